"""The nouns of in-process environments, and the one way in which an episode is played.

`AnyEnvironment` (what an author writes) → `EnvironmentSource` (one for each [[environments]]
entry) → `Task` (one question and how its answers are scored) → `Episode` (one rollout of it) →
`RolloutGroup`. `runner.py` plays groups of episodes against the engine, `scheduler.py` keeps many
groups in flight, `registry.py` makes the sources.

The runner knows `EnvironmentSource.play` alone: it asks the policy through `Episode.turn` until the
episode is over. Here that is one turn; the source of a `BaseEnvironment` (`state.py`) may have
several. No environment sees a token: tokens, mask and log-probabilities are recorded by the
episode.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.episode_state import Inference, Prompt, State
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.row_images import with_stored_images
from mlx_parallm.environments.task_draws import TaskDraws
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.execution.user_code import check_call
from mlx_parallm.rewards.base import GroupReward
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import ChatTokenizer, PolicyClient, RolloutGroup, Structure, Trajectory

Messages = tuple[Mapping[str, Any], ...]
Split = Literal["train", "heldout"]

log = get_logger("environments")

NEVER_DONE = "an episode does not end"  # the event of run.log, which `explain` looks for
MANY_TURNS = 64
"""More than almost any conversation has. A game may have more: then the warning is taken back by
its first end."""
DRAWS_PER_HELDOUT_TASK = 20
"""A source whose held-out draws repeat more often than this has no more distinct tasks."""


class PolicyInference(Inference, Protocol):
    """The inference that a run gives its environments: `InferenceModule.over` the run's engine."""

    @property
    def client(self) -> PolicyClient | None: ...

    @property
    def tokenizer(self) -> ChatTokenizer | None: ...

    @property
    def adapter(self) -> str | None: ...


class Learner(Protocol):
    """Learns beside the policy from the groups of its environment: a small controller, say.
    Trainer's thread only.

    Everything it needs of an episode is in the group's metadata
    (`EnvironmentSource.group_metadata`), so that a resumed run learns from the same groups as one
    that was not interrupted.
    """

    def trains_policy(self, step: int) -> bool:
        """Return whether the policy learns in `step`; if not, its groups are for this learner
        alone."""
        ...

    def learn(
        self, step: int, groups: Sequence[RolloutGroup], total_steps: int | None
    ) -> Mapping[str, float]:
        """Learn from the groups of a step that the policy has finished, of `total_steps` (None:
        the run has no end); return numbers for the metrics line."""
        ...

    def save(self, directory: Path) -> None:
        """Write everything into a directory of a checkpoint, which exists. Raises
        CheckpointError."""
        ...

    def load(self, directory: Path, step: int) -> None:
        """Continue from `save` after `step` steps. Raises CheckpointError."""
        ...


@dataclass(frozen=True, slots=True)
class Task:
    """One question: the messages that open every episode of its group, and the reward that sees
    the whole group."""

    key: str  # two tasks with one key are the same task; the splits share none
    messages: Messages
    reward: GroupReward | None  # None: the rollouts are not scored here
    answer: str | None = None  # the reference answer, for reports
    # the last message's text goes to the model as it is, without the chat template
    plain: bool = False
    state: State | None = None  # a BaseEnvironment's: each episode begins with a copy of it
    # columns of the data set's row
    columns: Mapping[str, Any] = field(default_factory=dict)
    # definitions that the chat template shows; their calls are not made
    tools: tuple[Mapping[str, Any], ...] = ()
    # names of the environment's tools that it shows; None: all
    tool_names: tuple[str, ...] | None = None

    @property
    def opening(self) -> Prompt:
        if self.plain:
            return self.messages[-1]["content"]
        prompt: Prompt = with_stored_images(self.messages, "a task's messages")
        return prompt

    @property
    def options(self) -> dict[str, Any]:
        """Return the options for the chat template, in every turn."""
        return {"tools": list(self.tools)} if self.tools else {}


