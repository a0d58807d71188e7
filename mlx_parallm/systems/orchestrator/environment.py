"""kind = "hybrid": the orchestrator as an environment of a training run.

    the task, how to act → planner: TOOL, DELEGATE, THINK → its result → planner → … → ANSWER, or
    max_steps

Every episode has its own `Orchestrator`; tools and experts are shared. What tools and experts
return is not sampled, so it is masked. An episode's metadata has the task, and at the end `reward`
(RewardConfig's sum), `solved`, `answer_text`, `steps`, `timed_out`, `delegations_failed` (a truth
value each), `routes` (what the planner did, in order) and `tool_calls` (a dictionary each: `name`,
`arguments`, `text`, `error`, `expert`).
"""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.dataset_rows import TaskData
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.state import BaseEnvironment, Inference, State
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.chat_messages import read_messages
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.execution.user_code import did_you_mean, is_reference, load, load_function
from mlx_parallm.models.threads import MLXThread
from mlx_parallm.system.log import get_logger
from mlx_parallm.systems.experts.registry import ExpertRegistry
from mlx_parallm.systems.experts.saving import load_expert
from mlx_parallm.systems.orchestrator.control import CONTROLS, ExpertControl, ExpertResult
from mlx_parallm.systems.orchestrator.learning import (
    STEPS,
    ActingExperts,
    ExpertLearner,
    Learning,
    schedule_of,
    settings_of,
)
from mlx_parallm.systems.orchestrator.orchestrator import (
    Orchestrator,
    OrchestratorConfig,
    controls_of,
)
from mlx_parallm.systems.orchestrator.reward import TASK_REWARDS, HybridTask, RewardConfig
from mlx_parallm.systems.orchestrator.routes import ServedPlanner, hybrid_router
from mlx_parallm.systems.orchestrator.task_pools import DEFAULT_TASKS, task_source
from mlx_parallm.types import Trajectory, has_score

log = get_logger("hybrid")

HOW_TO_ACT = """Each turn is one line:
TOOL: NAME(key=value) calls a tool
DELEGATE: NAME(key=value) lets an expert act
THINK: TEXT notes a thought
ANSWER: TEXT ends the task"""


@dataclass
class HybridState(State):
    """The state of one episode. `orchestrator` begins with the first turn, after the group's
    copies were made."""

    orchestrator: Orchestrator | None = None
    task_prompt: Any = None  # the task's prompt, without instructions


