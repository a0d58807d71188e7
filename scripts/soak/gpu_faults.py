"""A GPU that fails under a run that serves and trains: does it end where it would have ended?

    .venv/bin/python -m scripts.soak.gpu_faults --faults 300 --zeros 100 --hangs 4

*Faults*: evaluations of engine, trainer, publish, checkpoint and evaluation raise the texts of
Metal, CUDA and MLX, in deterministic runs under `--restarts`, with clients that ask all the while.
Each run has to write the numbers and the weights of one without faults, each version has to answer
as there, and each client gets its answer or an error in words.
*Zeros*: an evaluation gives zeros once, in a gradient, the optimizer, the adapter, the log-
probabilities of a step, keys, or the sampler. It has to be noticed before the step ends.
*Hangs*: an evaluation never returns, with the interpreter held or not. The process has to be
killed and started again within a minute, and ends as the other runs.
"""

import argparse
import collections
import io
import itertools
import json
import os
import random
import tempfile
import threading
import time
from dataclasses import dataclass, field
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
from scripts.soak.faulty_evaluations import TEXTS, Plan, environment, fired_of, inject
from scripts.soak.resume_bits import Run, differences

STEPS = 8
FAULTS_OF_A_RUN = 10
RAISES = ("engine", "trainer", "publish", "checkpoint", "any")
ZEROS = ("gradient", "optimizer", "adapter", "scores", "keys", "sampler")
PROMPTS = ("Sort: hgfa", "Reverse: dcba")


