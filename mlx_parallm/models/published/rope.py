"""Rotary positions as transformers computes them (`modeling_rope_utils.py` of 5.24): one module for
every kind, in the place of each class's own.

A pair of numbers i of a head is turned by the angle `position · inverse[i]`, and what is turned is
multiplied by `factor` (yarn, longrope).
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_parallm.errors import ModelError
from mlx_parallm.models.published.reader import Published, read_published

Numbers = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class RopeTurns:
    """How a head is turned by positions."""

    inverse: Numbers  # [pairs] float32: radians a position
    factor: float = 1.0
    longest: int | None = None
    """The longest text for which these hold; None: any. Beyond it transformers takes others for the
    whole text, from its first token on, which whoever samples it does not know yet: `fixed_ropes`
    chooses for all texts."""


class Rope(nn.Module):
    """Turns the first `dims` numbers of each head. In the place of mlx-lm's classes.

    Args:
        traditional: pairs lie beside each other ("interleaved"), not in two halves.
    """

    def __init__(self, turns: RopeTurns, *, traditional: bool, kind: str) -> None:
        super().__init__()
        self.dims = 2 * len(turns.inverse)
        self.traditional = traditional
        self.kind = kind
        self.longest = turns.longest
        self._factor = turns.factor
        with np.errstate(divide="ignore"):
            self._freqs = mx.array(
                np.float32(1) / turns.inverse
            )  # in the form that mx.fast.rope takes

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """[..., positions, head] → the same. Raises ModelError: a text longer than `longest`."""
        if (
            self.longest is not None
            and isinstance(offset, int)
            and x.shape[-2] + offset > self.longest
        ):
            raise ModelError(
                f"rope_parameters (rope_scaling): rope_type {self.kind!r} turns texts of more than"
                f" {self.longest} tokens in another way from their first token on: choose that way"
                " for all texts by model.rope_length"
            )
        if self._factor != 1.0:
            if x.shape[-1] == self.dims:
                x = x * self._factor
            else:
                x = x.at[..., : self.dims].multiply(self._factor)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


def turns_of(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    """Compute how `rope` (one `rope_parameters`) turns heads of `head_dim`.

    Raises ModelError: a kind that is not known here, or a key that it needs is missing.
    """
    kind = rope.get("rope_type", "default")
    compute = _KINDS.get(kind)
    if compute is None:
        raise ModelError(
            f"rope_parameters (rope_scaling): rope_type = {kind!r} is none of"
            f" {', '.join(sorted(_KINDS))}"
        )
    try:
        turns = compute(published, rope, head_dim)
        if published.model_type == "phimoe" and kind != "default":
            original = rope["original_max_position_embeddings"]
            return RopeTurns(turns.inverse, float(rope["short_mscale"]), original)
        return turns
    except KeyError as error:
        raise ModelError(
            f"rope_parameters (rope_scaling) of rope_type {kind!r} lacks {error}"
        ) from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"rope_parameters (rope_scaling) of rope_type {kind!r} cannot be read: {error}"
        ) from error


def longest_text(published: Published) -> int | None:
    """The most tokens that the ropes of a model hold for; None: any number."""
    bounds = [
        turns_of(published, rope, published.head_dim).longest for rope in published.ropes.values()
    ]
    return min((bound for bound in bounds if bound is not None), default=None)


def _dims(rope: Mapping[str, Any], head_dim: int) -> int:
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def _exponents(dims: int, over: int | None = None) -> Numbers:
    return np.arange(0, dims, 2, dtype=np.float32) / np.float32(over or dims)


def _plain(base: float, dims: int) -> Numbers:
    return np.float32(1) / np.float32(base) ** _exponents(dims)


_TURNED = {"mimo_v2_flash": 0.334}
"""`model_type` → the part of a head that a plain rope turns, if its `rope_parameters` do not
say it and transformers' class takes less than the whole head. Its scaled ropes turn all."""


