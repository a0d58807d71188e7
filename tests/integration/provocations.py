"""Real training runs, each of which does not learn for one known reason.
`tests/integration/test_diagnoses.py` and `scripts/bench/diagnoses.py` look whether `explain` names
it.

    python -m tests.integration.provocations DIRECTORY [--stalled-after SECONDS] [--seed N] [NAME …]

One process makes them one after another (the daemon's own `TrainingRun`, model, engine, server and
environments). Each ends as soon as it is named, or after its last step. Prints one JSON line a run;
what the runs log goes to stderr, after a line `=== name`.
"""

import argparse
import contextlib
import copy
import io
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import httpx
import mlx.core as mx
from rich.console import Console

from mlx_parallm.config.load import parse_config
from mlx_parallm.daemon import training_run
from mlx_parallm.errors import ParallmError
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from mlx_parallm.models.loading import resolve_model_path
from mlx_parallm.models.threads import release_streams
from mlx_parallm.rl_training.monitor import health
from mlx_parallm.rl_training.train import TrainingRun
from mlx_parallm.runs.explain import explain
from mlx_parallm.runs.run import open_run
from mlx_parallm.system.log import configure_logging
from scripts.bench.studies.upcycling import upcycle
from tests.integration.http_environment import HAS_ATROPOS, HttpEnvironment
from tests.integration.processes import free_port
from tests.integration.rows_of_tasks import write_rows

Work = Callable[[TrainingRun, str, threading.Event], None]  # the run, its URL, its stop

LONGEST_STALL_S = 60.0
"""Only a run that has stalled ends by the clock: one that continues ends at its last step,
however slow it is."""
ELSEWHERE = {"environment-stalled", "groups-refused"}
"""Told live by the sources of rollouts, in their own words and after a minute: tested where they
are."""
TOKENS = 320  # of the tiny model
USUAL_STALL_S = health.STALLED_AFTER_S
BASE: dict[str, Any] = {
    "server": {"batch_size": 64},
    "rl_training": {
        "learning_rate": 1e-3,
        "batch_size": 16,
        "blocks_per_eval": 0,
        "total_steps": 40,
        "max_empty_rounds": 1,
        "lora": {"rank": 4, "alpha": 8},
        "atropos": {"rollout_batch_size": 16, "max_token_length": 256},
    },
}


@dataclass(frozen=True)
class Provocation:
    """`diagnosis` is to be named, None: nothing is. `environment`: "tasks", or one of
    `Scripted`, or "" = none, groups come by HTTP. `beside`: work of another thread while the run
    continues."""

    diagnosis: str | None
    environment: str = "noise"
    training: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    entry: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    rows: str = ""  # kind of `write_rows`: the run learns from a file, and has no environment
    data: dict[str, Any] = field(default_factory=dict)
    tools: dict[str, Any] = field(default_factory=dict)
    beside: "Work | None" = None

    @property
    def stalls(self) -> bool:
        return self.diagnosis == "environment-stalled"


class Sender(HttpEnvironment):
    """Groups as an environment sends them, but for one fault."""

    def __init__(self, url: str, run: TrainingRun, stop: threading.Event, fault: str) -> None:
        super().__init__(url)
        self._run, self._fault, self.ended = run, fault, stop

    def _scored(self, problem: Any, ids: list[int], answer: dict[str, Any]) -> dict[str, Any]:
        data = super()._scored(problem, ids, answer)
        version = self._run.prepared.serving.weights.version
        if self._fault == "logprobs":
            data["inference_logprobs"] = [
                [1.0 if value == 1.0 else value - 0.3 for value in row]
                for row in data["inference_logprobs"]
            ]
        if self._fault == "no_logprobs":
            data["inference_logprobs"] = None
        if self._fault == "all_other" or (self._fault == "other" and len(self.replies) % 2):
            for name in ("tokens", "masks"):
                data[name] = [
                    [id if id < 0 else TOKENS - 1 - id for id in row] for row in data[name]
                ]
        old = self._fault == "all_old" or (self._fault == "old" and len(self.replies) % 2)
        data["policy_versions"] = [[0 if old else version] * len(row) for row in data["tokens"]]
        return data


def _when_ready(work: Work, run: TrainingRun, url: str, stop: threading.Event) -> None:
    with httpx.Client(verify=False) as http:
        while not stop.wait(0.05):
            with contextlib.suppress(httpx.TransportError):
                if http.get(f"{url}/health").status_code == 200:
                    return work(run, url, stop)


