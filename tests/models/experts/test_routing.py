"""Experts are recorded by one forward and repeated by another: a block by hand, mlx-lm's
architectures, layouts and gradients, and from the engine through the store to the trainer."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3_moe import ModelArgs, Qwen3MoeSparseMoeBlock

from mlx_parallm.engine.companions.routing import RecordedRouting
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.experts.replay import replays_experts, watched_experts
from mlx_parallm.models.experts.routing import (
    UNFORCED,
    ForwardRouting,
    expert_load,
    prepare_routing,
    routed,
    routing_shape,
    why_not_routed,
)
from mlx_parallm.models.layouts.layout import TokenBatch, pack_rows, share_prompts
from mlx_parallm.models.layouts.tree_rows import merge_rows
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import inject_lora
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import collate
from mlx_parallm.rl_training.step.routing import RecordedExperts
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.completions import rollout_of
from mlx_parallm.rollout_store.payload import decode_group, encode_group
from mlx_parallm.types import Rollout, RolloutGroup, RoutedExperts, joined_experts
from tests.engine.helpers import VOCAB, collect_deltas, request, run, serve
from tests.engine.test_architectures import BATCHED, GATED_DELTA, model_of
from tests.tiny_models import EXPERTS, QWEN3, lora_config, make_model

OTHERS = {
    "olmoe": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_moe": {
        "text_config": QWEN3 | EXPERTS | GATED_DELTA | {"model_type": "qwen3_5_moe_text"}
    },
}


def experts_of(name: str, seed: int = 0):
    if name in BATCHED:
        return model_of(name, seed=seed)
    return make_model(QWEN3 | {"vocab_size": VOCAB, "model_type": name} | OTHERS[name], seed=seed)


def test_forced_experts_get_the_weights_of_the_own_router():
    block = Qwen3MoeSparseMoeBlock(
        ModelArgs.from_dict(QWEN3 | EXPERTS | {"hidden_size": 8, "moe_intermediate_size": 4})
    )
    [number] = [prepare_routing(holder := mx_module(block))]
    x = mx.random.normal((1, 3, 8), key=mx.random.key(1))
    forced = [[0, 3], [2, 1], [UNFORCED, UNFORCED]]
    with routed(ForwardRouting(mx.array(forced)[:, None])):
        found = np.array(holder.block(x))[0]
    gate = np.array(block.gate.weight, np.float64)
    up, down, across = (
        np.array(block.switch_mlp[name].weight, np.float64)
        for name in ("up_proj", "down_proj", "gate_proj")
    )
    for token, (row, ids) in enumerate(zip(np.array(x[0], np.float64), forced, strict=True)):
        logits = gate @ row
        masses = np.exp(logits - logits.max())
        if ids[0] == UNFORCED:
            ids = np.argsort(-logits)[:2]
        wanted = np.zeros(8)
        for expert in ids:
            inner = across[expert] @ row
            inner = inner / (1 + np.exp(-inner)) * (up[expert] @ row)
            wanted += masses[expert] / masses[list(ids)].sum() * (down[expert] @ inner)
        np.testing.assert_allclose(found[token], wanted, atol=1e-5)
    assert number == 1


def mx_module(block):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

    return Holder()


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "mixtral", "qwen3_next", "granitemoehybrid", *OTHERS]
)
def test_an_architecture_takes_the_experts_that_it_is_told_to_take(name):
    model = experts_of(name)
    assert prepare_routing(model) == prepare_routing(model) == 2
    assert why_not_routed(model) == ""
    assert routing_shape(model) == (2, 2, 4)


def test_what_cannot_be_repeated_says_why():
    compiled, dense = model_of("deepseek_v3"), model_of("qwen2")
    assert watched_experts(dense, "auto") is None
    assert watched_experts(compiled, "auto") is None
    assert watched_experts(compiled, "off") is None
    for model, reason in ((compiled, "compiled function"), (dense, "has no experts")):
        with pytest.raises(ConfigError, match=f'router_replay = "on", but .*{reason}'):
            watched_experts(model, "on")


@pytest.mark.parametrize(
    ("setting", "differs", "replays"),
    [
        ("auto", {}, False),
        ("auto", {"staleness": 1}, True),
        ("auto", {"rounded": True}, True),
        ("auto", {"kv_bits": 8}, True),
        ("on", {}, True),
        ("off", {"staleness": 1, "kv_bits": 4}, False),
    ],
)
def test_auto_repeats_where_engine_and_trainer_may_differ(setting, differs, replays):
    model = experts_of("qwen3_moe")
    assert watched_experts(model, setting) == (2, 2, 4)
    assert replays_experts(model, setting, **({"staleness": 0} | differs)) is replays


def test_auto_repeats_with_a_quantised_base():
    packed = experts_of("qwen3_moe")
    nn.quantize(packed, group_size=32, bits=4)
    assert watched_experts(packed, "auto") == (2, 2, 4)
    assert replays_experts(packed, "auto", staleness=0)


# ---------------------------------------------------------------------- layouts and gradients


def rows_with_experts(seed=0):
    """Five rows of two prompts, scored behind them, and experts for each scored token."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, VOCAB, length) for length in (6, 4)]
    tokens, mask = np.zeros((5, 16), np.int32), np.zeros((5, 16), bool)
    for row, prompt in enumerate((0, 0, 1, 0, 1)):
        whole = np.concatenate([prompts[prompt], rng.integers(0, VOCAB, 3 + row % 3)])
        tokens[row, : len(whole)] = whole
        mask[row, len(prompts[prompt]) : len(whole) - 1] = True
    positions = np.flatnonzero(mask).astype(np.int32)
    forced = np.stack([rng.permutation(4)[:2] for _ in range(2 * len(positions))])
    return tokens, positions, forced.reshape(-1, 2, 2).astype(np.int32)


