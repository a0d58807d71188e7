"""Images whose tokens see each other both ways: worked masks, chunks that end behind images, and
answers that are those of a forward with a mask of this file."""

import hashlib
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma3_text

from mlx_parallm.engine.companions.images import ImageFeatures, image_ids
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ModelError, RequestError
from mlx_parallm.models.images.embedding import admit_images
from mlx_parallm.models.images.spans import ImageSpans, admit_spans, image_numbers
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.models.parameters import ParameterSlots
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.images import StepImages
from mlx_parallm.types import PromptImage, Request, Rollout, SamplingParams
from mlx_parallm.weights import SharedWeights
from tests.engine.helpers import ByteTokenizer, engine_options, run

IMAGE, WIDTH, WINDOW = 298, 32, 6
ARGS = gemma3_text.ModelArgs(
    model_type="gemma3_text",
    hidden_size=WIDTH,
    num_hidden_layers=4,
    intermediate_size=64,
    num_attention_heads=2,
    head_dim=16,
    num_key_value_heads=1,
    vocab_size=300,
    query_pre_attn_scalar=16,
    sliding_window=WINDOW,
    sliding_window_pattern=2,
)


def gemma() -> gemma3_text.Model:
    mx.random.seed(3)
    model = gemma3_text.Model(ARGS)
    model.apply(lambda array: 0.3 * mx.random.normal(array.shape))
    mx.eval(model.parameters())
    return model


class Encoder:
    """Features are random numbers of the digest."""

    modules: Mapping[str, nn.Module] = MappingProxyType({})
    trained, frozen_tower = (), False
    token_id, cache_bytes = IMAGE, 1 << 20
    rope_axes, levels, bidirectional = None, 0, True

    def over(self, tree: nn.Module) -> Self:
        return self

    def tower_output(self, image: PromptImage) -> mx.array:
        raise AssertionError("nothing is trained")

    def encode(self, image: PromptImage, output: mx.array | None = None) -> mx.array:
        return mx.random.normal((image.tokens, WIDTH), key=mx.random.key(int(image.digest[:8], 16)))


def picture(name: str, tokens: int) -> PromptImage:
    return PromptImage(hashlib.sha256(name.encode()).hexdigest(), "", tokens)


CAT, DOG, MAP = picture("cat", 5), picture("dog", 9), picture("map", 40)
PROMPTS: dict[str, list[Any]] = {
    "text": [1, 2, 3, 4],
    "one": [7, CAT, 8, 9],
    "first": [DOG, 8],
    "two in a row": [3, 4, CAT, DOG, 5],
    "three": [11, MAP, 12, CAT, *[13] * 30, DOG, 14],
    "the same twice": [CAT, 1, CAT, 2],
}


def parts_of(name: str) -> tuple[list[int], list[PromptImage], list[int]]:
    """The tokens, the images, and for each token the number of its image or -1."""
    tokens: list[int] = []
    numbers: list[int] = []
    images = [part for part in PROMPTS[name] if isinstance(part, PromptImage)]
    count = 0
    for part in PROMPTS[name]:
        if isinstance(part, PromptImage):
            tokens += [IMAGE] * part.tokens
            numbers += [count] * part.tokens
            count += 1
        else:
            tokens.append(part)
            numbers.append(-1)
    return tokens, images, numbers


def own_logprobs(model: Any, name: str, answer: list[int]) -> mx.array:
    """The answer's log-probabilities, by the model's blocks under masks that are made here."""
    prompt, images, numbers = parts_of(name)
    numbers = numbers + [-1] * len(answer)
    rows = iter(mx.concatenate([Encoder().encode(i) for i in images])) if images else iter(())
    embed = model.model.embed_tokens
    hidden = mx.stack(
        [
            next(rows) if number >= 0 else embed(mx.array(token))
            for token, number in zip([*prompt, *answer], numbers, strict=True)
        ]
    )[None]
    hidden = hidden * mx.array(WIDTH**0.5, mx.bfloat16).astype(mx.float32)
    size = len(numbers)
    seen = [
        [k <= q or (numbers[q] == numbers[k] and numbers[q] >= 0) for k in range(size)]
        for q in range(size)
    ]
    near = [[seen[q][k] and k > q - WINDOW for k in range(size)] for q in range(size)]
    for index, layer in enumerate(model.layers):
        hidden = layer(hidden, mx.array(seen if index % 2 else near), None)
    logits = model.lm_head(model.model.norm(hidden))[0]
    return token_logprobs(logits[len(prompt) - 1 : -1], mx.array(answer))


def engine(**options: Any) -> Engine:
    model = gemma()
    features = ImageFeatures(Encoder(), admit_images(model, bidirectional=True))
    weights = SharedWeights(model, keep_versions=1)
    lora = prepare_for_serving(model)
    return Engine(model, ByteTokenizer(), weights, lora, engine_options(**options), [features])


def request(name: str, **params: Any) -> Request:
    prompt, images, _ = parts_of(name)
    params = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | params
    return Request(name, tuple(prompt), SamplingParams(**params), images=tuple(images))


