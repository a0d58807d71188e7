"""Writes docs/models.md: what every architecture of the installed mlx-lm can do here, found out by
trying it.

Each architecture is built with small sizes and random weights, in its own process:

    serves      the engine's check at load (engine/cache/batch.py): batched decoding = plain forward, or row by row
    gradient    LoRA on all linear layers, our block-wise gradients: finite, and not zero
    kernels     a second process, in which MLX claims to have Metal and `mx.fast.metal_kernel` hands out stand-ins that
                raise: which kernel a training forward would call there. Such kernels have no gradient.
    scan        the size of the training graph of 64 and of 256 tokens: four times as large for an architecture that
                visits token after token, the same for the others

    .venv/bin/python scripts/generate_model_table.py            all of them, about ten minutes
    .venv/bin/python scripts/generate_model_table.py --one T    the raw finding for one
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import importlib
import io
import json
import os
import subprocess
import sys
import typing
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models.md"
MARK = (
    "<!-- generated from here on by scripts/generate_model_table.py and"
    " scripts/parity/document.py -->\n"
)
TIME_LIMIT_S = 150
LARGEST = 40_000_000  # parameters: more means that a size was not made small
SIZES_FILE = Path(__file__).with_name("model_table_sizes.json")
SCAN = 2.0  # growth of the training graph from 64 to 256 tokens: 1 without a scan, up to 4 with one
KERNELS = "MODEL_TABLE_CLAIMS_METAL"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes docs/models.md.")
    parser.add_argument(
        "--one", metavar="MODEL_TYPE", help="try one and print what was found, as JSON"
    )
    parser.add_argument(
        "--only", nargs="*", metavar="MODEL_TYPE", help="try these and print one line each"
    )
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(try_one(arguments.one)))
        return
    types = arguments.only or model_types()
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        findings = dict(zip(types, pool.map(finding, types), strict=True))
    if arguments.only:
        for name, row in findings.items():
            print(name, json.dumps(row), flush=True)
        return
    head = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    PAGE.write_text(f"{head}{MARK}\n{render(findings, aliases())}", encoding="utf-8")
    print(f"wrote {PAGE}: {len(findings)} architectures")


def model_types() -> list[str]:
    """Return the sorted names of mlx-lm's architecture modules, read from their source; none is
    imported."""
    names = []
    for file in files("mlx_lm.models").iterdir():
        is_module = file.name.endswith(".py")
        if is_module and {"Model", "ModelArgs"} <= _module_names(
            ast.parse(file.read_text(encoding="utf-8"))
        ):
            names.append(file.name.removesuffix(".py"))
    return sorted(names)


def aliases() -> dict[str, list[str]]:
    """architecture → the further `model_type`s that mlx-lm loads with it."""
    from mlx_parallm.models.mlx_lm_api import MODEL_REMAPPING

    names: dict[str, list[str]] = {}
    for alias, name in MODEL_REMAPPING.items():
        names.setdefault(name, []).append(alias)
    return names


def _module_names(tree: ast.Module) -> set[str]:
    names = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    return names | {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


# ---------------------------------------------------------------- one architecture


def try_one(name: str) -> dict[str, Any]:
    """In its own process: builds, serves, differentiates. Keys are left out where it did not get
    that far."""
    if os.environ.get(KERNELS):
        return {"kernels": kernels_called(name)}
    import mlx.core as mx

    from mlx_parallm.engine.cache.batch import (
        RowCaches,
        choose_cache,
        why_not_batched,
        why_not_by_tokens,
    )
    from mlx_parallm.errors import ModelError

    facts: dict[str, Any] = {}
    try:
        model = small_model(name)
        logits = model(mx.arange(12, dtype=mx.int32).reshape(2, 6) + 1)
        mx.eval(logits)
    except (Exception, SystemExit) as error:  # noqa: BLE001 — whatever an architecture raises is the finding
        return {"built": f"{type(error).__name__}: {error}"}
    facts["built"] = ""
    facts["parameters"] = parameter_count(model)
    try:
        cache = choose_cache(model, name, 2, 64)
        facts["layout"], facts["snapshots"] = cache.layout, cache.snapshot_bytes() is not None
        facts["keys"] = cache.token_bytes() > 0
        facts["no_prefixes"] = cache.why_no_prefixes if isinstance(cache, RowCaches) else ""
        facts["alone"] = why_not_batched(model) if cache.layout == "rows" else ""
        facts["not_by_tokens"] = why_not_by_tokens(model) if cache.layout != "tokens" else ""
        facts["serves"] = ""
    except ModelError as error:
        facts["serves"] = str(error).partition("served: ")[2]
    try:
        facts |= gradients(model)
    except Exception as error:  # noqa: BLE001
        facts["gradient"] = f"{type(error).__name__}: {error}"
    return facts


def gradients(model: Any) -> dict[str, Any]:
    """LoRA with both factors random, so that each has a gradient."""
    import mlx.core as mx

    from mlx_parallm.config.training import LoraConfig
    from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
    from mlx_parallm.models.lora import inject_lora, trainer_lora_layers

    inject_lora(model, LoraConfig(rank=4, alpha=8.0))
    for layer in trainer_lora_layers(model).values():
        layer.lora_b = 0.02 * mx.random.normal(layer.lora_b.shape)
    model.train()
    mx.eval(model.parameters())
    blockwise = BlockwiseModel(model, blocks_per_eval=1)

    def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
        return -logprobs.mean(), ()

    tokens = mx.arange(24, dtype=mx.int32).reshape(2, 12) + 1
    batch = TokenBatch(tokens, mx.arange(3, 20), mx.arange(4, 21, dtype=mx.int32))
    _, _, arrays = blockwise.loss_and_gradients(batch, objective)
    norm = float(mx.sqrt(sum(mx.square(g).sum() for g in arrays)).item())
    moving = sum(bool((mx.abs(g).max() > 0).item()) for g in arrays)
    finite = norm == norm and norm != float("inf")
    result: dict[str, Any] = {
        "gradient": "" if finite and norm > 0 else f"norm {norm}",
        "share": round(moving / max(1, len(arrays)), 2),
        "blockwise": blockwise.fallback,
        "unmerged": blockwise.unmerged,
    }
    return result | scan(model)


def scan(model: Any) -> dict[str, float]:
    """How the training graph, and the peak memory of a gradient, grow from 64 to 256 tokens."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    counts, peaks = [], []
    for length in (64, 256):
        tokens = (mx.arange(length, dtype=mx.int32) % 50)[None]

        def loss(m: Any, tokens: Any = tokens) -> Any:
            return m(tokens).astype(mx.float32).square().mean()

        function = nn.value_and_grad(model, loss)
        mx.eval(function(model, tokens))
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        graph = function(model, tokens)
        drawn = io.StringIO()
        mx.export_to_dot(drawn, *(array for _, array in tree_flatten(graph)))
        counts.append(drawn.getvalue().count("->"))
        mx.eval(graph)
        peaks.append(mx.get_peak_memory() - before)
    return {
        "scan": round(counts[1] / counts[0], 1),
        "bytes_per_token": round((peaks[1] - peaks[0]) / 192),
    }


