"""A reward learned from labels: logistic regression on counts of an episode. No MLX.

    LearnedReward.fit(trajectories, labels).save("reward.json")  →  rewards = ["builtin:learned"]

Features: how often each tool was called and how often calls succeeded, lengths, steps, and which
words and pairs of words are in the answer. scikit-learn counts, scales and fits, with an L2
penalty: the result depends only on the data. A policy that is trained on such a reward finds what
the labels never showed it; `is_known` says of an answer whether it is like those that were
labelled.
"""

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, model_validator

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.part_tools import Scores, to_binary
from mlx_parallm.system.packages import require
from mlx_parallm.system.pydantic_faults import faults
from mlx_parallm.types import Trajectory

LEAST_OF_EACH = 10
LEAST_USES = 3  # fewest uses for a tool, word or word pair to be a feature
MOST_PHRASES = 5000
COUNTED = ("calls", "success", "characters", "words", "steps", "spent", "truncated")
CONSTANT = 1e-9  # a standard deviation, of the largest value: below it is rounding
TOLERANCE = 1e-10  # bound on the mean loss's gradient
KNOWN = 0.5  # the share of an answer's words that was in a labelled one
BEYOND = 0.5  # deviations that a length may lie outside the labelled ones
WORD = re.compile(r"\w+|[^\w\s]")

Floats = NDArray[np.float64]


