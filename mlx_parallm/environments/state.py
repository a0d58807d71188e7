"""Environments as a stateless template with single-use states: `State` and `BaseEnvironment`.

    reset() → State → step(state) → … → is_terminal(state)

A `BaseEnvironment` has no rewards inside and stores nothing of an episode on itself: each rollout
of a group starts from a copy of one `State`, which holds everything that belongs to the episode.
The default `step` asks the policy `build_prompt(state)` and passes the answer to `update_state`;
such episodes need no thread. Your own `step` may
block: it runs on a thread of its episode, where `self.inference.generate` is a turn of the episode
(its tokens and log-probabilities are recorded). It may also be async and await
`self.inference.agenerate`.

A run plays its `StateSource`, which makes a task of each `reset` and runs `step` until
`is_terminal`. It is an object beside the environment for two reasons: one environment may be played
by two managers and an evaluation at a time, and its attributes are its author's, who may call them
`config`, `name`, `tools` or `rewards`.
"""

import asyncio
import functools
import hashlib
import inspect
import time
import weakref
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import (
    AnyEnvironment,
    EnvironmentSource,
    Messages,
    PolicyInference,
    Split,
    Task,
)
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.episode_state import Inference, Prompt, State, text_of
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.row_images import with_stored_images
from mlx_parallm.environments.step_thread import StepThread
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.prompt_images import image_refs
from mlx_parallm.execution.user_code import check_call, user_code
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Trajectory

log = get_logger("environments")

HELDOUT_FIRST = 2**20
"""Held-out tasks begin at this index where `reset` takes an index and no split."""
RESET_KEYWORDS = ("index", "split", "seed")

Step = Callable[[State], Awaitable[State]]


class BaseEnvironment(AnyEnvironment):
    """The rules of an episode: its task, its prompts, its end. One instance plays all episodes,
    many at once."""

    default_rewards: tuple[str, ...] = ()
    """References to the reward functions if the configuration names none."""
    inference: Inference | None = None
    blocking: bool = False
    """Whether `update_state` may take long (tools, a simulation): then it runs on a thread of
    the episode."""
    rewards_turns: bool = False
    """Whether the rewards of the turns are the whole reward: then no reward functions are
    needed."""
    episode_tools: EpisodeTools | None = None
    """Tools that the policy may call in the episodes; None: the tools of the configuration."""
    _next_index = 0

    def __init__(self, inference: Inference | None = None) -> None:
        """`inference` may be None if a run sets it."""
        self.inference = inference

    @classmethod
    def check_class(cls, what: str) -> None:
        if missing := sorted(cls.__abstractmethods__):
            raise ConfigError(f"{what} does not define {', '.join(missing)}()")
        for name, arguments in {
            "step": ("self", "state"),
            "is_terminal": ("self", "state"),
            "build_prompt": ("self", "state"),
            "update_state": ("self", "state", "response"),
        }.items():
            method = getattr(cls, name)
            check_call(inspect.signature(method), arguments, f"{what}.{name}")
            if name != "step" and inspect.iscoroutinefunction(method):
                raise ConfigError(
                    f"{what}.{name} is async; it has to be a plain function (step may be async)"
                )
        if inspect.iscoroutinefunction(cls.reset):
            raise ConfigError(f"{what}.reset is async; it has to be a plain function")

    @classmethod
    def from_entry(cls, config: EnvironmentConfig, *, seed: int, name: str) -> EnvironmentSource:
        what = f"environments: {config.kind}"
        scored = config.rewards or cls.default_rewards
        if not scored and not cls.rewards_turns:
            raise ConfigError(
                f"{what}: an environment does not score itself: it needs rewards ="
                ' ["python:file.py:function"]'
            )
        options = dict(config.options)
        if "seed" in inspect.signature(cls).parameters:
            options.setdefault("seed", seed)
        rewards = (
            RewardFunctions.from_config(config, columns=None, default=cls.default_rewards)
            if scored
            else RewardFunctions.none()
        )
        make = functools.partial(construct, cls, options, what)
        return StateSource(config, make, seed=seed, name=name, rewards=rewards)

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

    def end_episode(self, state: State) -> None:
        """Free what `state` holds, when the episode is over, has failed, was cancelled or has timed
        out.

        It is called on the thread of the steps, after the last step and before the rewards, which
        may not need the freed resources.
        """

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


