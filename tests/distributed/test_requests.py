"""Clients of rank 0's server, answered by two real engines over a real connection, in one
process."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import openai
import pytest

from mlx_parallm.distributed import balance, heartbeat
from mlx_parallm.distributed import requests as protocol
from mlx_parallm.distributed.balance import (
    CHOICE_TOKENS,
    MOST_PIECES,
    PIECE,
    BalancedClient,
    _beginnings,
    all_done,
    summed,
)
from mlx_parallm.distributed.heartbeat import RankHeartbeat
from mlx_parallm.distributed.players import hang_up
from mlx_parallm.distributed.requests import (
    Done,
    Events,
    Numbered,
    RankLoad,
    RankReady,
    RankRequestWorker,
    Refused,
    ResetPrefixCache,
    ResumeAdmission,
    RunRequests,
)
from mlx_parallm.engine.client import CLIENTS, Abort, CommandQueue, Letters, Mailbox
from mlx_parallm.engine.live_requests import Finished
from mlx_parallm.engine.prefix_disk.disk import Clearing
from mlx_parallm.errors import EngineUnavailableError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import EngineStats, Request, RequestOutput, SamplingParams, ServedModel
from tests.conftest import TINY_CONTEXT, TinyEngine, running_tiny_engine
from tests.server.fake_engine import HEALTHY
from tests.server.serving import RunningServer, running_server
from tests.waiting import until

SECOND = 1000  # the version that rank 1 serves
LONG = {"ignore_eos": True, "return_token_ids": True}


@dataclass
class Ranks:
    engines: tuple[TinyEngine, TinyEngine]
    balanced: BalancedClient
    server: RunningServer
    own: Connection  # rank 0's end

    def busy(self) -> list[int]:
        return [each.client.stats().running + each.client.stats().waiting for each in self.engines]


@contextmanager
def two_ranks(first: TinyEngine, second: TinyEngine, tokenizer: Tokenizer) -> Iterator[Ranks]:
    own, others = Pipe()
    with ExitStack() as closing:
        closing.callback(RankRequestWorker(others, second.client).close)
        closing.callback(hang_up, own)
        balanced = BalancedClient(first.client, [own], keeps_prompts=True)
        until(lambda: balanced.engines == 2)
        until(lambda: 1 in balanced.rank_stats())
        server = closing.enter_context(running_server(balanced, tokenizer))
        yield Ranks((first, second), balanced, server, own)


@pytest.fixture(scope="module")
def second() -> Iterator[TinyEngine]:
    with running_tiny_engine(TINY_CONTEXT) as engine:
        # the same numbers: an answer shows whose it is
        engine.weights.publish_parameters({}, version=SECOND)
        yield engine


@pytest.fixture
def ranks(
    tiny_engine: TinyEngine, second: TinyEngine, tiny_tokenizer: Tokenizer
) -> Iterator[Ranks]:
    with two_ranks(tiny_engine, second, tiny_tokenizer) as ranks:
        yield ranks
        until(lambda: ranks.busy() == [0, 0])


def completion(client: openai.OpenAI, **fields: Any) -> Any:
    body = {
        "model": "default",
        "prompt": "a",
        "max_tokens": 8,
        "temperature": 1.0,
        "seed": 1,
    } | fields
    return client.completions.create(**body, extra_body=LONG)


def versions(answer: Any) -> set[int]:
    return {span["version"] for choice in answer.choices for span in choice.weight_versions}


def test_requests_are_spread_and_paused_together_and_answered_as_by_one_engine(
    ranks: Ranks,
) -> None:
    old = ranks.engines[0].weights.version
    with (
        ranks.server.openai() as client,
        ranks.server.http() as http,
        ThreadPoolExecutor(8) as pool,
    ):
        alone = [completion(client, seed=seed, logprobs=1) for seed in range(6)]
        assert {version for answer in alone for version in versions(answer)} == {old}, (
            "one after the other: rank 0"
        )
        assert http.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
        answers = [pool.submit(completion, client, seed=seed, logprobs=1) for seed in range(6)]
        until(lambda: ranks.busy() == [3, 3])
        before = [each.client.stats().generation_tokens for each in ranks.engines]
        for each in ranks.engines:
            assert each.client.stats().holders == (CLIENTS,)
            assert each.client.call(lambda engine: engine.has_work).result(20) is False, (
                "it has stalled"
            )
        until(lambda: "mlx_parallm_requests_waiting 6.0" in http.get("/metrics").text)
        text = http.get("/metrics").text
        assert 'mlx_parallm_rank_waiting{rank="1"} 3.0' in text
        assert f"mlx_parallm_generation_tokens_total {float(sum(before))}" in text
        assert f'mlx_parallm_rank_generation_tokens_total{{rank="0"}} {float(before[0])}' in text
        assert http.post("/resume").json() == {"status": "resumed"}
        spread = [answer.result(60) for answer in answers]
        assert sorted(min(versions(answer)) for answer in spread) == [old] * 3 + [SECOND] * 3
        for ours, theirs in zip(spread, alone, strict=True):
            assert ours.choices[0].token_ids == theirs.choices[0].token_ids
            assert ours.choices[0].logprobs.token_logprobs == pytest.approx(
                theirs.choices[0].logprobs.token_logprobs, abs=1e-4
            )
            assert ours.usage == theirs.usage
        assert all(not each.client.stats().holders for each in ranks.engines)


@contextmanager
def busy_first(ranks: Ranks) -> Iterator[None]:
    """Rank 0 has a choice more than rank 1, which has stalled: what comes goes to rank 1."""
    first = ranks.engines[0].client
    first.pause_admission().result(20)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    params = SamplingParams(max_tokens=1, n=8)
    waiting = asyncio.run_coroutine_threadsafe(
        first.generate(Request("busy", (5, 6), params)), loop
    )
    until(lambda: first.queue.unfinished == 8)
    try:
        yield
    finally:
        first.resume_admission().result(20)
        waiting.result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_everything_a_client_can_ask_works_on_another_rank(ranks: Ranks) -> None:
    counters = ranks.engines[1].client.stats
    with busy_first(ranks), ranks.server.openai() as client, ranks.server.http() as http:
        whole = completion(client, n=2)
        assert (
            versions(whole) == {SECOND} and whole.choices[0].token_ids != whole.choices[1].token_ids
        )
        chunks = [*completion(client, stream=True)]
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == whole.choices[
            0
        ].token_ids
        assert chunks[-1].policy_version == SECOND
        chat = client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": "a"}], max_tokens=8,
            response_format={"type": "json_schema", "json_schema": {"name": "b", "schema": {"enum": [True]}}},
        )  # fmt: skip
        assert chat.choices[0].message.content == "true"
        assert client.responses.create(model="default", input="a", max_output_tokens=4).output
        scored = completion(client, prompt="ab", max_tokens=0, echo=True, logprobs=0)
        assert len(scored.choices[0].logprobs.token_logprobs) >= 2
        assert (
            http.post("/v1/embeddings", json={"model": "default", "input": "ab"}).status_code == 200
        )
        with pytest.raises(openai.BadRequestError):
            completion(client, max_tokens=TINY_CONTEXT + 1)
        prompt = "ab" * 64
        hits = list[int]()
        for kept in (False, True, False):
            before = counters().prefix_cache_hit_tokens
            if not kept:
                assert http.post("/reset_prefix_cache").json() == {"success": True}
            completion(client, prompt=prompt)
            hits.append(counters().prefix_cache_hit_tokens - before)
        assert hits[1] > hits[0] == hits[2] == 0
        aborted = counters().requests_aborted
        stream = completion(client, stream=True, max_tokens=200)
        next(iter(stream))
        stream.close()  # the client has gone
        until(lambda: counters().requests_aborted == aborted + 1)
        stream = completion(client, stream=True, max_tokens=200)
        next(iter(stream))
        assert http.post("/abort_requests").json()["aborted"] == 1
        assert [*stream][-1].choices[0].finish_reason == "abort"
        assert ranks.engines[0].client.stats().running == 0, "all of it was rank 1"


def test_a_rank_that_is_lost_ends_no_request_that_nobody_has_seen(
    tiny_engine: TinyEngine, second: TinyEngine, tiny_tokenizer: Tokenizer
) -> None:
    with ExitStack() as stack:
        ranks = stack.enter_context(two_ranks(tiny_engine, second, tiny_tokenizer))
        pool, client = (
            stack.enter_context(ThreadPoolExecutor(4)),
            stack.enter_context(ranks.server.openai()),
        )
        alone = completion(client)
        with busy_first(ranks):
            stream = completion(client, stream=True, max_tokens=200)
            next(iter(stream))
            second.client.pause_admission("test").result(20)
            unseen = pool.submit(completion, client)
            until(lambda: second.client.stats().waiting == 1)
            paused = ranks.balanced.pause_admission(CLIENTS)
            hang_up(ranks.own)
            with pytest.raises(openai.APIError, match="rank 1"):
                list(stream)
            paused.result(20)
            ranks.balanced.resume_admission(CLIENTS).result(20)
            until(lambda: ranks.balanced.engines == 1)
        assert unseen.result(60).choices[0].token_ids == alone.choices[0].token_ids
        assert versions(unseen.result()) == {tiny_engine.weights.version}
        assert versions(completion(client)) == {tiny_engine.weights.version}
    second.client.resume_admission("test").result(20)
    until(lambda: second.client.queue.unfinished == 0)  # nobody waits for what it had begun


class Other:
    """A `BalancedClient` whose rank 1 is the test."""

    def __init__(self, local: TinyEngine, *, keeps_prompts: bool = True) -> None:
        own, self.end = Pipe()
        self.balanced = BalancedClient(local.client, [own], keeps_prompts=keeps_prompts)
        self.end.send(RankReady(frozenset({None, "policy"})))
        until(lambda: self.balanced.engines == 2)

    def load(self, others: int) -> None:
        self.end.send(RankLoad(replace(HEALTHY, running=others), others, 0.0))
        until(
            lambda: (
                self.balanced.rank_stats().get(1, HEALTHY).running == others
                and 1 in self.balanced.rank_stats()
            )
        )

    @contextmanager
    def busy(self, choices: int) -> Iterator[None]:
        """Rank 0 has more to do."""
        self.balanced.queue.count(choices)
        try:
            yield
        finally:
            self.balanced.queue.count(-choices)

    def rank_of(self, request: Request) -> int:
        return self.balanced._choose(request, Counter())


@pytest.fixture
def other(tiny_engine: TinyEngine) -> Iterator[Other]:
    other = Other(tiny_engine)
    yield other
    other.end.close()


def asked(
    prompt: Sequence[int] = (5, 6), name: str = "a", adapter: str | None = None, **params: Any
) -> Request:
    return Request(
        name,
        tuple(prompt),
        SamplingParams(temperature=0.0, max_tokens=3, **params),
        adapter=adapter,
    )


def test_requests_go_where_least_runs_and_where_their_prompt_has_been_read(other: Other) -> None:
    assert other.rank_of(asked()) == 0
    other.load(2)
    history = tuple(range(4 * CHOICE_TOKENS))
    assert other.rank_of(asked(history)) == 0
    other.load(0)
    with other.busy(4):
        assert other.rank_of(asked()) == 1
        assert other.rank_of(asked(adapter="policy")) == 1
        for adapter in ("loaded", "policy@3"):
            assert other.rank_of(asked(adapter=adapter)) == 0, "only rank 0 has it"
        assert other.rank_of(asked((*history, 1))) == 0, "its beginning is there"
        assert other.rank_of(asked((*history, 1), adapter="policy")) == 1, (
            "under other weights it is not"
        )
        assert other.rank_of(asked((7, *history))) == 1
        assert other.rank_of(asked((*history[: 3 * CHOICE_TOKENS], 1))) == 1, "too little of it"
        kept = other.balanced._prompts
        assert kept is not None
        most = [asked((number, *range(PIECE * 8))) for number in range(MOST_PIECES // 8)]
        for each in most:
            kept.add(_beginnings(each, 0), 1)
        assert other.rank_of(asked((*history, 1))) == 1, "the oldest are forgotten"
        assert len(kept._ranks) == MOST_PIECES


async def test_what_a_rank_refuses_runs_here_and_what_is_given_up_is_aborted_there(
    other: Other,
) -> None:
    alone = await other.balanced.generate(asked())
    with other.busy(9):
        refused, given_up = (
            asyncio.create_task(
                other.balanced.generate_many([asked(name=name, n=n) for name in names])
            )
            for names, n in (("ab", 1), ("c", 3))
        )
        first = await asyncio.to_thread(other.end.recv)
        assert [request.request_id for request in first.requests] == ["a", "b"]
        assert [
            request.request_id for request in (await asyncio.to_thread(other.end.recv)).requests
        ] == ["c"]
        [there] = other.balanced._others
        assert there.unfinished == 5
        other.end.send(Refused(("a", "b"), "that is too long here"))
        outputs = await refused
        assert [output.completions[0].token_ids for output in outputs] == [
            alone.completions[0].token_ids
        ] * 2
        given_up.cancel()
        assert await asyncio.to_thread(other.end.recv) == Abort("c")
        assert there.unfinished == 3, "until it has ended there"
        other.end.send(Events((Finished("c", RequestOutput("c", (5, 6), ())),)))
        await asyncio.to_thread(until, lambda: there.unfinished == 0)


class Preparing:
    """An engine's client that a grammar keeps busy."""

    def __init__(self) -> None:
        self.queue, self.calls, self.go = CommandQueue(), list[str](), threading.Event()

    async def prepare(self, requests: Sequence[Request]) -> None:
        await asyncio.to_thread(self.go.wait)
        if requests[0].request_id == "bug":
            raise ZeroDivisionError("a bug")

    def hand_in(self, letters: Letters) -> None:
        self.calls += [f"run {request.request_id}" for request, _ in letters]

    def abort(self, request_id: str) -> None:
        self.calls.append(f"abort {request_id}")

    def resume_admission(self, holder: str) -> "Future[None]":
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset_prefix_cache(self) -> "Future[Clearing]":
        done, left = Future[Clearing](), Clearing()
        left.set_result("2 files cannot be removed")
        done.set_result(left)
        return done

    def models(self) -> tuple[ServedModel, ...]:
        return ()

    def stats(self) -> EngineStats:
        return HEALTHY


