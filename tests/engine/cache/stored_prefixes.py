"""Engines that keep their prefixes on disk, and what they have stored."""

from dataclasses import replace
from pathlib import Path

from mlx_parallm.engine.prefix_disk.disk import PrefixDisk
from mlx_parallm.engine.prefix_disk.files import BlockFiles
from mlx_parallm.types import Completion
from tests.engine.helpers import (
    Served,
    qwen3_model,
    ragged_prompts,
    request,
    run,
    serve,
)

PROMPT = ragged_prompts(1, seed=3, shortest=300, longest=300)[0]


NAME = "ab12" * 10  # of a block


OPEN: list[PrefixDisk] = []


def started(
    folder: Path, model=None, *, recurrent: bool = False, most: int = 1 << 26, **options
) -> Served:
    """An engine as a new process has it."""
    disk = PrefixDisk(BlockFiles(folder, most), "this model", recurrent=recurrent)
    OPEN.append(disk)
    return serve(model or qwen3_model(), prefix_disk=disk, **options)


def answer(
    served: Served, prompt: list[int], *, salt: str | None = None, adapter: str | None = None
) -> Completion:
    """A greedy answer; all that it leaves is on disk then."""
    asked = request("a", prompt, adapter=adapter, max_tokens=6, temperature=0.0, ignore_eos=True)
    [done] = run(served.engine, [replace(asked, cache_salt=salt)])["a"].completions
    if served.engine.on_disk.arrivals is not None:
        served.engine.on_disk.arrivals.disk.settle()
    return done


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
