import dataclasses
import io
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from structlog.testing import capture_logs

from mlx_parallm.rl_training.events import CheckpointSaved, RunInfo
from mlx_parallm.rl_training.monitor import display as display_module
from mlx_parallm.rl_training.monitor.display import TrainingDisplay, curl_line, trained_tokens_per_s
from mlx_parallm.rl_training.monitor.drawing import sparkline
from mlx_parallm.system.log import RunLog, configure_logging
from tests.pages import section
from tests.signals_reset import default_signals

pytestmark = pytest.mark.usefixtures("informative_logs")

INFO = RunInfo(
    run_name="quickstart",
    model="builtin:tiny",
    base_url="http://127.0.0.1:8000",
    total_steps=100,
    example_prompt="Sort: gattaca",
)
STALLED = (
    "environment sum stalled: nothing finished for 75 s with 2 groups in flight (oldest: sum-0-0)"
)


def step(number, **changed):
    return {
        "step": number,
        "policy_version": number,
        "reward_mean": 0.3 + 0.004 * number,
        "kl": 0.0123,
        "entropy": 0.456,
        "publish_ms": 0.51,
        "learning_rate": 5e-4,
        "serve_tok_s": 2345.6,
        "tokens": 4000,
        "time_train_s": 2.0,
    } | changed


def on_a_terminal(width=100, **options):
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=40, color_system=None
    )
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
        "0:20 so far · 0.5 s a step",
        "KL 0.0123",
        "entropy 0.456",
        "learning rate 0.0005",
        "publish 0.51 ms",
        "version 40",
        "served 2,346",
        "trained 2,000",
        "healthy",
        "curl http://127.0.0.1:8000/v1/chat/completions \\",
    ):
        assert part in text
    assert sparkline([0.3 + 0.004 * number for number in range(1, 41)]) in text


def test_the_panel_shows_reward_and_groups_of_each_environment(shown):
    display, _ = shown
    numbers = {
        "sum": {"reward_mean": 0.625, "groups": 9},
        "sort": {"reward_mean": None, "groups": 0},
    }
    display.update(step(41, environments=numbers))
    assert "sum 0.62 (9 groups) · sort – (0 groups)" in picture(*shown)
    display.update(step(42, environments={"sum": numbers["sum"]}))
    assert "sum 0.62" not in picture(*shown), "one environment: the reward says it"


def labels(text):
    """The first column of a panel with several environments, the longest label."""
    body = text[text.index("\nstep") : text.index("talk to it")].splitlines()
    return {line[: len("environments")].strip() for line in body} - {""}


def test_every_line_of_the_panel_is_on_its_page():
    page = section("watching.md", "The panel")
    display, console = on_a_terminal(width=80)
    display.start(dataclasses.replace(INFO, checkpoint_every=10, evaluate_every=10))
    each = {"reward_mean": 0.5, "groups": 4}
    display.update(step(1, environments={"a": each, "b": each}, **{"eval/score": 0.5}))
    drawn = labels(picture(display, console))
    display.stop()
    assert drawn >= {"step", "time", "reward", "held out", "health"}
    rows = set(
        re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)))
    )
    assert drawn <= rows, "say in docs/watching.md#the-panel what these lines are"
    assert labels(page.split("```")[1]) == drawn, (
        "the panel on the page has other lines: show a new one"
    )
    assert rows - drawn == {"accuracy", "loss", "talk to it while it learns"}, (
        "lines that the panel does not have"
    )


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
    assert "version 1 " in " ".join(text.split())


PROMPT = 'What\'s "2" + 2,\n in `$HOME` \\ or in 漢字漢字漢字漢字?'


