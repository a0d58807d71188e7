"""Which rows a step takes, and KTO's mismatched pairs."""

import random
from collections import Counter

import numpy as np
import pytest

from mlx_parallm.rl_training.data.batches import (
    DataBatches,
    advantages_of,
    best_fit_decreasing,
    mismatched,
)
from mlx_parallm.rl_training.data.heldout_rows import area_under_curve, in_words
from mlx_parallm.rl_training.data.learned_tokens import Encoded, Unit


def unit(number: int, *, prompt: int = 2, completion: int = 3, label: bool = True) -> Unit:
    tokens = np.array(
        [100 * number + position for position in range(prompt + completion)], np.int32
    )
    return Unit((Encoded(tokens, np.arange(prompt + completion) >= prompt),), label)


def batches(count: int, batch_size: int, seed: int = 0) -> DataBatches:
    return DataBatches([unit(number) for number in range(count)], batch_size=batch_size, seed=seed)


@pytest.mark.parametrize(
    ("count", "size", "sizes"), [(12, 4, [4, 4, 4]), (13, 4, [4, 3, 3, 3]), (5, 5, [5])]
)
def test_an_epoch_has_every_row_once_in_batches_of_nearly_one_size(
    count: int, size: int, sizes: list[int]
) -> None:
    made = batches(count, size)
    assert made.steps_per_epoch == len(sizes)
    for epoch in range(3):
        steps = [made.rows(1 + epoch * len(sizes) + number) for number in range(len(sizes))]
        assert [len(rows) for rows in steps] == sizes
        assert Counter(row for rows in steps for row in rows) == Counter(range(count))


def test_a_batch_of_packs_has_all_rows_of_each() -> None:
    packs = [[0, 5], [1], [2, 3, 4], [6]]
    made = DataBatches([unit(number) for number in range(7)], packs=packs, batch_size=2, seed=0)
    assert made.steps_per_epoch == 2
    for first in (1, 3):
        steps = [made.rows(step) for step in (first, first + 1)]
        assert Counter(row for rows in steps for row in rows) == Counter(range(7))
        assert all(sum(set(pack) <= set(rows) for pack in packs) == 2 for rows in steps)
    assert made.collect(1).statistics.sequences == len(made.rows(1))


def test_packs_are_those_of_trl() -> None:
    """The example of `trl.pack_dataset` (1.16): 5, 2, 3 and 1 tokens in packs of 4, of which it cuts
    the first to 4; then random sizes: no pack is above its capacity, and two of them never fit
    into one."""
    assert best_fit_decreasing([4, 2, 3, 1], 4) == [[0], [2, 3], [1]]
    assert best_fit_decreasing([9, 2, 2], 4) == [[0], [1, 2]]
    assert best_fit_decreasing([], 4) == []
    rng = random.Random(0)
    for _ in range(50):
        capacity = rng.choice([4, 16, 100])
        sizes = [rng.randint(1, capacity) for _ in range(rng.randint(1, 60))]
        packs = best_fit_decreasing(sizes, capacity)
        totals = sorted(sum(sizes[item] for item in pack) for pack in packs)
        assert sorted(item for pack in packs for item in pack) == list(range(len(sizes)))
        assert totals[-1] <= capacity
        assert len(totals) < 2 or totals[0] + totals[1] > capacity


def test_the_order_is_a_function_of_seed_and_step() -> None:
    assert [batches(40, 8).rows(step) for step in (1, 7)] == [
        batches(40, 8).rows(step) for step in (1, 7)
    ]
    assert batches(40, 8).rows(1) != batches(40, 8, seed=1).rows(1)
    assert batches(40, 8).rows(1) != batches(40, 8).rows(6)  # the second epoch


