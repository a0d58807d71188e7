"""Who judges: any OpenAI-compatible server, the base under the policy's adapter or an earlier
version of the policy in this process, or a function of the user's. No MLX.

`judge_model` makes a `JudgeModel` of the option `judge`; `builtin:judge` and `builtin:group_judge`
ask it with a `Question`. What a judge reads of the policy is data: `as_data` writes it as JSON in
which nothing can end its own text, and `mark_of` makes the lines around it, which no answer can
foresee.
"""

import asyncio
import hashlib
import inspect
import json
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Required, TypedDict, TypeVar
from weakref import WeakKeyDictionary

from mlx_parallm.errors import (
    AdapterError,
    ConfigError,
    ContextLengthError,
    EndpointError,
    RequestError,
    RolloutRejectedError,
)
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.execution.user_code import (
    file_of,
    is_async,
    is_reference,
    load_function,
    on_own_thread,
    user_code,
)
from mlx_parallm.system.files import sha256_of
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import (
    ChatTokenizer,
    PolicyClient,
    Request,
    RequestOutput,
    SamplingParams,
    Structure,
)

log = get_logger("rewards")
T = TypeVar("T")

BASE = "base"
VERSION = re.compile(r"policy@(\d+)")
FORMS = (
    '"base", "policy@VERSION", "python:file.py:function", or a URL like http://127.0.0.1:8000/v1'
)
CONTROL = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\U000e0000-\U000e007f"
    r"\ud800-\udfff]|[<\uff1c\ufe64](?=[|｜/!?\w])|[\[\uff3b](?=/?[A-Z_]{2,}[\]\uff3d])"
)
"""Characters that JSON leaves as they are and that a reader may take for more than text: ends of
lines, halves of characters, those that nobody sees, and the first one of a chat template's marks
and of tags, or of what a tokenizer may make one."""

TOO_LONG = re.compile("context[ _](length|size)", re.IGNORECASE)
"""In a server's words about a request for which it has no room."""

MOST_TOKENS = 1 << 40
"""Of a request, that a server is believed to have counted."""

MOST_LEFT = 64
"""Calls of a function that have not returned in time, beyond which no other one begins: each keeps
a thread."""

Messages = list[dict[str, str]]


class JudgeInference(Protocol):
    """The part of `InferenceModule` that a judge in this process needs; for "policy@VERSION" its
    `weights` too."""

    client: PolicyClient
    tokenizer: ChatTokenizer
    adapter: str | None


@dataclass(frozen=True, slots=True)
class Question:
    """`schema`: the JSON schema that the reply follows, if the judge can be held to one. None: it
    is free text. `alternatives`: likeliest first tokens that are wanted with the reply."""

    messages: Messages
    max_tokens: int
    schema: Mapping[str, Any] | None = None
    alternatives: int = 0


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The judge's reply and its cost. `text` None: none came, because of `problem`. `likely`: the
    likeliest first tokens and their log-probabilities, if they were wanted and are known."""

    text: str | None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    problem: Exception | None = None
    seconds: float = 0.0
    likely: Sequence[tuple[str, float]] | None = None


class JudgeModel(ABC):
    """A model that is asked. `name` tells it from others; `identity` too, in another process, with
    all that its replies depend on beside the question. None: nothing lasts as long."""

    name: str
    identity: str | None = None

    async def ask(self, question: Question) -> JudgeReply:
        """Raises RolloutRejectedError, EndpointError: the request was refused."""
        began = time.monotonic()
        reply = await self._ask(question)
        return replace(reply, seconds=time.monotonic() - began)

    @abstractmethod
    async def _ask(self, question: Question) -> JudgeReply: ...

    def attach(self, inference: JudgeInference) -> None:  # noqa: B027  most need none
        """Take the policy's engine."""

    async def aclose(self) -> None:  # noqa: B027  most have none
        """Close the connections of this event loop."""


