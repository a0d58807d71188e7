"""Who stands back for whom, and until when. The clock is the test's."""

import threading
from collections.abc import Callable

import pytest

from mlx_parallm.system import serve_priority as module
from mlx_parallm.system.serve_priority import Turns
from tests.clock import Clock

SOON, LONG = 0.05, 10.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(module, "perf_counter", own)
    return own


def started(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread, within: float) -> bool:
    thread.join(within)
    return not thread.is_alive()


def step_of(turns: Turns, clock: Clock, seconds: float) -> None:
    with turns.step():
        clock.now += seconds


@pytest.mark.parametrize("priority", ["serve", "train"])
def test_nobody_waits_longer_than_for_its_own_last_piece_of_work(
    clock: Clock, priority: str
) -> None:
    turns = Turns(priority)  # type: ignore[arg-type]
    with turns.training(), turns.step():
        clock.now += 0.01
        turns.after_evaluation()  # the engine is in its step all the while
    assert ended(started(lambda: step_of(turns, clock, 0.01)), LONG)


@pytest.mark.parametrize(
    ("priority", "trainer_waits", "engine_waits"),
    [("balanced", True, False), ("serve", True, False), ("train", False, True)],
)
def test_only_the_second_one_stands_back(
    clock: Clock, priority: str, trainer_waits: bool, engine_waits: bool
) -> None:
    turns = Turns(priority)  # type: ignore[arg-type]
    with turns.training():
        engine = started(lambda: step_of(turns, clock, 30.0))
        assert ended(engine, SOON) is not engine_waits
        trainer = started(turns.after_evaluation)
        assert ended(trainer, SOON) is not trainer_waits
        turns.engine_idle()
        assert ended(trainer, LONG)
        assert ended(engine, SOON) is not engine_waits  # until the training step ends
    assert ended(engine, LONG)


@pytest.mark.parametrize("priority", ["balanced", "serve", "train"])
def test_who_is_alone_never_waits(clock: Clock, priority: str) -> None:
    turns = Turns(priority)  # type: ignore[arg-type]
    assert ended(started(lambda: step_of(turns, clock, 30.0)), LONG)
    turns.engine_idle()
    with turns.training():
        clock.now += 30.0
        assert ended(started(turns.after_evaluation), LONG)


def test_the_trainer_rests_until_the_chat_has_ended(clock: Clock) -> None:
    turns = Turns("chat")
    with turns.training():
        turns.chats(True)
        clock.now += LONG
        trainer = started(turns.after_evaluation)
        assert not ended(trainer, SOON)
        turns.chats(False)
        assert ended(trainer, LONG)
        turns.chats(True)
        clock.now += SOON / module.REST  # and no longer than so many times its piece
        assert ended(started(turns.after_evaluation), LONG)
