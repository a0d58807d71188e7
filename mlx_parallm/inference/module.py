"""InferenceModule: one interface to the engine in this process and to any OpenAI-compatible
endpoint.

    InferenceModule("builtin:tiny")                                     its own engine
    InferenceModule(model=model, tokenizer=tokenizer)                   … over mlx_lm.load's result
    InferenceModule("name", backend="openai", base_url="http://…/v1")   another server
    InferenceModule.over(client, tokenizer)                             an engine that runs already

Methods block. Any number of threads may call them; their requests share the engine's batches and
run in one asyncio loop, in a thread of the module. Inside an episode of the same policy
(`environments.episode`) `generate` is a turn of that episode, which records its tokens,
log-probabilities and policy versions.
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
from mlx_parallm.execution.tool_calls import (
    Format,
    ParsedCalls,
    ToolLike,
    own_format,
    parse_tool_calls,
    prompt_with_tools,
    tool_definition,
)
from mlx_parallm.inference.engine import EngineBackend
from mlx_parallm.inference.openai import OpenAIBackend
from mlx_parallm.inference.types import (
    CalledAnswer,
    GenerateOptions,
    Generation,
    GenerationResult,
    Prompt,
    as_prompts,
    as_responses,
    explicit_params,
    is_messages,
)
from mlx_parallm.models.adapters.rope_length import check_rope_length
from mlx_parallm.models.experts.replay import recorded_for
from mlx_parallm.models.loaded_images import image_support, with_images
from mlx_parallm.models.loading import LoadedModel, adopt_model, load_model, load_tokenizer
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.models.mlx_lm_api import TokenizerWrapper
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import Completion, PolicyClient
from mlx_parallm.weights import SharedWeights

Backend = EngineBackend | OpenAIBackend

POLICY = "policy"  # name of the adapter of its own engine
# the specification's backends: here one engine is both
ENGINE_NAMES = ("mlx", "vllm", "huggingface")


class InferenceModule:
    """Text, tokens and log-probabilities from a model here or behind an endpoint.

    Args:
        model: directory, hub id, "builtin:tiny", or the model of mlx_lm.load, which is not changed;
            default: the configuration's. For an endpoint, the model's name in requests.
        tokenizer: the tokenizer of mlx_lm.load, if `model` is its model.
        backend: "mlx", or "openai" for an endpoint. "vllm" and "huggingface", as the specification
            has them, mean the engine here; with a base_url "vllm" is that server.
        adapter_path: LoRA adapter of the answers; default: the configuration's model.lora_path.
        config: [model] and [server] of the engine.
        timeout_s: longest time of one request to an endpoint.

    Attributes:
        source: the argument `model`.
        client: the engine's; None for an endpoint.
        loaded: the model of its own engine, for a trainer: a tree without the engine's
            wrappers that shares its arrays.
        weights: if that trainer publishes, its adapter under the name "policy".
        kv_bits: of the engine's keys and values.
        run: directory of the run that it serves; None: none.

    Raises ConfigError, ModelError (AdapterError), EndpointError.
    """

    source: Any = None
    loaded: LoadedModel | None = None
    weights: SharedWeights | None = None
    kv_bits: int | None = None
    run: Path | None = None

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
                f'backend = {backend!r}: an engine here is "mlx"; base_url'
                ' and api_key belong to "openai"'
            )
        if model is None and config is None:
            raise ConfigError(
                "no model: pass a directory, a hub id, the model of mlx_lm.load, or a configuration"
            )
        config = config or Config()
        if isinstance(model, nn.Module):
            if tokenizer is None:
                raise ConfigError("a model needs its tokenizer: model, tokenizer = mlx_lm.load(…)")
            self.loaded = adopt_model(model, tokenizer, fp32_lm_head=config.model.fp32_lm_head)
        changes = (
            {} if model is None else {"base_path": str(self.loaded.path if self.loaded else model)}
        )
        if adapter_path is not None:
            changes["lora_path"] = str(adapter_path)
        config = config.model_copy(update={"model": config.model.model_copy(update=changes)})
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
        run: Path | None = None,
    ) -> "InferenceModule":
        """Return a module over a running engine, which it does not stop.

        Args:
            tokenizer: is copied.
            adapter: None = the base.
            weights: the engine's; without them greedy answers are not cached.
            template_kwargs: arguments of the chat template.
            run: directory of the run.
        """
        module = cls.__new__(cls)
        module._new_tokenizer = lambda: copy.deepcopy(tokenizer)
        backend = EngineBackend(
            client,
            module._new_tokenizer(),
            adapter=adapter,
            weights=weights,
            template_kwargs=template_kwargs,
        )
        module.weights, module.run = weights, run
        module._set_up(backend)
        return module

    _new_tokenizer: Callable[[], Tokenizer]

    def _start_engine(self, config: Config, tokenizer: Any) -> EngineThread:
        """Raises ConfigError, ModelError."""
        if self.loaded is None:
            loaded = load_model(config.model)
            support = image_support(config.image_hooks(), loaded.path)
            loaded = self.loaded = with_images(loaded, support)
            self._new_tokenizer = lambda: load_tokenizer(
                loaded.path, config.model, loaded.image_reader
            )
        else:
            wrapper = (
                tokenizer
                if isinstance(tokenizer, TokenizerWrapper)
                else TokenizerWrapper(tokenizer)
            )
            self._new_tokenizer = lambda: Tokenizer(copy.deepcopy(wrapper))
        served = replace(self.loaded, model=copy.deepcopy(self.loaded.model))
        self.kv_bits = config.server.kv_bits
        self.weights = SharedWeights(
            served.model, policy=POLICY, keep_versions=config.server.keep_versions
        )
        path = config.model.lora_path
        adapters = {}
        if path is not None:
            adapter = load_adapter(path)
            check_rope_length(adapter.config, adapter.path, config.model.rope_length)
            adapters[POLICY] = adapter.layers
        # a trainer that is attached later may repeat them
        recorded = recorded_for(served.model, config.rl_training)
        started = start_engine(
            config.server,
            served,
            self.weights,
            self._new_tokenizer,
            base=config.model.base_path,
            deterministic=config.rl_training.deterministic,
            chats_first=config.rl_training.serve_priority == "chat",
            adapters=adapters,
            main_adapter=POLICY if path else None,
            recorded=recorded,
        )
        return started.thread

    def _set_up(self, backend: Backend, engine: EngineThread | None = None) -> None:
        self._backend = backend
        self._engine_backend = backend if isinstance(backend, EngineBackend) else None
        self._trained_since = -math.inf
        self._loop = LoopThread("inference", "this InferenceModule")
        self._finalizer = weakref.finalize(self, _end, self._loop, backend, engine)  # at exit, too

    # ------------------------------------------------------------------ state

    @property
    def client(self) -> PolicyClient | None:
        return None if self._engine_backend is None else self._engine_backend.client

    @property
    def adapter(self) -> str | None:
        """The adapter of the next requests; None = the base. May be set at any time."""
        return None if self._engine_backend is None else self._engine_backend.adapter

    @adapter.setter
    def adapter(self, name: str | None) -> None:
        if self._engine_backend is None:
            raise ConfigError(
                "an endpoint's adapter is a model name: make another InferenceModule with it"
            )
        self._engine_backend.adapter = name
        self._trained_since = -math.inf

    def follow_training(self, adapter: str) -> None:
        """Answer with the trained `adapter` from now on. Running episodes of the base still
        belong to this policy."""
        assert self._engine_backend is not None, "an endpoint has no weights to train"
        if self.adapter is None:  # the time first: an environment's step may generate at any moment
            self._trained_since = time.monotonic()
        self._engine_backend.adapter = adapter

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The caller's tokenizer, for one thread at a time (loop and engine have others). None
        for an endpoint."""
        return None if self._engine_backend is None else self._new_tokenizer()

    @property
    def max_model_len(self) -> int | None:
        """Longest prompt and answer, in tokens; None for an endpoint."""
        return None if self.client is None else self.client.max_model_len

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompts: Sequence[Prompt] | Prompt,
        max_new_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """Return answers; `result[i]` is a text. Blocks.

        Args:
            prompts: texts, which the model continues; lists of messages, for its chat template; or
                lists of token ids. A single prompt means a list of one.
            max_new_tokens: default 256, or less if the model's context ends before.
            options: see GenerateOptions.

        Inside an episode of this policy it is the episode's next turn, with the run's sampling: one
        prompt, and only max_new_tokens and stop may be set.

        Raises RequestError (ContextLengthError), EngineUnavailableError, GenerationFailedError,
        EndpointError; in an episode RolloutRejectedError.
        """
        settings = {**options, "max_new_tokens": max_new_tokens}
        if (episode := self._episode()) is not None:
            return _turn(episode.generate(*_one_turn(prompts, settings)), settings)
        return self._loop.run(self._generate(prompts, settings))

    async def agenerate(
        self,
        prompts: Sequence[Prompt] | Prompt,
        max_new_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """Do the same as `generate` in asyncio code. Cancelling it frees the engine's rows."""
        settings = {**options, "max_new_tokens": max_new_tokens}
        if (episode := self._episode()) is not None:
            return _turn(await episode.agenerate(*_one_turn(prompts, settings)), settings)
        return await self._loop.arun(self._generate(prompts, settings))

    def get_logprobs(self, prompts: Sequence[Prompt] | Prompt, responses: Any) -> list[np.ndarray]:
        """Return log-softmax(logits) of the tokens of each response after its prompt: [T] float32.

        Args:
            responses: texts, token ids, or a GenerationResult, whose sampled token ids are scored
                (its text may have other tokens, and has no EOS).

        Raises as `generate`; EndpointError: the endpoint cannot score (needs /tokenize for texts,
        and echo).
        """
        checked = as_prompts(prompts)
        return self._loop.run(
            self._backend.logprobs(checked, as_responses(responses, len(checked)))
        )

    def get_logits(self, prompts: Sequence[Prompt] | Prompt, responses: Any) -> list[np.ndarray]:
        """Return the logits of each token of a response: [T, vocabulary] float32, before
        temperature.

        They are computed between the engine's steps, a piece at a time. Arguments as
        `get_logprobs`. Raises
        RequestError: the backend is an endpoint, or there are more than 2 GiB of them.
        """
        checked = as_prompts(prompts)
        return self._loop.run(self._backend.logits(checked, as_responses(responses, len(checked))))

    def batch_generate_with_tools(
        self,
        prompts: Sequence[Prompt] | Prompt,
        available_tools: Sequence[ToolLike],
        max_new_tokens: int | None = None,
        *,
        formats: Format | Literal["auto"] | Sequence[Format] = "auto",
        **options: Unpack[GenerateOptions],
    ) -> tuple[list[str], list[ParsedCalls]]:
        """Return answers of a model that has tools, and the calls in each answer. Nothing is
        called.

        Args:
            available_tools: names, {"name", "description", "parameters"}, or functions.
            formats: formats of calls (tool_calls.py).

        The chat template describes the tools, or instructions before the prompt do if it has no
        place for them; with a chat template a text is a user's message. `calls[i].malformed` has
        the unreadable calls. An endpoint takes the calls out of the text itself: then they have no
        place in it. Raises as `generate`, and ConfigError.
        """
        tools = [tool_definition(tool) for tool in available_tools]
        if not tools:
            raise RequestError(
                "available_tools is empty: generate() answers without tools", param="tools"
            )
        settings = {**options, "max_new_tokens": max_new_tokens}
        if (episode := self._episode()) is not None:
            answers = [self._tool_turn(episode, prompts, tools, formats, settings)]
        else:
            params = explicit_params(settings)
            replies = self._loop.run(
                self._backend.generate_with_tools(as_prompts(prompts), tools, formats, params)
            )
            answers = [(reply.text, reply.calls) for reply in replies]
        return [text for text, _ in answers], [calls for _, calls in answers]

    async def agenerate_with_tools(
        self,
        prompts: Sequence[Prompt] | Prompt,
        tools: Sequence[ToolLike],
        max_new_tokens: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[CalledAnswer]:
        """Return the answers of a model that has tools, with how each ended. Outside of episodes.
        Raises as `batch_generate_with_tools`."""
        definitions = [tool_definition(tool) for tool in tools]
        params = explicit_params({**options, "max_new_tokens": max_new_tokens})
        return await self._loop.arun(
            self._backend.generate_with_tools(as_prompts(prompts), definitions, "auto", params)
        )

    def close(self) -> None:
        """End the module's threads, and its own engine; running requests raise
        EngineUnavailableError."""
        self._finalizer()

    def __enter__(self) -> "InferenceModule":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    async def _generate(self, prompts: Any, options: Mapping[str, Any]) -> GenerationResult:
        params = explicit_params(options)
        wants_logits = bool(options.get("return_logits"))
        if wants_logits and self.client is None:
            raise RequestError(
                "return_logits needs the model in this process: an OpenAI endpoint returns none"
            )
        logprobs = bool(options.get("return_logprobs"))
        by_prompt = await self._backend.generate(as_prompts(prompts), params, logprobs=logprobs)
        answers = [answer for each in by_prompt for answer in each]
        logits = None
        if wants_logits:
            pairs = [(answer.prompt_token_ids or (), answer.token_ids or ()) for answer in answers]
            logits = await self._backend.logits(
                [prompt for prompt, _ in pairs], [answer for _, answer in pairs]
            )
        return GenerationResult.of(answers, logprobs=logprobs, logits=logits)

    def _episode(self) -> Episode | None:
        """Return the caller's episode if this module is its policy, or was before training gave
        it an adapter."""
        episode = CURRENT.get()
        if episode is None or episode.client is not (self if self.client is None else self.client):
            return None
        began_as_base = episode.adapter is None and episode.since < self._trained_since
        return episode if began_as_base or episode.adapter == self.adapter else None

    def _tool_turn(
        self, episode: Episode, prompts: Any, tools: Any, formats: Any, options: Mapping[str, Any]
    ) -> tuple[str, ParsedCalls]:
        prompt, params = _one_turn(prompts, options)
        prompt, template_tools = prompt_with_tools(prompt, tools, self.tokenizer, formats)
        model_format = own_format(self.tokenizer)
        # the caller makes the calls: the episode's own tools stay out
        params["tools"] = template_tools or ()
        if model_format is not None:  # its markers may be special tokens
            params["skip_special_tokens"] = False
        text = episode.generate(prompt, params).text
        thinking = None if self.tokenizer is None else self.tokenizer.think_markers
        return text, parse_tool_calls(
            text, tools, formats, model_format=model_format, thinking=thinking
        )


def _endpoint(
    model: Any, base_url: str | None, api_key: str | None, timeout_s: float
) -> OpenAIBackend:
    if not isinstance(model, str) or base_url is None:
        raise ConfigError(
            'backend = "openai" needs the name of a model and base_url = "http://host:8000/v1"'
        )
    return OpenAIBackend(
        model, base_url, lambda url: OpenAIEndpoint(url, api_key, timeout_s=timeout_s)
    )


def _end(loop: LoopThread, backend: Backend, engine: EngineThread | None) -> None:
    try:
        if engine is not None:
            engine.stop()
    finally:
        loop.stop(backend.aclose)


def _one_turn(prompts: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the prompt and the parameters of an episode's turn. Raises RolloutRejectedError."""
    entries, params = as_prompts(prompts), explicit_params(options)
    if len(entries) != 1 or params.pop("n", 1) != 1 or options.get("return_logits"):
        raise RolloutRejectedError(
            "inside an episode generate() takes one prompt and returns one answer, without logits"
        )
    if not isinstance(entries[0], str) and not is_messages(entries[0]):
        raise RolloutRejectedError(
            "inside an episode a prompt is a text or a list of messages, not token ids"
        )
    return entries[0], params


def _turn(completion: Completion, options: Mapping[str, Any]) -> GenerationResult:
    return GenerationResult.of(
        [Generation.of(completion)], logprobs=bool(options.get("return_logprobs")), logits=None
    )
