"""Losses on rows of a file: preference pairs (DPO, ORPO, SimPO, CPO, reward models), labelled
completions (KTO), examples (SFT).

All but the reward model's, which reads values, read log-probabilities of the trained tokens
(`mask`: the completion's) and no others. A
pair is two neighbouring rows, 2i chosen and 2i + 1 rejected, in one micro-batch. With c, r the sums
over a completion, c_ref, r_ref the reference's, c̄, r̄ the means over its tokens, and Δ = (c -
c_ref) - (r - r_ref):

Worked: c = -4 over 8 tokens, r = -6.5 over 10, c_ref = -4.6, r_ref = -6, so Δ = 0.6 + 0.5 = 1.1, c̄
= -0.5, r̄ = -0.65. β = 0.1: DPO -log σ(0.11) = 0.639659, hinge 1 - 0.11 = 0.89, IPO (0.075 + 0.05 -
5)² = 23.765625 on means and (1.1 - 5)² = 15.21 on sums; CPO -log σ(0.25) + 0.5 = 1.075939; ORPO 0.5
+ 0.1 · 0.535646 = 0.553565; SimPO with β = 2, γ = 1: -log σ(2 · 0.15 - 1) = 1.103186. KTO with kl =
0.3: 1 - σ(0.1 · (0.6 - 0.3)) = 0.492501 for c as a desirable completion, 1 - σ(0.1 · (0.3 + 0.5)) =
0.480011 for r as an undesirable one.

Of the ratios 0.6 and -0.5 with β = 0.1: apo_zero σ(-0.06) + σ(-0.05) = 0.972507, apo_down σ(0.06) +
σ(-0.11) = 0.987523, bco_pair 0.663597 + 0.668460 = 1.332057, nca_pair 1.359625, sppo_hard 4.4² +
4.5² = 39.61, sigmoid_norm -log σ(0.1 · 0.125) = 0.686917, exo_pair with ε = 0.1: 0.451973, discopop
with τ = 0.05: 0.870281, sft 4 / 8 = 0.5. MPO, 0.8 sigmoid + 0.2 bco_pair + 1 sft: 1.278138.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import mlx.core as mx

from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate, masked

HIGHEST_MEAN_LOGPROB = -1e-6
"""ORPO: log(1 - e^x) has no value at x = 0; a completion of this mean log-probability is certain
in float32."""


@dataclass(frozen=True)
class Pairs:
    """The inputs of DPO's losses for P pairs. `chosen`, `rejected` [P]: the log-ratios c - c_ref
    and r - r_ref. `scores`: f' of them (`DIVERGENCES`), whose difference is the margin."""

    inputs: LossInputs
    ratios: mx.array  # [2P]
    scores: mx.array  # [2P]
    beta: float
    label_smoothing: float
    discopop_tau: float | None

    @property
    def chosen(self) -> mx.array:
        return self.ratios[0::2]

    @property
    def rejected(self) -> mx.array:
        return self.ratios[1::2]

    @cached_property
    def margin(self) -> mx.array:
        """Δ [P]."""
        chosen, rejected = _pairs(self.scores)
        return chosen - rejected

    @cached_property
    def mean_margin(self) -> mx.array:
        """Δ of means over tokens [P]."""
        chosen, rejected = _pairs(self.scores / _lengths(self.inputs))
        return chosen - rejected


def _sigmoid(pairs: Pairs) -> mx.array:
    """cDPO's (1-ε)(-log σ(βΔ)) - ε log σ(-βΔ), DPO's where ε = `label_smoothing` is 0."""
    return _smoothed(pairs.margin, pairs)


def _smoothed(margins: mx.array, pairs: Pairs) -> mx.array:
    h, smoothing = pairs.beta * margins, pairs.label_smoothing
    return _minus_log_sigmoid(h) * (1.0 - smoothing) + _minus_log_sigmoid(-h) * smoothing


