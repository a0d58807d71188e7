"""BackpropModule: gradients and updates for people who write Python, on the daemon's own trainer.

    advantages = backprop.compute_advantages(rewards, values)
    loss = backprop.compute_ppo_loss(trajectories, advantages)  a Loss: not computed yet
    backprop.update(loss)                                       one optimizer update; served at once

MLX differentiates functions, not numbers, so a Loss is a function of the weights: `update`
differentiates it, `item()` evaluates it. Trajectories are `rewards.base.Trajectory`s (or
`types.Rollout`s): tokens, mask and the log-probabilities of the sampling policy, which the ratio is
against.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.nn as nn
import mlx.optimizers as optimizers
import numpy as np
from mlx.utils import tree_flatten

from mlx_parallm.config.library import BackpropConfig, LibraryAlgorithm, RefUpdate, training_keys
from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import name_of, reference_to
from mlx_parallm.faces.library.losses import (
    Loss,
    Played,
    all_segments,
    sampled_tokens,
    segments_of,
    spread,
)
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.losses.advantages import group_advantages, whiten
from mlx_parallm.losses.kl import token_kl
from mlx_parallm.losses.policy_gradient import policy_loss
from mlx_parallm.losses.ppo import gae, value_loss
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from mlx_parallm.models.loading import LoadedModel, adopt_model, load_model
from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.threads import release_streams_at_exit
from mlx_parallm.rl_training.factory import build_policy
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.algorithms import custom_loss, loss_options
from mlx_parallm.rl_training.step.optimizer import make_optimizer
from mlx_parallm.rl_training.step.policy import REFERENCE_FILE, TrainedPolicy
from mlx_parallm.rl_training.step.prepare import StepPosition
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.blas import share_blas_between
from mlx_parallm.system.hardware import usable_cores

NO_VALUES = "this BackpropModule has no value head (value_head=False)"


class BackpropModule:
    """A policy that is trained by the library's algorithms: its weights, loss and optimizer.

    Args:
        model: an `InferenceModule`, whose weights are trained, and served after each update; or a
            path, a hub id, "builtin:tiny", or the model of `mlx_lm.load`.
        optimizer: of mlx.optimizers (Adam, AdamW, Lion, Muon). Only its numbers are read: updates
            are made on float32 copies. Default: AdamW with config.learning_rate.
        ref_model: the reference of the KL, a model of the same shape (or its path). Default: the
            policy before training; with an adapter, the model without it.
        value_head: False: no values, so no PPO; for architectures that do not return their last
            hidden state.

    It belongs to the thread that uses it first. Raises ConfigError.
    """

    def __init__(
        self,
        model: InferenceModule | nn.Module | str | Path,
        optimizer: optimizers.Optimizer | None = None,
        ref_model: nn.Module | str | Path | None = None,
        config: BackpropConfig | None = None,
        *,
        value_head: bool = True,
    ) -> None:
        # an algorithm's numbers go over `config`
        self.config = self.own_config = config or BackpropConfig()
        self.inference: InferenceModule | None = None
        self.source = model
        self._ref_model, self._value_head = ref_model, value_head
        self._optimizer_keys = {} if optimizer is None else optimizer_keys(optimizer)
        self._loaded: LoadedModel | None = None
        self._trainer: Trainer | None = None
        self._updates = 0
        self._last: Mapping[str, float | None] = {}
        self._run = self._run_config("ppo" if value_head else "grpo", self.config, {})
        if isinstance(model, InferenceModule):
            self.attach(model)

    # ------------------------------------------------------------------ parts

    @property
    def trainer(self) -> Trainer:
        """The trainer, made at its first use."""
        if self._trainer is None:
            self._trainer = self._make_trainer()
        return self._trainer

    @property
    def policy(self) -> TrainedPolicy:
        return self.trainer.policy

    @property
    def run_config(self) -> Config:
        """The daemon's configuration with the same meaning."""
        return self._run

    @property
    def loaded(self) -> LoadedModel:
        """The base model. Raises ModelError."""
        if self._loaded is None:
            if self.inference is not None and self.inference.loaded is not None:
                self._loaded = self.inference.loaded
            elif isinstance(self.source, nn.Module):
                self._loaded = adopt_model(self.source)
            else:
                self._loaded = load_model(ModelConfig(base_path=str(self.source)))
        return self._loaded

    def attach(self, inference: InferenceModule) -> None:
        """Train the weights of `inference`, which answers with them from now on.

        Raises ConfigError: it has no weights of its own, or those of another model.
        """
        if self.inference is inference:
            return
        if self.inference is not None or not (
            inference is self.source or _same(inference.source, self.source)
        ):
            raise ConfigError("the BackpropModule trains another model than the InferenceModule's")
        if inference.weights is None or inference.loaded is None:
            raise ConfigError("an InferenceModule over another server has no weights to train")
        self.inference = inference
        share_blas_between(2, usable_cores())  # the engine's thread and the caller's
        if self._trainer is not None:
            self.publish()

    def publish(self, *, at_least: int = 0) -> None:
        """Let the attached InferenceModule, if there is one, answer with the trained weights,
        under the next policy version, or a higher one: that of a run that continues."""
        if self.inference is None:
            return
        weights, policy = self.inference.weights, self.policy
        assert weights is not None and weights.policy is not None
        version = max(weights.version + 1, at_least)
        if policy.lora:
            weights.publish_adapter(policy.adapter(), version=version)
            self.inference.follow_training(weights.policy)
        else:
            weights.publish_parameters(policy.full_parameters(), version=version)

    def configure(
        self, algorithm: LibraryAlgorithm, config: BackpropConfig, settings: Mapping[str, Any]
    ) -> Trainer:
        """Return the trainer with one of the daemon's algorithms and more keys of [rl_training].
        Weights and the optimizer's state stay. Raises ConfigError."""
        if algorithm == "ppo" and not self._value_head:
            raise ConfigError(f"PPO needs values: {NO_VALUES}")
        self.config = config
        self._run = self._run_config(algorithm, config, settings)
        before, self._trainer = self._trainer, None
        if before is not None:
            training = self._run.rl_training
            self._trainer = Trainer(
                before.policy,
                training,
                make_algorithm(training),
                companions=before.companions,
            )
            self._trainer.optimizer.restore(before.optimizer.state())
        return self.trainer

    def expect_reference(self, directory: Path) -> None:
        """Make room for an updated reference, if the checkpoint in `directory` has one."""
        if (directory / REFERENCE_FILE).is_file():
            self.policy.blend_reference(0.0)

    def _make_trainer(self) -> Trainer:
        release_streams_at_exit()
        training, loaded = self._run.rl_training, self.loaded
        weights = self.inference.weights if self.inference is not None else None
        served = (
            weights.adapters().get(weights.policy)
            if weights is not None and weights.policy
            else None
        )
        algorithm = make_algorithm(training)
        policy = build_policy(
            loaded,
            training,
            algorithm,
            initial_adapter=served.layers if served is not None else None,
            keeps_reference=True,
            keeps_values=self._value_head,
            kv_bits=None if self.inference is None else self.inference.kv_bits,
        )
        if self._ref_model is not None and not _same(self._ref_model, self.source):
            other = self._ref_model
            if not isinstance(other, nn.Module):
                other = load_model(ModelConfig(base_path=str(other))).model
            policy.use_reference(dict(tree_flatten(other.parameters())))
        self._trainer = Trainer(policy, training, algorithm)
        self.publish()
        return self._trainer

    def _run_config(
        self, algorithm: LibraryAlgorithm, config: BackpropConfig, settings: Mapping[str, Any]
    ) -> Config:
        training = training_keys(algorithm, config) | self._optimizer_keys | dict(settings)
        if "loss" in settings:  # a loss of the user's own reads neither
            training.pop("clip_ratio", None)
            training.pop("entropy_weight", None)
        return parse_config({"rl_training": training}, type(self).__name__)

    # ------------------------------------------------------------------ numbers from rewards and
    # values

    def compute_advantages(self, rewards: Any, values: Any) -> Any:
        """Return generalised advantage estimates, normalised over all steps if the configuration
        says so.

        One episode: rewards [T] and values [T] → [T]; values [T + 1] if it was cut off, whose last
        value stands for the rest. Several episodes: lists of these → a list. There an episode's
        reward may be one number, that of its last step (with the values of `compute_values`: of its
        last token).
        """
        several = len(values) > 0 and np.ndim(values[0]) > 0
        if several and len(rewards) != len(values):
            raise ConfigError(f"{len(rewards)} episodes of rewards, but {len(values)} of values")
        pairs = zip(rewards, values, strict=True) if several else [(rewards, values)]
        episodes = [
            self._gae(np.asarray(r, np.float64), np.asarray(v, np.float64)) for r, v in pairs
        ]
        if self.config.normalize_advantages and episodes:
            whole = whiten(np.concatenate(episodes))
            episodes = np.split(whole, np.cumsum([len(part) for part in episodes])[:-1])
        return episodes if several else episodes[0]

    def _gae(self, rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
        if rewards.ndim == 0:
            rewards = np.append(np.zeros(max(len(values) - 1, 0)), rewards)[: len(values)]
        steps = len(rewards)
        if len(values) not in (steps, steps + 1):
            raise ConfigError(
                f"an episode of {steps} rewards has {steps} values, or one"
                f" more; these are {len(values)}"
            )
        if not steps:
            return np.zeros(0)
        rewards = rewards.copy()
        if len(values) > steps:
            rewards[-1] += self.config.gamma * values[-1]
        gamma, lam = self.config.gamma, self.config.gae_lambda
        return gae(rewards, values[:steps], np.array([steps - 1]), gamma=gamma, gae_lambda=lam)

    def compute_returns(self, rewards: Any) -> Any:
        """Return discounted sums: R_t = r_t + gamma · R_{t+1}. [T] → [T], or a list of episodes
        → a list."""
        if len(rewards) > 0 and np.ndim(rewards[0]) > 0:
            return [self.compute_returns(episode) for episode in rewards]
        episode = np.asarray(rewards, np.float64)
        last = np.array([len(episode) - 1])
        return gae(episode, np.zeros(len(episode)), last, gamma=self.config.gamma, gae_lambda=1.0)

    def compute_relative_advantages(self, rewards: Sequence[float], group_size: int) -> np.ndarray:
        """Return GRPO's advantages: reward minus mean of each group of `group_size` neighbours
        (answers to one prompt), divided by its population std if advantages are normalised; 0 if
        all rewards are equal. [N] → [N].

        Raises ConfigError: the rewards are not whole groups.
        """
        try:
            values = [float(reward) for reward in rewards]
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"rewards are {rewards!r}: expected a list of numbers, the groups one after another"
            ) from error
        if not isinstance(group_size, int):
            raise ConfigError(
                f"group_size is {group_size!r}: expected the number of answers to one prompt"
            )
        if group_size < 1 or len(values) % group_size:
            raise ConfigError(f"{len(values)} rewards are not whole groups of {group_size}")
        kind: Literal["std", "mean"] = "std" if self.config.normalize_advantages else "mean"
        groups = [values[start : start + group_size] for start in range(0, len(values), group_size)]
        return np.array(
            [a for group in groups for a in group_advantages(group, kind) or (0.0,) * group_size]
        )

    # ------------------------------------------------------------------ scores of trajectories

    def get_logprobs(self, trajectories: Sequence[Played]) -> list[np.ndarray]:
        """Return the current log-probabilities of each trajectory's sampled tokens: [n] float32,
        at the sampling temperature."""
        return self._scored(trajectories, 0)

    def compute_values(self, trajectories: Sequence[Played]) -> list[np.ndarray]:
        """Return the value head's estimates before each sampled token: [n] float32 for each
        trajectory."""
        if not self._value_head:
            raise ConfigError(NO_VALUES)
        return self._scored(trajectories, 2)

    def _scored(self, trajectories: Sequence[Played], column: int) -> list[np.ndarray]:
        parts = [segments_of(played) for played in trajectories]
        scores = iter(
            self.trainer.token_scores([segment for segments in parts for segment in segments])
        )
        return [np.concatenate([next(scores)[column] for _ in segments]) for segments in parts]

    # ------------------------------------------------------------------ losses

    def compute_ppo_loss(self, trajectories: Sequence[Played], advantages: Sequence[Any]) -> Loss:
        """Return the clipped surrogate (arXiv:1707.06347) + kl_coef · KL - entropy_coef · entropy,
        mean over tokens. Add `value_loss_coef * compute_value_loss(…)` for the value loss.

        `advantages`: a number for each trajectory, or one for each of its sampled tokens.
        """
        return self._policy_loss(trajectories, advantages, "clip")

    def compute_loss(self, trajectories: Sequence[Played], advantages: Sequence[Any]) -> Loss:
        """Return -E[log π · A] + kl_coef · KL - entropy_coef · entropy, mean over tokens
        (Williams 1992)."""
        return self._policy_loss(trajectories, advantages, "reinforce")

    def compute_custom_loss(
        self,
        trajectories: Sequence[Played],
        advantages: Sequence[Any],
        loss: Callable[[LossInputs], LossOutputs],
        *,
        needs_reference: bool = False,
    ) -> Loss:
        """Return your own loss, a pure function of `LossInputs`; its result is checked
        when it is called.

        Args:
            advantages: a number for each trajectory, or one for each of its sampled tokens.
            needs_reference: score the reference, so that `inputs.ref_logprobs` is there.

        Raises ConfigError: trajectories, advantages or loss are none.
        """
        if not callable(loss):
            raise ConfigError(f"loss is {loss!r}: expected a function, LossInputs → LossOutputs")
        rollouts, rows = spread(trajectories, advantages, "advantages")
        term = custom_loss(reference_to(loss, name_of(loss)))
        return Loss(
            self,
            rollouts,
            ((1.0, term),),
            rows,
            needs=frozenset(["reference"] if needs_reference else []),
        )

    def _policy_loss(self, played: Sequence[Played], advantages: Sequence[Any], loss: str) -> Loss:
        options = loss_options(self._run_config("ppo", self.config, {}).rl_training, loss)
        term = partial(policy_loss, options=options)
        needs = frozenset(["reference"] if self.config.kl_coef else [])
        rollouts, rows = spread(played, advantages, "advantages")
        return Loss(self, rollouts, ((1.0, term),), rows, needs=needs)

    def compute_kl(self, trajectories: Sequence[Played]) -> Loss:
        """Return KL(policy || reference) in nats a token, by config.kl_estimator.

        Raises ConfigError: "k3_ratio", and trajectories without the log-probabilities that the
        ratio is against.
        """
        estimator, segments = self.config.kl_estimator, all_segments(trajectories)
        if estimator == "k3_ratio" and any(segment.logprobs is None for segment in segments):
            raise ConfigError(
                'kl_estimator = "k3_ratio" divides by the log-probabilities of the policy that'
                " sampled, and these"
                " trajectories have none: keep those that the sampler returned, or choose"
                ' kl_estimator = "k3"'
            )

        def kl(inputs: LossInputs) -> LossOutputs:
            mean = aggregate(token_kl(inputs, estimator), inputs)
            return LossOutputs(mean, {"kl": mean})

        return Loss(self, segments, ((1.0, kl),), needs=frozenset(["reference"]))

    def compute_entropy(self, trajectories: Sequence[Played]) -> Loss:
        """Return the entropy of the whole distribution in nats a token. Subtract a bonus: `loss
        + -0.01 * entropy`."""

        def entropy(inputs: LossInputs) -> LossOutputs:
            assert inputs.entropy is not None
            mean = aggregate(inputs.entropy, inputs)
            return LossOutputs(mean, {"entropy": mean})

        return Loss(self, all_segments(trajectories), ((1.0, entropy),))

    def compute_value_loss(self, trajectories: Sequence[Played], returns: Sequence[Any]) -> Loss:
        """Return ½ (V - R)², clipped if the configuration says so; mean over tokens
        (losses/ppo.py).

        `returns`: a number for each trajectory, or one for each of its sampled tokens.
        """
        clip = self.config.ppo_clip_range if self.config.clip_value_loss else 0.0
        rollouts, rows = spread(trajectories, returns, "returns")
        if not self._value_head:
            raise ConfigError(NO_VALUES)
        columns = [
            np.array(row, np.float32)[sampled_tokens(r)]
            for row, r in zip(rows, rollouts, strict=True)
        ]
        whole = np.concatenate([*columns, np.zeros(0, np.float32)])
        return Loss(
            self,
            rollouts,
            ((1.0, partial(value_loss, clip=clip)),),
            returns=whole,
            needs=frozenset(["values"]),
        )

    def evaluate(self, loss: Loss) -> float:
        """Return the loss as a number; `loss.item()` calls it."""
        trainer = self.trainer.with_algorithm(loss.algorithm(), sequences=len(loss.rollouts))
        value, loss.metrics, loss.scores = trainer.evaluate(
            loss.batch(self._updates + 1), loss.scores
        )
        return value

    def update(self, loss: Loss) -> Mapping[str, float | None]:
        """Make one optimizer update and publish the weights to the attached InferenceModule.
        Return the metrics: loss, grad_norm (before clipping), learning_rate, and those of the
        loss."""
        trainer = self.trainer.with_algorithm(loss.algorithm(), sequences=len(loss.rollouts))
        result = trainer.train_step(
            loss.batch(self._updates + 1), position=StepPosition(scores=loss.scores)
        )
        loss.scores, loss.metrics = result.position.scores, result.metrics
        self._updates += result.position.updates
        self._last = result.metrics
        self.publish()
        return result.metrics

    def update_ref_model(self, method: RefUpdate | None = None) -> None:
        """Set the reference to the policy ("copy"), or to ema_alpha · reference + (1 -
        ema_alpha) · policy ("ema")."""
        method = method or self.config.ref_update_method
        if method not in ("copy", "ema"):
            raise ConfigError(f"update_ref_model({method!r}): choose 'copy' or 'ema'")
        self.policy.blend_reference(0.0 if method == "copy" else self.config.ema_alpha)

    def get_statistics(self) -> dict[str, Any]:
        """Return the number of updates and of trained parameters, and the metrics of the last
        update."""
        counts = {"updates": self.trainer.optimizer.updates, "parameters": self.policy.parameters}
        return counts | {name: number for name, number in self._last.items() if number is not None}


