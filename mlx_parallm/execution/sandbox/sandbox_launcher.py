"""The process that restricts itself and then runs the code: `sandbox.py` starts it with `python -I
-S`. No MLX.

    sandbox.Sandbox → this → (namespaces: the first process of a pid namespace →) the code

It reads a specification as JSON from its standard input and writes its report, a JSON object in
each line, to a descriptor. The ways:

    namespaces   Linux, as root or in a user namespace: its own root file system (a tmpfs with
                 read-only binds of the system's libraries and the interpreter), no network device,
                 and a pid namespace, whose end kills all its processes
    landlock     Linux without namespaces (most containers): Landlock for files, seccomp for sockets
                 and signals, and a child subreaper, which gets orphans back and kills them
    seatbelt     macOS: `sandbox-exec` is around this process, which sets the limits only

Both ways of Linux have a filter of system calls (seccomp), and this process looks after every
`WATCH_S` how much memory the code's processes hold together, for a limit of each process says
nothing about many.

Root becomes an unused user, because RLIMIT_NPROC does not count root's processes. That user may
have no right to enter the home with the interpreter. Namespaces bind the interpreter to a place
if it may; with Landlock the user keeps the one capability to read, which then reaches no further
than Landlock's rules.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time

TYPE_CHECKING = False  # typing would be a quarter of its start
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any, NoReturn

LIBC = ctypes.CDLL(None, use_errno=True)

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
NEW = NEWNS | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET | 0x2000000  # the last: cgroups
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_RIGHTS = {3: 15, 4: 15}  # ABI → how many file system rights it knows; later ones 16
LANDLOCK_SCOPES = 1 | 2  # from ABI 6 on: no abstract Unix sockets, no signals beyond the sandbox
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER = 1, 8, 22, 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 38, 47, 2
READING_CAPABILITIES = (2, 1)  # CAP_DAC_READ_SEARCH; CAP_DAC_OVERRIDE, which containers have

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # linux/audit.h
# The numbers of: ptrace, process_vm_writev, open_by_handle_at, io_uring_setup (which can open
# sockets), pidfd_getfd, bpf, perf_event_open, userfaultfd.
DENIED_CALLS = {
    "x86_64": (101, 311, 304, 425, 438, 321, 298, 323),
    "aarch64": (117, 271, 265, 425, 438, 280, 241, 282),
}
# memfd_create, memfd_secret, shmget, semget, msgget, mq_open: memory that no limit of a process
# counts. SysV's and POSIX's outlive the process, too.
UNCOUNTED_MEMORY_CALLS = {
    "x86_64": (319, 447, 29, 64, 68, 240),
    "aarch64": (279, 447, 194, 190, 186, 180),
}
# add_key, request_key, keyctl: the session's keyring belongs to who started the trainer.
KEY_CALLS = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}
# unshare, setns, mount, umount2, chroot, pivot_root, open_tree, move_mount, fsopen, fsconfig,
# fsmount, fspick, mount_setattr: in its own user namespace the code might mount a file system
# in memory.
NAMESPACE_CALLS = {
    "x86_64": (272, 308, 165, 166, 161, 155, 428, 429, 430, 431, 432, 433, 442),
    "aarch64": (97, 268, 40, 39, 51, 41, 428, 429, 430, 431, 432, 433, 442),
}
# a filter cannot read the second one's flags
CLONE, CLONE3 = {"x86_64": 56, "aarch64": 220}, 435
# Without namespaces: socket, kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo,
# pidfd_send_signal, setpriority, ioprio_set.
OUTSIDE_CALLS = {
    "x86_64": (41, 62, 200, 234, 129, 297, 424, 141, 251),
    "aarch64": (198, 129, 130, 131, 138, 240, 424, 140, 30),
}
# setxattr, lsetxattr, fsetxattr, removexattr, lremovexattr, fremovexattr, setxattrat,
# removexattrat, file_setattr: not Landlock's, and a right to write, which root's code may have
# kept, is enough for most.
ATTRIBUTE_CALLS = {
    "x86_64": (188, 189, 190, 197, 198, 199, 463, 466, 469),
    "aarch64": (5, 6, 7, 14, 15, 16, 463, 466, 469),
}
# fchmod, fchmodat, fchmodat2, chmod; fchown, fchownat, chown, lchown: Landlock lets them reach all
# the user's files.
OWNERS_CALLS = {"x86_64": (91, 268, 452, 90, 93, 260, 92, 94), "aarch64": (52, 53, 452, 55, 54)}
# prlimit64, sched_setaffinity, sched_setscheduler, sched_setparam, sched_setattr: their first
# argument is a process.
CALLS_FOR_ITSELF = {"x86_64": (302, 203, 144, 142, 314), "aarch64": (261, 122, 119, 118, 274)}
# fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX; ioctl: FIOSETOWN, SIOCSPGRP: who is sent a signal when a
# descriptor is ready.
COMMANDING_CALLS = {"x86_64": (72, 16), "aarch64": (25, 29)}
DENIED_COMMANDS = (8, 10, 15), (0x8901, 0x8902)
SOCKETPAIR = {"x86_64": 53, "aarch64": 199}
# it stays whole when all but a page is unmapped
MMAP, MAP_SHARED_ANONYMOUS = {"x86_64": 9, "aarch64": 222}, 0x21
# other types send to any address, connected or not
AF_UNIX, SOCK_STREAM, SOCK_SEQPACKET, TYPE_MASK = 1, 1, 5, 0xF

SYSTEM = (
    "/usr",
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/alternatives",
    "/nix/store",
)
# mapped, /dev/zero is uncounted memory
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
FIRST_UID, UIDS = 61184, 4336  # systemd's range for users that exist only while a process runs
# Without `site`, which takes most of the time of a start, but with its two words that programs use.
PYTHON = """import builtins, sys
builtins.exit = builtins.quit = sys.exit
del builtins, sys
exec(compile(open('main.py', 'rb').read(), 'main.py', 'exec'))
"""
COMMANDS = {
    "python": ("main.py", ["-I", "-S", "-B", "-X", "utf8", "-c", PYTHON]),
    "bash": ("main.sh", ["main.sh"]),
}
ALL = ("files", "network", "processes", "limits")
OPEN_FILES = 64  # the kernel holds up to 416 kB for each pair of sockets
WATCH_S = 0.02
MOST_FILES = 16384


class StopRequest(BaseException):
    """A limit's name: the run has reached it. None: SIGTERM, by which `sandbox.py` ends the run."""