def sends(fault: str) -> Work:
    return lambda run, url, stop: Sender(url, run, stop, fault).run()


def registers_only(run: TrainingRun, url: str, stop: threading.Event) -> None:
    Sender(url, run, stop, "")._register()


def holds_the_lock(run: TrainingRun, url: str, stop: threading.Event) -> None:
    weights = run.prepared.serving.weights
    while not stop.is_set():
        with weights.lock.read():
            stop.wait(0.3)
        stop.wait(0.05)


def unbounded(inputs: LossInputs) -> LossOutputs:
    """A loss of the user's whose gradient is not a number."""
    return LossOutputs(aggregate(inputs.logprobs, inputs) * math.inf, {})


def nothing_counts(rewards: list[float]) -> list[float]:
    """Advantages of the user's that are all 0."""
    return [0.0 for _ in rewards]


def untrained(source: Path, target: Path) -> None:
    """Write a model like `source` that has learned nothing."""
    target.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (target / file.name).write_bytes(file.read_bytes())
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    key = mx.random.key(0)
    noise = {
        name: array if array.ndim == 1 else mx.random.normal(array.shape, key=key) * 0.3
        for name, array in weights.items()
    }
    mx.save_safetensors(str(target / "model.safetensors"), noise, metadata={"format": "mlx"})


def taught(kind: str) -> dict[str, Any]:
    """A section with one teacher: the policy behind its own prompt, or its base."""
    more = {"policy": {"prompt": "{prompt}"}, "model": {"path": UNTRAINED}}.get(kind, {})
    return {"weight": 0.01, "teachers": [{"name": "teacher", "kind": kind, **more}]}


