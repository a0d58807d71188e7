"""The episode that the running code belongs to, so that `InferenceModule.generate` inside it is recorded in it."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Protocol

from mlx_parallm.environments.state import Prompt
from mlx_parallm.types import Completion, PolicyClient


class EpisodeOver(BaseException):
    """Ends the episode where it asks for another turn: it has no room left, or has ended.

    Not an Exception, so that `except Exception` in an environment lets it pass.
    """


class CurrentEpisode(Protocol):
    """What `InferenceModule` needs of `episode.Episode`: it goes through it where client and adapter are its own, so
    that another model's answers inside a step (one that plays the user, a judge) stay out of the transcript."""

    @property
    def client(self) -> PolicyClient: ...

    @property
    def adapter(self) -> str | None: ...

    @property
    def since(self) -> float:
        """When `adapter` was chosen, by time.monotonic(): not later than it began."""

    def generate(self, prompt: Prompt, params: Mapping[str, Any]) -> Completion:
        """As `agenerate`, and blocks: for a step that runs on a thread.

        Raises RuntimeError: on the thread of the environment's loop, where it would wait for itself.
        """

    async def agenerate(self, prompt: Prompt, params: Mapping[str, Any]) -> Completion:
        """Samples the episode's next turn as the run samples, and records it.

        Args:
            params: what the environment asks for itself: `max_tokens` (never more than the configuration's, or than
                there is room for), `stop` (instead of the configuration's), `tools` (for the chat template),
                `skip_special_tokens` (False: the text shows them).

        Raises:
            EpisodeOver: no room for another turn, or the episode has ended.
            RolloutRejectedError: another parameter, or the engine failed.
            RequestError: the chat template refuses the messages.
        """


CURRENT: ContextVar[CurrentEpisode | None] = ContextVar("episode", default=None)
