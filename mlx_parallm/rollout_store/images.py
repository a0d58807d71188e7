"""Names of stored images, beside the rollouts that saw them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_parallm.execution.prompt_images import image_refs
from mlx_parallm.rollout_store.companion import RolloutCompanion, SpanRecorder
from mlx_parallm.types import Request, Rollout


class ImageRecorder(SpanRecorder):
    """The images of an episode's prompts so far."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def show(self, prompt: Any) -> None:
        self._names = image_refs(prompt)

    def fields(self) -> dict[str, Any]:
        return {"images": self._names}


class StoredImages(RolloutCompanion):
    """`Rollout.images`, in the header."""

    shown = "images"

    def names(self, rollout: Rollout) -> list[str]:
        names = (name for segment in rollout.segments for name in segment.images)
        return [*dict.fromkeys(names)]

    def recorder(self) -> SpanRecorder:
        return ImageRecorder()

    def of_prompt(self, rollout: Rollout) -> dict[str, Any]:
        return {"images": rollout.images}

    def unkept(self, request: Request) -> str | None:
        return "images" if request.images else None

    def pack(self, segment: Rollout, shared: Any) -> tuple[dict[str, Any], Iterable[bytes]]:
        return {"images": list(segment.images)} if segment.images else {}, ()

    def unpack(
        self, header: Mapping[str, Any], shared: Any, read: Callable[[], bytes]
    ) -> dict[str, Any]:
        return {"images": tuple(header.get("images", ()))}
