"""Images in the engine, with an encoder of this file: mixed with text in one batch, computed once,
found again in the prefix cache; each answer is what the model's own forward gives."""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_parallm.engine.companions.images import ImageFeatures
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ModelError, RequestError
from mlx_parallm.models.images.embedding import admit_images
from mlx_parallm.models.images.positions import chunked_axes
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.types import PromptImage, Request, RequestOutput, SamplingParams
from mlx_parallm.weights import SharedWeights
from tests.engine.helpers import ByteTokenizer, engine_options, qwen3_model, run

IMAGE = 298  # the token
WIDTH = 64


class Encoder:
    """Features are random numbers of the digest. `broken`: digests that it cannot read."""

    modules: Mapping[str, nn.Module] = MappingProxyType({})
    trained, frozen_tower = (), False
    token_id = IMAGE
    rope_axes: np.ndarray | None = None
    levels = 0
    bidirectional = False

    def __init__(self, cache_bytes: int = 1 << 20, *, turns: bool = False) -> None:
        self.cache_bytes = cache_bytes
        self.rope_axes = chunked_axes((2, 3, 3)) if turns else None
        self.encoded: list[str] = []
        self.broken: set[str] = set()

    def over(self, tree: nn.Module) -> Self:
        return self

    def tower_output(self, image: PromptImage) -> mx.array:
        raise AssertionError("nothing is trained")

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        if image.digest in self.broken:
            raise ValueError("the tower cannot read it")
        self.encoded.append(image.digest)
        key = mx.random.key(int(image.digest[:8], 16))
        return mx.random.normal((image.tokens, WIDTH), key=key)


def picture(name: str, grid: tuple[int, int, int] = (1, 1, 5)) -> PromptImage:
    digest = hashlib.sha256(name.encode()).hexdigest()
    return PromptImage(digest, "", grid[0] * grid[1] * grid[2], grid)


class Parts:
    """An engine that reads images, and a second tree of the same arrays."""

    def __init__(self, encoder: Encoder | None = None, **options: Any) -> None:
        self.encoder = encoder or Encoder()
        self.plain = qwen3_model()
        model = qwen3_model()
        weights = SharedWeights(model, keep_versions=1)
        axes = self.encoder.rope_axes
        self.features = ImageFeatures(self.encoder, admit_images(model, axes, self.encoder.levels))
        self.table = None if axes is None else admit_images(self.plain, axes)
        lora = prepare_for_serving(model)
        self.engine = Engine(
            model, ByteTokenizer(), weights, lora, engine_options(**options), [self.features]
        )

    def twin(self, prompt: list[int], images: list[PromptImage], answer: list[int]) -> mx.array:
        """Log-probabilities of the answer by one forward over embeddings that are put together
        here."""
        tokens = [*prompt, *answer]
        embedded = [self.plain.model.embed_tokens(mx.array(tokens))]
        features = [Encoder().encode(image) for image in images]
        rows = iter(mx.concatenate(features) if features else ())
        embedded = mx.stack(
            [
                next(rows, row) if token == IMAGE else row  # an answer may have it as a text
                for token, row in zip(tokens, embedded[0], strict=True)
            ]
        )
        if self.table is not None:
            places = mx.array(turning_places(tokens, len(prompt), images))
            with self.table.at(places[:, None]):
                logits = self.plain(mx.array([tokens]), input_embeddings=embedded[None])[0]
        else:
            logits = self.plain(mx.array([tokens]), input_embeddings=embedded[None])[0]
        start = len(prompt) - 1
        return token_logprobs(logits[start:-1], mx.array(answer))


