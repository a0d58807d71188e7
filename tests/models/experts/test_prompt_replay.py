"""Experts of prompts' tokens: recorded by the engine in prefill and through its prefix cache, stored
once a group, and repeated by the trainer."""

import copy
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.engine.companions.routing import RecordedRouting
from mlx_parallm.environments.trajectory import SequenceRecorder
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.experts.replay import watched_experts
from mlx_parallm.models.experts.routing import UNFORCED, ForwardRouting, routed
from mlx_parallm.models.layouts.layout import pack_rows, share_prompts
from mlx_parallm.models.layouts.tree_rows import merge_rows
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import collate
from mlx_parallm.rl_training.step.routing import RecordedExperts, prompt_coverage
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.companions import with_fitting_experts
from mlx_parallm.rollout_store.completions import rollout_of
from mlx_parallm.rollout_store.payload import decode_group, encode_group
from mlx_parallm.types import PromptExperts, Rollout, RolloutGroup, RoutedExperts
from tests.engine.helpers import VOCAB, collect, collect_deltas, request, run, serve
from tests.models.experts.test_routing import experts_of
from tests.rl_training.making import make_config, make_policy

PARAMS = {"temperature": 1.0, "max_tokens": 5, "ignore_eos": True, "seed": 3}


def recording(name="qwen3_moe", **options):
    """A model, and an engine of a copy that records its experts."""
    model = experts_of(name)
    shape = watched_experts(model, "on")
    recorder = RecordedRouting(shape, prompts=True)
    options = {"max_rows": 4, "companions": [recorder], **options}
    return model, serve(copy.deepcopy(model), **options).engine


def rollouts_of(engine, prompts, **params):
    requests = [request(f"r{i}", p, **PARAMS, **params) for i, p in enumerate(prompts)]
    outputs = run(engine, requests)
    return [
        replace(rollout_of(asked, [choice]), scores={"reward": 0.0})
        for asked in requests
        for choice in outputs[asked.request_id].completions
    ]


def taken(model, tokens):
    """The experts of the model's own forward, [tokens, layers, k], sorted."""
    routing = ForwardRouting()
    with routed(routing):
        model(mx.array([tokens]))
    return np.sort(np.array(routing.by_token()), axis=-1)


def recorded(rollout):
    """[tokens - 1, layers, k] of a rollout with two layers of two experts; UNFORCED: none."""
    full = np.full((len(rollout.tokens) - 1, 2, 2), UNFORCED)
    full[np.array(rollout.mask[1:], bool)] = rollout.routed_experts.array()
    for part in rollout.prompt_experts:
        assert (full[part.start : part.stop] == UNFORCED).all(), "recorded twice"
        full[part.start : part.stop] = part.experts.array()
    return full


def moved(model):
    """Move the routers by half of their size."""
    for block in [m for m in model.modules() if "_routing_number" in vars(m)]:
        router = block.router if "router" in block else block.gate
        noise = mx.random.normal(router.weight.shape, key=mx.random.key(7))
        router.weight = router.weight + 0.5 * noise * mx.abs(router.weight).mean()


def sequences_of(rollouts):
    return [TrainSequence(r, (0.0,) * len(r.tokens), fresh=True) for r in rollouts]


def micro_batch(rollouts, **carried):
    sequences = sequences_of(rollouts)
    options = {"token_budget": 10_000, "companions": [RecordedExperts(**carried)]}
    mini = collate(sequences, range(len(sequences)), **options)
    return mini.micro_batches[0]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "olmoe", "qwen3_5_moe"])
