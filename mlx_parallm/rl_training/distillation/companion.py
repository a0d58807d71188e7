"""Build the teachers that a configuration names."""

from typing import TYPE_CHECKING

from mlx_parallm.rl_training.factory import CompanionContext

if TYPE_CHECKING:
    from mlx_parallm.rl_training.distillation.signal import Teachers


def teachers_of(context: CompanionContext) -> "Teachers | None":
    """Return the configured teachers, loaded and compared with the policy's tokenizer; None: there
    are none. Raises ConfigError, ModelError."""
    if not context.training.distillation.active:
        return None
    from mlx_parallm.rl_training.distillation.signal import Teachers

    return Teachers(context)