@dataclass
class Clients:
    """What clients heard: answers by (version, prompt), and errors by kind."""

    url: str
    answers: dict[tuple[int, str], str] = field(default_factory=dict)
    heard: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask(self) -> None:
        """Ask until `ended`; one thread of several."""
        prompts = itertools.cycle(PROMPTS)
        with httpx.Client(base_url=self.url, timeout=60) as client:
            while not self.ended.wait(0.1):
                self._one(client, next(prompts))

    def _one(self, client: httpx.Client, prompt: str) -> None:
        body = {"model": "default", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        try:
            response = client.post("/v1/completions", json=body)
        except httpx.ConnectError:
            self.heard["nobody there"] += 1
            return
        except httpx.TransportError as error:
            self.heard[f"cut off: {type(error).__name__}"] += 1
            return
        if response.status_code != httpx.codes.OK:
            self.heard[f"error {response.status_code}"] += 1
            error = response.json().get("error", {})
            if not error.get("message") or "type" not in error:
                self.faults.append(f"an error without words: {response.text[:200]}")
            return
        self.heard["answer"] += 1
        answer = response.json()
        key, text = (answer["policy_version"], prompt), answer["choices"][0]["text"]
        if self.answers.setdefault(key, text) != text:
            self.faults.append(f"version {key[0]} answered {text!r} and {self.answers[key]!r}")


@dataclass
class Outcome:
    """Of a run with faults. `fired`: where each was; `faults`: what is wrong."""

    plans: list[Plan]
    fired: list[dict[str, Any]]
    clients: Clients
    faults: list[str]


def finish(run: Run, *arguments: str, plans: list[Plan], timeout_s: float) -> Outcome:
    """Run to the end, with clients."""
    here = run.path.parents[1] / "faults"
    clients = Clients(run.url)
    threads = [threading.Thread(target=clients.ask, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    faults = []
    try:
        run.finish(*arguments, environment=environment(here, plans), timeout_s=timeout_s)
    except AssertionError as error:
        faults.append(f"it did not end well: {str(error)[-600:]}")
    clients.ended.set()
    for thread in threads:
        thread.join()
    return Outcome(plans, fired_of(here), clients, faults + clients.faults)


def compare(
    run: Run, reference: Run, outcome: Outcome, answers: dict[tuple[int, str], str]
) -> None:
    """Add what differs from the run without faults."""
    outcome.faults += differences(run.lines(), reference.lines())
    ours, other = (each.path / "final" / "adapters.safetensors" for each in (run, reference))
    if not ours.is_file() or ours.read_bytes() != other.read_bytes():
        outcome.faults.append("the final weights are others")
    for key, text in outcome.clients.answers.items():
        if answers.get(key, text) != text:
            outcome.faults.append(f"version {key[0]} answered {text!r}, not {answers[key]!r}")


def raising(generator: random.Random, count: int) -> list[Plan]:
    return [
        Plan(
            "raise",
            generator.choice(RAISES),
            generator.randrange(0, 12),
            generator.choice(TEXTS),
            sticks=generator.random() < 0.5,
        )
        for _ in range(count)
    ]


def run_faults(directory: Path, plans: list[Plan], steps: int = STEPS) -> list[Outcome]:
    """Runs with `FAULTS_OF_A_RUN` plans each, beside one without."""
    reference = Run(directory / "reference", steps=steps)
    without = finish(reference, plans=[], timeout_s=1200)
    outcomes = [without]
    for start in range(0, len(plans), FAULTS_OF_A_RUN):
        part = plans[start : start + FAULTS_OF_A_RUN]
        run = Run(directory / f"run-{start}", steps=steps)
        outcome = finish(run, "--restarts", "9", plans=part, timeout_s=300 * len(part) + 300)
        compare(run, reference, outcome, without.clients.answers)
        if any(plan.kind in ("hang", "sleep") for plan in part):
            outcome.faults += late_restarts(run, outcome.fired)
        outcomes.append(outcome)
    return outcomes


def late_restarts(run: Run, fired: list[dict[str, Any]]) -> list[str]:
    """Name hangs that were not answered by a new start within a minute."""
    killed = [
        line["timestamp"]
        for line in map(json.loads, (run.path / "run.log").read_text().splitlines())
        if "hung" in line["event"]
    ]
    return [f"{len(fired)} hangs, {len(killed)} restarts"] * (len(fired) != len(killed))


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


def run_zeros(directory: Path, generator: random.Random, count: int) -> list[tuple[Plan, str, str]]:
    """So many runs in which zeros were given: the plan, where, and what is wrong."""
    done: list[tuple[Plan, str, str]] = []
    most = dict.fromkeys(ZEROS, 12)  # evaluations of a place, as far as they are known
    for number in itertools.count():
        if len(done) == count:
            return done
        place = ZEROS[number % len(ZEROS)]
        plan = Plan("zeros", place, generator.randrange(most[place]))
        run = Run(directory / f"zeros-{number}", steps=2)
        where, wrong = in_mlx_thread(partial(zeros_once, run, plan))
        if where is None:
            most[place] = max(1, plan.after)
            continue
        done.append((plan, where, wrong))
    raise AssertionError("it counts to the end")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--zeros", type=int, default=12)
    parser.add_argument("--hangs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ[DEVICE_VARIABLE] = GPU_LIKE  # results are looked at for zeros
    generator, wrong = random.Random(args.seed), list[str]()
    configure_logging(level="error")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        zeros = run_zeros(directory, generator, args.zeros) if args.zeros else []
        for place, number in collections.Counter(where for _, where, _ in zeros).most_common():
            print(f"zeros in {place}: {number}")
        wrong += [
            f"zeros, {plan.place} {plan.after}, {at}: {bad}" for plan, at, bad in zeros if bad
        ]
        print(f"{len(zeros)} times zeros in {time.monotonic() - started:.0f} s", flush=True)
        plans = raising(generator, args.faults)
        hangs = [
            Plan(("hang", "sleep")[n % 2], ("engine", "trainer")[n // 2 % 2], 60 + 10 * n)
            for n in range(args.hangs)
        ]
        for kind, part in (("faults", plans), ("hangs", hangs)):
            started, heard = time.monotonic(), collections.Counter[str]()
            outcomes = run_faults(directory / kind, part) if part else []
            for outcome in outcomes:
                wrong += outcome.faults
                heard += outcome.clients.heard
            fired = [each["where"] for outcome in outcomes for each in outcome.fired]
            print(f"{len(fired)} of {len(part)} {kind} in {time.monotonic() - started:.0f} s, in")
            print("  " + ", ".join(f"{at} x{n}" for at, n in collections.Counter(fired).items()))
            print(
                "  clients: " + ", ".join(f"{what} x{n}" for what, n in heard.items()), flush=True
            )
    print(f"{len(wrong)} things are wrong")
    for text in wrong[:20]:
        print("-", text)
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
