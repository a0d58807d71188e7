"""Nothing of TRL's is accepted and not obeyed: each argument with another value."""

from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.trl.config import (
    ADAPTIVE_ENTROPY,
    SampledConfig,
    SFTConfig,
    TrainerConfig,
)
from mlx_parallm.faces.trl.dataset_argument import read_rows
from mlx_parallm.rl_training.step.learning_rate import learning_rate_at
from tests.trl.test_mapping import CLASSES, one, schedule_of

OTHER_VALUES: dict[str, Any] = {
    **{
        "entropy_coef_min": 0.01,
        "entropy_coef_max": 0.5,
        "off_policy_mask_threshold": 0.5,
        "top_entropy_quantile": 0.2,
        "output_dir": "elsewhere",
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"lr_end": 1e-6},
        "f_divergence_type": "forward_kl",
        "warmup_steps": 7,
        "warmup_ratio": 0.5,
    },
    **{
        "optim": "lion_32bit",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_steps": 3,
        "report_to": "all",
    },
    **{
        "eval_steps": 2,
        "project": "mine",
        "model_init_kwargs": {"dtype": "float32"},
        "chat_template_path": "{{ x }}",
    },
    **{
        "overrides": {"rl_training.seed": 9},
        "chat_template_kwargs": {"x": 1},
        "reward_weights": (0.5,),
    },
    **{
        "importance_sampling_level": "sequence",
        "scale_rewards": False,
        "multi_objective_aggregation": "normalize_then_sum",
        "num_generations": 4,
        "max_length": 99,
    },
    **{
        "generation_batch_size": 16,
        "steps_per_generation": 2,
        "max_token_length": 5000,
        "num_generations_eval": 3,
        "max_tool_calling_iterations": 3,
    },
    **{
        "loss_weights": (0.5,),
        "delta": 2.5,
        "epsilon_high": 0.3,
        "train_sampling_strategy": None,
        "host": "::1",
        "port": 1,
        "max_steps": 5,
    },
    **{
        "teacher_model_name_or_path": "builtin:tiny",
        "teacher_model_init_kwargs": {"revision": "v1"},
        "teacher_model_revision": "v1",
    },
    **{
        "disable_tqdm": True,
        "dataset_text_field": "body",
        "center_rewards_coefficient": 0.01,
        "label_smoothing": 0.1,
        "ld_alpha": 0.5,
        "save_total_limit": 5,
        "router_aux_loss_coef": 0.001,
        "temperature": 0.7,
        "neftune_noise_alpha": 5.0,
    },
}
ELSEWHERE = {
    **dict.fromkeys(
        ("overwrite_output_dir", "logging_steps", "logging_first_step"), "test_trainers"
    ),
    **dict.fromkeys(("load_best_model_at_end", "serve", "dataset_text_field"), "test_trainers"),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"), "test_which_rows_sft_learns_the_prompts_of"
    ),
    "shuffle_dataset": "refused (GRPO); TRL shuffles either way (SFT)",
    "disable_dropout": "DPO, KTO: test_dpo_and_kto_have_no_dropout; GRPO's adapter never has any",
}
NEEDED: dict[str, dict[str, Any]] = {  # what an argument is read with
    **{
        name: {"sync_ref_model": True, "beta": 0.1}
        for name in ("ref_model_mixup_alpha", "ref_model_sync_steps")
    },
    **{name: {"beta": 0.1} for name in ("sync_ref_model", "use_bias_correction_kl")},
    **{name: {"loss_type": "sapo"} for name in ("sapo_temperature_pos", "sapo_temperature_neg")},
    **{
        f"vespo_{name}_{sign}": {"loss_type": "vespo"}
        for name in ("k", "lambda")
        for sign in ("pos", "neg")
    },
    **{
        name: {"teacher_model_name_or_path": "/teacher"}
        for name in ("teacher_model_init_kwargs", "teacher_model_revision")
    },
    **{key: {"use_adaptive_entropy": True} for key in ADAPTIVE_ENTROPY},
    "log_completions": {"logging_steps": 3},
    "discopop_tau": {"loss_type": "discopop"},
    "f_alpha_divergence_coef": {"f_divergence_type": "alpha_divergence"},
    "lr_scheduler_kwargs": {"lr_scheduler_type": "polynomial"},
    **{
        name: {"eval_strategy": "steps"}
        for name in ("eval_steps", "num_generations_eval", "eval_on_start")
    },
}
LOSS_TYPES = {
    "GRPOConfig": "grpo",
    "DPOConfig": "hinge",
    "KTOConfig": "apo_zero_unpaired",
    "SFTConfig": "dft",
}