def _default(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    return RopeTurns(_plain(rope["rope_theta"], int(head_dim * turned_part(published, rope))))


def turned_part(published: Published, rope: Mapping[str, Any]) -> float:
    """Return the part of a head that `rope` turns."""
    plain = rope.get("rope_type", "default") == "default"
    usual = _TURNED.get(published.model_type, 1.0) if plain else 1.0
    return float(rope.get("partial_rotary_factor", usual))


def _linear(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    plain = _plain(rope["rope_theta"], _dims(rope, head_dim))
    return RopeTurns(plain / np.float32(rope["factor"]))


def _dynamic(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    """NTK by the text's length: as it is up to `max_position_embeddings`. Hunyuan's `alpha` gives
    another base to all texts."""
    base, dims = rope["rope_theta"], _dims(rope, head_dim)
    if published.model_type.startswith("hunyuan") and (alpha := rope.get("alpha")):
        return RopeTurns(_plain(base * alpha ** (dims / (dims - 2)), dims))
    return RopeTurns(_plain(base, dims), longest=published.config.max_position_embeddings)


def _yarn(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    """YaRN (arXiv:2309.00071)."""
    base, dims, original = (
        rope["rope_theta"],
        _dims(rope, head_dim),
        rope["original_max_position_embeddings"],
    )
    factor = rope["factor"]
    if factor is None:
        factor = published.config.max_position_embeddings / original

    def dimension(rotations: float) -> float:
        return dims * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    # transformers asks the whole `rope_parameters` for `truncate`, also where one layer type has it
    if published.config.rope_parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dims // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    periods = np.float32(base) ** _exponents(dims)
    scaled, plain = 1 / (factor * periods), 1 / periods
    attention = rope.get("attention_factor")
    if attention is None:
        one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = (
            yarn_scale(factor, one) / yarn_scale(factor, all_dims)
            if one and all_dims
            else yarn_scale(factor)
        )
    return RopeTurns((scaled * ramp + plain * (1 - ramp)).astype(np.float32), float(attention))


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature: 0.1 · mscale · ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    """LongRoPE (arXiv:2402.13753): `short_factor`, up to `original_max_position_embeddings`."""
    dims, original = _dims(rope, head_dim), rope["original_max_position_embeddings"]
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    if factor is None:
        factor = published.config.max_position_embeddings / original
    if attention is None:
        attention = 1.0
        if factor > 1:
            attention = math.sqrt(1 + math.log(factor) / math.log(original))
    factors = np.asarray(rope["short_factor"], np.float32)
    if len(factors) != dims // 2:
        raise ValueError(f"short_factor has {len(factors)} numbers; it needs {dims // 2}")
    inverse = 1 / (factors * np.float32(rope["rope_theta"]) ** _exponents(dims))
    longest = None if list(rope["long_factor"]) == list(rope["short_factor"]) else original
    return RopeTurns(inverse.astype(np.float32), float(attention), longest)


def _llama3(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    plain = _plain(rope["rope_theta"], _dims(rope, head_dim))
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * math.pi / plain
    scaled = np.where(waves > original / low, plain / np.float32(factor), plain)
    smooth = (original / waves - low) / (high - low)
    between = (waves >= original / high) & (waves <= original / low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    return RopeTurns(np.where(between, smoothed, scaled).astype(np.float32))


def _proportional(published: Published, rope: Mapping[str, Any], head_dim: int) -> RopeTurns:
    """Gemma 4: the pairs beyond the rotated part stay as they are."""
    angles = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    turned = 1 / np.float32(rope["rope_theta"]) ** _exponents(2 * angles, head_dim)
    inverse = np.concatenate([turned, np.zeros(head_dim // 2 - angles, np.float32)])
    return RopeTurns((inverse / np.float32(rope.get("factor", 1.0))).astype(np.float32))


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


ROPE_LENGTH = "rope_length"
"""The key of a config.json, and of an adapter's, under which model.rope_length is recorded."""


def fixed_ropes(config: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a config.json whose ropes turn every text as transformers turns one of `length`
    tokens: longrope takes its long factors, dynamic NTK one base. That is another model for
    shorter texts, and the same for all readers of the result, here or elsewhere.

    Raises ModelError: the ropes do not depend on a text's length, or none is so long.
    """
    changed = deepcopy(dict(config))
    if config.get(ROPE_LENGTH) == length:
        return changed
    published = read_published(config)
    bound = None if published is None else longest_text(published)
    if published is not None and published.model_type == "phimoe":
        raise ModelError(
            f"model.rope_length = {length}: transformers turns long texts of a phimoe by the short"
            " factors, others by the long ones: not supported"
        )
    if published is None or bound is None:
        raise ModelError(
            f"model.rope_length = {length}: the model's ropes do not depend on"
            " a text's length: leave it out"
        )
    changed[ROPE_LENGTH] = length
    if length <= bound:
        return changed
    text = changed["text_config"] if isinstance(changed.get("text_config"), dict) else changed
    most = max(_fix(published, name, rope, length, text) for name, rope in published.ropes.items())
    if length > most:
        raise ModelError(
            f"model.rope_length = {length}: config.json's ropes are for"
            f" texts of at most {most} tokens"
        )
    again = read_published(changed)
    if again is None or (longest_text(again) or length) < length:
        raise ModelError(
            f"model.rope_length = {length} is not supported for {published.model_type}"
        )
    return changed


def _fix(
    published: Published, name: str, rope: Mapping[str, Any], length: int, text: dict[str, Any]
) -> int:
    """Write one rope into `text` under the keys that `text` uses. Return the longest context that
    it supports."""
    written = [text[key] for key in ("rope_parameters", "rope_scaling") if text.get(key)]
    places = [place.get(name, place) if name else place for place in written]
    kind, positions = rope.get("rope_type", "default"), published.config.max_position_embeddings
    if kind == "longrope":
        for place in places:
            place["short_factor"] = list(rope["long_factor"])
    elif kind == "dynamic" and turns_of(published, rope, published.head_dim).longest is not None:
        factor, dims = rope["factor"], _dims(rope, published.head_dim)
        stretched = (factor * length / positions - (factor - 1)) ** (dims / (dims - 2))
        base = float(rope["rope_theta"] * stretched)
        for place in places:
            place.pop("type", None)
            place |= {"rope_type": "default", "rope_theta": base}
        if text.get("rope_scaling"):
            text |= {"rope_scaling": None, "rope_theta": base}
        text["max_position_embeddings"] = length
        return int(factor * positions)
    return int(positions)