def _sorted(pairs: Pairs, kind: str) -> mx.array:
    """The sigmoid loss of margins between completions of other pairs (`losses.aot`). A pair has
    half of the values that its two completions stand in, and the whole slopes of its own."""
    if kind not in pairs.inputs.row_constants:
        raise ValueError(f'loss_type = "{kind}" needs row_constants of losses.aot.sorted_margins')
    chosen, rejected = _pairs(pairs.inputs.row_constants[kind])
    moved = pairs.ratios - mx.stop_gradient(pairs.ratios)
    values = _smoothed(chosen + moved[0::2], pairs) + _smoothed(rejected - moved[1::2], pairs)
    return values - mx.stop_gradient(0.5 * values)


def _robust(pairs: Pairs) -> mx.array:
    """cDPO's with the second sign turned, over 1 - 2ε (arXiv:2403.00409)."""
    h, smoothing = pairs.beta * pairs.margin, pairs.label_smoothing
    values = _minus_log_sigmoid(h) * (1.0 - smoothing) - _minus_log_sigmoid(-h) * smoothing
    return values / (1.0 - 2.0 * smoothing)


def _exo_pair(pairs: Pairs) -> mx.array:
    """The reverse KL of the policy's preference σ(βΔ) and the labels', 1-ε and ε
    (arXiv:2402.00856, eq. 16)."""
    h, smoothing = pairs.beta * pairs.margin, mx.array(pairs.label_smoothing)
    chosen = mx.sigmoid(h) * (-_minus_log_sigmoid(h) - mx.log1p(-smoothing))
    return chosen + mx.sigmoid(-h) * (-_minus_log_sigmoid(-h) - mx.log(smoothing))


def _nca_pair(pairs: Pairs) -> mx.array:
    """-log σ(β chosen) - ½ log σ(-β chosen) - ½ log σ(-β rejected) (arXiv:2402.05369)."""
    chosen, rejected = pairs.beta * pairs.chosen, pairs.beta * pairs.rejected
    return (
        _minus_log_sigmoid(chosen)
        + 0.5 * _minus_log_sigmoid(-chosen)
        + 0.5 * _minus_log_sigmoid(-rejected)
    )


def _sppo_hard(pairs: Pairs) -> mx.array:
    """(chosen - 1/(2β))² + (rejected + 1/(2β))² (arXiv:2405.00675)."""
    half = 0.5 / pairs.beta
    return mx.square(pairs.chosen - half) + mx.square(pairs.rejected + half)


def _discopop(pairs: Pairs) -> mx.array:
    """-log σ(h) · (1 - m) + e^-h · m, h = βΔ, m = σ(h / τ) (arXiv:2406.08414, eq. 5). e^-h · m
    is one exponential: a large e^-h and an m of 0 would make a NaN."""
    assert pairs.discopop_tau is not None
    h = pairs.beta * pairs.margin
    exponential = mx.exp(-h - _minus_log_sigmoid(h / pairs.discopop_tau))
    return _minus_log_sigmoid(h) * mx.sigmoid(-h / pairs.discopop_tau) + exponential


def _sft(pairs: Pairs) -> mx.array:
    """The chosen completions' negative log-likelihood, a mean over tokens."""
    return -_pairs(_sums(pairs.inputs))[0] * _pairs(_sides(pairs.inputs))[0]