def _same(one: Any, other: Any) -> bool:
    """Return whether both are, or name, the same model."""
    paths = (str, Path)
    return one is other or (
        isinstance(one, paths) and isinstance(other, paths) and str(one) == str(other)
    )


KINDS = {
    optimizers.Adam: "adamw",
    optimizers.AdamW: "adamw",
    optimizers.Lion: "lion",
    optimizers.Muon: "muon",
}


def optimizer_keys(optimizer: optimizers.Optimizer) -> dict[str, Any]:
    """An optimizer of mlx.optimizers as keys of [rl_training]. It is read for its numbers and made
    again, because the trainer's works on float32 masters, in groups. Adam becomes AdamW without a
    decay; both correct their bias.

    Raises ConfigError: it is none of KINDS, its rate is a schedule, or one of its numbers would get
    lost."""
    kind = KINDS.get(type(optimizer))
    if kind is None:
        names = ", ".join(each.__name__ for each in KINDS)
        raise ConfigError(
            f"optimizer = {type(optimizer).__name__}: expected one of mlx.optimizers' {names}"
        )
    if optimizer._schedulers:
        raise ConfigError("the optimizer's learning rate is a schedule; give a number")
    keys = {"optimizer": kind, "learning_rate": scalar(optimizer.learning_rate)}
    decay = float(getattr(optimizer, "weight_decay", 0.0))
    keys["weight_decay"] = decay
    if kind == "adamw":
        keys["adam_beta1"], keys["adam_beta2"] = (float(beta) for beta in optimizer.betas)
        keys["adam_eps"] = float(optimizer.eps)
    training = parse_config({"rl_training": keys}, "optimizer").rl_training
    made = make_optimizer(kind, decay, training)
    for name, value in vars(optimizer).items():
        if name.startswith("_") or name in ("bias_correction", "weight_decay"):
            continue
        kept = getattr(made, name)
        if not np.array_equal(value, kept):
            raise ConfigError(
                f"the optimizer's {name} = {value} would get lost (the"
                f" trainer's is {kept}): leave it out"
            )
    return keys
