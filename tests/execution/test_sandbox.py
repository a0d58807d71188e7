"""Hostile programs in every way of closing the doors that this machine has; the table is
scripts/bench/sandbox.py."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from mlx_parallm.errors import ConfigError, SandboxError
from mlx_parallm.execution.sandbox import sandbox as module
from mlx_parallm.execution.sandbox import sandbox_launcher as launcher
from mlx_parallm.execution.sandbox.sandbox import PROTECTIONS, Sandbox
from scripts.bench import sandbox as bench
from tests.altered import Altered

TIMEOUT_S = 0.6
MARGIN_S = 2.0  # the promised second, and one for a machine that is busy otherwise


@pytest.fixture(params=module.WAYS)
def sandbox(request, monkeypatch):
    """One that must have all protections, by one way only."""
    monkeypatch.setattr(module, "WAYS", (request.param,))
    protections, why = module._trial(request.param)
    if protections is None or set(PROTECTIONS) - protections:
        pytest.skip(f"{request.param} is not for this machine: {why}")
    # Many processes: without namespaces those of all other tests of this user count, too.
    return Sandbox(concurrency=2, processes=256)


def test_a_program_has_its_streams_and_its_end(sandbox):
    run = sandbox.run(
        "import sys\nprint(input()[::-1])\nprint('bad', file=sys.stderr)\nsys.exit(3)",
        stdin="añb\n",
    )
    assert (run.outcome, run.returncode, run.ok) == ("ended", 3, False)
    assert (run.stdout, run.stderr) == ("bña\n", "bad\n")
    assert run.protections == frozenset(PROTECTIONS) == sandbox.protections
    assert sandbox.run("import os\nos.abort()").returncode < 0
    assert sandbox.run("if __name__ == '__main__':\n    exit(4)").returncode == 4
    failed = sandbox.run("x = 1\ny = unknown")
    assert failed.returncode == 1 and 'File "main.py", line 2' in failed.stderr


def test_bash_runs_too(sandbox):
    run = sandbox.run(
        'read line; echo "$line" | tr a-z A-Z > file; cat file', language="bash", stdin="hello\n"
    )
    assert (run.ok, run.stdout) == (True, "HELLO\n"), run.stderr


def test_it_starts_in_an_empty_directory_without_an_environment(sandbox):
    made = f"made_{os.getpid()}"  # another test process may be here too
    run = sandbox.run(
        (
            f"import os\nopen('{made}', 'w').close()\nprint(sorted(os.listdir()),"
            " os.getcwd())\nprint(sorted(os.environ))"
        ),
    )
    assert f"['{made}', 'main.py'] " in run.stdout, run.stderr
    assert "['HOME', 'LANG', 'PATH', 'TMPDIR']" in run.stdout
    assert not list(Path(tempfile.gettempdir()).glob(f"mlx_parallm_sandbox_*/{made}"))
    assert made not in sandbox.run("import os\nprint(os.listdir())").stdout


@pytest.mark.parametrize("program", [bench.ENDLESS_LOOP, bench.FORK_BOMB], ids=["loop", "bomb"])
def test_what_never_ends_is_ended(sandbox, program):
    run = Sandbox(timeout_s=TIMEOUT_S).run(program)
    assert (run.outcome, run.returncode) == ("timeout", None)
    assert run.seconds < TIMEOUT_S + MARGIN_S
    assert bench.left_over() == 0


@pytest.mark.skipif(
    os.name != "posix" or os.getuid() != 0, reason="the code has no user of its own"
)
def test_a_bomb_whose_launcher_had_no_time_left_is_ended_by_its_user(sandbox, monkeypatch):
    """As on a machine so busy that the launcher is killed before it has ended the bomb."""
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    monkeypatch.setattr(module, "LAST_S", 0.0)
    # on a busy machine the launcher may have had no time to start the bomb either
    with contextlib.suppress(SandboxError):
        Sandbox(timeout_s=TIMEOUT_S).run(bench.FORK_BOMB)
    users = range(launcher.FIRST_UID, launcher.FIRST_UID + launcher.UIDS)
    left = [p for p in psutil.process_iter(["uids", "status"]) if p.info["uids"].real in users]
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_a_launcher_that_has_not_started_its_code_in_time_is_named(sandbox, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    monkeypatch.setattr(module, "LAST_S", 0.0)
    monkeypatch.setattr(module, "LAUNCH", "input()\nimport signal\nsignal.pause()")
    with pytest.raises(SandboxError, match=r"started .*\d\.\d s"):
        Sandbox(timeout_s=0.1).run("pass")


def test_a_launcher_that_is_late_is_not_killed_before_what_it_has_to_end(sandbox, monkeypatch):
    """The code leads its own session: of a launcher that is killed a fork bomb would be
    left."""
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    assert Sandbox(timeout_s=TIMEOUT_S).run(bench.FORK_BOMB).outcome == "timeout"
    assert bench.left_over() == 0


def test_memory_ends_where_the_limit_is(sandbox):
    run = sandbox.run(bench.FOUR_GIGABYTES)
    assert "MemoryError" in run.stderr and run.returncode == 1


@pytest.mark.parametrize(
    "program", [bench.FILES_IN_MEMORY, bench.SHARED_MEMORY], ids=["memfd", "shared"]
)
def test_memory_that_no_limit_counts_is_refused(sandbox, program):
    if module.MACOS:
        pytest.skip("macOS has no such memory")
    run = sandbox.run(program)
    assert run.returncode == 1 and "PermissionError" in run.stderr, run


@pytest.mark.slow
def test_memory_is_that_of_all_processes_together(sandbox):
    if module.MACOS:
        pytest.skip("Python may not fork there")
    run = sandbox.run(bench.FORKED_MEMORY)
    assert (run.outcome, run.returncode, run.ok) == ("memory", None, False), run.stderr
    assert bench.left_over() == 0


NAMED = "import ctypes\nctypes.CDLL(None).prctl(15, {!r}, 0, 0, 0)\n"


@pytest.mark.parametrize(
    "name", [b"\x0cVmSwap: -99999", b"\rVmSwap: -99999"], ids=["form feed", "return"]
)
def test_a_processs_name_says_nothing_about_its_memory(name):
    if module.MACOS:
        pytest.skip("Python may not fork there")
    program = bench.FORKED_MEMORY.replace("200 << 20", "64 << 20").replace("(9)", "(2)")
    run = Sandbox(memory_mb=256, processes=256, concurrency=1).run(NAMED.format(name) + program)
    assert run.outcome == "memory", run


def test_a_processs_name_may_be_no_text(sandbox):
    if module.MACOS:
        pytest.skip("its processes have no such name")
    run = sandbox.run(NAMED.format(b"\xff") + "import time\ntime.sleep(0.3)\nprint('done')")
    assert (run.outcome, run.returncode, run.stdout) == ("ended", 0, "done\n"), run


def test_pages_that_forked_processes_share_count_once(sandbox):
    if module.MACOS:
        pytest.skip("Python may not fork there")
    program = "kept = b'x' * (150 << 20)\n" + bench.FORKED_MEMORY.replace("200 << 20", "1").replace(
        "(9)", "(0.3)"
    )
    run = sandbox.run(program)
    assert run.outcome == "ended" and "held" in run.stdout, run


@pytest.mark.parametrize(
    "program", [bench.MANY_FILES, bench.REMOVED_FILES], ids=["files", "removed"]
)
def test_all_that_is_written_is_bounded(sandbox, program):
    if module.MACOS:
        pytest.skip("macOS bounds each file")
    run = sandbox.run(program)
    assert not run.ok and run.outcome in ("disk", "ended") and "written" not in run.stdout, run


def calls(numbers):
    """A program that prints the numbers of the system calls that are not refused."""
    return (
        f"import ctypes\nlibrary = ctypes.CDLL(None, use_errno=True)\nfor number in {numbers}:\n"
        "    if library.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != 1:\n"
        "        print(number)\nprint('tried')"
    )


def test_shared_memory_and_keys_and_new_namespaces_are_refused(sandbox):
    """SysV's memory outlived the run without namespaces, and the session's keyring could be read
    in every way."""
    if module.MACOS:
        pytest.skip("calls of Linux")
    machine = os.uname().machine
    lists = (launcher.UNCOUNTED_MEMORY_CALLS, launcher.KEY_CALLS, launcher.NAMESPACE_CALLS)
    run = sandbox.run(calls([number for numbers in lists for number in numbers[machine]]))
    assert run.stdout == "tried\n", run
    cloned = sandbox.run(
        calls([launcher.CLONE[machine]]).replace("number, 0", "number, 0x10000000 | 17")
    )
    assert cloned.stdout == "tried\n", cloned


@pytest.mark.slow
@pytest.mark.long
def test_directories_deeper_than_a_stack_are_removed(sandbox):
    mark = f"deep_{os.getpid()}"
    run = sandbox.run(
        f"import os\nos.mkdir({mark!r})\nos.chdir({mark!r})\n{bench.DEEP_DIRECTORIES}"
    )
    assert run.outcome in ("ended", "disk"), run
    assert not list(Path(tempfile.gettempdir()).glob(f"mlx_parallm_sandbox_*/{mark}"))


def test_a_deep_tree_with_links_and_closed_directories_is_removed(tmp_path):
    kept, tree = tmp_path / "kept", tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    kept.mkdir()
    (kept / "file").write_text("x")
    (tree / "a" / "link").symlink_to(kept)
    (tree / "a" / "b" / "file").write_text("x")
    (tree / "a" / "b").chmod(0)
    (tree / "a").chmod(0)
    module._remove(str(tree))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (kept / "file").exists()


def test_a_directory_that_its_owner_closed_is_removed():
    made = Path(tempfile.mkdtemp())
    (made / "file").touch()
    user = os.geteuid()
    if user == 0:  # whom no mode stops
        os.chown(made, launcher.FIRST_UID, -1)
        os.seteuid(launcher.FIRST_UID)
    try:
        made.chmod(0)
        module._remove(str(made))
    finally:
        os.seteuid(user)
    assert not made.exists()


def test_what_started_the_program_cannot_be_ended_by_it(sandbox):
    if module.MACOS:
        pytest.skip("signals are the profile's")
    run = sandbox.run(bench.PARENT_ENDED)
    assert (run.ok, run.stdout) == (True, "alive\n"), run


def test_a_run_whose_launcher_was_killed_has_failed(sandbox):
    """The score of such an answer is 0; an error would have lost its group."""
    report = json.dumps({"protections": list(PROTECTIONS)}).encode()
    run = module._result(None, -9, [b"out", b"", report], 0.1)
    assert (run.outcome, run.returncode, run.ok, run.stdout) == ("ended", -9, False, "out")
    with pytest.raises(SandboxError, match="the sandbox ended with -9"):
        module._result(None, -9, [b"", b"", b""], 0.1)


ANOTHER_USER = """
import json, sys
from mlx_parallm.execution.sandbox import sandbox as module
from scripts.bench import sandbox as bench
found = {}
for way in module.WAYS:
    protections, why = module._trial(way)
    if protections is None or set(module.PROTECTIONS) - protections:
        found[way] = why
        continue
    module.WAYS, found[way] = (way,), []
    sandbox = module.Sandbox(timeout_s=5, processes=256)
    names = "FILES_IN_MEMORY", "FORKED_MEMORY", "REMOVED_FILES", "DEEP_DIRECTORIES", "PARENT_ENDED"
    for program in (*(vars(bench)[name] for name in names), sys.argv[1]):
        run = sandbox.run(program)
        found[way].append([run.outcome, run.ok, run.stdout])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_another_user_is_held_too():
    """As root, the other two of the four ways: those of a user without rights."""
    python, root = "/usr/bin/python3", Path(__file__).parents[2]
    site = Path(psutil.__file__).parents[1]
    environment = {"PYTHONPATH": f"{root}:{site}", "PYTHONDONTWRITEBYTECODE": "1"}
    machine = os.uname().machine
    if os.getuid() or module.MACOS:
        pytest.skip("this user is the other tests'")
    as_user = {
        "user": 65534,
        "group": 65534,
        "extra_groups": [],
        "env": environment,
        "cwd": "/",
        "text": True,
    }
    try:
        subprocess.run(
            [python, "-c", "import psutil, mlx_parallm.execution"],
            check=True,
            capture_output=True,
            **as_user,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"another user has no interpreter with this package: {error}")
    program = calls([*launcher.UNCOUNTED_MEMORY_CALLS[machine], *launcher.KEY_CALLS[machine]])
    run = subprocess.run(
        [python, "-c", ANOTHER_USER, program], capture_output=True, timeout=120, **as_user
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert set(found) == {"namespaces", "landlock"}
    for way, runs in found.items():
        if isinstance(runs, str):
            continue  # not for this machine
        memfd, forked, removed, _deep, parent, refused = runs
        assert memfd[:2] == ["ended", False] and forked[0] == "memory" and not removed[1], way
        assert parent == ["ended", True, "alive\n"] and refused == ["ended", True, "tried\n"], way


def test_the_home_is_out_of_reach(sandbox):
    if not os.access(Path.home(), os.W_OK):
        pytest.skip("this user has no home to write to")
    with tempfile.TemporaryDirectory(dir=Path.home()) as home:
        secret = Path(home) / "secret"
        secret.write_text("secret")
        secret.chmod(0o644)
        Path(home).chmod(0o777)
        run = sandbox.run(bench.read_and_write(secret))
        assert run.stdout.count("Error") == 2, run.stdout
        assert [entry.name for entry in Path(home).iterdir()] == ["secret"]


def test_nothing_can_be_connected_to(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        run = sandbox.run(bench.connect(server.getsockname()[1]))
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert run.stdout.endswith("Error\n"), run.stdout


def test_output_is_cut_while_it_is_read(sandbox):
    run = sandbox.run(bench.ONE_GIGABYTE_OF_OUTPUT)
    assert (run.outcome, run.returncode, run.ok) == ("output", None, False)
    assert set(run.stdout) == {"x"} and len(run.stdout) <= (1 << 20) + 1


def test_nothing_that_it_starts_outlives_it(sandbox):
    run = sandbox.run(bench.SURVIVOR)
    assert (run.ok, run.stdout) == (True, "left one behind\n"), run.stderr
    assert bench.left_over() == 0


def test_no_other_process_can_be_signalled(sandbox):
    run = sandbox.run(
        f"import os\nfor pid in ({os.getpid()}, os.getppid()):\n    try:\n        os.kill(pid,"
        " 9)\n        print(pid)\n"
        "    except OSError as error:\n        print(type(error).__name__)\n"
    )
    assert run.ok and str(os.getpid()) not in run.stdout.split()


REACHING_OUT = """
import fcntl, os, resource, signal, socket, struct

def refused(name, function, *arguments):
    try:
        function(*arguments)
    except PermissionError:
        print(name)
    except OSError:
        pass  # it was let through, and there was nothing to do

reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
for pid in (0, child):
    refused(f"prlimit {pid == child}", resource.prlimit, pid, resource.RLIMIT_CORE, (0, 0))
    refused(f"affinity {pid == child}", os.sched_setaffinity, pid, os.sched_getaffinity(0))
refused("setpriority", os.setpriority, os.PRIO_PROCESS, child, 5)
refused("F_GETFL", fcntl.fcntl, 1, fcntl.F_GETFL)
for name in ("F_SETOWN", "F_SETSIG"):
    refused(name, fcntl.fcntl, 1, getattr(fcntl, name), signal.SIGTERM)
for name in ("STREAM", "DGRAM", "RAW", "SEQPACKET"):
    refused(name, socket.socketpair, socket.AF_UNIX, getattr(socket, "SOCK_" + name))
refused("DGRAM, flags", socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
refused("TIPC", socket.socketpair, 30, socket.SOCK_STREAM)
pair = socket.socketpair()
refused("FIONREAD", fcntl.ioctl, pair[0], 0x541B, bytes(4))
for name, request in (("FIOSETOWN", 0x8901), ("SIOCSPGRP", 0x8902)):
    refused(name, fcntl.ioctl, pair[0], request, struct.pack("i", child))
own = os.open("own", os.O_CREAT | os.O_RDWR)
refused("posix_acl", os.setxattr, "own", "system.posix_acl_access", b"x")
for n, path in enumerate(["own", own]):
    refused(f"setxattr {n}", os.setxattr, path, "user.name", b"x")
    refused(f"removexattr {n}", os.removexattr, path, "user.name")
for name, given in (("chmod", [0o700]), ("chown", [os.getuid(), os.getgid()])):
    refused(name, getattr(os, name), "own", *given)
    refused("f" + name, getattr(os, "f" + name), own, *given)
refused("lchown", os.lchown, "own", os.getuid(), os.getgid())
"""
REFUSED = [
    *(
        "prlimit True",
        "affinity True",
        "setpriority",
        "F_SETOWN",
        "F_SETSIG",
        "DGRAM",
        "RAW",
        "DGRAM, flags",
        "TIPC",
    ),
    *(
        "FIOSETOWN",
        "SIOCSPGRP",
        "posix_acl",
        "setxattr 0",
        "removexattr 0",
        "setxattr 1",
        "removexattr 1",
    ),
]
REFUSED_TO_OWNERS = ["chmod", "fchmod", "chown", "fchown", "lchown"]


def test_without_namespaces_other_processes_and_files_are_out_of_reach(sandbox):
    if module.WAYS != ("landlock",):
        pytest.skip(
            "elsewhere other processes cannot be named, and its files"
            " are a file system of their own"
        )
    run = sandbox.run(REACHING_OUT)
    assert run.stdout.splitlines() == REFUSED + (REFUSED_TO_OWNERS if os.getuid() else []), (
        run.stderr
    )
    if os.getuid() == 0:
        script = "echo 'echo made' > x.sh; chmod +x x.sh; ./x.sh"
        assert sandbox.run(script, language="bash").stdout == "made\n"


def in_a_process(tmp_path, closing, program):
    """The lines that a program writes in a process that has called `closing` of the launcher."""
    protections, why = module._trial("landlock")
    if protections is None or not {"files", "processes"} <= protections:
        pytest.skip(f"not for this machine: {why}")
    start = f"import sys\nsys.path.append({module.PACKAGE!r})\nimport sandbox_launcher as l\n"
    start += "l.call('prctl', l.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)\n"
    command = [sys.executable, "-c", f"{start}{closing}\n{program}"]
    run = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


@pytest.mark.parametrize("own_user", [False, True])
def test_modes_belong_to_who_has_other_files(tmp_path, own_user):
    found = in_a_process(
        tmp_path, f"l.deny_calls(namespaces=False, own_user={own_user})", REACHING_OUT
    )
    assert found == REFUSED + ([] if own_user else REFUSED_TO_OWNERS)


def test_landlock_keeps_signals_and_abstract_sockets_in_where_it_can(tmp_path):
    closing = """import os, socket
if l.call("syscall", l.LANDLOCK_CREATE, None, 0, 1) < 6:
    print("old")
    sys.exit()
receiver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
receiver.bind("")
sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
l.restrict_files(["/usr"], os.getcwd())"""
    program = """
for act in (lambda: os.kill(os.getppid(), 0), lambda: sender.sendto(b"x", receiver.getsockname())):
    try:
        act()
    except PermissionError:
        print("refused")
"""
    found = in_a_process(tmp_path, closing, program)
    if found == ["old"]:
        pytest.skip("Landlock of before Linux 6.12")
    assert found == ["refused", "refused"]


SENDING = """
import socket
for kind in (1, 2, 3, 5):
    for address in {addresses}:
        try:
            socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"out", address)
        except OSError:
            pass
"""


def test_no_datagram_reaches_a_socket_outside(sandbox):
    if module.MACOS:
        pytest.skip("no abstract sockets")
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as named,
    ):
        Path(directory).chmod(0o777)
        abstract.bind("")
        named.bind(f"{directory}/socket")
        Path(f"{directory}/socket").chmod(0o777)
        program = SENDING.format(addresses=[abstract.getsockname(), named.getsockname()])
        assert sandbox.run(program).ok
        for receiver in (abstract, named):
            receiver.setblocking(False)
            with pytest.raises(BlockingIOError):
                receiver.recv(9)
        # the control: without a sandbox both come
        subprocess.run([sys.executable, "-c", program], check=True)
        assert abstract.recv(9) == named.recv(9) == b"out"


def test_its_limits_are_set(sandbox):
    if module.MACOS:
        pytest.skip("macOS has no limit of memory, and of processes one for all of a user")
    names = ("CPU", "CORE", "NOFILE", "FSIZE", "AS")
    run = sandbox.run(
        f"import resource\nfor name in {(*names, 'NPROC')}:\n    "
        "print(*resource.getrlimit(getattr(resource, 'RLIMIT_' + name)))"
    )
    *limits, processes = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    ours = (12, 0, 64, 64 << 20, 512 << 20)
    assert limits == [(value, value) for value in ours], run.stderr
    assert processes[0] == processes[1] >= 256


def test_memory_is_watched_where_the_kernel_does_not(monkeypatch):
    """macOS's way, on processes that stay below their own limit but not together."""
    monkeypatch.setattr(module, "WATCH_MEMORY", True)
    fork = "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        break\n"
    program = f"{fork}held = b'x' * (16 << 20)\ntime.sleep(60)"
    try:
        run = Sandbox(memory_mb=64, timeout_s=60, processes=256, require=["limits"]).run(program)
    except ConfigError as error:
        pytest.skip(str(error))
    assert (run.outcome, run.returncode) == ("memory", None)


async def test_the_loop_goes_on_meanwhile_and_no_more_run_than_may(sandbox):
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    runs = await asyncio.gather(
        *(sandbox.arun("import time\ntime.sleep(0.1)\nprint(time.time())") for _ in range(4))
    )
    ticking.cancel()
    assert ticks > 10
    ends = sorted(float(run.stdout) for run in runs)
    assert ends[2] - ends[0] >= 0.1, "two at once, so the third starts when the first has ended"


def test_what_cannot_be_closed_is_refused(monkeypatch):
    monkeypatch.setattr(module, "WAYS", ("landlock",))
    given = frozenset({"limits"})
    monkeypatch.setattr(module, "_trial", lambda way: (given, "lacks files: no Landlock"))
    with pytest.raises(
        ConfigError,
        match=r"landlock: .*files",
    ):
        Sandbox()
    assert Sandbox(require=["limits"]).protections == given
    monkeypatch.setattr(module, "_trial", lambda way: (None, "no such program"))
    with pytest.raises(ConfigError, match="landlock"):
        Sandbox(require=[])


def test_the_launcher_checks_again_before_the_code_starts(sandbox):
    sandbox._require = frozenset({"files", "telepathy"})
    with pytest.raises(SandboxError, match="telepathy"):
        sandbox.run("print('ran')")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s = 0"),
        ({"memory_mb": 8}, "memory_mb = 8; it has to be 64 or more"),
        ({"concurrency": 0}, "concurrency = 0"),
        ({"require": ["netwrok"]}, "there is no 'netwrok'"),
    ],
)
def test_values_that_make_no_sense(options, message):
    with pytest.raises(ConfigError, match=message):
        Sandbox(**options)


