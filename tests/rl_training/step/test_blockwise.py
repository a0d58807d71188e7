"""Block by block = the whole graph, for several architectures, adapters, full weights and a
4-bit base."""

import copy
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.models import blockwise
from mlx_parallm.models.blockwise import BlockwiseModel, TokenBatch
from mlx_parallm.models.cpu import kernels, unpacking
from mlx_parallm.models.heads import language_head as head
from mlx_parallm.models.layer_stack import LayerStack
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import inject_lora, trainer_lora_layers
from scripts.generate_model_table import small_model
from tests.rl_training.tiny_models import make_model
from tests.tiny_models import lora_config

ARCHITECTURES = ["qwen3", "llama", "gemma2", "gemma3_text", "gptj"]
"""GPT-J's blocks take the hidden state by keyword."""


def with_lora(model: nn.Module) -> nn.Module:
    inject_lora(model, lora_config(rank=4, alpha=8.0))
    for layer in trainer_lora_layers(model).values():
        # B = 0 would hide the gradients of A
        layer.lora_b = 0.3 * mx.random.normal(layer.lora_b.shape)
    mx.eval(model.parameters())
    return model


def with_full_weights(model: nn.Module) -> nn.Module:
    model.unfreeze()
    return model


def with_4_bit_base(model: nn.Module) -> nn.Module:
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: isinstance(m, nn.Linear))
    return with_lora(model)


def with_an_unpacked_base(model: nn.Module) -> nn.Module:
    model = with_4_bit_base(model)
    assert unpacking.use_unpacking(model)
    return model


def batch() -> TokenBatch:
    rng = np.random.default_rng(0)
    positions = np.sort(rng.choice(np.arange(4 * 12), 19, replace=False))
    return TokenBatch(
        inputs=mx.array(rng.integers(0, 40, (4, 12)), mx.int32),
        positions=mx.array(positions, mx.int32),
        targets=mx.array(rng.integers(0, 40, 19), mx.int32),
        temperature=mx.array(rng.uniform(0.5, 2.0, 19).astype(np.float32)),
    )


WEIGHTS = mx.array(np.linspace(-1, 1, 19).astype(np.float32))


def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
    return (mx.exp(0.1 * logprobs) * WEIGHTS + 0.3 * entropy).sum(), (logprobs,)


def whole_graph(model: nn.Module, tokens: TokenBatch) -> tuple[mx.array, dict[str, mx.array]]:
    """The naive twin: mlx's own value_and_grad over the model's own forward, logits at every
    position."""

    def loss(model: nn.Module) -> mx.array:
        logits = model(tokens.inputs).flatten(0, 1)[tokens.positions] / tokens.temperature[:, None]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(logprobs, tokens.targets[:, None], axis=-1)[:, 0]
        return objective(chosen, -(mx.exp(logprobs) * logprobs).sum(-1))[0]

    value, gradients = nn.value_and_grad(model, loss)(model)
    return value, dict(nn.utils.tree_flatten(gradients))


@pytest.mark.parametrize("prepare", [with_lora, with_full_weights, with_4_bit_base])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_equal_the_whole_graphs(
    architecture: str, prepare: Callable[[nn.Module], nn.Module]
) -> None:
    model = prepare(make_model(architecture))
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert not parts.fallback
    value, (logprobs,), gradients = parts.loss_and_gradients(batch(), objective)
    expected, expected_gradients = whole_graph(model, batch())
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    assert sorted(expected_gradients) == list(parts.slots.names)
    for name, gradient in zip(parts.slots.names, gradients, strict=True):
        scale = mx.abs(expected_gradients[name]).max().item()
        np.testing.assert_allclose(
            gradient, expected_gradients[name], atol=1e-5 * scale + 1e-7, err_msg=name
        )
    assert max(mx.abs(g).max().item() for g in gradients) > 1e-3
    assert logprobs.shape == (19,)


def talkie() -> nn.Module:
    """Make a tiny Talkie, whose blocks take the embeddings before the hidden state. mlx-lm makes
    its head of zeros, and each block's share of the embeddings 0."""
    model = make_model("talkie")
    model.lm_head = mx.random.normal(model.lm_head.shape)
    for layer in model.layers:
        layer.embed_skip.update({"a_g": mx.full(layer.embed_skip.a_g.shape, 0.7)})
    return model


