"""InferenceModule: one face over the engine in this process and over any OpenAI-compatible endpoint.

    InferenceModule("builtin:tiny")                                     an engine of its own: the daemon's, without HTTP
    InferenceModule(model=model, tokenizer=tokenizer)                   … over what mlx_lm.load returned
    InferenceModule("name", backend="openai", base_url="http://…/v1")   another server
    InferenceModule.over(client, tokenizer)                             an engine that runs already

Methods block and may be called by any number of threads at once; what they ask for shares the engine's batches. All of
it runs in one asyncio loop, in a thread of the module's own. Inside an episode of the same policy
(`environments.episode`) `generate` is a turn of that episode, so that its tokens, log-probabilities and policy versions
are recorded there.
"""

import copy
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Unpack

import mlx.nn as nn
import numpy as np

from mlx_parallm.config.load import Config
from mlx_parallm.engine.starting import start_engine
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.environments.episode import CURRENT, Episode
from mlx_parallm.errors import ConfigError, RequestError, RolloutRejectedError
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.execution.tool_calls import Format, ParsedCalls, parse_tool_calls
from mlx_parallm.execution.tool_definitions import ToolLike, tool_definition
from mlx_parallm.inference.engine import EngineBackend, own_format, told_of
from mlx_parallm.inference.openai import OpenAIBackend
from mlx_parallm.inference.types import (
    Answer,
    GenerateOptions,
    GenerationResult,
    Prompt,
    as_prompts,
    as_responses,
    explicit_params,
    is_messages,
)
from mlx_parallm.models.loading import LoadedModel, adopt_model, load_model, load_tokenizer
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.models.mlx_lm_api import TokenizerWrapper
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import Completion, PolicyClient
from mlx_parallm.weights import SharedWeights

Backend = EngineBackend | OpenAIBackend

POLICY = "policy"  # name of the adapter of an engine of its own
ENGINE_NAMES = ("mlx", "vllm", "huggingface")  # the specification's backends: here one engine is both


