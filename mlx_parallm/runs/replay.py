"""`mlx_parallm replay`: trains again on the rollouts of a run, without generating: other settings,
same data.

    run directory ─► its configuration, the checkpoint it starts from, its rollout store (reads
    only)
        each variant: model → trainer → steps on the groups that the run's steps took → a directory
        of its own → table

A variant's own samples are unknown: after its first update it learns from another
policy's answers.
"""

import math
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mlx_parallm.config.evaluation import PREFIX
from mlx_parallm.config.load import Config
from mlx_parallm.errors import CheckpointError, ConfigError, StoreError
from mlx_parallm.models.loaded_images import image_support, with_images
from mlx_parallm.models.loading import LoadedModel, check_model, load_model
from mlx_parallm.rl_training.checkpoint import OPTIMIZER_FILE, restore_random_state
from mlx_parallm.rl_training.factory import build_buffer, build_companions, build_trainer
from mlx_parallm.rl_training.initial_adapter import initial_adapter
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch
from mlx_parallm.rl_training.step.policy import read_tensors
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.directory import FINAL, RunDirectory, find_checkpoint
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile, complete
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.runs.run import Run, open_run
from mlx_parallm.system.files import write_directory
from mlx_parallm.system.terminal import Console
from mlx_parallm.types import RolloutGroup

CAVEAT = (
    "The rollouts are the run's: from its second update on a variant learns from answers that it"
    " would not have given."
    " Losses, gradients, clipping and speed can be compared; what it would have earned, only a"
    " run of its own shows."
)
SHOWN = (
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "clip_fraction",
    "ratio_mean",
    "grad_norm",
    "update_norm",
    "weights_moved",
    "tokens",
    "optimizer_updates",
    "skipped_steps",
    "time_train_s",
)
"""The known metrics of the table: means over the replayed steps."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """`changed`: its `key=value` overrides, "" = none. `lines`: its metrics, one a step."""

    changed: str
    directory: Path
    lines: list[Line]


@dataclass(frozen=True)
class Replay:
    """`run`: the metrics lines of the run itself, of the same steps."""

    name: str
    run: list[Line]
    variants: list[Variant]


def replay(
    path: Path,
    variants: Sequence[Sequence[str]] = ((),),
    *,
    start: str | None = None,
    steps: int | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Replay:
    """Args:
        path: a run directory.
        variants: `rl_training.key=value` overrides of each.
        start: the checkpoint to start from, e.g. step_000120; None = as the run itself started.
        steps: at most so many.
        progress: called with a line after each step.

    Raises ConfigError: no run, another model, data or environment, nothing to replay, tokens that
    are not kept.
    CheckpointError: no such step, or one that does not fit the variant. ModelError: as training.
    """
    run = open_run(path)
    saved = run.load_config()
    configs = [_variant(run, overrides, saved) for overrides in variants]
    checkpoint = _checkpoint(run, start)
    first = TrainerState.read(checkpoint).step if checkpoint else 0
    if not run.has("rollouts"):
        raise ConfigError(
            f"{run.path} has no {run.file('rollouts').name}: there are no rollouts to replay"
        )
    with closing(run.open_rollouts()) as store:
        lines = [dict(line) for line in run.metrics if line["step"] > first][:steps]
        if not lines:
            raise ConfigError(
                f"{run.path}: no recorded step after step {first}: nothing to"
                " replay (--from an earlier one)"
            )
        taken = {line["step"]: _kept(store, run.path, line["step"]) for line in lines}
        quantize = saved.rl_training.lora.enabled and saved.rl_training.lora.quantize_base
        check_model(saved.model, train=True, quantize=quantize)
        loaded = load_model(saved.model, quantize=quantize)
        hooks = saved.image_hooks()
        loaded = with_images(loaded, image_support(hooks, loaded.path), hooks)
        done = []
        for overrides, config in zip(variants, configs, strict=True):
            player = _Player(loaded, config, checkpoint, saved, store)
            result = player.play(run.path, lines, taken, progress)
            done.append(Variant(shlex.join(overrides), *result))
    return Replay(run.name, lines, done)


class _Player:
    """One variant: its own policy, optimizer and algorithm, from the checkpoint on."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: Config,
        checkpoint: Path | None,
        saved: Config,
        store: RolloutStore,
    ) -> None:
        self._config, training = config, config.rl_training
        initial = (
            None
            if checkpoint
            else initial_adapter(config.model, training.lora, training.checkpoint_dir)
        )
        self._trainer = build_trainer(
            loaded,
            training,
            make_algorithm(training),
            initial_adapter=initial,
            kv_bits=config.server.kv_bits,
        )
        build_companions(self._trainer, training, config.model, loaded)
        self._policy = self._trainer.policy
        versions = VersionSteps()
        if checkpoint is not None:
            state = TrainerState.read(checkpoint)
            versions = VersionSteps(state.policy_version, state.step)
            self._policy.load(checkpoint)
            if training.optimizer == saved.rl_training.optimizer:
                self._trainer.optimizer.restore(read_tensors(checkpoint / OPTIMIZER_FILE))
            else:
                self._trainer.optimizer.reload()
            self._trainer.restore(state.trainer)
            restore_random_state(state.random_state, checkpoint)
        self._store = store
        self._buffer = build_buffer(_Stored(store), versions, self._trainer, training)

    def play(
        self,
        run: Path,
        lines: Sequence[Line],
        taken: Mapping[int, Sequence[str]],
        progress: Callable[[str], object],
    ) -> tuple[Path, list[Line]]:
        """Trains a step for each line; leaves config.toml, metrics.jsonl and the result as
        `final`."""
        directory = RunDirectory.hold(_free_name(run))
        with closing(directory):
            directory.write_config(self._config.saved_as(directory.path.name))
            metrics, replayed = MetricsFile(directory.path / METRICS_FILE), []
            for line in lines:
                replayed.append(self._step(line, taken[line["step"]]))
                metrics.append(replayed[-1])
                progress(f"{directory.path.name}: step {line['step']}: loss {replayed[-1]['loss']}")
            write_directory(directory.path / FINAL, self._policy.save)
        return directory.path, replayed

    def _step(self, line: Line, group_ids: Sequence[str]) -> Line:
        result = self._trainer.train_step(self._batch(line["step"], group_ids))
        carried = {field.name: line.get(field.name) for field in fields(BatchStatistics)} | {
            key: line[key] for key in line if key.startswith("rewards/")
        }
        carried.pop("parts", None)
        numbers = {
            "step": line["step"],
            "policy_version": line["policy_version"],
            "time_train_s": result.seconds,
        }
        return complete({**carried, **result.metrics, **numbers})

    def _batch(self, step: int, group_ids: Sequence[str]) -> TrainBatch:
        if self._config.rl_training.deterministic:  # the order that a deterministic run trains in
            indices = {group.group_id: group.index or 0 for group in self._store.groups(group_ids)}
            group_ids = sorted(group_ids, key=lambda group_id: indices[group_id])
        return self._buffer.resume(step, group_ids)


