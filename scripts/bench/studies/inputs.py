"""What studies train on: each function writes its files into a run's directory."""

import asyncio
import itertools
import json
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.environments.kinds.tasks import make_problem
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.loading import resolve_model_path
from mlx_parallm.types import Rollout, Trajectory
from scripts.bench.studies.families import make
from scripts.bench.studies.upcycling import upcycle

KTO_ROWS, PAIRS, HELD_OUT = 400, 1200, 200
TASKS = ("sum", "sort", "reverse", "count", "largest")
JUDGED, JUDGED_FROM = 1000, 100_000  # held-out pairs of answers, and their first problem
ROWS, MEASURED = 300, 1500  # of three kinds; problems that they are chosen from
TRAINED = 12_000  # pairs of answers


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def first_words(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """Rows for the algorithm that the variant names: a prompt shows two words, right is the first.
    No answer is better than another without the prompt. No prompt is in both files."""
    words = ["".join(pair) for pair in itertools.product(ascii_lowercase, repeat=2)]
    rng = random.Random(seed)
    prompts = list(dict.fromkeys(tuple(rng.sample(words, 2)) for _ in range(2 * PAIRS)))
    rows: list[dict[str, object]] = []
    for first, second in prompts:
        row: dict[str, object] = {"prompt": f"Which is first: {first} or {second}?"}
        if "kto" in variant:
            label = rng.random() < 0.5
            row |= {"completion": first if label else second, "label": label}
        elif "sft" in variant:
            row["completion"] = first
        else:
            row |= {"chosen": first, "rejected": second}
        rows.append(row)
    count = KTO_ROWS if "kto" in variant else PAIRS
    write_rows(directory / "rows.jsonl", rows[:count])
    write_rows(directory / "heldout.jsonl", rows[count : count + HELD_OUT])


def reversed_words(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """Words of ten letters to spell backwards; others are held out."""
    rng = random.Random(seed)
    words = sorted({"".join(rng.choices(ascii_lowercase, k=10)) for _ in range(3000)})
    rng.shuffle(words)
    rows = [{"prompt": f"Reverse: {word}", "completion": word[::-1]} for word in words]
    write_rows(directory / "rows.jsonl", rows[HELD_OUT:])
    write_rows(directory / "heldout.jsonl", rows[:HELD_OUT])


def experts(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """The shipped model as a mixture of experts, in `model`."""
    upcycle(resolve_model_path("builtin:tiny"), directory / "model")


def judged_pairs(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """Two answers of the shipped model to each problem of the built-in tasks; the task's own reward
    says which is better. Ties are left out; no prompt is in both files."""
    held_out = _pairs(JUDGED, JUDGED_FROM, seed, set())
    seen = {str(row["prompt"]) for row in held_out}
    write_rows(directory / "heldout.jsonl", held_out)
    write_rows(directory / "rows.jsonl", _pairs(TRAINED, 0, seed, seen))


def judged_tasks(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """Problems of three built-in tasks: rows without an answer, and held-out rows with it."""
    for file, split, count in (("rows", "train", 2000), ("heldout", "heldout", 300)):
        problems = [
            make_problem(task, index, seed=seed if split == "train" else 0, split=split)
            for index in range(count // 3)
            for task in ("sort", "reverse", "sum")
        ]
        rows = [
            {"prompt": list(p.messages)} | ({"answer": p.answer} if split == "heldout" else {})
            for p in {problem.key: problem for problem in problems}.values()
        ]
        write_rows(directory / f"{file}.jsonl", rows)


ACTS = (
    "Call {} and say that I am late.",
    "What is the weather in {} right now?",
    "Book a table in {} for tonight.",
    "Show me a photo of {} from today.",
    "Send an e-mail to {}.",
    "Drive me to {}.",
    "Who called {} this morning?",
    "Switch off the lamp beside {}.",
    "What did {} eat for breakfast today?",
    "Buy two tickets from {} to the coast.",
)
WHOM = [
    "Rome",
    "Anna",
    "Lisbon",
    "my mother",
    "Oslo",
    "the mayor",
    "Kyoto",
    "Peter",
    "Cairo",
    "our teacher",
    "Quito",
    "Mia",
]


def impossible_requests(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """Requests that a model of text cannot fulfil; the last three kinds are held out."""
    kinds = (("rows", ACTS[:-3]), ("heldout", ACTS[-3:]))
    for file, acts in kinds:
        rows = [
            {"prompt": [{"role": "user", "content": act.format(whom)}]}
            for act in acts
            for whom in WHOM
        ]
        random.Random(seed if file == "rows" else 0).shuffle(rows)
        write_rows(directory / f"{file}.jsonl", rows)


def three_kinds_of_rows(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """Rows of the built-in task `reverse`: a fifth that the shipped model answers right now and
    then, three fifths with an answer that no policy gives, and a fifth that it answers right
    almost every time. Those held out are as they come."""
    source, rates = _pass_rates()
    tasks = random.Random(seed).sample(list(rates.values()), len(rates))
    learnable = [task for task, right in tasks if 2 <= right <= 12][: ROWS // 5]
    solved = [task for task, right in tasks if right >= 15][: ROWS // 5]
    others = [task for task, right in tasks if right in (0, 1, 13, 14)][: 3 * ROWS // 5]
    assert len(learnable) + len(solved) + len(others) == ROWS
    rows = [{"prompt": task.opening, "answer": task.answer} for task in learnable]
    if "oracle" not in variant:
        rows += [{"prompt": task.opening, "answer": task.answer} for task in solved]
        rows += [{"prompt": task.opening, "answer": "none"} for task in others]
    write_rows(directory / "rows.jsonl", rows)
    held_out = [{"prompt": task.opening, "answer": task.answer} for task in source.heldout(200)]
    write_rows(directory / "heldout.jsonl", held_out)


@cache
def _pass_rates() -> tuple[EnvironmentSource, dict[str, tuple[Task, int]]]:
    """Return the task, and how many of 16 sampled answers of the shipped model to each problem are
    right."""
    source = build_sources([EnvironmentConfig(kind="tasks", name="reverse")], seed=0)[0]
    tasks = list({task.key: task for task in map(source.task, range(MEASURED))}.values())
    with InferenceModule("builtin:tiny") as model:
        prompts = [list(task.messages) for task in tasks]
        answers = model.generate(prompts, 8, num_return_sequences=16, temperature=1.0, seed=0)
    texts = [answer.strip() for answer in answers]
    rates = {
        task.key: (task, sum(text == task.answer for text in texts[16 * n : 16 * n + 16]))
        for n, task in enumerate(tasks)
    }
    return source, rates


def right(completions: Sequence[Any], answer: Sequence[str], **_columns: Any) -> list[float]:
    """1 for the row's answer."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    return [float(text.strip() == wanted) for text, wanted in zip(texts, answer, strict=True)]


def _pairs(count: int, first: int, seed: int, without: set[str]) -> list[dict[str, Any]]:
    """Return `count` pairs of answers to problems from number `first` on."""
    entries = [EnvironmentConfig(kind="tasks", name=name, max_tokens=8) for name in TASKS]
    sources = build_sources(entries, seed=seed)
    rows: list[dict[str, Any]] = []
    with InferenceModule("builtin:tiny") as model:
        for number in itertools.count(first, 100):
            tasks = [source.task(n) for n in range(number, number + 100) for source in sources]
            prompts = [list(task.messages) for task in tasks]
            answers = list(
                model.generate(
                    prompts, 8, num_return_sequences=2, temperature=1.0, seed=seed + number + 100
                )
            )
            for task, prompt, *two in zip(tasks, prompts, answers[::2], answers[1::2], strict=True):
                rewards = asyncio.run(_rewards(task.reward, two))
                worse, better = sorted(zip(rewards, two, strict=True))
                if worse[0] != better[0] and all(two) and str(prompt) not in without:
                    rows.append({"prompt": prompt, "chosen": better[1], "rejected": worse[1]})
            if len(rows) >= count:
                return rows[:count]
    raise AssertionError("the tasks do not end")


def other_family(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """The teacher of the variant, in `teacher`. Both are made once, which takes minutes."""
    made = make(Path(tempfile.gettempdir()) / "mlx_parallm_other_family")
    name = "other" if "SentencePiece" in variant else "same"
    (directory / "teacher").symlink_to(made / name)


async def _rewards(reward: Any, texts: Sequence[str]) -> list[float]:
    rollout = Rollout((), (), None, (), 1.0, {})
    scored = reward([Trajectory(text, rollout) for text in texts])
    parts = await scored if hasattr(scored, "__await__") else scored
    return [part["reward"] for part in parts]


def answered_tasks(directory: Path, seed: int, variant: Sequence[str]) -> None:
    """Problems of the built-in tasks with their answers."""
    problems = [
        make_problem(task, i, seed=seed, split="train") for i in range(400) for task in TASKS
    ]
    rows = [
        {"prompt": list(p.messages), "answer": p.answer}
        for p in {problem.key: problem for problem in problems}.values()
    ]
    write_rows(directory / "rows.jsonl", rows)


def short(completions: Sequence[Any], **columns: Any) -> list[float]:
    """Eight characters less the answer's: a reward whose scale is larger than that of being right."""
    texts = [str(each[0]["content"]) for each in completions]
    return [8.0 - len(text.strip()) for text in texts]
