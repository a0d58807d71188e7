"""PPOAlgorithm, GRPOAlgorithm, REINFORCEAlgorithm: the daemon's training loop for people who write
Python.

    algorithm = GRPOAlgorithm(env, RolloutManager(env), reward_computer, BackpropModule(inference))
    metrics = algorithm.train(num_iterations=100)

An iteration is a step of `rl_training.loop`: the rollout manager collects trajectories, the reward
computer scores them, the buffer makes a batch of them, the trainer updates the weights, and the
InferenceModule answers with the new ones. All of it runs on the thread that calls `train`.
"""

import json
import math
import weakref
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar, Protocol

import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from mlx_parallm.config.library import AlgorithmConfig, LibraryAlgorithm
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LoggingConfig
from mlx_parallm.environments.manager import RolloutManager
from mlx_parallm.environments.state import BaseEnvironment
from mlx_parallm.errors import (
    CheckpointError,
    ConfigError,
    EnvironmentFailedError,
    RolloutRejectedError,
)
from mlx_parallm.execution.user_code import name_of, reference_to
from mlx_parallm.faces.library.backprop import BackpropModule
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rewards.base import scored
from mlx_parallm.rl_training.factory import build_buffer
from mlx_parallm.rl_training.loop import Parts, RunControl, TrainingLoop
from mlx_parallm.rl_training.monitor.trackers import TrackedRun, Trackers, check_installed
from mlx_parallm.rl_training.run.assembly import PublishedWeights, make_parts, open_files
from mlx_parallm.run_files.directory import RunDirectory, checkpoint_at
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.run_files.versions import VersionNumbers, VersionSteps
from mlx_parallm.system.files import write_atomically
from mlx_parallm.types import UNSCORED, Rollout, RolloutGroup, Trajectory

# beside config.toml: which of these classes, and its AlgorithmConfig
ALGORITHM_FILE = "algorithm.json"
REFILLS = 2  # for groups without variance; after them the iteration has the groups that there are


class ComputesRewards(Protocol):
    """An object with this method, which returns a number for each trajectory, None or NaN for one
    that it cannot score; `rewards/computers.py` has some."""

    def compute_rewards(
        self, trajectories: Sequence[Trajectory], method: Any = ...
    ) -> Sequence[float | None]: ...


@dataclass(frozen=True)
class TrainingMetrics:
    """The metrics of one iteration; None: unknown, or the algorithm has none. Rewards (of those
    that have one) and lengths (sampled tokens) are of all trajectories that the iteration
    collected, also of groups without variance, which are not trained on."""

    iteration: int
    loss: float | None
    policy_loss: float | None
    value_loss: float | None
    kl: float | None  # to the reference, nats a token
    entropy: float | None  # nats a token
    grad_norm: float | None  # before clipping
    learning_rate: float
    reward_mean: float
    reward_std: float  # population
    reward_min: float
    reward_max: float
    num_trajectories: int
    length_mean: float
    length_std: float
    seconds: float
    # the line of metrics.jsonl (run_files/metrics.py), with all other metrics
    line: Mapping[str, Any]

    @property
    def trajectories_per_second(self) -> float:
        return self.num_trajectories / self.seconds

    @classmethod
    def of(cls, line: Mapping[str, Any], rollouts: Sequence[Rollout]) -> "TrainingMetrics":
        rewards = [rollout.reward for rollout in rollouts if rollout.is_scored] or [math.nan]
        lengths = [rollout.sampled_tokens for rollout in rollouts] or [0]
        return cls(
            iteration=line["step"],
            loss=line["loss"],
            policy_loss=line.get("policy_loss"),
            value_loss=line.get("value_loss"),
            kl=line["kl"],
            entropy=line["entropy"],
            grad_norm=line["grad_norm"],
            learning_rate=line["learning_rate"],
            reward_mean=fmean(rewards),
            reward_std=pstdev(rewards),
            reward_min=min(rewards),
            reward_max=max(rewards),
            num_trajectories=len(rollouts),
            length_mean=fmean(lengths),
            length_std=pstdev(lengths),
            seconds=line["time_rollout_s"] + line["time_train_s"] + line["time_publish_s"],
            line=line,
        )


