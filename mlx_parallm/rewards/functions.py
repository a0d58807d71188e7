"""Reward functions of a configuration, called with TRL's signature: `f(prompts, completions,
**columns)`. No MLX.

`RewardFunctions` (one for each data set, made before a model is loaded) → `for_row` → the
GroupReward of one task. An entry of `rewards` names one of these, and its `reward_options` are
keyword arguments:

    python:file.py:f         a function with TRL's signature; its options are arguments of every
                             call
    python:file.py:Computer  a class, or an object, with compute_rewards(trajectories, method);
                             options of the class
    builtin:NAME             a part of `parts.py`, or the computer "svrl"; options of its factory

Functions are called as TRL 1.16 calls them (`GRPOTrainer._calculate_rewards`), once for each group:

    prompts, completions     strings, or lists of messages if the row's prompt is one
    completion_ids           the sampled tokens, EOS included
    every column of the row  repeated for each completion, except prompt, completion and
                             completion_ids; a value that the episode put into its metadata replaces
                             the row's, or adds a column
    trajectories             (not TRL's) the `Trajectory`s: turns, metadata of the environment
    tool_client              (not TRL's) the `ToolClient` of [tools], for rewards that call a tool
    trainer_state            global_step and max_steps
    log_metric(name, value)  its mean appears in metrics.jsonl as metrics/<name>/mean
    log_extra(column, list)  one value for each completion, kept with it for people to read

Parameters that a function does not have are not passed. A score of None means that the function
does not apply: it is left out of the weighted sum. A list in the place of a score holds the reward
of each turn (`TurnScores`); the score is its sum. Plain functions run one at a time on a thread of
theirs, async ones together on another (`threads.py`), so neither blocks the environments.
`methods.py` combines the scores.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.config.condition import Condition, condition_of
from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.errors import ConfigError, ParallmError, RolloutRejectedError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.execution.user_code import (
    PREFIX,
    check_call,
    did_you_mean,
    is_async,
    is_reference,
    load,
    load_function,
    name_of,
    user_code,
)
from mlx_parallm.rewards import threads
from mlx_parallm.rewards.base import EXTRA, TURN_REWARDS, UNSCORED, GroupReward
from mlx_parallm.rewards.methods import Method, Parts, combine
from mlx_parallm.rewards.parts import BUILT_IN, MAY_BE_BELOW_0, WEIGHTS
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import MAX_REWARD, Trajectory

log = get_logger("rewards")

BUILTIN = "builtin:"
DEEPEST = 32  # levels of lists and objects in a value of log_extra
NOT_A_COLUMN = ("prompt", "completion", "completion_ids")  # TRL does not pass these on
ARGUMENTS = (
    "prompts",
    "completions",
    "completion_ids",
    "trajectories",
    "tool_client",
    "trainer_state",
    "log_metric",
    "log_extra",
)

Prompt = str | Sequence[Mapping[str, Any]]


class TurnScores(float):
    """A score that is the sum of those of an episode's turns."""

    turns: tuple[float, ...]

    def __new__(cls, turns: Sequence[float]) -> "TurnScores":
        score = super().__new__(cls, math.fsum(turns))
        score.turns = tuple(turns)
        return score


def nothing(score: float | None) -> float:
    """Return 0 in the form of this score."""
    return TurnScores([0.0] * len(score.turns)) if isinstance(score, TurnScores) else 0.0


def lowest(score: float) -> float:
    """Return a score, or the lowest of its turns."""
    return min(score.turns, default=0.0) if isinstance(score, TurnScores) else score


UNWANTED = "where its condition does not hold it counts as 0, which would be more"

Score = float | str | None
"""None: the function does not apply; UNSCORED: nothing may score this trajectory."""


@dataclass(frozen=True)
class TrainingProgress:
    """The progress of the training, for reward functions: attributes named as in TRL's
    `trainer_state`."""

    global_step: int = 0
    max_steps: int = 0


