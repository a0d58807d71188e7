"""10,000 malformed groups among 1,000 good ones, sent to a real training daemon over eight
connections.

    .venv/bin/python -m tests.soak.malformed_groups

Every malformed one must be answered 4xx and lie in quarantine with a reason; every good one must be
trained on; memory must stay bounded and the daemon alive. A body of 50 MB may be cut off instead of
answered; its row must be there.
"""

import argparse
import collections
import copy
import gzip
import json
import random
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.soak.kill_rollouts import wait_until_trained
from tests.soak.training_daemon import BATCH_SIZE, Body, TrainingDaemon, sampled_groups

CONNECTIONS = 8
POOL = 40
MB = 1 << 20
MAX_GROWTH_MB = 1024  # eight connections, bodies of up to 32 MB each, as Python objects
NAN, INFINITY = float("nan"), float("inf")
JSON = {"Content-Type": "application/json"}
GZIP = JSON | {"Content-Encoding": "gzip"}

Random = random.Random


@dataclass(frozen=True)
class Wrong:
    """One request that must be refused."""

    content: bytes | Callable[[], Iterator[bytes]]
    headers: dict[str, str]


def change(path: str, value: Any) -> Callable[[Random, Body], Wrong]:
    """A group with one value changed; `path` names keys and indices."""

    def wrong(generator: Random, group: Body) -> Wrong:
        group = copy.deepcopy(group)
        *parents, last = [
            int(part) if part.lstrip("-").isdigit() else part for part in path.split(".")
        ]
        place: Any = group
        for key in parents:
            place = place[key]
        place[last] = value(place[last]) if callable(value) else value
        return Wrong(json.dumps(group).encode(), JSON)

    return wrong


def no_prompt(generator: Random, group: Body) -> Wrong:
    return Wrong(
        json.dumps(group | {"masks": [group["tokens"][0], *group["masks"][1:]]}).encode(), JSON
    )


def versions(generator: Random, group: Body) -> Wrong:
    return Wrong(
        json.dumps(
            group | {"policy_versions": [[2**70] * len(row) for row in group["tokens"]]}
        ).encode(),
        JSON,
    )


