"""InferenceModule over engines in this process: an own one, one that runs already, and the model
of mlx_lm.load."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.errors import (
    ConfigError,
    ContextLengthError,
    EngineUnavailableError,
    GenerationFailedError,
    ModelError,
    RequestError,
)
from mlx_parallm.inference import engine as inference_engine
from mlx_parallm.inference import module as module_of_inference
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import linear_layers, linear_shape, save_adapter
from tests.conftest import TinyEngine
from tests.server.fake_engine import FakeEngine
from tests.tiny_models import TINY_ASSETS
from tests.tokenizer_families import make_tokenizer
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SUM = [{"role": "user", "content": "Sum: 47+38"}]
NEVER_CLOSED = (
    "from mlx_parallm.inference.module import"
    " *\nprint(InferenceModule('builtin:tiny').generate('a', 4))"
)
CONFIG = load_config(
    None, ["server.max_model_len=256", "server.prefill_chunk=16", "server.batch_size=16"]
)


@pytest.fixture(scope="module")
def inference() -> Iterator[InferenceModule]:
    with InferenceModule("builtin:tiny", config=CONFIG) as module:
        yield module


@pytest.fixture
def own() -> Iterator[InferenceModule]:
    """One whose weights a test may change."""
    with InferenceModule("builtin:tiny", config=CONFIG) as module:
        yield module


def adapter(model: nn.Module, seed: int = 0) -> dict[str, LoraPair]:
    """Strong enough to change what is said."""
    keys, layers = iter(mx.random.split(mx.random.key(seed), 100)), {}
    for path, layer in linear_layers(model).items():
        wide, out = linear_shape(layer)
        layers[path] = LoraPair(
            mx.random.normal((wide, 4), key=next(keys)),
            mx.random.normal((4, out), key=next(keys)),
            0.1,
        )
    mx.eval([array for pair in layers.values() for array in pair.arrays])
    return layers


def test_answers_are_a_sequence_of_texts_with_what_was_sampled(inference: InferenceModule) -> None:
    prompts = ["47+38 =", SUM]
    result = inference.generate(prompts, max_new_tokens=6, num_return_sequences=3, seed=1)
    assert len(result) == 6 == len(result.token_ids) and list(result) == result.texts == result[:6]
    assert inference.tokenizer is not None
    for number, (text, ids) in enumerate(zip(result, result.token_ids, strict=True)):
        assert text == inference.tokenizer.decode(ids) and 1 <= len(ids) <= 6
        ended = ids[-1] in inference.tokenizer.eos_token_ids
        assert result.metadata["finish_reasons"][number] == ("stop" if ended else "length")
        assert result.metadata["policy_versions"][number] == (0,) * len(ids)
    rendered = inference.tokenizer.render_chat(SUM)
    assert [list(ids) for ids in result.metadata["prompt_token_ids"][3:]] == [rendered] * 3
    assert result.logprobs is None and result.logits is None
    ids_too = inference.generate([rendered], max_new_tokens=6, do_sample=False)
    assert (
        ids_too.texts == inference.generate(SUM, max_new_tokens=6, temperature=0).texts
    )  # one prompt is a list of one
    assert inference.generate([]).texts == []


def test_options_reach_the_sampler(inference: InferenceModule) -> None:
    def said(**options: Any) -> list[str]:
        return inference.generate(["ab", "ab", "ab"], max_new_tokens=12, **options).texts

    assert said(seed=5) == said(seed=5) != said(seed=6)
    # each prompt has its own stream
    assert len(set(said(seed=5, temperature=2.0))) == 3
    one, other = (inference.generate(["ab"] * 16, max_new_tokens=12).texts for _ in range(2))
    assert one != other
    greedy = said(do_sample=False, temperature=9.0)
    assert len(set(greedy)) == 1 and said(top_k=1) == said(top_p=1e-6) == greedy
    stopped = inference.generate(["ab"], max_new_tokens=12, do_sample=False, stop=greedy[0][3])
    assert stopped[0] == greedy[0][: greedy[0].index(greedy[0][3])]
    assert len(inference.generate("ab", 3, do_sample=False).token_ids[0]) <= 3
    long = [1] * 250
    # 256 tokens are the context
    assert len(inference.generate([long], do_sample=False).token_ids[0]) <= 6
    with pytest.raises(ContextLengthError):
        inference.generate([long], max_new_tokens=7)


def test_scores_are_those_of_the_sampler(inference: InferenceModule) -> None:
    """And those of a plain forward over the untouched tree."""
    prompts = ["Reverse: hfkdo", "47+38 =", "x", [3, 5, 8, 13] * 6]
    result = inference.generate(
        prompts, max_new_tokens=40, seed=6, return_logprobs=True, return_logits=True
    )
    assert len({token for ids in result.token_ids for token in ids}) >= 20
    scores = inference.get_logprobs(prompts, result)
    assert inference.loaded is not None
    for prompt, ids, sampled, score, logits in zip(
        result.metadata["prompt_token_ids"],
        result.token_ids,
        result.logprobs,
        scores,
        result.logits,
        strict=True,
    ):
        assert sampled.dtype == score.dtype == logits.dtype == np.float32
        assert sampled.shape == score.shape == (len(ids),) and logits.shape == (
            len(ids),
            inference.loaded.vocab_size,
        )
        np.testing.assert_allclose(score, sampled, atol=1e-4)
        plain = inference.loaded.model(mx.array([*prompt, *ids])[None])[0].astype(mx.float32)
        expected = np.array(plain)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(logits, expected, atol=2e-3)
        normal = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
        np.testing.assert_allclose(score, normal[np.arange(len(ids)), list(ids)], atol=1e-3)


def test_given_texts_are_scored(inference: InferenceModule) -> None:
    right, empty = inference.get_logprobs([SUM, SUM], ["85", ""])
    wrong = inference.get_logprobs(SUM, "11")[0]
    assert right.shape == wrong.shape == (2,) and empty.shape == (0,) and right.sum() > wrong.sum()
    assert inference.get_logits([SUM, SUM], ["", (5,)])[0].shape[0] == 0
    with pytest.raises(RequestError, match="1 responses to 2 prompts"):
        inference.get_logprobs(["a", "b"], ["c"])
    with pytest.raises(RequestError, match="the prompt is empty"):
        inference.get_logprobs([""], ["c"])


def test_an_engine_that_nobody_can_use_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[EngineThread] = []
    start = InferenceModule._start_engine

    def started(*given: Any) -> EngineThread:
        engines.append(start(*given))
        return engines[-1]

    def refused(*_: Any, **__: Any) -> None:
        raise ModelError("no backend")

    monkeypatch.setattr(InferenceModule, "_start_engine", started)
    monkeypatch.setattr(module_of_inference, "EngineBackend", refused)
    with pytest.raises(ModelError, match="no backend"):
        InferenceModule("builtin:tiny", config=CONFIG)
    [engine] = engines
    assert not engine._thread.is_alive()


def test_logits_are_bounded(inference: InferenceModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_engine, "MAX_LOGITS_BYTES", 4096)
    with pytest.raises(RequestError, match="responses"):
        inference.get_logits(["a"], [[5] * 20])


def test_greedy_answers_are_kept_until_weights_change(own: InferenceModule) -> None:
    assert own.loaded is not None and own.weights is not None and own.client is not None

    def ask(text: str = "ab", **options: Any) -> tuple[str, bool]:
        result = own.generate(text, 8, **{"do_sample": False, **options})
        return result[0], result.metadata["cached"][0]

    def steps() -> int:
        assert own.client is not None and own.client.wait_idle(10), (
            "the last step is counted after its answer is there"
        )
        return own.client.stats().steps

    first, cached = ask()
    before = steps()
    assert (not cached, ask(), steps()) == (True, (first, True), before)
    assert (
        not ask(stop="q")[1]
        and not ask("ba")[1]
        and not own.generate("ab", 9, do_sample=False).metadata["cached"][0]
    )
    # sampled: never
    assert not any(own.generate("ab", 8, seed=1).metadata["cached"][0] for _ in range(2))
    own.weights.publish_adapter(adapter(own.loaded.model))
    assert ask() == (first, False)  # the base is what it was, and nobody says so
    own.adapter = "policy"
    second, cached = ask()
    assert not cached and second != first and ask() == (second, True)
    own.weights.publish_adapter(adapter(own.loaded.model, seed=1))
    third, cached = ask()
    assert not cached and third != second
    assert set(own.generate("ab", 8, do_sample=False).metadata["policy_versions"][0]) == {2}
    # no new version, and still another answer
    own.weights.add_adapter("other", adapter(own.loaded.model, seed=2))
    own.adapter = "other"
    fourth, cached = ask()
    own.weights.add_adapter("other", adapter(own.loaded.model, seed=3))
    assert ask()[0] != fourth


def test_an_answer_during_which_weights_change_is_not_kept(
    own: InferenceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, weights, model = own.client, own.weights, own.loaded and own.loaded.model
    assert client is not None and weights is not None and model is not None
    layers, generate_many = adapter(model), client.generate_many

    async def published_meanwhile(requests: Any) -> Any:
        outputs = await generate_many(requests)
        weights.publish_adapter(layers)
        return outputs

    monkeypatch.setattr(client, "generate_many", published_meanwhile)
    assert [own.generate("ab", 4, do_sample=False).metadata["cached"] for _ in range(2)] == [
        [False],
        [False],
    ]


def test_the_oldest_answers_are_forgotten(
    own: InferenceModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_engine, "CACHED_ANSWERS", 2)

    def cached(text: str) -> bool:
        return bool(own.generate(text, 1, do_sample=False).metadata["cached"][0])

    assert [cached(text) for text in ("a", "b", "a", "c", "a", "b")] == [
        False,
        False,
        True,
        False,
        True,
        False,
    ]


def test_calls_of_many_threads_share_the_engines_steps(inference: InferenceModule) -> None:
    client = inference.client
    assert client is not None

    def steps(seeds: range) -> int:
        before, barrier = client.stats().steps, threading.Barrier(len(seeds))

        def ask(seed: int) -> list[Any]:
            barrier.wait()
            return inference.generate([[5, 6, 7]], 30, seed=seed).token_ids or []

        with ThreadPoolExecutor(len(seeds)) as pool:
            assert len(list(pool.map(ask, seeds))) == len(seeds)
        return client.stats().steps - before

    alone = [steps(range(seed, seed + 1)) for seed in range(8)]
    together = steps(range(8))
    assert together <= max(alone) + 8 < sum(alone) / 2


async def test_asyncio_code_awaits_and_cancels(inference: InferenceModule) -> None:
    client = inference.client
    assert client is not None
    together = await asyncio.gather(
        *(inference.agenerate(SUM, 8, do_sample=False) for _ in range(3))
    )
    assert len({result[0] for result in together}) == 1
    before = client.stats().requests_aborted
    endless = asyncio.create_task(inference.agenerate([[7] * 10], 240, num_return_sequences=8))
    await asyncio.to_thread(until, lambda: client.stats().running > 0)
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    assert await asyncio.to_thread(client.wait_idle, 30)
    assert client.stats().requests_aborted == before + 1


def test_the_model_of_mlx_lm_stays_as_it_is(inference: InferenceModule) -> None:
    model, tokenizer = mlx_lm.load(str(TINY_ASSETS))
    kinds = [type(module) for module in model.modules()]
    arrays = [array.dtype for _, array in nn.utils.tree_flatten(model.parameters())]
    prompts = [SUM, "Sort: dbca", "47+38 ="]
    with InferenceModule(model=model, tokenizer=tokenizer) as adopted:
        result = adopted.generate(prompts, max_new_tokens=12, do_sample=False)
        assert adopted.source is model and adopted.max_model_len == 2048
        assert (
            result.token_ids
            == inference.generate(prompts, max_new_tokens=12, do_sample=False).token_ids
        )
    assert [type(module) for module in model.modules()] == kinds
    assert [array.dtype for _, array in nn.utils.tree_flatten(model.parameters())] == arrays


def test_an_adapter_is_answered_with(inference: InferenceModule, tmp_path: Path) -> None:
    assert inference.loaded is not None
    layers = adapter(inference.loaded.model)
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", layers, num_layers=3)
    with InferenceModule(
        "builtin:tiny", adapter_path=tmp_path / "adapter", config=CONFIG
    ) as adapted:
        said = adapted.generate("ab", 8, do_sample=False)[0]
        assert (
            adapted.adapter == "policy" and said != inference.generate("ab", 8, do_sample=False)[0]
        )
        adapted.adapter = None
        assert (
            adapted.generate("ab", 8, do_sample=False)[0]
            == inference.generate("ab", 8, do_sample=False)[0]
        )
        assert adapted.weights is not None and adapted.weights.policy == "policy"
    with pytest.raises(ModelError):
        InferenceModule("builtin:tiny", adapter_path=tmp_path / "none")


def test_over_a_running_engine(
    tiny_engine: TinyEngine, tiny_tokenizer: Any, inference: InferenceModule
) -> None:
    with InferenceModule.over(tiny_engine.client, tiny_tokenizer) as over:
        result = over.generate([SUM, "47+38 ="], max_new_tokens=8, do_sample=False)
        assert (
            result.token_ids
            == inference.generate([SUM, "47+38 ="], max_new_tokens=8, do_sample=False).token_ids
        )
        # its weights are not known here
        assert over.generate(SUM, 8, do_sample=False).metadata["cached"] == [False]
        assert (
            over.loaded is None
            and over.client is tiny_engine.client
            and over.tokenizer is not tiny_tokenizer
        )
    with pytest.raises(EngineUnavailableError, match="closed"):
        over.generate("a")
    assert tiny_engine.client.stats().alive


def test_what_fails_in_the_engine_is_raised(tiny_tokenizer: Any) -> None:
    for behaviour, error in (
        ("fail", GenerationFailedError),
        ("unavailable", EngineUnavailableError),
    ):
        with InferenceModule.over(FakeEngine(behaviour), tiny_tokenizer) as module:  # type: ignore[arg-type]
            with pytest.raises(error):
                module.generate("a")
            with pytest.raises(RequestError, match="needs the engine"):
                module.get_logits("a", "b")


async def test_closing_ends_what_is_under_way(tiny_tokenizer: Any) -> None:
    engine = FakeEngine("hang")
    module = InferenceModule.over(engine, tiny_tokenizer)  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(module.generate, "a")
        awaiting = asyncio.create_task(module.agenerate("a"))
        await asyncio.to_thread(until, lambda: engine.running == 2)
        module.close()
        module.close()
        with pytest.raises(EngineUnavailableError, match="closed"):
            waiting.result(10)
        with pytest.raises(EngineUnavailableError, match="closed"):
            await awaiting
    assert engine.running == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no model"),
        ({"model": nn.Linear(1, 1)}, "a model needs its tokenizer"),
        ({"model": "m", "backend": "openai"}, "base_url"),
        ({"model": "m", "backend": "tpu"}, '"mlx"'),
        ({"model": "m", "base_url": "http://x/v1"}, 'belong to "openai"'),
        (
            {"model": "builtin:tiny", "config": load_config(None, ["server.max_model_len=4096"])},
            "2048 tokens",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        InferenceModule(**arguments)


@pytest.mark.parametrize("prompts", [[3.5], [None], [[]], [[SUM[0], "a"]], {"a": 1}])
def test_prompts_that_are_none_are_refused(inference: InferenceModule, prompts: Any) -> None:
    with pytest.raises(RequestError, match="expected a text"):
        inference.generate(prompts)
    with pytest.raises(TypeError, match="beams"):
        inference.generate("a", beams=3)


def test_a_response_as_text_has_the_tokens_that_it_has_behind_its_prompt(tmp_path: Path) -> None:
    """A SentencePiece tokenizer would put a space before a response that is tokenised alone; the
    prompt as text, as a chat and as ids."""
    tokenizer = make_tokenizer(tmp_path, "llama2")
    backend, chat = (
        inference_engine.EngineBackend(None, tokenizer),
        [{"role": "user", "content": "Hello"}],
    )  # type: ignore[arg-type]
    for prompt in ("Hello\n", chat, tokenizer.encode("Hello\n")):
        before, after, _ = backend._pair(prompt, "world")
        assert tokenizer.decode(after, opens_text=False) == "world"
        assert tokenizer.decode([*before, *after]).endswith("\nworld")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (["-m", "mlx_parallm.faces.primitives.inference"], "= 85"),
        (["examples/inference.py"], "eight threads:"),
        (
            ["-c", NEVER_CLOSED],
            "texts=",
        ),
    ],
    ids=["demo", "example", "never closed"],
)
def test_programs_run_to_their_end(program: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, *program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "") and says in done.stdout, done
