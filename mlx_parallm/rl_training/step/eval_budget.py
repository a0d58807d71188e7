"""How large a micro-batch may be, so that one evaluation stays within `max_eval_ms`. No MLX.

macOS kills GPU work that takes seconds while a display is on (ml-explore/mlx#3267), and the first piece of work that is
too large ends the process: so the budget starts small and doubles as long as evaluations take less than half the limit.
"""

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.system.log import get_logger

FIRST_TOKENS = 512
AIM = 0.8  # of the limit, when the budget is lowered

log = get_logger("trainer")


class EvalPace:
    """`budget`: tokens of a micro-batch, padding included; never above `token_budget`. No limit: always that."""

    def __init__(self, config: RLTrainingConfig) -> None:
        self._limit_ms = None if config.deterministic else config.max_eval_ms
        self._full = config.token_budget
        self.budget = self._full if self._limit_ms is None else min(self._full, FIRST_TOKENS)
        self._told_single = False

    def measured(self, longest_ms: float, *, tokens: int, rows: int) -> None:
        """After a micro-batch of `rows` sequences and `tokens` tokens, whose longest evaluation took `longest_ms`."""
        if self._limit_ms is None:
            return
        if longest_ms > self._limit_ms:
            if rows == 1:
                self._one_is_too_long(longest_ms, tokens)
            lowered = max(1, int(tokens * AIM * self._limit_ms / longest_ms))
            if lowered < self.budget:
                log.info("smaller micro-batches", tokens=lowered, evaluation_ms=round(longest_ms), limit=self._limit_ms)
                self.budget = lowered
        elif longest_ms < self._limit_ms / 2 and 2 * tokens > self.budget:  # a micro-batch that was nearly full
            self.budget = min(self._full, 2 * self.budget)

    def _one_is_too_long(self, longest_ms: float, tokens: int) -> None:
        if not self._told_single:
            log.warning(
                "one sequence alone takes longer than max_eval_ms: shorten rl_training.atropos.max_token_length or set"
                " rl_training.blocks_per_eval = 1",
                tokens=tokens,
                evaluation_ms=round(longest_ms),
                limit=self._limit_ms,
            )
        self._told_single = True
