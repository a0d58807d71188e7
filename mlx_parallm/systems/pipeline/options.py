"""The options of a pipeline, and what of them cannot work."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from mlx_parallm.deploy.export.ollama import DEFAULT_URL
from mlx_parallm.deploy.export.pipeline import REPORT_FILE
from mlx_parallm.errors import ConfigError
from mlx_parallm.systems.traces.builders import Kind

TrainingMethod = Literal["grpo", "kto", "dpo", "sft"]
METHODS: tuple[TrainingMethod, ...] = get_args(TrainingMethod)
KINDS: dict[TrainingMethod, Kind] = {
    "grpo": "prompts",
    "kto": "kto",
    "dpo": "preference",
    "sft": "sft",
}
OLLAMA = "ollama:"


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline.

    Attributes:
        traces: files or directories that `mlx_parallm traces import` reads.
        base_model: directory, hub id or "builtin:tiny".
        rewards: reward functions, "python:file.py:f" or "builtin:NAME": they label traces, are the
            reward of grpo, and judge held-out answers. None: grpo learns the good runs first, then
            by a reward that is learned from the labels, and the traces' own good answers judge.
        rules: functions of a `Trace` that label, "python:file.py:f".
        deploy: "ollama:NAME" or a directory; None = the file stays in the work directory.
        type: of the exported file; None = what the hardware is good for.
        epochs: passes over the rows (kto, dpo, sft).
        settings: further KEY=VALUE of the training configuration.
        most_problems: held-out prompts that are answered.
        even_if_worse: deploy a model whose held-out answers are not better than the base's.
    """

    traces: tuple[Path, ...]
    base_model: str
    method: TrainingMethod = "grpo"
    name: str = "model"
    rewards: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    deploy: str | None = None
    type: str | None = None
    epochs: int = 3
    test_fraction: float = 0.1
    good_from: float = 0.5
    least_gap: float = 0.1
    balance: float = 0.0
    near_duplicates: float = 0.9
    redact: bool = True
    most_problems: int = 200
    settings: tuple[str, ...] = ()
    even_if_worse: bool = False
    ollama_url: str = DEFAULT_URL


def check_name(name: str) -> None:
    """Raises ConfigError: it cannot be the name of a directory and of a file."""
    if not name or "/" in name or name in (".", ".."):
        raise ConfigError(f"--name {name!r}: it names a directory and a file, without /")


def check_options(options: PipelineOptions) -> PipelineOptions:
    """Return the options with absolute paths. Raises ConfigError: what cannot work, before
    anything is done."""
    if options.method not in METHODS:
        raise ConfigError(f"--method {options.method}: expected one of {', '.join(METHODS)}")
    if not options.traces:
        raise ConfigError(
            "--traces is missing: a recorder's directory, a file of traces, or logs of agents"
        )
    if options.epochs < 1 or options.most_problems < 1:
        raise ConfigError("--epochs and --problems: at least 1")
    check_name(options.name)
    deploy = options.deploy
    if deploy is not None and not deploy.removeprefix(OLLAMA):
        raise ConfigError("--deploy: expected ollama:NAME or a directory")
    if deploy is not None and not deploy.startswith(OLLAMA):
        place = Path(deploy).expanduser().absolute()
        _check_place(place, options.name)
        deploy = str(place)
    traces = tuple(path.expanduser().absolute() for path in options.traces)
    if missing := [path for path in traces if not path.exists()]:
        raise ConfigError(f"--traces {missing[0]} does not exist")
    return replace(options, traces=traces, deploy=deploy)


def _check_place(place: Path, name: str) -> None:
    """Raises ConfigError: something else is there that a deployment would replace."""
    if not place.exists():
        return
    try:
        file = str(json.loads((place / REPORT_FILE).read_text(encoding="utf-8"))["file"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"--deploy {place} exists and is not an exported model: choose another directory"
        ) from None
    if not file.startswith(f"{name}-"):
        raise ConfigError(
            f"--deploy {place} holds another model, {file}: choose another directory, or remove it"
        )
