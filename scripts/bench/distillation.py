"""Tokens until a student is as good as its teacher, against GRPO; and what a teacher costs a step.

    .venv/bin/python -m scripts.bench.distillation --out RESULTS [--seeds 0 1 2] [--problems 100]
    .venv/bin/python -m scripts.bench.distillation --out RESULTS --readers # self-distillation
    .venv/bin/python -m scripts.bench.distillation --out RESULTS --table   # of finished runs
    .venv/bin/python -m scripts.bench.distillation --step                  # a teacher of 4 × the size

For each seed: GRPO (train_configs/quickstart.toml), distillation from what it has made
(train_configs/distill.toml), and GRPO with self-distillation from the right answer in the prompt.
Each is one process of the real command in RESULTS/<case>-<seed>; a finished one is not made again.
Tokens are all sampled ones, those of dropped groups too. A case has arrived at the first evaluation
on held-out problems (sampled answers, --problems of each of five tasks) whose score is at least the
mark: for GRPO its own best - 0.03, for a student its teacher's last - 0.03.

The tiny model cannot read an answer that stands in its prompt, so its hinted self is no teacher.
--readers teaches it that first (150 steps of SFT on questions with their answers behind them), and
then compares from there: GRPO, and distillation from that frozen self with the answer in its prompt.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_parallm.config.load import load_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.models.loading import LoadedModel, load_model
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.rl_training.factory import build_teachers, build_trainer
from mlx_parallm.rl_training.options import make_algorithm, training_options
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.types import Rollout, RolloutGroup
from tests.tiny_models import QWEN3, save_checkpoint

ROOT = Path(__file__).parents[2]
HINTS = """
[model]
base_path = "builtin:tiny"
[rl_training]
algorithm = "sft"
learning_rate = 3e-3
lr_schedule = "linear"
batch_size = 64
total_steps = 150
blocks_per_eval = 0
[rl_training.lora]
rank = 16
alpha = 32.0
[data]
path = "{rows}"
"""
NEAR = 0.03
CASES = ("grpo", "distill", "self")
PROMPT, ANSWER, ANSWERS, REPEATS = 16, 8, 128, 7


@dataclass(frozen=True)
class Curve:
    """Held-out scores of a run by the tokens sampled until then."""

    points: tuple[tuple[int, float], ...]
    tokens: int

    @classmethod
    def of(cls, run: Path) -> "Curve":
        points, tokens = [], 0.0
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
            before = tokens
            tokens += line["sequences"] * line["completion_tokens_mean"]
            if line.get("eval/score") is not None:
                # the one at the start belongs to no token
                first = not points and line["eval/step"] == 0
                points.append((round(before if first else tokens), line["eval/score"]))
        return cls(tuple(points), round(tokens))

    @property
    def best(self) -> float:
        return max(score for _, score in self.points)

    @property
    def last(self) -> float:
        return self.points[-1][1]

    def until(self, mark: float) -> int | None:
        """Tokens at the first evaluation that reaches a mark."""
        return next((tokens for tokens, score in self.points if score >= mark), None)

    def at(self, tokens: int) -> float:
        """The score of the last evaluation by then."""
        return [score for so_far, score in self.points if so_far <= tokens][-1]


def train(
    out: Path, name: str, config: str, seed: int, problems: int | None, settings: Sequence[str]
) -> Path:
    """Make a run, unless it is there. `problems` None: it has no evaluation."""
    run = out / name
    if not (run / "final").is_dir():
        values = [
            f"rl_training.seed={seed}",
            f"rl_training.checkpoint_dir={out}",
            f"rl_training.run_name={name}",
            "server.port=0",
            *([] if problems is None else [f"evaluation.problems={problems}"]),
            *settings,
        ]
        command = [sys.executable, "-m", "mlx_parallm", "train", "--config", config]
        sets = [part for value in values for part in ("--set", value)]
        with (out / f"{name}.log").open("w") as log:
            subprocess.run([*command, *sets], check=True, cwd=ROOT, stdout=log, stderr=log)
    return run


def run_seed(out: Path, seed: int, problems: int) -> None:
    configs = ROOT / "train_configs"
    grpo = train(
        out, f"grpo-{seed}", f"{configs}/quickstart.toml", seed, problems, ["evaluation.every=6"]
    )
    teacher = f'rl_training.distillation.teachers.0.path="{grpo}/final"'
    settings = ["evaluation.every=3", teacher]
    train(out, f"distill-{seed}", f"{configs}/distill.toml", seed, problems, settings)
    self_teacher = '[{name="self", kind="policy", prompt="{prompt}\\n{answer}"}]'
    settings = [
        "evaluation.every=6",
        f"rl_training.distillation.teachers={self_teacher}",
        "rl_training.distillation.weight=0.05",
    ]
    train(out, f"self-{seed}", f"{configs}/quickstart.toml", seed, problems, settings)


def run_reader(out: Path, seed: int, problems: int) -> None:
    """Train a policy that can read an answer in its prompt, then go on from it by GRPO, and by
    its frozen self that reads the hint."""
    rows, config = out / f"hints-{seed}.jsonl", out / f"hints-{seed}.toml"
    rows.write_text("".join(json.dumps(row) + "\n" for row in _hinted_rows(seed)))
    config.write_text(HINTS.format(rows=rows))
    reader = train(out, f"reader-{seed}", str(config), seed, None, [])
    start = [
        f'model.lora_path="{reader}/final"',
        "rl_training.total_steps=60",
        'rl_training.lr_schedule="constant"',
        "evaluation.every=6",
    ]
    quickstart = f"{ROOT}/train_configs/quickstart.toml"
    train(out, f"reader-grpo-{seed}", quickstart, seed, problems, start)
    hinted = {"name": "self", "kind": "checkpoint", "path": f"{reader}/final"}
    keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in hinted.items())
    teacher = f'[{{{keys}, prompt = "{{prompt}}\\n{{answer}}"}}]'
    settings = [
        *start,
        f"rl_training.distillation.teachers={teacher}",
        "rl_training.distillation.reward=false",
        "rl_training.distillation.mode=loss",
        "rl_training.distillation.beta=0.5",
        "rl_training.max_staleness=0",
        "rl_training.update_epochs=2",
    ]
    train(out, f"reader-self-{seed}", quickstart, seed, problems, settings)


def _hinted_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Questions of quickstart's tasks, each with its answer behind it."""
    config = load_config(ROOT / "train_configs" / "quickstart.toml")
    sources = build_sources(
        config.environments, seed=1000 + seed, progress=lambda: TrainingProgress(0, 1), tools=None
    )
    for number in range(600):
        for source in sources:
            task = source.task(number)
            question = f"{task.messages[-1]['content']}\n{task.answer}"
            yield {
                "prompt": [{"role": "user", "content": question}],
                "completion": [{"role": "assistant", "content": task.answer}],
            }


