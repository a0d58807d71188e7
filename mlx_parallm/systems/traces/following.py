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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
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


@contextmanager
def _stretch(
    inside: AbstractContextManager[Any], end: Callable[[BaseException], None]
) -> Iterator[None]:
    """A part of a method's work: inside, and followed by `end` with an error that leaves it."""
    try:
        with inside:
            yield
    except BaseException as error:
        end(error)
        raise


def _call(following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    begun = following.before(*args, **kwargs)
    with _stretch(following.inside(begun), functools.partial(following.after, begun, None)):
        result = method(*args, **kwargs)
    return following.given_back(result, begun)


async def _await(
    following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    begun = following.before(*args, **kwargs)
    with _stretch(following.inside(begun), functools.partial(following.after, begun, None)):
        result = await method(*args, **kwargs)
    return following.given_back(result, begun)


@dataclass
class _Steps(Iterator[Any]):
    """A stream that is read step by step; `yield from` it hands on what a consumer sends or
    raises."""

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
    def inside(self) -> AbstractContextManager[Any]:
        return self.following.inside(self.begun)

    def __next__(self) -> Any:
        return self._read(next, self.stream)

    def send(self, value: Any) -> Any:
        return self._read(self.stream.send, value)

    def throw(self, *error: Any) -> Any:
        return self._read(self.stream.throw, *error)

    def close(self) -> None:
        with self.inside:
            self.stream.close()
        self.end(GeneratorExit())

    def _read(self, step: Callable[..., Any], *args: Any) -> Any:
        with _stretch(self.inside, self.end):
            part = step(*args)
        self.streamed.parts.append(part)
        return part

    async def read(self, step: Callable[..., Any], *args: Any) -> Any:
        """Read a part of an async stream. Raises StopAsyncIteration: it has ended."""
        with _stretch(self.inside, self.end):
            part = await step(*args)
        self.streamed.parts.append(part)
        return part


def _stream(
    following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Generator[Any, Any, Any]:
    begun = following.before(*args, **kwargs)
    return (yield from _Steps(following, begun, method(*args, **kwargs)))


async def _async_stream(
    following: Following, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> AsyncGenerator[Any, Any]:
    begun = following.before(*args, **kwargs)
    steps = _Steps(following, begun, method(*args, **kwargs))
    step, argument = steps.stream.asend, None
    while True:
        try:
            part = await steps.read(step, argument)
        except StopAsyncIteration:
            return
        try:
            step, argument = steps.stream.asend, (yield part)
        except GeneratorExit as error:
            with steps.inside:
                await steps.stream.aclose()
            steps.end(error)
            raise
        except BaseException as error:  # noqa: BLE001  it is the method's, which it is thrown into
            step, argument = steps.stream.athrow, error


class _Other:
    """Wrap a stream of an unknown class; its other attributes stay."""

    def __init__(self, following: Following, stream: Any) -> None:
        self._stream = stream
        self._steps = _Steps(following, following.before(), stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _OtherStream(_Other, Iterator[Any]):
    def __next__(self) -> Any:
        return next(self._steps)


class _OtherAsyncStream(_Other, AsyncIterator[Any]):
    async def __anext__(self) -> Any:
        return await self._steps.read(self._stream.__anext__)


class ThreadContexts:
    """While it is in use, a new thread, and what a pool of threads is given, continues in the
    context of the code that began it: a run's tool may work in a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._here = threading.local()
        self._own: tuple[Any, Any] = (None, None)  # `submit` and `start`

    def use(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            submit: Any = ThreadPoolExecutor.submit
            start: Any = threading.Thread.start
            self._own = submit, start
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

            self._put(submit_here, start_here)

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._put(*self._own)

    def _put(self, submit: Any, start: Any) -> None:
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
        threading.Thread.start = start  # type: ignore[method-assign]
