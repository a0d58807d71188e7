"""Attacks on the HTTP server, and on a training by the groups that reach it over HTTP."""

import gzip
import json
import os
import random
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np

from mlx_parallm.rollout_store.checks import TOO_LARGE
from mlx_parallm.rollout_store.store import RolloutStore
from tests.soak.attack_target import MB, Server, Target, Watch, attack, open_files
from tests.soak.training_daemon import GROUP_SIZE, TrainingDaemon, sampled_groups

JSON = {"Content-Type": "application/json"}
GZIP = JSON | {"Content-Encoding": "gzip"}
MOST_CPU_S = 5.0  # whatever else the machine does
Q_PROJ = "model.layers.0.self_attn.q_proj"


# ---------------------------------------------------------------------- connections and bodies


@attack("2,300 idle connections", got_through=True)
def idle_connections(target: Target) -> str:
    server = target.server()
    connections = [server.connect() for _ in range(2300)]
    try:
        started = time.monotonic()
        assert server.answers(), "/health does not answer"
        seconds = time.monotonic() - started
        held = open_files(server.process.pid)
        assert held < 1200, f"the server holds {held} files"
    finally:
        for connection in connections:
            connection.close()
    assert "Traceback" not in server.output.read_text(), "a traceback is in the log"
    return f"/health after {seconds:.2f} s, the server holds {held} files"


@attack("2,300 idle connections while a training saves checkpoints", got_through=True)
def idle_connections_of_a_training(target: Target) -> str:
    daemon = target.training()
    port = int(daemon.url.rpartition(":")[2])
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(2300)]
    try:
        steps = trained(daemon, 4)
    finally:
        for connection in connections:
            connection.close()
    saved = len(list(daemon.run.glob("step_*")))
    assert saved, f"no checkpoint after step {steps}"
    return f"step {steps}, {saved} checkpoints"


@attack("50 half headers", got_through=True)
def half_headers(target: Target) -> str:
    server = target.server()
    started = time.monotonic()
    for connection in [
        server.connect(b"POST /v1/completions HTTP/1.1\r\nHost: loc") for _ in range(50)
    ]:
        connection.settimeout(60)
        with suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        connection.close()
    return f"closed after {time.monotonic() - started:.0f} s"


@attack("100 bodies of 33 MB that stop after 31 MB", got_through=True)
def half_bodies(target: Target) -> str:
    server = target.server()
    header = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    )
    header += b"Content-Length: 33000000\r\n\r\n"
    held: list[socket.socket] = []

    def send() -> None:
        connection = server.connect(header)
        held.append(connection)
        with suppress(OSError):
            connection.sendall(b" " * (31 * MB))

    with Watch(server) as watch:
        together([send] * 100)
    for connection in held:
        connection.close()
    assert watch.grown_mb < 1500, str(watch)
    return str(watch)


@attack("1,500 lines of garbage", got_through=True)
def garbage(target: Target) -> str:
    server = target.server()
    before = server.output.read_text().count("\n")
    for _ in range(1500):
        with (
            closing(server.connect(b"\x16\x03\x01 garbage\r\n\r\n")) as connection,
            suppress(ConnectionResetError),
        ):
            connection.recv(4096)
    lines = server.output.read_text().count("\n") - before
    assert lines < 20, f"{lines} lines of log"
    return f"{lines} lines of log"


@attack("a chunked body without an end", got_through=False)
def endless_body(target: Target) -> str:
    header = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    with closing(
        target.server().connect(header + b"Content-Type: application/json\r\n\r\n")
    ) as connection:
        for _ in range(40):
            connection.sendall(b"%x\r\n%s\r\n" % (MB, b" " * MB))
        status = connection.recv(100).partition(b"\r\n")[0].decode()
    assert " 413 " in status, status
    return status


