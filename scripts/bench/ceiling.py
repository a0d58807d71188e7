"""The ceiling of serving: mlx-lm's own forward and cache, no engine, no server. What `serving.py` is divided by.

The same prompts in one prefill (head on the last position only), then decode steps with `mx.random.categorical` and
the token's float32 log-probability, one host sync a step.

    .venv/bin/python scripts/bench/ceiling.py --batch 8 --batch 32
"""

import argparse
import time

import mlx_parallm  # noqa: F401 - puts a fast BLAS under MLX before MLX is imported

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.models.loading import evaluate_module
from mlx_parallm.models.logprobs import token_logprobs

VOCAB = 8192
PROMPT = 51
OUTPUT = 64


def bench_model(seed: int = 0) -> nn.Module:
    """A random Qwen3 of 29 M parameters: 8 layers, hidden 512, vocabulary 8192, tied head; evaluated."""
    mx.random.seed(seed)
    model = qwen3.Model(
        qwen3.ModelArgs(
            model_type="qwen3",
            hidden_size=512,
            num_hidden_layers=8,
            intermediate_size=1536,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            rms_norm_eps=1e-6,
            vocab_size=VOCAB,
            max_position_embeddings=2048,
            rope_theta=10000.0,
            tie_word_embeddings=True,
        )
    )
    model.freeze()
    model.eval()
    evaluate_module(model)
    return model


def parameters(model: nn.Module) -> int:
    return sum(array.size for _, array in tree_flatten(model.parameters()))


def bench_prompts(count: int, length: int = PROMPT, seed: int = 1) -> list[list[int]]:
    """Distinct random prompts."""
    tokens = mx.random.randint(0, VOCAB - 1, (count, length), key=mx.random.key(seed))
    return [[int(token) for token in row] for row in tokens.tolist()]


def ceiling_rate(model: nn.Module, prompts: list[list[int]], output: int = OUTPUT) -> float:
    """Generated tokens a second, prefill included."""
    started = time.perf_counter()
    cache = make_prompt_cache(model)
    hidden = model.model(mx.array(prompts), cache=cache)[:, -1]
    token, logprob = _sample(model.model.embed_tokens.as_linear(hidden))
    mx.eval(token, logprob)
    for _ in range(output - 1):
        token, logprob = _sample(model(token[:, None], cache=cache)[:, -1])
        mx.eval(token, logprob)
    return len(prompts) * output / (time.perf_counter() - started)


def _sample(logits: mx.array) -> tuple[mx.array, mx.array]:
    token = mx.random.categorical(logits)
    return token, token_logprobs(logits, token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, action="append", help="batch size; may be given several times (8, 32)")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = bench_model()
    print(f"{parameters(model) / 1e6:.1f} M parameters, prompts of {PROMPT} tokens, {OUTPUT} out")
    for batch in arguments.batch or [8, 32]:
        prompts = bench_prompts(batch)
        ceiling_rate(model, prompts, 4)
        rates = sorted(ceiling_rate(model, prompts) for _ in range(arguments.rounds))
        print(f"batch {batch}: median {rates[len(rates) // 2]:.0f} tok/s, best {rates[-1]:.0f}")


if __name__ == "__main__":
    main()
