"""Player: a thread with an asyncio loop of its own that plays groups of one environment (or of several, in order).

Each environment has one, because its code is somebody else's: what blocks a thread for ever blocks this one only.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult
from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import ChatTokenizer


class Player:
    """`on_results` and `on_error` (a bug of ours: episodes fail as results) are called on the player's thread."""

    def __init__(
        self,
        name: str,
        runner: EpisodeRunner,
        *,
        on_results: Callable[[Sequence[GroupResult]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.name = name
        self._runner, self._on_results, self._on_error = runner, on_results, on_error
        self._loop = LoopThread(f"environment {name}")

    def play(self, plans: Sequence[GroupPlan]) -> None:
        """Start groups; several are submitted atomically. Any thread may call it. After `stop` it does nothing."""
        with suppress(EngineUnavailableError):
            self._loop.submit(self._play(plans)).add_done_callback(self._done)

    def stop(self, timeout_s: float = 0.0) -> bool:
        """Cancel what is played, and wait for the thread's end. Returns False while an environment blocks it."""
        return self._loop.stop(timeout_s=timeout_s)

    async def _play(self, plans: Sequence[GroupPlan]) -> None:
        self._on_results(await self._runner.run(plans))

    def _done(self, played: "Future[None]") -> None:
        if not played.cancelled() and (error := played.exception()) is not None:
            self._on_error(error)


class SharedTokenizer:
    """One tokenizer for several threads, one at a time: a large one takes seconds to load and much memory."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer, self._lock = tokenizer, threading.Lock()
        self.eos_token_ids = tokenizer.eos_token_ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        with self._lock:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        with self._lock:
            return self._tokenizer.render_chat(messages, **options)

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        with self._lock:
            return self._tokenizer.render_chat_text(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                template_kwargs=template_kwargs,
            )

    def token_text(self, token_id: int) -> str:
        with self._lock:
            return self._tokenizer.token_text(token_id)
