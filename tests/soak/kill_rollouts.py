"""kill -9 of the training daemon at random moments under a steady flow of groups: is any lost, is
any trained twice?

    .venv/bin/python -m tests.soak.kill_rollouts --kills 20

Four connections send scored groups to /atropos/scored_data all the while, each again until it is
answered, and note what was answered "received". The daemon is killed while it starts, resumes,
waits, trains or saves, and started again with `--resume auto`. At the end every group on the
senders' list must be in the ledger exactly once: trained on, dropped with a reason, or waiting for
more groups to make a batch; and what the ledger says of each step must be what the step's metrics
line counts. One group in ten has equal scores, one in ten log-probabilities of no model, half have
no id.
"""

import argparse
import collections
import json
import random
import sqlite3
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from mlx_parallm.faces.atropos.wire import from_scored_data
from tests.soak.training_daemon import (
    BATCH_SIZE,
    GROUP_SIZE,
    Body,
    TrainingDaemon,
    sampled_groups,
)

SENDERS = 4
POOL = 40
NO_VARIANCE, MISFIT = 0.1, 0.1  # shares of the groups sent
NATS = 9.0  # how far off log-probabilities of no model are


@dataclass
class Sent:
    """The senders' own log."""

    received: list[str] = field(default_factory=list)  # ids
    refused: list[str] = field(default_factory=list)
    cut_off: int = 0  # requests that a kill left without an answer, and that were sent again


class Sender(threading.Thread):
    """One connection at `rate` groups a second."""

    def __init__(self, url: str, pool: list[Body], seed: int, rate: float, sent: Sent) -> None:
        super().__init__(daemon=True)
        self._url, self._pool, self._rate, self._sent = url, pool, rate, sent
        self._generator = random.Random(seed)
        self._prefix = f"sender-{seed}"
        self.ended = threading.Event()

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            number = 0
            while not self.ended.wait(self._generator.expovariate(self._rate)):
                body = self._group(number)
                group_id = from_scored_data(body, policy_version=0, environment="").group_id
                self._send(client, body, group_id)
                number += 1

    def _group(self, number: int) -> Body:
        generator = self._generator
        body = dict(generator.choice(self._pool))
        scores = [generator.random() for _ in range(GROUP_SIZE)]
        kind = generator.random()
        if kind < NO_VARIANCE:
            scores = scores[:1] * GROUP_SIZE
        elif kind < NO_VARIANCE + MISFIT:
            rows = body["inference_logprobs"]
            body["inference_logprobs"] = [
                [value if value > 0 else value - NATS for value in row] for row in rows
            ]
        body["scores"] = scores
        if generator.random() < 0.5:
            body["group_id"] = f"{self._prefix}-{number}"
        return body

    def _send(self, client: httpx.Client, body: Body, group_id: str) -> None:
        """Until it is answered: a daemon that is down or was killed in mid-request is asked
        again."""
        while True:
            try:
                reply = client.post("/atropos/scored_data", json=body)
            except httpx.TransportError as error:
                self._sent.cut_off += not isinstance(error, httpx.ConnectError)
                time.sleep(0.05)
                continue
            if reply.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                time.sleep(0.05)
                continue
            kept = (
                self._sent.received
                if reply.json().get("status") == "received"
                else self._sent.refused
            )
            kept.append(group_id)
            return


@dataclass
class Kill:
    after_s: float  # since the process was started
    ready: bool
    step: int | None  # the last one in metrics.jsonl
    received: int


@dataclass
class Audit:
    """The result of comparing the senders' log with the ledger and the metrics."""

    states: dict[str, int]
    faults: list[str]


def run_kills(
    directory: Path, kills: int, *, seed: int = 0, rate: float = 40.0
) -> tuple[list[Kill], Sent, Audit]:
    """`rate`: groups a second. Raises AssertionError when the daemon ends by itself."""
    generator = random.Random(seed)
    daemon = TrainingDaemon(directory)
    try:
        daemon.wait_until_ready()
        sent, pool = Sent(), sampled_groups(daemon.url, POOL, generator)
        senders = [
            Sender(daemon.url, pool, number, rate / SENDERS, sent) for number in range(SENDERS)
        ]
        for sender in senders:
            sender.start()
        done = [_kill(daemon, generator, sent, first=number == 0) for number in range(kills)]
        daemon.wait_until_ready()
        for sender in senders:
            sender.ended.set()
        for sender in senders:
            sender.join()
        wait_until_trained(daemon)
        assert daemon.end() == 0, f"see {daemon.output}"
    finally:
        daemon.kill()
    return done, sent, audit(daemon.run, sent)


