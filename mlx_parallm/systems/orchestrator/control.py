"""An expert's loop over tool calls: observation → expert → action → arguments of a tool → result →
observation …

    ExpertControl(task, arguments)   makes the `ControlLoop` of one delegation; a call that cannot
                                     be carried out raises
    run_loop                         plays it; returns the `ExpertResult`, and its steps for
                                     recurrent PPO

The loop asks the live tool for every step. Actions become arguments as in the environment that the
expert was trained
in: `experts.tasks.shot_of` is the one place that knows angle and velocity.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.errors import ToolFailedError
from mlx_parallm.execution.tool_client import ToolResult
from mlx_parallm.systems.experts.expert import RNNExpertBase
from mlx_parallm.systems.experts.vector_tasks import ATTEMPTS, TARGETS_M, WINDS, shot_of
from mlx_parallm.systems.orchestrator.observation import ObservationBuilder
from mlx_parallm.systems.orchestrator.reward import SIMULATOR, HybridTask

LOOP_TOLERANCE_M = 0.5  # default

T = TypeVar("T")
RunMLX = Callable[[Callable[[], T]], T]
"""Runs a function that uses MLX, perhaps on a thread that is kept for it, and returns its
result."""


@dataclass(frozen=True)
class Judgement:
    """The meaning of one result for the expert. `ended`: the loop has nothing left to do."""

    reward: float
    ended: bool
    success: bool = False


class ControlLoop(Protocol):
    """One delegation. `observe` → [obs_dim] float32; `arguments` takes the expert's action [A]
    float32, or an int."""

    tool: str

    def observe(self) -> np.ndarray: ...

    def arguments(self, action: Any) -> dict[str, Any]: ...

    def take(self, result: ToolResult) -> Judgement:
        """Judge the result of a call. Raises ToolFailedError: it is not what this loop reads."""
        ...

    def summary(self) -> str:
        """Return the outcome in words, for the model."""
        ...


ExpertControl = Callable[[HybridTask, Mapping[str, Any]], ControlLoop]
"""Makes a loop of a task and the arguments of DELEGATE. Raises ToolFailedError: the arguments
are wrong."""


class ProjectileLoop:
    """Aim at a target with `physics_simulate`, as `experts.tasks.ProjectileTask`: same numbers,
    rewards, ten attempts.

    Arguments of DELEGATE: target (50 to 200 m), wind (-5 to 5 m/s, default 0): what the expert was
    trained for, and learns from. A shot nearer than the task's tolerance ends the loop.
    """

    tool = SIMULATOR

    def __init__(self, task: HybridTask, arguments: Mapping[str, Any]) -> None:
        numbers = {"wind": 0.0, **arguments}
        if unknown := sorted(set(numbers) - {"target", "wind"}):
            raise ToolFailedError(f"there is no argument {unknown[0]!r}: there are target and wind")
        for name, (low, high) in {"target": TARGETS_M, "wind": WINDS}.items():
            value = numbers.get(name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value <= high
            ):
                raise ToolFailedError(
                    f"{name} has to be a number from {low:g} to {high:g}, not {value!r}"
                )
        self._target, self._wind = float(numbers["target"]), float(numbers["wind"])
        self._tolerance = float(task.goal.get("tolerance", LOOP_TOLERANCE_M))
        self._error = self._distance = 0.0
        self._attempts = 0
        self._builder = ObservationBuilder()

    def observe(self) -> np.ndarray:
        return self._builder.physics(
            target=self._target,
            error=self._error,
            distance=self._distance,
            wind=self._wind,
            attempts=self._attempts,
        )

    def arguments(self, action: Any) -> dict[str, Any]:
        angle, velocity = shot_of(np.clip(np.asarray(action, np.float64), -1, 1))
        return {"angle": float(angle), "velocity": float(velocity), "wind": self._wind}

    def take(self, result: ToolResult) -> Judgement:
        value = result.value
        landed = value.get("distance") if isinstance(value, Mapping) else None
        if (
            isinstance(landed, bool)
            or not isinstance(landed, int | float)
            or not math.isfinite(landed)
        ):
            raise ToolFailedError(f"{SIMULATOR} returned no distance: {result.text[:80]!r}")
        self._distance, self._error = float(landed), abs(float(landed) - self._target)
        self._attempts += 1
        if self._error < self._tolerance:
            return Judgement(1.0, ended=True, success=True)
        last = self._attempts >= ATTEMPTS
        reward = 0.1 * max(0.0, 1 - self._error / self._target) - 0.01 - (0.5 if last else 0.0)
        return Judgement(reward, ended=last)

    def summary(self) -> str:
        if not self._attempts:
            return "no shot"
        word = "hit" if self._error < self._tolerance else "miss"
        return f"{word}: {self._distance:.1f} m, shot {self._attempts}"


CONTROLS: Mapping[str, ExpertControl] = MappingProxyType({"projectile": ProjectileLoop})


@dataclass(frozen=True)
class ExpertResult:
    """The outcome of a delegation. `trajectory`: a dictionary a step: arguments, result, reward."""

    expert: str
    steps: int
    reward: float
    success: bool
    text: str
    trajectory: tuple[Mapping[str, Any], ...] = ()
    error: str | None = None  # error of the call that ended the loop; "unknown_expert", "arguments"


@dataclass
class ExpertSteps:
    """The steps of an expert that explored, as recurrent PPO needs them. JSON by `to_json`.

    `last_value`: γ-less value of the state after the last step if the loop was cut; 0 if it
    ended.
    """

    expert: str
    observations: list[list[float]] = field(default_factory=list)  # [T, D]
    raw_actions: list[Any] = field(default_factory=list)  # [T, A], or [T] of a discrete expert
    log_probs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    last_value: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def direct(function: Callable[[], T]) -> T:
    """Run a function here and now."""
    return function()


def run_loop(
    name: str,
    expert: RNNExpertBase,
    loop: ControlLoop,
    call: Callable[[str, Mapping[str, Any]], ToolResult],
    *,
    max_steps: int,
    explore: bool,
    seed: int,
    run: Callable[[Callable[[], Any]], Any] = direct,
) -> tuple[ExpertResult, ExpertSteps | None]:
    """Play one delegation with its own memory.

    Args:
        call: calls a tool.
        explore: sample the actions and keep the steps for learning; otherwise take the most likely
            ones.
        seed: of the sampled actions.
        run: see `RunMLX`.

    A call that fails ends the loop: the result carries its error, and the step is not learned from.
    """
    steps = ExpertSteps(name) if explore else None
    trajectory: list[dict[str, Any]] = []
    judgement, result, error, memory = Judgement(0.0, ended=False), None, None, None
    for number in range(max_steps):
        seen = np.asarray(loop.observe(), np.float32)
        acted: _Acted = run(partial(_act, expert, seen, memory, explore, seed, number))
        arguments = loop.arguments(acted.action)
        result = call(loop.tool, arguments)
        if (error := result.error) is None:
            try:
                judgement = loop.take(result)
            except ToolFailedError as failure:
                error, result = "tool", ToolResult(str(failure), error="tool")
        if error is not None:
            break
        memory = acted.memory
        trajectory.append(
            {"arguments": arguments, "result": result.value, "reward": judgement.reward}
        )
        if steps is not None:
            steps.observations.append(_short(seen))
            steps.raw_actions.append(acted.raw)
            steps.log_probs.append(acted.log_prob)
            steps.values.append(acted.value)
            steps.rewards.append(judgement.reward)
        if judgement.ended:
            break
    if steps is not None and trajectory and not judgement.ended:
        after = np.asarray(loop.observe(), np.float32)
        steps.last_value = run(
            partial(_act, expert, after, memory, False, seed, len(trajectory))
        ).value
    outcome = ExpertResult(
        expert=name,
        steps=len(trajectory),
        reward=sum(step["reward"] for step in trajectory),
        success=judgement.success and error is None,
        text=loop.summary() if error is None else result.text if result is not None else "",
        trajectory=tuple(trajectory),
        error=error,
    )
    return outcome, steps if steps is not None and trajectory else None


@dataclass(frozen=True)
class _Acted:
    action: Any  # [A] float32, or an int
    raw: Any  # JSON
    log_prob: float
    value: float
    memory: mx.array  # [1, L · S, H]


def _short(numbers: np.ndarray) -> list[float]:
    """Return float32 numbers in nine digits, which give back every bit of them and are half as
    long as JSON."""
    return [float(f"{number:.9g}") for number in numbers.tolist()]


def _act(
    expert: RNNExpertBase,
    seen: np.ndarray,
    memory: mx.array | None,
    explore: bool,
    seed: int,
    number: int,
) -> _Acted:
    """One row at a time: the last bits of a row depend on its company, and an episode may be
    repeated alone."""
    key = mx.random.key(derive_seed("expert", seed, number))
    output = expert.step(mx.array(seen)[None], memory, deterministic=not explore, key=key)
    mx.eval(output.action, output.raw, output.log_prob, output.value, output.hidden)
    action: Any = np.array(output.action)[0]
    return _Acted(
        action=int(action) if expert.config.discrete_actions else action,
        raw=np.array(output.raw)[0].tolist()
        if expert.config.discrete_actions
        else _short(np.array(output.raw)[0]),
        log_prob=float(np.array(output.log_prob)[0]),
        value=float(np.array(output.value)[0]),
        memory=output.hidden,
    )