UNTRAINED = "an untrained model"
"""In the place of a teacher's path."""
EXPERTS = "a mixture of experts"
"""In the place of a base: the tiny model, its blocks made into experts."""
ROWS = {"total_steps": 40, "batch_size": 32}
DPO = {"algorithm": "dpo", "learning_rate": 0.1}
SCRIPTED = Path(__file__).with_name("scripted_environment.py")
HURRY = {"function_timeout_s": 0.05}
GATES = {"target_modules": ["gate"]}
HTTP = {"total_steps": 12}
RECOMPUTE = {"atropos": BASE["rl_training"]["atropos"] | {"missing_logprobs": "recompute"}}
# the sender does not wait for the trainer: its groups age where steps are slow
PATIENT = {"max_staleness": 1000}
PROVOCATIONS: dict[str, Provocation] = {
    "nothing": Provocation(None, "tasks", {"total_steps": 12, "kl_beta": 1e-3}),
    "constant reward": Provocation("reward-constant", "constant"),
    "rewards by prompt": Provocation("no-variance", "by_prompt"),
    "all wrong": Provocation("too-hard", "all_wrong"),
    "all right": Provocation("too-easy", "all_right"),
    "no number": Provocation("not-scored", "no_number", {"dynamic_sampling": False}),
    "all right in the end": Provocation("solved", "solved"),
    "most groups dropped": Provocation("oversampling", "rarely", {"max_oversampling": 16}),
    "a part for nothing": Provocation("reward-part-constant", "unused_part"),
    "all groups alike": Provocation("nothing-trained", "by_prompt"),
    "learned, but for an eighth": Provocation("learned", "learned", {"max_oversampling": 16}),
    "a copy earns everything": Provocation(
        "reward-hole", "hole", {"learning_rate": 5e-3, "total_steps": 120}
    ),
    "at most 0.7": Provocation("reward-below-1", "up_to_0.7", evaluation={"problems": 2}),
    "temperature 0.01": Provocation("same-answers", training={"temperature": 0.01}),
    "max_tokens 4": Provocation("truncation", entry={"max_tokens": 4}),
    "max_tokens 1": Provocation("eos-never-sampled", entry={"max_tokens": 1}),
    "no end of turns": Provocation("episodes-never-end", "endless"),
    "high rate, KL watched": Provocation(
        "kl-running-away", training={"learning_rate": 5e-2, "kl_beta": 1e-4}
    ),
    "reward for brevity": Provocation("entropy-collapse", "brevity", {"learning_rate": 1e-2}),
    "many epochs": Provocation(
        "ratio-mismatch", training={"learning_rate": 1e-2, "update_epochs": 6, "batch_size": 4}
    ),
    "shifted logprobs": Provocation("log-probability-mismatch", "", HTTP, beside=sends("logprobs")),
    "rate 1e-12": Provocation("learning-rate-too-small", training={"learning_rate": 1e-12}),
    "rate 1e-9, bfloat16": Provocation(
        "learning-rate-too-small",
        training={"learning_rate": 1e-9, "lora": {"enabled": False}},
        model={"dtype": "bfloat16"},
    ),
    "old groups": Provocation(
        "stale-rollouts", "", HTTP | {"max_staleness": 0}, beside=sends("old")
    ),
    "only old groups": Provocation(
        "stale-rollouts", "", HTTP | {"max_staleness": 0}, beside=sends("all_old")
    ),
    "other tokenizer": Provocation("another-model", "", HTTP, beside=sends("other")),
    "only other tokenizer": Provocation("another-model", "", HTTP, beside=sends("all_other")),
    "no logprobs": Provocation(
        "no-log-probabilities", "", HTTP | RECOMPUTE | PATIENT, beside=sends("no_logprobs")
    ),
    "falls silent": Provocation("environment-stalled", "silent"),
    "one late group": Provocation("environment-stalled", "late"),
    "sends nothing": Provocation("environment-stalled", "", HTTP, beside=registers_only),
    "reward raises": Provocation("groups-refused", "raises"),
    "loss without bound": Provocation(
        "not-finite", training={"loss": f"python:{__file__}:unbounded"}
    ),
    "tight KL bound": Provocation(
        "update-refused",
        training={"learning_rate": 1e-2, "weight_updates": {"max_publish_kl": 1e-6}},
    ),
    "tight target KL": Provocation(
        "no-update",
        training={"algorithm": "ppo", "learning_rate": 1e-2, "ppo": {"target_kl": 1e-3}},
    ),
    "teacher is the policy": Provocation(
        "teacher-constant", training={"max_staleness": 0, "distillation": taught("policy")}
    ),
    "teacher knows no more": Provocation(
        "teacher-no-better", training={"learning_rate": 1e-2, "distillation": taught("base")}
    ),
    "router runs away": Provocation(
        "experts-collapse",
        training={"learning_rate": 0.1, "lora": BASE["rl_training"]["lora"] | GATES},
        model={"base_path": EXPERTS},
    ),
    "rewards of a 5,000th": Provocation("reward-hardly-differs", "hardly"),
    "online DPO on a 5,000th": Provocation(
        "reward-hardly-differs", "hardly", {"algorithm": "online_dpo"}
    ),
    "all wrong and kept": Provocation("too-hard", "all_wrong", {"dynamic_sampling": False}),
    "advantages of 0": Provocation(
        "zero-advantages", training={"advantage": f"python:{__file__}:nothing_counts"}
    ),
    "a rate that ruins": Provocation("reward-fell", "tasks", {"learning_rate": 3e-2}),
    "brevity for all": Provocation("one-answer", "brevity", {"learning_rate": 1e-2}),
    "GSPO, short answers": Provocation(
        "sequences-clipped", "tasks", {"algorithm": "gspo", "batch_size": 4}
    ),
    "DPO, rate 0.1": Provocation("chosen-answers-unlikely", "", ROWS | DPO, rows="pairs"),
    "SimPO, rate 0.1": Provocation(
        "chosen-answers-unlikely", "", ROWS | DPO | {"algorithm": "simpo"}, rows="pairs"
    ),
    "KTO, rate 0.1": Provocation(
        "chosen-answers-unlikely", "", ROWS | DPO | {"algorithm": "kto"}, rows="labels"
    ),
    "SFT, rate 1": Provocation(
        "loss-rises", "", ROWS | {"algorithm": "sft", "learning_rate": 1.0}, rows="conversations"
    ),
    "a coin's pairs": Provocation(
        "not-told-apart",
        "",
        {"total_steps": 24, "batch_size": 32, "algorithm": "dpo", "learning_rate": 1e-6},
        rows="coin",
    ),
    "teacher at random": Provocation(
        "teacher-nonsense", "tasks", {"max_staleness": 0, "distillation": taught("model")}
    ),
    "teacher sends nothing": Provocation(
        "teacher-silent", "tasks", {"max_staleness": 0, "distillation": taught("group")}
    ),
    "a tool stalls": Provocation(
        "tool-stalls", "calling", tools={"functions": [f"python:{SCRIPTED}:stalls"]} | HURRY
    ),
    "a tool is broken": Provocation(
        "tool-fails", "calling", tools={"functions": [f"python:{SCRIPTED}:fails"]} | HURRY
    ),
    "lock held": Provocation(
        "weights-not-published",
        training={"weight_updates": {"lock_timeout_ms": 1}},
        beside=holds_the_lock,
    ),
}
if not HAS_ATROPOS:
    PROVOCATIONS = {name: one for name, one in PROVOCATIONS.items() if one.beside is None}


