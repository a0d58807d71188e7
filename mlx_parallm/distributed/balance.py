"""The engine of rank 0's server when there are several ranks: hands each request to the engine that
has least to do.

    server routes → BalancedClient ┬→ rank 0's engine
                                   └→ RankEngine of rank 1, … (requests.py)

A request goes to rank 0 where only rank 0 can run it: under an adapter that was loaded there, or a
version of the policy that is kept there (`policy@N`).
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitedTooLong
from dataclasses import asdict, fields, replace
from multiprocessing.connection import Connection
from typing import Any

from mlx_parallm.distributed.requests import (
    IDLE_WAIT_S,
    AwaitIdle,
    Order,
    PauseAdmission,
    RankEngine,
    ResetPrefixCache,
    ResumeAdmission,
)
from mlx_parallm.engine.client import TRAINER, EngineClient, Letters, Mailbox
from mlx_parallm.engine.live_requests import Failed
from mlx_parallm.engine.prefix_disk.disk import Clearing
from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.types import EngineStats, Request

PIECE = 64  # tokens: shorter prompts are computed again sooner than they are looked for
# a running choice more costs as much as this many prompt tokens that must be computed
CHOICE_TOKENS = 256
MOST_PIECES = 1 << 16
ANSWER_S = 1.0  # allowed for the answer to an order, beside its work
NOT_ADDED = {  # of EngineStats: what the ranks have together, or each by itself
    "alive",
    "ready",
    "last_step_time",
    "policy_version",
    "error",
    "prefix_disk_stuck_files",
    "prefix_disk_used_bytes",
    "kv_layout",
    "step_seconds",
    "holders",
}
ADDED = [field.name for field in fields(EngineStats) if field.name not in NOT_ADDED]


class BalancedClient(EngineClient):
    """`EngineClient` over the engines of all ranks. What it lacks rank 0's engine
    does.

    Args:
        local: rank 0's engine.
        connections: to ranks 1, 2, …, for their requests.
        keeps_prompts: the engines have a prefix cache.
    """

    def __init__(
        self, local: EngineClient, connections: Sequence[Connection], *, keeps_prompts: bool
    ) -> None:
        super().__init__(local.queue, local.stats)
        self._others = [
            RankEngine(each, rank, self._give_back) for rank, each in enumerate(connections, 1)
        ]
        self._prompts = PromptRanks() if keeps_prompts else None

    @property
    def engines(self) -> int:
        return 1 + sum(engine.serves(None) for engine in self._others)

    def hand_in(self, letters: Letters) -> None:
        shares: dict[int, Letters] = {}
        taken: Counter[int] = Counter()  # choices of these letters, by rank
        for request, mailbox in letters:
            rank = self._choose(request, taken)
            taken[rank] += request.params.n
            shares[rank] = (*shares.get(rank, ()), (request, mailbox))
        # rank 0 first: when it refuses, no other has its share
        for rank, share in sorted(shares.items()):
            if rank:
                self._others[rank - 1].hand_in(share)
            else:
                super().hand_in(share)

    def _choose(self, request: Request, taken: Mapping[int, int]) -> int:
        loads = {0: self.queue.unfinished + taken[0]}
        for engine in self._others:
            if engine.serves(request.adapter):
                loads[engine.rank] = engine.unfinished + taken[engine.rank]
        if len(loads) == 1:
            return 0
        if self._prompts is None:
            return min(loads, key=lambda rank: (loads[rank], rank))
        version = next(
            (model.policy_version for model in self.models() if model.adapter == request.adapter), 0
        )
        beginnings = _beginnings(request, version)
        held = self._prompts.held(beginnings)
        rank = min(loads, key=lambda rank: (loads[rank] * CHOICE_TOKENS - held[rank], rank))
        self._prompts.add(beginnings, rank)
        return rank

    def _give_back(self, engine: RankEngine, letters: Letters) -> None:
        for request, mailbox in letters:
            try:
                mailbox.loop.call_soon_threadsafe(self._run_here, engine, request, mailbox)
            except RuntimeError:  # the loop has ended, so no caller waits
                engine.released(request.request_id)

    def _run_here(self, engine: RankEngine, request: Request, mailbox: Mailbox) -> None:
        aborted = engine.released(request.request_id)
        if mailbox.result.done():  # the caller has gone meanwhile
            return
        try:
            super().hand_in(((request, mailbox),))
            if aborted:  # before its first step
                super().abort(request.request_id)
        except EngineUnavailableError as error:
            mailbox.deliver(Failed(mailbox.request_id, error))

    def abort(self, request_id: str) -> None:
        if not any(engine.abort(request_id) for engine in self._others):
            super().abort(request_id)

    # What concerns every engine.

    def pause_admission(self, holder: str = TRAINER, *, freeze: bool = False) -> "Future[Any]":
        return self._everywhere(
            super().pause_admission(holder, freeze=freeze), PauseAdmission(holder, freeze)
        )

    def resume_admission(self, holder: str = TRAINER) -> "Future[Any]":
        return self._everywhere(super().resume_admission(holder), ResumeAdmission(holder))

    def reset_prefix_cache(self) -> "Future[Clearing]":
        if self._prompts is not None:
            self._prompts.clear()
        others = [engine.carry_out(ResetPrefixCache()) for engine in self._others]
        emptied: Future[Clearing] = Future()

        def settle(here: "Future[Clearing]") -> None:
            if not emptied.set_running_or_notify_cancel():
                return  # the caller has gone
            if error := here.exception():
                emptied.set_exception(error)
            elif all(each.result() for each in others):
                emptied.set_result(here.result())
            else:
                left = Clearing()
                left.set_result("another rank's log says why")
                emptied.set_result(left)

        all_done([super().reset_prefix_cache(), *others]).add_done_callback(settle)
        return emptied

    def _everywhere(self, here: "Future[Any]", order: Order) -> "Future[Any]":
        return all_done([here, *(engine.carry_out(order) for engine in self._others)])

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Waits as `EngineClient` does; False too when another rank was not idle for
        IDLE_WAIT_S, or is silent."""
        others = [engine.carry_out(AwaitIdle()) for engine in self._others]
        try:
            return super().wait_idle(timeout_s) and all(
                each.result(IDLE_WAIT_S + ANSWER_S) for each in others
            )
        except WaitedTooLong:
            return False

    def stats(self) -> EngineStats:
        """Returns rank 0's, with the sums over all ranks if a number can be added."""
        return summed(list(self.rank_stats().values()))

    def rank_stats(self) -> Mapping[int, EngineStats]:
        others = {engine.rank: engine.stats for engine in self._others}
        return {
            0: self._stats(),
            **{rank: stats for rank, stats in others.items() if stats is not None},
        }


