"""mlx_parallm: serve a language model and train it by reinforcement learning in one process, on MLX.

Importing the package puts a fast BLAS under MLX on Linux CPU (`blas.py`) and has malloc keep freed memory (`heap.py`);
it imports no MLX itself.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mlx_parallm.system.blas import preload_fast_blas
from mlx_parallm.system.heap import keep_freed_memory

if TYPE_CHECKING:
    from mlx_parallm.config.training import LoraConfig
    from mlx_parallm.config.trl import DPOConfig, GRPOConfig, KTOConfig, SFTConfig
    from mlx_parallm.trl.trainers import DPOTrainer, GRPOTrainer, KTOTrainer, SFTTrainer

__version__ = "0.1.0"
__all__ = [
    "DPOConfig",
    "DPOTrainer",
    "GRPOConfig",
    "GRPOTrainer",
    "KTOConfig",
    "KTOTrainer",
    "LoraConfig",
    "SFTConfig",
    "SFTTrainer",
]

_HOMES = {
    "config.training": "LoraConfig",
    "config.trl": "GRPOConfig SFTConfig DPOConfig KTOConfig",
    "trl.trainers": "GRPOTrainer SFTTrainer DPOTrainer KTOTrainer",
}


def __getattr__(name: str) -> Any:
    """Load TRL's names at their first use (PEP 562), so that importing the package stays cheap. docs/trl.md"""
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(importlib.import_module(f"mlx_parallm.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


preload_fast_blas()
keep_freed_memory()
