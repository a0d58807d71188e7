"""Player: a thread with an asyncio loop of its own that plays groups of one environment (or of several, in order).

Each environment has one, because its code is somebody else's: what blocks a thread for ever blocks this one only.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, GroupResult
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
        self._running: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"environment {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def play(self, plans: Sequence[GroupPlan]) -> None:
        """Starts groups, two or more of them submitted atomically. From any thread, after `start`."""
        self._call(self._begin, plans)

    def stop(self) -> None:
        """Cancels what is played; the engine drops it. Returns at once."""
        self._call(self._ended.set)

    def join(self, timeout_s: float) -> bool:
        """After `stop`. False: the environment blocks the thread."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended: there is nobody to play
                self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._ended.wait()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _begin(self, plans: Sequence[GroupPlan]) -> None:
        task = asyncio.get_running_loop().create_task(self._play(plans))
        self._running.add(task)
        task.add_done_callback(self._done)

    async def _play(self, plans: Sequence[GroupPlan]) -> None:
        self._on_results(await self._runner.run(plans))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
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
