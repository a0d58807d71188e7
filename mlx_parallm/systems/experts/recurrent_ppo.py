"""Recurrent PPO: N episodes side by side, the hidden state carried through them and replayed in the
update.

    collect    `horizon` steps of N episodes → columns [T, N], with the memory that the first step
               began with
    cut        columns → rows: one a piece of an episode, right-padded, each with the memory that it
               began with
    update     `epochs` passes over the rows in mini-batches: `losses.ppo`, the one PPO of this
               package

A piece is replayed from the memory of its first step, so the first update's ratios are 1. An
episode that was truncated, or that the horizon cuts, has γ V of the state that it stopped in as
part of its last reward; a terminated one has not.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.losses.ppo import Loss, Steps, clipped_ppo, gae, loss_inputs, update_parts
from mlx_parallm.models.parameters import check_optimizer
from mlx_parallm.system.files import check_regular, write_directory
from mlx_parallm.systems.experts.expert import PackedState, RNNExpertBase
from mlx_parallm.systems.experts.saving import load_expert, save_expert
from mlx_parallm.systems.experts.vector_tasks import VectorTask

EXPERT_FILE, OPTIMIZER_FILE, STATE_FILE = (
    "expert.safetensors",
    "optimizer.safetensors",
    "state.json",
)
STOP_AT_KL = 1.5  # times target_kl


@dataclass(frozen=True)
class RecurrentPPOConfig:
    """Recurrent PPO. Raises ConfigError: a size below 1, a share outside [0, 1]."""

    horizon: int = 40  # steps of each episode between two updates
    epochs: int = 10
    batch_size: int = 640  # steps a mini-batch, in whole rows
    learning_rate: float = 1e-3
    anneal: bool = True  # the learning rate falls to 0 over `total_steps`
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_clip: float = 0.0  # 0: the plain squared error; a bound fits returns of the order of 1
    value_coefficient: float = 0.5
    entropy_weight: float = 0.0
    max_grad_norm: float = 0.5
    # None: measured, at most 1, so that returns stay below about 5
    reward_scale: float | None = None
    target_kl: float | None = 0.02  # an update ends when approx_kl is above 1.5 times this
    normalize_advantages: bool = True
    recurrent: bool = True  # False: every step begins without memory, to compare

    def __post_init__(self) -> None:
        if min(self.horizon, self.epochs, self.batch_size) < 1:
            raise ConfigError("PPO: horizon, epochs and batch_size have to be at least 1")
        if not (0 <= self.gamma <= 1 and 0 <= self.gae_lambda <= 1):
            raise ConfigError(
                f"PPO: gamma and gae_lambda have to be in [0, 1], not {self.gamma} and"
                f" {self.gae_lambda}"
            )
        if not (
            0 < self.learning_rate < math.inf and self.max_grad_norm > 0 and self.clip_ratio > 0
        ):
            raise ConfigError("PPO: learning_rate, max_grad_norm and clip_ratio have to be above 0")
        if self.reward_scale is not None and not 0 < self.reward_scale < math.inf:
            raise ConfigError(f"PPO: reward_scale has to be above 0, not {self.reward_scale}")

    def loss(self) -> Loss:
        """The clipped surrogate with entropy bonus, and the clipped value loss."""
        return clipped_ppo(
            clip_ratio=self.clip_ratio,
            entropy_weight=self.entropy_weight,
            value_clip=self.value_clip,
            value_coefficient=self.value_coefficient,
        )


@dataclass
class RewardScale:
    """The factor of rewards in what is learned from, so that the value loss does not drown the
    policy's.

    A fixed one, or min(1, 5 / (rms · H)): the root mean square of the rewards, and the steps H = 1
    / (1 - γ (1 - p)) that a return reaches over if an episode ends (is terminated) with
    probability p a step. A limit of time is no end, so short episodes too have returns of H
    rewards. Smaller returns stay as they are. Older updates count less.

    Worked: rewards of 1, γ = 0.99, never terminated: H = 100, factor 0.05, a return is 5.
    Terminated after every tenth step: p = 0.1, H = 1 / 0.109 = 9.17, factor 0.545.
    """

    FORGET: ClassVar[float] = 0.9
    LARGEST: ClassVar[float] = 5.0

    fixed: float | None
    gamma: float
    # sums over the steps so far, each update's times FORGET for every later one
    squares: float = 0.0
    ends: float = 0.0
    steps: float = 0.0

    @property
    def factor(self) -> float:
        if self.fixed is not None:
            return self.fixed
        if not self.squares:
            return 1.0
        reach = 1 / (1 - self.gamma * (1 - self.ends / self.steps) + 1e-8)
        return min(1.0, self.LARGEST / (math.sqrt(self.squares / self.steps) * reach))

    def measure(self, rewards: np.ndarray, ends: int) -> None:
        """Take the rewards of an update, of which `ends` ended an episode for good."""
        self.squares = self.FORGET * self.squares + float(
            np.square(rewards, dtype=np.float64).sum()
        )
        self.ends = self.FORGET * self.ends + ends
        self.steps = self.FORGET * self.steps + rewards.size


@dataclass
class Columns:
    """`horizon` steps of N episodes: arrays [T, N, …]."""

    first_state: np.ndarray  # [N, L · S, H]
    observations: np.ndarray
    raw_actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    rewards: np.ndarray  # scaled, with γ V if an episode was cut
    ended: np.ndarray


@dataclass(frozen=True)
class Rows:
    """Pieces of episodes, right-padded: arrays [R, T, …]; `lengths` [R], `state` [R, L · S, H]."""

    observations: np.ndarray
    actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    advantages: np.ndarray
    lengths: np.ndarray
    state: np.ndarray

    def take(self, rows: np.ndarray, mean: float, deviation: float) -> Steps:
        """Return these pieces as a `Steps`, advantages normalised by `mean` and `deviation`.

        A row of it is as long as the longest piece. Short pieces follow each other in one, so that
        little is padding.
        """
        lengths = self.lengths[rows]
        line, offset = pack(lengths, self.state[rows].any(axis=(1, 2)))
        inside = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        source = np.repeat(rows, lengths), inside
        target = np.repeat(line, lengths), np.repeat(offset, lengths) + inside
        shape = (int(line.max()) + 1, int(lengths.max()))

        def part(array: np.ndarray) -> np.ndarray:
            packed = np.zeros((*shape, *array.shape[2:]), array.dtype)
            packed[target] = array[source]
            return packed

        mask, begins = np.zeros(shape, bool), np.zeros(shape, bool)
        mask[target] = True
        begins[line, offset] = offset > 0
        state = np.zeros((shape[0], *self.state.shape[1:]), np.float32)
        state[line[offset == 0]] = self.state[rows[offset == 0]]
        values, advantages = part(self.values), part(self.advantages)
        return Steps(
            observations=mx.array(part(self.observations)),
            actions=mx.array(part(self.actions)),
            mask=mx.array(mask),
            logprobs=mx.array(part(self.log_probs)),
            values=mx.array(values),
            advantages=mx.array((advantages - mean) / deviation),
            returns=mx.array(advantages + values),
            state=PackedState(mx.array(state), begins),
        )


@dataclass(frozen=True)
class EpisodePiece:
    """Steps of one episode that follow each other, from the memory `state` [L · S, H] on: arrays
    [T, …]."""

    observations: np.ndarray
    raw_actions: np.ndarray
    log_probs: np.ndarray
    values: np.ndarray
    rewards: np.ndarray  # with γ V of the state after the last step if it was cut
    state: np.ndarray


def pack(lengths: np.ndarray, remembers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Place pieces into lines as long as the longest; return each piece's line and offset in it,
    [R] int each.

    Pieces that begin with a memory (`remembers`, [R] bool) begin a line. The others go into the
    first line with room for them, the longest first.

    Worked: lengths [1, 3, 2, 1], the last one remembers → it begins line 0; the piece of 3 line 1;
    the piece of 2 goes to line 0 behind the last one; the piece of 1 finds no room and begins line
    2.
    """
    longest, none, used = int(lengths.max()), len(lengths), 0
    line, offset = np.zeros(none, int), np.zeros(none, int)
    # heaps: the lines with so much room, and the first of
    lines: list[list[int]] = [[] for _ in range(longest + 1)]
    first = np.full(longest + 1, none)  # each: so the search takes no longer with more lines
    for piece in sorted(range(none), key=lambda piece: (not remembers[piece], -lengths[piece])):
        length = int(lengths[piece])
        room = length + int(first[length:].argmin())
        if remembers[piece] or first[room] == none:
            fits, room, used = used, longest, used + 1
        else:
            fits = heappop(lines[room])
            first[room] = lines[room][0] if lines[room] else none
        line[piece], offset[piece] = fits, longest - room
        heappush(lines[room - length], fits)
        first[room - length] = lines[room - length][0]
    return line, offset


