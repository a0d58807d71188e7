"""Images of a group's sequences, beside their messages."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from mlx_parallm.errors import ConfigError, RequestError, RolloutRejectedError
from mlx_parallm.execution.parts.images import IMAGE
from mlx_parallm.execution.parts.kinds import kind_of
from mlx_parallm.execution.prompt_images import ImageReader, data_url_bytes
from mlx_parallm.faces.atropos.companion import GIVEN, Optional, SentSequences
from mlx_parallm.server.protocol.fields import ListOf


class SentImages(SentSequences):
    images: Optional[str | ListOf[str] | None] = None
    """For each sequence null, an image (a data URL, or base64 alone, as atroposlib's environments
    send it), or a list of them in the order of their tokens; these are as many as the server's
    prompt has."""

    def columns(self) -> dict[str, Sequence[Any] | None]:
        return super().columns() | {"images": self.images}

    def content(self) -> bytes:
        return super().content() + (repr(self.images).encode() if self.images else b"")

    def carried(
        self, number: int, mask: Sequence[int], reader: ImageReader | None
    ) -> Mapping[str, Any]:
        """Store the images of a sequence, and return their names."""
        sent = self.images[number] if self.images else None
        row = [sent] if isinstance(sent, str) else sent or []
        messages = (self.messages or [])[number : number + 1]
        if not row and IMAGE in map(kind_of, chain(*map(parts_of, chain(*messages)))):
            raise RolloutRejectedError(
                f"sequence {number}: its messages have images, and the field images has none"
            )
        names: tuple[str, ...] = ()
        if reader is not None:
            names = self._stored(number, row, reader)
        elif row:
            raise RolloutRejectedError("the group carries images; the policy reads text only")
        return {**super().carried(number, mask, reader), "images": names}

    def _stored(self, number: int, row: Sequence[str], reader: ImageReader) -> tuple[str, ...]:
        names = []
        for image in row:
            try:
                url = image if image.startswith("data:") else f"data:;base64,{image}"
                names.append(reader.keep(data_url_bytes(url)))
            except (ValueError, RequestError, ConfigError) as error:
                raise RolloutRejectedError(f"sequence {number}: an image: {error}") from error
        labels = zip(self.tokens[number], self.masks[number], strict=True)
        count = sum(token == reader.token_id and label == GIVEN for token, label in labels)
        if count != (needed := sum(reader.stored(name).tokens for name in names)):
            raise RolloutRejectedError(
                f"sequence {number}: {count} image tokens, and its {len(names)} images have"
                f" {needed}: send the prompt's tokens as the server returned them"
            )
        return tuple(names)


def parts_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content; none of a text."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def without_pictures(content: Any) -> Any:
    """Return a message's content with its images' bytes left out."""
    if not isinstance(content, list):
        return content
    return [{"type": "image"} if kind_of(part) is IMAGE else part for part in content]


def refuse_other_media(messages: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Raises RolloutRejectedError: messages have parts that are neither text nor images."""
    parts = [part for row in messages for message in row for part in parts_of(message)]
    kinds = {str(part.get("type", "text"))[:80] for part in parts if kind_of(part) is not IMAGE}
    if kinds := kinds - {"text"}:
        raise RolloutRejectedError(
            f"the group carries {', '.join(sorted(kinds))}; the policy reads text and images only"
        )
