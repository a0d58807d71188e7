"""Reward functions of the user, with TRL's signature: `f(prompts, completions, **columns) -> list[float]`. No MLX.

`RewardFunctions` (one for each data set, made before a model is loaded) → `for_row` → the GroupReward of one task.
They are called as TRL 1.16 calls them (`GRPOTrainer._calculate_rewards`), once for each group:

    prompts, completions     strings, or lists of messages where the row's prompt is one
    completion_ids           the sampled tokens, EOS included
    every column of the row  repeated for each completion, but prompt, completion and completion_ids
    trainer_state            global_step and max_steps
    log_metric(name, value)  its mean reaches metrics.jsonl as metrics/<name>/mean
    log_extra(column, list)  accepted, recorded nowhere

A parameter that a function does not have is not passed. None as a score means that the function does not apply: it is
left out of the weighted sum. Plain functions run one at a time on a thread of theirs, async ones together on another,
so neither blocks the environments.
"""

import asyncio
import copy
import functools
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from mlx_parallm.errors import ConfigError, ParallmError, RolloutRejectedError
from mlx_parallm.log import get_logger
from mlx_parallm.rewards.base import UNSCORED, GroupReward, Response
from mlx_parallm.user_code import did_you_mean, is_async, load_function, name_of, user_code

log = get_logger("rewards")

GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra")
NOT_A_COLUMN = ("prompt", "completion", "completion_ids")  # TRL does not pass these on

Prompt = str | Sequence[Mapping[str, Any]]


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


class RewardFunctions:
    def __init__(
        self, references: Sequence[str], weights: Sequence[float], *, columns: Collection[str], key: str
    ) -> None:
        """Loads and checks the functions. `key`: the configuration key that names them.

        Raises ConfigError: what `user_code.load` refuses, a parameter that is neither TRL's nor a column, or a column
        with the name of what was sampled.
        """
        if "completions" in columns:
            raise ConfigError(
                f"{key}: the data has a column 'completions', which is what reward functions are given the sampled"
                " answers as: rename the column"
            )
        self._functions: list[RewardFunction] = []
        for reference, weight in zip(references, weights or [1.0] * len(references), strict=True):
            call, signature = load_function(reference, key)
            parameters = _parameters(signature, set(columns), f"{key}: {reference}")
            taken = sum(name_of(function.call) == name_of(call) for function in self._functions)
            name = name_of(call) if not taken else f"{name_of(call)}#{taken + 1}"
            self._functions.append(RewardFunction(name, call, weight, parameters))

    def for_row(self, prompt: Prompt, row: Mapping[str, Any], state: Callable[[], TrainingProgress]) -> GroupReward:
        """The reward of one task. `state` is asked at every call."""

        async def reward(responses: Sequence[Response]) -> list[dict[str, float]]:
            given = _arguments(prompt, row, responses)
            metrics: defaultdict[str, list[float]] = defaultdict(list)

            def log_metric(name: str, value: float) -> None:
                metrics[name].append(_number(value, f"log_metric({name!r})"))

            given |= {"trainer_state": state(), "log_metric": log_metric, "log_extra": _log_extra}
            calls = (_call(function, given, len(responses)) for function in self._functions)
            scores = await asyncio.gather(*calls)
            combined = _combine(self._functions, scores)
            means = {f"metrics/{name}": math.fsum(values) / len(values) for name, values in metrics.items()}
            return [parts | means for parts in combined]

        return reward


def _parameters(signature: inspect.Signature, columns: set[str], what: str) -> frozenset[str] | None:
    known = {*GIVEN, *(columns - set(NOT_A_COLUMN))}
    named, takes_all = set(), False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{what} takes {signature}: it is called by keyword, so there can be no / before that")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            if parameter.default is parameter.empty and name not in known:
                raise ConfigError(
                    f"{what} takes {signature}, but {name!r} is not a column of the data, held-out rows included"
                    f"{did_you_mean(name, sorted(known))}; given are {', '.join(sorted(known))}"
                )
            named.add(name)
    if not takes_all and not named & {"completions", "completion_ids"}:
        raise ConfigError(
            f"{what} takes {signature}: it sees no completions; expected (prompts, completions, **columns)"
        )
    return None if takes_all else frozenset(named)


def _arguments(prompt: Prompt, row: Mapping[str, Any], responses: Sequence[Response]) -> dict[str, Any]:
    texts = [response.text for response in responses]
    messages = not isinstance(prompt, str)
    columns = {name: [copy.deepcopy(value) for _ in responses] for name, value in row.items()}
    return {name: values for name, values in columns.items() if name not in NOT_A_COLUMN} | {
        "prompts": [copy.deepcopy(prompt) for _ in responses],
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if messages else texts,
        "completion_ids": [
            [token for token, sampled in zip(r.rollout.tokens, r.rollout.mask, strict=True) if sampled]
            for r in responses
        ],
    }


async def _call(function: RewardFunction, given: Mapping[str, Any], size: int) -> list[float | None]:
    wanted = {
        name: list(value) if isinstance(value, list) else value
        for name, value in given.items()
        if function.parameters is None or name in function.parameters
    }
    future = _start(function, wanted)
    try:
        result = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.running():
            _leave_behind()
        raise
    if isinstance(result, str | Mapping) or not isinstance(result, Iterable):
        raise RolloutRejectedError(f"{function.name} returned {type(result).__name__}, not a list of numbers")
    with user_code(function.name, RolloutRejectedError):
        values = list(result)
    if len(values) != size:
        raise RolloutRejectedError(f"{function.name} returned {len(values)} scores for {size} completions")
    return [
        None if value is None else _number(value, f"{function.name}, completion {number}")
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


def _combine(functions: Sequence[RewardFunction], scores: Sequence[Sequence[float | None]]) -> list[dict[str, float]]:
    """Parts and weighted sum of each completion; TRL's nansum over the functions that apply."""
    parts_G = []
    for column in zip(*scores, strict=True):
        known = [(f, score) for f, score in zip(functions, column, strict=True) if score is not None]
        parts = {f"rewards/{f.name}": score for f, score in known}
        if known:
            parts["reward"] = math.fsum(f.weight * score for f, score in known)
        parts_G.append(parts)
    sums = [parts["reward"] for parts in parts_G if "reward" in parts]
    if not sums:
        raise RolloutRejectedError(f"{', '.join(f.name for f in functions)} returned None for every completion")
    mean = math.fsum(sums) / len(sums)
    return [parts if "reward" in parts else {"reward": mean, UNSCORED: 1.0} for parts in parts_G]


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

        return asyncio.run_coroutine_threadsafe(on_loop(), _loop())
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

    _thread().put(in_thread)
    return future


# Threads for the life of the process, and daemons: a reward that never returns must not hold up the end of a run.


@functools.cache
def _thread() -> "SimpleQueue[Callable[[], None]]":
    """The thread of plain functions. It has no event loop, so a function may use asyncio.run, as it may under TRL."""
    jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def work() -> None:
        while True:
            jobs.get()()

    threading.Thread(target=work, name="rewards", daemon=True).start()
    return jobs


def _leave_behind() -> None:
    """Gives the calls that wait for one that does not end (it has used up its timeout_s) a thread of their own."""
    left = _thread()
    _thread.cache_clear()
    with suppress(Empty):
        while True:
            _thread().put(left.get_nowait())


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of async functions: one, so that a client that a user's module keeps stays on it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="async rewards", daemon=True).start()
    return loop