class AnyEnvironment(ABC):
    """Either form of an environment: a `BaseEnvironment` (`state.py`), scored by reward functions,
    or an `EnvironmentSource`, which makes and scores its tasks."""

    several_turns: bool = False
    """Whether an episode may have several turns: then a dry run plans for all of max_token_length,
    though its own episodes may have had one."""
    structure: Structure | None = None
    """Structure that every answer is held to while it is sampled; a `step` of your own passes
    none."""
    learner: Learner | None = None
    """The learner beside the policy, fed by this environment's groups."""

    @classmethod
    @abstractmethod
    def check_class(cls, what: str) -> None:
        """Raises ConfigError: a run cannot call a method of this class as it will; `what` names
        the class."""

    @classmethod
    @abstractmethod
    def from_entry(cls, config: EnvironmentConfig, *, seed: int, name: str) -> "EnvironmentSource":
        """Make the source of an [[environments]] entry. Raises ConfigError: its options or
        rewards do not fit."""

    def use_tools(self, tools: EpisodeTools | None) -> EpisodeTools | None:
        """Take the tools of the run that the policy may call; return those that the episodes call.

        An environment that reads calls by itself keeps them and returns None. Raises ConfigError:
        it has no use for them.
        """
        return tools

    def group_metadata(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Any]:
        """Return the metadata that the store keeps beside a finished group's rollouts, as JSON; a
        `learner` reads it."""
        return {}

    def router(self, name: str) -> Any:
        """Return an `AddedRouter` of the server for the environment `name`; None: it has no
        routes."""
        return None