@pytest.mark.parametrize("blocks", [1, 0])
def test_the_trainer_repeats_the_experts_of_prompts_in_every_layout(name, blocks):
    trained, engine = recording(name)
    prompts = [[5, 9, 2, 7, 1, 8, 4, 3, 6, 0, 2, 2, 7], [8, 1, 1, 6, 5, 5, 9, 3, 7, 2]]
    group = RolloutGroup("g", "e", tuple(rollouts_of(engine, prompts, n=2)))
    assert decode_group(encode_group(group)) == group
    trained.unfreeze()
    model = BlockwiseModel(trained, blocks_per_eval=blocks)
    part = micro_batch(group.rollouts, prompts=True)
    layouts = {"rows": (None, 2 * (12 + 9))}
    if model.shares_prompts:
        layouts["shared"] = (share_prompts(part.inputs, part.positions), 12 + 9)
    if model.packs_rows:
        layouts["packed"] = (pack_rows(part.inputs, part.positions, [2, 2]), 2 * (12 + 9))
    if model.merges_rows:
        layouts["tree"] = (merge_rows(part.inputs, part.positions), 12 + 9)
    assert len(layouts) >= (1 if name == "gpt_oss" else 2)
    for router in ("same", "moved"):
        if router == "moved":
            moved(trained)
        full = np.full((*part.inputs.shape, 2, 2), UNFORCED, np.int32)
        for i, row in enumerate(part.rows):
            ids = recorded(group.rollouts[row])
            assert (ids != UNFORCED).all()
            full[i, : len(ids)] = ids
        with routed(ForwardRouting(mx.array(full.reshape(-1, 2, 2)))):
            logits = trained(mx.array(part.inputs))
        rows = logits.reshape(-1, logits.shape[-1])[mx.array(part.positions)]
        wanted = np.array(token_logprobs(rows, mx.array(part.targets)))
        sampled_only = np.array(
            model.score(
                replace(part, carried={"experts": part.carried["experts"]}).token_batch(replay=True)
            )[0]
        )
        for layout, (compact, prompt_tokens) in layouts.items():
            model.forget_routing()
            batch = replace(part, compact=compact).token_batch(replay=True)
            scores = np.array(model.score(batch)[0])
            np.testing.assert_allclose(scores, wanted, atol=2e-4, err_msg=layout)
            assert model.prompt_experts_forced == 2 * prompt_tokens, layout
            assert (model.prompt_experts_differing > 0) is (router == "moved"), layout
    assert np.abs(sampled_only - wanted).max() > 1e-3, "prompts make no difference"


def test_prompts_are_recorded_through_chunks_and_the_prefix_cache():
    """A prompt of several chunks, one that continues from it, one inside of it, one by itself."""
    rng = np.random.default_rng(0)
    long, other = rng.integers(0, VOCAB, 40).tolist(), rng.integers(0, VOCAB, 7).tolist()
    model, engine = recording(prefill_chunk=16)
    [first] = rollouts_of(engine, [long])
    again = [list(first.tokens), [*long, 4, 4], long[:30], other]
    for rollout in [first, *rollouts_of(engine, again)]:
        np.testing.assert_array_equal(
            np.sort(recorded(rollout), axis=-1), taken(model, rollout.tokens[:-1])
        )
        assert prompt_coverage(sequences_of([rollout]))[0] == len(rollout.tokens) - 6
    model, engine = recording(prefix_cache_bytes=0)
    [alone] = rollouts_of(engine, [other])
    assert len(alone.prompt_experts[0].experts) == 6


def test_a_streamed_answer_has_them_too():
    _, engine = recording()
    [whole] = rollouts_of(engine, [[5, 9, 2, 7]])
    streamed = request("s", [5, 9, 2, 7], **PARAMS, stream=True)
    engine.add(streamed)
    deltas = collect_deltas(engine)["s"]
    assert rollout_of(streamed, deltas).prompt_experts == whole.prompt_experts != ()


def test_who_shares_a_prefill_has_the_whole_prompt_when_another_is_aborted():
    """The aborted request's answer is made while chunks of their prompt are still to come."""
    prompt = np.random.default_rng(0).integers(0, VOCAB, 40).tolist()
    model, engine = recording(prefill_chunk=8)
    first, second = (request(name, prompt, **PARAMS) for name in ("first", "second"))
    for asked in (first, second):
        engine.add(asked)
    engine.step()
    assert engine.scheduler.prefills, "the prompt is not computed yet"
    engine.abort("first")
    [choice] = collect(engine)["second"].completions
    rollout = rollout_of(second, [choice])
    np.testing.assert_array_equal(
        np.sort(recorded(rollout), axis=-1), taken(model, rollout.tokens[:-1])
    )


def test_a_model_without_experts_refuses_the_setting():
    with pytest.raises(ConfigError, match="experts"):
        make_policy(make_config(router_replay_prompts=True))
    with pytest.raises(ValueError, match=r'router_replay.*"off"'):
        make_config(router_replay_prompts=True, router_replay="off")


