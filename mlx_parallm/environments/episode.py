"""Episode: one rollout being played. Everything that is sampled in it goes through `turn`.

A prompt that begins with the last one and its answer continues the tokens that were sampled; any
other prompt opens a new sequence of the same episode (`types.Rollout.earlier`). Either way the
tokens are recorded as the engine saw them (`turn_policy.py`). Where the environment has tools,
`turn` makes the policy's calls and continues with their results (`tool_rounds.py`). `CURRENT` is
the episode of the running code, so that `InferenceModule.generate` inside it is a turn of it.
"""

import asyncio
import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Protocol, SupportsFloat

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.episode_state import Prompt, State, text_of
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.group_order import derive_seed
from mlx_parallm.environments.tool_rounds import ToolRounds
from mlx_parallm.environments.trajectory import SequenceRecorder
from mlx_parallm.environments.turn_policy import LastTurn, TurnPolicy, TurnRequest, snapshot
from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.types import MAX_REWARD, Completion, Rollout, Structure, Trajectory, Turn

TURN_OPTIONS = frozenset({"max_tokens", "stop", "tools"})
"""Options that an environment may set for a turn; the others are the run's, or the policy would not
be the sampled one."""


class EpisodeOver(BaseException):
    """Ends the episode where it asks for another turn: there is no room left, or the episode has
    ended.

    Not an Exception, so that `except Exception` in an environment lets it pass.
    """


class BlockingCalls:
    """Let code on other threads wait for work of the episode's loop, until it is closed."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._gate = threading.Lock()  # guards what follows
        self.is_open = True
        self._calls: set[concurrent.futures.Future[Completion]] = set()

    def result_of(self, begin: Callable[[], Coroutine[Any, Any, Completion]]) -> Completion:
        """Wait for what `begin` makes. Raises EpisodeOver; RuntimeError: on the loop's thread."""
        if threading.get_ident() == self._thread:
            raise RuntimeError(
                "generate() would block the environments' loop here: await agenerate()"
            )
        with self._gate:
            if not self.is_open:
                raise EpisodeOver
            call = asyncio.run_coroutine_threadsafe(begin(), self._loop)
            self._calls.add(call)
        try:
            return call.result()
        except concurrent.futures.CancelledError:
            raise EpisodeOver from None
        finally:
            with self._gate:
                self._calls.discard(call)

    def close(self) -> None:
        with self._gate:
            self.is_open = False
            calls = list(self._calls)
        for call in calls:
            call.cancel()


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
            bounded: the episode is cut after a number of steps.
            format_prompt: makes the policy's prompt of an environment's
            (`EnvironmentSource.format_prompt`).
            tools: the tools of the policy.
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
        self._rounds = (
            None
            if tools is None
            else ToolRounds(tools, self._one_turn, lambda: self._blocking.is_open, self._note_calls)
        )
        self._seed = seed
        self._sequences: list[SequenceRecorder] = []
        self._turns: list[Turn] = []
        self._turn_rewards: list[float] = []  # one for each turn so far; empty: no turn has one
        self._last: LastTurn | None = None
        self._failure: str | None = None
        self._one_at_a_time = asyncio.Lock()
        self._blocking = BlockingCalls()

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

        Raises RuntimeError: on the thread of the environment's loop, which would wait for
        itself.
        """
        return self._blocking.result_of(lambda: self.agenerate(prompt, params))

    async def agenerate(self, prompt: Prompt, params: Mapping[str, Any]) -> Completion:
        """Sample the episode's next turn as the run samples, and record it.

        Args:
            params: options of the environment: `max_tokens` (never more than the configuration's,
                or than there is room for), `stop` (instead of the configuration's), `tools` (for
                the chat template). `InferenceModule` may also set `skip_special_tokens` (False:
                the text shows them).

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
        """Return an episode of another player of the same game, which is not trained on.

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
            if not self._blocking.is_open:
                raise EpisodeOver
            formatted = snapshot(self._format_prompt(prompt))
            overrides: dict[str, Any] = (
                {} if skip_special_tokens else {"skip_special_tokens": False}
            )
            if max_tokens is not None:
                overrides["max_tokens"] = max_tokens
            if structure is not None:
                overrides["structure"] = structure
            if stop is not None:
                overrides["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
            has_own_tools = "tools" in options  # the environment makes these calls
            options = {name: value for name, value in options.items() if name != "tools" or value}
            if self._rounds is None or has_own_tools:
                return await self._one_turn(formatted, overrides, options)
            return await self._rounds.turn(self._policy, formatted, overrides, options)

    def _note_calls(self) -> None:
        """Let the environment's `State` know of the calls so far, and of the answer."""
        if isinstance(self.played, State):
            self.played.metadata |= self._tool_metadata

    @property
    def _tool_metadata(self) -> dict[str, Any]:
        return {} if self._rounds is None else self._rounds.metadata

    async def _one_turn(
        self, prompt: Prompt, overrides: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Completion:
        """Sample one answer and record it."""
        number = len(self._turns)
        seed = derive_seed("turn", self._seed, self.number, number)
        turn = TurnRequest(f"{self.name}/{number}", prompt, self._config, seed, overrides, options)
        completion = self._take_opening(turn) or await self._sample(turn)
        self._sequences[-1].show(prompt)
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
        """Record a turn that a client sampled with this policy, in its own sequence.

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
        """Return a text unchanged; of messages, only those added since the last turn."""
        last = self._last
        seen = (
            0
            if isinstance(prompt, str) or last is None or isinstance(last.prompt, str)
            else len(last.prompt) + 1
        )
        return text_of(prompt, seen if seen < len(prompt) else 0)

    def take_turn_reward(self, played: RewardsTurn) -> None:
        """Add the reward that a step reports to the last turn that it took, and clear it.

        Raises RolloutRejectedError: it is not a number, or no turn was taken yet.
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
        """Whether it continued, for several turns, until there was no room: the environment did
        not end it."""
        return self.cut and len(self._turns) > 1 and (self._full or not self._bounded)

    def close(self) -> None:
        """Allow no more turns; pending ones get EpisodeOver. Call it on the loop's
        thread."""
        self._blocking.close()

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
        """Return the unfinished episode; its rollout is not scored."""
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
    """Return placeholders for a group's episodes that did not begin."""
    rollout = Rollout((), (), (), (), temperature, {}, stop_reason="error", error=failure)
    return tuple(Trajectory("", rollout, step_count=0, group_id=group_id) for _ in range(size))