@dataclass(frozen=True)
class RewardFunction:
    """One entry of `rewards`, ready to be called by keyword."""

    name: str  # unique in its data set; the score is called rewards/<name>
    call: Callable[..., Any]
    weight: float  # the built-in default until the configuration's replaces it
    signature: inspect.Signature
    worker: threads.Worker = threads.FUNCTIONS

    @functools.cached_property
    def parameters(self) -> frozenset[str] | None:
        """Names that may be passed; None: any. Options of the configuration replace columns of
        the same name."""
        parameters = self.signature.parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return None
        return frozenset(
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.VAR_POSITIONAL
        )

    @functools.cached_property
    def required(self) -> frozenset[str]:
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = self.signature.parameters.values()
        return frozenset(
            p.name for p in parameters if p.default is p.empty and p.kind not in variable
        )

    def select(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of one call, with copies of the lists. Raises
        RolloutRejectedError: one is missing."""
        options = self.call.keywords if isinstance(self.call, functools.partial) else {}
        selected = {
            name: list(value) if isinstance(value, list) else value
            for name, value in arguments.items()
            if (self.parameters is None or name in self.parameters) and name not in options
        }
        if missing := sorted(self.required - set(selected)):
            raise RolloutRejectedError(
                f"{self.name} needs {missing[0]!r}, which the task does not have; available:"
                f" {', '.join(sorted(arguments))}"
            )
        return selected


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
        conditions: Mapping[str, str] | None = None,
    ) -> None:
        """Load and check the functions.

        Args:
            weights: one for each, or empty for the default ones.
            columns: of every task; None: not known before there is one.
            key: the configuration key that names the functions.
            options: keyword arguments by the functions' names.
            conditions: of functions by their names, on the score of another.

        Raises ConfigError: a reference that cannot be loaded or is not a reward, wrong options, a
        parameter that is neither TRL's nor a column, or a column with the name of the sampled
        completions.
        """
        if "completions" in (columns or ()):
            raise ConfigError(
                f"{key}: the data has a column 'completions', but reward functions get the sampled"
                " answers under that"
                " name: rename the column"
            )
        functions = load_rewards(references, options or {}, method, key)
        alone = len(functions) == 1 and functions[0].worker is threads.COMPUTERS
        self._method: Method = "absolute" if alone else method
        self._functions: list[RewardFunction] = []
        self._tool_client: ToolClient | None = None
        self._told_unscored = False
        default_weights = [function.weight for function in functions]
        for reference, function, weight in zip(
            references, functions, weights or default_weights, strict=True
        ):
            _check_parameters(function, columns, f"{key}: {reference}")
            self._functions.append(replace(function, weight=weight))
        self._conditions = {
            name: self._condition_of(name, text) for name, text in (conditions or {}).items()
        }
        for name, reference in zip(self.names, references, strict=True):
            binary = (options or {}).get(name, {}).get("threshold") is not None
            below = reference.removeprefix(BUILTIN) in MAY_BE_BELOW_0 and not binary
            if name in self._conditions and reference.startswith(BUILTIN) and below:
                raise ConfigError(
                    f"reward_conditions: {reference} may score below 0: {UNWANTED}; give a"
                    " condition to a reward of 0 or more"
                )

    def _condition_of(self, name: str, text: str) -> Condition:
        """Raises ConfigError: a name that no function has, a function's condition on itself, or a
        weight below 0."""
        condition = condition_of(text)
        for each in (name, condition.name):
            if each not in self.names:
                near = did_you_mean(each, self.names)
                raise ConfigError(
                    f"reward_conditions: there is no reward {each!r}{near}; there are"
                    f" {', '.join(self.names)}"
                )
        if name == condition.name:
            raise ConfigError(
                f"reward_conditions: {name} is its own condition: name another reward"
            )
        if self.weights[name] < 0:
            raise ConfigError(
                f"reward_conditions: {name} has the weight {self.weights[name]:g}: {UNWANTED};"
                " reward what is good, with a weight above 0"
            )
        return condition

    @classmethod
    def from_config(
        cls,
        config: EnvironmentConfig,
        *,
        columns: Collection[str] | None,
        default: Sequence[str] = (),
    ) -> "RewardFunctions":
        """Load the functions of an [[environments]] entry; `default`: references if it names
        none. Raises ConfigError."""
        references = config.rewards or tuple(default)
        if not references:
            raise ConfigError(
                f'environments: {config.name} needs rewards = ["python:file.py:function"]'
            )
        if config.reward_weights and len(config.reward_weights) != len(references):
            raise ConfigError(
                f"environments: {config.name} has {len(config.reward_weights)} reward_weights for"
                f" the rewards {', '.join(references)}"
            )
        return cls(
            references,
            config.reward_weights,
            columns=columns,
            key="environments: rewards",
            method=config.reward_method,
            options=config.reward_options,
            conditions=config.reward_conditions,
        )

    @classmethod
    def none(cls) -> "RewardFunctions":
        """Return no functions: every reward is 0, and nothing is learned from it."""
        return cls((), (), columns=None, key="environments: rewards")

    @property
    def names(self) -> list[str]:
        return [function.name for function in self._functions]

    @property
    def weights(self) -> dict[str, float]:
        return {function.name: function.weight for function in self._functions}

    def reading(self, argument: str) -> list[str]:
        """Return the names of the functions that cannot be called without this argument."""
        return [function.name for function in self._functions if argument in function.required]

    def attach(self, inference: Any) -> None:
        """Hand the policy's engine to the functions that ask a model (`judge = "base"`)."""
        for function in self._functions:
            if (attach := getattr(function.call, "attach", None)) is not None:
                attach(inference)

    def use_tools(self, client: ToolClient | None) -> None:
        """Hand the tools of [tools], if there are any, to the functions that call some. Raises
        ConfigError: they are missing."""
        self._tool_client = client
        tools = (
            [] if client is None else [definition["name"] for definition in client.definitions()]
        )
        for function in self._functions:
            needed = getattr(function.call, "needs_tool", None)
            if client is None and "tool_client" in function.required:
                raise ConfigError(
                    f"reward {function.name} calls a tool: set [[tools.mcp]] or tools.functions"
                )
            if needed is not None and needed not in tools:
                raise ConfigError(
                    f"reward {function.name}: there is no tool"
                    f" {needed!r}{did_you_mean(needed, tools)};"
                    f" [tools] has: {', '.join(tools)}"
                )

    def for_row(
        self, prompt: Prompt, row: Mapping[str, Any], state: Callable[[], TrainingProgress]
    ) -> GroupReward:
        """Return the reward of one task. Every call reads `state`."""
        weights = self.weights

        async def reward(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
            if not self._functions:
                return [{"reward": 0.0} for _ in trajectories]
            parts_G, metrics, extra_G = await self.parts(prompt, row, trajectories, state)
            counted_G = [self._counted(parts or {}) for parts in parts_G]
            rewards = combine(self._method, counted_G, weights)
            turns_G = list(map(self._turn_rewards, counted_G))
            scored = [value for value in rewards if value is not None]
            if not scored and None in parts_G:
                raise RolloutRejectedError(
                    f"{', '.join(self.names)} left every completion unscored"
                )
            # they do not apply to this task: its reward is 0, and nothing is learned from it
            if not scored and not self._told_unscored:  # later ones are counted
                self._told_unscored = True
                log.warning(
                    "no reward function scores any answer of a group; it is not learned from",
                    functions=self.names,
                )
            mean = math.fsum(scored) / max(len(scored), 1)
            return [
                {
                    f"rewards/{name}": score
                    for name, score in (parts or {}).items()
                    if score is not None
                }
                | ({"reward": mean, UNSCORED: 1.0} if value is None else {"reward": value})
                | ({} if turns is None or value is None else {TURN_REWARDS: turns})
                | ({EXTRA: extra} if extra else {})
                | metrics
                for parts, value, turns, extra in zip(
                    parts_G, rewards, turns_G, extra_G, strict=True
                )
            ]

        return reward

    def _counted(self, parts: Parts) -> Parts:
        """Return the scores with 0 in the place of those whose condition does not hold. Raises
        RolloutRejectedError: a score that has a condition is below 0."""
        for name in self._conditions:
            if (score := parts.get(name)) is not None and lowest(score) < 0:
                raise RolloutRejectedError(
                    f"{name} = {lowest(score):g} has a condition ({self._conditions[name]}):"
                    f" {UNWANTED}; let it score 0 or more"
                )
        void = {
            name
            for name, condition in self._conditions.items()
            if parts.get(name) is not None and not condition.holds(parts.get(condition.name))
        }
        return {
            name: score if name not in void else nothing(score) for name, score in parts.items()
        }

    def _turn_rewards(self, parts: Parts) -> list[float] | None:
        """Return the weighted sum of the scores of each turn; None: no function scored turns.

        Raises RolloutRejectedError: `reward_method` makes something else of scores than their sum,
        or functions scored different numbers of turns.
        """
        scores = {name: s.turns for name, s in parts.items() if isinstance(s, TurnScores)}
        if not scores:
            return None
        if self._method != "absolute":
            raise RolloutRejectedError(
                f'{next(iter(scores))} scored single turns, which reward_method = "{self._method}"'
                " cannot keep apart"
            )
        if len(set(map(len, scores.values()))) > 1:
            counts = ", ".join(f"{name} {len(turns)}" for name, turns in scores.items())
            raise RolloutRejectedError(f"scores of different numbers of turns: {counts}")
        weighted = (
            [self.weights[name] * value for value in turns] for name, turns in scores.items()
        )
        return [math.fsum(values) for values in zip(*weighted, strict=True)]

    async def parts(
        self,
        prompt: Prompt,
        row: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
        state: Callable[[], TrainingProgress],
    ) -> tuple[list[Parts | None], dict[str, float], list[dict[str, Any]]]:
        """Return each trajectory's score by every function (None: one of them returned UNSCORED),
        the metrics, and each trajectory's extra columns.

        Raises RolloutRejectedError: a function that raised, or did not return a number for each.
        """
        metrics: defaultdict[str, list[float]] = defaultdict(list)
        extra_G: list[dict[str, Any]] = [{} for _ in trajectories]

        def log_metric(name: str, value: float) -> None:
            metrics[name].append(_number(value, f"log_metric({name!r})"))

        def log_extra(column: str, values: Iterable[Any]) -> None:
            numbered = list(values)
            if len(numbered) != len(extra_G):
                raise RolloutRejectedError(
                    f"log_extra({column!r}): {len(numbered)} values for {len(extra_G)} completions"
                )
            for extra, value in zip(extra_G, numbered, strict=True):
                extra[str(column)] = _as_json(value)

        progress = {"trainer_state": state(), "log_metric": log_metric, "log_extra": log_extra}
        if self._tool_client is not None:
            progress["tool_client"] = self._tool_client
        arguments = _arguments(prompt, row, trajectories) | progress
        calls = (_call(function, arguments, len(trajectories)) for function in self._functions)
        scores = await asyncio.gather(*calls)
        parts_G: list[Parts | None] = []
        for column in zip(*scores, strict=True):
            numbers = {
                name: s
                for name, s in zip(self.names, column, strict=True)
                if not isinstance(s, str)
            }
            parts_G.append(numbers if len(numbers) == len(column) else None)
        return (
            parts_G,
            {
                f"metrics/{name}": math.fsum(values) / len(values)
                for name, values in metrics.items()
            },
            extra_G,
        )


# ---------------------------------------------------------------------- one call


def _arguments(
    prompt: Prompt, row: Mapping[str, Any], trajectories: Sequence[Trajectory]
) -> dict[str, Any]:
    texts = [trajectory.text for trajectory in trajectories]
    messages = not isinstance(prompt, str)
    names = dict.fromkeys(
        [*row, *(name for trajectory in trajectories for name in trajectory.metadata)]
    )
    columns = {
        name: [copy.deepcopy(t.metadata.get(name, row.get(name))) for t in trajectories]
        for name in names
    }
    return {name: values for name, values in columns.items() if name not in NOT_A_COLUMN} | {
        "prompts": [copy.deepcopy(prompt) for _ in trajectories],
        "completions": [[{"role": "assistant", "content": text}] for text in texts]
        if messages
        else texts,
        "completion_ids": [
            [
                token
                for s in t.rollout.segments
                for token, sampled in zip(s.tokens, s.mask, strict=True)
                if sampled
            ]
            for t in trajectories
        ],
        "trajectories": list(trajectories),
    }


async def _call(function: RewardFunction, arguments: Mapping[str, Any], size: int) -> list[Score]:
    future = _start(function, function.select(arguments))
    try:
        result = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if future.running():
            function.worker.leave_behind()
        raise
    if isinstance(result, str | Mapping) or not isinstance(result, Iterable):
        raise RolloutRejectedError(
            f"{function.name} returned {type(result).__name__}, not a list of numbers"
        )
    with user_code(function.name, RolloutRejectedError):
        values = list(result)
    if len(values) != size:
        raise RolloutRejectedError(
            f"{function.name} returned {len(values)} scores for {size} completions"
        )
    # lists for some completions and numbers for others would be a mistake
    numbers = [value for value in values if value is not None and not isinstance(value, str)]
    by_turn = bool(numbers) and all(isinstance(value, list | tuple) for value in numbers)
    score: Callable[[Any, str], float] = _turn_scores if by_turn else _number
    return [
        value
        if value is None or (isinstance(value, str) and value == UNSCORED)
        else None
        if _is_nan(value)
        else score(value, f"{function.name}, completion {number}")
        for number, value in enumerate(values)
    ]


def _is_nan(value: Any) -> bool:
    """Whether a value is one number, of any library, that is NaN: no score, as in TRL."""
    try:
        return not isinstance(value, str) and math.isnan(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def _turn_scores(value: Sequence[Any], what: str) -> TurnScores:
    return TurnScores([_number(score, f"{what}, turn {turn}") for turn, score in enumerate(value)])


def _start(function: RewardFunction, arguments: Mapping[str, Any]) -> "Future[Any]":
    if is_async(function.call):

        async def on_loop() -> Any:
            with user_code(function.name, RolloutRejectedError):
                return await function.call(**arguments)

        return threads.ASYNC_FUNCTIONS.submit(on_loop())
    future: Future[Any] = Future()

    def in_thread() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            with user_code(function.name, RolloutRejectedError):
                result = function.call(**arguments)
        except ParallmError as error:
            future.set_exception(error)
        # no Exceptions, and the thread has to live on
        except (asyncio.CancelledError, KeyboardInterrupt) as error:
            future.set_exception(RolloutRejectedError(f"{function.name}: {type(error).__name__}"))
        else:
            future.set_result(result)

    function.worker.put(in_thread)
    return future


def _number(value: Any, what: str) -> float:
    """A float of at most ±MAX_REWARD from a number of any library. Raises RolloutRejectedError."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    # RuntimeError: a tensor of several values
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise RolloutRejectedError(f"{what}: {value!r} is not a finite number")
    if abs(number) > MAX_REWARD:
        raise RolloutRejectedError(f"{what}: {number:g} is beyond ±{MAX_REWARD:g}")
    return number


def _as_json(value: Any) -> Any:
    """Return a JSON value: arrays as lists, other types as their text, as are numbers
    that are not finite and what lies deeper than DEEPEST. Raises nothing: people read it, no
    training depends on it."""

    def other(unknown: Any) -> Any:
        return unknown.tolist() if hasattr(unknown, "tolist") else _text_of(unknown)

    try:
        kept = json.loads(json.dumps(value, default=other), parse_constant=str)
        return kept if _is_flat(kept, DEEPEST) else _text_of(value)
    except (TypeError, ValueError, RecursionError):  # keys that are not texts, or a list in itself
        return _text_of(value)


def _is_flat(value: Any, levels: int) -> bool:
    """Whether lists and objects lie at most so many levels deep in each other."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels >= 0 and all(_is_flat(each, levels - 1) for each in inner)


def _text_of(value: Any) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError) as error:  # thousands of digits; deep
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


# ---------------------------------------------------------------------- loading


def is_reward_reference(text: str) -> bool:
    return text.startswith(BUILTIN) or is_reference(text)


def load_rewards(
    references: Sequence[str], options: Mapping[str, Mapping[str, Any]], method: Method, key: str
) -> list[RewardFunction]:
    """One for each reference. `options` by the name at a reference's end; the second of one name is
    "name#2".

    A computer that is alone applies `method` itself, one among others returns absolute scores.

    Raises ConfigError: a reference that cannot be loaded, is not a reward, or does not take its
    options; options for a name that is none of the rewards.
    """
    names = unique_names([reference.rpartition(":")[2] for reference in references])
    if unknown := [name for name in options if name not in names]:
        raise ConfigError(
            f"{key}: reward_options has {unknown[0]!r}, which is none of the"
            f" rewards{did_you_mean(unknown[0], names)}"
        )
    functions = []
    for reference, option_name in zip(references, names, strict=True):
        what, builtin = f"{key}: {reference}", reference.startswith(BUILTIN)
        keywords = options.get(option_name, {})
        loaded = (
            _load_builtin(reference, keywords, key, option_name)
            if builtin
            else _load_user(reference, keywords, key)
        )
        name = reference.removeprefix(BUILTIN) if builtin else name_of(loaded)
        weight = WEIGHTS.get(name, 1.0) if builtin else 1.0
        if hasattr(loaded, "compute_rewards"):
            call = _computer_function(
                loaded, name, method if len(references) == 1 else "absolute", what
            )
            functions.append(
                RewardFunction(name, call, weight, inspect.signature(call), threads.COMPUTERS)
            )
        else:
            functions.append(RewardFunction(name, loaded, weight, _signature(loaded, what)))
    unique = unique_names([function.name for function in functions])
    return [replace(function, name=name) for function, name in zip(functions, unique, strict=True)]


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names that are all different: the second "f" is "f#2"."""
    made: list[str] = []
    for name in names:
        number, one = 1, name
        while one in made:
            number += 1
            one = f"{name}#{number}"
        made.append(one)
    return made


def _load_builtin(reference: str, options: Mapping[str, Any], key: str, own_name: str) -> Any:
    """Return the reward that the factory makes; one that takes a name for what it notes has its
    own, so that the second of a kind does not write over the first."""
    what, name = f"{key}: {reference}", reference.removeprefix(BUILTIN)
    if name not in BUILT_IN:
        raise ConfigError(
            f"{what}: there is no built-in reward of this"
            f" name{did_you_mean(name, sorted(BUILT_IN))}"
        )
    factory = BUILT_IN[name]
    names = {"name": own_name} if "name" in inspect.signature(factory).parameters else {}
    return _create(factory, names | dict(options), what)


def _load_user(reference: str, options: Mapping[str, Any], key: str) -> Any:
    plain = reference.removeprefix(PREFIX)
    if ":" not in plain and (near := did_you_mean(plain, sorted(BUILT_IN))):
        raise ConfigError(
            f"{key}: {plain!r} is neither python:file.py:name nor builtin:NAME{near} with"
            f" {BUILTIN!r} before it"
        )
    what, value = f"{key}: {reference}", load(reference, key)
    if hasattr(value, "compute_rewards"):
        if isinstance(value, type):
            return _create(value, options, what)
        if options:
            raise ConfigError(
                f"{what} is an object already: reward_options can only be passed to a class"
            )
        return value
    function, signature = load_function(reference, key)
    if not options:
        return function
    if reserved := sorted(set(options) & set(ARGUMENTS)):
        raise ConfigError(
            f"{what}: reward_options has {reserved[0]!r}, which every call"
            " of the function passes itself"
        )
    accepts_all = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )
    for name in options:
        if name not in signature.parameters and not accepts_all:
            accepted = [
                parameter for parameter in signature.parameters if parameter not in ARGUMENTS
            ]
            raise ConfigError(
                f"{what} takes {signature}, which has no option"
                f" {name!r}{did_you_mean(name, accepted)}"
            )
    return functools.partial(function, **options)


def _create(factory: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    check_call(inspect.signature(factory), (), what, keywords=tuple(options))
    with user_code(what):
        return factory(**options)


def _signature(function: Callable[..., Any], what: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: its parameters cannot be read: {error}") from error


def _computer_function(computer: Any, name: str, method: Method, what: str) -> Callable[..., Any]:
    """The computer as a reward function; the parts of a `RewardComputer` become metrics."""
    compute, parts_of = computer.compute_rewards, getattr(computer, "compute_parts", None)
    check_call(
        inspect.signature(compute),
        ("trajectories",),
        f"{what}.compute_rewards",
        keywords=("method",),
    )
    if is_async(compute):
        raise ConfigError(f"{what}.compute_rewards is async; it has to be a plain method")

    def compute_rewards(
        trajectories: Sequence[Trajectory], log_metric: Callable[[str, float], None]
    ) -> Any:
        for parts in parts_of(trajectories) if parts_of is not None else ():
            for part, value in parts.items():
                if value is not None:
                    log_metric(f"{name}/{part}", value)
        return compute(list(trajectories), method=method)

    return compute_rewards


def _check_parameters(function: RewardFunction, columns: Collection[str] | None, what: str) -> None:
    """Raises ConfigError: a parameter that is neither TRL's nor a column, or a function that
    sees no answers."""
    signature = function.signature
    if any(
        parameter.kind is parameter.POSITIONAL_ONLY for parameter in signature.parameters.values()
    ):
        raise ConfigError(
            f"{what} takes {signature}: it is called by keyword, so there can be no / in it"
        )
    available = {*ARGUMENTS, *(columns or ())} - {"prompt", "completion"}
    if columns is not None:
        for name in signature.parameters:
            if name in function.required and name not in available:
                raise ConfigError(
                    f"{what} takes {signature}, but {name!r} is not a column of the data, held-out"
                    f" rows included{did_you_mean(name, sorted(available))}; available are"
                    f" {', '.join(sorted(available))}"
                )
    if function.parameters is not None and not function.parameters & {
        "completions",
        "completion_ids",
        "trajectories",
    }:
        raise ConfigError(
            f"{what} takes {signature}: it sees no completions; expected (prompts,"
            " completions, **columns)"
        )
