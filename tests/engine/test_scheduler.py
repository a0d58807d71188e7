"""The scheduler alone: no MLX, no model. Plans are checked by replaying them on a list of rows."""

import random
import subprocess
import sys

from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.engine.scheduler import Plan, Scheduler
from mlx_parallm.engine.sequence import Sequence, Status
from mlx_parallm.types import SamplingParams


def sequence(name: str, prompt: tuple[int, ...], adapter: str | None = None, max_tokens: int = 10) -> Sequence:
    return Sequence(
        request_id=name,
        index=0,
        prompt=prompt,
        params=SamplingParams(),
        adapter=adapter,
        max_tokens=max_tokens,
        random_stream=0,
        stop_ids=frozenset(),
        text=OutputText(lambda: None, (), include_stop=False, eager=False),  # type: ignore[arg-type,return-value]
    )


class Rows:
    """What lies in each row of a cache: the tokens, as far as they were written there."""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self.computed = 0

    def carry_out(self, plan: Plan) -> None:
        moved = [self.rows[move.source][: move.length] for move in plan.moves]
        for move, tokens in zip(plan.moves, moved, strict=True):
            self.rows[move.target] = list(tokens)
        for copy in plan.copies:
            self.rows[copy.target] = self.rows[copy.source][: copy.length]
        chunk = plan.prefill
        if chunk is not None:
            self.computed += len(chunk.prefill.rows) * (chunk.stop - chunk.start)
            for place, source in enumerate(chunk.sources):
                self.rows[chunk.first_row + place] = list(chunk.prefill.rows[source].tokens)
        for row, owner in enumerate(plan.rows):
            assert owner.row == row
            held = self.rows.setdefault(row, [])
            del held[owner.cached :]
            expected = [*owner.prompt, *owner.tokens][: owner.cached]
            assert held == expected, f"row {row} of {owner.request_id}"
            held.append(owner.next_token)
            owner.cached += 1
            owner.tokens.append(1000 + len(owner.tokens))


