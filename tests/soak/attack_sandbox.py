"""Attacks of an answer's code, of reward functions, and by damaged files. attack.py runs them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from mlx_parallm.execution.sandbox import sandbox as module
from mlx_parallm.execution.sandbox.sandbox import PROTECTIONS, Sandbox, SandboxRun
from mlx_parallm.rewards.code import fenced
from scripts.bench import sandbox as bench
from tests.soak.attack_target import Target, attack

TRAIN = str(Path(sys.executable).parent / "mlx_parallm_train")
SMALL = (
    *("rl_training.batch_size=16", "rl_training.atropos.rollout_batch_size=16"),
    *(
        "rl_training.checkpoint_interval=2",
        "rl_training.atropos.max_token_length=64",
        "server.port=0",
    ),
    "environments.0.group_size=8",
)
SHARED_FOR_EVER = """
import ctypes
library = ctypes.CDLL(None)
for _ in range(3):
    place = library.shmget(0, 10 << 20, 0o1600)
    print("made" if place >= 0 else "refused")
"""
KEYRING = "import ctypes\nprint(ctypes.CDLL(None).syscall(250, 0, -3, 0))\n"


def runs(program: str) -> dict[str, SandboxRun]:
    """Run a program in every way that this machine has."""
    runs_by_way, ways = {}, module.WAYS
    try:
        for way in bench.ways():
            if set(PROTECTIONS) <= (module._trial(way)[0] or frozenset()):
                bench.only(way)
                runs_by_way[way] = Sandbox(timeout_s=5.0, processes=64).run(program)
    finally:
        module.WAYS = ways
    assert runs_by_way, "the sandbox runs nothing here"
    return runs_by_way


def described(runs_by_way: dict[str, SandboxRun]) -> str:
    return ", ".join(
        f"{way}: {run.outcome} {run.returncode}, {run.seconds:.1f} s"
        for way, run in runs_by_way.items()
    )


@attack("3 GB in files of memory and in processes", got_through=True)
def memory(target: Target) -> str:
    for program in (bench.FILES_IN_MEMORY, bench.SHARED_MEMORY, bench.FORKED_MEMORY):
        runs_by_way = runs(program)
        assert not any("held" in run.stdout for run in runs_by_way.values()), described(runs_by_way)
    return described(runs_by_way)


@attack("0.5 GB in files, removed or not", got_through=True)
def files(target: Target) -> str:
    for program in (bench.MANY_FILES, bench.REMOVED_FILES):
        runs_by_way = runs(program)
        assert not any("written" in run.stdout for run in runs_by_way.values()), described(
            runs_by_way
        )
    return described(runs_by_way)


@attack("shared memory that outlives the run", got_through=True)
def shared_memory(target: Target) -> str:
    before = Path("/proc/sysvipc/shm").read_text()
    runs_by_way = runs(SHARED_FOR_EVER)
    assert not any("made" in run.stdout for run in runs_by_way.values()), described(runs_by_way)
    assert Path("/proc/sysvipc/shm").read_text() == before
    return described(runs_by_way)


@attack("the session's keyring", got_through=True)
def keyring(target: Target) -> str:
    if os.uname().machine != "x86_64":
        return "not tried: the number of the call is x86_64's"
    runs_by_way = runs(KEYRING)
    assert {run.stdout for run in runs_by_way.values()} == {"-1\n"}, described(runs_by_way)
    return described(runs_by_way)


@attack("1,200 nested directories; signals for what started the code", got_through=True)
def raising(target: Target) -> str:
    for program in (bench.DEEP_DIRECTORIES, bench.PARENT_ENDED):
        runs_by_way = runs(program)
    assert all(run.stdout == "alive\n" for run in runs_by_way.values()), described(runs_by_way)
    return described(runs_by_way)


@attack("60 kB of openings of code blocks", got_through=True)
def blocks(target: Target) -> str:
    longest, done = 0.0, threading.Event()

    def tick() -> None:
        nonlocal longest
        while not done.is_set():
            before = time.monotonic()
            time.sleep(0.005)
            longest = max(longest, time.monotonic() - before)

    thread = threading.Thread(target=tick)
    thread.start()
    for unit in ("```python\n", "```x\n"):
        assert fenced(unit * 20_000) == []
    done.set()
    thread.join()
    assert longest < 1, f"another thread stalled for {longest:.1f} s"
    return f"another thread stalled for {longest:.2f} s at most"


# ---------------------------------------------------------------------- trainings


def training(directory: Path, reward: str, *settings: str, steps: int = 100_000) -> list[str]:
    """The command of a training whose reward function has this body."""
    directory.mkdir()
    (directory / "reward.py").write_text(
        f"import os, time\ncalls = 0\ndef own(completions, **columns):\n{reward}\n"
    )
    (directory / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{n} + 1 ="}}\n' for n in range(40))
    )
    settings_of_run = [
        *SMALL,
        f"rl_training.checkpoint_dir='{directory}'",
        f"rl_training.total_steps={steps}",
        *settings,
    ]
    data = [
        "--model",
        "builtin:tiny",
        "--data",
        str(directory / "rows.jsonl"),
        "--reward",
        f"{directory}/reward.py:own",
    ]
    sets = [
        part
        for setting in [*settings_of_run, "rl_training.run_name='run'"]
        for part in ("--set", setting)
    ]
    return [TRAIN, *data, *sets]


FINE = "    return [float(len(set(text))) / 50 for text in completions]"
SPINS = (
    "    if any(directory.startswith('step_') for directory in os.listdir(RUN)):\n        while"
    f" True: pass\n{FINE}"
)
ENDS = f"    global calls\n    calls += 1\n    if calls == 6: os._exit(0)\n{FINE}"


def ended(command: list[str], seconds: float = 300) -> tuple[int, str]:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
    )
    return done.returncode, done.stderr


@attack("SIGTERM while a reward function spins", got_through=True)
def spinning(target: Target) -> str:
    directory = target.directory / "spins"
    command = training(
        directory, SPINS.replace("RUN", f"'{directory}/run'"), "environments.0.timeout_s=2"
    )
    with (target.directory / "spins.txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 200
        while not list(directory.glob("run/step_*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(10)
        process.send_signal(signal.SIGTERM)
        started = time.monotonic()
        code = process.wait(timeout=120)
    except subprocess.TimeoutExpired as error:
        raise AssertionError("it runs on after 120 s") from error
    finally:
        process.kill()
        process.wait()
    assert code == 0, (target.directory / "spins.txt").read_text()[-500:]
    return f"ended after {time.monotonic() - started:.0f} s"


@attack("os._exit(0) in a reward function, with --restarts 2", got_through=True)
def exits(target: Target) -> str:
    code, text = ended([*training(target.directory / "exits", ENDS), "--restarts", "2"])
    assert code == 1 and "is not done" in text, f"exit code {code}: {text[-300:]}"
    return f"exit code {code} after {text.count('ended with exit code 0')} such ends"


@attack("a checkpoint with changed bytes, and one of step -5", got_through=True)
def damaged(target: Target) -> str:
    directory = target.directory / "damaged"
    code, text = ended(training(directory, FINE, steps=2))
    assert code == 0, text[-500:]
    run, seen = directory / "run", []
    resume = [TRAIN, "--resume", str(run), "--set", "rl_training.total_steps=4"]
    lines = (run / "metrics.jsonl").read_text()
    shutil.copytree(run, directory / "kept", symlinks=True)
    for name in ("adapters.safetensors", "optimizer.safetensors"):
        file = (run / "latest" / name).resolve()
        content = bytearray(file.read_bytes())
        content[-4000:] = bytes(byte ^ 255 for byte in content[-4000:])
        file.write_bytes(content)
        code, text = ended(resume)
        assert code == 2 and name in text, f"exit code {code}: {text[-300:]}"
        seen.append(code)
        shutil.rmtree(run)
        shutil.copytree(directory / "kept", run, symlinks=True)
    state = (run / "latest" / "trainer_state.json").resolve()
    (state.parent / "SHA256SUMS").unlink()
    state.write_text(json.dumps(json.loads(state.read_text()) | {"step": -5}))
    code, text = ended(resume)
    assert code == 2 and "Traceback" not in text, f"exit code {code}: {text[-300:]}"
    assert (run / "metrics.jsonl").read_text() == lines, "metrics.jsonl was cut"
    return f"exit codes {[*seen, code]}, nothing was cut"


@attack("learning rates of 1e30 and inf", got_through=True)
def learning_rates(target: Target) -> str:
    code, text = ended(
        training(target.directory / "infinite", FINE, "rl_training.learning_rate=inf")
    )
    assert code == 2 and "finite number" in text, f"exit code {code}: {text[-300:]}"
    directory = target.directory / "large"
    code, text = ended(training(directory, FINE, "rl_training.learning_rate=1e30", steps=4))
    lines = [
        json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    # a step without a group to train on has none
    updates = [line for line in lines if line["loss"] is not None]
    refused = sum(line["publishes_refused"] for line in lines)
    skipped = sum(line["skipped_steps"] or 0 for line in lines)
    served = {line["policy_version"] for line in lines}
    assert code == 0 and updates and refused + skipped == len(updates) and served == {0}, (
        f"exit code {code}, {len(updates)} updates, {refused} refused, {skipped} skipped,"
        f" served {served}: {text[-99:]}"
    )
    return (
        f"inf: exit code 2; 1e30: of {len(updates)} updates {refused} refused, {skipped}"
        " skipped; version 0 is served"
    )


@attack("numbers in a config.json that no model has", got_through=True)
def numbers(target: Target) -> str:
    seen = []
    tiny = Path(module.__file__).parents[2] / "models" / "tiny"
    for key, value in {"vocab_size": -1, "rope_theta": 0, "num_hidden_layers": 10**6}.items():
        path = target.directory / key
        shutil.copytree(tiny, path)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {key: value}))
        serve = TRAIN.replace("_train", "_serve")
        code, text = ended([serve, "--model-path", str(path), "--port", "0"], 60)
        assert code == 2 and "Traceback" not in text, f"{key}: exit code {code}: {text[-300:]}"
        seen.append(key)
    return f"{', '.join(seen)}: exit code 2 in words"