def token_batch(tokens, positions, forced, compact=None):
    targets = np.roll(tokens.reshape(-1), -1)[positions]
    return TokenBatch(
        mx.array(tokens),
        mx.array(positions),
        mx.array(targets),
        compact=compact,
        experts=None if forced is None else mx.array(forced),
    )


def objective(logprobs, entropy):
    return (logprobs * mx.arange(len(logprobs))).sum() + 0.1 * entropy.sum(), ()


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "olmoe", "qwen3_5_moe"])
@pytest.mark.parametrize("blocks", [1, 0])
def test_scores_and_gradients_of_every_layout_are_those_of_the_whole_graph(name, blocks):
    model = experts_of(name)
    prepare_routing(model)
    inject_lora(model, lora_config(rank=2, alpha=4.0))
    for path, module in model.named_modules():
        if path.endswith(("mlp.gate", "mlp.router")):
            module.unfreeze()  # the gradient flows through the router
    model.train()
    mx.eval(model.parameters())
    tokens, positions, forced = rows_with_experts()
    plain = token_batch(tokens, positions, forced)
    whole = BlockwiseModel(copy.deepcopy(model), blocks_per_eval=blocks)
    free = whole.score(token_batch(tokens, positions, None))[0]
    scores, slopes = reference(model, tokens, positions, forced)
    assert np.abs(scores - np.array(free)).max() > 0.01, "the experts make no difference"
    layouts = {"rows": None}
    if whole.shares_prompts:
        layouts["shared"] = share_prompts(tokens, positions)
    if whole.packs_rows:
        layouts["packed"] = pack_rows(tokens, positions, [3, 2])
    if whole.merges_rows:
        layouts["tree"] = merge_rows(tokens, positions)
    assert len(layouts) >= (1 if name == "gpt_oss" else 2)
    for layout, compact in layouts.items():
        batch = token_batch(tokens, positions, forced, compact)
        found = np.array(whole.score(batch)[0])
        np.testing.assert_allclose(found, scores, atol=2e-4, err_msg=layout)
        _, _, gradients = whole.loss_and_gradients(batch, objective)
        for path, gradient in zip(whole.slots.names, gradients, strict=True):
            off = np.abs(np.array(gradient) - slopes[path]).max()
            assert off <= 2e-4 * (1 + np.abs(slopes[path]).max()), (layout, path)
    assert any("gate" in path or "router" in path for path in whole.slots.names)
    assert plain.experts is not None
    # two layers; a score and a loss of each layout
    assert whole.experts_forced == 2 * 2 * len(positions) * len(layouts)