class ModelOptions(TypedDict, total=False):
    """Options of every judge: who is asked, and how.

    Keys:
        judge: an endpoint's URL with its version ("http://127.0.0.1:8000/v1"), "base",
            "policy@VERSION" or "python:file.py:function" of (messages, schema).
        model: the endpoint's name of the model.
        api_key_file: file that holds the endpoint's key.
        chat_template_kwargs: e.g. { enable_thinking = false }.
        timeout_s: of one request.
        retries: further tries of an endpoint that is busy or cannot be reached.
        concurrency: requests at once.
    """

    judge: Required[str]
    model: str | None
    api_key_file: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    timeout_s: float
    retries: int
    concurrency: int


def judge_model(
    judge: str,
    *,
    model: str | None = None,
    api_key_file: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 300.0,
    retries: int = 2,
    concurrency: int = 16,
    max_tokens: int | None = None,
) -> JudgeModel:
    """Return what the option `judge` names. Raises ConfigError: options that contradict each other,
    a number of no sense, a key file or a function that cannot be read."""
    _check_numbers(timeout_s, retries=retries, concurrency=concurrency, max_tokens=max_tokens)
    version = VERSION.fullmatch(judge)
    here = judge == BASE or version is not None
    if (here or is_reference(judge)) and (model is not None or api_key_file is not None):
        whose = "the trained model" if here else "a function"
        raise ConfigError(
            f'judge = "{judge}" is {whose}: model and api_key_file belong to an endpoint'
        )
    if here:
        number = None if version is None else int(version[1])
        return EngineJudge(number, chat_template_kwargs or {}, timeout_s)
    if is_reference(judge):
        return PythonJudge(judge, timeout_s, concurrency)
    if not judge.startswith(("http://", "https://")):
        raise ConfigError(f"judge = {judge!r}: {FORMS}")
    if model is None:
        raise ConfigError("model is missing: set the name of the judge's model at the endpoint")
    try:
        key = Path(api_key_file).read_text().strip() if api_key_file else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"api_key_file: {error}") from error
    body: dict[str, Any] = {"model": model, "temperature": 0.0}
    if chat_template_kwargs:
        body["chat_template_kwargs"] = dict(chat_template_kwargs)

    def endpoint() -> OpenAIEndpoint:
        return OpenAIEndpoint(
            judge, key, timeout_s=timeout_s, retries=retries, max_in_flight=concurrency
        )

    return EndpointJudge(f"{judge} {model}", endpoint, body)


def asks_a_model(factory: Callable[..., T], **defaults: float) -> Callable[..., T]:
    """Give a judge's factory, which passes `ModelOptions` on, their names and defaults; `defaults`:
    those of its own."""
    *parameters, _ = inspect.signature(factory).parameters.values()
    names = {parameter.name for parameter in parameters}
    shared = inspect.signature(judge_model).parameters.values()
    of_model = [
        parameter.replace(
            kind=parameter.KEYWORD_ONLY, default=defaults.get(parameter.name, parameter.default)
        )
        for parameter in shared
        if parameter.name not in names
    ]
    factory.__signature__ = inspect.Signature([*of_model, *parameters])  # type: ignore[attr-defined]
    return factory


def _check_numbers(timeout_s: float, **counts: int | None) -> None:
    """Raises ConfigError: a number of no sense."""
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s = {timeout_s}: seconds, above 0")
    for name, number in counts.items():
        least = 0 if name == "retries" else 1  # with concurrency 0 requests would wait for ever
        if number is not None and number < least:
            raise ConfigError(f"{name} = {number}: {least} or more")


