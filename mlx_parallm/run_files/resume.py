"""Find what `--resume` means: the checkpoint that a run continues from, and the keys of the
configuration that may differ from the saved ones. No MLX.

The model, the adapter's shape, the problems and how a step is divided may not change on a resume:
the checkpoint, the rollouts that wait, or a comparison of the metrics before and after depend on
them. docs/operations.md has the list.
"""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlx_parallm.config.algorithm import BOUNDS, ENTROPY_RANGE, REPLAY_KEYS
from mlx_parallm.config.load import Config, load_config
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.run_files.directory import CONFIG_FILE, LATEST, STORE_FILE, find_checkpoint
from mlx_parallm.run_files.trainer_state import STATE_FILE, TrainerState
from mlx_parallm.run_files.versions import Notes
from mlx_parallm.system.files import sampled_digest
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.redaction import REDACTED

log = get_logger("train")

BASE_NOTE = "base_model"  # in the store of rollouts


def what_to_resume(config: Config, resume: str | None) -> tuple[Config, Path | None, bool]:
    """Return (configuration, checkpoint, start over). A run that was killed before its first
    checkpoint starts over in its directory, where its accepted groups lie. Raises
    CheckpointError: nothing there. ConfigError: a key that may not change on a resume, or a
    secret that is not given again."""
    refuse_redacted(config.model_dump(mode="json"))
    training = config.rl_training
    if resume is None:
        return config, None, False
    try:
        checkpoint = find_checkpoint(resume, training.checkpoint_dir, training.run_name)
    except CheckpointError:
        directory = Path(resume).expanduser().resolve()
        if not (directory / STORE_FILE).is_file():
            raise
        _check_never_saved(directory)
        return placed(config, directory), None, True
    if checkpoint is None:
        _check_never_saved(training.checkpoint_dir / str(training.run_name))
        return config, None, True
    changes = TrainerState.read(checkpoint).changes
    kept = restored_settings(training.changeable(), changes)
    check_resume(config, checkpoint.parent, checkpoint.parent / CONFIG_FILE, kept=kept)
    return placed(config, checkpoint.parent), checkpoint, False


def _check_never_saved(run: Path) -> None:
    """Raises CheckpointError: the run has saved checkpoints, and they are gone. Starting over would
    remove its metrics."""
    if not (run / LATEST).is_symlink():
        return
    there = sorted(path.parent.name for path in run.glob(f"*/{STATE_FILE}"))
    raise CheckpointError(
        f"--resume {run}: its checkpoints are gone ({LATEST} is {(run / LATEST).readlink()}; there:"
        f" {', '.join(there) or 'none'}): put one back, name one that is there, or start another"
        " rl_training.run_name"
    )


def placed(config: Config, run: Path) -> Config:
    """A run directory may have been moved: its present path counts."""
    training = config.rl_training.model_copy(
        update={"checkpoint_dir": run.parent, "run_name": run.name}
    )
    return config.model_copy(update={"rl_training": training})


def note_base(notes: Notes, model: Path) -> None:
    """Note which weights the run trains from, and warn of a resume that finds others there: what
    was learned was learned on the first ones. `model`: the local folder of the base."""
    files = sorted(model.glob("*.safetensors"))
    now, before = sampled_digest(files), notes.recall(BASE_NOTE)
    if before is None:
        notes.remember(BASE_NOTE, now)
    elif before != now:
        log.warning(
            "the base model has changed since the run began: its weights may not fit it",
            path=str(model),
        )


MAY_CHANGE = (
    "server.*",
    "logging.*",
    "rollouts.*",
    "model.lora_path",
    "model.trust_remote_code",
    "model.quantized_cache",
    "model.tool_parser",
    "model.reasoning_parser",
    *(
        f"rl_training.{key}"
        for key in (
            "learning_rate",
            "lr_schedule",
            "lr_final",
            "lr_decay_steps",
            "lr_decay_shape",
            "warmup_steps",
            "lr_per_update",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_eps",
            "decay_norms_and_biases",
            "max_grad_norm",
            "advantage",
            "kl_beta",
            "entropy_weight",
            "entropy_aggregation",
            "entropy_target",
            *ENTROPY_RANGE,
            *BOUNDS,
            "off_policy_mask",
            "top_entropy_quantile",
            "overlong_buffer",
            "overlong_length",
            "length_penalty",
            "length_penalty_weight",
            "sampler_correction*",
            *REPLAY_KEYS,
            "kl_in",
            "kl_target",
            "kl_horizon",
            "temperature",
            "token_budget",
            "packing",
            "blocks_per_eval",
            "max_eval_ms",
            "serve_priority",
            "deterministic",
            "ppo.*",
            "lora.dropout",
            "lora.loraplus_ratio",
            "reference_decay",
            "reference_update_every",
            "max_staleness",
            "buffer_sampling",
            "dynamic_sampling",
            "max_oversampling",
            "max_empty_rounds",
            "weight_updates.*",
            "distillation.*",
            "distillation.teachers.*.*",
            "total_steps",
            "until",
            "checkpoint_interval",
            "restart_every",
            "restart_pause_s",
            "max_silence_s",
            "keep_checkpoints",
            "keep_best",
            "checkpoint_dir",
            "run_name",
            "resume",
            "atropos.api_url",
            "atropos.poll_interval_s",
            "atropos.wandb_*",
            "atropos.max_token_length",
            "atropos.missing_logprobs",
        )
    ),
    "data.eval_every",
    "data.eval_rows",
    "evaluation.*",
    *(f"environments.*.{key}" for key in ("weight", "max_tokens", "timeout_s")),
)
"""Dotted keys; `*` stands for anything but a dot. A key that is a path may also name the same
file elsewhere."""

