"""Rows of a file for training runs, made of the built-in tasks: the tiny model knows their form."""

import json
import random
from pathlib import Path

from mlx_parallm.environments.kinds.tasks import make_problem

TASKS = ("sum", "sort", "reverse", "count", "largest")


def write_rows(kind: str, path: Path, rows: int = 900, *, seed: int = 0) -> Path:
    """Write rows of a kind: "pairs", "coin" (pairs whose sides say nothing), "labels", or
    "conversations"."""
    rng = random.Random(seed)
    problems = [
        make_problem(TASKS[number % len(TASKS)], number, seed=seed, split="train")
        for number in range(rows)
    ]
    lines = []
    for number, problem in enumerate(problems):
        other = problems[(number + len(TASKS)) % rows].answer
        prompt, right = problem.messages[-1]["content"], problem.answer
        wrong = other if other != right else f"{right}0"
        chosen, rejected = (right, wrong)
        if kind == "coin":
            answers = [problems[rng.randrange(rows)].answer for _ in range(2)]
            chosen, rejected = answers if answers[0] != answers[1] else (answers[0], "?")
        lines.append(
            {
                "pairs": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
                "coin": {"prompt": prompt, "chosen": chosen, "rejected": rejected},
                "labels": {
                    "prompt": prompt,
                    "completion": right if number % 2 else wrong,
                    "label": bool(number % 2),
                },
                "conversations": {"prompt": prompt, "completion": right},
            }[kind]
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
