"""Memory and time of `quantize_base` on a 1 B parameter random bfloat16 checkpoint, made shard by
shard on the spot.

Three fresh processes load it: the first quantises layer by layer and keeps the result, the second
starts from what was kept, the third is mlx-lm's own whole-model quantisation for comparison. Each
prints its peak resident memory and MLX's own peak.

    .venv/bin/python scripts/bench/quantize_on_load.py [--layers 16] [--directory DIR]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

assert mlx_parallm.__version__

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 2048, 8192, 32, 8, 32768
ALLOWANCE = 0.5e9  # bytes beside the 4-bit model and one layer: the interpreter, MLX, MKL
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory and time of quantising on load.")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument(
        "--directory",
        help="where the checkpoint is made (default: the system's temporary directory)",
    )
    parser.add_argument(
        "--load", choices=("ours", "whole"), help="internal: load in this process and print JSON"
    )
    arguments = parser.parse_args()
    if arguments.load:
        print(json.dumps(measure(Path(arguments.directory), whole=arguments.load == "whole")))
        return
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        path = Path(directory)
        make_checkpoint(path / "model", arguments.layers)
        report(path, first=run(path, "ours"), second=run(path, "ours"), whole=run(path, "whole"))


def make_checkpoint(path: Path, layers: int) -> None:
    """One file a block; no more than one block is ever in memory."""
    path.mkdir()
    kv_width = HIDDEN // HEADS * KV_HEADS
    block = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv_width, HIDDEN),
        "self_attn.v_proj": (kv_width, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shards = [{"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}]
    shards += [
        {f"model.layers.{i}.{name}.weight": shape for name, shape in block.items()}
        for i in range(layers)
    ]
    index = {}
    for number, shapes in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            key: (0.02 * mx.random.normal(shape)).astype(mx.bfloat16)
            for key, shape in shapes.items()
        }
        mx.save_safetensors(str(path / name), tensors, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, name)
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))


def run(path: Path, load: str) -> dict[str, Any]:
    """In a fresh process; adds the seconds of the whole process."""
    begin = time.perf_counter()
    result = subprocess.run(
        [sys.executable, __file__, "--load", load, "--directory", str(path)],
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(result.stdout.splitlines()[-1])) | {
        "process_s": time.perf_counter() - begin
    }


def measure(path: Path, *, whole: bool) -> dict[str, Any]:
    from mlx_lm.utils import load_model as load_whole
    from mlx_lm.utils import quantize_model

    from mlx_parallm.config.server import ModelConfig
    from mlx_parallm.models.loading import load_model
    from mlx_parallm.system.log import configure_logging

    configure_logging()
    start_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT
    begin = time.perf_counter()
    if whole:
        model = quantize_model(*load_whole(path / "model", lazy=True), 64, 4)[0]
        mx.eval(model.parameters())
    else:
        config = ModelConfig(base_path=str(path / "model"), quantized_cache=str(path / "cache"))
        model = load_model(config, quantize=True).model
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "start_rss": start_rss,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT,
        "mlx_peak": mx.get_peak_memory(),
        "model": sum(array.nbytes for _, array in tree_flatten(model.parameters())),
    }


def report(
    path: Path, *, first: dict[str, Any], second: dict[str, Any], whole: dict[str, Any]
) -> None:
    source = sum(file.stat().st_size for file in (path / "model").glob("*.safetensors"))
    kept = sum(file.stat().st_size for file in (path / "cache").glob("*/*.safetensors"))
    layer = max(file.stat().st_size for file in (path / "model").glob("*-00002-*"))
    bound = kept + layer + ALLOWANCE
    print(
        f"checkpoint {source / 1e9:.2f} GB bfloat16 ({source / 2e9:.2f} B parameters), 4-bit"
        f" {kept / 1e9:.2f} GB,"
    )
    print(f"one layer {layer / 1e9:.2f} GB; promised peak ≤ {bound / 1e9:.2f} GB resident\n")
    print(
        "| | load | whole process | peak resident | of it before loading | MLX's peak | model"
        " in"
        " memory |"
    )
    print("|---|---|---|---|---|---|---|")
    rows = {
        "first start: quantises": first,
        "second start: from the cache": second,
        "mlx-lm, whole model": whole,
    }
    for name, row in rows.items():
        sizes = [
            f"{row[key] / 1e9:.2f} GB" for key in ("peak_rss", "start_rss", "mlx_peak", "model")
        ]
        print(
            f"| {name} | {row['seconds']:.1f} s | {row['process_s']:.1f} s | {' | '.join(sizes)} |"
        )
    print(f"\nsecond start {first['seconds'] / second['seconds']:.1f} × faster (load),", end=" ")
    print(f"{first['process_s'] / second['process_s']:.1f} × (whole process);", end=" ")
    print(
        "peak as promised"
        if max(first["peak_rss"], second["peak_rss"]) <= bound
        else "PEAK ABOVE THE PROMISE"
    )


if __name__ == "__main__":
    main()
