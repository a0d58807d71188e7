"""`Algorithm`, and how each is made. `ALGORITHMS` is the registry: one function a line.

rollouts        one function for all: they differ in their presets (`config.algorithm.PRESETS`,
                filled into the configuration as it is read); PPO adds a value head and GAE to it
rows of a file  a loss, and whether it reads the reference: a line in `DATA_LOSSES`
the user's own  `rl_training.advantage` and `rl_training.loss` as functions: loaded and checked
                before a model is; what they return is checked at every call
                (docs/your_environment.md)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import fmean
from typing import ClassVar, cast

import mlx.core as mx
import numpy as np

from mlx_parallm.config.algorithm import PRESETS, Aggregation, AlgorithmSection, RatioLevel
from mlx_parallm.config.data import (
    BETAS,
    ONLINE_DPO,
    ONLINE_KTO,
    PAIRED,
    REWARD_MODEL,
    SORTED,
    USES_REFERENCE,
    PreferenceConfig,
)
from mlx_parallm.config.distillation import DistillationSettings
from mlx_parallm.config.training import LearningSection, PPOConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import is_reference, load_function_of, user_code
from mlx_parallm.losses.advantages import (
    AdvantageKind,
    Estimator,
    Shaping,
    best_and_worst,
    by_sign,
    group_advantages,
    raw_rewards,
    to_go,
    whiten,
)
from mlx_parallm.losses.aot import sorted_margins
from mlx_parallm.losses.distillation import with_divergence
from mlx_parallm.losses.policy_gradient import LOSSES, LossOptions, policy_loss
from mlx_parallm.losses.ppo import gae, with_value_loss
from mlx_parallm.losses.preference import (
    cpo_loss,
    dft_loss,
    dpo_loss,
    kto_loss,
    nll_loss,
    orpo_loss,
    reward_model_loss,
    simpo_loss,
)
from mlx_parallm.losses.selection import SELECTING, Selection
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.models.layouts.layout import TokenBatch, scaled
from mlx_parallm.models.sums import logsumexp
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.collate import Measure
from mlx_parallm.rl_training.step.distillation import Teaching
from mlx_parallm.rl_training.step.prepare import Compared, Finish, PreparedBatch, Signal
from mlx_parallm.rollout_store.companions import of_prompt
from mlx_parallm.run_files.metrics import KEYS
from mlx_parallm.types import Rollout

STOP_FACTOR = 1.5  # times the target KL, as in Spinning Up and Stable-Baselines3
# columns of metrics.jsonl that a loss may fill
LOSS_METRICS = ("kl", "entropy", "clip_fraction", "ratio_mean")

Loss = Callable[[LossInputs], LossOutputs]
Score = Callable[[Sequence[Rollout]], list[float]]
"""Sequences → log π(y|x) - log π_ref(y|x) of each, under the weights as they are now."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm as the trainer knows it.

    `advantages`: rewards of one group → one number each, None = nothing to learn. `finish`: a step
    over the whole batch (whitening, GAE). `needs_…`: scores to compute before the step's first
    update. `scores_values`: its loss reads the value head, and no earlier values. `on_data`: it
    learns from rows of a file, which no policy sampled. `rows_per_example`:
    consecutive sequences that only make sense together (2: a pair).
    `pairs`: an example is the best and the worst rollout of a group, in this order
    (`losses.advantages.pair_advantages`). `singles`: an example is one rollout, desirable or not by
    the sign of its reward. `constants`: of a batch, which the loss reads; the trainer
    scores. `stop_kl`: a mini-batch whose metric approx_kl is above
    it is not applied, and ends the updates of the step.
    `entropy_slope`: whether the loss depends on the entropy; without, the head is computed once.
    `fuse`: the loss takes arrays for numbers, and looks at none (`losses.types.LossInputs`), so it
    may be compiled with the step.
    `signal`: how a step learns from the scores of a companion.
    `selection`: the tokens that the loss treats in its own way. `compared`: what it reads of each
    token's distribution.
    """

    name: str
    loss: Loss
    advantages: Estimator
    pairs: bool = False
    singles: bool = False
    constants: Callable[[TrainBatch, Score], Mapping[str, float]] | None = None
    needs_reference: bool = False
    needs_values: bool = False
    scores_values: bool = False
    finish: Finish | None = None
    stop_kl: float | None = None
    on_data: bool = False
    rows_per_example: int = 1
    entropy_slope: bool = True
    fuse: bool = False
    signal: Signal | None = None
    selection: Selection | None = None
    compared: Compared | None = None

    @property
    def needs_entropies(self) -> bool:
        return self.selection is not None and self.selection.top_entropy is not None

    @property
    def has_values(self) -> bool:
        """Whether the policy has a value head."""
        return self.needs_values or self.scores_values


def shaping_of(algorithm: Algorithm, configured: Shaping) -> Shaping:
    """Return the configured changes to groups. A rollout marked `zero_advantage` is left out where
    the algorithm, or its signal, would give it an advantage all the same."""
    marked = algorithm.finish is not None or algorithm.signal is not None
    return replace(configured, leave_out_marked=configured.leave_out_marked or marked)


def taught(
    algorithm: Algorithm, distillation: DistillationSettings, config: AlgorithmSection
) -> Algorithm:
    """The same algorithm with the signal of [rl_training.distillation], if that is on."""
    teaching = Teaching.of(distillation)
    if teaching is None:
        return algorithm
    loss = algorithm.loss
    if teaching.mode == "loss":
        aggregation = config.loss_aggregation or "token"
        loss = with_divergence(loss, weight=teaching.weight, aggregation=aggregation)
    return replace(algorithm, loss=loss, signal=teaching)


# ---------------------------------------------------------------------- on rollouts


def policy_gradient(config: LearningSection) -> Algorithm:
    """The configured loss on the configured advantages, functions of the user's own included.
    Raises ConfigError."""
    name = cast(str, config.loss)  # every preset has one
    custom = is_reference(name)
    return Algorithm(
        name=config.algorithm,
        loss=custom_loss(name) if custom else partial(policy_loss, options=loss_options(config)),
        advantages=_estimator(config),
        needs_reference=config.kl_beta > 0,
        finish=whitened if config.advantage_whiten else None,
        entropy_slope=config.entropy_weight > 0 or config.entropy_target is not None or custom,
        fuse=not custom,
        selection=_selection(config),
    )


def _selection(config: LearningSection) -> Selection | None:
    read = asdict(config.loss_of())
    settings = {key: read[key] for key in SELECTING if key in read}
    selection = Selection(
        str(config.loss), settings, read.get("top_entropy_quantile"), seed=config.seed
    )
    return selection if selection.by_covariance or selection.top_entropy is not None else None


def loss_options(config: AlgorithmSection, loss: str | None = None) -> LossOptions:
    """The policy loss's options. The configuration has a number for each key that its loss
    reads.

    Args:
        loss: a key of `LOSSES` in place of the configured loss, with the configured settings.
    """
    name = loss or cast(str, config.loss)
    read = asdict(config.loss_of(name))
    aggregation: Aggregation = read.pop("loss_aggregation") or "token"
    level: RatioLevel = read.pop("ratio_level", None) or "token"
    off_policy_mask: float | None = read.pop("off_policy_mask")
    for key in (*SELECTING, "top_entropy_quantile"):  # `_selection` has read them
        read.pop(key, None)
    if "clip_ratio_high" in read and read["clip_ratio_high"] is None:
        read["clip_ratio_high"] = read["clip_ratio"]
    return LossOptions(
        token_loss=partial(LOSSES[name], **read),
        ratio_level=level,
        aggregation=aggregation,
        kl_estimator=config.kl_estimator,
        entropy_weight=config.entropy_weight,
        entropy_aggregation="token" if config.entropy_aggregation == "token" else aggregation,
        off_policy_mask=off_policy_mask,
    )


def _estimator(config: AlgorithmSection) -> Estimator:
    if config.advantage is not None and is_reference(config.advantage):
        return custom_advantage(config.advantage)
    if config.advantage is None or (config.advantage == "none" and config.advantage_whiten):
        return raw_rewards  # the baseline is the batch's, or the value head's
    return partial(group_advantages, kind=cast(AdvantageKind, config.advantage))


def whitened(prepared: PreparedBatch) -> PreparedBatch:
    """REINFORCE++ (arXiv:2501.03262): each token's reward-to-go, with the KL in it where kl_in =
    "reward", whitened over the tokens of the step. With group means taken off first (advantage =
    "mean") it is REINFORCE++-baseline."""
    values = prepared.advantages.astype(np.float64)
    if prepared.kl_penalty is not None:
        values = values - to_go(prepared.kl_penalty, prepared.lengths)
    return replace(prepared, advantages=whiten(values).astype(np.float32))


def ppo(config: LearningSection, options: PPOConfig) -> Algorithm:
    """PPO (arXiv:1707.06347): a value loss beside the policy loss, and generalised advantage
    estimation."""
    policy = policy_gradient(config)
    return replace(
        policy,
        loss=with_value_loss(
            policy.loss, clip=options.value_clip, coefficient=options.value_coefficient
        ),
        needs_values=True,
        finish=partial(
            credit,
            gamma=options.gamma,
            gae_lambda=options.gae_lambda,
            normalize_advantages=options.normalize_advantages,
        ),
        stop_kl=None if options.target_kl is None else STOP_FACTOR * options.target_kl,
    )


def credit(
    prepared: PreparedBatch, *, gamma: float, gae_lambda: float, normalize_advantages: bool
) -> PreparedBatch:
    """Rewards in `advantages` → GAE, whitened over the batch, and returns (of advantages before
    whitening).

    The value of a token is that of the state in which it is predicted. Only trained tokens are
    states: a tool's answer between two of them is passed over, so value and advantage are carried
    across it. The last trained token of a sequence gets the reward and ends its episode, also where
    the answer was cut off (as in TRL and verl): no value replaces the unwritten part.

    Metrics: explained_variance, 1 - Var(return - V) / Var(return), of the values before the step.
    """
    assert prepared.old_values is not None
    if not len(prepared.old_values):
        return prepared
    values = prepared.old_values.astype(np.float64)
    rewards = (
        np.zeros(len(values))
        if prepared.kl_penalty is None
        else -prepared.kl_penalty.astype(np.float64)
    )
    last = np.cumsum(prepared.lengths)[np.array(prepared.lengths) > 0] - 1
    rewards[last] += prepared.advantages[last]
    advantages = gae(rewards, values, last, gamma=gamma, gae_lambda=gae_lambda)
    returns = advantages + values
    spread = returns.var()
    explained = {"explained_variance": float(1.0 - advantages.var() / spread)} if spread > 0 else {}
    return replace(
        prepared,
        advantages=(whiten(advantages) if normalize_advantages else advantages).astype(np.float32),
        returns=returns.astype(np.float32),
        metrics={**prepared.metrics, **explained},
    )


# ---------------------------------------------------------------------- on rows of a file


DATA_LOSSES: dict[str, Callable[[PreferenceConfig, float], Loss]] = {
    "dpo": lambda preference, beta: partial(
        dpo_loss,
        beta=beta,
        loss_type=preference.loss_type,
        loss_weights=preference.loss_weights,
        label_smoothing=preference.label_smoothing,
        discopop_tau=preference.discopop_tau,
        f_divergence=preference.f_divergence,
        f_alpha=preference.f_alpha,
        ld_alpha=preference.ld_alpha,
        wpo=preference.wpo,
    ),
    "kto": lambda preference, beta: partial(kto_loss, beta=beta),
    "orpo": lambda preference, beta: partial(orpo_loss, beta=beta),
    "simpo": lambda preference, beta: partial(simpo_loss, beta=beta, gamma=preference.gamma),
    "cpo": lambda preference, beta: partial(cpo_loss, beta=beta, nll_weight=preference.nll_weight),
    "sft": lambda preference, beta: dft_loss if preference.sft_loss == "dft" else nll_loss,
    REWARD_MODEL: lambda preference, beta: partial(
        reward_model_loss, centering=preference.center_rewards_coefficient
    ),
}
"""One more is a function in `losses.preference`, a line here, and its name (with its options) in
`config.data`."""


@dataclass(frozen=True)
class CollisionEntropy:
    """-log Σ p² of each token's distribution: a `prepare.Compared`.

    Worked: p = (1/2, 1/4, 1/4) → -log 3/8 = 0.980829.
    """

    name: ClassVar[str] = "collision_entropy"

    def measure(self, columns: np.ndarray) -> Measure:
        """Return [n] of logits [n, V], without a slope."""

        def measured(logits: mx.array, batch: TokenBatch, chunk: slice) -> tuple[mx.array, ...]:
            wide = mx.stop_gradient(scaled(logits, batch, chunk))
            return (2.0 * logsumexp(wide) - logsumexp(2.0 * wide),)

        return measured


def on_rows(name: str, preference: PreferenceConfig) -> Algorithm:
    """The algorithm of this name on rows."""
    beta = BETAS.get(name, 0.0) if preference.beta is None else preference.beta
    return Algorithm(
        name=name,
        loss=DATA_LOSSES[name](preference, beta),
        advantages=lambda rewards: None,  # there are no groups of rewards
        needs_reference=name in USES_REFERENCE,
        scores_values=name == REWARD_MODEL,
        on_data=True,
        rows_per_example=2 if name in PAIRED else 1,
        finish=_sorting(preference),
        entropy_slope=False,
        fuse=True,
        compared=CollisionEntropy() if preference.wpo else None,
    )


def with_sorted_margins(
    prepared: PreparedBatch, *, kinds: Sequence[str], together: int | None, ld_alpha: float | None
) -> PreparedBatch:
    """A `prepare.Finish`: the margins of `losses.aot`, under the weights that the step starts from.
    The rows came without log-probabilities, so the trainer has scored them."""
    assert prepared.ref_logprobs is not None
    ends = np.cumsum(prepared.lengths)[:-1]
    policy, reference = (
        np.split(column, ends) for column in (prepared.rollout_logprobs, prepared.ref_logprobs)
    )
    margins = sorted_margins(kinds, policy, reference, together=together, ld_alpha=ld_alpha)
    return replace(prepared, row_constants=margins)


def _sorting(preference: PreferenceConfig) -> Finish | None:
    """The step over the whole batch of losses that sort its pairs."""
    kinds = [kind for kind in preference.loss_types if kind in SORTED]
    together, ld_alpha = preference.pairs_together, preference.ld_alpha
    sort = partial(with_sorted_margins, kinds=kinds, together=together, ld_alpha=ld_alpha)
    return sort if kinds else None


def online_dpo(preference: PreferenceConfig) -> Algorithm:
    """DPO's loss on pairs of answers that the policy has sampled (arXiv:2402.04792)."""
    beta = BETAS[ONLINE_DPO] if preference.beta is None else preference.beta
    return Algorithm(
        name=ONLINE_DPO,
        loss=DATA_LOSSES["dpo"](preference, beta),
        advantages=best_and_worst,
        pairs=True,
        needs_reference=True,
        rows_per_example=2,
        entropy_slope=False,
        fuse=True,
        compared=CollisionEntropy() if preference.wpo else None,
    )


