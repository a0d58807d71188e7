"""mlx_parallm: serve a language model and train it by reinforcement learning in one process, on MLX.

Importing the package puts a fast BLAS under MLX on Linux CPU (`blas.py`) and has malloc keep freed memory (`heap.py`);
it imports no MLX itself.
"""

from mlx_parallm.system.blas import preload_fast_blas
from mlx_parallm.system.heap import keep_freed_memory

__version__ = "0.1.0"

preload_fast_blas()
keep_freed_memory()