def test_another_language_is_refused(sandbox):
    with pytest.raises(SandboxError, match="not 'ruby'"):
        sandbox.run("puts 1", language="ruby")


def test_the_profile_for_macos():
    """Only its text: sandbox-exec is not on Linux."""
    profile = module._profile('/private/tmp/a "quoted" one', ["/opt/python"], "python")
    assert "(deny network*)" in profile and "(deny process-fork)" in profile
    allowed = r'(allow file-write* (subpath "/private/tmp/a \"quoted\" one")'
    assert profile.index("(deny file-write*)") < profile.index(allowed)
    assert profile.index("(deny file-read-data") < profile.index("(allow file-read-data")
    assert "process-fork" not in module._profile("/x", [], "bash")


def test_the_way_of_macos_but_for_what_its_kernel_does(monkeypatch, tmp_path):
    """sandbox-exec's place is taken by a program that closes nothing: start, end and time-out
    are the parent's."""
    if os.getuid() == 0:  # another user has to be able to execute it
        monkeypatch.setattr(module, "sys", Altered(sys, _base_executable="/usr/bin/python3"))
        if not Path("/usr/bin/python3").exists():
            pytest.skip("no interpreter outside root's home")
        try:
            os.chown(tmp_path, 0, 65534)
            subprocess.run(["/usr/bin/python3", "-I", "-c", ""], user=65534, check=True)
        except PermissionError as error:
            pytest.skip(f"this root cannot become another user: {error}")
    stand_in = tmp_path / "sandbox-exec"
    stand_in.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    stand_in.chmod(0o755)
    monkeypatch.setattr(module, "SANDBOX_EXEC", str(stand_in))
    monkeypatch.setattr(module, "MACOS", True)
    monkeypatch.setattr(module, "WAYS", ("seatbelt",))
    module._trial.cache_clear()
    run = Sandbox().run("print(input())\nexit(3)", stdin="hello\n")
    assert (run.outcome, run.returncode, run.stdout) == ("ended", 3, "hello\n"), run.stderr
    with pytest.raises(SandboxError, match="processes: bash"):
        Sandbox().run("true", language="bash")
    run = Sandbox(timeout_s=TIMEOUT_S).run(bench.ENDLESS_LOOP)
    assert (run.outcome, run.returncode) == ("timeout", None)
    assert run.seconds < TIMEOUT_S + MARGIN_S
    module._trial.cache_clear()
