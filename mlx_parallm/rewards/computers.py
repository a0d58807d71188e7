"""Reward computers with parts from functions or references: weighted and Pareto. No MLX."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.user_code import (
    check_call,
    did_you_mean,
    name_of,
    reference_to,
    user_code,
)
from mlx_parallm.rewards import threads
from mlx_parallm.rewards.functions import (
    RewardFunctions,
    TrainingProgress,
    is_reward_reference,
    unique_names,
)
from mlx_parallm.rewards.methods import (
    Method,
    Objective,
    Parts,
    RewardComputer,
    objectives_of,
    pareto_ranks,
)
from mlx_parallm.rewards.parts import SVRLRewardComputer
from mlx_parallm.types import Trajectory


class WeightedRewardComputer(RewardComputer):
    """A weighted sum of parts.

    A part is a function of one trajectory, which returns a number (soft), a bool (binary) or None
    (it does not apply); or a reference as in a configuration's `rewards` ("builtin:math",
    "python:score.py:correct"), or a function with a parameter `completions` (TRL's signature),
    which are called once for a group, with the metadata of its trajectories as columns.
    """

    def __init__(
        self,
        objective_functions: Sequence[Objective | str] = (),
        objective_names: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
        *,
        objectives: Sequence[Objective | str] = (),
        options: Mapping[str, Mapping[str, Any]] | None = None,
        normalize: bool = False,
    ) -> None:
        """
        Args:
            objective_functions: the parts; `objectives` is another name for them.
            objective_names: unique; default: the functions' own names, the second "f" as "f#2".
            weights: default: the same for each, 1 in all.
            options: keyword arguments of references, by the name at the reference's end.

        Raises ConfigError: no parts, or parts under both names; more or fewer names or weights than
        parts; a name twice; a reference that cannot be resolved.
        """
        what = type(self).__name__
        if bool(objective_functions) == bool(objectives):
            raise ConfigError(f"{what}: pass its parts as objective_functions, or as objectives")
        sources = tuple(objective_functions or objectives)
        own_names = unique_names([name_of(part) for part in sources])
        parts = tuple(
            reference_to(part, name) if _is_trls(part) else part
            for part, name in zip(sources, own_names, strict=True)
        )
        references = [part for part in parts if isinstance(part, str)]
        if wrong := [reference for reference in references if not is_reward_reference(reference)]:
            raise ConfigError(
                f'{what}: {wrong[0]!r} is neither a function nor "builtin:NAME" or'
                ' "python:file.py:name"'
            )
        self._by_reference = RewardFunctions(
            references, (), columns=None, key=what, options=options
        )
        loaded = iter(self._by_reference.names)
        loaded_names = [next(loaded) if isinstance(part, str) else "" for part in parts]
        names = [
            name if isinstance(part, str) else name_of(part)
            for name, part in zip(loaded_names, sources, strict=True)
        ]
        if len(set(map(id, sources))) == len(sources):  # one twice is a mistake
            names = unique_names(names)
        names = list(objective_names or names)
        for part in parts:
            if not isinstance(part, str):
                _check_objective(part, f"{what}: {name_of(part)}")
        shares = [1 / len(parts)] * len(parts) if weights is None else list(weights)
        for values, word in ((names, "objective_names"), (shares, "weights")):
            if len(values) != len(parts):
                raise ConfigError(f"{what}: {len(values)} {word} for {len(parts)} parts")
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"{what}: two parts have the name {twice[0]!r}: pass objective_names")
        super().__init__(dict(zip(names, shares, strict=True)), normalize=normalize)
        self._functions = {
            name: part for name, part in zip(names, parts, strict=True) if not isinstance(part, str)
        }

    def compute_parts(self, trajectories: Sequence[Trajectory]) -> list[Parts]:
        groups: dict[str | int, list[int]] = {}
        for position, trajectory in enumerate(trajectories):
            groups.setdefault(getattr(trajectory, "group_id", "") or position, []).append(position)
        referenced: dict[int, Parts | None] = {}
        if self._by_reference.names:
            for positions in groups.values():
                of_group = self._score_group([trajectories[position] for position in positions])
                referenced |= dict(zip(positions, of_group, strict=True))
        rows: list[Parts] = []
        for position, trajectory in enumerate(trajectories):
            if (scores := referenced.get(position, {})) is None:
                rows.append({})
                continue
            at_once = {name: _value(f, name, trajectory) for name, f in self._functions.items()}
            rows.append(at_once | dict(scores))
        return rows

    def _score_group(self, group: Sequence[Trajectory]) -> list[Parts | None]:
        """Return the scores of the references for one group, under their names in this computer;
        None for a trajectory that one of them left unscored."""
        names = [name for name in self.weights if name not in self._functions]
        first = group[0]
        scoring = self._by_reference.parts(first.prompt, first.metadata, group, TrainingProgress)
        parts, *_ = threads.ASYNC_FUNCTIONS.run(scoring)
        return [
            None if part is None else dict(zip(names, part.values(), strict=True)) for part in parts
        ]


class ParetoRewardComputer(WeightedRewardComputer):
    """Several objectives, each to be maximised, or minimised if its weight is negative. The
    default method is `pareto` (`methods.pareto_rewards`); `absolute` and `relative` use the
    weighted sum."""

    default_method: ClassVar[Method] = "pareto"

    def get_pareto_frontier_indices(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Return the positions of the trajectories that no other dominates, duplicates included."""
        objectives = objectives_of(self._checked_parts(trajectories), self.weights)
        ranks = pareto_ranks(list(objectives.values()))
        return [position for position, rank in zip(objectives, ranks, strict=True) if rank == 0]


def _check_objective(part: Objective, what: str) -> None:
    """Raises ConfigError: it is no function, or does not take one trajectory."""
    if not callable(part):
        raise ConfigError(f"{what}: {part!r} is not a function")
    try:
        signature = inspect.signature(part)
    except (TypeError, ValueError):  # a builtin: len
        return
    try:
        check_call(signature, ("trajectory",), what)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; expected f(trajectory), or TRL's f(completions, **columns)"
        ) from error


def _is_trls(part: Objective | str) -> bool:
    """Return whether a part is a function with TRL's signature, which sees the completions of a
    group."""
    if isinstance(part, str):
        return False
    try:
        return "completions" in inspect.signature(part).parameters
    except (TypeError, ValueError):  # a builtin: len
        return False


def _value(function: Objective, name: str, trajectory: Trajectory) -> float | None:
    with user_code(name, RolloutRejectedError):
        value = function(trajectory)
        return None if value is None else float(value)


KINDS: Mapping[str, Callable[..., RewardComputer]] = {
    "svrl": SVRLRewardComputer,
    "pareto": ParetoRewardComputer,
    "weighted": WeightedRewardComputer,
    "custom": WeightedRewardComputer,
}


def create_reward_computer(kind: str, **options: Any) -> RewardComputer:
    """Create a reward computer by its kind: "svrl", "pareto", or "weighted", which is also called
    "custom".

    Raises ConfigError: an unknown kind, or as the computer's constructor.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no reward computer {kind!r}{did_you_mean(kind, list(KINDS))}")
    return KINDS[kind](**options)
