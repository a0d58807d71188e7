"""Environments as a stateless template with single-use states: `State` and `BaseEnvironment`.

    reset() → State → step(state) → … → is_terminal(state)

A `BaseEnvironment` has no rewards inside, and keeps nothing of an episode on itself: each rollout of a group starts
from a copy of one `State`, and whatever belongs to an episode lies in it. Its default `step` asks the policy for
`build_prompt(state)` and hands what it said to `update_state`; then the episodes need no thread. A `step` of your own
may block: it runs on a thread of its episode, where `self.inference.generate` belongs to the episode (its tokens and
log-probabilities are recorded); or it is async, and awaits `self.inference.agenerate`.
"""

import copy
import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.system.log import get_logger

log = get_logger("environments")

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or a list of messages, which goes through the model's chat template."""


class Inference(Protocol):
    """What an environment needs of `mlx_parallm.inference.module.InferenceModule`."""

    def generate(self, prompts: Sequence[Prompt]) -> Sequence[str]: ...


@dataclass
class State:
    """Where one episode stands. Single use: made by `reset`, copied for each rollout of a group."""

    prompt: str | list[dict[str, Any]]
    response: str = ""  # the policy's last answer
    step_count: int = 0
    done: bool = False
    history: list[dict[str, str]] = field(default_factory=list)  # {"prompt", "response"} of each turn
    metadata: dict[str, Any] = field(default_factory=dict)  # what rewards are to know: columns, tool calls, spent …
    trajectory_id: str = ""  # "<group id>/<number in its group>", set when the episode starts

    def copy(self) -> "State":
        """Shares nothing with this one."""
        return copy.deepcopy(self)

    def add_turn(self, prompt: Prompt, response: str) -> None:
        """Notes a turn: it is the last `response`, part of `history`, and counts as a step."""
        self.history.append({"prompt": text_of(prompt), "response": response})
        self.response = response
        self.step_count += 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "State":
        """What `to_dict` gave. Raises ValueError: names that a State does not have."""
        if unknown := sorted(set(data) - {entry.name for entry in dataclasses.fields(cls)}):
            raise ValueError(f"a State has no {', '.join(unknown)}")
        return cls(**copy.deepcopy(dict(data)))


class BaseEnvironment(ABC):
    """How episodes go: the task, what is asked, when it is over. One instance plays them all, many at once."""

    default_rewards: tuple[str, ...] = ()
    """References to the reward functions of a configuration that names none."""
    inference: Inference | None = None
    blocking: bool = False
    """Whether `update_state` may take its time (tools, a simulation): then it runs on a thread of the episode."""

    def __init__(self, inference: Inference | None = None) -> None:
        """`inference` may stay None where a run sets it, or where `step` is the default."""
        self.inference = inference

    @abstractmethod
    def reset(self) -> State:
        """The beginning of an episode, for a whole group.

        It may take any of the keywords `index` (number of the task), `split` ("train" or "heldout") and `seed` (made of
        index, split and, in training, the run's seed), and is then a pure function of them: a run can be resumed and
        repeated. With neither index nor seed it is called once for each group, in their order.
        """

    def step(self, state: State) -> State:
        """One turn. Overridden, it may do anything, `self.inference.generate([prompt])[0]` any number of times."""
        prompt = self.build_prompt(state)
        return self.advance(state, prompt, self._inference.generate([prompt])[0])

    def is_terminal(self, state: State) -> bool:
        return state.done

    def build_prompt(self, state: State) -> Prompt:
        """What the policy is asked next. Where it begins with the last prompt and answer, it goes on from the tokens
        that were sampled; else it begins a new sequence of the same episode."""
        return state.prompt

    def update_state(self, state: State, response: str) -> State:
        """Takes the policy's answer to `build_prompt(state)`; returns `state`, changed, or a new one."""
        state.add_turn(self.build_prompt(state), response)
        return state

    def end_episode(self, state: State) -> None:  # noqa: B027  most hold nothing
        """Frees what `state` holds, which no step follows: the episode is over, has failed, was cancelled or timed out.
        On the thread of its steps, after the last of them, and before the rewards: they may not need what it frees."""

    def batch_step(self, states: Sequence[State]) -> list[State]:
        """One step of each: with the default `step` one call of `generate`, else a thread for each."""
        if not states:
            return []
        if overrides_step(self):
            with ThreadPoolExecutor(len(states)) as pool:
                return list(pool.map(self.step, states))
        prompts = [self.build_prompt(state) for state in states]
        answers = list(self._inference.generate(prompts))
        return [self.advance(*turn) for turn in zip(states, prompts, answers, strict=True)]

    def advance(self, state: State, prompt: Prompt, response: str) -> State:
        """`update_state`, after which the turn counts as a step and is in the history, whoever wrote it.

        Raises RolloutRejectedError: it returned no State.
        """
        steps, turns = state.step_count, len(state.history)
        after = check_state(self.update_state(state, response), f"{type(self).__name__}.update_state")
        if after.step_count <= steps:
            _warn_of_a_late_count(type(self))
        after.response = response
        after.step_count = max(after.step_count, steps + 1)
        if len(after.history) == turns:
            after.history.append({"prompt": text_of(prompt), "response": response})
        return after

    @property
    def _inference(self) -> Inference:
        if self.inference is None:
            raise RolloutRejectedError(f"{type(self).__name__} has no inference: give one to its constructor")
        return self.inference


def overrides_step(environment: BaseEnvironment) -> bool:
    """Whether its `step` is not the default one."""
    return type(environment).step is not BaseEnvironment.step


def check_state(given: Any, what: str) -> State:
    """Raises RolloutRejectedError: `what` returned something else."""
    if isinstance(given, State):
        return given
    if inspect.iscoroutine(given):
        given.close()  # or Python warns that it was never awaited
        raise RolloutRejectedError(f"{what} is async; it has to be a plain function")
    raise RolloutRejectedError(f"{what} returned {given!r}, not a State")


@functools.cache
def _warn_of_a_late_count(kind: type[BaseEnvironment]) -> None:
    """Its `update_state` has not counted the turn. Once, and only where it looks at the count."""
    code = getattr(kind.update_state, "__code__", None)
    if code is not None and "step_count" in code.co_names:
        log.warning(
            f"{kind.__name__}.update_state reads step_count before this turn is counted:"
            " call super().update_state(state, response) first"
        )


def text_of(prompt: Prompt, after: int = 0) -> str:
    """A prompt as text: itself, or the contents of its messages from number `after` on, a line each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(message.get("content") or "") for message in prompt[after:])