def online_kto(preference: PreferenceConfig) -> Algorithm:
    """KTO's loss on answers that the policy has sampled, each for itself."""
    weights = (preference.desirable_weight, preference.undesirable_weight)
    return Algorithm(
        name=ONLINE_KTO,
        loss=partial(kto_loss, beta=preference.beta or BETAS[ONLINE_KTO]),
        advantages=partial(by_sign, weights=weights),
        singles=True,
        constants=partial(kto_of_rollouts, measures_kl=preference.kto_loss == "kto"),
        needs_reference=True,
        entropy_slope=False,
        fuse=True,
    )


def kto_of_rollouts(batch: TrainBatch, score: Score, *, measures_kl: bool) -> dict[str, float]:
    """Return the constants of `kto_loss`: "kl" = max(0, mean log-ratio of each prompt with the
    completion of the next sequence), and how many sequences have either label.

    A prompt with another's completion is cut if it is longer than the longest sequence: memory
    and the model's context are for those."""
    rollouts = [sequence.rollout for sequence in batch.sequences if sequence.trained]
    following = [*rollouts[1:], *rollouts[:1]]
    kl = 0.0
    if measures_kl and rollouts:
        longest = max(len(rollout.tokens) for rollout in rollouts)
        foreign = map(partial(_mismatched, longest=longest), rollouts, following)
        kl = max(0.0, fmean(score(list(foreign))))
    labels = [math.fsum(sequence.advantages) for sequence in batch.sequences]
    return {
        "kl": kl,
        "desirable": float(sum(label > 0 for label in labels)),
        "undesirable": float(sum(label < 0 for label in labels)),
    }


