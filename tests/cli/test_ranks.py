"""The parent of `--ranks N`, with children that are a few lines of Python. tests/integration has real ranks."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_parallm import cli
from mlx_parallm.cli import ranks
from mlx_parallm.system.log import configure_logging
from tests.signals_reset import default_signals

# A rank that writes what it was started with to `NUMBER OF THE START.RANK`, then does what `deeds` has for the two.
CHILD = """
import json, os, pathlib, signal, sys, time
here, rank = pathlib.Path(sys.argv[1]), os.environ.get("MLX_RANK")
start = 2 if "--resume" in sys.argv else 1
hosts = json.load(open(os.environ["MLX_HOSTFILE"])) if rank else None
asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})
(here / f"new.{start}.{rank}").write_text(json.dumps([sys.argv[2:], hosts]))
(here / f"new.{start}.{rank}").rename(here / f"{start}.{rank}")
deed = json.loads((here / "deeds").read_text())[f"{start}.{rank}"]
if deed == "waits":
    while not asked:
        time.sleep(0.01)
    (here / f"asked.{rank}").write_text(" ".join(asked))
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
from mlx_parallm.cli.ranks import LocalRanks
here = pathlib.Path(sys.argv[1])
configure_logging()
command = [sys.executable, "-S", "-c", (here / "child.py").read_text(), str(here)]
parent = LocalRanks(["--config", "x"], here / "run", int(sys.argv[2]), continues=len(sys.argv) > 3, command=command)
assert "mlx.core" not in sys.modules
sys.exit(parent.run())
"""


def start(here: Path, count: int, deeds: dict[str, object], *, continues: bool = False) -> subprocess.Popen[str]:
    here.mkdir(exist_ok=True)
    (here / "deeds").write_text(json.dumps(deeds))
    (here / "child.py").write_text(CHILD)
    command = [sys.executable, "-c", PARENT, str(here), str(count), *(["continues"] if continues else [])]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals)


def test_a_rank_that_dies_ends_the_others_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    deeds = {"1.0": "waits", "1.1": "dies", "1.2": "waits"}
    stops = start(tmp_path / "stops", 3, deeds)
    goes_on = start(tmp_path / "goes on", 2, deeds | {"2.None": 0}, continues=True)
    _, said = stops.communicate(timeout=30)
    assert stops.returncode == 128 + signal.SIGKILL, said
    assert "rank 1 of 3 died of SIGKILL (killed, as by the system when memory runs out)" in said
    assert "start again with --resume auto" in said
    here = tmp_path / "stops"
    started = [json.loads((here / f"1.{rank}").read_text()) for rank in range(3)]
    assert [arguments for arguments, _ in started] == [["--config", "x", "--ranks", "1"]] * 3
    assert all(hosts == started[0][1] for _, hosts in started)
    assert len({host for [host] in started[0][1]}) == 3, "an address for each"
    assert [(here / f"asked.{rank}").read_text() for rank in (0, 2)] == ["SIGTERM"] * 2
    assert not list(here.glob("2.*"))

    _, said = goes_on.communicate(timeout=30)
    assert goes_on.returncode == 0, said
    assert "starting again with 1 from the beginning: there is no checkpoint yet" in said
    arguments, hosts = json.loads((tmp_path / "goes on/2.None").read_text())
    assert arguments == ["--config", "x", "--ranks", "1", "--resume", "auto"]
    assert hosts is None, "one rank is a process without MLX's ring"


def test_a_signal_reaches_every_rank_and_an_error_ends_all(tmp_path: Path) -> None:
    """Neither is the loss of a rank."""
    asked = start(tmp_path / "asked", 2, {"1.0": "waits", "1.1": "waits"}, continues=True)
    failed = start(tmp_path / "failed", 2, {"1.0": 2, "1.1": "waits"}, continues=True)
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "asked").glob("1.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    asked.send_signal(signal.SIGINT)
    assert (asked.wait(30), failed.wait(30)) == (0, 2)
    assert [(tmp_path / f"asked/asked.{rank}").read_text() for rank in range(2)] == ["SIGINT"] * 2
    assert not list(tmp_path.glob("*/2.*"))
    for parent in (asked, failed):
        parent.communicate()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--ranks", "0"], "--ranks 0: at least 1"),
        (["--ranks", "2", "--dry-run"], "--dry-run measures one process: leave out --ranks"),
        (["--ranks", "2", "--restarts", "1"], "--restarts starts one process anew; with --ranks, rl_training.on_rank"),
        (["--ranks", "2", "--set", "server.ports=1"], "server.ports"),
    ],
)
def test_what_cannot_be_started_is_one_line(flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.train(["--config", "quickstart", *flags]) == 2
    said = capsys.readouterr().err
    assert error in said
    assert said.count("\n") == 1


def test_a_launch_of_many_ranks_under_a_launch_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks.LocalRanks, "run", lambda _: pytest.fail("started"))
    monkeypatch.setenv("MLX_RANK", "0")
    assert cli.train(["--config", "quickstart", "--ranks", "2"]) == 2
    assert "under mlx.launch their number is that of -n" in capsys.readouterr().err
    assert cli.train(["--config", "quickstart", "--set", 'rl_training.on_rank_lost="continue"']) == 2
    assert 'on_rank_lost = "continue" needs --ranks N' in capsys.readouterr().err


def test_the_ranks_share_the_name_and_the_port_of_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[ranks.LocalRanks] = []
    monkeypatch.setattr(ranks.LocalRanks, "run", lambda parent: made.append(parent) or 5)
    own = ["--config", "quickstart", "--ranks", "2", "--set", f'rl_training.checkpoint_dir="{tmp_path}"']
    own += ["--set", "rl_training.on_rank_lost='continue'", "--set", "server.port=0"]
    try:
        assert cli.train(own) == 5
    finally:
        configure_logging(level="error")
    [parent] = made
    assert parent._arguments[: len(own)] == own
    assert parent._arguments[-3].startswith('rl_training.run_name="quickstart-')
    assert int(parent._arguments[-1].removeprefix("server.port=")) > 0
    assert (parent._count, parent._continues) == (2, True)
