"""How far bfloat16 and float16 round, here and in transformers, beside float64.

    TORCH/bin/python -m scripts.parity.rounding expect OUT     after scripts/parity/make.py OUT
    .venv/bin/python -m scripts.parity.rounding compare OUT [--only gemma3_text] [--write]

Weights are the same numbers of the half type everywhere. A difference is that of log-probabilities,
its mean over the vocabulary and its median over positions: where the rounding chooses another
expert, one position says nothing of the others. `--write` writes scripts/parity/rounding.json:
transformers' difference, and ours divided by it. docs/models.md shows the ratios.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "rounding.json"
TYPES = ("bfloat16", "float16")
MOST = 1.5
"""The largest ratio that is not a fault."""
Numbers = np.ndarray[Any, np.dtype[np.float64]]


def texts() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the token ids that are compared, [texts, tokens]."""
    return np.random.RandomState(7).randint(3, 96, (8, 24)).astype(np.int64)


def difference(a: Numbers, b: Numbers) -> float:
    """Return how far log-probabilities [texts, tokens, vocabulary] are from others."""
    return float(np.median(np.abs(a - b).mean(axis=-1)))


def folders(out: Path, only: str) -> Iterator[Path]:
    names = set(only.split(",")) if only else None
    for folder in sorted(out.iterdir()):
        if (folder / "plain").is_dir() and (names is None or folder.name in names):
            yield folder


def expect(out: Path, only: str) -> None:
    """Write OUT/ARCHITECTURE/TYPE/: the rounded checkpoint, float64's log-probabilities, and how
    far transformers is from them in that type."""
    import torch
    from safetensors.torch import load_file, save_file

    from scripts.parity.make import reference_model

    torch.set_num_threads(1)
    ids = torch.from_numpy(texts())

    def logprobs(path: Path, dtype: Any, **options: str) -> Numbers:
        model = reference_model(path.parent.name, path, dtype=dtype, **options).eval()
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits.double()
        scores: Numbers = logits.log_softmax(-1).numpy()
        return scores

    for folder in folders(out, only):
        config = json.loads((folder / "plain" / "config.json").read_text())
        for name in TYPES:
            dtype, target = getattr(torch, name), folder / name
            target.mkdir(exist_ok=True)
            weights = load_file(folder / "plain" / "model.safetensors")
            rounded = {key: value.to(dtype) for key, value in weights.items()}
            save_file(rounded, target / "model.safetensors", {"format": "pt"})
            (target / "config.json").write_text(json.dumps(config | {"dtype": name}))
            eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
            wanted = logprobs(target, torch.float64, **eager)
            np.save(target / "logprobs.npy", wanted)
            theirs = difference(logprobs(target, dtype, experts_implementation="eager"), wanted)
            (target / "transformers.json").write_text(json.dumps(theirs))


def compare(out: Path, only: str) -> dict[str, dict[str, list[float]]]:
    """Return (transformers' difference, ours divided by it) of each type, by architecture."""
    from mlx_parallm.errors import ParallmError

    found: dict[str, dict[str, list[float]]] = {}
    for folder in folders(out, only):
        for name in TYPES:
            file = folder / name / "transformers.json"
            if not file.exists():
                continue
            theirs = json.loads(file.read_text())
            wanted = np.load(folder / name / "logprobs.npy")
            try:
                ours = difference(logprobs_of(folder / name, name), wanted)
            except ParallmError as error:
                print(folder.name, str(error)[:100])
                break
            found.setdefault(folder.name, {})[name] = [theirs, round(ours / theirs, 2)]
        if folder.name in found:
            print(folder.name, found[folder.name], flush=True)
    return found


def logprobs_of(path: Path, dtype: str) -> Numbers:
    """Return what this program gives for the checkpoint in `path`, computed in `dtype`. Raises
    ModelError."""
    import mlx_parallm  # noqa: F401  puts a fast BLAS under MLX

    import mlx.core as mx  # isort: skip

    from mlx_parallm.config.server import ModelConfig
    from mlx_parallm.models.loading import load_model

    model = load_model(ModelConfig.model_validate({"base_path": str(path), "dtype": dtype})).model
    logits = model(mx.array(texts())).astype(mx.float32)
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return np.array(scores, np.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["expect", "compare"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.command == "expect":
        expect(args.out, args.only)
        return
    found = compare(args.out, args.only)
    if args.write:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((kept | found).items())]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if any(ratio > MOST for types in found.values() for _, ratio in types.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
