"""Vectorised environments for experts: N episodes side by side, each begun anew when it ends.

    ProjectileTask    choose angle and velocity to hit a target in wind, ten attempts an episode
    ConstantTask      answer 0.5; ten steps an episode: the smallest thing that can be learned
    GymnasiumTask     any environment of gymnasium with a Box observation and a Box or Discrete
                      action

`terminated` is an end of the task: nothing comes after it. `truncated` is a limit of time: the
value of the state that the episode stopped in still counts (Pardo et al. 2018, arXiv:1712.00378).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from mlx_parallm.errors import ConfigError
from mlx_parallm.system.packages import require

GRAVITY = 9.81  # m/s²
HIT_M = 1.0  # a shot nearer than this hits
ATTEMPTS = 10
MAX_VELOCITY = 100.0  # m/s
TARGETS_M, WINDS = (50.0, 200.0), (-5.0, 5.0)  # the projectile task's ranges; wind in m/s


@dataclass(frozen=True)
class VectorStep:
    """One step of N episodes. If an episode ended, `observations` has the first of the next
    one."""

    observations: np.ndarray  # [N, D] float32
    rewards: np.ndarray  # [N] float64
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    # [N, D] float32: observation after the step, of the same episode
    last_observations: np.ndarray
    # [N] each: the task's numbers of the episode so far
    info: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def ended(self) -> np.ndarray:
        return self.terminated | self.truncated


class VectorTask(Protocol):
    """N episodes side by side. Continuous actions are [N, A] in the environment's units,
    discrete ones [N] int."""

    num_envs: int
    obs_dim: int
    action_dim: int
    num_actions: int  # 0: continuous
    action_low: float
    action_high: float

    def reset(self, seed: int) -> np.ndarray:
        """Begin N episodes; return their first observations [N, D] float32."""
        ...

    def step(self, actions: np.ndarray) -> VectorStep: ...


def flight(angle_degrees: Any, velocity: Any, wind: Any) -> Any:
    """Return where a shot lands, in m: d = v cos θ · t + ½ · wind · t, t = 2 v sin θ / g. Scalars
    or arrays.

    Worked: 45°, 50 m/s, wind 0 → t = 100 · 0.707107 / 9.81 = 7.208 s, d = 35.355 · 7.208 = 254.84
    m.
    """
    angle = np.radians(angle_degrees)
    seconds = 2 * velocity * np.sin(angle) / GRAVITY
    return velocity * np.cos(angle) * seconds + 0.5 * wind * seconds


def shot_of(action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return angle (0 to 90°) and velocity (0 to 100 m/s) of actions [..., 2] in [-1, 1]."""
    return action[..., 0] * 45.0 + 45.0, (action[..., 1] + 1.0) * MAX_VELOCITY / 2


def projectile_observation(
    target: Any, error: Any, distance: Any, wind: Any, attempts: Any
) -> np.ndarray:
    """Return [..., 10] float32: target, |error|, landing of the last shot / 200 m, wind / 10,
    attempts / 10, zeros."""
    parts = [np.asarray(part, np.float32) for part in (target, error, distance, wind, attempts)]
    scales = np.array([200, 200, 200, 10, ATTEMPTS], np.float32)
    return np.concatenate(
        [np.stack(parts, axis=-1) / scales, np.zeros((*parts[0].shape, 5), np.float32)], axis=-1
    )


class ProjectileTask:
    """Hit a target at 50 to 200 m in wind of up to 5 m/s within ten attempts.

    Reward: 1 for a hit (within 1 m, the end), else 0.1 · max(0, 1 - error / target) - 0.01, and
    -0.5 more for the tenth miss. Actions are `shot_of`'s; the last shot's landing is in the
    observation. `info["nearest"]`: the best shot, m.
    """

    obs_dim, action_dim, num_actions, action_low, action_high = 10, 2, 0, -1.0, 1.0

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> np.ndarray:
        self._random = np.random.default_rng(seed)
        self._target, self._wind = np.zeros(self.num_envs), np.zeros(self.num_envs)
        self._error, self._distance = np.zeros(self.num_envs), np.zeros(self.num_envs)
        self._attempts, self._nearest = np.zeros(self.num_envs, int), np.zeros(self.num_envs)
        self._begin(np.ones(self.num_envs, bool))
        return self._observe()

    def _begin(self, rows: np.ndarray) -> None:
        count = int(rows.sum())
        self._target[rows] = self._random.uniform(*TARGETS_M, count)
        self._wind[rows] = self._random.uniform(*WINDS, count)
        self._error[rows] = self._distance[rows] = self._attempts[rows] = 0
        self._nearest[rows] = np.inf

    def _observe(self) -> np.ndarray:
        return projectile_observation(
            self._target, self._error, self._distance, self._wind, self._attempts
        )

    def step(self, actions: np.ndarray) -> VectorStep:
        self._distance = flight(*shot_of(np.clip(actions, -1, 1)), self._wind)
        self._error = np.abs(self._distance - self._target)
        self._attempts = self._attempts + 1
        hit = self._error < HIT_M
        out = ~hit & (self._attempts >= ATTEMPTS)
        rewards = (
            np.where(hit, 1.0, 0.1 * np.maximum(0, 1 - self._error / self._target) - 0.01)
            - 0.5 * out
        )
        self._nearest = np.minimum(self._nearest, self._error)
        last, ended, info = self._observe(), hit | out, {"nearest": self._nearest.copy()}
        self._begin(ended)
        return VectorStep(self._observe(), rewards, ended, np.zeros_like(ended), last, info)


