"""The vectorised sampler against a numpy twin that does one row at a time, in vLLM's order."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.engine.decoding.sampler import (
    BLOCK,
    BlockedLogits,
    SamplingBatch,
    block_size,
    random_keys,
    sample,
)
from mlx_parallm.engine.logit_edits import LogitEdits
from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.engine.sequence import Sequence, random_stream, splitmix64
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from mlx_parallm.types import SamplingParams
from tests.engine.helpers import EOS, ByteTokenizer, qwen3_model, request, run, serve

VOCAB = 50


def sequence(params: SamplingParams, edits: LogitEdits | None = None) -> Sequence:
    return Sequence(
        request_id="r",
        index=0,
        prompt=(1,),
        params=params,
        adapter=None,
        max_tokens=10,
        random_stream=random_stream(params.seed or 0, 0),
        stop_ids=frozenset(),
        text=OutputText(ByteTokenizer().detokenizer, (), include_stop=False, eager=False),
        edits=edits,
    )


def edits_of(
    params: SamplingParams, prompt: tuple[int, ...], output: list[int], stops: frozenset[int]
) -> LogitEdits:
    edits = LogitEdits(params, prompt, stops)
    for token in output:
        edits.add_output(token)
    return edits


def twin_logits(logits, params, prompt=(), output=(), stops=frozenset()):
    """Bias, min_tokens and penalties on one row, straight from their definitions."""
    row = logits.astype(np.float64).copy()
    for token, bias in params.logit_bias.items():
        row[token] += bias
    if len(output) < params.min_tokens:
        row[list(stops)] = -np.inf
    for token in set(prompt) | set(output):
        row[token] = (
            row[token] / params.repetition_penalty
            if row[token] > 0
            else row[token] * params.repetition_penalty
        )
    for token in output:
        row[token] -= params.frequency_penalty
    for token in set(output):
        row[token] -= params.presence_penalty
    return row


def twin_distribution(row, params):
    """Temperature, min_p, top_k, top_p on one row; probabilities."""
    row = row / (params.temperature or 1.0)
    if params.min_p:
        row = np.where(np.exp(row - row.max()) < params.min_p, -np.inf, row)
    order = np.argsort(-row, kind="stable")
    if params.top_k > 0:
        row[order[params.top_k :]] = -np.inf
    probabilities = np.exp(row - row.max())
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    dropped = order[before >= params.top_p] if params.top_p < 1.0 else []
    probabilities[dropped] = 0.0
    return probabilities / probabilities.sum()


def logits_of(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, VOCAB)).astype(np.float32)


FILTERS = [
    SamplingParams(),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.6, top_k=12, top_p=0.7),
    SamplingParams(temperature=1.7, top_p=0.9, min_p=0.02),
    SamplingParams(top_k=1),
    SamplingParams(top_p=1e-6),
    SamplingParams(top_k=-1, temperature=2.0),
    SamplingParams(temperature=0.8, top_k=VOCAB + 10, top_p=0.5, min_p=0.05),
]


@pytest.mark.parametrize(
    "chosen", [range(len(FILTERS)), [4], [1, 6], [2, 5]], ids=["all", "one", "top_k", "top_p"]
)
def test_draws_follow_the_twin_distribution(chosen):
    """4,000 draws of every row in one batch; each probability within 5 standard deviations."""
    params = [FILTERS[i] for i in chosen]
    rows = logits_of(len(params))
    draws = 4000
    batch = SamplingBatch(tuple(sequence(p) for p in params for _ in range(draws)))
    positions = [position for _ in params for position in range(draws)]
    sampled = sample(mx.array(np.repeat(rows, draws, axis=0)), batch, positions)
    tokens = np.array(sampled.tokens).reshape(len(params), draws)
    processed = iter(np.array(sampled.processed)) if sampled.processed is not None else iter(())
    for row, p in enumerate(params):
        expected = twin_distribution(rows[row].astype(np.float64), p)
        counts = np.bincount(tokens[row], minlength=VOCAB) / draws
        assert (counts[expected == 0] == 0).all(), "a filtered token was drawn"
        assert (
            np.abs(counts - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-9
        ).all()
        if p.reshapes_distribution:
            drawn = np.array([next(processed) for _ in range(draws)])
            np.testing.assert_allclose(drawn, np.log(expected[tokens[row]]), atol=1e-4)
    plain = np.array(sampled.logprobs).reshape(len(params), draws)
    for row, p in enumerate(params):
        unfiltered = np.log(
            twin_distribution(
                rows[row].astype(np.float64), SamplingParams(temperature=p.temperature)
            )
        )
        np.testing.assert_allclose(plain[row], unfiltered[tokens[row]], atol=1e-4)


def test_ties_with_the_last_kept_token_are_kept():
    """Documented: a sort's order among equals must not matter."""
    logits = np.full((1, 8), -5.0, np.float32)
    logits[0, 2:5] = 1.0
    batch = SamplingBatch((sequence(SamplingParams(top_k=2)),) * 500)
    tokens = np.array(
        sample(mx.array(np.repeat(logits, 500, axis=0)), batch, list(range(500))).tokens
    )
    assert set(tokens.tolist()) == {2, 3, 4}