PAIR_LOSSES: dict[str, Callable[[Pairs], mx.array]] = {
    "sigmoid": _sigmoid,
    "hinge": lambda pairs: mx.maximum(1.0 - pairs.beta * pairs.margin, 0.0),
    "ipo": lambda pairs: mx.square(pairs.mean_margin - 1.0 / (2.0 * pairs.beta)),
    "ipo_sum": lambda pairs: mx.square(pairs.margin - 1.0 / (2.0 * pairs.beta)),
    "robust": _robust,
    "sigmoid_norm": lambda pairs: _minus_log_sigmoid(pairs.beta * pairs.mean_margin),
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": lambda pairs: (
        _minus_log_sigmoid(pairs.beta * pairs.chosen)
        + _minus_log_sigmoid(-pairs.beta * pairs.rejected)
    ),
    "sppo_hard": _sppo_hard,
    "apo_zero": lambda pairs: (
        mx.sigmoid(-pairs.beta * pairs.chosen) + mx.sigmoid(pairs.beta * pairs.rejected)
    ),
    "apo_down": lambda pairs: (
        mx.sigmoid(pairs.beta * pairs.chosen) + mx.sigmoid(-pairs.beta * pairs.margin)
    ),
    "discopop": _discopop,
    "sft": _sft,
    "aot": partial(_sorted, kind="aot"),
    "aot_unpaired": partial(_sorted, kind="aot_unpaired"),
}
"""loss_type of DPO → its value for each pair, [P]. The names are TRL's but `ipo_sum`."""


LARGEST_EXPONENT = 80.0  # TRL's


def _alpha(ratios: mx.array, alpha: float | None) -> mx.array:
    assert alpha is not None
    power = alpha - 1.0
    if abs(power) < 1e-6:  # its limit, as TRL has it
        return ratios
    return (mx.exp(mx.minimum(power * ratios, LARGEST_EXPONENT)) - 1.0) / power


DIVERGENCES: dict[str, Callable[[mx.array, float | None], mx.array]] = {
    "reverse_kl": lambda ratios, alpha: ratios,
    "forward_kl": lambda ratios, alpha: 1.0 - mx.exp(mx.minimum(-ratios, LARGEST_EXPONENT)),
    "js_divergence": lambda ratios, alpha: math.log(2.0) - _minus_log_sigmoid(ratios),
    "alpha_divergence": _alpha,
}
"""f_divergence of DPO → f'(t) of log-ratios log t, up to a constant: log t, 1 - 1/t, log 2t / (1 +
t) and (t^(α-1) - 1) / (α - 1) (f-DPO, arXiv:2309.16240; as TRL)."""


def dpo_loss(
    inputs: LossInputs,
    *,
    beta: float,
    loss_type: str | Sequence[str],
    label_smoothing: float,
    loss_weights: Sequence[float] = (),
    discopop_tau: float | None = None,
    f_divergence: str = "reverse_kl",
    f_alpha: float | None = None,
    ld_alpha: float | None = None,
    wpo: bool = False,
) -> LossOutputs:
    """DPO (arXiv:2305.18290): "sigmoid" -log σ(βΔ), with ε = `label_smoothing` cDPO's; "hinge"
    max(0, 1 - βΔ) (SLiC, arXiv:2305.10425); "ipo" (arXiv:2310.12036) (Δ - 1/(2β))² with Δ of means
    over tokens as in TRL, "ipo_sum" of sums; "bco_pair" (arXiv:2404.04656); "apo_zero", "apo_down"
    (arXiv:2408.06266); the others: `PAIR_LOSSES`. Several are added up by `loss_weights` (default:
    1 each), as in MPO (arXiv:2411.10442).

    Args:
        discopop_tau: τ, which "discopop" needs.
        f_divergence: a key of `DIVERGENCES`, with α = `f_alpha`: Δ is of f' of the log-ratios.
            Worked: 0.6 and -0.5 → "forward_kl" Δ = 0.451188 + 0.648721 = 1.099910.
        ld_alpha: weight of the tokens behind the length of the pair's shorter completion (LD-DPO,
            arXiv:2409.06411), in all but "sft"; None: 1.
        wpo: a pair's loss is multiplied by exp of the means over tokens of log p - log Σ p², of
            both completions, not differentiated (WPO, arXiv:2406.11827, eq. 2); needs
            `collision_entropy`. Worked: log p = -1, -2 and -log Σ p² = 0.8, 1 of one completion,
            log p = -0.5 and 0.4 of the other: exp(-0.6) · exp(-0.1) = 0.496585.

    "sft": a chosen row's advantage is the weight of its tokens, 1 over the mean number of tokens
    where the mean is over all chosen ones of the mini-batch.

    "aot", "aot_unpaired" (arXiv:2406.05882) read margins of `losses.aot` in `row_constants`.

    Raises ValueError: no `ref_logprobs`, no `collision_entropy`, or no such margins.
    """
    kinds = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
    whole = inputs
    if ld_alpha is not None:
        inputs = _with_lighter_tails(inputs, ld_alpha)
    ratios = _log_ratios(inputs)
    scores = DIVERGENCES[f_divergence](ratios, f_alpha)
    pairs = Pairs(whole, ratios, scores, beta, label_smoothing, discopop_tau)
    values = mx.zeros_like(pairs.margin)
    for kind, weight in zip(kinds, loss_weights or (1.0,) * len(kinds), strict=True):
        part = PAIR_LOSSES[kind](pairs)
        values = values + (part if weight == 1.0 else weight * part)
    if wpo:
        values = values * _wpo_weights(whole)
    return _of_pairs(values, inputs, (beta * pairs.chosen, beta * pairs.rejected))


