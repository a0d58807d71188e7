"""Episode: one rollout on its way. Everything that is sampled in it goes through `turn`, whoever asks for it.

A prompt that begins with the last one and its answer goes on from the tokens that were sampled; any other opens a new
segment (`types.Rollout.earlier`). Either way the transcript holds what the engine saw, token for token.
"""

import asyncio
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import Environment, EnvironmentSource
from mlx_parallm.environments.current_episode import EpisodeOver
from mlx_parallm.environments.schedule import derive_seed
from mlx_parallm.environments.state import Prompt, State, text_of
from mlx_parallm.environments.transcript import Transcript, continuation
from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.types import (
    ChatTokenizer,
    Completion,
    PolicyClient,
    Request,
    Rollout,
    SamplingParams,
    Trajectory,
    Turn,
)

ASKABLE = frozenset({"max_tokens", "stop", "tools"})
"""What an environment may ask for itself; the rest is the run's, or what is trained on would not be its policy."""
ASKED = ASKABLE | {"skip_special_tokens"}  # by `InferenceModule` itself, where a call's marks are special tokens


@dataclass(frozen=True, slots=True)
class Policy:
    """Who is asked, and how it samples. `temperature` 0 is greedy, `adapter` None the base."""

    client: PolicyClient
    tokenizer: ChatTokenizer
    temperature: float
    max_token_length: int  # bounds prompt + completion
    adapter: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    top_p: float = 1.0
    priority: int = 0  # of its requests; lower goes first
    since: float = field(default_factory=time.monotonic)

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return min(self.max_token_length, self.client.max_model_len)

    def request(self, name: str, token_ids: Sequence[int], params: SamplingParams) -> Request:
        return Request(name, tuple(token_ids), params, adapter=self.adapter, priority=self.priority)

    def ids(self, prompt: Prompt, config: EnvironmentConfig, options: Mapping[str, Any]) -> list[int]:
        """Tokens of a prompt on its own. Raises RequestError: the template refuses the messages."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return self.tokenizer.render_chat(prompt, template_kwargs=self._kwargs(config), **options)

    def text(self, prompt: Prompt, config: EnvironmentConfig, options: Mapping[str, Any]) -> str:
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.render_chat_text(prompt, template_kwargs=self._kwargs(config), **options)

    def _kwargs(self, config: EnvironmentConfig) -> dict[str, Any]:
        return {**self.template_kwargs, **config.chat_template_kwargs}


@dataclass(frozen=True, slots=True)
class Opening:
    """The first turn, sampled with those of the whole group."""

    prompt: Prompt
    token_ids: Sequence[int]
    completion: Completion


@dataclass(frozen=True, slots=True)
class _Asked:
    """The last turn."""

    prompt: Prompt
    options: Mapping[str, Any]
    completion: Completion


class Episode:
    """Belongs to the asyncio loop that made it; `generate` is for other threads."""

    def __init__(
        self,
        policy: Policy,
        source: EnvironmentSource,
        *,
        group_id: str,
        seed: int,
        number: int,
        opening: Opening | None,
    ) -> None:
        """`number` is its place in the group, `seed` the group's."""
        self.name = f"{group_id}/{number}"
        self.group_id = group_id
        self.cut = False  # a limit has ended it
        self._full = False  # there was no room for another turn
        self.played: State | Environment | None = None  # whose metadata rewards see
        self._policy, self._source, self._opening = policy, source, opening
        self._seed, self._number = seed, number
        self._segments: list[Transcript] = []
        self._turns: list[Turn] = []
        self._last: _Asked | None = None
        self._failure: str | None = None
        self._one_at_a_time = asyncio.Lock()
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._gate = threading.Lock()  # guards what follows
        self._open = True
        self._calls: set[concurrent.futures.Future[Completion]] = set()

    # --- what code inside the episode generates through: `current_episode.CurrentEpisode`

    @property
    def client(self) -> PolicyClient:
        return self._policy.client

    @property
    def adapter(self) -> str | None:
        """Without the version that an evaluation is pinned to."""
        return self._policy.adapter and self._policy.adapter.partition("@")[0]

    @property
    def since(self) -> float:
        return self._policy.since

    def generate(self, prompt: Prompt, params: Mapping[str, Any]) -> Completion:
        if threading.get_ident() == self._thread:
            raise RuntimeError("generate() would block the environments' loop here: await agenerate()")
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
        if wrong := sorted(set(params) - ASKED):
            raise RolloutRejectedError(
                f"generate({', '.join(f'{name}=…' for name in wrong)}) inside an episode: it samples as the run does,"
                f" so that it can be trained on; it may be given {', '.join(sorted(ASKABLE))}"
            )
        options = {name: params[name] for name in ASKED if params.get(name) is not None}
        return await self.turn(prompt, **options)

    # --- turns

    async def turn(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        skip_special_tokens: bool = True,
        **options: Any,
    ) -> Completion:
        """Asks the policy, and keeps what it says. `options` are the template's. Raises as `agenerate`."""
        async with self._one_at_a_time:
            if not self._open:
                raise EpisodeOver
            asked = _snapshot(self._source.as_asked(prompt))
            wishes: dict[str, Any] = {} if skip_special_tokens else {"skip_special_tokens": False}
            if max_tokens is not None:
                wishes["max_tokens"] = max_tokens
            if stop is not None:
                wishes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
            completion = None if wishes or options else self._sampled_before(asked)
            if completion is None:
                completion = await self._sample(asked, wishes, options)
            self._segments[-1].sample(completion)
            self._turns.append(Turn(self._shown(asked), completion.text))
            self._last = _Asked(asked, options, completion)
            if completion.finish_reason not in ("stop", "length"):
                self._failure = completion.error or f"generation ended with {completion.finish_reason!r}"
                self.close()
                raise RolloutRejectedError(self._failure)
            return completion

    def _sampled_before(self, prompt: Prompt) -> Completion | None:
        opening, self._opening = self._opening, None
        if opening is None or _snapshot(opening.prompt) != prompt:
            return None
        self._segments.append(Transcript(opening.token_ids))
        return opening.completion

    async def _sample(self, prompt: Prompt, wishes: Mapping[str, Any], options: Mapping[str, Any]) -> Completion:
        """Nothing is kept of a turn that was not sampled to its end."""
        policy, config, turn = self._policy, self._source.config, len(self._turns)
        segment, given = self._follow(prompt, options)
        asked = (*segment.token_ids, *given)
        room = policy.longest - len(asked)
        if room < 1 and not self._segments:
            raise RolloutRejectedError(no_room(len(asked), policy.longest))
        if room < 1:
            self.cut = self._full = True
            self.close()
            raise EpisodeOver
        usual = SamplingParams(
            temperature=policy.temperature,
            top_p=policy.top_p,
            max_tokens=min(config.max_tokens, room),
            seed=derive_seed("turn", self._seed, self._number, turn),
            stop=config.stop,
        )
        most = min(usual.max_tokens, wishes.get("max_tokens", room))
        params = dataclasses.replace(usual, **{**wishes, "max_tokens": most})
        output = await policy.client.generate(policy.request(f"{self.name}/{turn}", asked, params))
        segment.give(given)
        if segment not in self._segments:
            self._segments.append(segment)
        return output.completions[0]

    def _follow(self, prompt: Prompt, options: Mapping[str, Any]) -> tuple[Transcript, list[int]]:
        """The segment that `prompt` belongs to, the last one or a new one, and what it adds to it."""
        policy, config, last = self._policy, self._source.config, self._last
        if last is not None and isinstance(prompt, str) == isinstance(last.prompt, str):
            given = continuation(
                policy.tokenizer,
                policy.text(last.prompt, config, last.options),
                last.completion.text,
                policy.text(prompt, config, options),
                last_token=self._segments[-1].last_token,
                stop=last.completion.stop_reason,
            )
            if given is not None:
                return self._segments[-1], given
        return Transcript(()), policy.ids(prompt, config, options)

    def _shown(self, prompt: Prompt) -> str:
        """A text as it is; of messages those that are new since the last turn."""
        last = self._last
        known = 0 if isinstance(prompt, str) or last is None or isinstance(last.prompt, str) else len(last.prompt) + 1
        return text_of(prompt, known if known < len(prompt) else 0)

    # --- its end

    def close(self) -> None:
        """No more turns; who waits for one is told that the episode is over. From the loop's thread."""
        with self._gate:
            self._open = False
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def check(self) -> None:
        """Raises RolloutRejectedError: it ended without an answer, or with a failure that the environment ignored."""
        if self._failure is not None:
            raise RolloutRejectedError(self._failure)
        if not self._turns:
            raise RolloutRejectedError("the episode ended before the policy was asked anything")

    def trajectory(self, failure: str | None) -> Trajectory:
        """The episode as far as it came; its rollout is not scored."""
        *earlier, last = self._segments or [Transcript(())]
        reason = "error"
        if failure is None and self._last is not None:
            reason = "length" if self.cut else self._last.completion.finish_reason
        rollout = last.rollout(temperature=self._policy.temperature, stop_reason=reason, error=failure)
        ended = (segment.rollout(temperature=self._policy.temperature, stop_reason="stop") for segment in earlier)
        return Trajectory(
            text=self._turns[-1].response if self._turns else "",
            rollout=dataclasses.replace(rollout, earlier=tuple(ended)),
            prompt=self._turns[0].prompt if self._turns else "",
            history=tuple(self._turns),
            step_count=self.played.step_count if isinstance(self.played, State) else len(self._turns),
            metadata=dict(self.played.metadata) if self.played is not None else {},
            group_id=self.group_id,
            out_of_room=reason == "length" and (self._full or len(rollout.tokens) >= self._policy.longest),
            messages=self._messages(),
        )

    def _messages(self) -> tuple[Mapping[str, Any], ...]:
        if self._last is None or isinstance(self._last.prompt, str):
            return ()
        return (*self._last.prompt, {"role": "assistant", "content": self._last.completion.text})


def failed_trajectories(group_id: str, size: int, temperature: float, failure: str) -> tuple[Trajectory, ...]:
    """What stands for the episodes of a group that did not begin."""
    rollout = Rollout((), (), (), (), temperature, {}, stop_reason="error", error=failure)
    return tuple(Trajectory("", rollout, step_count=0, group_id=group_id) for _ in range(size))


def no_room(prompt_tokens: int, longest: int) -> str:
    return f"the prompt has {prompt_tokens} tokens, at most {longest} are allowed"


def _snapshot(prompt: Prompt) -> Prompt:
    """Does not change when an environment goes on with its list of messages."""
    return prompt if isinstance(prompt, str) else tuple(dict(message) for message in prompt)
