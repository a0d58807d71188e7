"""TaskDraws: what draws the task of each training group, for a source that asks them in no order of
its own. `EnvironmentQueue` asks it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.types import RolloutGroup


class FinishedGroup(Protocol):
    """The part of a `runner.GroupResult` that draws use."""

    @property
    def plan(self) -> "Planned": ...
    @property
    def group(self) -> RolloutGroup: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def may_pass(self) -> bool: ...


class Planned(Protocol):
    @property
    def index(self) -> int | None: ...


class TaskDraws(Protocol):
    """The lock of its environment's queue guards it."""

    def draw(self, index: int, first: int) -> int:
        """Return the number of the task of group `index`; the groups below `first` are settled."""
        ...

    def finished(self, result: FinishedGroup) -> None:
        """Count what a group earned."""
        ...

    def rewind(self) -> None:
        """Forget which groups were in flight: they are played again."""
        ...

    def keep(self, run: Path) -> None:
        """Continue where the run in a directory has left it, and keep it there. Raises
        CheckpointError: a damaged file, or one of other tasks."""
        ...

    def numbers(self) -> Mapping[str, Any]:
        """Return numbers for a line of metrics.jsonl; those of several are added."""
        ...
