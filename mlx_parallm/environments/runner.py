"""Plays groups of episodes against the engine: `Task` → one `Request` of n completions →
`RolloutGroup`.

    EpisodeRunner   plays groups on the asyncio loop of its caller
    RolloutWorker   a thread with such a loop, for the groups of one environment
    LocalPlayer     the workers of all environments; a `GroupPlayer`, as other processes may bring
                    one

The completions of a group's first turn come from one request, so they share one prefill (except
if an environment's `step` decides what it asks). Every other turn is a request that holds the
whole sequence (`episode.py`). Whatever goes wrong in an episode is a recorded result: `run` returns
a `GroupResult` with the reason, and with the incomplete rollouts.
"""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from mlx_parallm.environments.base import EnvironmentSource, Split, Task
from mlx_parallm.environments.episode import CURRENT, Episode, EpisodeOver, Opening
from mlx_parallm.environments.turn_policy import EpisodePolicy, TurnPolicy, TurnRequest
from mlx_parallm.errors import (
    EndpointError,
    EngineUnavailableError,
    ParallmError,
    RolloutRejectedError,
)
from mlx_parallm.execution.tool_calls import openai_tools
from mlx_parallm.rewards.base import score_group
from mlx_parallm.system.device.faults import raise_device_fault
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.types import (
    Completion,
    Request,
    RequestOutput,
    Rollout,
    RolloutGroup,
    Trajectory,
)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """All facts that decide a group, except the weights that sample it."""

    group_id: str
    source: EnvironmentSource
    task_index: int
    size: int
    seed: int
    index: int | None = None
    split: Split = "train"
    task: Task | None = None  # replaces the source's number `task_index`
    max_steps: int | None = None  # turns of each episode; None: as many as there is room for


@dataclass(frozen=True, slots=True)
class GroupResult:
    """A finished group. `failure` says why it may not be trained on; its rollouts are then
    incomplete."""

    plan: GroupPlan
    group: RolloutGroup
    trajectories: tuple[Trajectory, ...] = ()  # one for each rollout of the group
    task: Task | None = None
    failure: str | None = None
    may_pass: bool = False  # it has failed because another server was away or busy
    # rl.sample, rl.reward: Unix seconds
    times: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Job:
    plan: GroupPlan
    task: Task
    deadline: float
    opening: TurnRequest
    request: Request | None  # the opening's request, for all members; None: each asks for itself
    began: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class _PlayedEpisode:
    trajectory: Trajectory
    may_pass: bool  # whether the failure may be temporary
    never_done: int  # turns, if the environment did not end it; else 0


