"""A model made by hand that says one text, but for a digit that it draws: enough for
environments that want a form."""

from itertools import pairwise
from pathlib import Path

import mlx.core as mx

from mlx_parallm.models.tokenizer import Tokenizer
from tests.tiny_models import QWEN3, VOCAB_SIZE, save_checkpoint

BEGIN, DIGITS, END = "\nWhy,sum?\\boxed{", "357", "}<|im_end|>"
"""After the assistant's line break: a line in which each token stands once, so that the last
token tells the next."""


def save_speaker(path: Path, tokenizer: Tokenizer) -> Path:
    """Writes a checkpoint that answers anything with BEGIN, one of DIGITS with equal probability,
    and END.

    One layer that adds next to nothing; embeddings are unit vectors, so the head is a table of
    successors.
    """
    config = QWEN3 | {
        "hidden_size": VOCAB_SIZE,
        "num_hidden_layers": 1,
        "max_position_embeddings": 8192,
    }
    save_checkpoint(path, config | {"tie_word_embeddings": False})
    weights = mx.load(str(path / "model.safetensors"))
    begin, digits, end = (tokenizer.encode(text) for text in (BEGIN, DIGITS, END))
    assert len({*begin, *digits, *end}) == len(begin) + len(digits) + len(end)
    head = mx.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for before, after in [*pairwise(begin), *pairwise(end)]:
        head[after, before] = 1.0
    for digit in digits:
        head[digit, begin[-1]] = head[end[0], digit] = 1.0
    for name in weights:
        if "proj" in name:
            weights[name] *= 0.01
    weights |= {"model.embed_tokens.weight": mx.eye(VOCAB_SIZE), "lm_head.weight": 1.2 * head}
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    return path