def turning_places(tokens: list[int], prompt: int, images: list[PromptImage]) -> list[list[int]]:
    """Time, row and column of each token, one token after another."""
    places: list[tuple[int, int, int]] = []
    now, left = 0, list(images)
    while len(places) < len(tokens):
        if len(places) < prompt and tokens[len(places)] == IMAGE:
            grid = left.pop(0).grid
            assert grid is not None
            for t in range(grid[0]):
                for row in range(grid[1]):
                    places += [(now + t, now + row, now + column) for column in range(grid[2])]
            now += max(grid)
        else:
            places.append((now, now, now))
            now += 1
    return [list(axis) for axis in zip(*places, strict=True)]


def request(name: str, prompt: list[int], images: list[PromptImage], **params: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(**params), images=tuple(images))


def with_pictures(*parts: int | PromptImage | list[int]) -> tuple[list[int], list[PromptImage]]:
    prompt: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, PromptImage):
            prompt += [IMAGE] * part.tokens
            images.append(part)
        else:
            prompt += part if isinstance(part, list) else [part]
    return prompt, images


CAT, DOG, MAP = picture("cat"), picture("dog", (1, 3, 3)), picture("map", (1, 5, 8))
PROMPTS = {
    "text": with_pictures(1, 2, 3, 4),
    "one": with_pictures(7, CAT, 8, 9),
    "first": with_pictures(DOG, 8),
    "two in a row": with_pictures(3, 4, CAT, DOG, 5),
    "three": with_pictures(11, MAP, 12, CAT, [13] * 30, DOG, 14),
    "the same twice": with_pictures(CAT, 1, CAT, 2),
    "long text": with_pictures([20 + i % 50 for i in range(150)]),
}


def answers(parts: Parts, names: list[str], **params: Any) -> dict[str, RequestOutput]:
    return run(parts.engine, [request(name, *PROMPTS[name], **params) for name in names])


@pytest.mark.parametrize(("chunk", "turns"), [(256, False), (16, False), (256, True), (16, True)])
def test_a_mixed_batch_answers_as_each_alone_and_as_the_models_own_forward(
    chunk: int, turns: bool
) -> None:
    together = Parts(Encoder(turns=turns), prefill_chunk=chunk)
    outputs = answers(together, [*PROMPTS], max_tokens=8, ignore_eos=True, temperature=0.0)
    assert sorted(together.encoder.encoded) == sorted(i.digest for i in (CAT, DOG, MAP))
    for name, (prompt, images) in PROMPTS.items():
        [completion] = outputs[name].completions
        single = Parts(Encoder(turns=turns))
        alone = answers(single, [name], max_tokens=8, ignore_eos=True, temperature=0.0)
        assert alone[name].completions[0].token_ids == completion.token_ids, name
        expected = together.twin(prompt, images, list(completion.token_ids))
        assert mx.abs(expected - mx.array(completion.logprobs)).max().item() <= 1e-4, name


@pytest.mark.parametrize("turns", [False, True])
def test_a_group_and_its_next_turn_compute_an_image_once(turns: bool) -> None:
    parts = Parts(Encoder(turns=turns))
    prompt, images = PROMPTS["three"]
    first = run(parts.engine, [request("g", prompt, images, n=16, max_tokens=4, seed=1)])["g"]
    assert len(first.completions) == 16 and parts.features.encoded == 3
    computed = parts.engine.counters.prefill_tokens
    assert computed == len(prompt)
    answer = list(first.completions[0].token_ids)
    again = request("next", [*prompt, *answer, 5, 6], images, max_tokens=4, temperature=0.0)
    output = run(parts.engine, [again])["next"]
    assert parts.features.encoded == 3, "the tower runs for new images only"
    assert parts.engine.counters.prefill_tokens - computed < 10, "the prompt was kept"
    [completion] = output.completions
    expected = parts.twin(list(again.prompt_token_ids), images, list(completion.token_ids))
    assert mx.abs(expected - mx.array(completion.logprobs)).max().item() <= 1e-4