@attack("200 hang-ups in the middle of a stream", got_through=False)
def hang_ups(target: Target) -> str:
    server = target.server()
    body = {
        "model": "default",
        "prompt": "a",
        "max_tokens": 500,
        "stream": True,
        "ignore_eos": True,
    }
    for _ in range(200):
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_lines())
    answer = server.post("/v1/completions", {"model": "default", "prompt": "a", "max_tokens": 1})
    assert answer.status_code == 200
    return f"{open_files(server.process.pid)} files open"


# ---------------------------------------------------------------------- what a body holds


def costly(server: Server, path: str, body: bytes, *statuses: int) -> str:
    """Send it once; nobody may wait for long, and it may not cost a gigabyte."""
    with Watch(server) as watch:
        status = server.post(path, content=body, headers=JSON).status_code
    assert status in statuses and watch.cpu_s < MOST_CPU_S and watch.grown_mb < 1000, (
        f"{status}, {watch}"
    )
    return f"{status}, {watch}"


FAULTY = {
    "8 MB of numbers as stop strings": (
        "/v1/completions",
        b'{"prompt":"a","stop":[%s1]}' % (b"1," * (4 * MB)),
    ),
    "8 MB of faulty prompts": ("/v1/completions", b'{"prompt":[%s[-1]]}' % (b"[-1]," * 1_000_000)),
    "8 MB of negative ids": ("/generate", b'{"input_ids":[%s-1]}' % (b"-1," * (8 * MB // 3))),
    "8 MB of messages that are none": (
        "/v1/chat/completions",
        b'{"messages":[%s1]}' % (b"1," * (4 * MB)),
    ),
    "8 MB of tools that are none": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":"a"}],"tools":[%s1]}' % (b"1," * (4 * MB)),
    ),
    "8 MB of rewards that are none": (
        "/v1/rewards",
        b'{"id":"a","rewards":[%s""]}' % (b'"",' * (8 * MB // 3)),
    ),
    "500,000 unknown fields": (
        "/v1/completions",
        b'{"prompt":"a",%s}' % b",".join(b'"x%d":1' % n for n in range(500_000)),
    ),
    "500,000 faulty biases": (
        "/v1/completions",
        b'{"prompt":"a","logit_bias":{%s}}' % b",".join(b'"x%d":1' % n for n in range(500_000)),
    ),
}


def _enter(name: str, path: str, body: bytes) -> None:
    @attack(name, got_through=True)
    def faulty(target: Target) -> str:
        return costly(target.server(), path, body, 400, 413)


for _name, (_path, _body) in FAULTY.items():
    _enter(_name, _path, _body)


@attack("32 MB of empty lists", got_through=True)
def empty_lists(target: Target) -> str:
    return costly(
        target.server(), "/v1/completions", b'{"prompt":[%s[]]}' % (b"[]," * (10 * MB)), 413
    )


@attack("/detokenize of 5 million ids", got_through=True)
def detokenize(target: Target) -> str:
    return costly(target.server(), "/detokenize", b'{"tokens":[%s1]}' % (b"1," * 5_000_000), 400)


@attack("200,000 messages of one letter", got_through=True)
def messages(target: Target) -> str:
    body = b'{"messages":[%s]}' % b",".join([b'{"role":"user","content":"a"}'] * 200_000)
    return costly(target.server(), "/v1/chat/completions", body, 400)


@attack("100,000 stop strings for 32 rows", got_through=True)
def stop_strings(target: Target) -> str:
    ask = {"model": "default", "prompt": "a", "n": 32, "max_tokens": 64, "ignore_eos": True}
    server = target.server()
    refused = server.post("/v1/completions", ask | {"stop": [f"stop {n}" for n in range(100_000)]})
    assert refused.status_code == 400, refused.text[:200]
    started = time.monotonic()
    assert server.post("/v1/completions", ask).status_code == 200
    plain = time.monotonic() - started
    allowed = ["a" * 255 + chr(0x400 + n) for n in range(64)]
    assert server.post("/v1/completions", ask | {"stop": allowed}).status_code == 200
    seconds = time.monotonic() - started - plain
    assert seconds < 5 * plain + 5, f"{seconds:.1f} s with 64 stop strings, {plain:.1f} s without"
    return f"400; 64 of the longest: {seconds:.1f} s, none: {plain:.1f} s"


@attack("JSON that is none: deep, NaN, long numbers, cut, bad UTF-8", got_through=False)
def bad_json(target: Target) -> str:
    bodies = (
        b"[" * 5_000_000,
        b'{"prompt": NaN}',
        b'{"prompt": 1%s}' % (b"0" * 100_000),
        b'{"prompt"',
        b'"\xff"',
        b"",
    )
    server = target.server()
    for body in bodies:
        status = server.post("/v1/completions", content=body, headers=JSON).status_code
        assert 400 <= status < 500, f"{status} for {body[:30]!r}"
    return f"{len(bodies)} bodies: 4xx"


# ---------------------------------------------------------------------- adapters


def adapter(
    server: Server, name: str, config: Any = None, *, rank: int = 2, fill: float = 0.0
) -> Path:
    """A PEFT adapter of one layer, of a wrong shape: what is tried comes before that is looked
    at."""
    directory = server.roots / name
    directory.mkdir(exist_ok=True)
    shapes = {"A": (rank, 8), "B": (8, rank)}
    tensors = {
        f"base_model.model.{Q_PROJ}.lora_{k}.weight": mx.array(np.full(s, fill, np.float32))
        for k, s in shapes.items()
    }
    mx.save_safetensors(str(directory / "adapter_model.safetensors"), tensors)
    (directory / "adapter_config.json").write_text(
        json.dumps({"r": rank, "lora_alpha": rank} | (config or {}))
    )
    return directory


def refused(server: Server, name: str, path: Path, words: str) -> str:
    with Watch(server) as watch:
        answer = server.post(
            "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, timeout_s=30
        )
    assert answer.status_code == 400 and words in answer.text, (
        f"{answer.status_code}: {answer.text[:200]}"
    )
    assert watch.cpu_s < MOST_CPU_S, str(watch)
    return f"400, {watch}"


@attack("an alpha_pattern that backtracks for ever", got_through=True)
def alpha_pattern(target: Target) -> str:
    server = target.server()
    refused(
        server,
        "p",
        adapter(server, "p", {"alpha_pattern": {"(([a-z._0-9]*)*)*!": 4}}),
        "the adapter's A is",
    )
    slow = {r"(\w|\.|[a-z])*[A-Z]": 4}  # tries each letter in two ways
    return refused(server, "p", adapter(server, "p", {"alpha_pattern": slow}), "take more than")


@attack("an alpha_pattern that is not a regular expression", got_through=True)
def invalid_pattern(target: Target) -> str:
    server = target.server()
    return refused(server, "i", adapter(server, "i", {"alpha_pattern": {"(": 4}}), "alpha_pattern")


@attack("a pipe as adapter_config.json, ten times", got_through=True)
def pipe(target: Target) -> str:
    server = target.server()
    directory = adapter(server, "f")
    (directory / "adapter_config.json").unlink()
    os.mkfifo(directory / "adapter_config.json")
    for _ in range(10):
        refused(server, "f", directory, "needs adapter_config.json")
    return "400"


@attack("adapters with NaN, and of rank 2,000,000", got_through=True)
def adapters_out_of_bounds(target: Target) -> str:
    server = target.server()
    refused(server, "n", adapter(server, "n", fill=float("nan")), "not finite")
    refused(server, "s", adapter(server, "s", {"lora_alpha": float("inf")}), "not finite")
    return refused(server, "r", adapter(server, "r", rank=2_000_000), "highest is")


@attack("adapter names: half a character, 100,000 characters, an escape", got_through=True)
def adapter_names(target: Target) -> str:
    server = target.server()
    path = str(adapter(server, "name"))
    for name in ('"\\ud800"', json.dumps("x" * 100_000), json.dumps("\x1b[2J")):
        body = f'{{"lora_name": {name}, "lora_path": {json.dumps(path)}}}'.encode()
        answer = server.post("/v1/load_lora_adapter", content=body, headers=JSON)
        refused = "printable" in answer.text or "at most 4096" in answer.text
        assert answer.status_code == 400 and refused, answer.text[:200]
    assert httpx.get(f"{server.url}/v1/models").status_code == 200
    return "400, /v1/models 200"


@attack("adapters out of the roots: links, .., /etc", got_through=False)
def adapter_paths(target: Target) -> str:
    server = target.server()
    (server.roots / "link").unlink(missing_ok=True)
    (server.roots / "link").symlink_to("/etc")
    for path in (server.roots / "link", server.roots / ".." / "..", Path("/etc/passwd")):
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": str(path)})
        assert answer.status_code == 403, f"{answer.status_code} for {path}"
    return "403"


# ---------------------------------------------------------------------- who may talk to it


@attack("foreign pages: Host, Origin, Sec-Fetch-Site in capitals", got_through=True)
def foreign_pages(target: Target) -> str:
    server = target.server()
    for headers in (
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "Cross-Site"},
    ):
        status = httpx.get(f"{server.url}/v1/models", headers=headers).status_code
        assert status == 403, f"{status} with {headers}"
    return "403"


@attack("weak keys on every address: one character, spaces", got_through=True)
def weak_keys(target: Target) -> str:
    for key in ("k", "  "):
        command = [
            str(Path(sys.executable).parent / "mlx_parallm_serve"),
            "--model-path",
            "builtin:tiny",
        ]
        ended = subprocess.run(
            [*command, "--host", "0.0.0.0", "--port", "0"],
            env={**os.environ, "MLX_PARALLM_API_KEY": key},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr[-300:]
    return ended.stderr.strip()[-80:]


# ---------------------------------------------------------------------- groups


def together(calls: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def trained(daemon: TrainingDaemon, more: int) -> int:
    """Send groups until it has made so many steps more; return the step."""
    metrics = daemon.run / "metrics.jsonl"

    def step() -> int:
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    wanted, deadline = step() + more, time.monotonic() + 120
    generator = random.Random(step())
    groups = sampled_groups(daemon.url, 8, generator)
    while step() < wanted:
        daemon.check()
        assert time.monotonic() < deadline, f"step {step()}, not {wanted}, in time"
        for group in groups:
            scores = [generator.random() for _ in range(GROUP_SIZE)]
            httpx.post(
                f"{daemon.url}/atropos/scored_data", json=group | {"scores": scores}, timeout=60
            )
        time.sleep(0.5)
    return step()


LARGE = ([1e308] * 4, [1e308, -1e308, 0, 0], [1e200, -1e200, 1, 0], [1e155, 0, 0, 0])


@attack("rewards of 1e308 over both ways in", got_through=True)
def large_rewards(target: Target) -> str:
    daemon = target.training()
    [group] = sampled_groups(daemon.url, 1, random.Random(1))
    for rewards in LARGE:
        answer = httpx.post(
            f"{daemon.url}/atropos/scored_data", json=group | {"scores": rewards}, timeout=60
        )
        assert answer.status_code == 422, answer.text[:200]
        ask = {"model": "default", "prompt": "a", "n": GROUP_SIZE, "max_tokens": 4}
        made = httpx.post(f"{daemon.url}/v1/completions", json=ask, timeout=60).json()["id"]
        answer = httpx.post(
            f"{daemon.url}/v1/rewards", json={"id": made, "rewards": rewards}, timeout=60
        )
        assert answer.status_code == 400, answer.text[:200]
    return f"422 and 400; step {trained(daemon, 2)}"


@attack("a resume with rewards of 1e308 in the store", got_through=True)
def large_rewards_in_the_store(target: Target) -> str:
    """Put rewards into the store as an older version without a bound left them: durable, and
    waiting."""
    with target.daemon("stored") as daemon:
        trained(daemon, 4)
        daemon.kill()
        with closing(RolloutStore(daemon.run / "rollouts.sqlite")) as store:
            [stored] = store.groups(sorted(store.known_ids())[:1])
            for number, rewards in enumerate(LARGE):
                scored = zip(stored.rollouts, rewards, strict=True)
                rollouts = tuple(
                    replace(rollout, scores={"reward": reward}) for rollout, reward in scored
                )
                store.add(
                    replace(stored, group_id=f"large{number}", rollouts=rollouts), source="atropos"
                )
        daemon.start()
        daemon.wait_until_ready()
        step = trained(daemon, 2)
        with closing(sqlite3.connect(daemon.run / "rollouts.sqlite")) as database:
            [[dropped]] = database.execute(
                "SELECT COUNT(*) FROM groups WHERE reason = ?", (TOO_LARGE,)
            )
    assert dropped == len(LARGE), f"{dropped} of {len(LARGE)} were dropped with the reason"
    return f"{dropped} groups dropped with the reason; step {step}"


@attack("registrations without bounds", got_through=True)
def registrations(target: Target) -> str:
    daemon = target.training()
    entry = {"max_token_length": 64, "desired_name": "e", "weight": 1, "group_size": 8}
    changes: tuple[dict[str, Any], ...] = (
        {"min_batch_allocation": 1e308},
        {"weight": 1e308},
        {"group_size": 10**400},
        {"desired_name": "x" * (1 << 20)},
    )
    for change in changes:
        answer = httpx.post(f"{daemon.url}/atropos/register-env", json=entry | change, timeout=60)
        assert answer.status_code == 422, answer.text[:200]
    return f"422; step {trained(daemon, 2)}"


@attack("65 KB of gzip that are 64 MB of lists, six at once", got_through=True)
def packed_lists(target: Target) -> str:
    daemon = target.training()
    body = gzip.compress(b'{"tokens":[%s[]]}' % (b"[]," * (64 * MB // 3)))
    deep = gzip.compress(b'{"images":[%s[]]}' % (b"[]," * 10_000_000))

    def send(content: bytes) -> Callable[[], object]:
        return lambda: httpx.post(
            f"{daemon.url}/atropos/scored_data", content=content, headers=GZIP, timeout=120
        )

    with Watch(daemon) as watch:
        together([send(body)] * 6 + [send(deep)] * 6)
    assert watch.grown_mb < 1500, str(watch)
    return f"{watch}; step {trained(daemon, 2)}"


@attack("a gzip bomb of 900 MB", got_through=False)
def bomb(target: Target) -> str:
    daemon = target.training()
    content = gzip.compress(b" " * (900 * MB), compresslevel=1)
    answer = httpx.post(
        f"{daemon.url}/atropos/scored_data", content=content, headers=GZIP, timeout=120
    )
    assert answer.status_code == 413, answer.text[:200]
    return "413"


@attack("the same id rewarded 12 times at once", got_through=False)
def rewarded_twice(target: Target) -> str:
    daemon = target.training()
    ask = {"model": "default", "prompt": "a", "n": GROUP_SIZE, "max_tokens": 4}
    made = httpx.post(f"{daemon.url}/v1/completions", json=ask, timeout=60).json()["id"]
    statuses: list[int] = []
    reward = {"id": made, "rewards": [0, 1, 0, 1]}

    def send() -> None:
        statuses.append(httpx.post(f"{daemon.url}/v1/rewards", json=reward, timeout=60).status_code)

    together([send] * 12)
    assert statuses.count(200) == 1, str(sorted(statuses))
    return str(sorted(set(statuses)))
