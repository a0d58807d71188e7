"""Plays one episode of a `BaseEnvironment`, and the threads for code of the user's that blocks."""

import asyncio
import contextvars
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, TypeVar

from mlx_parallm.environments.episode import Episode
from mlx_parallm.environments.state import BaseEnvironment, State, as_state, own_step
from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.user_code import user_code
from mlx_parallm.system.log import get_logger

log = get_logger("environments")

T = TypeVar("T")
Step = Callable[[State], Awaitable[State]]


async def play_states(
    episode: Episode, environment: BaseEnvironment, state: State, max_steps: int, threads: "StepThreads"
) -> None:
    """From `state`, which is the episode's own, to its end or `max_steps`."""
    state.trajectory_id = episode.name
    episode.played = state
    with threads.thread(episode.name, state, functools.partial(_end, environment, episode.name)) as thread:
        step = _step_of(environment, episode, thread)
        for _ in range(max_steps):
            if _is_over(environment, state):
                return
            before = state.step_count
            state = thread.state = episode.played = await step(state)
            state.trajectory_id = episode.name
            state.step_count = max(state.step_count, before + 1)
            await asyncio.sleep(0)  # a step that waits for nothing leaves the others their turn
        episode.cut = not _is_over(environment, state)


def _is_over(environment: BaseEnvironment, state: State) -> bool:
    with _called(environment, "is_terminal"):
        return state.done or environment.is_terminal(state)


def _called(environment: BaseEnvironment, method: str) -> AbstractContextManager[None]:
    return user_code(f"{type(environment).__name__}.{method}", RolloutRejectedError)


def _end(environment: BaseEnvironment, name: str, state: State) -> None:
    try:
        with _called(environment, "end_episode"):
            environment.end_episode(state)
    except RolloutRejectedError as error:
        log.warning("an episode was not closed", episode=name, error=str(error))


def _step_of(environment: BaseEnvironment, episode: Episode, thread: "StepThread") -> Step:
    if not own_step(environment):

        async def ask(state: State) -> State:
            with _called(environment, "build_prompt"):
                prompt = environment.build_prompt(state)
            said = (await episode.turn(prompt)).text
            with _called(environment, "update_state"):
                if environment.blocking:
                    return await thread.run(environment.advance, state, prompt, said)
                return environment.advance(state, prompt, said)

        return ask

    async def step(state: State) -> State:
        with _called(environment, "step"):
            given: Any = environment.step(state) if is_async else await thread.run(environment.step, state)
            return as_state(await given if is_async else given, f"{type(environment).__name__}.step")

    is_async = inspect.iscoroutinefunction(environment.step)
    return step


class StepThreads:
    """The threads of a runner's episodes. A thread cannot be killed: one that blocks when its episode has ended is left
    behind, and ends as soon as it asks for another turn."""

    def __init__(self) -> None:
        self._abandoned: list[StepThread] = []
        self._all: weakref.WeakSet[StepThread] = weakref.WeakSet()  # a thread that runs is kept by itself

    def thread(self, name: str, state: State, last: Callable[[State], None]) -> "StepThread":
        thread = StepThread(name, self._abandoned, state, last)
        self._all.add(thread)
        return thread

    def join(self, deadline: float) -> None:
        """Waits for steps that were left behind and for what frees states, at most until then (time.monotonic)."""
        for thread in list(self._all):
            thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def left_behind(self) -> int:
        """Threads that still run code of an episode that has ended."""
        self._abandoned[:] = [thread for thread in self._abandoned if thread.is_alive]
        return len(self._abandoned)


class StepThread:
    """Runs the code of one episode that may block, always on the same thread, which starts with the first call. `last`
    is called at the end, there or, where nothing has started it, here, with `state`: what the last call returned, even
    if nobody waited for it any more."""

    def __init__(self, name: str, abandoned: "list[StepThread]", state: State, last: Callable[[State], None]) -> None:
        self.state = state
        self._name, self._abandoned, self._last = name, abandoned, last
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StepThread":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is None:
            self._last(self.state)
        self._jobs.put(None)

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Its result, or what it raises. Cancelled, it leaves the thread behind."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        context, future = contextvars.copy_context(), Future[T]()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(function, *arguments)
            except (StopIteration, KeyboardInterrupt) as error:  # a future cannot hold the one, the loop not the other
                unlike = RuntimeError(f"{type(error).__name__}: {error}")
                future.set_exception(unlike.with_traceback(error.__traceback__))
            except BaseException as error:  # noqa: BLE001  boundary: what a step raises ends its episode
                future.set_exception(error)
            else:
                if isinstance(result, State):
                    self.state = result
                future.set_result(result)

        self._jobs.put(job)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running():
                self._abandoned.append(self)
            raise

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self._last(self.state)