def test_another_image_of_as_many_tokens_is_another_prefix() -> None:
    parts = Parts()
    for name in ("cat", "bird"):
        prompt, images = with_pictures([1] * 40, picture(name), [2] * 40)
        output = run(parts.engine, [request(name, prompt, images, max_tokens=3, temperature=0.0)])
        [completion] = output[name].completions
        expected = parts.twin(prompt, images, list(completion.token_ids))
        assert mx.abs(expected - mx.array(completion.logprobs)).max().item() <= 1e-4, name
        assert completion.cached_tokens == (0 if name == "cat" else 40), "the text before is shared"


def test_features_are_kept_within_their_bytes_and_computed_again() -> None:
    parts = Parts(Encoder(cache_bytes=6 * WIDTH * 4), prefix_cache_bytes=0)
    for name in ("one", "first", "one"):
        answers(parts, [name], max_tokens=2)
        assert parts.features.nbytes <= 9 * WIDTH * 4
    assert parts.encoder.encoded == [CAT.digest, DOG.digest, CAT.digest]


@pytest.mark.parametrize("turns", [False, True])
def test_a_step_that_failed_is_computed_again_with_its_images(turns: bool) -> None:
    parts = Parts(Encoder(turns=turns))
    for name in ("one", "three", "text"):
        parts.engine.add(
            request(name, *PROMPTS[name], max_tokens=6, temperature=0.0, ignore_eos=True)
        )
    for _ in range(3):
        parts.engine.step()
    parts.features.clear()
    assert not parts.engine.recover(), "none of them is the cause"
    outputs = {}
    for _ in range(50):
        if not parts.engine.has_work:
            break
        outputs |= {e.request_id: e.output for e in parts.engine.step() if hasattr(e, "output")}
    undisturbed = answers(
        Parts(Encoder(turns=turns)),
        ["one", "three", "text"],
        max_tokens=6,
        temperature=0.0,
        ignore_eos=True,
    )
    for name, output in outputs.items():
        assert output.completions[0].token_ids == undisturbed[name].completions[0].token_ids


def test_an_image_that_the_tower_cannot_read_fails_its_own_request_only() -> None:
    parts = Parts()
    parts.encoder.broken.add(DOG.digest)
    engine = parts.engine
    for name in ("first", "one"):
        engine.add(request(name, *PROMPTS[name], max_tokens=3, temperature=0.0))
    outputs: dict[str, RequestOutput] = {}
    for _ in range(30):
        if not engine.has_work:
            break
        try:
            events = engine.step()
        except ValueError:
            engine.recover()
            events = engine.take_events()
        outputs |= {e.request_id: e.output for e in events if hasattr(e, "output")}
    assert "cannot read it" in str(outputs["first"].completions[0].error)
    assert outputs["one"].completions[0].error is None


@pytest.mark.parametrize("turns", [False, True])
def test_a_given_text_behind_images_is_scored(turns: bool) -> None:
    parts = Parts(Encoder(turns=turns), prefill_chunk=16)
    prompt, images = PROMPTS["three"]
    answer = [5, 80, 6, 81]
    given = request("r", [*prompt, *answer], images, prompt_logprobs=0, max_tokens=0)
    scores = run(parts.engine, [given])["r"].prompt_logprobs
    assert scores is not None and parts.features.encoded == 3
    expected = np.array(parts.twin(prompt, images, answer))
    assert np.abs(expected - np.array(scores.logprobs[-4:])).max() <= 1e-4


