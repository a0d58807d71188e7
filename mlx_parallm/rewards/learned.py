"""A reward learned from labels: logistic regression on what can be counted in an episode. No MLX.

    LearnedReward.fit(trajectories, labels).save("reward.json")  →  rewards = ["builtin:learned"]

Features: how often each tool was called and how often calls succeeded, lengths, steps, and the
answer's words and pairs of words, hashed. scikit-learn fits it, with an L2 penalty: the result
depends only on the data.
"""

import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.part_tools import Scores, to_binary
from mlx_parallm.system.packages import require
from mlx_parallm.system.validation import faults
from mlx_parallm.types import Trajectory

LEAST_OF_EACH = 10
LEAST_USES = 3  # of a tool that becomes a feature
BUCKETS: Final = 256
COUNTED = ("calls", "success", "characters", "words", "steps", "spent", "truncated")
TOLERANCE = 1e-10  # of the mean loss's gradient
WORD = re.compile(r"\w+|[^\w\s]")

Floats = NDArray[np.float64]


class LearnedReward(BaseModel):
    """`score` → the probability of a good label. All lists have one entry for each feature:
    COUNTED, the tools, the buckets of words."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[1]
    buckets: Literal[256]
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

        Raises ConfigError: fewer than 10 good or 10 bad labels, not one label for each trajectory,
        a negative l2, or no scikit-learn.
        """
        require("a reward that is fitted to labels", "sklearn")
        from sklearn.linear_model import LogisticRegression

        if not 0 <= l2 < math.inf:
            raise ConfigError(f"learned reward: l2 = {l2}: expected a number from 0")
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
        fitted = LogisticRegression(
            C=1 / l2 if l2 else np.inf, solver="newton-cholesky", tol=TOLERANCE
        )
        fitted.fit((rows - mean) / scale, np.asarray(labels, bool))
        return cls(
            format=1,
            buckets=BUCKETS,
            tools=tools,
            mean=mean.tolist(),
            scale=scale.tolist(),
            weights=fitted.coef_[0].tolist(),
            bias=float(fitted.intercept_[0]),
            positive=positive,
            negative=negative,
        )

    @model_validator(mode="after")
    def _one_number_for_each_feature(self) -> "LearnedReward":
        size = len(COUNTED) + len(self.tools) + BUCKETS
        if {len(self.mean), len(self.scale), len(self.weights)} != {size}:
            raise ValueError(f"its lists should have {size} numbers")
        return self

    def score(self, trajectory: Trajectory) -> float:
        """0 to 1."""
        features = (_features(trajectory, self.tools) - np.asarray(self.mean)) / np.asarray(
            self.scale
        )
        return _sigmoid(float(features @ np.asarray(self.weights)) + self.bias)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "LearnedReward":
        """Read what `save` wrote. Raises ConfigError: the file cannot be read or is of another
        version."""
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"learned reward: {path} cannot be read as one: {faults(error)}"
            ) from error


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


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
