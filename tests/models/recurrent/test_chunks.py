"""The recurrences in chunks against loops over tokens in float64, values and gradients, and in
mlx-lm's own layers."""

import importlib
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from structlog.testing import capture_logs

from mlx_parallm.models.recurrent import layers as recurrent_layers
from mlx_parallm.models.recurrent.chunks import gated_delta, linear_scan, selective_scan
from mlx_parallm.models.support import layers_by_token
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from scripts.generate_model_table import small_model
from tests.rl_training.making import make_config
from tests.rl_training.rollouts import make_batch, random_groups


def gated_delta_loop(q, k, v, decay, beta, state, mask=None):
    """S ← e^g S; S ← S + β(v - S k) ⊗ k; o = S q, with S [Dv, Dk], token by token."""
    q, k = (mx.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k))
    outputs = []
    for t in range(q.shape[1]):
        fade = decay[:, t, :, None, None] if decay.ndim == 3 else decay[:, t, :, None, :]
        faded = state * fade
        change = beta[:, t, :, None] * (v[:, t] - (faded @ k[:, t, :, :, None])[..., 0])
        new = faded + change[..., None] * k[:, t, :, None, :]
        state = new if mask is None else mx.where(mask[:, t, None, None, None], new, state)
        outputs.append((state @ q[:, t, :, :, None])[..., 0])
    return mx.stack(outputs, axis=1), state


def linear_loop(decay, x, state):
    outputs = []
    for t in range(x.shape[1]):
        state = decay[:, t] * state + x[:, t]
        outputs.append(state)
    return mx.stack(outputs, axis=1), state


def selective_loop(x, delta, a, b, c, state):
    outputs = []
    for t in range(x.shape[1]):
        state = (
            mx.exp(delta[:, t, :, None] * a) * state
            + (delta[:, t] * x[:, t])[..., None] * b[:, t, None, :]
        )
        outputs.append((state * c[:, t, None, :]).sum(axis=-1))
    return mx.stack(outputs, axis=1), state


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def decays(numbers: np.random.Generator, shape: tuple[int, ...], strongest: float) -> np.ndarray:
    """Between 1 and e^-strongest, most of them weak, so that weak ones follow strong ones."""
    return np.exp(-strongest * numbers.random(shape) ** 4)


def delta_inputs(seed: int) -> list[np.ndarray]:
    """Ragged lengths, heads that share keys, keys that repeat, strong and weak decays, one gate
    or one a channel."""
    numbers, choose = np.random.default_rng(seed), random.Random(seed)
    batch, length, groups, width = (
        choose.randint(1, 2),
        choose.randint(1, 150),
        choose.randint(1, 2),
        choose.choice((4, 8)),
    )
    key_heads, key = choose.randint(1, 2), choose.choice((4, 16))
    heads = key_heads * groups
    k = unit(numbers.normal(size=(batch, length, key_heads, key)))
    if seed % 3 == 0:
        # nearly the same key again and again: (I + A)⁻¹ by powers of A would lose all
        k = unit(k[:, :1] + 0.05 * k)
    gates = (batch, length, heads, key) if seed % 2 else (batch, length, heads)
    return [
        unit(numbers.normal(size=(batch, length, key_heads, key))),
        k,
        numbers.normal(size=(batch, length, heads, width)),
        decays(numbers, gates, choose.choice((0.1, 5.0, 30.0))),
        2 * numbers.random((batch, length, heads)) ** 0.5,
        numbers.normal(size=(batch, heads, width, key)),
    ]


def check(chunked: Any, loop: Any, inputs: list[np.ndarray], *, bound: float = 1e-5) -> None:
    """Values, the last state and all gradients, as far apart as `bound` of the largest number at
    most."""
    with mx.stream(mx.cpu):
        exact = [mx.array(x, mx.float64) for x in inputs]
        single = [mx.array(x, mx.float32) for x in inputs]
        weights = [np.random.default_rng(1).normal(size=output.shape) for output in loop(*exact)]

        def slopes(function: Any, arrays: list[mx.array]) -> list[mx.array]:
            kind = arrays[0].dtype
            outputs, gradients = mx.vjp(function, arrays, [mx.array(w, kind) for w in weights])
            mx.eval(outputs, gradients)
            return [*outputs, *gradients]

        for ours, expected in zip(slopes(chunked, single), slopes(loop, exact), strict=True):
            reference = np.array(expected)
            assert ours.dtype == mx.float32
            assert np.abs(np.array(ours) - reference).max() <= bound * max(
                np.abs(reference).max(), 1e-3
            )


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 200))]
)
def test_gated_delta_is_the_loop(seed):
    check(gated_delta, gated_delta_loop, delta_inputs(seed))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129])
