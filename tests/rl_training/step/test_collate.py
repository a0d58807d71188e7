"""Micro-batches: alignment, order, and a budget that follows the measured time of an evaluation."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.models import blockwise
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import (
    FIRST_TOKENS,
    MicroBatchBudget,
    collate,
    epoch_order,
    padded_length,
)
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import PromptExperts, Rollout, RoutedExperts
from tests.rl_training.making import (
    assert_same_training,
    make_config,
    make_trainer,
    perturb_adapter,
    weights,
)
from tests.rl_training.rollouts import make_batch, make_rollout, random_groups
from tests.rl_training.step.test_ranks import with_experts


def test_alignment_of_one_sequence() -> None:
    """Prompt 1 2 3, completion 5 6: 5 is predicted at position 2, 6 at position 3."""
    rollout = make_rollout((5, 6), logprob=-1.5, temperature=0.5)
    sequence = TrainSequence(rollout, (0, 0, 0, 7.0, 8.0), True)
    (micro,) = collate([sequence], [0], token_budget=64).micro_batches
    assert micro.inputs.tolist() == [[1, 2, 3, 5, 6, 0, 0, 0]]
    assert micro.mask.tolist() == [[False, False, True, True, False, False, False, False]]
    assert micro.positions.tolist() == [2, 3]
    assert micro.targets.tolist() == [5, 6]
    assert micro.temperatures.tolist() == [0.5, 0.5]
    assert micro.scatter.tolist() == [[2, 2, 0, 1, 2, 2, 2, 2]]
    assert (micro.inputs.dtype, micro.targets.dtype) == (np.int32, np.int32)


def test_two_turns_of_one_sequence() -> None:
    """5 → 20 EOS(2) sampled, a second EOS and a tool's answer 30 31 given, then 21 EOS sampled."""
    tokens, mask = (5, 20, 2, 2, 30, 31, 21, 2), (0, 1, 1, 0, 0, 0, 1, 1)
    rollout = Rollout(tokens, mask, None, (0,) * 8, 1.0, {"reward": 1.0})
    (micro,) = collate(
        [TrainSequence(rollout, (1.0,) * 8, False)], [0], token_budget=64
    ).micro_batches
    assert micro.inputs.tolist() == [[5, 20, 2, 2, 30, 31, 21, 2]]
    assert (micro.positions.tolist(), micro.targets.tolist()) == ([0, 1, 5, 6], [20, 2, 21, 2])
    assert micro.scatter.tolist() == [[0, 1, 4, 4, 4, 2, 3, 4]]


def test_where_a_micro_batchs_tokens_stand_in_the_columns_of_the_step() -> None:
    """Three sequences with 2, 0 and 3 trained tokens: their numbers are 0-1, none and 2-4."""
    sequences = [
        TrainSequence(make_rollout(tokens), (), True) for tokens in ((5, 6), (), (7, 8, 9))
    ]
    mini = collate(sequences, [2, 1, 0], token_budget=64)
    (micro,) = mini.micro_batches
    assert (micro.rows, micro.columns.tolist()) == ((0, 2), [0, 1, 2, 3, 4]), (
        "nothing is computed for the empty one"
    )
    assert (mini.sequences, mini.tokens) == (3, 5), "and it counts in the means over sequences"
    assert collate(sequences, [1], token_budget=64).micro_batches == ()
    (micro,) = collate(sequences, [2], token_budget=64).micro_batches
    assert micro.columns.tolist() == [2, 3, 4]


def test_the_first_token_cannot_be_trained_on() -> None:
    sequence = TrainSequence(make_rollout((5, 6), prompt=()), (1.0, 1.0), True)
    mini = collate([sequence], [0], token_budget=64)
    assert mini.micro_batches[0].targets.tolist() == [6]
    assert mini.tokens == 1


def test_greedy_rollouts_count_as_temperature_1() -> None:
    sequence = TrainSequence(make_rollout((5,), temperature=0.0), (1.0,) * 4, True)
    assert collate([sequence], [0], token_budget=64).micro_batches[0].temperatures.tolist() == [1.0]


@pytest.mark.parametrize("budget", [1, 24, 64, 10_000])
def test_every_row_once_within_the_budget(budget: int) -> None:
    batch = make_batch(random_groups(6))
    mini = collate(batch.sequences, range(3, 24), token_budget=budget)
    assert sorted(row for micro in mini.micro_batches for row in micro.rows) == list(range(3, 24))
    for micro in mini.micro_batches:
        assert micro.inputs.size <= budget or len(micro.rows) == 1
        for row, tokens, mask in zip(micro.rows, micro.inputs, micro.mask, strict=True):
            rollout = batch.sequences[row].rollout
            assert tuple(tokens[: len(rollout.tokens) - 1]) == rollout.tokens[:-1]
            assert not tokens[len(rollout.tokens) :].any()
            assert mask.sum() == sum(rollout.mask[1:])
    assert mini.tokens == sum(sum(batch.sequences[row].rollout.mask[1:]) for row in range(3, 24))
    assert mini.sequences == 21


