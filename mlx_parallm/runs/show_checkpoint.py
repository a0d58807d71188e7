"""`mlx_parallm checkpoint`: a checkpoint's content, and whether it is complete. No MLX.

`describe` returns JSON values, `as_text` makes text of them.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlx_parallm.errors import AdapterError, CheckpointError
from mlx_parallm.models.adapters.settings import check_adalora, check_peft
from mlx_parallm.models.checkpoint_files import numbers_in, safetensors_header
from mlx_parallm.run_files.checksums import damaged_files
from mlx_parallm.run_files.directory import moment
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.runs.run import Run

OPTIMIZER_FILE = "optimizer.safetensors"
ADAPTER_FILE, ADAPTER_CONFIG = "adapters.safetensors", "adapter_config.json"
PEFT_FILE = "adapter_model.safetensors"
METRICS = ("reward_mean", "loss", "kl", "grad_norm", "learning_rate", "heldout_score", "eval/loss")


def describe(path: Path) -> dict[str, Any]:
    """Describe a step_* directory, a link to one, the newest of a run directory, or an adapter in
    PEFT's files.

    `problems`: the damaged parts.

    Raises CheckpointError: there is no checkpoint.
    """
    checkpoint = _find(path.expanduser())
    if (checkpoint / PEFT_FILE).is_file() and not (checkpoint / ADAPTER_FILE).exists():
        return _peft(checkpoint)
    problems: list[str] = []
    headers = dict(_headers(checkpoint, problems))
    facts: dict[str, Any] = {
        "path": str(checkpoint),
        "links": list(Run(checkpoint.parent).links(checkpoint)),
        "problems": problems,
    }
    facts |= _state(checkpoint, problems)
    facts |= _weights(checkpoint, headers, problems)
    if not (checkpoint / OPTIMIZER_FILE).is_file():
        problems.append(f"{OPTIMIZER_FILE} is missing")
    facts["optimizer"] = _optimizer(headers.get(OPTIMIZER_FILE), facts.pop("optimizer_updates"))
    facts["checksums"] = _checksums(checkpoint, problems)
    files = {file.name: file.stat().st_size for file in sorted(checkpoint.iterdir())}
    return facts | {"files": files, "bytes": sum(files.values()), "complete": not problems}


def as_text(facts: Mapping[str, Any]) -> str:
    return "".join(f"{name:<14}{value}\n" for name, value in _rows(facts))


def _rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield (
        "checkpoint" if facts["optimizer"] else "PEFT adapter",
        facts["path"] + (f"  ({', '.join(facts['links'])})" if facts["links"] else ""),
    )
    yield (
        "state",
        "complete" if facts["complete"] else "damaged: " + "; ".join(facts["problems"]),
    )
    if facts["step"] is not None:
        partial = (
            f" and {facts['mini_batches']} mini-batches of the next"
            if facts["mini_batches"]
            else ""
        )
        served = "not served yet" if facts["unpublished"] else "served"
        yield (
            "step",
            f"{facts['step']}{partial}, policy version {facts['policy_version']} ({served})",
        )
    yield "trained", f"{facts['kind']}, {facts['parameters']:,} numbers"
    if facts["adapter"]:
        yield (
            "adapter",
            ", ".join(f"{key} {value}" for key, value in facts["adapter"].items()),
        )
    if optimizer := facts["optimizer"]:
        name = optimizer["name"] or "unknown"
        yield "optimizer", f"{name}, {optimizer['updates']} updates, {optimizer['bytes']:,} bytes"
    if facts["score"] is not None:
        yield "score", f"{facts['score']:.4g}"
    for name, value in facts["metrics"].items():
        yield name, f"{value:.4g}"
    if facts["checksums"]:
        yield "checksums", facts["checksums"]
    yield "size", f"{facts['bytes']:,} bytes in {len(facts['files'])} files"


def _find(path: Path) -> Path:
    """Return the checkpoint at `path`, also a step_* whose state is missing."""
    if checkpoint := Run(path).checkpoint():
        return checkpoint
    if path.is_dir() and (moment(path.resolve())[0] >= 0 or (path / PEFT_FILE).is_file()):
        return path.resolve()
    hint = "" if path.exists() else ": no such directory"
    raise CheckpointError(f"{path} is neither a checkpoint nor a run directory with one{hint}")


def _peft(directory: Path) -> dict[str, Any]:
    """Describe an adapter in PEFT's files: it has weights and settings, and nothing that a run
    continues from."""
    problems: list[str] = []
    header = dict(_headers(directory, problems)).get(PEFT_FILE, {})
    kind, settings = "adapter", dict[str, Any]()
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        modules = config["target_modules"]
        last = (
            modules
            if isinstance(modules, str)
            else " ".join(sorted({name.rpartition(".")[2] for name in modules}))
        )
        base = config.get("base_model_name_or_path") or "unknown"
        adaptive = config.get("peft_type") == "ADALORA"
        settings = {
            "rank": config["init_r" if adaptive else "r"],
            "alpha": config["lora_alpha"],
            "modules": last,
            "base": base,
        }
        kind = "AdaLoRA" if adaptive else "DoRA" if config.get("use_dora") else "LoRA"
        (check_adalora if adaptive else check_peft)(config, directory / ADAPTER_CONFIG)
        if adaptive:
            triplets = [entry["shape"][0] for name, entry in header.items() if ".lora_E" in name]
            settings["left"] = f"{sum(triplets)} of {config['init_r'] * len(triplets)} triplets"
    except AdapterError as error:
        problems.append(str(error))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"{ADAPTER_CONFIG} cannot be read: {error!r}")
    settings["layers"] = sum(".lora_A" in name for name in header)
    files = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    facts: dict[str, Any] = dict.fromkeys(
        ("step", "mini_batches", "policy_version", "unpublished", "score", "optimizer", "checksums")
    )
    facts |= {
        "path": str(directory),
        "links": [],
        "problems": problems,
        "metrics": {},
        "complete": not problems,
    }
    facts |= {
        "kind": f"{kind} in PEFT's format",
        "adapter": settings,
        "parameters": numbers_in(header),
    }
    return facts | {"files": files, "bytes": sum(files.values())}


def _headers(checkpoint: Path, problems: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(checkpoint.glob("*.safetensors")):
        try:
            header = safetensors_header(file)
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror or error}")
            continue
        if header is None:
            problems.append(f"{file.name} is cut short or no safetensors file")
        else:
            yield file.name, header


def _checksums(checkpoint: Path, problems: list[str]) -> str:
    """Say whether all bytes are those that were written; add the changed files that `problems`
    does not name yet."""
    try:
        damaged = damaged_files(checkpoint)
    except CheckpointError as error:
        problems += [] if problems else [str(error)]
        return "cannot be compared"
    if damaged is None:
        return "missing: an older version wrote it, or they were removed"
    problems += [
        f"{name} has changed since it was written (SHA-256)"
        for name in damaged
        if not any(name in text for text in problems)
    ]
    return f"another one: {', '.join(damaged)}" if damaged else "every file is as it was written"


def _state(checkpoint: Path, problems: list[str]) -> dict[str, Any]:
    unknown: dict[str, Any] = dict.fromkeys(
        ("step", "mini_batches", "policy_version", "unpublished", "score")
    )
    unknown |= {"optimizer_updates": None, "metrics": {}}
    try:
        state = TrainerState.read(checkpoint)
    except CheckpointError as error:
        problems.append(str(error))
        return unknown
    line = state.metrics if isinstance(state.metrics, dict) else {}
    metrics = {key: line[key] for key in METRICS if isinstance(line.get(key), int | float)}
    return {
        "step": state.step,
        "mini_batches": state.mini_batches,
        "policy_version": state.policy_version,
        "unpublished": state.unpublished,
        "score": state.score,
        "optimizer_updates": state.optimizer_updates,
        "metrics": metrics,
    }


def _weights(
    checkpoint: Path, headers: Mapping[str, dict[str, Any]], problems: list[str]
) -> dict[str, Any]:
    """Return the kind of weights, their number of parameters, and an adapter's settings."""
    if ADAPTER_FILE in headers or (checkpoint / ADAPTER_CONFIG).exists():
        if ADAPTER_FILE not in headers:
            problems.append(f"{ADAPTER_FILE} is missing")
        settings: dict[str, Any] = {}
        try:
            config = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            settings = {key: config["lora_parameters"][key] for key in ("rank", "scale")}
            kind = {"lora": "LoRA", "dora": "DoRA"}[config["fine_tune_type"]]
            kind = "AdaLoRA" if "adalora_parameters" in config else kind
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(f"{ADAPTER_CONFIG} cannot be read: {error!r}")
            kind = "adapter"
        header = headers.get(ADAPTER_FILE, {})
        settings["layers"] = sum(name.endswith(".lora_a") for name in header)
        return {"kind": kind, "adapter": settings, "parameters": numbers_in(header)}
    models = [header for name, header in headers.items() if name.startswith("model")]
    if not models:
        problems.append(f"neither {ADAPTER_FILE} nor model*.safetensors is there")
    if models and not (checkpoint / "config.json").is_file():
        problems.append("config.json is missing")
    return {"kind": "full weights", "adapter": None, "parameters": sum(map(numbers_in, models))}


def _optimizer(header: Mapping[str, Any] | None, updates: int | None) -> dict[str, Any]:
    if header is None:
        return {"name": None, "updates": updates, "bytes": 0}
    metadata = header.get("__metadata__") or {}  # MLX writes null if there is none
    name = metadata.get("optimizer")
    size = sum(
        e[1] - e[0]
        for e in (t["data_offsets"] for key, t in header.items() if key != "__metadata__")
    )
    return {"name": name, "updates": updates, "bytes": size}