def test_ends_of_chunks(length):
    inputs = delta_inputs(4)
    inputs = [
        np.resize(x, (x.shape[0], length, *x.shape[2:])) if i < 5 else x
        for i, x in enumerate(inputs)
    ]
    check(gated_delta, gated_delta_loop, inputs)


def test_one_key_again_and_again_is_learned_once():
    """With the key e, β = 1 and no decay the state holds the last value alone: the output of q =
    e is v_t, exactly."""
    k = mx.zeros((1, 100, 1, 4)).at[..., 0].add(1.0)
    v = mx.random.normal((1, 100, 1, 3), key=mx.random.key(0))
    y, state = gated_delta(k, k, v, mx.ones((1, 100, 1)), mx.ones((1, 100, 1)))
    np.testing.assert_allclose(np.array(y), np.array(v), atol=1e-6)
    np.testing.assert_allclose(np.array(state)[0, 0, :, 0], np.array(v)[0, -1, 0], atol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_padding_leaves_the_state_as_it_is(seed):
    """A row of 37 tokens padded on both sides to 90: the same outputs where it is, the same last
    state."""
    inputs = [mx.array(x, mx.float32) for x in delta_inputs(seed)]
    row = [x[:1, :37] if i < 5 else x[:1] for i, x in enumerate(inputs)]
    row = [mx.concatenate([x, *[x] * 3], axis=1)[:, :37] if i < 5 else x for i, x in enumerate(row)]
    wanted, last = gated_delta(*row)
    padded = [
        mx.pad(x, [(0, 0), (20, 33), *[(0, 0)] * (x.ndim - 2)], constant_values=0.3)
        for x in row[:5]
    ]
    places = mx.arange(90)[None]
    y, state = gated_delta(*padded, row[5], mask=(places >= 20) & (places < 57))
    np.testing.assert_allclose(np.array(y[:, 20:57]), np.array(wanted), atol=1e-5)
    np.testing.assert_allclose(np.array(state), np.array(last), atol=1e-5)


def test_half_precision_comes_back_as_such_and_is_computed_in_float32():
    inputs = [mx.array(x, mx.float32) for x in delta_inputs(7)]
    half = [x.astype(mx.bfloat16) for x in inputs[:3]]
    y, state = gated_delta(*half, *inputs[3:])
    wanted, last = gated_delta(*[x.astype(mx.float32) for x in half], *inputs[3:])
    assert (y.dtype, state.dtype) == (mx.bfloat16, mx.float32)
    np.testing.assert_array_equal(
        np.array(y.astype(mx.float32)), np.array(wanted.astype(mx.bfloat16).astype(mx.float32))
    )
    np.testing.assert_array_equal(np.array(state), np.array(last))


@pytest.mark.parametrize(("length", "strongest"), [(1, 1.0), (31, 30.0), (32, 0.1), (100, 5.0)])
def test_linear_scan_is_the_loop(length, strongest):
    numbers = np.random.default_rng(length)
    shape = (2, length, 5)
    inputs = [
        decays(numbers, shape, strongest),
        numbers.normal(size=shape),
        numbers.normal(size=(2, 5)),
    ]

    def chunked(*arrays: mx.array) -> tuple[mx.array, mx.array]:
        h = linear_scan(*arrays)
        return h, h[:, -1]

    check(chunked, linear_loop, inputs)


@pytest.mark.parametrize(("length", "strongest"), [(1, 0.1), (17, 3.0), (64, 0.1), (300, 1.0)])
def test_selective_scan_is_the_loop(length, strongest):
    numbers = np.random.default_rng(length)
    rows, states = (2, length, 6), (2, length, 4)
    a = -np.tile(np.arange(1.0, 5.0), (6, 1)) * strongest
    inputs = [
        numbers.normal(size=rows),
        numbers.random(rows),
        a,
        numbers.normal(size=states),
        numbers.normal(size=states),
    ]
    check(selective_scan, selective_loop, [*inputs, numbers.normal(size=(2, 6, 4))])


RECURRENT = {  # architecture: what its layers call in chunks
    "qwen3_5": "gated_delta",
    "qwen3_next": "gated_delta",
    "kimi_linear": "gated_delta",
    "olmo_hybrid": "gated_delta",
    "bailing_moe_v3": "gated_delta",
    "bailing_moe_linear": "chunked_simple_decay",
    "recurrent_gemma": "linear_scan",
    "mamba": "selective_scan",
    "jamba": "selective_scan",
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_models_layers_compute_in_chunks_what_they_computed_token_by_token(name, monkeypatch):
    """Logits and gradients of the whole model, and logits that continue from a cache; the loop is
    not called any more."""
    model = small_model(name)
    model.train()
    tokens = (mx.arange(70, dtype=mx.int32) * 7 % 50)[None]

    def computed() -> list[mx.array]:
        weights = mx.random.normal((1, 70, 1), key=mx.random.key(3))
        gradients = mx.grad(lambda p: (model.update(p), (model(tokens) * weights).sum())[1])(before)
        model.update(before)
        cache = model.make_cache()
        parts = [
            model(tokens[:, part], cache=cache)
            for part in (slice(0, 40), slice(40, 69), slice(69, 70))
        ]
        arrays = [value for _, value in sorted(tree_flatten(gradients))]
        return [model(tokens), mx.concatenate(parts, axis=1), *arrays]

    before, calls = model.trainable_parameters(), []
    recurrence = getattr(recurrent_layers, RECURRENT[name])
    counted = lambda *args, **options: (calls.append(name), recurrence(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(recurrent_layers, RECURRENT[name], counted)
    chunked = computed()
    assert calls
    calls.clear()
    monkeypatch.setattr(recurrent_layers, "FEWEST_TOKENS", 1000)
    by_token = computed()
    assert not calls
    for ours, expected in zip(chunked, by_token, strict=True):
        scale = max(mx.abs(expected).max().item(), 1e-3)
        assert mx.abs(ours - expected).max().item() <= 2e-5 * scale


@pytest.mark.parametrize("kept", [mx.float32, mx.bfloat16])
def test_a_mamba_layers_types_are_those_of_the_loop(kept, monkeypatch):
    """A checkpoint in bfloat16 whose A is float32, as Mamba's are: logits and states are
    float32, as mlx-lm's."""
    model = small_model("mamba")
    named = tree_flatten(model.parameters())
    model.load_weights(
        [(path, x.astype(kept if path.endswith("A_log") else mx.bfloat16)) for path, x in named]
    )
    tokens = (mx.arange(40, dtype=mx.int32) * 7 % 50)[None]

    def types() -> list[mx.Dtype]:
        cache = model.make_cache()
        logits = model(tokens, cache=cache)
        return [logits.dtype, *[state.dtype for layer in cache for state in layer.cache]]

    recurrent_layers.use_chunks(model)
    chunked = types()
    monkeypatch.setattr(recurrent_layers, "FEWEST_TOKENS", 1000)
    assert chunked == types() and chunked[0] == kept


@pytest.fixture
def other_sequence(monkeypatch):
    """A MambaBlock as another release might write it: its recurrence takes one more argument."""
    block = importlib.import_module("mlx_lm.models.mamba").MambaBlock
    by_token = getattr(block._process_sequence, "by_token", block._process_sequence)

    def _process_sequence(self, x, conv_cache, state_cache, reverse=False):
        return by_token(self, x, conv_cache, state_cache)

    monkeypatch.setattr(block, "_process_sequence", _process_sequence)
    return _process_sequence


def test_a_layer_without_a_form_in_chunks_trains_as_it_is_and_is_named(
    other_sequence, informative_logs
):
    """The warning at load names the layer, its class and the function; the one of the trainer
    names the layers."""
    with capture_logs() as logs:
        model = small_model("mamba")
    assert type(model.layers[0].mixer)._process_sequence is other_sequence
    [warning] = [log for log in logs if log["log_level"] == "warning"]
    assert warning["layer"] == "backbone.layers.0.mixer (MambaBlock)"
    assert (
        "_process_sequence(self, x, conv_cache, state_cache, reverse) is not mlx-lm's"
        in warning["reason"]
    )
    assert layers_by_token(model) == ["layer 0 (mixer: MambaBlock)"] and not model.training
    with capture_logs() as logs:
        config = make_config(batch=8)
        options = config
        policy = TrainedPolicy(
            model,
            options,
            source=Path(__file__).parent,
            model_config={"model_type": "mamba"},
        )
        trainer = Trainer(policy, options, make_algorithm(config))
    [warning] = [log for log in logs if log["event"] == "a layer trains slowly"]
    assert (
        warning["layer"] == "layer 0 (mixer: MambaBlock)"
        and "one token after another" in warning["reason"]
    )
    result = trainer.train_step(make_batch(random_groups(2)))
    assert result.finished and result.metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3_5", "kimi_linear", "mamba", "jamba", "mamba2", "recurrent_gemma"]
)
def test_no_other_layer_is_named(name):
    assert layers_by_token(small_model(name)) == []


def test_each_kind_of_layer_is_named_with_its_number():
    names = layers_by_token(small_model("rwkv7"))
    assert names == ["layer 0 (attn: Rwkv7TimeMixing)", "layer 1 (attn: Rwkv7TimeMixing)"]