@pytest.mark.parametrize("needs_key", [False, True])
def test_the_curl_line_can_be_pasted_at_any_width(needs_key):
    """bash reads the same words from the lines that the panel draws; a prompt of over 12
    characters was folded."""
    info = RunInfo("run", "m", "http://127.0.0.1:8000", 1, PROMPT, needs_key=needs_key)
    told = "".join(f"{drawn(info, width)}\n" for width in WIDTHS) + curl_line(info)
    script = f"curl() {{ printf '%s\\0' \"$@\" END; }}\n{told}"
    done = subprocess.run(
        ["bash", "-uc", script],
        capture_output=True,
        text=True,
        env={"MLX_PARALLM_API_KEY": "k e y"},
    )
    assert not done.stderr
    commands = [words.split("\0")[:-1] for words in done.stdout.split("END\0")[:-1]]
    key = ["-H", "Authorization: Bearer k e y"] if needs_key else []
    url, body = "http://127.0.0.1:8000/v1/chat/completions", {"role": "user", "content": PROMPT}
    assert [words[:-1] for words in commands] == [
        [url, "-H", "Content-Type: application/json", *key, "-d"]
    ] * 7
    assert [json.loads(words[-1])["messages"] for words in commands] == [[body]] * 7


WIDTHS = (24, 44, 60, 80, 81, 120)


def drawn(info, width):
    """The command as a terminal shows it: nothing is folded by the terminal."""
    display, console = on_a_terminal(width=width)
    display.start(info)
    lines = picture(display, console).rstrip().splitlines()
    display.stop()
    assert max(cell_len(line) for line in lines) <= width
    return "\n".join(lines[next(n for n, line in enumerate(lines) if line.startswith("curl")) :])


def test_a_long_prompt_does_not_push_the_panel_off_the_screen():
    info = RunInfo("run", "m", "http://127.0.0.1:8000", 1, "a word or two " * 100)
    command = curl_line(info, 80)
    assert len(command.splitlines()) < 8 and command.endswith("a word\"}]}'")


@pytest.mark.parametrize(
    ("values", "arrow"),
    [
        ([0.375], ""),
        ([0.375, 0.48], "0.38 → 0.48"),
        ([0.0, 0.5, 0.75, 1.0], "0.25 → 0.88"),  # (0 + 0.5) / 2 and (0.75 + 1) / 2
        ([0.0, 0.3, 0.6, 0.9, 1.0], "0.15 → 0.95"),  # the middle one is in neither
        ([0.0] * 5 + [0.5] * 5 + [1.0] * 5, "0.00 → 1.00"),
    ],
)
def test_the_first_and_the_last_values_do_not_overlap(values, arrow):
    """Two evaluations at 0.375 and 0.48 were shown as "0.43 → 0.43": both means had both values."""
    display, console = on_a_terminal()
    display.start(INFO)
    for number, value in enumerate(values, 1):
        display.update(step(number, reward_mean=0.5, **{"eval/score": value}))
    [line] = [
        line for line in picture(display, console).splitlines() if line.startswith("held out")
    ]
    display.stop()
    assert line.rstrip().endswith(arrow) and ("→" in line) is bool(arrow)


def test_the_next_checkpoint_and_the_next_evaluation_are_named():
    info = dataclasses.replace(INFO, checkpoint_every=40, evaluate_every=30, evaluates_at_end=True)
    display, console = on_a_terminal()
    display.start(info)
    text = picture(display, console)
    assert "none yet · next after step 40" in text and "next after step 30" in text
    display.update(step(61, **{"eval/score": 0.5}))
    display.saved(CheckpointSaved(60, Path("checkpoints/run/step_000060")))
    text = picture(display, console)
    assert "of step 60 · next after step 80" in text and "· next after step 90" in text
    display.update(step(100))
    text = picture(display, console)
    display.stop()
    assert "next after" not in text
    assert [info.next_evaluation(step) for step in (89, 90, 99, 100)] == [90, 100, 100, None]
    assert dataclasses.replace(info, evaluate_every=0).next_evaluation(0) == 100
    assert dataclasses.replace(info, evaluates_at_end=False).next_evaluation(90) is None


def test_an_evaluation_stands_above_the_panel_and_not_under_its_health():
    display, console = on_a_terminal()
    display.start(INFO)
    display.note("evaluation of step 0 (version 0): sum: accuracy 0.300 [0.180, 0.454]")
    display.update(step(1))
    text = picture(display, console)
    display.stop()
    assert "evaluation of step 0" not in text
    assert "evaluation of step 0 (version 0): sum" in console.file.getvalue()