def _well(environment: str = "tasks", /, *, rows: str = "", **training: Any) -> Provocation:
    training = ({"total_steps": 20, "batch_size": 32} if rows else {"total_steps": 15}) | training
    return Provocation(None, "" if rows else environment, training, rows=rows)


RATE = {"learning_rate": 1e-3}
HEALTHY: dict[str, Provocation] = {
    "GRPO": _well(),
    "GRPO, KL watched": _well(kl_beta=1e-3),
    "GRPO, entropy": _well(entropy_weight=1e-3),
    "GRPO, two epochs": _well(update_epochs=2),
    "GRPO, low rate": _well(learning_rate=1e-4),
    "GRPO, all weights": _well(learning_rate=1e-4, lora={"enabled": False}),
    "GRPO, groups kept": _well(dynamic_sampling=False),
    "GRPO, fresh": _well(max_staleness=0),
    "GRPO, cosine": _well(lr_schedule="cosine", warmup_steps=3),
    **{f"{name}": _well(algorithm=name) for name in ("dapo", "dr_grpo", "rloo", "cispo", "ppo")},
    "reinforce_pp": _well(algorithm="reinforce_pp"),
    "GSPO, wider": _well(algorithm="gspo", clip_ratio=0.02, clip_ratio_high=0.03),
    "online DPO": _well(algorithm="online_dpo"),
    "online KTO": _well(algorithm="online_kto"),
    "GRPO, temperature 0.8": _well(temperature=0.8),
    "GRPO, no warm-up, linear": _well(lr_schedule="linear"),
    "SFT": _well(rows="conversations", algorithm="sft", **RATE),
    "SFT, DFT": _well(
        rows="conversations", algorithm="sft", preference={"sft_loss": "dft"}, **RATE
    ),
    "SFT, all weights": _well(
        rows="conversations", algorithm="sft", lora={"enabled": False}, learning_rate=1e-4
    ),
    "DPO": _well(rows="pairs", algorithm="dpo", learning_rate=1e-4),
    "DPO, IPO": _well(
        rows="pairs", algorithm="dpo", preference={"loss_type": "ipo"}, learning_rate=1e-4
    ),
    **{
        name: _well(rows="pairs", algorithm=name, learning_rate=1e-4)
        for name in ("orpo", "simpo", "cpo")
    },
    "KTO": _well(rows="labels", algorithm="kto", learning_rate=1e-4),
    "reward model": _well(rows="pairs", algorithm="reward_model", learning_rate=1e-4),
    "GRPO, 40 steps": _well(total_steps=40, kl_beta=1e-3, clip_ratio_high=0.28),
}
"""Runs in which nothing is wrong."""