class CollectedGroups:
    """A `rollout_buffer.GroupStore` in memory. The trainer's own thread collects groups when the
    buffer waits for them.

    Args:
        collect: plays and scores this number of groups. It blocks, and may return fewer (some
            failed) or more; at least one, or it raises.
    """

    def __init__(self, collect: Callable[[int], list[RolloutGroup]]) -> None:
        self._collect = collect
        self._requested = 0
        self._waiting: dict[str, RolloutGroup] = {}

    def request(self, n: int, environment: str | None = None, /) -> None:
        """Add `n` groups to those that the next wait collects. There is one environment."""
        self._requested += n

    def wait_for_groups(self, timeout_s: float, *, at_least: int = 1) -> bool:
        """Collect the requested groups, however long it takes. Return whether there are
        `at_least` groups."""
        if self._requested > 0:
            groups = self._collect(self._requested)
            self._requested = max(0, self._requested - len(groups))
            self._waiting |= {group.group_id: group for group in groups}
        return len(self._waiting) >= at_least

    def waiting(self, limit: int | None = None, *, exclude: set[str]) -> list[RolloutGroup]:
        return [group for group_id, group in self._waiting.items() if group_id not in exclude][
            :limit
        ]

    def waiting_ids(self) -> set[str]:
        return set(self._waiting)

    def known_ids(self) -> set[str]:
        return set(self._waiting)

    def groups(self, group_ids: Sequence[str]) -> list[RolloutGroup]:
        raise AssertionError("only the daemon resumes inside a step")

    def take(self, group_ids: Sequence[str], step: int) -> None:
        for group_id in group_ids:
            del self._waiting[group_id]

    def drop(self, group_ids: Sequence[str], step: int, reason: str) -> None:
        self.take(group_ids, step)

    def restore(self, consumed_up_to_step: int, *, keep_drops_of: int | None = None) -> int:
        """Do nothing: there are no groups of an earlier process (`checkpoint.ConsumedGroups`)."""
        return 0


Callback = Callable[["BaseAlgorithm", TrainingMetrics], None]


@dataclass(frozen=True)
class _AlgorithmRun:
    """The run of an algorithm, from its first use to `close`.

    `directory`: None: nothing is kept. `release` gives it back to other processes.
    """

    loop: TrainingLoop
    parts: Parts
    directory: RunDirectory | None
    release: Callable[[], object]