class _Stored:
    """The store of a RolloutBuffer over a ledger that is only read."""

    def __init__(self, store: RolloutStore) -> None:
        self._store = store

    def waiting(
        self, limit: int | None = None, *, exclude: Collection[str] = ()
    ) -> list[RolloutGroup]:
        return []

    def groups(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        return self._store.groups(group_ids)

    def known_ids(self) -> set[str]:
        return set()

    def waiting_ids(self) -> set[str]:
        return set()

    def take(self, group_ids: Collection[str], step: int) -> None:
        """Do nothing: the recorded step has taken it."""

    def drop(self, group_ids: Collection[str], step: int, reason: str) -> None:
        """Do nothing: the recorded step has dropped it."""

    def wait_for_groups(self, timeout_s: float, *, at_least: int = 1) -> bool:
        return False


def _variant(run: Run, overrides: Sequence[str], saved: Config) -> Config:
    """Raises ConfigError: a key that the stored tokens depend on, an algorithm that learns from
    no rollouts."""
    config = run.load_config(overrides)
    sections = {
        "model": config.model != saved.model,
        "environments": config.environments != saved.environments,
    }
    for section, differs in sections.items():
        if differs:
            raise ConfigError(
                f"{shlex.join(overrides)}: {section} may not change: the rollouts of {run.path}"
                f" are of {saved.model.base_path} and its environments. What may is rl_training.*"
            )
    if config.rl_training.lora.quantize_base != saved.rl_training.lora.quantize_base:
        raise ConfigError(
            "rl_training.lora.quantize_base may not change: the rollouts are of the base as it was"
        )
    if make_algorithm(config.rl_training).on_data:
        raise ConfigError(
            f"rl_training.algorithm = {config.rl_training.algorithm}"
            " learns from rows, not from rollouts"
        )
    return config


def _checkpoint(run: Run, start: str | None) -> Path | None:
    if start is None:
        return None
    try:
        checkpoint = find_checkpoint(str(run.path / start), run.path.parent, None)
    except CheckpointError:
        checkpoint = None
    if checkpoint is None or checkpoint.parent != run.path.resolve():
        names = ", ".join(path.name for path in run.checkpoints()) or "none"
        raise CheckpointError(
            f"--from {start}: {run.path} has no such checkpoint. There are: {names}"
        )
    if TrainerState.read(checkpoint).in_progress is not None:
        raise CheckpointError(f"--from {start} is in the middle of a step: start at a whole one")
    return checkpoint


def _kept(store: RolloutStore, run: Path, step: int) -> list[str]:
    """Raises ConfigError: the step's rollouts are not there any more."""
    group_ids = store.taken_by(step)
    try:
        store.groups(group_ids)
    except StoreError as error:
        raise ConfigError(
            f"the rollouts of step {step} are not kept any more ({error}). Start later with"
            " --from; [rollouts] keep and"
            f" max_gb say how many a run keeps, and mlx_parallm rollouts {run} what is there"
        ) from error
    return group_ids


def _free_name(run: Path) -> Path:
    number = 1
    while (
        path := run.with_name(f"{run.name}-replay{'' if number == 1 else f'-{number}'}")
    ).exists():
        number += 1
    return path


def show(replayed: Replay, console: Console) -> None:
    """The means side by side."""
    first, last = replayed.run[0]["step"], replayed.run[-1]["step"]
    names = [replayed.name, *(variant.directory.name for variant in replayed.variants)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"mean of steps {first} to {last}")
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    columns = [replayed.run, *(variant.lines for variant in replayed.variants)]
    extra = {key for lines in columns for key in lines[0]} - {*SHOWN} - {*complete({})}
    # a replay samples nothing, held-out answers neither
    evaluated = {key for key in extra if key.startswith(PREFIX)}
    for key in (*SHOWN, *sorted(extra - evaluated)):
        means = [_mean(lines, key) for lines in columns]
        if any(mean is not None for mean in means):
            table.add_row(key, *("-" if mean is None else f"{mean:.6g}" for mean in means))
    for variant in replayed.variants:
        console.print(Text(f"{variant.directory}: {variant.changed or 'the settings of the run'}"))
    console.print(table)
    console.print(Text(CAVEAT, style="dim"))


def _mean(lines: Sequence[Line], key: str) -> float | None:
    values = [
        line[key]
        for line in lines
        if isinstance(line.get(key), int | float) and line[key] is not None
    ]
    return math.fsum(values) / len(values) if values else None