def construct(
    kind: type[BaseEnvironment], options: Mapping[str, Any], what: str
) -> BaseEnvironment:
    """Make an environment. Raises ConfigError: options that its constructor does not take, or what
    it raises."""
    check_call(inspect.signature(kind), (), what, keywords=tuple(options))
    with user_code(what):
        return kind(**options)


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


class StateSource(EnvironmentSource):
    """The source of a `BaseEnvironment`."""

    def __init__(
        self,
        config: EnvironmentConfig,
        make: Callable[[], BaseEnvironment],
        *,
        seed: int,
        name: str | None = None,
        rewards: RewardFunctions | None = None,
    ) -> None:
        """`make` returns the environment that all episodes share. Without `rewards` nothing is
        scored.

        Raises ConfigError: an environment that cannot be played, or a system prompt for one that
        asks in plain text.
        """
        super().__init__(config, seed=seed, name=name)
        self.template, self.rewards, self._make = make(), rewards, make
        self.learner, self.structure = self.template.learner, self.template.structure
        self.several_turns = self.template.several_turns
        self.tools = self._usable(None)
        type(self.template).check_class(f"environments: {config.kind}")
        self._reset_keywords = _reset_keywords(type(self.template), f"environments: {config.kind}")
        self._abandoned: list[StepThread] = []
        # a thread that runs is kept by itself
        self._threads: weakref.WeakSet[StepThread] = weakref.WeakSet()
        self._attached = self._traced = False
        self.in_order = not {"index", "seed"} & set(self._reset_keywords)
        self.opens_together = not overrides_step(self.template)
        if config.prompt_format == "text" and config.system_prompt is not None:
            raise ConfigError(
                f'environments: {config.kind}: prompt_format = "text" has no system prompt'
            )

    def task(self, index: int, split: Split = "train") -> Task:
        """Return a task: a pure function of the arguments where `reset` takes `index` or `seed`,
        else the next one (`in_order`)."""
        state = self._reset(index, split)
        prompt = self.template.build_prompt(state.copy())
        chat = self.format_prompt(prompt)
        seen_text = "".join((text_of(chat), *image_refs(chat)))
        answer = state.metadata.get(self.config.answer_column)
        reward = None
        if self.rewards is not None:
            seen = prompt if isinstance(prompt, str) or isinstance(chat, str) else list(chat)
            reward = self.rewards.for_row(seen, state.copy().metadata, self.progress)
        return Task(
            key=f"{self.config.name}:{_digest(seen_text, state.metadata)}",
            messages=({"role": "user", "content": chat},) if isinstance(chat, str) else tuple(chat),
            reward=reward,
            answer=None if answer is None else str(answer),
            plain=isinstance(chat, str),
            state=state,
            tool_names=self.named_tools(state.metadata),
        )

    def attach(self, inference: PolicyInference) -> None:
        if self.template.inference is None or self._attached:  # one that it was made with stays
            self.template.inference, self._attached = inference, True
        super().attach(inference)

    def take_tools(self, tools: EpisodeTools | None) -> None:
        """Raises ConfigError: there are tools, but the environment has its own."""
        if self.config.tools and self.template.episode_tools is not None:
            what = f"environments: {self.name}"
            raise ConfigError(
                f"{what}: this environment has tools of its own: leave out its key `tools`"
            )
        super().take_tools(tools)

    def use_tools(self, tools: EpisodeTools | None) -> EpisodeTools | None:
        return self.template.use_tools(self.template.episode_tools or tools)

    def format_prompt(self, prompt: Prompt) -> Prompt:
        """Make a text one message of the user's, unless the configuration asks in text; put
        messages after its system prompt.

        Raises RolloutRejectedError: neither text nor messages.
        """
        if isinstance(prompt, str):
            if self.config.prompt_format == "text":
                return prompt
            return self.open_with(({"role": "user", "content": prompt},))
        if not isinstance(prompt, list | tuple) or not all(
            isinstance(message, Mapping) for message in prompt
        ):
            raise RolloutRejectedError(
                f"{type(self.template).__name__} asks {prompt!r}: expected text or messages"
            )
        messages: Messages = with_stored_images(
            tuple(prompt), f"environments: {self.name}: messages"
        )
        return self.open_with(messages)

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        assert task.state is not None, "task() makes it"
        environment, state = self.template, task.state.copy()
        state.trajectory_id = episode.name
        episode.played = state
        last = functools.partial(_end, environment, episode.name)
        try:
            with StepThread(episode.name, state, last, self._abandoned) as thread:
                self._threads.add(thread)
                step = _step_of(environment, episode, thread)
                for _ in range(max_steps):
                    if _is_over(environment, state):
                        return
                    before = state.step_count
                    state = thread.state = episode.played = await step(state)
                    episode.take_turn_reward(state)
                    state.trajectory_id = episode.name
                    state.step_count = max(state.step_count, before + 1)
                    self.note_turn(episode)
                    # a step that waits for nothing leaves the others their turn
                    await asyncio.sleep(0)
                episode.cut = not _is_over(environment, state)
        except RolloutRejectedError as error:
            if error.__cause__ is not None and not self._traced:
                self._traced = True  # later failures are reported in a line each
                log.warning(
                    "the environment raised", environment=self.name, exc_info=error.__cause__
                )
            raise

    def group_metadata(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Any]:
        return self.template.group_metadata(trajectories)

    def router(self, name: str) -> Any:
        return self.template.router(name)

    @property
    def how_to_end(self) -> str:
        kind = type(self.template)
        where = "step" if overrides_step(self.template) else "update_state"
        return (
            f"nothing set state.done: {kind.__name__}.{where} has to set it when the episode is"
            " over, or is_terminal"
            " has to return True"
        )

    @property
    def left_behind(self) -> int:
        self._abandoned[:] = [thread for thread in self._abandoned if thread.is_alive]
        return len(self._abandoned)

    def join(self, deadline: float) -> None:
        for thread in list(self._threads):
            thread.join(max(0.0, deadline - time.monotonic()))

    @functools.cached_property
    def _heldout(self) -> BaseEnvironment:
        """A second instance for tasks that come in order: held-out ones use up none of the
        training's."""
        return self._make()

    def _reset(self, index: int, split: Split) -> State:
        environment = self._heldout if self.in_order and split == "heldout" else self.template
        shifted = (
            index if split == "train" or "split" in self._reset_keywords else HELDOUT_FIRST + index
        )
        # Held-out tasks are the same ones for every seed of a run.
        seed = (
            derive_seed("reset", self.seed, index)
            if split == "train"
            else derive_seed("heldout reset", index)
        )
        values: Mapping[str, Any] = {"index": shifted, "split": split, "seed": seed}
        what = f"{type(environment).__name__}.reset"
        with user_code(what, RolloutRejectedError):
            return check_state(
                environment.reset(**{name: values[name] for name in self._reset_keywords}), what
            )


