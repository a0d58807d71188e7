"""BackpropConfig and AlgorithmConfig: keyword faces of `[rl_training]` for `primitives`. Imports no
MLX.

`training_keys` maps them onto the daemon's keys. A default is the daemon's own, unless `DIFFERENT`
lists it. Names that other libraries have for a key are accepted (`ALIASES`); names of earlier
versions that could have no effect are refused with the reason (`REFUSED`).
"""

import difflib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from mlx_parallm.config.algorithm import CLIP_RATIO, KLEstimator
from mlx_parallm.config.environment import Method, Section
from mlx_parallm.config.training import LoggingConfig, LoraConfig, RLTrainingConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.pydantic_faults import faults

RefUpdate = Literal["copy", "ema"]
LibraryAlgorithm = Literal["ppo", "grpo", "reinforce"]

DAEMON = RLTrainingConfig()
DIFFERENT: dict[str, Any] = {
    "gamma": 0.99,  # ppo.gamma: 1
    "kl_coef": 0.1,  # kl_beta: 0
    # entropy_weight: 0; without it PPO ended at 0.75 of 1 in one seed of three (docs/library.md)
    "entropy_coef": 0.01,
    "ppo_epochs": 4,  # update_epochs: 1
    "learning_rate": 1e-6,  # 1e-5
    "num_iterations": 1000,  # total_steps: 100
    "save_every": 10,  # checkpoint_interval: 50
}
"""Defaults other than the daemon's, which the comments name. Reason: the library's specification
prints these."""

SHARED_ALIASES = {
    **dict.fromkeys(("clip_ratio", "clip_range", "clip_epsilon", "eps_clip"), "ppo_clip_range"),
    **dict.fromkeys(("kl_beta", "kl_weight", "beta"), "kl_coef"),
    **dict.fromkeys(("entropy_weight", "entropy_coefficient"), "entropy_coef"),
    **dict.fromkeys(("value_coef", "value_coefficient", "vf_coef"), "value_loss_coef"),
    **dict.fromkeys(("ema_decay", "ref_ema"), "ema_alpha"),
    **dict.fromkeys(("update_epochs", "n_epochs"), "ppo_epochs"),
    "lr": "learning_rate",
}


class Options(Section):
    """A section made by keywords. Raises ConfigError: a keyword is unknown, refused, repeated or
    out of its range."""

    ALIASES: ClassVar[Mapping[str, str]] = SHARED_ALIASES
    REFUSED: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        kind, named = type(self).__name__, dict[str, Any]()
        for keyword, value in values.items():
            name = self.ALIASES.get(keyword, keyword)
            if keyword in self.REFUSED:
                raise ConfigError(f"{kind}({keyword}=…): {self.REFUSED[keyword]}")
            if name not in type(self).model_fields:
                near = difflib.get_close_matches(
                    keyword, [*type(self).model_fields, *self.ALIASES], n=1, cutoff=0.0
                )
                raise ConfigError(f"{kind} has no {keyword!r}; did you mean {near[0]!r}?")
            if name in named:
                raise ConfigError(f"{kind}: {name} is given twice, as {keyword!r} too")
            named[name] = value
        try:
            super().__init__(**named)
        except ValidationError as error:
            raise ConfigError(f"{kind}: {faults(error)}") from error


