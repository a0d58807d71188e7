"""Classes of mlx-lm that read tensors, or choose experts, otherwise than transformers does."""

import functools
import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.published.reader import Published

Weights = dict[str, mx.array]
Sanitize = Callable[[Weights], Weights]
Reading = Callable[[Any, Weights, Sanitize], Weights]
Mend = Callable[[nn.Module, Published], None]


def once(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that makes a class make it once: modules of one kind keep one class."""
    return functools.cache(make)


@once
def reading(kind: Any, read: Reading) -> type[Any]:
    """Return a class that reads tensors through `read`."""

    class Mended(kind):
        def sanitize(self, weights: Weights) -> Weights:
            sanitize = getattr(super(), "sanitize", dict)  # not every class has one
            return read(self, dict(weights), sanitize)

    return named_as(Mended, kind)


def named_as(made: Any, kind: Any) -> type[Any]:
    """Give a mended class the name and module of mlx-lm's, by which it is found."""
    made.__name__, made.__qualname__ = kind.__name__, kind.__qualname__
    made.__module__ = kind.__module__
    return made


def renamed(*pairs: tuple[re.Pattern[str], str]) -> Mend:
    """Return a mend: tensors have other names as transformers saves them than mlx-lm reads. Each
    pair is a regular expression and its replacement."""

    def name_of(name: str) -> str:
        for pattern, replacement in pairs:
            name = pattern.sub(replacement, name)
        return name

    def read(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
        return sanitize({name_of(name): array for name, array in weights.items()})

    def mend(model: nn.Module, published: Published) -> None:
        model.__class__ = reading(type(model), read)

    return mend


plain_names = renamed((re.compile(r"^transformer\."), ""))
"""GPT-2: transformers' names begin with `transformer.`, the hub's do not."""
dense_names = renamed((re.compile(r"\.block_sparse_moe\.((?:gate|up|down)_proj\.)"), r".mlp.\1"))
"""Kimi Linear: a layer without experts."""
norm_names = renamed(
    (re.compile(r"\.attention_layer_norm\."), ".input_layernorm."),
    (re.compile(r"\.feedforward_layer_norm\."), ".post_attention_layernorm."),
)
"""OLMo Hybrid: a recurrent layer's norms."""
nanochat_names = renamed(
    (re.compile(r"^model\.embed_tokens\."), "transformer.wte."),
    (re.compile(r"^model\.layers\."), "transformer.h."),
    (re.compile(r"\.self_attn\.([qkv])_proj\."), r".attn.c_\1."),
    (re.compile(r"\.self_attn\.o_proj\."), ".attn.c_proj."),
    (re.compile(r"\.mlp\.fc1\."), ".mlp.c_fc."),
    (re.compile(r"\.mlp\.fc2\."), ".mlp.c_proj."),
)


def each(*mends: Mend) -> Mend:
    """Return a mend that does several."""

    def mend(model: nn.Module, published: Published) -> None:
        for part in mends:
            part(model, published)

    return mend


def unpacked_experts(model: nn.Module, published: Published) -> None:
    """GPT-OSS as transformers saves it in a plain type: [experts, in, out], gate, up in turns."""
    model.__class__ = reading(type(model), _experts_apart)


def _experts_apart(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    if not any(name.endswith("experts.gate_up_proj") for name in weights):
        return sanitize(weights)
    apart: Weights = {}
    for name, array in weights.items():
        stem, _, part = name.rpartition(".")
        if not stem.endswith(".experts"):
            apart[name] = array
        elif part == "gate_up_proj":
            turned = array.swapaxes(-1, -2)
            apart[f"{stem}.gate_proj.weight"] = mx.contiguous(turned[:, ::2])
            apart[f"{stem}.up_proj.weight"] = mx.contiguous(turned[:, 1::2])
        elif part == "gate_up_proj_bias":
            apart[f"{stem}.gate_proj.bias"] = mx.contiguous(array[:, ::2])
            apart[f"{stem}.up_proj.bias"] = mx.contiguous(array[:, 1::2])
        elif part == "down_proj":
            apart[f"{stem}.down_proj.weight"] = mx.contiguous(array.swapaxes(-1, -2))
        else:
            apart[f"{stem}.{part.removesuffix('_bias')}.bias"] = array
    return sanitize(apart)


def folded_multipliers(model: nn.Module, published: Published) -> None:
    """Falcon-H1: `sanitize` multiplies the weights by the configuration's factors, but leaves out
    those of keys and values, and all biases."""
    model.__class__ = reading(type(model), _with_factors)


def _with_factors(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    kernel = weights["model.layers.0.mamba.conv1d.weight"]
    folds = kernel.shape[-1] > kernel.shape[1]  # else mlx-lm saved it, folded
    weights = sanitize(weights)
    if not folds:
        return weights
    args = model.args
    factors = {
        "self_attn.k_proj.weight": args.key_multiplier,
        "self_attn.k_proj.bias": args.key_multiplier,
        "self_attn.v_proj.weight": args.attention_in_multiplier,
        "self_attn.o_proj.bias": args.attention_out_multiplier,
        "mamba.out_proj.bias": args.ssm_out_multiplier,
        "mamba.in_proj.bias": model.model._mup_vector,
        "feed_forward.gate_proj.bias": args.mlp_multipliers[0],
        "feed_forward.down_proj.bias": args.mlp_multipliers[1],
    }
    return {
        name: array * next((f for end, f in factors.items() if name.endswith(end)), 1)
        for name, array in weights.items()
    }


class _Statics(nn.Module):
    """Holds the numbers that a router adds to the experts' scores before it chooses."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = mx.zeros((1, experts))


@once
def _biased(kind: Any) -> type[Any]:
    class Biased(kind):
        def __call__(self, x: mx.array) -> mx.array:
            scores = self.gate_act(self.gate(x).astype(mx.float32))
            ranked = scores + self.moe_statics.e_score_correction_bias.reshape(-1)
            chosen = mx.argpartition(-ranked, kth=self.k - 1, axis=-1)[..., : self.k]
            chosen = mx.stop_gradient(chosen)
            shares = mx.take_along_axis(scores, chosen, axis=-1)
            shares = shares / mx.maximum(shares.sum(axis=-1, keepdims=True), 1e-12)
            y = self.switch_mlp(x, chosen)
            y = (y * shares[..., None]).sum(axis=-2).astype(y.dtype)
            return y if self.shared_experts is None else y + self.shared_experts(x)

    return named_as(Biased, kind)


def biased_experts(model: nn.Module, published: Published) -> None:
    """ERNIE 4.5 MoE: the class drops the bias by which experts are chosen."""
    for module in model.modules():
        if hasattr(module, "switch_mlp") and hasattr(module, "gate_act"):
            module.__class__ = _biased(type(module))
            module.moe_statics = _Statics(published.config.moe_num_experts)
    model.__class__ = reading(type(model), _with_bias)


def _with_bias(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    end = ".moe_statics.e_score_correction_bias"
    kept = {name: array for name, array in weights.items() if name.endswith(end)}
    none = {
        f"{path}.e_score_correction_bias": module.e_score_correction_bias
        for path, module in model.named_modules()
        if isinstance(module, _Statics)
    }
    return sanitize(weights) | none | kept


@once
def _unnormalised(kind: Any) -> type[Any]:
    class Unnormalised(kind):
        def __call__(self, x: mx.array) -> mx.array:
            k = self.num_experts_per_tok
            scores = self.router(x)
            chosen = mx.stop_gradient(mx.argpartition(-scores, kth=k - 1, axis=-1)[..., :k])
            shares = mx.softmax(scores.astype(mx.float32), axis=-1, precise=True)
            shares = mx.take_along_axis(shares, chosen, axis=-1).astype(x.dtype)
            return (self.switch_mlp(x, chosen) * shares[..., None]).sum(axis=-2)

    return named_as(Unnormalised, kind)


def unnormalised_shares(model: nn.Module, published: Published) -> None:
    """Jamba: an expert's share is that among all experts; the class divides by the chosen ones'."""
    for module in model.modules():
        if hasattr(module, "switch_mlp") and hasattr(module, "router"):
            module.__class__ = _unnormalised(type(module))


@once
def _tied(kind: Any) -> type[Any]:
    class Tied(kind):
        def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
            inner = self["backbone"] if "backbone" in self else self["model"]
            table = inner["embeddings"] if "embeddings" in inner else inner["embed_tokens"]
            logits: mx.array = table.as_linear(inner(inputs, cache=cache))
            return logits

    return named_as(Tied, kind)


def tie_head(model: nn.Module) -> None:
    """Let the embeddings be the head of a model whose class knows no tied ones."""
    if isinstance(model.get("lm_head"), nn.Linear):
        del model["lm_head"]
        model.__class__ = _tied(type(model))


@once
def _grouped(kind: Any) -> type[Any]:
    class Grouped(kind):
        def __call__(self, hidden_states: mx.array, gate: mx.array | None = None) -> mx.array:
            if gate is not None:
                hidden_states = nn.silu(gate) * hidden_states
            groups = mx.unflatten(hidden_states, -1, (self.groups, -1))
            return self.weight * mx.fast.rms_norm(groups, None, self.eps).flatten(-2)

    return named_as(Grouped, kind)


def grouped_norms(model: nn.Module, published: Published) -> None:
    """Mamba 2: the norm behind the recurrence is taken in each group; the class has one group."""
    for module in model.modules():
        if getattr(module, "n_groups", 1) > 1 and isinstance(norm := module.get("norm"), nn.Module):
            norm.__class__ = _grouped(type(norm))
            norm.groups = module.n_groups


@once
def _wide_scan(kind: Any) -> type[Any]:
    class WideScan(kind):
        def _ssm(
            self, hidden_states: mx.array, B: mx.array, C: mx.array, *rest: Any, **named: Any
        ) -> mx.array:
            wide = (array.astype(mx.float32) for array in (hidden_states, B, C))
            scanned: mx.array = super()._ssm(*wide, *rest, **named)
            return scanned

    return named_as(WideScan, kind)


@once
def _wide_gate(kind: Any) -> type[Any]:
    class WideGate(kind):
        def __call__(self, hidden_states: mx.array, gate: mx.array) -> mx.array:
            normed: mx.array = super().__call__(hidden_states, gate.astype(mx.float32))
            return normed.astype(gate.dtype)

    return named_as(WideGate, kind)


def wide_scans(model: nn.Module, published: Published) -> None:
    """Mamba 2: transformers rounds what leaves the recurrence only behind its norm; the class
    rounds it, its residual and the gated product to the model's type."""
    for module in model.modules():
        if hasattr(module, "_ssm"):
            module.__class__ = _wide_scan(type(module))
            module.norm.__class__ = _wide_gate(type(module.norm))


_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def stacked_experts(model: nn.Module, published: Published) -> None:
    """Qwen3.5-MoE as transformers 5 saves it: an array for each expert; the class reads them
    stacked, as the hub's files have them."""
    model.__class__ = reading(type(model), _stacked)


def _stacked(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    parts: dict[str, dict[str, dict[int, mx.array]]] = {}
    rest: Weights = {}
    for name, array in weights.items():
        if match := _EXPERT.match(name):
            kinds = parts.setdefault(match[1], {})
            kinds.setdefault(match[3], {})[int(match[2])] = array
        else:
            rest[name] = array
    for prefix, kinds in parts.items():
        stacks = {
            kind: mx.stack([arrays[i] for i in sorted(arrays)]) for kind, arrays in kinds.items()
        }
        rest[f"{prefix}.gate_up_proj"] = mx.concatenate([stacks["gate"], stacks["up"]], axis=1)
        rest[f"{prefix}.down_proj"] = stacks["down"]
    return sanitize(rest)


_ONE_MORE = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)


class WideNorm(nn.RMSNorm):
    """Holds its weights in float32 in a model of every type, and computes in it."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x.astype(mx.float32), self.weight, self.eps).astype(x.dtype)


def _with_wide_norms(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    return sanitize(
        {
            name: array.astype(mx.float32)
            if array.ndim == 1 and name.endswith(_ONE_MORE)
            else array
            for name, array in weights.items()
        }
    )


def wide_norms(model: nn.Module, published: Published) -> None:
    """Qwen3-Next, Qwen3.5, Step 3.5: `sanitize` adds 1 to the norms' weights in the checkpoint's
    type, which rounds them."""
    for module in model.modules():
        if type(module) is nn.RMSNorm or type(module).__name__ == "ZeroCenteredRMSNorm":
            module.__class__ = WideNorm
    model.__class__ = reading(type(model), _with_wide_norms)


def check_one_head(model: Any, weights: Weights, sanitize: Sanitize) -> Weights:
    """A tied head: mlx-lm leaves out a head of the checkpoint's own. Raises ValueError: there is
    one, and transformers computes with it."""
    heads = [name for name in weights if name.endswith("lm_head.weight")]
    embeddings = [name for name in weights if name.endswith("embed_tokens.weight")]
    pairs = [(head, embedding) for head in heads[:1] for embedding in embeddings[:1]]
    stored = [(weights[head], weights[embedding]) for head, embedding in pairs]
    read = sanitize(weights)
    if any(name.endswith("lm_head.weight") for name in read):
        return read
    for (head, embedding), (one, other) in zip(pairs, stored, strict=True):
        if one.shape == other.shape and not mx.array_equal(one, other).item():
            raise ValueError(
                f"config.json has tie_word_embeddings = true, and {head} is not {embedding}:"
                " transformers computes with both, so set tie_word_embeddings = false, or delete"
                f" {head}"
            )
    return read


def set_dtype(model: nn.Module, dtype: mx.Dtype) -> None:
    """Give a model's arrays a type, in place, but for those that are wide in every type."""
    wide = [(norm, norm.weight) for norm in model.modules() if isinstance(norm, WideNorm)]
    model.set_dtype(dtype)
    for norm, weight in wide:
        norm.weight = weight.astype(mx.float32)