def test_beside_a_panel_every_line_goes_to_the_run_log_alone(tmp_path, capsys):
    """In a terminal run.log had one line, in a pipe all of them."""
    with RunLog() as run_log:
        run_log.open(tmp_path)
        configure_logging(level="info", run_log=run_log)
        display, _ = on_a_terminal()
        display.start(INFO)
        display.update(step(1))
        display.note("an evaluation")
        display.saved(CheckpointSaved(1, Path("step_000001")))
        display._sources = lambda: [STALLED]
        display.tick()
        display.stop()
    events = [json.loads(line) for line in (tmp_path / "run.log").read_text().splitlines()]
    names = [
        "training",
        "talk to the model",
        "step",
        "an evaluation",
        "saved step_000001",
        "health",
    ]
    assert [event["event"].partition(": ")[0] for event in events] == names
    assert (events[2]["step"], events[5]["level"]) == (1, "warning")
    assert not any(key.startswith("_") for event in events for key in event)
    assert capsys.readouterr().err == ""


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


def test_nobody_is_sent_to_a_model_that_learns_to_judge():
    display, console = on_a_terminal(pages=["http://127.0.0.1:8000/dashboard"])
    with capture_logs() as logs:
        display.start(dataclasses.replace(INFO, example_prompt=""))
        display.update(step(1))
        text = picture(display, console)
        display.stop()
    assert not any("talk to" in entry["event"] for entry in logs)
    assert "watch it:" in text and "talk to it" not in text


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
    talk, _, command = events.pop(1).partition(": ")
    assert talk == "talk to the model" and events == [
        "training",
        "step",
        "step",
        "checkpoint saved",
    ]
    assert "\n" not in command and shlex.split(command)[0] == "curl"
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
    assert [(entry["log_level"], entry["health"]) for entry in logs] == [
        ("warning", STALLED),
        ("info", "healthy"),
    ]


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
    display.start(INFO)
    with capture_logs() as logs:
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
    assert (logs[0]["rewards/accuracies"], logs[0]["heldout_score"], logs[0]["loss"]) == (
        0.75,
        0.5,
        0.5,
    )
    assert "reward_mean" not in logs[0]


SICK = {
    "skipped_steps": 1,
    "kl": 2.0,
    "truncated_fraction": 0.5,
    "dropped_stale": 40,
    "groups": 16,
    "publish_timeouts": 3,
    "eval/score": 0.5,
}


def test_four_findings_leave_the_command_and_the_page_on_a_screen_of_24_rows():
    """The gravest is shown, and the command that shows the others."""
    info = RunInfo(
        "a-run-with-a-long-name-20261128",
        "builtin:tiny",
        "http://127.0.0.1:8000",
        180,
        "Sort: hgfa and then reverse what you have sorted, and answer with nothing but the letters",
        needs_key=True,
        checkpoint_every=50,
        evaluate_every=20,
    )
    display, console = on_a_terminal(width=80, pages=("http://127.0.0.1:8000/dashboard#key=abc",))
    display.start(info)
    two = {name: {"groups": 8, "reward_mean": 0.5} for name in ("sum", "sort", "reverse")}
    for number in range(1, 6):
        display.update(step(number, **SICK, environments=two))
    text = picture(display, console)
    display.stop()
    lines = text.rstrip().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert lines[-1].startswith("watch it: http") and "curl" in text
    flat = " ".join(text.split())
    assert "not finite" in flat and "KL running away" not in flat and "stale rollouts" not in flat
    assert "mlx_parallm explain" in flat and "(+" in flat


def test_a_held_out_loss_is_shown_as_a_loss():
    display, console = on_a_terminal()
    display.start(INFO)
    display.update(step(1, **ROWS | {"eval/loss": 0.058, "heldout_score": -0.058}))
    text = picture(display, console)
    display.stop()
    assert "0.058" in text and "-0.058" not in text


def test_a_prompt_with_a_picture_is_asked_with_it():
    picture_part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [picture_part, {"type": "text", "text": "How many?"}]
    info = RunInfo("run", "m", "http://127.0.0.1:8000", 1, content)
    body = json.loads(shlex.split(curl_line(info))[-1])
    assert body["messages"] == [{"role": "user", "content": content}]
