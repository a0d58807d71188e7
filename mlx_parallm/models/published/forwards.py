"""Classes of mlx-lm whose forward, or whose names of tensors, are others than transformers': those
of single architectures."""

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.experts.targets import number_of_experts
from mlx_parallm.models.mlx_lm_api import create_attention_mask
from mlx_parallm.models.published.classes import (
    Sanitize,
    Weights,
    named_as,
    once,
    reading,
    renamed,
)
from mlx_parallm.models.published.gemma import embedding_scale
from mlx_parallm.models.published.reader import Published
from mlx_parallm.models.published.rope import yarn_scale


def latent_norms(model: nn.Module, published: Published) -> None:
    """MLA: transformers' norms of the small projections have 1e-6 whatever `rms_norm_eps` says."""
    for module in model.modules():
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if isinstance(norm := module.get(name), nn.RMSNorm):
                norm.eps = 1e-6


def indexer_norms(model: nn.Module) -> None:
    """DeepSeek's sparse attention: transformers' norm of the indexer's keys has 1e-6. Another
    number of it selects other tokens."""
    for module in model.modules():
        if isinstance(norm := module.get("k_norm"), nn.LayerNorm) and "weights_proj" in module:
            norm.eps = 1e-6


CHOICE_BIASES = ("e_score_correction_bias", "expert_bias", "gate_bias")


@once
def _above_zero(kind: Any) -> type[Any]:
    class GroupsOfExperts(kind):
        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            return value - mx.minimum(value.min(), 0) if name in CHOICE_BIASES else value

    return named_as(GroupsOfExperts, kind)


def experts_of_other_groups(model: nn.Module) -> None:
    """Choose no expert of a group that was not chosen: mlx-lm's classes give these the score 0,
    which is above a negative one, and transformers' minus infinity. So the biases, which serve the
    choice alone, are read with none below 0: sigmoids are above 0, and the order is the same."""
    for module in list(model.modules()):
        groups = getattr(module, "n_group", None)
        groups = groups or getattr(getattr(module, "args", None), "num_expert_group", None)
        if (groups or 1) > 1 and set(CHOICE_BIASES) & set(module):
            module.__class__ = _above_zero(type(module))


@once
def _scaled_head(kind: Any) -> type[Any]:
    class ScaledNorm(kind):
        def __call__(self, x: mx.array) -> mx.array:
            return super().__call__(x) / self.divisor

    return named_as(ScaledNorm, kind)


def scaled_as_minicpm3(model: nn.Module, published: Published) -> None:
    """MiniCPM3: the class does not divide what enters the head if the head is tied, and knows no
    temperature of YaRN."""
    config, rope = published.config, published.rope
    if rope.get("rope_type", "default") != "default" and (all_dim := rope.get("mscale_all_dim")):
        for layer in model.layers:
            layer.self_attn.softmax_scale *= yarn_scale(rope["factor"], all_dim) ** 2
    if config.tie_word_embeddings:
        norm: Any = model.model.norm
        norm.__class__ = _scaled_head(type(norm))
        norm.divisor = config.hidden_size / config.dim_model_base


def split_kernels(model: nn.Module, published: Published) -> None:
    """OLMo Hybrid: transformers keeps one kernel of queries, keys and values, and cuts it in three
    equal parts when it saves it, whatever their sizes are."""
    model.__class__ = reading(type(model), _kernels_apart)


