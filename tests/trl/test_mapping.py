"""TRL's arguments → the daemon's configuration, with worked numbers. `trl_1_16.json`: TRL's own
names and defaults."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.trl.config import (
    NOT_HERE,
    SPEED_ONLY,
    WITHOUT_EFFECT,
    DistillationConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    KTOConfig,
    RewardConfig,
    SampledConfig,
    SFTConfig,
    TaughtConfig,
    TrainerConfig,
)
from mlx_parallm.faces.trl.dataset_argument import read_rows, with_completions
from mlx_parallm.faces.trl.mapping import (
    HOW,
    SAME,
    UpdateSchedule,
    configuration,
    grpo_schedule,
    lora_settings,
    rows_schedule,
    taught_schedule,
)

THEIRS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "trl_1_16.json").read_text()
)
CLASSES: dict[str, type[TrainerConfig]] = {
    kind.__name__: kind
    for kind in (
        *(GRPOConfig, DistillationConfig, GKDConfig),
        *(SFTConfig, DPOConfig, KTOConfig, RewardConfig),
    )
}
OTHER_DEFAULTS = {
    "output_dir": "there is always a run directory",
    "save_total_limit": "checkpoints of all weights would fill a disk",
    "optim": "another name of AdamW",
    "bf16": "the dtype is the model's",
    "project": "mlx_parallm's own",
    "assistant_only_loss": "TRL trains on all turns; None here, so that an"
    " explicit False can be refused",
    "loss_type": "DPO's list of one is a name",
}


def schedule_of(args: TrainerConfig) -> UpdateSchedule:
    """Return the updates of 64 rows."""
    if isinstance(args, GRPOConfig):
        return grpo_schedule(args, 64)
    if isinstance(args, TaughtConfig):
        return taught_schedule(args, 64)
    return rows_schedule(args, 64)  # type: ignore[arg-type]


def one(args: TrainerConfig, **options: Any) -> Config:
    rows = read_rows(
        [{"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": True}] * 64,
        "rows",
    )
    schedule = schedule_of(args)
    given = {
        "model": "builtin:tiny",
        "train": rows,
        "evaluated": None,
        "lora": {"enabled": False},
    } | options
    if isinstance(args, SampledConfig):
        given = {"rewards": [len], "names": ["len"]} | given
    if isinstance(args, TaughtConfig):
        given = {"teacher": args.teacher_model_name_or_path} | given
    return configuration(args, schedule, **given)


# ---------------------------------------------------------------------- names and defaults


def test_dpo_and_kto_have_no_dropout_unless_it_is_asked_for() -> None:
    lora = lora_settings({"r": 4, "lora_dropout": 0.1})
    for kind in (DPOConfig, KTOConfig, RewardConfig):
        assert one(kind(), lora=lora).rl_training.lora.dropout == 0.0
        assert one(kind(disable_dropout=False), lora=lora).rl_training.lora.dropout == 0.1
    assert one(SFTConfig(), lora=lora).rl_training.lora.dropout == 0.1


@pytest.mark.parametrize("name", CLASSES)
def test_every_name_of_trl_is_known_and_its_default_accepted(name: str) -> None:
    for argument, default in (THEIRS["all"] | THEIRS[name]).items():
        CLASSES[name](**{argument: default})


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_trls(name: str) -> None:
    ours = CLASSES[name]().model_dump()
    theirs = THEIRS["all"] | THEIRS[name]
    different = {
        key
        for key in ours
        if key in theirs and ours[key] != theirs[key] and ours[key] != (theirs[key] or {})
    }
    assert different <= set(OTHER_DEFAULTS), different


def test_every_field_is_in_one_table() -> None:
    fields = {field for kind in CLASSES.values() for field in kind.model_fields}
    assert fields == SAME.keys() | HOW.keys()
    assert not SAME.keys() & HOW.keys()
    others = (SPEED_ONLY, WITHOUT_EFFECT, NOT_HERE)
    assert len(fields.union(*others)) == len(fields) + sum(map(len, others))


def test_names_of_the_tables_are_trls() -> None:
    theirs = {name for part in THEIRS.values() for name in part}
    older = {
        "max_prompt_length",
        "logging_dir",
        "eval_packing",
    }
    assert (set(SPEED_ONLY) | WITHOUT_EFFECT.keys() | NOT_HERE.keys()) - theirs <= older


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_vllm": True}, "the engine of this process samples"),
        ({"load_best_model_at_end": True}, "eval_strategy"),
        ({"top_k": 20}, "the model's own distribution"),
        ({"deepspeed": "zero3.json"}, "mlx.launch"),
        ({"push_to_hub": True}, "--push-to-hub"),
        ({"top_p": 0.9}, "the model's own distribution"),
        ({"num_generation": 4}, "did you mean 'num_generations'"),
        ({"lerning_rate": 1.0}, "did you mean 'learning_rate'"),
        ({"temperature": -1.0}, "temperature"),
        ({"loss_type": "vespo", "delta": 2.0}, "delta is a bound of the clipped loss"),
        ({"multi_objective_aggregation": "sum"}, "normalize_then_sum"),
        ({"loss_type": "cispo"}, "epsilon_high"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "warmup_ratio"),
    ],
)
def test_what_means_nothing_here_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="GRPOConfig") as caught:
        GRPOConfig(**options)
    assert words in str(caught.value)


def test_what_changes_no_result_is_accepted_with_one_warning() -> None:
    given = {
        "bf16": True,
        "fp16": False,
        "run_name": "x",
        "max_prompt_length": 512,
        "top_p": 1.0,
        "top_k": -1,
    }
    with pytest.warns(UserWarning, match=r"run_name.*'x'") as heard:
        args = GRPOConfig("out", **given, min_p=0.0)
    assert (
        len(heard) == 1
        and heard[0].filename == __file__
        and "fp16=False" not in str(heard[0].message)
    )
    assert one(args) == one(GRPOConfig("out"))


def test_harmless_values_and_an_engine_that_is_off_are_accepted() -> None:
    args = GRPOConfig(
        "out", use_vllm=False, bf16=None, vllm_mode="server", dataloader_num_workers=4, fp16=False
    )
    assert args.output_dir == "out"


# ---------------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("options", "prompts", "expected"),
    [
        # 8 x 1 = 8 completions, 1 prompt of 8: 100 updates an epoch, 3 epochs
        ({}, 100, UpdateSchedule(8, 8, 1, 100, 300)),
        # 4 x 8 = 32 completions of one update, 4 prompts: 100 // 4 = 25
        (
            {
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 8,
                "num_train_epochs": 1,
            },
            100,
            UpdateSchedule(32, 32, 1, 25, 25),
        ),
        # sampled: 16 x 4 = 64, 8 prompts; updates of 16 x 2 = 32, so two; twice over: 4 updates a
        # step; 50 // 8 = 6
        (
            {
                "per_device_train_batch_size": 16,
                "gradient_accumulation_steps": 2,
                "steps_per_generation": 4,
                "num_iterations": 2,
                "num_train_epochs": 2,
            },
            50,
            UpdateSchedule(64, 32, 4, 6, 48),
        ),
        # generation_batch_size 24 = 8 x 3, 6 prompts of 4; three updates of 8
        (
            {"generation_batch_size": 24, "num_generations": 4, "max_steps": 10},
            12,
            UpdateSchedule(24, 8, 3, 2, 10),
        ),
    ],
)
def test_grpo_counts_as_trl(
    options: dict[str, Any], prompts: int, expected: UpdateSchedule
) -> None:
    assert grpo_schedule(GRPOConfig(**options), prompts) == expected


def test_ten_updates_of_three_a_step_are_four_steps() -> None:
    schedule = UpdateSchedule(24, 8, 3, 2, 10)
    assert (schedule.total_steps, schedule.steps(3), schedule.steps(4), schedule.epoch(4)) == (
        4,
        1,
        2,
        2.0,
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"per_device_train_batch_size": 4}, "not whole groups of num_generations = 8"),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
            "not a multiple of gradient_accumulation",
        ),
        ({"generation_batch_size": 12, "num_generations": 4}, "not a multiple of per_device"),
        ({"generation_batch_size": 8, "steps_per_generation": 1}, "say the same"),
    ],
)
def test_batches_that_do_not_divide_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        grpo_schedule(GRPOConfig(**options), 100)


def test_rows_count_as_trl() -> None:
    args = SFTConfig(per_device_train_batch_size=4, gradient_accumulation_steps=4)
    # 6 whole batches and a rest
    assert rows_schedule(args, 100) == UpdateSchedule(16, 16, 1, 7, 21)
    # fewer rows than one batch
    assert rows_schedule(SFTConfig(max_steps=5), 3) == UpdateSchedule(3, 3, 1, 1, 5)


# ---------------------------------------------------------------------- the configuration


def test_a_grpo_configuration() -> None:
    args = GRPOConfig(
        "runs/first",
        per_device_train_batch_size=16,
        num_generations=4,
        learning_rate=2e-5,
        warmup_ratio=0.1,
        max_steps=50,
        save_steps=20,
        epsilon_high=0.28,
        max_completion_length=32,
        reward_weights=[0.5],
        seed=7,
        report_to=["tensorboard"],
        overrides={"rl_training.token_budget": 999},
    )
    config = one(args)
    training, [environment] = config.rl_training, config.environments
    assert (training.checkpoint_dir, training.run_name) == (Path("runs").absolute(), "first")
    assert (training.batch_size, training.atropos.rollout_batch_size, training.total_steps) == (
        16,
        16,
        50,
    )
    assert (training.warmup_steps, training.checkpoint_interval, training.lr_schedule) == (
        5,
        20,
        "linear",
    )
    assert (training.loss, training.loss_aggregation, training.advantage) == (
        "clip",
        "token",
        "std_sample",
    )
    assert (training.clip_ratio, training.clip_ratio_high, training.max_staleness) == (0.2, 0.28, 0)
    assert (training.learning_rate, training.seed, training.adam_beta2) == (2e-5, 7, 0.999)
    assert (training.token_budget, training.blocks_per_eval) == (999, None)
    assert (environment.group_size, environment.max_tokens, environment.reward_weights) == (
        4,
        32,
        (0.5,),
    )
    assert (environment.prompt_format, environment.heldout_fraction) == ("text", 0.0)
    assert config.logging.trackers == ("tensorboard",)
    # as many tokens, where the vocabulary lacks it
    three_bytes = read_rows([{"prompt": "日" * 300}], "rows")
    assert one(args, train=three_bytes).rl_training.atropos.max_token_length >= 900 + 32
    assert not training.lora.enabled


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss_type": "grpo"}, {"loss": "clip", "loss_aggregation": "sequence"}),
        ({"loss_type": "bnpo"}, {"loss": "clip", "loss_aggregation": "token"}),
        ({"loss_type": "luspo"}, {"loss": "clip", "loss_aggregation": "sequence_sum"}),
        (
            {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 77},
            {"loss_aggregation": "constant", "constant_length": 77, "advantage": "mean"},
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {"loss": "cispo", "loss_aggregation": "token", "clip_ratio_high": 4.0},
        ),
        (
            {"loss_type": "sapo"},
            {"loss": "sapo", "sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05},
        ),
        (
            {"loss_type": "vespo", "off_policy_mask_threshold": 0.5},
            {"loss": "vespo", "loss_aggregation": "token", "off_policy_mask": 0.5},
        ),
        ({"scale_rewards": "batch"}, {"advantage": "std_batch"}),
        ({"top_entropy_quantile": 0.2}, {"top_entropy_quantile": 0.2}),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"advantage": "batch"}),
        ({"delta": 2.5}, {"loss": "two_sided", "ratio_delta": 2.5}),
        ({"importance_sampling_level": "sequence"}, {"ratio_level": "sequence"}),
        (
            {
                "beta": 0.04,
                "sync_ref_model": True,
                "ref_model_mixup_alpha": 0.25,
                "ref_model_sync_steps": 64,
            },
            {
                "kl_beta": 0.04,
                "kl_estimator": "k3_ratio",
                "reference": "ema",
                "reference_decay": 0.75,
                "reference_update_every": 64,
            },
        ),
        (
            {"beta": 0.1, "use_bias_correction_kl": False},
            {"kl_estimator": "k3", "dynamic_sampling": False},
        ),
        ({"adam_epsilon": 1e-6}, {"adam_eps": 1e-6}),
        ({"gradient_checkpointing": False}, {"blocks_per_eval": 0}),
        (
            {"lr_scheduler_type": "constant", "warmup_steps": 9},
            {"lr_schedule": "constant", "warmup_steps": 0},
        ),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}, {"warmup_steps": 9}),
        ({"save_strategy": "no", "max_steps": 33}, {"checkpoint_interval": 33}),
        ({"optim": "lion_32bit"}, {"optimizer": "lion"}),
        (
            {"optim": "adamw_8bit", "adam_beta2": 0.9},
            {"optimizer": "adamw_8bit", "adam_beta2": 0.9},
        ),
        ({"optim": "adamw_bnb_8bit"}, {"optimizer": "adamw_8bit"}),
        ({"optim": "lion_8bit"}, {"optimizer": "lion_8bit"}),
    ],
)
def test_arguments_of_the_loss_and_the_schedule(
    options: dict[str, Any], expected: dict[str, Any]
) -> None:
    values = one(GRPOConfig(**options)).rl_training.model_dump()
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("optim", "kind"),
    [("paged_adamw_8bit", "adamw_8bit"), ("paged_adamw_32bit", "adamw"), ("paged_lion", "lion")],
)
def test_a_paged_optimizer_is_the_plain_one_with_a_warning(optim: str, kind: str) -> None:
    with pytest.warns(UserWarning, match=f"the pages of optim='{optim}'"):
        args = SFTConfig(optim=optim)
    assert one(args).rl_training.optimizer == kind


def test_the_rows_of_eval_dataset_are_an_environment_of_their_own() -> None:
    rows = read_rows([{"prompt": "b"}, {"prompt": "a"}], "rows")
    overrides = {
        "environments.0.system_prompt": None,
        "environments.0.max_tokens": 9,
        "environments.0.weight": 2.0,
    }
    args = GRPOConfig(reward_weights=[0.5], num_generations=4, overrides=overrides)
    [training], [held] = (
        (config := one(args, evaluated=rows)).environments,
        config.evaluation.environments,
    )
    assert (training.name, training.max_tokens, training.group_size) == ("train", 9, 4)
    assert (held.name, held.max_tokens, held.reward_weights, held.heldout_fraction) == (
        "eval_dataset",
        9,
        (0.5,),
        1.0,
    )
    assert (held.rewards, held.data) == (training.rewards, "python:this_process:eval_dataset")
    assert (config.evaluation.problems, config.evaluation.samples) == (2, 4)


def test_a_loss_of_ones_own_takes_the_place_of_loss_type() -> None:
    def own(inputs: Any) -> Any:
        return inputs

    training = one(GRPOConfig(), loss=own).rl_training
    assert training.loss == "python:this_process:own" and training.clip_ratio is None


def test_configurations_of_rows() -> None:
    config = one(DPOConfig(beta=0.3, loss_type=["ipo"], max_length=None, max_steps=3))
    assert (config.rl_training.algorithm, config.rl_training.preference.beta) == ("dpo", 0.3)
    assert config.rl_training.preference.loss_type == "ipo"
    assert (config.data.too_long, config.data.prompt_format, config.data.eval_fraction) == (
        "skip",
        "text",
        0.0,
    )
    config = one(KTOConfig(desirable_weight=2.0, model_init_kwargs={"dtype": "float32"}))
    assert (config.rl_training.preference.desirable_weight, config.model.dtype) == (2.0, "float32")
    assert one(SFTConfig(max_length=12)).data.max_length == 12
    mpo = one(
        DPOConfig(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0])
    ).rl_training.preference
    assert (mpo.loss_type, mpo.loss_weights) == (("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.0))
    assert (
        one(DPOConfig(loss_type="discopop", discopop_tau=0.1)).rl_training.preference.discopop_tau
        == 0.1
    )
    sorts = DPOConfig(
        **{"loss_type": ["aot_unpaired", "sigmoid"], "ld_alpha": 0.2},
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    )
    found = one(sorts).rl_training.preference
    assert (found.pairs_together, found.ld_alpha) == (4, 0.2)
    assert one(DPOConfig(use_weighting=True)).rl_training.preference.wpo
    for options, words in (
        ({"loss_type": "aot", "use_weighting": True}, "wpo weights the loss of a pair"),
        ({"loss_type": "aot", "f_divergence_type": "forward_kl"}, 'not with "aot"'),
        ({"loss_type": ["ipo", "ipo"]}, "several different ones"),
        ({"loss_type": ["ipo", "sigmoid"], "loss_weights": [1.0]}, "1 numbers for 2 losses"),
        ({"loss_type": "exo_pair"}, "needs label_smoothing > 0"),
        ({"discopop_tau": 0.1}, "only read with loss_type"),
    ):
        with pytest.raises(ConfigError, match=words):
            one(DPOConfig(**options))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            GRPOConfig(overrides={"rl_training.lerning_rate": 1}),
            "did you mean 'rl_training.learning_rate'",
        ),
        (GRPOConfig(overrides={"environments.3.weight": 1}), "not an entry of 1"),
        (GRPOConfig(report_to="mlflow"), "mlflow"),
        (GRPOConfig(optim="rmsprop"), "adamw_torch"),
        (GRPOConfig(optim="adafactor_8bit"), "adamw_8bit"),
        (GRPOConfig(model_init_kwargs={"quantization_config": 1}), "quantization_config"),
    ],
)
def test_values_that_do_not_fit(args: GRPOConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        one(args)


# ---------------------------------------------------------------------- adapters and rows


def test_adalora_is_pefts_with_its_updates_as_steps() -> None:
    """`init_r` is the rank, `r` means nothing; two updates a step."""
    settings: dict[str, Any] = {
        **{"peft_type": "ADALORA", "init_r": 6, "r": 8, "lora_alpha": 8, "total_step": 64},
        **{"target_r": 4, "tinit": 4, "tfinal": 0, "deltaT": 3, "orth_reg_weight": 0.1},
        **{"use_rslora": False, "use_dora": False, "lora_dropout": 0.0},
    }
    peft = SimpleNamespace(**settings, target_modules=["q_proj"])
    for lora in (lora_settings(settings), lora_settings(peft)):
        config = one(GRPOConfig(steps_per_generation=2, gradient_accumulation_steps=1), lora=lora)
        found = config.rl_training.lora
        assert (found.use_adalora, found.rank, found.alpha) == (True, 6, 8.0)
        adalora = found.adalora
        assert (adalora.target_r, adalora.orth_reg_weight) == (4, 0.1)
        assert (adalora.tinit, adalora.tfinal, adalora.deltaT) == (2, 0, 2)


def test_adapter_settings_come_as_pefts_object_a_dictionary_or_ours() -> None:
    peft = SimpleNamespace(
        **{
            "peft_type": "LORA",
            "r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.1,
            "target_modules": None,
        },
        **{"use_rslora": True, "use_dora": False, "modules_to_save": None, "rank_pattern": {}},
    )
    found = LoraConfig(**lora_settings(peft))
    assert (found.rank, found.alpha, found.dropout, found.use_rslora) == (8, 16.0, 0.1, True)
    assert found.target_modules == ("q_proj", "v_proj")  # PEFT's own default
    assert (
        LoraConfig(**lora_settings({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"})).rank == 4
    )
    assert LoraConfig(**lora_settings(LoraConfig(r=3))).rank == 3
    assert not LoraConfig(**lora_settings(None)).enabled
    peft.modules_to_save = ["lm_head"]
    with pytest.raises(ConfigError, match="modules_to_save"):
        lora_settings(peft)
    for ignored in (
        {"bias": "all"},
        {"init_lora_weights": "pissa"},
        {"exclude_modules": ["q_proj"]},
    ):
        with pytest.raises(ConfigError, match=next(iter(ignored))):
            lora_settings({"r": 4} | ignored)
    with pytest.raises(ConfigError, match="neither PEFT's LoraConfig"):
        lora_settings(17)
    with pytest.raises(ValueError, match="PEFT's name of rank"):
        LoraConfig(r=3, rank=4)


def test_rows_come_as_lists_and_data_sets() -> None:
    class Dataset:  # as datasets.Dataset
        column_names = ("prompt",)

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return iter([{"prompt": "a"}, {"prompt": "b"}])

    assert read_rows(Dataset(), "train_dataset").rows == ({"prompt": "a"}, {"prompt": "b"})
    assert not read_rows([{"prompt": "a"}], "x").conversational
    assert read_rows([{"prompt": [{"role": "user", "content": "a"}]}], "x").conversational
    assert read_rows([{"body": "a"}], "x", text_field="body").rows == ({"text": "a"},)
    assert read_rows([{"q": "a"}], "x", formatting=lambda row: row["q"] * 2).rows == (
        {"text": "aa"},
    )
    for bad, words in (
        (None, "train_dataset is missing"),
        ({"train": [], "test": []}, r"choose one, such as train_dataset\['train'\]"),
        (iter([{"prompt": "a"}]), "has no length"),
        ([], "has no rows"),
        (["a"], "row 0: expected a dictionary, got str"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_rows(bad, "train_dataset")


def test_lions_betas_are_not_read() -> None:
    with pytest.raises(ConfigError, match=r"adam_beta2.*'lion_32bit'"):
        SFTConfig(optim="lion_32bit", adam_beta2=0.95)


def test_a_distillation_configuration() -> None:
    """One completion a prompt, one update a step, the divergence from the whole distribution and
    no reward: 64 prompts in batches of 4 × 2 are 8 steps an epoch."""
    args = DistillationConfig(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        max_completion_length=40,
        beta=0.25,
        teacher_model_revision="v2",
    )
    config = one(args, teacher="/teacher", rewards=(), names=())
    training, [environment] = config.rl_training, config.environments
    assert (training.total_steps, training.batch_size) == (16, 8)
    assert training.atropos.rollout_batch_size == 8
    assert (environment.group_size, environment.max_tokens, environment.rewards) == (1, 40, ())
    assert (training.temperature, training.kl_beta, training.max_staleness) == (1.0, 0.0, 0)
    learned = training.distillation
    assert (learned.mode, learned.reward, learned.beta, learned.top_k) == ("loss", False, 0.25, 0)
    assert (learned.weight, learned.lmbda, training.loss_aggregation) == (1.0, 1.0, "token")
    [teacher] = learned.teachers
    assert (teacher.kind, teacher.path, teacher.revision) == ("model", "/teacher", "v2")


def test_a_gkd_configuration() -> None:
    config = one(GKDConfig(max_new_tokens=30, max_length=200), rewards=(), names=())
    training = config.rl_training
    learned, [teacher] = training.distillation, training.distillation.teachers
    assert (learned.lmbda, learned.beta, training.temperature) == (0.5, 0.5, 0.9)
    assert learned.temperature == 1.0  # TRL samples at 0.9 and compares at 1
    assert teacher.kind == "base"  # TRL: without a teacher the model itself
    assert training.atropos.max_token_length == 200
    assert config.environments[0].max_tokens == 30
    with pytest.raises(ConfigError, match="seq_kd"):
        GKDConfig(seq_kd=True)
    with pytest.raises(ConfigError, match="'output_attentions'"):
        one(GKDConfig(teacher_model_init_kwargs={"output_attentions": True}))


def test_the_last_message_is_the_completion() -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    both = read_rows([{"messages": chat}, {"prompt": chat[:1], "completion": chat[1:]}], "rows")
    for row in with_completions(both, "rows", needed=True).rows:
        assert row["prompt"] == chat[:1] and row["completion"] == "b"
    for wrong, words in (
        ({"messages": chat[:1]}, "row 0: the completion is not one message of the assistant"),
        ({"prompt": "a"}, "row 0: there is no completion"),
    ):
        with pytest.raises(ConfigError, match=words):
            with_completions(read_rows([wrong], "rows"), "rows", needed=True)
    assert with_completions(read_rows([{"prompt": "a"}], "rows"), "rows", needed=False).rows


def test_rows_in_their_order() -> None:
    """TRL's train_sampling_strategy: KTO's default is sequential there and here, the others'
    random."""
    for kind in (SFTConfig, DPOConfig):
        assert one(kind()).data.shuffle
        assert not one(kind(train_sampling_strategy="sequential")).data.shuffle
    assert (
        not one(KTOConfig()).data.shuffle
        and one(KTOConfig(train_sampling_strategy="random")).data.shuffle
    )
    for value in ("group_by_length", "sequential"):
        with pytest.raises(ConfigError, match="train_sampling_strategy"):
            GRPOConfig(train_sampling_strategy=value)
