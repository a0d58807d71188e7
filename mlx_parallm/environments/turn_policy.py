"""How the policy answers one turn of an episode: `TurnPolicy`, and `EpisodePolicy`, the engine.

A prompt that begins with the last one and its answer continues the tokens that were sampled; any
other prompt opens a new sequence.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.episode_state import Prompt, shown_text
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.trajectory import SequenceRecorder, continuation
from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.answer_grammar import required_calls
from mlx_parallm.execution.prompt_images import carried_with
from mlx_parallm.execution.taught_tools import TAUGHT_FORMAT
from mlx_parallm.execution.thinking import thinking_after
from mlx_parallm.execution.tool_calls import (
    ParsedCalls,
    openai_tools,
    own_format,
    parse_tool_calls,
    prompt_with_tools,
    with_instructions,
)
from mlx_parallm.types import ChatTokenizer, Completion, PolicyClient, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that an episode asks for."""

    name: str
    prompt: Prompt
    config: EnvironmentConfig
    seed: int
    overrides: Mapping[str, Any]  # fields of SamplingParams, set by the environment
    options: Mapping[str, Any]  # for the chat template

    def asks_as(self, other: "TurnRequest") -> bool:
        """Return whether prompt, overrides and options are equal."""
        mine, theirs = (
            (snapshot(self.prompt), dict(self.overrides)),
            (snapshot(other.prompt), dict(other.overrides)),
        )
        return mine == theirs and dict(self.options) == dict(other.options)


@dataclass(frozen=True, slots=True)
class LastTurn:
    prompt: Prompt
    options: Mapping[str, Any]
    completion: Completion


class TurnPolicy(Protocol):
    """Plays the policy's part in episodes. `EpisodePolicy` is the engine; `runs/eval.py` has one
    for an endpoint."""

    @property
    def temperature(self) -> float: ...

    @property
    def client(self) -> object:
        """The client by which an `InferenceModule` of the same policy recognises it."""

    @property
    def adapter(self) -> str | None: ...

    @property
    def since(self) -> float:
        """The time at which `adapter` was chosen, by time.monotonic()."""

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""

    def with_sampling(self, temperature: float, top_p: float) -> "TurnPolicy": ...

    def with_adapter(self, adapter: str | None) -> "TurnPolicy":
        """Return the policy with other weights. Raises RolloutRejectedError: it has no others."""

    def open_group(self, turn: TurnRequest, n: int) -> Request | None:
        """Return one request for the first turn of n episodes; None: each of them asks for its
        first turn."""

    async def sample(
        self, turn: TurnRequest, sequences: list[SequenceRecorder], last: LastTurn | None
    ) -> Completion | None:
        """Sample a turn, and record its prompt in the last of `sequences`, which is new where the
        turn starts one.

        Returns None: there is no room for another turn. Raises RolloutRejectedError: not even for
        the first.
        """

    def with_tools(
        self, prompt: Prompt, tools: EpisodeTools
    ) -> tuple[Prompt, dict[str, Any], dict[str, Any]]:
        """Return a prompt with the tools, and the overrides and options of its TurnRequest."""

    def tool_calls(self, completion: Completion, tools: EpisodeTools) -> ParsedCalls:
        """Return the calls in an answer."""

    def after_calls(
        self,
        prompt: Prompt,
        completion: Completion,
        notes: Sequence[Mapping[str, Any]],
        tools: EpisodeTools,
    ) -> Prompt:
        """Return the prompt after an answer and the results of its calls (`EpisodeTools.call`)."""


