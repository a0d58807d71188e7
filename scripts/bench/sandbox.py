"""Try what the sandbox holds back, and measure its cost: hostile programs in every way that this
machine has, then runs/s.

    .venv/bin/python scripts/bench/sandbox.py [--runs 60]

For each program: how it ended, after how many seconds (the time-out is 1), and how many of its
processes are left. A program that got through prints BROKEN, and the exit code is 1.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from mlx_parallm.execution.sandbox import sandbox as module
from mlx_parallm.execution.sandbox.sandbox import PROTECTIONS, Sandbox, SandboxRun

MARK = "mlx-parallm-hostile"

IGNORE_SIGNALS = """
import os, signal, sys, time
for number in range(1, signal.NSIG):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
"""
ENDLESS_LOOP = f"{IGNORE_SIGNALS}\nwhile True:\n    pass\n"
FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
FOUR_GIGABYTES = (
    "block = bytearray(4 << 30)\nblock[::4096] = b'x' * (1 << 20)\nprint('allocated')\n"
)
ONE_GIGABYTE_OF_OUTPUT = (
    "import sys\nfor _ in range(1 << 14):\n    sys.stdout.write('x' * (1 << 16))\n"
)
MANY_FILES = (
    "for number in range(64):\n    open(str(number), 'wb').write(bytes(8 <<"
    " 20))\nprint('written')\n"
)
FILES_IN_MEMORY = (
    "import os\nfor _ in range(50):\n    os.write(os.memfd_create('m'), bytes(6 <<"
    " 23))\nprint('held')\n"
)
SHARED_MEMORY = (
    "import mmap\nfor _ in range(50):\n    mmap.mmap(-1, 6 << 23)[:] = bytes(6 <<"
    " 23)\nprint('held')\n"
)
FORKED_MEMORY = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        break
held = b"x" * (200 << 20)
time.sleep(9)
print("held")
"""
REMOVED_FILES = """
import os, time
held = []
for number in range(64):
    held.append(open(str(number), "wb"))
    held[-1].write(bytes(8 << 20))
    held[-1].flush()
    os.unlink(str(number))
time.sleep(9)
print("written")
"""
DEEP_DIRECTORIES = "import os\nfor _ in range(1200):\n    os.mkdir('d')\n    os.chdir('d')\n"
PARENT_ENDED = """
import os, resource, signal
for act in (
    *(lambda n=n: os.kill(os.getppid(), n) for n in range(1, signal.NSIG)),
    lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0)),
    lambda: os.sched_setaffinity(os.getppid(), [0]) or print("reached"),
):
    try:
        act()
    except OSError:
        pass
print("alive")
"""
SURVIVOR = f"""{IGNORE_SIGNALS}
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{MARK}"])
    os._exit(0)
time.sleep(0.2)
print("left one behind")
"""


def read_and_write(file: Path) -> str:
    """Print "read" if it can read the file, "written" if it can write beside it."""
    return f"""
for what, act in (
    ("read", lambda: open({str(file)!r}).read()),
    ("written", lambda: open({str(file.with_suffix(".written"))!r}, "w").write("x")),
):
    try:
        act()
        print(what)
    except OSError as error:
        print(type(error).__name__)
"""


