"""Tasks of hybrid episodes: pools (rows, a JSONL file) and generators (functions of a number). No
MLX.

The routing tasks have three kinds, and each has one good route: a product that a tool computes, a
target that an expert hits, a word that needs neither. Task `index` of a split follows from the
numbers alone.
"""

import inspect
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.dataset_rows import TaskData, read_tasks
from mlx_parallm.environments.kinds.tasks import split_of
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import did_you_mean, is_reference, load_function

BUILTIN = "builtin:"
DEFAULT_TASKS = f"{BUILTIN}routing"
WORDS = (
    "amber",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "harbor",
    "island",
    "jasper",
    "lagoon",
    "maple",
    "river",
)
HIT_TOLERANCE_M = 1.0
KINDS = ("math", "physics", "general")

Generator = Callable[[int, Split], Mapping[str, Any]]


def routing_task(index: int, split: Split = "train", seed: int = 0) -> dict[str, Any]:
    """Return task `index`: a product (type "math"), a target ("physics") or a word ("general")."""
    rng = random.Random(f"routing/{seed if split == 'train' else 'heldout'}/{index}")
    kind = rng.choice(KINDS)
    while True:
        task = _MAKERS[kind](rng)
        # there are too few words to divide
        if kind == "general" or split_of(f"routing:{task['prompt']}") == split:
            return task


def _product(rng: random.Random) -> dict[str, Any]:
    a, b = rng.randrange(11, 100), rng.randrange(11, 100)
    return {"prompt": f"What is {a} * {b}?", "type": "math", "goal": {"expected_answer": a * b}}


def _target(rng: random.Random) -> dict[str, Any]:
    target, wind = rng.randrange(50, 200), rng.randrange(-5, 6)
    goal = {"target": target, "wind": wind, "tolerance": HIT_TOLERANCE_M}
    return {"prompt": f"Hit {target} m in wind {wind} m/s.", "type": "physics", "goal": goal}


def _word(rng: random.Random) -> dict[str, Any]:
    word = rng.choice(WORDS)
    return {"prompt": f"Say {word}.", "type": "general", "goal": {"expected_answer": word}}


_MAKERS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = MappingProxyType(
    {"math": _product, "physics": _target, "general": _word}
)
GENERATORS: Mapping[str, Callable[..., Mapping[str, Any]]] = MappingProxyType(
    {"routing": routing_task}
)


def task_source(tasks: TaskData | Callable[..., Mapping[str, Any]], *, seed: int) -> Generator:
    """Return what makes task `index` of a split.

    Args:
        tasks: rows or a JSONL file of them; "builtin:routing"; a function, or a reference to one
            ("python:file.py:name"), of `index` and, if it has such parameters, `split` and
            `seed`.

    Raises ConfigError: none of these.
    """
    if isinstance(tasks, str) and tasks.startswith(BUILTIN):
        name = tasks.removeprefix(BUILTIN)
        if name not in GENERATORS:
            raise ConfigError(
                f"hybrid: tasks: there is no {tasks!r}{did_you_mean(name, list(GENERATORS))}"
            )
        return _generated(GENERATORS[name], seed)
    if isinstance(tasks, str) and is_reference(tasks):
        return _generated(load_function(tasks, "hybrid: tasks")[0], seed)
    if callable(tasks):
        return _generated(tasks, seed)
    rows = read_tasks(tasks, "prompt", seed=seed, what="hybrid: tasks")
    return lambda index, split: rows.row(index, split).columns


def _generated(function: Callable[..., Mapping[str, Any]], seed: int) -> Generator:
    parameters = inspect.signature(function).parameters

    def make(index: int, split: Split) -> Mapping[str, Any]:
        arguments = {"split": split, "seed": seed}
        return function(
            index, **{name: value for name, value in arguments.items() if name in parameters}
        )

    return make