@dataclass(frozen=True, slots=True)
class EpisodePolicy:
    """The engine that answers, and how it samples. `temperature` 0 is greedy, `adapter` None the
    base."""

    client: PolicyClient
    tokenizer: ChatTokenizer
    temperature: float
    max_token_length: int  # bounds prompt + completion
    adapter: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    top_p: float = 1.0
    priority: int = 0  # its requests' priority; lower goes first
    since: float = field(default_factory=time.monotonic)
    tokenizer_lock: threading.Lock = field(default_factory=threading.Lock, compare=False)
    """Environments on several threads share the tokenizer: a large one takes seconds to load and
    much memory."""

    @property
    def longest(self) -> int:
        return min(self.max_token_length, self.client.max_model_len)

    def with_sampling(self, temperature: float, top_p: float) -> "EpisodePolicy":
        return dataclasses.replace(self, temperature=temperature, top_p=top_p)

    def with_adapter(self, adapter: str | None) -> "EpisodePolicy":
        return dataclasses.replace(self, adapter=adapter)

    def open_group(self, turn: TurnRequest, n: int) -> Request:
        """Raises RolloutRejectedError: the prompt leaves no room."""
        token_ids = self.ids(turn.prompt, turn.config, turn.options)
        room = self.longest - len(token_ids)
        if room < 1:
            raise RolloutRejectedError(_no_room(len(token_ids), self.longest))
        return self._request(turn, token_ids, room, n)

    async def sample(
        self, turn: TurnRequest, sequences: list[SequenceRecorder], last: LastTurn | None
    ) -> Completion | None:
        if sequences and self._too_long(turn.prompt) is not None:
            return None
        sequence, added = self._follow(turn, sequences, last)
        token_ids = (*sequence.token_ids, *added)
        room = self.longest - len(token_ids)
        if room < 1 and not sequences:
            raise RolloutRejectedError(_no_room(len(token_ids), self.longest))
        if room < 1:
            return None
        output = await self.client.generate(self._request(turn, token_ids, room))
        sequence.add_prompt(added)
        if sequence not in sequences:
            sequences.append(sequence)
        return output.completions[0]

    def with_tools(
        self, prompt: Prompt, tools: EpisodeTools
    ) -> tuple[Prompt, dict[str, Any], dict[str, Any]]:
        if isinstance(prompt, str):  # no chat template: they are part of the text
            return with_instructions(prompt, tools.definitions, tools.how_to_call), {}, {}
        overrides = {"skip_special_tokens": False}  # the markers of a call may be special tokens
        if tools.formats == "auto" and not self.tokenizer.template_takes_tools:  # as rows are
            return snapshot(prompt), overrides, {"tools": openai_tools(tools.definitions)}
        chat, template_tools = prompt_with_tools(
            prompt, tools.definitions, self.tokenizer, tools.formats
        )
        options = {} if template_tools is None else {"tools": template_tools, "teach_tools": False}
        return snapshot(chat), overrides, options

    def tool_calls(self, completion: Completion, tools: EpisodeTools) -> ParsedCalls:
        form = own_format(self.tokenizer) or TAUGHT_FORMAT
        return parse_tool_calls(
            completion.text,
            tools.definitions,
            tools.formats,
            model_format=form,
            thinking=self.tokenizer.think_markers,
        )

    def after_calls(
        self,
        prompt: Prompt,
        completion: Completion,
        notes: Sequence[Mapping[str, Any]],
        tools: EpisodeTools,
    ) -> Prompt:
        # A template without tools often wants the roles in turns.
        if isinstance(prompt, str) or not self.with_tools(prompt, tools)[2]:
            return with_results_as_text(prompt, completion.text, notes)
        answer = {"role": "assistant", "content": completion.text}
        return (*prompt, answer, *({"role": "tool", "content": note["text"]} for note in notes))

    def ids(
        self, prompt: Prompt, config: EnvironmentConfig, options: Mapping[str, Any]
    ) -> list[int]:
        """Return the tokens of a prompt on its own.

        Raises RolloutRejectedError: it is so long that it would take seconds, and has no room
        anyway. RequestError: the template refuses the messages.
        """
        if (reason := self._too_long(prompt)) is not None:
            raise RolloutRejectedError(reason)
        with self.tokenizer_lock:
            if isinstance(prompt, str):
                return self.tokenizer.encode(prompt)
            return self.tokenizer.render_chat(
                prompt, template_kwargs=self._kwargs(config), **options
            )

    def _too_long(self, prompt: Prompt) -> str | None:
        """Return why a prompt cannot fit, as far as its size shows it, before the tokenizer
        spends seconds on it."""
        if not isinstance(prompt, str) and len(prompt) > self.longest:
            return (
                f"the prompt has {len(prompt)} messages, and at most"
                f" {self.longest} tokens are allowed"
            )
        texts = (
            [prompt]
            if isinstance(prompt, str)
            else [shown_text(message.get("content")) for message in prompt]
        )
        characters = sum(map(len, texts))
        if characters <= self.longest * self.tokenizer.longest_token:
            return None
        return (
            f"the prompt has {characters} characters, and at most {self.longest} tokens are allowed"
        )

    def _for_row_tools(self, turn: TurnRequest, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the sampling options for rows with tools whose answers must call one."""
        tools = turn.options.get("tools")
        if not tools or turn.config.tool_choice != "required":
            return {}
        with self.tokenizer_lock:
            structure = required_calls(cast(Any, self.tokenizer), tools, token_ids)
        return {"structure": structure, "skip_special_tokens": False}  # its markers may be such

    def _request(
        self, turn: TurnRequest, token_ids: Sequence[int], room: int, n: int = 1
    ) -> Request:
        overrides = self._for_row_tools(turn, token_ids) | dict(turn.overrides)
        params = SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=min(turn.config.max_tokens, room, overrides.pop("max_tokens", room)),
            n=n,
            seed=turn.seed,
            stop=turn.config.stop,
            thinking_token_budget=turn.config.thinking_token_budget,
        )
        params = dataclasses.replace(params, **overrides)
        if params.stop and not isinstance(turn.prompt, str):  # they count behind the reasoning
            with self.tokenizer_lock:
                thinking = thinking_after(cast(Any, self.tokenizer), token_ids)
            if thinking is not None:
                params = dataclasses.replace(params, reasoning=thinking.reasoning)
        return Request(
            turn.name,
            tuple(token_ids),
            params,
            adapter=self.adapter,
            priority=self.priority,
            opens_text=not isinstance(turn.prompt, str) or self.tokenizer.opens_text(token_ids),
            **carried_with(self.tokenizer, turn.prompt),
        )

    def _follow(
        self, turn: TurnRequest, sequences: Sequence[SequenceRecorder], last: LastTurn | None
    ) -> tuple[SequenceRecorder, list[int]]:
        """Return the sequence that a turn belongs to, the last one or a new one, and the tokens
        that it adds."""
        if last is not None and isinstance(turn.prompt, str) == isinstance(last.prompt, str):
            with self.tokenizer_lock:
                added = continuation(
                    self.tokenizer,
                    self._text(last.prompt, turn.config, last.options),
                    last.completion.text,
                    self._text(turn.prompt, turn.config, turn.options),
                    last_token=sequences[-1].last_token,
                    stop=last.completion.stop_reason,
                )
            if added is not None:
                return sequences[-1], added
        return SequenceRecorder(()), self.ids(turn.prompt, turn.config, turn.options)

    def _text(self, prompt: Prompt, config: EnvironmentConfig, options: Mapping[str, Any]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.render_chat_text(
            prompt, template_kwargs=self._kwargs(config), **options
        )

    def _kwargs(self, config: EnvironmentConfig) -> dict[str, Any]:
        return {**self.template_kwargs, **config.chat_template_kwargs}


def _no_room(prompt_tokens: int, longest: int) -> str:
    return f"the prompt has {prompt_tokens} tokens, at most {longest} are allowed"


def with_results_as_text(prompt: Prompt, answer: str, notes: Sequence[Mapping[str, Any]]) -> Prompt:
    """Return a prompt with an answer and the results of its calls (`EpisodeTools.call`), for a
    template that has no place for them."""
    results = [note["text"] for note in notes]
    if isinstance(prompt, str):
        return f"{prompt}{answer}\n" + "".join(f"RESULT: {result}\n" for result in results)
    return (
        *prompt,
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "\n".join(results)},
    )


def snapshot(prompt: Prompt) -> Prompt:
    """Return a copy that stays as it is when an environment extends its list of messages."""
    return prompt if isinstance(prompt, str) else tuple(dict(message) for message in prompt)