def too_many(generator: Random, group: Body) -> Wrong:
    rows = ("tokens", "masks", "scores", "inference_logprobs")
    return Wrong(
        json.dumps(group | {name: group[name] * (BATCH_SIZE // 4 + 1) for name in rows}).encode(),
        JSON,
    )


def body(content: bytes, headers: dict[str, str] = JSON) -> Callable[[Random, Body], Wrong]:
    return lambda generator, group: Wrong(content, headers)


def cut(generator: Random, group: Body) -> Wrong:
    content = json.dumps(group).encode()
    return Wrong(content[: generator.randrange(1, len(content) - 1)], JSON)


def noise(generator: Random, group: Body) -> Wrong:
    return Wrong(generator.randbytes(generator.randrange(1, 2000)), GZIP)


def cut_gzip(generator: Random, group: Body) -> Wrong:
    content = gzip.compress(json.dumps(group).encode())
    return Wrong(content[: generator.randrange(1, len(content) - 1)], GZIP)


def chunks(generator: Random, group: Body) -> Wrong:
    def pieces() -> Iterator[bytes]:
        for _ in range(50):
            yield b"[" * MB

    return Wrong(pieces, JSON)


COMMON: dict[str, Callable[[Random, Body], Wrong]] = {
    "a label too few": change("masks.0", lambda row: row[:-1]),
    "a log-probability too many": change("inference_logprobs.1", lambda row: [*row, -1.0]),
    "a score too few": change("scores", lambda row: row[:-1]),
    "a sequence too many": change("tokens", lambda rows: [*rows, rows[0]]),
    "advantages for one sequence": change("advantages", [[1.0]]),
    "NaN as a score": change("scores.2", NAN),
    "infinite score": change("scores.0", -INFINITY),
    "NaN as a log-probability": change("inference_logprobs.0.-1", NAN),
    "infinite log-probability": change("inference_logprobs.3.-1", -INFINITY),
    "NaN as a temperature": change("generation_params", {"temperature": NAN}),
    "id out of range": change("tokens.0.0", 10_000),
    "negative id": change("tokens.0.0", -3),
    "id of 70 bits": change("tokens.0.0", 2**70),
    "id is text": change("tokens.0.0", "five"),
    "id is a fraction": change("tokens.0.0", 1.5),
    "tokens are text": change("tokens", "abc"),
    "scores are objects": change("scores", [{}, {}, {}, {}]),
    "messages are a number": change("messages", 5),
    "label is not the token": change("masks.0.-1", lambda token: token + 1),
    "0 and 1 for labels": change("masks.0", lambda row: [int(label >= 0) for label in row]),
    "log-probability above 0": change("inference_logprobs.0.-1", 0.5),
    "log-probability missing": change("inference_logprobs.0.-1", 1.0),
    "no log-probabilities": change("inference_logprobs", None),
    "nothing sampled": change("masks.0", lambda row: [-100] * len(row)),
    "no prompt": no_prompt,
    "more sequences than a batch": too_many,
    "too long": change("tokens.0", lambda row: row * 40),
    "images": change("images", ["data:image/png;base64,"]),
    "supervised": change("overrides", [{"sft": True}]),
    "env_id is text": change("env_id", "first"),
    "half a character as an id": change("group_id", "\ud800"),
    "half a character as a name": change("environment", "\ud800"),
    "half a character as a key": change("messages", [[{"\ud800": 1}]]),
    "versions of 70 bits": versions,
    "nested deep": body(b'{"tokens": ' + b"[" * 900 + b"]" * 900 + b"}"),
    "no tokens": change("tokens", []),
    "empty sequences": body(json.dumps({"tokens": [[]], "masks": [[]], "scores": [1.0]}).encode()),
    "an empty object": body(b"{}"),
    "a list": body(b"[]"),
    "null": body(b"null"),
    "nothing": body(b""),
    "not JSON": body(b"tokens=1,2,3"),
    "not UTF-8": body(b'{"tokens": "\xff"}'),
    "nested too deep": body(b"[" * 100_000),
    "cut off": cut,
    "gzip noise": noise,
    "gzip cut off": cut_gzip,
}
RARE: dict[str, Callable[[Random, Body], Wrong]] = {
    "50 MB": body(b"[" * (50 * MB)),
    "50 MB in chunks": chunks,
    "20 MB of text for ids": body(
        b'{"tokens": [[' + b'"a",' * (5 * MB) + b'"a"]], "masks": [], "scores": []}'
    ),
    "20 MB of ids": body(
        b'{"tokens": [[' + b"7," * (10 * MB) + b'7]], "masks": [[1]], "scores": [0.5]}'
    ),
    "gzip of 200 MB": body(gzip.compress(b"[" * (200 * MB), 1), GZIP),
}
RARE_EACH = 8


@dataclass
class Sent:
    """The senders' own log."""

    statuses: dict[str, collections.Counter[int]] = field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    faults: list[str] = field(default_factory=list)

    def note(self, kind: str, status: int, text: str, expected: tuple[int, ...]) -> None:
        self.statuses[kind][status] += 1
        if status not in expected:
            self.faults.append(f"{kind}: {status} {text[:200]}")


def send(
    url: str, todo: Iterator[str], lock: threading.Lock, pool: list[Body], seed: int, sent: Sent
) -> None:
    generator = Random(seed)
    with httpx.Client(base_url=url, timeout=120) as client:
        while True:
            with lock:
                kind = next(todo, None)
            if kind is None:
                return
            group = generator.choice(pool) | {"scores": [generator.random() for _ in range(4)]}
            if kind == "good":
                reply = client.post("/atropos/scored_data", json=group)
                sent.note(kind, reply.status_code, reply.text, (200,))
                continue
            wrong = (COMMON | RARE)[kind](generator, group)
            content = wrong.content() if callable(wrong.content) else wrong.content
            try:
                reply = client.post("/atropos/scored_data", content=content, headers=wrong.headers)
                sent.note(kind, reply.status_code, reply.text, (400, 413, 422))
            except httpx.TransportError as error:
                sent.note(kind, 0, repr(error), (0,) if kind.startswith("50 MB") else ())


def watch(process: psutil.Process, ended: threading.Event, resident: list[int]) -> None:
    while not ended.wait(0.1):
        resident.append(process.memory_info().rss)


def run(directory: Path, bad: int, good: int, seed: int = 0) -> list[str]:
    """Print what came; return the faults."""
    generator = Random(seed)
    daemon = TrainingDaemon(
        directory, "rl_training.max_staleness=1000000", "rl_training.checkpoint_interval=50"
    )
    try:
        daemon.wait_until_ready()
        pool, sent = sampled_groups(daemon.url, POOL, generator), Sent()
        kinds = list(RARE) * RARE_EACH
        kinds += ["good"] * good + [
            list(COMMON)[number % len(COMMON)] for number in range(bad - len(kinds))
        ]
        generator.shuffle(kinds)
        todo, lock, ended, resident = iter(kinds), threading.Lock(), threading.Event(), list[int]()
        watcher = threading.Thread(
            target=watch, args=(psutil.Process(daemon.process.pid), ended, resident)
        )
        watcher.start()
        started = time.monotonic()
        arguments = (daemon.url, todo, lock, pool)
        senders = [
            threading.Thread(target=send, args=(*arguments, seed, sent))
            for seed in range(CONNECTIONS)
        ]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        seconds = time.monotonic() - started
        wait_until_trained(daemon)
        ended.set()
        watcher.join()
        faults = sent.faults + ([] if daemon.end() == 0 else ["the daemon did not end in order"])
    finally:
        daemon.kill()
    return faults + report(daemon, sent, bad, good, seconds, resident)


def report(
    daemon: TrainingDaemon, sent: Sent, bad: int, good: int, seconds: float, resident: list[int]
) -> list[str]:
    connection = sqlite3.connect(f"file:{daemon.run / 'rollouts.sqlite'}?mode=ro", uri=True)
    states = dict(
        connection.execute("SELECT state, COUNT(*) FROM groups GROUP BY state").fetchall()
    )
    reasons = [reason for (reason,) in connection.execute("SELECT reason FROM rejects").fetchall()]
    connection.close()
    for kind, statuses in sorted(sent.statuses.items()):
        print(
            f"{kind:30}",
            ", ".join(f"{status or 'cut off'} ×{count}" for status, count in statuses.items()),
        )
    megabytes = [value / MB for value in resident]
    growth = max(megabytes) - megabytes[0]
    size = sum(file.stat().st_size for file in daemon.run.glob("rollouts.sqlite*")) / MB
    print(
        f"\n{bad} malformed and {good} good groups in {seconds:.0f} s; ledger: {states};"
        f" quarantine: {len(reasons)}"
    )
    print(
        f"resident: {megabytes[0]:.0f} MB at the start, at most {max(megabytes):.0f},"
        f" {megabytes[-1]:.0f} at the end;"
        f" rollouts.sqlite {size:.1f} MB"
    )
    faults = []
    if states != {"taken": good}:
        faults.append(f"of {good} good groups: {states}")
    if len(reasons) != bad or not all(reasons):
        faults.append(
            f"of {bad} malformed groups {len(reasons)} lie in quarantine, {reasons.count('')}"
            " without reason"
        )
    if growth > MAX_GROWTH_MB:
        faults.append(f"the daemon grew by {growth:.0f} MB")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bad", type=int, default=10_000)
    parser.add_argument("--good", type=int, default=1_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        faults = run(Path(directory), args.bad, args.good)
    print(f"{len(faults)} faults")
    for fault in faults[:20]:
        print("-", fault)
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
