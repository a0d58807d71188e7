"""The two networks: an embedding → log-probabilities of mutations, and an embedding → expected
return.

    Linear → batch normalisation → ReLU → dropout, three times (hidden, hidden, hidden / 2), and a
    linear head

In training mode batch normalisation uses the mini-batch's statistics and dropout draws from the key
of the call; in evaluation mode running statistics are used and nothing is dropped. The same key
gives the same mask, so two networks can be compared under one mask.
"""

from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn

MASKED = -1e9  # logit of a mutation that may not be chosen: its probability is 0 in float32


class HiddenLayers(nn.Module):
    """Three hidden layers: [B, input_dim] → [B, hidden_dim / 2] float32."""

    def __init__(self, input_dim: int, hidden_dim: int, dropout: float) -> None:
        super().__init__()
        sizes = [input_dim, hidden_dim, hidden_dim, hidden_dim // 2]
        self.linear = [nn.Linear(a, b) for a, b in pairwise(sizes)]
        self.norm = [nn.BatchNorm(size) for size in sizes[1:]]
        self.dropout = dropout

    def __call__(self, x: mx.array, key: mx.array | None) -> mx.array:
        for linear, norm in zip(self.linear, self.norm, strict=True):
            x = nn.relu(norm(linear(x)))
            if self.training and self.dropout and key is not None:
                key, now = mx.random.split(key)
                kept = mx.random.bernoulli(1 - self.dropout, x.shape, key=now)
                x = mx.where(kept, x / (1 - self.dropout), 0.0)
        return x


class PolicyNetwork(nn.Module):
    """Chooses a mutation. Weights are Xavier's (uniform), biases 0, drawn from `key`."""

    def __init__(
        self, input_dim: int, action_dim: int, hidden_dim: int, *, dropout: float, key: mx.array
    ) -> None:
        super().__init__()
        self.hidden = HiddenLayers(input_dim, hidden_dim, dropout)
        self.head = nn.Linear(hidden_dim // 2, action_dim)
        initialize(self, key)

    def __call__(
        self, x: mx.array, allowed: mx.array | None = None, key: mx.array | None = None
    ) -> mx.array:
        """Return log-probabilities [B, actions] float32 of embeddings [B, input_dim].

        Args:
            allowed: [B, actions] bool; the others get the probability 0.
            key: random key of dropout (training only).
        """
        logits = self.head(self.hidden(x, key)).astype(mx.float32)
        if allowed is not None:
            logits = mx.where(allowed, logits, MASKED)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class ValueNetwork(nn.Module):
    """Estimates the discounted sum of rewards from a prompt on. The same layers, one number."""

    def __init__(self, input_dim: int, hidden_dim: int, *, dropout: float, key: mx.array) -> None:
        super().__init__()
        self.hidden = HiddenLayers(input_dim, hidden_dim, dropout)
        self.head = nn.Linear(hidden_dim // 2, 1)
        initialize(self, key)

    def __call__(self, x: mx.array, key: mx.array | None = None) -> mx.array:
        """Return values [B] float32 of embeddings [B, input_dim]. `key`: of dropout, in training
        mode."""
        return self.head(self.hidden(x, key)).astype(mx.float32)[:, 0]


def initialize(network: nn.Module, key: mx.array) -> None:
    """Set every linear layer to Xavier's uniform weights, ± sqrt(6 / (inputs + outputs)), and
    zero biases (Glorot and Bengio 2010, eq. 16)."""
    for _, module in sorted(network.named_modules()):
        if isinstance(module, nn.Linear):
            key, now = mx.random.split(key)
            bound = (6 / sum(module.weight.shape)) ** 0.5
            module.weight = mx.random.uniform(-bound, bound, module.weight.shape, key=now)
            module.bias = mx.zeros_like(module.bias)
