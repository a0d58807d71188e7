import io
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from mlx_parallm.rl_training.events import RunInfo
from mlx_parallm.rl_training.monitor import display as display_module
from mlx_parallm.rl_training.monitor.display import TrainingDisplay, curl_line, sparkline, trained_tokens_per_s
from mlx_parallm.system.log import configure_logging
from tests.signals_reset import default_signals

INFO = RunInfo(
    run_name="quickstart",
    model="builtin:tiny",
    base_url="http://127.0.0.1:8000",
    total_steps=100,
    example_prompt="Sort: gattaca",
)
STALLED = "environment sum stalled: nothing finished for 75 s with 2 groups in flight (oldest: sum-0-0)"


@pytest.fixture(autouse=True)
def informative_logs():
    configure_logging(level="info")
    yield
    configure_logging(level="error")


def step(number, **changed):
    return {
        "step": number,
        "policy_version": number,
        "reward_mean": 0.3 + 0.004 * number,
        "kl": 0.0123,
        "entropy": 0.456,
        "publish_ms": 0.51,
        "serve_tok_s": 2345.6,
        "tokens": 4000,
        "time_train_s": 2.0,
    } | changed


def on_a_terminal(width=100, **options):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None)
    return TrainingDisplay(console, **options), console


def picture(display, console):
    paper = Console(file=io.StringIO(), width=console.width)
    paper.print(display._render())
    return paper.file.getvalue()


@pytest.fixture
def shown():
    """A display on a terminal after 40 steps of half a second each."""
    now = [0.0]
    display, console = on_a_terminal(clock=lambda: now[0])
    display.start(INFO)
    for number in range(1, 41):
        now[0] += 0.5
        display.update(step(number))
    yield display, console
    display.stop()


def test_the_panel_shows_everything_that_was_promised(shown):
    text = picture(*shown)
    for part in (
        "quickstart · builtin:tiny",
        "40/100",
        "ETA 0:30",
        "0.460 ",
        "0.31 → 0.45",
        "KL 0.0123",
        "entropy 0.456",
        "publish 0.51 ms",
        "policy version 40",
        "served 2,346",
        "trained 2,000",
        "healthy",
        "curl http://127.0.0.1:8000/v1/chat/completions \\",
    ):
        assert part in text
    assert sparkline([0.3 + 0.004 * number for number in range(1, 41)]) in text


def test_the_panel_shows_reward_and_groups_of_each_environment(shown):
    display, _ = shown
    numbers = {"sum": {"reward_mean": 0.625, "groups": 9}, "sort": {"reward_mean": None, "groups": 0}}
    display.update(step(41, environments=numbers))
    assert "sum 0.62 in 9 · sort – in 0" in picture(*shown)
    display.update(step(42, environments={"sum": numbers["sum"]}))
    assert "sum 0.62" not in picture(*shown), "one environment: the reward says it"


def test_the_health_line_changes_between_steps(shown):
    display, console = shown
    display._sources = lambda: [STALLED]
    assert STALLED in " ".join(picture(display, console).split())


def test_a_narrow_terminal_shows_it_too():
    display, console = on_a_terminal(width=44)
    display.start(INFO)
    display.update(step(1))
    text = picture(display, console)
    display.stop()
    assert max(map(len, text.splitlines())) <= 44
    assert "policy version 1" in " ".join(text.split())


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_curl_line_is_a_command_that_a_shell_reads(needs_key):
    info = RunInfo("run", "m", "http://127.0.0.1:8000", 1, 'What\'s "2" + 2?', needs_key=needs_key)
    line = curl_line(info)
    words = shlex.split(line.replace("\\\n", " "))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert words[-1] == '{"model":"default","messages":[{"role":"user","content":"What\'s \\"2\\" + 2?"}]}'
    assert ("Authorization: Bearer $MLX_PARALLM_API_KEY" in words) is needs_key
    assert max(map(len, curl_line(INFO).splitlines())) <= 80


def test_a_sparkline_is_drawn_to_scale():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([-2.0, 0.0, 2.0]) == "▁▅█"
    assert sparkline([5.0, 5.0]) == "▁▁"
    assert sparkline([]) == sparkline([float("nan")]) == ""
    assert sparkline([float(i < 50) for i in range(100)], width=10) == "█████▁▁▁▁▁"


def test_trained_tokens_are_counted_against_training_time():
    assert trained_tokens_per_s({"tokens": 300, "time_train_s": 2.0}) == 150.0
    assert trained_tokens_per_s({"tokens": 300}) is None
    assert trained_tokens_per_s({"tokens": 300, "time_train_s": 0.0}) is None


def test_without_a_terminal_each_step_is_one_line():
    now = [0.0]
    display = TrainingDisplay(Console(file=io.StringIO()), clock=lambda: now[0])
    with capture_logs() as logs:
        display.start(INFO)
        for number in (1, 2):
            now[0] += 2.0
            display.update(step(number))
        display.note("checkpoint saved")
        display.stop()
    events = [entry["event"] for entry in logs]
    assert events == ["training", "talk to the model", "step", "step", "checkpoint saved"]
    assert "\n" not in logs[1]["command"]
    assert shlex.split(logs[1]["command"])[0] == "curl"
    assert logs[3] == {
        "event": "step",
        "part": "display",
        "log_level": "info",
        "step": 2,
        "policy_version": 2,
        "reward_mean": 0.308,
        "kl": 0.0123,
        "entropy": 0.456,
        "publish_ms": 0.51,
        "served_tok_s": 2346.0,
        "trained_tok_s": 2000.0,
        "eta": "3:16",
        "health": "healthy",
    }


