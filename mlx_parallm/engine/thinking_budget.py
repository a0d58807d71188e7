"""vLLM's `thinking_token_budget`: after so many tokens of thought the marker that ends them is
forced, token by token. No MLX.

    SequenceMaker → `ThinkingBudget` around the request's grammar, if it has one → sampler.py

What is reasoning is told as a chat's answer tells it (server/protocol/answer_parts.py): it comes
first, and once. Forced tokens are marked as those that a grammar leaves no choice of, so they are
not trained on.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mlx_parallm.engine.grammar import GRAMMAR_CODE, TokenMatcher, bits_of, mask_bytes

if TYPE_CHECKING:
    from mlx_parallm.models.tokenizer import Detokenizer


class ThinkingBudget:
    """A matcher that ends the reasoning of one choice in time. Engine thread only.

    Args:
        tokens: how many tokens may stand between the markers.
        reasoning: `SamplingParams.reasoning`; its start is "" if the prompt has opened it.
        end: token ids of the end marker.
        decoder: of text with special tokens.
        width: how many tokens a mask speaks of.
        matcher: of the request's grammar, which goes on counting; where it forbids the end
            marker, it has the last word.
    """

    __slots__ = (
        "_decoder",
        "_end",
        "_forced",
        "_left",
        "_matcher",
        "_over",
        "_reasoning",
        "_start",
        "_text",
        "_width",
        "ends_thinking",
        "forces",
    )

    def __init__(
        self,
        tokens: int,
        reasoning: tuple[str, str],
        end: Sequence[int],
        decoder: "Detokenizer",
        width: int,
        matcher: TokenMatcher | None,
    ) -> None:
        self._start, self._reasoning = reasoning  # a start of "" is behind us
        self._left = tokens
        self._end, self._forced = end, 0  # how many of the end's tokens have been forced
        self._decoder, self._text = decoder, ""
        self._over = False
        self._width, self._matcher = width, matcher
        self.forces = self.ends_thinking = False

    @property
    def error_code(self) -> str:
        return GRAMMAR_CODE if self._matcher is None else self._matcher.error_code

    def binds(self, ahead: int = 0) -> bool:
        """Return whether a mask may be needed (`Matcher.binds`)."""
        may_end = self._left <= ahead and not self._over if ahead else self._ends_now
        return may_end or (self._matcher is not None and self._matcher.binds(ahead))

    @property
    def _ends_now(self) -> bool:
        return not (self._over or self._start) and self._left <= 0

    def allowed(self) -> np.ndarray:
        """The bits of `Matcher.allowed`."""
        if self._matcher is None:
            bits = np.full(mask_bytes(self._width), 255, np.uint8)
        else:
            bits = self._matcher.allowed()
        self.forces = self._matcher is not None and self._matcher.forces
        self.ends_thinking = False
        if not self._ends_now:
            return bits
        ending = bits_of([self._end[self._forced]], self._width)
        if not (bits & ending).any():
            return bits
        self.forces = self.ends_thinking = True
        return ending

    def advance(self, token: int) -> str | None:
        """Take the sampled token. Returns an error, as `Matcher.advance`."""
        broken = None if self._matcher is None else self._matcher.advance(token)
        self.forces = self.ends_thinking = False
        if self._over:
            return broken
        if self._ends_now and token == self._end[self._forced]:
            self._forced += 1
            self._over = self._forced == len(self._end)
            return broken
        self._forced = 0  # a grammar has taken another token amid the end
        self._text += self._decoder.add(token)
        if self._start:
            self._open()
        else:
            self._count()
        return broken

    def _open(self) -> None:
        """Look for the start of the reasoning."""
        opening = self._text.lstrip()
        if not opening.startswith(self._start):
            self._over = not self._start.startswith(opening)
            return
        self._text, self._start = opening.removeprefix(self._start), ""
        if self._text:
            self._count()

    def _count(self) -> None:
        """Count a token of thought, unless it completes the end."""
        if self._reasoning in self._text:
            self._over = True
            return
        self._left -= 1
        self._text = self._text[-len(self._reasoning) :]  # may begin the end
