"""A GPU that fails under a run that serves and trains: does it end where it would have ended?

    .venv/bin/python -m tests.soak.gpu_faults --faults 300 --zeros 100 --hangs 4 --out FILE

*Faults*: evaluations of engine, trainer, publish, checkpoint, held-out evaluation and adapter
loader raise the texts of Metal, CUDA and MLX, in deterministic runs under `--restarts`, with
clients that ask and load adapters all the while. Each run has to write the numbers and the weights
of one without faults, each version has to answer as in the other runs, and each client
gets its answer or an error in words.
*Zeros*: an evaluation gives zeros once, in a gradient, the optimizer, the adapter, the log-
probabilities of a step, keys, or the sampler. It has to be noticed before the step ends. What the
model computes to check itself before the first step is left out: a check that fails there chooses
the plain path, which gives the same numbers.
*Groups*: evaluations of the trainer raise while scored groups come over HTTP. Each group that was
answered "received" has to be in the ledger once.
*Hangs*: an evaluation never returns, with the interpreter held or not. The process has to be
killed and started again within a minute, and ends as the other runs.

All go the way that a GPU takes (MLX_PARALLM_DEVICE=gpu-like). Each piece draws from a seed of its
own and is a line of FILE when it is done: started again, the script continues after the last one.
"""

import argparse
import collections
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.errors import DeviceFaultError
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from mlx_parallm.system.log import configure_logging
from mlx_parallm.system.terminal import Console
from tests.soak.faulty_evaluations import TEXTS, Plan, fired_of, inject, planned
from tests.soak.kill_rollouts import POOL, SENDERS, Sender, Sent, audit, wait_until_trained
from tests.soak.resume_bits import Run, differences
from tests.soak.training_daemon import TrainingDaemon, sampled_groups

STEPS = 12
FAULTS_OF_A_RUN = 20
HANGS_OF_A_RUN = 2
RESTART_S = 60.0
ROUNDING = 1e-4
RAISES = {
    "engine": 150,
    "trainer": 60,
    "publish": 5,
    "checkpoint": 3,
    "evaluation": 30,
    "loader": 2,
    "any": 250,
}
"""Place → evaluations there in some two steps: a fault comes at any of them."""
RECEIVING = ("trainer", "publish", "checkpoint")
"""Places of faults while groups come from outside, and the engine has no work."""
ZEROS = ("gradient", "optimizer", "adapter", "scores", "keys", "sampler")
PROMPTS = ("Sort: hgfa", "Reverse: dcba")
TRAINING = """
dynamic_sampling = false

[evaluation]
problems = 4
every = 3
"""


