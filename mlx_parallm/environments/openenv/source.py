"""kind = "openenv": environments behind OpenEnv's protocol, at a URL or started by a command.

    reset → observation → text → policy → text → action → step → observation …, until it is done

Where the actions of the server are calls of tools (MCP), the policy calls them as it calls those of
[tools], and its answer without a call ends the episode. Rewards are those of the server, each of
the turn that it came for; `rewards` of the configuration replace them.

The metadata of an episode holds `seed`, the columns of its task, `return` (the sum of the rewards),
`rewards` (of each step), `rewarded` (whether the server gave any), `actions`, `invalid_actions`
(answers that were no action: nothing is done, but the turn counts), `done`, `server`, and `state`
(with `keep_state`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import EnvironmentSource, Split, Task
from mlx_parallm.environments.dataset_rows import DataRow, SplitRows, TaskData, read_tasks
from mlx_parallm.environments.episode import CURRENT, Episode
from mlx_parallm.environments.episode_tools import EpisodeTools, SourceTools
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.openenv.actions import Actions, Observations, is_of_tools
from mlx_parallm.environments.openenv.servers import Servers, command_of
from mlx_parallm.environments.openenv.session import (
    ActionRefusedError,
    ServerSession,
    ServerStep,
    list_tools,
    require_client,
)
from mlx_parallm.errors import ConfigError, EndpointError, RolloutRejectedError
from mlx_parallm.execution.tool_results import CallsBefore, Failure, ToolResult, as_json, bounded
from mlx_parallm.execution.user_code import read_options
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import Trajectory

log = get_logger("environments")

TOOLS = "Use the tools to solve the task."
FAILURES: Mapping[str, Failure] = {
    "tool_not_found": "unknown_tool",
    "invalid_args": "arguments",
    "timeout": "timeout",
    "transport_error": "server",
}
"""OpenEnv's kinds of errors of tools, as ours; others are the tool's."""


@dataclass(frozen=True)
class OpenEnvOptions:
    """The options of an entry.

    Attributes:
        url: of a server, or several; episodes are shared out among them.
        command: starts a server; `{port}` in it stands for its port. `processes` of them.
        tasks: rows {"prompt": text before the first observation, …}, or a JSONL file of
            them; the other columns go to `reset`. Default: no text, and a seed for each task.
        reset: further arguments of `reset`, the same for every task.
        instructions: stand before the first observation; default: the schema of an action, where
            an answer has to be one.
        action_of: see `Actions`.
        observation_text: see `Observations`.
        max_steps: turns of the policy.
        max_sessions: of one server at once; default: as many as it takes.
        keep_state: ask for the state of the episode at its end, for rewards.
        connect_timeout_s, message_timeout_s: longest wait for a connection, and for an answer.
        ready_timeout_s: longest wait for a server's first answer.
        retries: of opening a session, on another server where there is one.
    """

    url: str | Sequence[str] = ()
    command: str | Sequence[str] = ()
    processes: int = 1
    tasks: TaskData = ()
    reset: Mapping[str, Any] | None = None
    instructions: str | None = None
    action_of: str | None = None
    observation_text: str | None = None
    max_steps: int = 100
    max_sessions: int | None = None
    keep_state: bool = False
    connect_timeout_s: float = 10.0
    message_timeout_s: float = 60.0
    ready_timeout_s: float = 60.0
    retries: int = 2

    def check(self) -> None:
        """Raises ConfigError: no server, or a number that means nothing."""
        if not self.urls and not self.command:
            raise ConfigError(
                'openenv: where is the server? Set url = "http://host:8000", or command = "…'
                ' --port {port}"'
            )
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"openenv: url {url!r} has to begin with http:// or https://")
        for name, value in {
            "processes": self.processes,
            "max_steps": self.max_steps,
            "max_sessions": 1 if self.max_sessions is None else self.max_sessions,
        }.items():
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"openenv: {name} has to be at least 1, not {value!r}")

    @property
    def urls(self) -> tuple[str, ...]:
        urls = (self.url,) if isinstance(self.url, str) else self.url
        return tuple(url.rstrip("/") for url in urls)


class PlayedEpisode:
    """An episode as rewards see it."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.turn_reward: float | None = None
        self.metadata: dict[str, Any] = {
            **metadata,
            "return": 0.0,
            "rewards": [],
            "rewarded": False,
            "actions": [],
            "invalid_actions": 0,
            "done": False,
        }

    def take(self, action: Any, result: ServerStep) -> None:
        """Note a step."""
        self.metadata["actions"].append(action)
        self.metadata["rewards"].append(result.reward or 0.0)
        self.metadata["return"] += result.reward or 0.0
        self.metadata["rewarded"] |= result.reward is not None
        self.metadata["done"] = result.done


