"""The parent of `--ranks N`, with children that are a few lines of Python. tests/integration has
real ranks."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlx_parallm import cli
from mlx_parallm.cli import rank_launcher
from mlx_parallm.errors import RankLostError
from tests.altered import Altered
from tests.signals_reset import default_signals
from tests.waiting import until

# A rank that writes what it was started with to `NUMBER OF THE START.RANK`, then does what `deeds`
# has for the two.
CHILD = """
import json, os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ.get("MLX_RANK")
start = 2 if "--resume" in sys.argv else 1
hosts = json.load(open(os.environ["MLX_HOSTFILE"])) if rank else None
asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
(here / f"new.{start}.{rank}").write_text(json.dumps([sys.argv[2:], hosts, os.getpid()]))
(here / f"new.{start}.{rank}").rename(here / f"{start}.{rank}")
# It waits for files of other processes and for signals: it can only look.
deed = json.loads((here / "deeds").read_text())[f"{start}.{rank}"]
def is_there(process):
    try:
        return os.kill(process, 0) is None
    except ProcessLookupError:
        return False
if deed in ("waits", "fails", "outlives"):
    while not asked:
        time.sleep(0.01)
    if deed == "outlives":
        while not (here / "asked.1").exists() or is_there(json.loads((here / f"{start}.1").read_text())[2]):
            time.sleep(0.01)
        time.sleep(0.3)  # for what the parent may send then
    (here / f"new.asked.{rank}").write_text(" ".join(asked))
    (here / f"new.asked.{rank}").rename(here / f"asked.{rank}")
    sys.exit(2 if deed == "fails" else 0)
elif deed == "held":
    while not (here / "go").exists():
        time.sleep(0.01)
elif deed == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
elif deed == "dies":
    while not (here / f"{start}.0").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
else:
    sys.exit(deed)
"""
PARENT = """
import pathlib, sys
from mlx_parallm.system.log import configure_logging
from mlx_parallm.cli.rank_launcher import LocalRanks
here = pathlib.Path(sys.argv[1])
configure_logging()
child = (here / "child.py").read_text()
if "watches" in sys.argv:
    child = "from mlx_parallm.cli.rank_launcher import end_with_parent; end_with_parent()" + child
