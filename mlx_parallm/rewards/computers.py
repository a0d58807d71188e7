"""RewardComputer: scores trajectories once they are collected, from Python or named in a configuration's `rewards`.

Whatever has `compute_rewards(trajectories, method)` and returns one number for each works where one of these does.
`relative` and `pareto` compare the trajectories of one prompt (`group_id`); those that are alone in their group are
compared with each other.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, ClassVar

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.methods import METHODS, Method, Parts, combine, standardize
from mlx_parallm.types import Trajectory

Objective = Callable[[Trajectory], float | None]


class RewardComputer(ABC):
    """Named parts of each trajectory, and their weights. A subclass says what the parts are."""

    default_method: ClassVar[Method] = "absolute"

    def __init__(self, weights: Mapping[str, float], *, normalize: bool = False) -> None:
        """`normalize`: what `compute_rewards` returns has mean 0 and standard deviation 1 (population), whatever the
        method. Raises ConfigError: a weight that is not a finite number."""
        for name, weight in weights.items():
            if not math.isfinite(weight):
                raise ConfigError(f"{type(self).__name__}: the weight of {name!r} is {weight}")
        self.weights = dict(weights)
        self.normalize = normalize

    @abstractmethod
    def compute_parts(self, trajectories: Sequence[Trajectory]) -> list[Parts]:
        """For each trajectory its parts by their names, unweighted; None where a part does not apply."""

    def compute_rewards(self, trajectories: Sequence[Trajectory], method: Method | None = None) -> list[float]:
        """One number for each trajectory, by `rewards/methods.py`. A trajectory to which no part applies gets the mean
        of those that it is compared with.

        Raises ConfigError: an unknown method. RolloutRejectedError: a part that is not finite, or none that applies.
        """
        method = method or self.default_method
        if method not in METHODS:
            raise ConfigError(f"no reward method {method!r}: choose one of {', '.join(METHODS)}")
        rewards = [0.0] * len(trajectories)
        parts = self._checked_parts(trajectories)
        for together in compared_together(trajectories):
            scores = combine(method, [parts[n] for n in together], self.weights)
            known = [score for score in scores if score is not None]
            if not known:
                raise RolloutRejectedError(f"{type(self).__name__}: no part applies to any trajectory of a group")
            for n, score in zip(together, scores, strict=True):
                rewards[n] = fmean(known) if score is None else score
        return standardize(rewards) if self.normalize else rewards

    def compute_objective_statistics(self, trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
        """For each part: mean, std (population), min, max over the trajectories that it applies to."""
        parts = self._checked_parts(trajectories)
        statistics = {}
        for name in self.weights:
            if values := [value for part in parts if (value := part.get(name)) is not None]:
                spread = {"std": pstdev(values), "min": min(values), "max": max(values)}
                statistics[name] = {"mean": fmean(values)} | spread
        return statistics

    def _checked_parts(self, trajectories: Sequence[Trajectory]) -> list[Parts]:
        parts = self.compute_parts(trajectories)
        for scores in parts:
            for name, value in scores.items():
                if value is not None and not math.isfinite(value):
                    raise RolloutRejectedError(f"{type(self).__name__}: {name} is {value}")
        return parts


def compared_together(trajectories: Sequence[Trajectory]) -> list[list[int]]:
    """Positions of the trajectories that are compared with each other."""
    groups: defaultdict[Any, list[int]] = defaultdict(list)
    for position, trajectory in enumerate(trajectories):
        groups[getattr(trajectory, "group_id", "")].append(position)
    alone = [group[0] for group in groups.values() if len(group) == 1]
    return [group for group in groups.values() if len(group) > 1] + ([alone] if alone else [])


class SVRLRewardComputer(RewardComputer):
    """Quality of the answer against what its verification has cost (`environments/kinds/svrl.py`):

        task - verification_weight · spent / budget + efficiency_weight · max(0, (max_steps - steps) / max_steps)

    with the parts `task`, `cost` = spent / budget, and `efficiency`. `pareto` has them as objectives, cost as a cost.
    """

    def __init__(
        self,
        task_evaluator: Objective | None = None,
        verification_weight: float = 0.1,
        efficiency_weight: float = 0.05,
        *,
        normalize: bool = False,
    ) -> None:
        """`task_evaluator`: quality of an answer, by default `final_answer_is_right`."""
        weights = {"task": 1.0, "cost": -verification_weight, "efficiency": efficiency_weight}
        super().__init__(weights, normalize=normalize)
        self._evaluate = task_evaluator or final_answer_is_right

    def compute_parts(self, trajectories: Sequence[Trajectory]) -> list[Parts]:
        return [self._parts(trajectory) for trajectory in trajectories]

    def _parts(self, trajectory: Trajectory) -> Parts:
        noted = trajectory.metadata
        if missing := sorted({"spent", "budget", "max_steps"} - set(noted)):
            raise RolloutRejectedError(
                f"SVRLRewardComputer: the trajectory's metadata has no {', '.join(missing)}: is this SVRL?"
            )
        return {
            "task": self._evaluate(trajectory),
            "cost": noted["spent"] / noted["budget"],
            "efficiency": max(0.0, (noted["max_steps"] - trajectory.step_count) / noted["max_steps"]),
        }


def final_answer_is_right(trajectory: Trajectory) -> float:
    """1 where metadata["final_answer"] is metadata["answer"], as a number or as text but for case and white space.

    Raises RolloutRejectedError: the task has no "answer".
    """
    answer = trajectory.metadata.get("answer")
    if answer is None:
        raise RolloutRejectedError('the task has no "answer" to compare with; give a task_evaluator of your own')
    given = trajectory.metadata.get("final_answer")
    return 0.0 if given is None else float(_same(str(given), str(answer)))


def _same(given: str, answer: str) -> bool:
    try:
        return float(given) == float(answer)
    except ValueError:
        return " ".join(given.lower().split()) == " ".join(answer.lower().split())
