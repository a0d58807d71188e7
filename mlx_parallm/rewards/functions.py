"""Reward functions of a configuration, called with TRL's signature: `f(prompts, completions, **columns)`. No MLX.

`RewardFunctions` (one for each data set, made before a model is loaded) → `for_row` → the GroupReward of one task.
They are called as TRL 1.16 calls them (`GRPOTrainer._calculate_rewards`), once for each group:

    prompts, completions     strings, or lists of messages where the row's prompt is one
    completion_ids           the sampled tokens, EOS included
    every column of the row  repeated for each completion, but prompt, completion and completion_ids; where an episode
                             has noted something under its name, or a new one, that
    trajectories             (not TRL's) the `Trajectory`s: turns, what the environment noted
    trainer_state            global_step and max_steps
    log_metric(name, value)  its mean reaches metrics.jsonl as metrics/<name>/mean
    log_extra(column, list)  accepted, recorded nowhere

A parameter that a function does not have is not passed. None as a score means that the function does not apply: it is
left out of the weighted sum. Plain functions run one at a time on a thread of theirs, async ones together on another,
so neither blocks the environments. `references.py` says what a reference may name, `methods.py` what becomes of the
parts.
"""

import asyncio
import copy
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.errors import ConfigError, ParallmError, RolloutRejectedError
from mlx_parallm.execution.user_code import is_async, user_code
from mlx_parallm.rewards import threads
from mlx_parallm.rewards.base import UNSCORED, GroupReward
from mlx_parallm.rewards.methods import Method, Parts, combine
from mlx_parallm.rewards.references import Loaded, check_parameters, load_rewards
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Trajectory

log = get_logger("rewards")

NOT_A_COLUMN = ("prompt", "completion", "completion_ids")  # TRL does not pass these on

Prompt = str | Sequence[Mapping[str, Any]]
Score = float | str | None
"""None: the function does not apply; UNSCORED: nothing may score this trajectory."""


