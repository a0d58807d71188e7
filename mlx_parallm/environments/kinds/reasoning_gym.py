"""kind = "reasoning_gym": tasks and verifiers of the reasoning-gym package, which is imported only
when configured.

The package draws item i of a data set from `seed + i`. Training and held-out items come from
distant seeds. Small data sets repeat questions under any seed, so a hash of the question's text
also decides its split: no question is in both.
"""

import dataclasses
import difflib
import hashlib
import math
from collections.abc import Iterable
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, Split, Task
from mlx_parallm.environments.kinds.tasks import split_of
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.base import verifier
from mlx_parallm.system.packages import require

HELDOUT_SEED = 3_000_000_000
DEFAULT_SIZE = 20_000  # virtual items; the most that every data set of reasoning-gym 0.1.25 accepts
DRAWS = 2_000  # items looked at for one of the right split; a tenth is held out
STRIDE = 7_919  # between two draws of one index


def question_key(dataset: str, question: str) -> str:
    """Return what identifies a question; `tasks.split_of` of it is the question's split."""
    return f"reasoning_gym/{dataset}:{question}"


class ReasoningGymSource(EnvironmentSource):
    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: package missing, unknown data set or option, a value that the data
        set refuses."""
        super().__init__(config, seed=seed, name=name)
        options = {"size": DEFAULT_SIZE, **config.options}
        digest = hashlib.sha256(f"{config.name}/{seed}".encode()).digest()
        train_seed = options.pop(
            "seed", int.from_bytes(digest[:8], "big") % (HELDOUT_SEED - DEFAULT_SIZE)
        )
        self._datasets = {
            "train": _create(config.name, {**options, "seed": train_seed}),
            "heldout": _create(config.name, {**options, "seed": HELDOUT_SEED}),
        }

    def task(self, index: int, split: Split = "train") -> Task:
        dataset = self._datasets[split]
        for draw in range(DRAWS):
            entry = dataset[(index + draw * STRIDE) % len(dataset)]
            key = question_key(self.config.name, entry["question"])
            if split_of(key) == split:
                return self._task(dataset, entry, key)
        raise ConfigError(
            f"environments: reasoning-gym's {self.config.name!r} with these options has too few"
            " distinct questions:"
            f" none of {DRAWS} drawn belongs to the {split} split"
        )

    def _task(self, dataset: Any, entry: dict[str, Any], key: str) -> Task:
        def check(text: str) -> float:
            value = float(dataset.score_answer(text.strip(), entry))
            if not math.isfinite(value):
                raise RolloutRejectedError(
                    f"reasoning-gym's {self.config.name} scored an answer {value}"
                )
            return value

        return Task(
            key=key,
            messages=self.open_with(({"role": "user", "content": entry["question"]},)),
            reward=verifier(check),
            answer=None if entry["answer"] is None else str(entry["answer"]),
        )


def _create(name: str, options: dict[str, Any]) -> Any:
    require('environments: kind = "reasoning_gym"', "reasoning_gym")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise ConfigError(
            f"environments: reasoning-gym has no data set {name!r}; did you mean"
            f" {_near(name, DATASETS)}?"
        )
    available = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    for option in options:
        if option not in available:
            raise ConfigError(
                f"environments: reasoning-gym's {name!r} has no option {option!r}; did you mean"
                f" {_near(option, available)}?"
                f" There are: {', '.join(available)}"
            )
    try:
        return reasoning_gym.create_dataset(name, **options)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"environments: reasoning-gym's {name!r} refuses its options: {error}"
        ) from error


def _near(name: str, names: Iterable[str]) -> str:
    return ", ".join(
        repr(near) for near in difflib.get_close_matches(name, list(names), n=2, cutoff=0.0)
    )
