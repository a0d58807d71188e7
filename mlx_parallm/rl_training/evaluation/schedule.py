"""[evaluation]: held-out problems answered by the engine while training continues. See
docs/watching.md#evaluation.

    Evaluations     the schedule: when one is due, of which version, and the file of its result
    FallGuard       back to the best weights, when the score falls
    EvaluationLog   the file of results, and the score of a checkpoint (log.py)
    best_by         by which score the best checkpoint is chosen (run_files/best_checkpoint.py)

An evaluation measures one version: its requests name `policy@VERSION`, which is held in memory
until the end, so the trainer can publish meanwhile; they have a lower priority than those of the
rollouts. Training waits for it where versions are not kept (all weights are trained), where a run
has to repeat bit for bit (deterministic), and after the last step. While one is still running, the
next one that is due is skipped.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.evaluation import PREFIX, EvaluationConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LearningSection
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import CheckpointError, RefusedError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.rl_training.evaluation.evaluate import (
    ABSOLUTE,
    Evaluation,
    build_evaluated,
    draw_problems,
    evaluate,
    overall_score,
)
from mlx_parallm.rl_training.evaluation.examiner import own_examiners
from mlx_parallm.rl_training.events import EvaluationFinished, RunEvents, SpanEnded, Waiting
from mlx_parallm.run_files.directory import checkpoints, moment
from mlx_parallm.run_files.evaluations import EvaluationLog, flat, says_nothing
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import PolicyClient
from mlx_parallm.weights import SharedWeights

BEHIND_ROLLOUTS = 1  # priority of the requests
# without an answer, beyond the longest time-out of an episode: then an environment blocks
PATIENCE_S = 60.0
JOIN_S = 5.0
TURN_S = 0.1

log = get_logger("evaluation")


def evaluation_sources(
    settings: EvaluationConfig,
    environments: Sequence[EnvironmentConfig],
    training: Sequence[EnvironmentSource],
    progress: Callable[[], TrainingProgress],
    *,
    seed: int,
    tools: EpisodeTools | None = None,
) -> tuple[EnvironmentSource, ...]:
    """Return the sources that a run evaluates: those of training, if that is possible. Raises
    ConfigError.

    Args:
        environments: those that train, of which `training` are the sources.
    """
    if not settings.problems:
        return ()
    evaluated = settings.environments or environments
    if settings.environments or any(entry.reward_method != ABSOLUTE for entry in environments):
        return build_evaluated(evaluated, progress, seed=seed, tools=tools)
    return tuple(training)


@dataclass
class _RunningEvaluation:
    step: int
    version: int
    held: bool  # the version, in memory
    future: "Future[list[Evaluation]]"
    began: float
    last_answer: float


class Evaluations:
    """The evaluations of one run. Call everything on the trainer's thread; the answers are sampled
    on another.

    Args:
        sources: (evaluated, trained on); the first may be empty.
        tokenizer: an instance for this alone.
        policy: the adapter that is trained, None where all weights are.
        while_waiting: called at least every TURN_S while training waits for an evaluation.
    """

    def __init__(
        self,
        evaluation: EvaluationConfig,
        training: LearningSection,
        model: ModelConfig,
        run: Path,
        evaluations: EvaluationLog,
        sources: tuple[Sequence[EnvironmentSource], Sequence[EnvironmentSource]],
        *,
        client: PolicyClient,
        tokenizer: Tokenizer,
        weights: SharedWeights,
        versions: VersionSteps,
        policy: str | None,
        events: RunEvents | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._training, self._run = evaluation, training, run
        self._template_kwargs = model.chat_template_kwargs
        self._begins_as_base = model.lora_path is None
        self._log, self._problems = (
            evaluations,
            draw_problems(sources[0], evaluation.problems, sources[1]),
        )
        self._client, self._tokenizer, self._weights = client, tokenizer, weights
        self._versions, self._policy, self._events = versions, policy, events or RunEvents()
        self._should_stop, self._while_waiting = should_stop, while_waiting
        self._last = training.total_steps
        self._training_waits = training.deterministic or policy is None
        self._patience_s = PATIENCE_S + max(
            (each.source.config.timeout_s for each in self._problems), default=0.0
        )
        trained = [source.config for source in sources[1]]
        self._own = {
            each.source.name: own_examiners(trained, [each.source.config])
            for each in self._problems
        }
        self._running: _RunningEvaluation | None = None
        self._thread: LoopThread | None = None
        self._postponed = False
        self._unreported: dict[str, float | None] = {}
        evaluated, trained_on = sources
        if separate := set(evaluated) - set(trained_on):
            inference = InferenceModule.over(client, tokenizer, policy, weights=weights)
            for source in separate:
                source.attach(inference)

    # ------------------------------------------------------------------ called by the loop

    def begin(self, state: TrainerState | None, metrics: Iterable[Mapping[str, Any]] = ()) -> None:
        """Start, before the first step of this process, what `at_start` asks for or the last
        process left unfinished.

        Args:
            metrics: the run's lines so far; a result that none of them has is added to the next
                one.
        """
        reported = {line.get(f"{PREFIX}step") for line in metrics}
        if (done := self._log.done()) and done[-1]["step"] not in reported:
            self._unreported = flat(done[-1])
        step = self._newest_due(state.step if state else 0)
        if step is None or self._log.settled(step):
            return
        if state is None:
            self._start(0, self._versions.newest[0])
        else:
            self._start_again(step, state)
        if self._training_waits:
            self._wait()

    def measure(self, step: int) -> dict[str, float | None]:
        """Return the numbers for the metrics line of `step`, which was trained and published;
        start the one that is due."""
        last, skipped = step == self._last, self._log.skipped
        if last:
            self._wait()  # the last one is not skipped
        numbers, self._unreported = self._unreported | self._collect(), {}
        if self._is_due(step) or self._postponed:
            self._begin_due(step, last=last)
        if last or self._training_waits:
            self._wait()
            numbers |= self._collect()
        return numbers | (
            {f"{PREFIX}skipped": self._log.skipped} if self._log.skipped > skipped else {}
        )

    def measure_end(self, step: int) -> dict[str, float | None]:
        """Return the numbers for the line of a step that turns out to be the last: it is
        evaluated as the one at total_steps is."""
        self._last = step
        return self.measure(step)

    def wants_checkpoint(self, step: int) -> bool:
        """Whether the weights of this step are evaluated: they must be kept in case they are the
        best, or the process ends before the evaluation does."""
        return self._log.running == step or any(
            line["step"] == step for line in self._log.done()[-1:]
        )

    def now(self, step: int) -> dict[str, float | None]:
        """Evaluate the served weights, those after `step`, and return the numbers; empty without
        held-out problems."""
        self._wait()
        self._collect()
        if self._problems:
            self._start(step, self._versions.newest[0])
            self._wait()
        return self._collect()

    def finish(self) -> None:
        """Wait, after the loop, for an evaluation that `begin` has started, if no step
        followed."""
        self._wait()
        self._collect()

    def stop(self) -> None:
        """Cancel the running one: a resume starts it again. May be called again."""
        self._release()
        if self._thread is not None:
            self._thread.stop(timeout_s=JOIN_S)  # one that an environment blocks is left behind

    # ------------------------------------------------------------------ when

    def _is_due(self, step: int) -> bool:
        settings = self._settings
        if step == 0 or not self._problems:
            return settings.at_start and bool(self._problems)
        return (settings.every > 0 and step % settings.every == 0) or (
            settings.at_end and step == self._last
        )

    def _newest_due(self, step: int) -> int | None:
        return next((due for due in range(step, -1, -1) if self._is_due(due)), None)

    def _begin_due(self, step: int, *, last: bool) -> None:
        """Start the evaluation that is due, as soon as the served weights are those of a step."""
        self._give_up_if_stuck()
        version, steps = self._versions.newest
        self._postponed = steps != step and not last
        if self._postponed:
            return
        if steps != step:
            self._skip(step, "the weights of the last step are not served")
        elif self._running is not None:
            self._skip(step, f"that of step {self._running.step} was still running")
        elif not self._log.settled(step):
            self._start(step, version)

    def _skip(self, step: int, reason: str) -> None:
        self._events.warn("evaluation skipped", step=step, reason=reason)
        self._log.add({"step": step, "skipped": reason})

    # ------------------------------------------------------------------ one evaluation

    def _start_again(self, step: int, now: TrainerState) -> None:
        """Repeat an evaluation that a stop or a kill interrupted. Its weights are in the
        checkpoint of its step; before the first step they are the base's."""
        version = _version_of(self._run, step)
        if self._policy is None:
            # there is one version of them at a time
            available = now.step == step and now.in_progress is None
        else:
            available = version in self._weights.history.versions()
        if version is not None and available:
            self._start(step, version)
        elif step == 0 and self._policy is not None and self._begins_as_base:
            self._start(0, 0, of_base=True)
        else:
            self._skip(step, "it was interrupted, and its weights are not kept")

    def _start(self, step: int, version: int, *, of_base: bool = False) -> None:
        adapter = None if self._policy is None or of_base else f"{self._policy}@{version}"
        if adapter is not None:
            self._weights.history.hold(version)
        now = time.monotonic()
        answering = EpisodePolicy(
            self._client,
            self._tokenizer,
            temperature=0.0,
            max_token_length=self._training.atropos.max_token_length,
            adapter=adapter,
            template_kwargs=self._template_kwargs,
            priority=BEHIND_ROLLOUTS,
        )
        work = evaluate(answering, self._problems, self._settings, answered=self._answered)
        self._thread = self._thread or LoopThread("evaluation")
        self._running = _RunningEvaluation(
            step, version, adapter is not None, self._thread.submit(work), now, now
        )
        self._log.running = step

    def _answered(self) -> None:
        """Called on the other thread."""
        if (running := self._running) is not None:
            running.last_answer = time.monotonic()

    def _collect(self) -> dict[str, float | None]:
        """Record a result that has arrived, emit its events, and return it as keys of a metrics
        line."""
        running = self._running
        if running is None or not running.future.done():
            return {}
        self._release()
        evaluations = running.future.result()
        for evaluation in evaluations:
            if evaluation.failed:
                self._events.warn(
                    "every answer failed",
                    environment=evaluation.environment,
                    error=evaluation.first_error,
                )
        ended = time.time()
        line: dict[str, Any] = {
            "step": running.step,
            "version": running.version,
            "seconds": time.monotonic() - running.began,
            "score": overall_score(evaluations),
            "environments": {
                evaluation.environment: evaluation.to_json(self._own[evaluation.environment])
                for evaluation in evaluations
            },
        }
        if reason := says_nothing(line):
            line["score"] = None
            if not any(evaluation.failed for evaluation in evaluations):  # that is said above
                self._events.warn("the evaluation has no score", step=running.step, reason=reason)
        self._log.add(line)
        self._events.emit(SpanEnded("evaluate", running.step, ended - line["seconds"], ended))
        self._events.emit(EvaluationFinished(line))
        return flat(line)

    def _wait(self) -> None:
        """Wait for the running one. Give it up on a stop request, and when no more answers come."""
        while (running := self._running) is not None and not wait([running.future], TURN_S).done:
            if self._should_stop():
                self._release()
                return
            self._while_waiting()
            self._events.emit(Waiting(running.step, time.monotonic() - running.began))
            self._give_up_if_stuck()

    def _give_up_if_stuck(self) -> None:
        running = self._running
        if (
            running is None
            or running.future.done()
            or time.monotonic() - running.last_answer < self._patience_s
        ):
            return
        self._release()
        self._thread = None  # an environment blocks it; it is a daemon
        self._skip(
            running.step,
            f"no answer came within {self._patience_s:.0f} s: does an environment block?",
        )

    def _release(self) -> None:
        """Cancel the running one and release its version."""
        if (running := self._running) is None:
            return
        running.future.cancel()
        if running.held:
            self._weights.history.release(running.version)
        self._running = self._log.running = None