def connect(port: int) -> str:
    return f"""
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=0.5)
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""


def left_over(patience_s: float = 2.0) -> int:
    """Count the processes that a hostile program has left behind, wherever they hang in the
    tree. One that soon ends by itself belongs to another run."""
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if any(MARK in word or "'main.py'" in word for word in line):
            processes.append(process)
    _, left = psutil.wait_procs(processes, timeout=patience_s)
    return sum(_lives(process) for process in left)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False  # it has ended meanwhile


def ways() -> list[str]:
    """Those that run anything here, alone in `sandbox.WAYS` when tried."""
    return [way for way in module.WAYS if module._trial(way)[0] is not None]


def only(way: str) -> None:
    module.WAYS = (way,)


def main() -> int:
    parser = argparse.ArgumentParser(description="What the sandbox holds back, and what it costs.")
    parser.add_argument("--runs", type=int, default=60)
    arguments = parser.parse_args()
    print(f"{sys.platform}, kernel {os.uname().release}, uid {os.getuid()}, {os.cpu_count()} cores")
    broken = 0
    for way in ways():
        only(way)
        broken += hostile(way)
        speed(way, arguments.runs)
    return int(broken > 0)


def hostile(way: str) -> int:
    protections = module._trial(way)[0] or frozenset()
    require = [name for name in PROTECTIONS if name in protections]
    sandbox = Sandbox(timeout_s=1.0, require=require)
    print(f"\n{way}: {', '.join(require)}")
    home = Path(tempfile.mkdtemp(dir=Path.home(), prefix=".mlx_parallm_bench_"))
    secret = home / "secret"
    secret.write_text("secret")
    secret.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server:
        cases: list[tuple[str, str, Callable[[SandboxRun], bool]]] = [
            ("endless loop, ignores signals", ENDLESS_LOOP, lambda run: run.outcome == "timeout"),
            ("fork bomb", FORK_BOMB, lambda run: run.outcome == "timeout"),
            ("4 GB", FOUR_GIGABYTES, lambda run: "MemoryError" in run.stderr),
            (
                "reads and writes in the home",
                read_and_write(secret),
                lambda run: run.stdout.count("Error") == 2,
            ),
            (
                "network",
                connect(server.getsockname()[1]),
                lambda run: run.stdout.endswith("Error\n"),
            ),
            ("1 GB of output", ONE_GIGABYTE_OF_OUTPUT, lambda run: run.outcome == "output"),
            (
                "2.5 GB in memfd_create",
                FILES_IN_MEMORY,
                lambda run: "PermissionError" in run.stderr,
            ),
            ("2.5 GB in shared memory", SHARED_MEMORY, lambda run: "PermissionError" in run.stderr),
            ("1.8 GB in nine processes", FORKED_MEMORY, lambda run: run.outcome == "memory"),
            ("0.5 GB in files", MANY_FILES, lambda run: "written" not in run.stdout),
            (
                "0.5 GB in removed files",
                REMOVED_FILES,
                lambda run: run.outcome != "timeout" and not run.ok,
            ),
            ("1,200 nested directories", DEEP_DIRECTORIES, lambda run: True),
            (
                "signals and limits for its parent",
                PARENT_ENDED,
                lambda run: run.stdout == "alive\n",
            ),
            (
                "child, setsid, ignores signals",
                SURVIVOR,
                lambda run: "left one behind" in run.stdout,
            ),
        ]
        broken = 0
        for name, program, contained in cases:
            run = sandbox.run(program)
            left = left_over()
            good = contained(run) and run.seconds <= 2.0 and not left
            broken += not good
            output = (
                run.stdout.strip().replace("\n", ", ")[:40]
                or run.stderr.strip().rpartition("\n")[2][:40]
            )
            print(
                f"  {name:32s} {run.outcome:8s} {run.seconds:5.2f} s  left {left} "
                f" {'' if good else 'BROKEN '}"
                f"{output if run.outcome == 'ended' else ''}"
            )
    secret.unlink()
    home.rmdir()
    return broken


def cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def speed(way: str, runs: int) -> None:
    sandbox = Sandbox(require=())
    for workers in (1, os.cpu_count() or 1):
        started, used = time.perf_counter(), cpu_s()
        with ThreadPoolExecutor(workers) as pool:
            results = list(pool.map(lambda _: sandbox.run("print(sum(range(1000)))"), range(runs)))
        seconds, cpu = time.perf_counter() - started, cpu_s() - used
        assert all(run.stdout == "499500\n" for run in results)
        print(
            f"  {way}, {workers} at once: {runs / seconds:.1f} runs/s"
            f" ({cpu / runs * 1000:.0f} ms of CPU each)"
        )


if __name__ == "__main__":
    sys.exit(main())
