"""kind = "gymnasium": a text policy in any environment of gymnasium, which is imported only when
one is made.

    observation → text → policy → text → action → step → observation …, until terminated or
    truncated

The metadata of an episode holds `seed`, `return` (the sum of the rewards), `rewards` (of each
turn), `actions`, `invalid_actions` (the number of answers that were not actions: nothing is done,
but the turn counts), `terminated` and `truncated`.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.state import BaseEnvironment, Inference, State
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.action_grammar import any_name
from mlx_parallm.execution.user_code import is_reference, load_function_of, user_code
from mlx_parallm.system.packages import require
from mlx_parallm.types import Structure, Trajectory

WHOLE_NUMBER = re.compile(r"-?\d+")


@dataclass
class SimulationState(State):
    """A State with a live simulation. A copy starts its own simulation, from the seed and
    the actions."""

    def __post_init__(self) -> None:
        self.live: Any = None
        self.taken: list[Any] = []  # actions as the simulation took them

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"live": None}


class GymnasiumEnvironment(BaseEnvironment):
    several_turns = True
    default_rewards = ("python:mlx_parallm.environments.kinds.gymnasium:episode_return",)
    blocking = True

    def __init__(
        self,
        inference: Inference | None = None,
        id: str = "",
        *,
        make: Mapping[str, Any] | None = None,
        instructions: str = "",
        observation_text: Callable[[Any], str] | str | None = None,
        action_of: Callable[[str], Any] | str | None = None,
        action_names: Sequence[str] = (),
        constrained: bool = False,
        max_steps: int = 100,
        seed: int = 0,
    ) -> None:
        """
        Args:
            id: as `gymnasium.make` takes it ("FrozenLake-v1", "my_package:My-v0"); `make` holds its
                keywords.
            instructions: come before the first observation; default: what the actions are, where
                they are known.
            observation_text: makes a text of an observation: a function, a reference to one
                ("python:file.py:name"), or a template with {observation} and {render}, which is
                what `render` returns (make = { render_mode = "ansi" }); default: "{observation}",
                a string as it is, anything else as JSON.
            action_of: returns the action of an answer, None for none; default: for a Discrete space
                one of `action_names`, else a number in the answer; for a Text space the answer; for
                others JSON.
            action_names: of a Discrete space, in its order.
            constrained: hold the sampled text to an action of a Discrete space: a name, or a
                number.
            max_steps: turns of the policy.

        Raises ConfigError: package missing, no such environment, actions that JSON does not hold
        (Dict, Tuple) without `action_of`, names of another number than there are actions.
        """
        super().__init__(inference)
        self._id, self._make, self.max_steps, self._seed = id, dict(make or {}), max_steps, seed
        self._gymnasium = _import_gymnasium()
        probe = self._open()
        self._space = probe.action_space
        probe.close()
        if action_of is None:
            self._check_actions()
        discrete = isinstance(self._space, self._gymnasium.spaces.Discrete)
        if action_names and not (discrete and len(action_names) == self._space.n):
            raise ConfigError(
                f"gymnasium: {len(action_names)} action_names do not fit the actions, {self._space}"
            )
        if max_steps < 1:
            raise ConfigError(f"gymnasium: max_steps has to be at least 1, not {max_steps}")
        self._names = tuple(action_names)
        if constrained and not (discrete and action_of is None):
            raise ConfigError(
                "gymnasium: constrained needs actions that can be listed: a"
                " Discrete space, and no action_of"
            )
        if constrained:
            numbers = range(self._space.start, self._space.start + self._space.n)
            choice = json.dumps(self._names or [str(number) for number in numbers])
            self.structure = Structure("choice", choice, "gymnasium: constrained")
        self._template = _template(observation_text, self._make)
        self._text = (
            None
            if self._template is not None
            else _function(observation_text, ("observation",), "observation_text")
        )
        self._action = _function(action_of, ("text",), "action_of") or self._default_action
        self._instructions = instructions or self._default_instructions(discrete)

    def reset(self, *, index: int | None = None, split: Split = "train") -> State:
        """Begin episode `index` of a split, which has its own seed; without an index the next
        one."""
        index = self._index_or_next(index)
        seed = derive_seed(f"gymnasium {split}", self._seed if split == "train" else 0, index)
        metadata = {"seed": seed, "return": 0.0, "rewards": []}
        metadata |= {"actions": [], "invalid_actions": 0}
        state = SimulationState("", metadata=metadata | {"terminated": False, "truncated": False})
        try:
            shown = self._shown(state, self._begin(state))
        finally:
            self.end_episode(state)  # every rollout has a copy, and its own simulation
        opening = f"{self._instructions}\n\n{shown}".strip()
        state.prompt = [{"role": "user", "content": opening}]
        return state

    def update_state(self, state: State, response: str) -> State:
        """Take the action of the answer and show the next observation."""
        if not isinstance(state, SimulationState):
            raise RolloutRejectedError(
                "a GymnasiumEnvironment continues from the State that its reset has made"
            )
        state = super().update_state(state, response)
        assert isinstance(state, SimulationState) and isinstance(state.prompt, list)
        metadata = state.metadata
        if state.live is None:
            self._begin(state)
        with user_code("gymnasium: action_of", RolloutRejectedError):
            action = self._action(response)
        if action is None or not self._space.contains(action):
            metadata["invalid_actions"] += 1
            metadata["rewards"].append(0.0)
            shown = f"That is no action. {self._actions_text()}".strip()
        else:
            observation, reward, metadata["terminated"], metadata["truncated"], _ = self._stepped(
                state, action
            )
            state.taken.append(action)
            metadata["actions"].append(_plain(action))
            # without one the episode has no score
            number = math.nan if reward is None else float(reward)
            metadata["return"] += number
            metadata["rewards"].append(number)
            shown = self._shown(state, observation)
        state.done = bool(
            metadata["terminated"] or metadata["truncated"] or state.step_count >= self.max_steps
        )
        turns = [{"role": "assistant", "content": response}, {"role": "user", "content": shown}]
        state.prompt = [*state.prompt, *turns[: 1 if state.done else 2]]
        if state.done:
            self.end_episode(state)
        return state

    def end_episode(self, state: State) -> None:
        """Close the simulation, if it is open."""
        if isinstance(state, SimulationState) and state.live is not None:
            live, state.live = state.live, None
            live.close()

    def _open(self) -> Any:
        """Raises ConfigError: gymnasium cannot make it."""
        with user_code(f"gymnasium: {self._id or 'id is missing'}"):
            return self._gymnasium.make(self._id, **self._make)

    def _check_actions(self) -> None:
        """Raises ConfigError: an action does not survive a round trip through JSON."""
        try:
            fits = self._space.contains(
                self._space.from_jsonable([_plain(self._space.sample())])[0]
            )
        except (ValueError, TypeError, LookupError, AttributeError, NotImplementedError):
            fits = False
        if not fits:
            raise ConfigError(
                f"gymnasium: {self._id} has the actions {self._space}, which an answer in JSON"
                " cannot express: set"
                " action_of, or wrap it so that its actions are Discrete, MultiDiscrete,"
                " MultiBinary, Box or Text"
            )

    def _begin(self, state: SimulationState) -> Any:
        """Start the simulation, repeat the episode's actions, and return the last observation."""
        state.live = self._open()
        with user_code(f"gymnasium: {self._id}", RolloutRejectedError):
            observation, _ = state.live.reset(seed=state.metadata["seed"])
        for action in state.taken:
            observation, *_ = self._stepped(state, action)
        return observation

    def _stepped(self, state: SimulationState, action: Any) -> Any:
        with user_code(f"gymnasium: {self._id}", RolloutRejectedError):
            return state.live.step(action)

    def _shown(self, state: SimulationState, observation: Any) -> str:
        if self._text is not None:
            with user_code("gymnasium: observation_text", RolloutRejectedError):
                return str(self._text(observation))
        values = {"observation": _observation_text(observation)}
        if self._template is None:
            return values["observation"]
        if "render" in (name for _, name, _, _ in Formatter().parse(self._template)):
            with user_code(f"gymnasium: {self._id}: render", RolloutRejectedError):
                values["render"] = str(state.live.render())
        return self._template.format_map(values)

    def _default_action(self, text: str) -> Any:
        spaces = self._gymnasium.spaces
        if isinstance(self._space, spaces.Text):
            return text.strip()
        if isinstance(self._space, spaces.Discrete):
            return self._discrete_action(text)
        try:
            return self._space.from_jsonable([json.loads(text)])[0]
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
            return None

    def _discrete_action(self, text: str) -> int | None:
        """Return the one action name in the answer, else its one whole number."""
        if self._names:
            numbers_of = {name.casefold(): n for n, name in enumerate(self._names)}
            words = {match[0].casefold() for match in any_name(self._names).finditer(text)}
            return int(self._space.start) + numbers_of[words.pop()] if len(words) == 1 else None
        numbers = WHOLE_NUMBER.findall(text)
        # the range of int64
        return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) < 19 else None

    def _actions_text(self) -> str:
        if self._names:
            return f"Actions: {', '.join(self._names)}."
        if isinstance(self._space, self._gymnasium.spaces.Discrete):
            return f"Actions: {self._space.start} to {self._space.start + self._space.n - 1}."
        return ""

    def _default_instructions(self, discrete: bool) -> str:
        return f"{self._actions_text()} Answer with one of them." if discrete else ""


