"""StartedRun, the second stage of a run: everything serves and plays.

    rows → run directory → store → sources of rollouts, HTTP → model, trainer, weights → engine
    → sources start → buffer

A start that failed, or that a stop request ended, leaves no directory that it has made.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mlx_parallm.config.data import DATA_ALGORITHMS, REWARD_MODEL
from mlx_parallm.config.load import Config
from mlx_parallm.models.loading import LoadedModel, check_model
from mlx_parallm.models.scoring.card import CARD_FILE, RewardModelCard
from mlx_parallm.models.scoring.reward_model import load_shared_scorers
from mlx_parallm.rl_training.checkpoint import CheckpointVersions
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.rl_training.data.heldout_rows import HeldOut
from mlx_parallm.rl_training.data.source import DataSource
from mlx_parallm.rl_training.evaluation.schedule import Evaluations
from mlx_parallm.rl_training.factory import build_buffer, build_companions, build_trainer
from mlx_parallm.rl_training.group_fit import LogprobMismatchCheck
from mlx_parallm.rl_training.initial_adapter import initial_adapter
from mlx_parallm.rl_training.loop import Batches, Parts
from mlx_parallm.rl_training.plan.memory_watch import MemoryWatch
from mlx_parallm.rl_training.plan.preflight import PlannedRun, room_for_evaluations
from mlx_parallm.rl_training.publish.rollback import RollbackService
from mlx_parallm.rl_training.publish.weight_updater import drained
from mlx_parallm.rl_training.run.assembly import (
    PublishedWeights,
    RunFiles,
    make_parts,
    open_files,
)
from mlx_parallm.rl_training.run.prepare import PreparedRun
from mlx_parallm.rl_training.run.serving import open_serving
from mlx_parallm.rl_training.sources import POLICY, SourceContext, Sources
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.best_checkpoint import best_by
from mlx_parallm.run_files.directory import STORE_FILE, DiskUse, RunDirectory
from mlx_parallm.run_files.evaluations import EvaluationLog
from mlx_parallm.run_files.resume import note_base, overridden_settings, restored_settings
from mlx_parallm.run_files.spans import SpanLog
from mlx_parallm.run_files.trainer_state import RecordedChange, TrainerState
from mlx_parallm.run_files.versions import VersionNumbers
from mlx_parallm.system.files import GB, reserve_bytes
from mlx_parallm.system.log import get_logger
from mlx_parallm.weights import SharedWeights

log = get_logger("train")


@dataclass(frozen=True)
class OpenDirectory:
    """The directory of a run, and its files open from the start."""

    directory: RunDirectory
    store: RolloutStore
    disk: DiskUse
    spans: SpanLog

    @property
    def path(self) -> Path:
        return self.directory.path


@dataclass(frozen=True)
class StartedRun:
    """A run whose loop may begin. Main thread only.

    `state`: of the checkpoint that the run continues from; None: it begins. `data`, `heldout`: of a
    run on rows; None: it learns from rollouts.
    """

    prepared: PreparedRun
    opened: OpenDirectory
    memory: MemoryWatch
    sources: Sources
    commands: RunCommands
    rollbacks: RollbackService
    weights: SharedWeights
    evaluation_log: EvaluationLog
    parts: Parts
    state: TrainerState | None
    data: DataSource | None
    heldout: HeldOut | None

    @property
    def config(self) -> Config:
        """The configuration as it is now: people may change settings."""
        return self.commands.config

    @property
    def first_step(self) -> int:
        """The number of steps that the run continues from."""
        return self.state.step if self.state is not None else 0

    @cached_property
    def evaluations(self) -> Evaluations:
        """The evaluations of held-out problems, made when they are first needed."""
        prepared, serving, config = self.prepared, self.prepared.serving, self.config
        evaluations = Evaluations(
            config.evaluation,
            config.rl_training,
            config.model,
            self.opened.path,
            self.evaluation_log,
            (prepared.evaluated, prepared.environments),
            client=serving.client,
            tokenizer=serving.tokenizer(),
            weights=self.weights,
            versions=self.parts.versions,
            policy=POLICY if config.rl_training.lora.enabled else None,
            events=prepared.events,
            should_stop=prepared.stop.is_set,
            while_waiting=self.check,
        )
        prepared.closing.callback(evaluations.stop)
        return evaluations

    def evaluate(self) -> Mapping[str, float | None]:
        """Measure the present weights on held-out rows, as keys of a metrics line; not
        while they train."""
        if self.heldout is not None:
            return self.heldout.numbers()
        return self.evaluations.now(self.prepared.live.step())

    def check(self) -> None:
        """Raise the error that ended a source, the server or another rank, or that the disk is
        nearly full."""
        self.prepared.ranks.check(self.prepared.stop)
        self.prepared.serving.check()
        self.opened.disk.check()
        self.sources.check()

    def keep_settings(self, values: Mapping[str, float]) -> None:
        """Note settings that the trainer has changed: in the configuration, and where answers are
        sampled."""
        self.commands.keep(values)
        directory = self.opened.directory
        directory.write_config(self.config.saved_as(directory.path.name))
        if "temperature" in values:
            self.sources.use_temperature(values["temperature"])


def start_run(prepared: PreparedRun) -> StartedRun | None:
    """Build everything and start the sources; None: a stop was requested meanwhile."""
    config, serving, closing = prepared.config, prepared.serving, prepared.closing
    quantize = config.rl_training.lora.enabled and config.rl_training.lora.quantize_base
    planned, memory = _planned(prepared, quantize=quantize)
    data = _read_rows(prepared)
    if data is not None:
        config = prepared.counted_by(data)
    prepared.ranks.begin(config)
    training = config.rl_training
    initial = (
        None
        if prepared.checkpoint
        else initial_adapter(config.model, training.lora, training.checkpoint_dir)
    )
    opened = _open_directory(prepared, keeps_groups=data is None)
    # nothing is sampled for training on rows, so there is nothing to hand in
    sources = Sources([data]) if data is not None else _make_sources(prepared, opened)
    commands = RunCommands(
        opened.path,
        prepared.stop,
        config,
        step=prepared.live.step,
        alone=prepared.ranks.size == 1,
    )
    closing.callback(commands.close)
    rollbacks = RollbackService()
    _listen(prepared, opened, sources, rollbacks, commands)
    loaded = serving.load(quantize=quantize)
    note_base(opened.store, serving.model_path)
    trainer = build_trainer(
        loaded,
        training,
        prepared.algorithm,
        eval_bytes=planned.eval_bytes,
        initial_adapter=initial,
        between_blocks=serving.turns.after_evaluation,
        ranks=prepared.ranks,
        kv_bits=config.server.kv_bits,
    )
    _complete(trainer, prepared, loaded)
    evaluation_log = EvaluationLog(
        opened.path,
        best_by(training.keep_best, config.evaluation),
        prepared.run_log.redactor.value,
    )
    files = _resume(
        prepared,
        opened,
        trainer,
        evaluation_log,
        keep=training.keep_checkpoints,
        keep_best=bool(training.keep_best),
    )
    published = _publish(prepared, opened, loaded, trainer, files)
    closing.callback(opened.store.wake)
    closing.callback(sources.stop)
    sources.start(serving, files.state)
    heldout = data.heldout(trainer, training.total_steps) if data is not None else None
    parts = make_parts(
        trainer,
        training,
        published,
        data.batches(trainer)
        if data is not None
        else _rollout_batches(prepared, opened, trainer, published, sources),
        files,
        drained=lambda: drained(
            prepared.ranks.clients_engine(serving.client), prepared.stop.is_set
        ),
        events=prepared.events,
        sources=sources.keeping_state(),
        rollbacks=rollbacks,
    )
    opened.directory.write_config(config.saved_as(opened.path.name))
    if prepared.stop.is_set():
        return None
    opened.directory.keep()
    state, values = _with_changes(files.state, training.changeable())
    started = StartedRun(
        prepared=prepared,
        opened=opened,
        memory=memory,
        sources=sources,
        commands=commands,
        rollbacks=rollbacks,
        weights=published.shared,
        evaluation_log=evaluation_log,
        parts=parts,
        state=state,
        data=data,
        heldout=heldout,
    )
    if values:
        trainer.change(values)
        started.keep_settings(values)
    return started


def _planned(prepared: PreparedRun, *, quantize: bool) -> tuple[PlannedRun, MemoryWatch]:
    """Return the run's needs, compared with the available memory. Raises ConfigError."""
    config, processes = prepared.config, prepared.ranks.here
    deterministic = config.rl_training.deterministic
    planned = PlannedRun.of(
        config,
        check_model(config.model, train=True, quantize=quantize),
        room=room_for_evaluations(deterministic=deterministic, processes=processes),
    )
    return planned, MemoryWatch.checked(planned, processes=processes)


