"""How good a prompt is, 0 to 1, learned from ratings of 1 to 5. No MLX.

    features(prompt) → z-scores → ridge regression → logistic function

It is fitted to the logits of (rating - 1) / 4, held within [EDGE, 1 - EDGE], so scores do not
saturate. What a rewriting is worth depends on the prompt: fallbacks if a task may well fail,
numbers if there are several tasks. So features say what a prompt needs, and whether it has that.
`rated_prompts.jsonl` holds ratings of our own, of prompts as they are and after each mutation;
`RewardModel.fit` takes anyone's.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from mlx_parallm.errors import ConfigError
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.pydantic_faults import faults
from mlx_parallm.systems.prompt_policy.classifier import LIMIT, LISTED, classify_prompt, verb_family
from mlx_parallm.systems.prompt_policy.mutations import (
    FALLBACK,
    mutate,
    reduce_context,
    split_tasks,
)
from mlx_parallm.systems.prompt_policy.phrases import CATEGORIES, TERMS

RATINGS = Path(__file__).with_name("rated_prompts.jsonl")
AS_IT_IS = "as it is"
LOWEST, HIGHEST = 1.0, 5.0  # ratings
RIDGE = 2.0
EDGE = 0.03
FEWEST = 10  # ratings of a fit
VAGUE_WORDS = 7  # a request of no more words says little
LONG_WORDS = 120
_RISK = re.compile(
    r"\b(fail(s|ed|ing)?|crash(es)?|flaky|intermittent|broken|random(ly)?|race condition|leak|only happens)\b",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"\s*(what|who|when|where|why|how|which|explain|describe|define)\b", re.IGNORECASE
)


def features(prompt: str) -> dict[str, float]:
    """Return the features of a prompt by name: numbers of the order of 1."""
    first, *rest = [part for part in re.split(r"\n\s*\n", prompt.strip()) if part.strip()] or [""]
    core = classify_prompt(first)
    words = re.findall(r"\w+", prompt.lower())
    numbered = core.has_list or any(
        LISTED.findall(part) and re.search(r"^\s*\d", part, re.M) for part in rest
    )
    fallback = bool(FALLBACK.search(prompt))
    limits = [part for part in rest if LIMIT.search(part) and not FALLBACK.search(part)]
    constrained = core.has_constraints or bool(limits)
    detailed = any(
        part not in limits and not FALLBACK.search(part) and not re.search(r"^\s*\d", part, re.M)
        for part in rest
    )
    tasks = 0 if numbered and core.has_list else len(split_tasks(first)[1])
    several = tasks >= 2 or (core.has_list and core.words > VAGUE_WORDS)
    vague = core.words <= VAGUE_WORDS and not core.is_question and not _ASKS.match(first)
    risky = verb_family(core) == "mend" and (bool(_RISK.search(first)) or not vague)
    asks = core.is_question or bool(_ASKS.match(first))
    shorter = reduce_context(first, core)
    values = {
        "filler": 0.0 if shorter is None else 1 - len(shorter.text) / len(first),
        "log words": math.log1p(len(words)) - 3,
        "long": max(0, len(words) - LONG_WORDS) / LONG_WORDS,
        "repetition": 1 - len(set(words)) / max(1, len(words)),
        "vague terms": sum(
            bool(re.search(rf"\b{re.escape(term)}\b", first.lower())) for term in TERMS
        )
        / 2,
    }
    for need, has, lack in (
        (vague, detailed, "detail"),
        (several, numbered, "numbered parts"),
        (risky, fallback, "fallbacks"),
        (asks, constrained, "limits"),
    ):
        values[f"needs {lack}, has none"] = float(need and not has)
        values[f"needs {lack}, has them"] = float(need and has)
        values[f"has {lack} without need"] = float(has and not need)
    category = core.category
    return values | {name: float(name == category) for name in CATEGORIES}


@dataclass(frozen=True)
class PromptScore:
    """`score` and `confidence`: 0 to 1. `breakdown`: what each feature adds to the score's
    logit, largest first."""

    score: float
    confidence: float
    breakdown: Mapping[str, float]
    explanation: str


class RewardModel(BaseModel):
    """A fitted model. `names` [F]; `mean`, `scale`, `weights` [F], `bias`; `spread`: of the
    logit's error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    names: tuple[str, ...]
    mean: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float
    spread: float

    @classmethod
    def fit(
        cls, prompts: Sequence[str], ratings: Sequence[float], *, ridge: float = RIDGE
    ) -> "RewardModel":
        """Fit ratings of 1 to 5. Raises ConfigError: fewer than 10, other numbers of both, or a
        rating out of range."""
        if len(prompts) != len(ratings) or len(prompts) < FEWEST:
            raise ConfigError(
                f"reward model: {len(prompts)} prompts and {len(ratings)} ratings; it takes"
                f" {FEWEST} of each"
            )
        if not all(LOWEST <= rating <= HIGHEST for rating in ratings):
            raise ConfigError(f"reward model: ratings go from {LOWEST:g} to {HIGHEST:g}")
        rows = [features(prompt) for prompt in prompts]
        names = tuple(rows[0])
        x = np.array([list(row.values()) for row in rows])
        share = np.clip(
            (np.array(ratings, np.float64) - LOWEST) / (HIGHEST - LOWEST), EDGE, 1 - EDGE
        )
        y = np.log(share / (1 - share))
        mean, scale = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-3)
        z = (x - mean) / scale
        bias = float(y.mean())
        weights = np.linalg.solve(z.T @ z + ridge * np.eye(len(names)), z.T @ (y - bias))
        return cls(
            names=names,
            mean=mean.tolist(),
            scale=scale.tolist(),
            weights=weights.tolist(),
            bias=bias,
            spread=float(np.std(y - bias - z @ weights)),
        )

    def score(self, prompt: str) -> PromptScore:
        """Score a prompt. `confidence` falls with the distance from the prompts of the fit."""
        z = (np.array(list(features(prompt).values())) - self.mean) / self.scale
        parts = z * self.weights
        logit = self.bias + float(parts.sum())
        order = np.argsort(-np.abs(parts))
        breakdown = {self.names[i]: float(parts[i]) for i in order}
        explanation = ", ".join(
            f"{name} {value:+.2f}" for name, value in list(breakdown.items())[:3]
        )
        confidence = 1 / (1 + self.spread + float(np.maximum(np.abs(z) - 3, 0).mean()))
        return PromptScore(
            1 / (1 + math.exp(-max(-30.0, min(30.0, logit)))), confidence, breakdown, explanation
        )

    def evaluate(self, prompts: Sequence[str], ratings: Sequence[float]) -> dict[str, float]:
        """Return mae, rmse and correlation of scores with (rating - 1) / 4."""
        scores = np.array([self.score(prompt).score for prompt in prompts])
        wanted = (np.array(ratings, np.float64) - LOWEST) / (HIGHEST - LOWEST)
        errors = scores - wanted
        spread = scores.std() * wanted.std()
        correlation = (
            float(((scores - scores.mean()) * (wanted - wanted.mean())).mean() / spread)
            if spread
            else 0.0
        )
        return {
            "mae": float(np.abs(errors).mean()),
            "rmse": float(np.sqrt(np.square(errors).mean())),
            "correlation": correlation,
        }

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all. Raises CheckpointError."""
        write_atomically(Path(path), self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, path: str | Path) -> "RewardModel":
        """Read what `save` wrote. Raises ConfigError: no such file, another one, or other
        features."""
        try:
            model = cls.model_validate_json(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is not a reward model: {faults(error)}") from error
        sizes = {len(numbers) for numbers in (model.mean, model.scale, model.weights)}
        if model.names != tuple(features("")) or sizes != {len(model.names)}:
            raise ConfigError(f"{path} was fitted with other features: fit it again")
        return model


def rated_prompts() -> list[dict[str, Any]]:
    """Return the ratings of the package: {"prompt", "scores": {"as it is": 2.5, mutation: rating
    or None}}."""
    return [json.loads(line) for line in RATINGS.read_text().splitlines()]


def rated_texts(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[float]]:
    """Return the texts, mutated ones too, and their ratings."""
    texts, ratings = [], []
    for row in rows:
        for name, rating in row["scores"].items():
            if rating is None:
                continue
            mutation = None if name == AS_IT_IS else mutate(row["prompt"], name)
            texts.append(row["prompt"] if mutation is None else mutation.text)
            ratings.append(float(rating))
    return texts, ratings


@cache
def default_reward_model() -> RewardModel:
    """Return the model that is fitted to the ratings of the package."""
    return RewardModel.fit(*rated_texts(rated_prompts()))
