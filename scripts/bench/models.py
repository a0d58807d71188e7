"""The benchmarks' model: a random Qwen3 of 29 M parameters, in memory or as a checkpoint with
its own tokenizer."""

import json
from pathlib import Path
from typing import Any

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_parallm.models.loading import evaluate_module

assert mlx_parallm.__version__

VOCAB = 8192
END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
LARGER: dict[str, Any] = {
    "hidden_size": 896,
    "num_hidden_layers": 13,
    "intermediate_size": 2688,
    "num_attention_heads": 14,
    "num_key_value_heads": 7,
}
"""What a model of 132 M parameters has instead."""


def bench_model(seed: int = 0, *, sharpness: float = 1.0, **shape: Any) -> nn.Module:
    """SHAPE, but for what `shape` says; evaluated. The logits' standard deviation is about
    `sharpness`."""
    mx.random.seed(seed)
    model = qwen3.Model(qwen3.ModelArgs(**SHAPE | shape))
    model.model.norm.weight = model.model.norm.weight * sharpness
    model.freeze()
    model.eval()
    evaluate_module(model)
    return model


def parameters(model: nn.Module) -> int:
    return sum(array.size for _, array in tree_flatten(model.parameters()))


def bench_prompts(count: int, length: int, seed: int = 1) -> list[list[int]]:
    """Distinct random prompts."""
    tokens = mx.random.randint(0, VOCAB - 1, (count, length), key=mx.random.key(seed))
    return [[int(token) for token in row] for row in tokens.tolist()]


def save_bench_model(
    directory: Path, *, endless: bool = False, sharpness: float = 1.0, **shape: Any
) -> Path:
    """Write the model in Hugging Face layout with a byte-level BPE tokenizer that covers all of
    its ids.

    `endless`: the end of text is an id that the model cannot sample, so every answer has the length
    asked for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model = bench_model(sharpness=sharpness, **shape)
    mx.save_safetensors(
        str(directory / "model.safetensors"), dict(tree_flatten(model.parameters()))
    )
    arguments = {key: value for key, value in vars(model.args).items() if value is not None}
    end = VOCAB if endless else VOCAB - 1
    (directory / "config.json").write_text(json.dumps(arguments | {"eos_token_id": end}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in alphabet for b in alphabet][: end - len(alphabet)]
    vocabulary = {text: i for i, text in enumerate([*alphabet, *(a + b for a, b in pairs), END])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, chat_template=CHAT_TEMPLATE
    )
    wrapped.save_pretrained(directory)
    return directory
