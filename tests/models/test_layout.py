"""Prompts computed once for all rows that share them, and unrelated sequences packed into one
row: same scores, same gradients, fewer tokens, and no sequence sees another."""

import re
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.qwen3 import TransformerBlock

from mlx_parallm.models import blockwise
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.layer_stack import LayerStack
from mlx_parallm.models.layouts.layout import (
    TokenBatch,
    compare_layouts,
    pack_rows,
    share_prompts,
    shareable,
)
from mlx_parallm.system.device import traits
from tests.active_memory import active_memory
from tests.rl_training.step.test_blockwise import with_4_bit_base, with_full_weights, with_lora
from tests.rl_training.tiny_models import make_model

SHARING = ["qwen3", "llama", "qwen2", "phi3", "olmo2", "deepseek_v2"]
MLA = {
    "n_routed_experts": None,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 3,
    "rope_scaling": {"type": "yarn", "factor": 1.0, "original_max_position_embeddings": 128},
}
GPT2 = {
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "n_ctx": 64,
    "layer_norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
}


def model_of(architecture: str) -> nn.Module:
    return make_model(architecture, **(MLA if architecture == "deepseek_v2" else {}))


def batch(
    *,
    seed: int = 0,
    prompts: tuple[int, ...] = (9, 5, 9),
    rows: tuple[int, ...] = (0, 1, 0, 0, 2, 1),
) -> TokenBatch:
    """Rows of three prompts (`rows`: which), two of one length, each with 1 to 6 sampled tokens,
    some of them unscored in the middle, with a temperature each."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 40, length) for length in prompts]
    tokens, mask = np.zeros((len(rows), 16), np.int32), np.zeros((len(rows), 16), bool)
    for i, row in enumerate(rows):
        count = 1 + (i * 5) % 6
        whole = np.concatenate([texts[row], rng.integers(0, 40, count)])
        tokens[i, : len(whole)] = whole
        mask[i, len(texts[row]) - 1 : len(whole) - 1] = True
        if count > 3:
            mask[i, len(texts[row]) + 1] = False  # a tool's answer
    positions = np.flatnonzero(mask[:, :-1]).astype(np.int32)
    inputs = np.ascontiguousarray(tokens[:, :-1])
    return TokenBatch(
        mx.array(inputs),
        mx.array(positions),
        mx.array(tokens[:, 1:].reshape(-1)[positions]),
        mx.array(rng.uniform(0.5, 2.0, len(positions)).astype(np.float32)),
        share_prompts(inputs, positions),
    )


def plain(tokens: TokenBatch) -> TokenBatch:
    return TokenBatch(tokens.inputs, tokens.positions, tokens.targets, tokens.temperature)


def objective(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
    weights = mx.arange(logprobs.shape[0]) / logprobs.shape[0] - 0.4
    return (mx.exp(0.1 * logprobs) * weights + 0.3 * weights * entropy).sum(), (logprobs,)


def test_rows_are_taken_apart_where_the_first_token_is_scored() -> None:
    inputs = np.array([[7, 8, 1, 2], [7, 8, 3, 0], [7, 9, 3, 4]], np.int32)
    shared = share_prompts(inputs, np.array([1, 2, 3, 5, 6, 9, 11], np.int32))
    assert shared.prompts[:, :2].tolist() == [[7, 8], [7, 9]] and shared.lengths.tolist() == [2, 2]
    assert shared.rests[:, :2].tolist() == [[1, 2], [3, 0], [3, 4]] and shared.owner.tolist() == [
        0,
        0,
        1,
    ]
    assert shared.prompts.shape[1] == shared.rests.shape[1] == 8  # buckets
    rest = 2 * 8
    assert shared.positions.tolist() == [1, rest, rest + 1, 1, rest + 8, 8 + 1, rest + 2 * 8 + 1]


def test_a_prompt_that_another_one_begins_with_is_another_prompt() -> None:
    shared = share_prompts(np.array([[7, 8, 1], [7, 8, 1]], np.int32), np.array([1, 5], np.int32))
    assert shared.lengths.tolist() == [2, 3] and shared.owner.tolist() == [0, 1]


@pytest.mark.parametrize("architecture", SHARING)
def test_scores_and_gradients_are_those_of_the_rows(architecture: str) -> None:
    model = with_lora(model_of(architecture))
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert not parts.fallback and not parts.unshared
    check(parts, batch())


@pytest.mark.parametrize("prepare", [with_full_weights, with_4_bit_base])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_of_all_weights_and_over_a_quantised_base(
    prepare: Callable[[nn.Module], nn.Module], blocks: int
) -> None:
    check(BlockwiseModel(prepare(make_model()), blocks_per_eval=blocks), batch())


def test_with_the_head_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = BlockwiseModel(with_lora(make_model()), blocks_per_eval=1)
    monkeypatch.setattr(parts, "_chunks", lambda _: [slice(0, 5), slice(5, 9), slice(9, None)])
    check(parts, batch())


@pytest.mark.parametrize("prompts", [(9, 9, 9), (1, 9, 3)])
def test_prompts_of_equal_and_of_very_unequal_lengths(prompts: tuple[int, ...]) -> None:
    check(BlockwiseModel(with_lora(make_model()), blocks_per_eval=1), batch(prompts=prompts))


def check(parts: BlockwiseModel, tokens: TokenBatch) -> None:
    assert parts.shares_prompts and tokens.compact is not None
    for a, b in zip(parts.score(tokens), parts.score(plain(tokens)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    value, _, gradients = parts.loss_and_gradients(tokens, objective)
    expected, _, plain_gradients = parts.loss_and_gradients(plain(tokens), objective)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, a, b in zip(parts.slots.names, gradients, plain_gradients, strict=True):
        assert mx.linalg.norm(b.reshape(-1)).item() > 0, name
        # sums in another order: with OpenBLAS 1.0e-5 (olmo2's norms), with MKL 3e-6; a wrong
        # position is 1e-2 and more
        assert (
            mx.linalg.norm((a - b).reshape(-1)).item()
            <= 3e-5 * mx.linalg.norm(b.reshape(-1)).item()
        ), name


def test_shared_and_packed_rows_send_fewer_tokens_through_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts, seen = BlockwiseModel(with_lora(make_model()), blocks_per_eval=1), list[int]()
    forward = TransformerBlock.__call__

    def counting(self: nn.Module, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        seen.append(x.shape[0] * x.shape[1])
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(TransformerBlock, "__call__", counting)
    one_group = batch(prompts=(9,), rows=(0,) * 6)
    parts.score(one_group)
    assert one_group.compact is not None and sum(seen) == 3 * one_group.compact.tokens == 3 * (
        16 + 6 * 8
    )
    seen.clear()
    parts.score(plain(one_group))
    assert sum(seen) == 3 * 6 * 15
    seen.clear()
    packed = packed_batch()
    parts.score(packed)
    assert packed.compact is not None and sum(seen) == 3 * packed.compact.tokens == 3 * 4 * 16


def test_no_tracer_stays_behind() -> None:
    parts, tokens = BlockwiseModel(with_lora(make_model()), blocks_per_eval=1), batch()
    parts.loss_and_gradients(tokens, objective)
    before = parts.slots.read()
    np.testing.assert_array_equal(parts.score(tokens)[0], parts.score(tokens)[0])
    assert all(a is b for a, b in zip(before, parts.slots.read(), strict=True))


@pytest.mark.parametrize(
    ("architecture", "extra", "unshared", "unpacked"),
    [
        ("gemma3_text", {}, "RotatingKVCache", "RotatingKVCache"),
        # its mask has to fit keys of five axes
        ("gemma2", {}, "do not take", "off by|do not take"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "do not take", None),
        ("gpt2", GPT2, None, "depends on the position"),
    ],
)
def test_what_cannot_be_shared_or_packed_says_why_and_goes_on(
    architecture: str, extra: dict, unshared: str | None, unpacked: str | None
) -> None:
    parts = BlockwiseModel(with_lora(make_model(architecture, **extra)), blocks_per_eval=1)
    assert not parts.fallback
    for reason, found, tokens in (
        (unshared, parts.unshared, batch()),
        (unpacked, parts.unpacked, packed_batch()),
    ):
        if reason is not None:
            assert re.search(reason, found)
            np.testing.assert_array_equal(parts.score(tokens)[0], parts.score(plain(tokens))[0])


def test_blocks_that_ignore_the_prompt_are_found_out() -> None:
    """A model with plain caches whose attention does not look into them."""

    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(40, 16)
            self.layers = [Mixer() for _ in range(2)]
            self.head = nn.Linear(16, 40)
            self.head.weight = 20 * self.head.weight  # what is off is off by more than TF32 is

        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            hidden = self.embed(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return self.head(hidden)

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def __call__(self, x: mx.array) -> mx.array:
            return x + mx.tanh(self.linear(mx.cumsum(x, axis=1)))

    model = Forgetful()
    assert not shareable(model)
    parts = BlockwiseModel(model, blocks_per_eval=1)
    assert not parts.fallback and "off by" in parts.unshared and "off by" in parts.unpacked


def test_small_heads_are_made_whole_and_large_ones_in_pieces() -> None:
    assert blockwise.head_rows(512, 8192) == 512
    assert blockwise.head_rows(1024, 32768) == 32
    assert blockwise.head_rows(4096, 8192) == 128
    assert blockwise.head_rows(4096, 151936, times=blockwise.TRAINED_HEAD) == 128
    assert blockwise.head_rows(0, 151936) == 1


@pytest.mark.slow
def test_a_large_head_takes_little_memory_and_gives_the_same_gradient() -> None:
    """1,024 tokens × 8,192 vocabulary: 32 MiB of logits. The naive way holds several such
    arrays."""
    model = with_lora(make_model(vocab_size=8192))
    parts = BlockwiseModel(model, blocks_per_eval=1)
    rng = np.random.default_rng(0)
    inputs, targets = (
        mx.array(rng.integers(0, 8192, shape), mx.int32) for shape in ((8, 128), (1024,))
    )
    tokens = TokenBatch(inputs, mx.arange(1024, dtype=mx.int32), targets)
    weights = mx.random.normal((1024,))
    mx.eval(inputs, targets, tokens.positions, weights)

    def loss(logprobs: mx.array, entropy: mx.array) -> tuple[mx.array, tuple[mx.array, ...]]:
        return (weights * logprobs + 0.1 * entropy).sum(), ()

    def naive() -> list[mx.array]:
        def whole(model: nn.Module) -> mx.array:
            logits = model(inputs).reshape(1024, -1)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            chosen = mx.take_along_axis(logprobs, targets[:, None], axis=-1)[:, 0]
            return loss(chosen, -(mx.exp(logprobs) * logprobs).sum(-1))[0]

        found = dict(nn.utils.tree_flatten(nn.value_and_grad(model, whole)(model)[1]))
        mx.eval(found)
        return [found[name] for name in parts.slots.names]

    def peak(way: Callable[[], list[mx.array]]) -> tuple[int, list[mx.array]]:
        mx.synchronize()
        before = active_memory()
        mx.reset_peak_memory()
        found = way()
        return mx.get_peak_memory() - before, found

    whole, expected = peak(naive)
    pieces, gradients = peak(lambda: parts.loss_and_gradients(tokens, loss)[2])
    assert pieces < whole / 4
    off = sum(mx.square(a - b).sum().item() for a, b in zip(gradients, expected, strict=True))
    assert off**0.5 <= 1e-5 * sum(mx.square(b).sum().item() for b in expected) ** 0.5


LENGTHS = (9, 1, 5, 12, 2, 3, 16)  # of what goes into the model
ROWS = (3, 2, 1, 1)  # 15, 14, 3 and 16 tokens


def packed_batch(
    lengths: Sequence[int] = LENGTHS, counts: Sequence[int] = ROWS, *, seed: int = 0
) -> TokenBatch:
    """Tokens 0 … 39. The last position of a sequence is scored, and about half of the others."""
    rng = np.random.default_rng(seed)
    tokens, mask = np.zeros((len(lengths), 20), np.int32), np.zeros((len(lengths), 20), bool)
    for i, length in enumerate(lengths):
        tokens[i, : length + 1] = rng.integers(0, 40, length + 1)
        mask[i, :length] = rng.random(length) < 0.5
        mask[i, length - 1] = True
    positions = np.flatnonzero(mask).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1).reshape(-1)[positions]
    return TokenBatch(
        mx.array(tokens),
        mx.array(positions),
        mx.array(targets),
        0.8,
        pack_rows(tokens, positions, counts),
    )


def test_sequences_lie_end_to_end_up_to_their_last_scored_token() -> None:
    tokens = np.array([[1, 2, 3, 0], [4, 5, 9, 9], [6, 7, 8, 0]], np.int32)
    packed = pack_rows(tokens, np.array([1, 2, 5, 8, 10], np.int32), [2, 1])
    assert packed.inputs.tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 8, 0, 0, 0, 0, 0]]
    assert packed.owner.tolist() == [[0, 0, 0, 1, 1, -1, -1, -1], [2, 2, 2, -1, -1, -1, -1, -1]]
    assert packed.positions.tolist() == [1, 2, 4, 8, 10]
    assert packed.tokens == 16


@pytest.mark.parametrize("architecture", SHARING)
def test_packed_scores_and_gradients_are_those_of_the_rows(architecture: str) -> None:
    check_packed(with_lora(model_of(architecture)), packed_batch())


@pytest.mark.parametrize(
    ("prepare", "blocks"), [(with_full_weights, 0), (with_full_weights, 2), (with_4_bit_base, 1)]
)
def test_packed_all_weights_and_over_a_quantised_base(
    prepare: Callable[[nn.Module], nn.Module], blocks: int
) -> None:
    check_packed(prepare(make_model()), packed_batch(), blocks)


@pytest.mark.parametrize(
    ("lengths", "counts"), [((1, 1, 1), (3,)), ((8, 8), (2,)), ((15, 1), (2,)), ((4,), (1,))]
)
def test_packed_boundaries(lengths: tuple[int, ...], counts: tuple[int, ...]) -> None:
    check_packed(with_lora(make_model()), packed_batch(lengths, counts))


def check_packed(model: nn.Module, tokens: TokenBatch, blocks: int = 1) -> None:
    parts = BlockwiseModel(model, blocks_per_eval=blocks)
    assert parts.packs_rows, parts.unpacked
    check_as_rows(parts, tokens)


def check_as_rows(parts: BlockwiseModel, tokens: TokenBatch) -> None:
    """Scores, loss and gradients are those of the rows without their layout."""
    for a, b in zip(parts.score(tokens), parts.score(plain(tokens)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    value, _, gradients = parts.loss_and_gradients(tokens, objective)
    expected, _, rows = parts.loss_and_gradients(plain(tokens), objective)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    whole, other = (
        np.concatenate([np.array(g, np.float64).ravel() for g in found])
        for found in (rows, gradients)
    )
    assert np.linalg.norm(whole) > 0
    # sums in another order: with OpenBLAS's AVX-512 2e-6; a token that sees another sequence is
    # 1e-2 and more
    assert np.linalg.norm(other - whole) <= 1e-5 * np.linalg.norm(whole)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_no_token_sees_another_sequence(changed: int) -> None:
    """Bit for bit, before and behind the one that changes."""
    parts = BlockwiseModel(with_lora(make_model()), blocks_per_eval=1)
    lengths, counts = (6, 7, 5), (3,)
    before, after = packed_batch(lengths, counts), packed_batch(lengths, counts)
    tokens = np.array(after.inputs)
    tokens[changed, : lengths[changed]] = 39 - tokens[changed, : lengths[changed]]
    after = TokenBatch(
        mx.array(tokens),
        after.positions,
        after.targets,
        0.8,
        pack_rows(tokens, np.array(after.positions), counts),
    )
    owner = np.array(before.positions) // tokens.shape[1]
    [one, other] = [np.array(parts.score(found)[0]) for found in (before, after)]
    for sequence in range(3):
        assert np.array_equal(one[owner == sequence], other[owner == sequence]) == (
            sequence != changed
        )


def test_no_gradient_reaches_another_sequence() -> None:
    """The rows of an untied embedding that only other sequences have."""
    parts = BlockwiseModel(with_full_weights(make_model("llama")), blocks_per_eval=1)
    tokens = np.array([[1, 2, 3, 4], [11, 12, 13, 14], [21, 22, 23, 24]], np.int32)
    positions = np.array([3, 7, 11], np.int32)
    packed = TokenBatch(
        mx.array(tokens),
        mx.array(positions),
        mx.array([5, 6, 7], mx.int32),
        1.0,
        pack_rows(tokens, positions, [3]),
    )
    _, _, gradients = parts.loss_and_gradients(packed, lambda logprobs, _: (logprobs[1], ()))
    embedding = np.abs(
        np.array(gradients[parts.slots.names.index("model.embed_tokens.weight")])
    ).sum(axis=1)
    assert set(np.flatnonzero(embedding)) == {11, 12, 13, 14}


@pytest.mark.parametrize(
    ("off", "on_cpu", "used"),
    [
        (0.0005, True, True),
        (0.004, True, False),
        (0.004, False, True),
        (0.03, False, True),
        (0.1, False, False),
    ],
)
def test_scores_may_be_off_by_more_on_a_gpu(
    off: float, on_cpu: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 products are TF32 there: an H100 is off by 0.004, in bfloat16 by 0.03."""
    monkeypatch.setattr(traits, "on_cpu", lambda: on_cpu)
    model = make_model("qwen3")
    stack = LayerStack(model)

    def score(batch: TokenBatch) -> tuple[mx.array, ...]:
        return (mx.ones(8) * (1 if batch.compact is None else 1 + off),)

    assert [reason == "" for reason in compare_layouts(model, stack, score)] == [used] * 3
