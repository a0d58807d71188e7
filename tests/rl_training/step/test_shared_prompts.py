"""Micro-batches by prompt: the cut, its budget, the rule when it pays, and training that comes out the same."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.collate import MiniBatch, collate
from mlx_parallm.types import RolloutGroup
from tests.rl_training.making import make_config, make_trainer
from tests.rl_training.rollouts import make_batch, make_rollout


def groups(count: int, *, size: int = 4, prompt: int = 40, longest: int = 12) -> list[RolloutGroup]:
    """Each with a prompt of its own; completions of 1 to `longest` tokens."""
    rng = np.random.default_rng(3)
    found = []
    for number in range(count):
        start = tuple(rng.integers(3, 40, prompt + number).tolist())
        rollouts = [
            make_rollout(
                tuple(rng.integers(3, 40, 1 + int(rng.integers(longest))).tolist()),
                prompt=start,
                reward=float(i % 2),
                logprob=-3.0,
            )
            for i in range(size)
        ]
        found.append(RolloutGroup(f"g{number}", "sum", tuple(rollouts)))
    return found


def cut(batch: TrainBatch, rows: Sequence[int] | None = None, **options: int) -> MiniBatch:
    chosen = range(len(batch.sequences)) if rows is None else rows
    return collate(batch.sequences, chosen, share_prompts=True, **{"token_budget": 256, **options})


def test_rows_of_one_prompt_are_put_together() -> None:
    batch = make_batch(groups(4))
    order = np.random.default_rng(0).permutation(16).tolist()
    mini = cut(batch, order)
    assert sorted(row for part in mini.micro_batches for row in part.rows) == list(range(16))
    assert all(part.compact is not None and part.tokens <= 256 for part in mini.micro_batches)
    plain = collate(batch.sequences, order, token_budget=256)
    assert sum(part.tokens for part in mini.micro_batches) < 0.6 * sum(part.tokens for part in plain.micro_batches)
    assert (mini.tokens, mini.sequences) == (plain.tokens, plain.sequences)


@pytest.mark.parametrize("budget", [1, 60, 100, 10_000])
def test_the_budget_counts_what_is_computed(budget: int) -> None:
    batch = make_batch(groups(3))
    for part in cut(batch, token_budget=budget).micro_batches:
        assert part.tokens <= budget or len(part.rows) == 1
        if part.compact is not None:
            assert part.tokens == part.compact.prompts.size + part.compact.rests.size < part.inputs.size
            assert len(part.compact.positions) == len(part.positions)


def test_short_prompts_and_single_rows_are_cut_by_length() -> None:
    short = make_batch(groups(4, prompt=4))
    alone = make_batch(groups(8)).sequences[::4]  # one of each group
    for sequences in (short.sequences, alone):
        rows = range(len(sequences))
        mini = collate(sequences, rows, token_budget=256, share_prompts=True)
        plain = collate(sequences, rows, token_budget=256)
        assert [part.rows for part in mini.micro_batches] == [part.rows for part in plain.micro_batches]
        assert all(part.compact is None for part in mini.micro_batches)


def test_a_sequence_without_a_sampled_token_takes_no_part_in_it() -> None:
    batch = make_batch(groups(2))
    given = make_rollout((5, 6))
    given = replace(given, mask=(0,) * len(given.tokens))
    sequences = (*batch.sequences, TrainSequence(given, (0.0,) * len(given.tokens), False))
    mini = collate(sequences, range(len(sequences)), token_budget=256, share_prompts=True)
    assert sum(len(part.rows) for part in mini.micro_batches) == len(sequences)
    assert all(part.compact is None for part in mini.micro_batches)


def test_pairs_stay_together_in_their_order() -> None:
    batch = make_batch(groups(4, size=2))
    for part in cut(batch, [6, 7, 0, 1, 4, 5, 2, 3], together=2, token_budget=130).micro_batches:
        assert all(a + 1 == b and a % 2 == 0 for a, b in zip(part.rows[::2], part.rows[1::2], strict=True))
        assert part.compact is not None


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("kl_beta", [0.0, 0.2])
def test_a_step_is_the_same_step(lora: bool, kl_beta: float) -> None:
    batch = make_batch(groups(3))

    def gradient(*, share: bool) -> tuple[list[np.ndarray], dict[str, float | None]]:
        trainer = make_trainer(make_config(lora=lora, batch=16, batch_size=12, token_budget=300, kl_beta=kl_beta))
        assert trainer.model.shares_prompts
        if not share:
            trainer.model.unshared = "for comparison"
        seen: list[list[np.ndarray]] = []
        update = trainer.optimizer.update

        def spy(gradients: list, *args: object, **kwargs: object) -> object:
            seen.append([np.array(g) for g in gradients])
            return update(gradients, *args, **kwargs)

        trainer.optimizer.update = spy  # type: ignore[method-assign]
        metrics = trainer.train_step(batch).metrics
        [gradients] = seen
        return gradients, metrics

    (shared, metrics), (plain, plain_metrics) = gradient(share=True), gradient(share=False)
    whole = np.sqrt(sum(np.square(array).sum() for array in plain))
    off = np.sqrt(sum(np.square(a - b).sum() for a, b in zip(shared, plain, strict=True)))
    assert whole > 0 and off <= 1e-5 * whole
    for name in ("loss", "kl", "entropy", "ratio_mean", "grad_norm"):
        assert (metrics[name] is None) == (plain_metrics[name] is None)
        assert metrics[name] is None or metrics[name] == pytest.approx(plain_metrics[name], rel=1e-4, abs=1e-5), name