def cut(columns: Columns, gamma: float, gae_lambda: float) -> Rows:
    """Cut the columns where episodes end; advantages by GAE, each piece for itself."""
    horizon, count = columns.ended.shape
    pieces = []
    for n in range(count):
        bounds = [*(np.flatnonzero(columns.ended[:, n]) + 1), horizon]
        for a, b in zip([0, *bounds[:-1]], bounds, strict=True):
            if b > a:
                pieces.append(
                    EpisodePiece(
                        columns.observations[a:b, n],
                        columns.raw_actions[a:b, n],
                        columns.log_probs[a:b, n],
                        columns.values[a:b, n],
                        columns.rewards[a:b, n],
                        columns.first_state[n] if a == 0 else np.zeros_like(columns.first_state[n]),
                    )
                )
    return rows_of(pieces, gamma, gae_lambda)


def rows_of(pieces: Sequence[EpisodePiece], gamma: float, gae_lambda: float) -> Rows:
    """Return pieces of episodes as rows, with advantages by GAE, each piece for itself."""
    lengths = np.array([len(piece.values) for piece in pieces])
    inside = np.arange(lengths.max()) < lengths[:, None]
    values = np.concatenate([piece.values for piece in pieces])
    advantages = gae(
        np.concatenate([piece.rewards for piece in pieces]).astype(np.float64),
        values.astype(np.float64),
        np.cumsum(lengths) - 1,
        gamma=gamma,
        gae_lambda=gae_lambda,
    )

    def padded(values: np.ndarray) -> np.ndarray:
        rows = np.zeros(
            (*inside.shape, *values.shape[1:]),
            np.int32 if values.dtype.kind == "i" else np.float32,
        )
        rows[inside] = values
        return rows

    return Rows(
        padded(np.concatenate([piece.observations for piece in pieces])),
        padded(np.concatenate([piece.raw_actions for piece in pieces])),
        padded(np.concatenate([piece.log_probs for piece in pieces])),
        padded(values),
        padded(advantages),
        lengths,
        np.stack([piece.state for piece in pieces]),
    )


