"""RunEvents: who hears what, in which order, and what a subscriber that fails costs."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from mlx_parallm.rl_training import events as module
from mlx_parallm.rl_training.events import Noted, RunEvents, SpanEnded, Warned
from tests.rl_training.bandit_run import running

pytestmark = pytest.mark.usefixtures("informative_logs")


def test_subscribers_are_called_in_order_and_one_that_fails_costs_one_warning() -> None:
    events, seen = RunEvents(), []

    def broken(event: Noted) -> None:
        seen.append("broken")
        raise OSError("no terminal")

    events.subscribe(Noted, lambda event: seen.append(f"first {event.text}"))
    events.subscribe(Noted, broken)
    events.subscribe(Noted, lambda event: seen.append("last"))
    events.subscribe(Warned, lambda event: seen.append(event))
    with capture_logs() as logs:
        events.emit(Noted("a"))
        events.emit(Noted("b"))
        events.warn("weights not published", step=3)
    assert seen == [
        "first a",
        "broken",
        "last",
        "first b",
        "broken",
        "last",
        Warned("weights not published", {"step": 3}),
    ]
    assert [line["event"] for line in logs] == ["an event was not handled", "weights not published"]
    assert (logs[0]["problem"], logs[1]["step"]) == ("OSError: no terminal", 3)


def test_a_block_that_raises_has_no_span() -> None:
    events, seen = RunEvents(), []
    events.subscribe(SpanEnded, seen.append)
    with pytest.raises(ValueError, match="x"), events.span("train", 1):
        raise ValueError("x")
    with events.span("train", 2):
        pass
    assert [(span.name, span.step) for span in seen] == [("train", 2)]


def test_a_run_tells_everything_in_its_order(tmp_path: Path) -> None:
    """What the dashboard draws: groups with rewards, publishes, metrics lines, and lanes of
    time."""
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and hasattr(kind, "__slots__")
    ]
    with running(tmp_path / "run", total_steps=2) as run:
        seen: list[object] = []
        for kind in kinds:
            run.stream.subscribe(kind, seen.append)
        run.loop.run()
    names = [event.name if isinstance(event, SpanEnded) else type(event).__name__ for event in seen]
    step = ["wait", "BatchReady", "train", "WeightsPublished", "publish", "StepFinished"]
    assert names == [*step, *step, "checkpoint", "CheckpointSaved"]
    finished = [event for event in seen if isinstance(event, module.StepFinished)]
    assert [event.line["step"] for event in finished] == [1, 2]
    assert all(len(group.rollouts) == 8 for event in finished for group in event.batch.groups)
    spans = [event for event in seen if isinstance(event, SpanEnded)]
    assert all(span.ended >= span.began for span in spans)
    assert [span.began for span in spans] == sorted(span.began for span in spans)