class EndpointJudge(JudgeModel):
    """Asks an OpenAI-compatible server, with a client for each event loop: connections belong to
    one loop."""

    def __init__(
        self, name: str, make: Callable[[], OpenAIEndpoint], body: Mapping[str, Any]
    ) -> None:
        self.name, self._make, self._body = name, make, body
        self.identity = f"{name} {json.dumps(body)}"
        self._bounds_texts = True  # the server takes a schema that says how long a text is
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, OpenAIEndpoint] = (
            WeakKeyDictionary()
        )

    async def _ask(self, question: Question) -> JudgeReply:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop) or self._clients.setdefault(loop, self._make())
        body = {**self._body, "max_tokens": question.max_tokens, "messages": question.messages}
        if question.alternatives:
            body |= {"logprobs": True, "top_logprobs": question.alternatives}
        try:
            reply = await self._post(client, body, question.schema)
        except EndpointError as error:
            if error.may_pass or TOO_LONG.search(str(error)):
                return JudgeReply(None, problem=error)
            raise
        try:
            choice = reply["choices"][0]
            text = _text(choice["message"]["content"])
        except (LookupError, TypeError) as error:
            raise RolloutRejectedError(
                f"judge: this is not a chat completion: {str(reply)[:200]}"
            ) from error
        used = reply.get("usage")
        prompt, completion = _count(used, "prompt_tokens"), _count(used, "completion_tokens")
        likely = _likely(choice) if question.alternatives else None
        return JudgeReply(text, prompt, completion, likely=likely)

    async def _post(
        self, client: OpenAIEndpoint, body: Mapping[str, Any], schema: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Ask for a reply of the length asked for, or as long as there is room; one token is never
        too long. Raises EndpointError."""
        try:
            return await self._by_schema(client, body, schema)
        except EndpointError as error:
            too_long = error.status == 400 and TOO_LONG.search(str(error))
            if body["max_tokens"] == 1 or not too_long:
                raise
        unbounded = {key: value for key, value in body.items() if key != "max_tokens"}
        return await self._by_schema(client, unbounded, schema)

    async def _by_schema(
        self, client: OpenAIEndpoint, body: Mapping[str, Any], schema: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Ask by a schema, if there is one. OpenAI's own strict schemas take no `maxLength`: a
        server that refuses it gets the schema without, from then on. Raises EndpointError."""
        path = "/chat/completions"
        if schema is None:
            return await client.post(path, body)
        if self._bounds_texts:
            try:
                return await client.post(path, {**body, **_response_format(schema)})
            except EndpointError as error:
                if error.status != 400 or TOO_LONG.search(str(error)):
                    raise
        reply = await client.post(path, {**body, **_response_format(_without_bounds(schema))})
        if self._bounds_texts:
            self._bounds_texts = False
            log.warning("the judge's server takes no length of texts", judge=self.name)
        return reply

    async def aclose(self) -> None:
        if (client := self._clients.pop(asyncio.get_running_loop(), None)) is not None:
            await client.aclose()


def _response_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    form = {"name": "judgement", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def _without_bounds(schema: Any) -> Any:
    """Return the schema without `maxLength`, at any depth."""
    if not isinstance(schema, Mapping):
        return schema
    return {k: _without_bounds(value) for k, value in schema.items() if k != "maxLength"}


def _text(content: Any) -> str:
    """Return a message's content, of parts those that are text. Raises TypeError: it has none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part["type"] == "text")
    if not isinstance(content, str | None):
        raise TypeError
    return content or ""


def _likely(choice: Mapping[str, Any]) -> list[tuple[str, float]] | None:
    """Return the likeliest first tokens of a chat's choice; None: it does not have them."""
    try:
        tops = choice["logprobs"]["content"][0]["top_logprobs"]
        return [(str(top["token"]), float(top["logprob"])) for top in tops]
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def _count(used: Any, name: str) -> int:
    """A number of tokens that a server has counted; 0 where it counts none, or what cannot be."""
    value = used.get(name) if isinstance(used, Mapping) else None
    return value if type(value) is int and 0 <= value <= MOST_TOKENS else 0


class EngineJudge(JudgeModel):
    """Asks the base model under the policy's adapter, or a version of the policy, in the policy's
    engine."""

    def __init__(
        self, version: int | None, template_kwargs: Mapping[str, Any], timeout_s: float
    ) -> None:
        self.name = BASE if version is None else f"policy@{version}"
        # a resumed run may make another version of that number
        self.identity = None if version is not None else f"{BASE} {json.dumps(template_kwargs)}"
        self.inference: JudgeInference | None = None
        self._version, self._held = version, False
        self._template_kwargs, self._timeout_s = template_kwargs, timeout_s

    def attach(self, inference: JudgeInference) -> None:
        self.inference = inference

    async def _ask(self, question: Question) -> JudgeReply:
        inference = self.inference
        if inference is None:
            raise RolloutRejectedError(
                f'judge = "{self.name}" works only within a run, which provides the engine'
            )
        adapter = await self._adapter(inference)
        structure = None
        if question.schema is not None:
            structure = Structure("json_schema", json.dumps(question.schema), "judge", strict=True)
        try:
            tokens = inference.tokenizer.render_chat(
                [
                    without_special_tokens(message, inference.tokenizer)
                    for message in question.messages
                ],
                template_kwargs=self._template_kwargs,
            )
            request = Request(
                f"judge/{uuid.uuid4().hex}",
                tuple(tokens),
                SamplingParams(
                    temperature=0.0,
                    max_tokens=question.max_tokens,
                    structure=structure,
                    logprobs=question.alternatives or None,
                ),
                adapter=adapter,
                opens_text=True,
            )
            async with asyncio.timeout(self._timeout_s):
                output = await _within_room(inference.client, request)
        except TimeoutError:
            return JudgeReply(None, problem=TimeoutError(f"no answer within {self._timeout_s:g} s"))
        except RequestError as error:  # too long for the model
            return JudgeReply(None, problem=error)
        [completion] = output.completions
        text = completion.text if completion.finish_reason in ("stop", "length") else None
        problem = None if text is not None else RolloutRejectedError(str(completion.error))
        likely = [
            (inference.tokenizer.decode([top.token_id]), top.logprob)
            for top in (completion.top_logprobs or [()])[0]
        ]
        return JudgeReply(text, len(tokens), len(completion.token_ids), problem, likely=likely)

    async def _adapter(self, inference: JudgeInference) -> str | None:
        """Return the adapter that judges, None for the base. Raises RolloutRejectedError."""
        if inference.adapter is None:
            raise RolloutRejectedError(
                f'judge = "{self.name}" needs a policy that is an adapter, but here the base itself'
                " is trained: use LoRA, or set an endpoint"
            )
        if self._version is None:
            return None
        weights = getattr(inference, "weights", None)
        policy = getattr(weights, "policy", None)
        if weights is None or policy is None:
            raise RolloutRejectedError(
                f'judge = "{self.name}": this process trains no adapter, so it has no versions'
            )
        name = f"{policy}@{self._version}"
        try:
            if (load := weights.loader(name)) is not None:
                await asyncio.to_thread(load)
            if not self._held:
                weights.history.hold(self._version)
                self._held = True
        except AdapterError as error:
            raise RolloutRejectedError(f'judge = "{self.name}": {error}') from error
        return name


async def _within_room(client: PolicyClient, request: Request) -> RequestOutput:
    """Generate a reply of the length asked for, or as long as there is room; one token is never
    too long. Raises RequestError: there is none."""
    try:
        return await client.generate(request)
    except RequestError as error:
        too_long = isinstance(error, ContextLengthError) or error.param == "max_tokens"
        if request.params.max_tokens == 1 or not too_long:
            raise
    params = replace(request.params, max_tokens=None)
    return await client.generate(replace(request, params=params))


def without_special_tokens(message: Mapping[str, str], tokenizer: ChatTokenizer) -> dict[str, str]:
    """Escape what this tokenizer would read as a special token: it can only stand in data."""
    content = message["content"]
    for mark in map(tokenizer.token_text, sorted(tokenizer.special_ids)):
        if len(mark) > 2 and mark in content:
            content = content.replace(mark, f"\\u{ord(mark[0]):04x}{mark[1:]}")
    return {**message, "content": content}


class PythonJudge(JudgeModel):
    """Asks a function of the user's: (messages, schema) → the reply's text. Plain ones run on
    threads."""

    def __init__(self, reference: str, timeout_s: float, concurrency: int) -> None:
        """Raises ConfigError."""
        self.name = reference
        self._function, signature = load_function(reference, "judge")
        try:
            signature.bind([], None)
        except TypeError as error:
            raise ConfigError(
                f"judge: {reference} takes {signature}: expected (messages, schema)"
            ) from error
        code = _code_of(reference, self._function)
        self.identity = None if code is None else f"{reference} {code}"
        self._timeout_s, self._concurrency = timeout_s, concurrency
        self._running: set[object] = set()  # calls on threads
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    async def _ask(self, question: Question) -> JudgeReply:
        loop = asyncio.get_running_loop()
        slots = self._slots.setdefault(loop, asyncio.Semaphore(self._concurrency))
        try:
            async with slots, asyncio.timeout(self._timeout_s):
                text = await self._call(question)
        except TimeoutError:
            return JudgeReply(None, problem=TimeoutError(f"no answer within {self._timeout_s:g} s"))
        except RolloutRejectedError as error:
            return JudgeReply(None, problem=error)
        return JudgeReply(text)

    async def _call(self, question: Question) -> str:
        def call() -> Any:
            try:
                with user_code(self.name, RolloutRejectedError):
                    return self._function(question.messages, question.schema)
            finally:
                self._running.discard(this_call)

        if is_async(self._function):
            with user_code(self.name, RolloutRejectedError):
                text = await self._function(question.messages, question.schema)
        else:
            if (left := len(self._running)) >= self._concurrency + MOST_LEFT:
                raise RolloutRejectedError(
                    f"{self.name}: {left} calls have not returned, so no other one begins"
                )
            self._running.add(this_call := object())
            text = await on_own_thread(call, f"judge {self.name}", RolloutRejectedError)
        if not isinstance(text, str):
            raise RolloutRejectedError(f"{self.name} returned {type(text).__name__}, not a text")
        return text


def _code_of(reference: str, function: Any) -> str | None:
    """Return digests of the file that a reference names and of that which a function under its
    decorators is in; None: it is in none."""
    while isinstance(function, partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, partial) else function.__wrapped__
    written = function if inspect.isroutine(function) else type(function)
    try:
        files = {Path(inspect.getfile(written)).resolve(), file_of(reference)}
        return " ".join(sorted(map(sha256_of, files)))
    except (OSError, TypeError):
        return None


def report_problems(problems: Sequence[Exception | None], what: str = "judge") -> None:
    """Warn that some requests were not answered. Raises RolloutRejectedError: none was."""
    failed = [problem for problem in problems if problem is not None]
    if failed and len(failed) == len(problems):
        raise RolloutRejectedError(f"{what}: {failed[-1]}") from failed[-1]
    if failed:
        log.warning(
            "the judge did not answer",
            requests=len(failed),
            of=len(problems),
            problem=str(failed[-1]),
        )


# ---------------------------------------------------------------------- what a judge reads


def as_data(value: Any) -> str:
    """Return JSON in one line: quotes and ends of lines in a text are escaped, and so is whatever
    a chat template or another reader may take for a mark. The same JSON value is read from it."""
    return CONTROL.sub(_escaped, json.dumps(value, ensure_ascii=False))


def _escaped(match: re.Match[str]) -> str:
    """Return a character as JSON's escape, in two halves beyond U+FFFF."""
    halves = match[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{halves[n : n + 4]}" for n in range(0, len(halves), 4))


def mark_of(*texts: str) -> str:
    """Return 16 hexadecimal digits that depend on all that a judge is shown: an answer that held
    them would change them."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "replace")).hexdigest()[:16]