def test_sorting_by_length_saves_padding() -> None:
    short, long = make_rollout((5,) * 2), make_rollout((5,) * 60)
    sequences = [TrainSequence(r, (1.0,) * len(r.tokens), True) for r in (short, long) * 4]
    shapes = [
        micro.inputs.shape for micro in collate(sequences, range(8), token_budget=256).micro_batches
    ]
    assert shapes == [(4, 8), (4, 64)]


def test_buckets() -> None:
    assert [padded_length(n) for n in (1, 8, 9, 64, 65, 256, 257)] == [8, 8, 16, 64, 80, 256, 320]


def test_order_is_a_function_of_seed_step_and_epoch() -> None:
    order = epoch_order(32, seed=1, step=2, epoch=0)
    assert sorted(order) == list(range(32))
    assert order == epoch_order(32, seed=1, step=2, epoch=0)
    others = [
        epoch_order(32, seed=seed, step=step, epoch=epoch)
        for seed, step, epoch in ((1, 2, 1), (1, 3, 0), (2, 2, 0))
    ]
    assert order not in others


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_the_rows_of_an_example_stay_together_in_their_order(budget: int) -> None:
    """Pairs (2i, 2i + 1), whatever their lengths, and the budget decides between pairs only."""
    batch = make_batch(random_groups(4))
    rows = [6, 7, 2, 3, 14, 15, 0, 1, 8, 9]
    mini = collate(batch.sequences, rows, token_budget=budget, together=2)
    found = [row for micro in mini.micro_batches for row in micro.rows]
    assert sorted(found) == sorted(rows)
    for micro in mini.micro_batches:
        pairs = list(zip(micro.rows[::2], micro.rows[1::2], strict=True))
        assert all(second == first + 1 for first, second in pairs)
        assert micro.tokens <= budget or len(pairs) == 1
    longest = [
        max(len(batch.sequences[row].rollout.tokens) for row in micro.rows)
        for micro in mini.micro_batches
    ]
    assert longest == sorted(longest)


def pace(**values: Any) -> MicroBatchBudget:
    return MicroBatchBudget(*RLTrainingConfig(**({"max_eval_ms": 1000} | values)).eval_limits)


def test_without_a_limit_and_in_deterministic_mode_the_clock_changes_nothing() -> None:
    for found in (pace(max_eval_ms=None), pace(deterministic=True, max_staleness=0)):
        found.observe(9999.0, tokens=8192, rows=8)
        assert found.tokens == 8192


def test_begins_small_and_doubles_while_there_is_time() -> None:
    found = pace()
    assert found.tokens == FIRST_TOKENS
    seen = []
    for _ in range(5):
        found.observe(400.0, tokens=found.tokens, rows=4)
        seen.append(found.tokens)
    assert seen == [1024, 2048, 4096, 8192, 8192]
    found = pace()
    found.observe(1.0, tokens=8, rows=1)
    assert found.tokens == FIRST_TOKENS, "a small micro-batch says nothing about a full one"
    found.observe(600.0, tokens=512, rows=4)
    assert found.tokens == FIRST_TOKENS, "twice as much would not fit"


def test_too_long_an_evaluation_lowers_it() -> None:
    found = pace()
    found.tokens = 4096
    found.observe(2000.0, tokens=4000, rows=8)
    assert found.tokens == 1600


def test_a_single_sequence_that_is_too_long_is_said_once() -> None:
    configure_logging(level="warning")
    found = pace()
    with capture_logs() as logs:
        for _ in range(3):
            found.observe(1500.0, tokens=300, rows=1)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "max_token_length" in logs[0]["event"]


@pytest.mark.parametrize(
    ("aggregation", "divisors"),
    [
        ("token", (2, 3)),
        ("sequence", (2 * 2, 2 * 3)),
        ("sequence_sum", (2, 2)),
        ("constant", (2 * 10, 2 * 10)),
    ],
)
def test_a_masked_sequence_counts_as_0_in_the_loss(
    aggregation: str, divisors: tuple[int, int]
) -> None:
    """TRL's mask_truncated_completions: B stays what it was. Four sequences of 2, 3, 3, 3
    tokens, all with advantage -1 and the ratio 1, so that each token's loss is 1; the first and
    the last are masked. Mini-batches of two that each hold one of them: 2 resp. 3 tokens of loss
    1 over the number of tokens (dapo: 1), over 2 sequences of their mean (grpo: 1 / 2), over 2
    sequences (luspo: tokens / 2), over 2 · 10 (dr_grpo). Two updates, as with no mask."""
    rollouts = [
        make_rollout((5, 6, 7)),
        make_rollout((5, 6)),
        make_rollout((7, 8, 9)),
        make_rollout((9, 8, 7)),
    ]
    masked = [
        replace(rollout, mask=(0,) * len(rollout.mask)) for rollout in (rollouts[0], rollouts[3])
    ]
    config = make_config(batch=4, batch_size=2, loss_aggregation=aggregation, learning_rate=1e-9)
    config = config.model_copy(update={"constant_length": 10})
    trainer = make_trainer(config)
    seen: list[float] = []
    original = trainer.accumulate

    def accumulate(*arguments: Any) -> Any:
        sums = original(*arguments)
        seen.append(sums.totals["loss"])
        return sums

    trainer.accumulate = accumulate
    trainer._order = lambda batch, epoch: (0, 1, 2, 3)
    rows = [masked[0], rollouts[1], rollouts[2], masked[1]]
    scored = [replace(row, logprobs=None) for row in rows]  # so that the ratio is 1
    sequences = tuple(TrainSequence(row, (-1.0,) * len(row.tokens), False) for row in scored)
    result = trainer.train_step(replace(make_batch([]), sequences=sequences))
    assert result.position.updates == 2
    assert seen == pytest.approx([2 / divisors[0], 3 / divisors[1]], rel=1e-4)


