"""Reads config.json as its author's library does: through transformers' configuration class.

That class knows every spelling (`rope_parameters` of transformers 5, `rope_theta` and
`rope_scaling` of 4, `type` before that) and holds the defaults of missing keys. It
needs no torch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

from mlx_parallm.errors import ModelError

GLOBAL = "full_attention"
"""The layer type whose rope a class that knows one alone gets."""


@dataclass(frozen=True)
class Published:
    """A text model, as its config.json describes it."""

    model_type: str
    config: PreTrainedConfig
    """Every key, defaults filled in."""
    written: Mapping[str, Any]
    """The part of config.json that speaks of it, as it is written."""
    within: str = ""
    """`model_type` of the model that it is the text part of."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a key's value; `default`: the architecture has no such key."""
        alias = self.config.attribute_map.get(name, name)
        # Gemma 4's configuration does not give a key that some layers override, its dict does
        value = self._values[alias] if alias in self._values else getattr(self.config, name, None)
        return default if value is None else value

    @cached_property
    def _values(self) -> dict[str, Any]:
        with quiet():
            values: dict[str, Any] = self.config.to_dict()
        return values

    @property
    def keys(self) -> frozenset[str]:
        """The keys that the architecture's configuration class has."""
        return frozenset(self.defaults)

    @property
    def defaults(self) -> dict[str, Any]:
        """The keys, with the values that they have where config.json has none."""
        kind: Any = type(self.config)
        return _defaults(kind)

    def is_usual(self, key: str) -> bool:
        """Whether a key has the value that it would have were it left out: its default, or what
        the other keys give."""
        value = self.get(key)
        if equal(value, self.defaults.get(key)):
            return True
        others = {k: v for k, v in self.written.items() if k != key}
        try:
            left_out = Published(self.model_type, _read(type(self.config), others), others)
        except Exception:  # noqa: BLE001 - transformers needs the key here
            return False
        return equal(value, left_out.get(key))

    def unusual(self) -> list[str]:
        """Return "key = value" of the keys whose values are not defaults; long ones are cut."""
        keys = sorted(set(self.written) & self.keys)
        values = {key: self.get(key) for key in keys}
        return [
            f"{key} = {value!r:.60}"
            for key, value in values.items()
            if not equal(value, self.defaults.get(key))
        ]

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int(self.config.num_hidden_layers)

    @property
    def head_dim(self) -> int:
        """Numbers in a head that are turned by positions."""
        if size := self.get("head_dim"):
            return int(size)
        return int(self.config.hidden_size // self.config.num_attention_heads)

    @property
    def ropes(self) -> dict[str, dict[str, Any]]:
        """`rope_parameters` by layer type; one of them all is under "". Empty: it has none."""
        parameters = self.get("rope_parameters")
        if not parameters:
            return {}
        nested = {
            name: value for name, value in parameters.items() if isinstance(value, dict | None)
        }
        if nested and not any(key in parameters for key in ("rope_type", "rope_theta")):
            return {name: value for name, value in nested.items() if value}
        return {"": parameters}

    def rope_of(self, layer: int) -> dict[str, Any] | None:
        """`rope_parameters` of a layer. None: that layer has none."""
        ropes = self.ropes
        if "" in ropes:
            return ropes[""]
        types = self.get("layer_types") or ()
        return ropes.get(types[layer]) if layer < len(types) else None

    @property
    def rope(self) -> dict[str, Any]:
        """The one rope of all layers, or that of the layers that see the whole text."""
        ropes = self.ropes
        return ropes.get("") or ropes.get(GLOBAL) or next(iter(ropes.values()), {})


def read_published(config: Mapping[str, Any]) -> Published | None:
    """Read a config.json. None: transformers has no class of its `model_type`, so nothing is known
    of its keys' meaning.

    Raises ModelError: transformers' class refuses it.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        return None
    if name == "bailing_hybrid" and "group_norm_size" in config:
        return None  # Ring 2.5 has the name too, and transformers knows the other one alone
    try:
        read = _read(CONFIG_MAPPING[name], config)
    except Exception as error:
        text = " ".join(str(error).split())
        raise ModelError(f"config.json of a {name} is refused by transformers: {text}") from error
    text_config = getattr(read, "text_config", None)
    if isinstance(text_config, PreTrainedConfig):
        part = config.get("text_config")
        return Published(
            text_config.model_type, text_config, part if isinstance(part, Mapping) else config, name
        )
    return Published(name, read, config)


def own_values(config: Mapping[str, Any]) -> str:
    """Name the keys of config.json with values of their own, in brackets: one of them is the likely
    cause where a model cannot be built or loaded. Raises ModelError."""
    published = read_published(config)
    keys = [] if published is None else published.unusual()
    return f" (config.json's own values: {', '.join(keys)})" if keys else ""


def _read(kind: type[PreTrainedConfig], config: Mapping[str, Any]) -> PreTrainedConfig:
    # transformers' classes change the dicts that they are given
    spelled = _one_spelling(deepcopy({k: v for k, v in config.items() if k not in _NOT_ITS}))
    with quiet():
        read: PreTrainedConfig = kind.from_dict(spelled)
    return read


def equal(a: Any, b: Any) -> bool:
    """Compare values of keys; a list and a tuple of the same values are equal."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return list(a) == list(b)
    return bool(a == b)


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    with quiet():
        values: dict[str, Any] = kind().to_dict()
    return values


def _one_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Write `rope_type` if a scaling says `type`, as before transformers 4.43: not all of its
    classes read that."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key)
        for part in (scaling, *(scaling.values() if isinstance(scaling, dict) else ())):
            if isinstance(part, dict) and "type" in part:
                part.setdefault("rope_type", part.pop("type"))
    return config


_NOT_ITS = ("quantization", "quantization_config", "dtype", "torch_dtype")
"""Keys that say how the weights are stored, which is read elsewhere."""


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' remarks on odd values, and its bars, from the terminal: refusals come as
    errors."""
    level, bars = (
        transformers_logging.get_verbosity(),
        transformers_logging.is_progress_bar_enabled(),
    )
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
