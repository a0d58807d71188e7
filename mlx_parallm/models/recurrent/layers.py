"""Puts the recurrences in chunks (`chunks.py`) in the place of mlx-lm's loops over tokens.

    use_chunks      in the layers of a model: training, and prompts if there is no Metal kernel
    use_trees       the same layers, convolutions and Mamba 2 go over a forest of tokens (`tree.py`)
                    where their thread does

A few tokens, such as a decode step's, keep mlx-lm's own step; so does everything in front of the
recurrence. On Metal mlx-lm's kernels stay in use: in evaluation mode, without a
gradient.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_parallm.models.mlx_lm_api import chunked_simple_decay, ssm_steps
from mlx_parallm.models.recurrent.chunks import linear_scan, selective_scan
from mlx_parallm.models.recurrent.fast_paths import gated_delta
from mlx_parallm.models.recurrent.tree import (
    TokenTree,
    convolve,
    current_tree,
    tree_gated_delta,
    tree_selective_scan,
    tree_ssd,
)
from mlx_parallm.system.log import get_logger

log = get_logger(__name__)
FEWEST_TOKENS = 8  # with fewer, a loop over tokens is as fast
Layer = Any


def use_chunks(model: nn.Module) -> list[str]:
    """Replace the loops over tokens that the model's layers call; returns the names of those
    replaced, for the process.

    A function of the same name with other parameters is left as it is, with a warning: the model
    trains as slowly as mlx-lm does.
    """
    replaced = []
    for kind, path in _kinds(model):
        replace = partial(_replace, f"{path} ({kind.__name__})")
        names = vars(sys.modules[kind.__module__])
        # imported by name; it calls its own global
        if (update := names.get("gated_delta_update")) is not None:
            replaced += replace(
                inspect.unwrap(update).__globals__, "gated_delta_ops", _gated_delta_ops
            )
        replaced += replace(names, "rnn_scan", _rnn_scan)
        if kind.__module__.rpartition(".")[2] == "bailing_moe_linear":
            replaced += replace(names, "recurrent_gla", _recurrent_gla)
        if kind.__name__ == "MambaBlock":
            replaced += replace(kind, "_process_sequence", _mamba_sequence)
        if kind.__name__ == "JambaMambaMixer":
            replaced += replace(kind, "ssm_step", _jamba_step)
    return replaced


def use_trees(model: nn.Module) -> None:
    """Let what `use_chunks` does not replace go over a forest, too; for the process. A function
    that is not mlx-lm's is left as it is, with a warning: `TreeOfRows` refuses its layer."""
    for kind, path in _kinds(model):
        replace = partial(_replace, f"{path} ({kind.__name__})")
        names = vars(sys.modules[kind.__module__])
        if (update := names.get("gated_delta_update")) is not None:
            replace(inspect.unwrap(update).__globals__, "gated_delta_kernel", _gated_delta_kernel)
        if (update := names.get("ssm_update")) is not None:
            replace(inspect.unwrap(update).__globals__, "ssm_attn", _ssm_attn)
        if kind.__module__.rpartition(".")[2] == "bailing_hybrid":
            replace(names, "recurrent_gla", _gla_in_chunks)
        if kind is nn.Conv1d:
            replace(nn.Conv1d, "__call__", _conv1d)


def _kinds(model: nn.Module) -> list[tuple[type, str]]:
    """Return the classes of the modules, and the path of the first module of each. MLX goes from
    the last layer to the first."""
    return list({type(module): path for path, module in model.named_modules()}.items())


def _replace(layer: str, owner: Any, name: str, make: Callable[[Any], Any]) -> list[str]:
    """Replace `owner[name]`, or the method of a class, by `make(original)`, once. `layer`: for
    the warning."""
    names = owner if isinstance(owner, dict) else vars(owner)
    original = names.get(name)
    if original is None or hasattr(original, "by_token"):
        return []
    chunked = make(original)
    parameters, expected = (
        list(inspect.signature(function).parameters) for function in (original, chunked)
    )
    if parameters != expected:
        reason = f"{name}({', '.join(parameters)}) is not mlx-lm's {name}({', '.join(expected)})"
        log.warning("a recurrent layer goes token by token", layer=layer, reason=reason)
        return []
    chunked.by_token = original
    if isinstance(owner, dict):
        owner[name] = chunked
    else:
        setattr(owner, name, chunked)
    return [name]