EDITS = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(presence_penalty=1.2),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(logit_bias={3: 4.0, 7: -100.0}),
    SamplingParams(min_tokens=5),
    SamplingParams(
        repetition_penalty=0.8,
        presence_penalty=-0.5,
        frequency_penalty=0.4,
        logit_bias={4: 2.0},
        min_tokens=9,
    ),
]


@pytest.mark.parametrize("outputs", [[], [3, 4, 4, 9, 4, 11], [token % 47 for token in range(60)]])
def test_penalties_and_bias_follow_the_twin(outputs):
    """One batch of rows with all kinds of edits and one without; log-probabilities of the edited
    distribution."""
    prompt, stops = tuple(range(2, 50, 2)), frozenset({0, 9})
    params = [*EDITS, SamplingParams()]
    rows = logits_of(len(params), seed=1)
    edits = [edits_of(p, prompt, outputs, stops) if LogitEdits.needed(p) else None for p in params]
    batch = SamplingBatch(tuple(sequence(p, edit) for p, edit in zip(params, edits, strict=True)))
    draws = []
    for position in range(200):
        sampled = sample(mx.array(rows), batch, [position] * len(params))
        draws.append(np.array(sampled.tokens))
        processed = dict(zip(batch.reshaped, np.array(sampled.processed).tolist(), strict=True))
        for row, p in enumerate(params[:-1]):
            expected = twin_distribution(twin_logits(rows[row], p, prompt, outputs, stops), p)
            assert processed[row] == pytest.approx(np.log(expected[draws[-1][row]]), abs=1e-4)
    if not outputs:
        assert not set(np.array(draws)[:, 4].tolist()) & stops, "min_tokens forbids the ends"


def test_keys_are_splitmix64_and_depend_on_seed_choice_and_position_only():
    stream = random_stream(7, 1)
    keys = random_keys(np.array([stream, stream], np.uint64), np.array([0, 5], np.uint64))
    state = (stream + 5 * 0x9E3779B97F4A7C15) & (2**64 - 1)
    expected = splitmix64(state)
    assert keys[1].tolist() == [expected & 0xFFFFFFFF, expected >> 32]
    twice = (sequence(SamplingParams(seed=7)), sequence(SamplingParams(seed=8)))
    drawn = [np.array(SamplingBatch(twice).keys([place, place])).tolist() for place in range(50)]
    assert (
        drawn[2][0][2:]
        == random_keys(np.array(twice[0].random_stream, np.uint64), np.array(5, np.uint64)).tolist()
    ), "two keys a token, of outputs number 2 and 3, 4 and 5, …"
    every = {tuple(row[start : start + 2]) for rows in drawn for row in rows for start in (0, 2)}
    assert len(every) == 200, "no key is used twice"
    # First output of Vigna's splitmix64.c for the state 1234567.
    assert splitmix64(1234567) == 6457827717110365317
    streams = {random_stream(seed, index) for seed in range(50) for index in range(20)}
    assert len(streams) == 1000
    assert random_stream(-1, 0) == random_stream(2**64 - 1, 0), "any integer is a seed"


