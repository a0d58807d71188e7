"""The commands as functions. Imports no MLX."""

from mlx_parallm.cli.commands import doctor, explain, merge_lora, rollouts, serve, train
from mlx_parallm.cli.run_commands import convert_adapter, evaluate, replay, show_checkpoint

__all__ = [
    *("convert_adapter", "doctor", "evaluate", "explain", "merge_lora", "replay", "rollouts", "serve"),
    *("show_checkpoint", "train"),
]
