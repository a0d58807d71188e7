"""Real ranks: processes of this machine over MLX's ring, launched as `mlx.launch` does it."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import psutil
import pytest

from mlx_parallm.errors import EXIT_AGAIN
from mlx_parallm.models.loading import resolve_model_path
from mlx_parallm.rollout_store.store import RolloutStore
from tests.integration import processes
from tests.integration.in_process import train_here
from tests.integration.processes import BIN, free_port, metrics
from tests.signals_reset import default_signals

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def launch(directory: Path, count: int, command: list[str]) -> list[subprocess.Popen[str]]:
    """Ranks 0, 1, … of one launch; each its own session, so that signals reach one at a time."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [[f"127.0.0.1:{end.getsockname()[1]}"] for end in sockets]
    for end in sockets:
        end.close()
    (directory / "hosts.json").write_text(json.dumps(hosts))
    environment = os.environ | {
        "MLX_HOSTFILE": str(directory / "hosts.json"),
        "MKL_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            command,
            env=environment | {"MLX_RANK": str(rank)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=default_signals,
        )
        for rank in range(count)
    ]


def outputs(
    ranks: list[subprocess.Popen[str]], timeout_s: float = 90
) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each; whoever is left then is killed."""
    try:
        results = []
        for process in ranks:
            out, err = process.communicate(timeout=timeout_s)
            results.append((process.returncode, out, err))
        return results
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def program(directory: Path, what: str, count: int = 2) -> list[subprocess.Popen[str]]:
    return launch(directory, count, [sys.executable, "-m", "tests.integration.ranks_program", what])


@pytest.mark.long
def test_three_ranks_exchange_add_and_tell(tmp_path: Path) -> None:
    found = outputs(program(tmp_path, "calls", 3))
    assert [code for code, _, _ in found] == [0, 0, 0], found
    results = [json.loads(out.splitlines()[-1]) for _, out, _ in found]
    for result in results:
        assert result["exchanged"] == [{"rank": r, "column": [r, r + 1, r + 2]} for r in range(3)]
        assert result["sums"] == [
            ["mlx.core.float32", [3, 5], 7.0],
            ["mlx.core.uint32", [], 21.0],
            ["mlx.core.float32", [4_000_000], 4.5],
        ]
        assert result["stopped"] is None
    assert [result.get("told") for result in results] == [None, ["work", None], ["work", None]]


@pytest.mark.long
def test_ranks_with_other_versions_are_refused_in_one_line(tmp_path: Path) -> None:
    first, second = outputs(program(tmp_path, "versions"))
    assert (
        first[0] == 1
        and first[2].splitlines()[-1]
        == "rank 1 has mlx-parallm 0.1, rank 0 mlx-parallm 0.0: install the same on all"
    )
    assert second[0] == 2
    assert "0.1" not in second[2]


@pytest.mark.long
def test_a_rank_with_another_model_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    """Of the same shapes: a single number differs."""
    runs = tmp_path / "runs"
    config, other = write_config(tmp_path, steps=1, runs=runs), tmp_path / "other"
    shutil.copytree(resolve_model_path("builtin:tiny"), other)
    weights = dict(mx.load(str(other / "model.safetensors")))
    name = max(weights)
    mx.save_safetensors(
        str(other / "model.safetensors"),
        weights | {name: weights[name] + 1e-3},
        {"format": "mlx"},
    )
    start = "import os, sys; from mlx_parallm.cli import train; sys.exit(train(sys.argv[1:3] + "
    start += "(['--model', sys.argv[3]] if os.environ['MLX_RANK'] == '1' else [])))"
    first, second = outputs(
        launch(tmp_path, 2, [sys.executable, "-c", start, "--config", str(config), str(other)])
    )
    errors = [line for line in (first[2] + second[2]).splitlines() if line.startswith("error")]
    assert errors == [
        f"error: rank 1: {other} is another model, or another version of it, than on rank 0"
    ]
    assert (first[0], second[0]) == (2, 0)
    assert not runs.exists() or not list(runs.iterdir())


@pytest.mark.parametrize("how", ["dies", "vanishes"])
def test_a_lost_rank_ends_the_collective_and_the_process(tmp_path: Path, how: str) -> None:
    ranks = program(tmp_path, how)
    started = time.monotonic()
    try:
        out, err = ranks[0].communicate(timeout=60)
        code, seconds = ranks[0].returncode, time.monotonic() - started
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    result = json.loads(out.splitlines()[-1])
    assert result["sum"] is None
    assert "rank 1 of 2 is gone" in result["lost"]
    assert code == {"dies": 0, "vanishes": 2}[how], err
    assert seconds < 40


@pytest.mark.parametrize(
    ("how", "why"), [("stops", "not all ranks have come"), ("stands", "although all are there")]
)
def test_a_sum_that_does_not_end_ends_the_process(tmp_path: Path, how: str, why: str) -> None:
    ranks = program(tmp_path, how)
    try:
        out, err = ranks[0].communicate(timeout=60)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    [line] = [line for line in out.splitlines() if line.startswith("{")]
    result = json.loads(line)
    assert result["sum"] is None and result["again"] is True
    assert why in result["lost"] and "rank_timeout_s" in result["lost"]
    assert ranks[0].returncode == EXIT_AGAIN, err


def test_a_rank_that_waits_for_one_that_never_comes_can_be_ended(tmp_path: Path) -> None:
    """By a signal, or when its time is up: MLX's connecting holds Python's lock, so no handler
    of ours would run."""
    config = write_config(tmp_path, steps=1, runs=tmp_path)
    command = [str(BIN / "mlx_parallm_train"), "--config", str(config)]
    impatient = (
        "from mlx_parallm.distributed import ranks as distributed; distributed.JOIN_S = 1;"
        " distributed.join()"
    )
    for started, code in ((command, -signal.SIGTERM), ([sys.executable, "-c", impatient], 1)):
        [alone, other] = launch(tmp_path, 2, started)
        other.kill()
        other.communicate()
        try:
            if code != 1:
                assert alone.stderr is not None
                assert any("waiting for the other ranks" in line for line in alone.stderr)
                alone.terminate()
            alone.communicate(timeout=20)
            assert alone.returncode == code
        finally:
            alone.kill()
            alone.communicate()


def write_config(directory: Path, *, steps: int, runs: Path) -> Path:
    training = "deterministic = true\nupdate_epochs = 2"
    return processes.write_config(
        directory, steps=steps, interval=1000, directory=runs, training=training
    )


def train_with_ranks(config: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "mlx_parallm_train", "--config", config, *flags],
        env=os.environ | {"MKL_NUM_THREADS": "1"},
        cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120, preexec_fn=default_signals,
    )  # fmt: skip


def ask_while_paused(training: "Future[Any]", url: str) -> None:
    """Pauses both ranks, sends requests, which wait on both, forgets prompts and continues."""
    with httpx.Client(base_url=url, timeout=60) as http, ThreadPoolExecutor(6) as pool:

        def ranks_with(name: str) -> set[int]:
            found = re.findall(
                rf'^mlx_parallm_rank_{name}{{rank="(\d)"}} [1-9]', http.get("/metrics").text, re.M
            )
            return {int(rank) for rank in found}

        def ready() -> bool:
            try:
                return http.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        def until(condition: Callable[[], bool]) -> None:
            while not condition():
                assert not training.done(), training.result()
                time.sleep(0.02)  # other processes, whose state only their routes tell

        until(ready)
        assert http.post("/pause", params={"mode": "wait"}).status_code == 200
        until(lambda: not ranks_with("running"))  # none of the training either
        until(lambda: 'rank_policy_version{rank="1"}' in http.get("/metrics").text)
        body = {"prompt": "a", "max_tokens": 4}
        answers = [pool.submit(http.post, "/v1/completions", json=body) for _ in range(6)]
        until(lambda: ranks_with("waiting") == {0, 1})
        assert http.post("/reset_prefix_cache").json() == {"success": True}
        assert http.post("/resume").status_code == 200
        assert [answer.result().status_code for answer in answers] == [200] * 6


def test_two_ranks_train_and_sample_as_one_process_does(tmp_path: Path) -> None:
    """The first step has the same rollouts, so the same numbers; in each step every rank samples
    with its weights."""
    one, two = tmp_path / "one", tmp_path / "two"
    train_here(write_config(tmp_path, steps=1, runs=one))
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        flags = ("--ranks", "2", "--set", f"server.port={port}")
        training = pool.submit(train_with_ranks, write_config(tmp_path, steps=3, runs=two), *flags)
        ask_while_paused(training, f"http://127.0.0.1:{port}")
        launched = training.result()
    assert launched.returncode == 0, launched.stderr
    first, second = (metrics(directory / "run") for directory in (one, two))
    assert [line["step"] for line in second] == [1, 2, 3]
    for name in (
        "loss",
        "grad_norm",
        "entropy",
        "reward_mean",
        "tokens",
        "update_norm",
        "optimizer_updates",
    ):
        assert second[0][name] == pytest.approx(first[0][name], rel=1e-4, abs=1e-6), name
    assert (two / "run/final").exists()
    with closing(RolloutStore(two / "run/rollouts.sqlite")) as store:
        taken = {step: store.groups(store.taken_by(step)) for step in (1, 2, 3)}
    for step, groups in taken.items():
        assert {group.metadata.get("rank", 0) for group in groups} == {0, 1}
        assert {version for group in groups for version in group.sampled_versions} == {step - 1}
        assert second[step - 1]["logprob_diff_max"] < 1e-4, (
            "each rank samples with the weights that are trained"
        )
    ids = [group.group_id for groups in taken.values() for group in groups]
    assert len(ids) == len(set(ids))
    assert "training state taken from rank 0" not in launched.stderr, (
        "no weights have crossed the network"
    )


@pytest.mark.long
def test_a_launch_of_two_trains_as_one_process_does(tmp_path: Path) -> None:
    """The real mlx.launch."""
    command = [
        str(BIN / "mlx_parallm_train"),
        "--config",
        str(write_config(tmp_path, steps=1, runs=tmp_path)),
    ]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    launched = subprocess.run(
        [BIN / "mlx.launch", "-n", "2", "--backend", "ring", "--starting-port", str(port), "--", *command],
        capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=120,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr
    assert "ranks joined" in launched.stderr + launched.stdout
    assert len(metrics(tmp_path / "run")) == 1
    assert (tmp_path / "run/final").exists()


@pytest.mark.long
def test_a_deterministic_run_of_two_ranks_resumes_to_the_same_bits(tmp_path: Path) -> None:
    whole, halves = (
        write_config(tmp_path, steps=4, runs=tmp_path / "whole").read_text(),
        tmp_path / "halves",
    )
    (tmp_path / "whole.toml").write_text(whole)
    config = write_config(tmp_path, steps=4, runs=halves)
    runs = [
        train_with_ranks(tmp_path / "whole.toml", "--ranks", "2"),
        train_with_ranks(config, "--ranks", "2", "--set", "rl_training.total_steps=2"),
        train_with_ranks(config, "--ranks", "2", "--resume", "auto"),
    ]
    assert [run.returncode for run in runs] == [0, 0, 0], runs[-1].stderr
    first, second = (metrics(directory / "run") for directory in (tmp_path / "whole", halves))
    assert len(first) == len(second) == 4
    for ours, theirs in zip(first, second, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "entropy",
            "reward_mean",
            "tokens",
            "update_norm",
            "policy_version",
        ):
            assert ours[name] == theirs[name], (ours["step"], name)
    adapters = [
        dict(mx.load(str(run / "run/final/adapters.safetensors")))
        for run in (tmp_path / "whole", halves)
    ]
    assert all(
        mx.array_equal(array, adapters[1][name]).item() for name, array in adapters[0].items()
    )


@pytest.mark.long
@pytest.mark.parametrize("killed", [0, 1])
def test_a_run_goes_on_without_a_rank_that_was_killed(tmp_path: Path, killed: int) -> None:
    """kill -9 in the middle of a run of two: the other one continues from the checkpoint, and no
    group is lost, or trained on twice."""
    config = write_config(tmp_path, steps=40, runs=tmp_path)
    settings = ["rl_training.on_rank_lost='continue'", "rl_training.checkpoint_interval=3"]
    flags = ["--ranks", "2", *(part for setting in settings for part in ("--set", setting))]
    parent = subprocess.Popen(
        [BIN / "mlx_parallm_train", "--config", config, *flags],
        env=os.environ | {"MKL_NUM_THREADS": "1"},
        cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, preexec_fn=default_signals,
    )  # fmt: skip
    written, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 60
    while (
        not (written.exists() and written.read_text().count("\n") >= 5)
        and time.monotonic() < deadline
    ):
        assert parent.poll() is None, parent.communicate()
        time.sleep(0.02)
    children = {
        int(child.environ()["MLX_RANK"]): child for child in psutil.Process(parent.pid).children()
    }
    children[killed].kill()
    _, said = parent.communicate(timeout=120)
    assert parent.returncode == 0, said
    assert f"rank {killed} of 2 died of SIGKILL" in said
    assert "starting again with 1 from step_" in said
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 41))
    with closing(RolloutStore(tmp_path / "run/rollouts.sqlite")) as store:
        ids = [group for step in range(1, 41) for group in store.taken_by(step)]
        known = store.known_ids()
    assert len(ids) == len(set(ids))
    numbers = sorted(int(each.rsplit("-", 1)[1]) for each in known)
    assert numbers == list(range(len(numbers))), (
        "every group that was started has come, also those of the killed rank"
    )


def test_a_killed_rank_leaves_a_checkpoint_that_goes_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=400, runs=tmp_path)
    command = [str(BIN / "mlx_parallm_train"), "--config", str(config), "--resume", "auto"]
    ranks = launch(tmp_path, 2, command)
    written, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 60
    while (
        not (written.exists() and written.read_text().count("\n") >= 2)
        and time.monotonic() < deadline
    ):
        assert ranks[0].poll() is None, ranks[0].communicate()
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGKILL)
    code, _, said = outputs(ranks)[0]
    assert code == 2, said
    assert "rank 1 of 2 is gone" in said
    assert "--resume auto" in said
    done = len(metrics(tmp_path / "run"))
    assert list((tmp_path / "run").glob("step_*"))
    # the number of ranks may change
    train_here(config, f"rl_training.total_steps={done + 1}", resume="auto")
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, done + 2))


@pytest.mark.parametrize(
    "where", ["in a step", pytest.param("between two", marks=pytest.mark.long)]
)
def test_a_rank_that_is_asked_to_stop_stops_all_in_order(tmp_path: Path, where: str) -> None:
    """In a step, or while rank 0 waits for rollouts: of an external source that never sends any."""
    config = write_config(tmp_path, steps=400, runs=tmp_path)
    if where == "between two":
        text = config.read_text()
        config.write_text(
            text[: text.index("[[environments]]")] + '[model]\nbase_path = "builtin:tiny"\n'
        )
    ranks = launch(
        tmp_path, 2, [str(BIN / "mlx_parallm_train"), "--config", str(config), "--resume", "auto"]
    )
    told, written = threading.Event(), tmp_path / "run/metrics.jsonl"
    lines: list[str] = []

    def read() -> None:
        assert ranks[0].stderr is not None
        for line in ranks[0].stderr:
            lines.append(line)
            if "ranks joined" in line:
                told.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert told.wait(60), lines
    deadline = time.monotonic() + 60
    while (
        where == "in a step"
        and not (written.exists() and written.stat().st_size)
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    ranks[1].terminate()
    try:
        codes = [process.wait(60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
        reader.join()
        for process in ranks:
            process.communicate()
    assert codes == [0, 0], lines
    assert any("another rank was asked to" in line for line in lines), lines
    assert where == "between two" or metrics(tmp_path / "run")
    assert (tmp_path / "run/latest/trainer_state.json").is_file()
