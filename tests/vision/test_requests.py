"""A model that sees, served: the three APIs read the same picture, an answer is what mlx-vlm's own
forward gives, and what cannot be read is a 400 that says which image and why."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import anthropic
import httpx
import mlx.core as mx
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from transformers import AutoConfig, AutoImageProcessor

from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.weights import SharedWeights
from tests.images.checkpoints import IMAGE, save_smolvlm
from tests.vision.drawn import data_url, file_of, noise

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

WIDE, SQUARE = noise(80, 50, 1), noise(24, 24, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that requests may read."""
    path = tmp_path_factory.mktemp("shared")
    (path / "square.png").write_bytes(file_of(SQUARE))
    (path.parent / "secret.png").write_bytes(file_of(SQUARE))
    return path


@pytest.fixture(scope="module")
def serving(checkpoint: Path, shared: Path) -> Iterator[Serving]:
    serving = Serving(
        Config.model_validate(
            {
                "model": {"base_path": str(checkpoint)},
                "server": {"port": 0, "batch_size": 4},
                "vision": {
                    "enabled": True,
                    "max_images": 3,
                    "max_image_bytes": 60_000,
                    "max_pixels": 10_000,
                    "directories": [str(shared)],
                    "hosts": ["127.0.0.1"],
                    "timeout_s": 1.0,
                },
            }
        )
    )
    try:
        serving.listen()
        loaded = serving.load()
        serving.open(
            loaded, SharedWeights(loaded.model, keep_versions=1), adapters={}, main_adapter=None
        )
        yield serving
    finally:
        serving.close()


@pytest.fixture
def client(serving: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{serving.url}/v1", api_key="x", max_retries=0) as client:
        yield client


def image(url: str, detail: str = "auto") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def ask(client: OpenAI, content: Any, **fields: Any) -> Any:
    options = {"max_tokens": 6, "temperature": 0.0, "logprobs": True} | fields
    body = {"return_token_ids": True, "ignore_eos": True}
    return client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": content}],
        extra_body=body,
        **options,
    )


def own_logprobs(path: Path, prompt: list[int], answer: list[int], pictures: list[Any]) -> Any:
    """The answer's log-probabilities by mlx-vlm's whole model and transformers' processor."""
    config = AutoConfig.from_pretrained(path)
    settings = config.to_dict()
    for part in (settings, settings["text_config"]):
        part |= {"rope_theta": 10000.0, "rope_scaling": None}
    module = import_module("mlx_vlm.models.smolvlm")
    arguments = module.ModelConfig.from_dict(settings)
    arguments.text_config = module.TextConfig.from_dict(settings["text_config"])
    arguments.vision_config = module.VisionConfig.from_dict(settings["vision_config"])
    model = module.Model(arguments)
    weights = model.sanitize(dict(mx.load(str(path / "model.safetensors"))))
    weights = module.VisionModel(arguments.vision_config).sanitize(weights)
    model.load_weights([*weights.items()])
    processor = AutoImageProcessor.from_pretrained(path, backend="pil")
    pixels = mx.array(np.array(processor([pictures])["pixel_values"]))
    output = model(mx.array([[*prompt, *answer]]), pixels)
    logits = output.logits[0][len(prompt) - 1 : -1]
    return token_logprobs(logits, mx.array(answer))


def test_an_answer_is_that_of_the_models_own_forward(client: OpenAI, checkpoint: Path) -> None:
    content = [text("Is "), image(data_url(WIDE)), text(" larger than "), image(data_url(SQUARE))]
    answer = ask(client, [*content, text("?")])
    ids = answer.model_dump()
    prompt, sampled = ids["prompt_token_ids"], ids["choices"][0]["token_ids"]
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.prompt_tokens_details.image_tokens == prompt.count(320) == 28 + 40
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content]
    expected = own_logprobs(checkpoint, prompt, sampled, [WIDE, SQUARE])
    assert mx.abs(expected - mx.array(logprobs)).max().item() <= 1e-4


def test_streams_and_groups_and_the_next_turn_compute_a_picture_once(
    client: OpenAI, serving: Serving
) -> None:
    def encoded() -> int:
        count: int = serving.client.call(lambda engine: engine.companions.reader.encoded).result()
        return count

    before, url = encoded(), data_url(noise(50, 70, 3))
    group = ask(client, [image(url), text("n")], n=16, temperature=1.0, seed=1)
    assert len({choice.message.content for choice in group.choices}) > 1
    assert encoded() == before + 1
    stream = ask(client, [image(url), text("n")], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    history = [
        {"role": "user", "content": [image(url), text("n")]},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "And now?"},
    ]
    turn = client.chat.completions.create(model="default", messages=history, max_tokens=2)
    assert turn.usage.prompt_tokens_details.cached_tokens > 20
    assert encoded() == before + 1