def orpo_loss(inputs: LossInputs, *, beta: float) -> LossOutputs:
    """ORPO (arXiv:2403.07691): -c̄ - β log σ(log odds(c̄) - log odds(r̄)), odds(x) = e^x / (1 -
    e^x). No reference.

    -c̄ is the chosen completion's own mean, as in the paper; the prompt's tokens are not in it (TRL
    has them in). Metrics besides the usual ones: nll, log_odds.
    """
    chosen, rejected = _pairs(_sums(inputs) / _lengths(inputs))
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    outputs = _of_pairs(
        beta * _minus_log_sigmoid(log_odds) - chosen, inputs, (beta * chosen, beta * rejected)
    )
    return LossOutputs(
        outputs.loss,
        outputs.metrics
        | {"nll": _mean_of_pairs(-chosen, inputs), "log_odds": _mean_of_pairs(log_odds, inputs)},
    )


def simpo_loss(inputs: LossInputs, *, beta: float, gamma: float) -> LossOutputs:
    """SimPO (arXiv:2405.14734): -log σ(β (c̄ - r̄) - γ). No reference; length-normalised."""
    chosen, rejected = _pairs(_sums(inputs) / _lengths(inputs))
    values = _minus_log_sigmoid(beta * (chosen - rejected) - gamma)
    return _of_pairs(values, inputs, (beta * chosen, beta * rejected))


def cpo_loss(inputs: LossInputs, *, beta: float, nll_weight: float) -> LossOutputs:
    """CPO (arXiv:2401.08417): -log σ(β (c - r)) - nll_weight · c̄. No reference. Metrics besides
    the usual ones: nll.

    The likelihood term is a mean over tokens, as in TRL: a sum would weigh long completions more
    than the preference.
    """
    chosen, rejected = _pairs(_sums(inputs))
    nll = _pairs(-_sums(inputs) / _lengths(inputs))[0]
    values = _minus_log_sigmoid(beta * (chosen - rejected)) + nll_weight * nll
    outputs = _of_pairs(values, inputs, (beta * chosen, beta * rejected))
    return LossOutputs(outputs.loss, outputs.metrics | {"nll": _mean_of_pairs(nll, inputs)})


