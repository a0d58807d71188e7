"""The training configuration's stable name; the classes are in `config.training`."""

from mlx_parallm.config.training import (
    AtroposConfig,
    LoraConfig,
    PPOConfig,
    RLTrainingConfig,
    WeightUpdateConfig,
)

__all__ = ["AtroposConfig", "LoraConfig", "PPOConfig", "RLTrainingConfig", "WeightUpdateConfig"]
