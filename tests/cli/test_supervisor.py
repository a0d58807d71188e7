"""The parent of `--restarts N`, with children that are a few lines of Python."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_parallm import cli, daemon
from mlx_parallm.cli import supervisor
from mlx_parallm.cli.supervisor import HEARTBEAT, Supervisor
from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.system.log import RunLog
from tests.signals_reset import default_signals

# A child that appends its arguments to `starts` and then does line n of `deeds` at start n. `saves`
# makes a checkpoint.
CHILD = """
import os, pathlib, signal, sys
here = pathlib.Path(sys.argv[1])
with (here / "starts").open("a") as file:
    print(*sys.argv[2:], file=file)
count = len((here / "starts").read_text().splitlines())
deed = (here / "deeds").read_text().splitlines()[count - 1]
for word in deed.split():
    if word == "saves":
        (here / "run").mkdir(exist_ok=True)
        (here / "run" / "latest").unlink(missing_ok=True)
        (here / "run" / "latest").symlink_to(f"step_{count:06d}")
    elif word == "waits":
        numbers = {signal.SIGTERM, signal.SIGINT}
        (here / "ready").touch()
        for _ in range(2):
            number = signal.sigwait(numbers)
            with (here / "got").open("a") as file:
                print(signal.Signals(number).name, file=file)
    elif word.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, word))
    elif word == "done":
        sys.exit(79)
    else:
        sys.exit(int(word))
"""
PARENT = """
import pathlib, sys
from mlx_parallm.system.log import RunLog, configure_logging
from mlx_parallm.cli.supervisor import Supervisor
here, restarts, resume = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None
run_log = RunLog()
configure_logging(run_log=run_log)
own = ["--resume", resume] if resume else []
command = [sys.executable, "-S", "-c", (here / "child.py").read_text(), str(here)]
parent = Supervisor(own, here / "run", restarts=restarts, resume=resume, command=command, pause_s=0.01, run_log=run_log)
assert "mlx.core" not in sys.modules
sys.exit(parent.run())
"""


def start(here: Path, *deeds: str, restarts: int, resume: str = "") -> subprocess.Popen[str]:
    (here / "deeds").write_text("\n".join(deeds))
    (here / "child.py").write_text(CHILD)
    command = [
        sys.executable,
        "-c",
        PARENT,
        str(here),
        str(restarts),
        *([resume] if resume else []),
    ]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals)


def starts(here: Path) -> list[str]:
    return (here / "starts").read_text().splitlines()


def test_a_run_that_saved_because_memory_was_short_goes_on(tmp_path: Path) -> None:
    parent = start(tmp_path, "saves 75", "75", "done", restarts=2)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == 0, said
    assert said.count("memory was running out") == 2
    assert len((tmp_path / "starts").read_text().splitlines()) == 3


def test_an_abort_is_answered_by_a_start_from_the_newest_checkpoint(tmp_path: Path) -> None:
    parent = start(tmp_path, "SIGABRT", "saves SIGSEGV", "done", restarts=2)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == 0, said
    assert starts(tmp_path) == ["", "--resume auto", "--resume auto"]
    assert "the daemon died of SIGABRT (aborted, as by a failed assertion" in said
    assert "from step_000002; restart 1 of 2" in said, "a new checkpoint gives the full number back"
    [line] = [json.loads(text) for text in (tmp_path / "run" / "run.log").read_text().splitlines()][
        -1:
    ]
    assert "SIGSEGV" in line["event"]


@pytest.mark.slow
@pytest.mark.long
def test_a_crash_loop_ends_and_an_exit_code_is_passed_on(tmp_path: Path) -> None:
    deeds: list[tuple[str, ...]] = [
        ("done",),
        ("1",),
        ("2",),
        ("saves SIGKILL", "SIGKILL", "SIGKILL", "done"),
    ]
    parents = []
    for number, what in enumerate(deeds):
        (tmp_path / str(number)).mkdir()
        parents.append(start(tmp_path / str(number), *what, restarts=2))
    said = [parent.communicate(timeout=60)[1] for parent in parents]
    assert [parent.returncode for parent in parents] == [0, 1, 2, 128 + signal.SIGKILL]
    assert [len(starts(tmp_path / str(number))) for number in range(4)] == [1, 1, 1, 3]
    assert "not started again: 2 restarts brought no new checkpoint" in said[3]


def test_a_fault_of_the_gpu_is_answered_and_a_rest_does_not_count(tmp_path: Path) -> None:
    parent = start(tmp_path, "saves 75", "saves 80", "saves 80", "75", "done", restarts=1)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == 0, said
    assert starts(tmp_path) == ["", *["--resume auto"] * 4]
    assert "the GPU has failed" in said and "from step_000001; restart 1 of 1" in said
    assert "the daemon has ended at a checkpoint" in said and "from step_000003" in said
    (tmp_path / "again").mkdir()
    gives_up = start(tmp_path / "again", "75", "75", restarts=1)
    gives_up.communicate(timeout=30)
    assert gives_up.returncode == 75


@pytest.mark.slow
def test_a_child_that_is_silent_is_killed_and_started_again(tmp_path: Path) -> None:
    """A call in C that holds the interpreter: no thread of the child itself can tell."""
    child = """
