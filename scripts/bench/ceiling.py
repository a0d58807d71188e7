"""The ceiling of serving: mlx-lm's own forward and cache, no engine, no server. What `serving.py`
is divided by.

The same prompts in one prefill (head on the last position only), then decode steps with
`mx.random.categorical` and the token's float32 log-probability, one host sync a step.

    .venv/bin/python scripts/bench/ceiling.py --batch 8 --batch 32
"""

import argparse
import time

from scripts.bench.models import bench_model, bench_prompts, parameters  # isort: skip  # the fast BLAS comes before MLX

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.models.logprobs import token_logprobs

PROMPT = 51
OUTPUT = 64


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch",
        type=int,
        action="append",
        help="batch size; may be given several times (8, 32)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model = bench_model()
    print(f"{parameters(model) / 1e6:.1f} M parameters, prompts of {PROMPT} tokens, {OUTPUT} out")
    for batch in arguments.batch or [8, 32]:
        prompts = bench_prompts(batch, PROMPT)
        ceiling_rate(model, prompts, 4)
        rates = sorted(ceiling_rate(model, prompts) for _ in range(arguments.rounds))
        print(f"batch {batch}: median {rates[len(rates) // 2]:.0f} tok/s, best {rates[-1]:.0f}")


if __name__ == "__main__":
    main()
