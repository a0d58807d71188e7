"""Drafts of text that repeats itself: the answers are those without them, in fewer steps."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.companions.routing import RecordedRouting
from mlx_parallm.engine.decoding.prompt_lookup import LONGEST_REST, PATIENCE, Drafts
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.starting import no_drafts
from mlx_parallm.types import Completion, Request
from tests.engine.helpers import (
    VOCAB,
    Served,
    collect,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
)
from tests.tiny_models import make_model

REPEATED = [*range(20, 60)] * 2


def circling_model() -> nn.Module:
    """A model whose answer hardly depends on what is further back: at temperature 0 it goes round
    in a circle."""
    model = qwen3_model()
    for layer in model.layers:
        layer.self_attn.o_proj.weight = 0.02 * layer.self_attn.o_proj.weight
    return model


# ---------------------------------------------------------------------- drafts


def test_a_draft_is_what_followed_the_same_tokens_before() -> None:
    drafts = Drafts([1, 2, 3, 4, 5, 6, 7, 8, 9], longest=16)
    assert drafts.next([]) == []
    assert drafts.next([2, 3]) == []
    assert drafts.next([2, 3, 4]) == [5, 6, 7, 8]  # four at first
    drafts.judge(4, 4, 8)
    assert drafts.next([2, 3, 4, 5, 6, 7, 8, 1, 2, 3]) == [4, 5, 6, 7, 8, 9, 2, 3]  # then eight


def test_the_last_place_counts_and_it_may_overlap() -> None:
    assert Drafts([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3], 16).next([])[:1] == [5]
    assert Drafts([7, 7, 7, 7], 16).next([]) == [7]


@pytest.mark.parametrize(("held", "length"), [(4, 8), (1, 4), (0, 4)])
def test_drafts_grow_with_success(held: int, length: int) -> None:
    drafts = Drafts(REPEATED, longest=8)
    assert len(drafts.next(REPEATED[:3])) == 4
    drafts.judge(4, held, 4)
    assert len(drafts.next(REPEATED[:8])) == length


def test_failures_in_a_row_are_followed_by_longer_rests() -> None:
    drafts, answer, rests = Drafts(REPEATED, longest=4), REPEATED * 20, []
    tokens = 3
    for _ in range(9):
        drafts.judge(4, 0, tokens)
        begin = tokens
        while not drafts.next(answer[:tokens]):
            tokens += 1
        rests.append(tokens - begin)
    assert rests == [1, 2, 4, 8, 16, 32, 64, LONGEST_REST, LONGEST_REST]
    drafts.judge(4, 1, tokens)
    drafts.judge(4, 0, tokens)
    assert drafts.next(answer[:tokens]) == []
    assert drafts.next(answer[: tokens + 1])


def test_images_are_not_guessed() -> None:
    assert Drafts([1, 2, 3, -5, -5, 1, 2, 3], 4).next([]) == []


def test_it_gives_up_for_a_while_where_nothing_is_repeated() -> None:
    drafts = Drafts(REPEATED, longest=4)
    assert drafts.next(REPEATED[:3])
    others = [*REPEATED[:3], *range(100, 100 + PATIENCE + 1)]
    assert not drafts.none_soon(others[:-1])
    assert drafts.none_soon(others)


# ---------------------------------------------------------------------- answers


def both(item: Request, **options: Any) -> tuple[Completion, Completion, Engine]:
    """The answer with drafts and without, and the engine with them."""
    model = circling_model()
    plain = run(serve(circling_model(), **options).engine, [item])[item.request_id].completions[0]
    engine = serve(model, prompt_lookup=16, **options).engine
    return run(engine, [item])[item.request_id].completions[0], plain, engine


def check_equal(drafted: Completion, plain: Completion) -> None:
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.logprobs == pytest.approx(plain.logprobs, abs=2e-5)
    assert drafted.policy_versions == plain.policy_versions
    assert (drafted.finish_reason, drafted.stop_reason) == (plain.finish_reason, plain.stop_reason)


@pytest.mark.parametrize("layout", ["tokens", "rectangle"])
def test_a_text_that_repeats_itself_takes_fewer_steps(layout: str) -> None:
    item = request("a", REPEATED, temperature=0.0, max_tokens=100, ignore_eos=True)
    drafted, plain, engine = both(item, by_tokens=layout == "tokens")
    check_equal(drafted, plain)
    counters = engine.counters
    assert counters.steps < 60
    assert counters.accepted_draft_tokens > 50
    assert counters.generation_tokens == 100
    assert counters.draft_tokens >= counters.accepted_draft_tokens


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_sampled_answers_are_the_same(temperature: float) -> None:
    for number, prompt in enumerate(ragged_prompts(6, longest=30)):
        item = request(
            "a",
            [*prompt, *prompt, *prompt],
            temperature=temperature,
            top_p=0.9,
            seed=number,
            max_tokens=60,
            logprobs=2,
        )
        drafted, plain, _ = both(item)
        check_equal(drafted, plain)
        assert len(drafted.top_logprobs or ()) == len(drafted.token_ids)
        assert drafted.processed_logprobs == pytest.approx(plain.processed_logprobs, abs=1e-4)


@pytest.mark.parametrize("stop", [{"max_tokens": 37}, {"max_tokens": 90, "stop_token_ids": (0,)}])
def test_an_answer_ends_where_it_ends_without_drafts(stop: dict[str, Any]) -> None:
    free = request("a", REPEATED, temperature=0.0, max_tokens=90, ignore_eos=True)
    circle = both(free)[1].token_ids
    if "stop_token_ids" in stop:  # one that first comes late
        late = max(set(circle), key=circle.index)
        stop = stop | {"stop_token_ids": (late,)}
    item = request("a", REPEATED, temperature=0.0, ignore_eos=True, **stop)
    drafted, plain, engine = both(item)
    check_equal(drafted, plain)
    # what it left in the prefix cache is right: the next turn continues from it
    again = request("b", [*REPEATED, *drafted.token_ids, 7], temperature=0.0, max_tokens=8)
    twice = run(engine, [again])["b"].completions[0]
    fresh = run(serve(circling_model()).engine, [again])["b"].completions[0]
    assert twice.cached_tokens > len(REPEATED)
    assert twice.token_ids == fresh.token_ids


def test_others_come_and_go_meanwhile() -> None:
    items = [
        request(name, REPEATED[start:], temperature=0.0, max_tokens=length, ignore_eos=True)
        for name, start, length in (("a", 0, 120), ("b", 3, 20), ("c", 5, 30))
    ]
    plain = run(serve(circling_model()).engine, items)
    engine = serve(circling_model(), prompt_lookup=8).engine
    outputs: dict[str, Any] = {}
    engine.add(items[0])
    for later in items[1:]:
        for _ in range(12):
            engine.step()
        engine.check_integrity()
        engine.add(later)
    outputs = collect(engine)
    engine.check_integrity()
    for item in items:
        assert (
            outputs[item.request_id].completions[0].token_ids
            == plain[item.request_id].completions[0].token_ids
        )
    assert engine.counters.accepted_draft_tokens > 20


def test_a_drafted_row_takes_no_more_room_than_it_can_come_to_hold() -> None:
    engine = serve(circling_model(), prompt_lookup=8).engine
    engine.add(request("a", REPEATED, temperature=0.0, max_tokens=40, ignore_eos=True))
    while not engine._draft_row.is_out:
        engine.step()
    most = (len(REPEATED) + 40) * engine.cache.token_bytes()
    while engine._draft_row.is_out:
        assert engine.counters.kv_bytes <= most
        engine.step()


def test_an_abort_meanwhile_frees_the_row() -> None:
    engine = serve(circling_model(), prompt_lookup=8).engine
    engine.add(request("a", REPEATED, temperature=0.0, max_tokens=200, ignore_eos=True))
    while not engine.counters.accepted_draft_tokens:
        engine.step()
    engine.abort("a")
    collect(engine)
    engine.check_integrity()
    assert not engine.scheduler.rows
    engine.release_memory()
    assert engine.counters.kv_bytes == 0


def test_an_adapter_and_new_weights_meanwhile() -> None:
    served = serve(circling_model(), prompt_lookup=8)
    served.weights.add_adapter("x", random_adapter(served, 1))
    item = request("a", REPEATED, temperature=0.0, max_tokens=60, adapter="x", ignore_eos=True)
    plain = serve(circling_model())
    plain.weights.add_adapter("x", random_adapter(plain, 1))
    assert (
        run(served.engine, [item])["a"].completions[0].token_ids
        == run(plain.engine, [item])["a"].completions[0].token_ids
    )


def test_where_a_draft_cannot_be_rewound_there_is_none() -> None:
    mamba = {
        "model_type": "mamba",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "state_size": 8,
        "conv_kernel": 4,
        "time_step_rank": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
    }
    served: Served = serve(make_model(mamba), prompt_lookup=8)
    item = request("a", REPEATED, temperature=0.0, max_tokens=40, ignore_eos=True)
    assert len(run(served.engine, [item])["a"].completions[0].token_ids) == 40
    assert served.engine.counters.draft_tokens == 0


@pytest.mark.parametrize("name", ["presence_penalty", "logit_bias"])
def test_rows_whose_logits_depend_on_the_tokens_before_are_left_alone(name: str) -> None:
    value: Any = 1.5 if name == "presence_penalty" else {3: 1.0}
    item = request("a", REPEATED, temperature=0.0, max_tokens=40, ignore_eos=True, **{name: value})
    drafted, plain, engine = both(item)
    check_equal(drafted, plain)
    assert engine.counters.draft_tokens == 0


def test_nan_ends_the_request_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = serve(circling_model(), prompt_lookup=8).engine
    engine.add(request("a", REPEATED, temperature=0.0, max_tokens=200, ignore_eos=True))
    while not engine.counters.accepted_draft_tokens:
        engine.step()
    launch = engine._runner.launch_draft

    def spoiled(sequence: Any, draft: Sequence[int], caches: list[Any], view: Any) -> Any:
        for cache in caches:
            cache.values = cache.values * mx.nan
        return launch(sequence, draft, caches, view)

    monkeypatch.setattr(engine._runner, "launch_draft", spoiled)
    accepted = engine.counters.accepted_draft_tokens
    output = collect(engine)["a"]
    assert output.completions[0].finish_reason == "error"
    assert engine.counters.accepted_draft_tokens >= accepted, "a counter of /metrics went back"
    monkeypatch.undo()
    after = run(engine, [request("b", [1, 2, 3], temperature=0.0, max_tokens=5)])["b"]
    fresh = run(
        serve(circling_model()).engine, [request("b", [1, 2, 3], temperature=0.0, max_tokens=5)]
    )["b"]
    assert after.completions[0].token_ids == fresh.completions[0].token_ids


def test_what_excludes_drafts_is_refused_or_named() -> None:
    for changes in ({"kv_bits": 8}, {"enable_return_routed_experts": True}):
        with pytest.raises(ValueError, match="prompt_lookup"):
            ServerConfig(prompt_lookup=8, **changes)
    with pytest.raises(ValueError, match="prompt_lookup"):  # a row of logits for each token
        ServerConfig(prompt_lookup=100_000)
    assert no_drafts([], deterministic=False) == ""
    assert "deterministic" in no_drafts([], deterministic=True)
    assert "experts" in no_drafts([RecordedRouting((2, 2, 8))], deterministic=False)
