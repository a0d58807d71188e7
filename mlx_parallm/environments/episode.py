"""Episode: one rollout being played. Everything that is sampled in it goes through `turn`.

A prompt that begins with the last one and its answer continues the tokens that were sampled; any
other prompt opens a new sequence of the same episode (`types.Rollout.earlier`). Either way the
tokens are recorded as the engine saw them. Where the environment has tools (`episode_tools.py`),
`turn` makes the policy's calls and goes on with their results; the environment sees the answer
alone, and its next prompt continues what really went before. `CURRENT` is the episode of the
running code, so that `InferenceModule.generate` inside it is a turn of it.
"""

import asyncio
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, Protocol, SupportsFloat, cast

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.schedule import derive_seed
from mlx_parallm.environments.state import Prompt, State, shown_text, text_of
from mlx_parallm.environments.trajectory import SequenceRecorder, continuation
from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.answer_grammar import required_calls
from mlx_parallm.execution.prompt_images import image_refs
from mlx_parallm.execution.taught_tools import TAUGHT_FORMAT
from mlx_parallm.execution.tool_calls import (
    ParsedCalls,
    openai_tools,
    own_format,
    parse_tool_calls,
    prompt_with_tools,
    with_instructions,
)
from mlx_parallm.execution.tool_results import last_question
from mlx_parallm.types import (
    MAX_REWARD,
    ChatTokenizer,
    Completion,
    PolicyClient,
    Request,
    Rollout,
    SamplingParams,
    Structure,
    Trajectory,
    Turn,
)

TURN_OPTIONS = frozenset({"max_tokens", "stop", "tools"})
"""What an environment may set for a turn; the rest is the run's, or the trained policy would not
be the sampled one."""


class EpisodeOver(BaseException):
    """Ends the episode where it asks for another turn: there is no room left, or the episode has
    ended.

    Not an Exception, so that `except Exception` in an environment lets it pass.
    """


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A turn that an episode asks for."""

    name: str
    prompt: Prompt
    config: EnvironmentConfig
    seed: int
    overrides: Mapping[str, Any]  # of SamplingParams, set by the environment
    options: Mapping[str, Any]  # for the chat template

    def asks_as(self, other: "TurnRequest") -> bool:
        """Whether both ask the same in the same way."""
        mine, theirs = (
            (_snapshot(self.prompt), dict(self.overrides)),
            (_snapshot(other.prompt), dict(other.overrides)),
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
    priority: int = 0  # of its requests; lower goes first
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
            return _snapshot(prompt), overrides, {"tools": openai_tools(tools.definitions)}
        chat, template_tools = prompt_with_tools(
            prompt, tools.definitions, self.tokenizer, tools.formats
        )
        options = {} if template_tools is None else {"tools": template_tools, "teach_tools": False}
        return _snapshot(chat), overrides, options

    def tool_calls(self, completion: Completion, tools: EpisodeTools) -> ParsedCalls:
        form = own_format(self.tokenizer) or TAUGHT_FORMAT
        return parse_tool_calls(
            completion.text, tools.definitions, tools.formats, model_format=form
        )

    def after_calls(
        self,
        prompt: Prompt,
        completion: Completion,
        notes: Sequence[Mapping[str, Any]],
        tools: EpisodeTools,
    ) -> Prompt:
        if isinstance(prompt, str):
            return f"{prompt}{completion.text}\n" + "".join(
                f"RESULT: {note['text']}\n" for note in notes
            )
        answer = {"role": "assistant", "content": completion.text}
        if self.with_tools(prompt, tools)[2]:
            return (*prompt, answer, *({"role": "tool", "content": note["text"]} for note in notes))
        # A template without tools often wants the roles in turns.
        return (
            *prompt,
            answer,
            {"role": "user", "content": "\n".join(note["text"] for note in notes)},
        )

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
        """Return what sampling needs where the row has tools and an answer has to call one."""
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
        )
        params = dataclasses.replace(params, **overrides)
        return Request(
            turn.name,
            tuple(token_ids),
            params,
            adapter=self.adapter,
            priority=self.priority,
            opens_text=not isinstance(turn.prompt, str) or self.tokenizer.opens_text(token_ids),
            images=self.tokenizer.images_of(turn.prompt) if image_refs(turn.prompt) else (),
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


class Played(Protocol):
    """The `State` of an episode, or the like of a source: rewards see its metadata."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...


