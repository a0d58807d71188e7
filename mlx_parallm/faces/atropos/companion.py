"""The seam for fields of a scored group that have an entry for each sequence, and become fields of
its rollout: a class for each companion, which `wire.ScoredData` inherits."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator

from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.server.protocol.fields import ListOf

GIVEN = -100  # the label of a token that is not trained on
Integers = ListOf[ListOf[int]]
_T = TypeVar("_T")
Optional = Annotated[
    ListOf[_T] | None, BeforeValidator(lambda value: None if value == [] else value)
]
"""A field that may be missing: BaseEnv.collect_trajectories sends [] for one that no item has."""


class SentSequences(BaseModel):
    """The sequences of a group. A companion adds its field, and answers as this does."""

    ours: ClassVar[frozenset[str]] = frozenset()
    """Fields of companions that atroposlib does not have."""
    tokens: Integers
    masks: Integers
    messages: Optional[ListOf[dict[str, Any]]] = None

    def columns(self) -> dict[str, Sequence[Any] | None]:
        """Return the companions' fields by name, an entry a sequence each."""
        return {}

    def content(self) -> bytes:
        """Return what tells a group from others that have the same tokens and scores."""
        return b""

    def carried(
        self, number: int, mask: Sequence[int], reader: ImageReader | None
    ) -> Mapping[str, Any]:
        """Return fields of the rollout of a sequence. `reader`: the policy's; None: it reads texts
        alone. Raises RolloutRejectedError."""
        return {}