class EpisodeRunner:
    def __init__(self, policy: TurnPolicy) -> None:
        self._policy = policy

    def use_adapter(self, adapter: str | None) -> None:
        """Sample with `adapter` in the groups that start from now on."""
        assert isinstance(self._policy, EpisodePolicy), "an endpoint has no adapters"
        self._policy = dataclasses.replace(self._policy, adapter=adapter, since=time.monotonic())

    def use_temperature(self, temperature: float) -> None:
        """Sample at `temperature` in the groups that start from now on."""
        assert isinstance(self._policy, EpisodePolicy), "an endpoint has its own"
        self._policy = dataclasses.replace(self._policy, temperature=temperature)

    async def run(self, plans: Sequence[GroupPlan]) -> list[GroupResult]:
        """Play groups, two or more of them submitted atomically; return results in the order of
        `plans`.

        Raises CancelledError, which aborts the requests in the engine, and DeviceFaultError.
        """
        prepared = [self._prepare(plan) for plan in plans]
        jobs = [item for item in prepared if isinstance(item, _Job)]
        finished = iter(await self._play(jobs) if jobs else [])
        return [next(finished) if isinstance(item, _Job) else item for item in prepared]

    def _prepare(self, plan: GroupPlan) -> _Job | GroupResult:
        source, config = plan.source, plan.source.config
        with attempt() as outcome:
            task = plan.task or source.task(plan.task_index, plan.split)
            if not isinstance(task, Task):
                raise RolloutRejectedError(
                    f"{type(source).__name__}.task returned {task!r}, not a Task"
                )
            held = {} if source.structure is None else {"structure": source.structure}
            opening = TurnRequest(
                plan.group_id, task.opening, config, plan.seed, held, task.options
            )
            if (tools := source.tools_of(task)) is not None:
                prompt, overrides, options = self._policy.with_tools(task.opening, tools)
                opening = dataclasses.replace(
                    opening, prompt=prompt, overrides=held | overrides, options=options
                )
            request = self._policy.open_group(opening, plan.size) if source.opens_together else None
        if outcome.failure is not None:
            return _failed(plan, outcome)
        return _Job(
            plan, task, asyncio.get_running_loop().time() + config.timeout_s, opening, request
        )

    async def _play(self, jobs: Sequence[_Job]) -> list[GroupResult]:
        together = [job for job in jobs if job.request is not None]
        outputs: dict[str, RequestOutput] = {}
        with attempt() as outcome:
            if together:
                async with _deadline(max(together, key=lambda job: job.deadline)):
                    names = [job.plan.group_id for job in together]
                    outputs = dict(zip(names, await self._ask(together), strict=True))

        async def finish(job: _Job) -> GroupResult:
            if outcome.failure is not None and job.request is not None:
                return _failed(job.plan, outcome, job.task)
            return await self._finish(job, outputs.get(job.plan.group_id))

        return list(await asyncio.gather(*map(finish, jobs)))

    async def _ask(self, jobs: Sequence[_Job]) -> list[RequestOutput]:
        requests = [job.request for job in jobs if job.request is not None]
        client: Any = self._policy.client  # an engine's, if there are requests
        if len(requests) == 1:
            return [await client.generate(requests[0])]
        return await client.generate_many(requests)

    async def _finish(self, job: _Job, output: RequestOutput | None) -> GroupResult:
        first: Sequence[Completion | None] = (
            output.completions if output else [None] * job.plan.size
        )
        episodes = (
            self._episode(job, number, completion) for number, completion in enumerate(first)
        )
        played = await asyncio.gather(*episodes)
        trajectories, may_pass = (
            tuple(each.trajectory for each in played),
            any(each.may_pass for each in played),
        )
        times = {"rl.sample": (job.began, time.time())}
        failure = next((each.error for each in trajectories if each.error is not None), None)
        if failure is None and job.task.reward is not None:
            with attempt() as outcome:
                async with _deadline(job):
                    scored = await score_group(job.task.reward, trajectories)
                trajectories = tuple(
                    dataclasses.replace(trajectory, rollout=rollout)
                    for trajectory, rollout in zip(trajectories, scored, strict=True)
                )
            times["rl.reward"] = (times["rl.sample"][1], time.time())
            failure, may_pass = outcome.failure and f"reward: {outcome.failure}", outcome.may_pass
        rollouts = tuple(trajectory.rollout for trajectory in trajectories)
        kept = job.plan.source.group_metadata(trajectories) if failure is None else {}
        counts = {
            "out_of_room": sum(each.out_of_room for each in trajectories),
            "never_done": sum(each.never_done > 0 for each in played),
            "never_done_turns": sum(each.never_done for each in played),
        }
        group = _group(job.plan, rollouts, job.task, {**kept, **counts})
        return GroupResult(job.plan, group, trajectories, job.task, failure, may_pass, times)

    async def _episode(self, job: _Job, number: int, first: Completion | None) -> _PlayedEpisode:
        """Play one rollout; return it, with its error if it failed."""
        plan, opening = job.plan, None
        if first is not None and job.request is not None:
            opening = Opening(job.opening, job.request.prompt_token_ids, first)
        episode = Episode(
            self._policy,
            plan.source.config,
            group_id=plan.group_id,
            seed=plan.seed,
            number=number,
            group_size=plan.size,
            opening=opening,
            format_prompt=plan.source.format_prompt,
            bounded=plan.max_steps is not None,
            tools=plan.source.tools_of(job.task),
        )
        CURRENT.set(episode)  # for this task only: gather gives each episode its own context
        with attempt() as outcome:
            try:
                async with _deadline(job, lambda: plan.source.endless):
                    with suppress(EpisodeOver):
                        await plan.source.play(
                            episode, job.task, plan.max_steps or self._policy.longest
                        )
                episode.check()
                plan.source.note_end(episode)
            finally:
                episode.close()
        never_done = episode.turns if outcome.failure is None and episode.never_done else 0
        return _PlayedEpisode(episode.trajectory(outcome.failure), outcome.may_pass, never_done)