class Called(Exception):
    """A stand-in kernel was called."""


def kernels_called(name: str) -> list[str]:
    """Names of the Metal kernels that a forward in training mode calls. MLX must not have been
    imported before."""
    import mlx.core as mx

    def stand_in(name: str, **_: Any) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            raise Called(name)

        return call

    mx.metal.is_available = lambda: True
    mx.fast.metal_kernel = stand_in
    mx.default_device = lambda: mx.gpu
    try:
        model = small_model(name)
        model.train()
        mx.eval(model(mx.arange(12, dtype=mx.int32).reshape(2, 6) + 1))
    except Called as error:
        return [str(error)]
    except (Exception, SystemExit):  # noqa: BLE001 — the first process says why it cannot be built
        return []
    return []


# ---------------------------------------------------------------- small sizes


def small_model(name: str, **changes: Any) -> Any:
    """The architecture with small sizes, and `changes` to its config.json. Raises whatever it
    raises."""
    import mlx.core as mx
    import mlx.nn as nn

    from mlx_parallm.models.loading import evaluate_module
    from mlx_parallm.models.recurrent.layers import use_chunks

    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = small_config(module, name) | changes
    model = module.Model(module.ModelArgs.from_dict(config))
    if (count := parameter_count(model)) > LARGEST:
        raise ValueError(f"{count:,} parameters with small sizes")
    mx.random.seed(0)
    fill_empty_matrices(model)
    if not hasattr(model, "_no_grad"):  # as models/loading.py does
        nn.Module.__init__(model)
    model.eval()
    evaluate_module(model)
    use_chunks(model)
    return model


