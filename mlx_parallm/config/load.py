"""The whole configuration tree. Strict and frozen; CLI > TOML > hardware defaults > defaults. Imports no MLX.

`load_config` reads a TOML file (a path, or the name of a shipped configuration), applies `section.key=value` overrides
and returns a `Config`; an unknown key is an error that names the nearest valid one. `docs/config.md` is generated from
the descriptions here (`scripts/generate_config_docs.py`).
"""

import difflib
import importlib.resources
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tomli
import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from mlx_parallm.config.algorithm import AlgorithmConfig, without_unread
from mlx_parallm.config.data import DATA_ALGORITHMS, DataConfig, PreferenceConfig, check_data
from mlx_parallm.config.environment import HUB_PREFIX, EnvironmentConfig, Section, check_shares
from mlx_parallm.config.evaluation import EvaluationConfig, check_evaluation, moved_keys
from mlx_parallm.config.lora import LoraConfig
from mlx_parallm.config.ppo import PPOConfig
from mlx_parallm.config.prepare import PrepareConfig, check_prepared
from mlx_parallm.config.rollouts import RolloutsConfig
from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.config.updates import WeightUpdateConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import absolute, is_reference
from mlx_parallm.system.redaction import REDACTED, Redactor, environment_secrets

API_KEY_VARIABLE = "MLX_PARALLM_API_KEY"
_LIKE_A_FILE = re.compile(r"[^\s:]{1,200}\.(jsonl|json|csv|txt|py|toml)")


class AtroposConfig(Section):
    api_url: str = "embedded"
    """"embedded" = the queue under /atropos of this server; or the URL of an external Atropos API."""
    wandb_group: str = ""
    """Told to environments that ask."""
    wandb_project: str = ""
    """Told to environments that ask."""
    rollout_batch_size: int = Field(128, ge=1)
    """Sequences of one training step."""
    max_token_length: int = Field(2048, ge=1)
    """Longest sequence that is trained on: prompt and all turns, with what the environment says between them."""
    poll_interval_s: float = Field(1.0, gt=0)
    """Pause between two polls of an external API that has no batch."""
    missing_logprobs: Literal["reject", "recompute"] = "reject"
    """Groups without log-probabilities (server_type openai): refused, or trained on with the trainer's own, ratio 1."""

    @field_validator("api_url")
    @classmethod
    def _reachable(cls, value: str) -> str:
        if value != "embedded" and not value.startswith(("http://", "https://")):
            raise ValueError(f'{value!r} is neither "embedded" nor a URL that begins with http:// or https://')
        return value


