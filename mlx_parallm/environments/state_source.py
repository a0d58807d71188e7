"""A `BaseEnvironment` as an `EnvironmentSource`: of one [[environments]] entry, or of a `RolloutManager` in Python."""

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, Messages, PolicyInference, Task
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.kinds.problems import Split
from mlx_parallm.environments.playing import StepThreads, play_states
from mlx_parallm.environments.schedule import derive_seed
from mlx_parallm.environments.state import BaseEnvironment, Prompt, State, as_state, own_step, text_of
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.user_code import check_call, user_code
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.system.log import get_logger

HELDOUT_FIRST = 2**20
"""Held-out tasks of an environment whose `reset` knows indices and no splits begin at this one."""
RESET_KEYWORDS = ("index", "split", "seed")

log = get_logger("environments")


class StateSource(EnvironmentSource):
    def __init__(
        self,
        config: EnvironmentConfig,
        make: Callable[[], BaseEnvironment],
        *,
        seed: int,
        name: str | None = None,
        rewards: RewardFunctions | None = None,
    ) -> None:
        """`make` gives the template that all episodes share. Without `rewards` nothing is scored.

        Raises ConfigError: an environment that cannot be played, or a system prompt for one that asks in plain text.
        """
        super().__init__(config, seed=seed, name=name)
        self.template, self.rewards, self._make = make(), rewards, make
        check_environment(type(self.template), f"environments: {config.kind}")
        self._takes = _reset_takes(type(self.template), f"environments: {config.kind}")
        self._threads = StepThreads()
        self._attached = self._traced = False
        self.in_order = not {"index", "seed"} & set(self._takes)
        self.opens_together = not own_step(self.template)
        if config.prompt_format == "text" and config.system_prompt is not None:
            raise ConfigError(f'environments: {config.kind}: prompt_format = "text" has no system prompt')

    def task(self, index: int, split: Split = "train") -> Task:
        """A pure function of its arguments where `reset` takes `index` or `seed`; else the next one (`in_order`)."""
        state = self._reset(index, split)
        prompt = self.template.build_prompt(state.copy())
        asked = self.as_asked(prompt)
        answer = state.metadata.get(self.config.answer_column)
        reward = None
        if self.rewards is not None:
            seen = prompt if isinstance(prompt, str) or isinstance(asked, str) else list(asked)
            reward = self.rewards.for_row(seen, state.copy().metadata, self.progress)
        return Task(
            key=f"{self.config.name}:{_digest(text_of(asked), state.metadata)}",
            messages=({"role": "user", "content": asked},) if isinstance(asked, str) else tuple(asked),
            reward=reward,
            answer=None if answer is None else str(answer),
            plain=isinstance(asked, str),
            state=state,
        )

    def attach(self, inference: PolicyInference) -> None:
        if self.template.inference is None or self._attached:  # its own stays
            self.template.inference, self._attached = inference, True
        if self.rewards is not None:
            self.rewards.attach(inference)

    def as_asked(self, prompt: Prompt) -> Prompt:
        """A text is one message of the user's where the configuration says so; messages come after its system prompt.

        Raises RolloutRejectedError: neither text nor messages.
        """
        if isinstance(prompt, str):
            if self.config.prompt_format == "text":
                return prompt
            return self.open_with(({"role": "user", "content": prompt},))
        if not isinstance(prompt, list | tuple) or not all(isinstance(message, Mapping) for message in prompt):
            raise RolloutRejectedError(f"{type(self.template).__name__} asks {prompt!r}: expected text or messages")
        messages: Messages = tuple(prompt)
        return self.open_with(messages)

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        assert task.state is not None, "task() makes it"
        try:
            await play_states(episode, self.template, task.state.copy(), max_steps, self._threads)
        except RolloutRejectedError as error:
            if error.__cause__ is not None and not self._traced:
                self._traced = True  # the others are told in a line each
                log.warning("the environment raised", environment=self.name, exc_info=error.__cause__)
            raise

    @property
    def left_behind(self) -> int:
        return self._threads.left_behind

    def join(self, deadline: float) -> None:
        self._threads.join(deadline)

    @functools.cached_property
    def _heldout(self) -> BaseEnvironment:
        """For tasks that come in order: held-out ones use up none of the training's."""
        return self._make()

    def _reset(self, index: int, split: Split) -> State:
        environment = self._heldout if self.in_order and split == "heldout" else self.template
        shifted = index if split == "train" or "split" in self._takes else HELDOUT_FIRST + index
        # Held-out tasks are the same ones for every seed of a run.
        seed = derive_seed("reset", self.seed, index) if split == "train" else derive_seed("heldout reset", index)
        given: Mapping[str, Any] = {"index": shifted, "split": split, "seed": seed}
        what = f"{type(environment).__name__}.reset"
        with user_code(what, RolloutRejectedError):
            return as_state(environment.reset(**{name: given[name] for name in self._takes}), what)


def check_environment(kind: type[BaseEnvironment], what: str) -> None:
    """Raises ConfigError: a class whose methods cannot be called as they will be."""
    if missing := sorted(kind.__abstractmethods__):
        raise ConfigError(f"{what} does not define {', '.join(missing)}()")
    for name, arguments in {
        "step": ("self", "state"),
        "is_terminal": ("self", "state"),
        "build_prompt": ("self", "state"),
        "update_state": ("self", "state", "response"),
    }.items():
        method = getattr(kind, name)
        check_call(inspect.signature(method), arguments, f"{what}.{name}")
        if name != "step" and inspect.iscoroutinefunction(method):
            raise ConfigError(f"{what}.{name} is async; it has to be a plain function (step may be async)")
    if inspect.iscoroutinefunction(kind.reset):
        raise ConfigError(f"{what}.reset is async; it has to be a plain function")


def _reset_takes(kind: type[BaseEnvironment], what: str) -> tuple[str, ...]:
    signature = inspect.signature(kind.reset)
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    takes = tuple(name for name in RESET_KEYWORDS if every or name in signature.parameters)
    check_call(signature, ("self",), f"{what}.reset", keywords=takes)
    return takes


def _digest(text: str, metadata: Mapping[str, Any]) -> str:
    return hashlib.sha256(f"{text}\n{sorted(metadata.items())!r}".encode()).hexdigest()[:16]