def _mismatched(rollout: Rollout, other: Rollout, *, longest: int) -> Rollout:
    """The first tokens of the prompt of one with the completion of another (arXiv:2402.01306,
    §3.3)."""
    prompt, completion = rollout.mask.index(1), other.mask.index(1)
    mask = (*(0,) * prompt, *other.trained_mask[completion:])[:longest]
    return Rollout(
        (*rollout.tokens[:prompt], *other.tokens[completion:])[:longest],
        mask,
        None,
        (0,) * len(mask),
        rollout.temperature,
        {},
        **of_prompt(rollout),
    )


ALGORITHMS: dict[str, Callable[[LearningSection], Algorithm]] = {
    **dict.fromkeys(PRESETS, policy_gradient),
    "ppo": lambda training: ppo(training, training.ppo),
    **dict.fromkeys(DATA_LOSSES, lambda training: on_rows(training.algorithm, training.preference)),
    ONLINE_DPO: lambda training: online_dpo(training.preference),
    ONLINE_KTO: lambda training: online_kto(training.preference),
}


# ---------------------------------------------------------------------- the user's own functions


def custom_advantage(reference: str) -> Estimator:
    """Rewards of one group → one number each, or None (nothing to learn). Raises ConfigError,
    here and when called."""
    key = f"rl_training.advantage: {reference}"
    function = load_function_of(("rewards",), reference, "rl_training.advantage")

    def advantages(rewards: Sequence[float]) -> tuple[float, ...] | None:
        with user_code(key):
            values = function(list(rewards))
            numbers = None if values is None else tuple(float(value) for value in values)
        if numbers is None:
            return None
        if len(numbers) != len(rewards) or not all(map(math.isfinite, numbers)):
            raise ConfigError(
                f"{key} returned {values!r} for {len(rewards)} rewards: expected a finite"
                " number for each"
            )
        return numbers if any(numbers) else None

    return advantages


