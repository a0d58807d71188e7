"""`Config`, the whole configuration, strict and frozen; CLI > TOML > hardware defaults > defaults.
Imports no MLX.

`load_config` reads a TOML file (a path, or the name of a shipped configuration), applies
`section.key=value` overrides and returns a `Config`; an unknown key is an error that names the
nearest valid one. Each section is a class in a module of this folder, or in the folder of a leaf
(leaves.py). `scripts/generate_config_docs.py` makes docs/config.md of their descriptions.
"""

import difflib
import importlib.resources
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, get_args, get_origin

import tomli
import tomli_w
from pydantic import ValidationError, create_model, model_validator

from mlx_parallm.config.algorithm import COMPARING, without_unread
from mlx_parallm.config.data import (
    DATA_ALGORITHMS,
    OF_ROWS,
    ONLINE_DPO,
    ONLINE_KTO,
    OPTIONS,
    ROLLOUT_KEYS,
    SORTED,
    DataConfig,
)
from mlx_parallm.config.environment import HUB_PREFIX, EnvironmentConfig, Section
from mlx_parallm.config.evaluation import EvaluationConfig, check_evaluation
from mlx_parallm.config.leaves import Leaf, imported, leaves
from mlx_parallm.config.server import ModelConfig, ServerConfig
from mlx_parallm.config.tools import ToolsConfig
from mlx_parallm.config.training import LoggingConfig, RLTrainingConfig, RolloutsConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import absolute, is_reference
from mlx_parallm.system.files import is_directory, is_file, local_path
from mlx_parallm.system.hardware import GIB, Hardware
from mlx_parallm.system.redaction import REDACTED, Redactor, environment_secrets

API_KEY_VARIABLE = "MLX_PARALLM_API_KEY"
GPU_PREFILL_CHUNK = 2048  # mlx-lm's own step on a GPU; on a CPU it would hold up decoding
# macOS kills GPU work that takes seconds while a display is on (ml-explore/mlx#3267)
METAL_EVAL_MS = 250
EVAL_KEY = "rl_training.max_eval_ms"
# tokens of a micro-batch: a guard for small machines, far below their memory
TOKENS_PER_GIB = 1024
LARGE_BILLIONS, LARGE_TOKENS_PER_GIB = 4.0, 96
"""Qwen3-14B in 4 bits needs 30.7 GiB at 8192 tokens, and 17.0 at 2048: what 24 GB have."""
PATHS = ("data", "heldout_data", "pass_rates", "path", "eval_path")  # keys of files
_LIKE_A_FILE = re.compile(r"[^\s:]{1,200}\.(jsonl|json|csv|txt|py|toml)")


SectionT = TypeVar("SectionT", bound=Section)