import ctypes, pathlib, sys
from mlx_parallm.system.device import heartbeat
here = pathlib.Path(sys.argv[2])
if (here / "once").exists():
    sys.exit(79)
(here / "once").touch()
heartbeat.Heartbeat.directory = pathlib.Path(sys.argv[1])
heartbeat.beat_for_process()
ctypes.PyDLL(None).sleep(300)
"""
    parent = Supervisor(
        [],
        tmp_path / "run",
        restarts=1,
        command=[sys.executable, "-c", child, HEARTBEAT, str(tmp_path)],
        pause_s=0.0,
        silence_s=1.0,
    )
    told: list[str] = []
    parent._tell = lambda event, *_: told.append(event)  # type: ignore[method-assign]
    (tmp_path / "signs").mkdir()
    assert parent._run(tmp_path / "signs") == 0
    assert len(told) == 1 and "the daemon hung: the process gave no sign for" in told[0]


def test_an_exit_that_the_daemon_did_not_make_is_no_success(tmp_path: Path) -> None:
    """os._exit(0) in a reward function looked like a finished run."""
    assert supervisor.DONE == 79 and supervisor.CHILD.endswith("train() or 79)\n")
    (tmp_path / "ends").mkdir()
    parent = start(tmp_path, "saves 0", "done", restarts=1)
    gives_up = start(tmp_path / "ends", "0", "0", restarts=1)
    _, said = parent.communicate(timeout=30)
    assert parent.returncode == 0 and starts(tmp_path) == ["", "--resume auto"]
    assert "ended with exit code 0, but is not done (does a reward" in said
    gives_up.communicate(timeout=30)
    assert gives_up.returncode == 1 and len(starts(tmp_path / "ends")) == 2


@pytest.mark.slow
def test_a_finished_run_whose_end_takes_too_long_is_done() -> None:
    """A reward function that spins: the end limit ended the process with 0, and the finished run
    was started again."""
    stand_in = """