BAD = {
    "fewer tokens": (request("r", [1, IMAGE, 2], [CAT]), "1 image tokens, and its images (1) need"),
    "no text behind": (request("r", [1, *[IMAGE] * 5], [CAT]), "must not end with an image"),
    "embedded": (
        request("r", PROMPTS["one"][0], [CAT], pooling="mean", max_tokens=0),
        "a prompt with images is not embedded",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_run_is_refused(name: str) -> None:
    bad, reason = BAD[name]
    with pytest.raises(RequestError, match=reason.replace("(", r"\(").replace(")", r"\)")):
        Parts().engine.add(bad)


def test_a_model_without_images_refuses_them() -> None:
    model = qwen3_model()
    weights = SharedWeights(model, keep_versions=1)
    engine = Engine(model, ByteTokenizer(), weights, prepare_for_serving(model), engine_options())
    with pytest.raises(RequestError, match="reads no images"):
        engine.add(request("r", *PROMPTS["one"]))


def test_the_token_of_an_image_in_a_text_is_a_token_like_others() -> None:
    parts = Parts()
    text = [1, IMAGE, 2]
    [completion] = run(parts.engine, [request("r", text, [], max_tokens=3, temperature=0.0)])[
        "r"
    ].completions
    logits = parts.plain(mx.array([[*text, *completion.token_ids]]))[0]
    expected = token_logprobs(logits[2:-1], mx.array(completion.token_ids))
    assert mx.abs(expected - mx.array(completion.logprobs)).max().item() <= 1e-4


def test_the_embedding_stays_the_layer_that_it_was() -> None:
    model = qwen3_model(tie_word_embeddings=True)
    names = {path for path, _ in model.named_modules()}
    before = model(mx.array([[1, 2, 3]]))
    table = admit_images(model)
    assert admit_images(model) is table and {path for path, _ in model.named_modules()} == names
    assert mx.array_equal(model(mx.array([[1, 2, 3]])), before).item()
    cache = make_prompt_cache(model)
    ids = mx.array([[1, 300, 302]])
    with table.using(model.model.embed_tokens.weight[5:8], ids):
        shown = model(ids, cache=cache)
    assert mx.abs(shown - model(mx.array([[1, 5, 7]]))).max().item() < 1e-4
    quantised = qwen3_model(tie_word_embeddings=True)
    nn.quantize(quantised, group_size=32)
    row = quantised.model.embed_tokens(mx.array([5]))
    ids = mx.array([[1, 300]])
    with admit_images(quantised).using(row, ids):
        shown = quantised(ids)
    assert mx.abs(shown - quantised(mx.array([[1, 5]]))).max().item() < 1e-4
    with pytest.raises(ModelError, match=r"0 .*embed_tokens"):
        admit_images(nn.Linear(2, 2))


class WideEncoder(Encoder):
    """Features for the embedding, and others that the first block adds."""

    levels = 1

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        first = super().encode(image)
        return mx.concatenate([first, 0.5 * first[::-1]], axis=-1)


def test_blocks_that_add_features_of_their_own() -> None:
    prompt, images = PROMPTS["three"]
    parts = Parts(WideEncoder())
    outputs = run(
        parts.engine,
        [
            request("seen", prompt, images, max_tokens=6, temperature=0.0, ignore_eos=True),
            request("text", *PROMPTS["text"], max_tokens=6, temperature=0.0, ignore_eos=True),
        ],
    )
    [completion] = outputs["seen"].completions
    answer = list(completion.token_ids)
    features = iter(mx.concatenate([WideEncoder().encode(image) for image in images]))
    model, hidden, added = parts.plain.model, [], []
    for token in prompt:
        row = next(features) if token == IMAGE else None
        hidden.append(model.embed_tokens(mx.array(token)) if row is None else row[:WIDTH])
        added.append(mx.zeros(WIDTH) if row is None else row[WIDTH:])
    hidden += list(model.embed_tokens(mx.array(answer)))
    added += [mx.zeros(WIDTH)] * len(answer)
    state = model.layers[0](mx.stack(hidden)[None], "causal", None) + mx.stack(added)[None]
    state = model.norm(model.layers[1](state, "causal", None))
    logits = parts.plain.lm_head(state)[0, len(prompt) - 1 : -1]
    expected = token_logprobs(logits, mx.array(answer))
    assert mx.abs(expected - mx.array(completion.logprobs)).max().item() <= 1e-4
    [text] = outputs["text"].completions
    alone = answers(Parts(), ["text"], max_tokens=6, temperature=0.0, ignore_eos=True)
    assert alone["text"].completions[0].token_ids == text.token_ids
