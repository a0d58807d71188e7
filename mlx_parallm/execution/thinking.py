"""Tell whether the answer to a prompt may begin with reasoning. No MLX."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

TAIL_TOKENS = 16  # enough for the markers with which a template opens an answer


class MarkedTokenizer(Protocol):
    """The part of `models.tokenizer.Tokenizer` that knows the markers of reasoning."""

    @property
    def think_markers(self) -> tuple[str, str] | None: ...

    def encode_within(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """`markers`: around the reasoning. `opened`: the prompt has opened it, so the answer begins
    inside."""

    markers: tuple[str, str]
    opened: bool

    @property
    def reasoning(self) -> tuple[str, str]:
        """Return it as `SamplingParams.reasoning`."""
        return ("" if self.opened else self.markers[0], self.markers[1])


def thinking_after(tokenizer: MarkedTokenizer, prompt_token_ids: Sequence[int]) -> Thinking | None:
    """Return whether the answer to a prompt may begin with reasoning. None: the model does not
    think, or the prompt has ended it.

    Markers in a user's message must not count: only the prompt's end does.
    """
    markers = tokenizer.think_markers
    if markers is None:
        return None
    tail = tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)
    if tail.rstrip().endswith(markers[1]):
        return None
    return Thinking(markers, opened=tail.rstrip().endswith(markers[0]))


def tokens_of_thought(tokenizer: MarkedTokenizer, prompt_token_ids: Sequence[int]) -> int:
    """Count the prompt's tokens behind its last start of reasoning, which it has not ended (vLLM's
    `thinking_token_budget` counts them)."""
    assert tokenizer.think_markers is not None
    start = tuple(tokenizer.encode_within(tokenizer.think_markers[0]))
    for place in range(len(prompt_token_ids), len(start) - 1, -1):
        if tuple(prompt_token_ids[place - len(start) : place]) == start:
            return len(prompt_token_ids) - place
    return 0
