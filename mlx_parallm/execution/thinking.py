"""Tell whether the answer to a prompt may begin with reasoning. No MLX."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

TAIL_TOKENS = 16  # enough for the markers with which a template opens an answer


class MarkedTokenizer(Protocol):
    """The part of `models.tokenizer.Tokenizer` that knows the markers of reasoning."""

    @property
    def think_markers(self) -> tuple[str, str] | None: ...

    def encode_within(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class TurnsTokenizer(MarkedTokenizer, Protocol):
    """It also knows how the chat template opens an answer."""

    @property
    def answer_opening(self) -> str: ...


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


def ends_thinking(tokenizer: MarkedTokenizer) -> bool:
    """Return whether the end of the model's reasoning has a marker, so that it can be forced."""
    return tokenizer.think_markers is not None and bool(tokenizer.think_markers[1])


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


def tokens_of_thought(
    tokenizer: TurnsTokenizer, prompt_token_ids: Sequence[int], eos_token_ids: Collection[int]
) -> int | None:
    """Count the prompt's tokens behind its last start of reasoning (vLLM's `thinking_token_budget`
    counts them). None: no reasoning has begun, or it has ended, or the turn in which it stood.

    Markers in a user's message must not count: an answer is opened behind them.
    """
    assert tokenizer.think_markers is not None
    start, end = (tuple(tokenizer.encode_within(marker)) for marker in tokenizer.think_markers)
    last = {*start[-1:], *end[-1:], *eos_token_ids}
    for stop in range(len(prompt_token_ids), 0, -1):
        if prompt_token_ids[stop - 1] not in last:
            continue
        if start and tuple(prompt_token_ids[max(stop - len(start), 0) : stop]) == start:
            behind = prompt_token_ids[stop:]
            opening = tokenizer.answer_opening
            if opening and opening in tokenizer.decode(behind, skip_special_tokens=False):
                return None
            return len(behind)
        ended = end and tuple(prompt_token_ids[max(stop - len(end), 0) : stop]) == end
        if ended or prompt_token_ids[stop - 1] in eos_token_ids:
            return None
    return None
