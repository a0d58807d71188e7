"""How many prompt tokens a step computes, so that it ends in time (`server.max_prefill_ms`)."""

FIRST_TOKENS = 256
"""Prefill tokens of a step, until the limit has been measured."""
FEWEST_TOKENS = 16
AIM = 0.8
"""Factor on the limit after a step that took too long."""


class PrefillPace:
    """Prompt tokens of the next step. macOS kills GPU work that takes seconds, and a token of a
    long prompt takes longer the more tokens precede it (ml-explore/mlx#3267). So `tokens` starts
    small, doubles while a step takes less than half the limit, and shrinks when one takes longer.

    Args:
        most: `server.prefill_chunk`.
        limit_ms: of a step that computes prompt tokens; None: `tokens` is always `most`.
    """

    def __init__(self, most: int, limit_ms: int | None) -> None:
        self._most, self._limit_ms = most, limit_ms
        self.tokens = most if limit_ms is None else min(most, FIRST_TOKENS)

    def observe(self, tokens: int, took_ms: float) -> None:
        """Note a step that computed so many prompt tokens."""
        if self._limit_ms is None or not tokens:
            return
        if took_ms > self._limit_ms:
            fewer = int(tokens * AIM * self._limit_ms / took_ms)
            self.tokens = max(FEWEST_TOKENS, min(self.tokens, fewer))
        elif took_ms < self._limit_ms / 2 and 2 * tokens > self.tokens:
            self.tokens = min(self._most, 2 * self.tokens)