def reward_model_loss(inputs: LossInputs, *, centering: float = 0.0) -> LossOutputs:
    """Bradley–Terry of scores s: -log σ(s_c - s_r - margin) + centering · (s_c + s_r)².

    Sources: arXiv:2203.02155; margin: Llama 2, arXiv:2307.09288; centering: arXiv:2312.09244, as
    TRL has it. A row has one true entry of `mask`, its last token, and `values` there is its
    score. The chosen row's advantage is the margin of its pair. A pair is right where s_c > s_r,
    whatever its margin; a tie counts as half an accuracy.

    Worked: scores 1.2 and 0.7, margin 0.1, centering 0.01: -log σ(0.4) + 0.01 · 1.9² = 0.513015 +
    0.0361 = 0.549115; its slope by the chosen score is -σ(-0.4) + 0.038 = -0.363312, by the
    rejected one 0.401312 + 0.038 = 0.439312.

    Raises ValueError: no `values`.
    """
    if inputs.values is None:
        raise ValueError("the loss of a reward model needs values")
    chosen, rejected = _pairs(masked(inputs.values, inputs.mask).sum(axis=-1))
    margin = _pairs(masked(inputs.advantages, inputs.mask).sum(axis=-1))[0]
    losses = _minus_log_sigmoid(chosen - rejected - margin)
    if centering:
        losses = losses + centering * mx.square(chosen + rejected)
    numbers = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": _wins(chosen - rejected),
    }
    metrics = {name: _mean_of_pairs(number, inputs) for name, number in numbers.items()}
    return LossOutputs(_mean_of_pairs(losses, inputs), metrics)


def kto_loss(inputs: LossInputs, *, beta: float) -> LossOutputs:
    """KTO (arXiv:2402.01306): w · (1 - σ(±β (ratio - kl))), + for a desirable completion, ratio =
    Σ(logprobs - ref).

    With kl = 0 it is APO-zero of single rows (arXiv:2408.06266): w · (1 - σ(β ratio)) and w · σ(β
    ratio).

    A row's advantage is its label and weight: +w desirable, -w undesirable. `constants`, of the
    whole mini-batch: "kl", the estimate max(0, mean ratio of mismatched prompts and completions),
    not differentiated; "desirable" and "undesirable", how many there are. rewards/accuracies: share
    of rows on their side of kl, at it ½.

    Raises ValueError: no `ref_logprobs`. KeyError: `constants` lacks one.
    """
    ratios = _log_ratios(inputs)
    kl = inputs.constants["kl"]
    labels = _sides(inputs)
    side = mx.sign(labels)
    values = mx.abs(labels) * mx.sigmoid(-side * beta * (ratios - kl))
    logps = mx.stop_gradient(_sums(inputs))

    def mean(values: mx.array) -> mx.array:
        return values.sum() / inputs.sequence_normalizer

    metrics = {
        "rewards/accuracies": mean(_wins(side * (ratios - kl))),
        "kto_kl": kl * mean(mx.ones_like(ratios)),
    }
    for name, sign, count in (("chosen", 1, "desirable"), ("rejected", -1, "undesirable")):
        number = mx.maximum(inputs.constants[count], 1.0)
        metrics[f"rewards/{name}"] = mx.where(side == sign, beta * ratios, 0.0).sum() / number
        metrics[f"logps/{name}"] = mx.where(side == sign, logps, 0.0).sum() / number
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return LossOutputs(mean(values), metrics)


def nll_loss(inputs: LossInputs) -> LossOutputs:
    """SFT: -logprobs, mean over the mini-batch's trained tokens.

    Worked: log-probabilities -1 and -2 of one row, -6 of another: (1 + 2 + 6) / 3 = 3.
    """
    return LossOutputs(aggregate(-inputs.logprobs, inputs))


def dft_loss(inputs: LossInputs) -> LossOutputs:
    """Dynamic fine-tuning (arXiv:2508.05629): -p · logprobs, the probability p not differentiated,
    mean over the mini-batch's trained tokens: unlikely tokens count less. Metrics: nll, for this
    loss also rises if an unlikely token becomes a likely one.

    Worked: log-probabilities -1, -2 and -6: (e^-1 + 2 e^-2 + 6 e^-6) / 3 = 0.217808.
    """
    logprobs = masked(inputs.logprobs, inputs.mask)
    return LossOutputs(
        aggregate(-mx.stop_gradient(mx.exp(logprobs)) * logprobs, inputs),
        {"nll": aggregate(-mx.stop_gradient(logprobs), inputs)},
    )


