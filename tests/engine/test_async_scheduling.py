"""server.async_scheduling: the next step is started before this one is read, and nothing that a
client gets changes."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.config.load import parse_config
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.device.traits import on_cpu
from mlx_parallm.system.hardware import async_scheduling
from mlx_parallm.system.serve_priority import Turns
from tests.engine.helpers import (
    collect,
    qwen3_model,
    ragged_prompts,
    request,
    run,
    serve,
    short_segments,
)

PROMPT = [1, 2, 3]


def count_ahead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of rows of each step that is started ahead."""
    started: list[int] = []
    launch_after = engine._runner.launch_after

    def counted(step, view):
        started.append(len(step.rows))
        return launch_after(step, view)

    monkeypatch.setattr(engine._runner, "launch_after", counted)
    return started


def load() -> list:
    """Different lengths, a group, filters, alternatives, a stop string, and rows that no step
    may run ahead of."""
    prompts = ragged_prompts(6, longest=40)
    return [
        request("short", prompts[0], temperature=0.0, max_tokens=5, ignore_eos=True),
        request("long", prompts[1], seed=3, max_tokens=40, ignore_eos=True),
        request("group", prompts[2], n=3, seed=4, max_tokens=25, ignore_eos=True),
        request("filters", prompts[3], seed=5, top_k=9, top_p=0.9, logprobs=3, max_tokens=30),
        request("stops", prompts[4], seed=6, stop=("a", "\x01", "\x02"), max_tokens=30),
    ]


@pytest.mark.parametrize("by_tokens", [True, False])
def test_answers_are_those_of_one_step_after_the_other(by_tokens, monkeypatch):
    outputs = []
    with short_segments():
        for ahead in (False, True):
            served = serve(qwen3_model(), max_rows=7, by_tokens=by_tokens, async_scheduling=ahead)
            started = count_ahead(served.engine, monkeypatch)
            outputs.append(run(served.engine, load()))
            assert bool(started) == ahead and (
                not ahead or (len(started) > 20 and max(started) > 4)
            )
            served.engine.check_integrity()
    one_by_one, ahead = (
        {name: out.completions for name, out in found.items()} for found in outputs
    )
    for name, completions in one_by_one.items():
        for plain, other in zip(completions, ahead[name], strict=True):
            assert (plain.token_ids, plain.text, plain.finish_reason) == (
                other.token_ids,
                other.text,
                other.finish_reason,
            )
            assert other.logprobs == pytest.approx(plain.logprobs, abs=1e-5)


@pytest.mark.parametrize(
    "values", [{"presence_penalty": 1.5}, {"min_tokens": 8}, {"logit_bias": {5: 2.0}}]
)
def test_no_step_runs_ahead_of_a_token_that_it_depends_on(values, monkeypatch):
    served = serve(qwen3_model(), async_scheduling=True)
    started = count_ahead(served.engine, monkeypatch)
    plain = request("plain", PROMPT, max_tokens=6, ignore_eos=True)
    run(
        served.engine,
        [
            request(
                "r", PROMPT, seed=1, max_tokens=8, ignore_eos="min_tokens" not in values, **values
            ),
            plain,
        ],
    )
    assert not started