def main() -> None:
    status, specification = int(sys.argv[1]), json.load(sys.stdin.buffer)
    os.set_inheritable(status, False)
    os.umask(0o022)
    signal.signal(signal.SIGTERM, _stop)
    # RLIMIT_NPROC counts its processes alone
    uid = user_of(os.getpid()) if os.getuid() == 0 else None
    way = {"namespaces": in_namespaces, "landlock": in_landlock, "seatbelt": in_seatbelt}[
        specification["way"]
    ]
    try:
        way(specification, status, uid)
    except OSError as error:
        report(status, error=str(error))
    except StopRequest as stop:
        report(status, limit=stop.args[0])


def user_of(launcher: int) -> int:
    """Return the user of the code that the launcher with this pid runs, if it is root's."""
    return FIRST_UID + launcher % UIDS


def _stop(_number: int, _frame: Any) -> NoReturn:
    _ignore_stops()  # a second one would end what ends the code
    raise StopRequest(None)


def in_namespaces(specification: Mapping[str, Any], status: int, uid: int | None) -> None:
    processes = Processes()
    enter_namespaces()
    call("prctl", PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    make_root(specification["directory"], specification["prefixes"], specification["disk"])

    def first_process() -> None:
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        report(status, exit=wait_for(spawn(status, lambda: execute(specification, status, uid))))

    first = spawn(status, first_process)
    try:
        watch(specification["timeout_s"], lambda: processes.over(specification, first))
        wait_for(first)
    finally:
        _ignore_stops()
        end(first)  # it is gone when every process of its namespace is


def in_landlock(specification: Mapping[str, Any], status: int, uid: int | None) -> None:
    processes = Processes()
    call("prctl", PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(specification["directory"])
    if uid is not None:
        os.chown(".", uid, uid)
    child = spawn(status, lambda: execute(specification, status, uid))
    try:
        watch(specification["timeout_s"], lambda: processes.over(specification, os.getpid()))
        report(status, exit=wait_for(child))
    finally:
        _ignore_stops()
        processes.kill_descendants()


def in_seatbelt(specification: Mapping[str, Any], status: int, uid: int | None) -> None:
    os.chdir(specification["directory"])
    if uid is not None:
        os.chown(".", uid, uid)
    execute(specification, status, uid)


def enter_namespaces() -> None:
    """Raises OSError: the kernel, a container or AppArmor does not allow them."""
    uid, gid = os.getuid(), os.getgid()
    call("unshare", NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (NEWUSER if uid else 0))
    if uid:
        for file, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{file}", "w") as stream:
                stream.write(text)


def make_root(root: str, prefixes: list[str], disk: int) -> None:
    """Make `root` the root directory: read-only binds from outside, and a /tmp; all writes
    together `disk` bytes."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes=16384,mode=755")
    for path in (*SYSTEM, *prefixes):
        bind(path, root, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for path in DEVICES:
        bind(path, root, ATTR_RDONLY | ATTR_NOSUID)
    for directory in ("/tmp", "/dev/shm"):
        os.makedirs(root + directory, exist_ok=True)
        os.chmod(root + directory, 0o1777)
    os.chroot(root)
    os.chdir("/tmp")


def bind(path: str, root: str, attributes: int) -> None:
    """Bind `path` below `root`, unless it is there already; a link stays a link."""
    target = root + path
    if os.path.lexists(target) or not os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(path, target, None, MS_BIND | MS_REC)
    settings = struct.pack("QQQQ", attributes, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, settings, len(settings))


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    call("mount", texts[0], texts[1], texts[2], flags, texts[3])


def execute(specification: Mapping[str, Any], status: int, uid: int | None) -> NoReturn:
    """Apply the remaining restrictions, and become the code, in the working directory."""
    # if this is the launcher itself, and leads a session already
    if specification["way"] != "seatbelt":
        os.setsid()  # or a signal to "my process group" would reach the launcher
    name, arguments = COMMANDS[specification["language"]]
    program = {"python": specification["python"], "bash": "/bin/bash"}[specification["language"]]
    write_files(name, specification["code"], specification["stdin"])
    set_limits(specification, uid)
    closed, lacking = list(ALL), {}
    if specification["way"] == "landlock":
        lacking = close_without_namespaces(specification, uid)
    elif specification["way"] == "seatbelt":
        closed = specification["closed"]
        drop_root(uid)
    else:
        drop_root(uid)
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        try:
            deny_calls(namespaces=True)
        except OSError as error:
            lacking = dict.fromkeys(("files", "limits"), f"seccomp: {error}")
    if sys.platform == "linux":
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    closed = [name for name in closed if name not in lacking]
    missing = [name for name in specification["require"] if name not in closed]
    report(status, protections=closed, lacking=lacking, missing=missing)
    if missing:
        os._exit(1)
    here = os.getcwd() if specification["way"] == "namespaces" else specification["directory"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": here, "TMPDIR": here, "LANG": "C.UTF-8"}
    try:
        os.execve(program, [program, *arguments], environment)
    except OSError as error:
        raise OSError(
            error.errno, f"{program} cannot be executed: {os.strerror(error.errno or 0)}"
        ) from error


def write_files(name: str, code: str, stdin: str) -> None:
    for path, text in ((name, code), ("stdin", stdin)):
        with open(path, "wb") as file:
            file.write(text.encode(errors="replace"))
    os.dup2(os.open("stdin", os.O_RDONLY), 0)
    os.unlink("stdin")


def set_limits(specification: Mapping[str, Any], uid: int | None) -> None:
    seconds = int(specification["timeout_s"]) + 2
    limits = {"CPU": seconds, "CORE": 0, "NOFILE": OPEN_FILES, "FSIZE": specification["disk"]}
    # macOS: `sandbox.py` watches the memory, and the profile forbids to fork
    if sys.platform == "linux":
        limits["AS"] = specification["memory"]
        counted_apart = specification["way"] == "namespaces" or uid is not None
        limits["NPROC"] = specification["processes"] + (
            0 if counted_apart else tasks_of(os.getuid())
        )
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def tasks_of(uid: int) -> int:
    """Return the number of a user's threads, which RLIMIT_NPROC counts."""
    threads = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                threads += len(os.listdir(f"/proc/{entry}/task")) * (
                    os.stat(f"/proc/{entry}").st_uid == uid
                )
            except OSError:
                continue  # it has ended
    return threads


def close_without_namespaces(specification: Mapping[str, Any], uid: int | None) -> dict[str, str]:
    """Apply Landlock, another user, and seccomp. Return the missing protections, and why."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    lacking = {}
    try:
        restrict_files([*SYSTEM, *specification["prefixes"]], specification["directory"])
    except OSError as error:
        lacking["files"] = f"Landlock: {error}"
    drop_root(uid, keep_reading=not lacking and not open_to_others(specification["python"]))
    try:
        deny_calls(namespaces=False, own_user=uid is not None)
    except OSError as error:
        lacking |= dict.fromkeys(("network", "processes", "limits"), f"seccomp: {error}")
    return lacking


def restrict_files(readable: list[str], writable: str) -> None:
    """Apply Landlock (Linux 6.2). Raises OSError: the kernel has none, an old one, or it is
    switched off."""
    abi = call("syscall", LANDLOCK_CREATE, None, 0, 1)
    if abi < 3:
        raise OSError(f"version {abi} lets any file be truncated; Linux 6.2 has one that does not")
    everything = (1 << LANDLOCK_RIGHTS.get(abi, 16)) - 1
    handled = (
        struct.pack("QQQ", everything, 0, LANDLOCK_SCOPES)
        if abi >= 6
        else struct.pack("Q", everything)
    )
    rules = call("syscall", LANDLOCK_CREATE, handled, len(handled), 0)
    allowed = [(path, EXECUTE | READ_FILE | READ_DIR) for path in readable]
    allowed += [(path, READ_FILE | WRITE_FILE) for path in DEVICES] + [(writable, everything)]
    for path, rights in allowed:
        if os.path.exists(path):
            if not os.path.isdir(path):
                rights &= EXECUTE | READ_FILE | WRITE_FILE
            beneath = os.open(path, os.O_PATH)
            call("syscall", LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights, beneath), 0)
            os.close(beneath)
    call("syscall", LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)


def deny_calls(*, namespaces: bool, own_user: bool = True) -> None:
    """Install a seccomp filter: calls that reach beyond the sandbox or its limits fail with EPERM.

    Args:
        namespaces: other processes, and the files' attributes, are out of reach already.
        own_user: the user has no other files, so modes and owners may be changed.

    Raises OSError: not on this machine.
    """
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(f"the system calls of {machine} are not listed here")
    # An instruction: what, lines to skip if so, lines to skip if not, value.
    load, equal, at_least, any_bit, give, keep_bits = 0x20, 0x15, 0x35, 0x45, 0x06, 0x54
    kill, allow, refuse = (
        (give, 0, 0, 0x80000000),
        (give, 0, 0, 0x7FFF0000),
        (give, 0, 0, 0x00050001),
    )
    unknown = (give, 0, 0, 0x00050026)  # ENOSYS: the C library uses the older call then
    call_number, architecture, first, second, fourth = (
        (load, 0, 0, 0),
        (load, 0, 0, 4),
        (load, 0, 0, 16),
        (load, 0, 0, 24),
        (load, 0, 0, 40),
    )
    program = [architecture, (equal, 1, 0, ARCHITECTURES[machine]), kill, call_number]
    # the first: x32's numbers
    program += [(at_least, 0, 1, 0x40000000), refuse, (equal, 0, 1, CLONE3), unknown]
    lists: list[Mapping[str, tuple[int, ...]]] = [
        DENIED_CALLS,
        UNCOUNTED_MEMORY_CALLS,
        KEY_CALLS,
        NAMESPACE_CALLS,
    ]
    if not namespaces:
        lists += [OUTSIDE_CALLS, ATTRIBUTE_CALLS, *(() if own_user else (OWNERS_CALLS,))]
    for number in (number for numbers in lists for number in numbers[machine]):
        program += [(equal, 0, 1, number), refuse]
    looked_at = {
        number: [first, (equal, 1, 0, 0), refuse, allow] for number in CALLS_FOR_ITSELF[machine]
    }
    looked_at[CLONE[machine]] = [first, (any_bit, 0, 1, NEW), refuse, allow]
    shared = (keep_bits, 0, 0, MAP_SHARED_ANONYMOUS)
    looked_at[MMAP[machine]] = [fourth, shared, (equal, 0, 1, MAP_SHARED_ANONYMOUS), refuse, allow]
    if not namespaces:
        for number, commands in zip(COMMANDING_CALLS[machine], DENIED_COMMANDS, strict=True):
            refused = [line for command in commands for line in ((equal, 0, 1, command), refuse)]
            looked_at[number] = [second, *refused, allow]
        kinds = [
            second,
            (keep_bits, 0, 0, TYPE_MASK),
            (equal, 2, 0, SOCK_STREAM),
            (equal, 1, 0, SOCK_SEQPACKET),
        ]
        looked_at[SOCKETPAIR[machine]] = [
            first,
            (equal, 1, 0, AF_UNIX),
            refuse,
            *kinds,
            refuse,
            allow,
        ]
    for number, lines in looked_at.items():
        program += [(equal, 0, len(lines), number), *lines]
    program.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    call("prctl", PR_SET_SECCOMP, 2, struct.pack("@HP", len(program), ctypes.addressof(code)), 0, 0)


def open_to_others(path: str) -> bool:
    """Return whether another user can reach an executable file."""
    while os.stat(path).st_mode & 0o001:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def drop_root(uid: int | None, *, keep_reading: bool = False) -> None:
    """Change from root to `uid`, without capabilities, but with `keep_reading` the one to read
    all files."""
    if uid is None:
        return
    if keep_reading:
        call("prctl", PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setregid(uid, uid)
    os.setreuid(uid, uid)
    for capability in READING_CAPABILITIES if keep_reading else ():
        bit = 1 << capability
        header = struct.pack("Ii", 0x20080522, 0)
        if LIBC.capset(header, struct.pack("6I", bit, bit, bit, 0, 0, 0)) == 0:
            call("prctl", PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0)
            return


def spawn(status: int, work: Callable[[], None]) -> int:
    """Run `work` in a child, which ends after it. Return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # Without handlers: the first process of a namespace gets only the signals that it has one
        # for.
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        work()
    except (OSError, ValueError) as error:  # ValueError: of setrlimit
        report(status, error=str(error))
    finally:
        os._exit(1)


def wait_for(child: int) -> int:
    """Return a child's exit code, or minus the signal. Other children are reaped meanwhile."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def end(child: int) -> None:
    try:
        os.kill(child, signal.SIGKILL)
        wait_for(child)
    except (ProcessLookupError, ChildProcessError):
        return  # it has ended, and was reaped


class Processes:
    """A reader of /proc, also from a root directory that has none. Raises OSError: this machine's
    /proc has too little."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._text(
            f"{os.getpid()}/task/{os.getpid()}/children",
            "the kernel does not list children in /proc",
        )
        self._text(f"{os.getpid()}/status", "the kernel does not show a process's memory in /proc")

    def over(self, specification: Mapping[str, Any], root: int) -> str | None:
        """Return the limit that what `root` has started exceeds together, or None."""
        running = self.descendants(root)
        limit = specification["memory"]
        if self._memory(running, "status", ("RssAnon", "VmSwap")) > limit:
            # Forked processes share pages: the exact number, of which this kernel may show nothing,
            # takes longer.
            exact = self._memory(running, "smaps_rollup", ("Pss_Anon", "SwapPss"))
            if exact > limit or not exact:
                return "memory"
        if specification["way"] == "namespaces":  # whose file system is as large as `disk`
            return None
        return (
            "disk"
            if self._written(specification["directory"], running) > specification["disk"]
            else None
        )

    def kill_descendants(self) -> None:
        """Kill all descendants. They are stopped first, until all are: they might fork faster
        than they are killed one by one. The children of a killed process become this one's
        (PR_SET_CHILD_SUBREAPER)."""
        while True:
            stopped: set[int] = set()
            while running := self.descendants(os.getpid()) - stopped:
                send(running, signal.SIGSTOP)
                stopped |= running
            send(stopped, signal.SIGKILL)
            try:
                os.wait()
            except ChildProcessError:
                return

    def descendants(self, root: int) -> set[int]:
        processes: set[int] = set()
        parents = [root]
        while parents:
            children = self._children(parents.pop()) - processes
            processes |= children
            parents += children
        return processes

    def _children(self, pid: int) -> set[int]:
        children: set[int] = set()
        for thread in self._list(f"{pid}/task"):
            children.update(map(int, self._text(f"{pid}/task/{thread}/children").split()))
        return children

    def _memory(self, pids: Iterable[int], file: str, names: Collection[str]) -> int:
        """Return the sum of the lines of these names, in bytes."""
        # Not splitlines(): a process may have a form feed and a line break in its name.
        lines = (line.split() for pid in pids for line in self._text(f"{pid}/{file}").split("\n"))
        return sum(int(line[1]) << 10 for line in lines if line and line[0].rstrip(":") in names)

    def _written(self, directory: str, pids: Iterable[int]) -> float:
        """Return the bytes of the files in a directory, and of those that are open and removed;
        infinity: too many files, or one that lies too deep to be looked at."""
        blocks: dict[tuple[int, int], int] = {}  # by (device, inode): a file may have several names
        waiting, files = [directory], 0
        while waiting and files <= MOST_FILES:
            try:
                for entry in os.scandir(waiting.pop()):
                    state, files = entry.stat(follow_symlinks=False), files + 1
                    blocks[state.st_dev, state.st_ino] = state.st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
            except (FileNotFoundError, PermissionError):
                continue  # it was removed meanwhile, or may not be entered
            except OSError:  # path too long
                return float("inf")
        for name in (f"{pid}/fd/{name}" for pid in pids for name in self._list(f"{pid}/fd")):
            try:
                state = os.stat(name, dir_fd=self._proc)
            except OSError:
                continue  # it was closed meanwhile
            if state.st_nlink == 0:
                blocks[state.st_dev, state.st_ino] = state.st_blocks
        return float("inf") if files > MOST_FILES else 512 * sum(blocks.values())

    def _list(self, path: str) -> list[str]:
        """Return the names in a directory; none if the process has ended, or may not be looked
        at."""
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return []
        try:
            return os.listdir(directory)
        except (FileNotFoundError, ProcessLookupError):
            return []
        finally:
            os.close(directory)

    def _text(self, path: str, needed: str = "") -> str:
        """Return a file; "" if the process has ended, or may not be looked at. Raises OSError:
        it is `needed`."""
        try:
            with open(
                os.open(path, os.O_RDONLY, dir_fd=self._proc), errors="replace", newline="\n"
            ) as file:
                return file.read()
        except (FileNotFoundError, ProcessLookupError, PermissionError) as error:
            if needed:
                raise OSError(f"{needed} ({error})") from error
            return ""


def watch(seconds: float, over: Callable[[], str | None]) -> None:
    """Raise StopRequest in this thread with the limit that `over` names, or "timeout" after so
    many seconds."""
    ends = time.monotonic() + seconds

    def look(_number: int, _frame: Any) -> None:
        spent = time.process_time()
        limit = "timeout" if time.monotonic() >= ends else over()
        if limit is not None:
            _ignore_stops()
            raise StopRequest(limit)
        # to look costs a tenth of a core at most
        pause = max(WATCH_S, 10 * (time.process_time() - spent))
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, min(pause, ends - time.monotonic())))

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(WATCH_S, seconds))


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue  # it has ended


def _ignore_stops() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library. Raises OSError: it returns -1."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(getattr(LIBC, name)(*values))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def report(status: int, **fields: Any) -> None:
    os.write(status, json.dumps(fields).encode() + b"\n")