@dataclass
class EpisodeStatistics:
    """Returns and lengths of the episodes that ended since the last reading."""

    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)


class RecurrentPPO:
    """Trains an expert on a task. `train(total_steps)` may be called again; it continues. Without a
    task its owner has the steps, and calls `update(rows_of(…))`.

    Raises ConfigError: the expert's sizes are not the task's, or it has no value head.
    """

    def __init__(
        self,
        expert: RNNExpertBase,
        task: VectorTask | None,
        config: RecurrentPPOConfig | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if task is not None:
            check_sizes(expert, task)
        if not expert.config.use_value_head:
            raise ConfigError(f"expert {expert.config.name!r}: PPO needs use_value_head = True")
        self.expert, self.task, self.config, self.seed = (
            expert,
            task,
            config or RecurrentPPOConfig(),
            seed,
        )
        self.optimizer = self._new_optimizer()
        self.optimizer.init(expert.trainable_parameters())
        self.steps = self.updates = 0
        self.finished = EpisodeStatistics()
        self.scale = RewardScale(self.config.reward_scale, self.config.gamma)
        self._factor = self.scale.factor  # in whose units the value head and new columns are
        self._loss = self.config.loss()
        self._gradient = nn.value_and_grad(expert, self._objective)
        self._key = mx.random.key(seed)
        self._order = np.random.default_rng(seed)
        self._observations: np.ndarray | None = None

    def anneal(self, done: float) -> None:
        """Set the learning rate for a training of which `done`, 0 to 1, is done."""
        if self.config.anneal:
            self.optimizer.learning_rate = self.config.learning_rate * max(1 - done, 0.01)

    def train(
        self, total_steps: int, *, report: Callable[[dict[str, float]], bool | None] | None = None
    ) -> list[dict[str, float]]:
        """Train until `self.steps` is `total_steps`. `report` gets each update's metrics; True from
        it ends training.

        Metrics: steps, episode_return (mean of the episodes that ended; absent when none did),
        episode_length, policy_loss, value_loss, entropy, approx_kl, clip_fraction,
        explained_variance, grad_norm, steps_per_second, reward_scale. Returns are unscaled,
        value_loss is of scaled ones.
        """
        history = []
        while self.steps < total_steps:
            began, before = time.perf_counter(), self.steps
            self.anneal(self.steps / total_steps)
            metrics = self.update(
                cut(self._rescaled(self.collect()), self.config.gamma, self.config.gae_lambda)
            )
            metrics["steps"] = self.steps
            metrics["steps_per_second"] = (self.steps - before) / (time.perf_counter() - began)
            if self.finished.returns:
                metrics["episode_return"] = float(np.mean(self.finished.returns))
                metrics["episode_length"] = float(np.mean(self.finished.lengths))
                self.finished = EpisodeStatistics()
            history.append(metrics)
            if report is not None and report(metrics):
                break
        return history

    def collect(self) -> Columns:
        """Play `horizon` steps of each episode; episodes continue where the last call left them."""
        expert, task, config = self.expert, self.task, self.config
        if task is None:
            raise RuntimeError("this RecurrentPPO has no task to play")
        expert.eval()
        if self._observations is None:
            self._observations = task.reset(self.seed)
            self._state = expert.initial_state(task.num_envs)
            self._return, self._length = np.zeros(task.num_envs), np.zeros(task.num_envs, int)
        first_state, kept, cuts = np.array(self._state), [], []
        for _ in range(config.horizon):
            self._key, key = mx.random.split(self._key)
            seen = self._observations
            output = expert.step(mx.array(seen), self._state, key=key)
            mx.eval(output.action, output.raw, output.log_prob, output.value, output.hidden)
            step = task.step(np.array(output.action))
            behind = np.zeros(task.num_envs)  # γ V of the state that an episode was truncated in
            if step.truncated.any():
                after = expert.step(
                    mx.array(step.last_observations), self._memory(output.hidden), key=key
                ).value
                behind = config.gamma * np.where(
                    step.truncated & ~step.terminated, np.array(after), 0.0
                )
            kept.append(
                (
                    seen,
                    np.array(output.raw),
                    np.array(output.log_prob),
                    np.array(output.value),
                    np.array(step.rewards, np.float64),
                    step.ended,
                )
            )
            cuts.append((behind, step.terminated))
            self._count(step.rewards, step.ended)
            alive = mx.array(~step.ended)[:, None, None]
            self._state = mx.where(alive, self._memory(output.hidden), 0.0)
            self._observations = step.observations
        columns = Columns(first_state, *(np.stack(column) for column in zip(*kept, strict=True)))
        for name, values in (("rewards", columns.rewards), ("observations", columns.observations)):
            if not np.isfinite(values).all():
                raise ConfigError(
                    f"PPO: {type(task).__name__}.step gave {name} that are NaN or infinite"
                )
        behind, terminated = (np.stack(column) for column in zip(*cuts, strict=True))
        last = np.array(expert.step(mx.array(self._observations), self._state, key=self._key).value)
        behind[-1] += config.gamma * np.where(columns.ended[-1], 0.0, last)
        self.scale.measure(columns.rewards, int(terminated.sum()))
        columns.rewards = self._factor * columns.rewards + behind
        self.steps += config.horizon * task.num_envs
        return columns

    def _rescaled(self, columns: Columns) -> Columns:
        """Learn in the newest factor's units from now on, the columns first: the value head goes
        over to them."""
        ratio, self._factor = self.scale.factor / self._factor, self.scale.factor
        if ratio == 1.0:
            return columns
        head = self.expert.value_head
        head.weight, head.bias = head.weight * ratio, head.bias * ratio
        return replace(
            columns, values=columns.values * np.float32(ratio), rewards=columns.rewards * ratio
        )

    def save(self, directory: str | Path) -> None:
        """Write expert, optimizer and random states as one directory, whole or absent. Raises
        CheckpointError."""

        def fill(path: Path) -> None:
            save_expert(path / EXPERT_FILE, self.expert)
            mx.save_safetensors(
                str(path / OPTIMIZER_FILE), dict(tree_flatten(self.optimizer.state))
            )
            state: dict[str, Any] = {
                "steps": self.steps,
                "updates": self.updates,
                "key": self._key.tolist(),
            }
            state |= {"order": self._order.bit_generator.state, "seed": self.seed}
            text = json.dumps(state | {"scale": vars(self.scale), "factor": self._factor})
            (path / STATE_FILE).write_text(text)

        write_directory(Path(directory), fill)

    def _new_optimizer(self) -> optimizers.Adam:
        return optimizers.Adam(self.config.learning_rate, eps=1e-5)

    def load(self, directory: str | Path) -> None:
        """Continue from `save`: weights, optimizer, counts. Episodes begin anew. Raises
        CheckpointError."""
        directory = Path(directory)
        loaded = load_expert(directory / EXPERT_FILE, type(self.expert))
        if (loaded.kind, loaded.config) != (self.expert.kind, self.expert.config):
            raise CheckpointError(
                f"{directory} holds another expert: {loaded.kind}, {loaded.config}"
            )
        try:
            for name in (STATE_FILE, OPTIMIZER_FILE):
                check_regular(directory / name)
            state = json.loads((directory / STATE_FILE).read_text())
            flat: Any = mx.load(str(directory / OPTIMIZER_FILE))
            optimizer: Any = tree_unflatten(list(flat.items()))
            check_optimizer(self._new_optimizer(), loaded, optimizer)
            self.steps, self.updates = int(state["steps"]), int(state["updates"])
            self._order.bit_generator.state = state["order"]
            self.scale = replace(
                self.scale,
                **{name: state["scale"][name] for name in ("squares", "ends", "steps")},
            )
            self._factor = float(state["factor"])
            self._key = mx.array(state["key"], mx.uint32)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{directory} is not a checkpoint of recurrent PPO: {error}"
            ) from error
        self.expert.update(loaded.parameters())
        self.optimizer.state = optimizer
        self.seed, self._observations = derive_seed("recurrent PPO", self.seed, self.steps), None

    def _memory(self, hidden: mx.array) -> mx.array:
        return hidden if self.config.recurrent else mx.zeros_like(hidden)

    def _count(self, rewards: np.ndarray, ended: np.ndarray) -> None:
        self._return += rewards
        self._length += 1
        self.finished.returns += self._return[ended].tolist()
        self.finished.lengths += self._length[ended].tolist()
        self._return[ended], self._length[ended] = 0, 0

    def update(self, rows: Rows) -> dict[str, float]:
        """Pass over the rows `epochs` times; end earlier when approx_kl exceeds its bound.
        Return the mean metrics."""
        config, sums, batches = self.config, dict[str, float](), 0
        rows = rows if config.recurrent else single_steps(rows)
        inside = np.arange(rows.values.shape[1]) < rows.lengths[:, None]
        advantages, values = rows.advantages[inside], rows.values[inside]
        mean, deviation = (
            (advantages.mean(), advantages.std() + 1e-8)
            if config.normalize_advantages
            else (0.0, 1.0)
        )
        self.expert.train()
        for _ in range(config.epochs):
            for chosen in self._mini_batches(rows.lengths):
                metrics = self._step(rows.take(chosen, float(mean), float(deviation)))
                batches += 1
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0.0) + value
            if (
                config.target_kl is not None
                and metrics["approx_kl"] > STOP_AT_KL * config.target_kl
            ):
                break
        self.updates += 1
        spread = (advantages + values).var()
        explained = 1 - advantages.var() / spread if spread else math.nan
        means = {name: value / batches for name, value in sums.items()}
        return means | {"explained_variance": float(explained), "reward_scale": self._factor}

    def _mini_batches(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Rows in random order, cut into mini-batches of about `batch_size` steps."""
        order = self._order.permutation(len(lengths))
        total = np.cumsum(lengths[order])
        count = max(1, round(total[-1] / self.config.batch_size))
        bounds = np.searchsorted(total, total[-1] * np.arange(1, count) / count)
        return [part for part in np.split(order, bounds) if len(part)]

    def _objective(self, steps: Steps) -> tuple[mx.array, dict[str, mx.array]]:
        outputs = self._loss(loss_inputs(self.expert, steps))
        return outputs.loss, outputs.metrics

    def _step(self, steps: Steps) -> dict[str, float]:
        (_, metrics), gradients = self._gradient(steps)
        parts = [(self.optimizer, self.expert, gradients)]
        return update_parts(parts, metrics, max_grad_norm=self.config.max_grad_norm)


def single_steps(rows: Rows) -> Rows:
    """Make every step a row, from the memory 0: the view of a policy without memory."""
    inside = np.arange(rows.values.shape[1]) < rows.lengths[:, None]
    part = lambda array: array[inside][:, None]  # noqa: E731
    count = int(inside.sum())
    return Rows(
        part(rows.observations),
        part(rows.actions),
        part(rows.log_probs),
        part(rows.values),
        part(rows.advantages),
        np.ones(count, int),
        np.zeros((count, *rows.state.shape[1:]), np.float32),
    )


def check_sizes(expert: RNNExpertBase, task: VectorTask) -> None:
    """Raises ConfigError: the expert does not fit the task."""
    config = expert.config
    if config.obs_dim != task.obs_dim:
        raise ConfigError(
            f"expert {config.name!r} reads {config.obs_dim} numbers, the task shows {task.obs_dim}"
        )
    if (config.num_actions if config.discrete_actions else 0) != task.num_actions:
        raise ConfigError(
            f"expert {config.name!r}: discrete_actions and num_actions do not fit the task's"
            f" {task.num_actions}"
        )
    if not task.num_actions and (config.action_dim, config.action_low, config.action_high) != (
        task.action_dim,
        task.action_low,
        task.action_high,
    ):
        raise ConfigError(
            f"expert {config.name!r}: the task has {task.action_dim} actions in"
            f" [{task.action_low}, {task.action_high}]"
        )


def evaluate(
    expert: RNNExpertBase,
    task: VectorTask,
    episodes: int,
    *,
    seed: int,
    deterministic: bool = True,
    recurrent: bool = True,
) -> list[dict[str, Any]]:
    """Play the first `episodes` episodes that begin, whole; return each one's return, length, end,
    and the task's info.

    Every environment plays the same number of episodes (rounded up), so that short ones are not
    over-represented.
    """
    check_sizes(expert, task)
    each = -(-episodes // task.num_envs)
    observations, state = task.reset(seed), expert.initial_state(task.num_envs)
    key = mx.random.key(seed)
    total, length = np.zeros(task.num_envs), np.zeros(task.num_envs, int)
    done: list[list[dict[str, Any]]] = [[] for _ in range(task.num_envs)]
    expert.eval()
    while min(map(len, done)) < each:
        key, now = mx.random.split(key)
        output = expert.step(mx.array(observations), state, deterministic=deterministic, key=now)
        step = task.step(np.array(output.action))
        total, length = total + step.rewards, length + 1
        for row in np.flatnonzero(step.ended):
            if len(done[row]) < each:
                end = {
                    "return": float(total[row]),
                    "length": int(length[row]),
                    "terminated": bool(step.terminated[row]),
                }
                done[row].append(
                    end | {name: float(values[row]) for name, values in step.info.items()}
                )
            total[row], length[row] = 0.0, 0
        alive = mx.array(~step.ended)[:, None, None] if recurrent else mx.array(False)
        state, observations = mx.where(alive, output.hidden, 0.0), step.observations
    return [row[number] for number in range(each) for row in done][:episodes]