def test_a_token_of_several_rows_goes_where_the_first_that_knows_says():
    """The prompt's last token, which predicts the first one of each answer, is computed once."""
    model = experts_of("qwen3_moe")
    prepare_routing(model)
    inject_lora(model, lora_config(rank=2, alpha=4.0))
    mx.eval(model.parameters())
    tokens = np.array([[5, 9, 2, 1, 1], [5, 9, 2, 3, 3], [5, 9, 2, 7, 4]], np.int32)
    positions = np.array([2, 7, 12], np.int32)
    experts = np.array([[-1, -1], [2, 0], [3, 1]], np.int32)[:, None].repeat(2, 1)
    computed = BlockwiseModel(model, blocks_per_eval=1)
    assert computed.shares_prompts and computed.merges_rows
    alike = np.broadcast_to(experts[1], experts.shape).copy()
    wanted = np.array(computed.score(token_batch(tokens, positions, alike))[0])
    for compact in (share_prompts(tokens, positions), merge_rows(tokens, positions)):
        batch = token_batch(tokens, positions, experts, compact)
        np.testing.assert_allclose(np.array(computed.score(batch)[0]), wanted, atol=1e-4)


def reference(model, tokens, positions, forced):
    """Scores and gradients of the model's own forward, row by row: what mlx-lm's blocks compute
    when their choice is what we say."""
    full = np.full((tokens.size, 2, 2), UNFORCED, np.int32)
    full[positions] = forced
    full = full.reshape(*tokens.shape, 2, 2)
    targets = mx.array(np.roll(tokens.reshape(-1), -1)[positions])

    def loss(_):
        logits = []
        for row, experts in zip(tokens, full, strict=True):
            with routed(ForwardRouting(mx.array(experts))):
                logits.append(model(mx.array(row)[None])[0])
        chosen = mx.concatenate(logits)[mx.array(positions)]
        scores = token_logprobs(chosen, targets)
        masses = mx.softmax(chosen.astype(mx.float32), axis=-1)
        entropy = -(masses * mx.log(masses)).sum(axis=-1)
        return objective(scores, entropy)[0], scores

    (_, scores), slopes = nn.value_and_grad(model, loss)(None)
    return np.array(scores), {path: np.array(a) for path, a in tree_flatten(slopes)}


# ---------------------------------------------------------------------- from the engine


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "olmoe", "qwen3_5_moe"])
def test_the_trainer_repeats_what_the_engine_took(name):
    """The trainer's router is moved, as by updates since: without replay it takes other experts,
    with it none, and the scores are those of a plain forward with these experts."""
    trained = experts_of(name)
    shape = watched_experts(trained, "on")
    served = serve(copy.deepcopy(trained), max_rows=4, companions=[RecordedRouting(shape)])
    trained.unfreeze()
    prompts = [[5, 9, 2, 7], [8, 1, 1], [3, 3, 6, 2, 4]]
    params = {"temperature": 1.0, "max_tokens": 6, "ignore_eos": True, "seed": 3, "n": 2}
    outputs = run(served.engine, [request(f"r{i}", p, **params) for i, p in enumerate(prompts)])
    rollouts = [
        Rollout(
            (*prompt, *choice.token_ids),
            (0,) * len(prompt) + (1,) * 6,
            (0.0,) * len(prompt) + choice.logprobs,
            (0,) * (len(prompt) + 6),
            1.0,
            {"reward": 0.0},
            routed_experts=choice.routed_experts,
        )
        for i, prompt in enumerate(prompts)
        for choice in outputs[f"r{i}"].completions
    ]
    group = decode_group(encode_group(RolloutGroup("g", "e", tuple(rollouts))))
    assert group.rollouts == tuple(rollouts)
    assert Rollout.from_json(rollouts[0].to_json()) == rollouts[0]
    assert len(rollouts[0].routed_experts.ids) == 6 * 2 * 2, "a byte a layer, expert and token"
    model = BlockwiseModel(trained, blocks_per_eval=1)
    [part] = micro_batches(group.rollouts)
    same = np.array(model.score(part.token_batch(replay=True))[0])
    np.testing.assert_allclose(same, engine_logprobs(rollouts, part), atol=1e-4)
    assert model.experts_forced == 2 * 36
    assert model.experts_differing == 0
    for block in [m for m in trained.modules() if "_routing_number" in vars(m)]:
        router = block.router if "router" in block else block.gate
        noise = mx.random.normal(router.weight.shape, key=mx.random.key(7))
        router.weight = router.weight + 0.5 * noise * mx.abs(router.weight).mean()
    model.experts_forced = model.experts_differing = 0
    moved = np.array(model.score(part.token_batch(replay=True))[0])
    free = np.array(model.score(part.token_batch())[0])
    assert 0 < model.experts_differing < model.experts_forced == 2 * 36
    assert np.abs(free - moved).max() > 1e-3
    again = copy.deepcopy(trained)
    with routed(ForwardRouting(mx.array(part_experts(part)))):
        logits = again(mx.array(part.inputs))
    rows = logits.reshape(-1, logits.shape[-1])[mx.array(part.positions)]
    np.testing.assert_allclose(
        moved, np.array(token_logprobs(rows, mx.array(part.targets))), atol=2e-4
    )


