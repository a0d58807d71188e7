"""Shutdown signals in real processes: taken while MLX computes, the second one at once,
duplicates counted once."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from mlx_parallm.system import signals
from tests.altered import Altered
from tests.signals_reset import default_signals

WATCH = """
import sys, threading
from mlx_parallm.system.signals import ShutdownWatcher, block_shutdown_signals
block_shutdown_signals()
import mlx.core as mx
x = mx.ones((512, 512))
mx.eval(x @ x)
def first(name):
    print("first", name, flush=True)
    {first}
stop = threading.Event()
ShutdownWatcher(first, same_request_s={same}).start()
print("ready", flush=True)
{main}
"""
WAIT = "stop.wait()"
# One evaluation that outlasts the test, as a training step would.
COMPUTE = "y = mx.ones((2048, 2048)) / 2048\nfor _ in range(20000): y = y @ y\nmx.eval(y)"


def start(
    *,
    first: str = "stop.set()",
    same: float = 0.0,
    main: str = WAIT,
    preexec: Callable[[], object] = default_signals,
) -> "subprocess.Popen[str]":
    program = WATCH.format(first=first, same=same, main=main)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, preexec_fn=preexec
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def next_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_calls_back(number: signal.Signals) -> None:
    with start() as process:
        process.send_signal(number)
        assert next_line(process) == f"first {number.name}\n"
        assert process.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_are_taken_while_mlx_computes(number: signal.Signals) -> None:
    with start(main=COMPUTE) as process:
        process.send_signal(number)
        assert next_line(process) == f"first {number.name}\n"
        process.send_signal(number)
        assert process.wait(10) == 128 + number


def test_a_callback_that_hangs_does_not_hide_the_second_signal() -> None:
    with start(first="threading.Event().wait()") as process:
        process.send_signal(signal.SIGTERM)
        assert next_line(process) == "first SIGTERM\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_one_request_delivered_twice_counts_once() -> None:
    """`timeout make quickstart` signals the process and its group."""
    finish = "sys.stdin.readline(); stop.set()"
    program = WATCH.format(first=finish, same=60.0, main=WAIT)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert next_line(process) == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert next_line(process) == "first SIGTERM\n"
        process.send_signal(signal.SIGTERM)
        process.communicate("continue\n", timeout=10)
        assert process.returncode == 0


def test_nohup_keeps_sighup_ignored() -> None:
    with start(preexec=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert next_line(process) == "first SIGTERM\n"
        assert process.wait(10) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_thread_that_mlx_starts_has_the_signals_blocked() -> None:
    main = (
        "from pathlib import Path\n"
        # sigwait unblocks, inside the kernel, what it waits for
        "watcher = next(t.native_id for t in threading.enumerate() if t.name =="
        " 'shutdown-watcher')\n"
        "masks = [int(line.split()[1], 16) for status in Path('/proc/self/task').glob('*/status')"
        " if status.parent.name != str(watcher)"
        " for line in status.read_text().splitlines() if line.startswith('SigBlk')]\n"
        "wanted = sum(1 << number - 1 for number in (1, 2, 15))\n"
        "print(len(masks), all(mask & wanted == wanted for mask in masks), flush=True)"
    )
    with start(main=main) as process:
        threads, blocked = next_line(process).split()
        assert process.wait(10) == 0
    assert int(threads) >= 2
    assert blocked == "True"


def test_what_the_command_line_loads_before_it_blocks_signals_starts_no_threads() -> None:
    """NumPy's and MLX's would receive SIGTERM, whose default action ends the process without a
    checkpoint."""
    program = (
        "import sys, mlx_parallm.cli.start, mlx_parallm.cli.supervisor,"
        " mlx_parallm.run_files.directory\n"
        "assert not {'numpy', 'mlx.core'} & set(sys.modules), 'loaded before"
        " block_shutdown_signals'"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_limit_of_an_end_that_goes_on_has_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """`rl_training.restart_every`: a supervisor would take the code of a finished run for its
    end."""
    codes = list[int]()
    monkeypatch.setattr(signals, "os", Altered(os, _exit=codes.append))
    monkeypatch.setattr(signals, "LAST_WORDS_S", 0)
    for code in (None, 80):
        limit = signals.EndLimit()
        limit.start(0.0, exit_code=code)
        limit._thread.join()
    assert codes == [0, 80]


SPINNING = """
import sys, threading
from mlx_parallm.system.signals import EndLimit
limit = EndLimit()
def spin():
    while True: pass
for _ in range(4):
    threading.Thread(target=spin, daemon=True).start()
EndLimit.exit_code = 7
limit.start(0.2, lambda: print("last words", flush=True))
limit.start(0.0)
{then}
spin()
"""


@pytest.mark.slow
@pytest.mark.parametrize("then", ["", "limit.start(0.0)"])
def test_an_end_that_takes_too_long_is_made_one(then: str) -> None:
    """Threads that spin leave the others so little time that an end in order took minutes."""
    ended = subprocess.run(
        [sys.executable, "-c", SPINNING.format(then=then)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout) == (7, "last words\n"), ended.stderr


def test_an_end_in_time_is_left_alone() -> None:
    ends = SPINNING.format(
        then=(
            "limit.cancel()\nthreading.Event().wait(0.5)\nsys.stdout.flush()\nimport"
            " os\nos._exit(3)"
        )
    )
    ended = subprocess.run([sys.executable, "-c", ends], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "")


OLDER = """
import signal, sys, threading, time
older = threading.Event()
threading.Thread(target=older.wait, daemon=True).start()  # its mask lets the signals through
from mlx_parallm.system.signals import Shutdown, StopRequested
before = [signal.getsignal(number) for number in (1, 2, 15)], signal.pthread_sigmask(0, ())
with Shutdown():
    pass
assert before == ([signal.getsignal(number) for number in (1, 2, 15)], signal.pthread_sigmask(0, ()))
with Shutdown() as shutdown:
    {wait}
"""
WAITS = "print('ready', flush=True); assert shutdown.stop.wait(60)"
COMPUTES = """
    try:
        with shutdown.interrupts():
            print('ready', flush=True)
            {work}
    except StopRequested as stopped:
        print(stopped)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("wait", "printed"),
    [
        (WAITS, ""),
        (COMPUTES.format(work="threading.Event().wait()"), "{name}\n"),
        (COMPUTES.format(work="while True: pass"), "{name}\n"),
        # nothing interrupts it: the limit ends the process
        ("shutdown.limit_s = 0.0\n    while True:\n        try: " + WAITS + "; time.sleep(60)"
         "\n        except BaseException: pass", ""),
    ],
    ids=["waits", "waits for a lock", "computes", "swallows it"],
)  # fmt: skip
def test_a_shutdown_takes_signals_of_older_threads(
    wait: str, printed: str, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OLDER.format(wait=wait)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=default_signals,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        output, _ = process.communicate(timeout=30)
        assert (process.returncode, output) == (0, printed.format(name=number.name))