command = [sys.executable, *([] if "watches" in sys.argv else ["-S"]), "-c", child, str(here)]
continues, count = "continues" in sys.argv, int(sys.argv[2])
parent = LocalRanks(["--config", "x"], here / "run", count, continues=continues, command=command)
assert "mlx.core" not in sys.modules
sys.exit(parent.run())
"""


def write(here: Path, deeds: dict[str, object]) -> None:
    here.mkdir(exist_ok=True)
    (here / "deeds").write_text(json.dumps(deeds))
    (here / "child.py").write_text(CHILD)


def start(here: Path, count: int, deeds: dict[str, object], *flags: str) -> subprocess.Popen[str]:
    write(here, deeds)
    command = [sys.executable, "-c", PARENT, str(here), str(count), *flags]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals)


def test_a_rank_that_dies_ends_the_others_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    deeds = {"1.0": "waits", "1.1": "dies", "1.2": "waits"}
    stops = start(tmp_path / "stops", 3, deeds)
    goes_on = start(tmp_path / "continues", 2, deeds | {"2.None": 0}, "continues")
    _, said = stops.communicate(timeout=30)
    assert stops.returncode == 128 + signal.SIGKILL, said
    assert "rank 1 of 3 died of SIGKILL (killed, as by the system when memory runs out)" in said
    assert "start again with --resume auto" in said
    here = tmp_path / "stops"
    started = [json.loads((here / f"1.{rank}").read_text()) for rank in range(3)]
    assert [arguments for arguments, _, _ in started] == [["--config", "x", "--ranks", "1"]] * 3
    assert all(hosts == started[0][1] for _, hosts, _ in started)
    assert len({host for [host] in started[0][1]}) == 3, "an address for each"
    assert [(here / f"asked.{rank}").read_text() for rank in (0, 2)] == ["SIGTERM"] * 2
    assert not list(here.glob("2.*"))

    _, said = goes_on.communicate(timeout=30)
    assert goes_on.returncode == 0, said
    assert "starting again with 1 from the beginning: there is no checkpoint yet" in said
    arguments, hosts, _ = json.loads((tmp_path / "continues/2.None").read_text())
    assert arguments == ["--config", "x", "--ranks", "1", "--resume", "auto"]
    assert hosts is None, "one rank is a process without MLX's ring"


def test_ranks_whose_sum_stood_still_are_started_again(tmp_path: Path) -> None:
    """All of them, for none has died; not for ever."""
    deeds: dict[str, object] = {"1.0": 75, "1.1": "waits", "2.0": 0, "2.1": 0}
    goes_on = start(tmp_path / "continues", 2, deeds, "continues")
    stops = start(tmp_path / "stops", 2, deeds)
    always = {f"{turn}.{rank}": 75 for turn in (1, 2) for rank in range(2)}
    ends = start(tmp_path / "ends", 2, dict(always), "continues")
    for parent, code, again in ((goes_on, 0, 1), (stops, 75, 0), (ends, 75, 3)):
        _, said = parent.communicate(timeout=60)
        assert parent.returncode == code and said.count("starting all ranks again") == again, said
    assert (tmp_path / "continues/2.1").exists() and not (tmp_path / "stops/2.0").exists()


def until_there(*files: Path) -> None:
    until(lambda: all(file.exists() for file in files), 30)


def test_a_signal_reaches_every_rank_and_an_error_ends_all(tmp_path: Path) -> None:
    """Neither is the loss of a rank. A rank that fails after the user's signal brings the others
    no second one, which would end them at once."""
    asked = start(tmp_path / "asked", 2, {"1.0": "outlives", "1.1": "fails"}, "continues")
    failed = start(tmp_path / "failed", 2, {"1.0": 2, "1.1": "waits"}, "continues")
    until_there(tmp_path / "asked/1.0", tmp_path / "asked/1.1")
    asked.send_signal(signal.SIGINT)
    assert (asked.wait(30), failed.wait(30)) == (2, 2)
    assert [(tmp_path / f"asked/asked.{rank}").read_text() for rank in range(2)] == ["SIGINT"] * 2
    assert not list(tmp_path.glob("*/2.*"))
    for parent in (asked, failed):
        parent.communicate()


def test_ranks_whose_parent_was_killed_are_asked_to_stop(tmp_path: Path) -> None:
    parent = start(tmp_path, 2, {"1.0": "waits", "1.1": "waits"}, "watches")
    until_there(tmp_path / "1.0", tmp_path / "1.1")
    parent.kill()
    until_there(tmp_path / "asked.0", tmp_path / "asked.1")
    parent.communicate()
    assert [(tmp_path / f"asked.{rank}").read_text() for rank in range(2)] == ["SIGTERM"] * 2


def stub_ranks(here: Path, deeds: dict[str, object], count: int = 2) -> rank_launcher.LocalRanks:
    write(here, deeds)
    return rank_launcher.LocalRanks(
        [], here / "run", count, command=[sys.executable, "-S", "-c", CHILD, str(here)]
    )


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def start_one(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        if started:
            until_there(tmp_path / "1.0")  # its handlers are there
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(popen(*args, **options))
        return started[0]

    parent = stub_ranks(tmp_path, {"1.0": "waits"})
    monkeypatch.setattr(rank_launcher, "subprocess", Altered(subprocess, Popen=start_one))
    with pytest.raises(RankLostError, match=r"rank 1 of 2 .*started"):
        parent._run_once([])
    assert started[0].returncode == 0
    assert (tmp_path / "asked.0").read_text() == "SIGTERM"


def test_a_rank_that_does_not_end_is_named_and_one_that_is_stopped_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: list[object] = []

    def warn(event: str, **values: object) -> None:
        named.append(values["ranks"])
        (tmp_path / "go").touch()
        until_there(tmp_path / "1.1")
        waiting = json.loads((tmp_path / "1.1").read_text())[2]
        until(lambda: not psutil.pid_exists(waiting), 30)  # before the other is killed

    monkeypatch.setattr(rank_launcher, "LATE_S", 0.1)
    monkeypatch.setattr(rank_launcher.log, "warning", warn)
    deeds = {"1.0": 0, "1.1": "held", "1.2": "stopped"}
    assert stub_ranks(tmp_path, deeds, 3)._run_once([]) == [0, 0, -signal.SIGKILL]
    assert named[0] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--ranks", "0"], "--ranks 0: at least 1"),
        (["--ranks", "2", "--dry-run"], "--dry-run measures one process: leave out --ranks"),
        (
            ["--ranks", "2", "--restarts", "1"],
            "--restarts starts one process anew; with --ranks, rl_training.on_rank",
        ),
        (["--ranks", "2", "--set", "server.ports=1"], "server.ports"),
    ],
)
def test_what_cannot_be_started_is_one_line(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.train(["--config", "quickstart", *flags]) == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


def test_a_launch_of_many_ranks_under_a_launch_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_launcher.LocalRanks, "run", lambda _: pytest.fail("started"))
    monkeypatch.setenv("MLX_RANK", "0")
    assert cli.train(["--config", "quickstart", "--ranks", "2"]) == 2
    assert "under mlx.launch their number is that of -n" in capsys.readouterr().err
    assert (
        cli.train(["--config", "quickstart", "--set", 'rl_training.on_rank_lost="continue"']) == 2
    )
    assert 'on_rank_lost = "continue" needs --ranks N' in capsys.readouterr().err


def test_the_ranks_share_the_name_and_the_port_of_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[rank_launcher.LocalRanks] = []
    monkeypatch.setattr(rank_launcher.LocalRanks, "run", lambda parent: made.append(parent) or 5)
    own = [
        "--config",
        "quickstart",
        "--ranks",
        "2",
        "--set",
        f'rl_training.checkpoint_dir="{tmp_path}"',
    ]
    own += ["--set", "rl_training.on_rank_lost='continue'", "--set", "server.port=0"]
    assert cli.train(own) == 5
    [parent] = made
    assert parent._arguments[: len(own)] == own
    assert parent._arguments[-3].startswith('rl_training.run_name="quickstart-')
    assert int(parent._arguments[-1].removeprefix("server.port=")) > 0
    assert (parent._count, parent._continues) == (2, True)
