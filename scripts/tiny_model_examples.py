"""Examples on which the tiny model is trained and measured: questions of each task, and the same
skills as bare expressions."""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reasoning_gym

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.kinds.reasoning_gym import question_key
from mlx_parallm.environments.kinds.tasks import TASKS, make_problem, split_of

REASONING_GYM: dict[str, dict[str, Any]] = {
    "spell_backward": {"min_word_len": 3, "max_word_len": 6},
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
}


@dataclass(frozen=True)
class Example:
    """A question, its answer, and both as tokens: the prompt as served, the answer with its end
    mark."""

    question: str
    answer: str


Source = Callable[[int], Example]


def sources(split: Split, seed: int) -> dict[str, Source]:
    """For each task the function from an index to an example of the split."""

    def built_in(task: str) -> Source:
        def draw(index: int) -> Example:
            problem = make_problem(task, index, seed=seed, split=split)
            return Example(problem.messages[0]["content"], problem.answer)

        return draw

    def gym(name: str) -> Source:
        seed_of_split = seed * 10_000_000 + (900_000_000 if split == "heldout" else 0)
        dataset = reasoning_gym.create_dataset(
            name, seed=seed_of_split, size=10_000_000, **REASONING_GYM[name]
        )

        def draw(index: int) -> Example:
            for item in range(index * 100, index * 100 + 100):
                entry = dataset[item]
                if split_of(question_key(name, entry["question"])) == split:
                    return Example(entry["question"], entry["answer"])
            raise SystemExit(f"no {split} question of {name} among a hundred")

        return draw

    return {
        **{task: built_in(task) for task in TASKS},
        **{name: gym(name) for name in REASONING_GYM},
    }


def letters(rng: random.Random, shortest: int, longest: int) -> str:
    alphabet = rng.choice(["abc", "aeinorst", string.ascii_lowercase, string.ascii_lowercase])
    return "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))


def terms(rng: random.Random) -> tuple[int, int]:
    below = rng.choice([10, 100, 100, 100])
    return rng.randrange(below), rng.randrange(below)


def skills(seed: int, *, anywhere: bool = False) -> dict[str, Source]:
    """The same skills as the tasks', written as expressions, without a word of instruction.

    `anywhere`: with letters that mean nothing before them (and an "=" after some sums), so that the
    skill does not hang on its place in the prompt.
    """

    def add(rng: random.Random) -> tuple[str, str]:
        a, b = terms(rng)
        return f"{a}{rng.choice(['+', ' + '])}{b}", str(a + b)

    def subtract(rng: random.Random) -> tuple[str, str]:
        a, b = terms(rng)
        return f"{a} - {b}", str(a - b)

    def in_order(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 7)
        return f"sorted({text})", "".join(sorted(text))

    def backward(rng: random.Random) -> tuple[str, str]:
        text = letters(rng, 2, 7)
        return f"reversed({text})", text[::-1]

    def count(rng: random.Random) -> tuple[str, str]:
        text = " ".join(letters(rng, 2, 6) for _ in range(rng.randint(1, 2)))
        wanted = rng.choice(text.replace(" ", ""))
        return f"count({wanted},{text})", str(text.count(wanted))

    def largest(rng: random.Random) -> tuple[str, str]:
        numbers = [rng.randrange(10, 100) for _ in range(rng.randint(2, 4))]
        return f"max({','.join(map(str, numbers))})", str(max(numbers))

    def source(name: str, make: Callable[[random.Random], tuple[str, str]]) -> Source:
        def draw(index: int) -> Example:
            rng = random.Random(f"{name}/{seed}/{index}")
            expression, answer = make(rng)
            if anywhere:
                end = rng.choice(["", " ="]) if name in ("add", "subtract") else ""
                expression = f"{letters(rng, 1, 12)}: {expression}{end}"
            return Example(expression, answer)

        return draw

    makers = {
        "add": add,
        "subtract": subtract,
        "sorted": in_order,
        "reversed": backward,
        "count": count,
    }
    return {name: source(name, make) for name, make in {**makers, "max": largest}.items()}