def test_a_token_that_was_started_before_a_publish_has_the_version_that_computed_it():
    served, other = (
        serve(qwen3_model(), policy="policy", async_scheduling=True),
        qwen3_model(seed=1),
    )
    served.engine.add(request("r", PROMPT, temperature=0.0, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        served.engine.step()
    served.weights.publish_parameters(dict(tree_flatten(other.parameters())))
    completion = collect(served.engine)["r"].completions[0]
    assert completion.policy_versions == (0,) * 5 + (1,) * 7
    cache, inputs, wanted = make_prompt_cache(served.plain), PROMPT, []
    for model in [served.plain] * 5 + [other] * 7:
        wanted.append(int(mx.argmax(model(mx.array([inputs]), cache=cache)[0, -1]).item()))
        inputs = wanted[-1:]
    assert list(completion.token_ids) == wanted


def test_freezing_reads_what_was_started():
    served = serve(qwen3_model(), async_scheduling=True)
    served.engine.add(request("r", PROMPT, stream=True, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        served.engine.step()
    served.engine.pause("trainer", freeze=True)
    assert served.engine.has_work
    served.engine.step()
    assert [len(sequence.tokens) for sequence in served.engine.scheduler.rows] == [5]
    assert not served.engine.has_work
    served.weights.publish_parameters(dict(tree_flatten(qwen3_model(seed=1).parameters())))
    served.engine.resume("trainer")
    assert collect(served.engine)["r"].completions[0].policy_versions == (0,) * 5 + (1,) * 7


def test_it_is_off_on_a_cpu_and_when_deterministic_unless_it_is_set():
    assert parse_config({}).server.async_scheduling is None
    assert async_scheduling(None, deterministic=False) == (not on_cpu())
    assert not async_scheduling(None, deterministic=True)
    assert async_scheduling(True, deterministic=False)
    with pytest.raises(ConfigError, match="leave one out"):
        parse_config(
            {
                "server": {"async_scheduling": True},
                "rl_training": {"deterministic": True, "max_staleness": 0},
            }
        )


@pytest.mark.parametrize("by_tokens", [True, False])
def test_a_row_that_was_aborted_with_nan_on_its_way_spoils_no_other(by_tokens):
    served = serve(
        qwen3_model(),
        policy="policy",
        by_tokens=by_tokens,
        prefix_cache_bytes=0,
        async_scheduling=True,
    )
    good = dict(tree_flatten(served.plain.parameters()))
    served.engine.add(request("r", PROMPT, max_tokens=50, ignore_eos=True))
    for _ in range(4):
        served.engine.step()
    served.weights.publish_parameters({path: array * float("nan") for path, array in good.items()})
    served.engine.step()
    served.engine.abort("r")
    served.weights.publish_parameters(good)
    served.engine.step()
    served.engine.add(request("next", [5, 6], max_tokens=4, ignore_eos=True))
    # its row is the aborted one's; beside a longer one it is masked where that one has written
    served.engine.step()
    found = run(served.engine, [request("longer", range(30), max_tokens=4, ignore_eos=True)])
    assert [found[name].completions[0].error for name in ("next", "longer")] == [None, None]


def test_a_scored_text_waits_for_room_also_while_steps_run_ahead():
    bound = 200 * serve(qwen3_model()).engine.cache.token_bytes()
    served = serve(qwen3_model(), kv_cache_bytes=bound, async_scheduling=True)
    served.engine.add(request("r", PROMPT, max_tokens=150, ignore_eos=True))
    for _ in range(4):
        served.engine.step()
    served.engine.add(request("text", list(range(80)), prompt_logprobs=1, max_tokens=0))
    served.engine.step()
    assert served.engine.scores.oldest.done == 0 and served.engine.scheduler.reserved > 200


def test_requests_grow_older_while_steps_run_ahead(monkeypatch):
    served = serve(qwen3_model(), max_rows=1, async_scheduling=True)
    started = count_ahead(served.engine, monkeypatch)
    served.engine.add(request("r", PROMPT, max_tokens=50, ignore_eos=True))
    served.engine.add(request("waits", PROMPT, max_tokens=5))
    for _ in range(30):
        served.engine.step()
    assert len(started) > 20 and served.engine.scheduler._step == 30 + 1


def test_a_request_that_waits_for_memory_does_not_stop_it(monkeypatch):
    bound = 200 * serve(qwen3_model()).engine.cache.token_bytes()
    served = serve(qwen3_model(), kv_cache_bytes=bound, async_scheduling=True)
    started = count_ahead(served.engine, monkeypatch)
    served.engine.add(request("r", PROMPT, max_tokens=150, ignore_eos=True))
    served.engine.add(request("waits", PROMPT, max_tokens=150, ignore_eos=True))
    for _ in range(20):
        served.engine.step()
    assert len(served.engine.scheduler.waiting) == 1 and len(started) > 10
    assert len(collect(served.engine)) == 2


def test_the_engine_does_not_go_ahead_of_its_rest():
    """serve_priority = "train": after a step the device is the trainer's alone."""
    turns = Turns("train")
    assert not turns.engine_rests
    with turns.training():
        assert turns.engine_rests and not Turns("balanced").engine_rests
    served = serve(qwen3_model(), async_scheduling=True)
    served.engine.add(request("r", PROMPT, max_tokens=50, ignore_eos=True))
    for _ in range(4):
        served.engine.step(ahead=False)
    assert served.engine._ahead is None


def test_a_failure_of_a_step_that_was_started_ahead_loses_no_token(monkeypatch):
    served, twin = serve(qwen3_model(), async_scheduling=True), serve(qwen3_model())
    plain = request("r", PROMPT, seed=1, max_tokens=20, ignore_eos=True)
    served.engine.add(plain)
    for _ in range(5):
        served.engine.step()
    collected = served.engine._runner.collect
    monkeypatch.setattr(served.engine._runner, "collect", lambda step: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        served.engine.step()
    monkeypatch.setattr(served.engine._runner, "collect", collected)
    assert not served.engine.recover() and served.engine._ahead is None
    found, wanted = collect(served.engine)["r"], run(twin.engine, [plain])["r"]
    assert found.completions[0].token_ids == wanted.completions[0].token_ids
