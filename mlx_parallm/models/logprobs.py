"""THE place where a token's log-probability is computed: engine, trainer and reference all call it.

log p(token) = logits[token] / T - logsumexp(logits / T), in float32 whatever the model's dtype.
bfloat16 here costs up to 0.1 nat (measured by others on a 32k vocabulary), which an importance
ratio turns into noise.
"""

from typing import cast

import mlx.core as mx

from mlx_parallm.models.ops import as_data, exp_minus, row_maxima
from mlx_parallm.models.recurrent.fast_paths import cross_entropy
from mlx_parallm.models.sums import logsumexp, row_sums


def token_logprobs(
    logits: mx.array,
    tokens: mx.array,
    temperature: float | mx.array = 1.0,
    normalizer: mx.array | None = None,
) -> mx.array:
    """Log-probabilities of given tokens.

    Args:
        logits: [..., V], any float dtype.
        tokens: [...], integer ids.
        temperature: a positive number, or an array that broadcasts against [...].
        normalizer: [...], logsumexp(logits / T) if it is known already (`BlockedLogits`).

    Returns:
        [...] float32.
    """
    scaled = _scale(logits, temperature)
    if normalizer is None and (surprise := cross_entropy(scaled, tokens)) is not None:
        return -surprise
    chosen = _of_tokens(scaled, tokens)
    return chosen - (logsumexp(scaled) if normalizer is None else normalizer)


def token_logprobs_and_entropy(
    logits: mx.array,
    tokens: mx.array,
    temperature: float | mx.array = 1.0,
    *,
    entropy_slope: bool = True,
) -> tuple[mx.array, mx.array]:
    """Log-probabilities of the tokens and the entropy (nats) of softmax(logits / temperature), both
    [...] float32.

    H = logsumexp(z) - sum(softmax(z) * z). The gradient by z is written out, with slopes a of log p
    and b of H: a at the token, and -p · (a + b · (log p + H)) everywhere. So the logits' exp is
    computed once; there is no second derivative. Without `entropy_slope` b is taken to be 0, which
    spares passes over the logits.

    Example: probabilities 1/8, 2/8, 5/8: log p of the last is -0.470, H = 0.900; d log p / dz =
    (-1/8, -2/8, 3/8).
    """
    scaled = _scale(logits, temperature)

    @mx.custom_function
    def scores(z: mx.array) -> tuple[mx.array, ...]:
        peak = row_maxima(z)
        masses = exp_minus(z, peak)
        total = row_sums(masses)[..., None]
        normalizer = (peak + mx.log(total))[..., 0]
        mean = row_sums(masses * z) / total[..., 0]
        return _of_tokens(z, tokens) - normalizer, normalizer - mean, masses, total

    @scores.vjp
    def gradient(
        z: mx.array, slopes: tuple[mx.array, ...], outputs: tuple[mx.array, ...]
    ) -> mx.array:
        (a, b, *_), (logprobs, entropy, masses, total) = slopes, outputs
        if entropy_slope:
            shift = (entropy - (_of_tokens(z, tokens) - logprobs))[..., None]
            everywhere = masses / -total * (a[..., None] + b[..., None] * (z + shift))
            at_token = a - mx.exp(logprobs) * (a + b * (logprobs + entropy))
        else:
            everywhere = masses * (a[..., None] / -total)
            at_token = a - mx.exp(logprobs) * a
        return mx.put_along_axis(everywhere, _indices(tokens), at_token[..., None], axis=-1)

    logprobs, entropy, *_ = cast("tuple[mx.array, ...]", scores(scaled))
    return logprobs, entropy


def _of_tokens(z: mx.array, tokens: mx.array) -> mx.array:
    return mx.take_along_axis(z, _indices(tokens), axis=-1).squeeze(-1)


def _indices(tokens: mx.array) -> mx.array:
    return tokens[..., None].astype(mx.int32)


def _scale(logits: mx.array, temperature: float | mx.array) -> mx.array:
    scaled = logits.astype(mx.float32)
    if isinstance(temperature, mx.array):
        return scaled / temperature[..., None]
    return scaled if temperature == 1.0 else scaled / as_data(temperature)
