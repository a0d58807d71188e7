"""kind = "tasks": small problems with one exact answer, made from a seed and scored by exact match,
that a model of a million parameters can learn within two minutes on a laptop.

A problem is a pure function of (task, index, seed, split), the same on every machine and Python
version. The problems of a task are divided by a hash of their key into nine tenths for training and
one tenth held out, so the two splits never share a problem, whatever the seed.
`mlx_parallm/models/tiny` was pretrained on the training split only (`scripts/build_tiny_model.py`,
`docs/models.md#the-tiny-model`).
"""

import hashlib
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, Messages, Split, Task
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import did_you_mean
from mlx_parallm.rewards.base import verifier

HELDOUT_SHARE = 10
"""One problem key in this many is held out."""
HELDOUT_SEED = 0
"""Held-out problems do not depend on the run's seed, so that runs are compared on the same ones."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its one right answer."""

    task: str
    messages: Messages
    answer: str
    key: str
    """Identifies the problem; its hash decides the split."""


def _problem(task: str, question: str, answer: str, payload: str) -> Problem:
    return Problem(task, ({"role": "user", "content": question},), answer, f"{task}:{payload}")


def _letters(
    rng: random.Random, shortest: int, longest: int, alphabet: str = string.ascii_lowercase
) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))


def _sum(rng: random.Random) -> Problem:
    """Two numbers of up to two digits. `a + b` and `b + a` are one problem."""
    a, b = rng.randrange(100), rng.randrange(100)
    return _problem("sum", f"Sum: {a}+{b}", str(a + b), f"{min(a, b)}+{max(a, b)}")


def _sort(rng: random.Random) -> Problem:
    """Three to five letters into alphabetical order."""
    letters = _letters(rng, 3, 5)
    return _problem("sort", f"Sort: {letters}", "".join(sorted(letters)), letters)


def _reverse(rng: random.Random) -> Problem:
    """Three to six letters from back to front."""
    letters = _letters(rng, 3, 6)
    return _problem("reverse", f"Reverse: {letters}", letters[::-1], letters)


def _count(rng: random.Random) -> Problem:
    """How often one of the letters occurs among three to six, drawn from an alphabet of three."""
    letters = _letters(rng, 3, 6, "abc")
    wanted = rng.choice(letters)
    return _problem(
        "count", f"Count {wanted}: {letters}", str(letters.count(wanted)), f"{wanted}/{letters}"
    )


def _largest(rng: random.Random) -> Problem:
    """The largest of three numbers of two digits."""
    numbers = [rng.randrange(10, 100) for _ in range(3)]
    listed = ",".join(map(str, numbers))
    return _problem(
        "largest", f"Largest: {listed}", str(max(numbers)), "/".join(map(str, sorted(numbers)))
    )


TASKS: Mapping[str, Callable[[random.Random], Problem]] = MappingProxyType(
    {"sum": _sum, "sort": _sort, "reverse": _reverse, "count": _count, "largest": _largest}
)


def split_of(key: str) -> Split:
    """Return the split that a problem key belongs to."""
    digest = hashlib.sha256(key.encode()).digest()
    return "heldout" if int.from_bytes(digest[:8]) % HELDOUT_SHARE == 0 else "train"


def make_problem(task: str, index: int, *, seed: int, split: Split) -> Problem:
    """Return problem number `index` of a task, deterministic in its arguments.

    Raises ValueError: no such task; the message lists the tasks.
    """
    draw = TASKS.get(task)
    if draw is None:
        raise ValueError(f"unknown task {task!r}: choose one of {', '.join(TASKS)}")
    rng = random.Random(f"{task}/{seed}/{split}/{index}")
    while True:
        problem = draw(rng)
        if split_of(problem.key) == split:
            return problem


def score(problem: Problem, completion: str) -> float:
    """Return 1.0 if the completion is the answer, surrounding white space aside, else 0.0."""
    return 1.0 if completion.strip() == problem.answer else 0.0


class TasksSource(EnvironmentSource):
    tasks: Mapping[str, Any] = TASKS

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: an unknown task, or options (these tasks have none)."""
        super().__init__(config, seed=seed, name=name)
        if config.name not in self.tasks:
            near = did_you_mean(config.name, list(self.tasks)) or "."
            raise ConfigError(
                f"environments: no built-in task {config.name!r}{near} There are:"
                f" {', '.join(self.tasks)}"
            )
        if config.options:
            raise ConfigError(
                f"environments: the built-in task {config.name!r} takes no options (got"
                f" {', '.join(config.options)})"
            )

    def problem(self, index: int, seed: int, split: Split) -> Problem:
        """Return problem number `index` of the configured task."""
        return make_problem(self.config.name, index, seed=seed, split=split)

    def task(self, index: int, split: Split = "train") -> Task:
        problem = self.problem(index, HELDOUT_SEED if split == "heldout" else self.seed, split)
        return Task(
            key=problem.key,
            messages=self.open_with(problem.messages),
            reward=verifier(lambda text: score(problem, text)),
            answer=problem.answer,
        )
