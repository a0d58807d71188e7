"""Sessions of clients, and the sampling sessions in them. Server's thread only."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_parallm.server.errors import ServerBusyError

# sampling sessions; the one that was not used for the longest time makes room
MOST_SAMPLERS = 16_384
MOST_LINES = 1024  # copies of a sampling client that have their own line of completions
KEPT_EVENTS = 1 << 17  # events kept for an unread line


@dataclass
class ClientSession:
    session_id: str
    user_metadata: Mapping[str, Any] | None
    display_name: str | None
    project_id: str | None
    created: float
    last_seen: float
    finished: str | None = None
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class Completions:
    """The ended samples of one client, for `retrieve_futures`: events from number `first` + 1 on.

    `running`: requests that have begun and not ended.
    """

    running: int = 0
    first: int = 0
    events: list[dict[str, object]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, event: dict[str, object]) -> None:
        self.events.append(event)
        if len(self.events) > KEPT_EVENTS:  # its client asks for each sample instead
            gone = KEPT_EVENTS // 2
            del self.events[:gone]
            self.first += gone
        self.news.set()


@dataclass
class Sampler:
    """A sampling session. `adapter`: None = the base. `weights`: of the model, when they were
    saved."""

    sampler_id: str
    base_model: str
    model_path: str | None = None
    adapter: str | None = None
    run: str | None = None
    directory: Path | None = None  # a named checkpoint's
    weights: Callable[[], tuple[int, int] | None] = lambda: None
    completions: dict[int, Completions] = field(default_factory=dict)  # by copied client

    @property
    def session_id(self) -> str:
        """The id of the client's session that made it."""
        return self.sampler_id.partition(":")[0]

    @property
    def running(self) -> bool:
        return any(line.running for line in self.completions.values())

    def line(self, clone: int) -> Completions:
        """The completions of one copy of the client. Raises ServerBusyError: too many copies."""
        line = self.completions.get(clone)
        if line is None:
            if len(self.completions) >= MOST_LINES:
                raise ServerBusyError(
                    f"a sampling session has at most {MOST_LINES} copies of its client"
                )
            line = self.completions[clone] = Completions()
        return line


class SamplingSessions:
    """The samplers by id, at most MOST_SAMPLERS."""

    def __init__(self) -> None:
        # the one that was used last is the last
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()

    def __len__(self) -> int:
        return len(self._samplers)

    def get(self, sampler_id: str) -> Sampler | None:
        """Find one, which is then in use."""
        sampler = self._samplers.get(sampler_id)
        if sampler is not None:
            self._samplers.move_to_end(sampler_id)
        return sampler

    def add(self, sampler: Sampler) -> Sampler | None:
        """Keep it; return the one that made room, whose samples have ended."""
        self._samplers[sampler.sampler_id] = sampler
        if len(self._samplers) <= MOST_SAMPLERS:
            return None
        gone = next(
            (each for each in self._samplers.values() if each is not sampler and not each.running),
            None,
        )
        if gone is not None:
            del self._samplers[gone.sampler_id]
        return gone

    def drop(self, sampler_id: str) -> None:
        self._samplers.pop(sampler_id, None)

    def drop_live(self, run: str) -> None:
        """Drop those with weights of this run that have no name."""
        for sampler_id in [
            key
            for key, each in self._samplers.items()
            if each.run == run and each.directory is None
        ]:
            del self._samplers[sampler_id]