def micro_batches(rollouts):
    sequences = [TrainSequence(r, (0.0,) * len(r.tokens), fresh=True) for r in rollouts]
    options = {"token_budget": 10_000, "companions": [RecordedExperts()]}
    return collate(sequences, range(len(sequences)), **options).micro_batches


def engine_logprobs(rollouts, part):
    sampled = [rollouts[row].logprobs[-6:] for row in part.rows]
    return np.concatenate(sampled)


def part_experts(part):
    full = np.full((part.inputs.size, 2, 2), UNFORCED, np.int32)
    full[part.positions] = part.carried["experts"]
    return full


def test_the_engine_records_what_its_forwards_took_by_whatever_way():
    """Rows of different lengths, with and without steps that are started ahead."""
    model = experts_of("qwen3_moe")
    companions = [RecordedRouting(watched_experts(model, "on"))]
    ways = []
    for ahead in (False, True):
        served = serve(
            copy.deepcopy(model), max_rows=3, companions=companions, async_scheduling=ahead
        )
        requests = [
            request(f"r{i}", [4 + i] * (2 + 3 * i), temperature=0.0, max_tokens=4 + i)
            for i in range(5)
        ]
        outputs = run(served.engine, requests)
        ways.append([outputs[f"r{i}"].completions[0] for i in range(5)])
    for one, other in zip(*ways, strict=True):
        assert one.routed_experts == other.routed_experts
        assert len(one.routed_experts) == len(one.token_ids)
    streamed = request("s", [6] * 8, temperature=0.0, max_tokens=6, stream=True)
    served.engine.add(streamed)
    deltas = collect_deltas(served.engine)["s"]
    assert {len(delta.token_ids) for delta in deltas} >= {1}, "in parts"
    assert rollout_of(streamed, deltas).routed_experts == ways[0][2].routed_experts
    tokens = [*[6] * 8, *ways[0][2].token_ids]
    routing = ForwardRouting()
    with routed(routing):
        model(mx.array([tokens[:-1]]))
    wanted = np.sort(np.array(routing.by_token())[7:], axis=-1)
    np.testing.assert_array_equal(np.sort(ways[0][2].routed_experts.array(), axis=-1), wanted)


# ---------------------------------------------------------------------- the nouns


def test_experts_of_turns_are_joined_or_none_are_known():
    one, two = RoutedExperts(2, 2, bytes(range(8))), RoutedExperts(2, 2, bytes(4))
    assert joined_experts([one, two]) == RoutedExperts(2, 2, bytes(range(8)) + bytes(4))
    assert joined_experts([one, None]) is None
    assert joined_experts([one, RoutedExperts(2, 2, bytes(8), wide=True)]) is None
    assert joined_experts([]) is None
    assert RoutedExperts(1, 2, b"\x01\x02\x03\x00", wide=True).array().tolist() == [[[513, 3]]]
    with pytest.raises(ValueError, match="not whole tokens"):
        RoutedExperts(2, 2, bytes(5))


def test_a_rollout_with_experts_of_other_tokens_is_rejected():
    rollout = Rollout(
        (1, 2, 3),
        (0, 1, 1),
        (0.0, -1.0, -1.0),
        (0, 0, 0),
        1.0,
        {"reward": 1.0},
        routed_experts=RoutedExperts(2, 2, bytes(4)),
    )
    with pytest.raises(RolloutRejectedError, match="1 tokens for 2"):
        check_group(RolloutGroup("g", "e", (rollout,)), vocab_size=10, max_token_length=8)


