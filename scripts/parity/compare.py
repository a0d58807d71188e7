"""What this program makes of the checkpoints of scripts/parity/make.py, beside transformers' numbers.

    .venv/bin/python -m scripts.parity.compare OUT [--only llama,qwen3] [--table docs] [--list]

Each checkpoint goes the whole way: `check_model` and `load_model`, the forward of the trainer, the
caches of a prefill in pieces (as it is served), the trainer's gradient of all weights, block by
block. Prints the largest differences by architecture; `--list` prints each option. With `--write`
scripts/parity/results.json holds what docs/models.md shows.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  puts a fast BLAS under MLX

import mlx.core as mx  # isort: skip
import numpy as np

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.engine.cache.prefill import new_caches
from mlx_parallm.errors import ParallmError
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layouts.layout import TokenBatch
from mlx_parallm.models.loading import check_model, load_model
from mlx_parallm.models.logprobs import token_logprobs
from scripts.parity.weights import direction

RESULTS = Path(__file__).parent / "results.json"
EQUAL, GRADIENT = 2e-5, 1e-4
RECURRENT = 1e-4
"""Bounds on the differences of log-probabilities, and on relative ones of gradients."""
FOLDED = frozenset({"falcon_h1"})
"""Architectures whose gradient is of other numbers: their weights hold the configuration's
factors."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    only = set(args.only.split(",")) if args.only else None
    results = {}
    for folder in sorted(path for path in args.out.iterdir() if path.is_dir()):
        if only and folder.name not in only:
            continue
        rows = list(compare_all(folder))
        results[folder.name] = summary(folder.name, rows)
        shown = {key: value for key, value in results[folder.name].items() if value}
        print(folder.name, json.dumps(shown), flush=True)
        for row in rows if args.list else ():
            print("   ", json.dumps(row))
    if args.write:
        kept = json.loads(RESULTS.read_text())["architectures"] if RESULTS.exists() else {}
        described = {
            "transformers": version("transformers"),
            "mlx_lm": version("mlx-lm"),
            "architectures": dict(sorted((kept | results).items())),
        }
        RESULTS.write_text(json.dumps(described, indent=1) + "\n")
    if any(result["wrong"] for result in results.values()):
        sys.exit(1)


def compare_all(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what became of each option of an architecture."""
    for file in sorted(folder.glob("*/case.json")):
        case = json.loads(file.read_text())
        try:
            yield {"option": case["option"], **compare(file.parent, case)}
        except ParallmError as error:
            told = str(error).replace(str(file.parent), "DIR")
            yield {"option": case["option"], "refused": told}
        except Exception as error:  # noqa: BLE001 - what a user would see
            yield {"option": case["option"], "crash": f"{type(error).__name__}: {error}"[:300]}
        mx.clear_cache()


def compare(path: Path, case: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest differences: `whole` and `served` of log-probabilities, `gradient`
    relative. Raises ParallmError: the checkpoint is refused."""
    config = ModelConfig(base_path=str(path), rope_length=case.get("rope_length"))
    check_model(config, train=True)
    model = load_model(config).model
    ids = mx.array(case["ids"])[None]
    wanted = np.array(case["logprobs"])

    caches, parts = new_caches(model, ids.shape[1]), []
    for start, end in ((0, 7), (7, 16), (16, 17), (17, 18), (18, ids.shape[1])):
        parts.append(model(ids[:, start:end], cache=caches))
        mx.eval(parts[-1])
    served = np.array(_scores(mx.concatenate(parts, axis=1), ids))
    return {
        "whole": float(np.abs(np.array(_scores(model(ids), ids)) - wanted).max()),
        "served": float(np.abs(served - wanted).max()),
        "gradient": gradient_difference(model, ids, case["gradients"])
        if case["gradients"]
        else 0.0,
    }


def _scores(logits: mx.array, ids: mx.array) -> mx.array:
    scores = token_logprobs(logits[0, :-1], ids[0, 1:])
    mx.eval(scores)
    return scores


def gradient_difference(
    model: Any, ids: mx.array, wanted: Mapping[str, tuple[float, float]]
) -> float:
    """Return the largest relative difference of the trainer's gradients to `wanted`: norms, and
    products with a direction. Only tensors that have the same name and shape here count; infinite:
    there is none."""
    model.unfreeze()
    parts = BlockwiseModel(model, blocks_per_eval=1)
    count = ids.shape[1] - 1
    weights = mx.linspace(-1, 1, count)
    batch = TokenBatch(ids, mx.arange(count), ids[0, 1:])
    _, _, gradients = parts.loss_and_gradients(
        batch, lambda scores, *others: ((scores * weights).sum(), ())
    )
    found = dict(zip(parts.slots.names, gradients, strict=True))
    worst, largest, compared = 0.0, max(norm for norm, _ in wanted.values()), 0
    for name, (norm, product) in wanted.items():
        place = next((place for place in _places(name) if place in found), None)
        if place is None or norm < 1e-6 * largest:
            continue
        compared += 1
        array = np.array(found[place], np.float64)
        if place != name and _TURNED.search(name):
            array = array.T
        along = direction(name, list(array.shape))
        worst = max(
            worst,
            abs(np.linalg.norm(array) - norm) / norm,
            abs((array * along).sum() - product) / (norm * np.sqrt(array.size)),
        )
    return float(worst) if compared else float("inf")


_TURNED = re.compile(r"^transformer\.h\..*\.(c_attn|c_proj|c_fc)\.weight$")
"""Matrices that GPT-2's class holds the other way round than they are saved."""


def _places(name: str) -> Iterator[str]:
    """Yield the names that classes of mlx-lm give a saved tensor."""
    yield name
    yield f"language_model.{name}"
    yield name.replace("model.language_model.", "language_model.model.")
    yield name.replace("language_model.", "")  # a class that reads text alone
    yield name.replace("transformer.", "model.")  # GPT-2
    yield re.sub(r"^(gpt_neox\.|(?=embed_out))", "model.", name).replace(".layers.", ".h.")


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what docs/models.md shows of an architecture."""
    scored = [row for row in rows if "whole" in row]
    wrong = [
        row["option"]
        for row in scored
        if max(row["whole"], row["served"]) > RECURRENT
        or (row["gradient"] > GRADIENT and name not in FOLDED)
    ]
    near = [
        row["option"] for row in scored if EQUAL < max(row["whole"], row["served"]) <= RECURRENT
    ]
    return {
        "tried": len(rows),
        "equal": len(scored) - len(wrong),
        "difference": max((max(row["whole"], row["served"]) for row in scored), default=None),
        "gradient": max((row["gradient"] for row in scored), default=None),
        "refused": [row["option"] for row in rows if "refused" in row],
        "crashed": [row["option"] for row in rows if "crash" in row],
        "near": near,
        "wrong": wrong,
    }


if __name__ == "__main__":
    main()
