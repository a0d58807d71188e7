"""The scheduler alone: no MLX, no model. Plans are checked by replaying them on a list of rows."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.engine.scheduling.room import cache_room
from mlx_parallm.engine.scheduling.scheduler import AGEING_STEPS, Scheduler, SchedulerOutput
from mlx_parallm.engine.sequence import Sequence, Status
from mlx_parallm.types import SamplingParams


def sequence(
    name: str,
    prompt: tuple[int, ...],
    adapter: str | None = None,
    max_tokens: int = 10,
    priority: int = 0,
) -> Sequence:
    return Sequence(
        request_id=name,
        index=0,
        prompt=prompt,
        params=SamplingParams(),
        adapter=adapter,  # whatever it is: here its name
        max_tokens=max_tokens,
        random_stream=0,
        stop_ids=frozenset(),
        text=OutputText(lambda: None, (), include_stop=False, eager=False),  # type: ignore[arg-type,return-value]
        priority=priority,
    )


def new_scheduler(
    max_rows: int,
    prefill_chunk: int,
    max_kv_tokens: int | None = None,
    max_cached_tokens: int = 0,
    **options: bool,
) -> Scheduler:
    room = cache_room(max_kv_tokens, max_cached_tokens, **{"rewindable": True} | options)
    return Scheduler(max_rows, prefill_chunk, room)


def under(epoch: int):
    """Weights as the engine names them: by adapter, and how often they changed."""
    return lambda sequence: (sequence.adapter, epoch)


def tokens_of(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


class Rows:
    """What lies in each row of a cache: the tokens, as far as they were written there, with what
    read them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.rows: dict[int, list[int]] = {}
        self.computed = 0

    def step(self, epoch: int = 0) -> SchedulerOutput:
        plan = self.scheduler.schedule(under(epoch))
        self.carry_out(plan)
        return plan

    def carry_out(self, plan: SchedulerOutput) -> None:
        for save in plan.saves:
            save.segment.arrays = list(self.rows[save.row][save.segment.start : save.segment.stop])
            assert tuple(save.segment.arrays) == save.segment.tokens
        moved = [self.rows[move.source][: move.length] for move in plan.moves]
        for move, tokens in zip(plan.moves, moved, strict=True):
            self.rows[move.target] = list(tokens)
        for chunk in plan.prefill:
            prefill = chunk.prefill
            if not prefill.caches:
                assert {row.reused for row in prefill.rows} == {chunk.start}, (
                    "rows begin at one position"
                )
                for row in prefill.rows:
                    held = [
                        token for p in row.prefix for token in p.segment.arrays[: p.stop - p.start]
                    ]
                    assert tuple(held) == row.tokens[: row.reused]
                    prefill.caches.append(held)
            self.computed += len(prefill.rows) * (chunk.stop - chunk.start)
            for cache, row in zip(prefill.caches, prefill.rows, strict=True):
                assert len(cache) == min(chunk.start, len(row.tokens))
                cache += row.tokens[chunk.start : chunk.stop]
            for place, source in enumerate(chunk.sources):
                self.rows[chunk.first_row + place] = list(prefill.caches[source])
        for row, owner in enumerate(plan.rows):
            assert owner.row == row
            held = self.rows.setdefault(row, [])
            del held[owner.cached :]
            expected = [*owner.prompt, *owner.tokens][: owner.cached]
            assert held == expected, f"row {row} of {owner.request_id}"
            held.append(owner.next_token)
            owner.cached += 1
            owner.tokens.append(1000 + len(owner.tokens))


