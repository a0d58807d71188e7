"""Images of data sets' rows (the columns `images` and `image` of TRL's formats) and of messages →
parts of the prompt that name a stored image. No picture is opened here.

Images lie in the user's cache, named by the SHA-256 of their bytes (`IMAGES`), before a row is
used: rollouts and messages hold the names alone. A row's paths are relative to its file.
"""

import base64
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_parallm.config.server import cache_directory
from mlx_parallm.errors import ConfigError, RequestError, RolloutRejectedError
from mlx_parallm.execution.chat_messages import read_messages
from mlx_parallm.execution.parts.images import IMAGE
from mlx_parallm.execution.parts.kinds import all_kinds, kind_of
from mlx_parallm.execution.prompt_images import STORED, data_url_bytes, image_refs, stored_digest
from mlx_parallm.system.files import local_path, read_bounded, write_atomically

IMAGES = "images"  # folder in the user's cache
LONGEST_EXAMPLE = 1000  # characters of a content with its images that a person can still paste
OTHER_MEDIA = ("videos", "video", "audios", "audio")
MARK = "<image>"  # LLaVA's and LLaMA-Factory's place of an image in a text
_SOURCES = ("image", "url", "image_url")
_KINDS = {b"\xff\xd8": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}  # first bytes; else PNG
_BEGINNINGS = (*_KINDS, b"\x89PNG")
LARGEST = 256 << 20
"""Bytes of an image's file."""


def has_images(row: Mapping[str, Any], messages: Any = "") -> bool:
    """Whether a row has images, in its columns or in messages of `read_messages`."""
    return any(row.get(name) is not None for name in IMAGE.columns) or (
        not isinstance(messages, str)
        and any(not isinstance(message["content"], str) for message in messages)
    )


def with_row_images(
    messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], where: str, data: str
) -> list[dict[str, Any]]:
    """Return a prompt's messages with the row's images, stored.

    As many as its messages have places for them ({"type": "image"}, or `<image>` in a user's text)
    go there; if there is no place, all come before the text of the first user's message, as in
    TRL.

    Raises ConfigError: an image that cannot be read, or not as many as places.
    """
    folder = local_path(data).parent if not data.startswith("hf:") else Path()
    values = _values(row, where)
    if values:
        messages = [_with_places(message) for message in messages]
    places = [
        part
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == "image" and not any(name in part for name in _SOURCES)
    ]
    if places and len(places) != len(values):
        raise ConfigError(
            f"{where}: the messages have {len(places)} places for images,"
            f" and the row has {len(values)}"
        )
    left = iter(values)

    def part_of(part: Mapping[str, Any]) -> dict[str, Any]:
        if part["type"] != "image":
            return dict(part)
        name = next((name for name in _SOURCES if name in part), None)
        value = next(left) if name is None else part[name]
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        return {"type": "image", "image": stored(value, folder, where)}

    read = [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else [part_of(part) for part in message["content"]],
        }
        for message in messages
    ]
    if values and not places:
        user = next((message for message in read if message["role"] == "user"), None)
        if user is None:
            raise ConfigError(f"{where}: the row has images, and no user's message to show them in")
        text = user["content"]
        parts = [{"type": "text", "text": text}] if isinstance(text, str) else text
        user["content"] = [
            *({"type": "image", "image": stored(value, folder, where)} for value in values),
            *parts,
        ]
    return read


def put_into_turns(
    turns: Mapping[str, Sequence[Mapping[str, Any]]],
    row: Mapping[str, Any],
    where: str,
    data: str,
    *,
    chat: bool,
    blind: str | None = None,
) -> dict[str, Any]:
    """Return the columns of messages of a row, with its images in each, stored; none: it has none.

    Args:
        turns: messages of `read_messages`, by their columns.
        chat: whether there is a chat template; `blind`: who trains on the row and reads none.

    Raises ConfigError.
    """
    if not any(has_images(row, messages) for messages in turns.values()):
        return {}
    if not chat:
        refuse_images(row, next(iter(turns.values())), where)
    if blind is not None:
        raise ConfigError(f"{where}: {blind} reads no images")
    return {name: with_row_images(each, row, where, data) for name, each in turns.items()}