def of_the_server(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """The reward beside the turns', which the server gives: 0, or none where the server
    never gave one."""
    return [{"reward": 0.0 if t.metadata["rewarded"] else None} for t in trajectories]


class OpenEnvSource(EnvironmentSource):
    several_turns = True
    opens_together = False

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Start the servers, and learn what they do. Raises ConfigError: package missing, a server
        that does not answer, or wrong options."""
        super().__init__(config, seed=seed, name=name)
        what = "environments: openenv"
        settings = self.settings = read_options(OpenEnvOptions, config.options, what)
        settings.check()
        require_client()
        if config.prompt_format == "text":
            raise ConfigError(f'{what}: prompt_format = "text" is not there: it is a chat')
        self._observations = Observations(settings.observation_text)
        self._rows: SplitRows[DataRow] | None = None
        if settings.tasks:
            self._rows = read_tasks(settings.tasks, "prompt", seed=seed, what="openenv: tasks")
        self.rewards = self._scores = (
            RewardFunctions.from_config(config, columns=None)
            if config.rewards
            else RewardFunctions.none()  # rewards of turns come from the server
        )
        command = command_of(settings.command) if settings.command else ()
        self.servers = Servers(
            settings.urls,
            [command] * settings.processes if command else [],
            max_sessions=settings.max_sessions,
            connect_timeout_s=settings.connect_timeout_s,
            message_timeout_s=settings.message_timeout_s,
            ready_timeout_s=settings.ready_timeout_s,
            wait_s=config.timeout_s / 2,
            retries=settings.retries,
        )
        schema = self.servers.schemas()["action"]
        self._sessions: dict[str, tuple[ServerSession, PlayedEpisode]] = {}
        self._openings: dict[str, str] = {}
        self._warned = False
        self._listed: EpisodeTools | None = None
        self._actions: Actions | None = None
        if is_of_tools(schema):
            self._listed = self.tools = self._tools()
        else:
            self._actions = Actions(schema, settings.action_of)

    def take_tools(self, tools: EpisodeTools | None) -> None:
        """Raises ConfigError: a tool of the configuration's `tools` that the server has not."""
        if self._listed is None:
            super().take_tools(tools)
            return
        names = self.config.tools
        if names is not None:
            self.tools = self._listed.only(names, f"environments: {self.name}: tools")
        self._scores.use_tools(None if tools is None else tools.client)

    @property
    def how_to_end(self) -> str:
        return "the server never said that the episode is done: set max_steps"

    def task(self, index: int, split: Split = "train") -> Task:
        """Return a task: arguments of `reset`, and the text before the first observation."""
        seed = derive_seed(f"openenv {split}", self.seed if split == "train" else 0, index)
        columns = {} if self._rows is None else dict(self._rows.row(index, split).columns)
        prompt = columns.pop("prompt", "")
        opening = self._opening(prompt, "")
        facts = {**columns, "seed": seed}
        answer = columns.get(self.config.answer_column)
        return Task(
            key=f"{self.name}:{split}:{seed if self._rows is None else prompt}",
            messages=opening,
            reward=self._scores.for_row([*opening], facts, self.progress)
            if self.config.rewards
            else of_the_server,
            answer=None if answer is None else str(answer),
            columns={"prompt": prompt, "reset": {**(self.settings.reset or {}), **facts}},
            tool_names=self.named_tools(columns),
        )

    async def play(self, episode: Episode, task: Task, max_steps: int) -> None:
        """Play one episode in its own session. Raises EndpointError: not found, or it is
        lost; RolloutRejectedError: the environment has failed."""
        reset = {"episode_id": episode.name, **task.columns["reset"]}
        played = episode.played = PlayedEpisode(task.columns["reset"])
        async with self.servers.open(reset) as (session, first):
            played.metadata["server"] = session.url
            if first.done:
                raise RolloutRejectedError(f"{session.url}: the episode was done before it began")
            shown = self._observations.text(first.observation)
            self._compare_openings(episode, shown)
            opening = self._opening(task.columns["prompt"], shown)
            if self._actions is None:
                await self._call_tools(episode, session, played, opening)
            else:
                limit = min(max_steps, self.settings.max_steps)
                await self._take_steps(episode, session, played, opening, limit)
            if self.settings.keep_state:
                played.metadata["state"] = dict(await session.state())

    async def _take_steps(
        self,
        episode: Episode,
        session: ServerSession,
        played: PlayedEpisode,
        opening: Sequence[Mapping[str, str]],
        limit: int,
    ) -> None:
        assert self._actions is not None
        talk = list(opening)
        for _ in range(limit):
            completion = await episode.turn(tuple(talk), structure=self._actions.structure)
            self.note_turn(episode)
            shown = await self._step(session, played, completion.text)
            episode.take_turn_reward(played)
            if played.metadata["done"]:
                return
            talk += [
                {"role": "assistant", "content": completion.text},
                {"role": "user", "content": shown},
            ]
        episode.cut = True

    async def _step(self, session: ServerSession, played: PlayedEpisode, text: str) -> str:
        """Take the action of an answer; return the policy's next observation."""
        assert self._actions is not None
        action, why = self._actions.read(text), self._actions.instructions
        if action is not None:
            try:
                result = await session.step(action)
            except ActionRefusedError as error:
                why = str(error)
            else:
                played.take(action, result)
                self._reward_turn(played, result.reward)
                return "" if result.done else self._observations.text(result.observation)
        played.metadata["invalid_actions"] += 1
        self._reward_turn(played, 0.0)
        return f"That is no action. {why}".strip()

    def _reward_turn(self, played: PlayedEpisode, reward: float | None) -> None:
        if not self.config.rewards:
            played.turn_reward = reward or 0.0

    async def _call_tools(
        self,
        episode: Episode,
        session: ServerSession,
        played: PlayedEpisode,
        opening: Sequence[Mapping[str, str]],
    ) -> None:
        """Let the policy call tools (`SourceTools`) until it answers, or the episode is done."""
        self._sessions[episode.name] = session, played
        try:
            await episode.turn(tuple(opening))
        finally:
            del self._sessions[episode.name]

    async def call(
        self, name: str, arguments: Mapping[str, Any], _: CallsBefore | None = None
    ) -> ToolResult:
        """Make a call in the session of the running episode, which knows the calls before it."""
        episode = CURRENT.get()
        assert episode is not None, "tools are called in episodes"
        session, played = self._sessions[episode.name]
        action = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        try:
            result = await session.step(action)
        except ActionRefusedError as error:
            return ToolResult(str(error), error="arguments")
        played.take({"tool_name": name, "arguments": dict(arguments)}, result)
        self._reward_turn(played, result.reward)
        episode.take_turn_reward(played)
        if result.done:
            episode.close()
        return bounded(name, _tool_result(result.observation))

    def _tools(self) -> EpisodeTools:
        """Raises ConfigError: the server does not tell its tools."""
        server, loop = self.servers.servers[0], LoopThread("openenv")
        try:
            definitions = loop.run(
                list_tools(server.url, timeout_s=self.settings.connect_timeout_s)
            )
        except (EndpointError, RolloutRejectedError) as error:
            raise ConfigError(f"openenv: {error}") from error
        finally:
            loop.stop()
        if not definitions:
            raise ConfigError(f"openenv: {server.url} has no tools")
        return EpisodeTools(SourceTools(self.call), tuple(definitions))

    def _opening(self, prompt: str, shown: str) -> tuple[Mapping[str, str], ...]:
        """Return the messages before the first turn."""
        instructions = self.settings.instructions
        if instructions is None:
            actions = getattr(self, "_actions", None)
            instructions = actions.instructions if actions is not None else ""
            if actions is None and not prompt and not shown:
                instructions = TOOLS
        parts = [part for part in (instructions, prompt, shown) if part]
        return self.open_with(({"role": "user", "content": "\n\n".join(parts)},))

    def _compare_openings(self, episode: Episode, shown: str) -> None:
        """Warn once where the episodes of a group begin differently: they are compared with each
        other, but have different tasks."""
        if episode.group_size < 2 or self._warned:
            return
        first = self._openings.setdefault(episode.group_id, shown)
        if first != shown:
            self._warned = True
            log.warning(
                "the episodes of a group begin differently: the server's"
                " reset does not follow its seed",
                environment=self.name,
                group=episode.group_id,
            )
        while len(self._openings) > 64:  # groups in flight
            del self._openings[next(iter(self._openings))]


def _tool_result(observation: Mapping[str, Any]) -> ToolResult:
    """Return the content of a CallToolObservation: FastMCP's result, or a plain value."""
    error = observation.get("error")
    if isinstance(error, Mapping):
        kind = FAILURES.get(str(error.get("error_type")), "tool")
        return ToolResult(str(error.get("message", "")), error=kind)
    if error:
        return ToolResult(error if isinstance(error, str) else as_json(error), error="tool")
    result = observation.get("result")
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        parts = [part for part in result["content"] if isinstance(part, Mapping)]
        text = "\n".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")
        failed = bool(result.get("is_error"))
        structured = result.get("structured_content")
        return ToolResult(text, structured, "tool" if failed else None)
    return ToolResult(result if isinstance(result, str) else as_json(result))