@pytest.mark.parametrize("prepare", [with_lora, with_4_bit_base])
def test_a_hidden_state_behind_another_argument(prepare: Callable[[nn.Module], nn.Module]) -> None:
    model = prepare(talkie())
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert not parts.fallback
    value, _, gradients = parts.loss_and_gradients(batch(), objective)
    expected, expected_gradients = whole_graph(model, batch())
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, gradient in zip(parts.slots.names, gradients, strict=True):
        # one number of many may be off by twice as much
        off = mx.linalg.norm(gradient - expected_gradients[name])
        assert off.item() <= 2e-5 * mx.linalg.norm(expected_gradients[name]).item() + 1e-7, name
    assert max(mx.abs(g).max().item() for g in gradients) > 1e-3


def wired(name: str) -> nn.Module:
    """Make a tiny model whose blocks read what earlier blocks, or embeddings outside them, hand
    over."""
    if name == "talkie":
        return talkie()
    # the last two blocks read keys and values of the second and the first
    if name == "gemma4_text":
        layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
        return small_model(name, **layers, layer_types=["sliding_attention", "full_attention"] * 2)
    if name == "hunyuan":  # every other block reads those of the one before it
        return small_model(name, num_hidden_layers=4, use_cla=True, cla_share_factor=2)
    return small_model(name)


@pytest.mark.parametrize("blocks", [0, 1, 3])
@pytest.mark.parametrize("prepare", [with_lora, with_full_weights])
@pytest.mark.parametrize("name", ["talkie", "gemma4_text", "hunyuan", "gemma3n"])
def test_what_blocks_hand_to_later_ones_carries_its_gradient(
    name: str, prepare: Callable[[nn.Module], nn.Module], blocks: int
) -> None:
    """Shared keys and values, per-layer embeddings that are trained, a hidden state of several
    streams (Gemma 3n)."""
    model = prepare(wired(name))
    parts = BlockwiseModel(model, blocks_per_eval=blocks)
    assert not parts.fallback
    value, _, gradients = parts.loss_and_gradients(batch(), objective)
    expected, expected_gradients = whole_graph(model, batch())
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    whole = sum(mx.square(g).sum().item() for g in expected_gradients.values()) ** 0.5
    for part, gradient in zip(parts.slots.names, gradients, strict=True):
        off = mx.sqrt(mx.square(gradient - expected_gradients[part]).sum()).item()
        assert (
            off <= 1e-4 * mx.sqrt(mx.square(expected_gradients[part]).sum()).item() + 1e-6 * whole
        ), part


def test_an_object_that_blocks_write_into_is_named() -> None:
    parts = BlockwiseModel(with_lora(small_model("kimi_k3")), blocks_per_eval=1)
    assert "write into one ResidualBlocks, which later ones and the head read" in parts.fallback


@pytest.mark.parametrize("prepare", [with_lora, with_full_weights])
@pytest.mark.parametrize("blocks", [0, 2, 3])
def test_any_number_of_blocks(blocks: int, prepare: Callable[[nn.Module], nn.Module]) -> None:
    model = prepare(make_model())
    _, _, one = BlockwiseModel(model, blocks_per_eval=1).loss_and_gradients(batch(), objective)
    _, _, other = BlockwiseModel(model, blocks_per_eval=blocks).loss_and_gradients(
        batch(), objective
    )
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


EACH_ONCE = (
    (0, 1, with_lora),
    (1, 2, with_full_weights),
    (0, 2, with_4_bit_base),
    (1, 1, with_an_unpacked_base),
)
"""Every value of each is seen; g++ makes loops for each combination, so the other twelve are
long."""
EACH_ONCE_AND_ALL = [
    one if one in EACH_ONCE else pytest.param(*one, marks=pytest.mark.long)
    for one in itertools.product(
        (0, 1), (1, 2), (with_lora, with_full_weights, with_4_bit_base, with_an_unpacked_base)
    )
]