class RolloutWorker:
    """A thread with an asyncio loop that plays the groups of one environment (or of several, in a
    fixed order).

    Each environment has a worker, because its code is foreign: code that blocks its thread forever
    blocks no other. `on_results` and `on_error` (a bug in this package: episodes fail as results)
    are called on the worker's thread.
    """

    def __init__(
        self,
        name: str,
        runner: EpisodeRunner,
        *,
        on_results: Callable[[Sequence[GroupResult]], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.name = name
        self._runner, self._on_results, self._on_error = runner, on_results, on_error
        self._loop = LoopThread(f"environment {name}")

    def play(self, plans: Sequence[GroupPlan]) -> None:
        """Start groups; several are submitted atomically. Any thread may call it. After `stop`
        it does nothing."""
        with suppress(EngineUnavailableError):
            self._loop.submit(self._play(plans)).add_done_callback(self._done)

    def stop(self, timeout_s: float = 0.0) -> bool:
        """Cancel running episodes, and wait for the thread's end. Returns False while an
        environment blocks it."""
        return self._loop.stop(timeout_s=timeout_s)

    async def _play(self, plans: Sequence[GroupPlan]) -> None:
        self._on_results(await self._runner.run(plans))

    def _done(self, played: "Future[None]") -> None:
        if not played.cancelled() and (error := played.exception()) is not None:
            self._on_error(error)


OnResults = Callable[[Sequence[GroupResult]], None]
OnError = Callable[[BaseException], None]


class GroupPlayer(Protocol):
    """Plays groups, here or in another process. Any thread may call it; `OnResults` gets every
    result, and `OnError` a bug in this package."""

    def play(self, plans: Sequence[GroupPlan]) -> None:
        """Start groups; those of one call are submitted atomically if the order is fixed."""

    def use_temperature(self, temperature: float) -> None:
        """Sample at `temperature` in the groups that start from now on."""

    def stop(self, timeout_s: float = 0.0) -> Sequence[str]:
        """Cancel running episodes; return the environments that block their threads longer than
        `timeout_s`."""
        ...


MakePlayer = Callable[[OnResults, OnError], GroupPlayer]


class LocalPlayer:
    """Plays groups in this process: a worker for each environment, or one for all of them in a
    fixed order."""

    def __init__(
        self,
        runner: EpisodeRunner,
        environments: Sequence[str],
        *,
        fixed_order: bool,
        on_results: OnResults,
        on_error: OnError,
    ) -> None:
        together = [list(environments)] if fixed_order else [[name] for name in environments]
        self._runner, self._by_environment = runner, dict[str, RolloutWorker]()
        for names in together:
            worker = RolloutWorker(
                ", ".join(names), runner, on_results=on_results, on_error=on_error
            )
            self._by_environment |= dict.fromkeys(names, worker)

    def play(self, plans: Sequence[GroupPlan]) -> None:
        shares: dict[RolloutWorker, list[GroupPlan]] = {}
        for plan in plans:
            shares.setdefault(self._by_environment[plan.source.name], []).append(plan)
        for worker, share in shares.items():
            worker.play(share)

    def use_temperature(self, temperature: float) -> None:
        self._runner.use_temperature(temperature)

    def stop(self, timeout_s: float = 0.0) -> list[str]:
        workers = list(dict.fromkeys(self._by_environment.values()))
        for worker in workers:
            worker.stop()
        deadline = time.monotonic() + timeout_s
        return [
            worker.name
            for worker in workers
            if not worker.stop(max(0.0, deadline - time.monotonic()))
        ]


@dataclass(slots=True)
class Outcome:
    failure: str | None = None
    may_pass: bool = False  # another server was away or busy


@contextmanager
def attempt() -> Iterator[Outcome]:
    """The boundary around foreign code: environments, rewards, the engine's refusal of a
    request. Raises DeviceFaultError: the GPU has failed under it, as it may under an expert that
    acts; that is not an episode's failure."""
    outcome = Outcome()
    try:
        yield outcome
    except (Exception, SystemExit) as error:  # noqa: BLE001  boundary: a failed episode is a recorded result
        raise_device_fault(error)
        outcome.failure, outcome.may_pass = describe(error), _may_pass(error)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # raised by foreign code: this episode was not cancelled
        outcome.failure = describe(error)


def describe(error: BaseException) -> str:
    """Return an error in one line: ours as their text, foreign ones with their type."""
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, ParallmError)
        else f"{type(error).__name__}: {text}".removesuffix(": ")
    )


