"""Data that the policy's parts exchange: an experience, a choice, the history that /stats shows,
and the counts for a kind of prompt. No MLX."""

import base64
import json
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ConfigDict, NonNegativeInt, TypeAdapter

SIZE = 128
PRIOR = 4.0  # λ: after so many experiences of one prompt the uncertainty is about 0.7
RECENT_REWARDS, RECENT_UPDATES = 100, 10  # how many /stats averages


@dataclass(frozen=True)
class Experience:
    """One mutation and its result.

    Attributes:
        state: embedding of the prompt, [input_dim] float32.
        log_prob: of `action` when it was chosen.
        next_state: embedding of the prompt after it, [input_dim]; unused where `done`.
        allowed: [action_dim] bool, actions that could be chosen; None = all.
        episode_id: experiences of one episode have the same; None = an episode of one step.
        sequence: its number in the store, from 1.
    """

    state: np.ndarray
    action: int
    reward: float
    next_state: np.ndarray
    done: bool
    log_prob: float
    value: float
    allowed: np.ndarray | None = None
    episode_id: str | None = None
    sequence: int = 0


@dataclass(frozen=True)
class Choice:
    """A mutation that was chosen. `uncertainty`: 0 = many experiences of such prompts, 1 = none."""

    action: int
    log_prob: float
    value: float
    probabilities: np.ndarray  # [action_dim] float32
    uncertainty: float


@dataclass
class History:
    """Counts and rewards that /stats shows; part of a checkpoint."""

    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

    updates: NonNegativeInt = 0
    episodes: NonNegativeInt = 0
    experiences: NonNegativeInt = 0
    through: NonNegativeInt = 0  # sequence number of the last experience that is counted
    max_reward: float | None = None
    actions: list[NonNegativeInt] = field(default_factory=list)  # how often each was chosen
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_REWARDS))
    losses: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT_UPDATES))

    def add(self, experience: Experience) -> None:
        self.experiences += 1
        self.through = max(self.through, experience.sequence)
        self.episodes += experience.done
        self.actions += [0] * (experience.action + 1 - len(self.actions))
        self.actions[experience.action] += 1
        self.rewards.append(experience.reward)
        self.max_reward = (
            experience.reward
            if self.max_reward is None
            else max(self.max_reward, experience.reward)
        )

    def to_json(self) -> dict[str, Any]:
        lists = {
            "actions": list(self.actions),
            "rewards": list(self.rewards),
            "losses": list(self.losses),
        }
        return vars(self) | lists

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "History":
        """Raises ValueError: damaged."""
        history = TypeAdapter(cls).validate_json(json.dumps(value))
        history.rewards = deque(history.rewards, RECENT_REWARDS)
        history.losses = deque(history.losses, RECENT_UPDATES)
        return history


class Novelty:
    """A measure of how new a prompt is: the leverage of an embedding among those of all
    experiences.

    u(x) = sqrt(λ xᵀ (λ I + Σ x xᵀ)⁻¹ x),  x of length 1

    It is the standard deviation of a ridge regression's prediction, as a share of what it is
    without any data (LinUCB, arXiv:1003.0146, eq. 4): 1 before the first experience, about sqrt(λ /
    (λ + n)) after n of equal prompts. Embeddings are projected to SIZE dimensions at random, so
    that one experience costs SIZE² operations. Not thread-safe.
    """

    def __init__(self, input_dim: int, seed: int) -> None:
        self.input_dim, self.seed = input_dim, seed
        size = min(SIZE, input_dim)
        generator = np.random.default_rng(seed)
        self._projection = generator.standard_normal((input_dim, size)) / math.sqrt(size)
        self._inverse = np.eye(size) / PRIOR

    def uncertainty(self, state: np.ndarray) -> float:
        """Return 0 to 1 for an embedding [input_dim]; 1 for a vector of zeros."""
        x = self._direction(state)
        return (
            math.sqrt(min(1.0, max(0.0, PRIOR * float(x @ self._inverse @ x)))) if x.any() else 1.0
        )

    def add(self, state: np.ndarray) -> None:
        """Count an experience (Sherman–Morrison)."""
        x = self._direction(state)
        y = self._inverse @ x
        self._inverse -= np.outer(y, y) / (1 + x @ y)

    def to_json(self) -> dict[str, Any]:
        inverse = base64.b64encode(self._inverse.astype("<f8").tobytes()).decode()
        return {"input_dim": self.input_dim, "seed": self.seed, "inverse": inverse}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Novelty":
        """Raises ValueError, KeyError or TypeError: damaged."""
        novelty = cls(int(value["input_dim"]), int(value["seed"]))
        numbers = np.frombuffer(base64.b64decode(value["inverse"]), "<f8")
        if not np.isfinite(numbers).all():
            raise ValueError("its novelty has numbers that are not finite")
        novelty._inverse = numbers.reshape(novelty._inverse.shape).copy()
        return novelty

    def _direction(self, state: np.ndarray) -> np.ndarray:
        x = np.asarray(state, np.float64) @ self._projection
        length = float(np.linalg.norm(x))
        return x / length if length else x
