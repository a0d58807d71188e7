"""Chats of people who agreed as a source of rollouts.

    /v1 chats ─ ChatObserver ─► FeedbackStore ◄─ POST /v1/feedback
                                    │ worker thread: judge → decide → (review) → batch
                                    ▼
                                RolloutStore → trainer

An answer is its own group with the advantage that a running mean gives it. Whole batches are
handed over, at most `max_updates_per_hour` of them.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace

from fastapi import Request as HTTPRequest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mlx_parallm.config.data import ONLINE_KTO
from mlx_parallm.errors import ConfigError, RolloutRejectedError, StoreError
from mlx_parallm.rl_training.sources import (
    POLICY,
    RolloutSource,
    Served,
    SourceContext,
    policy_inference,
)
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.payload import decode_group
from mlx_parallm.run_files.trainer_state import TrainerState
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.server.context import ServerDeps
from mlx_parallm.server.metrics import PREFIX
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread
from mlx_parallm.systems.feedback.config import FeedbackConfig
from mlx_parallm.systems.feedback.consent import Agreement
from mlx_parallm.systems.feedback.follow_ups import ConversationReader
from mlx_parallm.systems.feedback.judge import JudgeFailedError, reply_judge
from mlx_parallm.systems.feedback.observer import ENVIRONMENT, ChatObserver
from mlx_parallm.systems.feedback.routes import CHAT_PATHS, FeedbackRoutes
from mlx_parallm.systems.feedback.signals import releasable
from mlx_parallm.systems.feedback.store import (
    AMBIGUOUS,
    FEEDBACK_FILE,
    HOUR_S,
    NOBODY_JUDGES,
    FeedbackStore,
    KeptAnswer,
    ReadyAnswer,
)
from mlx_parallm.systems.traces.privacy import secret_finder
from mlx_parallm.types import Request, RolloutGroup

LONGEST_WAIT_S = 60.0  # between two looks, if nothing is known to be due
RETRY_S = 10.0
TRIES = 3  # when a judge does not answer
NO_CONSENT = "no consent"
LOST = "it could not be written"
ASKED = frozenset(
    ("/v1/chat/completions", "/v1/chat/completions/tokens", "/v1/responses", "/v1/messages")
)
"""Paths whose POST is a chat."""
JOIN_S = 5.0

log = get_logger("feedback")


def refuse_to_serve(config: FeedbackConfig, deps: ServerDeps) -> None:
    """Bring no routes. Raises ConfigError: a server that trains nothing cannot learn."""
    if config.enabled:
        raise ConfigError(
            "feedback.enabled = true learns from chats: it is for `mlx_parallm train`, and a server"
            " of `mlx_parallm serve` trains nothing"
        )


def feedback_source(context: SourceContext) -> "FeedbackSource | None":
    """Return the source; None: it is off. Raises ConfigError: keys, the judge."""
    config = context.config
    if not config.section(FeedbackConfig).enabled:
        return None
    return FeedbackSource(context)


class FeedbackSource(RolloutSource):
    """Answers of chats with the rewards that people's doing gives them."""

    name = ENVIRONMENT

    def __init__(self, context: SourceContext) -> None:
        config, section = context.config, context.config.section(FeedbackConfig)
        self._context, self._section = context, section
        context.group_sizes.append(1)
        self._by_sign = config.rl_training.algorithm == ONLINE_KTO
        self._decay = None if self._by_sign else section.baseline_decay
        self._store = FeedbackStore(
            context.directory / FEEDBACK_FILE,
            settle_s=section.settle_s,
            weights=section.rewards.model_dump(),
            most_per_hour=section.max_answers_per_hour,
        )
        self._agreement, self._judge = Agreement(section), reply_judge(section)
        owner = config.resolve_api_key()
        if owner is not None and (name := self._agreement.keys.get(owner)) is not None:
            raise ConfigError(
                f"feedback.keys_file: {section.keys_file}: the key of {name!r} is the server's own,"
                " which opens everything"
            )
        finder = (
            secret_finder([owner, *self._agreement.keys], personal=section.redact_personal)
            if section.redact
            else None
        )
        self._reader = ConversationReader(
            self._store,
            finder,
            judges=self._judge is not None,
            regenerate_within_s=section.regenerate_within_s,
        )
        self._without_consent = self._lost = 0
        self._lost_at, self._lost_why = 0.0, ""
        self._lost_lock = threading.Lock()
        # judge's failures by answer and reply: how many, and when to ask again
        self._failures: dict[tuple[str, str], tuple[int, float]] = {}
        self._problem: str | None = None
        self._thread = LoopThread(ENVIRONMENT)
        self._worker: Future[None] | None = None
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        routes = FeedbackRoutes(
            self._store,
            self._agreement,
            self._reader,
            review=section.review,
            decay=self._decay,
            heard=self.heard,
            more=self._numbers,
        )
        self.router = AddedRouter(
            routes.router,
            observe=self._observe,
            metrics=self._metrics,
            user_keys=tuple(self._agreement.keys),
            user_paths=CHAT_PATHS,
            close=self._store.close,
        )

    # ------------------------------------------------------------------ the server's thread

    def _observe(self, request: HTTPRequest) -> ChatObserver | None:
        consent = self._agreement.of(request)
        if consent is None:
            self._without_consent += request.method == "POST" and request.url.path in ASKED
            return None
        return ChatObserver(
            self._store,
            self._reader,
            consent,
            is_policy=self._is_policy,
            heard=self.heard,
            lost=self._note_lost,
        )

    def _note_lost(self, error: StoreError) -> None:
        with self._lost_lock:  # several threads write
            self._lost += 1
        self._lost_at, self._lost_why = time.time(), str(error)
        log.warning("a chat is not learned", reason=self._lost_why)

    def _is_policy(self, request: Request) -> bool:
        lora = self._context.config.rl_training.lora.enabled
        return request.samples_from(POLICY if lora else None)

    def heard(self) -> None:
        """Wake the worker: something new was written. From any thread."""
        loop, wake = self._loop, self._wake
        if loop is not None and wake is not None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(wake.set)

    # ------------------------------------------------------------------ the trainer's thread

    def start(self, served: Served, state: TrainerState | None) -> None:
        config = self._context.config
        if self._judge is not None:
            self._judge.attach(
                policy_inference(
                    served,
                    lora=config.rl_training.lora.enabled,
                    template_kwargs=config.model.chat_template_kwargs,
                )
            )
        self._worker = self._thread.submit(self._work())

    def health(self) -> str | None:
        if time.time() - self._lost_at < LONGEST_WAIT_S:
            return f"chats are not learned: {self._lost_why}"
        return self._problem

    def check(self) -> None:
        if self._worker is not None and self._worker.done() and not self._worker.cancelled():
            self._worker.result()

    def stop(self) -> None:
        self._thread.stop(self._judge.aclose if self._judge is not None else None, JOIN_S)

    # ------------------------------------------------------------------ the worker's thread

    async def _work(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        while True:
            self._wake.clear()
            due = await self.turn()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(due - time.time(), 0.01)):
                    await self._wake.wait()

    async def turn(self) -> float:
        """Do all that is due now; return the Unix time of the next turn."""
        again = await self._judge_replies()
        section = self._section
        await asyncio.to_thread(
            self._store.decide,
            review=section.review,
            decay=self._decay,
            keep_s=section.keep_s,
            max_answers=section.max_answers,
        )
        later = await asyncio.to_thread(self._release)
        now = time.time()
        due = [now + LONGEST_WAIT_S, again, later, self._store.next_due()]
        return min(max(each, now) for each in due if each is not None)

    async def _judge_replies(self) -> float | None:
        """Judge the replies that wait; return when to try again those that got no judgement."""
        pending = await asyncio.to_thread(self._store.pending)
        waiting = {(kept.id, kept.reply) for kept in pending}
        self._failures = {key: each for key, each in self._failures.items() if key in waiting}
        at_once = asyncio.Semaphore(self._section.judge_concurrency)

        async def judge(kept: KeptAnswer) -> None:
            async with at_once:
                await self._judge_reply(kept)

        async with asyncio.TaskGroup() as judging:
            for kept in pending:
                _, again = self._failures.get((kept.id, kept.reply), (0, 0.0))
                if again <= time.time():
                    judging.create_task(judge(kept))
        return min((again for _, again in self._failures.values()), default=None)

    async def _judge_reply(self, kept: KeptAnswer) -> None:
        key, value = (kept.id, kept.reply), None
        failures, _ = self._failures.pop(key, (0, 0.0))
        if self._judge is None:  # an earlier start of this run had one
            await asyncio.to_thread(self._store.judged, *key, None, NOBODY_JUDGES)
            return
        try:
            value = await self._judge(kept.question, kept.answer, kept.reply)
        except JudgeFailedError as error:
            self._problem = f"the judge of replies fails: {error}"
            log.warning("a reply is not judged", answer=kept.id, reason=str(error))
            if error.may_pass and failures + 1 < TRIES:
                self._failures[key] = failures + 1, time.time() + RETRY_S
            else:
                await asyncio.to_thread(self._store.judged, *key, None, "the judge failed")
            return
        self._problem = None
        is_clear = value is not None and abs(value) >= self._section.ambiguous_below and value != 0
        outcome = "taken" if is_clear else AMBIGUOUS
        await asyncio.to_thread(self._store.judged, *key, value if is_clear else None, outcome)

    def _release(self) -> float | None:
        """Hand whole batches over to the trainer; return when the next one may follow, if the
        bound on updates holds one back."""
        size, most = (
            self._context.config.rl_training.atropos.rollout_batch_size,
            self._section.max_updates_per_hour,
        )
        while len(ready := self._store.ready(size)) == size:
            now = time.time()
            window = HOUR_S if most is None or most >= 1 else HOUR_S / most
            releases = self._store.releases(now - window)
            if not releasable(1, releases, most, now):
                return min(releases) + window
            groups = [group for answer in ready if (group := self._group(answer)) is not None]
            if len(groups) < size:
                continue  # others take the places of those that were refused
            # known ids are not added again: after a kill between the two the batch comes once
            self._context.store.add_all(groups, source=self.name)
            self._store.released([answer.id for answer in ready], since=now - window)
            for listener in self._context.on_reward:
                listener()
        return None

    def _group(self, answer: ReadyAnswer) -> RolloutGroup | None:
        unscored = decode_group(answer.payload)
        [rollout] = unscored.rollouts
        group = replace(
            unscored,
            rollouts=(replace(rollout, scores={"reward": answer.reward}),),
            advantages=None if self._by_sign else (answer.advantage,),
        )
        longest = self._context.config.rl_training.atropos.max_token_length
        try:
            check_group(group, vocab_size=self._context.vocab_size, max_token_length=longest)
        except RolloutRejectedError as error:
            self._context.store.reject(group, source=self.name, reason=str(error))
            self._store.refused(answer.id, str(error))
            return None
        return group

    # ------------------------------------------------------------------ what is counted

    def _numbers(self) -> dict[str, int]:
        return {NO_CONSENT: self._without_consent} | ({LOST: self._lost} if self._lost else {})

    def _metrics(self) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            f"{PREFIX}_feedback_answers",
            "Answers of chats by what became of them, those without consent too",
            labels=["outcome"],
        )
        signals = CounterMetricFamily(
            f"{PREFIX}_feedback_signals",
            "What people said about answers, by what became of it",
            labels=["kind", "outcome"],
        )
        forgotten = CounterMetricFamily(
            f"{PREFIX}_feedback_forgotten", "Answers that were decided on, and are forgotten"
        )
        for outcome, number in self._numbers().items():
            answers.add_metric([outcome], number)
        for (what, kind, outcome), number in self._store.counts().items():
            if what == "answer":
                answers.add_metric([outcome], number)
            elif what == "signal":
                signals.add_metric([kind, outcome], number)
            else:
                forgotten.add_metric([], number)
        states = GaugeMetricFamily(
            f"{PREFIX}_feedback_answers_now", "Answers of chats by their state", labels=["state"]
        )
        for state, number in self._store.states().items():
            states.add_metric([state], number)
        yield from (answers, signals, forgotten, states)
