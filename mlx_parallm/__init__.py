"""mlx_parallm: serve a language model and train it by reinforcement learning in one process, on
MLX.

Importing the package puts a fast BLAS under MLX on Linux CPU (`blas.py`) and has malloc keep freed
memory (`heap.py`); it imports no MLX itself. In a command's process it first holds the signals
(`command_start.py`).
"""

import mlx_parallm.system.command_start  # noqa: F401, I001  # before what takes time
from typing import TYPE_CHECKING

from mlx_parallm.system.blas import preload_fast_blas
from mlx_parallm.system.heap import keep_freed_memory
from mlx_parallm.system.moved_names import keep_moved_names, lazy_names
from mlx_parallm.system.quiet import hide_advice

if TYPE_CHECKING:
    from mlx_parallm.config.training import LoraConfig
    from mlx_parallm.faces.trl.config import (
        DistillationConfig,
        DPOConfig,
        GKDConfig,
        GRPOConfig,
        KTOConfig,
        RewardConfig,
        SFTConfig,
    )
    from mlx_parallm.faces.trl.rollouts import generate_rollout_completions
    from mlx_parallm.faces.trl.trainers import (
        DistillationTrainer,
        DPOTrainer,
        GKDTrainer,
        GRPOTrainer,
        KTOTrainer,
        RewardTrainer,
        SFTTrainer,
    )

__version__ = "0.1.0"
__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "DistillationConfig",
    "DistillationTrainer",
    "GKDConfig",
    "GKDTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LoraConfig",
    "RewardConfig",
    "RewardTrainer",
    "SFTConfig",
    "SFTTrainer",
    "generate_rollout_completions",
]

__getattr__, __dir__ = lazy_names(  # TRL's names (docs/trl.md); importing the package stays cheap
    __name__,
    {
        "config.training": "LoraConfig",
        "faces.trl.config": "GRPOConfig DistillationConfig GKDConfig SFTConfig"
        " DPOConfig KTOConfig RewardConfig",
        "faces.trl.rollouts": "generate_rollout_completions",
        "faces.trl.trainers": "GRPOTrainer DistillationTrainer GKDTrainer SFTTrainer DPOTrainer"
        " KTOTrainer RewardTrainer",
    },
    absent="faces.trl.absent",
)

preload_fast_blas()
keep_freed_memory()
hide_advice()
keep_moved_names()