def _may_pass(error: BaseException | None) -> bool:
    for _ in range(16):  # `raise error from error` has no end
        if isinstance(error, ConnectionError) or (
            isinstance(error, EndpointError) and error.may_pass
        ):
            return True
        error = error and (error.__cause__ or error.__context__)
    return False


@asynccontextmanager
async def _deadline(job: _Job, why: Callable[[], str | None] = lambda: None) -> AsyncIterator[None]:
    limit = asyncio.timeout_at(job.deadline)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if limit.expired():  # and not some other time-out inside the environment
            allowed = f"timeout_s = {job.plan.source.config.timeout_s:g} s"
            reason = f" ({words})" if (words := why()) else ""
            raise RolloutRejectedError(f"not finished within {allowed}{reason}") from error
        raise


def task_in_words(task: Task, source: EnvironmentSource) -> dict[str, Any]:
    """Return a task's messages and row as JSON, for a group's metadata.

    `columns_left_out`: columns that JSON does not know. `taught_tools`: the policy's prompt has
    `tools`, which a prompt made of these messages would lack.
    """
    row = {"answer": task.answer, **task.columns} if task.state is None else task.state.metadata
    plain, left_out = {}, []
    for name, value in row.items():
        try:
            plain[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            left_out.append(str(name))
    prompt = task.opening if task.plain else [dict(message) for message in task.messages]
    words: dict[str, Any] = {
        "asked": prompt,
        "row": plain,
        "template_kwargs": dict(source.config.chat_template_kwargs),
    }
    if left_out:
        words["columns_left_out"] = left_out
    tools = source.tools_of(task)
    if task.tools or tools is not None:
        words["taught_tools"] = True
        words["tools"] = [*task.tools, *(() if tools is None else openai_tools(tools.definitions))]
    return words


def _failed(plan: GroupPlan, outcome: Outcome, task: Task | None = None) -> GroupResult:
    return GroupResult(plan, _group(plan, (), task), (), task, outcome.failure, outcome.may_pass)


def _group(
    plan: GroupPlan,
    rollouts: tuple[Rollout, ...],
    task: Task | None,
    counts: Mapping[str, Any] = MappingProxyType({"out_of_room": 0}),
) -> RolloutGroup:
    metadata: dict[str, Any] = {**counts, "task_index": plan.task_index}
    if task is not None:
        metadata |= {"key": task.key, "answer": task.answer}
        if plan.source.keeps_rows:
            metadata |= task_in_words(task, plan.source)
    return RolloutGroup(
        plan.group_id, plan.source.name, rollouts, index=plan.index, metadata=metadata
    )
