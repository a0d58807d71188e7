"""Images in chats: their places in messages, and their tokens in a prompt's text. No
MLX, no picture is opened here.

    messages (`read_messages` with images) → image_sources → ImageReader.read → PromptImage
    rendered text, a placeholder for each  → with_images   → text with each image's own tokens
"""

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.parts.images import IMAGE, ImageSource
from mlx_parallm.execution.parts.kinds import Shown
from mlx_parallm.types import ChatTokenizer, PromptImage, Request, Rollout

PARTS = ("visual.", "vision_tower.", "vision_model.", "connector.", "multi_modal_projector.")
"""Beginnings of names of the part that sees, in checkpoints and adapters."""
CUT = "'truncate_prompt_tokens' would cut into a prompt with images"
STORED = "sha256:"  # begins the name of an image that this process has stored
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHOWN = 60  # characters of a client's text in an error


def stored_digest(name: str) -> str:
    """Return the digest in the name of a stored image, which is the name of its file too. Raises
    ValueError: it is none, and may lead anywhere."""
    digest = name.removeprefix(STORED)
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{name[:_SHOWN]!r} is not a name of a stored image")
    return digest


class ImageReader(Protocol):
    """Turn sources into inputs of this process's model."""

    @property
    def placeholder(self) -> str:
        """The text that the model's chat template writes for an image."""

    @property
    def token_id(self) -> int:
        """The token that is in a prompt for each of an image's features."""

    async def read(self, sources: Sequence[ImageSource]) -> list[PromptImage]:
        """Return the images in order. Raises RequestError: one that is not there, is not an image,
        or is too large; which and why."""

    def stored(self, name: str) -> PromptImage:
        """Return the image of a name that `STORED` begins: a data set's row has it. Any thread.
        Raises RequestError."""

    def keep(self, data: bytes) -> str:
        """Store an image and return its name. Any thread. Raises RequestError: it is none that is
        read here."""

    def close(self) -> None:
        """End its threads."""


def kinds_read(reader: ImageReader | None) -> Shown:
    """Return the names of the kinds of parts that a model with this reader reads."""
    return () if reader is None else (IMAGE.name,)


def image_sources(
    messages: Iterable[Mapping[str, Any]], where: str = "messages"
) -> list[ImageSource]:
    """Return the images of messages, in their order. `place` of a part is its
    place in the body of another API. Raises RequestError."""
    return [
        IMAGE.source(part, str(part.get("place") or f"{where}.{position}.content.{index}"))
        for position, message in enumerate(messages)
        if not isinstance(message["content"], str)
        for index, part in enumerate(message["content"])
        if part["type"] == "image"
    ]


def image_refs(messages: str | Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of stored images in a prompt, in order."""
    if isinstance(messages, str):
        return ()
    return tuple(
        part["image"]
        for message in messages
        if isinstance(message.get("content"), list | tuple)
        for part in message["content"]
        if isinstance(part, Mapping) and part.get("type") == "image"
    )


def stored_in(messages: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of a `Rollout` whose prompt are these messages."""
    return {"images": image_refs(messages)}


def names_of(rollout: Rollout) -> tuple[str, ...]:
    """Return the names of the stored images that a rollout shows."""
    return rollout.images


def stored_names(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of stored images in the fields of a rollout."""
    names: tuple[str, ...] = fields.get("images", ())
    return names


def data_url_bytes(url: str, most: int | None = None) -> bytes:
    """Decode a data URL of an image. Raises ValueError: it is not one, or is larger than
    `most` bytes."""
    head, comma, body = url.partition(",")
    kind, *options = head.removeprefix("data:").split(";")
    if not comma or "base64" not in (option.strip().lower() for option in options):
        raise ValueError("a data URL is read as data:image/…;base64,…")
    if kind.strip() and not kind.strip().lower().startswith("image/"):
        raise ValueError(f"the data URL says {kind.strip()[:_SHOWN]!r}, which is not an image")
    if most is not None and len(body) // 4 * 3 > most + 3:
        raise ValueError(f"it has {len(body) // 4 * 3} bytes, and at most {most} are read")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except binascii.Error:
        raise ValueError("the data URL is not base64") from None


def without_sources(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as a chat template gets them: it sees where parts beside text are, and not
    the megabytes that they are written in."""
    return [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [
                part if part["type"] == "text" else {"type": part["type"]}
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def text_of(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the text of a content of `read_messages`, without its images."""
    if isinstance(content, str):
        return content
    return "".join(texts_of(content))


def texts_of(content: str | Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of a content of `read_messages`, in order."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]


def without_images(messages: Iterable[Mapping[str, Any]], role: str) -> list[dict[str, Any]]:
    """Return messages of which those of a role show texts alone."""
    return [
        {**message, "content": text_of(message["content"])}
        if message["role"] == role
        else dict(message)
        for message in messages
    ]


def check_places(text: str, placeholder: str, images: int) -> None:
    """Raises RequestError: a rendered text has not as many placeholders as images."""
    if (places := text.count(placeholder)) != images:
        reason = (
            f"the chat template made {places} places of these {images} images: a text beside images"
            f" must not hold {placeholder!r}, and the model's template must show them"
        )
        raise RequestError(reason, param="messages")


def with_images(text: str, placeholder: str, images: Sequence[PromptImage]) -> str:
    """Return a rendered text in which each placeholder has become its image's own text. Raises
    RequestError: there are more placeholders, or fewer."""
    check_places(text, placeholder, len(images))
    pieces = text.split(placeholder)
    return pieces[0] + "".join(
        image.text + piece for image, piece in zip(images, pieces[1:], strict=True)
    )


def with_stored(reader: ImageReader | None, text: str, refs: Sequence[str]) -> str:
    """Return a rendered text with the own text of each stored image. Raises RequestError."""
    if reader is None or not refs:
        return text
    return with_images(text, reader.placeholder, [*map(reader.stored, refs)])


async def with_sources(
    reader: ImageReader | None, text: str, sources: Sequence[ImageSource]
) -> tuple[str, dict[str, Any]]:
    """Return a rendered text with the own text of each image, and the fields of `Request` that go
    with it. Raises RequestError."""
    if reader is None or not sources:
        return text, {}
    check_places(text, reader.placeholder, len(sources))
    images = tuple(await reader.read(sources))
    return with_images(text, reader.placeholder, images), {"images": images}


async def carried_by(
    reader: ImageReader | None, messages: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the fields of `Request` that go with messages whose prompt the client has rendered.
    Raises RequestError."""
    if reader is None or not (sources := image_sources(messages)):
        return {}
    return {"images": tuple(await reader.read(sources))}


def carried_with(
    tokenizer: ChatTokenizer, prompt: str | Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the fields of `Request` that go with a prompt of stored images. Raises
    RequestError."""
    return {"images": tokenizer.images_of(prompt)} if image_refs(prompt) else {}


def digests(request: Request) -> tuple[str, ...]:
    """Return what tells a request's images from others."""
    return tuple(image.digest for image in request.images)


def counted_tokens(counts: dict[str, Any], requests: Iterable[Request]) -> dict[str, Any]:
    """Add OpenAI's count of the prompts' image tokens, if there are some."""
    if tokens := sum(image.tokens for request in requests for image in request.images):
        counts["prompt_tokens_details"]["image_tokens"] = tokens
    return counts
