"""[evaluation]: held-out problems answered by the engine while training goes on. See docs/evaluation.md.

    Evaluations     when one is due, of which version, and what becomes of it
    EvaluationLog   where it is written, and what says how good a checkpoint is (evaluation_log.py)

An evaluation is of one version: its requests name `policy@VERSION`, which is held in memory until it is over, so the
trainer publishes on meanwhile; they wait behind those of the rollouts. Training waits for it where versions are not
kept (all weights are trained), where it has to repeat bit for bit (deterministic), and after the last step. One that is
still running when the next one is due makes that one be skipped.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_parallm.config.evaluation import PREFIX
from mlx_parallm.config.load import Config
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.evaluate import (
    ABSOLUTE,
    Evaluation,
    ProblemSet,
    build_evaluated,
    draw_problems,
    evaluate,
    overall_score,
    remarks,
)
from mlx_parallm.errors import CheckpointError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.rl_training.checkpoints.trainer_state import TrainerState
from mlx_parallm.rl_training.evaluation.log import EvaluationLog, flat
from mlx_parallm.rl_training.events import EvaluationFinished, RunEvents, SpanEnded, Waiting
from mlx_parallm.rl_training.publish.versions import VersionSteps
from mlx_parallm.rl_training.run_directory import checkpoints, moment
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import PolicyClient
from mlx_parallm.weights import SharedWeights

BEHIND_ROLLOUTS = 1  # priority of the requests
PATIENCE_S = 60.0  # without an answer, beyond the longest time-out of an episode: the environment blocks its thread
JOIN_S = 5.0
TURN_S = 0.1

log = get_logger("evaluation")


def evaluation_sources(
    config: Config, training: Sequence[EnvironmentSource], progress: Callable[[], TrainingProgress]
) -> tuple[EnvironmentSource, ...]:
    """What a run evaluates: the training sources as they are, where that is possible. Raises ConfigError."""
    if not config.evaluation.problems:
        return ()
    if config.evaluation.environments or any(entry.reward_method != ABSOLUTE for entry in config.environments):
        return build_evaluated(config, progress)
    return tuple(training)


@dataclass
class _Running:
    step: int
    version: int
    held: bool  # the version, in memory
    future: "Future[list[Evaluation]]"
    began: float
    last_answer: float


class Evaluations:
    """One run's. Everything is called on the trainer's thread; the answers are asked for on another.

    Args:
        sources: what is evaluated (nothing is allowed), and what is trained on.
        tokenizer: an instance of its own.
        policy: the adapter that is trained, None where all weights are.
        while_waiting: called at least every TURN_S while training waits for an evaluation.
    """

    def __init__(
        self,
        config: Config,
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
        self._config, self._settings, self._run = config, config.evaluation, run
        self._log, self._problems = evaluations, _problems(config, *sources)
        self._client, self._tokenizer, self._weights = client, tokenizer, weights
        self._versions, self._policy, self._events = versions, policy, events or RunEvents()
        self._should_stop, self._while_waiting = should_stop, while_waiting
        self._last = config.rl_training.total_steps
        self._training_waits = config.rl_training.deterministic or policy is None
        self._patience_s = PATIENCE_S + max((own.source.config.timeout_s for own in self._problems), default=0.0)
        self._running: _Running | None = None
        self._thread: LoopThread | None = None
        self._postponed = False
        self._untold: dict[str, float] = {}
        evaluated, training = sources
        if own := set(evaluated) - set(training):
            inference = InferenceModule.over(client, tokenizer, policy, weights=weights)
            for source in own:
                source.attach(inference)

    # ------------------------------------------------------------------ what the loop calls

    def begin(self, state: TrainerState | None, metrics: Iterable[Mapping[str, Any]] = ()) -> None:
        """Before the first step of this process: `at_start`, or what the end of the process before interrupted.

        Args:
            metrics: the run's lines so far; a result that none of them tells of is told with the next one.
        """
        told = {line.get(f"{PREFIX}step") for line in metrics}
        if (done := self._log.done()) and done[-1]["step"] not in told:
            self._untold = flat(done[-1])
        step = self._newest_due(state.step if state else 0)
        if step is None or self._log.settled(step):
            return
        if state is None:
            self._start(0, self._versions.newest[0])
        else:
            self._start_again(step, state)
        if self._training_waits:
            self._wait()

    def measure(self, step: int) -> dict[str, float]:
        """After `step` was trained and published: what is there for its metrics line; starts what is due."""
        last, skipped = step == self._last, self._log.skipped
        if last:
            self._wait()  # the last one is not skipped
        told, self._untold = self._untold | self._collect(), {}
        if self._is_due(step) or self._postponed:
            self._begin_due(step, last=last)
        if last or self._training_waits:
            self._wait()
            told |= self._collect()
        return told | ({f"{PREFIX}skipped": self._log.skipped} if self._log.skipped > skipped else {})

    def wants_checkpoint(self, step: int) -> bool:
        """The weights of this step are evaluated: they are to be there when they turn out to be the best, or when the
        process ends before the evaluation does."""
        return self._log.running == step or any(line["step"] == step for line in self._log.done()[-1:])

    def finish(self) -> None:
        """After the loop: waits for what `begin` has started, where no step followed."""
        self._wait()
        self._collect()

    def stop(self) -> None:
        """Gives up what is running: a resume starts it again. May be called again."""
        self._release()
        if self._thread is not None:
            self._thread.stop(timeout_s=JOIN_S)  # one that an environment blocks is left behind

    # ------------------------------------------------------------------ when

    def _is_due(self, step: int) -> bool:
        own = self._settings
        if step == 0 or not self._problems:
            return own.at_start and bool(self._problems)
        return (own.every > 0 and step % own.every == 0) or (own.at_end and step == self._last)

    def _newest_due(self, step: int) -> int | None:
        return next((due for due in range(step, -1, -1) if self._is_due(due)), None)

    def _begin_due(self, step: int, *, last: bool) -> None:
        """Of the first weights from then on that are served as they are."""
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

    def _skip(self, step: int, why: str) -> None:
        self._events.warn("evaluation skipped", step=step, reason=why)
        self._log.add({"step": step, "skipped": why})

    # ------------------------------------------------------------------ one evaluation

    def _start_again(self, step: int, now: TrainerState) -> None:
        """One that a stop or a kill has interrupted. The checkpoint of its step has the weights; those before the first
        step are the base's."""
        version = _version_of(self._run, step)
        if self._policy is None:
            there = now.step == step and now.in_progress is None  # there is one version of them at a time
        else:
            there = version in self._weights.history.versions()
        if version is not None and there:
            self._start(step, version)
        elif step == 0 and self._policy is not None and self._config.model.lora_path is None:
            self._start(0, 0, of_base=True)
        else:
            self._skip(step, "it was interrupted, and its weights are not kept")

    def _start(self, step: int, version: int, *, of_base: bool = False) -> None:
        adapter = None if self._policy is None or of_base else f"{self._policy}@{version}"
        if adapter is not None:
            self._weights.history.hold(version)
        now = time.monotonic()
        work = evaluate(
            self._client,
            self._problems,
            self._tokenizer,
            self._settings,
            max_token_length=self._config.rl_training.atropos.max_token_length,
            adapter=adapter,
            template_kwargs=self._config.model.chat_template_kwargs,
            priority=BEHIND_ROLLOUTS,
            answered=self._answered,
        )
        self._thread = self._thread or LoopThread("evaluation")
        self._running = _Running(step, version, adapter is not None, self._thread.submit(work), now, now)
        self._log.running = step

    def _answered(self) -> None:
        """The other thread."""
        if (running := self._running) is not None:
            running.last_answer = time.monotonic()

    def _collect(self) -> dict[str, float]:
        """What has come to an end since: noted, told, and as keys of a metrics line."""
        running = self._running
        if running is None or not running.future.done():
            return {}
        self._release()
        found = running.future.result()
        for evaluation in found:
            if evaluation.failed:
                self._events.warn(
                    "every answer failed", environment=evaluation.environment, error=evaluation.first_error
                )
        ended = time.time()
        line: dict[str, Any] = {
            "step": running.step,
            "version": running.version,
            "seconds": time.monotonic() - running.began,
            "score": overall_score(found),
            "environments": {evaluation.environment: evaluation.to_json() for evaluation in found},
        }
        self._log.add(line)
        self._events.emit(SpanEnded("evaluate", running.step, ended - line["seconds"], ended))
        self._events.emit(EvaluationFinished(line))
        return flat(line)

    def _wait(self) -> None:
        """For what is running. It is given up when the process is asked to stop, and when nothing comes any more."""
        while (running := self._running) is not None and not wait([running.future], TURN_S).done:
            if self._should_stop():
                self._release()
                return
            self._while_waiting()
            self._events.emit(Waiting(running.step, time.monotonic() - running.began))
            self._give_up_if_stuck()

    def _give_up_if_stuck(self) -> None:
        running = self._running
        if running is None or running.future.done() or time.monotonic() - running.last_answer < self._patience_s:
            return
        self._release()
        self._thread = None  # it is blocked, and a daemon
        self._skip(running.step, f"no answer came within {self._patience_s:.0f} s: does an environment block?")

    def _release(self) -> None:
        """Of what was running; cancels it where it still does."""
        if (running := self._running) is None:
            return
        running.future.cancel()
        if running.held:
            self._weights.history.release(running.version)
        self._running = self._log.running = None


def _problems(
    config: Config, evaluated: Sequence[EnvironmentSource], training: Sequence[EnvironmentSource]
) -> list[ProblemSet]:
    """What there is to answer; says what is wrong with it. Raises ConfigError: a source of the user's that fails."""
    count = config.evaluation.problems
    drawn = draw_problems(evaluated, count)
    for remark in remarks(drawn, count, training):
        log.warning(f"evaluation: {remark}")
    return [own for own in drawn if own.tasks]


def _version_of(run: Path, step: int) -> int | None:
    """Under which the weights of its checkpoint were served; None: they never were, or there is none."""
    for path in checkpoints(run):
        if moment(path) == (step, 0):
            try:
                state = TrainerState.read(path)
            except CheckpointError:
                return None
            return None if state.unpublished else state.policy_version
    return None