@dataclass(frozen=True)
class TrainingProgress:
    """What reward functions may know of the training: attributes of the same names as in TRL's `trainer_state`."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True)
class RewardFunction:
    name: str  # unique in its data set; the score is called rewards/<name>
    call: Callable[..., Any]
    weight: float
    parameters: frozenset[str] | None  # None = takes everything by keyword
    required: frozenset[str]
    worker: threads.Worker

    @property
    def options(self) -> Mapping[str, Any]:
        """Keyword arguments that the configuration has set: a column of the same name is not passed."""
        return self.call.keywords if isinstance(self.call, functools.partial) else {}


class RewardFunctions:
    def __init__(
        self,
        references: Sequence[str],
        weights: Sequence[float],
        *,
        columns: Collection[str] | None,
        key: str,
        method: Method = "absolute",
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Loads and checks the functions.

        Args:
            weights: one for each, or none at all for the default ones.
            columns: of every task; None: not known before there is one.
            key: the configuration key that names the functions.
            options: keyword arguments by the functions' names.

        Raises ConfigError: what `references.load_rewards` refuses, a parameter that is neither TRL's nor a column, or a
        column with the name of what was sampled.
        """
        if "completions" in (columns or ()):
            raise ConfigError(
                f"{key}: the data has a column 'completions', which is what reward functions are given the sampled"
                " answers as: rename the column"
            )
        entries = load_rewards(references, options or {}, method, key)
        self._method: Method = "absolute" if len(entries) == 1 and entries[0].computer else method
        self._functions: list[RewardFunction] = []
        for reference, entry, weight in zip(references, entries, weights or [e.weight for e in entries], strict=True):
            parameters = check_parameters(entry, columns, f"{key}: {reference}")
            worker = threads.COMPUTERS if entry.computer else threads.FUNCTIONS
            required = frozenset(_required(entry))
            self._functions.append(RewardFunction(entry.name, entry.call, weight, parameters, required, worker))

    @classmethod
    def from_config(
        cls, config: EnvironmentConfig, *, columns: Collection[str] | None, default: Sequence[str] = ()
    ) -> "RewardFunctions":
        """Those of an [[environments]] entry; `default`: references where it names none. Raises ConfigError."""
        references = config.rewards or tuple(default)
        if not references:
            raise ConfigError(f'environments: {config.name} needs rewards = ["python:file.py:function"]')
        if config.reward_weights and len(config.reward_weights) != len(references):
            raise ConfigError(
                f"environments: {config.name} has {len(config.reward_weights)} reward_weights for the rewards"
                f" {', '.join(references)}"
            )
        return cls(
            references,
            config.reward_weights,
            columns=columns,
            key="environments: rewards",
            method=config.reward_method,
            options=config.reward_options,
        )

    @property
    def names(self) -> list[str]:
        return [function.name for function in self._functions]

    def attach(self, inference: Any) -> None:
        """Hands the policy's engine to the functions that ask a model (`judge = "base"`)."""
        for function in self._functions:
            if (attach := getattr(function.call, "attach", None)) is not None:
                attach(inference)

    def for_row(self, prompt: Prompt, row: Mapping[str, Any], state: Callable[[], TrainingProgress]) -> GroupReward:
        """The reward of one task. `state` is asked at every call."""
        weights = {function.name: function.weight for function in self._functions}

        async def reward(trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
            parts_G, metrics = await self.parts(prompt, row, trajectories, state)
            scored = [parts is not None for parts in parts_G]
            rewards = combine(self._method, [parts or {} for parts in parts_G], weights)
            known = [value for value in rewards if value is not None]
            if not known:
                what = "returned None for every completion" if all(scored) else "left every completion unscored"
                raise RolloutRejectedError(f"{', '.join(self.names)} {what}")
            mean = math.fsum(known) / len(known)
            return [
                {f"rewards/{name}": score for name, score in (parts or {}).items() if score is not None}
                | ({"reward": mean, UNSCORED: 1.0} if value is None else {"reward": value})
                | metrics
                for parts, value in zip(parts_G, rewards, strict=True)
            ]

        return reward

    async def parts(
        self,
        prompt: Prompt,
        row: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
        state: Callable[[], TrainingProgress],
    ) -> tuple[list[Parts | None], dict[str, float]]:
        """For each trajectory what every function said of it (None: one of them said UNSCORED), and the metrics.

        Raises RolloutRejectedError: a function that raised, or returned something else than a number for each.
        """
        given = _arguments(prompt, row, trajectories)
        metrics: defaultdict[str, list[float]] = defaultdict(list)

        def log_metric(name: str, value: float) -> None:
            metrics[name].append(_number(value, f"log_metric({name!r})"))

        given |= {"trainer_state": state(), "log_metric": log_metric, "log_extra": _log_extra}
        calls = (_call(function, given, len(trajectories)) for function in self._functions)
        scores = await asyncio.gather(*calls)
        parts_G: list[Parts | None] = []
        for column in zip(*scores, strict=True):
            numbers = {name: s for name, s in zip(self.names, column, strict=True) if not isinstance(s, str)}
            parts_G.append(numbers if len(numbers) == len(column) else None)
        return parts_G, {f"metrics/{name}": math.fsum(values) / len(values) for name, values in metrics.items()}


def _required(entry: Loaded) -> list[str]:
    return [
        name
        for name, parameter in entry.signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]


def _arguments(prompt: Prompt, row: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    texts = [trajectory.text for trajectory in trajectories]
    messages = not isinstance(prompt, str)
    names = dict.fromkeys([*row, *(name for trajectory in trajectories for name in trajectory.metadata)])
    columns = {name: [copy.deepcopy(t.metadata.get(name, row.get(name))) for t in trajectories] for name in names}
    return {name: values for name, values in columns.items() if name not in NOT_A_COLUMN} | {
        "prompts": [copy.deepcopy(prompt) for _ in trajectories],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if messages else texts,
        "completion_ids": [
            [token for s in t.rollout.segments for token, sampled in zip(s.tokens, s.mask, strict=True) if sampled]
            for t in trajectories
        ],
        "trajectories": list(trajectories),
    }


async def _call(function: RewardFunction, given: Mapping[str, Any], size: int) -> list[Score]:
    wanted = {
        name: list(value) if isinstance(value, list) else value
        for name, value in given.items()
        if (function.parameters is None or name in function.parameters) and name not in function.options
    }
    if missing := sorted(function.required - set(wanted)):
        there = ", ".join(sorted(given))
        raise RolloutRejectedError(
            f"{function.name} wants {missing[0]!r}, which the task does not have; there is: {there}"
        )
    future = _start(function, wanted)
    try:
        result = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.running():
            function.worker.leave_behind()
        raise
    if isinstance(result, str | Mapping) or not isinstance(result, Iterable):
        raise RolloutRejectedError(f"{function.name} returned {type(result).__name__}, not a list of numbers")
    with user_code(function.name, RolloutRejectedError):
        values = list(result)
    if len(values) != size:
        raise RolloutRejectedError(f"{function.name} returned {len(values)} scores for {size} completions")
    return [
        value
        if value is None or (isinstance(value, str) and value == UNSCORED)
        else _number(value, f"{function.name}, completion {number}")
        for number, value in enumerate(values)
    ]


def _number(value: Any, what: str) -> float:
    """A finite float from a number of any library. Raises RolloutRejectedError."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several values
        number = math.nan
    if not math.isfinite(number):
        raise RolloutRejectedError(f"{what}: {value!r} is not a finite number")
    return number


def _log_extra(column: str, values: Sequence[Any]) -> None:
    _warn_once(column)


@functools.cache
def _warn_once(column: str) -> None:
    log.warning("what log_extra is given is recorded nowhere", column=column)


def _start(function: RewardFunction, arguments: Mapping[str, Any]) -> "Future[Any]":
    if is_async(function.call):

        async def on_loop() -> Any:
            with user_code(function.name, RolloutRejectedError):
                return await function.call(**arguments)

        return threads.on_loop(on_loop())
    future: Future[Any] = Future()

    def in_thread() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with user_code(function.name, RolloutRejectedError):
                result = function.call(**arguments)
        except ParallmError as error:
            future.set_exception(error)
        except (asyncio.CancelledError, KeyboardInterrupt) as error:  # no Exceptions, and the thread has to live on
            future.set_exception(RolloutRejectedError(f"{function.name}: {type(error).__name__}"))
        else:
            future.set_result(result)

    function.worker.put(in_thread)
    return future
