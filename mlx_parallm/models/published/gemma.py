"""Gemma's classes of mlx-lm, where they compute otherwise than transformers does: the scale of the
embeddings, norms by 1 + weight, soft caps that are left out."""

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.mlx_lm_api import mlx_lm_attention
from mlx_parallm.models.parameters import scalar
from mlx_parallm.models.published.classes import named_as, once
from mlx_parallm.models.published.reader import Published


def embedding_scale(hidden_size: int, dtype: mx.Dtype) -> float:
    """Return what Gemma multiplies its embeddings by: √hidden_size, rounded to the model's type."""
    return scalar(mx.array(hidden_size**0.5, dtype).astype(mx.float32))


@once
def _scaled(kind: Any) -> type[Any]:
    class Scaled(kind):
        def __call__(
            self, inputs: mx.array, cache: Any = None, input_embeddings: mx.array | None = None
        ) -> mx.array:
            hidden = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
            return super().__call__(inputs, cache, hidden * self.embedding_scale)

    return named_as(Scaled, kind)


def scale_of_its_type(model: nn.Module, published: Published) -> None:
    """Gemma 3: the class rounds the embeddings' scale to bfloat16 in models of every type."""
    inner: Any = model.language_model.model if "language_model" in model else model.model
    inner.__class__ = _scaled(type(inner))
    inner.embedding_scale = float(inner.args.hidden_size**0.5)  # rounded on multiplication
    inner.args = dataclasses.replace(inner.args, hidden_size=1)  # so its own embedding scale is 1


@once
def _norm(kind: Any) -> type[Any]:
    class Norm(kind):
        def __call__(self, x: mx.array) -> mx.array:
            if x.dtype == mx.float32:
                normed: mx.array = super().__call__(x)
                return normed
            weight = 1.0 + self.weight.astype(mx.float32)
            return mx.fast.rms_norm(x.astype(mx.float32), weight, self.eps).astype(x.dtype)

    return named_as(Norm, kind)


def norms_in_float32(model: nn.Module, published: Published) -> None:
    """Norms of 1 + weight: the class adds in the model's type, which rounds the sum."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and type(module) is not nn.RMSNorm:
            module.__class__ = _norm(type(module))


@once
def _uncapped_attention(kind: Any) -> type[Any]:
    class Uncapped(kind):
        def __call__(
            self, x: mx.array, mask: mx.array | None = None, cache: Any = None
        ) -> mx.array:
            queries, keys, values = (
                projection(x).reshape(*x.shape[:2], -1, self.head_dim).swapaxes(1, 2)
                for projection in (self.q_proj, self.k_proj, self.v_proj)
            )
            offset = 0 if cache is None else cache.offset
            queries, keys = self.rope(queries, offset=offset), self.rope(keys, offset=offset)
            if cache is not None:
                keys, values = cache.update_and_fetch(keys, values)
            out = mlx_lm_attention(queries, keys, values, cache, self.scale, mask)
            return self.o_proj(out.swapaxes(1, 2).flatten(2))

    return named_as(Uncapped, kind)


@once
def _uncapped_head(kind: Any) -> type[Any]:
    class UncappedHead(kind):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            return self.model.embed_tokens.as_linear(self.model(inputs, cache))

    return named_as(UncappedHead, kind)


def soft_caps(model: nn.Module, published: Published) -> None:
    """Gemma 2: the class computes no model without its soft caps."""
    if published.get("attn_logit_softcapping") is None:
        for module in model.modules():
            if hasattr(module, "attn_logit_softcapping"):
                module.__class__ = _uncapped_attention(type(module))
    if published.get("final_logit_softcapping") is None:
        model.__class__ = _uncapped_head(type(model))