def fill_empty_matrices(model: Any) -> None:
    """Give random numbers to matrices that the architecture makes as zeros for a checkpoint to
    fill: nothing would reach the output, and no gradient the layers below (Talkie's head)."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    empty = [
        (k, a) for k, a in tree_flatten(model.parameters()) if a.ndim >= 2 and not mx.any(a).item()
    ]
    model.update(
        tree_unflatten([(k, (0.1 * mx.random.normal(a.shape)).astype(a.dtype)) for k, a in empty])
    )


def small_config(module: Any, name: str) -> dict[str, Any]:
    """A config.json: the shared sizes, something for each field that has no default, and the
    architecture's own."""
    sizes = json.loads(SIZES_FILE.read_text(encoding="utf-8"))
    config = sizes["shared"] | {"model_type": name} | sizes["architectures"].get(name, {})
    _complete(config, module.ModelArgs)
    if "text_config" in {field.name for field in dataclasses.fields(module.ModelArgs)}:
        inner = sizes["shared"] | sizes["text"].get(name, {})
        defined = [value for value in vars(module).values() if isinstance(value, type)]
        imported = [
            value.ModelArgs for value in vars(module).values() if hasattr(value, "ModelArgs")
        ]
        for arguments in (*defined, *imported):
            if dataclasses.is_dataclass(arguments) and arguments is not module.ModelArgs:
                _complete(inner, arguments)
        config["text_config"] = inner
    return config


def _complete(config: dict[str, Any], arguments: Any) -> None:
    """Give every field without a default something of its type."""
    kinds = typing.get_type_hints(arguments)
    for field in dataclasses.fields(arguments):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            config.setdefault(field.name, something(field.name, kinds[field.name]))


def something(name: str, kind: Any) -> Any:
    """A value of a field's type."""
    base = typing.get_origin(kind) or kind
    if base is typing.Union:
        return something(name, typing.get_args(kind)[0])
    if base is float:
        return 1e-5 if "eps" in name else 1.0
    if base in (bool, int, list, dict, str):
        return {bool: False, int: 2, list: [], dict: {}, str: ""}[base]
    return None


def parameter_count(model: Any) -> int:
    from mlx.utils import tree_flatten

    return sum(array.size for _, array in tree_flatten(model.parameters()))


# ---------------------------------------------------------------- all of them


def finding(name: str) -> dict[str, Any]:
    return run(name, {}) | run(name, {KERNELS: "1"})