class CoreConfig(Section):
    """The sections of the core. `Config` has those of the leaves too."""

    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    rl_training: RLTrainingConfig = RLTrainingConfig()
    data: DataConfig = DataConfig()
    rollouts: RolloutsConfig = RolloutsConfig()
    logging: LoggingConfig = LoggingConfig()
    environments: tuple[EnvironmentConfig, ...] = ()
    """In-process environments; none = only environments that come over HTTP."""
    tools: ToolsConfig = ToolsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        _check_data(self.data, self.rl_training, len(self.environments))
        _check_signal(self.environments, self.evaluation, self.rl_training)
        check_evaluation(self.evaluation, self.environments, self.rl_training.keep_best)
        if self.server.async_scheduling and self.rl_training.deterministic:
            raise ValueError(
                "server.async_scheduling = true does not go with"
                " rl_training.deterministic: leave one out"
            )
        if self.model.fp32_lm_head and self.rl_training.lora.qat_bits is not None:
            raise ValueError(
                "model.fp32_lm_head does not go with rl_training.lora.qat_bits, whose trainer"
                " rounds the head: leave one out"
            )
        for leaf in leaves():
            if leaf.check is not None and leaf.name in type(self).model_fields:
                imported(leaf.check)(self)
        return self

    @property
    def evaluated(self) -> tuple[EnvironmentConfig, ...]:
        """The entries of [[evaluation.environments]], else of [[environments]]."""
        return self.evaluation.environments or self.environments

    @property
    def base_is_plain(self) -> bool:
        """Whether the base's weights are loaded as its checkpoint has them today, so that a reward
        model on the same base can share them."""
        model = self.model
        quantizes = self.rl_training.lora.quantize_base
        as_it_is = model.revision is None and model.dtype == "auto" and model.rope_length is None
        return as_it_is and not quantizes

    @property
    def reward_models(self) -> tuple[str, ...]:
        """The reward models that score answers in this process: paths, each once."""
        entries = (*self.environments, *self.evaluation.environments)
        parts = [part for entry in entries for part in entry.reward_options.items()]
        paths = [
            options.get("path") for name, options in parts if name.split("#")[0] == "reward_model"
        ]
        return tuple(dict.fromkeys(str(path) for path in paths if path))

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the section of this class: the way in which a leaf reads its settings."""
        return next(section for _, section in self if isinstance(section, kind))

    def of_leaf(self, leaf: Leaf) -> Section | None:
        """Return the section of a leaf, which its hooks are handed; None: it has none."""
        return None if leaf.section is None else self.section(imported(leaf.section))

    def image_hooks(self) -> tuple[Callable[..., Any], ...]:
        """Return the hooks `images` of the leaves with their sections, for
        `models.loaded_images`."""
        hooks = ((leaf.images, leaf) for leaf in leaves())
        return tuple(
            partial(imported(hook), self.of_leaf(leaf)) for hook, leaf in hooks if hook is not None
        )

    def resolve_api_key(self) -> str | None:
        """Return the API key of the environment, the file, or the configuration, in this order."""
        if key := os.environ.get(API_KEY_VARIABLE):
            if not key.strip():
                raise ConfigError(
                    f"{API_KEY_VARIABLE} holds only white space: set a key, or unset it"
                )
            return key
        if self.server.api_key_file is not None:
            try:
                return self.server.api_key_file.read_text().strip() or None
            except OSError as error:
                raise ConfigError(f"server.api_key_file: {error}") from error
        key = self.server.api_key.get_secret_value() if self.server.api_key else None
        if key is not None and not key.strip():
            raise ConfigError("server.api_key holds only white space: set a key, or leave it out")
        if key == REDACTED:
            raise ConfigError(
                f"server.api_key is redacted in a saved configuration: set {API_KEY_VARIABLE}"
            )
        return key

    def redactor(self) -> Redactor:
        """Return what hides the API key and the secrets of the environment."""
        return Redactor([self.resolve_api_key(), *environment_secrets()])

    def to_toml(self) -> str:
        """Return the resolved configuration with secrets redacted."""
        return tomli_w.dumps(_without_none(self.redacted()))

    def with_training(self, values: Mapping[str, Any]) -> "Config":
        """Return the configuration with other values of keys of [rl_training]. Raises
        ConfigError."""
        data = self.model_dump()
        data["rl_training"] |= dict(values)
        return parse_config(data)

    def saved_as(self, run_name: str) -> str:
        """Return the same of the run of this name, whatever its name was to be."""
        training = self.rl_training.model_copy(update={"run_name": run_name})
        return self.model_copy(update={"rl_training": training}).to_toml()

    def redacted(self) -> dict[str, Any]:
        """Return every key as JSON, secrets hidden: an API key, `http://user:KEY@host`, options
        named like a secret."""
        redacted: dict[str, Any] = Redactor(environment_secrets()).value(
            self.model_dump(mode="json")
        )
        return redacted


def _with_leaves() -> type[CoreConfig]:
    sections = {leaf.name: imported(leaf.section) for leaf in leaves() if leaf.section is not None}
    fields: dict[str, Any] = {name: (section, section()) for name, section in sections.items()}
    return create_model("Config", __base__=CoreConfig, __module__=__name__, **fields)


if TYPE_CHECKING:
    Config = CoreConfig
else:
    Config = _with_leaves()


def _check_data(data: DataConfig, training: RLTrainingConfig, environments: int) -> None:
    """Raises ValueError: rows without an algorithm that learns from them or the reverse, both
    rows and environments, or a key that the algorithm does not read."""
    algorithm = training.algorithm
    if algorithm not in DATA_ALGORITHMS:
        if data.changed():
            raise ValueError(
                f"data.{data.changed()[0]} is set, but {algorithm} learns from rollouts: set"
                " rl_training.algorithm to"
                f" one of {', '.join(DATA_ALGORITHMS)}, or give the rows to an environment"
                " (docs/your_data.md)"
            )
    elif algorithm != "sft" and (data.learn_prompts or data.pack_rows):
        option = "learn_prompts" if data.learn_prompts else "pack_rows"
        raise ValueError(f"data.{option} is an option of sft: {algorithm} does not use it")
    elif data.path is None:
        raise ValueError(
            f'algorithm = "{algorithm}" learns from rows of a file: set data.path = "rows.jsonl"'
        )
    elif environments:
        raise ValueError(
            f'algorithm = "{algorithm}" learns from data.path alone: leave out [[environments]]'
        )
    elif unread := [name for name in ROLLOUT_KEYS if name in training.changed()]:
        raise ValueError(f"rl_training.{unread[0]} is about rollouts: {algorithm} does not use it")
    elif training.weight_updates.max_publish_kl is not None:
        raise ValueError(
            f"rl_training.weight_updates.max_publish_kl is measured on rollouts: {algorithm}"
            " does not use it"
        )
    elif changed := training.atropos.changed():
        raise ValueError(
            f"rl_training.atropos.{changed[0]} is about rollouts: {algorithm} does not use it"
        )
    measures_kl = algorithm in ("kto", ONLINE_KTO) and training.preference.kto_loss == "kto"
    if measures_kl and training.batch_size < 2:
        raise ValueError(
            f"{algorithm} estimates a KL over a mini-batch: batch_size has to be at least 2"
        )
    _check_options(training)


def _check_signal(
    environments: Sequence[EnvironmentConfig],
    evaluation: EvaluationConfig,
    training: RLTrainingConfig,
) -> None:
    """Raises ValueError: an environment with nothing to learn from: no rewards, or one answer to a
    prompt where answers are compared."""
    distillation = training.distillation
    for entry in environments:
        compares = training.algorithm == ONLINE_DPO or training.advantage in COMPARING
        if entry.group_size == 1 and compares and not distillation.active:
            raise ValueError(
                f"environments: {entry.name}: group_size = 1, but {training.algorithm} compares the"
                " answers to one prompt: set at least 2"
            )
        if training.advantage == "maxrl" and entry.reward_method in ("relative", "gdpo"):
            raise ValueError(
                f'environments: {entry.name}: reward_method = "{entry.reward_method}" makes rewards'
                ' below 0, which advantage = "maxrl" does not take'
            )
        if entry.kind != "dataset" or entry.rewards:
            continue
        if not distillation.active or distillation.reward:
            raise ValueError(
                f'environments: {entry.name}: kind = "dataset" needs rewards ='
                ' ["python:file.py:function"] (only with'
                " distillation.reward = false it may have none)"
            )
        if evaluation.problems and not evaluation.environments:
            raise ValueError(
                f"environments: {entry.name} has no rewards, so evaluation.problems cannot be"
                " scored: set rewards, or evaluation.problems = 0"
            )
    for entry in evaluation.environments:
        if entry.kind == "dataset" and not entry.rewards:
            raise ValueError(
                f'evaluation.environments: {entry.name}: kind = "dataset" needs rewards ='
                ' ["python:file.py:function"]'
            )


def _check_options(training: RLTrainingConfig) -> None:
    """Raises ValueError: a key of [rl_training.preference] that the algorithm does not read."""
    algorithm = training.algorithm
    of_rows = [kind for kind in training.preference.loss_types if kind in OF_ROWS]
    if algorithm == ONLINE_DPO and of_rows:
        raise ValueError(
            f'rl_training.preference.loss_type = "{of_rows[0]}" learns from rows of a file:'
            f" {ONLINE_DPO} does not use it"
        )
    sorting = [kind for kind in of_rows if kind in SORTED]
    if training.lora.dropout > 0 and sorting:
        raise ValueError(
            f'rl_training.preference.loss_type = "{sorting[0]}" sorts log-probabilities that are'
            " scored without dropout: set rl_training.lora.dropout = 0"
        )
    if wrong := [
        name for name in training.preference.changed() if name not in OPTIONS.get(algorithm, ())
    ]:
        readers = ", ".join(name for name, keys in OPTIONS.items() if wrong[0] in keys)
        raise ValueError(
            f"rl_training.preference.{wrong[0]} is an option of"
            f" {readers}: {algorithm} does not use it"
        )


def load_config(
    source: str | Path | None,
    overrides: list[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    *,
    text: str = "",
    saved: bool = False,
) -> Config:
    """Read a configuration and apply `section.key=value` overrides. Relative files in it are looked
    for beside the configuration file, then in the working directory.

    Args:
        source: a file, or the name of a shipped configuration.
        defaults: values of `hardware_defaults` for keys that neither the file nor an override sets.
        text: TOML to read if `source` is None.
        saved: the file is the one that a run was saved with.

    Raises ConfigError: a missing file, bad TOML, an unknown key (with the nearest valid one), a bad
    value.
    """
    where, directories = "the configuration", [Path.cwd()]
    if source is not None:
        path = find_config(source)
        where, directories = str(path), [path.resolve().parent, Path.cwd()]
    try:
        data = tomli.loads(text if source is None else path.read_text(encoding="utf-8"))
    except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from error
    if isinstance(data.get("rl_training"), dict):
        data["rl_training"] = without_unread(data["rl_training"], overrides or [])
    if saved and not data:  # its defaults would be another run's settings
        raise ConfigError(f"{where}: it is empty: give --config")
    for override in overrides or []:
        _apply_override(data, override)
    _set_defaults(data, defaults or {})
    _make_paths_absolute(data, directories)
    return parse_config(data, where, overrides or [])


def _set_defaults(data: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Fill missing keys with the machine's defaults, unless another key decides them."""
    training = data.get("rl_training")
    if isinstance(training, dict) and training.get("serve_priority") == "chat":
        defaults = {key: each for key, each in defaults.items() if key != EVAL_KEY}
    for key, value in defaults.items():
        section, leaf = key.split(".")
        if isinstance(data.setdefault(section, {}), dict):
            data[section].setdefault(leaf, value)