class BackpropConfig(Options):
    gamma: float = Field(DIFFERENT["gamma"], gt=0, le=1)
    """Discount of rewards a step (in PPO: a token) later."""
    gae_lambda: float = Field(DAEMON.ppo.gae_lambda, ge=0, le=1)
    """Generalised advantage estimation (arXiv:1506.02438)."""
    ppo_clip_range: float = Field(CLIP_RATIO, ge=0, le=1)
    """The ratio is held within 1 ± this."""
    kl_coef: float = Field(DIFFERENT["kl_coef"], ge=0)
    """Weight of the KL to the reference in the loss; 0 = not computed."""
    kl_estimator: KLEstimator = DAEMON.kl_estimator
    """Schulman's estimators of KL(policy || reference), the absolute difference, and "k3_ratio",
    k3 times the ratio."""
    normalize_advantages: bool = True
    """PPO, REINFORCE: whitened over the batch. GRPO: (r - mean) / std of the group, else r -
    mean."""
    ppo_epochs: int = Field(DIFFERENT["ppo_epochs"], ge=1)
    """Passes over the trajectories of one iteration. REINFORCE, which has no ratio, makes one."""
    value_loss_coef: float = Field(DAEMON.ppo.value_coefficient, gt=0)
    """Weight of the value loss."""
    clip_value_loss: bool = True
    """Within an iteration a value may move by ppo_clip_range at most before its loss has no
    gradient."""
    entropy_coef: float = Field(DIFFERENT["entropy_coef"], ge=0)
    """Weight of the entropy bonus."""
    max_grad_norm: float = Field(DAEMON.max_grad_norm, ge=0)
    """Clip the global gradient norm; 0 = off."""
    learning_rate: float = Field(DIFFERENT["learning_rate"], gt=0)
    """Learning rate of AdamW, if BackpropModule gets no optimizer."""
    ref_update_method: RefUpdate = "copy"
    """`update_ref_model` makes the reference a copy of the policy, or a moving average of both."""
    ema_alpha: float = Field(DAEMON.reference_decay, ge=0, lt=1)
    """Share of the reference that stays: reference = ema_alpha · reference + (1 - ema_alpha) ·
    policy."""
    lora: LoraConfig = DAEMON.lora
    """Adapter to train; LoraConfig(enabled=False) trains all weights."""
    token_budget: int = Field(DAEMON.token_budget, ge=1)
    """Tokens of one backward pass, padding included."""
    blocks_per_eval: int | None = Field(DAEMON.blocks_per_eval, ge=0)
    """Transformer blocks evaluated together; 1 = least memory, 0 = all at once, the fastest for
    a small model."""
    seed: int = DAEMON.seed
    """Seed of the adapter's initial weights and of the order of trajectories."""


