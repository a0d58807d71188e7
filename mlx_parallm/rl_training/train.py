"""TrainingRun: builds the trainer's half of the process around a `PolicyServer` and runs the loop.

    configuration, --resume → run directory → store → sources of rollouts, HTTP → model, trainer,
    weights → engine → sources start → buffer → TrainingLoop → report

`execute` returns when the run is finished or a stop was requested; `close` ends every thread that
was started, also after a failure half way. The daemon chooses the serving half and the kinds of
sources, and connects them to routes.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mlx_parallm.config.data import DATA_ALGORITHMS, REWARD_MODEL
from mlx_parallm.config.load import Config
from mlx_parallm.engine.client import CLIENTS
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.episode_tools import EpisodeTools, open_tools
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.execution.prompt_images import ImageReader, text_of
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import LoadedModel, check_model
from mlx_parallm.models.scoring.card import CARD_FILE, RewardModelCard
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rewards.functions import TrainingProgress
from mlx_parallm.rl_training.checkpoint import Checkpointer, CheckpointVersions
from mlx_parallm.rl_training.checkpoints.resume import initial_adapter, what_to_resume
from mlx_parallm.rl_training.checkpoints.trainer_state import TrainerState
from mlx_parallm.rl_training.commands import (
    RunCommands,
    changeable,
    overridden_settings,
    restored_settings,
    with_settings,
)
from mlx_parallm.rl_training.data.source import DataSource, Fit
from mlx_parallm.rl_training.evaluation.best_checkpoint import best_by
from mlx_parallm.rl_training.evaluation.comparison import BEFORE, compare
from mlx_parallm.rl_training.evaluation.heldout_rows import HeldOut, describe
from mlx_parallm.rl_training.evaluation.log import EvaluationLog
from mlx_parallm.rl_training.evaluation.schedule import (
    Evaluations,
    FallGuard,
    evaluation_sources,
)
from mlx_parallm.rl_training.events import (
    EvaluationFinished,
    Noted,
    Outcome,
    RolledBack,
    RunEvents,
    RunFinished,
    RunInfo,
    RunStarted,
    SamplesWritten,
    StepFinished,
    WeightsPublished,
)
from mlx_parallm.rl_training.factory import build_buffer, build_teachers, build_trainer
from mlx_parallm.rl_training.group_fit import LogprobMismatchCheck
from mlx_parallm.rl_training.loop import Batches, Parts, RunControl, TrainingLoop
from mlx_parallm.rl_training.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.rl_training.monitor import report
from mlx_parallm.rl_training.monitor.display import TrainingDisplay
from mlx_parallm.rl_training.monitor.samples import (
    SAMPLES_FILE,
    SAMPLES_PAGE,
    SampleLog,
    without_template,
)
from mlx_parallm.rl_training.monitor.spans import SpanLog
from mlx_parallm.rl_training.monitor.tokens import TokenLog
from mlx_parallm.rl_training.monitor.trackers import TrackedRun, Trackers, check_installed
from mlx_parallm.rl_training.plan.memory_watch import MemoryWatch
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.rl_training.publish.rollback import Rollbacks, RollbackService
from mlx_parallm.rl_training.publish.versions import VersionNumbers, VersionSteps
from mlx_parallm.rl_training.run_directory import STORE_FILE, DiskUse, RunDirectory, moment
from mlx_parallm.rl_training.sources import (
    POLICY,
    RolloutSource,
    Served,
    SourceContext,
    SourceKind,
    Sources,
)
from mlx_parallm.rl_training.step.algorithms import make_algorithm
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.prepare import check_kv_bits
from mlx_parallm.rl_training.step.ranks import ALONE, Ranks
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rl_training.weight_updater import WeightUpdater, drained
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.files import GB, reserve_bytes
from mlx_parallm.system.log import FILE_ONLY, RunLog, get_logger
from mlx_parallm.system.signals import EndLimit
from mlx_parallm.system.terminal import Console
from mlx_parallm.system.turns import Turns
from mlx_parallm.weights import PublishReport, SharedWeights, VersionArchive

END_S = 60.0  # after the last checkpoint, beside the drain: trackers, pictures, joins
log = get_logger("train")


class PolicyServer(Served, Protocol):
    """The serving half of the process, as a run uses it: `daemon.Serving`."""

    @property
    def url(self) -> str: ...
    @property
    def needs_key(self) -> bool: ...
    @property
    def model_path(self) -> Path: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def image_reader(self) -> ImageReader | None: ...
    @property
    def turns(self) -> Turns: ...
    def page_urls(self, *, with_key: bool) -> Sequence[str]: ...
    def listen(
        self,
        sources: Iterable[RolloutSource],
        rollbacks: RollbackService,
        routers: Iterable[Any],
        *,
        run: Path,
        commands: RunCommands,
    ) -> None: ...
    def load(self, *, quantize: bool) -> LoadedModel: ...
    def open(
        self,
        loaded: LoadedModel,
        weights: SharedWeights,
        *,
        adapters: Mapping[str, Mapping[str, LoraPair]],
        main_adapter: str | None,
        trains_base: bool,
        adapter_roots: Sequence[Path],
        record_experts: bool,
        record_prompt_experts: bool,
    ) -> None: ...
    def observe_publish(self, report: PublishReport) -> None: ...
    def watch_tools(self, counts: Callable[[], Mapping[str, float]]) -> None: ...
    def check(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class StartedRun:
    """Hold what `TrainingRun.start` has built; everything serves and plays by now."""

    directory: RunDirectory
    store: RolloutStore
    sources: Sources
    parts: Parts
    state: TrainerState | None
    commands: RunCommands


class TrainingRun:
    """One run of `mlx_parallm train`. Main thread only.

    Args:
        serve: makes the serving half; it takes the port at once.
        source_kinds: where rollouts may come from, besides rows of a file.
        wants_checkpoint: asked after each step, besides checkpoint_interval.
        fit: counts the steps of a run on rows, once it is known how many of them are trained on.

    Raises ConfigError, CheckpointError: before anything is started or written.
    """

    def __init__(
        self,
        config: Config,
        *,
        resume: str | None,
        stop: threading.Event,
        console: Console,
        serve: Callable[[Config], PolicyServer],
        source_kinds: Sequence[SourceKind],
        run_log: RunLog | None = None,
        ranks: Ranks = ALONE,
        wants_checkpoint: Callable[[], bool] = lambda: False,
        fit: Fit | None = None,
    ) -> None:
        self._stop, self._console, self._run_log = stop, console, run_log or RunLog()
        self._wants_checkpoint, self._fit = wants_checkpoint, fit
        self._source_kinds, self._ranks = source_kinds, ranks
        check_installed(config.logging)
        config, self._checkpoint, self._start_over = what_to_resume(config, resume)
        check_kv_bits(config)
        self.config, training = config, config.rl_training
        self._closing = ExitStack()
        self.tools = self._open_tools()
        with ExitStack() as failed:  # nobody closes a run whose constructor has raised
            failed.callback(self._closing.close)
            self.environments = build_sources(
                config.environments, seed=training.seed, progress=self._progress, tools=self.tools
            )
            self._evaluated = evaluation_sources(
                config, self.environments, self._progress, self.tools
            )
            for source in self.environments:
                source.keeps_rows = training.distillation.reads_rows
            # the user's code is checked before a model is loaded
            self._algorithm = make_algorithm(training)
            self.serving = serve(config)
            failed.pop_all()
        self._end, self._ends_process = EndLimit(), False
        self._closing.callback(self._end.cancel)
        self._closing.callback(self.serving.close)
        self._began = False
        self.events = RunEvents()
        self._loop: TrainingLoop | None = None
        self.weights: SharedWeights | None = None
        # (layers, experts a token, experts) that the trainer repeats
        self._experts: tuple[int, int, int] | None = None
        self._disk: DiskUse | None = None
        self.data: DataSource | None = None
        self._heldout: HeldOut | None = None
        self._evaluations: Evaluations | None = None
        self._rollbacks = RollbackService()

    def execute(self) -> None:
        """Train to total_steps or to the stop; leave a checkpoint either way. The process should
        end after it."""
        self._ends_process = True
        started = self.start()
        if started is not None:
            self.train(started)

    def start(self) -> StartedRun | None:
        """Build everything and start the sources; None: a stop was requested meanwhile."""
        config = self.config
        quantize = config.rl_training.lora.enabled and config.rl_training.lora.quantize_base
        model_config = check_model(config.model, train=True, quantize=quantize)
        planned = PlannedRun.of(config, model_config)
        self._memory = MemoryWatch.checked(planned, processes=self._ranks.here)
        if config.rl_training.algorithm in DATA_ALGORITHMS:
            self.data = DataSource(config, self.serving.tokenizer())
            config = self.config = self.data.with_total_steps(self._fit)
        self._ranks.begin(config)
        initial = None if self._checkpoint else initial_adapter(config)
        directory = RunDirectory.open(config, self._checkpoint, reuse=self._start_over)
        self._closing.callback(lambda: None if self._began else directory.discard())
        self._closing.callback(directory.close)
        self._run_log.open(directory.path)
        reserve = reserve_bytes(directory.path, config.rollouts.min_free_gb)
        store_file = directory.path / STORE_FILE
        if (
            self._checkpoint
            and self.data is None
            and not (store_file.is_file() and store_file.stat().st_size)
        ):
            log.warning(
                "accepted groups are lost: there is no file of rollouts, or it is empty",
                file=str(store_file),
            )
        store = RolloutStore(store_file, min_free_bytes=reserve)
        self._closing.callback(store.close)
        self._disk = DiskUse(
            directory, store, config.rollouts, keep=config.rl_training.keep_checkpoints
        )
        self._disk.check()
        self._closing.callback(self.serving.close)  # before the store, which requests write to
        step, _ = moment(self._checkpoint) if self._checkpoint else (0, 0)
        self._spans = SpanLog(
            directory.path, step=step, most_bytes=round(config.logging.tokens_gb * GB / 16)
        )
        sources = self._make_sources(directory, store)
        if self.tools is not None:
            self.serving.watch_tools(self.tools.client.metrics)
        routers = [
            router for source in self.environments if (router := source.router()) is not None
        ]
        commands = RunCommands(
            directory.path,
            self._stop,
            config=lambda: self.config,
            step=self._step,
            alone=self._ranks.size == 1,
        )
        self._closing.callback(commands.close)
        self.serving.listen(
            sources, self._rollbacks, routers, run=directory.path, commands=commands
        )
        loaded = self.serving.load(quantize=quantize)
        parts, state = self._training_parts(loaded, initial, directory, store, sources)
        directory.write_config(config)
        if self._stop.is_set():
            return None
        self._began = True
        if state is not None and (
            overridden := overridden_settings(changeable(config), state.changes)
        ):
            state = replace(
                state, changes=[*state.changes, {"step": state.step, "settings": overridden}]
            )
        started = StartedRun(directory, store, sources, parts, state, commands)
        if state is not None and (values := restored_settings(changeable(config), state.changes)):
            parts.trainer.change(values)
            self._keep_settings(started, values)
        return started

    def _keep_settings(self, started: StartedRun, values: Mapping[str, float]) -> None:
        """Settings that the trainer has changed: the configuration, and where answers are
        sampled."""
        self.config = with_settings(self.config, values)
        started.directory.write_config(self.config)
        if "temperature" in values:
            started.sources.use_temperature(values["temperature"])

    def evaluate(self, started: StartedRun) -> dict[str, float]:
        """Measure the weights as they are now on what is held out, as keys of a metrics line;
        not while they train."""
        if self._heldout is not None:
            return self._heldout.numbers()
        return self._evaluating(started).now(self._step())

    def close(self) -> None:
        """Ends what was started: sources, HTTP, engine, store. A start that failed leaves no
        directory."""
        self._closing.close()

    # ------------------------------------------------------------------ building

    def _open_tools(self) -> EpisodeTools | None:
        """Start the servers of [tools], where there is an environment. Raises ConfigError."""
        tools = open_tools(self.config.tools) if self.config.evaluated else None
        if tools is not None:
            self._closing.callback(tools.client.close)
        return tools

    def _make_sources(self, directory: RunDirectory, store: RolloutStore) -> Sources:
        if self.data is not None:  # nothing is sampled for training, so there is nothing to hand in
            return Sources([self.data])
        context = SourceContext(
            self.config,
            directory.path,
            store,
            self.serving.vocab_size,
            self.environments,
            current_step=self._step,
            policy_version=lambda: self.weights.version if self.weights else 0,
            on_times=self._spans.add,
            players=self._ranks.players,
            experts=lambda: self._experts,
            images=self.serving.image_reader,
        )
        return Sources(kind(context) for kind in self._source_kinds)

    def _training_parts(
        self,
        loaded: LoadedModel,
        initial: dict[str, LoraPair] | None,
        directory: RunDirectory,
        store: RolloutStore,
        sources: Sources,
    ) -> tuple[Parts, TrainerState | None]:
        training = self.config.rl_training
        trainer = build_trainer(
            loaded,
            training,
            self._algorithm,
            initial_adapter=initial,
            between_blocks=self.serving.turns.after_evaluation,
            ranks=self._ranks,
            kv_bits=self.config.server.kv_bits,
        )
        policy = trainer.policy
        self._experts = policy.experts if policy.replays_experts else None
        policy.described = self._described()
        teachers = build_teachers(
            trainer,
            self.config.model,
            loaded,
            between_blocks=self.serving.turns.after_evaluation,
        )
        if teachers is not None:
            self._closing.callback(teachers.close)
        learners = {
            source.name: source.learner
            for source in self.environments
            if source.learner is not None
        }
        metrics = MetricsFile(directory.path / METRICS_FILE)
        self._evaluation_log = EvaluationLog(
            directory.path,
            best_by(training.keep_best, self.config.evaluation),
            self._run_log.redactor.value,
        )
        checkpointer = Checkpointer(
            directory.path,
            policy,
            trainer.optimizer,
            keep=training.keep_checkpoints,
            keep_best=bool(training.keep_best),
            judge=self._evaluation_log,
            learners=learners,
        )
        state = checkpointer.resume(self._checkpoint, store, metrics) if self._checkpoint else None
        self._evaluation_log.cut(state.step if state else 0)
        # a run that was killed before its first checkpoint: its groups are there, its steps not
        if self._start_over:
            store.restore(0)
            metrics.cut(0)
        numbers = VersionNumbers(store)
        served = checkpointer.served(self._checkpoint, state) if self._checkpoint and state else {}
        versions = (
            state.restored_versions(numbers, served_known=bool(served)) if state else VersionSteps()
        )
        with (
            policy.serving(served, self._checkpoint)
            if served and self._checkpoint
            else nullcontext()
        ):
            weights = self.weights = open_serving(
                self.serving,
                loaded,
                policy,
                version=versions.newest[0],
                keep_versions=self.config.server.keep_versions,
                archive=CheckpointVersions(directory.path),
                adapter_roots=(directory.path.parent,),
            )
            self._ranks.publish(weights.version, trainer)
        updater = WeightUpdater(
            weights,
            trainer,
            versions,
            numbers=numbers,
            drained=lambda: drained(
                self._ranks.clients_engine(self.serving.client), self._stop.is_set
            ),
            events=self.events,
        )
        if served and state:
            updater.resume(
                served, due=state.publish_is_due(training.weight_updates.update_every_n_steps)
            )
        rollbacks = Rollbacks(self._rollbacks, directory.path, trainer, updater)
        self._closing.callback(store.wake)
        self._closing.callback(sources.stop)
        sources.start(self.serving, state)
        batches = self._batches(trainer, store, versions, sources)
        states = sources.keeping_state()
        parts = Parts(
            trainer, batches, versions, updater, checkpointer, metrics, states, rollbacks, learners
        )
        return parts, state

    def _described(self) -> dict[str, str]:
        """Return the texts that lie beside the weights in each checkpoint, by file name."""
        config = self.config
        if config.rl_training.algorithm != REWARD_MODEL:
            return {}
        card = RewardModelCard.of_run(
            config.model,
            config.data,
            self.serving.tokenizer(),
            lora=config.rl_training.lora.enabled,
            quantized=config.rl_training.lora.enabled and config.rl_training.lora.quantize_base,
        )
        return {CARD_FILE: card.to_text()}

    def _batches(
        self, trainer: Trainer, store: RolloutStore, versions: VersionSteps, sources: Sources
    ) -> Batches:
        """Return what the loop takes its batches from."""
        if self.data is not None:
            self._heldout = self.data.heldout(trainer)
            return self.data.batches(trainer)
        return build_buffer(
            store,
            versions,
            trainer,
            self.config.rl_training,
            group_sizes=[source.config.group_size for source in self.environments],
            request_groups=sources.request if self.environments else None,
            minimums=sources.minimums,
            is_mismatched=LogprobMismatchCheck(trainer),
        )

    # ------------------------------------------------------------------ running

    def train(self, started: StartedRun) -> None:
        """Train what `start` has built."""
        directory, parts, state = started.directory, started.parts, started.state
        tokenizer = self.serving.tokenizer()
        self._display(started, tokenizer)
        events, metrics = self.events, MetricsFile(directory.path / METRICS_FILE)
        if self._heldout is not None and (state is None or state.step == 0):
            events.emit(Noted(f"held-out rows before training: {describe(self._heldout.before())}"))
        events.subscribe(WeightsPublished, lambda event: self.serving.observe_publish(event.report))
        self._memory.subscribe(events)

        def mark(event: RolledBack) -> None:
            started.commands.mark("rollback", f"rolled back to {event.to}")

        events.subscribe(RolledBack, mark)
        most_bytes = round(self.config.logging.tokens_gb * GB)
        token_log = TokenLog(directory.path, step=state.step if state else 0, most_bytes=most_bytes)
        self._closing.callback(token_log.close)
        token_log.subscribe(events)
        self._spans.subscribe(events)
        self._closing.callback(self._spans.flush)
        self._subscribe_samples(directory, state, tokenizer)
        self._trackers(directory, state).subscribe(events)
        if self._disk is not None:
            self._disk.subscribe(events)
        evaluations = self._evaluating(started)
        events.subscribe(
            EvaluationFinished,
            lambda event: parts.checkpointer and parts.checkpointer.point_at_best(),
        )
        self._guard_falls(events)
        events.subscribe(RunFinished, lambda event: self._report(metrics, directory, event.outcome))
        lines = list(metrics.read())
        events.emit(RunStarted(self._run_info(directory, state), lines))
        control = RunControl(
            should_stop=self._stop.is_set,
            before_step=self._check_disk,
            between_steps=lambda: self._perform(started),
            while_waiting=lambda: self.check(started.sources),
            training=self.serving.turns.training,
            measure=lambda step: self._measure(step, evaluations),
            after_step=lambda line: (
                evaluations.wants_checkpoint(line["step"]) or self._wants_checkpoint()
            ),
            served_tokens=lambda: (
                self.serving.client.stats().generation_tokens + self._ranks.served_tokens()
            ),
        )
        evaluations.begin(state, lines)
        self._loop = TrainingLoop(parts, control=control, events=events, state=state)
        if state is None and self.config.evaluation.max_fall is not None:
            self._loop.save_now()  # the weights at the start may turn out to be the best
        try:
            outcome = self._loop.run()
        finally:
            self._rollbacks.close()
            started.commands.close()
        if outcome == "stopped":
            self._end_soon()
        evaluations.finish()
        events.emit(RunFinished(outcome))
        self._end_soon()
        self._ranks.check()

    def _guard_falls(self, events: RunEvents) -> None:
        """Let the weights go back to the best ones when an evaluation falls, where that is
        asked for."""
        if (most := self.config.evaluation.max_fall) is None:
            return

        def roll_back(version: int) -> None:
            self._rollbacks.request(version=version)

        FallGuard(self._evaluation_log, most, roll_back).subscribe(events)

    def _perform(self, started: StartedRun) -> None:
        """Do what was ordered of the run."""
        assert self._loop is not None, "the loop asks"
        started.commands.perform(self._loop, lambda values: self._keep_settings(started, values))

    def _measure(self, step: int, evaluations: Evaluations) -> dict[str, Any]:
        """Return what a metrics line has beside the trainer's numbers."""
        rows = self._heldout.measure(step) if self._heldout else {}
        return {
            **rows,
            **evaluations.measure(step),
            **(self.tools.new_counts() if self.tools else {}),
        }

    def _end_soon(self) -> None:
        """The last checkpoint is written: what is left may not take long, where the process has
        nothing else to do."""
        if not self._ends_process:
            return
        event, why = (
            "ended at once",
            "the end took too long: does a reward function or environment not return?",
        )
        seconds = END_S + self.config.server.drain_timeout_s
        self._end.start(seconds, lambda: log.warning(event, reason=why, seconds=seconds))

    def _display(self, started: StartedRun, tokenizer: Tokenizer) -> None:
        def health() -> list[str | None]:
            # then nothing else is the reason for waiting
            if CLIENTS in self.serving.client.stats().holders:
                return [
                    "paused by a client: POST /resume, or Resume on the dashboard, goes on",
                    self._memory.health(),
                ]
            teachers = started.parts.trainer.teachers
            return [
                *started.sources.health(),
                started.parts.buffer.health(),
                teachers.health() if teachers is not None else None,
                self._memory.health(),
            ]

        readable = without_template(tokenizer, self.config.model.chat_template_kwargs)
        # a file's readers are not known
        pages = self.serving.page_urls(with_key=self._console.is_terminal)
        display = TrainingDisplay(self._console, sources=health, readable=readable, pages=pages)
        self._closing.callback(display.stop)
        display.subscribe(self.events)

    def _trackers(self, directory: RunDirectory, state: TrainerState | None) -> Trackers:
        tracking, redactor = self.config.logging, self._run_log.redactor
        config = redactor.value(self.config.redacted())
        run = TrackedRun(directory.path, tracking.project, config, step=state.step if state else 0)
        trackers = Trackers(tracking.trackers, run)
        self._closing.callback(trackers.close)
        return trackers

    def _subscribe_samples(
        self, directory: RunDirectory, state: TrainerState | None, tokenizer: Tokenizer
    ) -> None:
        hide = self._run_log.redactor.text
        sample_log = SampleLog(
            directory.path / SAMPLES_FILE,
            lambda parts: [hide(text) for text in tokenizer.decode_parts(parts)],
            every=self.config.logging.sample_every,
            step=state.step if state else 0,
        )

        def write(event: StepFinished) -> None:
            if samples := sample_log.write(event.batch):
                self.events.emit(SamplesWritten(event.batch.step, samples))

        self.events.subscribe(StepFinished, write)

    def _check_disk(self) -> None:
        if self._disk is not None:
            self._disk.check()

    def check(self, sources: Sources) -> None:
        """Raise the error that ended a source, the server or another rank, or that the disk is
        nearly full."""
        self._ranks.check(self._stop)
        self.serving.check()
        self._check_disk()
        sources.check()

    def _evaluating(self, started: StartedRun) -> Evaluations:
        if self._evaluations is not None:
            return self._evaluations
        assert self.weights is not None, "the engine serves by now"
        self._evaluations = evaluations = Evaluations(
            self.config,
            started.directory.path,
            self._evaluation_log,
            (self._evaluated, self.environments),
            client=self.serving.client,
            tokenizer=self.serving.tokenizer(),
            weights=self.weights,
            versions=started.parts.versions,
            policy=POLICY if self.config.rl_training.lora.enabled else None,
            events=self.events,
            should_stop=self._stop.is_set,
            while_waiting=lambda: self.check(started.sources),
        )
        self._closing.callback(evaluations.stop)
        return evaluations

    def _report(self, metrics: MetricsFile, directory: RunDirectory, outcome: Outcome) -> None:
        lines, evaluations, finished = (
            list(metrics.read()),
            self._evaluation_log.done(),
            outcome == "finished",
        )
        curve = None
        if any(line["reward_mean"] is not None for line in lines):
            try:
                curve = report.write_reward_curve(
                    lines, directory.path / "reward.png", title=directory.path.name
                )
            except OSError as error:
                log.warning("the reward curve cannot be written", error=str(error))
        if finished and not report.has_trained(lines):
            commands = []  # the result is the base model: there is nothing new to serve
        elif finished:
            training, base = self.config.rl_training, self.config.model.base_path
            lora, scores = training.lora.enabled, training.algorithm == REWARD_MODEL
            commands = report.next_commands(directory.path, base, lora=lora, scores=scores)
        else:
            commands = [f"{report.our_command()} train --resume {directory.path}"]
        comparisons = (
            compare(evaluations[0], evaluations[-1]) if finished and len(evaluations) > 1 else []
        )
        samples = directory.path / SAMPLES_PAGE
        self._memory.tell(self._console)
        problems = report.problems_of(lines, directory.path)
        for problem in problems:
            log.warning(problem, **{FILE_ONLY: True})  # the report shows them
        first = (
            (f"after step {evaluations[0]['step']}")
            if comparisons and evaluations[0]["step"]
            else BEFORE
        )
        shown = samples if samples.is_file() else None
        successes = report.successes_of(lines)
        report.print_report(
            self._console, comparisons, commands, curve, shown, problems, successes, first=first
        )

    def _run_info(self, directory: RunDirectory, state: TrainerState | None) -> RunInfo:
        evaluation, rows = (
            self.config.evaluation,
            self._heldout is not None and self._heldout.measures,
        )
        return RunInfo(
            run_name=directory.path.name,
            model=self.config.model.base_path,
            base_url=self.serving.url,
            total_steps=self.config.rl_training.total_steps,
            example_prompt=self.data.example_prompt
            if self.data is not None
            else _example_prompt(self.environments),
            start_step=state.step if state else 0,
            needs_key=self.serving.needs_key,
            checkpoint_every=self.config.rl_training.checkpoint_interval,
            evaluate_every=evaluation.every
            if evaluation.problems
            else self.config.data.eval_every
            if rows
            else 0,
            evaluates_at_end=(evaluation.problems > 0 and evaluation.at_end) or rows,
        )

    def _step(self) -> int:
        return self._loop.step if self._loop else 0

    def _progress(self) -> TrainingProgress:
        """Return the progress that reward functions may read."""
        return TrainingProgress(self._step(), self.config.rl_training.total_steps)