def _settings(
    provocation: Provocation,
    name: str,
    directory: Path,
    port: int,
    stalled_after_s: float,
    seed: int,
) -> dict[str, Any]:
    """The configuration of the run; writes the models and rows that it names."""
    data = copy.deepcopy(BASE)
    data["server"]["port"] = port
    if provocation.model.get("base_path") == EXPERTS:
        upcycle(resolve_model_path("builtin:tiny"), directory / "experts")
        data["model"] = {"base_path": str(directory / "experts")}
    else:
        data["model"] = provocation.model
    data["evaluation"] = provocation.evaluation
    data["rl_training"] |= {"seed": seed} | copy.deepcopy(provocation.training)
    for teacher in data["rl_training"].get("distillation", {}).get("teachers", ()):
        if teacher.get("path") == UNTRAINED:
            teacher["path"] = str(directory / "untrained")
            untrained(Path(resolve_model_path("builtin:tiny")), directory / "untrained")
    if provocation.rows:
        file = write_rows(provocation.rows, directory / f"{provocation.rows}.jsonl", seed=seed)
        data["data"] = {"path": str(file), "eval_fraction": 0.1} | provocation.data
        for key in ("atropos", "max_empty_rounds"):  # of rollouts
            del data["rl_training"][key]
    if provocation.tools:
        data["tools"] = provocation.tools
        data["rl_training"]["atropos"]["max_token_length"] = 512  # prompts show the tool
    data["rl_training"] |= {
        "checkpoint_dir": str(directory),
        "run_name": name.replace(" ", "_").replace(",", ""),
    }
    if provocation.environment:
        scripted = {"endless": "Endless", "calling": "Calling"}.get(
            provocation.environment, "Scripted"
        )
        kind = f"python:{SCRIPTED}:{scripted}"
        entry = {"kind": kind, "name": provocation.environment, "group_size": 4, "max_tokens": 8}
        if provocation.environment == "tasks":
            entry |= {"kind": "tasks", "name": "sort"}
        if provocation.stalls:
            # "late" comes back, after more than ten steps of a slow machine; "silent" stays so
            entry["options"] = {
                "silence_s": stalled_after_s + 20
                if provocation.environment == "late"
                else LONGEST_STALL_S
            }
        data["environments"] = [entry | provocation.entry]
    return data


def provoke(name: str, directory: Path, *, stalled_after_s: float, seed: int = 0) -> dict[str, Any]:
    """Makes the run; returns its directory, what was named, and how long it took."""
    provocation = (PROVOCATIONS | HEALTHY)[name]
    health.STALLED_AFTER_S = stalled_after_s if provocation.stalls else USUAL_STALL_S
    port = free_port()
    data = _settings(provocation, name, directory, port, stalled_after_s, seed)
    config = parse_config(data)
    stop, run_directory = threading.Event(), directory / str(config.rl_training.run_name)
    heard = Heard(sys.stderr)
    run = training_run(config, resume=None, stop=stop, console=Console(file=io.StringIO()))
    named: list[str] = []
    limit = time.monotonic() + LONGEST_STALL_S + stalled_after_s if provocation.stalls else math.inf
    watched = (run_directory, provocation.diagnosis, named, heard, stop, limit)
    threads = [threading.Thread(target=_watch, args=watched)]
    if provocation.beside is not None:
        url = f"http://127.0.0.1:{port}"
        threads.append(
            threading.Thread(target=_when_ready, args=(provocation.beside, run, url, stop))
        )
    started = time.monotonic()
    for thread in threads:
        thread.start()
    with contextlib.redirect_stderr(heard):
        try:
            run.execute()
        finally:
            stop.set()
            run.close()
            for thread in threads:
                thread.join()
    return {
        "name": name,
        "run": str(run_directory),
        "named": named,
        "seconds": round(time.monotonic() - started, 2),
    }


def _watch(
    run: Path,
    diagnosis: str | None,
    named: list[str],
    heard: "Heard",
    stop: threading.Event,
    limit: float,
) -> None:
    """Explains the run while it continues, and stops it when the diagnosis is there and the run
    has said it itself."""
    while not stop.wait(0.15):
        try:
            findings = {
                finding.diagnosis.name: finding.diagnosis
                for finding in explain(open_run(run)).findings
            }
        except ParallmError:  # not there yet
            findings = {}
        named[:] = findings
        said = diagnosis in findings and (diagnosis in ELSEWHERE or heard.of(findings[diagnosis]))
        if said or time.monotonic() > limit:
            stop.set()


class Heard(io.TextIOBase):
    """Writes on, and remembers what was written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._parts = stream, list[str]()

    def write(self, text: str) -> int:
        self._parts.append(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def of(self, diagnosis: health.Diagnosis) -> bool:
        return lead(diagnosis) in "".join(self._parts)


def lead(diagnosis: health.Diagnosis) -> str:
    """The words of its sentence that are the same at every step."""
    return diagnosis.sentence.split(":")[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--stalled-after", type=float, default=USUAL_STALL_S)
    parser.add_argument("--seed", type=int, default=0, help="of the runs and of their rows")
    args = parser.parse_intermixed_args()
    configure_logging()
    for name in args.names or [*PROVOCATIONS, *HEALTHY]:
        sys.stderr.write(f"=== {name}\n")
        result = provoke(name, args.directory, stalled_after_s=args.stalled_after, seed=args.seed)
        print(json.dumps(result), flush=True)
    release_streams()


if __name__ == "__main__":
    main()
