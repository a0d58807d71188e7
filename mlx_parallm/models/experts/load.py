"""How evenly a mixture of experts is used: of the experts that the sampled tokens went to."""

from collections.abc import Iterable

import numpy as np

from mlx_parallm.types import RoutedExperts


def expert_load(recorded: Iterable[RoutedExperts], experts: int) -> dict[str, float]:
    """Return, over all layers of a model with so many `experts` in each:

    `expert_load_max`: tokens of a layer's busiest expert ÷ those of the average expert, the mean
    over layers; 1 = all are used alike, experts ÷ (experts a token) = always the same ones.
    `experts_unused`: share of the experts to which no token went.

    Empty without a recorded token.
    """
    counts: np.ndarray | None = None
    for rollout in recorded:
        ids = rollout.array()
        layers = np.arange(ids.shape[1])[:, None]
        counts = np.zeros((ids.shape[1], experts), np.int64) if counts is None else counts
        np.add.at(counts, (np.broadcast_to(layers, ids.shape), ids), 1)
    if counts is None or not counts.any():
        return {}
    return {
        "expert_load_max": float((counts.max(axis=1) / counts.mean(axis=1)).mean()),
        "experts_unused": float((counts == 0).mean()),
    }