def hardware_defaults(hardware: Hardware, billions: float | None = None) -> dict[str, Any]:
    """Return the keys whose default depends on the machine, as {"section.key": value}.

    Args:
        billions: parameters of the model, as far as its name says; None: unknown. A large one takes
            most of the memory itself, and a token of a micro-batch takes more.
    """
    keys: dict[str, Any] = {}
    if hardware.backend != "cpu":
        keys["server.prefill_chunk"] = GPU_PREFILL_CHUNK
    if hardware.backend == "metal":
        keys[EVAL_KEY] = METAL_EVAL_MS
        keys["server.max_prefill_ms"] = METAL_EVAL_MS
    is_large = billions is not None and billions >= LARGE_BILLIONS and hardware.backend != "cpu"
    each = LARGE_TOKENS_PER_GIB if is_large else TOKENS_PER_GIB
    affordable = each * max(1, hardware.memory_bytes // GIB)
    if affordable < RLTrainingConfig.model_fields["token_budget"].default:
        keys["rl_training.token_budget"] = affordable
    return keys


def parse_config(
    data: dict[str, Any], where: str = "the configuration", overrides: Sequence[str] = ()
) -> Config:
    """Validate a mapping that came from `where` and `overrides`. Raises ConfigError, as
    `load_config`."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = defaultdict[str, list[str]](list)
        for entry in error.errors():
            problems[_origin(entry, overrides) or where].append(_explain(entry))
        raise ConfigError(
            "; ".join(f"{where}: {'; '.join(texts)}" for where, texts in problems.items())
        ) from error


def find_config(source: str | Path) -> Path:
    """Return the path, or the shipped configuration of that name (`quickstart` or
    `quickstart.toml`)."""
    path = Path(source)
    if is_file(path):
        return path
    name = path.name if path.name.endswith(".toml") else path.name + ".toml"
    roots = [
        Path(str(importlib.resources.files("mlx_parallm"))) / "config" / "shipped" / "train_configs"
    ]
    roots.append(roots[0].parents[3] / "train_configs")  # a source checkout
    shipped = {
        p.name: p for root in reversed(roots) if root.is_dir() for p in sorted(root.glob("*.toml"))
    }
    if name in shipped and (len(path.parts) == 1 or path.parent.name == "train_configs"):
        return shipped[name]
    names = ", ".join(sorted(p.removesuffix(".toml") for p in shipped))
    near = difflib.get_close_matches(name, shipped, n=1)
    meant = f"; did you mean {near[0].removesuffix('.toml')!r}?" if near else ":"
    raise ConfigError(
        f"no configuration {str(source)!r}: not a file, and not one of the shipped ones{meant}"
        f" There are {names}"
    )


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


def _environments(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of [[environments]] and of [[evaluation.environments]]."""
    lists = [
        part.get("environments")
        for part in (data, data.get("evaluation"))
        if isinstance(part, dict)
    ]
    return [
        entry
        for entries in lists
        if isinstance(entries, list)
        for entry in entries
        if isinstance(entry, dict)
    ]


def _make_paths_absolute(data: dict[str, Any], directories: list[Path]) -> None:
    """Make the paths of user code and data absolute: a saved configuration must not depend on
    the working directory."""
    of_leaves = [data.get(leaf.name) for leaf in leaves() if leaf.section is not None]
    _absolute_in_leaves(of_leaves, directories)
    for section in [data.get("rl_training"), data.get("data"), *of_leaves, *_environments(data)]:
        if not isinstance(section, dict):
            continue
        for key in ("advantage", "loss", "kind", *PATHS):
            value = section.get(key)
            is_path = key in PATHS and not str(value).startswith(HUB_PREFIX)
            if isinstance(value, str) and (is_path or is_reference(value)):
                section[key] = absolute(value, directories)
        if isinstance(section.get("rewards"), list):
            section["rewards"] = [absolute(str(entry), directories) for entry in section["rewards"]]
        for key in ("options", "reward_options"):
            if key in section:
                section[key] = _absolute_files(section[key], directories)
    if "tools" in data:
        data["tools"] = _absolute_files(data["tools"], directories)
    training = data.get("rl_training")
    if isinstance(training, dict) and "distillation" in training:
        training["distillation"] = _absolute_files(training["distillation"], directories)


def _absolute_in_leaves(sections: Sequence[Any], directories: list[Path]) -> None:
    """Make paths, and files of the user's functions, absolute."""
    for section in sections:
        for key, value in section.items() if isinstance(section, dict) else ():
            if isinstance(value, str) and (is_reference(value) or key.endswith("_file")):
                section[key] = absolute(value, directories)


def _absolute_files(value: Any, directories: list[Path], key: str = "") -> Any:
    """Return options, which may be anything, with absolute references, and absolute paths of
    files that exist, and of a directory that `path` names."""
    if isinstance(value, dict):
        return {name: _absolute_files(entry, directories, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [_absolute_files(entry, directories) for entry in value]
    if isinstance(value, str) and value and key == "path":
        places = (directory / local_path(value) for directory in directories)
        place = next((place for place in places if is_directory(place)), None)
        if place is not None:
            return str(place.resolve())
    is_file = key in ("path", "schema") or key.endswith("_file")
    if isinstance(value, str) and (is_reference(value) or is_file or _LIKE_A_FILE.fullmatch(value)):
        return absolute(value, directories)
    return value


def _origin(entry: Any, overrides: Sequence[str]) -> str | None:
    """Return the override that an error of validation is about, as the user wrote it."""
    dotted = ".".join(map(str, entry["loc"]))
    for override in overrides:
        key = override.partition("=")[0].strip()
        unknown_section = entry["type"] == "extra_forbidden" and key.startswith(f"{dotted}.")
        if unknown_section or f"{dotted}.".startswith(f"{key}."):
            return f"--set {override}"
    return None


def _explain(entry: Any) -> str:
    location = [str(part) for part in entry["loc"]]
    dotted = ".".join(location)
    if entry["type"] != "extra_forbidden":
        message = entry["msg"].removeprefix("Value error, ")
        value = "" if entry["type"] == "value_error" else f" (got {entry['input']!r})"
        return f"{dotted}: {message}{value}".removeprefix(": ")
    *section, name = location
    near = difflib.get_close_matches(name, _keys_of(section), n=1)
    places = [key for key in _all_keys(Config) if key.endswith(f".{name}")] + [
        ".".join([*section, key]) for key in near
    ]
    hint = f"did you mean {places[0]!r}?" if places else "docs/config.md lists every key"
    return f"unknown key {dotted!r}; {hint}"


def _all_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _all_keys(field.annotation, f"{prefix}{name}.")


def _keys_of(location: list[str]) -> list[str]:
    section: Any = Config
    for part in location:
        if part.isdigit():
            continue
        section = section.model_fields[part].annotation
        if get_origin(section) is tuple:  # one entry for each
            section = get_args(section)[0]
    return list(section.model_fields)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
