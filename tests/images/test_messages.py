"""Images in messages and in rendered texts: their order, their places, and what is refused."""

from typing import Any

import pytest

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import read_messages
from mlx_parallm.execution.prompt_images import image_sources, text_of, with_images, without_sources
from mlx_parallm.models.text.chat_template import render_template, takes_parts
from mlx_parallm.types import PromptImage
from tests.images.checkpoints import TEMPLATE

URL = "data:image/png;base64,AA"
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "First "},
            {"type": "input_text", "text": "this:"},
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            {"type": "input_image", "image_url": URL + "B"},
            {"type": "text", "text": "?"},
        ],
    },
]


def test_a_users_images_stay_in_their_places() -> None:
    read = read_messages(CHAT, shown=["image"])
    assert read_messages(read, shown=["image"]) == read
    kinds = [part["type"] for part in read[1]["content"]]
    assert kinds == ["text", "image", "image", "text"]
    first, second = image_sources(read)
    assert (first.value, first.detail, first.where) == (URL, "low", "messages.1.content.1")
    assert (second.value, second.detail) == (URL + "B", None)
    shown = without_sources(read)
    assert shown[0] == read[0] and shown[1]["content"][1:3] == [{"type": "image"}] * 2
    assert text_of(read[1]["content"]) == "First this:?" and text_of("x") == "x"


def test_without_images_they_are_refused_as_before() -> None:
    with pytest.raises(RequestError, match="text parts"):
        read_messages(CHAT)
    with pytest.raises(RequestError, match=r"messages\.0\.content\.0"):
        read_messages([{"role": "assistant", "content": [{"type": "image"}]}], shown=["image"])


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_url"}, "needs one of image_url"),
        ({"type": "input_image", "file_id": "file-1"}, "keeps no files"),
        ({"type": "image", "image": URL, "url": URL}, "needs one of"),
        ({"type": "image", "image": URL, "crop": 1}, "has no field 'crop'"),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "most"}}, "expected auto"),
    ],
)
def test_a_part_that_is_not_understood_is_refused(part: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        image_sources(read_messages([{"role": "user", "content": [part]}], shown=["image"]))


def test_each_placeholder_becomes_its_image() -> None:
    images = [PromptImage("a", "[a]", 1), PromptImage("b", "[b]", 1)]
    assert with_images("x<i>y<i>", "<i>", images) == "x[a]y[b]"
    with pytest.raises(RequestError, match="2 places of these 1"):
        with_images("x<i>y<i>", "<i>", images[:1])


def test_a_template_that_reads_parts_alone_shows_texts_and_images() -> None:
    assert takes_parts(TEMPLATE)
    read = read_messages(CHAT, shown=["image"])
    text = render_template(TEMPLATE, read, continue_final_message=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>System: Be brief.<|im_end|>\nUser: First"
        " this:<image><image>?<|im_end|>\nAssistant:"
    )
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    assert render_template(TEMPLATE, chat, continue_final_message=True).endswith("Assistant: Well,")
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert not takes_parts(plain) and not takes_parts("nothing")