def _read_rows(prepared: PreparedRun) -> DataSource | None:
    """Return the rows that the run learns from; None: it learns from rollouts."""
    config, training = prepared.config, prepared.config.rl_training
    if training.algorithm not in DATA_ALGORITHMS:
        return None
    return DataSource(
        config.data,
        training.algorithm,
        training.preference,
        prepared.serving.tokenizer(),
        config.model.chat_template_kwargs,
    )


def _open_directory(prepared: PreparedRun, *, keeps_groups: bool) -> OpenDirectory:
    """Open the run directory and its store, which HTTP requests write to."""
    config, checkpoint, closing = prepared.config, prepared.checkpoint, prepared.closing
    training = config.rl_training
    directory = RunDirectory.open(
        training.checkpoint_dir, training.run_name, checkpoint, reuse=prepared.start_over
    )
    closing.callback(directory.discard)
    closing.callback(directory.close)
    prepared.run_log.open(directory.path)
    reserve = reserve_bytes(directory.path, config.rollouts.min_free_gb)
    store_file = directory.path / STORE_FILE
    is_there = store_file.is_file() and store_file.stat().st_size > 0
    if checkpoint and keeps_groups and not is_there:
        log.warning(
            "accepted groups lost: rollouts.sqlite is missing or empty",
            file=str(store_file),
        )
    store = RolloutStore(store_file, min_free_bytes=reserve)
    closing.callback(store.close)
    disk = DiskUse(directory, store, config.rollouts, keep=training.keep_checkpoints)
    disk.check()
    closing.callback(prepared.serving.close)  # before the store, which requests write to
    step = TrainerState.read(checkpoint).step if checkpoint else 0  # the name may be `final`
    most_bytes = round(config.logging.tokens_gb * GB / 16)
    return OpenDirectory(
        directory, store, disk, SpanLog(directory.path, step=step, most_bytes=most_bytes)
    )