def readers_table(out: Path, seeds: Sequence[int]) -> str:
    lines = [
        "| seed | start | tokens of self-distillation | its score | GRPO's at equal tokens |"
        " GRPO's tokens to the same score |",
        "|---|---|---|---|---|---|",
    ]
    for seed in seeds:
        runs = [out / f"reader-{case}-{seed}" for case in ("grpo", "self")]
        if not all((run / "final").is_dir() for run in runs):
            continue
        grpo, distilled = map(Curve.of, runs)
        tokens, score = distilled.points[-1]
        lines.append(
            f"| {seed} | {distilled.points[0][1]:.3f} | {tokens} | {distilled.last:.3f} |"
            f" {grpo.at(tokens):.3f} | {grpo.until(score) or f'not in {grpo.tokens}'} |"
        )
    return "\n".join(lines)


def table(out: Path, seeds: Sequence[int]) -> str:
    lines = [
        "| seed | teacher, last | GRPO: tokens to its best - 0.03 | distilled: tokens to the"
        " teacher - 0.03 | share | self: score at equal tokens, GRPO's |",
        "|---|---|---|---|---|---|",
    ]
    for seed in seeds:
        curves = {
            case: Curve.of(out / f"{case}-{seed}")
            for case in CASES
            if (out / f"{case}-{seed}" / "metrics.jsonl").is_file()
        }
        grpo, student, from_self = (curves.get(case) for case in CASES)
        if grpo is None:
            continue
        slow = grpo.until(grpo.best - NEAR)
        fast = None if student is None else student.until(grpo.last - NEAR)
        share = "–" if fast is None or slow is None else f"{fast / slow:.2f}"
        if student is not None and fast is None:
            fast_words = f"not in {student.tokens} (best {student.best:.3f})"
        else:
            fast_words = str(fast)
        end = "–"
        if from_self is not None:
            tokens = min(from_self.points[-1][0], grpo.points[-1][0])
            end = f"{from_self.at(tokens):.3f}, {grpo.at(tokens):.3f}"
        lines.append(f"| {seed} | {grpo.last:.3f} | {slow} | {fast_words} | {share} | {end} |")
    return "\n".join(lines)


