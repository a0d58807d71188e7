"""A method that is followed: something is called before it and after its end, whatever it gives: a
value, an awaitable, a generator, an async generator, another stream.

    before(*args, **kwargs) → begun
    inside(begun)                  around each stretch of its work
    after(begun, result, error)    once, when all of it has ended

A stream ends when its consumer has read it or closes it; its result is `Streamed`. One that nobody
reads never begins.
"""

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any


@dataclass
class Streamed:
    """The parts of a stream, in order. `value`: a generator's return value."""

    parts: list[Any] = field(default_factory=list)
    value: Any = None

    def __str__(self) -> str:
        return str(self.value) if self.value is not None else "".join(map(_text, self.parts))


def _text(part: Any) -> str:
    """The text of one part: itself, or its `content`, `text` or `delta`."""
    if part is None or isinstance(part, str):
        return part or ""
    if isinstance(part, Mapping):
        texts: tuple[Any, ...] = tuple(part.get(name) for name in ("content", "text", "delta"))
    else:
        fields = vars(part) if hasattr(part, "__dict__") else {}
        texts = tuple(fields.get(name) for name in ("content", "text", "delta"))
    return next((text for text in texts if isinstance(text, str)), str(part))


@dataclass(frozen=True)
class Following:
    """The three functions that record a method's answers; see the module."""

    before: Callable[..., Any]
    inside: Callable[[Any], AbstractContextManager[Any]]
    after: Callable[[Any, Any, BaseException | None], None]

    def followed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method. It stays what it is: a coroutine function, a generator function, …"""
        drive: Callable[..., Any] = _call
        if inspect.isasyncgenfunction(method):
            drive = _async_stream
        elif inspect.isgeneratorfunction(method):
            drive = _stream
        elif inspect.iscoroutinefunction(method):
            drive = _await
        return functools.update_wrapper(functools.partial(drive, self, method), method)

    def given_back(self, result: Any, begun: Any) -> Any:
        """Return what a method has given, followed to its end if that is still to come."""
        going_on = replace(self, before=lambda: begun)
        if isinstance(result, asyncio.Future | Future):
            result.add_done_callback(functools.partial(self._done, begun))
            return result
        if inspect.isawaitable(result):
            return _await(going_on, lambda: result)
        if inspect.isasyncgen(result):
            return _async_stream(going_on, lambda: result)
        if inspect.isgenerator(result):
            return _stream(going_on, lambda: result)
        if hasattr(type(result), "__anext__"):
            return _OtherAsyncStream(going_on, result)
        if hasattr(type(result), "__next__"):
            return _OtherStream(going_on, result)
        self.after(begun, result, None)
        return result

    def _done(self, begun: Any, future: Any) -> None:
        if future.cancelled():
            self.after(begun, None, asyncio.CancelledError())
        elif (error := future.exception()) is not None:
            self.after(begun, None, error)
        else:
            self.after(begun, future.result(), None)


class _Stretch:
    """A part of a method's work: inside, and followed by `end` with an error that leaves it."""

    def __init__(
        self, following: Following, begun: Any, end: Callable[[BaseException], None]
    ) -> None:
        self._inside, self._end = following.inside(begun), end

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._inside.__exit__(kind, error, at)
        if error is not None:
            self._end(error)