@pytest.mark.slow  # g++ makes the loops
@pytest.mark.long
@pytest.mark.skipif(
    not kernels.available(),
    reason="without MLX on the CPU and a C++ compiler nothing is fused",
)
@pytest.mark.parametrize(("blocks", "pieces", "prepare"), EACH_ONCE_AND_ALL)
def test_fused_gradients_are_those_of_the_operations_one_by_one(
    blocks: int,
    pieces: int,
    prepare: Callable[[nn.Module], nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice, with other numbers: nothing of the first call is a constant of the second."""
    made: list[Callable[..., Any]] = []
    parts = BlockwiseModel(prepare(make_model()), blocks_per_eval=blocks)
    plain = kernels.fused

    def counting(function: Callable[..., Any], size: int) -> Callable[..., Any]:
        found = plain(function, size)
        made.extend([found] * (found is not function))
        return found

    monkeypatch.setattr(blockwise, "fused", counting)
    other = replace(batch(), inputs=batch().inputs[::-1], temperature=1.0)
    chunks = [slice(0, 19)] if pieces == 1 else [slice(0, 7), slice(7, 19)]
    monkeypatch.setattr(parts, "_chunks", lambda _: chunks)
    for tokens in (batch(), other):
        monkeypatch.setattr(kernels, "FEWEST_TO_FUSE", 1 << 18)
        value, _, gradients = parts.loss_and_gradients(tokens, objective, fuse=True)
        known = len(made)
        monkeypatch.setattr(kernels, "FEWEST_TO_FUSE", 0)
        fused_value, (logprobs,), fused = parts.loss_and_gradients(tokens, objective, fuse=True)
        assert (len(made) > known) != (prepare is with_an_unpacked_base), (
            "all weights would be unpacked at once"
        )
        assert fused_value.item() == pytest.approx(value.item(), rel=1e-6) and logprobs.shape == (
            19,
        )
        for name, a, b in zip(parts.slots.names, gradients, fused, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, err_msg=name)
        parts.slots.write([array * 1.1 for array in parts.slots.read()])


@pytest.mark.parametrize("prepare", [with_lora, with_full_weights])
def test_head_in_chunks(
    prepare: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare(make_model())
    whole = BlockwiseModel(model, blocks_per_eval=1)
    value, _, gradients = whole.loss_and_gradients(batch(), objective)
    logprobs, entropy = whole.score(batch())
    chunked = BlockwiseModel(model, blocks_per_eval=1)
    monkeypatch.setattr(chunked, "_chunks", lambda _: [slice(0, 7), slice(7, 14), slice(14, 19)])
    value_c, _, gradients_c = chunked.loss_and_gradients(batch(), objective)
    assert value_c.item() == pytest.approx(value.item(), rel=1e-6)
    for a, b in zip(gradients, gradients_c, strict=True):
        np.testing.assert_allclose(a, b, atol=4e-6)  # sums in another order: with OpenBLAS 1.1e-6
    for a, b in zip((logprobs, entropy), chunked.score(batch()), strict=True):
        np.testing.assert_allclose(a, b, atol=4e-6)


def test_the_chunk_follows_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "WHOLE_HEAD", 40 * 99)
    monkeypatch.setattr(head, "HEAD_PIECE", 40 * 64)
    tokens = TokenBatch(mx.zeros((2, 60), mx.int32), mx.arange(100), mx.zeros(100, mx.int32))
    chunks = BlockwiseModel(with_lora(make_model()), blocks_per_eval=1)._chunks(tokens)
    assert chunks == [slice(0, 64), slice(64, 100)]


def test_score_is_the_token_logprob_of_the_plain_forward() -> None:
    model, tokens = with_lora(make_model()), batch()
    logprobs, _ = BlockwiseModel(model, blocks_per_eval=1).score(tokens)
    logits = model(tokens.inputs).reshape(-1, 40)[tokens.positions]
    np.testing.assert_allclose(
        logprobs, token_logprobs(logits, tokens.targets, tokens.temperature), atol=1e-5
    )


def test_gradients_add_up_over_micro_batches_in_float32() -> None:
    parts = BlockwiseModel(with_lora(make_model()), blocks_per_eval=1)
    _, _, once = parts.loss_and_gradients(batch(), objective)
    _, _, twice = parts.loss_and_gradients(batch(), objective, once)
    for a, b in zip(once, twice, strict=True):
        np.testing.assert_allclose(2 * np.array(a), b, rtol=1e-6)


def test_a_bfloat16_tree_gives_float32_gradients() -> None:
    model = make_model()
    model.set_dtype(mx.bfloat16)
    parts = BlockwiseModel(with_full_weights(model), blocks_per_eval=1)
    assert not parts.fallback
    _, _, gradients = parts.loss_and_gradients(batch(), objective)
    assert {g.dtype for g in gradients} == {mx.float32}


def test_parameters_are_the_same_objects_afterwards() -> None:
    """Tracers must not stay in the tree, and no array of it may be written to: the serving tree
    shares them."""
    model = with_full_weights(make_model())
    parts = BlockwiseModel(model, blocks_per_eval=1)
    before = parts.slots.read()
    parts.loss_and_gradients(batch(), objective)
    assert all(a is b for a, b in zip(before, parts.slots.read(), strict=True))


def test_every_evaluation_gives_a_turn() -> None:
    turns: list[int] = []
    model = with_lora(make_model())
    parts = BlockwiseModel(model, between_blocks=lambda: turns.append(1), blocks_per_eval=1)
    turns.clear()
    parts.loss_and_gradients(batch(), objective)
    # three group inputs; the last group with head and loss; the two blocks below
    assert len(turns) == 3 + 1 + 2


class Glued(nn.Module):
    """A model that does something of its own between its blocks, or hands one block's work to
    another unseen."""

    def __init__(self, glue: Callable[[mx.array, mx.array], mx.array]) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.layers = [nn.Linear(16, 16) for _ in range(3)]
        self.head = nn.Linear(16, 40)
        self._glue = glue

    def __call__(self, tokens: mx.array) -> mx.array:
        first = hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(self._glue(hidden, first))
        if self._glue is centred:
            return self.head(
                hidden - hidden.mean(axis=tuple(range(hidden.ndim - 1)), keepdims=True)
            )
        return self.head(hidden + 0.5 * first if self._glue is identity else hidden)


def identity(hidden: mx.array, _: mx.array) -> mx.array:
    return hidden


def centred(hidden: mx.array, _: mx.array) -> mx.array:
    return hidden


def residual(hidden: mx.array, first: mx.array) -> mx.array:
    return hidden + first


@pytest.mark.parametrize(
    ("glue", "reason"),
    # identity: the head sees the embedding behind our back; centred: all rows at once
    [(residual, "before block"), (identity, "beside its blocks"), (centred, "each position alone")],
)
def test_other_architectures_fall_back_to_the_whole_graph(glue: Callable, reason: str) -> None:
    model = Glued(glue)
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert reason in parts.fallback
    value, _, gradients = parts.loss_and_gradients(batch(), objective)
    expected, expected_gradients = whole_graph(model, batch())
    assert value.item() == pytest.approx(expected.item(), abs=1e-5)
    for name, gradient in zip(parts.slots.names, gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradients[name], atol=1e-6)
    logits = model(batch().inputs).reshape(-1, 40)[batch().positions]
    np.testing.assert_allclose(
        parts.score(batch())[0],
        token_logprobs(logits, batch().targets, batch().temperature),
        atol=1e-6,
    )


def test_training_beside_a_thread_that_computes() -> None:
    """Another thread evaluates a tree that shares the base arrays, all the while."""
    model = make_model()
    serving = copy.deepcopy(model)
    tokens = batch().inputs
    expected = np.array(serving(tokens))
    done, failures = threading.Event(), []

    def serve() -> None:
        while not done.is_set():
            if not np.array_equal(np.array(serving(tokens)), expected):
                failures.append("other logits")
        mx.synchronize()
        mx.clear_streams()

    thread = threading.Thread(target=serve)
    thread.start()
    parts = BlockwiseModel(with_lora(model), blocks_per_eval=1)
    for _ in range(10):
        parts.loss_and_gradients(batch(), objective)
    done.set()
    thread.join()
    assert not failures


def test_the_check_at_start_computes_two_blocks_of_each_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model(num_hidden_layers=7)
    blocks = model.layers
    for number in (3, 4, 5):
        blocks[number].mlp.gate_proj = nn.Linear(32, 64, bias=True)
    model.freeze()
    with_lora(model)
    counts = dict.fromkeys(map(id, blocks), 0)
    called = type(blocks[0]).__call__

    def counted(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        counts[id(block)] += 1
        return called(block, *args, **kwargs)

    monkeypatch.setattr(type(blocks[0]), "__call__", counted)
    parts = BlockwiseModel(model, blocks_per_eval=1)
    times = [counts[id(block)] for block in blocks]
    assert not parts.fallback and parts.shares_prompts
    assert [number for number, count in enumerate(times) if count > 1] == [0, 1, 3, 4]
    # asked for what it passes on, which is not evaluated
    assert times[2] == times[5] == times[6] == 1
    assert model.layers == blocks and len(parts.score(batch())[0]) == 19
    assert min(counts[id(block)] for block in blocks) == 2  # afterwards every block is computed


def test_blocks_that_get_an_earlier_ones_output_as_an_argument_are_found() -> None:
    """Also where the blocks that are computed do not get any."""
    for seed in range(5):
        mx.random.seed(seed)
        assert "beside its blocks" in BlockwiseModel(Skipping(), blocks_per_eval=1).fallback


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def __call__(self, hidden: mx.array, earlier: mx.array) -> mx.array:
        return self.linear(hidden) + 0.5 * earlier


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = [Mixing() for _ in range(6)]

    def __call__(self, tokens: mx.array) -> mx.array:
        outputs = [self.embed(tokens)]
        for index, layer in enumerate(self.layers):
            outputs.append(layer(outputs[-1], outputs[max(0, index - 2)] * 2))
        return self.head(outputs[-1])


def test_blocks_with_other_settings_are_of_another_kind() -> None:
    model = make_model(num_hidden_layers=6)
    model.layers[3].self_attn.windows = [1, 2]
    model.layers[4].mlp.gate_proj = nn.Linear(32, 64, bias=True)
    assert LayerStack(model).samples() == {0, 1, 3, 4}