def test_without_a_terminal_a_stall_is_told_once_while_waiting():
    health: list[str | None] = [None]
    display = TrainingDisplay(Console(file=io.StringIO()), sources=lambda: health)
    display.start(INFO)
    with capture_logs() as logs:
        display.tick()
        health[0] = STALLED
        display.tick()
        health[0] = STALLED.replace("75", "76")
        assert health[0] != STALLED
        display.tick()
        health[0] = None
        display.tick()
    assert [(entry["log_level"], entry["health"]) for entry in logs] == [("warning", STALLED), ("info", "healthy")]


def test_a_resumed_run_counts_the_pace_from_its_first_step_which_may_be_the_rest_of_one():
    now = [0.0]
    display, console = on_a_terminal(clock=lambda: now[0])
    display.start(RunInfo("r", "m", "http://x", 100, "hi", start_step=90))
    assert "90/100" in picture(display, console)
    now[0] = 60.0
    display.update(step(91))
    assert "ETA –" in picture(display, console)
    now[0] = 63.0
    display.update(step(92))
    assert "ETA 0:24" in picture(display, console)
    display.stop()


def test_a_display_that_fails_becomes_the_plain_one():
    class Broken(io.StringIO):
        broken = False

        def write(self, text):
            if self.broken:
                raise OSError(5, "Input/output error")
            return super().write(text)

    file = Broken()
    display = TrainingDisplay(Console(file=file, force_terminal=True, width=80))
    display.start(INFO)
    file.broken = True
    with capture_logs() as logs:
        display.stop()
        display.update(step(1))
        display.update({"no": "step"})  # a line that nobody can show
        display.update(step(2))
    assert [entry["event"] for entry in logs] == [
        "display failed, continuing with plain lines",
        "step",
        "display failed, continuing with plain lines",
        "step",
    ]


def test_a_terminal_that_goes_away_between_steps_is_noticed_by_the_refresh(monkeypatch):
    monkeypatch.setattr(display_module, "REFRESHES_PER_SECOND", 200)
    display, _ = on_a_terminal()
    with capture_logs() as logs:
        display.start(INFO)
        display._sources = lambda: 1 / 0
        display._refresher.join(20)
    assert [entry["event"] for entry in logs] == ["display failed, continuing with plain lines"]
    display.stop()


def test_a_display_that_cannot_start_leaves_the_streams_alone():
    before = sys.stdout, sys.stderr
    display, _ = on_a_terminal(sources=lambda: 1 / 0)
    display.start(INFO)
    assert (sys.stdout, sys.stderr) == before
    assert not display._refresher.is_alive()
    display.stop()


PROGRAM = """
import sys, time
from tests.rl_training.monitor.test_display import INFO, step
from mlx_parallm.system.log import configure_logging
from mlx_parallm.rl_training.monitor import display as display_module
from mlx_parallm.rl_training.events import RunInfo
from mlx_parallm.rl_training.monitor.display import TrainingDisplay
display = TrainingDisplay()
try:
    display.start(INFO)
    display.update(step(1))
    print("a line from elsewhere", file=sys.stderr)
    while True:
        time.sleep(0.05)
except KeyboardInterrupt:
    display.stop()
    print("INTERRUPTED")
    sys.exit(7)
"""


def test_ctrl_c_reaches_the_trainer_and_the_cursor_comes_back():
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=default_signals,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(terminal)
    seen = b""
    deadline = time.monotonic() + 60
    interrupted = False
    try:
        while time.monotonic() < deadline:
            if select.select([main], [], [], 0.2)[0]:
                try:
                    seen += os.read(main, 65536)
                except OSError:  # the other side has closed
                    break
            if not interrupted and b"a line from elsewhere" in seen and b"healthy" in seen:
                process.send_signal(signal.SIGINT)
                interrupted = True
        assert process.wait(20) == 7, seen.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(main)
    text = seen.decode(errors="replace")
    assert "INTERRUPTED" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # shown after it was hidden


ROWS = {"reward_mean": None, "sequences": 64, "groups": 0, "kl": None, "loss": 0.5}


@pytest.mark.parametrize(
    ("numbers", "name", "curve"),
    [({"rewards/accuracies": 0.75}, "accuracy", "0.750"), ({"loss": 1.25}, "loss", "1.250")],
)
def test_a_run_on_rows_shows_its_accuracy_or_its_loss(numbers, name, curve):
    display, console = on_a_terminal()
    display.start(INFO)
    display.update(step(1, **ROWS | numbers))
    drawn = picture(display, console)
    display.stop()
    assert f"{name} {curve}" in " ".join(drawn.split())
    assert "reward" not in drawn
    with capture_logs() as logs:
        plain = TrainingDisplay(Console(file=io.StringIO()))
        plain.update(step(1, **ROWS | {"rewards/accuracies": 0.75, "heldout_score": 0.5}))
    assert (logs[0]["rewards/accuracies"], logs[0]["heldout_score"], logs[0]["loss"]) == (0.75, 0.5, 0.5)
    assert "reward_mean" not in logs[0]