class InferenceModule:
    """
    Args:
        model: directory, hub id, "builtin:tiny"; the model of mlx_lm.load, which stays as it is; default: the
            configuration's. For an endpoint, the name that requests carry.
        tokenizer: of mlx_lm.load, where `model` is.
        backend: "mlx", or "openai" for an endpoint. "vllm" and "huggingface", as the specification has them, mean the
            engine here; with a base_url "vllm" is that server.
        adapter_path: LoRA adapter to answer with; default: the configuration's model.lora_path.
        config: [model] and [server] of the engine.
        timeout_s: of one request to an endpoint.

    Attributes:
        source: `model` as it was given.
        client: the engine's; None for an endpoint.
        loaded: the model of an engine of its own, in a tree that shares the engine's arrays and that nobody has
            wrapped: what a trainer starts from.
        weights: where that trainer publishes, its adapter under the name "policy".

    Raises ConfigError, ModelError (AdapterError), EndpointError.
    """

    source: Any = None
    loaded: LoadedModel | None = None
    weights: SharedWeights | None = None

    def __init__(
        self,
        model: str | Path | nn.Module | None = None,
        tokenizer: Any = None,
        *,
        backend: Literal["mlx", "openai", "vllm", "huggingface"] = "mlx",
        base_url: str | None = None,
        api_key: str | None = None,
        adapter_path: str | Path | None = None,
        config: Config | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.source = model
        if backend == "openai" or (backend == "vllm" and base_url is not None):
            self._set_up(_endpoint(model, base_url, api_key, timeout_s))
            return
        if backend not in ENGINE_NAMES or base_url is not None or api_key is not None:
            raise ConfigError(
                f'backend = {backend!r}: an engine here is "mlx"; base_url and api_key belong to "openai"'
            )
        if model is None and config is None:
            raise ConfigError("no model: give a directory, a hub id, what mlx_lm.load returned, or a configuration")
        config = config or Config()
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise ConfigError("a model needs its tokenizer: model, tokenizer = mlx_lm.load(…)")
            self.loaded = adopt_model(model, tokenizer)
        given = {} if model is None else {"base_path": str(self.loaded.path if self.loaded else model)}
        if adapter_path is not None:
            given["lora_path"] = str(adapter_path)
        config = config.model_copy(update={"model": config.model.model_copy(update=given)})
        engine = in_mlx_thread(lambda: self._start_engine(config, tokenizer))
        with ExitStack() as unused:
            unused.callback(engine.stop)
            answering = EngineBackend(
                engine.client,
                self._new_tokenizer(),
                adapter=POLICY if config.model.lora_path else None,
                weights=self.weights,
                template_kwargs=config.model.chat_template_kwargs,
            )
            self._set_up(answering, engine)
            unused.pop_all()

    @classmethod
    def over(
        cls,
        client: PolicyClient,
        tokenizer: Tokenizer,
        adapter: str | None = None,
        *,
        weights: SharedWeights | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> "InferenceModule":
        """A module over an engine that runs already and belongs to somebody else.

        Args:
            tokenizer: is copied.
            adapter: None = the base.
            weights: what that engine reads; without it greedy answers are not cached.
            template_kwargs: for the chat template.
        """
        module = cls.__new__(cls)
        module._new_tokenizer = lambda: copy.deepcopy(tokenizer)
        backend = EngineBackend(
            client, module._new_tokenizer(), adapter=adapter, weights=weights, template_kwargs=template_kwargs
        )
        module.weights = weights
        module._set_up(backend)
        return module

    _new_tokenizer: Callable[[], Tokenizer]

    def _start_engine(self, config: Config, tokenizer: Any) -> EngineThread:
        """Raises ConfigError, ModelError."""
        if self.loaded is None:
            loaded = self.loaded = load_model(config.model)
            self._new_tokenizer = lambda: load_tokenizer(loaded.path, config.model)
        else:
            wrapper = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
            self._new_tokenizer = lambda: Tokenizer(copy.deepcopy(wrapper))
        served = replace(self.loaded, model=copy.deepcopy(self.loaded.model))
        self.weights = SharedWeights(served.model, policy=POLICY, keep_versions=config.server.keep_versions)
        path = config.model.lora_path
        adapters = {} if path is None else {POLICY: load_adapter(path).layers}
        started = start_engine(
            config, served, self.weights, self._new_tokenizer, adapters=adapters, main_adapter=POLICY if path else None
        )
        return started.thread

    def _set_up(self, backend: Backend, engine: EngineThread | None = None) -> None:
        self._backend = backend
        self._engine_backend = backend if isinstance(backend, EngineBackend) else None
        self._trained_since = -math.inf
        self._loop = LoopThread("inference", "this InferenceModule")
        self._finalizer = weakref.finalize(self, _end, self._loop, backend, engine)  # at exit, too

    # ------------------------------------------------------------------ what there is

    @property
    def client(self) -> PolicyClient | None:
        return None if self._engine_backend is None else self._engine_backend.client

    @property
    def adapter(self) -> str | None:
        """The adapter that requests name; None = the base. May be set at any time."""
        return None if self._engine_backend is None else self._engine_backend.adapter

    @adapter.setter
    def adapter(self, name: str | None) -> None:
        if self._engine_backend is None:
            raise ConfigError("an endpoint's adapter has a model's name: make another InferenceModule with it")
        self._engine_backend.adapter = name
        self._trained_since = -math.inf

    def follow_training(self, adapter: str) -> None:
        """What is trained answers from now on, as `adapter`; the base's episodes that are under way remain this
        policy's."""
        assert self._engine_backend is not None, "an endpoint has no weights that are trained"
        if self.adapter is None:  # the time first: a step may ask at any moment
            self._trained_since = time.monotonic()
        self._engine_backend.adapter = adapter

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The caller's: for one thread at a time (loop and engine have their own). None for an endpoint."""
        return None if self._engine_backend is None else self._new_tokenizer()

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and answer, in tokens; None for an endpoint."""
        return None if self.client is None else self.client.max_model_len

    # ------------------------------------------------------------------ what it does

    def generate(
        self,
        prompts: Sequence[Prompt] | Prompt,
        max_new_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """Answers, of which `result[i]` is the text. Blocks.

        Args:
            prompts: texts, which the model goes on with as they are; lists of messages, for its chat template; or lists
                of token ids. One alone is a list of one.
            max_new_tokens: default 256, and less where the model's context ends before.
            options: see GenerateOptions.

        Inside an episode of this policy it is the episode's next turn, sampled as the run samples: one prompt, and only
        max_new_tokens and stop can be set.

        Raises RequestError (ContextLengthError), EngineUnavailableError, GenerationFailedError, EndpointError; in an
        episode RolloutRejectedError.
        """
        asked = prompts, {**options, "max_new_tokens": max_new_tokens}
        if (episode := self._episode()) is not None:
            return _turn(episode.generate(*_one_turn(*asked)), asked[1])
        return self._loop.run(self._generate(*asked))

    async def agenerate(
        self,
        prompts: Sequence[Prompt] | Prompt,
        max_new_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """As `generate`, for asyncio code. Cancelling it frees the engine's rows."""
        asked = prompts, {**options, "max_new_tokens": max_new_tokens}
        if (episode := self._episode()) is not None:
            return _turn(await episode.agenerate(*_one_turn(*asked)), asked[1])
        return await self._loop.arun(self._generate(*asked))

    def get_logprobs(self, prompts: Sequence[Prompt] | Prompt, responses: Any) -> list[np.ndarray]:
        """Log-probabilities of the tokens of each response after its prompt: [T] float32, log-softmax(logits).

        Args:
            responses: texts, token ids, or a GenerationResult, whose own token ids are scored (a text may be tokenised
                otherwise than it was sampled, and has no EOS).

        Raises as `generate`; EndpointError: the endpoint cannot score (needs /tokenize for texts, and echo).
        """
        found = as_prompts(prompts)
        return self._loop.run(self._backend.logprobs(found, as_responses(responses, len(found))))

    def get_logits(self, prompts: Sequence[Prompt] | Prompt, responses: Any) -> list[np.ndarray]:
        """Logits from which each token of a response was to be sampled: [T, vocabulary] float32, before temperature.

        Computed between the engine's steps, a piece at a time. Arguments as `get_logprobs`. Raises RequestError: for an
        endpoint, or more than 2 GiB of them.
        """
        found = as_prompts(prompts)
        return self._loop.run(self._backend.logits(found, as_responses(responses, len(found))))

    def batch_generate_with_tools(
        self,
        prompts: Sequence[Prompt] | Prompt,
        available_tools: Sequence[ToolLike],
        max_new_tokens: int | None = None,
        *,
        formats: Format | Literal["auto"] | Sequence[Format] = "auto",
        **options: Unpack[GenerateOptions],
    ) -> tuple[list[str], list[ParsedCalls]]:
        """Answers of a model that was told of tools, and the calls in each. Nothing is called.

        Args:
            available_tools: names, {"name", "description", "parameters"}, or functions.
            formats: of calls (tool_calls.py).

        The model is told in its chat template's way where that takes tools, in words before the prompt where not; with
        a chat template a text is a user's message. `calls[i].malformed` has what could not be read. An endpoint takes
        the calls out of the text itself: then they have no place in it. Raises as `generate`, and ConfigError.
        """
        tools = [tool_definition(tool) for tool in available_tools]
        if not tools:
            raise RequestError("available_tools is empty: generate() answers without tools", param="tools")
        if (episode := self._episode()) is not None:
            found = [self._tool_turn(episode, prompts, tools, formats, {**options, "max_new_tokens": max_new_tokens})]
        else:
            params = explicit_params({**options, "max_new_tokens": max_new_tokens})
            found = self._loop.run(self._backend.generate_with_tools(as_prompts(prompts), tools, formats, params))
        return [text for text, _ in found], [calls for _, calls in found]

    def close(self) -> None:
        """Ends the module's threads, its own engine included; what was under way raises EngineUnavailableError."""
        self._finalizer()

    def __enter__(self) -> "InferenceModule":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    async def _generate(self, prompts: Any, options: Mapping[str, Any]) -> GenerationResult:
        params = explicit_params(options)
        wants_logits = bool(options.get("return_logits"))
        if wants_logits and self.client is None:
            raise RequestError("return_logits needs the model in this process: no OpenAI endpoint gives logits")
        logprobs = bool(options.get("return_logprobs"))
        found = await self._backend.generate(as_prompts(prompts), params, logprobs=logprobs)
        answers = [answer for each in found for answer in each]
        logits = None
        if wants_logits:
            pairs = [(answer.prompt_token_ids or (), answer.token_ids or ()) for answer in answers]
            logits = await self._backend.logits([prompt for prompt, _ in pairs], [answer for _, answer in pairs])
        return GenerationResult.of(answers, logprobs=logprobs, logits=logits)

    def _episode(self) -> Episode | None:
        """The episode that the calling code belongs to, where this module is its policy, or was when it began and has
        been given an adapter by training since."""
        episode = CURRENT.get()
        if episode is None or episode.client is not (self if self.client is None else self.client):
            return None
        began_as_base = episode.adapter is None and episode.since < self._trained_since
        return episode if began_as_base or episode.adapter == self.adapter else None

    def _tool_turn(
        self, episode: Episode, prompts: Any, tools: Any, formats: Any, options: Mapping[str, Any]
    ) -> tuple[str, ParsedCalls]:
        prompt, params = _one_turn(prompts, options)
        told, given = told_of(prompt, tools, self.tokenizer)
        own = own_format(self.tokenizer)
        asked = {**params, **({"tools": given} if given else {})}
        if own is not None:  # its markers may be special tokens
            asked["skip_special_tokens"] = False
        text = episode.generate(told, asked).text
        return text, parse_tool_calls(text, tools, formats, own=own)


def _endpoint(model: Any, base_url: str | None, api_key: str | None, timeout_s: float) -> OpenAIBackend:
    if not isinstance(model, str) or base_url is None:
        raise ConfigError('backend = "openai" needs the name of a model and base_url = "http://host:8000/v1"')
    return OpenAIBackend(model, base_url, lambda url: OpenAIEndpoint(url, api_key, timeout_s=timeout_s))


def _end(loop: LoopThread, backend: Backend, engine: EngineThread | None) -> None:
    try:
        if engine is not None:
            engine.stop()
    finally:
        loop.stop(backend.aclose)


def _one_turn(prompts: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The prompt and the parameters of an episode's turn. Raises RolloutRejectedError."""
    found, params = as_prompts(prompts), explicit_params(options)
    if len(found) != 1 or params.pop("n", 1) != 1 or options.get("return_logits"):
        raise RolloutRejectedError("inside an episode generate() takes one prompt and gives one answer, without logits")
    if not isinstance(found[0], str) and not is_messages(found[0]):
        raise RolloutRejectedError("inside an episode a prompt is a text or a list of messages, not token ids")
    return found[0], params


def _turn(completion: Completion, options: Mapping[str, Any]) -> GenerationResult:
    return GenerationResult.of([Answer.of(completion)], logprobs=bool(options.get("return_logprobs")), logits=None)
