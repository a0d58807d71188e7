"""One GRPO step of a Qwen3-14B shape in 4 bits with the engine beside it: what the preflight says,
what it then takes.

    python scripts/bench/step_14b.py --directory DIR                all 40 layers: 40 GB of disk; the step takes about a
                                                                    quarter of an hour on two cores
    python scripts/bench/step_14b.py --directory DIR --layers 2     the same in a minute

The checkpoint is written in bfloat16, file by file, and quantised while it is loaded, which is part
of the peak; a second run starts from what was kept. Its blocks hold the same random numbers each,
under their own names. The step trains a rank-16 adapter of every linear layer on one micro-batch
of `--tokens` tokens: a group of eight completions of one prompt. Both peaks are printed:
`mx.get_peak_memory` from before the load on, and the process's resident set.
"""

import argparse
import asyncio
import copy
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from mlx_parallm.config.load import Config, parse_config
from mlx_parallm.daemon import Serving
from mlx_parallm.models.loading import read_config
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.types import Request, Rollout, SamplingParams
from mlx_parallm.weights import SharedWeights

assert mlx_parallm.__version__
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, LAYERS = (
    5120,
    17408,
    40,
    8,
    128,
    151936,
    40,
)
GROUP, POLICY = 8, "policy"
SPARE = 2e9  # bytes of disk that stay free
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
# its tokenizer stands in: no text is made here
TINY = Path(mlx_parallm.__file__).parent / "models" / "tiny"
console = Console(width=140)