def custom_loss(reference: str) -> Loss:
    """LossInputs of one micro-batch → LossOutputs (or the bare loss). Raises ConfigError, here
    and when called."""
    key = f"rl_training.loss: {reference}"
    function = load_function_of(("inputs",), reference, "rl_training.loss")

    def loss(inputs: LossInputs) -> LossOutputs:
        with user_code(key):
            outputs = function(inputs)
        if isinstance(outputs, mx.array):
            outputs = LossOutputs(outputs)
        value = outputs.loss if isinstance(outputs, LossOutputs) else outputs
        if (
            not isinstance(outputs, LossOutputs)
            or not isinstance(value, mx.array)
            or value.ndim != 0
        ):
            shape = list(value.shape) if isinstance(value, mx.array) else type(value).__name__
            raise ConfigError(
                f"{key} returned {shape}: expected LossOutputs with a loss"
                " of one number (see aggregate)"
            )
        if taken := [name for name in outputs.metrics if name in KEYS and name not in LOSS_METRICS]:
            raise ConfigError(
                f"{key} returned the metric {taken[0]!r}, which is a"
                " column of metrics.jsonl already"
            )
        with user_code(key):
            metrics = {name: mx.array(value) for name, value in outputs.metrics.items()}
        if wrong := [name for name, value in metrics.items() if value.ndim != 0]:
            raise ConfigError(
                f"{key}: the metric {wrong[0]!r} has the shape"
                f" {list(metrics[wrong[0]].shape)}, not one number"
            )
        return LossOutputs(outputs.loss, metrics or {"policy_loss": outputs.loss})

    return loss