def open_serving(
    serving: PolicyServer,
    loaded: LoadedModel,
    policy: TrainedPolicy,
    *,
    version: int,
    keep_versions: int,
    archive: VersionArchive | None = None,
    adapter_roots: Sequence[Path] = (),
) -> SharedWeights:
    """Let the server answer with what is being trained, as `version`. Arguments:
    `SharedWeights`, `daemon.Serving`."""
    if policy.lora:
        weights = SharedWeights(
            loaded.model,
            policy=POLICY,
            version=version,
            keep_versions=keep_versions,
            archive=archive,
        )
        adapters = {POLICY: policy.adapter()}
    else:
        weights = SharedWeights(loaded.model, version=version - 1, keep_versions=1)
        weights.publish_parameters(policy.full_parameters())
        adapters = {}
    main_adapter = POLICY if policy.lora else None
    serving.open(
        loaded,
        weights,
        adapters=adapters,
        main_adapter=main_adapter,
        trains_base=not policy.lora,
        adapter_roots=adapter_roots,
        record_experts=policy.replays_experts,
        record_prompt_experts=policy.replays_prompts,
    )
    return weights


def _example_prompt(sources: tuple[EnvironmentSource, ...]) -> str:
    if not sources:
        return "Hello!"
    [task] = sources[0].heldout(1) or [sources[0].task(0)]
    return text_of(task.messages[-1]["content"])