def test_a_batch_holds_pairs_side_by_side_and_its_rows_labels() -> None:
    made = DataBatches(
        [
            Unit((*unit(number).sequences, *unit(number + 50).sequences), True)
            for number in range(6)
        ],
        batch_size=3,
        seed=0,
    )
    batch = made.collect(1)
    firsts = [sequence.rollout.tokens[0] // 100 for sequence in batch.sequences]
    assert [b - a for a, b in zip(firsts[0::2], firsts[1::2], strict=True)] == [50, 50, 50]
    assert batch.statistics.sequences == 6
    assert made.resume(1, ()) == batch
    labelled = DataBatches(
        [unit(0), unit(1, label=False)],
        batch_size=2,
        seed=0,
        weights=(1.5, 0.5),
        log_ratios=lambda rollouts: [1.0, 3.0],
    )
    batch = labelled.collect(1)
    assert {sequence.rollout.tokens[0]: sequence.advantages[0] for sequence in batch.sequences} == {
        0: 1.5,
        100: -0.5,
    }
    assert batch.constants == {"kl": 2.0, "desirable": 1.0, "undesirable": 1.0}


def test_chosen_tokens_have_one_mean_or_one_for_some_pairs_at_a_time() -> None:
    """2, 6 and 4 tokens: 3 / 12 each; two at a time 3 / (2 · 8) and 3 / (2 · 4)."""
    lengths = (2, 6, 4)
    pairs = [
        Unit((*unit(0, completion=length).sequences, *unit(1).sequences), True)
        for length in lengths
    ]
    assert advantages_of(pairs, (1.0, 1.0)) == [0.25] * 3
    assert advantages_of(pairs, (1.0, 1.0), 2) == [3 / 16, 3 / 16, 3 / 8]


def test_a_negative_kl_counts_as_none() -> None:
    made = DataBatches(
        [unit(0), unit(1)], batch_size=2, seed=0, log_ratios=lambda rollouts: [-1.0, -3.0]
    )
    assert made.collect(1).constants["kl"] == 0.0


def test_a_mismatched_row_is_ones_prompt_with_anothers_completion() -> None:
    made = mismatched(unit(1), unit(2, prompt=1, completion=2))
    assert made.tokens.tolist() == [100, 101, 201, 202]
    assert made.mask.tolist() == [False, False, True, True]


def test_no_row_of_a_batch_is_matched_with_itself() -> None:
    seen: list[tuple[int, int]] = []

    def scored(rollouts: object) -> list[float]:
        assert isinstance(rollouts, list)
        seen.extend((rollout.tokens[0] // 100, rollout.tokens[-1] // 100) for rollout in rollouts)
        return [0.0] * len(rollouts)

    made = DataBatches(
        [unit(number) for number in range(7)], batch_size=3, seed=0, log_ratios=scored
    )
    for step in range(1, 1 + made.steps_per_epoch):
        made.collect(step)
    assert (
        sorted(prompt for prompt, _ in seen)
        == sorted(completion for _, completion in seen)
        == list(range(7))
    )
    assert all(prompt != completion for prompt, completion in seen)


def test_area_under_the_curve() -> None:
    assert area_under_curve([2, 1, 1], [True, True, False]) == 0.75
    assert area_under_curve([0.0] * 4, [True, True, False, False]) == 0.5
    assert area_under_curve([1, 2], [True, True]) is None


def test_held_out_rows_before_and_after_are_one_line():
    first = {"step": 1, "eval_before/loss": 0.693, "eval_before/rewards/accuracies": 0.5}
    middle = {"step": 2, "eval/loss": 0.7, "eval/rewards/accuracies": 0.25}
    last = {"step": 3, "eval/loss": 0.5, "eval/rewards/accuracies": 0.75}
    line = "held-out rows: loss 0.693 -> 0.500, accuracy 0.500 -> 0.750"
    assert in_words([first, middle, last], 40) == f"{line} (40 rows)"
    assert in_words([first, middle, last], 1) == f"{line} (1 row, too few to tell)"
    assert in_words([first], 40) is None and in_words([middle], 40) is None