def _with_places(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a user's message with a place for an image if its text has `<image>`."""
    content = message["content"]
    if message["role"] != "user" or not isinstance(content, str) or MARK not in content:
        return dict(message)
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def refuse_other_media(row: Mapping[str, Any], where: str) -> None:
    """Raises ConfigError: a row has videos or sound, which no model here takes."""
    for name in OTHER_MEDIA:
        value = row.get(name)
        if value is not None and not (isinstance(value, str | list | tuple) and not value):
            raise ConfigError(f"{where}: column {name!r}: only texts and images can be read")


def with_stored_images(prompt: Any, what: str) -> Any:
    """Return a prompt, a text or messages, in which the images of messages are stored; their paths
    are relative to the working directory. Raises RolloutRejectedError: one that cannot be read."""
    if isinstance(prompt, str) or not any(map(_waits_to_be_stored, prompt)):
        return prompt
    try:
        messages = read_messages(prompt, what, shown=all_kinds())
        return tuple(with_row_images(messages, {}, what, "hf:"))
    except (ConfigError, RequestError) as error:
        raise RolloutRejectedError(str(error)) from error


def with_data_urls(prompt: Any) -> Any:
    """Return a prompt, a text or messages, whose stored images are data URLs in OpenAI's form, for
    another server. Raises RolloutRejectedError: an image is not there any more."""
    if isinstance(prompt, str) or not image_refs(prompt):
        return prompt
    return tuple(
        message
        if isinstance(message["content"], str)
        else {**message, "content": [*map(_as_data_url, message["content"])]}
        for message in prompt
    )


def example_content(messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return the last message's content as a client would send it, with its images; "" where these
    are too large for a command line, or no longer there."""
    try:
        [*_, last] = with_data_urls(messages)
    except RolloutRejectedError:
        return ""
    content = last["content"]
    return content if isinstance(content, str) or len(str(content)) <= LONGEST_EXAMPLE else ""


def _as_data_url(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part.get("type") != "image":
        return part
    name = part["image"]
    try:
        data = read_bounded(cache_directory(IMAGES) / stored_digest(name), LARGEST)
    except (OSError, ValueError) as error:
        raise RolloutRejectedError(f"the image {name}: {error}") from error
    kind = next((kind for begin, kind in _KINDS.items() if data.startswith(begin)), "png")
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _waits_to_be_stored(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list | tuple) and any(
        kind_of(part) is IMAGE and not str(part.get("image", "")).startswith(STORED)
        for part in content
    )


def refuse_images(row: Mapping[str, Any], messages: Any, where: str) -> None:
    """Raises ConfigError: images beside a prompt that is a plain text."""
    if has_images(row, messages):
        raise ConfigError(f'{where}: images need the chat template: set prompt_format = "chat"')


def stored(value: Any, folder: Path, where: str) -> str:
    """Put an image into the cache, and return the name by which messages hold it. Raises
    ConfigError."""
    data = _bytes(value, folder, where)
    digest = hashlib.sha256(data).hexdigest()
    file = cache_directory(IMAGES) / digest
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, data)
    return f"{STORED}{digest}"


def _values(row: Mapping[str, Any], where: str) -> list[Any]:
    present = [name for name in IMAGE.columns if row.get(name) is not None]
    if len(present) > 1:
        raise ConfigError(f"{where}: the row has both 'images' and 'image': keep one of them")
    if not present:
        return []
    value = row[present[0]]
    if value == []:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _bytes(value: Any, folder: Path, where: str) -> bytes:
    if isinstance(value, Mapping):  # an image of Hugging Face's `datasets`, not decoded
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | bytearray) and value:
        return bytes(value)
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return data_url_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{where}: an image: {error}") from error
    if isinstance(value, str | os.PathLike) and str(value):
        path = local_path(str(value).removeprefix("file://"))
        try:
            data = read_bounded(folder / path, LARGEST)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: the image {value} cannot be read: {error}") from error
        if not data.startswith(_BEGINNINGS):  # it would be stored, and sent to other servers
            raise ConfigError(
                f"{where}: {value} is not an image that is read here: PNG, JPEG, WebP or GIF"
            )
        return data
    if callable(save := getattr(value, "save", None)) and hasattr(value, "mode"):  # Pillow's
        file = io.BytesIO()
        save(file, "PNG")
        return file.getvalue()
    raise ConfigError(
        f"{where}: an image is {type(value).__name__}; expected a path, a data: URL, bytes, or a"
        " picture of Pillow's"
    )