def newcomers(generator: random.Random, everyone: list[Sequence], step: int) -> list[Sequence]:
    """Up to three choices of a prompt that may begin as earlier ones did, or continue with what was
    answered."""
    shared = [i % 5 for i in range(generator.randrange(40))]
    length = generator.choice([1, 2, 9, 20, 45])
    prompt = tuple([*shared, *(generator.randrange(5) for _ in range(length))][:45])
    if everyone and generator.random() < 0.3:
        before = generator.choice(everyone)
        prompt = tuple([*before.prompt, *before.tokens, 7][:45])
    adapter, limit, count = (
        generator.choice([None, "a"]),
        generator.randint(1, 9),
        generator.choice([1, 1, 3]),
    )
    new = [
        sequence(f"{step}.{i}", prompt, adapter, limit, generator.choice([0, 0, 0, -1, 2]))
        for i in range(count)
    ]
    for each in new:
        each.cache_salt = generator.choice([None, None, "salt"])
    return new


def end_some(generator: random.Random, scheduler: Scheduler) -> None:
    """Who has reached its length, and now and then another: stopped, failed, or given up before
    it began."""
    for owner in scheduler.rows:
        if len(owner.tokens) >= owner.max_tokens or generator.random() < 0.02:
            owner.finish("length", error="failed" if generator.random() < 0.1 else None)
    for each in scheduler.active:
        if each.status is Status.PREFILLING and generator.random() < 0.02:
            each.finish("abort")


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    max_rows=st.integers(1, 6),
    chunk=st.sampled_from([16, 24, 100]),
    bound=st.sampled_from([120, 300, 10**6]),
    cached=st.sampled_from([0, 30, 200, 10**6]),
    rewindable=st.booleans(),
)
def test_rows_stay_dense_hold_their_tokens_and_keep_within_the_bounds(
    seed: int, max_rows: int, chunk: int, bound: int, cached: int, rewindable: bool
) -> None:
    generator = random.Random(seed)
    scheduler = new_scheduler(max_rows, chunk, bound, cached, rewindable=rewindable)
    rows, everyone = Rows(scheduler), []
    for step in range(2000):
        if step < 80 and generator.random() < 0.5:
            new = newcomers(generator, everyone, step)
            everyone += new
            scheduler.add(new)
        plan = rows.step(epoch=step // 50)
        assert len(plan.rows) <= max_rows
        assert scheduler.reserved <= bound, "no more is promised than there is"
        assert len(plan.rows) * max((s.cached for s in plan.rows), default=0) <= plan.max_row_tokens
        end_some(generator, scheduler)
        scheduler.room.prefix_cache.check_integrity()
        if step > 80 and not scheduler.has_work:
            break
    assert everyone and all(s.finished for s in everyone)
    assert scheduler.room.prefix_cache.hit_tokens == 0 or (cached and rewindable)


def test_first_come_first_served():
    scheduler = new_scheduler(max_rows=2, prefill_chunk=64)
    order = [sequence(str(i), (i, i + 1)) for i in range(6)]
    scheduler.add(order)
    started = []
    for _ in range(20):
        for owner in scheduler.schedule(under(0)).rows:
            if owner not in started:
                started.append(owner)
            owner.finish("length")
    assert started == order


def test_lower_priority_values_go_first_and_nobody_waits_for_ever():
    """A stream of urgent requests keeps the only row busy; one level of priority is worth
    AGEING_STEPS steps."""
    scheduler = new_scheduler(max_rows=1, prefill_chunk=64)
    patient = sequence("patient", (1, 2), priority=1)
    scheduler.add([sequence("first", (9,)), patient, sequence("urgent", (3, 4), priority=-1)])
    order = []
    for step in range(2 * AGEING_STEPS):
        [owner] = scheduler.schedule(under(0)).rows
        owner.finish("length")
        order.append(owner.request_id)
        if owner is patient:
            break
        scheduler.add([sequence(str(step), (5, 6))])
    assert order[:2] == ["urgent", "first"], "the queue was empty when these came"
    assert order[-1] == "patient" and AGEING_STEPS <= len(order) <= AGEING_STEPS + 2


def test_a_batch_of_prompts_stays_within_the_chunk():
    scheduler = new_scheduler(max_rows=16, prefill_chunk=100)
    scheduler.add([sequence(str(i), tokens_of(i, 31)) for i in range(5)])  # 30 positions each
    first = scheduler.schedule(under(0))
    [chunk] = first.prefill
    assert [len(row.tokens) for row in chunk.prefill.rows] == [30, 30, 30]
    assert len(first.rows) == 3 and first.prefilled_tokens == 93
    assert len(scheduler.schedule(under(0)).rows) == 5


def test_a_long_prompt_goes_by_chunks_that_are_smaller_while_rows_decode():
    scheduler = new_scheduler(max_rows=4, prefill_chunk=64)
    scheduler.add([sequence("long", tokens_of(0, 200))])
    assert scheduler.schedule(under(0)).prefill[0].stop == 64, "nobody decodes"
    scheduler.add([sequence(str(i), (1, i)) for i in range(3)])
    plan = scheduler.schedule(under(0))
    assert [len(chunk.prefill.rows) for chunk in plan.prefill] == [3] and len(plan.rows) == 3
    chunks = []
    while scheduler.prefills:
        plan = scheduler.schedule(under(0))
        chunks.append((plan.prefill[0].start, plan.prefill[0].stop, len(plan.rows)))
    assert chunks[:2] == [(64, 80, 3), (80, 96, 3)] and chunks[-1][1:] == (199, 4)


def test_a_short_prompt_does_not_wait_for_a_long_one_and_the_long_one_ends():
    scheduler = new_scheduler(max_rows=8, prefill_chunk=64)
    long = sequence("long", tokens_of(0, 4000), max_tokens=1)
    scheduler.add([long])
    scheduler.schedule(under(0))
    waits = []
    for step in range(2000):
        short = sequence(f"short {step}", (step, *tokens_of(0, 31)), max_tokens=1)
        scheduler.add([short])
        wait = 0
        while not short.finished:
            wait += 1
            for owner in scheduler.schedule(under(0)).rows:
                owner.finish("length")
        waits.append(wait)
        if long.finished:
            break
    assert waits[0] == 1 and max(waits) <= 2, "at most one chunk of the long prompt comes between"
    assert long.finished, "and short ones cannot hold it up for ever"


def test_identical_prompts_share_one_prefill_row_also_one_under_way():
    scheduler = new_scheduler(max_rows=8, prefill_chunk=16)
    prompt = tokens_of(0, 40)
    scheduler.add([sequence("a", prompt), sequence("b", prompt)])
    scheduler.schedule(under(0))
    scheduler.add([sequence("late", prompt), sequence("adapter", prompt, adapter="x")])
    finished = []
    for _ in range(9):
        plan = scheduler.schedule(under(0))
        finished += [
            (chunk.sources, plan.prefilled_tokens) for chunk in plan.prefill if chunk.sources
        ]
    assert finished == [([0, 0, 0], 40), ([0], 40)], "another adapter is another prefix"


def test_a_known_prefix_is_not_computed_again():
    scheduler = new_scheduler(max_rows=8, prefill_chunk=64, max_cached_tokens=1000)
    rows = Rows(scheduler)
    first = sequence("first", tokens_of(0, 30), max_tokens=5)
    scheduler.add([first])
    while not first.finished:
        rows.step()
        if len(first.tokens) == 5:
            first.finish("length")
    rows.step()
    assert rows.computed == 29
    turn = (*first.prompt, *first.tokens, 7, 8, 9)
    scheduler.add(
        [
            sequence("next", turn),
            sequence("same", first.prompt),
            sequence("other", tokens_of(1, 30)),
        ]
    )
    plan = rows.step()
    # 34 of the next turn are known (the newest token was never fed), so 3 are new; "same" is all
    # known
    assert rows.computed == 29 + 3 + 29
    assert plan.prefilled_tokens == 4 + 30
    assert [s.cached_prompt_tokens for s in plan.rows if s.request_id == "next"] == [34]
    assert (scheduler.room.prefix_cache.hit_tokens, scheduler.room.prefix_cache.query_tokens) == (
        34 + 29,
        30 + 38 + 30 + 30,
    )


def test_no_prefix_goes_to_other_weights_another_adapter_or_another_salt():
    scheduler = new_scheduler(max_rows=8, prefill_chunk=64, max_cached_tokens=1000)
    rows = Rows(scheduler)
    prompt = tokens_of(0, 9)
    old, late = sequence("old", prompt), sequence("late", prompt)
    scheduler.add([old])
    rows.step()
    rows.step()  # the prompt has gone into the cache
    scheduler.add([late])
    assert rows.step().prefilled_tokens == 0
    others = [sequence("adapter", prompt, adapter="x"), sequence("salt", prompt)]
    others[1].cache_salt = "mine"
    scheduler.add(others)
    assert rows.step().prefilled_tokens == 18
    scheduler.add([sequence("new", prompt)])
    old.finish("length")
    assert rows.step(epoch=1).prefilled_tokens == 9, (
        "what old weights read is not stored under new ones either"
    )


def test_a_row_that_failed_and_a_measured_prompt_feed_no_prefix():
    scheduler = new_scheduler(max_rows=2, prefill_chunk=64, max_cached_tokens=1000)
    rows = Rows(scheduler)
    prompt = tokens_of(0, 9)
    failed, measured = sequence("failed", prompt), sequence("measured", tokens_of(20, 9))
    measured.params = SamplingParams(prompt_logprobs=0)
    scheduler.add([failed, measured])
    rows.step()
    failed.finish("error", error="not finite")
    measured.finish("length")
    scheduler.add([sequence("second", prompt), sequence("third", measured.prompt)])
    assert rows.step().prefilled_tokens == 18


def test_the_bound_on_cache_tokens_holds_admissions_back():
    scheduler = new_scheduler(max_rows=8, prefill_chunk=64, max_kv_tokens=100)
    scheduler.add([sequence(str(i), (i,), max_tokens=29) for i in range(8)])  # 30 positions each
    plan = scheduler.schedule(under(0))
    assert len(plan.rows) == 3
    plan.rows[0].finish("length")
    assert len(scheduler.schedule(under(0)).rows) == 3
    prompts = new_scheduler(max_rows=8, prefill_chunk=64, max_kv_tokens=100)
    # and 20 while it is computed
    prompts.add([sequence(str(i), tokens_of(i, 21), max_tokens=9) for i in range(8)])
    assert len(prompts.schedule(under(0)).rows) == 2
    assert len(prompts.schedule(under(0)).rows) == 2, (
        "a third would need 20 more while its prompt is computed"
    )


def test_a_text_that_is_scored_waits_for_its_place_and_keeps_it():
    scheduler = new_scheduler(max_rows=8, prefill_chunk=64, max_kv_tokens=100)
    scheduler.add([sequence(str(i), (i,), max_tokens=29) for i in range(8)])  # 30 positions each
    running = scheduler.schedule(under(0)).rows
    scheduler.room.beside = 50
    assert not scheduler.has_room_beside, "90 and 50"
    running[0].finish("length")
    assert len(scheduler.schedule(under(0)).rows) == 2, "nobody takes the place that became free"
    assert not scheduler.has_room_beside, "60 and 50"
    running[1].finish("length")
    assert len(scheduler.schedule(under(0)).rows) == 1 and scheduler.has_room_beside
    scheduler.room.beside = 0
    assert len(scheduler.schedule(under(0)).rows) == 3


def test_pausing_admits_nobody_and_forget_rows_loses_the_active():
    scheduler = new_scheduler(max_rows=2, prefill_chunk=16)
    scheduler.add([sequence("a", (1,)), sequence("b", tokens_of(0, 60)), sequence("c", (3,))])
    scheduler.schedule(under(0))
    scheduler.paused = True
    assert len(scheduler.schedule(under(0)).rows) == 1
    assert {s.request_id for s in scheduler.forget_rows()} == {"a", "b"}
    assert [s.status for s in scheduler.waiting] == [Status.WAITING]
    assert not scheduler.has_work, "paused, and nothing runs"