def _reset_keywords(kind: type[BaseEnvironment], what: str) -> tuple[str, ...]:
    signature = inspect.signature(kind.reset)
    every = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )
    takes = tuple(name for name in RESET_KEYWORDS if every or name in signature.parameters)
    check_call(signature, ("self",), f"{what}.reset", keywords=takes)
    return takes


def _digest(text: str, metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{text}\n{sorted(metadata.items())!r}".encode()).hexdigest()[:16]


def _is_over(environment: BaseEnvironment, state: State) -> bool:
    with _called(environment, "is_terminal"):
        return state.done or environment.is_terminal(state)


def _called(environment: BaseEnvironment, method: str) -> AbstractContextManager[None]:
    return user_code(f"{type(environment).__name__}.{method}", RolloutRejectedError)


def _end(environment: BaseEnvironment, name: str, state: State) -> None:
    try:
        with _called(environment, "end_episode"):
            environment.end_episode(state)
    except RolloutRejectedError as error:
        log.warning("an episode was not closed", episode=name, error=str(error))


def _step_of(environment: BaseEnvironment, episode: Episode, thread: StepThread) -> Step:
    if not overrides_step(environment):

        async def ask(state: State) -> State:
            with _called(environment, "build_prompt"):
                prompt = environment.build_prompt(state)
            answer = (await episode.turn(prompt, structure=environment.structure)).text
            with _called(environment, "update_state"):
                if environment.blocking:
                    return await thread.run(environment.advance, state, prompt, answer)
                return environment.advance(state, prompt, answer)

        return ask

    async def step(state: State) -> State:
        with _called(environment, "step"):
            result: Any = (
                environment.step(state) if is_async else await thread.run(environment.step, state)
            )
            return check_state(
                await result if is_async else result, f"{type(environment).__name__}.step"
            )

    is_async = inspect.iscoroutinefunction(environment.step)
    return step