class RLTrainingConfig(AlgorithmConfig, PrepareConfig):
    learning_rate: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    optimizer: Literal["adamw", "muon", "lion", "adafactor"] = "adamw"
    """MLX's own; "muon" trains the matrices inside the blocks, AdamW the rest (docs/parameters.md)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Decay after warm-up, to `lr_final` one step after total_steps, so that the last step still learns."""
    lr_final: float = Field(0.0, ge=0)
    """Learning rate at the end of a linear or cosine schedule."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from 0."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay: decoupled; Muon adds it to the gradient, as MLX has it."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW's beta1."""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's beta2."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Clip the global gradient norm; 0 = off."""
    batch_size: int = Field(32, ge=1)
    """Sequences of one mini-batch, i.e. of one optimizer update."""
    update_epochs: int = Field(1, ge=1)
    """Passes over a step's rollouts."""
    token_budget: int = Field(8192, ge=1)
    """Tokens of one micro-batch, padding included."""
    packing: bool = True
    """Short sequences share a row, without seeing each other, where that saves padding (docs/training_on_data.md)."""
    blocks_per_eval: int = Field(1, ge=0)
    """Transformer blocks evaluated together in training; 1 = checkpoint every block, 0 = the whole graph at once."""
    max_eval_ms: int | None = Field(None, ge=1)
    """Micro-batches shrink until one evaluation takes no longer; off in deterministic mode. Default on Metal: 1000."""
    serve_priority: Literal["balanced", "serve", "train"] = "balanced"
    """Who comes first on one device: nobody, requests, or training (docs/operations.md)."""
    reference: Literal["base", "initial", "ema"] = "base"
    """KL reference: the untouched base, what was trained as the run started, or its moving average."""
    reference_decay: float = Field(0.99, ge=0, lt=1)
    """"ema": d of reference = d · reference + (1 - d) · policy; 1 - d is TRL's mixup alpha."""
    reference_update_every: int = Field(1, ge=1)
    """"ema": steps between two updates of the reference."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of rollouts; training divides logits by it too."""
    max_staleness: int = Field(1, ge=0)
    """Steps that a rollout may lag behind, and that the environments run ahead; 0 = on-policy: publish, then sample."""
    deterministic: bool = False
    """Bit-equal repeats; needs max_staleness = 0; slower on CPU."""
    buffer_sampling: Literal["fifo", "uniform", "priority"] = "fifo"
    """Which waiting groups a step takes: oldest first, at random, or by |advantage|."""
    max_empty_rounds: int = Field(8, ge=1)
    """Refills of a step without one trainable group before the step is given up with a message."""
    total_steps: int = Field(100, ge=1)
    """Absolute number of steps, also after a resume."""
    checkpoint_interval: int = Field(50, ge=1)
    """Steps between checkpoints; one is always made at the end."""
    keep_checkpoints: int = Field(3, ge=1)
    """Newest step_* directories kept."""
    keep_best: bool | str = True
    """Keep the best checkpoint too, as `best`: by a number of [evaluation], e.g. "eval/NAME/accuracy"; true = by
    eval/score, else the score of held-out rows, else the mean reward of its last 10 steps."""
    checkpoint_dir: Path = Path("checkpoints")
    """Directory of runs."""
    run_name: str | None = None
    """Directory of this run under checkpoint_dir; default: the config file's name and the time."""
    resume: str | None = None
    """Run directory, one of its steps, or "auto" (latest of run_name, else a fresh start)."""
    seed: int = 0
    """Seed of everything random."""
    preference: PreferenceConfig = PreferenceConfig()
    lora: LoraConfig = LoraConfig()
    atropos: AtroposConfig = AtroposConfig()
    ppo: PPOConfig = PPOConfig()
    weight_updates: WeightUpdateConfig = WeightUpdateConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "RLTrainingConfig":
        if self.deterministic and self.max_staleness != 0:
            raise ValueError("deterministic = true needs max_staleness = 0")
        self._check_read()
        check_prepared(self, self.kl_beta)
        self.ppo.check(self.algorithm)
        self.weight_updates.check(max_staleness=self.max_staleness, lora=self.lora.enabled)
        if self.algorithm not in DATA_ALGORITHMS and self.batch_size > self.atropos.rollout_batch_size:
            raise ValueError(
                f"batch_size ({self.batch_size}) is larger than atropos.rollout_batch_size"
                f" ({self.atropos.rollout_batch_size}): a mini-batch is part of a step's rollouts"
            )
        return self

    def _check_read(self) -> None:
        """Raises ValueError: a key is set that what was chosen does not read."""
        readers = {
            'optimizer = "adamw" or "muon"': (self.optimizer in ("adamw", "muon"), ("adam_beta1", "adam_beta2")),
            'reference = "ema"': (self.reference == "ema", ("reference_decay", "reference_update_every")),
            "kl_target": (self.kl_target is not None, ("kl_horizon",)),
        }
        for reader, (chosen, keys) in readers.items():
            for key in keys:
                if not chosen and getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} is set, but only read with {reader}")


class LoggingConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least grave lines that go to the terminal and to run.log."""
    trackers: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ()
    """Where metrics and samples are sent too; each needs the extra of its name (docs/operations.md)."""
    project: str = "mlx_parallm"
    """Project of the run in W&B and trackio."""
    sample_every: int = Field(10, ge=0)
    """Steps between two sample tables (first, best, worst completion) in terminal, samples.jsonl, trackers; 0 = off."""


class Config(Section):
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    rl_training: RLTrainingConfig = RLTrainingConfig()
    data: DataConfig = DataConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    logging: LoggingConfig = LoggingConfig()
    environments: tuple[EnvironmentConfig, ...] = ()
    """In-process environments; none = only environments that come over HTTP."""
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> "Config":
        check_shares(self.environments, self.rl_training.atropos.rollout_batch_size)
        check_data(self.data, self.rl_training, len(self.environments))
        check_evaluation(self.evaluation, self.environments, self.rl_training.keep_best)
        return self

    def resolve_api_key(self) -> str | None:
        """The key from the environment, the file, or the configuration, in this order."""
        if key := os.environ.get(API_KEY_VARIABLE):
            return key
        if self.server.api_key_file is not None:
            try:
                return self.server.api_key_file.read_text().strip() or None
            except OSError as error:
                raise ConfigError(f"server.api_key_file: {error}") from error
        key = self.server.api_key.get_secret_value() if self.server.api_key else None
        if key == REDACTED:
            raise ConfigError(f"server.api_key is redacted in a saved configuration: set {API_KEY_VARIABLE}")
        return key

    def to_toml(self) -> str:
        """The resolved configuration with secrets redacted."""
        return tomli_w.dumps(_without_none(self.redacted()))

    def redacted(self) -> dict[str, Any]:
        """Every key as JSON, secrets hidden: an API key, `http://user:KEY@host`, options named like a secret."""
        found: dict[str, Any] = Redactor(environment_secrets()).value(self.model_dump(mode="json"))
        return found


def load_config(
    source: str | Path | None,
    overrides: list[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    text: str = "",
    saved: bool = False,
) -> Config:
    """Reads a configuration file or shipped configuration and applies `section.key=value` overrides.

    `text` is TOML to read where `source` is None. `saved`: the file is what a run was saved with. Relative files named
    in it are looked for beside the configuration file, then in the working directory.
    `defaults` (dotted key → value, from `hardware.defaults`) fill in keys that neither of them sets.
    Raises ConfigError: a missing file, bad TOML, an unknown key (with the nearest valid one), a bad value.
    """
    where, directories = "the configuration", [Path.cwd()]
    if source is not None:
        path = find_config(source)
        where, directories = str(path), [path.resolve().parent, Path.cwd()]
    try:
        data = tomli.loads(text if source is None else path.read_text(encoding="utf-8"))
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    moved_keys(data)
    if isinstance(data.get("rl_training"), dict):
        data["rl_training"] = without_unread(data["rl_training"], overrides or [], saved=saved)
    for override in overrides or []:
        _apply_override(data, override)
    moved_keys(data)
    for key, value in (defaults or {}).items():
        section, leaf = key.split(".")
        if isinstance(data.setdefault(section, {}), dict):
            data[section].setdefault(leaf, value)
    _make_paths_absolute(data, directories)
    return parse_config(data, where)


def parse_config(data: dict[str, Any], where: str = "the configuration") -> Config:
    """Validates a nested mapping; see `load_config` for what is raised."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_explain(entry) for entry in error.errors())) from error