def test_rows_without_experts_go_by_their_router():
    known = Rollout(
        (1, 2, 3),
        (0, 1, 1),
        (0.0, -1.0, -1.0),
        (0, 0, 0),
        1.0,
        {"reward": 1.0},
        routed_experts=RoutedExperts(1, 2, b"\x00\x01\x02\x03"),
    )
    unknown = Rollout((1, 2), (0, 1), (0.0, -1.0), (0, 0), 1.0, {"reward": 1.0})
    [part] = micro_batches([known, unknown])
    by_row = dict(
        zip(
            part.rows,
            np.split(np.array(part.carried["experts"]), [part.mask[0].sum()]),
            strict=True,
        )
    )
    assert by_row[0].tolist() == [[[0, 1]], [[2, 3]]]
    assert by_row[1].tolist() == [[[UNFORCED, UNFORCED]]]
    [part] = micro_batches([unknown])
    assert part.carried == {}


def test_the_load_of_experts():
    """Three tokens, two layers, four experts, one a token. Layer 0: expert 0 twice, 3 once: the
    busiest has 2 of an average 0.75, the entropy is log 3 - 2/3 log 2. Layer 1: always expert 1: 3
    of 0.75, entropy 0. Five of eight are unused."""
    counts = np.array([[2, 0, 0, 1], [0, 3, 0, 0]])
    assert expert_load(counts) == pytest.approx(
        {
            "expert_tokens": 0.75,
            "expert_load_max": (2 / 0.75 + 3 / 0.75) / 2,
            "expert_load_entropy": (np.log(3) - 2 / 3 * np.log(2)) / 2 / np.log(4),
            "experts_unused": 5 / 8,
        },
        abs=1e-12,
    )
    assert expert_load(np.zeros((2, 4), np.int64)) == {}


@pytest.mark.parametrize(("blocks", "rows"), [(0, 100), (1, 100), (1, 2)])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_a_training_forward_counts_the_experts_of_its_scored_tokens_once(
    blocks, rows, replay, share, monkeypatch
):
    """As one graph and block by block, also where the head goes in pieces of two rows; neither the
    backward pass nor a score counts."""
    monkeypatch.setattr("mlx_parallm.models.blockwise.head_rows", lambda *_, **__: rows)
    trained = experts_of("qwen3_moe")
    watched_experts(trained, "on")
    inject_lora(trained, lora_config(rank=2, alpha=4))
    rng = np.random.default_rng(0)
    prompt, rollouts = tuple(rng.integers(0, VOCAB, 60).tolist()), []
    for _ in range(2):
        ids = rng.permuted(np.tile(np.arange(4, dtype=np.uint8), (6, 1)), axis=1)[:, :2]
        rollouts.append(
            Rollout(
                tokens=(*prompt, *rng.integers(0, VOCAB, 3).tolist()),
                mask=(0,) * 60 + (1,) * 3,
                logprobs=(0.0,) * 60 + (-1.0,) * 3,
                policy_versions=(0,) * 63,
                temperature=1.0,
                scores={},
                routed_experts=RoutedExperts(2, 2, ids.tobytes()),
            )
        )
    sequences = [TrainSequence(r, (0.0,) * len(r.tokens), fresh=True) for r in rollouts]
    options = {"token_budget": 1000, "share_prompts": share, "companions": [RecordedExperts()]}
    [part] = collate(sequences, [0, 1], **options).micro_batches
    model = BlockwiseModel(trained, blocks_per_eval=blocks)
    model.expert_load = np.zeros((2, 4), np.int64)
    batch = part.token_batch(replay=replay)
    model.score(batch)
    model.loss_and_gradients(batch, lambda logprobs, *_: (logprobs.sum(), ()))
    routing = ForwardRouting()
    with routed(routing):
        trained(mx.array([rollout.tokens[:-1] for rollout in rollouts]))
    tokens = np.array(routing.by_token()).reshape(2, 62, 2, 2)[:, 59:]
    if replay:
        tokens = np.stack([rollout.routed_experts.array() for rollout in rollouts])
    counted = tokens.reshape(6, 2, 2)
    if part.compact is not None:  # the end of the prompt is one token
        counted = np.concatenate([tokens[:, 1:].reshape(4, 2, 2), tokens[part.rows[0], :1]])
    assert (part.compact is not None) is share
    wanted = [np.bincount(counted[:, layer].ravel(), minlength=4) for layer in range(2)]
    np.testing.assert_array_equal(model.expert_load, wanted)
