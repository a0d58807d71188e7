"""TRL's arguments → the daemon's configuration. `SAME` and `HOW` are the one table of it, which
docs/trl.md shows.

SAME            TRL's name → the key with the same meaning, and the same unit
HOW             TRL's name → its mapping in words; `configuration` does it
UpdateSchedule   TRL counts optimizer updates; a step here is a batch of completions, which may have
                 several
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.config.data import OF_ROWS, REWARD_MODEL
from mlx_parallm.config.evaluation import ABOUT_TRAINING
from mlx_parallm.config.load import Config, hardware_defaults, parse_config
from mlx_parallm.config.training import ADAM, LoraConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_calls import tool_definition
from mlx_parallm.execution.user_code import name_of, reference_to
from mlx_parallm.faces.trl.config import (
    PAGED,
    DistillationConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    KTOConfig,
    RewardConfig,
    RowsConfig,
    SampledConfig,
    SFTConfig,
    TaughtConfig,
    TrainerConfig,
)
from mlx_parallm.faces.trl.dataset_argument import DataRows
from mlx_parallm.faces.trl.environments import Factories, with_environments
from mlx_parallm.faces.trl.rollouts import RolloutCalls, with_rollout_func
from mlx_parallm.faces.trl.schedules import lr_schedule
from mlx_parallm.models.adapters.settings import ADALORA_SCHEDULE, NAMES, TRAINED, check_trained
from mlx_parallm.models.checkpoint_files import billions_in
from mlx_parallm.system.hardware import detect

TRAIN, EVALUATED_AS = "train", "eval_dataset"  # the environments' names in metrics
# PEFT's for Llama, Qwen and their like, where target_modules is None
PEFT_DEFAULT_MODULES = ("q_proj", "v_proj")
NO_BOUND = 1 << 30
SPARE_TOKENS = 256  # for a chat template around a prompt
RESET_TOKENS = 1024  # for an environment's `reset`, which adds to the prompt

SAME: Mapping[str, str] = {
    "learning_rate": "rl_training.learning_rate",
    "weight_decay": "rl_training.weight_decay",
    "max_grad_norm": "rl_training.max_grad_norm",
    "seed": "rl_training.seed",
    "full_determinism": "rl_training.deterministic",
    "save_total_limit": "rl_training.keep_checkpoints",
    "trust_remote_code": "model.trust_remote_code",
    "project": "logging.project",
    "host": "server.host",
    "port": "server.port",
    "num_iterations": "rl_training.update_epochs",
    "temperature": "rl_training.temperature",
    "chat_template_kwargs": "model.chat_template_kwargs",
    "beta": "rl_training.kl_beta",
    "entropy_coef": "rl_training.entropy_weight",
    "mask_truncated_completions": "rl_training.mask_truncated",
    "label_smoothing": "rl_training.preference.label_smoothing",
    "loss_weights": "rl_training.preference.loss_weights",
    "f_divergence_type": "rl_training.preference.f_divergence",
    "ld_alpha": "rl_training.preference.ld_alpha",
    "use_weighting": "rl_training.preference.wpo",
    "discopop_tau": "rl_training.preference.discopop_tau",
    "desirable_weight": "rl_training.preference.desirable_weight",
    "undesirable_weight": "rl_training.preference.undesirable_weight",
    "center_rewards_coefficient": "rl_training.preference.center_rewards_coefficient",
    "head_learning_rate": "rl_training.preference.head_learning_rate",
    "chat_template_path": "model.chat_template",
    "num_generations": "environments.0.group_size",
    "max_completion_length": "environments.0.max_tokens",
    "max_new_tokens": "environments.0.max_tokens",
    "lmbda": "rl_training.distillation.lmbda",
    "reward_weights": "environments.0.reward_weights",
    "max_tool_calling_iterations": "tools.max_rounds",
}
HOW: Mapping[str, str] = {
    "output_dir": "`rl_training.checkpoint_dir` is its parent,"
    " `rl_training.run_name` its last part",
    "overwrite_output_dir": "the trainer removes the run before it begins",
    "lr_scheduler_type": "`rl_training.lr_schedule`; `constant` has no warm-up",
    "lr_scheduler_kwargs": "`rl_training.lr_final`, `.lr_decay_steps`, `.lr_decay_shape`",
    "warmup_steps": "`rl_training.warmup_steps`, with `rl_training.lr_per_update`",
    "warmup_ratio": "`rl_training.warmup_steps`",
    "optim": "`rl_training.optimizer`",
    "adam_beta1": "`rl_training.adam_beta1` (AdamW, Muon)",
    "adam_beta2": "`rl_training.adam_beta2` (AdamW, Muon)",
    "adam_epsilon": "`rl_training.adam_eps` (AdamW, Muon)",
    "per_device_train_batch_size": "× `gradient_accumulation_steps` = `rl_training.batch_size`",
    "gradient_accumulation_steps": "× `per_device_train_batch_size` = `rl_training.batch_size`",
    "num_train_epochs": "`rl_training.total_steps`",
    "train_sampling_strategy": "`data.shuffle`",
    "max_steps": "`rl_training.total_steps`, in steps",
    "logging_steps": "the trainer's `state.log_history` and `on_log`",
    "logging_first_step": "the trainer's `state.log_history` and `on_log`",
    "eval_strategy": "`evaluation.every` (GRPO), `data.eval_every`",
    "eval_steps": "`evaluation.every` (GRPO), `data.eval_every`, in steps",
    "eval_on_start": "`evaluation.at_start` (GRPO)",
    "save_strategy": "`rl_training.checkpoint_interval`",
    "save_steps": "`rl_training.checkpoint_interval`, in steps",
    "load_best_model_at_end": "`trainer.save_model` writes `best`, not `final`",
    "gradient_checkpointing": "`rl_training.blocks_per_eval`: automatic for True, 0 for False",
    "router_aux_loss_coef": "None and 0: no loss of the router; None warns where TRL adds one",
    "neftune_noise_alpha": "`rl_training.preference.neftune_alpha` (SFT)",
    "report_to": "`logging.trackers`",
    "disable_tqdm": '`logging.level = "warning"`, and no display',
    "model_init_kwargs": "`model.dtype`, `model.revision`, `model.trust_remote_code`",
    "cast_lm_head_to_fp32": "`model.fp32_lm_head`",
    "serve": "whether the daemon's HTTP server starts",
    "overrides": "any key",
    "num_generations_eval": "`evaluation.samples`",
    "max_token_length": "`rl_training.atropos.max_token_length`",
    "generation_batch_size": "`rl_training.atropos.rollout_batch_size`",
    "steps_per_generation": "× `per_device_train_batch_size` ="
    " `rl_training.atropos.rollout_batch_size`",
    "shuffle_dataset": "always so",
    "disable_dropout": "`rl_training.lora.dropout = 0`",
    "use_bias_correction_kl": '`rl_training.kl_estimator = "k3_ratio"`, else `"k3"`',
    "epsilon": "`rl_training.clip_ratio`",
    "epsilon_high": "`rl_training.clip_ratio_high`; cispo: less 1",
    "delta": '`rl_training.loss = "two_sided"`, `rl_training.ratio_delta`',
    "sapo_temperature_pos": "`rl_training.sapo_tau_positive`",
    "sapo_temperature_neg": "`rl_training.sapo_tau_negative`",
    "vespo_k_pos": "`rl_training.vespo_k_positive`",
    "vespo_lambda_pos": "`rl_training.vespo_lambda_positive`",
    "vespo_k_neg": "`rl_training.vespo_k_negative`",
    "vespo_lambda_neg": "`rl_training.vespo_lambda_negative`",
    "use_adaptive_entropy": "whether `rl_training.entropy_target` is set",
    "entropy_coef_min": "`rl_training.entropy_min`, with use_adaptive_entropy",
    "entropy_coef_max": "`rl_training.entropy_max`, with use_adaptive_entropy",
    "entropy_coef_delta": "`rl_training.entropy_delta`, with use_adaptive_entropy",
    "entropy_target": "`rl_training.entropy_target`, with use_adaptive_entropy",
    "top_entropy_quantile": "`rl_training.top_entropy_quantile`, unset for 1",
    "off_policy_mask_threshold": "`rl_training.off_policy_mask`",
    "f_alpha_divergence_coef": "`rl_training.preference.f_alpha`, with alpha_divergence",
    "loss_type": (
        "`rl_training.loss`, `.loss_aggregation` (GRPO); `rl_training.preference.loss_type`"
        " (DPO), `.kto_loss` (KTO),"
        " `.sft_loss` (SFT)"
    ),
    "importance_sampling_level": "`rl_training.ratio_level`",
    "scale_rewards": '`rl_training.advantage`: `"std_sample"`, `"std_batch"` or `"mean"`',
    "multi_objective_aggregation": '`environments.0.reward_method = "gdpo"` and'
    ' `rl_training.advantage = "batch"`',
    "sync_ref_model": '`rl_training.reference = "ema"`',
    "ref_model_mixup_alpha": "`rl_training.reference_decay` = 1 - this",
    "ref_model_sync_steps": "`rl_training.reference_update_every`, in steps",
    "log_completions": "`logging.sample_every` = logging_steps",
    "max_length": '`data.max_length`, with `data.too_long = "skip"`; GKD:'
    " `rl_training.atropos.max_token_length`",
    "assistant_only_loss": "`data.learn_prompts`, of `messages` (SFT)",
    "completion_only_loss": "`data.learn_prompts`, of `prompt` and `completion` (SFT)",
    "packing": "`data.pack_rows` (SFT)",
    "dataset_text_field": "the column is renamed to `text` (SFT)",
    "teacher_model_name_or_path": "`rl_training.distillation.teachers`, a `path` of `kind ="
    ' "model"`; GKD without one: `kind = "base"`',
    "teacher_model_init_kwargs": "the teacher's `revision`",
    "teacher_model_revision": "the teacher's `revision`",
    "seq_kd": "always off",
}

AGGREGATION = {
    **dict.fromkeys(("dapo", "bnpo", "cispo", "vespo"), "token"),
    **dict.fromkeys(("grpo", "sapo"), "sequence"),
    "dr_grpo": "constant",
    "luspo": "sequence_sum",
}
ADVANTAGE: Mapping[bool | str, str] = {
    **dict.fromkeys((True, "group"), "std_sample"),
    **dict.fromkeys((False, "none"), "mean"),
    "batch": "std_batch",
}
TRACKERS = ("wandb", "tensorboard", "trackio")
KINDS: Mapping[type[TrainerConfig], str] = {
    SFTConfig: "sft",
    DPOConfig: "dpo",
    KTOConfig: "kto",
    RewardConfig: REWARD_MODEL,
}


@dataclass(frozen=True)
class UpdateSchedule:
    """A run in TRL's unit, the optimizer update (its `global_step`), and in ours, the step."""

    rollouts: int  # completions of a step; rows of one
    batch_size: int  # sequences of one update
    updates_per_step: int
    steps_per_epoch: int
    max_steps: int  # updates

    @property
    def total_steps(self) -> int:
        return self.steps(self.max_steps)

    def steps(self, updates: float) -> int:
        """Return the steps that hold so many updates: the last one is whole."""
        return max(1, math.ceil(updates / self.updates_per_step))

    def update(self, step: int) -> int:
        """Return the updates after so many steps, as TRL counts them."""
        return min(step * self.updates_per_step, self.max_steps)

    def epoch(self, step: int) -> float:
        return step / self.steps_per_epoch