def run(name: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            env=os.environ | {"MKL_NUM_THREADS": "1"} | environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"built": f"no answer in {TIME_LIMIT_S} s"}
    try:
        return dict(json.loads(result.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        last = (result.stderr.strip().splitlines() or ["no output"])[-1]
        return {"built": f"the process ended with {result.returncode}: {last}"}


def render(findings: dict[str, dict[str, Any]], others: dict[str, list[str]]) -> str:
    from scripts.parity.document import explanation, with_column  # run as `python -m`

    rows = {
        name: (trains(row), turns(row), prefixes(row), tokens(row), notes(row))
        for name, row in findings.items()
    }

    def bullets(column: int, words: dict[str, str]) -> list[str]:
        counts = {
            word: sum(row[column].partition(":")[0] == word for row in rows.values())
            for word in words
        }
        return [f"* **{word}** ({counts[word]}): {meaning}" for word, meaning in words.items()]

    lines = [
        "## Every architecture",
        "",
        (
            f"Every architecture of mlx-lm {version('mlx-lm')}, tried by"
            " `python -m scripts.generate_model_table` with MLX"
        ),
        (
            f"{version('mlx')} on the CPU, on a tiny random checkpoint of each; generated, do not"
            " edit. `model_type`"
        ),
        (
            "is the name in a model's config.json. A configuration that mlx-lm cannot build is refused"
            " before the weights are"
        ),
        "downloaded.",
        "",
        "**trains**",
        "",
        *bullets(0, TRAINS),
        "",
        *explanation(),
        "",
        (
            "**turns**: how rows with a common beginning, such as the"
            " turns of an episode, are trained"
        ),
        "([benchmarks/training.md](benchmarks/training.md#turns-of-an-episode-once-the-tree-of-tokens))",
        "",
        *bullets(1, TURNS),
        "",
        (
            "**prefixes**: whether a text continues from what was computed before, such as an"
            " agent's next turn, or an"
        ),
        "evaluation's instructions ([serving.md](serving.md#how-much-at-once))",
        "",
        *bullets(2, PREFIXES),
        "",
        (
            "**tokens**: how the keys and values of the sequences that run"
            " at the same time lie in memory"
        ),
        "",
        *bullets(3, TOKENS),
        "",
        "**Mixtures of experts in 4 bits on a CPU** are unpacked, one projection at a time, where there are more",
        "products than experts: MLX multiplies packed experts row by row. For 512 tokens and 4 of 32 experts of",
        "512 × 256 (`scripts/bench/experts.py` of commit c6501726, one core) a gradient takes 1.1 times as long as with the same",
        "experts in float32, and took 7.3 times as long before. Prefill gains too. Decoding few rows stays MLX's",
        "own, as do experts whose projection has more than 268 million numbers (1 GiB when unpacked).",
        "",
        "| model_type | also | trains | turns | prefixes | tokens | what else was found |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, cells in rows.items():
        also = ", ".join(f"`{other}`" for other in others.get(name, []))
        written = [cell.replace("|", "/").replace("\n", " ") for cell in cells]
        lines.append(f"| `{name}` | {also} | {' | '.join(written)} |")
    return with_column("\n".join(lines) + "\n")


TRAINS = {
    "full speed": "served, and LoRA on all linear layers has a finite gradient.",
    "as one graph": "the same, but its layers cannot be evaluated one after another: a step needs"
    " the activations of "
    "all layers at once, and requests wait longer beside it.",
    "slowly": (
        "served and trained, but the training pass visits token after"
        " token; the log names the layers."
    ),
    "no": "served; there is no gradient.",
    "refused": (
        "going on from its cache does not give what its own forward gives,"
        " and training needs the engine."
    ),
    "not tried": "it could not be built or run here with generic small sizes; it may still work.",
}
TURNS = {
    "tree": "each distinct token is computed and differentiated once.",
    "rows": "row by row; prompts are still computed once where the log does not say otherwise.",
}
PREFIXES = {
    "yes": "from any token of a text that was computed.",
    "snapshots": "a recurrent layer has a state instead of keys and values: from where a prompt or"
    " an answer ended, "
    "where prompts part, and from places on the way of a long prompt.",
    "no": "each request computes its whole prompt.",
}
TOKENS = {
    "by tokens": "a row holds what its text takes, and what rows share is held once.",
    "rectangle": "all rows take as much as the longest one; the reason is"
    " why they do not lie by tokens.",
    "states": "no layer keeps keys and values: a small state a row.",
    "one by one": "mlx-lm's own forward takes one sequence: right, and no faster than one request at a time.",
}


def trains(row: dict[str, Any]) -> str:
    """The word for it, and why."""
    if row.get("built"):
        return f"not tried: it could not be built or run: {row['built'][:160]}"
    if row["serves"]:
        return f"refused: {row['serves']}"
    if kernels := row.get("kernels"):
        return f"no: on Metal its forward calls the kernel `{kernels[0]}`, which has no gradient"
    if row.get("gradient"):
        return f"no: {row['gradient'][:160]}"
    if row.get("scan", 0) >= SCAN:
        return f"slowly: {row['scan']:.1f} times the graph for 4 times the tokens"
    if row.get("blockwise"):
        return f"as one graph: {row['blockwise'].rpartition(': ')[0]}"
    return "full speed"


def turns(row: dict[str, Any]) -> str:
    """Return "" where it does not train."""
    if not trains(row).startswith(("full speed", "as one graph", "slowly")):
        return ""
    return f"rows: {row['unmerged'][:160]}" if row["unmerged"] else "tree"


def prefixes(row: dict[str, Any]) -> str:
    if row.get("serves") != "":
        return ""
    if row["no_prefixes"]:
        return f"no: {row['no_prefixes']}"
    return "snapshots" if row["snapshots"] else "yes"


def tokens(row: dict[str, Any]) -> str:
    if row.get("serves") != "":
        return ""
    if row["layout"] == "tokens":
        return "by tokens"
    if row["layout"] == "rows":
        return f"one by one: {row['alone'][:160]}"
    return f"rectangle: {row['not_by_tokens'][:160]}" if row["keys"] else "states"


def notes(row: dict[str, Any]) -> str:
    """Return the findings beside the first reason."""
    noted = []
    if row.get("kernels") and row.get("built"):
        noted.append(
            "on Metal a training forward calls the kernel"
            f" `{row['kernels'][0]}`, which has no gradient"
        )
    if row.get("kernels") and row.get("gradient"):
        noted.append(f"gradient: {row['gradient'][:160]}")
    if row.get("kernels") and row.get("scan", 0) >= SCAN:
        noted.append(
            f"training visits token after token: {row['scan']:.1f} times"
            " the graph for 4 times the tokens"
        )
    if row.get("share", 1) < 1 and not row.get("gradient"):
        noted.append(
            f"{row['share']:.0%} of the adapter's arrays had a gradient in one small batch"
        )
    return "; ".join(noted)


if __name__ == "__main__":
    main()