def test_which_image_a_token_is_of() -> None:
    of_images = np.array([[0, 1, 1, 0, 1, 1, 1, 1]], bool)
    begins = np.array([[0, 1, 0, 0, 1, 0, 1, 0]], bool)
    assert image_numbers(of_images, begins).tolist() == [[-1, 0, 0, -1, 1, 1, 2, 2]]
    assert image_numbers(of_images, np.zeros_like(begins)).tolist() == [[-1, 0, 0, -1, 1, 1, 1, 1]]


class _Cache:
    offset = 2


def test_a_mask_has_the_later_tokens_of_an_image_too() -> None:
    spans, hidden = ImageSpans(), mx.zeros((1, 4, 1))
    spans.use(np.array([[-1, 0, 0, 0]], np.int32))
    assert np.array(spans.seen("causal", hidden, None))[0, 0].astype(int).tolist() == [
        [1, 0, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
        [1, 1, 1, 1],
    ]
    window = mx.array([[k <= q and k > q - 2 for k in range(-2, 4)] for q in range(4)])
    assert np.array(spans.seen(window, hidden, _Cache()))[0, 0].astype(int).tolist() == [
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 1, 1],
    ]
    assert np.array(spans.seen("causal", hidden, _Cache())).shape == (1, 1, 4, 6)
    with pytest.raises(ValueError, match="no mask of booleans"):
        spans.seen(None, hidden, None)
    assert spans.seen(None, hidden[:, :1], None) is None, "a decode step sees all there is"
    spans.use(np.full((1, 4), -1))
    assert spans.seen("causal", hidden, None) == "causal"
    with pytest.raises(ModelError, match="has no self_attn"):
        blocks = nn.Module()
        blocks.layers = [nn.Linear(2, 2)]
        admit_spans(blocks)


def test_a_mixed_batch_answers_as_each_alone_and_as_under_masks_of_our_own() -> None:
    plain, single = gemma(), engine(prefix_cache_bytes=0)
    together = run(engine(prefill_chunk=16), [request(name) for name in PROMPTS])
    for name in PROMPTS:
        [completion] = together[name].completions
        [alone] = run(single, [request(name)])[name].completions
        assert alone.token_ids == completion.token_ids, name
        expected = own_logprobs(plain, name, list(completion.token_ids))
        assert mx.abs(expected - mx.array(completion.logprobs)).max().item() <= 1e-4, name


def test_groups_later_turns_and_failed_steps_see_images_whole() -> None:
    plain, served = gemma(), engine(prefill_chunk=16)
    group = run(served, [request("three", n=4, temperature=1.0, seed=5)])["three"]
    [later] = run(served, [request("three")])["three"].completions
    assert later.cached_tokens == len(parts_of("three")[0]) - 1
    for completion in (*group.completions, later):
        expected = own_logprobs(plain, "three", list(completion.token_ids))
        assert mx.abs(expected - mx.array(completion.logprobs)).max().item() <= 1e-4
    failed = engine(prefill_chunk=16)
    failed.add(request("three"))
    for _ in range(6):
        failed.step()
    assert not failed.recover(), "it is computed again, in chunks that leave images whole"
    while failed.has_work:
        for event in failed.step():
            if hasattr(event, "output"):
                assert event.output.completions[0].token_ids == later.token_ids


def test_a_chunk_ends_behind_an_image() -> None:
    served = engine(prefill_chunk=16)
    served.add(request("three"))  # 1 + 40 + 1 + 5 + 30 + 9 + 1
    ends = []
    while not served.scheduler.rows:
        served.step()
        ends += [prefill.done for prefill in served.scheduler.prefills]
    assert ends == [41, 57, 73]


def test_tokens_of_an_image_stand_together() -> None:
    tokens = [1, *[IMAGE] * 3, 2, *[IMAGE] * 2, 3]
    split = Request("r", tuple(tokens), SamplingParams(max_tokens=1), images=(CAT,))
    with pytest.raises(RequestError, match="must stand together"):
        engine().add(split)
    features = ImageFeatures(Encoder(), admit_images(gemma()))
    assert features.spans_of(image_ids(tuple(tokens), (CAT,), IMAGE), (CAT,)) == ()


class _Reader:
    def stored(self, name: str) -> PromptImage:
        return {"cat": CAT, "dog": DOG}[name]


def test_a_training_step_sees_them_whole() -> None:
    model, plain = gemma(), gemma()
    parts: Any = SimpleNamespace(encoder=Encoder(), reader=_Reader())
    table = admit_images(model, bidirectional=True)
    images = StepImages(parts, table, ParameterSlots(model))
    prompt, _, _ = parts_of("the same twice")
    answer = [4, 5, 6]
    rollout = Rollout(
        tokens=(*prompt, *answer),
        mask=(*[0] * len(prompt), *[1] * len(answer)),
        logprobs=None,
        policy_versions=(0,) * (len(prompt) + len(answer)),
        temperature=1.0,
        scores={},
        images=("cat", "cat"),
    )
    [admitted] = images.admit([TrainSequence(rollout, (0.0,) * len(rollout.tokens), True)])
    assert images.wants_rows([admitted])
    ids = np.array([[*admitted.rollout.tokens, 0, 0]], np.int32)
    with images.seen(ids):
        logits = model(mx.array(ids))[0]
    got = token_logprobs(logits[len(prompt) - 1 : -3], mx.array(answer))
    expected = own_logprobs(plain, "the same twice", answer)
    assert mx.abs(expected - got).max().item() <= 1e-4
