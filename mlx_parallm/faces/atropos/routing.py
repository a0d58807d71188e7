"""Recorded experts of a group's sequences, as /inference/v1/generate returns them."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.faces.atropos.companion import Optional, SentSequences
from mlx_parallm.server.protocol.routing import read_npy


class SentExperts(SentSequences):
    ours = SentSequences.ours | {"routed_experts"}
    routed_experts: Optional[str | None] = None

    def columns(self) -> dict[str, Sequence[Any] | None]:
        return super().columns() | {"routed_experts": self.routed_experts}

    def carried(
        self, number: int, mask: Sequence[int], reader: ImageReader | None
    ) -> Mapping[str, Any]:
        fields = super().carried(number, mask, reader)
        if self.routed_experts is None or (text := self.routed_experts[number]) is None:
            return fields
        try:
            experts, prompts = read_npy(text, mask)
        except ValueError as error:
            raise RolloutRejectedError(f"sequence {number}: routed_experts: {error}") from error
        return {**fields, "routed_experts": experts, "prompt_experts": prompts}
