"""Guess the next tokens of a text that repeats itself, for the engine to check in one forward
(`server.prompt_lookup`; prompt lookup decoding, vLLM's method "ngram"). No MLX.

A draft is what followed the last N_GRAM tokens where they stood before, in prompt or answer. The
engine feeds it behind the newest token and samples every position with that position's own random
stream; the draft holds up to the first other token. So the answer is the one without a draft,
up to the rounding of a forward of several tokens. A draft that fails costs time only: after each
failure in a row twice as many tokens pass before the next one, up to LONGEST_REST.
"""

from collections.abc import Sequence

N_GRAM = 3
FIRST_DRAFT = 4  # tokens; doubled after each draft that held, up to `longest`
LONGEST_REST = 64  # tokens
PATIENCE = 8  # tokens


class Drafts:
    """The drafts of one sequence.

    Args:
        prompt: its prompt; placeholders have negative numbers, which no draft has.
        longest: tokens of a draft.
    """

    def __init__(self, prompt: Sequence[int], longest: int) -> None:
        self._text = list(prompt)
        self._prompt = len(prompt)
        self._after: dict[tuple[int, ...], int] = {}  # n-gram → the place behind its last one
        self._indexed = N_GRAM - 1  # n-grams that end before this place are in `_after`
        self._longest, self._length = longest, min(FIRST_DRAFT, longest)
        self._rest, self._begins_at, self._last_draft = 1, 0, 0

    def next(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that may come after an answer of `tokens`; empty: none are likely."""
        text = self._text
        text.extend(tokens[len(text) - self._prompt :])
        for end in range(self._indexed, len(text)):  # without the last n-gram: it is looked up
            self._after[tuple(text[end - N_GRAM : end])] = end
        self._indexed = max(self._indexed, len(text))
        if len(tokens) < self._begins_at or len(text) < N_GRAM:
            return []
        place = self._after.get(tuple(text[-N_GRAM:]))
        draft = [] if place is None else text[place : place + self._length]
        if min(draft, default=-1) < 0:
            return []
        self._last_draft = len(tokens)
        return draft

    def none_soon(self, tokens: Sequence[int]) -> bool:
        """Whether no draft is likely for a while: a rest of several tokens has begun, or nothing
        has been repeated for PATIENCE tokens."""
        count = len(tokens)
        return self._begins_at > count + 1 or count > self._last_draft + PATIENCE

    def judge(self, drafted: int, held: int, tokens: int) -> None:
        """Note that of a draft so many tokens held; the answer has `tokens` now."""
        if held == drafted:
            self._length = min(2 * self._length, self._longest)
        elif held:
            self._length = max(FIRST_DRAFT, held + 1)
            self._length = min(self._length, self._longest)
        if held:
            self._rest = 1
        else:
            self._length = min(FIRST_DRAFT, self._longest)
            self._begins_at = tokens + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