class ConstantTask:
    """Answer 0.5: the reward is 1 - |action - 0.5|, ten steps an episode; the observation is
    constant."""

    obs_dim, action_dim, num_actions, action_low, action_high = 4, 1, 0, -1.0, 1.0
    target, length = 0.5, 10

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> np.ndarray:
        self._steps = 0
        return np.ones((self.num_envs, self.obs_dim), np.float32)

    def step(self, actions: np.ndarray) -> VectorStep:
        self._steps = (self._steps + 1) % self.length
        same, ended = (
            np.ones((self.num_envs, self.obs_dim), np.float32),
            np.full(self.num_envs, self._steps == 0),
        )
        return VectorStep(
            same, 1 - np.abs(actions[:, 0] - self.target), ended, np.zeros_like(ended), same
        )


class GymnasiumTask:
    """N environments of gymnasium, `gymnasium.make_vec` in one process.

    Raises ConfigError: gymnasium is not installed, no such environment, spaces that are neither Box
    nor Discrete.
    """

    def __init__(self, id: str, num_envs: int, make: Mapping[str, Any] | None = None) -> None:
        require(f"environment {id!r}", "gymnasium")
        import gymnasium
        from gymnasium.vector import AutoresetMode

        options = {"autoreset_mode": AutoresetMode.SAME_STEP}
        try:
            self._envs = gymnasium.make_vec(
                id, num_envs, vectorization_mode="sync", vector_kwargs=options, **dict(make or {})
            )
        except (gymnasium.error.Error, TypeError) as error:
            raise ConfigError(f"environment {id!r}: {error}") from error
        seen, taken = self._envs.single_observation_space, self._envs.single_action_space
        if not isinstance(seen, gymnasium.spaces.Box):
            raise ConfigError(f"environment {id!r}: an expert needs a Box observation, not {seen}")
        self.num_envs, self.obs_dim = num_envs, int(np.prod(seen.shape))
        self.num_actions, self.action_dim, self.action_low, self.action_high = 0, 1, -1.0, 1.0
        if isinstance(taken, gymnasium.spaces.Discrete):
            self.num_actions = int(taken.n)
        elif (
            isinstance(taken, gymnasium.spaces.Box)
            and np.isfinite([taken.low.min(), taken.high.max()]).all()
        ):
            self.action_dim = int(np.prod(taken.shape))
            self.action_low, self.action_high = float(taken.low.min()), float(taken.high.max())
        else:
            raise ConfigError(
                f"environment {id!r}: an expert needs a Discrete or a"
                f" bounded Box action, not {taken}"
            )
        self._start, self._taken = int(getattr(taken, "start", 0)), taken

    def reset(self, seed: int) -> np.ndarray:
        return self._flat(self._envs.reset(seed=seed)[0])

    def _flat(self, observations: Any) -> np.ndarray:
        return np.asarray(observations, np.float32).reshape(self.num_envs, self.obs_dim)

    def step(self, actions: np.ndarray) -> VectorStep:
        if self.num_actions:
            taken = actions.astype(int) + self._start
        else:
            shape = (self.num_envs, *self._taken.shape)
            taken = np.clip(actions.reshape(shape), self._taken.low, self._taken.high).astype(
                self._taken.dtype
            )
        seen, rewards, terminated, truncated, info = self._envs.step(taken)
        last = self._flat(seen).copy()
        for row in np.flatnonzero(terminated | truncated):
            last[row] = np.asarray(info["final_obs"][row], np.float32).reshape(-1)
        return VectorStep(
            self._flat(seen), np.asarray(rewards, np.float64), terminated, truncated, last
        )

    def close(self) -> None:
        self._envs.close()
