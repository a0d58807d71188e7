"""Optional packages: which extra brings each, and one line for one that is missing. Imports no MLX.

`pip install .` on Linux brings MLX without a backend: the CPU's and CUDA's put their
files into the same place, so the machine's owner has to choose one. A command that computes calls
`require_mlx` before it starts, and whatever needs another optional package calls `require` before
its work begins. `missing` turns an ImportError that came all the same into that line.
"""

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

from mlx_parallm.errors import ConfigError
from mlx_parallm.system.blas import has_cuda_backend, install

EXTRAS: dict[str, tuple[str, ...]] = {
    "reasoning-gym": ("reasoning_gym",),
    "rewards": ("math_verify",),
    "gymnasium": ("gymnasium",),
    "textarena": ("textarena",),
    "openenv": ("websockets",),
    "task-folders": ("yaml",),
    "mcp": ("mcp", "mcp_types", "httpx2"),
    "datasets": ("datasets",),
    "traces": ("datasketch", "sklearn"),
    "export": ("gguf", "xllamacpp"),
    "wandb": ("wandb",),
    "tensorboard": ("tensorboardX",),
    "trackio": ("trackio",),
    "vision": ("mlx_vlm", "PIL"),
    "tinker": ("google.protobuf", "zstandard"),
    "dev": ("pytest", "ruff", "mypy"),
}
"""Extra → modules that it brings. The extras `cpu` and `cuda` bring MLX's backends."""
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "google.protobuf": "protobuf",
    "google": "protobuf",
    "PIL": "pillow",
}
BACKENDS = f"{install('cpu')}, or '.[cuda]' on a machine with an NVIDIA GPU"


def is_installed(module: str) -> bool:
    """Return whether a module can be found. Imports its parent package, not the module."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except ValueError:  # a module that a program has made and put there has no spec
        return True


def require(what: str, *modules: str) -> None:
    """Raises ConfigError: one of the modules, which `what` needs, is not installed."""
    for module in modules:
        if not is_installed(module):
            raise ConfigError(needs(what, module))


def needs(what: str, module: str) -> str:
    """Return the line that names the package of a module and how to install it."""
    root = module.partition(".")[0]
    extra = next(
        (extra for extra, modules in EXTRAS.items() if {module, root} & set(modules)), None
    )
    package = DISTRIBUTIONS.get(module, root.replace("_", "-"))
    return (
        f"{what} needs the package {package}:"
        f" {install(extra) if extra else f'pip install {package}'}"
    )


def missing(error: ImportError) -> str | None:
    """Return the line for an import that failed because a package is not installed; None: the
    fault is another one."""
    root = (error.name or "").partition(".")[0]
    if root == "mlx" or "libmlx" in str(error):
        return mlx_backend_advice() or f"MLX cannot be loaded ({error}): {BACKENDS}"
    if (
        isinstance(error, ModuleNotFoundError)
        and root not in ("", "mlx_parallm")
        and not is_installed(root)
    ):
        return needs("this", error.name if error.name in DISTRIBUTIONS else root)
    return None


def wrong_wheel(error: BaseException) -> str | None:
    """Return the line for an error of kernels that were built for another version of macOS; None:
    it is another error."""
    text = str(error)
    if "language version" not in text and "Unable to load kernel" not in text:
        return None
    return (
        f"MLX's kernels do not fit this system ({' '.join(text.split())[:200]}): on macOS install"
        " the wheel for this version (pip install --force-reinstall"
        " --no-cache-dir mlx), or update macOS"
    )


def require_mlx() -> None:
    """Raises ConfigError: no backend of MLX is installed."""
    if advice := mlx_backend_advice():
        raise ConfigError(advice)


def mlx_backend_advice() -> str | None:
    """Return what to install so that MLX can be loaded; None: it can. Loads no MLX into this
    process.

    A wheel's backend is a library beside MLX's modules. Without it, a build from source may
    still have MLX in one piece. Another process tries that.
    """
    spec = importlib.util.find_spec("mlx")
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    if not places:
        return f"MLX is not installed: {BACKENDS if sys.platform == 'linux' else 'pip install mlx'}"
    if sys.platform != "linux" or any(
        next(place.glob("lib*/libmlx.so*"), None) for place in places
    ):
        return None
    tried = subprocess.run(
        [sys.executable, "-c", "import mlx.core"], capture_output=True, check=False
    )
    return (
        f"MLX has no backend here (its libmlx.so is not installed): {BACKENDS}"
        if tried.returncode
        else None
    )


def extras() -> dict[str, bool]:
    """Return which of this package's extras are installed, each as a whole."""
    backends = {"cpu": version("mlx-cpu") is not None, "cuda": has_cuda_backend()}
    return backends | {extra: all(map(is_installed, modules)) for extra, modules in EXTRAS.items()}


def version(package: str) -> str | None:
    """Return the installed version of a package; None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
