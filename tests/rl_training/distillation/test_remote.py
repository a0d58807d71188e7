"""Teachers over HTTP: each API's form against the same numbers, a server that goes and comes back."""

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.models.loading import LoadedModel, load_model, load_tokenizer
from mlx_parallm.rl_training.distillation import remote, signal
from mlx_parallm.rl_training.distillation.remote import rest_of
from mlx_parallm.rl_training.distillation.tokenizers import PIECES
from mlx_parallm.rl_training.step.distillation import AGREES, IDS, LOGPROBS, TARGETS
from tests.rl_training.distillation.making import BASE
from tests.rl_training.distillation.test_teachers import (
    TINY,
    batch_of,
    mlx_tiny,
    question,
    tiny_trainer,
)
from tests.scripted_http import Reply, scripted_http
from tests.server.serving import RunningServer

VOCAB = 320


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model(TINY)


@pytest.fixture
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers are compared by a few texts, where a test is about something else."""
    monkeypatch.setattr(remote, "texts", lambda: PIECES)


def table(tokens: list[int]) -> np.ndarray:
    """log-probabilities of what follows each prefix, [T, V], a function of the tokens alone."""
    rows = []
    for end in range(1, len(tokens) + 1):
        seed = zlib.crc32(np.array(tokens[:end], np.int64).tobytes())
        logits = 2 * np.random.default_rng(seed).normal(size=VOCAB)
        rows.append(logits - np.log(np.exp(logits).sum()))
    return np.array(rows)


def best(row: np.ndarray, count: int) -> list[int]:
    return np.argsort(-row)[:count].tolist()


def as_vllm(body: dict[str, Any]) -> dict[str, Any]:
    tokens, rows = body["prompt"], table(body["prompt"])
    entries: list[Any] = [None]
    for token, row in zip(tokens[1:], rows, strict=False):
        ids = dict.fromkeys([token, *best(row, body["prompt_logprobs"])])
        entries.append({str(key): {"logprob": float(row[key]), "rank": 1} for key in ids})
    return {"choices": [{"text": "", "prompt_logprobs": entries}]}


def as_echo(body: dict[str, Any]) -> dict[str, Any]:
    tokens, rows = body["prompt"], table(body["prompt"])
    own = [None, *(float(row[t]) for t, row in zip(tokens[1:], rows, strict=False)), -1.0]
    top = [None, *({"x": float(row.max())} for row in rows)]
    return {"choices": [{"logprobs": {"token_logprobs": own, "top_logprobs": top}}]}


def as_sglang(body: dict[str, Any]) -> dict[str, Any]:
    tokens, rows = body["input_ids"], table(body["input_ids"])
    own: list[Any] = [[None, tokens[0], None]]
    own += [[float(row[t]), t, None] for t, row in zip(tokens[1:], rows, strict=False)]
    meta: dict[str, Any] = {"input_token_logprobs": own}
    if body["top_logprobs_num"]:
        tops = [
            [[float(row[key]), key, None] for key in best(row, body["top_logprobs_num"])]
            for row in rows[:-1]
        ]
        meta["input_top_logprobs"] = [None, *tops]
    return {"text": "", "meta_info": meta}


def scripted(*, refuse: Callable[[str], Reply | None] | None = None) -> Callable[[str, Any], Any]:
    """A server of all three APIs with the tiny model's tokenizer. `refuse`: another reply."""
    tokenizer = load_tokenizer(mlx_tiny(), TINY)

    def answer(path: str, body: Any) -> Reply | None:
        if refuse is not None and (reply := refuse(path)) is not None:
            return None if reply[0] == 0 else reply
        if path == "/v1/models":
            return 200, {}, {"data": [{"id": "big"}]}
        if path == "/tokenize":
            ids = tokenizer.encode(body["prompt"], add_special_tokens=False)
            return 200, {}, {"tokens": ids}
        if path == "/generate":
            return 200, {}, as_sglang(body)
        assert body["model"] == "big"
        return 200, {}, (as_echo if body.get("echo") else as_vllm)(body)

    return answer


def teacher(url: str, **more: Any) -> dict[str, Any]:
    return {"name": "big", "kind": "http", "url": url, "tries": 1, **more}


