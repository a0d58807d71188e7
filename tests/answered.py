"""Rollouts of the tiny model's tokens, made of texts."""

from functools import cache
from typing import Any

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Rollout


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model_path("builtin:tiny", None, fetch=False), ModelConfig())


def answered(
    question: str,
    *turns: str,
    reward: float = 0.0,
    version: int = 3,
    slope: float = 0.0,
    **changes: Any,
) -> Rollout:
    """Turns of the model, and between two of them what the environment says. Token i has
    log-probability i · slope."""
    prompt = tokenizer().render_chat([{"role": "user", "content": question}])
    tokens, mask = list(prompt), [0] * len(prompt)
    for number, turn in enumerate(turns):
        part = tokenizer().encode(turn)
        tokens += part
        mask += [1 - number % 2] * len(part)
    logprobs = tuple(place * slope * own for place, own in enumerate(mask))
    values: dict[str, Any] = {
        "scores": {"reward": reward},
        "temperature": 1.0,
        "stop_reason": "stop",
    } | changes
    return Rollout(tuple(tokens), tuple(mask), logprobs, (version,) * len(tokens), **values)