def test_training_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(random_groups(4))
    config = make_config(batch=16, blocks_per_eval=1, token_budget=64)
    whole = make_trainer(config)
    whole.train_step(batch)
    limited = make_trainer(config.model_copy(update={"max_eval_ms": 1000}))
    sizes: list[int] = []
    cut = limited.model.loss_and_gradients

    def observed(tokens: Any, *others: Any, **options: Any) -> Any:
        sizes.append(tokens.inputs.size)
        now[1] = 0.05 * tokens.inputs.size  # seconds an evaluation: 16 tokens take 0.8 s
        return cut(tokens, *others, **options)

    now = [0.0, 0.0]

    def clock() -> float:
        now[0] += now[1]
        return now[0]

    monkeypatch.setattr(blockwise, "perf_counter", clock)
    monkeypatch.setattr(limited.model, "loss_and_gradients", observed)
    limited.train_step(batch)
    assert max(sizes[:1]) > 16
    assert max(sizes[1:]) <= 16
    assert_same_training(weights(whole), weights(limited))


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "grpo"},
        {"algorithm": "ppo"},
        {"algorithm": "gspo", "sampler_correction": "tis"},
        {"algorithm": "grpo", "kl_in": "reward", "kl_beta": 0.1, "loss_aggregation": "sequence"},
        {"algorithm": "grpo", "router_replay": "on", "router_replay_prompts": True},
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_what_a_grammar_forced_is_read_and_not_learned_from(values: dict[str, Any]) -> None:
    """A step on rollouts with forced tokens equals one on the same rollouts whose mask leaves
    these out; of one that was forced wholly nothing is left."""
    rng = np.random.default_rng(3)
    architecture = "qwen3_moe" if "router_replay" in values else "qwen3"
    groups = []
    for group in random_groups(4, seed=5):
        rollouts = [
            with_experts(each) if "router_replay" in values else each for each in group.rollouts
        ]
        forced = [rng.random(len(each.mask)) < 0.4 for each in rollouts]
        forced[0][:] = True
        rollouts = [
            replace(each, forced=tuple((np.array(each.mask) * held).tolist()))
            for each, held in zip(rollouts, forced, strict=True)
        ]
        groups.append(replace(group, rollouts=tuple(rollouts)))
    batch = make_batch(groups)
    left_out = [
        replace(sequence, rollout=left_out_of(sequence.rollout)) for sequence in batch.sequences
    ]
    steps = []
    for given in (batch, replace(batch, sequences=tuple(left_out))):
        trainer = make_trainer(make_config(batch_size=16, **values), architecture=architecture)
        perturb_adapter(trainer.policy)
        trainer.optimizer.reload()
        steps.append((trainer.train_step(given), weights(trainer)))
    (a, trained), (b, expected) = steps
    assert (
        a.metrics["tokens"]
        == sum(s.trained for s in left_out)
        < sum(sum(s.rollout.mask) for s in batch.sequences)
    )
    assert a.metrics["loss"] == pytest.approx(b.metrics["loss"], rel=1e-5)
    assert_same_training(trained, expected)


def left_out_of(rollout: Rollout) -> Rollout:
    """The rollout as one whose forced tokens stood in its prompt."""
    mask = np.array(rollout.trained_mask, bool)
    recorded, parts = rollout.routed_experts, rollout.prompt_experts
    if recorded is not None:
        sampled = np.array(rollout.mask, bool)
        ids = recorded.array()
        parts += tuple(
            PromptExperts(int(place) - 1, RoutedExperts.of(ids[[number]]))
            for number, place in enumerate(np.flatnonzero(sampled))
            if not mask[place]
        )
        recorded = RoutedExperts.of(ids[mask[sampled]]) if mask.any() else None
    logprobs = np.where(mask, rollout.logprobs, 0.0)
    return replace(
        rollout,
        mask=tuple(mask.astype(int).tolist()),
        logprobs=tuple(logprobs.tolist()),
        forced=None,
        routed_experts=recorded,
        prompt_experts=parts,
    )