class FallGuard:
    """Weights whose evaluation falls too far below the best one go back to it. Use it on the
    trainer's thread.

    It requests an ordinary rollback (`publish/rollback.py`), which the trainer performs between two
    steps: weights and optimizer go back, steps and data continue.

    Args:
        max_fall: how far the metric that checkpoints are compared by may fall below its best.
        roll_back: requests a rollback to a version. Raises RefusedError.
    """

    def __init__(
        self, log: EvaluationLog, max_fall: float, roll_back: Callable[[int], object]
    ) -> None:
        self._log, self._max_fall, self._roll_back = log, max_fall, roll_back

    def subscribe(self, events: RunEvents) -> None:
        events.subscribe(EvaluationFinished, lambda event: self.take(event.line, events))

    def take(self, line: Mapping[str, Any], events: RunEvents) -> None:
        """Request a rollback if this evaluation, which is in the log already, is too bad."""
        score = self._log.score(line["step"], line["version"])
        best = self._log.best()
        if score is None or best is None or best.score - score <= self._max_fall:
            return
        fell = {
            "step": line["step"],
            "score": round(score, 4),
            "best": round(best.score, 4),
            "best_step": best.step,
        }
        try:
            self._roll_back(best.version)
        except RefusedError as error:
            events.warn("the evaluation fell, and nothing goes back", reason=str(error), **fell)
            return
        events.warn("the evaluation fell: the weights go back to the best ones", **fell)


def _version_of(run: Path, step: int) -> int | None:
    """Return the version that the step's checkpoint was served as; None: it never was, or there
    is none."""
    for path in checkpoints(run):
        if moment(path) == (step, 0):
            try:
                state = TrainerState.read(path)
            except CheckpointError:
                return None
            return None if state.unpublished else state.policy_version
    return None