log = get_logger("train")


def check_resume(
    config: Config, run: Path, saved_file: Path, *, kept: Mapping[str, float] | None = None
) -> None:
    """Compare with the configuration that the run was saved with. `kept`: settings that were
    changed while it continued, and that it continues with (`commands.restored_settings`). Raises
    ConfigError: which keys may not change."""
    if not saved_file.is_file():
        return
    try:
        saved = load_config(saved_file, saved=True)
    except ConfigError as error:
        log.warning("cannot tell what changed since the run was saved", reason=str(error))
        return
    before = dict(_leaves(saved.redacted()))
    goes_on = config.with_training(kept) if kept else config
    now = dict(_leaves(goes_on.redacted()))
    changed = [key for key in before | now if before.get(key) != now.get(key)]
    refused = [key for key in changed if not _may_change(key, before.get(key), now.get(key))]
    if refused:
        what = ", ".join(
            f"{key} ({_shown(before.get(key))} → {_shown(now.get(key))})" for key in refused
        )
        start = "model.lora_path" if config.rl_training.lora.enabled else "model.base_path"
        raise ConfigError(
            f"--resume {run}: may not change: {what}. Set back to the first value to continue, or"
            " start a new run from"
            f" this one's weights: {start}={run / 'latest'} and another rl_training.run_name,"
            " without --resume"
        )
    if shown := [key for key in changed if not key.startswith(("server.", "logging."))]:
        log.info(
            "changed on resume",
            **{key: f"{_shown(before.get(key))} → {_shown(now.get(key))}" for key in shown},
        )


def refuse_redacted(values: Mapping[str, Any]) -> None:
    """Raises ConfigError: a secret that a saved configuration does not hold. (server.api_key
    says so itself.)"""
    for key, value in _leaves(values):
        if isinstance(value, str) and REDACTED in value and key != "server.api_key":
            raise ConfigError(
                f"{key} is redacted in a saved configuration: give it again with --set {key}=…"
            )


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a mapping; a list of mappings counts its
    entries."""
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        value = {str(number): entry for number, entry in enumerate(value)}
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def _may_change(key: str, before: Any, now: Any) -> bool:
    return any(_matches(key.split("."), pattern.split(".")) for pattern in MAY_CHANGE) or _moved(
        before, now
    )


def _matches(key: list[str], pattern: list[str]) -> bool:
    return len(key) == len(pattern) and all(map(fnmatchcase, key, pattern))


def _moved(before: Any, now: Any) -> bool:
    """The same file or directory in another place: `/data/Qwen3-4B` → `/Users/me/Qwen3-4B`,
    lists of them too."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(a == b or _moved(a, b) for a, b in zip(before, now, strict=True))
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    place = Path(
        now.removeprefix("python:").partition(".py:")[0] + (".py" if ".py:" in now else "")
    )
    return Path(before).name == Path(now).name and place.expanduser().exists()


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def restored_settings(
    now: Mapping[str, float], changes: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return the values that a resumed run continues with, of keys whose value now is the one
    before a change: a configuration that says something else than both was changed on purpose.

    Args:
        now: `changeable` of [rl_training].
        changes: `TrainerState.changes`.
    """
    values = dict(now)
    for change in changes:
        for key, (before, after) in change["settings"].items():
            if values.get(key) == before:
                values[key] = after
    return {key: value for key, value in values.items() if value != now[key]}


def overridden_settings(
    now: Mapping[str, float], changes: Sequence[Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Return {key: [value of the run, value now]} of keys that a resume changes on purpose.
    It is recorded as a separate change, so that a later resume from the file that the run began
    with keeps it, too. A kl_beta of 0 is not: the file always says whether a run has a
    reference."""
    newest = {key: new for change in changes for key, (_, new) in change["settings"].items()}
    resumed = {**now, **restored_settings(now, changes)}
    return {
        key: [new, resumed[key]]
        for key, new in newest.items()
        if resumed[key] != new and resumed[key] > 0 < new
    }