def expected(groups: list[Any]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """log π_T and agreement of each token, and the rows that predict them."""
    logprobs, agrees, rows = [], [], []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        numbers = table(list(rollout.tokens))
        for place, own in enumerate(rollout.mask):
            if own:
                row = numbers[place - 1]
                rows.append(row)
                logprobs.append(row[rollout.tokens[place]])
                agrees.append(row.argmax() == rollout.tokens[place])
    return np.array(logprobs), np.array(agrees, float), rows


@pytest.mark.parametrize("api", ["vllm", "sglang", "completions"])
def test_log_probabilities_of_sampled_tokens(tiny: LoadedModel, api: str) -> None:
    groups = [question(number) for number in range(3)]
    with scripted_http(scripted()) as (url, received):
        trainer = tiny_trainer(tiny, teacher(url, api=api))
        scores = trainer.companions["teachers"].score(batch_of(*groups), lambda: False)
        trainer.companions["teachers"].close()
    logprobs, agrees, _ = expected(groups)
    assert scores[LOGPROBS] == pytest.approx(logprobs, abs=1e-6)
    if api != "sglang":  # there the best tokens are asked for with mode = "loss" alone
        assert (scores[AGREES] == agrees).all()
    assert sum(one.path in ("/generate", "/v1/completions") for one in received) == 6
    assert sum(one.path == "/tokenize" for one in received) >= 200


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_the_best_tokens_and_the_rest(tiny: LoadedModel, api: str) -> None:
    groups = [question(number) for number in range(2)]
    with scripted_http(scripted()) as (url, _):
        trainer = tiny_trainer(tiny, teacher(url, api=api), mode="loss", top_k=5)
        scores = trainer.companions["teachers"].score(batch_of(*groups), lambda: False)
        trainer.companions["teachers"].close()
    _, _, rows = expected(groups)
    ids, targets = scores[IDS].reshape(-1, 5), scores[TARGETS].reshape(-1, 6)
    for row, own, numbers in zip(rows, ids.astype(int), targets, strict=True):
        assert own.tolist() == best(row, 5)
        assert numbers[:5] == pytest.approx(row[own], abs=1e-5)
        assert numbers[5] == pytest.approx(np.log(1 - np.exp(row[own]).sum()), abs=1e-5)
    assert rest_of([np.log(0.5), np.log(0.25)]) == pytest.approx(-1.386294, abs=1e-6)
    assert rest_of([0.0]) == -80


def test_a_step_goes_on_without_a_lost_teacher(tiny: LoadedModel) -> None:
    """What came counts; the rest has no signal, and nothing is NaN."""
    calls = 0

    def lose(path: str) -> Reply | None:
        nonlocal calls
        calls += path == "/v1/completions"
        return (0, {}, None) if calls > 2 else None

    groups = [question(number) for number in range(3)]
    with scripted_http(scripted(refuse=lose)) as (url, _):
        trainer = tiny_trainer(
            tiny, teacher(url, requests_at_once=1), on_teacher_lost="skip", reward=False
        )
        metrics = trainer.train_step(batch_of(*groups)).metrics
        assert "does not answer" in trainer.companions["teachers"].health()
        trainer.companions["teachers"].close()
    assert metrics["teacher_unscored"] == 4
    assert 0 < metrics["teacher_share"] < 1
    assert np.isfinite(metrics["loss"])
    assert np.isfinite(metrics["teacher_kl"])
    assert metrics["skipped_steps"] == 0


def test_a_step_waits_for_a_lost_teacher(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "PAUSE_S", 0.01)
    calls = 0

    def lose(path: str) -> Reply | None:
        nonlocal calls
        calls += path == "/v1/completions"
        return (503, {}, {"error": {"message": "busy"}}) if 2 < calls < 12 else None

    groups = [question(number) for number in range(3)]
    with scripted_http(scripted(refuse=lose)) as (url, received):
        trainer = tiny_trainer(tiny, teacher(url))
        scores = trainer.companions["teachers"].score(batch_of(*groups), lambda: False)
        assert trainer.companions["teachers"].health() is None
        trainer.companions["teachers"].close()
    assert scores[LOGPROBS] == pytest.approx(expected(groups)[0], abs=1e-6)
    assert sum(one.path == "/v1/completions" for one in received) > 6


def test_a_stop_request_ends_the_waiting(tiny: LoadedModel) -> None:
    trainer = tiny_trainer(tiny, teacher("http://127.0.0.1:9"))
    assert trainer.companions["teachers"].score(batch_of(question(1)), lambda: True) is None
    result = trainer.train_step(batch_of(question(1)), should_stop=lambda: True)
    trainer.companions["teachers"].close()
    assert not result.finished
    assert not result.position.updates


def other_ids(path: str) -> Reply | None:
    return (200, {}, {"tokens": [1, 2, 3]}) if path == "/tokenize" else None


def no_tokenize(path: str) -> Reply | None:
    return (404, {}, {"error": {"message": "no such route"}}) if path == "/tokenize" else None


def bad_request(path: str) -> Reply | None:
    told = {"error": {"message": "prompt_logprobs: at most 20"}}
    return (400, {}, told) if path == "/v1/completions" else None


def no_numbers(path: str) -> Reply | None:
    return (200, {}, {"choices": [{"text": ""}]}) if path == "/v1/completions" else None


@pytest.mark.parametrize(
    ("refuse", "words"),
    [
        (other_ids, "has another tokenizer than the policy"),
        (no_tokenize, "set path to the directory of its tokenizer"),
        (bad_request, "HTTP 400: .*at most 20"),
        (no_numbers, r"prompt_logprobs has None for .* tokens: does it speak this api \(vllm\)"),
    ],
)
def test_what_it_answers_wrongly_ends_the_run(tiny: LoadedModel, refuse: Any, words: str) -> None:
    with scripted_http(scripted(refuse=refuse)) as (url, _):
        trainer = tiny_trainer(tiny, teacher(url))
        with pytest.raises(ConfigError, match=words):
            trainer.companions["teachers"].score(batch_of(question(1)), lambda: False)
        trainer.companions["teachers"].close()


def with_entry(entry: Any) -> Callable[[dict[str, Any]], Any]:
    """Of vLLM: every token's entry in the place of its own."""

    def change(reply: dict[str, Any]) -> Any:
        rows = reply["choices"][0]["prompt_logprobs"]
        reply["choices"][0]["prompt_logprobs"] = [None, *([entry] * (len(rows) - 1))]
        return reply

    return change


def with_numbers(number: Any) -> Callable[[dict[str, Any]], Any]:
    """Of vLLM: every token's log-probabilities in the place of its own."""

    def change(reply: dict[str, Any]) -> Any:
        for entries in reply["choices"][0]["prompt_logprobs"][1:]:
            for entry in entries.values():
                entry["logprob"] = number
        return reply

    return change


def negative(reply: dict[str, Any]) -> Any:
    for entries in reply["choices"][0]["prompt_logprobs"][1:]:
        entries["-7"] = {"logprob": -0.001}
    return reply


def last_of(meta: str, entry: Any) -> Callable[[dict[str, Any]], Any]:
    def change(reply: dict[str, Any]) -> Any:
        reply["meta_info"][meta][-1] = entry
        return reply

    return change


ODD: list[tuple[str, Any, str]] = [
    ("vllm", lambda _: [1, 2], "is this an OpenAI endpoint"),
    ("vllm", lambda _: "[" * 5000, "nested too deeply"),
    ("vllm", lambda _: {"choices": {"0": {}}}, "no choices"),
    ("vllm", with_entry(5), "AttributeError"),
    ("vllm", with_entry({"x": {"logprob": -1.0}}), "ValueError"),
    ("vllm", with_entry({"1": -1.0}), "prompt_logprobs without the token itself"),
    ("vllm", with_numbers(None), "TypeError"),
    ("vllm", with_numbers("much"), "ValueError"),
    ("vllm", with_numbers(10**400), "OverflowError"),
    ("vllm", with_numbers(float("nan")), "not numbers"),
    ("vllm", with_numbers(-0.0), "have a sum above 1"),
    ("vllm", negative, "its best tokens are"),
    ("sglang", lambda reply: {**reply, "meta_info": [1]}, "AttributeError"),
    ("sglang", last_of("input_token_logprobs", []), "IndexError"),
    ("sglang", last_of("input_token_logprobs", [-1.0, None]), "TypeError"),
    ("sglang", last_of("input_top_logprobs", [[-1.0, 3]] * 5), "its best tokens are"),
    ("sglang", last_of("input_top_logprobs", {"3": -1.0}), "Error"),
]


@pytest.mark.usefixtures("few_texts")
@pytest.mark.parametrize(("api", "change", "words"), ODD)
def test_an_answer_of_another_form_has_no_score_and_ends_no_run(
    tiny: LoadedModel, api: str, change: Any, words: str
) -> None:
    """The first three answers are right, the others odd: those have no score, health names the
    teacher and says why."""
    right, asked = scripted(), 0

    def answer(path: str, body: Any) -> Any:
        nonlocal asked
        reply = right(path, body)
        if path not in ("/v1/completions", "/generate"):
            return reply
        asked += 1
        return reply if asked <= 3 else (200, {}, change(reply[2]))

    groups = [question(number) for number in range(3)]
    with scripted_http(answer) as (url, _):
        one = teacher(url, api=api, requests_at_once=1)
        trainer = tiny_trainer(tiny, one, mode="loss", top_k=5)
        metrics = trainer.train_step(batch_of(*groups)).metrics
        health = trainer.companions["teachers"].health()
        trainer.companions["teachers"].close()
    assert health is not None and health.startswith("teacher big: ") and words in health
    assert 0 < metrics["teacher_share"] < 1
    assert np.isfinite(metrics["loss"])


def test_the_files_of_its_tokenizer_will_do(tiny: LoadedModel) -> None:
    with scripted_http(scripted(refuse=no_tokenize)) as (url, received):
        trainer = tiny_trainer(tiny, teacher(url, path=str(mlx_tiny())))
        trainer.companions["teachers"].score(batch_of(question(1)), lambda: False)
        trainer.companions["teachers"].close()
    assert not any(one.path == "/tokenize" for one in received)


@pytest.mark.parametrize(
    ("section", "training", "words"),
    [
        ({"mode": "loss", "top_k": 0}, {}, "does not send its whole vocabulary"),
        ({"mode": "loss", "api": "completions"}, {}, "by their texts, not by ids"),
        ({}, {"temperature": 0.9}, "at temperature 1, and rl_training.temperature is 0.9"),
    ],
)
def test_what_no_server_can_do_is_refused_at_the_start(
    tiny: LoadedModel, section: dict[str, Any], training: dict[str, Any], words: str
) -> None:
    api = {"api": section.pop("api")} if "api" in section else {}
    with pytest.raises(ConfigError, match=words):
        tiny_trainer(tiny, teacher("http://127.0.0.1:9", **api), training=training, **section)


def test_an_answer_of_another_temperature_has_no_signal(tiny: LoadedModel) -> None:
    group = question(1)
    with scripted_http(scripted()) as (url, _):
        trainer = tiny_trainer(tiny, teacher(url))
        batch = batch_of(group)
        object.__setattr__(batch.sequences[0].rollout, "temperature", 0.7)
        scores = trainer.companions["teachers"].score(batch, lambda: False)
        trainer.companions["teachers"].close()
    assert np.isnan(scores[LOGPROBS]).sum() == sum(group.rollouts[0].mask)
    assert trainer.companions["teachers"].measured(batch)["teacher_unscored"] == 1


@pytest.mark.parametrize("api", ["vllm", "sglang", "completions"])
def test_our_own_server_says_what_the_same_weights_say_here(
    tiny: LoadedModel, server: RunningServer, api: str
) -> None:
    """The base, served over HTTP and in this process."""
    batch = batch_of(*(question(number) for number in range(3)))
    section = {"mode": "loss", "top_k": 8} if api == "vllm" else {}
    here = tiny_trainer(tiny, BASE, **section)
    there = tiny_trainer(tiny, teacher(server.url, api=api), **section)
    own, served = (t.companions["teachers"].score(batch, lambda: False) for t in (here, there))
    there.companions["teachers"].close()
    assert served[LOGPROBS] == pytest.approx(own[LOGPROBS], abs=1e-4)
    if section:
        for name, width in ((TARGETS, 9), (IDS, 8)):
            pair = [np.sort(scores[name].reshape(-1, width)[:, :8]) for scores in (own, served)]
            assert pair[1] == pytest.approx(pair[0], abs=1e-3)
        rest = [np.exp(scores[TARGETS].reshape(-1, 9)[:, 8]) for scores in (own, served)]
        assert rest[1] == pytest.approx(rest[0], abs=2e-5), "1 minus the others, in float32"


def test_a_timeout_that_is_the_teachers_own_ends_the_waiting(tiny: LoadedModel) -> None:
    """It has the type of a turn's end, and would be waited for again without an end."""
    with scripted_http(lambda path, body: (200, {}, {"data": [{"id": "big"}]})) as (url, _):
        trainer = tiny_trainer(tiny, {"name": "big", "kind": "http", "url": url})
        teacher = trainer.companions["teachers"]._by_name["big"][1]

        async def late(*_: Any) -> None:
            raise TimeoutError("its own")

        teacher._all = late
        with pytest.raises(TimeoutError, match="its own"):
            teacher.score([], None, lambda: False)
        trainer.companions["teachers"].close()