def test_an_abort_finds_a_request_that_is_still_prepared_and_a_bug_is_no_silence() -> None:
    own, others = Pipe()
    client: Any = Preparing()
    served = RankRequestWorker(others, client)
    for message in (RunRequests((asked(name="a"),)), RunRequests((asked(name="bug"),)), Abort("a")):
        own.send(message)
    own.send(Numbered(3, ResumeAdmission(CLIENTS)))
    messages = iter(own.recv, None)
    assert [type(next(messages)) for _ in range(2)] == [RankReady, RankLoad]
    answers = (message for message in messages if not isinstance(message, RankLoad))
    assert next(answers) == Done(3, True), "an order waits for no grammar"
    own.send(Numbered(4, ResetPrefixCache()))
    assert next(answers) == Done(4, False), "files are left"
    assert isinstance(next(messages), RankLoad), "also when nothing has changed"
    client.go.set()
    assert next(answers) == Refused(("bug",), "ZeroDivisionError: a bug")
    until(lambda: client.calls == ["run a", "abort a"])
    served.close()
    own.close()


def test_a_prompt_stays_with_a_rank_only_as_long_as_its_cache_may_hold_it(
    other: Other, tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = tuple(range(4 * CHOICE_TOKENS))
    others = [other, Other(tiny_engine, keeps_prompts=False)]
    for each in others:
        each.load(1)
        assert each.rank_of(asked(history)) == 0
        each.load(0)
    with other.busy(2), others[1].busy(0):
        assert [each.rank_of(asked(history)) for each in others] == [0, 1], (
            "no cache: no reason to stay"
        )
        newer = [
            replace(model, policy_version=model.policy_version + 1)
            for model in other.balanced.models()
        ]
        monkeypatch.setattr(other.balanced, "models", lambda: newer)
        assert other.rank_of(asked(history)) == 1, "under other weights"
        other.load(5)
        assert other.rank_of(asked(history)) == 1, "it has been read there since"
        for gone, said in ((False, "another rank's log says why"), (True, "")):
            left = other.balanced.reset_prefix_cache()
            order = other.end.recv()
            assert order.order == ResetPrefixCache()
            other.end.send(Done(order.number, gone))
            assert left.result(20).result(20) == said
        assert other.balanced.reset_prefix_cache().cancel(), "its client leaves"
        other.end.send(Done(other.end.recv().number, True))
        assert other.rank_of(asked(history)) == 0
    others[1].end.close()


async def test_what_was_aborted_is_not_run_by_rank_0_when_its_rank_refuses_it_or_is_lost(
    other: Other,
) -> None:
    [there] = other.balanced._others

    async def asks(name: str) -> "asyncio.Task[RequestOutput]":
        waiting = asyncio.create_task(other.balanced.generate(asked(name=name)))
        await asyncio.to_thread(other.end.recv)
        return waiting

    with other.busy(9):
        refused, given_back, lost = [await asks(name) for name in ("refused", "on its way", "lost")]
        long = replace(asked(name="left"), params=SamplingParams(max_tokens=200))
        stream = other.balanced.stream(long)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(other.end.recv)
        for name in ("refused", "lost"):
            other.balanced.abort(name)
        first.cancel()  # its client leaves
        aborts = [await asyncio.to_thread(other.end.recv) for _ in range(3)]
        assert {each.request_id for each in aborts} == {"refused", "lost", "left"}
        before = other.balanced.stats().generation_tokens
        other.end.send(Refused(("refused", "on its way"), "that is too long here"))
        # blocks this loop: nothing runs on rank 0 before the abort
        until(lambda: there.unfinished == 2)
        other.balanced.abort("on its way")
        other.end.close()
        for each in (refused, given_back, lost):
            assert [choice.finish_reason for choice in (await each).completions] == ["abort"]
        assert other.balanced.stats().generation_tokens < before + 100, (
            "nobody waits for what was left"
        )
        await asyncio.to_thread(until, lambda: not there._aborted and not there._returning)


async def test_a_rank_that_is_silent_is_given_up(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    [there] = other.balanced._others
    other.load(1)
    with other.busy(9):
        assert other.rank_of(asked()) == 1
        waiting = asyncio.create_task(other.balanced.generate(asked()))
        await asyncio.to_thread(other.end.recv)
        monkeypatch.setattr(balance, "ANSWER_S", 0.0)
        monkeypatch.setattr(balance, "IDLE_WAIT_S", 0.0)
        assert not await asyncio.to_thread(other.balanced.wait_idle, 5.0), "it does not answer"
        paused = other.balanced.pause_admission(CLIENTS)
        for looks, is_chosen in ((protocol.QUIET_LOOKS - 1, True), (protocol.QUIET_LOOKS, False)):
            there._heartbeat.silent = looks
            assert (other.rank_of(asked()) == 1) is is_chosen
            assert other.balanced.engines == 1 + is_chosen
        monkeypatch.setattr(heartbeat, "LOOK_S", 0.0)
        other.load(0)  # from now on it looks without a pause
        await asyncio.to_thread(paused.result, 20)
        other.balanced.resume_admission(CLIENTS)
        assert [choice.finish_reason for choice in (await waiting).completions] == ["length"]
        assert other.balanced.engines == 1 and there.unfinished == 0
        assert other.balanced.rank_stats()[1].steps == HEALTHY.steps, "totals do not fall"
        assert other.balanced.rank_stats()[1].running == 0


def test_a_request_that_cannot_be_sent_ends_the_connection(other: Other) -> None:
    [there] = other.balanced._others
    cannot: Any = threading.Lock()
    order = there.carry_out(cannot)
    assert order.result(20) is True, "a lost rank has nothing left to do"
    assert other.balanced.engines == 1


async def test_no_rank_runs_what_rank_0_cannot_take(tiny_engine: TinyEngine) -> None:
    other = Other(tiny_engine, keeps_prompts=False)
    other.balanced.queue = CommandQueue()
    other.balanced.queue.close("the engine is dead")
    letters = tuple((asked(name=name), Mailbox(name)) for name in "ba")
    other.balanced.queue.count(1)  # the first is rank 1's
    with pytest.raises(EngineUnavailableError):
        other.balanced.hand_in(letters)
    assert other.balanced._others[0].unfinished == 0
    other.end.close()


def test_the_engine_that_stands_still_for_longest_is_the_one_that_counts() -> None:
    works, stands = (
        replace(HEALTHY, running=1, last_step_time=9.0),
        replace(HEALTHY, waiting=1, last_step_time=2.0),
    )
    assert summed([works, stands]).last_step_time == 2.0
    assert summed([works, replace(HEALTHY, last_step_time=1.0)]).last_step_time == 9.0, (
        "it has nothing to do"
    )
    counted = replace(
        HEALTHY, draft_tokens=2, prefix_disk_dropped_bytes=3, prefix_disk_used_bytes=5
    )
    both = summed([counted, counted])
    assert (both.draft_tokens, both.prefix_disk_dropped_bytes) == (4, 6)
    assert both.prefix_disk_used_bytes == 5, "they share the directory"


def test_a_heartbeat_that_stops_is_noticed_and_one_that_goes_on_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heartbeat, "LOOK_S", 0.01)
    silent = threading.Event()
    (own, other), (alone, stopped) = Pipe(), Pipe()
    wrong = list[str]()
    heartbeats = [RankHeartbeat(end, lambda: wrong.append("it beats")) for end in (own, other)]
    RankHeartbeat(alone, silent.set)
    assert silent.wait(20) and not wrong
    for each in heartbeats:
        each.close()
    stopped.close()


def test_futures_are_done_together() -> None:
    first, second = Future[int](), Future[int]()
    both, failed = all_done([first, second]), Future[int]()
    first.set_result(5)
    assert not both.done()
    second.set_result(6)
    assert both.result(1) == 5
    failed.set_exception(EngineUnavailableError("dead"))
    with pytest.raises(EngineUnavailableError):
        all_done([failed, first]).result(1)


def test_a_request_that_is_still_prepared_when_rank_0_goes_is_aborted() -> None:
    own, others = Pipe()
    client: Any = Preparing()
    served = RankRequestWorker(others, client)
    own.send(RunRequests((asked(name="a"),)))
    until(lambda: bool(served._preparing))
    own.close()
    until(lambda: bool(served._aborted))
    client.go.set()
    until(lambda: client.calls == ["run a", "abort a"])
    served.close()
