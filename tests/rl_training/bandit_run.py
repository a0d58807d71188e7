"""The loop with all its parts, over a source that plays a bandit with the policy's own
probabilities."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.rl_training.events import (
    CheckpointSaved,
    RunEvents,
    StepFinished,
    WeightsPublished,
)
from mlx_parallm.rl_training.factory import build_buffer
from mlx_parallm.rl_training.loop import Parts, RunControl, TrainingLoop
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.publish.rollback import RollbackService
from mlx_parallm.rl_training.run.assembly import PublishedWeights, make_parts, open_files
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.directory import find_checkpoint
from mlx_parallm.run_files.versions import VersionNumbers
from mlx_parallm.types import RolloutGroup
from mlx_parallm.weights import PublishReport, SharedWeights
from tests.rl_training.making import make_config, make_policy
from tests.rl_training.rollouts import make_rollout
from tests.rl_training.tiny_models import make_model

PROMPT = (1, 2, 3)
GROUP = 8


class Bandit:
    """Asked for groups it plays them at once with the served weights. One token;
    `reward(token)`."""

    def __init__(
        self, trainer: Trainer, weights: SharedWeights, store: RolloutStore, events: list[str]
    ) -> None:
        self.trainer, self.weights, self.store, self.events = trainer, weights, store, events
        self.next = 0
        self.reward: Callable[[int], float] = lambda token: float(token < 20)

    def __call__(self, n: int) -> None:
        self.events.append(f"ask {n} of v{self.weights.version}")
        logits = self.trainer.policy.model(mx.array([PROMPT]))[0, -1].astype(mx.float32)
        probabilities = np.array(mx.softmax(logits), np.float64)
        probabilities /= probabilities.sum()
        wanted = n
        while wanted:
            tokens = np.random.default_rng(self.next).choice(40, GROUP, p=probabilities)
            rollouts = tuple(
                make_rollout(
                    (int(token),),
                    prompt=PROMPT,
                    reward=self.reward(int(token)),
                    logprob=float(np.log(probabilities[token])),
                    version=self.weights.version,
                )
                for token in tokens
            )
            wanted -= self.store.add(
                RolloutGroup(f"g{self.next}", "b", rollouts, index=self.next), source="bandit"
            )
            self.next += 1

    def state(self) -> dict[str, Any]:
        return {"next": self.next}


@dataclass
class Run:
    config: RLTrainingConfig
    directory: Path
    parts: Parts
    bandit: Bandit
    store: RolloutStore
    shared: SharedWeights
    loop: TrainingLoop
    rollback_service: RollbackService
    stream: RunEvents
    events: list[str] = field(default_factory=list)
    published: list[PublishReport] = field(default_factory=list)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return list(self.parts.metrics.read())


def open_run(
    directory: Path,
    *,
    resume: bool | str = False,
    poison: Any = None,
    control: RunControl | None = None,
    **values: Any,
) -> Run:
    """Make the parts as a run does; `poison` wraps the loss."""
    config = make_config(
        **{"batch": 16, "total_steps": 6, "checkpoint_interval": 2, "max_staleness": 0} | values
    )
    store = RolloutStore(directory / "rollouts.sqlite")
    options, algorithm = config, make_algorithm(config)
    if poison is not None:
        algorithm = replace(algorithm, loss=poison(algorithm.loss))
    trainer = Trainer(make_policy(config), options, algorithm)
    checkpoint = None
    if resume:
        place = directory if resume is True else directory / resume
        checkpoint = find_checkpoint(str(place), directory.parent, None)
        assert checkpoint is not None
    files = open_files(
        directory,
        trainer,
        store,
        checkpoint=checkpoint,
        keep=config.keep_checkpoints,
        keep_best=False,
    )
    state, numbers, older = files.state, VersionNumbers(store), files.served()
    versions = files.versions(numbers, served_known=bool(older))
    shared = SharedWeights(
        make_model(), policy="policy", version=versions.newest[0], keep_versions=1
    )
    events: list[str] = []
    bandit = Bandit(trainer, shared, store, events)
    bandit.next = state.sources["bandit"]["next"] if state else 0
    published: list[PublishReport] = []
    stream = RunEvents()
    stream.subscribe(WeightsPublished, lambda event: published.append(event.report))
    stream.subscribe(StepFinished, lambda event: events.append(f"line {event.line['step']}"))
    stream.subscribe(CheckpointSaved, lambda event: events.append(f"saved {event.path.name}"))
    rollback_service = RollbackService()
    buffer = build_buffer(
        store, versions, trainer, options, group_sizes=[GROUP], request_groups=bandit
    )
    parts = make_parts(
        trainer,
        options,
        PublishedWeights(shared, versions, numbers, older),
        buffer,
        files,
        events=stream,
        sources={"bandit": bandit},
        rollbacks=rollback_service,
    )
    control = replace(control or RunControl(), wait_turn_s=0.05)
    loop = TrainingLoop(parts, control=control, events=stream, state=state)
    return Run(
        config,
        directory,
        parts,
        bandit,
        store,
        shared,
        loop,
        rollback_service,
        stream,
        events,
        published,
    )


@contextmanager
def running(directory: Path, **values: Any) -> Iterator[Run]:
    directory.mkdir(exist_ok=True)
    run = open_run(directory, **values)
    try:
        yield run
    finally:
        run.store.close()