# ---------------------------------------------------------------------- what a teacher costs


def step_times() -> dict[str, float]:
    """Median seconds of a step of 128 answers without a teacher, with one of 4 × the parameters,
    and of that one's plain forward over the same rows."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "large"
        student = load_model(ModelConfig())
        save_checkpoint(place, QWEN3 | four_times(student))
        large = load_model(ModelConfig(base_path=str(place)))
        teachers = [{"name": "large", "kind": "model", "path": str(place)}]
        batch = _batch()
        plain, taught = _trainer(student, []), _trainer(student, teachers)
        rows = mx.array([sequence.rollout.tokens for sequence in batch.sequences])

        def forward() -> None:
            mx.eval(token_logprobs(large.model(rows[:, :-1]), rows[:, 1:]))

        times: dict[str, list[float]] = {"step": [], "taught step": [], "plain forward": []}
        for _ in range(REPEATS + 1):  # in turns, on a machine that others use
            times["step"].append(_seconds(lambda: plain.train_step(batch)))
            times["taught step"].append(_seconds(lambda: taught.train_step(batch)))
            times["plain forward"].append(_seconds(forward))
        numbers = {name: statistics.median(measured[1:]) for name, measured in times.items()}
        numbers["parameters, teacher / student"] = _size(large) / _size(student)
        whole = numbers["step"] + numbers["plain forward"]
        return numbers | {"taught / (step + forward)": numbers["taught step"] / whole}


def _size(loaded: LoadedModel) -> int:
    return sum(array.size for _, array in tree_flatten(loaded.model.parameters()))


def four_times(student: LoadedModel) -> dict[str, Any]:
    """The student's shape, twice as wide."""
    shape = student.config
    wide = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    kept = ("head_dim", "num_hidden_layers", "vocab_size")
    return {key: 2 * shape[key] for key in wide} | {key: shape[key] for key in kept}


def _trainer(student: LoadedModel, teachers: list[dict[str, Any]]) -> Trainer:
    section = {"reward": False, "teachers": teachers} if teachers else {}
    training = RLTrainingConfig.model_validate(
        {"blocks_per_eval": 0, "batch_size": 32, "distillation": section}
    )
    options = training_options(training)
    trainer = build_trainer(student, options, make_algorithm(training))
    build_teachers(trainer, options.teachers, ModelConfig(), student)
    return trainer


def _batch() -> TrainBatch:
    mx.random.seed(0)
    numbers = mx.random.randint(5, 300, (ANSWERS, PROMPT + ANSWER)).tolist()
    rollouts = [
        Rollout(
            tuple(row),
            (0,) * PROMPT + (1,) * ANSWER,
            (0.0,) * PROMPT + (-2.0,) * ANSWER,
            (0,) * len(row),
            1.0,
            {"reward": float(place % 2)},
        )
        for place, row in enumerate(numbers)
    ]
    groups = tuple(
        RolloutGroup(f"g{start}", "bench", tuple(rollouts[start : start + 8]))
        for start in range(0, ANSWERS, 8)
    )
    sequences = tuple(
        TrainSequence(rollout, (2 * rollout.reward - 1,) * len(rollout.tokens), fresh=True)
        for rollout in rollouts
    )
    return TrainBatch(1, groups, sequences, BatchStatistics())


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--readers", action="store_true")
    parser.add_argument("--step", action="store_true")
    args = parser.parse_args()
    if args.step:
        for name, number in step_times().items():
            print(f"{name}: {number:.3f}")
        return
    if args.out is None:
        parser.error("--out is needed")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for seed in [] if args.table else args.seeds:
        (run_reader if args.readers else run_seed)(out, seed, args.problems)
    print(table(out, args.seeds))
    print(readers_table(out, args.seeds))


if __name__ == "__main__":
    main()
