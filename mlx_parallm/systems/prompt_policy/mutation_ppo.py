"""PPO over mutations of prompts: `PPOTrainer` owns the two networks, learns from experiences, and
saves itself.

    act       networks in evaluation mode → a choice: action, log-probability, value, probabilities
    update    experiences in parts of `update_size` → GAE episode by episode → n_epochs of clipped
              steps (`losses.ppo`)

Batch normalisation and dropout make the log-probability of an action depend on its mini-batch and
its mask. So the old log-probabilities (and values) are computed again for each mini-batch, by the
networks of before the part, in training mode and under the mask of the step: the ratio of the first
mini-batch is 1. That the action was chosen by an older policy, in evaluation mode, is corrected by
min(π(a) / μ(a), max_importance), a weight of the advantage (arXiv:2110.00641, eq. 3).
"""

import json
import operator
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_parallm.errors import CheckpointError
from mlx_parallm.losses.ppo import Steps, clipped_ppo, gae, loss_inputs, update_parts
from mlx_parallm.models.parameters import check_optimizer, check_weights
from mlx_parallm.system.files import check_regular, write_directory
from mlx_parallm.systems.prompt_policy.config import PromptPPOConfig
from mlx_parallm.systems.prompt_policy.experience import Experience, History, Novelty
from mlx_parallm.systems.prompt_policy.networks import PolicyNetwork, ValueNetwork

PPOConfig = PromptPPOConfig
"""The specification's name; the package has another class of it."""

WEIGHTS_FILE, OPTIMIZER_FILE, STATE_FILE = (
    "policy.safetensors",
    "optimizer.safetensors",
    "state.json",
)
# an update in the history
LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl")


