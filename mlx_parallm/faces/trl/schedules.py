"""transformers' schedules of the learning rate → keys of [rl_training]."""

import json
from collections.abc import Mapping
from typing import Any

from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.trl.config import TrainerConfig

OF_WSD: Mapping[str, Any] = {
    "num_decay_steps": None,
    "num_stable_steps": None,
    "warmup_type": "linear",
    "decay_type": "cosine",
    "min_lr_ratio": 0.0,
    "num_cycles": 0.5,
}
SCHEDULES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "linear": ("linear", {}),
    "cosine": ("cosine", {"num_cycles": 0.5}),
    "cosine_with_min_lr": ("cosine", {"num_cycles": 0.5, "min_lr": None, "min_lr_rate": None}),
    "polynomial": ("linear", {"power": 1.0, "lr_end": 1e-7}),
    "inverse_sqrt": ("inverse_sqrt", {"timescale": None}),
    "warmup_stable_decay": ("wsd", OF_WSD),
    "constant": ("constant", {}),
    "constant_with_warmup": ("constant", {}),
}
"""transformers' schedule → (ours, its arguments with their defaults). `VARIED` of them may have
other values."""
VARIED = ("min_lr", "min_lr_rate", "lr_end", "num_decay_steps", "decay_type", "min_lr_ratio")


def lr_schedule(args: TrainerConfig) -> dict[str, Any]:
    """Return the keys of [rl_training] of a schedule. Raises ConfigError: an argument of it that
    is not here."""
    name = args.lr_scheduler_type
    kind, defaults = SCHEDULES[name]
    values = {**defaults, **_schedule_arguments(args, defaults)}
    final = values.get("lr_end") or values.get("min_lr")
    rate = values.get("min_lr_rate") or values.get("min_lr_ratio") or 0.0
    if name == "cosine_with_min_lr" and not (final or rate):
        raise ConfigError("lr_scheduler_kwargs: cosine_with_min_lr needs min_lr, or min_lr_rate")
    final = final or rate * args.learning_rate
    keys: dict[str, Any] = {"lr_schedule": kind} | ({"lr_final": final} if final else {})
    if kind != "wsd":
        return keys
    if not values["num_decay_steps"]:
        raise ConfigError("lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps")
    if rate and (args.warmup_steps or args.warmup_ratio):
        raise ConfigError(
            "lr_scheduler_kwargs: min_lr_ratio is not here with a warm-up, which begins at 0"
        )
    decay = {"lr_decay_steps": values["num_decay_steps"], "lr_decay_shape": values["decay_type"]}
    return keys | decay


def _schedule_arguments(args: TrainerConfig, defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return lr_scheduler_kwargs. Raises ConfigError: one that the schedule does not have, or a
    value of it that is not here."""
    arguments = args.lr_scheduler_kwargs or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ConfigError(f"lr_scheduler_kwargs={arguments!r} is no JSON: {error}") from None
    name = args.lr_scheduler_type
    for key, value in dict(arguments).items():
        if key not in defaults:
            there_are = ", ".join(defaults) or "none"
            raise ConfigError(f"lr_scheduler_kwargs: {name} has no {key!r} (it has {there_are})")
        if key not in VARIED and value != defaults[key]:
            raise ConfigError(
                f"lr_scheduler_kwargs: {key}={value!r} of {name} is not here: leave it out"
            )
    return dict(arguments)