class AlgorithmConfig(Options):
    """If a key is None, BackpropConfig's holds."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "use_amp": (
            "MLX has no autocast: load the model in bfloat16 (ModelConfig.dtype), its products"
            " are then in it"
        ),
        "log_every": (
            "every iteration gives one TrainingMetrics, and one line of metrics.jsonl in"
            " checkpoint_dir"
        ),
        "custom_params": "nothing reads it: keep your own numbers in a"
        " callback or in the reward computer",
        "gradient_accumulation_steps": "trajectories are cut into backward passes by"
        " BackpropConfig.token_budget",
    }

    num_iterations: int = Field(DIFFERENT["num_iterations"], ge=1)
    """Iterations of `train` without an argument."""
    batch_size: int = Field(DAEMON.batch_size, ge=1)
    """Trajectories of one iteration."""
    mini_batch_size: int | None = Field(None, ge=1)
    """Trajectories of one optimizer update; default: batch_size."""
    group_size: int | None = Field(None, ge=1)
    """Trajectories of one prompt. Default: 8 for GRPO, which compares them and needs 2; 1 for
    PPO and REINFORCE."""
    max_steps_per_rollout: int | None = Field(None, ge=1)
    """Steps after which an episode is cut off; default: the rollout manager's."""
    max_staleness: int = Field(DAEMON.max_staleness, ge=0)
    """Largest age of a trajectory in iterations; older ones are dropped."""
    reward_method: Method | None = None
    """Argument `method` of the reward computer; default: its own default."""
    filter_percentile: float = Field(0.0, ge=0, lt=100)
    """Learn only from trajectories at or above this percentile of their group's rewards; 0 =
    from all."""
    learning_rate: float | None = Field(None, gt=0)
    """Learning rate instead of the optimizer's."""
    ppo_epochs: int | None = Field(None, ge=1)
    """Passes over the trajectories of one iteration."""
    ppo_clip_range: float | None = Field(None, ge=0, le=1)
    """The ratio is held within 1 ± this."""
    kl_coef: float | None = Field(None, ge=0)
    """Weight of the KL to the reference."""
    entropy_coef: float | None = Field(None, ge=0)
    """Weight of the entropy bonus."""
    value_loss_coef: float | None = Field(None, gt=0)
    """PPO: weight of the value loss."""
    max_grad_norm: float | None = Field(None, ge=0)
    """Clip the global gradient norm; 0 = off."""
    update_ref_every: int = Field(0, ge=0)
    """Iterations between two updates of the reference; 0 = no updates."""
    ref_update_method: RefUpdate | None = None
    """BackpropConfig.ref_update_method of these updates."""
    ema_alpha: float | None = Field(None, ge=0, lt=1)
    """BackpropConfig.ema_alpha of these updates."""
    checkpoint_dir: Path | None = None
    """Directory of runs; None = nothing is written."""
    run_name: str | None = None
    """Directory of this run under checkpoint_dir; default: the algorithm's name and the time."""
    save_every: int = Field(DIFFERENT["save_every"], ge=1)
    """Iterations between checkpoints; `train` makes one at its end."""
    keep_checkpoints: int = Field(DAEMON.keep_checkpoints, ge=1)
    """Newest checkpoints to keep, besides the best."""
    trackers: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """Trackers that get every iteration; each needs the extra of its name."""
    use_wandb: bool = False
    """Another way to name "wandb" among the trackers."""
    wandb_project: str = LoggingConfig().project
    """Project of the run in W&B and trackio."""

    @model_validator(mode="after")
    def _fits(self) -> "AlgorithmConfig":
        if (self.mini_batch_size or 1) > self.batch_size:
            raise ValueError(
                f"mini_batch_size ({self.mini_batch_size}) is larger than batch_size"
                f" ({self.batch_size})"
            )
        if self.all_trackers and self.checkpoint_dir is None:
            raise ValueError(
                f"{self.all_trackers[0]} needs checkpoint_dir, where"
                " the run's id and files are kept"
            )
        return self

    @property
    def all_trackers(self) -> tuple[Literal["wandb", "tensorboard", "trackio"], ...]:
        return (
            *self.trackers,
            *(("wandb",) if self.use_wandb and "wandb" not in self.trackers else ()),
        )

    def over(self, backprop: BackpropConfig) -> BackpropConfig:
        """Return `backprop`, updated by the keys that are set here."""
        shared = BackpropConfig.model_fields.keys() & type(self).model_fields.keys()
        return backprop.model_copy(update=self.model_dump(include=shared, exclude_none=True))

    def training_keys(
        self, algorithm: LibraryAlgorithm, max_token_length: int | None
    ) -> dict[str, Any]:
        """Return the keys of [rl_training] that BackpropConfig does not have."""
        keys: dict[str, Any] = {
            "batch_size": self.mini_batch_size or self.batch_size,
            "atropos": {
                "rollout_batch_size": self.batch_size,
                "max_token_length": max_token_length,
            },
            "total_steps": self.num_iterations,
            "checkpoint_interval": self.save_every,
            "keep_checkpoints": self.keep_checkpoints,
        }
        if self.learning_rate is not None:
            keys["learning_rate"] = self.learning_rate
        if self.checkpoint_dir is not None:
            keys["checkpoint_dir"] = str(self.checkpoint_dir)
            keys["run_name"] = self.run_name or f"{algorithm}-{datetime.now():%Y%m%d-%H%M%S}"
        return keys


def training_keys(algorithm: LibraryAlgorithm, config: BackpropConfig) -> dict[str, Any]:
    """Return the keys of [rl_training] with the same meaning."""
    keys: dict[str, Any] = {
        "algorithm": algorithm,
        "learning_rate": config.learning_rate,
        "max_grad_norm": config.max_grad_norm,
        "kl_beta": config.kl_coef,
        "kl_estimator": config.kl_estimator,
        "entropy_weight": config.entropy_coef,
        "lora": config.lora.model_dump(),
        "seed": config.seed,
        "token_budget": config.token_budget,
        "blocks_per_eval": config.blocks_per_eval,
        "max_staleness": 0,  # the newest weights sample the next trajectories
    }
    if algorithm == "reinforce":
        return keys | {"advantage_whiten": config.normalize_advantages}
    keys |= {"update_epochs": config.ppo_epochs, "clip_ratio": config.ppo_clip_range}
    if algorithm == "grpo":
        return keys | {"advantage": "std" if config.normalize_advantages else "mean"}
    values = {
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
        "normalize_advantages": config.normalize_advantages,
        "value_clip": config.ppo_clip_range if config.clip_value_loss else 0.0,
        "value_coefficient": config.value_loss_coef,
    }
    return keys | {"ppo": values}
