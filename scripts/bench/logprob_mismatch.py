"""How far are a run's rollouts from its own later weights, and how far is a foreign vocabulary?

    mlx_parallm_train --config train_configs/quickstart.toml --set rl_training.checkpoint_interval=16 \
        --set rl_training.keep_checkpoints=100
    python scripts/bench/logprob_mismatch.py checkpoints/quickstart-…

For each checkpoint: nats a token (`LogprobMismatchCheck.distance`) between it and the groups that
were sampled so many steps before; and the same groups with their tokens shuffled over the
vocabulary. The smaller of two distances counts: the shortest sequence's, and the whole group's.
`MISMATCH_NATS` lies between the largest of the first kind and the least of the second.
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_parallm.config.load import load_config
from mlx_parallm.models.loading import load_model
from mlx_parallm.rl_training.group_fit import MISMATCH_NATS, LogprobMismatchCheck
from mlx_parallm.rl_training.options import make_algorithm, training_options
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import RolloutGroup

STALENESS = (0, 1, 2, 4, 8, 16, 32)
GROUPS = 24  # of each checkpoint and staleness


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    config = load_config(run / "config.toml")
    loaded = load_model(config.model)
    training = config.rl_training
    options = training_options(training)
    policy = TrainedPolicy(
        loaded.model, options.policy, source=loaded.path, model_config=loaded.config
    )
    check = LogprobMismatchCheck(Trainer(policy, options.trainer, make_algorithm(training)))
    by_version = groups_by_version(run)
    shuffle = np.random.default_rng(0).permutation(loaded.vocab_size)
    nats: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for checkpoint in sorted(run.glob("step_*")):
        policy.load(checkpoint)
        for staleness in STALENESS:
            for group in by_version[int(checkpoint.name[5:]) - staleness][:GROUPS]:
                nats["own", staleness].append(distances(check, group))
                nats["shuffled", staleness].append(distances(check, shuffled(group, shuffle)))
    table = Table(
        "tokens",
        "steps old",
        "groups",
        "shortest",
        "group",
        "smaller of both",
        title="nats a token",
    )
    for (kind, staleness), pairs in sorted(nats.items()):
        columns = [*np.array(pairs).T, np.array(pairs).min(axis=1)]
        ranges = [f"{column.min():.2f} … {column.max():.2f}" for column in columns]
        table.add_row(kind, str(staleness), str(len(pairs)), *ranges)
    Console().print(table, f"MISMATCH_NATS = {MISMATCH_NATS:g}")


def groups_by_version(run: Path) -> dict[int, list[RolloutGroup]]:
    """Return the groups of a run that publishes after every step, so that the version is the
    step."""
    by_version: dict[int, list[RolloutGroup]] = defaultdict(list)
    store = RolloutStore(run / "rollouts.sqlite", read_only=True)
    for group in store.groups(sorted(store.known_ids())):
        by_version[max(group.sampled_versions)].append(group)
    store.close()
    return by_version


def distances(check: LogprobMismatchCheck, group: RolloutGroup) -> tuple[float, float]:
    """Return the distance over the shortest sequence, and over all."""
    shortest = min(group.rollouts, key=lambda rollout: len(rollout.tokens))
    return check.distance([shortest]), check.distance(group.rollouts)


def shuffled(group: RolloutGroup, order: np.ndarray) -> RolloutGroup:
    rollouts = (replace(r, tokens=tuple(order[list(r.tokens)].tolist())) for r in group.rollouts)
    return replace(group, rollouts=tuple(rollouts))


if __name__ == "__main__":
    main()