def another(name: str, kind: type[TrainerConfig]) -> Any:
    """Return a value of an argument that is not its default."""
    default = kind.model_fields[name].get_default(call_default_factory=True)
    if name == "loss_type":
        return LOSS_TYPES.get(kind.__name__)
    if name == "train_sampling_strategy":
        return "sequential" if default == "random" else "random"
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(default, bool):
        return not default
    assert isinstance(default, int | float), name
    return default * 2 if default else (1 if isinstance(default, int) else 0.25)


@pytest.mark.parametrize("name", CLASSES)
def test_every_argument_is_obeyed_or_refused(name: str) -> None:
    """Each argument with another value changes the configuration or the counted updates, or is
    refused: what is accepted and not obeyed is the worst that a face can do. `ELSEWHERE`: obeyed
    by the trainer itself."""
    kind = CLASSES[name]
    rows = read_rows(
        [{"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": True}] * 64,
        "rows",
    )

    def made(**options: Any) -> Any:
        args = kind(**options)
        count = schedule_of(args)
        lora = {"enabled": True, "lora_dropout": 0.1}
        config = one(args, evaluated=rows if "eval_strategy" in options else None, lora=lora)
        return config.model_dump(exclude={"environments": {"__all__": {"data"}}}), count

    silent = []
    for argument in kind.model_fields:
        needed = {
            key: value
            for key, value in NEEDED.get(argument, {}).items()
            if key in kind.model_fields
        }
        # rows always are
        if argument in ELSEWHERE or (
            argument == "eval_on_start" and not issubclass(kind, SampledConfig)
        ):
            continue
        if (value := another(argument, kind)) is None:
            continue
        try:
            changed = made(**needed | {argument: value})
        except ConfigError as error:
            silent += [] if argument in str(error) else [f"{argument}: {error}"]
            continue
        if repr(changed) == repr(made(**needed)):
            silent.append(argument)
    assert silent == []


@pytest.mark.parametrize(
    ("name", "warmup", "kwargs", "expected"),
    [
        # transformers 5.24's get_scheduler, peak 1
        (
            "cosine_with_min_lr",
            2,
            {"min_lr": 0.1},
            [0, 0.5, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289],
        ),
        ("cosine_with_min_lr", 2, '{"min_lr_rate": 0.1}', [0, 0.5, 1, 0.939711, 0.775, 0.55]),
        ("polynomial", 2, {"lr_end": 0.1}, [0, 0.5, 1, 0.85, 0.7, 0.55, 0.4, 0.25]),
        ("inverse_sqrt", 2, None, [0, 0.5, 1, 0.816497, 0.707107, 0.632456, 0.57735, 0.534522]),
        ("inverse_sqrt", 0, None, [1, 0.99995, 0.9999, 0.99985]),
        (
            "warmup_stable_decay",
            2,
            {"num_decay_steps": 4},
            [0, 0.5, 1, 1, 1, 0.853553, 0.5, 0.146447],
        ),
        (
            "warmup_stable_decay",
            2,
            {"num_decay_steps": 4, "decay_type": "linear"},
            [0, 0.5, 1, 1, 1, 0.75, 0.5, 0.25],
        ),
        (
            "warmup_stable_decay",
            0,
            {"num_decay_steps": 5, "decay_type": "1-sqrt", "min_lr_ratio": 0.1},
            [1, 1, 1, 1, 0.597508, 0.430790, 0.302863, 0.195016],
        ),
    ],
)
def test_schedules_are_those_of_transformers(
    name: str, warmup: int, kwargs: Any, expected: list[float]
) -> None:
    args = SFTConfig(
        learning_rate=1.0,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=kwargs,
        warmup_steps=warmup,
        max_steps=8,
        per_device_train_batch_size=4,
    )
    training = one(args).rl_training
    found = [learning_rate_at(step, training) for step in range(1, len(expected) + 1)]
    assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("linear", {"lr_end": 0.1}, "linear has no 'lr_end'"),
        ("polynomial", {"power": 2.0}, "power=2.0"),
        ("cosine_with_min_lr", None, "needs min_lr"),
        ("warmup_stable_decay", None, "needs num_decay_steps"),
        ("inverse_sqrt", "{", "is no JSON"),
    ],
)
def test_arguments_of_a_schedule_that_are_not_here(name: str, kwargs: Any, words: str) -> None:
    args = SFTConfig(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs, max_steps=8)
    with pytest.raises(ConfigError, match=words):
        one(args)