class Phases:
    """Seconds and peak of each phase; phases inside of others are added up by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peaks: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            self.peaks[name] = mx.get_peak_memory()
            console.print(
                f"{name}: {self.seconds[name]:,.1f} s, peak so far {self.peaks[name] / 1e9:.2f} GB"
            )

    def timed(self, owner: Any, method: str, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, wrapped)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--directory", type=Path, required=True, help="where the checkpoint is made, and kept"
    )
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--tokens", type=int, default=2048, help="of the micro-batch")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of the activations"
    )
    arguments = parser.parse_args()
    path = arguments.directory / f"qwen3-14b-{arguments.layers}-layers"
    if not (path / "config.json").is_file():
        make_checkpoint(path, arguments.layers)
    prompt, completion = lengths(arguments.tokens)
    config = configuration(path, arguments)
    predicted = predict(config, path, Lengths(prompt, completion))
    phases = Phases()
    report = step(config, phases, prompt, completion)
    table = Table("phase", "seconds", "peak so far, GB")
    for name, seconds in phases.seconds.items():
        table.add_row(name, f"{seconds:,.1f}", f"{phases.peaks[name] / 1e9:.2f}")
    console.print(table)
    peak, resident = mx.get_peak_memory(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
    console.print(
        f"loss {report['loss']:.4f}, gradient norm {report['grad_norm']:.3g},"
        f" {report['tokens']:,} tokens trained"
    )
    console.print(
        f"mx.get_peak_memory {peak / 1e9:.2f} GB; the preflight said {predicted / 1e9:.2f}:"
        f" {predicted / peak:.2f}"
    )
    console.print(f"resident set at most {resident / 1e9:.2f} GB")


def lengths(tokens: int) -> tuple[int, int]:
    """Tokens of the prompt and of each completion, so that GROUP rows with one prompt are
    `tokens`."""
    prompt = tokens // GROUP
    return prompt, (tokens - prompt) // GROUP + 1


def configuration(path: Path, arguments: argparse.Namespace) -> Config:
    return parse_config(
        {
            "model": {
                "base_path": str(path),
                "dtype": arguments.dtype,
                "quantized_cache": str(arguments.directory / "quantized"),
            },
            "server": {
                "port": 0,
                "batch_size": GROUP,
                "max_model_len": 1024,
                "prefix_cache_bytes": 0,
                "keep_versions": 1,
            },
            "rl_training": {
                "batch_size": GROUP,
                "token_budget": arguments.tokens,
                "blocks_per_eval": 1,
                "weight_updates": {"rollback_versions": 0},
                "lora": {"enabled": True, "rank": 16, "alpha": 32, "quantize_base": True},
                "atropos": {"rollout_batch_size": GROUP, "max_token_length": 1024},
            },
            # not played: prompts are shared
            "environments": [{"kind": "tasks", "name": "sum", "group_size": GROUP}],
        }
    )


def predict(config: Config, path: Path, longest: Lengths) -> int:
    shape = PlannedRun.of(config, read_config(path)).shape
    estimate = PlannedRun(config, shape, longest).memory
    table = Table("the preflight's parts", "GB")
    for name, size in estimate.parts.items():
        table.add_row(name, f"{size / 1e9:.2f}")
    table.add_row("without the process: what MLX counts", f"{estimate.of_mlx / 1e9:.2f}")
    console.print(table)
    return estimate.of_mlx


def step(config: Config, phases: Phases, prompt: int, completion: int) -> dict[str, float]:
    serving = Serving(config)
    mx.reset_peak_memory()
    try:
        with phases.phase("load and quantise"):
            loaded = serving.load(quantize=True)
        algorithm = make_algorithm(config.rl_training)
        with phases.phase("adapter, optimizer, checks"):
            options = config.rl_training
            policy = TrainedPolicy(
                copy.deepcopy(loaded.model),
                options,
                source=loaded.path,
                model_config=loaded.config,
            )
            trainer = Trainer(policy, options, algorithm)
        weights = SharedWeights(
            loaded.model, policy=POLICY, keep_versions=config.server.keep_versions
        )
        serving.open(loaded, weights, adapters={POLICY: policy.adapter()}, main_adapter=POLICY)
        with phases.phase("engine: one prompt of 16 tokens, two tokens"):
            request = Request(
                "one",
                tuple(range(16)),
                SamplingParams(max_tokens=2, ignore_eos=True),
                adapter=POLICY,
            )
            asyncio.run(serving.client.generate_many([request]))
        phases.timed(trainer.model, "_forward", "step: forward")
        phases.timed(trainer.model, "_score_pieces", "step: head, scores")
        phases.timed(trainer.model, "_backward_groups", "step: backward through the blocks")
        phases.timed(trainer.optimizer, "update", "step: update")
        with phases.phase("step: all"):
            result = trainer.train_step(batch(prompt, completion))
        assert result.finished
        with phases.phase("publish"):
            weights.publish_adapter(policy.adapter())
        return {name: float(result.metrics[name] or 0) for name in ("loss", "grad_norm", "tokens")}
    finally:
        serving.close()


def batch(prompt: int, completion: int) -> TrainBatch:
    """A group of one prompt, every other completion rewarded."""
    rng = np.random.default_rng(0)
    start = tuple(rng.integers(0, VOCABULARY, prompt).tolist())
    sequences = []
    for number in range(GROUP):
        tokens = start + tuple(rng.integers(0, VOCABULARY, completion).tolist())
        mask = (0,) * prompt + (1,) * completion
        logprobs = (0.0,) * prompt + (-float(np.log(VOCABULARY)),) * completion
        reward = float(number % 2)
        rollout = Rollout(tokens, mask, logprobs, (0,) * len(tokens), 1.0, {"reward": reward})
        sequences.append(TrainSequence(rollout, (2 * reward - 1,) * len(tokens), fresh=False))
    return TrainBatch(1, (), tuple(sequences), BatchStatistics())


def make_checkpoint(path: Path, layers: int) -> None:
    """One file a block; no more than one block is ever in memory."""
    block = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    table = (VOCABULARY, HIDDEN)
    outer = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": table,
        "model.norm.weight": (HIDDEN,),
    }
    needed = 2 * (sum(map(size_of, outer.values())) + layers * sum(map(size_of, block.values())))
    free = shutil.disk_usage(existing(path)).free
    if needed * 1.4 + SPARE > free:  # and its copy in 4 bits
        raise SystemExit(f"{path}: {needed * 1.4 / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
    path.mkdir(parents=True, exist_ok=True)
    index: dict[str, str] = {}

    def write(number: int, tensors: dict[str, mx.array]) -> None:
        name = f"model-{number:05d}-of-{layers + len(outer):05d}.safetensors"
        mx.save_safetensors(str(path / name), tensors, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    numbers = {name: draw(shape) for name, shape in block.items()}
    for layer in range(layers):
        write(
            layer, {f"model.layers.{layer}.{name}.weight": array for name, array in numbers.items()}
        )
    numbers.clear()
    for number, (name, shape) in enumerate(outer.items(), start=layers):
        write(number, {name: draw(shape)})
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(TINY / name, path / name)
    config: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    # last: it says that the checkpoint is whole
    (path / "config.json").write_text(json.dumps(config))
    mx.clear_cache()


def draw(shape: tuple[int, ...]) -> mx.array:
    """A norm's ones, or uniform numbers of standard deviation 0.02, in pieces of 1 GiB of
    float32."""
    if len(shape) == 1:
        return mx.ones(shape, mx.bfloat16)
    rows, bound = max(1, 2**28 // shape[1]), 0.02 * 3**0.5
    parts = []
    for start in range(0, shape[0], rows):
        part = mx.random.uniform(-bound, bound, (min(rows, shape[0] - start), shape[1])).astype(
            mx.bfloat16
        )
        mx.eval(part)
        parts.append(part)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def size_of(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape))


def existing(path: Path) -> Path:
    return path if path.exists() else existing(path.parent)


if __name__ == "__main__":
    main()