@pytest.mark.parametrize("stop_early", [False, True])
def test_engine_applies_penalties_over_its_own_output(stop_early):
    """The engine's incremental bookkeeping: every token recomputed by the twin from the tokens
    before it."""
    served = serve(qwen3_model())
    prompt = [3, 4, 5, 5, 9]
    params = {
        "temperature": 0.0,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.3,
        "logit_bias": {EOS: -100.0 if not stop_early else 5.0, 7: 3.0},
        "min_tokens": 4,
        "max_tokens": 25,
    }
    output = run(
        served.engine, [request("r", prompt, **params), request("other", [9, 9], max_tokens=9)]
    )["r"]
    completion = output.completions[0]
    tokens = list(completion.token_ids)
    logits = np.array(served.plain(mx.array(prompt + tokens)[None])[0])[len(prompt) - 1 : -1]
    for place, row in enumerate(logits):
        edited = twin_logits(
            row, SamplingParams(**params), tuple(prompt), tokens[:place], frozenset({EOS})
        )
        assert tokens[place] == int(edited.argmax())
        for found, scores in (
            (completion.processed_logprobs, edited),
            (completion.logprobs, row.astype(np.float64)),
        ):
            expected = (
                scores[tokens[place]] - np.log(np.exp(scores - scores.max()).sum()) - scores.max()
            )
            assert found[place] == pytest.approx(expected, abs=1e-4)


def keys(rows: int) -> mx.array:
    return mx.array(
        np.random.default_rng(0).integers(0, 2**32, (rows, 4), dtype=np.uint64).astype(np.uint32)
    )


@pytest.mark.parametrize("vocab", [5, BLOCK, 300, 4 * BLOCK])
def test_normaliser_is_logsumexp(vocab: int) -> None:
    logits = mx.random.normal((3, vocab), key=mx.random.key(1)) * 5
    assert (
        mx.abs(BlockedLogits.split(logits).logsumexp - mx.logsumexp(logits, axis=-1)).max() < 2e-6
    )


def test_tokens_come_as_often_as_the_softmax_says() -> None:
    rows, vocab = 40_000, 300
    logits = mx.random.normal((1, vocab), key=mx.random.key(2)) * 2
    tokens = np.array(BlockedLogits.split(mx.broadcast_to(logits, (rows, vocab))).draw(keys(rows)))
    found = np.bincount(tokens, minlength=vocab) / rows
    expected = np.array(mx.softmax(logits, axis=-1))[0]
    deviation = np.sqrt(expected * (1 - expected) / rows)
    assert np.all(np.abs(found - expected) < 5 * deviation + 1e-4)
    blocks = [
        found[start : start + BLOCK].sum() - expected[start : start + BLOCK].sum()
        for start in (0, 128, 256)
    ]
    assert np.abs(blocks).max() < 0.01


def test_a_forbidden_token_is_never_drawn() -> None:
    rows, vocab = 2000, 300
    allowed = np.array([130, 131, 299])  # one block without any, one in the padded block
    logits = np.full((rows, vocab), -np.inf, np.float32)
    logits[:, allowed] = [0.0, -3.0, 1.0]
    tokens = np.array(BlockedLogits.split(mx.array(logits)).draw(keys(rows)))
    assert set(tokens.tolist()) == set(allowed.tolist())


def test_blocks_divide_a_vocabulary_if_that_leaves_few() -> None:
    sizes = {vocab: block_size(vocab) for vocab in (151_936, 49_152, 320, 50_257, 40)}
    assert sizes == {151_936: 128, 49_152: 128, 320: 64, 50_257: 128, 40: 128}


def test_a_broken_row_shows_and_stays_in_range() -> None:
    logits = mx.array([[1.0, float("nan"), 0.0], [1.0, 2.0, 3.0]])
    blocks = BlockedLogits.split(logits)
    assert np.isnan(np.array(blocks.logsumexp)).tolist() == [True, False]
    assert np.array(blocks.draw(keys(2))).max() < BLOCK


def test_a_temperature_that_makes_all_logits_the_same_ends_no_engine(monkeypatch):
    """On the way of a GPU it looked like a lost result: one request stopped the server."""
    monkeypatch.setenv(DEVICE_VARIABLE, GPU_LIKE)
    served = serve(qwen3_model(num_hidden_layers=1), prefix_cache_bytes=0)
    hot = request("hot", [3, 4, 5], temperature=1e30, max_tokens=3, ignore_eos=True)
    [completion] = run(served.engine, [hot])["hot"].completions
    assert completion.logprobs == (pytest.approx(-math.log(300)),) * 3