class HybridEnvironment(BaseEnvironment):
    """Tasks for a planner with tools and experts; the experts' thread ends with the environment."""

    several_turns = True
    default_rewards = ("python:mlx_parallm.systems.orchestrator.environment:hybrid",)
    blocking = True

    def __init__(
        self,
        inference: Inference | None = None,
        tasks: TaskData | Callable[..., Mapping[str, Any]] = DEFAULT_TASKS,
        *,
        experts: Mapping[str, Any] | ExpertRegistry | None = None,
        controls: Mapping[str, str | ExpertControl] | None = None,
        tools: EpisodeTools | None = None,
        instructions: str | None = None,
        history: Literal["messages", "summary"] = "messages",
        rewards: Mapping[str, float] | None = None,
        task_rewards: Mapping[str, str | Callable[..., float]] | None = None,
        learn: Learning = "planner",
        alternate_every: int | None = None,
        min_steps: int | None = None,
        ppo: Mapping[str, Any] | None = None,
        max_steps: int = 50,
        max_expert_steps: int = 20,
        tool_call_timeout: float | None = None,
        cache_tool_calls: bool = True,
        seed: int = 0,
    ) -> None:
        """Load the experts and make the tools and the loops.

        Args:
            tasks: as in `task_source`.
            experts: name → a file of `save_expert` (.safetensors or .npz), or a registry.
            controls: expert → what makes its loops: "projectile", a function, or a reference to
                one.
            tools: `EpisodeTools.of(ToolClient(…))`, in Python; default: those of the configuration.
            instructions: before the task; default: the grammar, the tools and the experts. "" =
                nothing.
            history: what the planner reads: the conversation, or the task with the last 5 results
                and 3 actions.
            rewards: numbers of `RewardConfig`. task_rewards: type → a function of the episode.
            learn, alternate_every, min_steps: see `LearningSchedule`; ppo: settings of
                `RecurrentPPOConfig`. An option that `learn` does not use
                is refused.
            max_steps, max_expert_steps, tool_call_timeout, cache_tool_calls: see
                `OrchestratorConfig`.

        Raises ConfigError: any of them is wrong. CheckpointError: no such expert.
        """
        super().__init__(inference)
        if history not in ("messages", "summary"):
            raise ConfigError(f'hybrid: history: "messages" or "summary", not {history!r}')
        self._tasks = task_source(tasks, seed=seed)
        self._history = history
        self._warned: set[tuple[str, str]] = set()
        self.config = OrchestratorConfig(
            max_steps,
            max_expert_steps,
            tool_call_timeout,
            cache_tool_calls,
            rewards_of(rewards or {}, task_rewards or {}),
        )
        registry = experts if isinstance(experts, ExpertRegistry) else _load_experts(experts or {})
        self.controls = controls_of(
            registry, {name: _control(value) for name, value in (controls or {}).items()}
        )
        self.episode_tools, self._instructions = tools, instructions
        if learn != "planner" and not len(registry):
            raise ConfigError(f'hybrid: learn = "{learn}", but there is no expert: set experts')
        thread = MLXThread("experts")
        self.acting = ActingExperts(registry, lambda function: thread.submit(function).result())
        self.close = weakref.finalize(self, thread.close)  # at exit, too
        self.use_tools(tools)
        schedule = schedule_of(
            learn, {"alternate_every": alternate_every, "min_steps": min_steps, "ppo": ppo}
        )
        self.run = lambda function: thread.submit(function).result()
        # A planner that learns alone needs none, and experts that never learn may have no value
        # head.
        self.learner = (
            None
            if learn == "planner"
            else ExpertLearner(self.acting, schedule, settings_of(ppo or {}), seed=seed)
        )

    def use_tools(self, tools: EpisodeTools | None) -> None:
        """Take the tools: the planner may call those of `definitions`, the experts' loops all of
        the client's."""
        self.tools = tools if tools is not None else EpisodeTools(ToolClient(), ())
        self.instructions = self._about() if self._instructions is None else self._instructions

    def reset(self, *, index: int | None = None, split: Split = "train") -> HybridState:
        """Task `index` of a split; without an index the next one. Raises ConfigError: it is no
        task."""
        row = copy.deepcopy(dict(self._tasks(self._index_or_next(index), split)))
        task = HybridTask.of(row)
        goal = task.goal
        row.setdefault("answer", goal.get("expected_answer", goal.get("target")))
        prompt = row.pop("prompt")
        return HybridState(
            self._opening(prompt), metadata={**row, "split": split}, task_prompt=prompt
        )

    def update_state(self, state: State, response: str) -> State:
        """Carry out the turn's action, and add what came of it to the conversation."""
        state = super().update_state(state, response)
        assert isinstance(state, HybridState), "reset() makes it"
        orchestrator = state.orchestrator = state.orchestrator or self.begin(state)
        result = orchestrator.step_text(response)
        # After every turn: an episode may end here for lack of room, and the policy is not asked
        # again.
        state.metadata |= {
            "routes": [*state.metadata.get("routes", ()), _route(result.info)],
            **outcome(orchestrator),
        }
        if (expert := result.expert_result) is not None and any(orchestrator.delegations_failed):
            self._warn(expert)
        state.done = result.done
        if not result.done:
            added = (
                {"role": "assistant", "content": response},
                {"role": "user", "content": result.text},
            )
            whole = self._opening(result.observation)
            state.prompt = whole if self._history == "summary" else [*state.prompt, *added]
        return state

    def _warn(self, expert: ExpertResult) -> None:
        """Log the first delegation to an expert that fails for each kind of reason."""
        if expert.error is not None and (expert.expert, expert.error) not in self._warned:
            self._warned.add((expert.expert, expert.error))
            log.warning("a delegation failed", expert=expert.expert, reason=expert.text)

    def begin(self, state: HybridState) -> Orchestrator:
        """Return the orchestrator of an episode, at its task; held-out ones do not explore."""
        explore = self.acting.explore and state.metadata["split"] == "train"
        orchestrator = self.orchestrator(
            explore=explore, seed=derive_seed(f"hybrid/{state.trajectory_id}")
        )
        orchestrator.reset({**state.metadata, "prompt": state.task_prompt})
        return orchestrator

    def orchestrator(self, *, explore: bool = False, seed: int = 0) -> Orchestrator:
        """Return an orchestrator with these tools and experts."""
        return Orchestrator(
            self.config,
            self.acting.registry,
            self.tools.client,
            planner_tools=self.tools.definitions,
            controls=self.controls,
            explore=explore,
            seed=seed,
            run=self.run,
        )

    def group_metadata(self, trajectories: Sequence[Trajectory]) -> Mapping[str, Any]:
        """Return the experts' steps of each rollout, from which they learn."""
        kept = [trajectory.metadata.get(STEPS, []) for trajectory in trajectories]
        return {STEPS: kept} if any(kept) else {}

    def router(self, name: str) -> Any:
        """Return /v1/hybrid/chat/completions: the planner with these tools and experts."""
        return hybrid_router(ServedPlanner(self.orchestrator, self.opening, lambda: self.inference))

    def opening(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation of a client's as the planner reads it."""
        *earlier, last = read_messages(messages)
        return [*earlier, {**last, "content": self._with_instructions(last["content"])}]

    def _opening(self, prompt: Any) -> list[dict[str, Any]]:
        return self.opening(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )

    def _with_instructions(self, text: str) -> str:
        return f"{self.instructions}\n\n{text}" if self.instructions else text

    def _about(self) -> str:
        """Return the grammar, the tools and the experts."""
        lines = [HOW_TO_ACT]
        tools = self.tools.definitions
        lines += ["Tools:", *(_described(tool) for tool in tools)] if tools else []
        experts = [f"- {name}: {_purpose(self.controls[name])}" for name in self.acting.registry]
        return "\n".join([*lines, *(["Experts:", *experts] if experts else [])])


def outcome(orchestrator: Orchestrator) -> dict[str, Any]:
    """Return what rewards and the store read of an episode that goes no further, as JSON."""
    return {
        "reward": reward if has_score(reward := orchestrator.reward_if_ended) else None,
        "solved": orchestrator.solved,
        "answer_text": orchestrator.answer,
        "steps": orchestrator.steps,
        "timed_out": orchestrator.timed_out,
        "delegations_failed": list(orchestrator.delegations_failed),
        "tool_calls": [
            {
                "name": call.name,
                "arguments": dict(call.arguments),
                "text": call.result.text,
                "error": call.result.error,
                "expert": call.expert,
            }
            for call in orchestrator.calls
        ],
        STEPS: [steps.to_json() for steps in orchestrator.expert_steps],
    }


def hybrid(
    trajectories: Sequence[Trajectory], log_metric: Callable[[str, float], None]
) -> list[float | None]:
    """The reward of the specification: `RewardConfig`'s sum over the episode. Logs what `solved`
    does."""
    solved(trajectories, log_metric)
    return [trajectory.metadata.get("reward") for trajectory in trajectories]


def solved(
    trajectories: Sequence[Trajectory], log_metric: Callable[[str, float], None]
) -> list[float | None]:
    """1 if the task was solved, else 0; None if the episode never began. Logs the shares of
    tools, delegations and direct answers among first actions, of the solved, and of the
    delegations that failed."""
    for trajectory in trajectories:
        first = next(iter(trajectory.metadata.get("routes", ())), "nothing")
        for kind in ("tool", "delegate", "answer", "invalid"):
            log_metric(f"first_{kind}", float(first.partition(" ")[0] == kind))
        log_metric("solved", float(bool(trajectory.metadata.get("solved"))))
        for failed in trajectory.metadata.get("delegations_failed", ()):
            log_metric("failed_delegations", float(failed))
    ends = (trajectory.metadata.get("solved") for trajectory in trajectories)
    return [None if end is None else float(bool(end)) for end in ends]


def rewards_of(numbers: Mapping[str, Any], functions: Mapping[str, Any]) -> RewardConfig:
    """Return the rewards of tables of the configuration. Raises ConfigError."""
    reward_names = [entry.name for entry in fields(RewardConfig) if entry.name != "task_rewards"]
    for name in numbers:
        if name not in reward_names:
            raise ConfigError(f"hybrid: rewards has no {name!r}{did_you_mean(name, reward_names)}")
    custom_rewards = {
        kind: load_function(value, f"hybrid: task_rewards.{kind}")[0]
        if isinstance(value, str)
        else value
        for kind, value in functions.items()
    }
    return RewardConfig(**numbers, task_rewards={**TASK_REWARDS, **custom_rewards})


def _load_experts(files: Mapping[str, Any]) -> ExpertRegistry:
    registry = ExpertRegistry()
    for name, file in files.items():
        registry.register(load_expert(file), name)
    return registry


def _control(value: str | ExpertControl) -> ExpertControl:
    if not isinstance(value, str):
        return value
    if is_reference(value):
        loop: ExpertControl = load(value, "hybrid: controls")
        return loop
    if value not in CONTROLS:
        raise ConfigError(f"hybrid: controls has no {value!r}{did_you_mean(value, list(CONTROLS))}")
    return CONTROLS[value]


def _route(info: Mapping[str, Any]) -> str:
    """Return what an action was: "tool math_solve", "invalid aim", "answer"."""
    invalid = info["error"] in ("unknown_tool", "unknown_expert", "malformed", "arguments")
    return f"{'invalid' if invalid else info['kind']} {info['name']}".strip()


def _described(tool: Mapping[str, Any]) -> str:
    parameters = ", ".join(tool["parameters"].get("properties", {}))
    return f"- {tool['name']}({parameters}): {' '.join(str(tool['description']).split())}"


def _purpose(control: ExpertControl) -> str:
    return " ".join((control.__doc__ or "").split("\n\n")[0].split())
