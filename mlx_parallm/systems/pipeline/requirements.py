"""Check before the first stage of a pipeline what the later ones need.

A training of hours must not end at a package that is missing, a server that does not run, or a disk
that is full. The checks are of packages, the type of the file, the base model's architecture and
chat template, Ollama, places to write and the disk.
"""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from mlx_parallm.deploy.export import llama_server
from mlx_parallm.deploy.export.ollama import OllamaDeployer
from mlx_parallm.errors import ConfigError, EndpointError, ParallmError
from mlx_parallm.models.checkpoint_files import directory_of
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.system.packages import require

OLLAMA_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+){0,2}(:[\w.\-]+)?")
GB = 1e9
LLAMA_CPP = "`pip install xllamacpp`, or put llama-server on the PATH"


def check_packages() -> None:
    """Raises ConfigError: the export has no package to write GGUF with."""
    require("a pipeline's export", "gguf")


def check_ollama(url: str, name: str) -> None:
    """Raises ConfigError: no such name can be, or no Ollama answers there."""
    if OLLAMA_NAME.fullmatch(name) is None:
        raise ConfigError(
            f"--deploy ollama:{name}: a name of Ollama's is letters, digits, '.', '_' and '-'"
        )
    try:
        with closing(OllamaDeployer(url)) as deployer:
            deployer.version()
    except EndpointError as error:
        raise ConfigError(
            f"--deploy ollama:{name}: Ollama has to run before the training begins: {error}. Start"
            " it (`ollama serve`),"
            " set --ollama-url, or deploy into a directory"
        ) from error


def check_place(place: Path, what: str) -> None:
    """Raises ConfigError: a directory cannot be made there."""
    nearest = next(each for each in (place, *place.parents) if each.exists())
    if not nearest.is_dir():
        raise ConfigError(f"{what} {place}: {nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"{what} {place}: {nearest} cannot be written to")


def check_disk(places: list[tuple[Path, float]]) -> None:
    """Check the free space of each file system. `places`: a directory, and the bytes that will lie
    below it.

    Raises ConfigError: it is too small.
    """
    needed: dict[int, tuple[Path, float]] = {}
    for place, size in places:
        nearest = next(each for each in (place, *place.parents) if each.exists())
        device = nearest.stat().st_dev
        needed[device] = nearest, needed.get(device, (nearest, 0.0))[1] + size
    for nearest, size in needed.values():
        if size > (free := shutil.disk_usage(nearest).free):
            raise ConfigError(
                f"the disk of {nearest} has {free / GB:.1f} GB free, and the pipeline's files take"
                f" about {size / GB:.1f} GB: make room, choose a smaller --type, or another --work"
            )


def check_export(base_model: str, check: Callable[[], None]) -> bool:
    """Check that the base can become a GGUF file of its type, as far as its files are here. Return
    whether they are.

    Raises ConfigError.
    """
    if directory_of(base_model) is None:
        return False
    try:
        in_mlx_thread(check)
    except ParallmError as error:
        raise ConfigError(f"the model that is trained could not be exported: {error}") from error
    return True


def remarks(*, judged: bool) -> list[str]:
    """Return what will be left out for lack of a program that is not needed."""
    if llama_server.available():
        return []
    not_evaluated = ", and not asked the held-out prompts" if judged else ""
    return [
        f"no llama.cpp here: the exported file will not be verified{not_evaluated} ({LLAMA_CPP})"
    ]