def _make_sources(prepared: PreparedRun, opened: OpenDirectory) -> Sources:
    live = prepared.live
    context = SourceContext(
        prepared.config,
        opened.path,
        opened.store,
        prepared.serving.vocab_size,
        prepared.environments,
        current_step=live.step,
        policy_version=live.policy_version,
        on_times=opened.spans.add,
        players=prepared.ranks.players,
        experts=lambda: live.experts,
        image_reader=prepared.serving.image_reader,
    )
    return Sources(kind(context) for kind in prepared.source_kinds)


def _listen(
    prepared: PreparedRun,
    opened: OpenDirectory,
    sources: Sources,
    rollbacks: RollbackService,
    commands: RunCommands,
) -> None:
    """Let HTTP answer; /health says that the model is loading."""
    if prepared.tools is not None:
        prepared.serving.watch_tools(prepared.tools.client.metrics)
    routers = [
        router
        for source in prepared.environments
        if (router := source.router(source.name)) is not None
    ]
    prepared.serving.listen(sources, rollbacks, routers, run=opened.path, commands=commands)


def _complete(trainer: Trainer, prepared: PreparedRun, loaded: LoadedModel) -> None:
    """Give a new trainer what lies beside its weights in a checkpoint, and its companions."""
    policy = trainer.policy
    prepared.live.experts = policy.experts.shape if policy.experts.sampled else None
    policy.described = _described(prepared)
    build_companions(
        trainer,
        prepared.config.rl_training,
        prepared.config.model,
        loaded,
        between_blocks=prepared.serving.turns.after_evaluation,
    )
    for companion in trainer.companions.values():
        prepared.closing.callback(companion.close)


