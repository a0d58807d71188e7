"""What an entry of `rewards` names: a function of the user's, a part that is built in, or a reward computer. No MLX.

python:file.py:f         a function with TRL's signature; its options are keyword arguments of every call
python:file.py:Computer  a class, or an object, with compute_rewards(trajectories, method); options of the class
builtin:NAME             a part of `parts.py`, or "svrl"; options of its factory
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import (
    check_call,
    did_you_mean,
    is_async,
    is_reference,
    load,
    load_function,
    name_of,
    user_code,
)
from mlx_parallm.rewards.computers import SVRLRewardComputer
from mlx_parallm.rewards.methods import Method
from mlx_parallm.rewards.parts import PARTS, WEIGHTS
from mlx_parallm.types import Trajectory

BUILTIN = "builtin:"
GIVEN = ("prompts", "completions", "completion_ids", "trajectories", "trainer_state", "log_metric", "log_extra")
BUILT_IN: Mapping[str, Callable[..., Any]] = {**PARTS, "svrl": SVRLRewardComputer}


@dataclass(frozen=True)
class Loaded:
    """One entry of `rewards`, ready to be called by keyword."""

    name: str
    call: Callable[..., Any]
    signature: inspect.Signature
    weight: float  # where none is configured
    computer: bool = False


def is_reward_reference(text: str) -> bool:
    return text.startswith(BUILTIN) or is_reference(text)


def load_rewards(
    references: Sequence[str], options: Mapping[str, Mapping[str, Any]], method: Method, key: str
) -> list[Loaded]:
    """One for each reference. `options` by the name at a reference's end; the second of one name is "name#2".

    A computer that stands alone is asked for `method` itself, one among others for absolute scores.

    Raises ConfigError: what cannot be loaded, is no reward, or does not take its options; options of no reward.
    """
    entries, names = [], _unique([reference.rpartition(":")[2] for reference in references])
    for name in options:
        if name not in names:
            raise ConfigError(
                f"{key}: reward_options has {name!r}, which is none of the rewards{did_you_mean(name, names)}"
            )
    for reference, name in zip(references, names, strict=True):
        given = options.get(name, {})
        what = f"{key}: {reference}"
        loaded = _builtin(reference, given, what) if reference.startswith(BUILTIN) else _own(reference, given, key)
        weight = WEIGHTS.get(reference.removeprefix(BUILTIN), 1.0)
        named = reference.removeprefix(BUILTIN) if reference.startswith(BUILTIN) else name_of(loaded)
        if hasattr(loaded, "compute_rewards"):
            call = _of_computer(loaded, named, method if len(references) == 1 else "absolute", what)
            entries.append(Loaded(named, call, inspect.signature(call), weight, computer=True))
        else:
            entries.append(Loaded(named, loaded, _signature(loaded, what), weight))
    unique = _unique([entry.name for entry in entries])
    return [Loaded(n, e.call, e.signature, e.weight, e.computer) for n, e in zip(unique, entries, strict=True)]


def _unique(names: Sequence[str]) -> list[str]:
    return [name if (n := names[:i].count(name)) == 0 else f"{name}#{n + 1}" for i, name in enumerate(names)]


def _builtin(reference: str, options: Mapping[str, Any], what: str) -> Any:
    name = reference.removeprefix(BUILTIN)
    if name not in BUILT_IN:
        raise ConfigError(f"{what}: nothing built in has this name{did_you_mean(name, sorted(BUILT_IN))}")
    return _made(BUILT_IN[name], options, what)


def _own(reference: str, options: Mapping[str, Any], key: str) -> Any:
    what, own = f"{key}: {reference}", load(reference, key)
    if isinstance(own, type) and hasattr(own, "compute_rewards"):
        return _made(own, options, what)
    if hasattr(own, "compute_rewards"):
        if options:
            raise ConfigError(f"{what} is an object, which is made already: reward_options are for a class of them")
        return own
    function, signature = load_function(reference, key)
    if not options:
        return function
    if taken := sorted(set(options) & set(GIVEN)):
        raise ConfigError(f"{what}: reward_options has {taken[0]!r}, which the function is given at every call")
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name in options:
        if name not in signature.parameters and not accepts_all:
            known = [parameter for parameter in signature.parameters if parameter not in GIVEN]
            raise ConfigError(f"{what} takes {signature}, which has no option {name!r}{did_you_mean(name, known)}")
    return functools.partial(function, **options)


def _made(factory: Callable[..., Any], options: Mapping[str, Any], what: str) -> Any:
    check_call(inspect.signature(factory), (), what, keywords=tuple(options))
    with user_code(what):
        return factory(**options)


def _signature(function: Callable[..., Any], what: str) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: its parameters cannot be read: {error}") from error


def _of_computer(computer: Any, name: str, method: Method, what: str) -> Callable[..., Any]:
    """The computer as a reward function; the parts of one of ours become metrics."""
    compute, parts_of = computer.compute_rewards, getattr(computer, "compute_parts", None)
    check_call(inspect.signature(compute), ("trajectories",), f"{what}.compute_rewards", keywords=("method",))
    if is_async(compute):
        raise ConfigError(f"{what}.compute_rewards is async; it has to be a plain method")

    def compute_rewards(trajectories: Sequence[Trajectory], log_metric: Callable[[str, float], None]) -> Any:
        for parts in parts_of(trajectories) if parts_of is not None else ():
            for part, value in parts.items():
                if value is not None:
                    log_metric(f"{name}/{part}", value)
        return compute(list(trajectories), method=method)

    return compute_rewards


def check_parameters(loaded: Loaded, columns: Collection[str] | None, what: str) -> frozenset[str] | None:
    """Names that the function takes; None: everything. `columns` None: they are known when there is a task.

    Raises ConfigError: a parameter that is neither given nor a column, or a function that sees nothing of an answer.
    """
    known = {*GIVEN, *(columns or ())} - {"prompt", "completion"}
    named, takes_all = set(), False
    for name, parameter in loaded.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{what} takes {loaded.signature}: it is called by keyword, so there can be no / in it")
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            if parameter.default is parameter.empty and name not in known and columns is not None:
                raise ConfigError(
                    f"{what} takes {loaded.signature}, but {name!r} is not a column of the data, held-out rows included"
                    f"{did_you_mean(name, sorted(known))}; given are {', '.join(sorted(known))}"
                )
            named.add(name)
    if not takes_all and not named & {"completions", "completion_ids", "trajectories"}:
        raise ConfigError(
            f"{what} takes {loaded.signature}: it sees no completions; expected (prompts, completions, **columns)"
        )
    return None if takes_all else frozenset(named)
