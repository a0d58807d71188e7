"""What a rank other than 0 watches while it has nothing to do: a real connection, no model."""

import os
import socket
import threading
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.distributed import follower
from mlx_parallm.distributed.follower import Follower, follow
from mlx_parallm.distributed.ranks import EXIT_LOST, BeginRun, JoinedRanks, Publish
from mlx_parallm.errors import EngineUnavailableError, RankLostError
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.system.signals import EndLimit


class Serving:
    """Loads nothing. `alive`: whether its engine is."""

    turns, alive = Turns(1.0), True

    def load(self, *, quantize: bool) -> None: ...

    def check(self) -> None:
        if not self.alive:
            raise EngineUnavailableError("the engine thread has ended")

    def check_memory(self) -> None: ...


class Part(Follower):
    """Of a run whose model is nowhere."""

    def __init__(
        self, begin: BeginRun, model: Any, ranks: JoinedRanks, stop: threading.Event, *_: Any
    ) -> None:
        self._ranks, self._config, self._stop = ranks, begin.config, stop
        self._serving: Any = Serving()
        self._quantize, self._weights = False, None

    def _publish(self, version: int) -> None:
        self._weights = SimpleNamespace()  # type: ignore[assignment]
        self._serving.alive = version < 5


@pytest.fixture
def follows(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[JoinedRanks, Connection, list[tuple[int | None, float]]]]:
    """Rank 1 of two; rank 0's end of its connection; the limits (exit code, seconds) that were
    started."""
    limits: list[tuple[int | None, float]] = []
    monkeypatch.setattr(
        EndLimit, "start", lambda limit, seconds, *_: limits.append((limit._exit_code, seconds))
    )
    monkeypatch.setattr(follower, "Follower", Part)
    monkeypatch.setattr(follower, "build_trainer", lambda *_, **__: None)
    leader, own = Pipe()
    ranks = JoinedRanks.__new__(JoinedRanks)
    ranks.rank, ranks.size, ranks._then = 1, 2, ""
    ranks._silent = []
    ranks._connections, ranks._watched = [own], [socket.socket(fileno=os.dup(own.fileno()))]
    config = parse_config(
        {"server": {"drain_timeout_s": 5.0}, "rl_training": {"on_rank_lost": "continue"}}
    )
    leader.send(BeginRun(config, ""))
    leader.send([(False, ""), (False, "")])  # rank 0's answer: nobody has an error
    yield ranks, leader, limits
    for end in (leader, own, *ranks._watched):
        end.close()


def run(ranks: JoinedRanks) -> None:
    follow(ModelConfig(), ranks, threading.Event(), lambda _: pytest.fail("not asked"))


def test_a_rank_whose_engine_has_died_ends_between_two_steps(follows: Any) -> None:
    ranks, leader, limits = follows
    leader.send(Publish(4))
    leader.send(Publish(5))
    end_of_run = threading.Timer(5, leader.send, [None])
    end_of_run.start()
    with pytest.raises(EngineUnavailableError, match="engine thread"):
        run(ranks)
    end_of_run.cancel()
    assert limits == [(EXIT_LOST, follower.END_S + 5.0)]


def test_the_end_of_the_run_has_a_limit_on_every_rank(follows: Any) -> None:
    """Foreign threads may keep a process from ending."""
    ranks, leader, limits = follows
    leader.send(None)
    run(ranks)
    assert limits == [(0, follower.END_S + 5.0)]


def test_what_is_advised_when_rank_0_is_gone_is_what_its_settings_do(
    follows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, leader, _ = follows
    monkeypatch.setattr(Serving, "load", lambda *_, **__: leader.close())
    with pytest.raises(RankLostError, match="rank 0 of 2") as lost:
        run(ranks)
    assert "--resume auto" not in str(lost.value)


def test_a_dead_engine_is_found(follows: Any) -> None:
    ranks, _, _ = follows
    part = Part(BeginRun(parse_config({}), ""), None, ranks, threading.Event())
    part._publish(5)
    with pytest.raises(EngineUnavailableError):
        part._check()
