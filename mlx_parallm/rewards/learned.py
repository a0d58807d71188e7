"""A reward learned from labels: logistic regression on what can be counted in an episode. No MLX.

    LearnedReward.fit(trajectories, labels).save("reward.json")  →  rewards = ["builtin:learned"]

Features: how often each tool was called and how often calls succeeded, lengths, steps, and the
answer's words and pairs of words, hashed. The fit is iteratively reweighted least squares (Newton's
method) with an L2 penalty: its result depends only on the data.
"""

import itertools
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.part_tools import Scores, to_binary
from mlx_parallm.types import Trajectory

LEAST_OF_EACH = 10
LEAST_USES = 3  # of a tool that becomes a feature
BUCKETS = 256
COUNTED = ("calls", "success", "characters", "words", "steps", "spent", "truncated")
ITERATIONS, TOLERANCE, SMALLEST_STEP = 100, 1e-13, 1e-4
WORD = re.compile(r"\w+|[^\w\s]")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LearnedReward:
    """`score` → the probability of a good label. All lists have one entry for each feature:
    COUNTED, the tools, the buckets of words."""

    tools: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    positive: int  # labels it was fitted on
    negative: int

    @classmethod
    def fit(
        cls, trajectories: Sequence[Trajectory], labels: Sequence[bool], *, l2: float = 1.0
    ) -> "LearnedReward":
        """Minimises the sum of the log losses + l2/2 · |weights|² (the bias is free). All features
        but the words are standardised.

        Raises ConfigError: fewer than 10 good or 10 bad labels, or not one label for each
        trajectory.
        """
        if len(labels) != len(trajectories):
            raise ConfigError(
                f"learned reward: {len(labels)} labels for {len(trajectories)} trajectories"
            )
        positive = sum(bool(label) for label in labels)
        negative = len(labels) - positive
        if min(positive, negative) < LEAST_OF_EACH:
            raise ConfigError(
                f"learned reward: {positive} good and {negative} bad labels; it takes"
                f" {LEAST_OF_EACH} of each"
            )
        uses = Counter(
            call["name"] for t in trajectories for call in t.metadata.get("tool_calls", ())
        )
        tools = tuple(sorted(name for name, count in uses.items() if count >= LEAST_USES))
        rows = np.stack([_features(trajectory, tools) for trajectory in trajectories])
        counted = len(rows[0]) - BUCKETS
        mean, scale = rows.mean(axis=0), rows.std(axis=0)
        mean[counted:], scale[counted:] = 0.0, 1.0  # rare words scaled up would be learned by heart
        scale[scale == 0] = 1.0
        weights, bias = _newton((rows - mean) / scale, np.asarray(labels, np.float64), l2)
        lists = [tuple(map(float, values)) for values in (mean, scale, weights)]
        return cls(tools, lists[0], lists[1], lists[2], bias, positive, negative)

    def score(self, trajectory: Trajectory) -> float:
        """0 to 1."""
        features = (_features(trajectory, self.tools) - np.asarray(self.mean)) / np.asarray(
            self.scale
        )
        return _sigmoid(float(features @ np.asarray(self.weights)) + self.bias)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"format": 1, "buckets": BUCKETS, **asdict(self)}) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "LearnedReward":
        """Read what `save` wrote. Raises ConfigError: the file cannot be read or is of another
        version."""
        try:
            data = json.loads(Path(path).read_text())
            if (data.pop("format"), data.pop("buckets")) != (1, BUCKETS):
                raise ValueError("of another version")
            values: dict[str, Any] = {
                n: tuple(v) if isinstance(v, list) else v for n, v in data.items()
            }
            model = cls(**values)
            size = len(COUNTED) + len(model.tools) + BUCKETS
            if {len(model.mean), len(model.scale), len(model.weights)} != {size}:
                raise ValueError(f"its lists should have {size} numbers")
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ConfigError(f"learned reward: {path} cannot be read as one: {error}") from error
        return model


def learned(*, path: str, threshold: float | None = None) -> Callable[..., Any]:
    """The probability that a person would label the episode as good, by the `LearnedReward` in a
    file.

    Raises ConfigError: the file cannot be read.
    """
    model = LearnedReward.load(path)

    def part(trajectories: Sequence[Trajectory]) -> Scores:
        return to_binary([model.score(trajectory) for trajectory in trajectories], threshold)

    return part


def _features(trajectory: Trajectory, tools: Sequence[str]) -> Floats:
    calls: Sequence[Mapping[str, Any]] = trajectory.metadata.get("tool_calls", ())
    words = WORD.findall(trajectory.text.lower())
    counted = {
        "calls": math.log1p(len(calls)),
        "success": sum(bool(call.get("ok")) for call in calls) / len(calls) if calls else 0.5,
        "characters": math.log1p(len(trajectory.text)),
        "words": math.log1p(len(words)),
        "steps": math.log1p(trajectory.step_count),
        "spent": math.log1p(max(0.0, float(trajectory.metadata.get("spent", 0.0)))),
        "truncated": float(trajectory.truncated),
    }
    used = Counter(call["name"] for call in calls)
    buckets = np.zeros(BUCKETS)
    for phrase in (*words, *map(" ".join, itertools.pairwise(words))):
        buckets[zlib.crc32(phrase.encode(errors="replace")) % BUCKETS] += 1
    dense = [counted[name] for name in COUNTED] + [
        used[tool] / len(calls) if calls else 0.0 for tool in tools
    ]
    return np.concatenate([dense, np.log1p(buckets)])


def _newton(rows_N_F: Floats, labels_N: Floats, l2: float) -> tuple[Floats, float]:
    """Weights and bias. Steps are halved until the loss falls, so that it converges from
    anywhere (it is convex)."""
    design = np.column_stack([rows_N_F, np.ones(len(rows_N_F))])  # [N, F + 1]
    penalty = np.append(np.full(rows_N_F.shape[1], l2), 0.0)
    weights = np.zeros(design.shape[1])

    def loss(at: Floats) -> float:
        logits = design @ at
        return float(
            np.logaddexp(0, logits).sum() - labels_N @ logits + (penalty * at * at).sum() / 2
        )

    for _ in range(ITERATIONS):
        good = 1 / (1 + np.exp(-np.clip(design @ weights, -500, 500)))
        gradient = design.T @ (good - labels_N) + penalty * weights
        hessian = (design.T * (good * (1 - good))) @ design + np.diag(penalty + 1e-12)
        step = np.linalg.solve(hessian, gradient)
        # of the loss, twice what is left of it
        fall, before = float(gradient @ step), loss(weights)
        if fall <= TOLERANCE * (1 + before):
            break
        share = 1.0
        while loss(weights - share * step) > before - share * fall / 10 and share > SMALLEST_STEP:
            share /= 2
        weights = weights - share * step
    return weights[:-1], float(weights[-1])


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
