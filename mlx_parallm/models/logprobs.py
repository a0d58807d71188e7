"""THE place where a token's log-probability is computed: engine, trainer and reference all call it.

log p(token) = logits[token] / T - logsumexp(logits / T), in float32 whatever the model's dtype. bfloat16 here costs up
to 0.1 nat (measured by others on a 32k vocabulary), which an importance ratio turns into noise.
"""

import mlx.core as mx


def token_logprobs(
    logits: mx.array, tokens: mx.array, temperature: float | mx.array = 1.0, normalizer: mx.array | None = None
) -> mx.array:
    """Log-probabilities of given tokens.

    Args:
        logits: [..., V], any float dtype.
        tokens: [...], integer ids.
        temperature: a positive number, or an array that broadcasts against [...].
        normalizer: [...], logsumexp(logits / T) where it is known already (engine/draw.py).

    Returns:
        [...] float32.
    """
    scaled = _scale(logits, temperature)
    chosen = mx.take_along_axis(scaled, tokens[..., None].astype(mx.int32), axis=-1).squeeze(-1)
    return chosen - (mx.logsumexp(scaled, axis=-1) if normalizer is None else normalizer)


def token_logprobs_and_entropy(
    logits: mx.array, tokens: mx.array, temperature: float | mx.array = 1.0
) -> tuple[mx.array, mx.array]:
    """Log-probabilities of the tokens and the entropy (nats) of softmax(logits / temperature), both [...] float32.

    H = logsumexp(z) - sum(softmax(z) * z); one logsumexp serves both.
    """
    scaled = _scale(logits, temperature)
    normalizer = mx.logsumexp(scaled, axis=-1)
    chosen = mx.take_along_axis(scaled, tokens[..., None].astype(mx.int32), axis=-1).squeeze(-1)
    probabilities = mx.exp(scaled - normalizer[..., None])
    return chosen - normalizer, normalizer - (probabilities * scaled).sum(axis=-1)


def _scale(logits: mx.array, temperature: float | mx.array) -> mx.array:
    scaled = logits.astype(mx.float32)
    if isinstance(temperature, mx.array):
        return scaled / temperature[..., None]
    return scaled if temperature == 1.0 else scaled / temperature
