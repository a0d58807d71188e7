"""Who reads the user's next message: a language model (this one's base, or a server's), or a Python
function. No MLX.

It judges the answer by what the user wrote back, -1 to 1; None if it cannot tell.
"""

from typing import Any, Protocol

from mlx_parallm.errors import ConfigError, EndpointError, RolloutRejectedError
from mlx_parallm.execution.user_code import (
    is_reference,
    load_function_of,
    on_own_thread,
    user_code,
)
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.judge import judge
from mlx_parallm.systems.feedback.config import FeedbackConfig

KEY = "feedback.judge"
CRITERIA = (
    "Somebody asked a model something, read its answer, and wrote a reply. The task below has the"
    " question and the model's answer; the answer below is that person's reply. Judge only whether"
    " the reply shows that the person was content with the model's answer: 10 for thanks or for"
    " going on with it, 0 for a complaint or a correction, 5 where the reply does not tell."
)


class JudgeFailedError(Exception):
    """There is no judgement. `str`: why; `may_pass`: asking again later may help."""

    def __init__(self, reason: str, *, may_pass: bool) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class ReplyJudge(Protocol):
    async def __call__(self, question: str, answer: str, reply: str) -> float | None:
        """Return -1 to 1, or None. Raises JudgeFailedError."""

    def attach(self, inference: Any) -> None:
        """Take the policy's engine."""

    async def aclose(self) -> None: ...


def reply_judge(config: FeedbackConfig) -> ReplyJudge | None:
    """Return the configured judge; None: replies are not judged. Raises ConfigError."""
    if config.judge is None:
        return None
    if is_reference(config.judge):
        return FunctionJudge(config.judge)
    return ModelReplyJudge(config)


class FunctionJudge:
    """A function of the user's: (question, answer, reply) → a number from -1 to 1, or None."""

    def __init__(self, reference: str) -> None:
        self._name = f"{KEY}: {reference}"
        self._function = load_function_of(("question", "answer", "reply"), reference, KEY)

    async def __call__(self, question: str, answer: str, reply: str) -> float | None:
        """It runs on a thread: it may block. Raises JudgeFailedError: it raised, or returned
        something else."""
        try:
            return await on_own_thread(
                lambda: self._ask(question, answer, reply), f"judge {self._name}"
            )
        except ConfigError as error:
            raise JudgeFailedError(str(error), may_pass=False) from error

    def _ask(self, question: str, answer: str, reply: str) -> float | None:
        with user_code(self._name):
            value = self._function(question, answer, reply)
            number = None if value is None else float(value)
        if number is not None and not abs(number) <= 1:  # NaN too
            raise JudgeFailedError(
                f"{self._name} returned {value!r}: expected -1 to 1, or None", may_pass=False
            )
        return number

    def attach(self, inference: Any) -> None: ...

    async def aclose(self) -> None: ...


class ModelReplyJudge:
    """A language model: `rewards.judge.ModelJudge` with criteria of its own."""

    def __init__(self, config: FeedbackConfig) -> None:
        key_file = config.judge_api_key_file
        self._judge = judge(
            judge=str(config.judge),
            model=config.judge_model,
            api_key_file=None if key_file is None else str(key_file),
            criteria=CRITERIA,
        )

    async def __call__(self, question: str, answer: str, reply: str) -> float | None:
        task = f"Question: {question}\n\nThe model's answer: {answer}"
        try:
            [score] = await self._judge([task], [reply])
        except (RolloutRejectedError, EndpointError) as error:
            raise JudgeFailedError(str(error), may_pass=True) from error
        return None if score is None or score == UNSCORED else 2.0 * float(score) - 1.0

    def attach(self, inference: Any) -> None:
        self._judge.attach(inference)

    async def aclose(self) -> None:
        await self._judge.aclose()