import threading, mlx_parallm.cli
from mlx_parallm.system.signals import EndLimit
mlx_parallm.cli.train = lambda: EndLimit().start(0.0) or threading.Event().wait(30)
"""
    command = [sys.executable, "-c", stand_in + supervisor.CHILD]
    assert subprocess.run(command, timeout=30).returncode == supervisor.DONE


def test_the_older_step_that_was_asked_for_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").symlink_to("step_000009")
    parent = start(
        tmp_path, "SIGABRT", "saves SIGABRT", "done", restarts=1, resume="run/step_000001"
    )
    parent.communicate(timeout=30)
    assert parent.returncode == 0
    first = "--resume run/step_000001"
    assert starts(tmp_path) == [first, first, f"{first} --resume {tmp_path}/run"]


@pytest.mark.parametrize(
    ("end", "code"),
    [("SIGKILL", 128 + signal.SIGKILL), ("80", 0)],  # 80: at a checkpoint, for a rest
)
def test_signals_are_passed_on_each_one_and_end_it(tmp_path: Path, end: str, code: int) -> None:
    parent = start(tmp_path, f"waits {end}", "done", restarts=5)
    for number, count in ((signal.SIGTERM, 0), (signal.SIGINT, 1)):
        wait_for(tmp_path / "got" if count else tmp_path / "ready")
        parent.send_signal(number)
    _, said = parent.communicate(timeout=30)
    assert (tmp_path / "got").read_text().split() == ["SIGTERM", "SIGINT"]
    assert parent.returncode == code, said
    assert len(starts(tmp_path)) == 1, (
        "a death after a request to stop is not a reason to start again"
    )


def test_a_signal_during_a_rest_ends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parent = Supervisor([], tmp_path / "run", restarts=1, rest_s=600.0)
    monkeypatch.setattr(parent, "_one_start", lambda *_: (supervisor.PAUSED, ""))
    monkeypatch.setattr(parent, "_say", lambda *_: parent._stopping.set())  # just before the rest
    assert parent._run(tmp_path) == 0


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("resume", "named"), [(None, True), ("auto", True), ("some/run", False)])
def test_every_start_has_the_name_and_the_port_of_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resume: str | None, named: bool
) -> None:
    made: list[Supervisor] = []

    def run(self: Supervisor) -> int:
        made.append(self)
        return 7

    monkeypatch.setattr(Supervisor, "run", run)
    server, own = ServerConfig(port=0), ["--config", "x", "--restarts", "3"]
    assert supervisor.supervise(own, server, tmp_path / "a run", resume=resume, restarts=3) == 7
    arguments = made[0]._arguments
    assert arguments[:6] == ["--config", "x", "--restarts", "3", "--restarts", "0"]
    assert ('rl_training.run_name="a run"' in arguments) == named
    assert int(arguments[-1].removeprefix("server.port=")) > 0


@pytest.mark.parametrize("resume", ["auto", "run"])
def test_the_command_hands_over_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resume: str
) -> None:
    """Also a run whose directory holds no configuration yet."""
    (tmp_path / "mine.toml").write_text(f'[rl_training]\ncheckpoint_dir = "{tmp_path}"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts.sqlite").touch()
    monkeypatch.chdir(tmp_path)
    given: list[tuple[list[str], Path, str | None, int]] = []

    def supervise(
        arguments: list[str],
        server: ServerConfig,
        run: Path,
        *,
        resume: str | None,
        restarts: int,
        run_log: RunLog,
        rest_s: float,
        silence_s: float,
    ) -> int:
        given.append((arguments, run, resume, restarts))
        return 0

    monkeypatch.setattr(supervisor, "supervise", supervise)
    arguments = ["--config", "mine.toml", "--resume", resume, "--restarts", "2"]
    assert cli.train(arguments) == 0
    assert given == [(arguments, tmp_path / ("mine" if resume == "auto" else "run"), resume, 2)]


def test_own_data_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The arguments of a second start are arguments that `mlx_parallm_train` takes."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "score.py").write_text(
        "def f(completions, **columns): return [0.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    parents: list[Supervisor] = []
    monkeypatch.setattr(Supervisor, "run", lambda parent: parents.append(parent) or 0)
    started: list[tuple[str, str | None, str | None]] = []

    def run_training(config: Config, *, resume: str | None) -> int:
        started.append((config.model.base_path, config.rl_training.run_name, resume))
        return 0

    monkeypatch.setattr(daemon, "run_training", run_training)
    monkeypatch.setattr("mlx_parallm.cli.start._before_mlx", lambda **_: None)
    own = ["--model", "builtin:tiny", "--data", "rows.jsonl", "--reward", "score.py:f"]
    assert cli.train([*own, "--restarts", "2"]) == 0
    [parent] = parents
    again = supervisor.resume_again(parent._first, parent._directory, None, "step_000001")
    assert cli.train([*parent._arguments, *again]) == 0
    assert started == [("builtin:tiny", parent._directory.name, "auto")]
