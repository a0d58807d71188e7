"""Prompt tokens of a step within a time limit."""

import pytest

from mlx_parallm.config.load import hardware_defaults
from mlx_parallm.engine.scheduling.prefill_pace import FEWEST_TOKENS, PrefillPace
from mlx_parallm.system.hardware import GIB, Hardware
from tests.engine.helpers import qwen3_model, request, run, serve


def test_a_step_grows_and_shrinks() -> None:
    pace, seen = PrefillPace(2048, 250), []
    for took in (50, 50, 50, 50, 200, 500, 500, 1e6, 100):
        pace.observe(pace.tokens, took)
        seen.append(pace.tokens)
    assert seen == [512, 1024, 2048, 2048, 2048, 819, 327, FEWEST_TOKENS, 2 * FEWEST_TOKENS]


def test_little_work_says_nothing_and_no_limit_is_none() -> None:
    pace = PrefillPace(2048, 250)
    pace.observe(8, 1)
    pace.observe(0, 1e6)
    assert pace.tokens == 256
    free = PrefillPace(2048, None)
    free.observe(2048, 1e6)
    assert free.tokens == 2048


def test_metal_has_a_limit() -> None:
    for backend, wanted in (("metal", 250), ("cuda", None), ("cpu", None)):
        defaults = hardware_defaults(Hardware(backend, "arm64", 8, 64 * GIB, 64 * GIB))
        assert defaults.get("server.max_prefill_ms") == wanted


def test_slow_steps_make_smaller_chunks_and_the_same_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every step counts as slow; the prompt's 300 tokens then go in chunks of ever fewer."""
    prompts = [[1 + (7 * i + j) % 50 for j in range(300)] for i in range(2)]
    asked = [
        request(str(i), prompt, max_tokens=5, temperature=0.0) for i, prompt in enumerate(prompts)
    ]
    expected = run(serve(qwen3_model(), prefill_chunk=128).engine, asked)
    seen: list[int] = []
    observe = PrefillPace.observe

    def slow(pace: PrefillPace, tokens: int, took_ms: float) -> None:
        seen.append(tokens)
        observe(pace, tokens, 400.0)

    monkeypatch.setattr(PrefillPace, "observe", slow)
    engine = serve(qwen3_model(), prefill_chunk=128, max_prefill_ms=250).engine
    found = run(engine, asked)
    assert seen[0] == 128 and seen[1] <= 64 and max(seen[4:]) < 40
    assert engine.scheduler.prefill_chunk == FEWEST_TOKENS
    for name, output in expected.items():
        assert found[name].completions[0].token_ids == output.completions[0].token_ids