class ActorCritic(nn.Module):
    """The two networks, as a `losses.ppo.Policy` over rows of one step. `state` of a row:
    (allowed, dropout key)."""

    def __init__(self, config: PromptPPOConfig) -> None:
        super().__init__()
        keys = mx.random.split(mx.random.key(config.seed))
        self.policy = PolicyNetwork(
            config.input_dim,
            config.action_dim,
            config.hidden_dim,
            dropout=config.dropout,
            key=keys[0],
        )
        self.value = ValueNetwork(
            config.input_dim, config.hidden_dim, dropout=config.dropout, key=keys[1]
        )
        self.eval()
        mx.eval(self.parameters())

    def act(self, observations: mx.array, state: Any) -> tuple[mx.array, Any]:
        """The likeliest mutation of each embedding [B, input_dim] → [B]."""
        return mx.argmax(self.policy(observations, state), axis=-1), state

    def scores(
        self, observations: mx.array, actions: mx.array, state: Any
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Log-probabilities, entropies and values, [B, 1] float32 each, of embeddings [B, 1,
        input_dim]."""
        allowed, key = state
        keys = (None, None) if key is None else mx.random.split(key)
        log_probs = self.policy(observations[:, 0], allowed, keys[0])
        chosen = mx.take_along_axis(log_probs, actions, axis=-1)
        entropy = -mx.sum(mx.exp(log_probs) * log_probs, axis=-1, keepdims=True)
        return chosen, entropy, self.value(observations[:, 0], keys[1])[:, None]


class PPOTrainer:
    """Learns, in one thread; `observe`, `uncertainty` and `summary` may be called from any."""

    def __init__(self, config: PromptPPOConfig | None = None, store_id: str = "") -> None:
        self.config = config or PromptPPOConfig()
        # id of the store that `trained_through` and `history.through` count in
        self.store_id = store_id
        self.networks = ActorCritic(self.config)
        self._lock = threading.Lock()  # guards history and novelty
        self.history = History()
        self.novelty = Novelty(self.config.input_dim, self.config.seed)
        self.trained_through = 0  # the sequence number of the last experience that was learned from
        self.order = np.random.default_rng(self.config.seed)
        self._optimizers = [self._optimizer(), self._optimizer()]
        for optimizer, network in zip(self._optimizers, self._parts(), strict=True):
            optimizer.init(network.trainable_parameters())
        self._loss = clipped_ppo(
            clip_ratio=self.config.eps_clip,
            entropy_weight=self.config.entropy_coef,
            value_clip=self.config.value_clip,
            value_coefficient=self.config.value_coef,
        )
        self._gradient = nn.value_and_grad(self.networks, self._objective)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update. It falls by `lr_decay` every `lr_step` updates."""
        return self.config.learning_rate * self.config.lr_decay ** (
            self.history.updates // self.config.lr_step
        )

    def observe(self, experience: Experience) -> None:
        """Count an experience, before it is learned from. One that was counted already (by a
        checkpoint) is left."""
        with self._lock:
            if experience.sequence == 0 or experience.sequence > self.history.through:
                self.history.add(experience)
                self.novelty.add(experience.state)

    def uncertainty(self, state: np.ndarray) -> float:
        """Return how little is known about an embedding [input_dim]: 1 = nothing, towards 0 with
        experiences."""
        with self._lock:
            return self.novelty.uncertainty(state)

    def summary(self) -> History:
        """Return a copy of the history."""
        with self._lock:
            return History.from_json(self.history.to_json())

    def update(self, experiences: Sequence[Experience]) -> dict[str, float]:
        """Learn from these experiences; return the mean metrics over all mini-batches.

        Metrics: policy_loss, value_loss, entropy (nats), approx_kl, clip_fraction, grad_norm,
        learning_rate, first_ratio and first_ratio_error (mean ratio of the first mini-batch,
        largest distance from 1), importance (mean weight of the experiences). Raises ValueError:
        fewer than two experiences.
        """
        if len(experiences) < 2:
            raise ValueError("an update needs at least two experiences")
        config, rate = self.config, self.learning_rate
        for optimizer in self._optimizers:
            optimizer.learning_rate = rate
        steps = list[dict[str, float]]()
        for rows in parts_of(experiences, config.update_size):
            steps += self._learn([experiences[row] for row in rows])
        self._settle(mx.array(np.stack([e.state for e in experiences])))
        self.trained_through = max(self.trained_through, *(e.sequence for e in experiences))
        means = {name: sum(step[name] for step in steps) / len(steps) for name in steps[0]}
        result = {name: value for name, value in means.items() if not name.startswith("ratio_")}
        result |= {
            "first_ratio": steps[0]["ratio_mean"],
            "first_ratio_error": steps[0]["ratio_error"],
        }
        result["learning_rate"] = rate
        with self._lock:
            self.history.updates += 1
            self.history.losses.append({name: result[name] for name in LOSSES})
        return result

    def _learn(self, experiences: Sequence[Experience]) -> list[dict[str, float]]:
        """Take `n_epochs` of clipped steps on these experiences; return the metrics of each."""
        batch, metrics = self._batch(experiences), list[dict[str, float]]()
        before = ActorCritic(self.config)  # π_old: the same arrays, which no step changes in place
        before.update(self.networks.parameters())
        before.train()
        self.networks.train()
        for _ in range(self.config.n_epochs):
            metrics += [
                self._step(before, batch, rows) for rows in self._mini_batches(len(experiences))
            ]
        self._settle(batch.states)
        return metrics

    def _settle(self, states: mx.array) -> None:
        """Set batch normalisation's running statistics to those of all states under the new
        weights.

        Averages over the steps lag behind: the policy that acts would not be the one that was
        optimised."""
        norms = [
            module
            for _, module in self.networks.named_modules()
            if isinstance(module, nn.BatchNorm)
        ]
        for norm in norms:
            norm.momentum, kept = 1.0, norm.momentum
        self.networks.policy(states), self.networks.value(states)
        for norm in norms:
            norm.momentum = kept
        self.networks.eval()
        mx.eval(self.networks.parameters())

    def save(self, directory: Path) -> None:
        """Write everything as one directory, whole or absent. Raises CheckpointError."""

        def fill(path: Path) -> None:
            mx.save_safetensors(
                str(path / WEIGHTS_FILE), dict(tree_flatten(self.networks.parameters()))
            )
            states = {str(n): optimizer.state for n, optimizer in enumerate(self._optimizers)}
            mx.save_safetensors(str(path / OPTIMIZER_FILE), dict(tree_flatten(states)))
            with self._lock:
                state: dict[str, Any] = {
                    "history": self.history.to_json(),
                    "novelty": self.novelty.to_json(),
                }
            state |= {
                "config": self.config.model_dump(mode="json"),
                "trained_through": self.trained_through,
                "store_id": self.store_id,
                "order": self.order.bit_generator.state,
            }
            (path / STATE_FILE).write_text(json.dumps(state))

        directory.parent.mkdir(parents=True, exist_ok=True)
        write_directory(directory, fill)

    def load(self, directory: Path) -> None:
        """Continue from a checkpoint. Raises CheckpointError, and changes nothing: none, damaged,
        other sizes."""
        try:
            for name in (STATE_FILE, WEIGHTS_FILE, OPTIMIZER_FILE):
                check_regular(directory / name)
            state = json.loads((directory / STATE_FILE).read_text())
            weights: Any = mx.load(str(directory / WEIGHTS_FILE))
            flat: Any = mx.load(str(directory / OPTIMIZER_FILE))
            optimizer: Any = tree_unflatten(list(flat.items()))
            mx.eval(weights, optimizer)
            history, novelty = (
                History.from_json(state["history"]),
                Novelty.from_json(state["novelty"]),
            )
            order = np.random.default_rng()
            order.bit_generator.state = state["order"]
            # else its sequence numbers mean nothing here
            ours = state.get("store_id", "") == self.store_id
            trained_through = operator.index(state["trained_through"]) if ours else 0
        except (OSError, ArithmeticError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{directory} is not a checkpoint of a prompt policy: {error}"
            ) from error
        try:
            check_weights(self.networks, weights)
            states = [
                optimizer[number] if isinstance(optimizer, list) else optimizer[str(number)]
                for number in range(len(self._optimizers))
            ]
            for one, part in zip(states, self._parts(), strict=True):
                check_optimizer(self._optimizer(), part, one)
        except (KeyError, IndexError) as error:
            raise CheckpointError(f"{directory} has no optimizer {error}: damaged") from error
        except ValueError as error:
            raise CheckpointError(
                f"{directory} holds a policy of other sizes, or is damaged: {error};"
                " where sizes differ, set prompt_policy.ppo to those that it was saved with"
            ) from error
        self.networks.update(tree_unflatten(list(weights.items())))
        self.networks.eval()
        for one, its_state in zip(self._optimizers, states, strict=True):
            one.state = its_state
        with self._lock:
            history.through = max(self.history.through, history.through if ours else 0)
            self.history, self.novelty = history, novelty
        self.order, self.trained_through = order, max(self.trained_through, trained_through)

    def _parts(self) -> tuple[nn.Module, nn.Module]:
        return self.networks.policy, self.networks.value

    def _optimizer(self) -> optimizers.AdamW:
        return optimizers.AdamW(self.config.learning_rate, weight_decay=self.config.weight_decay)

    def _batch(self, experiences: Sequence[Experience]) -> "Batch":
        """Values, advantages and weights of these experiences, by the networks as they act."""
        config, size = self.config, self.config.action_dim
        states = mx.array(np.stack([e.state for e in experiences]))
        actions = mx.array(np.array([[e.action] for e in experiences], np.int32))
        allowed = mx.array(
            np.stack([np.ones(size, bool) if e.allowed is None else e.allowed for e in experiences])
        )
        log_probs, _, values = self.networks.scores(states[:, None], actions, (allowed, None))
        next_values = self.networks.value(mx.array(np.stack([e.next_state for e in experiences])))
        advantages, returns = advantages_of(
            experiences, np.array(values[:, 0]), np.array(next_values), config
        )
        behaviour = np.array([e.log_prob for e in experiences])
        ratio = np.exp(np.clip(np.array(log_probs[:, 0], np.float64) - behaviour, -20.0, 20.0))
        weights = np.minimum(ratio, config.max_importance)
        normal = (advantages - advantages.mean()) / (advantages.std() + 1e-8) * weights
        return Batch(
            states,
            actions,
            allowed,
            weights,
            mx.array(normal, mx.float32),
            mx.array(returns, mx.float32),
        )

    def _mini_batches(self, count: int) -> list[np.ndarray]:
        """Rows in random order, in mini-batches of about `batch_size`, none with a single row."""
        return np.array_split(
            self.order.permutation(count),
            max(1, min(round(count / self.config.batch_size), count // 2)),
        )

    def _step(self, before: ActorCritic, batch: "Batch", rows: np.ndarray) -> dict[str, float]:
        chosen, key = mx.array(rows), mx.random.key(int(self.order.integers(2**31)))
        observations, actions = batch.states[chosen][:, None], batch.actions[chosen]
        state = (batch.allowed[chosen], key)
        old_log_probs, _, old_values = before.scores(observations, actions, state)
        steps = Steps(
            observations=observations,
            actions=actions,
            mask=mx.ones(actions.shape, mx.bool_),
            logprobs=mx.stop_gradient(old_log_probs),
            values=mx.stop_gradient(old_values),
            advantages=batch.advantages[chosen][:, None],
            returns=batch.returns[chosen][:, None],
            state=state,
        )
        (_, metrics), gradients = self._gradient(steps)
        each = gradients["policy"], gradients["value"]
        parts = list(zip(self._optimizers, self._parts(), each, strict=True))
        numbers = update_parts(parts, metrics, max_grad_norm=self.config.max_grad_norm)
        return numbers | {"importance": float(batch.weights[rows].mean())}

    def _objective(self, steps: Steps) -> tuple[mx.array, dict[str, mx.array]]:
        inputs = loss_inputs(self.networks, steps)
        outputs = self._loss(inputs)
        error = mx.max(mx.abs(mx.exp(inputs.logprobs - inputs.ratio_logprobs) - 1))
        return outputs.loss, outputs.metrics | {"ratio_error": error}


@dataclass(frozen=True)
class Batch:
    """The experiences of a part: arrays [N, …]."""

    states: mx.array
    actions: mx.array  # [N, 1] int32
    allowed: mx.array  # [N, actions] bool
    weights: np.ndarray  # [N] float64, importance
    advantages: mx.array  # [N], normalised and weighted
    returns: mx.array  # [N]


def episodes_of(experiences: Sequence[Experience]) -> list[list[int]]:
    """Return the rows of each episode in the order of arrival. An experience without
    `episode_id` is an episode."""
    episodes: dict[tuple[str | int, int], list[int]] = {}
    # how often an id's episode has ended: then it begins again
    ended: Counter[str | int] = Counter()
    for row, experience in enumerate(experiences):
        name: str | int = row if experience.episode_id is None else experience.episode_id
        episodes.setdefault((name, ended[name]), []).append(row)
        ended[name] += experience.done
    return list(episodes.values())


def parts_of(experiences: Sequence[Experience], size: int) -> list[list[int]]:
    """Split rows into parts of about `size`, oldest first, without splitting an episode; none
    has a single row."""
    parts, fewest = [list[int]()], 2
    for rows in episodes_of(experiences):
        if len(parts[-1]) + len(rows) > size and len(parts[-1]) >= fewest:
            parts.append([])
        parts[-1] += rows
    if len(parts) > 1 and len(parts[-1]) < max(fewest, size // 2):
        last = parts.pop()
        parts[-1] += last
    return [sorted(part) for part in parts]


def advantages_of(
    experiences: Sequence[Experience],
    values: np.ndarray,
    next_values: np.ndarray,
    config: PromptPPOConfig,
) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns, [N] float64 each, by GAE within each episode, in the order of
    arrival.

    A step that ends its episode's experiences without `done` has γ V of the state after it as part
    of its reward.

    Args:
        values: [N], of the states. next_values: [N], of the states after them.

    Worked, γ = 1, λ = 0.5, V = 0.5 everywhere: an episode with rewards 0, 1 (done) has δ = [0,
    0.5], so advantages [0.25, 0.5]; one whose only step has reward 0 and is not done: 0 + 0.5 - 0.5
    = 0.
    """
    episodes = episodes_of(experiences)
    order = np.array([row for rows in episodes for row in rows])
    last = np.cumsum([len(rows) for rows in episodes]) - 1
    rewards = np.array([e.reward for e in experiences], np.float64)[order]
    for position in last:
        row = order[position]
        if not experiences[row].done:
            rewards[position] += config.gamma * float(next_values[row])
    ordered = gae(
        rewards,
        values.astype(np.float64)[order],
        last,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    advantages = np.empty(len(experiences))
    advantages[order] = ordered
    return advantages, advantages + values
