"""The text of one choice: incremental decoding, stop strings, and what of it a stream may
already show. No MLX."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.models.tokenizer import Detokenizer


class OutputText:
    """Text of the tokens so far, cut before a stop string.

    A stop string may begin in one token and end in a later one, so text that could be its beginning
    is held back from `take` until it is decided. Without stop strings and without a stream nothing
    is decoded until `finish`: the engine thread then does that work once, off the path of the
    decode step.

    Args:
        detokenizer: makes a fresh incremental decoder.
        stop: stop strings, none empty.
        include_stop: keep the matched stop string in the text.
        eager: decode at each token (streams, stop strings).
        reasoning: its markers, if the text may begin with some ("" and the end: it does). Stop
            strings count behind it.
    """

    __slots__ = (
        "_checked",
        "_decoder",
        "_done",
        "_eager",
        "_first",
        "_include_stop",
        "_lazy",
        "_lookback",
        "_make",
        "_reasoning",
        "_stop",
        "_taken",
        "_text",
    )

    def __init__(
        self,
        detokenizer: "Callable[[], Detokenizer]",
        stop: tuple[str, ...],
        *,
        include_stop: bool,
        eager: bool,
        reasoning: tuple[str, str] | None = None,
    ) -> None:
        self._make = detokenizer
        self._decoder: Detokenizer | None = None
        self._stop = stop
        self._include_stop = include_stop
        self._eager = eager or bool(stop)
        # characters that may begin a stop string
        self._lookback = max((len(text) for text in stop), default=1) - 1
        self._lazy: list[int] = []
        self._text = ""
        self._taken = 0
        self._reasoning = reasoning  # None once it is over, or the text has none
        self._first = 0  # where stop strings may begin
        self._checked = 0  # start of the text that may complete a stop string
        self._done = False

    def add(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Takes the next token; returns the stop string that it completed, if any (the text is
        then cut and final)."""
        if not self._eager:
            self._lazy.append(token_id)
            return None
        self._decoder = self._decoder or self._make()
        return self._append(self._decoder.add(token_id), check_stop)

    def take(self) -> str:
        """Text that became showable since the last call."""
        end = len(self._text)
        if not self._done and self._lookback:
            end -= self._longest_beginning_of_a_stop()
        shown = self._text[self._taken : end]
        self._taken = max(self._taken, end)
        return shown

    def finish(self) -> str:
        """Ends the text and returns all of it; an unfinished character shows as U+FFFD.
        Idempotent."""
        if self._done:
            return self._text
        if self._lazy:
            decoder = self._make()
            self._text = (
                "".join([decoder.add(token_id) for token_id in self._lazy]) + decoder.finish()
            )
        elif self._decoder is not None:
            self._append(self._decoder.finish(), check_stop=False)
        self._done = True
        return self._text

    def abandon(self) -> None:
        """The decoder failed: the text ends where it is."""
        self._done = True

    def _append(self, new: str, check_stop: bool) -> str | None:
        self._text += new
        if not (self._stop and new) or self._is_reasoning():
            return None
        checked, self._checked = self._checked, len(self._text)
        if not check_stop:
            return None
        # a match ends in the new text
        begins = ((max(self._first, checked - len(text) + 1), text) for text in self._stop)
        matches = [
            (at, text) for begin, text in begins if (at := self._text.find(text, begin)) >= 0
        ]
        if not matches:
            return None
        # the first in the text; on a tie the first in the request
        at, text = min(matches, key=lambda match: match[0])
        self._text = self._text[: at + (len(text) if self._include_stop else 0)]
        self._done = True
        return text

    def _is_reasoning(self) -> bool:
        """Whether the text may be reasoning still. If it is over, what follows is checked."""
        if self._reasoning is None:
            return False
        start, end = self._reasoning
        opening = self._text.lstrip()
        if start and not opening.startswith(start):
            if start.startswith(opening):
                return True
            self._reasoning = None
            return False
        at = self._text.find(end, max(self._checked - len(end), 0))
        self._checked = len(self._text)
        if at < 0:
            return True
        self._reasoning, self._checked = None, at + len(end)
        self._first = self._checked
        return False

    def _longest_beginning_of_a_stop(self) -> int:
        end, longest = len(self._text), 0
        for stop in self._stop:
            at = self._text.find(stop[0], max(self._taken, end - len(stop) + 1))
            while 0 <= at < end - longest:
                if self._text.startswith(stop[: end - at], at):
                    longest = end - at
                at = self._text.find(stop[0], at + 1)
        return longest