def test_rows_stay_dense_and_keep_their_tokens():
    generator = random.Random(0)
    scheduler, rows = Scheduler(max_rows=5, prefill_chunk=24), Rows()
    everyone = []
    for step in range(400):
        if step < 300 and generator.random() < 0.5:
            prompt = tuple(generator.randrange(50) for _ in range(generator.choice([1, 2, 9, 40])))
            repeats = generator.choice([1, 1, 3])
            new = [sequence(f"{step}.{i}", prompt, max_tokens=generator.randint(1, 9)) for i in range(repeats)]
            everyone += new
            scheduler.add(new)
        plan = scheduler.schedule(epoch=step // 50)
        rows.carry_out(plan)
        assert len(plan.rows) <= 5
        for owner in plan.rows:
            if len(owner.tokens) >= owner.max_tokens or generator.random() < 0.02:
                owner.finish("length")
    assert not scheduler.has_work
    assert len(everyone) > 100 and all(s.finished for s in everyone)


def test_first_come_first_served():
    scheduler = Scheduler(max_rows=2, prefill_chunk=64)
    order = [sequence(str(i), (i, i + 1)) for i in range(6)]
    scheduler.add(order)
    started = []
    for _ in range(20):
        for owner in scheduler.schedule(0).rows:
            if owner not in started:
                started.append(owner)
            owner.finish("length")
    assert started == order


def test_a_batch_of_prompts_stays_within_the_chunk():
    scheduler = Scheduler(max_rows=16, prefill_chunk=100)
    scheduler.add([sequence(str(i), tuple(range(i, i + 31))) for i in range(5)])  # 30 positions each
    first = scheduler.schedule(0)
    assert [len(row.tokens) for row in first.prefill.prefill.rows] == [30, 30, 30]
    assert len(first.rows) == 3 and first.prefilled_tokens == 93
    assert len(scheduler.schedule(0).rows) == 5


def test_a_long_prompt_goes_by_chunks_while_others_decode():
    scheduler = Scheduler(max_rows=4, prefill_chunk=16)
    scheduler.add([sequence("short", (1, 2))])
    assert len(scheduler.schedule(0).rows) == 1
    scheduler.add([sequence("long", tuple(range(50)))])
    chunks = []
    while scheduler.prefill is not None or scheduler.waiting:
        plan = scheduler.schedule(0)
        chunks.append((plan.prefill.start, plan.prefill.stop, len(plan.rows)))
    assert chunks == [(0, 16, 1), (16, 32, 1), (32, 48, 1), (48, 49, 2)]


def test_identical_prompts_share_one_prefill_row_also_one_under_way():
    scheduler = Scheduler(max_rows=8, prefill_chunk=16)
    prompt = tuple(range(40))
    scheduler.add([sequence("a", prompt), sequence("b", prompt)])
    scheduler.schedule(0)
    scheduler.add([sequence("late", prompt), sequence("adapter", prompt, adapter="x")])
    plans = [scheduler.schedule(0) for _ in range(2)]
    assert plans[-1].prefill.sources == (0, 0, 0)
    assert plans[-1].prefilled_tokens == 40
    assert [s.request_id for s in scheduler.waiting] == ["adapter"], "another adapter is another prefix"


def test_no_sharing_across_a_change_of_weights():
    scheduler = Scheduler(max_rows=8, prefill_chunk=64)
    prompt = tuple(range(9))
    scheduler.add([sequence("old", prompt)])
    scheduler.schedule(epoch=0)
    scheduler.add([sequence("new", prompt)])
    plan = scheduler.schedule(epoch=1)
    assert plan.copies == () and plan.prefilled_tokens == 9


def test_a_finished_row_is_taken_over_without_a_copy():
    scheduler = Scheduler(max_rows=1, prefill_chunk=64)
    prompt = tuple(range(9))
    first, second = sequence("first", prompt), sequence("second", prompt)
    scheduler.add([first, second])
    assert scheduler.schedule(0).rows == (first,)
    first.finish("length")
    plan = scheduler.schedule(0)
    assert plan.rows == (second,) and (plan.moves, plan.copies, plan.prefill) == ((), (), None)
    assert (second.row, second.cached, first.row) == (0, 8, -1)


def test_a_row_that_failed_is_no_donor():
    scheduler = Scheduler(max_rows=2, prefill_chunk=64)
    prompt = tuple(range(9))
    first = sequence("first", prompt)
    scheduler.add([first])
    scheduler.schedule(0)
    first.finish("error", error="not finite")
    scheduler.add([sequence("second", prompt)])
    plan = scheduler.schedule(0)
    assert plan.prefilled_tokens == 9 and plan.copies == ()


def test_the_bound_on_cache_tokens_holds_admissions_back():
    scheduler = Scheduler(max_rows=8, prefill_chunk=64, max_kv_tokens=100)
    scheduler.add([sequence(str(i), (i,), max_tokens=29) for i in range(8)])  # 30 positions each
    plan = scheduler.schedule(0)
    assert len(plan.rows) == 3
    plan.rows[0].finish("length")
    assert len(scheduler.schedule(0).rows) == 3
    alone = Scheduler(max_rows=8, prefill_chunk=64, max_kv_tokens=100)
    alone.add([sequence("huge", (1,), max_tokens=500), sequence("b", (2,))])
    assert [s.request_id for s in alone.schedule(0).rows] == ["huge"], "too long for the bound runs alone"


def test_pausing_admits_nobody_and_forget_rows_loses_the_active():
    scheduler = Scheduler(max_rows=2, prefill_chunk=16)
    scheduler.add([sequence("a", (1,)), sequence("b", tuple(range(60))), sequence("c", (3,))])
    scheduler.schedule(0)
    scheduler.paused = True
    assert len(scheduler.schedule(0).rows) == 1
    assert {s.request_id for s in scheduler.forget_rows()} == {"a", "b"}
    assert [s.status for s in scheduler.waiting] == [Status.WAITING]
    assert not scheduler.has_work, "paused, and nothing runs"


def test_the_scheduler_imports_no_mlx():
    program = "import sys, mlx_parallm.engine.scheduler; assert not {m for m in sys.modules if m.startswith('mlx.')}"
    subprocess.run([sys.executable, "-c", program], check=True)