@dataclass
class Clients:
    """What clients heard: answers by "version prompt", and errors by kind. `adapter`: a directory
    that one of them loads again and again, or None."""

    url: str
    adapter: Path | None
    answers: dict[str, list[Any]] = field(default_factory=dict)
    heard: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self, pause_s: float) -> None:
        """Ask until `ended`; one thread of several. An answer counts for a version that was served
        before and after it, and so for all of its tokens and the prompt's."""
        prompts = itertools.cycle(PROMPTS)
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.ended.wait(pause_s):
                body = {"model": "default", "prompt": next(prompts), "max_tokens": 8}
                body |= {"temperature": 0, "logprobs": 1}
                before = self._version(client)
                answer = self._post(client, "/v1/completions", body)
                if answer is not None and before is not None and before == self._version(client):
                    self._note(f"{before} {body['prompt']}", answer.json()["choices"][0])

    def _version(self, client: httpx.Client) -> int | None:
        try:
            answer = client.get("/v1/models/default")
        except httpx.TransportError:
            return None
        ok = answer.status_code == httpx.codes.OK
        return int(answer.json()["policy_version"]) if ok else None

    def load(self, pause_s: float) -> None:
        """Load and unload an adapter until `ended`."""
        body = {"lora_name": "extra", "lora_path": str(self.adapter), "load_inplace": True}
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.ended.wait(pause_s):
                self._post(client, "/v1/load_lora_adapter", body)

    def _post(self, client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response | None:
        try:
            response = client.post(path, json=body)
        except httpx.ConnectError:
            self.heard["nobody there"] += 1
            return None
        except httpx.TransportError as error:
            self.heard[f"cut off: {type(error).__name__}"] += 1
            return None
        if response.status_code != httpx.codes.OK:
            self.heard[f"error {response.status_code}"] += 1
            error = response.json().get("error", {})
            if not error.get("message") or "type" not in error:
                self.wrong.append(f"an error without words: {response.text[:200]}")
            return None
        self.heard["adapter" if "lora_name" in body else "answer"] += 1
        return response

    def _note(self, key: str, choice: dict[str, Any]) -> None:
        said = [choice["text"], *choice["logprobs"]["token_logprobs"]]
        if not alike(self.answers.setdefault(key, said), said):
            self.wrong.append(f"version {key} answered {said} and {self.answers[key]}")


def alike(one: list[Any], other: list[Any]) -> bool:
    """Whether two greedy answers are the same text, with the same log-probabilities but for the
    rounding of other rows beside it."""
    return (
        one[0] == other[0]
        and len(one) == len(other)
        and all(abs(a - b) < ROUNDING for a, b in zip(one[1:], other[1:], strict=True))
    )


@dataclass
class Piece:
    """A line of the results. `fired`: where and when; `answers`: by "version prompt"; `wrong`: what
    should not be."""

    name: str
    plans: list[dict[str, Any]]
    fired: list[dict[str, Any]]
    wrong: list[str]
    seconds: float
    heard: dict[str, int] = field(default_factory=dict)
    answers: dict[str, list[Any]] = field(default_factory=dict)


class Results:
    """The pieces that are done, in a file of JSON lines; None: nowhere."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        text = file.read_text() if file is not None and file.exists() else ""
        self.pieces = {
            piece.name: piece for piece in (Piece(**json.loads(line)) for line in text.splitlines())
        }

    def once(self, name: str, make: Callable[[], Piece | None]) -> Piece | None:
        """Return the piece of that name, made now where it is not there yet. None: `make` has
        none."""
        if name in self.pieces:
            return self.pieces[name]
        if (piece := make()) is None:
            return None
        self.pieces[name] = piece
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(piece)) + "\n")
        for text in piece.wrong:
            print(f"- {name}: {text}", flush=True)
        return piece

    def of(self, kind: str) -> list[Piece]:
        return [piece for name, piece in self.pieces.items() if name.startswith(f"{kind}-")]

    def other_answers(self) -> list[str]:
        """Name the answers of a version that are not those of the first run that was asked."""
        first, wrong = dict[str, list[Any]](), list[str]()
        for piece in self.pieces.values():
            for key, said in piece.answers.items():
                if not alike(first.setdefault(key, said), said):
                    wrong.append(f"{piece.name}: version {key} answered {said}, not {first[key]}")
        return wrong


def finish(
    run: Run, *arguments: str, plans: list[Plan], timeout_s: float, adapter: Path | None
) -> Piece:
    """Run to the end, with clients."""
    here, started = run.path.parents[1] / "faults", time.monotonic()
    clients = Clients(run.url, adapter)
    threads = [threading.Thread(target=clients.ask, args=(0.1,), daemon=True) for _ in range(2)]
    if adapter is not None:
        arguments = (*arguments, "--set", f'server.adapter_roots=["{adapter}"]')
        threads.append(threading.Thread(target=clients.load, args=(0.5,), daemon=True))
    for thread in threads:
        thread.start()
    command = [sys.executable, "-m", "tests.soak.preloaded_train", str(planned(here, plans))]
    command += ["--config", str(run.config), "--resume", "auto", *arguments]
    wrong = []
    with run.output.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout=timeout_s)
            if code:
                wrong.append(f"it ended with {code}: {run.output.read_text()[-1000:]}")
        except subprocess.TimeoutExpired:
            wrong.append(f"it did not end within {timeout_s:.0f} s")
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    clients.ended.set()
    for thread in threads:
        thread.join()
    return Piece(
        run.path.parents[1].name,
        [asdict(plan) for plan in plans],
        fired_of(here),
        wrong + clients.wrong,
        round(time.monotonic() - started, 1),
        dict(clients.heard),
        clients.answers,
    )


class FaultyRuns:
    """Runs with faults, beside one without."""

    def __init__(self, directory: Path, results: Results, seed: int, steps: int = STEPS) -> None:
        self._directory, self._results, self._seed, self._steps = directory, results, seed, steps
        self._reference = Run(directory / "reference", steps=steps, training=TRAINING)
        self.reference = finish(self._reference, plans=[], timeout_s=1200, adapter=None)
        self.reference.wrong.extend(self._reference_is_short())

    def run(self, kind: str, count: int, most: int) -> None:
        """Run until so many faults have come, at most `most` a run."""
        fired = 0
        for number in itertools.count():
            if fired >= count:
                return
            name = f"{kind}-{number}"
            plans = _plans(kind, random.Random(f"{self._seed} {name}"), min(most, count - fired))
            piece = self._results.once(name, partial(self._one, name, plans))
            assert piece is not None
            if not piece.fired:
                raise SystemExit(f"{name}: no fault came: {piece.wrong}")
            fired += len(piece.fired)

    def _one(self, name: str, plans: list[Plan]) -> Piece:
        run = Run(self._directory / name, steps=self._steps, training=TRAINING)
        most = 300 * len(plans) + 300
        adapter = self._reference.path / "final"
        restarts = str(len(plans) + 1)
        piece = finish(run, "--restarts", restarts, plans=plans, timeout_s=most, adapter=adapter)
        piece.wrong += differences(run.lines(), self._reference.lines())
        ours, other = (
            each.path / "final" / "adapters.safetensors" for each in (run, self._reference)
        )
        if not ours.is_file() or ours.read_bytes() != other.read_bytes():
            piece.wrong.append("the final weights are others")
        if any(plan.kind in ("hang", "sleep") for plan in plans):
            piece.wrong += late_restarts(run, piece.fired)
        shutil.rmtree(self._directory / name)
        return piece

    def _reference_is_short(self) -> list[str]:
        lines = len(self._reference.lines())
        return [f"{lines} of {self._steps} steps without faults"] * (lines != self._steps)


def _plans(kind: str, generator: random.Random, count: int) -> list[Plan]:
    return [_fault(generator) if kind == "faults" else _hang(generator, n) for n in range(count)]


def _fault(generator: random.Random, places: Sequence[str] = tuple(RAISES)) -> Plan:
    place = generator.choice(places)
    after, text = generator.randrange(RAISES[place]), generator.choice(TEXTS)
    return Plan("raise", place, after, text, sticks=generator.random() < 0.5)


def _hang(generator: random.Random, number: int) -> Plan:
    """After the first evaluations, which may take long: heartbeat.COLD."""
    place = generator.choice(("engine", "trainer"))
    return Plan(("hang", "sleep")[number % 2], place, 60 + generator.randrange(60))


def late_restarts(run: Run, fired: list[dict[str, Any]]) -> list[str]:
    """Name hangs that were not answered by a new start within a minute."""
    lines = map(json.loads, (run.path / "run.log").read_text().splitlines())
    killed = [line["timestamp"] for line in lines if "hung" in line["event"]]
    if len(fired) != len(killed):
        return [f"{len(fired)} hangs, {len(killed)} restarts"]
    took = [
        datetime.fromisoformat(at).timestamp() - hang["at"]
        for at, hang in zip(killed, fired, strict=True)
    ]
    return [f"started again after {s:.0f} s" for s in took if not 0 <= s <= RESTART_S]


class FaultyDaemon(TrainingDaemon):
    """A training daemon under `--restarts`, whose processes fail by plans."""

    def __init__(self, directory: Path, plans: list[Plan]) -> None:
        self.faults, self._count = planned(directory / "faults", plans), len(plans)
        super().__init__(directory)

    def start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "tests.soak.preloaded_train", str(self.faults)]
        command += ["--config", str(self._config), "--resume", "auto"]
        command += ["--restarts", str(self._count + 1)]
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )
        return self.process

    def wait_until_failed(self, timeout_s: float) -> None:
        """Wait for all faults. Raises AssertionError."""
        deadline = time.monotonic() + timeout_s
        while len(fired_of(self.faults)) < self._count:
            self.check()
            assert time.monotonic() < deadline, "not all faults came in time"
            time.sleep(0.2)


def groups_once(directory: Path, name: str, plans: list[Plan], seed: int) -> Piece:
    """Send scored groups to a daemon that fails again and again: each that was answered "received"
    has to be in the ledger once, and each step's line has to count what the ledger says."""
    started, wrong, sent = time.monotonic(), list[str](), Sent()
    daemon = FaultyDaemon(directory / name, plans)
    try:
        daemon.wait_until_ready()
        pool = sampled_groups(daemon.url, POOL, random.Random(seed))
        senders = [Sender(daemon.url, pool, number, 10.0, sent) for number in range(SENDERS)]
        for sender in senders:
            sender.start()
        daemon.wait_until_failed(60.0 * len(plans))
        daemon.wait_until_ready()
        for sender in senders:
            sender.ended.set()
        for sender in senders:
            sender.join()
        wait_until_trained(daemon)
        if code := daemon.end():
            wrong.append(f"it ended with {code}")
    except AssertionError as error:
        wrong.append(f"it did not end well: {str(error)[-1000:]}")
        daemon.end()
    wrong += audit(daemon.run, sent).faults + [f"refused: {each}" for each in sent.refused]
    heard = {"received": len(sent.received), "cut off": sent.cut_off}
    seconds = round(time.monotonic() - started, 1)
    return Piece(name, [asdict(p) for p in plans], fired_of(daemon.faults), wrong, seconds, heard)


def run_groups(directory: Path, results: Results, seed: int, count: int) -> None:
    """Run until so many faults came while groups were received."""
    for number in itertools.count():
        fired = sum(len(piece.fired) for piece in results.of("groups"))
        if fired >= count:
            return
        generator = random.Random(f"{seed} groups-{number}")
        plans = [_fault(generator, RECEIVING) for _ in range(min(FAULTS_OF_A_RUN, count - fired))]
        name = f"groups-{number}"
        (directory / name).mkdir()
        piece = results.once(name, partial(groups_once, directory, name, plans, seed + number))
        if piece is None or not piece.fired:
            raise SystemExit(f"{name}: no fault came")


def zeros_once(run: Run, plan: Plan) -> tuple[str | None, str]:
    """Train in this process while an evaluation gives zeros. Return where that was (None: there
    was no such evaluation) and what is wrong: "" = nothing."""
    config, lines_then = load_config(run.config), list[int]()
    with inject(plan, lambda where: lines_then.append(len(run.lines()))) as injector:
        training = training_run(
            config,
            http=False,
            resume=None,
            stop=threading.Event(),
            console=Console(file=io.StringIO()),
        )
        noticed = False
        try:
            training.execute()
        except DeviceFaultError:
            noticed = True
        finally:
            training.close()
    if injector.fired is None:
        return None, ""
    if not noticed:
        return injector.fired, "it was not noticed"
    late = len(run.lines()) - lines_then[0]
    return injector.fired, f"{late} steps were accepted after it" if late else ""


def run_zeros(directory: Path, results: Results, seed: int, count: int) -> None:
    """Run until zeros were given so many times."""

    def one(name: str, plan: Plan) -> Piece | None:
        started = time.monotonic()
        run = Run(directory / name, steps=2)
        where, wrong = in_mlx_thread(partial(zeros_once, run, plan))
        shutil.rmtree(directory / name)
        if where is None:  # so many evaluations there are not
            return None
        fired, seconds = [{"where": where}], round(time.monotonic() - started, 1)
        return Piece(name, [asdict(plan)], fired, [wrong] * bool(wrong), seconds)

    most = dict.fromkeys(ZEROS, 12)  # evaluations of a place, as far as they are known
    for number in itertools.count():
        if len(results.of("zeros")) >= count:
            return
        name, place = f"zeros-{number}", ZEROS[number % len(ZEROS)]
        plan = Plan("zeros", place, random.Random(f"{seed} {name}").randrange(most[place]))
        if results.once(name, partial(one, name, plan)) is None:
            most[place] = max(1, plan.after)


def tell(results: Results) -> int:
    """Print what was seen; return how many things are wrong."""
    wrong = [f"{name}: {text}" for name, piece in results.pieces.items() for text in piece.wrong]
    wrong += results.other_answers()
    for kind in ("zeros", "groups", "faults", "hangs"):
        pieces = results.of(kind)
        fired = [each for piece in pieces for each in piece.fired]
        heard = sum(
            (collections.Counter(piece.heard) for piece in pieces), collections.Counter[str]()
        )
        print(f"{len(fired)} {kind} in {sum(piece.seconds for piece in pieces):.0f} s")
        for title, counts in (
            (
                "places",
                collections.Counter(
                    plan["place"] for p in pieces for plan in p.plans[: len(p.fired)]
                ),
            ),
            ("functions", collections.Counter(each["where"] for each in fired)),
            ("clients", heard),
        ):
            if counts:
                print(f"  {title}: " + ", ".join(f"{n} {what}" for what, n in counts.most_common()))
    versions = {key for piece in results.pieces.values() for key in piece.answers}
    print(f"{len(versions)} pairs of a version and a prompt were compared")
    print(f"{len(wrong)} things are wrong")
    for text in wrong[:40]:
        print("-", text[:600])
    return len(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--zeros", type=int, default=12)
    parser.add_argument("--hangs", type=int, default=2)
    parser.add_argument("--groups", type=int, default=0, help="faults while groups are received")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="results, a JSON line each; continues after them")
    args = parser.parse_args()
    os.environ[DEVICE_VARIABLE] = GPU_LIKE  # results are looked at for zeros
    configure_logging(level="error")
    results = Results(args.out)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run_zeros(directory, results, args.seed, args.zeros)
        run_groups(directory, results, args.seed, args.groups)
        if args.faults or args.hangs:
            runs = FaultyRuns(directory, results, args.seed)
            results.pieces["reference"] = runs.reference
            runs.run("faults", args.faults, FAULTS_OF_A_RUN)
            runs.run("hangs", args.hangs, HANGS_OF_A_RUN)
    raise SystemExit(bool(tell(results)))


if __name__ == "__main__":
    main()