def _kill(daemon: TrainingDaemon, generator: random.Random, sent: Sent, *, first: bool) -> Kill:
    """One kill and the start after it: every fourth while the daemon starts, the others in the
    seconds after that."""
    started = time.monotonic()
    if first or generator.random() < 0.75:
        daemon.wait_until_ready()
        time.sleep(generator.uniform(0.0, 2.5))
    else:
        time.sleep(generator.uniform(0.0, 3.0))
    daemon.check()
    ready = daemon.is_ready()
    daemon.kill()
    lines = read_metrics(daemon.run)
    kill = Kill(
        time.monotonic() - started,
        ready,
        lines[-1]["step"] if lines else None,
        len(sent.received),
    )
    daemon.start()
    return kill


def wait_until_trained(daemon: TrainingDaemon, timeout_s: float = 300) -> None:
    """Until fewer groups wait than make a batch, and the last batch has its line: SIGTERM stops
    inside a step."""
    deadline = time.monotonic() + timeout_s
    while httpx.get(daemon.url + "/atropos/status").json()[
        "queue_size"
    ] >= BATCH_SIZE // GROUP_SIZE or max(
        (step for _, state, step, _ in read_ledger(daemon.run) if state == "taken"), default=0
    ) > len(read_metrics(daemon.run)):
        daemon.check()
        assert time.monotonic() < deadline, "what waits is not trained on in time"
        time.sleep(0.1)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Complete lines of metrics.jsonl."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def read_ledger(run: Path) -> list[tuple[str, str, int | None, str | None]]:
    """Each group's id, state, step and reason."""
    connection = sqlite3.connect(f"file:{run / 'rollouts.sqlite'}?mode=ro", uri=True)
    rows = connection.execute("SELECT group_id, state, step, reason FROM groups").fetchall()
    connection.close()
    return rows


def audit(run: Path, sent: Sent) -> Audit:
    """Compare the senders' log with the ledger, and the ledger with the metrics, step by step."""
    rows = read_ledger(run)
    ledger = collections.Counter(group_id for group_id, *_ in rows)
    received = set(sent.received)
    faults = [f"lost: {group_id}" for group_id in sorted(received - ledger.keys())]
    faults += [f"never sent: {group_id}" for group_id in sorted(ledger.keys() - received)]
    faults += [
        f"{count} times in the ledger: {group_id}"
        for group_id, count in ledger.items()
        if count > 1
    ]
    faults += [
        f"dropped without a reason: {row[0]}" for row in rows if row[1] == "dropped" and not row[3]
    ]
    words = {
        group_id: state if reason is None else f"{state}: {reason.split(':')[0]}"
        for group_id, state, _, reason in rows
    }
    steps: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for group_id, _, step, _ in rows:
        steps[step or 0][words[group_id]] += 1
    lines = read_metrics(run)
    if [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
        faults.append(f"steps of metrics.jsonl: {[line['step'] for line in lines]}")
    for line in lines:
        if (marked := steps.pop(line["step"], collections.Counter())) != (
            counted := _counted(line)
        ):
            faults.append(
                f"step {line['step']}: {dict(counted)} in the metrics, {dict(marked)} in the ledger"
            )
    unfinished = len(lines) + 1  # what was dropped while its batch was not yet together
    faults += [
        f"step {step}: {dict(states)}, no line"
        for step, states in steps.items()
        if step not in (0, unfinished)
    ]
    faults += [f"trained in the unfinished step {unfinished}"] * bool(steps[unfinished]["taken"])
    return Audit(dict(collections.Counter(words.values())), faults)


def _counted(line: dict[str, Any]) -> collections.Counter[str]:
    """Count a step's groups by its metrics, in the ledger's words."""
    groups, equal = line["groups"], round(line["groups"] * line["groups_without_variance"])
    return +collections.Counter(
        {
            "taken": groups - equal,
            "dropped: no variance": equal,
            "dropped: too old": line["dropped_stale"],
            "dropped: other tokenizer or model": line["dropped_misfit"],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rate", type=float, default=40.0, help="groups a second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        kills, sent, result = run_kills(Path(directory), args.kills, seed=args.seed, rate=args.rate)
    print("kill  seconds after start  state     last step  received so far")
    for number, kill in enumerate(kills, 1):
        state = "ready" if kill.ready else "starting"
        print(
            f"{number:4}  {kill.after_s:19.2f}  {state:8}  {kill.step or '-':>9} "
            f" {kill.received:15}"
        )
    print(
        f"\n{len(sent.received)} groups received ({sent.cut_off} requests were cut"
        " off by a kill, and sent again)"
    )
    for state, count in sorted(result.states.items()):
        print(f"  {count:6}  {state}")
    print(f"{len(result.faults)} faults")
    for fault in result.faults[:20]:
        print("-", fault)
    raise SystemExit(bool(result.faults or sent.refused))


if __name__ == "__main__":
    main()
