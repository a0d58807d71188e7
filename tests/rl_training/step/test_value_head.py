"""The value head beside the language model's: values and gradients against the plain whole
graph, in every path."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
from mlx_parallm.models.heads.value_head import (
    attach_value_head,
    value_head_of,
    without_value_head,
)
from mlx_parallm.models.layouts.layout import share_prompts
from tests.rl_training.step.test_blockwise import Glued, residual, with_full_weights, with_lora
from tests.rl_training.tiny_models import make_model

RNG = np.random.default_rng(0)
BATCH = TokenBatch(
    inputs=mx.array(RNG.integers(0, 40, (4, 12)), mx.int32),
    positions=mx.array(np.sort(RNG.choice(np.arange(48), 19, replace=False)), mx.int32),
    targets=mx.array(RNG.integers(0, 40, 19), mx.int32),
)
TARGETS = mx.array(RNG.normal(size=19).astype(np.float32))


def with_head(model: nn.Module) -> nn.Module:
    """A head that says something: at 0 it would hide what reaches the model."""
    attach_value_head(model)
    head = value_head_of(model)
    assert head is not None
    mx.random.seed(5)
    head.weight, head.bias = 3.0 * mx.random.normal(head.weight.shape), mx.array([0.2])
    mx.eval(model.parameters())
    return model


def objective(
    logprobs: mx.array, entropy: mx.array, values: mx.array
) -> tuple[mx.array, tuple[mx.array, ...]]:
    return (mx.exp(0.1 * logprobs) + 0.3 * entropy + 2.0 * mx.square(values - TARGETS)).sum(), (
        values,
    )


def whole_graph(model: nn.Module) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
    """The naive twin: the architecture's layers one after the other, MLX's own value_and_grad
    over all of it."""

    def loss(model: nn.Module) -> tuple[mx.array, mx.array]:
        hidden = model.model.embed_tokens(BATCH.inputs)
        for layer in model.model.layers:
            hidden = layer(hidden, "causal", None)
        rows = hidden.reshape(-1, hidden.shape[-1])[BATCH.positions]
        unit = rows / mx.sqrt((rows * rows).mean(-1, keepdims=True) + 1e-6)
        values = (unit @ model.value_head.weight.T)[:, 0] / 32 + model.value_head.bias
        normed = model.model.norm(rows)
        logits = (
            model.lm_head(normed)
            if "lm_head" in model
            else model.model.embed_tokens.as_linear(normed)
        )
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, BATCH.targets[:, None], axis=-1)[:, 0]
        return objective(chosen, -(mx.exp(logprobs) * logprobs).sum(-1), values)[0], values

    (value, values), gradients = nn.value_and_grad(model, loss)(model)
    return value, values, dict(nn.utils.tree_flatten(gradients))


def compare(
    parts: BlockwiseModel, expected: tuple[mx.array, mx.array, dict[str, mx.array]]
) -> None:
    value, (values,), gradients = parts.loss_and_gradients(BATCH, objective)
    assert value.item() == pytest.approx(expected[0].item(), rel=1e-5)
    np.testing.assert_allclose(values, expected[1], atol=1e-5)
    np.testing.assert_allclose(parts.score(BATCH)[2], expected[1], atol=1e-5)
    assert {"value_head.weight", "value_head.bias"} <= set(parts.slots.names) == set(expected[2])
    for name, gradient in zip(parts.slots.names, gradients, strict=True):
        scale = mx.abs(expected[2][name]).max().item()
        np.testing.assert_allclose(
            gradient, expected[2][name], atol=1e-5 * scale + 1e-6, err_msg=name
        )
        assert scale > 1e-4, name


@pytest.mark.parametrize("path", ["fused", "chunked", "blocks", "whole"])
@pytest.mark.parametrize("prepare", [with_lora, with_full_weights])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_values_and_gradients_are_the_whole_graphs(
    architecture: str,
    prepare: Callable[[nn.Module], nn.Module],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = with_head(prepare(make_model(architecture)))
    parts = BlockwiseModel(model, blocks_per_eval=2 if path == "blocks" else 1)
    assert not parts.fallback
    if path == "chunked":
        monkeypatch.setattr(parts, "_chunks", lambda _: [slice(0, 7), slice(7, 14), slice(14, 19)])
    if path == "whole":  # what architectures get that cannot be taken apart
        parts._stack = None
    compare(parts, whole_graph(model))


def test_finite_differences() -> None:
    """Along the gradient of the head, and along that of the adapter by the values alone."""
    parts = BlockwiseModel(with_head(with_lora(make_model())), blocks_per_eval=1)

    def of_values(
        _: mx.array, __: mx.array, values: mx.array
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        return mx.square(values - TARGETS).sum(), ()

    _, _, gradients = parts.loss_and_gradients(BATCH, of_values)
    start = parts.slots.read()
    for head in (True, False):
        along = [
            g if name.startswith("value_head.") == head else mx.zeros_like(g)
            for name, g in zip(parts.slots.names, gradients, strict=True)
        ]
        size = sum(mx.square(g).sum().item() for g in along)
        step, found = 1e-2 / size**0.5, []
        for sign in (1.0, -1.0):
            parts.slots.write([p + sign * step * g for p, g in zip(start, along, strict=True)])
            found.append(of_values(*parts.score(BATCH))[0].item())
        parts.slots.write(start)
        assert size > 1e-2
        assert (found[0] - found[1]) / (2 * step) == pytest.approx(size, rel=1e-2)


def test_with_prompts_that_are_computed_once() -> None:
    model = with_head(with_lora(make_model()))
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert parts.shares_prompts
    tokens = np.array([[1, 2, 3, 4, 5, 6], [1, 2, 3, 5, 4, 0], [2, 4, 6, 1, 3, 5]], np.int32)
    positions = np.array([2, 4, 5, 8, 9, 13, 15, 17], np.int32)
    apart = TokenBatch(mx.array(tokens), mx.array(positions), mx.arange(8, dtype=mx.int32) % 7)
    together = TokenBatch(
        apart.inputs, apart.positions, apart.targets, compact=share_prompts(tokens, positions)
    )

    def of_values(
        _: mx.array, __: mx.array, values: mx.array
    ) -> tuple[mx.array, tuple[mx.array, ...]]:
        return mx.square(values - TARGETS[:8]).sum(), (values,)

    _, (expected,), gradients = parts.loss_and_gradients(apart, of_values)
    _, (found,), shared = parts.loss_and_gradients(together, of_values)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for a, b in zip(shared, gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * mx.abs(b).max().item() + 1e-7)


def test_it_starts_at_zero_in_float32_whatever_the_model_is() -> None:
    model = make_model()
    model.set_dtype(mx.bfloat16)
    attach_value_head(with_full_weights(model))
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert not parts.fallback
    values = parts.score(BATCH)[2]
    assert values.dtype == mx.float32
    np.testing.assert_array_equal(values, np.zeros(19, np.float32))
    slots = dict(zip(parts.slots.names, parts.slots.read(), strict=True))
    assert slots["value_head.weight"].dtype == slots["value_head.bias"].dtype == mx.float32
    _, _, gradients = parts.loss_and_gradients(BATCH, objective)
    found = dict(zip(parts.slots.names, gradients, strict=True))
    assert np.isfinite(found["value_head.weight"]).all()
    assert mx.abs(found["value_head.weight"]).max().item() > 0.1, (
        "at zero it is the head that learns first"
    )


def test_the_embedding_is_not_differentiated_for_it() -> None:
    """With an adapter as many evaluations as without the head."""

    def evaluations(model: nn.Module) -> int:
        turns: list[int] = []
        parts = BlockwiseModel(model, between_blocks=lambda: turns.append(1), blocks_per_eval=1)
        turns.clear()
        parts.loss_and_gradients(BATCH, lambda logprobs, *_: (logprobs.sum(), ()))
        return len(turns)

    assert evaluations(with_head(with_lora(make_model()))) == evaluations(with_lora(make_model()))


def test_it_can_be_taken_out() -> None:
    model = with_head(make_model())
    with without_value_head(model):
        assert "value_head" not in dict(model.parameters())
    assert value_head_of(model) is not None
    with without_value_head(plain := make_model()):
        pass
    assert value_head_of(plain) is None


class Layerless(nn.Module):
    def __call__(self, tokens: mx.array) -> mx.array:
        return tokens[..., None].astype(mx.float32)


class Streams(nn.Module):
    """Its blocks pass two hidden states on, as Gemma 3n's do several."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Identity()]

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden = mx.stack([tokens[..., None].astype(mx.float32)] * 2)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.mean(axis=0)