class LearnedReward(BaseModel):
    """`score` → the probability of a good label. `mean`, `scale`, `low`, `high` have one entry for
    each counted feature (COUNTED, then the tools), `weights` one for each of these and then one for
    each of `phrases`. Counts are standardised and kept between `low` and `high`, the least
    and the most of the labelled episodes; a phrase counts once."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[2]
    tools: tuple[str, ...]
    words: tuple[str, ...]  # all that was in a labelled answer
    phrases: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    positive: int  # labels it was fitted on
    negative: int

    @classmethod
    def fit(
        cls, trajectories: Sequence[Trajectory], labels: Sequence[bool], *, l2: float = 1.0
    ) -> "LearnedReward":
        """Minimises the sum of the log losses + l2/2 · |weights|² (the bias is free). A feature
        that is the same in all episodes but for rounding has the weight 0.

        Raises ConfigError: fewer than 10 good or 10 bad labels, not one label for each trajectory,
        a label that is neither true nor false, a negative l2, or no scikit-learn.
        """
        require("a reward that is fitted to labels", "sklearn")
        from sklearn.linear_model import LogisticRegression
        from sklearn.preprocessing import StandardScaler

        if not 0 <= l2 < math.inf:
            raise ConfigError(f"learned reward: l2 = {l2}: expected a number from 0")
        if len(labels) != len(trajectories):
            raise ConfigError(
                f"learned reward: {len(labels)} labels for {len(trajectories)} trajectories"
            )
        for number, label in enumerate(labels):
            if label not in (True, False):
                raise ConfigError(
                    f"learned reward: label {number} is {label!r}: expected true or false"
                )
        positive = sum(bool(label) for label in labels)
        negative = len(labels) - positive
        if min(positive, negative) < LEAST_OF_EACH:
            raise ConfigError(
                f"learned reward: {positive} good and {negative} bad labels; it takes"
                f" {LEAST_OF_EACH} of each"
            )
        uses = Counter(call["name"] for t in trajectories for call in t.tool_calls)
        tools = tuple(sorted(name for name, count in uses.items() if count >= LEAST_USES))
        texts = [trajectory.text for trajectory in trajectories]
        phrases, present_N_P = _phrases_of(texts)
        counted_N_C = np.stack([_counted(trajectory, tools) for trajectory in trajectories])
        scaler = StandardScaler().fit(counted_N_C)
        constant_C = np.sqrt(scaler.var_) <= CONSTANT * np.abs(counted_N_C).max(axis=0, initial=1.0)
        scaler.scale_[constant_C] = 1.0
        standard_N_C = np.where(constant_C, 0.0, scaler.transform(counted_N_C))
        with warnings.catch_warnings():  # what the solver cannot do another one does
            warnings.simplefilter("ignore")
            fitted = LogisticRegression(
                C=1 / l2 if l2 else np.inf, solver="newton-cholesky", tol=TOLERANCE
            ).fit(np.hstack([standard_N_C, present_N_P]), np.asarray(labels, bool))
        weights = fitted.coef_[0]
        weights[: len(constant_C)][constant_C] = 0.0
        return cls(
            format=2,
            tools=tools,
            words=tuple(sorted({word for text in texts for word in _words(text)})),
            phrases=phrases,
            mean=scaler.mean_.tolist(),
            scale=scaler.scale_.tolist(),
            low=standard_N_C.min(axis=0).tolist(),
            high=standard_N_C.max(axis=0).tolist(),
            weights=weights.tolist(),
            bias=float(fitted.intercept_[0]),
            positive=positive,
            negative=negative,
        )

    @model_validator(mode="after")
    def _one_number_for_each_feature(self) -> "LearnedReward":
        counted = len(COUNTED) + len(self.tools)
        if {len(self.mean), len(self.scale), len(self.low), len(self.high)} != {counted}:
            raise ValueError(f"mean, scale, low and high should have {counted} numbers")
        if len(self.weights) != counted + len(self.phrases):
            raise ValueError(f"weights should have {counted + len(self.phrases)} numbers")
        return self

    def score(self, trajectory: Trajectory) -> float:
        """0 to 1."""
        standard = np.clip(self._standard(trajectory), self.low, self.high)
        present = set(_phrases(trajectory.text))
        has_phrase = [phrase in present for phrase in self.phrases]
        return _sigmoid(float(np.concatenate([standard, has_phrase]) @ self.weights) + self.bias)

    def is_known(self, trajectory: Trajectory) -> bool:
        """Whether an episode is like those that the reward was fitted on: half of its answer's
        words was in one of them, and its lengths and calls are about within theirs."""
        standard = self._standard(trajectory)
        off = max(np.max(standard - self.high), np.max(np.subtract(self.low, standard)))
        words, seen = _words(trajectory.text), set(self.words)
        share = sum(word in seen for word in words) / len(words) if words else float(not off)
        return bool(share >= KNOWN and off <= BEYOND)

    def knows_text(self, text: str) -> bool:
        """Whether half of a text's words was in a labelled answer."""
        words, seen = _words(text), set(self.words)
        return bool(words) and sum(word in seen for word in words) >= KNOWN * len(words)

    def _standard(self, trajectory: Trajectory) -> Floats:
        counted = _counted(trajectory, self.tools)
        return np.asarray((counted - np.asarray(self.mean)) / np.asarray(self.scale))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.model_dump_json() + "\n", encoding="utf-8")

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
    file. Metric `learned/unknown`: the share of the episodes that are like none of the labelled
    ones.

    Raises ConfigError: the file cannot be read.
    """
    model = LearnedReward.load(path)

    def part(
        trajectories: Sequence[Trajectory],
        log_metric: Callable[[str, float], None] | None = None,
    ) -> Scores:
        if log_metric is not None:
            for trajectory in trajectories:
                log_metric("learned/unknown", float(not model.is_known(trajectory)))
        return to_binary([model.score(trajectory) for trajectory in trajectories], threshold)

    return part


def _counted(trajectory: Trajectory, tools: Sequence[str]) -> Floats:
    calls: Sequence[Mapping[str, Any]] = trajectory.tool_calls
    counted = {
        "calls": math.log1p(len(calls)),
        "success": sum(bool(call.get("ok")) for call in calls) / len(calls) if calls else 0.5,
        "characters": math.log1p(len(trajectory.text)),
        "words": math.log1p(len(_words(trajectory.text))),
        "steps": math.log1p(trajectory.step_count),
        "spent": math.log1p(max(0.0, float(trajectory.metadata.get("spent", 0.0)))),
        "truncated": float(trajectory.truncated),
    }
    used = Counter(call["name"] for call in calls)
    shares = [used[tool] / len(calls) if calls else 0.0 for tool in tools]
    return np.array([counted[name] for name in COUNTED] + shares)


def _phrases_of(texts: Sequence[str]) -> tuple[tuple[str, ...], Floats]:
    """Return the phrases of several texts, and which text has which: [texts, phrases]."""
    from sklearn.feature_extraction.text import CountVectorizer

    counter = CountVectorizer(
        analyzer=_phrases, binary=True, min_df=LEAST_USES, max_features=MOST_PHRASES
    )
    try:
        present = counter.fit_transform(texts).toarray().astype(np.float64)
    except ValueError:  # no phrase is in so many texts
        return (), np.zeros((len(texts), 0))
    return tuple(counter.get_feature_names_out().tolist()), present


def _phrases(text: str) -> list[str]:
    """Words and pairs of words."""
    words = _words(text)
    return [*words, *map(" ".join, itertools.pairwise(words))]


def _words(text: str) -> list[str]:
    # halves of a character are signs that no file can hold
    return WORD.findall(text.lower().encode("utf-8", "replace").decode())


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