def grpo_schedule(args: GRPOConfig, prompts: int) -> UpdateSchedule:
    """Count as TRL does. Raises ConfigError: completions that are not whole groups, or no whole
    updates."""
    device, accumulated = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if args.generation_batch_size is not None and args.steps_per_generation is not None:
        raise ConfigError(
            "GRPOConfig: generation_batch_size and steps_per_generation"
            " say the same: set one of them"
        )
    if args.generation_batch_size is not None and args.generation_batch_size % device:
        raise ConfigError(
            f"GRPOConfig: generation_batch_size ({args.generation_batch_size}) is not a multiple of"
            f" per_device_train_batch_size ({device})"
        )
    parts = (
        args.steps_per_generation or (args.generation_batch_size or device * accumulated) // device
    )
    rollouts = device * parts
    if rollouts % args.num_generations:
        raise ConfigError(
            f"GRPOConfig: per_device_train_batch_size ({device}) x steps_per_generation ({parts}) ="
            f" {rollouts} completions are not whole groups of"
            f" num_generations = {args.num_generations}"
        )
    if parts % accumulated:
        raise ConfigError(
            f"GRPOConfig: steps_per_generation ({parts}) is not a multiple of"
            " gradient_accumulation_steps"
            f" ({accumulated}): the last update of a batch would be incomplete"
        )
    updates = args.num_iterations * parts // accumulated
    steps_per_epoch = max(1, prompts // (rollouts // args.num_generations))
    max_steps = _max_steps(args, steps_per_epoch * updates)
    return UpdateSchedule(rollouts, device * accumulated, updates, steps_per_epoch, max_steps)


def taught_schedule(args: TaughtConfig, prompts: int) -> UpdateSchedule:
    """Count one update a step, of one completion for each of its prompts."""
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    steps_per_epoch = max(1, prompts // batch)
    return UpdateSchedule(batch, batch, 1, steps_per_epoch, _max_steps(args, steps_per_epoch))


def rows_schedule(args: RowsConfig, rows: int) -> UpdateSchedule:
    """Return a schedule of one update a step. The batches of an epoch are nearly equal, the last
    one too."""
    batch = min(args.per_device_train_batch_size * args.gradient_accumulation_steps, rows)
    steps_per_epoch = math.ceil(rows / batch)
    return UpdateSchedule(batch, batch, 1, steps_per_epoch, _max_steps(args, steps_per_epoch))


def _max_steps(args: TrainerConfig, updates_per_epoch: int) -> int:
    return (
        args.max_steps
        if args.max_steps > 0
        else math.ceil(args.num_train_epochs * updates_per_epoch)
    )


def lora_settings(peft_config: Any) -> dict[str, Any]:
    """Return [rl_training.lora] of a `LoraConfig`, of PEFT's, or of a dictionary with PEFT's
    names. None trains all weights, as in TRL. Raises ConfigError: a setting that is not
    supported."""
    if peft_config is None:
        return {"enabled": False}
    if isinstance(peft_config, LoraConfig):
        return peft_config.model_dump()
    if isinstance(peft_config, Mapping):
        # LoraConfig knows near names
        check_trained(peft_config, accepted={name for name in peft_config if name not in NAMES})
        adaptive = str(peft_config.get("peft_type")) == "ADALORA"
        settings = {
            name: value
            for name, value in peft_config.items()
            if (name in TRAINED or name not in NAMES)
            and not (adaptive and name in (*ADALORA_SCHEDULE, "r"))
        }
        if adaptive:
            settings |= {"use_adalora": True, "adalora": _schedule_of(peft_config)}
        return settings
    if getattr(peft_config, "peft_type", None) is None or not hasattr(peft_config, "lora_alpha"):
        raise ConfigError(
            f"peft_config: {type(peft_config).__name__} is neither PEFT's"
            " LoraConfig, nor a dictionary of r, …"
        )
    adaptive = str(getattr(peft_config.peft_type, "value", peft_config.peft_type)) == "ADALORA"
    check_trained(vars(peft_config))
    modules = peft_config.target_modules
    return {
        **({"use_adalora": True, "adalora": _schedule_of(vars(peft_config))} if adaptive else {}),
        "rank": peft_config.init_r if adaptive else peft_config.r,
        "alpha": float(peft_config.lora_alpha),
        "dropout": peft_config.lora_dropout,
        "target_modules": modules
        if isinstance(modules, str)
        else tuple(sorted(modules or PEFT_DEFAULT_MODULES)),
        "use_rslora": bool(peft_config.use_rslora),
        "use_dora": bool(peft_config.use_dora),
    }


def _schedule_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """AdaLoRA's settings, steps as TRL counts them; total_step is the run's."""
    names = [name for name in ADALORA_SCHEDULE if name != "total_step"]
    return {name: settings[name] for name in names if settings.get(name) is not None}


def _lora_in_steps(lora: Mapping[str, Any], schedule: UpdateSchedule) -> dict[str, Any]:
    """[rl_training.lora] with AdaLoRA's updates as steps."""
    if not lora.get("use_adalora"):
        return dict(lora)
    settings = dict(lora.get("adalora") or {})
    for name in ("tinit", "tfinal", "deltaT"):
        if settings.get(name):
            settings[name] = schedule.steps(settings[name])
    return {**lora, "adalora": settings}


def configuration(
    args: TrainerConfig,
    schedule: UpdateSchedule,
    *,
    model: str,
    train: DataRows,
    evaluated: DataRows | None,
    rewards: Sequence[Any] = (),
    names: Iterable[str] = (),
    tools: Sequence[Any] = (),
    factories: Factories | None = None,
    rollouts: RolloutCalls | None = None,
    reward_weights: Sequence[float] | None = None,
    loss: Any = None,
    teacher: str | None = None,
    lora: Mapping[str, Any],
    chat_template: str | None = None,
) -> Config:
    """Return the daemon's configuration of a run. Objects of this program get references that
    `load` finds.

    Args:
        rewards: functions or references; `names`: of the functions.
        tools: functions that the model may call; `factories`: environments that play the rows.
        rollouts: calls of the function that samples.
        reward_weights: of all rewards, in the place of those of `args`.
        teacher: directory, hub id or file of the teacher; None: the base.

    Raises ConfigError: values that do not go together.
    """
    data = _shared(args, schedule, model=model, lora=lora, chat_template=chat_template)
    training = data["rl_training"]
    if loss is not None:
        training["loss"] = (
            loss if isinstance(loss, str) else reference_to(loss, getattr(loss, "__name__", "loss"))
        )
    if isinstance(args, SampledConfig):
        named = zip(rewards, names, strict=True)
        references = [
            value if isinstance(value, str) else reference_to(value, name) for value, name in named
        ]
        if isinstance(args, GRPOConfig):
            training |= _grpo_keys(args, schedule, own_loss=loss is not None)
        else:
            assert isinstance(args, TaughtConfig)
            training |= _taught_keys(args, teacher)
        _add_rollouts(data, args, schedule, train, evaluated, references)
        if args.max_token_length is None:
            data["rl_training"]["atropos"]["max_token_length"] += _of_tools(tools, factories)
    else:
        assert isinstance(args, RowsConfig)
        _add_rows(data, args, schedule, train, evaluated)
    values = args.model_dump() | ({"reward_weights": reward_weights} if reward_weights else {})
    for name, key in SAME.items():
        if (
            name in values
            and values[name] is not None
            and (name != "beta" or isinstance(args, GRPOConfig))
        ):
            _put(data, key, values[name])
    billions = billions_in(str(data["model"]["base_path"]))
    for key, value in hardware_defaults(detect(), billions).items():
        section, leaf = key.split(".")
        data[section].setdefault(leaf, value)
    for key, value in args.overrides.items():
        _put(data, key, value)
    if isinstance(args, SampledConfig) and evaluated is not None:
        data["evaluation"].setdefault(
            "environments", [_evaluation_environment(data["environments"][0], evaluated)]
        )
    _play_with(data, tools, factories, rollouts)
    return parse_config(data, type(args).__name__)


def _shared(
    args: TrainerConfig,
    schedule: UpdateSchedule,
    *,
    model: str,
    lora: Mapping[str, Any],
    chat_template: str | None,
) -> dict[str, Any]:
    optimizer = _optimizer(args.optim)
    warmup = args.warmup_ratio or args.warmup_steps
    warmup = math.ceil(warmup * schedule.max_steps) if warmup < 1 else warmup
    if args.lr_scheduler_type == "constant":
        warmup = 0
    interval = {
        "no": schedule.total_steps,
        "epoch": schedule.steps_per_epoch,
        "steps": schedule.steps(args.save_steps),
    }
    place = Path(args.output_dir).expanduser().absolute()
    training: dict[str, Any] = {
        "checkpoint_dir": str(place.parent),
        "run_name": place.name,
        "optimizer": optimizer,
        **lr_schedule(args),
        "warmup_steps": int(warmup),
        "lr_per_update": True,
        "batch_size": schedule.batch_size,
        "total_steps": schedule.total_steps,
        "checkpoint_interval": interval[args.save_strategy],
        "blocks_per_eval": None if args.gradient_checkpointing else 0,
        "lora": _lora_in_steps(lora, schedule),
    }
    if optimizer in ADAM:
        training |= {
            "adam_beta1": args.adam_beta1,
            "adam_beta2": args.adam_beta2,
            "adam_eps": args.adam_epsilon,
        }
    level = {"level": "warning"} if args.disable_tqdm else {}
    return {
        "server": {},
        "model": {"base_path": model, "chat_template": chat_template}
        | _model_keys(args.model_init_kwargs or {})
        | {"fp32_lm_head": getattr(args, "cast_lm_head_to_fp32", False)},
        "rl_training": training,
        "logging": {"trackers": _trackers(args.report_to)} | level,
    }


def _add_rollouts(
    data: dict[str, Any],
    args: SampledConfig,
    schedule: UpdateSchedule,
    train: DataRows,
    evaluated: DataRows | None,
    rewards: Sequence[str],
) -> None:
    data["rl_training"]["atropos"] = {
        "rollout_batch_size": schedule.rollouts,
        "max_token_length": _longest(args, train, evaluated),
    }
    chat = train.conversational
    data["environments"] = [
        {
            "kind": "dataset",
            "name": TRAIN,
            "data": reference_to(train.rows, "train_dataset"),
            "heldout_fraction": 0.0,
            "prompt_column": "prompt",
            "prompt_format": "chat" if chat else "text",
            "rewards": list(rewards),
        }
        | ({"group_size": 1} if isinstance(args, TaughtConfig) else {})
        | ({"reward_method": "gdpo"} if _is_gdpo(args) else {})
    ]
    if evaluated is not None:
        if evaluated.conversational != chat:
            raise ConfigError(
                "eval_dataset: its prompts are of another kind (text or messages) than"
                " train_dataset's"
            )
        every = _evaluated_every(args, schedule)
        data["evaluation"] = {
            "problems": len(evaluated.rows),
            "every": every,
            "at_start": args.eval_on_start,
            "at_end": every > 0,
            "greedy": False,
            "samples": (args.num_generations_eval or args.num_generations)
            if isinstance(args, GRPOConfig)
            else 1,
            "temperature": args.temperature,
        }
    if args.log_completions:
        data["logging"]["sample_every"] = schedule.steps(args.logging_steps)
    data["server"]["batch_size"] = max(32, min(schedule.rollouts, 256))


def _evaluation_environment(training: Mapping[str, Any], evaluated: DataRows) -> dict[str, Any]:
    """Return the environment of training with the rows of eval_dataset."""
    other = (*ABOUT_TRAINING, "heldout_fraction")
    rows = {"name": EVALUATED_AS, "data": reference_to(evaluated.rows, EVALUATED_AS)}
    return {key: value for key, value in training.items() if key not in other} | rows


def _grpo_keys(args: GRPOConfig, schedule: UpdateSchedule, *, own_loss: bool) -> dict[str, Any]:
    """Return the keys of [rl_training] that are about the loss and its batches."""
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    bounds: dict[str, Any] = {"loss": "clip", "clip_ratio": args.epsilon, "clip_ratio_high": high}
    if args.loss_type == "cispo":
        bounds = {"loss": "cispo", "clip_ratio_high": high - 1.0}
    elif args.loss_type == "sapo":
        taus = {
            "sapo_tau_positive": args.sapo_temperature_pos,
            "sapo_tau_negative": args.sapo_temperature_neg,
        }
        bounds = {"loss": "sapo", **taus}
    elif args.loss_type == "vespo":
        bounds = {
            "loss": "vespo",
            "vespo_k_positive": args.vespo_k_pos,
            "vespo_lambda_positive": args.vespo_lambda_pos,
            "vespo_k_negative": args.vespo_k_neg,
            "vespo_lambda_negative": args.vespo_lambda_neg,
        }
    elif args.delta is not None:
        bounds |= {"loss": "two_sided", "ratio_delta": args.delta}
    bounds |= {
        "loss_aggregation": AGGREGATION[args.loss_type],
        "off_policy_mask": args.off_policy_mask_threshold,
        "top_entropy_quantile": args.top_entropy_quantile
        if args.top_entropy_quantile < 1
        else None,
        "ratio_level": args.importance_sampling_level,
    }
    if args.loss_type == "dr_grpo":
        bounds["constant_length"] = args.max_completion_length
    keys = ({} if own_loss else bounds) | {  # the user's own reads none of these
        "advantage": "batch" if _is_gdpo(args) else ADVANTAGE[args.scale_rewards],
        "kl_estimator": "k3_ratio" if args.use_bias_correction_kl else "k3",
        "entropy_aggregation": "token",
        "dynamic_sampling": False,
        "max_staleness": 0,
    }
    if args.use_adaptive_entropy:
        keys |= {
            "entropy_target": args.entropy_target,
            "entropy_delta": args.entropy_coef_delta,
            "entropy_min": args.entropy_coef_min,
            "entropy_max": args.entropy_coef_max,
        }
    if args.beta:
        keys |= _reference(
            args.sync_ref_model, args.ref_model_mixup_alpha, args.ref_model_sync_steps, schedule
        )
    return keys


def _is_gdpo(args: TrainerConfig) -> bool:
    gdpo = "normalize_then_sum"
    return isinstance(args, GRPOConfig) and args.multi_objective_aggregation == gdpo


def _taught_keys(args: TaughtConfig, teacher: str | None) -> dict[str, Any]:
    """Return the keys of [rl_training] for a divergence from a teacher, and nothing else."""
    options = dict(args.teacher_model_init_kwargs or {})
    revision = options.pop("revision", None)
    if isinstance(args, DistillationConfig):
        revision = args.teacher_model_revision or revision
    harmless = ("dtype", "torch_dtype", "trust_remote_code", "attn_implementation", "device_map")
    if wrong := [name for name in options if name not in harmless]:
        raise ConfigError(
            f"teacher_model_init_kwargs: {wrong[0]!r} means nothing here: revision does; the"
            " teacher has the student's dtype"
        )
    scorer: dict[str, Any] = {"name": "teacher", "kind": "base"}
    if teacher is not None:
        scorer = {"name": "teacher", "kind": "model", "path": teacher, "revision": revision}
    return {
        "algorithm": "importance_sampling",  # its advantage is 0: only the divergence is learned
        "loss_aggregation": "token",
        "max_staleness": 0,
        "distillation": {
            "mode": "loss",
            "reward": False,
            "beta": args.beta,
            "top_k": 0,
            "temperature": 1.0 if isinstance(args, GKDConfig) else None,
            "teachers": [scorer],
        },
    }


def _add_rows(
    data: dict[str, Any],
    args: RowsConfig,
    schedule: UpdateSchedule,
    train: DataRows,
    evaluated: DataRows | None,
) -> None:
    training = data["rl_training"]
    training |= {"algorithm": KINDS[type(args)], "max_staleness": 0}
    rows: dict[str, Any] = {
        "path": reference_to(train.rows, "train_dataset"),
        "eval_fraction": 0.0,
        "max_length": args.max_length or NO_BOUND,
        "too_long": "skip",
        "end_token": "tokenizer",
        "shuffle": args.train_sampling_strategy == "random",
        "prompt_format": "chat" if train.conversational else "text",
    }
    if evaluated is not None:
        rows["eval_path"] = reference_to(evaluated.rows, "eval_dataset")
        rows["eval_every"] = _evaluated_every(args, schedule)
        rows["eval_rows"] = NO_BOUND
    data["data"] = rows
    if isinstance(args, DPOConfig | KTOConfig | RewardConfig) and args.disable_dropout:
        settings = {
            name: value for name, value in training["lora"].items() if name != "lora_dropout"
        }
        training["lora"] = settings | {"dropout": 0.0}
    if isinstance(args, DPOConfig | KTOConfig):
        training["preference"] = {"beta": args.beta}
        training |= _reference(
            args.sync_ref_model, args.ref_model_mixup_alpha, args.ref_model_sync_steps, schedule
        )
    if isinstance(args, KTOConfig):
        training["preference"]["kto_loss"] = args.loss_type
    if isinstance(args, SFTConfig):
        training["preference"] = {"sft_loss": "dft" if args.loss_type == "dft" else "nll"}
        if args.neftune_noise_alpha:
            training["preference"]["neftune_alpha"] = args.neftune_noise_alpha
        rows["learn_prompts"] = args.learns_prompts(train.rows)
        rows["pack_rows"] = args.packing
    if isinstance(args, DPOConfig):
        kinds = (args.loss_type,) if isinstance(args.loss_type, str) else args.loss_type
        training["preference"]["loss_type"] = kinds[0] if len(kinds) == 1 else kinds
        if args.f_divergence_type == "alpha_divergence":
            training["preference"]["f_alpha"] = args.f_alpha_divergence_coef
        if set(kinds) & set(OF_ROWS) and args.gradient_accumulation_steps > 1:
            training["preference"]["pairs_together"] = args.per_device_train_batch_size


def _reference(moves: bool, alpha: float, every: int, schedule: UpdateSchedule) -> dict[str, Any]:
    if not moves:
        return {}
    return {
        "reference": "ema",
        "reference_decay": 1 - alpha,
        "reference_update_every": schedule.steps(every),
    }


def _evaluated_every(args: TrainerConfig, schedule: UpdateSchedule) -> int:
    updates = args.eval_steps or args.logging_steps
    return {"no": 0, "epoch": schedule.steps_per_epoch, "steps": schedule.steps(updates)}[
        args.eval_strategy
    ]


def _longest(args: SampledConfig, *splits: DataRows | None) -> int:
    """Return an upper bound of prompt and completion: a token is a byte at least."""
    if args.max_token_length is not None:
        return args.max_token_length
    if isinstance(args, GKDConfig) and args.max_length is not None:
        return args.max_length
    prompts = (
        str(row.get("prompt", "")) for split in splits if split is not None for row in split.rows
    )
    longest = max((len(prompt.encode(errors="replace")) for prompt in prompts), default=0)
    return args.longest_completion + longest + SPARE_TOKENS


def _play_with(
    data: dict[str, Any],
    tools: Sequence[Any],
    factories: Factories | None,
    rollouts: RolloutCalls | None,
) -> None:
    """Add the functions that the model may call, and let environments play the rows, or a function
    sample for them."""
    if tools:
        named = zip(tools, map(name_of, tools), strict=True)
        data.setdefault("tools", {})["functions"] = [reference_to(tool, n) for tool, n in named]
    played: Callable[[Mapping[str, Any]], dict[str, Any]]
    if factories is not None:
        played = partial(with_environments, of=factories)
    elif rollouts is not None:
        played = partial(with_rollout_func, of=rollouts)
        # placeholders of the function are left out of its rollouts
        data["rl_training"]["atropos"].setdefault("missing_logprobs", "recompute")
    else:
        return
    data["environments"][:] = map(played, data["environments"])
    held_out = data.get("evaluation", {}).get("environments", [])
    held_out[:] = [played({"heldout_fraction": 1.0, **entry}) for entry in held_out]


def _of_tools(tools: Sequence[Any], factories: Factories | None) -> int:
    """Return what definitions of tools and the text of `reset` add to a prompt at most, as far as
    that is known: a token is a byte at least."""
    definitions = [tool_definition(tool) for tool in tools]
    added = 0
    if factories is not None:
        added = RESET_TOKENS
        definitions += max(factories.definitions.values(), key=lambda each: len(str(each)))
    return added + sum(2 * len(str(each).encode(errors="replace")) for each in definitions)


def _optimizer(name: str) -> str:
    """Strip "paged": it concerns only the memory of the states."""
    plain = name.removeprefix(PAGED)
    for kind in ("adamw", "lion", "adafactor", "sgd", "muon"):
        if plain.startswith(kind):
            if "8bit" not in plain and "4bit" not in plain:
                return kind
            if kind in ("adamw", "lion") and "8bit" in plain:
                return f"{kind}_8bit"
    raise ConfigError(
        f'optim={name!r}: choose "adamw_torch", "adamw_8bit", "lion_32bit", "lion_8bit",'
        ' "adafactor", "sgd" or "muon"'
    )


def _trackers(report_to: str | Sequence[str]) -> list[str]:
    names = [report_to] if isinstance(report_to, str) else list(report_to)
    if names == ["all"]:
        return list(TRACKERS)
    if wrong := [name for name in names if name not in (*TRACKERS, "none")]:
        raise ConfigError(f"report_to={wrong[0]!r}: choose {', '.join(TRACKERS)}, all or none")
    return [name for name in names if name != "none"]


def _model_keys(options: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, value in options.items():
        if name in ("dtype", "torch_dtype"):
            keys["dtype"] = str(value).removeprefix("torch.")
        elif name in ("revision", "trust_remote_code"):
            keys[name] = value
        elif name not in ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage"):
            raise ConfigError(
                f"model_init_kwargs: {name!r} means nothing here: dtype, revision,"
                " trust_remote_code do"
            )
    return keys


def _put(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; a number among its parts is an index."""
    *sections, leaf = key.split(".")
    node: Any = data
    for part in sections:
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                raise ConfigError(f"overrides: {key!r}: {part!r} is not an entry of {len(node)}")
            node = node[int(part)]
        else:
            node = node.setdefault(part, {})
    if not isinstance(node, dict):
        raise ConfigError(f"overrides: {key!r} is not a key of docs/config.md")
    node[leaf] = value