@pytest.mark.parametrize(
    ("model", "why"), [(Layerless(), "no list of layers"), (Streams(), "not one vector a token")]
)
def test_models_without_a_hidden_state_are_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        attach_value_head(model)


def test_an_architecture_that_cannot_be_taken_apart() -> None:
    """One graph, and the head still on what left the last block."""
    model = with_head(with_full_weights(Glued(residual)))
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert parts.fallback

    def of_values(model: nn.Module) -> tuple[mx.array, mx.array]:
        first = hidden = model.embed(BATCH.inputs)
        for layer in model.layers:
            hidden = layer(hidden + first)
        rows = hidden.reshape(-1, 16)[BATCH.positions]
        unit = rows / mx.sqrt((rows * rows).mean(-1, keepdims=True) + 1e-6)
        values = (unit @ model.value_head.weight.T)[:, 0] / 16 + model.value_head.bias
        return mx.square(values - TARGETS).sum(), values

    (_, expected), gradients = nn.value_and_grad(model, of_values)(model)
    twins = dict(nn.utils.tree_flatten(gradients))
    _, (values,), found = parts.loss_and_gradients(
        BATCH, lambda _, __, v: (mx.square(v - TARGETS).sum(), (v,))
    )
    np.testing.assert_allclose(values, expected, atol=1e-5)
    for name, gradient in zip(parts.slots.names, found, strict=True):
        np.testing.assert_allclose(
            gradient, twins[name], atol=1e-5 * mx.abs(twins[name]).max().item() + 1e-7
        )
    assert mx.abs(twins["embed.weight"]).max().item() > 1e-3
