"""A trained reward model as a reward part: `rewards = ["builtin:reward_model"]`. No MLX here.

The model (models/scoring) is loaded at the first score, once in a process whoever asks for it, and
works on a thread of its own. What it does not fit is refused before the run begins.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.errors import RequestError, RolloutRejectedError
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.part_tools import Completions, texts_of, to_binary
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Trajectory

log = get_logger("rewards")

Conversation = str | Sequence[Mapping[str, Any]]


def reward_model(*, path: str, threshold: float | None = None) -> "ModelReward":
    """The score of a trained reward model: any number, larger is better.

    Args:
        path: the run that trained it (its `final`, else its `latest`), or a checkpoint.

    Metric: reward_model/unscored, answers of the group that it could not read.

    Raises ConfigError: there is none, or its base has another tokenizer. ModelError: no such base.
    """
    from mlx_parallm.models.scoring.card import check_reward_model

    return ModelReward(str(check_reward_model(path)), threshold)


class ModelReward:
    """The reward function of `builtin:reward_model`."""

    def __init__(self, directory: str, threshold: float | None) -> None:
        self._directory, self._threshold = directory, threshold

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Completions,
        trajectories: Sequence[Trajectory] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | str | None]:
        """Score whole conversations: a trajectory's messages, where it has some.

        An answer that cannot be read (it is too long) is left unscored. Raises
        RolloutRejectedError: none of the group can.
        """
        from mlx_parallm.models.scoring.reward_model import shared_scorer

        texts = texts_of(completions)
        rows: Sequence[Trajectory | None] = trajectories or [None] * len(texts)
        conversations = [
            row.messages if row is not None and row.messages else whole(prompt, text)
            for prompt, text, row in zip(prompts, texts, rows, strict=True)
        ]
        answers = await asyncio.wrap_future(
            shared_scorer(self._directory).score_each(conversations)
        )
        problems = [answer for answer in answers if isinstance(answer, RequestError)]
        if problems and len(problems) == len(answers):
            raise RolloutRejectedError(f"reward_model: {problems[0]}") from problems[0]
        if problems:
            log.warning("answers without a score", count=len(problems), problem=str(problems[0]))
        if log_metric is not None:
            log_metric("reward_model/unscored", len(problems))
        scores = [None if isinstance(answer, RequestError) else answer for answer in answers]
        return [
            UNSCORED if score is None else score for score in to_binary(scores, self._threshold)
        ]


def whole(prompt: Any, answer: str) -> Conversation:
    """Return prompt and answer as one conversation: texts as a text, messages as messages."""
    if isinstance(prompt, str):
        return prompt + answer
    return [*prompt, {"role": "assistant", "content": answer}]