def _kernels_apart(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    for path, module in model.named_modules():
        names = [f"{path}.{part}_conv1d.weight" for part in "qkv"]
        if hasattr(module, "q_conv1d") and all(name in weights for name in names):
            whole = mx.concatenate([weights[name] for name in names])
            ends = [module.key_dim, 2 * module.key_dim]
            weights |= dict(zip(names, mx.split(whole, ends), strict=True))
    return sanitize(weights)


class NormedRope(nn.Module):
    """Turns a head, then divides it by its root mean square."""

    def __init__(self, rope: Any, eps: float) -> None:
        super().__init__()
        self.turn = rope
        self.eps = eps

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """[..., positions, head] → the same."""
        return mx.fast.rms_norm(self.turn(x, offset=offset), None, self.eps)


def norms_of_queries(model: nn.Module, published: Published) -> None:
    """Llama 4: queries and keys that are turned are normed with `rms_norm_eps`; mlx-lm's class has
    1e-6, and its class of the text model alone norms those that are not turned too."""
    for module in model.modules():
        if getattr(module, "use_qk_norm", False):
            module.use_qk_norm = False
            if module.use_rope:
                module.rope = NormedRope(module.rope, published.config.rms_norm_eps)


head_names = renamed((re.compile(r"^lm_head\."), "output."))
"""Llama 4's text model alone."""


def ling_names(model: nn.Module, published: Published) -> None:
    """Ling 3: transformers saves the last projection of every layer under the name that MLA's
    has."""
    model.__class__ = reading(type(model), _own_projections)


def _own_projections(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    names = {
        f"model.layers.{i}.attention.dense.weight": f"model.layers.{i}.attention.o_proj.weight"
        for i, layer in enumerate(model.layers)
        if layer.is_linear
    }
    return sanitize({names.get(name, name): array for name, array in weights.items()})


_ZERO_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\.weight$")


def no_zero_experts(model: nn.Module, published: Published) -> None:
    """LongCat: experts that compute nothing have arrays too where transformers saves them."""
    model.__class__ = reading(type(model), _computing_experts)


def _computing_experts(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    count = number_of_experts(vars(model.args))
    return sanitize(
        {
            name: array
            for name, array in weights.items()
            if not (match := _ZERO_EXPERT.search(name)) or int(match[1]) < count
        }
    )


def _text_alone(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    return sanitize(
        {name: array for name, array in weights.items() if not name.startswith("model.vision_")}
    )


def text_alone(model: nn.Module, published: Published) -> None:
    """Muse Glimmer: the class reads text, and does not know all names of what sees."""
    model.__class__ = reading(type(model), _text_alone)


class _Held:
    """The keys and values of one layer in one forward pass, for the layers that read them too."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.held = keys, values
        return self.held

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.held


@once
def _sharing(kind: Any) -> type[Any]:
    class Sharing(kind):
        def __call__(
            self,
            inputs: mx.array | None = None,
            cache: Any = None,
            input_embeddings: mx.array | None = None,
        ) -> mx.array:
            if cache is None:
                cache = [_Held() for _ in range(self.first_kv_shared_layer_idx)]
            return super().__call__(inputs, cache, input_embeddings)

    return named_as(Sharing, kind)


def shared_keys(model: nn.Module, published: Published) -> None:
    """Gemma 3n: the last layers read an earlier one's keys and values; the class computes own ones
    if it has no cache, from arrays that transformers does not save."""
    inner: Any = model.model.language_model
    inner.__class__ = _sharing(type(inner))
    for layer in inner.layers:
        if layer.self_attn.is_kv_shared_layer:
            for name in ("k_proj", "v_proj", "k_norm"):
                del layer.self_attn[name]
    model.__class__ = reading(type(model), _without_shared)


def _without_shared(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    ends = tuple(
        f"layers.{i}.self_attn.{name}.weight"
        for i, layer in enumerate(model.layers)
        if layer.self_attn.is_kv_shared_layer
        for name in ("k_proj", "v_proj", "k_norm")
    )
    return sanitize({name: array for name, array in weights.items() if not name.endswith(ends)})


def index_ropes(model: nn.Module, published: Published) -> None:
    """MiniMax-M3: what chooses blocks of keys is turned as the keys are."""
    for module in model.modules():
        if "index_rope" in module:
            module.index_rope = module.rope


@once
def _rounded_scale(kind: Any) -> type[Any]:
    class Rounded(kind):
        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            hidden = self.embed_tokens(tokens)
            if self.scale_by_sqrt_dim:
                hidden = hidden * self.scale
            caches = [None] * len(self.layers) if cache is None else cache
            mask = create_attention_mask(hidden, caches[self.swa_idx], window_size=self.window_size)
            for block, of_block in zip(self.layers, caches, strict=True):
                hidden = block(hidden, mask=mask, cache=of_block)
            return self.final_norm(hidden)

    return named_as(Rounded, kind)


def rounded_scale(model: nn.Module, published: Published) -> None:
    """RecurrentGemma: the embeddings' scale is rounded to bfloat16 whatever the model's type is,
    and the blocks' norms have `rms_norm_eps`, of which the class knows the last one's alone."""
    inner: Any = model.model
    inner.__class__ = _rounded_scale(type(inner))
    inner.scale = embedding_scale(published.config.hidden_size, mx.bfloat16)
    for layer in inner.layers:
        for norm in (layer.temporal_pre_norm, layer.channel_pre_norm):
            norm.eps = published.config.rms_norm_eps
