"""Recurrent policies: encoder → L × (GRU or LSTM) → heads of the action, its deviation, and the
value.

The memory between two steps is one array [B, L · S, H] with S = 1 (GRU: h) or 2 (LSTM: h, c), so
that it is stored, cut and reset like any other column. Zeros begin an episode.

A continuous action is a = low + (high - low) · (tanh(u) + 1) / 2 with u ~ N(mean, std). What is
stored and replayed is
u: tanh⁻¹ of an action near the bound has no digits left. Its log-probability counts the change of
variables,

    log p(a) = log N(u; mean, std) - Σ log((high - low) / 2 · (1 - tanh²(u)))

(Haarnoja et al. 2018, arXiv:1801.01290, appendix C), with log(1 - tanh²(u)) = 2 (log 2 - u -
softplus(-2u)).

Worked, bounds ±1, mean 0, std 1, u = 0.5: log N = -0.918939 - 0.125 = -1.043939; tanh² = 0.213552,
log 0.786448 = -0.240229; log p = -0.803710.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ConfigError

LOG_STD_MIN, LOG_STD_MAX, LOG_STD_START = -5.0, 0.0, -1.0
RELU_GAIN = math.sqrt(2)  # keeps the variance behind a ReLU
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class ExpertConfig:
    """The shape of an expert. Raises ConfigError: a size below 1, bounds in the wrong order, no
    number of actions, or a setting of the other kind of actions, which would have no effect."""

    name: str
    obs_dim: int
    # size of continuous actions; a discrete expert chooses one of `num_actions`
    action_dim: int = 1
    hidden_dim: int = 128
    num_layers: int = 2
    dropout: float = 0.0  # between layers, while the policy learns
    discrete_actions: bool = False
    num_actions: int = 0
    action_low: float = -1.0
    action_high: float = 1.0
    use_value_head: bool = True

    def __post_init__(self) -> None:
        if min(self.obs_dim, self.action_dim, self.hidden_dim, self.num_layers) < 1:
            raise ConfigError(
                f"expert {self.name!r}: obs_dim, action_dim, hidden_dim and"
                " num_layers have to be at least 1"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"expert {self.name!r}: dropout has to be in [0, 1), not {self.dropout}"
            )
        if self.discrete_actions and self.num_actions < 2:
            raise ConfigError(
                f"expert {self.name!r}: discrete_actions needs num_actions ≥ 2, not"
                f" {self.num_actions}"
            )
        what = f"expert {self.name!r}"
        if self.discrete_actions and (self.action_low, self.action_high) != (-1.0, 1.0):
            raise ConfigError(
                f"{what}: action_low and action_high have no effect with discrete_actions"
            )
        if self.num_actions and not self.discrete_actions:
            raise ConfigError(
                f"{what}: num_actions = {self.num_actions} needs discrete_actions = True"
            )
        if self.dropout and self.num_layers == 1:
            raise ConfigError(f"{what}: dropout is between layers, and num_layers is 1")
        if not -math.inf < self.action_low < self.action_high < math.inf:
            raise ConfigError(
                f"expert {self.name!r}: finite action_low < action_high, not"
                f" {self.action_low}, {self.action_high}"
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ExpertOutput:
    """One step of B rows. `action` is what the environment takes; `raw` what `scores` replays."""

    action: mx.array  # [B, A] float32, or [B] int32
    raw: mx.array  # [B, A] float32 before tanh, or the action itself
    log_prob: mx.array  # [B] float32, of `action`
    value: mx.array  # [B] float32; 0 without a value head
    entropy: mx.array  # [B] float32, nats
    hidden: mx.array  # [B, L · S, H] after the step


@dataclass(frozen=True)
class PackedState:
    """The memory of B rows of steps, and where episodes begin in them: a row may hold several,
    one after the other."""

    state: mx.array  # [B, L · S, H] before the first step
    begins: np.ndarray  # [B, T] bool: another episode begins with this step, its memory is 0


class RNNExpertBase(nn.Module):
    """The base class of GRU and LSTM experts: a `losses.ppo.Policy`. A call of it keeps the memory
    between calls (`reset_hidden`)."""

    kind = ""  # "gru", "lstm"
    states = 1  # arrays of memory a layer

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self._config = config
        self._hidden: mx.array | None = None
        width = config.hidden_dim
        self.encoder = nn.Linear(config.obs_dim, width)
        self.encoder.weight = _orthogonal(width, config.obs_dim, RELU_GAIN)
        self.layers = [self.make_layer(width) for _ in range(config.num_layers)]
        self.dropout = nn.Dropout(config.dropout)
        if config.discrete_actions:
            self.policy_logits = _small(nn.Linear(width, config.num_actions))
        else:
            self.policy_mean = _small(nn.Linear(width, config.action_dim))
            self.policy_log_std = _small(nn.Linear(width, config.action_dim), bias=LOG_STD_START)
        if config.use_value_head:
            self.value_head = _small(nn.Linear(width, 1))

    @property
    def config(self) -> ExpertConfig:
        return self._config

    def make_layer(self, width: int) -> nn.Module:
        raise NotImplementedError

    def run_layer(
        self, layer: nn.Module, x: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        """x [B, T, H], state [B, S, H] → outputs [B, T, H], the state after the last step [B, S,
        H]."""
        raise NotImplementedError

    def initial_state(self, rows: int) -> mx.array:
        """Return zeros [B, L · S, H]: the memory that an episode begins with."""
        return mx.zeros((rows, self._config.num_layers * self.states, self._config.hidden_dim))

    def features(
        self, observations: mx.array, state: mx.array | PackedState | None
    ) -> tuple[mx.array, mx.array]:
        """observations [B, T, D] → [B, T, H], and the memory after them."""
        begins = state.begins if isinstance(state, PackedState) else None
        memory = state.state if isinstance(state, PackedState) else state
        memory = self.initial_state(len(observations)) if memory is None else memory
        x, after = nn.relu(self.encoder(observations)), []
        for number, layer in enumerate(self.layers):
            if number:
                x = self.dropout(x)
            layer_memory = memory[:, number * self.states : (number + 1) * self.states]
            x, new = (
                self.run_layer(layer, x, layer_memory)
                if begins is None
                else self._run_episodes(layer, x, layer_memory, begins)
            )
            after.append(new)
        return x, mx.concatenate(after, axis=1)

    def _run_episodes(
        self, layer: nn.Module, x: mx.array, state: mx.array, begins: np.ndarray
    ) -> tuple[mx.array, mx.array]:
        """Call `run_layer`, but set a row's memory to 0 before the step where an episode begins."""
        cuts, outputs = np.flatnonzero(begins.any(axis=0)).tolist(), list[mx.array]()
        for first, part in zip([0, *cuts], mx.split(x, cuts, axis=1), strict=True):
            if outputs:
                state = mx.where(mx.array(begins[:, first])[:, None, None], 0.0, state)
            output, state = self.run_layer(layer, part, state)
            outputs.append(output)
        return mx.concatenate(outputs, axis=1), state

    def step(
        self,
        observations: mx.array,
        state: mx.array | None = None,
        *,
        deterministic: bool = False,
        key: mx.array | None = None,
    ) -> ExpertOutput:
        """Act once: observations [B, D]. `deterministic` takes the most likely action. `key`: of
        mx.random."""
        x, hidden = self.features(observations[:, None], state)
        x = x[:, 0]
        if self._config.discrete_actions:
            logits = self.policy_logits(x)
            raw = (
                logits.argmax(axis=-1) if deterministic else mx.random.categorical(logits, key=key)
            )
            raw = raw.astype(mx.int32)
        else:
            mean, log_std = self._gaussian(x)
            raw = (
                mean
                if deterministic
                else mean + mx.exp(log_std) * mx.random.normal(mean.shape, key=key)
            )
        log_prob, entropy = self._log_prob_and_entropy(x, raw)
        return ExpertOutput(
            self.environment_action(raw), raw, log_prob, self._value(x), entropy, hidden
        )

    def act(self, observations: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
        """`losses.ppo.Policy.act`: the raw action, which `scores` takes."""
        output = self.step(observations, state)
        return output.raw, output.hidden

    def scores(
        self, observations: mx.array, actions: mx.array, state: mx.array | PackedState | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        """`losses.ppo.Policy.scores`: replay rows [B, T, …] of raw actions from `state`."""
        x, _ = self.features(observations, state)
        log_prob, entropy = self._log_prob_and_entropy(x, actions)
        return log_prob, entropy, self._value(x)

    def environment_action(self, raw: mx.array) -> mx.array:
        """Return the action that an environment takes for a raw one."""
        if self._config.discrete_actions:
            return raw
        low, high = self._config.action_low, self._config.action_high
        return low + (high - low) * 0.5 * (mx.tanh(raw) + 1.0)

    def reset_hidden(self) -> None:
        """Begin a new episode: the next call has no memory."""
        self._hidden = None

    def __call__(self, obs: Any, deterministic: bool = False) -> dict[str, mx.array]:
        """One step with the expert's own memory: obs [D] or [B, D] → action, log_prob, value,
        hidden, entropy."""
        array = mx.array(np.asarray(obs, np.float32))
        rows = array[None] if array.ndim == 1 else array
        if rows.ndim != 2 or rows.shape[1] != self._config.obs_dim:
            raise ValueError(
                f"expert {self._config.name!r} reads {self._config.obs_dim} numbers, not the"
                f" shape {array.shape}"
            )
        if self._hidden is not None and len(self._hidden) != len(rows):
            raise ValueError(
                f"{len(rows)} rows, but the memory is of {len(self._hidden)}: call reset_hidden()"
            )
        output = self.step(rows, self._hidden, deterministic=deterministic)
        self._hidden = output.hidden
        rows_of = {
            "action": output.action,
            "log_prob": output.log_prob,
            "value": output.value,
            "entropy": output.entropy,
        }
        return {k: v[0] if array.ndim == 1 else v for k, v in rows_of.items()} | {
            "hidden": output.hidden
        }

    def _gaussian(self, x: mx.array) -> tuple[mx.array, mx.array]:
        return self.policy_mean(x), mx.clip(self.policy_log_std(x), LOG_STD_MIN, LOG_STD_MAX)

    def _log_prob_and_entropy(self, x: mx.array, raw: mx.array) -> tuple[mx.array, mx.array]:
        """[…] float32 each. The entropy of a squashed action: H(N) + log |da/du| at the sampled
        u, exact on average."""
        if self._config.discrete_actions:
            logprobs = nn.log_softmax(self.policy_logits(x), axis=-1)
            chosen = mx.take_along_axis(logprobs, raw[..., None], axis=-1)[..., 0]
            return chosen, -(mx.exp(logprobs) * logprobs).sum(axis=-1)
        mean, log_std = self._gaussian(x)
        z = (raw - mean) * mx.exp(-log_std)
        scale = math.log((self._config.action_high - self._config.action_low) / 2)
        jacobian = scale + 2 * (math.log(2) - raw - nn.softplus(-2 * raw))
        log_prob = -0.5 * mx.square(z) - log_std - HALF_LOG_2PI - jacobian
        return log_prob.sum(axis=-1), (log_std + HALF_LOG_2PI + 0.5 + jacobian).sum(axis=-1)

    def _value(self, x: mx.array) -> mx.array:
        return self.value_head(x)[..., 0] if self._config.use_value_head else mx.zeros(x.shape[:-1])


class GRUExpert(RNNExpertBase):
    kind = "gru"

    def make_layer(self, width: int) -> nn.Module:
        layer = nn.GRU(width, width)
        layer.Wx, layer.Wh = (_orthogonal_gates(3, width) for _ in range(2))
        layer.b, layer.bhn = mx.zeros(3 * width), mx.zeros(width)
        return layer

    def run_layer(
        self, layer: nn.Module, x: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        hidden = layer(x, hidden=state[:, 0])
        return hidden, hidden[:, -1:]


class LSTMExpert(RNNExpertBase):
    kind, states = "lstm", 2

    def make_layer(self, width: int) -> nn.Module:
        layer = nn.LSTM(width, width)
        layer.Wx, layer.Wh = (_orthogonal_gates(4, width) for _ in range(2))
        layer.bias = mx.repeat(
            mx.array([0.0, 1.0, 0.0, 0.0]), width
        )  # the second gate is the forget gate: begin by remembering
        return layer

    def run_layer(
        self, layer: nn.Module, x: mx.array, state: mx.array
    ) -> tuple[mx.array, mx.array]:
        hidden, cell = layer(x, hidden=state[:, 0], cell=state[:, 1])
        return hidden, mx.stack([hidden[:, -1], cell[:, -1]], axis=1)


KINDS: Mapping[str, Callable[[ExpertConfig], RNNExpertBase]] = {
    "gru": GRUExpert,
    "lstm": LSTMExpert,
}


def make_expert(kind: str, config: ExpertConfig) -> RNNExpertBase:
    """Raises ConfigError: a kind that is not in `KINDS`."""
    if kind not in KINDS:
        raise ConfigError(f"{kind!r} is not a kind of expert: {' or '.join(KINDS)}")
    return KINDS[kind](config)


def _small(layer: nn.Linear, bias: float = 0.0) -> nn.Linear:
    """Begin at one output for every observation: zero weights, and `bias`."""
    layer.weight, layer.bias = mx.zeros_like(layer.weight), mx.full(layer.bias.shape, bias)
    return layer


def _orthogonal(rows: int, columns: int, gain: float = 1.0) -> mx.array:
    """Return a random matrix [rows, columns] with orthonormal rows, or columns if they are fewer,
    times `gain`.

    Saxe et al. 2013, arXiv:1312.6120. It decides how often a run succeeds: docs/systems.md#experts.
    """
    q, r = mx.linalg.qr(mx.random.normal((max(rows, columns), min(rows, columns))), stream=mx.cpu)
    q = gain * q * mx.sign(mx.diag(r))
    return q if rows >= columns else q.T


def _orthogonal_gates(gates: int, width: int) -> mx.array:
    """Return [gates · width, width]: each gate's matrix orthogonal by itself."""
    return mx.concatenate([_orthogonal(width, width) for _ in range(gates)])