@pytest.mark.parametrize("cached", [True, False])
def test_turns_add_what_their_prompts_add(cached):
    model, engine = recording(prefix_cache_bytes=1 << 26 if cached else 0)
    recorder = SequenceRecorder([5, 9, 2, 7])
    for turn, answer in enumerate(([3, 3, 8], [1], [])):
        asked = request(f"t{turn}", recorder.token_ids, **PARAMS)
        [choice] = run(engine, [asked])[asked.request_id].completions
        recorder.add_sampled(choice)
        recorder.add_prompt(answer)
    rollout = recorder.rollout(temperature=1.0, stop_reason="stop")
    assert len(rollout.prompt_experts) == 3, "a stretch a turn"
    # the last token of a turn belongs to the next one's prompt
    assert [part.start for part in rollout.prompt_experts] == [0, 8, 16]
    np.testing.assert_array_equal(
        np.sort(recorded(rollout), axis=-1), taken(model, rollout.tokens[:-1])
    )
    scored = replace(rollout, scores={"reward": 1.0})
    check_group(RolloutGroup("g", "e", (scored,)), vocab_size=VOCAB, max_token_length=99)
    part = micro_batch([scored], prompts=True)
    assert sorted([*part.positions, *part.carried["prompt_experts"][0]]) == list(range(22))
    assert prompt_coverage(sequences_of([scored])) == (7, 7)


# ---------------------------------------------------------------------- the nouns

IDS = RoutedExperts(1, 2, bytes([0, 1, 2, 3]))
PLAIN = Rollout(
    (1, 2, 3, 4, 5),
    (0, 0, 0, 1, 1),
    (0.0, 0.0, 0.0, -1.0, -1.0),
    (0,) * 5,
    1.0,
    {"reward": 1.0},
    routed_experts=IDS,
    prompt_experts=(PromptExperts(0, IDS),),
)


def test_a_groups_prompt_is_stored_and_held_once():
    ids = np.random.default_rng(0).integers(0, 256, (400, 6, 4)).astype(np.uint8)
    mask = (0,) * 401 + (1,)
    rollouts = [
        Rollout(
            (0,) * 402,
            mask,
            (0.0,) * 402,
            (0,) * 402,
            1.0,
            {"reward": 1.0},
            # equal, and not the same object
            prompt_experts=(PromptExperts(0, RoutedExperts.of(ids.copy())),),
        )
        for _ in range(8)
    ]
    sizes = [len(encode_group(RolloutGroup("g", "e", tuple(rollouts[:n])))) for n in (1, 8)]
    assert sizes[0] > ids.size * 0.9 and sizes[1] < sizes[0] * 1.1
    group = decode_group(encode_group(RolloutGroup("g", "e", tuple(rollouts))))
    assert list(group.rollouts) == rollouts
    assert len({id(rollout.prompt_experts[0].experts) for rollout in group.rollouts}) == 1


def test_a_rollout_with_prompts_experts_survives_json_and_is_checked():
    assert Rollout.from_json(PLAIN.to_json()) == PLAIN
    for parts in (
        (PromptExperts(3, IDS),),
        (PromptExperts(0, IDS), PromptExperts(1, IDS)),
        (PromptExperts(-1, IDS),),
    ):
        wrong = replace(PLAIN, prompt_experts=parts)
        with pytest.raises(RolloutRejectedError, match="prompt's tokens"):
            check_group(RolloutGroup("g", "e", (wrong,)), vocab_size=10, max_token_length=8)
    group = RolloutGroup("g", "e", (replace(PLAIN, earlier=(PLAIN,)),))
    assert with_fitting_experts(group, (1, 2, 4)) == group
    with pytest.raises(RolloutRejectedError, match="expert 3"):
        with_fitting_experts(group, (1, 2, 3))
    left = with_fitting_experts(group, None).rollouts[0].segments
    assert [part.prompt_experts for part in left] == [(), ()]


def test_a_prompts_token_without_a_record_goes_by_its_router_and_is_counted():
    """Of [1 2 3 | 4 5] the tokens 1 and 2 are recorded in the first row, 2 in the second; token 3
    predicts the first sampled one."""
    one = replace(PLAIN, prompt_experts=())
    second = PLAIN.prompt_experts[0].behind(1)
    two = replace(PLAIN, prompt_experts=(second,))
    assert second == PromptExperts(1, RoutedExperts(1, 2, bytes([2, 3])))
    assert second.behind(2) is None
    part = micro_batch([PLAIN, two, one], prompts=True)
    width = part.inputs.shape[1]
    places = {
        (part.rows[p // width], p % width) for p in part.carried["prompt_experts"][0].tolist()
    }
    assert places == {(0, 0), (0, 1), (1, 1)}
    assert prompt_coverage(sequences_of([PLAIN, two, one])) == (6, 3)
    assert "prompt_experts" not in micro_batch([PLAIN]).carried, "by setting"
    assert part.token_batch().prompt_experts is None
