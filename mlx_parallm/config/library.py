"""BackpropConfig and AlgorithmConfig: what the library (`mlx_parallm.primitives`) is told in Python. Imports no MLX.

One number has one name here and several elsewhere; the others are accepted (`ALIASES`). Names of earlier versions that
could have no effect are refused with the reason (`REFUSED`). Both are turned into the daemon's own `[rl_training]`.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationError, model_validator

from mlx_parallm.config.environment import Section
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import ConfigError

RefUpdate = Literal["copy", "ema"]
AlgorithmName = Literal["ppo", "grpo", "reinforce"]
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
    """A section that is made by keywords. Raises ConfigError: unknown, refused, given twice, or out of its range."""

    ALIASES: ClassVar[Mapping[str, str]] = SHARED_ALIASES
    REFUSED: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        kind, named = type(self).__name__, dict[str, Any]()
        for given, value in values.items():
            name = self.ALIASES.get(given, given)
            if given in self.REFUSED:
                raise ConfigError(f"{kind}({given}=…): {self.REFUSED[given]}")
            if name not in type(self).model_fields:
                near = difflib.get_close_matches(given, [*type(self).model_fields, *self.ALIASES], n=1, cutoff=0.0)
                raise ConfigError(f"{kind} has no {given!r}; did you mean {near[0]!r}?")
            if name in named:
                raise ConfigError(f"{kind}: {name} is given twice, as {given!r} too")
            named[name] = value
        try:
            super().__init__(**named)
        except ValidationError as error:
            found = (
                f"{'.'.join(map(str, e['loc']))}: {e['msg'].removeprefix('Value error, ')}" for e in error.errors()
            )
            raise ConfigError(f"{kind}: " + "; ".join(text.removeprefix(": ") for text in found)) from error


class BackpropConfig(Options):
    gamma: float = Field(0.99, gt=0, le=1)
    """Discount of what comes a step (in PPO: a token) later."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Generalised advantage estimation (arXiv:1506.02438)."""
    ppo_clip_range: float = Field(0.2, ge=0, le=1)
    """The ratio is held within 1 ± this."""
    kl_coef: float = Field(0.1, ge=0)
    """Weight of the KL to the reference in the loss; 0 = not computed."""
    kl_estimator: Literal["k1", "abs", "k2", "k3"] = "k3"
    """Schulman's estimators of KL(policy || reference), and the absolute difference."""
    normalize_advantages: bool = True
    """PPO, REINFORCE: whitened over the batch. GRPO: (r - mean) / std of the group, else r - mean."""
    ppo_epochs: int = Field(4, ge=1)
    """Passes over the trajectories of one iteration. REINFORCE, which has no ratio, makes one."""
    value_loss_coef: float = Field(0.1, gt=0)
    """Weight of the value loss."""
    clip_value_loss: bool = True
    """Within an iteration a value may move by ppo_clip_range at most before its loss stops pulling."""
    entropy_coef: float = Field(0.01, ge=0)
    """Weight of the entropy bonus."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm; 0 = off."""
    learning_rate: float = Field(1e-6, gt=0)
    """Of AdamW, where BackpropModule is given no optimizer."""
    ref_update_method: RefUpdate = "copy"
    """What `update_ref_model` does: the reference becomes the policy, or their moving average."""
    ema_alpha: float = Field(0.99, ge=0, lt=1)
    """The share of the reference that is kept: reference = ema_alpha · reference + (1 - ema_alpha) · policy."""
    lora: LoraConfig = LoraConfig()
    """The adapter that is trained; LoraConfig(enabled=False) trains all weights."""
    token_budget: int = Field(8192, ge=1)
    """Tokens of one backward pass, padding included."""
    seed: int = 0
    """Of the adapter's first numbers and of the order of trajectories."""


class AlgorithmConfig(Options):
    """Where a number is None, BackpropModule's own holds."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "use_amp": "MLX has no autocast: load the model in bfloat16 (ModelConfig.dtype), its products are then in it",
        "log_every": "every iteration is one TrainingMetrics, and one line of metrics.jsonl in checkpoint_dir",
        "custom_params": "nothing reads it: keep numbers of your own in a callback or in the reward computer",
        "gradient_accumulation_steps": "trajectories are cut into backward passes by BackpropConfig.token_budget",
    }

    num_iterations: int = Field(1000, ge=1)
    """Of `train`, where it is not told."""
    batch_size: int = Field(32, ge=1)
    """Trajectories that one iteration is trained on."""
    mini_batch_size: int | None = Field(None, ge=1)
    """Trajectories of one optimizer update; default: batch_size."""
    group_size: int | None = Field(None, ge=1)
    """Trajectories of one prompt. GRPO compares them: 8 (at least 2); PPO and REINFORCE: 1."""
    max_steps_per_rollout: int | None = Field(None, ge=1)
    """Steps after which an episode is cut off; default: the rollout manager's."""
    max_staleness: int = Field(1, ge=0)
    """Iterations that a trajectory may have been on its way; older ones are dropped."""
    reward_method: Literal["absolute", "relative", "pareto"] | None = None
    """What the reward computer is asked for; default: its own default."""
    filter_percentile: float = Field(0.0, ge=0, lt=100)
    """Learn from trajectories at or above this percentile of their group's rewards only; 0 = from all."""
    learning_rate: float | None = Field(None, gt=0)
    """In the place of the optimizer's."""
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
    """Iterations between two updates of the reference; 0 = it stays as it was."""
    ref_update_method: RefUpdate | None = None
    """Of these updates."""
    ema_alpha: float | None = Field(None, ge=0, lt=1)
    """Of these updates."""
    checkpoint_dir: Path | None = None
    """Directory of runs; None = nothing is written."""
    run_name: str | None = None
    """Directory of this run under checkpoint_dir; default: the algorithm's name and the time."""
    save_every: int = Field(10, ge=1)
    """Iterations between checkpoints; `train` makes one at its end."""
    keep_checkpoints: int = Field(3, ge=1)
    """Newest ones that are kept, besides the best."""
    use_wandb: bool = False
    """Send every iteration to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "mlx_parallm"
    """Project of the run there."""

    @model_validator(mode="after")
    def _fits(self) -> "AlgorithmConfig":
        if (self.mini_batch_size or 1) > self.batch_size:
            raise ValueError(f"mini_batch_size ({self.mini_batch_size}) is larger than batch_size ({self.batch_size})")
        if self.use_wandb and self.checkpoint_dir is None:
            raise ValueError("use_wandb keeps the run's id and files in checkpoint_dir: set it")
        return self

    def over(self, own: BackpropConfig) -> BackpropConfig:
        """`own` with what is set here."""
        shared = BackpropConfig.model_fields.keys() & type(self).model_fields.keys()
        return own.model_copy(update={key: value for key in shared if (value := getattr(self, key)) is not None})


def training_keys(algorithm: AlgorithmName, config: BackpropConfig) -> dict[str, Any]:
    """[rl_training] that means the same."""
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
        "max_staleness": 0,  # the next trajectories are sampled by the newest weights
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