class RewardsTurn(Protocol):
    """The `State` of an episode, or the like: it may hold the reward of the last turn."""

    turn_reward: float | None


@dataclass(frozen=True, slots=True)
class Opening:
    """The first turn, sampled in one request with those of the whole group."""

    turn: TurnRequest
    token_ids: Sequence[int]
    completion: Completion


class Episode:
    """Belongs to the asyncio loop that made it; `generate` is for other threads."""

    def __init__(
        self,
        policy: TurnPolicy,
        config: EnvironmentConfig,
        *,
        group_id: str,
        seed: int,
        number: int,
        group_size: int,
        opening: Opening | None = None,
        format_prompt: Callable[[Prompt], Prompt] = lambda prompt: prompt,
        bounded: bool = False,
        tools: EpisodeTools | None = None,
    ) -> None:
        """
        Args:
            seed: of the group.
            number: place in the group, which has `group_size` episodes.
            bounded: whoever plays it has set a number of steps after which it is cut.
            format_prompt: makes an environment's prompt what the policy is asked
            (`EnvironmentSource.format_prompt`).
            tools: what the policy may call.
        """
        self.name = f"{group_id}/{number}"
        self.group_id, self.number, self.group_size = group_id, number, group_size
        self.cut = False  # a limit has ended it
        self._bounded = bounded
        self.played: Played | None = None
        self._full = False  # there was no room for another turn
        self._policy, self._config, self._opening, self._format_prompt = (
            policy,
            config,
            opening,
            format_prompt,
        )
        self._tools = tools
        self._notes: list[dict[str, Any]] = []  # of the calls
        self._answer_text: str | None = None
        self._question: str | None = None  # the last user message of the opening
        # the conversation as the environment knows it, and as it went
        self._seen: tuple[Prompt, Prompt] | None = None
        self._seed = seed
        self._sequences: list[SequenceRecorder] = []
        self._turns: list[Turn] = []
        self._turn_rewards: list[float] = []  # of the turns so far; empty: none has one
        self._last: LastTurn | None = None
        self._failure: str | None = None
        self._one_at_a_time = asyncio.Lock()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._gate = threading.Lock()  # guards what follows
        self._open = True
        self._calls: set[concurrent.futures.Future[Completion]] = set()

    # --- what `InferenceModule` uses inside the episode. It records a turn here where client and
    # adapter are its own, so that another model's answers inside a step (one that plays the user, a
    # judge) stay out of the trajectory.

    @property
    def policy(self) -> TurnPolicy:
        return self._policy

    @property
    def client(self) -> object:
        return self._policy.client

    @property
    def adapter(self) -> str | None:
        """The adapter without the version that an evaluation is pinned to."""
        return self._policy.adapter and self._policy.adapter.partition("@")[0]

    @property
    def since(self) -> float:
        """The time at which `adapter` was chosen, by time.monotonic(): at the latest when the
        episode began."""
        return self._policy.since

    def generate(self, prompt: Prompt, params: Mapping[str, Any]) -> Completion:
        """Do as `agenerate` does, but block: for a step that runs on a thread.

        Raises RuntimeError: on the thread of the environment's loop, where it would wait for
        itself.
        """
        if threading.get_ident() == self._thread:
            raise RuntimeError(
                "generate() would block the environments' loop here: await agenerate()"
            )
        with self._gate:
            if not self._open:
                raise EpisodeOver
            call = asyncio.run_coroutine_threadsafe(self.agenerate(prompt, params), self._loop)
            self._calls.add(call)
        try:
            return call.result()
        except concurrent.futures.CancelledError:
            raise EpisodeOver from None
        finally:
            with self._gate:
                self._calls.discard(call)

    async def agenerate(self, prompt: Prompt, params: Mapping[str, Any]) -> Completion:
        """Sample the episode's next turn as the run samples, and record it.

        Args:
            params: what the environment sets: `max_tokens` (never more than the configuration's, or
                than there is room for), `stop` (instead of the configuration's), `tools` (for the
                chat template). `InferenceModule` may also set `skip_special_tokens` (False: the
                text shows them).

        Raises:
            EpisodeOver: no room for another turn, or the episode has ended.
            RolloutRejectedError: another parameter, or the engine failed.
            RequestError: the chat template refuses the messages.
        """
        allowed = TURN_OPTIONS | {"skip_special_tokens"}
        if wrong := sorted(set(params) - allowed):
            raise RolloutRejectedError(
                f"generate({', '.join(f'{name}=…' for name in wrong)}) inside an episode: it"
                " samples as the run does,"
                f" so that it can be trained on; it takes only {', '.join(sorted(TURN_OPTIONS))}"
            )
        return await self.turn(
            prompt, **{name: value for name, value in params.items() if value is not None}
        )

    def beside(self, name: str, adapter: str | EllipsisType | None = ...) -> "Episode":
        """Return an episode of another player of the same game, which nobody trains on.

        Args:
            name: of the player, unique in this episode.
            adapter: its weights, None for the base; default: the policy's.

        Raises RolloutRejectedError: there is no way to other weights.
        """
        return Episode(
            self._policy if adapter is ... else self._policy.with_adapter(adapter),
            self._config,
            group_id=f"{self.name}/{name}",
            seed=derive_seed(name, self._seed, self.number),
            number=0,
            group_size=self.group_size,
            format_prompt=self._format_prompt,
        )

    # --- turns

    async def turn(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        skip_special_tokens: bool = True,
        structure: Structure | None = None,
        **options: Any,
    ) -> Completion:
        """Ask the policy and record its answer, which matches `structure`. `options` are the
        template's. Raises as `agenerate`."""
        async with self._one_at_a_time:
            if not self._open:
                raise EpisodeOver
            formatted = _snapshot(self._format_prompt(prompt))
            overrides: dict[str, Any] = (
                {} if skip_special_tokens else {"skip_special_tokens": False}
            )
            if max_tokens is not None:
                overrides["max_tokens"] = max_tokens
            if structure is not None:
                overrides["structure"] = structure
            if stop is not None:
                overrides["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
            has_own_tools = "tools" in options  # whoever asks makes the calls
            options = {name: value for name, value in options.items() if name != "tools" or value}
            if self._tools is None or has_own_tools:
                return await self._one_turn(formatted, overrides, options)
            return await self._with_calls(self._tools, formatted, overrides, options)

    async def _with_calls(
        self,
        tools: EpisodeTools,
        requested: Prompt,
        overrides: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Completion:
        """Sample a turn, make its calls, go on with their results until an answer has no call."""
        prompt = self._as_it_went(requested)
        self._question = self._question or last_question(requested)
        self._note_calls(None)
        for _ in range(tools.max_rounds):
            shown, tool_overrides, tool_options = self._policy.with_tools(prompt, tools)
            completion = await self._one_turn(
                shown, {**tool_overrides, **overrides}, {**tool_options, **options}
            )
            calls = self._policy.tool_calls(completion, tools)
            if completion.finish_reason == "length" or not (calls or calls.malformed):
                self._note_calls(completion.text)
                break
            notes = await tools.call(calls, self._notes, self._question)
            self._notes += notes
            self._note_calls(None)
            prompt = self._policy.after_calls(prompt, completion, notes, tools)
            if not self._open:  # a call has ended the episode
                break
        went = prompt if self._answer_text is None else _followed(prompt, completion.text)
        self._seen = _followed(requested, completion.text), went
        return completion

    def _as_it_went(self, prompt: Prompt) -> Prompt:
        """Return a prompt that continues the last one and its answer with the calls that were
        made in between."""
        if self._seen is None:
            return prompt
        seen, went = self._seen
        if (
            isinstance(prompt, str)
            and isinstance(seen, str)
            and isinstance(went, str)
            and prompt.startswith(seen)
        ):
            return went + prompt[len(seen) :]
        if isinstance(prompt, str) or isinstance(seen, str) or isinstance(went, str):
            return prompt
        if [_plain(message) for message in prompt[: len(seen)]] != [
            _plain(message) for message in seen
        ]:
            return prompt
        return (*went, *prompt[len(seen) :])

    def _note_calls(self, answer: str | None) -> None:
        """Let the environment's `State` know of the calls so far, and of the answer."""
        self._answer_text = answer
        if isinstance(self.played, State):
            self.played.metadata |= self._tool_metadata

    @property
    def _tool_metadata(self) -> dict[str, Any]:
        metadata = {"tool_calls": list(self._notes), "answer_text": self._answer_text}
        return {} if self._tools is None else metadata

    async def _one_turn(
        self, prompt: Prompt, overrides: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Completion:
        """Sample one answer and record it."""
        number = len(self._turns)
        seed = derive_seed("turn", self._seed, self.number, number)
        turn = TurnRequest(f"{self.name}/{number}", prompt, self._config, seed, overrides, options)
        completion = self._take_opening(turn) or await self._sample(turn)
        self._sequences[-1].images = image_refs(prompt)
        self._sequences[-1].add_sampled(completion)
        self._turns.append(Turn(self._new_text(prompt), completion.text))
        self._last = LastTurn(prompt, options, completion)
        if completion.finish_reason not in ("stop", "length"):
            self._failure = completion.error or (
                f"generation ended with {completion.finish_reason!r}"
            )
            self.close()
            raise RolloutRejectedError(self._failure)
        return completion

    def _take_opening(self, turn: TurnRequest) -> Completion | None:
        """Return the first turn's completion, where it was sampled with the group and for this
        prompt."""
        opening, self._opening = self._opening, None
        if opening is None or not turn.asks_as(opening.turn):
            return None
        self._sequences.append(SequenceRecorder(opening.token_ids))
        return opening.completion

    async def _sample(self, turn: TurnRequest) -> Completion:
        """Sample a turn. Nothing is recorded of one that was not sampled to its end."""
        completion = await self._policy.sample(turn, self._sequences, self._last)
        if completion is None:
            self.cut = self._full = True
            self.close()
            raise EpisodeOver
        return completion

    def record(
        self,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        spans: Sequence[Sequence[int] | Completion],
        text: str,
    ) -> None:
        """Record a turn that somebody else sampled with this policy, in a sequence of its own.

        Args:
            spans: what follows the prompt: completions, and tokens between them that were given.
            text: of all spans.

        Raises RolloutRejectedError: the sequence is longer than the run allows.
        """
        sequence = SequenceRecorder(prompt_ids)
        for span in spans:
            if isinstance(span, Completion):
                sequence.add_sampled(span)
                self._last = LastTurn(prompt, {}, dataclasses.replace(span, text=text))
            else:
                sequence.add_prompt(span)
        if (length := len(sequence.token_ids)) > self._policy.longest:
            raise RolloutRejectedError(
                f"{length} tokens are more than max_token_length = {self._policy.longest}"
            )
        self._sequences.append(sequence)
        self._turns.append(Turn(text_of(prompt), text))

    def _new_text(self, prompt: Prompt) -> str:
        """Return a text as it is, and of messages those that are new since the last turn."""
        last = self._last
        seen = (
            0
            if isinstance(prompt, str) or last is None or isinstance(last.prompt, str)
            else len(last.prompt) + 1
        )
        return text_of(prompt, seen if seen < len(prompt) else 0)

    def take_turn_reward(self, played: RewardsTurn) -> None:
        """Add the reward that a step reports to the last turn that it took, and clear it.

        Raises RolloutRejectedError: it is no number, or no turn was taken yet.
        """
        reward, played.turn_reward = played.turn_reward, None
        if reward is None:
            return
        what = f"{type(played).__name__}.turn_reward"
        if not isinstance(reward, SupportsFloat) or not abs(float(reward)) <= MAX_REWARD:
            raise RolloutRejectedError(
                f"{what} is {reward!r}, not a number of at most ±{MAX_REWARD:g}"
            )
        if not self._turns:
            raise RolloutRejectedError(f"{what} is set, but the policy was not asked anything yet")
        self._turn_rewards += [0.0] * (len(self._turns) - len(self._turn_rewards))
        self._turn_rewards[-1] += float(reward)

    # --- its end

    @property
    def turns(self) -> int:
        """Turns that the policy has taken."""
        return len(self._turns)

    @property
    def never_done(self) -> bool:
        """Whether it went on, for several turns, until there was no room: the environment did
        not end it."""
        return self.cut and len(self._turns) > 1 and (self._full or not self._bounded)

    def close(self) -> None:
        """Allow no more turns; whoever waits for one gets EpisodeOver. Call it on the loop's
        thread."""
        with self._gate:
            self._open = False
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def check(self) -> None:
        """Raises RolloutRejectedError: it ended without an answer, or with a failure that the
        environment ignored."""
        if self._failure is not None:
            raise RolloutRejectedError(self._failure)
        if not self._turns:
            raise RolloutRejectedError("the episode ended before the policy was asked anything")

    @property
    def _rewards_of_turns(self) -> tuple[float, ...]:
        without = len(self._turns) - len(self._turn_rewards)
        return (*self._turn_rewards, *[0.0] * without) if self._turn_rewards else ()

    def trajectory(self, failure: str | None) -> Trajectory:
        """Return the episode as far as it came; its rollout is not scored."""
        *earlier, final = self._sequences or [SequenceRecorder(())]
        temperature, last, reason = self._policy.temperature, self._last, "error"
        if failure is None and last is not None:
            reason = "length" if self.cut else last.completion.finish_reason
        rollout = final.rollout(temperature=temperature, stop_reason=reason, error=failure)
        ended = (
            sequence.rollout(temperature=temperature, stop_reason="stop") for sequence in earlier
        )
        messages: tuple[Mapping[str, Any], ...] = ()
        if last is not None and not isinstance(last.prompt, str):
            messages = (*last.prompt, {"role": "assistant", "content": last.completion.text})
        return Trajectory(
            text=self._turns[-1].response if self._turns else "",
            rollout=dataclasses.replace(
                rollout, earlier=tuple(ended), turn_rewards=self._rewards_of_turns
            ),
            prompt=self._turns[0].prompt if self._turns else "",
            history=tuple(self._turns),
            step_count=self.played.step_count
            if isinstance(self.played, State)
            else len(self._turns),
            metadata=(dict(self.played.metadata) if self.played is not None else {})
            | self._tool_metadata,
            group_id=self.group_id,
            out_of_room=reason == "length"
            and (self._full or len(rollout.tokens) >= self._policy.longest),
            messages=messages,
        )


CURRENT: ContextVar[Episode | None] = ContextVar("episode", default=None)


def failed_trajectories(
    group_id: str, size: int, temperature: float, failure: str
) -> tuple[Trajectory, ...]:
    """Return what stands for the episodes of a group that did not begin."""
    rollout = Rollout((), (), (), (), temperature, {}, stop_reason="error", error=failure)
    return tuple(Trajectory("", rollout, step_count=0, group_id=group_id) for _ in range(size))


def _no_room(prompt_tokens: int, longest: int) -> str:
    return f"the prompt has {prompt_tokens} tokens, at most {longest} are allowed"


def _followed(prompt: Prompt, answer: str) -> Prompt:
    return (
        prompt + answer
        if isinstance(prompt, str)
        else (*prompt, {"role": "assistant", "content": answer})
    )


def _plain(message: Mapping[str, Any]) -> tuple[Any, str]:
    return message.get("role"), shown_text(message.get("content")).strip()


def _snapshot(prompt: Prompt) -> Prompt:
    """Return a copy that stays as it is when an environment extends its list of messages."""
    return prompt if isinstance(prompt, str) else tuple(dict(message) for message in prompt)