class BaseAlgorithm(ABC):
    """The loop of an algorithm: collect trajectories, compute rewards, update the weights.

    Args:
        env: the environment; None: the one that the rollout manager plays.
        rollout_manager: plays `env` with the InferenceModule whose weights `backprop` trains.
        reward_computer: sees all trajectories of a collection; those of one prompt have the same
            `group_id`.
        callbacks: called after every iteration; an error in one ends `train`.
        loss: your own loss in the place of the algorithm's, LossInputs → LossOutputs.

    Raises ConfigError: the parts do not fit together.
    """

    name: ClassVar[LibraryAlgorithm]
    usual_group_size: ClassVar[int] = 1

    def __init__(
        self,
        env: BaseEnvironment | None,
        rollout_manager: RolloutManager,
        reward_computer: ComputesRewards,
        backprop: BackpropModule,
        config: AlgorithmConfig | None = None,
        *,
        callbacks: Sequence[Callback] = (),
        loss: Callable[[LossInputs], LossOutputs] | None = None,
    ) -> None:
        self._own_loss = {} if loss is None else {"loss": reference_to(loss, name_of(loss))}
        self.env, self.rollout_manager, self.reward_computer = env, rollout_manager, reward_computer
        self.backprop, self.config = backprop, config or AlgorithmConfig()
        self.callbacks = list(callbacks)
        self.group_size = self.config.group_size or self.usual_group_size
        self._check()
        if env is not None and not any(env is played for played in rollout_manager.environments):
            raise ConfigError("the rollout manager plays another environment than the argument env")
        inference = rollout_manager.inference
        if not isinstance(inference, InferenceModule):
            raise ConfigError("the environment has no InferenceModule: give one to its constructor")
        backprop.attach(inference)
        self.inference, self._kind = (
            inference,
            type(env or rollout_manager.environments[0]).__name__,
        )
        self._run: _AlgorithmRun | None = None  # None: not trained yet, or closed
        self._groups = 0  # collected so far
        self._collected: list[Rollout] = []  # for this iteration
        self._metrics: list[TrainingMetrics] = []  # this `train` call's
        self._trackers: Trackers | None = None
        self._bar: tuple[Progress, TaskID] | None = None

    @property
    def iteration(self) -> int:
        """The number of finished iterations."""
        return self._run.loop.step if self._run is not None else 0

    def train(
        self, num_iterations: int | None = None, progress_bar: bool = True
    ) -> list[TrainingMetrics]:
        """Train for `num_iterations` more. With a checkpoint_dir the last state is saved, as
        `final`.

        Raises EnvironmentFailedError: every episode of a collection failed. RolloutRejectedError:
        the reward computer did not return one finite number for each trajectory. CheckpointError: a
        full disk, …
        """
        count = self.config.num_iterations if num_iterations is None else num_iterations
        if count < 1:
            raise ConfigError(f"num_iterations = {count}: at least 1")
        run, self._metrics, self._collected = self._the_run(), [], []
        last = run.loop.step + count
        if run.directory is not None:
            self._write_settings(run.directory, last)
        with self._tracked(run), self._shown(count, progress_bar):
            run.loop.run(last)
        return self._metrics

    def save_checkpoint(self, iteration: int | None = None, *, best: bool = False) -> Path:
        """Save a checkpoint in the daemon's format: `mlx_parallm serve --lora-path` serves it,
        `mlx_parallm merge` merges it. `best`: the link `best` points to it from now on.

        Raises ConfigError: there is no checkpoint_dir, or `iteration` is not the last one.
        CheckpointError.
        """
        run = self._the_run()
        if run.directory is None:
            raise ConfigError(
                "AlgorithmConfig.checkpoint_dir is not set: there is no place for checkpoints"
            )
        step = run.loop.step
        if iteration not in (None, step):
            raise ConfigError(f"the weights are those after iteration {step}, not {iteration}")
        if not (run.directory.path / ALGORITHM_FILE).is_file():  # before the first `train`
            self._write_settings(run.directory, step)
        return run.loop.save(best=best)

    def close(self) -> None:
        """End the run: another process may then use its directory. The garbage collector does it
        too."""
        if self._run is not None and self._run.directory is not None:
            self._run.release()
            self._run = None

    # ------------------------------------------------------------------ parts

    def _check(self) -> None:
        config, size = self.config, self.group_size
        if config.batch_size % size:
            raise ConfigError(
                f"batch_size ({config.batch_size}) is not a multiple of group_size ({size})"
            )
        check_installed(LoggingConfig(trackers=config.all_trackers))

    def _the_run(self) -> "_AlgorithmRun":
        if self._run is None:
            self._run = self._open_run(None)
        parts, weights = self._run.parts, self.inference.weights
        if parts.trainer is not self.backprop.trainer:
            raise ConfigError(
                "another algorithm has used this BackpropModule meanwhile: make a new one"
            )
        assert weights is not None, "attach() checks it"
        # BackpropModule.update published it
        if weights.version > parts.versions.newest[0]:
            parts.versions.record(weights.version, self._run.loop.step)
            parts.updater.begin()
        return self._run

    def _open_run(self, checkpoint: Path | None) -> "_AlgorithmRun":
        config, backprop, weights = self.config, self.backprop, self.inference.weights
        assert weights is not None, "attach() checks it"
        trainer = backprop.configure(
            self.name,
            config.over(backprop.config),
            config.training_keys(self.name, self.inference.max_model_len) | self._own_loss,
        )
        training = backprop.run_config.rl_training
        store, directory, files = CollectedGroups(self._collect), None, None
        with ExitStack() as closing:
            if config.checkpoint_dir is not None:
                directory = RunDirectory.open(
                    training.checkpoint_dir, training.run_name, checkpoint
                )
                closing.callback(directory.close)
                if checkpoint is not None:
                    backprop.expect_reference(checkpoint)
                files = open_files(
                    directory.path,
                    trainer,
                    store,
                    checkpoint=checkpoint,
                    keep=training.keep_checkpoints,
                    keep_best=True,
                )
            state = files.state if files is not None else None
            if state is not None:
                backprop.publish(at_least=state.policy_version)
            versions = VersionSteps(weights.version, state.step if state else 0)
            collecting = {"max_staleness": config.max_staleness, "max_empty_rounds": REFILLS}
            buffer = build_buffer(
                store,
                versions,
                trainer,
                training.model_copy(update=collecting),
                group_sizes=[self.group_size],
                request_groups=store.request,
            )
            published = PublishedWeights(weights, versions, VersionNumbers())
            parts = make_parts(trainer, training, published, buffer, files)
            control = RunControl(after_step=self._after_step)
            loop = TrainingLoop(parts, control=control, state=_between_steps(state))
            release = weakref.finalize(self, closing.pop_all().close)
        return _AlgorithmRun(loop, parts, directory, release)

    def _write_settings(self, directory: RunDirectory, total_steps: int) -> None:
        """Write the files that the commands and `load_algorithm_from_checkpoint` read.
        `total_steps`: at the end of this call of `train`."""
        source, config = self.backprop.source, self.backprop.run_config
        base = source if isinstance(source, str) else self.backprop.loaded.path
        training = config.rl_training.model_copy(update={"total_steps": max(1, total_steps)})
        sections = {"model": ModelConfig(base_path=str(base)), "rl_training": training}
        directory.write_config(config.model_copy(update=sections).saved_as(directory.path.name))
        settings = {"name": self.name, "config": self.config.model_dump(mode="json")}
        write_atomically(
            directory.path / ALGORITHM_FILE, (json.dumps(settings, indent=1) + "\n").encode()
        )

    # ------------------------------------------------------------------ an iteration

    def _collect(self, groups: int) -> list[RolloutGroup]:
        """Play and score this number of groups; leave out those with a failed episode."""
        steps = self.config.max_steps_per_rollout
        limit = {} if steps is None else {"max_steps_per_rollout": steps}
        size = self.group_size
        played = self.rollout_manager.collect_rollouts(groups * size, **limit, group_size=size)
        together: dict[str, list[Trajectory]] = {}
        for trajectory in played:
            together.setdefault(trajectory.group_id, []).append(trajectory)
        whole = [
            group
            for group in together.values()
            if len(group) == size and not any(t.error for t in group)
        ]
        if not whole:
            reasons = [trajectory.error for trajectory in played if trajectory.error is not None]
            raise EnvironmentFailedError(
                f"none of {len(played)} episodes can be used: {reasons[:1] or 'there are none'}"
            )
        rollouts = self._scored([trajectory for group in whole for trajectory in group])
        compared = len(rollouts) if size == 1 else size
        parts = [
            self._filtered(rollouts[start : start + compared])
            for start in range(0, len(rollouts), compared)
        ]
        members = [rollout for part in parts for rollout in part]
        first, self._groups = self._groups, self._groups + len(whole)
        return [
            RolloutGroup(
                f"{self.name}-{index}",
                self._kind,
                tuple(members[start : start + size]),
                index=index,
            )
            for index, start in zip(
                range(first, self._groups), range(0, len(members), size), strict=True
            )
        ]

    def _scored(self, trajectories: Sequence[Trajectory]) -> tuple[Rollout, ...]:
        method = self.config.reward_method
        options = {} if method is None else {"method": method}
        rewards = self.reward_computer.compute_rewards(list(trajectories), **options)
        try:
            numbers = [math.nan if reward is None else float(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            expected = f"expected a list of {len(trajectories)} numbers"
            raise RolloutRejectedError(
                f"compute_rewards returned {rewards!r}: {expected}"
            ) from error
        if numbers and all(map(math.isnan, numbers)):
            raise RolloutRejectedError(
                f"compute_rewards scored none of {len(numbers)} trajectories"
            )
        unscored = {"reward": 0.0, UNSCORED: 1.0}
        scores = [unscored if math.isnan(reward) else {"reward": reward} for reward in numbers]
        rollouts = scored(trajectories, scores)
        self._collected += rollouts
        return rollouts

    def _filtered(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Give no advantage to rollouts below the percentile; they count in their group's mean."""
        rewards = [rollout.reward for rollout in rollouts if rollout.is_scored]
        if not self.config.filter_percentile or not rewards:
            return list(rollouts)
        least = float(np.percentile(rewards, self.config.filter_percentile))
        return [replace(r, zero_advantage=r.zero_advantage or r.reward < least) for r in rollouts]

    def _after_step(self, line: dict[str, Any]) -> None:
        metrics, self._collected = TrainingMetrics.of(line, self._collected), []
        self._metrics.append(metrics)
        every = self.config.update_ref_every
        if every and metrics.iteration % every == 0:
            self.backprop.update_ref_model()
        if self._trackers is not None:
            self._trackers.log(line)
        if self._bar is not None:
            progress, task = self._bar
            progress.update(task, advance=1, reward=f"{metrics.reward_mean:.3f}")
        for callback in self.callbacks:
            callback(self, metrics)

    @contextmanager
    def _tracked(self, run: "_AlgorithmRun") -> Iterator[None]:
        if not self.config.all_trackers or run.directory is None:
            yield
            return
        tracked = TrackedRun(
            run.directory.path,
            self.config.wandb_project,
            self.backprop.run_config.redacted(),
            step=self.iteration,
        )
        self._trackers = Trackers(self.config.all_trackers, tracked)
        try:
            yield
        finally:
            self._trackers.close()
            self._trackers = None

    @contextmanager
    def _shown(self, count: int, progress_bar: bool) -> Iterator[None]:
        columns = (
            TextColumn(self.name),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"),
        )
        with Progress(*columns, TimeRemainingColumn(), disable=not progress_bar) as progress:
            self._bar = progress, progress.add_task(self.name, total=count, reward="…")
            try:
                yield
            finally:
                self._bar = None


class PPOAlgorithm(BaseAlgorithm):
    """PPO (arXiv:1707.06347): a value head on the policy, generalised advantages, a clipped
    ratio."""

    name = "ppo"


class GRPOAlgorithm(BaseAlgorithm):
    """GRPO (arXiv:2402.03300): each trajectory against the others of its prompt, without a value
    head."""

    name = "grpo"
    usual_group_size = 8

    def _check(self) -> None:
        super()._check()
        if self.group_size < 2:
            raise ConfigError(
                "GRPO compares the trajectories of one prompt: group_size has to be at least 2"
            )


class REINFORCEAlgorithm(BaseAlgorithm):
    """REINFORCE (Williams 1992): rewards, whitened over the batch, times the log-probability;
    one pass, no ratio."""

    name = "reinforce"

    def _check(self) -> None:
        super()._check()
        update_config = self.backprop.own_config
        of_updates = (
            update_config.ppo_epochs if "ppo_epochs" in update_config.model_fields_set else 1
        )
        if (epochs := self.config.ppo_epochs or of_updates) > 1:
            raise ConfigError(
                f"ppo_epochs = {epochs}: REINFORCE has no ratio that could correct a second pass"
                " over the same answers,"
                " so ppo_epochs can only be 1; PPOAlgorithm and GRPOAlgorithm take several"
            )


ALGORITHMS: dict[str, type[BaseAlgorithm]] = {
    kind.name: kind for kind in (PPOAlgorithm, GRPOAlgorithm, REINFORCEAlgorithm)
}


def create_algorithm(name: str, *parts: Any, **options: Any) -> BaseAlgorithm:
    """Return the algorithm "ppo", "grpo" or "reinforce", with its constructor's arguments.
    Raises ConfigError."""
    if name.lower() not in ALGORITHMS:
        raise ConfigError(f"no algorithm {name!r}: choose one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name.lower()](*parts, **options)


def load_algorithm_from_checkpoint(
    path: str | Path,
    env: BaseEnvironment | None,
    rollout_manager: RolloutManager,
    reward_computer: ComputesRewards,
    backprop: BackpropModule,
    *,
    callbacks: Sequence[Callback] = (),
) -> BaseAlgorithm:
    """Resume a run from its directory (the latest checkpoint), or from one of its steps, `final` or
    `best`.

    Weights, value head, reference, optimizer and random states come from the checkpoint, the
    AlgorithmConfig from the run; the caller makes the other parts again. Raises CheckpointError: no
    checkpoint, or not an algorithm's.
    """
    checkpoint = checkpoint_at(Path(path))
    file = (checkpoint or Path(path)).parent / ALGORITHM_FILE
    if checkpoint is None or not file.is_file():
        raise CheckpointError(
            f"{path}: no checkpoint of an algorithm there (a step_… directory,"
            f" {ALGORITHM_FILE} above it)"
        )
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        values = saved["config"] | {
            "checkpoint_dir": file.parent.parent,
            "run_name": file.parent.name,
        }
        config, name = AlgorithmConfig(**values), str(saved["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    algorithm = create_algorithm(
        name, env, rollout_manager, reward_computer, backprop, config, callbacks=callbacks
    )
    algorithm._run = algorithm._open_run(checkpoint)
    return algorithm


def _between_steps(state: TrainerState | None) -> TrainerState | None:
    """Raises CheckpointError: it is inside a step, whose rollouts only the daemon keeps."""
    if state is not None and state.in_progress is not None:
        raise CheckpointError("the checkpoint is inside a step: resume from the one before it")
    return state