class PromptRanks:
    """Which ranks have read the beginnings of recent prompts: their prefix caches may hold them.
    One thread."""

    def __init__(self) -> None:
        # by the hash of a beginning; the newest last
        self._ranks: OrderedDict[int, frozenset[int]] = OrderedDict()

    def held(self, beginnings: Sequence[int]) -> Counter[int]:
        """Returns how many tokens of the prompt each rank has read."""
        held: Counter[int] = Counter()
        for number, key in enumerate(beginnings, 1):
            ranks = self._ranks.get(key)
            if not ranks:
                break
            held.update(
                dict.fromkeys((rank for rank in ranks if held[rank] == (number - 1) * PIECE), PIECE)
            )
        return held

    def add(self, beginnings: Sequence[int], rank: int) -> None:
        for key in beginnings:
            self._ranks[key] = self._ranks.get(key, frozenset()) | {rank}
            self._ranks.move_to_end(key)
        while len(self._ranks) > MOST_PIECES:
            self._ranks.popitem(last=False)

    def clear(self) -> None:
        self._ranks.clear()


def _beginnings(request: Request, version: int) -> list[int]:
    """Hashes of the prompt's first PIECE tokens, of its first 2 PIECE tokens, … as these weights
    and this salt read them."""
    prompt, keys = request.prompt_token_ids, list[int]()
    key = hash((request.adapter, version, request.cache_salt))
    for end in range(PIECE, len(prompt) + 1, PIECE):
        key = hash((key, prompt[end - PIECE : end]))
        keys.append(key)
    return keys


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Return the first, with the sums of all numbers that can be added, and the last step of the
    engine that has work and has stalled for longest."""
    rows = [asdict(each) for each in stats]
    sums: dict[str, Any] = {name: sum(row[name] for row in rows) for name in ADDED}
    parts = rows[0]["step_seconds"]
    seconds = {part: sum(row["step_seconds"].get(part, 0.0) for row in rows) for part in parts}
    last = min(
        (each.last_step_time for each in stats if each.running or each.waiting),
        default=stats[0].last_step_time,
    )
    return replace(stats[0], **sums, step_seconds=seconds, last_step_time=last)


def all_done(futures: Sequence["Future[Any]"]) -> "Future[Any]":
    """Return a future with the first one's outcome, which is there when all are done."""
    done: Future[Any] = Future()
    left = iter(futures)

    def wait(_: object = None) -> None:
        following = next(left, None)
        if following is not None:
            following.add_done_callback(wait)
        elif done.set_running_or_notify_cancel():
            if error := futures[0].exception():
                done.set_exception(error)
            else:
                done.set_result(futures[0].result())

    wait()
    return done