class EnvironmentSource(AnyEnvironment):
    """Tasks of one [[environments]] entry, and how their episodes are played: in one turn, where
    `play` is not overridden. `name` is unique in a run and part of every group id."""

    # set for each source by a run that trains
    progress: Callable[[], TrainingProgress] = TrainingProgress
    endless: str | None = None
    """Warning about episodes that do not end; None once the
    environment has ended one."""
    rewards: RewardFunctions | None = None
    """Those of the configuration, if the source scores with them."""
    tools: EpisodeTools | None = None
    """The tools that the policy may call in its episodes."""
    in_order = False
    """Whether `task` is not a pure function of its arguments: then it is called once for each
    group, in their order."""
    opens_together = True
    """Whether every episode of a group begins with `task.opening`: then one request opens all of
    them."""
    keeps_rows = False
    """Whether the store keeps each group's row and messages, of which other prompts are made."""
    draws: TaskDraws | None = None
    """What draws the task of each training group; None: group k asks task k."""

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: the class has a method `environment`, which nothing calls."""
        self.config = config
        self.seed = seed
        self.name = name or config.name
        if callable(getattr(type(self), "environment", None)):
            raise ConfigError(
                f"environments: {self.name}: {type(self).__name__}.environment is never called: an"
                " EnvironmentSource plays one turn; for several write a BaseEnvironment"
                " (docs/your_environment.md)"
            )
        self._ends_episodes = False  # it has ended one

    @classmethod
    def check_class(cls, what: str) -> None:
        if missing := sorted(cls.__abstractmethods__):
            raise ConfigError(f"{what} does not define {', '.join(missing)}(index, split)")
        if inspect.iscoroutinefunction(cls.task):
            raise ConfigError(f"{what}.task is async; it has to be a plain function")
        check_call(inspect.signature(cls.task), ("self", "index", "split"), f"{what}.task")
        check_call(inspect.signature(cls), ("config",), what, keywords=("seed", "name"))

    @classmethod
    def from_entry(cls, config: EnvironmentConfig, *, seed: int, name: str) -> "EnvironmentSource":
        return cls(config, seed=seed, name=name)

    @property
    def stays_here(self) -> bool:
        """Whether one process plays all groups: its state is not a function of the
        configuration and the task."""
        return self.in_order or self.learner is not None

    @property
    def how_to_end(self) -> str:
        """Return why no episode ended, and how to end one."""
        return (
            "each answer was a call of a tool, or play() asked again: lower tools.max_rounds, or"
            " let play() end"
        )

    def note_turn(self, episode: Episode) -> None:
        """Warn once of an environment that has ended no episode yet, when one has many turns."""
        if episode.turns >= MANY_TURNS:
            self._warn_of(episode)

    def note_end(self, episode: Episode) -> None:
        """Warn once of an environment that has ended no episode yet, when there is no room for
        another turn."""
        if episode.never_done:
            self._warn_of(episode)
        elif not episode.cut:
            self._ends_episodes, self.endless = True, None

    def _warn_of(self, episode: Episode) -> None:
        if self._ends_episodes or self.endless is not None:
            return
        self.endless = f"{episode.turns} turns and {self.how_to_end}"
        log.warning(NEVER_DONE, environment=self.name, reason=self.endless)

    @abstractmethod
    def task(self, index: int, split: Split = "train") -> Task:
        """Return task number `index` of a split: a pure function of configuration, seed, index
        and split."""

    def long_tasks(self, size: int) -> Iterator[tuple[str, Task]]:
        """Yield place and task of each row whose prompt has more than `size` bytes of text; of an
        environment without rows: none."""
        return iter(())

    def attach(self, inference: PolicyInference) -> None:
        """Take the run's engine, once it is there, for environments and rewards that generate."""
        if self.rewards is not None:
            self.rewards.attach(inference)

    def take_tools(self, tools: EpisodeTools | None) -> None:
        """Take the run's tools, if there are any: for the policy those that the configuration
        allows it, for rewards all of them.

        Raises ConfigError: a tool of the configuration's `tools`, or of a reward, that there is
        not.
        """
        names, what = self.config.tools, f"environments: {self.name}: tools"
        if tools is None and names:
            raise ConfigError(f"{what}: none configured: set [[tools.mcp]] or tools.functions")
        allowed = tools if tools is None or names is None else tools.only(names, what)
        self.tools = self._usable(allowed)
        if self.config.tool_choice == "required" and self.tools is not None:
            raise ConfigError(
                f'environments: {self.name}: tool_choice = "required" is for tools of rows, whose'
                " calls nobody makes; with those of [tools] no answer would ever end an episode:"
                " set tools = []"
            )
        if self.config.tools_column is not None and self.tools is None:
            raise ConfigError(
                f"{what}_column: the policy calls no tools of [tools] in this environment"
            )
        if self.rewards is not None:
            self.rewards.use_tools(None if tools is None else tools.client)

    def _usable(self, allowed: EpisodeTools | None) -> EpisodeTools | None:
        tools = self.use_tools(allowed)
        return tools if tools is not None and tools.definitions else None

    def tools_of(self, task: Task) -> EpisodeTools | None:
        """Return the tools of the policy in the episodes of a task. Raises ConfigError: it
        names an unknown tool."""
        if self.tools is None or task.tool_names is None:
            return self.tools
        return (
            self.tools.only(task.tool_names, f"environments: {self.name}: a task")
            if task.tool_names
            else None
        )

    def named_tools(self, columns: Mapping[str, Any]) -> tuple[str, ...] | None:
        """Return the tools in a row's `tools_column`, or None. Raises RolloutRejectedError:
        no list of names."""
        names = (
            columns.get(self.config.tools_column) if self.config.tools_column is not None else None
        )
        if names is None:
            return None
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            column = f"environments: {self.name}: column {self.config.tools_column!r}"
            raise RolloutRejectedError(f"{column} has {names!r}: expected a list of tools")
        return tuple(names)

    @property
    def left_behind(self) -> int:
        """Threads that still run code of episodes that have ended."""
        return 0

    def join(self, deadline: float) -> None:
        """Wait for the threads of episodes, at most until `deadline` (time.monotonic)."""

    def heldout(self, n: int) -> list[Task]:
        """Return up to n distinct held-out tasks, the same for every seed of a run; fewer where
        there are no more."""
        tasks: dict[str, Task] = {}
        for index in range(DRAWS_PER_HELDOUT_TASK * n):
            if len(tasks) == n:
                break
            task = self.task(index, "heldout")
            tasks.setdefault(task.key, task)
        return list(tasks.values())

    def open_with(self, messages: Messages) -> Messages:
        """Return the task's messages after the configured system prompt."""
        if self.config.system_prompt is None:
            return messages
        return ({"role": "system", "content": self.config.system_prompt}, *messages)

    def format_prompt(self, prompt: Prompt) -> Prompt:
        """Return the policy's prompt for an environment's `prompt`."""
        shown: Prompt = with_stored_images(prompt, f"environments: {self.name}: messages")
        return shown

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        """Play one episode to its end, in at most `max_steps` steps: here one question and one
        answer."""
        await episode.turn(task.opening, **({} if self.tools is not None else task.options))
