"""Environments as a stateless template with single-use states: `State` and `BaseEnvironment`.

    reset() → State → step(state) → … → is_terminal(state)

A `BaseEnvironment` has no rewards inside and stores nothing of an episode on itself: each rollout
of a group starts from a copy of one `State`, which holds everything that belongs to the episode.
The default `step` asks the policy `build_prompt(state)` and passes the answer to `update_state`;
such episodes need no thread. Your own `step` may
block: it runs on a thread of its episode, where `self.inference.generate` is a turn of the episode
(its tokens and log-probabilities are recorded). It may also be async and await
`self.inference.agenerate`.

`state_source.StateSource` plays a `BaseEnvironment` as an `EnvironmentSource` (`base.py`), which is
a run's source.
"""

import copy
import dataclasses
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import BETWEEN, Structure, Trajectory

log = get_logger("environments")

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or a list of messages, which goes through the model's chat template."""


class Inference(Protocol):
    """The part of `mlx_parallm.inference.module.InferenceModule` that an environment uses."""

    def generate(self, prompts: Sequence[Prompt]) -> Sequence[str]: ...


@dataclass
class State:
    """The state of one episode, used once: `reset` makes it, and each rollout of a group gets a
    copy."""

    prompt: str | list[dict[str, Any]]
    response: str = ""  # the policy's last answer
    step_count: int = 0
    done: bool = False
    # {"prompt", "response"} of each turn
    history: list[dict[str, str]] = field(default_factory=list)
    # read by rewards: columns, tool calls, spent …
    metadata: dict[str, Any] = field(default_factory=dict)
    # reward of the turn that was just taken, for credit by turn; taken over after each step
    turn_reward: float | None = None
    trajectory_id: str = ""  # "<group id>/<number in its group>", set when the episode starts

    def copy(self) -> "State":
        """Return a state that shares nothing with this one."""
        return copy.deepcopy(self)

    def add_turn(self, prompt: Prompt, response: str) -> None:
        """Record a turn as the last `response`, in `history`, and as a step."""
        self.history.append({"prompt": text_of(prompt), "response": response})
        self.response = response
        self.step_count += 1

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "State":
        """Make a State from what `to_dict` returned. Raises ValueError: names that a State does
        not have."""
        if unknown := sorted(set(data) - {entry.name for entry in dataclasses.fields(cls)}):
            raise ValueError(f"a State has no {', '.join(unknown)}")
        return cls(**copy.deepcopy(dict(data)))


class BaseEnvironment(ABC):
    """The rules of an episode: its task, its prompts, its end. One instance plays all episodes,
    many at once."""

    default_rewards: tuple[str, ...] = ()
    """References to the reward functions if the configuration names none."""
    inference: Inference | None = None
    blocking: bool = False
    """Whether `update_state` may take long (tools, a simulation): then it runs on a thread of
    the episode."""
    several_turns: bool = False
    """Whether an episode may have several turns: a dry run plans for their length."""
    rewards_turns: bool = False
    """Whether the rewards of the turns are the whole reward: then no reward functions are
    needed."""
    episode_tools: EpisodeTools | None = None
    """Tools that the policy may call in the episodes; None: the tools of the configuration."""

    structure: Structure | None = None
    """Structure that every answer is held to while it is sampled; a custom `step` passes
    none."""
    learner: Any = None
    """A `base.Learner` that learns beside the policy from the groups of this environment."""
    _next_index = 0

    def __init__(self, inference: Inference | None = None) -> None:
        """`inference` may be None if a run sets it."""
        self.inference = inference

    @abstractmethod
    def reset(self) -> State:
        """Return the state that every episode of a group begins with.

        It may take any of the keywords `index` (number of the task), `split` ("train" or "heldout")
        and `seed` (made of index, split and, in training, the run's seed). It is then a pure
        function of them, so that a run can be resumed and repeated. With neither index nor seed it
        is called once for each group, in their order.
        """

    def _index_or_next(self, index: int | None) -> int:
        """Return `index` for a `reset`; if it is None, the number of the next task, from 0."""
        if index is None:
            index, self._next_index = self._next_index, self._next_index + 1
        return index

    def use_tools(self, tools: EpisodeTools | None) -> EpisodeTools | None:
        """Take the tools of the run that the policy may call; return those that the episodes call.

        An environment whose `update_state` reads calls by itself keeps them and returns None.
        Raises ConfigError: it has no use for them.
        """
        return tools

    def step(self, state: State) -> State:
        """Play one turn. An override may do anything, and call
        `self.inference.generate([prompt])[0]` repeatedly."""
        prompt = self.build_prompt(state)
        return self.advance(state, prompt, self._inference.generate([prompt])[0])

    def is_terminal(self, state: State) -> bool:
        return state.done

    def build_prompt(self, state: State) -> Prompt:
        """Return the policy's next prompt. A prompt that begins with the last prompt and
        its answer continues the sampled tokens; any other begins a new sequence of the same
        episode."""
        return state.prompt

    def update_state(self, state: State, response: str) -> State:
        """Take the policy's answer to `build_prompt(state)`; return `state`, changed, or a new
        one."""
        state.add_turn(self.build_prompt(state), response)
        return state

    def end_episode(self, state: State) -> None:  # noqa: B027  most hold nothing
        """Free what `state` holds, when the episode is over, has failed, was cancelled or has timed
        out.

        It is called on the thread of the steps, after the last step and before the rewards, which
        may not need the freed resources.
        """

    def group_metadata(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Any]:
        """Return the metadata that the store keeps beside a finished group's rollouts, as JSON; a
        `learner` reads it."""
        return {}

    def router(self, name: str) -> Any:
        """Return an `AddedRouter` of the server for the environment `name`; None: it has no
        routes."""
        return None

    def advance(self, state: State, prompt: Prompt, response: str) -> State:
        """Call `update_state`, and record the turn as a step and in the history if it has not
        done so.

        Raises RolloutRejectedError: it returned no State.
        """
        steps, turns = state.step_count, len(state.history)
        after = check_state(
            self.update_state(state, response), f"{type(self).__name__}.update_state"
        )
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
            raise RolloutRejectedError(
                f"{type(self).__name__} has no inference: give one to its constructor"
            )
        return self.inference


def overrides_step(environment: BaseEnvironment) -> bool:
    """Whether the environment has its own `step`."""
    return type(environment).step is not BaseEnvironment.step


def check_state(value: Any, what: str) -> State:
    """Return the value that `what` returned. Raises RolloutRejectedError: it is not a State."""
    if isinstance(value, State):
        return value
    if inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited
        raise RolloutRejectedError(f"{what} is async; it has to be a plain function")
    raise RolloutRejectedError(f"{what} returned {value!r}, not a State")


@functools.cache
def _warn_of_a_late_count(kind: type[BaseEnvironment]) -> None:
    """Warn once of an `update_state` that looks at the step count and has not counted the turn."""
    code = getattr(kind.update_state, "__code__", None)
    if code is not None and "step_count" in code.co_names:
        log.warning(
            f"{kind.__name__}.update_state reads step_count before this turn is counted:"
            " call super().update_state(state, response) first"
        )


def text_of(prompt: Prompt, after: int = 0) -> str:
    """Return a prompt as text: itself, or the contents of its messages from number `after` on, a
    line each."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(shown_text(message.get("content")) for message in prompt[after:])


def shown_text(content: Any) -> str:
    """Return a message's content as people read it: an image is ⟦image⟧."""
    if isinstance(content, list | tuple):
        image = BETWEEN.format("image")
        return "".join(str(part.get("text", image)) for part in content)
    return str(content or "")
