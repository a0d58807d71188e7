"""Quantisation-aware training of an adapter: held-out rows by the adapter, and by the exported
model in 4 bits, with and without `rl_training.lora.qat_bits`.

    .venv/bin/python scripts/bench/qat.py [--seeds 3] [--steps 300] [--rank 16]

SFT of the shipped model on words spelt backwards, by the command; `mlx_parallm merge --q-bits 4`
of the final adapter. Score: the share of held-out words that greedy decoding spells right; loss:
nats a token of the answers. "As trained" computes as the trainer does, with `qat_bits` rounded; the
others are loaded as a server loads them, "unrounded" without `qat_bits`.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlx_parallm.config.load import load_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.adapters.linear import merged_rows
from mlx_parallm.models.loading import (
    load_model,
    load_tokenizer,
    read_config,
    resolve_model_path,
)
from mlx_parallm.models.lora import linear_layers, load_adapter
from mlx_parallm.rl_training.options import training_options
from mlx_parallm.rl_training.step.policy import TrainedPolicy

assert mlx_parallm.__version__

PROGRAM = str(Path(sys.executable).with_name("mlx_parallm"))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS, LENGTH = 200, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    print("| seed | training | unrounded: score, loss | as trained | merged, rounded to 4 bits |")
    print("|---|---|---|---|---|")
    for seed in range(options.seeds):
        for qat in (False, True):
            with tempfile.TemporaryDirectory() as directory:
                measured = measure(Path(directory), seed, options.steps, options.rank, qat)
            name = "qat_bits = 4" if qat else "without"
            cells = (f"{score:.3f}, {loss:.4f}" for score, loss in measured)
            print(f"| {seed} | {name} | {' | '.join(cells)} |", flush=True)


def measure(place: Path, seed: int, steps: int, rank: int, qat: bool) -> list[tuple[float, float]]:
    """(score, loss) of the adapter on its base, of the trainer's model, and of the exported one."""
    lora = f"rank = {rank}\nalpha = {2.0 * rank}\n" + ("qat_bits = 4" if qat else "")
    held_out = train(place, seed, steps, lora)
    run(
        *("merge", "--base-model", "builtin:tiny", "--lora-path", place / "run" / "final"),
        *("--output-path", place / "q4", "--q-bits", "4"),
    )
    exported = load_model(ModelConfig(base_path=str(place / "q4"))).model
    adapter = place / "run" / "final"
    trained = trainers_model(place / "sft.toml", adapter)
    return [adapter_scores(adapter, held_out), *(scores(m, held_out) for m in (trained, exported))]


def trainers_model(config: Path, adapter: Path) -> nn.Module:
    """The model that this run's trainer computes with, with an adapter of the run."""
    loaded, training = load_model(ModelConfig()), load_config(config).rl_training
    policy = TrainedPolicy(
        loaded.model,
        training_options(training).policy,
        source=loaded.path,
        model_config=read_config(loaded.path),
    )
    policy.load(adapter)
    policy.model.eval()
    return policy.model


def train(place: Path, seed: int, steps: int, lora: str, rate: float = 2e-3) -> list[str]:
    """Train an adapter with these lines of [rl_training.lora]; return the held-out words."""
    held_out = write_rows(place / "rows.jsonl", seed)
    config = place / "sft.toml"
    config.write_text(
        f"""
[model]
base_path = "builtin:tiny"
[server]
port = 0
[rl_training]
algorithm = "sft"
seed = {seed}
learning_rate = {rate}
lr_schedule = "cosine"
warmup_steps = 10
batch_size = 32
total_steps = {steps}
checkpoint_dir = "{place}"
run_name = "run"
[rl_training.lora]
{lora}
[data]
path = "{place / "rows.jsonl"}"
max_length = 64
"""
    )
    run("train", "--config", config)
    return held_out


def adapter_scores(adapter: Path, held_out: Sequence[str]) -> tuple[float, float]:
    """(score, loss) of the shipped model with an adapter, in float32."""
    base = load_model(ModelConfig()).model
    layers, linear = load_adapter(adapter).layers, linear_layers(base)
    weights = [
        (f"{path}.weight", merged_rows(linear[path].weight, p)) for path, p in layers.items()
    ]
    base.update(tree_unflatten(weights))
    return scores(base, held_out)


def run(*command: str | Path) -> None:
    subprocess.run([PROGRAM, *map(str, command)], check=True, capture_output=True)


def write_rows(file: Path, seed: int) -> list[str]:
    """Words to learn from; returns others."""
    letters = random.Random(seed)
    words = sorted({"".join(letters.choices(LETTERS, k=LENGTH)) for _ in range(3000)})
    letters.shuffle(words)
    with file.open("w") as rows:
        for word in words[WORDS:]:
            row = {"prompt": f"Reverse: {word}", "completion": word[::-1]}
            rows.write(json.dumps(row) + "\n")
    return words[:WORDS]


def scores(model: nn.Module, words: Sequence[str]) -> tuple[float, float]:
    """(share of words whose every token is the most likely one, nats a token)."""
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"), ModelConfig())
    right, nats, count = 0, 0.0, 0
    for word in words:
        chat = [{"role": "user", "content": f"Reverse: {word}"}]
        text = tokenizer.render_chat_text(chat)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = tokenizer.encode_after(text, word[::-1])
        tokens = mx.array([[*prompt, *answer]])
        logits = model(tokens)[0, len(prompt) - 1 : -1].astype(mx.float32)
        logprobs = nn.log_softmax(logits, axis=-1)
        wanted = mx.array(answer)
        nats -= float(mx.take_along_axis(logprobs, wanted[:, None], axis=1).sum().item())
        right += bool((logits.argmax(axis=-1) == wanted).all().item())
        count += len(answer)
    return right / len(words), nats / count


if __name__ == "__main__":
    main()