def test_three_apis_read_one_picture(client: OpenAI, serving: Serving) -> None:
    url = data_url(WIDE)
    chat = ask(client, [image(url), text("What?")])
    response = client.responses.create(
        model="default",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": url, "detail": "auto"},
                    {"type": "input_text", "text": "What?"},
                ],
            }
        ],
        max_output_tokens=6,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks = [{"type": "image", "source": source}, text("What?")]
    with anthropic.Anthropic(base_url=serving.url, api_key="x", max_retries=0) as other:
        message = other.messages.create(
            model="default",
            max_tokens=6,
            messages=[{"role": "user", "content": blocks}],
            extra_body={"ignore_eos": True, "temperature": 0.0},
        )
        counted = other.messages.count_tokens(
            model="default", messages=[{"role": "user", "content": blocks}]
        )
    said = chat.choices[0].message.content
    assert response.output_text == said and message.content[0].text == said
    count = chat.usage.prompt_tokens
    read = message.usage.input_tokens + message.usage.cache_read_input_tokens
    assert response.usage.input_tokens == read == counted.input_tokens == count


def test_tokenize_counts_a_pictures_tokens_and_low_detail_has_fewer(serving: Serving) -> None:
    counts = {}
    for detail in ("high", "low"):
        content = [image(data_url(WIDE), detail), text("x")]
        body = {"messages": [{"role": "user", "content": content}]}
        counts[detail] = httpx.post(f"{serving.url}/tokenize", json=body).json()["count"]
    # 6 tiles of 4 tokens with two around, two ends of lines, and one more
    assert counts["high"] - counts["low"] == 6 * (4 + 2) + 3


def test_prompt_ids_of_a_client_take_their_pictures_from_the_messages(serving: Serving) -> None:
    messages = [{"role": "user", "content": [image(data_url(SQUARE)), text("x")]}]
    body: dict[str, Any] = {"messages": messages}
    tokens = httpx.post(f"{serving.url}/tokenize", json=body).json()["tokens"]
    body |= {"max_tokens": 4, "temperature": 0.0}
    url = f"{serving.url}/v1/chat/completions"
    rendered = httpx.post(url, json=body).json()["choices"][0]["message"]
    sent = httpx.post(f"{url}/tokens", json=body | {"tokens": tokens}).json()
    assert sent["choices"][0]["message"] == rendered
    tokens.remove(320)
    short = httpx.post(f"{url}/tokens", json=body | {"tokens": tokens})
    assert short.status_code == 400 and "image tokens" in short.json()["error"]["message"]


def test_files_of_allowed_directories_only(client: OpenAI, shared: Path) -> None:
    by_data = ask(client, [image(data_url(SQUARE)), text("x")])
    by_file = ask(client, [image(f"file://{shared}/square.png"), text("x")])
    assert by_file.choices[0].message.content == by_data.choices[0].message.content
    (shared / "link.png").symlink_to(shared.parent / "secret.png")
    for path in ("../secret.png", "link.png", "absent.png", "%2e%2e/secret.png"):
        with pytest.raises(BadRequestError, match="there is no such file"):
            ask(client, [image(f"file://{shared}/{path}"), text("x")])


REFUSED = {
    "not base64": ("data:image/png;base64,####", "not base64"),
    "not encoded": ("data:image/png,AAAA", "a data URL is read as data:image/"),
    "text": (data_url(b"hello", "text/plain"), "is not an image"),
    "svg": (data_url(b"<svg xmlns='x'/>", "image/svg+xml"), "SVG is not read"),
    "empty": ("data:image/png;base64,", "it is empty"),
    "no image": (data_url(b"GIF" + b"0" * 40), "it is not an image that is read here"),
    "cut off": (data_url(file_of(WIDE)[:4000]), "it is damaged"),
    "too many pixels": (
        data_url(file_of(noise(200, 60).resize((200, 60)), "JPEG")),
        "12000|200 × 60",
    ),
    "too many bytes": (data_url(b"x" * 61_000), "at most 60000 are read"),
    "another host": ("https://example.com/a.png", "fetches no image from 'example.com'"),
    "a nearer host": ("http://localhost:1/a.png", "fetches no image from 'localhost'"),
    "nobody there": ("http://127.0.0.1:9/a.png", "gave no image: ConnectError"),
    "another scheme": ("ftp://example.com/a.png", "expected a data: URL"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(client: OpenAI, name: str) -> None:
    url, reason = REFUSED[name]
    with pytest.raises(BadRequestError, match=reason) as refused:
        ask(client, [image(data_url(SQUARE)), text("and"), image(url)])
    error: Any = refused.value.body
    assert error["param"] == "messages.0.content.2" and error["code"] == "invalid_image"


def test_other_things_that_cannot_be(client: OpenAI, serving: Serving) -> None:
    square = image(data_url(SQUARE))
    with pytest.raises(BadRequestError, match=r"4 images, .*3"):
        ask(client, [square] * 4)
    with pytest.raises(BadRequestError, match="must not hold '<image>'"):
        ask(client, [square, text(f"what is {IMAGE}?")])
    with pytest.raises(BadRequestError, match="truncate_prompt_tokens"):
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": [square, text("x")]}],
            extra_body={"truncate_prompt_tokens": 9},
        )
    spoken = [{"role": "assistant", "content": [square]}]
    with pytest.raises(BadRequestError, match="only text parts"):
        client.chat.completions.create(model="default", messages=spoken)
    item = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(model="default", input=[item])
    assert json.loads(json.dumps(refused.value.body))["param"] == "input.0.content.0"


def test_text_alone_is_answered_as_before(client: OpenAI) -> None:
    assert ask(client, "hello").usage.prompt_tokens < 30
    listed = ask(client, [text("hel"), text("lo")])
    assert listed.choices[0].message.content == ask(client, "hello").choices[0].message.content