def _gated_delta_ops(by_token: Callable[..., Any]) -> Callable[..., Any]:
    def gated_delta_ops(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        if (tree := current_tree()) is not None:
            return tree_gated_delta(tree, q, k, v, g, beta), state
        if q.shape[1] < FEWEST_TOKENS:
            return by_token(q, k, v, g, beta, state, mask)
        return gated_delta(q, k, v, g, beta, state, mask)

    return gated_delta_ops


def _gated_delta_kernel(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def gated_delta_kernel(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        if (tree := current_tree()) is not None:
            return tree_gated_delta(tree, q, k, v, g, beta), state
        computed: tuple[mx.array, mx.array] = kernel(q, k, v, g, beta, state, mask)
        return computed

    return gated_delta_kernel


def _ssm_attn(in_rows: Callable[..., Any]) -> Callable[..., Any]:
    def ssm_attn(
        x: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
        step: int = 256,
    ) -> tuple[mx.array, mx.array | None]:
        if (tree := current_tree()) is None:
            computed: tuple[mx.array, mx.array] = in_rows(
                x, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths, step
            )
            return computed
        dt = ssm_steps(dt, dt_bias, time_step_limit)
        log_decay = dt * -mx.exp(A_log).astype(dt.dtype)
        inputs = (dt[..., None] * x, log_decay, B, C)
        y = tree_ssd(tree, *(array.flatten(0, 1) for array in inputs))
        return y.reshape(x.shape).astype(x.dtype) + x * D[:, None], state

    return ssm_attn


def _conv1d(in_rows: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Layer, x: mx.array) -> mx.array:
        if (tree := current_tree()) is None:
            convolved: mx.array = in_rows(self, x)
            return convolved
        rows, kernel = x.shape[0], self.weight.shape[1]
        x = x[:, kernel - 1 :]  # behind an empty state
        if self.weight.shape[2] != 1 or rows * x.shape[1] != tree.width:
            raise ValueError("its convolution looks at other tokens, or mixes channels")
        out = convolve(tree, x.flatten(0, 1), self.weight, self.get("bias"))
        return out.reshape(rows, -1, out.shape[-1])

    return __call__


def _recurrent_gla(by_token: Callable[..., Any]) -> Callable[..., Any]:
    def recurrent_gla(
        q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float, h: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        if (tree := current_tree()) is not None:
            return _gla_over(tree, q, k, v, g, scale), h
        if q.shape[2] < FEWEST_TOKENS:
            return by_token(q, k, v, g, scale, h)
        y, state = chunked_simple_decay(q, k, v, g, scale=scale, h=h)
        return y, state.astype(q.dtype)

    return recurrent_gla


def _gla_in_chunks(in_rows: Callable[..., Any]) -> Callable[..., Any]:
    def recurrent_gla(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        *,
        scale: float,
        h: mx.array | None = None,
        mask: mx.array | None = None,
        chunk: int = 128,
    ) -> tuple[mx.array, mx.array | None]:
        if (tree := current_tree()) is not None:
            return _gla_over(tree, q, k, v, g, scale), h
        y, state = in_rows(q, k, v, g, scale=scale, h=h, mask=mask, chunk=chunk)
        return y, state

    return recurrent_gla


def _gla_over(
    tree: TokenTree, q: mx.array, k: mx.array, v: mx.array, g: mx.array, scale: float
) -> mx.array:
    """Lightning attention: h ← e^g h + k ⊗ v; y = q h, of [B, H, T, D] tokens and one g a head."""
    c, b, x = (array.swapaxes(1, 2).flatten(0, 1) for array in (q * scale, k, v))
    y = tree_ssd(tree, x, mx.broadcast_to(g, x.shape[:2]), b, c)
    return y.reshape(v.swapaxes(1, 2).shape).swapaxes(1, 2).astype(q.dtype)


def _rnn_scan(by_token: Callable[..., Any]) -> Callable[..., Any]:
    def rnn_scan(x: mx.array, a: mx.array, h0: mx.array | None) -> tuple[mx.array, mx.array]:
        if x.shape[1] < FEWEST_TOKENS:
            return by_token(x, a, h0)
        h = linear_scan(a, x, h0)
        return h, h[:, -1]

    return rnn_scan


def _mamba_sequence(by_token: Callable[..., Any]) -> Callable[..., Any]:
    def _process_sequence(
        self: Layer, x: mx.array, conv_cache: mx.array | None, state_cache: mx.array | None
    ) -> tuple[mx.array, tuple[mx.array, mx.array | None]]:
        if x.shape[1] < FEWEST_TOKENS and current_tree() is None:
            return by_token(self, x, conv_cache, state_cache)
        x, z = self.in_proj(x).split(indices_or_sections=2, axis=-1)
        before = self.conv_kernel_size - 1
        window = (
            mx.pad(x, [(0, 0), (before, 0), (0, 0)])
            if conv_cache is None
            else mx.concatenate([conv_cache, x], axis=1)
        )
        x = nn.silu(self.conv1d(window))
        delta, b, c = _selected(self, x)
        if self.use_bcdt_rms:
            eps = self.args.mixer_rms_eps
            delta, b, c = (mx.fast.rms_norm(array, weight=None, eps=eps) for array in (delta, b, c))
        wide = mx.result_type(x, self.A_log)  # in mlx-lm's loop a float32 A makes a float32 state
        y, state = _scanned(self, x.astype(wide), delta, b, c, state_cache)
        return self.out_proj(nn.silu(z) * y), (window[:, -before:], state)

    return _process_sequence


def _jamba_step(by_token: Callable[..., Any]) -> Callable[..., Any]:
    def ssm_step(
        self: Layer, x: mx.array, A: mx.array, state: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        if x.shape[1] < FEWEST_TOKENS and current_tree() is None:
            return by_token(self, x, A, state)
        delta, b, c = _selected(self, x)
        norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        delta, b, c = (norm(array) for norm, array in zip(norms, (delta, b, c), strict=True))
        return _scanned(self, x, delta, b, c, state)

    return ssm_step


def _selected(layer: Layer, x: mx.array) -> Any:
    """δ before its projection, B and C of Mamba's layer."""
    places = [layer.time_step_rank, layer.time_step_rank + layer.ssm_state_size]
    return mx.split(layer.x_proj(x), places, axis=-1)


def _scanned(
    layer: Layer, x: mx.array, delta: mx.array, b: mx.array, c: mx.array, state: mx.array | None
) -> tuple[mx.array, mx.array | None]:
    inputs = x, nn.softplus(layer.dt_proj(delta)), -mx.exp(layer.A_log), b, c
    if (tree := current_tree()) is not None:
        return tree_selective_scan(tree, *inputs) + layer.D * x, state
    y, state = selective_scan(*inputs, state)
    return y + layer.D * x, state