def find_config(source: str | Path) -> Path:
    """A path as given, or the shipped configuration of that name (`quickstart` or `quickstart.toml`)."""
    path = Path(source)
    if path.is_file():
        return path
    name = path.name if path.name.endswith(".toml") else path.name + ".toml"
    roots = [Path(str(importlib.resources.files("mlx_parallm"))) / "assets" / "train_configs"]
    roots.append(roots[0].parents[2] / "train_configs")  # a source checkout
    shipped = {p.name: p for root in reversed(roots) if root.is_dir() for p in sorted(root.glob("*.toml"))}
    if name in shipped and (len(path.parts) == 1 or path.parent.name == "train_configs"):
        return shipped[name]
    known = ", ".join(sorted(p.removesuffix(".toml") for p in shipped))
    raise ConfigError(f"no configuration {str(source)!r}: not a file, and not one of the shipped ones ({known})")


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"--set {override!r}: expected section.key=value")
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        value = text  # a bare word is a string
    *sections, leaf = key.strip().split(".")
    node: Any = data
    for part in sections:
        node = _descend(node, part, override)
    if isinstance(node, list):
        raise ConfigError(f"--set {override!r}: name one entry, e.g. environments.0.weight")
    node[leaf] = value


def _descend(node: Any, part: str, override: str) -> Any:
    if isinstance(node, list):
        if not part.isdigit() or int(part) >= len(node):
            raise ConfigError(f"--set {override!r}: {part!r} is not an index below {len(node)}")
        return node[int(part)]
    child = node.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"--set {override!r}: {part!r} is a value, not a section")
    return child


def _make_paths_absolute(data: dict[str, Any], directories: list[Path]) -> None:
    """User code and data: the saved configuration must not depend on where it was read, or from where."""
    evaluation = data.get("evaluation")
    lists = [part.get("environments") for part in (data, evaluation) if isinstance(part, dict)]
    entries = [entry for found in lists if isinstance(found, list) for entry in found]
    for section in [data.get("rl_training"), data.get("data"), *entries]:
        if not isinstance(section, dict):
            continue
        for key in ("advantage", "loss", "kind", "data", "heldout_data", "path", "eval_path"):
            value = section.get(key)
            is_path = key in ("data", "heldout_data", "path", "eval_path") and not str(value).startswith(HUB_PREFIX)
            if isinstance(value, str) and (is_path or is_reference(value)):
                section[key] = absolute(value, directories)
        if isinstance(section.get("rewards"), list):
            section["rewards"] = [absolute(str(entry), directories) for entry in section["rewards"]]
        for key in ("options", "reward_options"):
            if key in section:
                section[key] = _absolute_files(section[key], directories)


def _absolute_files(value: Any, directories: list[Path], key: str = "") -> Any:
    """Options are anything: references become absolute, and what looks like a file, or stands for one, and is there."""
    if isinstance(value, dict):
        return {name: _absolute_files(entry, directories, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_absolute_files(entry, directories) for entry in value]
    is_file = key in ("path", "schema") or key.endswith("_file")
    if isinstance(value, str) and (is_reference(value) or is_file or _LIKE_A_FILE.fullmatch(value)):
        return absolute(value, directories)
    return value


def _explain(entry: Any) -> str:
    location = [str(part) for part in entry["loc"]]
    dotted = ".".join(location)
    if entry["type"] != "extra_forbidden":
        message = entry["msg"].removeprefix("Value error, ")
        given = "" if entry["type"] == "value_error" else f" (got {entry['input']!r})"
        return f"{dotted or 'configuration'}: {message}{given}"
    valid = _keys_of(location[:-1])
    near = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.0)
    hint = f"; did you mean {'.'.join([*location[:-1], near[0]])!r}?" if near else ""
    return f"unknown key {dotted!r}{hint}"


def _keys_of(location: list[str]) -> list[str]:
    section: Any = Config
    for part in location:
        if part.isdigit():
            continue
        section = EnvironmentConfig if part == "environments" else section.model_fields[part].annotation
    return list(section.model_fields)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
