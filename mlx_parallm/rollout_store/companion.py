"""The seam for what travels with a rollout beside its tokens: in an episode, a check, the store.

A companion turns what the engine returned into fields of `Rollout`, and these into a header and
columns of bytes. companions.py lists them. A training step has its own side of them
(`rl_training/step/companion.py`). No MLX.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from mlx_parallm.types import Completion, CompletionDelta, Request, Rollout, RolloutGroup

Part = Completion | CompletionDelta


class SpanRecorder:
    """One sequence of an episode, span by span."""

    def show(self, prompt: Any) -> None:
        """Note the whole prompt of the next turn, a text or messages."""

    def add_sampled(self, completion: Completion, end: int) -> None:
        """Note a turn, which makes the sequence `end` tokens long."""

    def fields(self) -> dict[str, Any]:
        """Return fields of `Rollout`."""
        return {}


class RolloutCompanion:
    """Something that travels with the tokens of a rollout. The defaults carry nothing."""

    shown: ClassVar[str] = ""
    """Name under which people see it beside the texts of a rollout; "": they do not."""

    def names(self, rollout: Rollout) -> list[str]:
        """Return what people see of it. Only if it is `shown`."""
        return []

    def recorder(self) -> SpanRecorder:
        return SpanRecorder()

    def of_answer(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return fields of `Rollout`, of an answer that came in parts."""
        return {}

    def metadata(self, completion: Completion) -> dict[str, Any]:
        """Return what a program in Python gets beside an answer, by name."""
        return {}

    def of_prompt(self, rollout: Rollout) -> dict[str, Any]:
        """Return fields that belong to the prompt alone."""
        return {}

    def unkept(self, request: Request) -> str | None:
        """Name what this request has that is not kept for training, nor then its answer; None: it
        has nothing of the kind."""
        return None

    # ------------------------------------------------------------------ checks

    def check(self, segment: Rollout) -> None:
        """Raises RolloutRejectedError: it does not fit the segment's tokens."""

    def check_group(self, group: RolloutGroup, vocab_size: int) -> None:
        """Raises RolloutRejectedError: it does not fit the group, or the vocabulary."""

    # ------------------------------------------------------------------ in the store

    def pack_group(self, group: RolloutGroup) -> tuple[dict[str, Any], Iterable[bytes], Any]:
        """Return what the group's header holds, the columns in front of its rollouts', and what
        `pack` needs."""
        return {}, (), None

    def pack(self, segment: Rollout, shared: Any) -> tuple[dict[str, Any], Iterable[bytes]]:
        """Return what the segment's header holds, and the columns behind its tokens'."""
        return {}, ()

    def unpack_group(self, header: Mapping[str, Any], read: Callable[[], bytes]) -> Any:
        """Return what `unpack` needs; `read` gives the next column."""
        return None

    def unpack(
        self, header: Mapping[str, Any], shared: Any, read: Callable[[], bytes]
    ) -> dict[str, Any]:
        """Return fields of `Rollout`."""
        return {}
