"""Plays the episodes of groups against the engine: `Task` → one `Request` of n completions → `RolloutGroup`.

The completions of a group's first turn come from one request, so they share one prefill. A later turn is a request of
its own that holds the whole transcript. Whatever goes wrong in an episode is a recorded result: `run` returns a
`GroupResult` with the reason, and with the rollouts as far as they came.
"""

import asyncio
import dataclasses
import inspect
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from mlx_parallm.config import EnvironmentConfig
from mlx_parallm.environments.base import ChatTokenizer, Environment, EnvironmentSource, PolicyClient, Task
from mlx_parallm.environments.schedule import derive_seed
from mlx_parallm.environments.tasks import Split
from mlx_parallm.environments.transcript import Transcript, continuation
from mlx_parallm.errors import ParallmError, RolloutRejectedError
from mlx_parallm.rewards.base import Response, score_group
from mlx_parallm.types import Completion, Request, RequestOutput, Rollout, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Everything that decides a group but for the weights it is sampled with."""

    group_id: str
    source: EnvironmentSource
    task_index: int
    size: int
    seed: int
    index: int | None = None
    split: Split = "train"
    task: Task | None = None  # given: instead of the source's number `task_index`


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A finished group. `failure` says why it may not be trained on; its rollouts are then as far as they came."""

    plan: GroupPlan
    group: RolloutGroup
    texts: tuple[str, ...] = ()  # last answer of each rollout
    task: Task | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    plan: GroupPlan
    task: Task
    request: Request
    deadline: float


