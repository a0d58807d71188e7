"""`Orchestrator`: one episode of the hybrid system. An action of the planner in, a `StepResult`
out.

    TOOL: name(k=v)       → the tool is called                                     tool_result
    DELEGATE: name(k=v)   → the expert acts in a loop of tool calls (control.py)   expert_result
    ANSWER: text          → the end; rewards of reward.py
    THINK: text           → nothing; it costs a step

An action never raises for what a tool, an expert or the planner does: unknown names, calls that
cannot be read, failures and time-outs are results with an `error`, and cost what `RewardConfig`
says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.errors import ConfigError, ToolFailedError
from mlx_parallm.execution.action_grammar import Action, parse_actions, write_action
from mlx_parallm.execution.tool_client import ToolClient, ToolResult
from mlx_parallm.execution.tool_results import CallsBefore, no_such_tool
from mlx_parallm.systems.experts.registry import ExpertRegistry
from mlx_parallm.systems.orchestrator.control import (
    CONTROLS,
    ExpertControl,
    ExpertResult,
    ExpertSteps,
    direct,
    run_loop,
)
from mlx_parallm.systems.orchestrator.observation import ObservationBuilder
from mlx_parallm.systems.orchestrator.reward import (
    CallRecord,
    HybridTask,
    RewardConfig,
    final_reward,
    is_solved,
    nearly,
    step_reward,
)

NO_ACTION = "No action yet. Write TOOL:, DELEGATE: or ANSWER:."


@dataclass(frozen=True)
class OrchestratorConfig:
    """The limits of an episode. Raises ConfigError: a limit that is not above 0.

    `tool_call_timeout`: seconds, of one call, in the place of the tool client's own limits
    (`MCPServer.timeout_s`, `function_timeout_s`; 30 each); None: those.
    """

    max_steps: int = 50
    max_expert_steps: int = 20  # in one delegation
    tool_call_timeout: float | None = None
    cache_tool_calls: bool = True  # of the planner's calls; `ToolClient` says of which tools
    rewards: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        seconds = 1.0 if self.tool_call_timeout is None else self.tool_call_timeout
        if min(self.max_steps, self.max_expert_steps) < 1 or not seconds > 0:
            raise ConfigError(
                "orchestrator: max_steps, max_expert_steps and tool_call_timeout have to be above 0"
            )


@dataclass(frozen=True)
class OrchestratorStep:
    """One step. `observation`: the text view after it; `info`: the action's kind and name, and
    what went wrong."""

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any]
    tool_result: ToolResult | None = None
    expert_result: ExpertResult | None = None

    @property
    def text(self) -> str:
        """The part of the observation that this step adds; empty at the end."""
        return str(self.info["text"])


StepResult = OrchestratorStep  # the specification's name; the trainer's steps have one of that name


class Orchestrator:
    """One episode at a time: `reset(task)`, then `step(action)` until it is done.

    Args:
        registry: the experts; each acts with its own memory in every delegation.
        tools: where all calls go; it is not closed.
        planner_tools: definitions of the tools that the planner may call, where those are not all;
            loops may call all.
        controls: expert → what makes its loops. Default: "projectile" for each expert of ten
            numbers and two actions.
        explore: sample the experts' actions, and keep their steps in `expert_steps`.
        seed: of those samples.
        run: runs what uses MLX (control.RunMLX).

    Raises ConfigError: no loop for an expert, or a loop for none.
    """

    def __init__(
        self,
        config: OrchestratorConfig | None,
        registry: ExpertRegistry,
        tools: ToolClient,
        *,
        planner_tools: Sequence[Mapping[str, Any]] | None = None,
        controls: Mapping[str, ExpertControl] | None = None,
        explore: bool = False,
        seed: int = 0,
        run: Callable[[Callable[[], Any]], Any] = direct,
    ) -> None:
        self.config, self.registry, self.tools = config or OrchestratorConfig(), registry, tools
        self.controls = controls_of(registry, controls or {})
        self._planner_tools = planner_tools
        self.explore, self.seed, self.run = explore, seed, run
        # `run` may use another thread
        mx.eval([registry.get(name).parameters() for name in registry])
        self._builder = ObservationBuilder()
        self._task: HybridTask | None = None
        self.done = True

    def reset(self, task: Mapping[str, Any] | HybridTask) -> str:
        """Begin a task; return the text view. Raises ConfigError: it is not a task."""
        self._task = HybridTask.of(task)
        kind, rewarded_types = self._task.type, [*self.config.rewards.task_rewards, "general"]
        if kind not in rewarded_types and (meant := nearly(kind, rewarded_types)):
            raise ConfigError(
                f"task: type {kind!r} has no reward function; did you mean {meant!r}?"
            )
        self.steps, self.delegations, self.done, self.timed_out = 0, 0, False, False
        self.answer: str | None = None
        self.total_reward = 0.0
        self.calls: list[CallRecord] = []
        self.actions: list[str] = []  # as the planner wrote them
        self.results: list[str] = []
        self.expert_steps: list[ExpertSteps] = []
        self.delegations_failed: list[bool] = []  # of those that had an expert and right arguments
        self.tools.forget()
        return self.observation

    @property
    def task(self) -> HybridTask:
        if self._task is None:
            raise RuntimeError("reset(task) comes first")
        return self._task

    @property
    def observation(self) -> str:
        """The task, the last five results and the last three actions."""
        return self._builder.text(
            self.task.prompt,
            step=self.steps,
            max_steps=self.config.max_steps,
            results=self.results,
            actions=self.actions,
        )

    @property
    def solved(self) -> bool:
        return self.done and is_solved(self.config.rewards, self)

    def step_text(self, text: str) -> StepResult:
        """Take a turn of the planner: its first action that is not a thought, or the thought.

        What follows an action in the same turn was written before its result was there: it is left
        out, and `info["left_out"]` counts it.
        """
        actions = parse_actions(text, self._parameters())
        chosen = next((action for action in actions if action.kind != "think"), None)
        if chosen is None:
            return self.step(actions[0] if actions else Action("think", 0, 0))
        return self.step(
            chosen,
            written=text[chosen.start : chosen.end].strip(),
            left_out=_after(actions, chosen),
        )

    def step(self, action: Action | str, *, written: str = "", left_out: int = 0) -> StepResult:
        """Carry out an action. A text is `step_text`. Raises RuntimeError: the episode is over,
        or has not begun."""
        if isinstance(action, str):
            return self.step_text(action)
        if self.done:
            raise RuntimeError("the episode is over, or has not begun: reset(task)")
        self.steps += 1
        tool_result, expert_result, error, text = (
            None,
            None,
            action.error and "malformed",
            action.error or "",
        )
        if action.error is not None:
            text = f"The call cannot be read: {action.error}"
        elif action.kind == "tool":
            tool_result = self._call(
                action.name, action.arguments, cached=self.config.cache_tool_calls
            )
            error, text = tool_result.error, tool_result.text
        elif action.kind == "delegate":
            expert_result = self._delegate(action.name, action.arguments)
            error, text = expert_result.error, expert_result.text
        elif action.kind == "answer":
            self.answer, self.done = action.text, True
        else:
            text = NO_ACTION
        success = expert_result is not None and expert_result.success
        reward = step_reward(self.config.rewards, action.kind, error, success=success)
        if action.kind in ("tool", "delegate"):
            text = f"{action.name or action.kind} -> {text}"
            self.results.append(text)
        self.actions.append(written or _as_written(action))
        if not self.done and self.steps >= self.config.max_steps:
            self.done = self.timed_out = True
        if self.done:
            reward += final_reward(self.config.rewards, self, timed_out=self.timed_out)
        self.total_reward += reward
        info = {
            "kind": action.kind,
            "name": action.name,
            "error": error,
            "text": "" if self.done else text,
            "left_out": left_out,
            "steps": self.steps,
            "timed_out": self.timed_out,
        }
        return StepResult(self.observation, reward, self.done, info, tool_result, expert_result)

    @property
    def reward_if_ended(self) -> float:
        """The reward of the whole episode if it goes no further: without an answer, where there
        is none yet."""
        end = 0.0 if self.done else final_reward(self.config.rewards, self, timed_out=False)
        return self.total_reward + end

    def _parameters(self) -> dict[str, list[str]]:
        """Return the names of the tools' parameters, for calls that leave them out."""
        tools = self.tools.definitions() if self._planner_tools is None else self._planner_tools
        return {tool["name"]: list(tool["parameters"].get("properties", {})) for tool in tools}

    def _call(
        self, name: str, arguments: Mapping[str, Any], *, cached: bool, expert: str = ""
    ) -> ToolResult:
        allowed = (
            None
            if expert or self._planner_tools is None
            else [tool["name"] for tool in self._planner_tools]
        )
        if allowed is not None and name not in allowed:
            result = no_such_tool(name, allowed)
        else:
            made = [(call.name, call.arguments) for call in self.calls]
            result = self.tools.call(
                name,
                arguments,
                timeout_s=self.config.tool_call_timeout,
                cached=cached,
                before=CallsBefore(made, self.task.prompt),
            )
        self.calls.append(CallRecord(name, dict(arguments), result, expert))
        return result

    def _delegate(self, name: str, arguments: Mapping[str, Any]) -> ExpertResult:
        if name not in self.registry:
            registered = ", ".join(self.registry) or "none"
            text = f"there is no expert {name!r}; there are: {registered}"
            return ExpertResult(name, 0, 0.0, False, text, error="unknown_expert")
        try:
            loop = self.controls[name](self.task, arguments)
        except ToolFailedError as error:
            return ExpertResult(name, 0, 0.0, False, str(error), error="arguments")
        self.delegations += 1
        result, steps = run_loop(
            name,
            self.registry.get(name),
            loop,
            lambda tool, values: self._call(tool, values, cached=False, expert=name),
            max_steps=self.config.max_expert_steps,
            explore=self.explore,
            seed=derive_seed("delegation", self.seed, self.delegations),
            run=self.run,
        )
        if steps is not None:
            self.expert_steps.append(steps)
        self.delegations_failed.append(result.error is not None)
        return result


def controls_of(
    registry: ExpertRegistry, custom: Mapping[str, ExpertControl]
) -> dict[str, ExpertControl]:
    """Return a control for each expert. Raises ConfigError."""
    if unknown := sorted(set(custom) - set(registry)):
        raise ConfigError(
            f"controls: there is no expert {unknown[0]!r}:"
            f" {', '.join(registry) or 'none is registered'}"
        )
    controls = dict(custom)
    for name in registry:
        config = registry.get(name).config
        if name not in controls:
            if (config.obs_dim, config.action_dim, config.discrete_actions) != (10, 2, False):
                raise ConfigError(
                    f"expert {name!r} reads {config.obs_dim} numbers: no loop is known for it; set"
                    f" controls ({', '.join(CONTROLS)}, or a function of yours)"
                )
            controls[name] = CONTROLS["projectile"]
    return controls


def _after(actions: tuple[Action, ...], chosen: Action) -> int:
    return len(actions) - actions.index(chosen) - 1


def _as_written(action: Action) -> str:
    if action.kind in ("answer", "think"):
        return f"{action.kind.upper()}: {action.text}"
    if action.kind == "tool":
        return write_action("tool", action.name, action.arguments)
    return write_action("delegate", action.name, action.arguments)
