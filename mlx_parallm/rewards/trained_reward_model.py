"""A trained reward model as a reward part: `rewards = ["builtin:reward_model"]`. No MLX here.

path    the model (models/scoring) is loaded at the first score, once in a process for all that ask
        for it, and works on its own thread; a run that it does not fit is refused before the run
        begins
url     a server's /v1/score, of this package: `mlx_parallm serve --reward-model`
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from mlx_parallm.errors import ConfigError, EndpointError, RequestError, RolloutRejectedError
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.part_tools import Completions, texts_of, to_binary
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Trajectory

log = get_logger("rewards")

Conversation = str | Sequence[Mapping[str, Any]]


def reward_model(
    *,
    path: str = "",
    url: str = "",
    threshold: float | None = None,
    model: str | None = None,
    api_key_file: str | None = None,
    timeout_s: float = 120.0,
    retries: int = 3,
    concurrency: int = 16,
) -> "ModelReward":
    """The score of a trained reward model: any number, larger is better.

    Args:
        path: the run that trained it (its `final`, else its `latest`), or a checkpoint.
        url: instead of it, a server with /v1/score, e.g. "http://127.0.0.1:8001/v1".
        model: the server's name of it; default: the only one that it has.
        api_key_file: file that holds the server's key.
        timeout_s: of one request.
        retries: further tries of a server that is busy or cannot be reached.
        concurrency: requests to the server at once.

    Metric: reward_model/unscored, answers of the group that it could not read.

    Raises ConfigError: not found, or its base has another tokenizer; both a path and a url, or
    neither. ModelError: no such base.
    """
    if bool(path) == bool(url):
        raise ConfigError("reward_model: set path, a run here, or url, a server's (one of them)")
    if path:
        if model is not None or api_key_file is not None:
            raise ConfigError("reward_model: model and api_key_file belong to a url")
        from mlx_parallm.models.scoring.card import check_reward_model

        return ModelReward(_Here(str(check_reward_model(path))), threshold)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"reward_model: url = {url!r}: expected e.g. http://127.0.0.1:8001/v1")
    try:
        key = Path(api_key_file).read_text(encoding="utf-8").strip() if api_key_file else None
    except OSError as error:
        raise ConfigError(f"reward_model: api_key_file: {error}") from error

    def server() -> OpenAIEndpoint:
        root = url.rstrip("/").removesuffix("/v1")
        return OpenAIEndpoint(
            f"{root}/v1", key, timeout_s=timeout_s, retries=retries, max_in_flight=concurrency
        )

    return ModelReward(_RewardModelServer(server, model), threshold)


class _Scorer(Protocol):
    async def __call__(
        self, conversations: Sequence[Conversation]
    ) -> Sequence[float | RequestError]:
        """A score of each, or why it has none."""
        ...


class _Here:
    """The model in this process."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    async def __call__(
        self, conversations: Sequence[Conversation]
    ) -> Sequence[float | RequestError]:
        from mlx_parallm.models.scoring.reward_model import shared_scorer

        return await asyncio.wrap_future(shared_scorer(self._directory).score_each(conversations))


class _RewardModelServer:
    """A server's model, with a client for each event loop: connections belong to one loop."""

    def __init__(self, make: Callable[[], OpenAIEndpoint], model: str | None) -> None:
        self._make, self._body = make, {} if model is None else {"model": model}
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, OpenAIEndpoint] = (
            WeakKeyDictionary()
        )

    async def __call__(
        self, conversations: Sequence[Conversation]
    ) -> Sequence[float | RequestError]:
        """A server refuses a request for one conversation in it: then each is asked about alone.
        Raises EndpointError: it is away, or has no reward model; RolloutRejectedError: it answers
        something else."""
        try:
            return await self._scores(conversations)
        except EndpointError as error:
            if error.status != 400:
                raise
            if len(conversations) == 1:
                return [RequestError(str(error))]
        alone = await asyncio.gather(*(self([one]) for one in conversations))
        return [score for [score] in alone]

    async def _scores(self, conversations: Sequence[Conversation]) -> list[float]:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop) or self._clients.setdefault(loop, self._make())
        if isinstance(conversations[0], str):
            body: dict[str, Any] = {"input": list(conversations)}
        else:
            body = {"messages": [list(conversation) for conversation in conversations]}
        reply = await client.post("/score", self._body | body)
        try:
            entries = sorted(reply["data"], key=lambda entry: entry["index"])
            scores = [float(entry["score"]) for entry in entries]
        except (LookupError, TypeError, ValueError) as error:
            raise RolloutRejectedError(
                f"reward_model: this is not an answer of /v1/score: {str(reply)[:200]}"
            ) from error
        if len(scores) != len(conversations) or not all(map(math.isfinite, scores)):
            raise RolloutRejectedError(
                f"reward_model: {len(conversations)} conversations were sent, and the scores are"
                f" {str(scores)[:200]}"
            )
        return scores

    async def aclose(self) -> None:
        if (client := self._clients.pop(asyncio.get_running_loop(), None)) is not None:
            await client.aclose()


class ModelReward:
    """The reward function of `builtin:reward_model`."""

    def __init__(self, scorer: _Scorer, threshold: float | None) -> None:
        self._scorer, self._threshold = scorer, threshold

    async def __call__(
        self,
        prompts: Sequence[Any],
        completions: Completions,
        trajectories: Sequence[Trajectory] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | str | None]:
        """Score whole conversations: a trajectory's messages, if it has some.

        An answer that cannot be read (it is too long) is left unscored. Raises
        RolloutRejectedError: none of the group can; EndpointError: the server is away.
        """
        texts = texts_of(completions)
        rows: Sequence[Trajectory | None] = trajectories or [None] * len(texts)
        conversations = [
            row.messages if row is not None and row.messages else whole(prompt, text)
            for prompt, text, row in zip(prompts, texts, rows, strict=True)
        ]
        answers = await self._scorer(conversations)
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