class EpisodeRunner:
    def __init__(
        self,
        client: PolicyClient,
        tokenizer: ChatTokenizer,
        *,
        temperature: float,
        max_token_length: int,
        adapter: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`max_token_length` bounds prompt + completion; `temperature` 0 is greedy; `adapter` None is the base."""
        self._client = client
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._max_token_length = max_token_length
        self._adapter = adapter
        self._template_kwargs = dict(template_kwargs or {})

    async def run(self, plans: Sequence[GroupPlan]) -> list[GroupResult]:
        """Plays groups; two or more are submitted atomically. Results in the order of `plans`. Raises nothing but
        CancelledError, which aborts the requests in the engine."""
        prepared = [self._prepare(plan) for plan in plans]
        jobs = [item for item in prepared if isinstance(item, _Job)]
        finished = iter(await self._play(jobs) if jobs else [])
        return [next(finished) if isinstance(item, _Job) else item for item in prepared]

    def _prepare(self, plan: GroupPlan) -> _Job | GroupResult:
        config = plan.source.config
        with attempt() as outcome:
            task = plan.task or plan.source.task(plan.task_index, plan.split)
            if not isinstance(task, Task):
                raise RolloutRejectedError(f"{type(plan.source).__name__}.task returned {task!r}, not a Task")
            prompt = self.render_prompt(task, config)
            room = self._longest - len(prompt)
            if room < 1:
                raise RolloutRejectedError(f"the prompt has {len(prompt)} tokens, at most {self._longest} are allowed")
        if outcome.failure is not None:
            return _failed(plan, outcome.failure)
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=min(config.max_tokens, room),
            n=plan.size,
            seed=plan.seed,
            stop=config.stop,
        )
        request = Request(plan.group_id, tuple(prompt), params, adapter=self._adapter)
        return _Job(plan, task, request, asyncio.get_running_loop().time() + config.timeout_s)

    def render_prompt(self, task: Task, config: EnvironmentConfig) -> list[int]:
        """Token ids that open every episode of `task`. Raises RequestError."""
        if task.plain:
            return self._tokenizer.encode(task.messages[-1]["content"])
        return self._tokenizer.render_chat(task.messages, template_kwargs=self._template_options(config))

    @property
    def _longest(self) -> int:
        return min(self._max_token_length, self._client.max_model_len)

    def _template_options(self, config: EnvironmentConfig) -> dict[str, Any]:
        return self._template_kwargs | config.chat_template_kwargs

    async def _play(self, jobs: Sequence[_Job]) -> list[GroupResult]:
        last = max(jobs, key=lambda job: job.deadline)
        with attempt() as outcome:
            async with _deadline(last):
                if len(jobs) == 1:
                    outputs = [await self._client.generate(last.request)]
                else:
                    outputs = await self._client.generate_many([job.request for job in jobs])
        if outcome.failure is not None:
            return [_failed(job.plan, outcome.failure, job.task) for job in jobs]
        pairs = zip(jobs, outputs, strict=True)
        return list(await asyncio.gather(*(self._finish(job, output) for job, output in pairs)))

    async def _finish(self, job: _Job, output: RequestOutput) -> GroupResult:
        episodes = (self._episode(job, completion) for completion in output.completions)
        responses = await asyncio.gather(*episodes)
        rollouts = tuple(response.rollout for response in responses)
        failure = next((rollout.error for rollout in rollouts if rollout.error is not None), None)
        if failure is None:
            with attempt() as outcome:
                async with _deadline(job):
                    rollouts = await score_group(job.task.reward, responses)
            failure = outcome.failure and f"reward: {outcome.failure}"
        texts = tuple(response.text for response in responses)
        return GroupResult(job.plan, _group(job.plan, rollouts, job.task), texts, job.task, failure)

    async def _episode(self, job: _Job, completion: Completion) -> Response:
        """One rollout from its first completion to its end; errors are in the rollout."""
        segments = [Transcript(job.request.prompt_token_ids)]
        text, stop_reason = completion.text, "error"
        with attempt() as outcome:
            async with _deadline(job):
                text, stop_reason = await self._turns(job, segments, completion)
        *earlier, last = segments
        rollout = last.rollout(temperature=self._temperature, stop_reason=stop_reason, error=outcome.failure)
        ended = (segment.rollout(temperature=self._temperature, stop_reason="stop") for segment in earlier)
        return Response(text, dataclasses.replace(rollout, earlier=tuple(ended)))

    async def _turns(self, job: _Job, segments: list[Transcript], completion: Completion) -> tuple[str, str]:
        """Plays on to the end of the episode; a template that rewrites history opens another segment."""
        environment = job.plan.source.environment(job.task)
        conversation = list(job.task.messages)
        for turn in range(1, self._longest + 1):
            segments[-1].sample(completion)
            if completion.finish_reason not in ("stop", "length"):
                raise RolloutRejectedError(completion.error or f"generation ended with {completion.finish_reason!r}")
            answer = await _step(environment, completion.text)
            if answer is None or completion.finish_reason == "length":
                break
            room = self._give(job, segments, conversation, completion.text, answer)
            if room <= 0:
                return completion.text, "length"
            conversation += [{"role": "assistant", "content": completion.text}, *answer]
            completion = await self._next_turn(job, segments[-1], completion.index, turn, room)
        return completion.text, completion.finish_reason

    def _give(
        self,
        job: _Job,
        segments: list[Transcript],
        conversation: list[Mapping[str, str]],
        text: str,
        answer: Sequence[Mapping[str, str]],
    ) -> int:
        """Gives the environment's answer to the turn `text`; returns the room for the next one. Without room, nothing
        is given."""
        options, last = self._template_options(job.plan.source.config), segments[-1]
        given: list[int] | None
        if job.task.plain:
            given = self._tokenizer.encode("".join(turn["content"] for turn in answer), add_special_tokens=False)
        else:
            given = continuation(
                self._tokenizer, conversation, text, answer, last_token=last.last_token, template_kwargs=options
            )
        if given is None:
            turns = [*conversation, {"role": "assistant", "content": text}, *answer]
            opened = Transcript(self._tokenizer.render_chat(turns, template_kwargs=options))
            if len(opened) < self._longest:
                segments.append(opened)
            return self._longest - len(opened)
        room = self._longest - len(last) - len(given)
        if room > 0:
            last.give(given)
        return room

    async def _next_turn(self, job: _Job, transcript: Transcript, rollout: int, turn: int, room: int) -> Completion:
        params = dataclasses.replace(
            job.request.params,
            n=1,
            max_tokens=min(job.plan.source.config.max_tokens, room),
            seed=derive_seed("turn", job.plan.seed, rollout, turn),
        )
        request = Request(f"{job.plan.group_id}/{rollout}/{turn}", transcript.token_ids, params, self._adapter)
        output = await self._client.generate(request)
        return dataclasses.replace(output.completions[0], index=rollout)


@dataclass(slots=True)
class Outcome:
    failure: str | None = None


@contextmanager
def attempt() -> Iterator[Outcome]:
    """The boundary around everything that is not ours: environments, rewards, the engine's refusal of a request."""
    outcome = Outcome()
    try:
        yield outcome
    except (Exception, SystemExit) as error:  # noqa: BLE001  boundary: a failed episode is a recorded result
        outcome.failure = describe(error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        outcome.failure = describe(error)  # foreign code's own: nobody has cancelled this episode


def describe(error: BaseException) -> str:
    """One line: our own errors speak for themselves, foreign ones are named."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ParallmError) else f"{type(error).__name__}: {text}".removesuffix(": ")


@asynccontextmanager
async def _deadline(job: _Job) -> AsyncIterator[None]:
    limit = asyncio.timeout_at(job.deadline)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():  # and not some other time-out inside the environment
            allowed = f"timeout_s = {job.plan.source.config.timeout_s:g} s"
            raise RolloutRejectedError(f"not finished within {allowed}") from error
        raise


async def _step(environment: Environment, text: str) -> Sequence[Mapping[str, str]] | None:
    what, given = f"{type(environment).__name__}.step", environment.step(text)
    if not inspect.isawaitable(given):
        raise RolloutRejectedError(f"{what} is a plain function; it has to be async")
    answer = await given
    if answer is None or (isinstance(answer, tuple | list) and all(isinstance(turn, Mapping) for turn in answer)):
        return answer
    raise RolloutRejectedError(f"{what} returned {answer!r}: expected a tuple of messages, or None at the end")


def _failed(plan: GroupPlan, reason: str, task: Task | None = None) -> GroupResult:
    return GroupResult(plan, _group(plan, (), task), task=task, failure=reason)


def _group(plan: GroupPlan, rollouts: tuple[Rollout, ...], task: Task | None) -> RolloutGroup:
    metadata: dict[str, Any] = {"task_index": plan.task_index}
    if task is not None:
        metadata |= {"key": task.key, "answer": task.answer}
    return RolloutGroup(plan.group_id, plan.source.name, rollouts, index=plan.index, metadata=metadata)