def _described(prepared: PreparedRun) -> dict[str, str]:
    """Return the texts that lie beside the weights in each checkpoint, by file name."""
    config, lora = prepared.config, prepared.config.rl_training.lora
    if config.rl_training.algorithm != REWARD_MODEL:
        return {}
    card = RewardModelCard.of_run(
        config.model,
        config.data,
        prepared.serving.tokenizer(),
        lora=lora.enabled,
        quantized=lora.enabled and lora.quantize_base,
    )
    return {CARD_FILE: card.to_text()}


def _resume(
    prepared: PreparedRun,
    opened: OpenDirectory,
    trainer: Trainer,
    evaluation_log: EvaluationLog,
    *,
    keep: int,
    keep_best: bool,
) -> RunFiles:
    """Restore trainer, store and files to the run's last step."""
    files = open_files(
        opened.path,
        trainer,
        opened.store,
        checkpoint=prepared.checkpoint,
        keep=keep,
        keep_best=keep_best,
        judge=evaluation_log,
        learners={
            source.name: source.learner
            for source in prepared.environments
            if source.learner is not None
        },
    )
    evaluation_log.cut(files.step)
    # a run that was killed before its first checkpoint: its groups are there, its steps not
    if prepared.start_over:
        opened.store.restore(0)
        files.metrics.cut(0)
    return files


def _publish(
    prepared: PreparedRun,
    opened: OpenDirectory,
    loaded: LoadedModel,
    trainer: Trainer,
    files: RunFiles,
) -> PublishedWeights:
    """Let the server and the other ranks answer with the policy."""
    numbers, older = VersionNumbers(opened.store), files.served()
    versions = files.versions(numbers, served_known=bool(older))
    policy, checkpoint, config = trainer.policy, prepared.checkpoint, prepared.config
    base, faults = loaded if config.base_is_plain else None, prepared.serving.turns.faults
    load_shared_scorers(config.reward_models, base, faults)
    with policy.serving(older, checkpoint) if older and checkpoint else nullcontext():
        weights = open_serving(
            prepared.serving,
            loaded,
            policy,
            version=versions.newest[0],
            keep_versions=config.server.keep_versions,
            archive=CheckpointVersions(opened.path),
            adapter_roots=(opened.path.parent,),
        )
        prepared.live.serves(weights)
        prepared.ranks.publish(weights.version, trainer)
    return PublishedWeights(weights, versions, numbers, older)


def _rollout_batches(
    prepared: PreparedRun,
    opened: OpenDirectory,
    trainer: Trainer,
    published: PublishedWeights,
    sources: Sources,
) -> Batches:
    return build_buffer(
        opened.store,
        published.versions,
        trainer,
        prepared.config.rl_training,
        group_sizes=[source.config.group_size for source in prepared.environments],
        request_groups=sources.request if prepared.environments else None,
        minimums=sources.minimums,
        is_mismatched=LogprobMismatchCheck(trainer),
    )


def _with_changes(
    state: TrainerState | None, now: Mapping[str, float]
) -> tuple[TrainerState | None, dict[str, float]]:
    """Return the checkpoint's state with the settings that this resume changes on purpose, and
    those that the run continues with instead of `now`."""
    if state is None:
        return None, {}
    if overridden := overridden_settings(now, state.changes):
        change: RecordedChange = {"step": state.step, "settings": overridden}
        state = replace(state, changes=[*state.changes, change])
    return state, restored_settings(now, state.changes)
