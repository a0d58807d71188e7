"""The commands as functions: `main` is `mlx_parallm`, `train` is `mlx_parallm_train`, and so on.
Imports no MLX."""

from collections.abc import Callable

from mlx_parallm.cli.table import COMMANDS, main, script

__all__ = [
    "convert_adapter",
    "doctor",
    "evaluate",
    "explain",
    "main",
    "merge_lora",
    "replay",
    "rollouts",
    "serve",
]
__all__ += ["show_checkpoint", "train"]

train = script("mlx_parallm_train")
serve = script("mlx_parallm_serve")
explain = script("mlx_parallm_explain")
rollouts = script("mlx_parallm_rollouts")
show_checkpoint = script("mlx_parallm_show_checkpoint")
evaluate = script("mlx_parallm_eval")
replay = script("mlx_parallm_replay")
merge_lora = script("mlx_parallm_merge_lora")
convert_adapter = script("mlx_parallm_convert_adapter")
doctor = script("mlx_parallm_doctor")


def __getattr__(name: str) -> Callable[..., int]:
    """Return the command of a leaf, by the name that its script has behind `mlx_parallm_`."""
    if f"mlx_parallm_{name}" not in {command.script for command in COMMANDS}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return script(f"mlx_parallm_{name}")