def episode_return(trajectories: Sequence[Trajectory]) -> list[float]:
    """Return gymnasium's rewards, summed over each episode: the default reward function."""
    return [trajectory.metadata["return"] for trajectory in trajectories]


def turn_rewards(trajectories: Sequence[Trajectory]) -> list[list[float] | None]:
    """Return gymnasium's reward of each turn, None where a turn has none: a reward function for
    credit = "turn"."""
    rewards_N = [trajectory.metadata["rewards"] for trajectory in trajectories]
    return [None if any(map(math.isnan, rewards)) else rewards for rewards in rewards_N]


def _import_gymnasium() -> Any:
    require('environments: kind = "gymnasium"', "gymnasium")
    import gymnasium

    return gymnasium


def _template(option: Callable[..., Any] | str | None, make: Mapping[str, Any]) -> str | None:
    """Return the option if it is a template. Raises ConfigError: it cannot be filled in."""
    if not isinstance(option, str) or is_reference(option):
        return None
    what = f"gymnasium: observation_text {option!r}"
    try:
        names = {name for _, name, _, _ in Formatter().parse(option) if name is not None}
    except ValueError as error:
        raise ConfigError(f"{what}: {error}; {{{{ and }}}} stand for braces") from error
    if not names or names - {"observation", "render"}:
        raise ConfigError(
            f"{what} is neither a template with {{observation}} or {{render}} nor a reference"
            ' ("python:file.py:name")'
        )
    if "render" in names and make.get("render_mode") != "ansi":
        raise ConfigError(f'{what} needs make = {{ render_mode = "ansi" }}, a picture in text')
    return option


def _function(
    option: Callable[..., Any] | str | None, arguments: Sequence[str], name: str
) -> Callable[..., Any] | None:
    return (
        load_function_of(arguments, option, f"gymnasium: {name}")
        if isinstance(option, str)
        else option
    )


def _observation_text(observation: Any) -> str:
    """Return a text as it is, anything else as JSON. Raises ConfigError: it holds what JSON does
    not know."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_plain(observation), ensure_ascii=False, default=_refuse)


def _refuse(value: Any) -> None:
    raise ConfigError(
        f"gymnasium: an observation holds {type(value).__name__} ({value!r:.60}), which has no text"
        ' of its own: set observation_text = "python:file.py:name", a function of the observation'
    )


def _plain(value: Any) -> Any:
    """Return numpy's numbers and arrays as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