def _call(following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    begun = following.before(*args, **kwargs)
    with _Stretch(following, begun, functools.partial(following.after, begun, None)):
        result = method(*args, **kwargs)
    return following.given_back(result, begun)


async def _await(
    following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    begun = following.before(*args, **kwargs)
    with _Stretch(following, begun, functools.partial(following.after, begun, None)):
        result = await method(*args, **kwargs)
    return following.given_back(result, begun)


@dataclass
class _Steps:
    """A stream that is read step by step."""

    following: Following
    begun: Any
    stream: Any
    streamed: Streamed = field(default_factory=Streamed)
    has_ended: bool = False

    def end(self, error: BaseException) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        if isinstance(error, StopIteration):
            self.streamed.value = error.value
        is_whole = isinstance(error, StopIteration | StopAsyncIteration)
        self.following.after(self.begun, self.streamed, None if is_whole else error)

    @property
    def stretch(self) -> _Stretch:
        return _Stretch(self.following, self.begun, self.end)

    def next(self, sent: Any = None, error: BaseException | None = None) -> Any:
        """Read a part; the consumer sent something into the stream, or raised an error there.
        Raises StopIteration: the stream has ended."""
        with self.stretch:
            if error is not None:
                part = self.stream.throw(error)
            elif hasattr(self.stream, "send"):
                part = self.stream.send(sent)
            else:
                part = next(self.stream)
        self.streamed.parts.append(part)
        return part

    async def anext(self, sent: Any = None, error: BaseException | None = None) -> Any:
        """Read a part, as `next` does. Raises StopAsyncIteration: the stream has ended."""
        with self.stretch:
            if error is not None:
                part = await self.stream.athrow(error)
            elif hasattr(self.stream, "asend"):
                part = await self.stream.asend(sent)
            else:
                part = await anext(self.stream)
        self.streamed.parts.append(part)
        return part


def _stream(
    following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Generator[Any, Any, Any]:
    begun = following.before(*args, **kwargs)
    steps = _Steps(following, begun, method(*args, **kwargs))
    sent: Any = None
    failure: BaseException | None = None
    while True:
        try:
            part = steps.next(sent, failure)
        except StopIteration as stop:
            return stop.value
        sent, failure = None, None
        try:
            sent = yield part
        except GeneratorExit as error:
            with following.inside(begun):
                steps.stream.close()
            steps.end(error)
            raise
        except BaseException as error:  # noqa: BLE001  it is the method's, which it is thrown into
            failure = error


async def _async_stream(
    following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any, Any]:
    begun = following.before(*args, **kwargs)
    steps = _Steps(following, begun, method(*args, **kwargs))
    sent: Any = None
    failure: BaseException | None = None
    while True:
        try:
            part = await steps.anext(sent, failure)
        except StopAsyncIteration:
            return
        sent, failure = None, None
        try:
            sent = yield part
        except GeneratorExit as error:
            with following.inside(begun):
                await steps.stream.aclose()
            steps.end(error)
            raise
        except BaseException as error:  # noqa: BLE001  it is the method's, which it is thrown into
            failure = error


class _Other:
    """A stream of another class: it keeps its other attributes."""

    def __init__(self, following: Following, stream: Any) -> None:
        self._stream = stream
        self._steps = _Steps(following, following.before(), stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _OtherStream(_Other):
    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._steps.next()


class _OtherAsyncStream(_Other):
    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return await self._steps.anext()


class ThreadContexts:
    """While it is in use, a new thread, and what a pool of threads is given, continues in the
    context of the code that began it: a run's tool may work in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._here = threading.local()
        self._submit: Any = ThreadPoolExecutor.submit
        self._start: Any = threading.Thread.start

    def use(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            submit: Any = ThreadPoolExecutor.submit
            start: Any = threading.Thread.start
            self._submit, self._start = submit, start
            here = self._here

            @functools.wraps(submit)
            def submit_here(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
                here.is_pool = True  # its threads serve others too
                try:
                    context = contextvars.copy_context()
                    return submit(pool, context.run, function, *args, **kwargs)
                finally:
                    here.is_pool = False

            @functools.wraps(start)
            def start_here(thread: threading.Thread) -> None:
                if not getattr(here, "is_pool", False):
                    context, run = contextvars.copy_context(), thread.run
                    thread.run = lambda: context.run(run)  # type: ignore[method-assign]
                start(thread)

            ThreadPoolExecutor.submit = submit_here  # type: ignore[method-assign]
            threading.Thread.start = start_here  # type: ignore[method-assign, assignment]

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                ThreadPoolExecutor.submit = self._submit  # type: ignore[method-assign]
                threading.Thread.start = self._start  # type: ignore[method-assign]