# ---------------------------------------------------------------------- parts


def _sums(inputs: LossInputs) -> mx.array:
    """Log-probability of each row's trained tokens, [B]."""
    return masked(inputs.logprobs, inputs.mask).sum(axis=-1)


def _sides(inputs: LossInputs) -> mx.array:
    """The advantage that all tokens of a row have, [B]."""
    return masked(inputs.advantages, inputs.mask).sum(axis=-1) / _lengths(inputs)


def _lengths(inputs: LossInputs) -> mx.array:
    return mx.maximum(inputs.mask.sum(axis=-1), 1)


def _log_ratios(inputs: LossInputs) -> mx.array:
    """log π(y|x) - log π_ref(y|x), [B]. Token by token first: sums of hundreds of tokens would
    cancel to noise."""
    if inputs.ref_logprobs is None:
        raise ValueError("this loss needs ref_logprobs")
    return (masked(inputs.logprobs, inputs.mask) - masked(inputs.ref_logprobs, inputs.mask)).sum(
        axis=-1
    )


def _with_lighter_tails(inputs: LossInputs, alpha: float) -> LossInputs:
    """The inputs with the log-probabilities of tokens behind the shorter completion's length times
    alpha."""
    mask = inputs.mask
    shared = mx.repeat(mask.sum(axis=-1).reshape(-1, 2).min(axis=-1), 2)
    weights = mx.where(mx.cumsum(mask.astype(mx.int32), axis=-1) <= shared[:, None], 1.0, alpha)
    then = inputs.ref_logprobs
    return replace(
        inputs,
        logprobs=masked(inputs.logprobs, mask) * weights,
        ref_logprobs=None if then is None else masked(then, mask) * weights,
    )


def _wpo_weights(inputs: LossInputs) -> mx.array:
    """exp(mean of log p - log Σ p²) of both completions of each pair, multiplied, [P]."""
    if inputs.collision_entropy is None:
        raise ValueError("WPO needs the collision_entropy of each token")
    aligned = masked(inputs.logprobs + inputs.collision_entropy, inputs.mask).sum(axis=-1)
    chosen, rejected = _pairs(mx.stop_gradient(aligned / _lengths(inputs)))
    return mx.exp(chosen + rejected)


def _pairs(rows: mx.array) -> tuple[mx.array, mx.array]:
    """[2P] → chosen [P], rejected [P]."""
    return rows[0::2], rows[1::2]


def _mean_of_pairs(values: mx.array, inputs: LossInputs) -> mx.array:
    return values.sum() / (inputs.sequence_normalizer / 2)


def _of_pairs(
    values: mx.array, inputs: LossInputs, rewards: tuple[mx.array, mx.array]
) -> LossOutputs:
    """The mean of per-pair `values`, and the metrics that every loss of pairs has. A tie counts
    as half an accuracy."""
    (chosen, rejected), logps = rewards, _pairs(_sums(inputs))
    numbers = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": _wins(chosen - rejected),
        "logps/chosen": logps[0],
        "logps/rejected": logps[1],
    }
    metrics = {name: _mean_of_pairs(number, inputs) for name, number in numbers.items()}
    return LossOutputs(_mean_of_pairs(values, inputs), metrics)


def _wins(margins: mx.array) -> mx.array:
    return 0.5 * (1.0 + mx.sign(margins))


def _minus_log_sigmoid(x: mx.array) -> mx.array:
    return mx.logaddexp(-x, mx.zeros_like(x))


def _log1mexp(x: mx.array) -> mx.array:
    """log(1 - e^x) for x ≤ 0, by expm1: exact for small |x|, where 1 - e^x would cancel."""
    return mx.log(-mx.expm1(mx.minimum(x, HIGHEST_MEAN_LOGPROB)))
