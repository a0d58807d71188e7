"""Micro-batches that compute less (packed rows, prompts shared by their answers): the cut, its
budget, when it pays, and training that comes out the same."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_parallm.models.layouts.layout import PackedRows, SharedRows
from mlx_parallm.models.layouts.padding import padded_length
from mlx_parallm.models.layouts.tree_rows import TreeRows
from mlx_parallm.rl_training.step import trainer as trainer_base
from mlx_parallm.rl_training.step.batch import TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.collate import SHORT_ROW, MiniBatch, collate, parts_packed, used
from mlx_parallm.system.device.traits import gpu_like
from mlx_parallm.types import RolloutGroup
from tests.rl_training.making import make_config, make_trainer, perturb_adapter
from tests.rl_training.rollouts import make_batch, make_rollout, random_groups

CLOSE = 3e-5 if gpu_like() else 1e-5
"""Of steps whose rows share attention: MLX's own sums, on the way of a GPU, round more."""


def sequences(lengths: Sequence[int]) -> list[TrainSequence]:
    """So many tokens go into the model; the prompt is one of them."""
    rng = np.random.default_rng(len(lengths))
    rollouts = [make_rollout(rng.integers(3, 40, length).tolist(), prompt=(number % 40,)) for number, length in
                enumerate(lengths)]  # fmt: skip
    return [TrainSequence(rollout, (1.0,) * len(rollout.tokens), False) for rollout in rollouts]


def ragged(count: int, longest: int, *, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, longest + 1, count).tolist()


@pytest.mark.parametrize("budget", [1, 50, 200, 1000, 100_000])
@pytest.mark.parametrize("longest", [7, 90, 400])
def test_every_sequence_once_within_rows_and_budget(budget: int, longest: int) -> None:
    given = sequences(ragged(60, longest))
    parts = parts_packed(given, range(4, 60), token_budget=budget)
    assert sorted(sequence for part in parts for sequence in part.sequences) == list(range(4, 60))
    for part in parts:
        lengths = [[used(given[sequence]) for sequence in row] for row in part.rows]
        assert all(sum(row) <= part.width for row in lengths)
        assert part.width == padded_length(max(map(sum, lengths)))
        assert part.width <= max(SHORT_ROW, padded_length(max(map(max, lengths))))
        assert part.tokens <= budget or len(part.sequences) == 1
        assert part.counts == [len(row) for row in part.rows]
    longest_of = [max(used(given[sequence]) for sequence in part.sequences) for part in parts]
    assert longest_of == sorted(longest_of)


def test_rows_are_filled() -> None:
    given = sequences(ragged(200, 250))
    [part] = parts_packed(given, range(200), token_budget=100_000)
    assert sum(used(sequence) for sequence in given) >= 0.9 * part.tokens


def cut(given: Sequence[TrainSequence], **options: Any) -> MiniBatch:
    return collate(given, range(len(given)), **{"token_budget": 4096, "packing": True} | options)


def is_packed(mini: MiniBatch) -> bool:
    return any(part.compact is not None for part in mini.micro_batches)


def test_mixed_lengths_are_packed_and_the_loss_sees_the_rows_as_before() -> None:
    given = sequences([60, 9, 20, 33, 5, 41])
    packed, padded = cut(given), cut(given, packing=False)
    [part], [row_part] = packed.micro_batches, padded.micro_batches
    assert (
        isinstance(part.compact, PackedRows) and part.tokens == 3 * 64 < row_part.tokens == 6 * 64
    )
    assert (packed.tokens, packed.sequences) == (padded.tokens, padded.sequences)
    assert sorted(part.rows) == sorted(row_part.rows)
    for i, row in enumerate(part.rows):
        other = row_part.rows.index(row)
        assert part.inputs[i].tolist() == row_part.inputs[other].tolist()
        assert part.mask[i].tolist() == row_part.mask[other].tolist()


def test_what_is_left_as_it_is() -> None:
    assert not is_packed(cut(sequences([30] * 8)))  # nothing to gain
    assert not is_packed(cut(sequences([9, 60] * 4), together=2))
    unsampled = make_rollout((), prompt=(1, 2, 3))
    # not computed at all
    assert is_packed(cut([*sequences([60, 9, 20]), TrainSequence(unsampled, (0.0,) * 3, False)]))
    assert is_packed(cut(sequences([60, 9, 20])))
    # 600 short ones in the rows of two long ones: a quarter fewer tokens, but 2,048 attention
    # scores for each
    short_and_long = sequences([9] * 600 + [2000] * 2)
    assert not is_packed(cut(short_and_long, token_budget=16384))


def test_prompts_are_shared_where_that_computes_less() -> None:
    groups = random_groups(1, 8)
    [group] = groups
    shared = [make_rollout(rollout.tokens[-3:], prompt=(7,) * 40) for rollout in group.rollouts]
    given = [TrainSequence(rollout, (1.0,) * len(rollout.tokens), True) for rollout in shared]
    mini = cut(given, share_prompts=True)
    assert is_packed(mini) and not isinstance(mini.micro_batches[0].compact, PackedRows)


def test_a_budget_that_shrinks_cuts_packed_rows_again() -> None:
    """What `max_eval_ms` does while a mini-batch is under way."""
    trainer, batch = make_trainer(make_config(batch_size=16)), make_batch(random_groups(4))
    whole = trainer._mini_batch(batch, range(16), 0)
    assert is_packed(whole)
    trainer._budget.tokens = 16
    again = list(trainer._micro_batches(whole))
    assert sorted(row for part in again for row in part.rows) == list(range(16))
    assert all(part.tokens <= 16 or len(part.rows) == 1 for part in again)


def test_why_a_model_is_not_packed_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons: list[str] = []

    def info(event: str, **fields: str) -> None:
        reasons.extend([fields["reason"]] * (event == "sequences are not packed"))

    monkeypatch.setattr(trainer_base, "log", SimpleNamespace(info=info))
    for packing, told in ((False, 0), (True, 1)):
        make_trainer(make_config(packing=packing), architecture="gemma3_text")
        assert len(reasons) == told
    assert "RotatingKVCache" in reasons[0]


def long_prompts(
    count: int, *, size: int = 4, prompt: int = 40, longest: int = 12
) -> list[RolloutGroup]:
    """Each with its own prompt; completions of 1 to `longest` tokens."""
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


def rewritten_episodes(count: int, *, size: int = 3, turns: int = 4) -> list[RolloutGroup]:
    """Groups of episodes whose template drops the thoughts of earlier turns: a row a turn."""
    rng = np.random.default_rng(4)

    def words(length: int) -> list[int]:
        return rng.integers(3, 40, length).tolist()

    groups = []
    for number in range(count):
        instruction, rollouts = words(20), []
        for episode in range(size):
            history = [*instruction]
            for _ in range(turns):
                thought, answer = words(5), words(4)
                rollouts.append(
                    make_rollout(
                        (*thought, *answer), prompt=history, reward=float(episode % 2), logprob=-3.0
                    )
                )
                history += [*answer, *words(6)]
        groups.append(RolloutGroup(f"e{number}", "turns", tuple(rollouts)))
    return groups


def test_turns_of_rewritten_episodes_are_a_tree() -> None:
    """3 episodes of 4 turns: each beginning of a row is a token that is computed once. Without
    two equal words by chance 20 of instruction, and a turn's 5 + 4 - 1 that go into the model,
    with the answer and 6 of the tool again in the next turn's history: 20 + 3 · (4 · 8 + 3 · 10) =
    206. Parts repeat what they need."""
    batch = make_batch(rewritten_episodes(1))
    beginnings = {
        row.rollout.tokens[: end + 1] for row in batch.sequences for end in range(used(row))
    }
    assert 200 <= len(beginnings) <= 206

    def merged(budget: int, **options: Any) -> MiniBatch:
        return collate(batch.sequences, range(12), token_budget=budget, merging=True, **options)

    [part] = merged(400).micro_batches
    assert isinstance(part.compact, TreeRows) and part.tokens == padded_length(len(beginnings))
    assert sorted(part.rows) == list(range(12))
    parts = merged(100).micro_batches
    assert len(parts) > 2 and all(part.tokens <= 100 for part in parts)
    assert sorted(row for part in parts for row in part.rows) == list(range(12))
    assert merged(400).tokens == collate(batch.sequences, range(12), token_budget=400).tokens
    pairs = merged(400, together=2)
    assert not any(isinstance(part.compact, TreeRows) for part in pairs.micro_batches)
    single = make_batch(long_prompts(3))  # a prompt in common is not a reason
    mini = collate(single.sequences, range(12), token_budget=400, merging=True, share_prompts=True)
    assert {type(part.compact) for part in mini.micro_batches} == {SharedRows}
    # … but where prompts cannot be shared, as between layers with windows
    mini = collate(single.sequences, range(12), token_budget=400, merging=True)
    assert {type(part.compact) for part in mini.micro_batches} == {TreeRows}


def cut_shared(batch: TrainBatch, rows: Sequence[int] | None = None, **options: int) -> MiniBatch:
    chosen = range(len(batch.sequences)) if rows is None else rows
    return collate(batch.sequences, chosen, share_prompts=True, **{"token_budget": 256, **options})


def test_rows_of_one_prompt_are_put_together() -> None:
    batch = make_batch(long_prompts(4))
    order = np.random.default_rng(0).permutation(16).tolist()
    mini = cut_shared(batch, order)
    assert sorted(row for part in mini.micro_batches for row in part.rows) == list(range(16))
    assert all(part.compact is not None and part.tokens <= 256 for part in mini.micro_batches)
    plain = collate(batch.sequences, order, token_budget=256)
    assert sum(part.tokens for part in mini.micro_batches) < 0.6 * sum(
        part.tokens for part in plain.micro_batches
    )
    assert (mini.tokens, mini.sequences) == (plain.tokens, plain.sequences)


@pytest.mark.parametrize("budget", [1, 60, 100, 10_000])
def test_the_budget_counts_what_is_computed(budget: int) -> None:
    batch = make_batch(long_prompts(3))
    for part in cut_shared(batch, token_budget=budget).micro_batches:
        assert part.tokens <= budget or len(part.rows) == 1
        if part.compact is not None:
            assert (
                part.tokens
                == part.compact.prompts.size + part.compact.rests.size
                < part.inputs.size
            )
            assert len(part.compact.positions) == len(part.positions)


def test_short_prompts_and_single_rows_are_cut_by_length() -> None:
    short = make_batch(long_prompts(4, prompt=4))
    alone = make_batch(long_prompts(8)).sequences[::4]  # one of each group
    for sequences in (short.sequences, alone):
        rows = range(len(sequences))
        mini = collate(sequences, rows, token_budget=256, share_prompts=True)
        plain = collate(sequences, rows, token_budget=256)
        assert [part.rows for part in mini.micro_batches] == [
            part.rows for part in plain.micro_batches
        ]
        assert all(part.compact is None for part in mini.micro_batches)


def test_a_sequence_without_a_sampled_token_takes_no_part_in_it() -> None:
    batch = make_batch(long_prompts(2))
    given = make_rollout((5, 6))
    given = replace(given, mask=(0,) * len(given.tokens))
    sequences = (*batch.sequences, TrainSequence(given, (0.0,) * len(given.tokens), False))
    mini = collate(sequences, range(len(sequences)), token_budget=256, share_prompts=True)
    rows = [row for part in mini.micro_batches for row in part.rows]
    assert sorted(rows) == list(range(len(batch.sequences))), "nothing is computed for it"
    assert mini.sequences == len(sequences), "it counts in means over sequences"
    assert all(part.compact is not None for part in mini.micro_batches)


def test_pairs_stay_together_in_their_order() -> None:
    batch = make_batch(long_prompts(4, size=2))
    for part in cut_shared(
        batch, [6, 7, 0, 1, 4, 5, 2, 3], together=2, token_budget=130
    ).micro_batches:
        assert all(
            a + 1 == b and a % 2 == 0 for a, b in zip(part.rows[::2], part.rows[1::2], strict=True)
        )
        assert part.compact is not None


@pytest.mark.parametrize(
    ("groups", "kind", "values", "near"),
    [
        (
            random_groups(4),
            PackedRows,
            {"algorithm": "grpo", "kl_beta": 0.2, "token_budget": 96},
            1e-6,
        ),
        (random_groups(4), PackedRows, {"algorithm": "ppo", "sampler_correction": "tis"}, 1e-6),
        (random_groups(4), PackedRows, {"lora": False}, 1e-6),
        (
            rewritten_episodes(2),
            TreeRows,
            {"batch": 24, "batch_size": 24, "token_budget": 300},
            CLOSE,
        ),
        (
            rewritten_episodes(2),
            TreeRows,
            {"batch": 24, "batch_size": 24, "token_budget": 300, "kl_beta": 0.2, "lora": False},
            CLOSE,
        ),
        (
            rewritten_episodes(2),
            TreeRows,
            {"architecture": "qwen3_next", "batch": 24, "batch_size": 24, "token_budget": 300}
            | {"kl_beta": 0.2},
            CLOSE,
        ),
        (long_prompts(3), SharedRows, {"batch_size": 12, "token_budget": 300}, CLOSE),
        (
            long_prompts(3),
            SharedRows,
            {"batch_size": 12, "token_budget": 300, "kl_beta": 0.2},
            CLOSE,
        ),
        (
            long_prompts(3),
            SharedRows,
            {"batch_size": 12, "token_budget": 300, "kl_beta": 0.2, "lora": False},
            CLOSE,
        ),
    ],
)
def test_a_step_is_the_same_step(
    groups: list[RolloutGroup], kind: type, values: dict[str, Any], near: float
) -> None:
    batch, architecture = make_batch(groups), {"architecture": values.get("architecture", "qwen3")}
    values = {key: value for key, value in values.items() if key not in architecture}

    def gradient(*, compact: bool) -> tuple[np.ndarray, dict[str, float | None], int]:
        config = make_config(**{"batch_size": 16, "packing": compact} | values)
        trainer = make_trainer(config, **architecture)
        if not compact:
            trainer.model.unshared = trainer.model.unmerged = "for comparison"
        perturb_adapter(trainer.policy)
        trainer.optimizer.reload()
        seen: list[np.ndarray] = []
        computed: list[int] = []
        kinds: set[type] = set()
        update, backward = trainer.optimizer.update, trainer.model.loss_and_gradients

        def spy(gradients: list, *args: object) -> object:
            seen.append(np.concatenate([np.array(g, np.float64).ravel() for g in gradients]))
            return update(gradients, *args)

        def count(tokens: Any, *args: Any, **options: Any) -> Any:
            kinds.add(type(tokens.compact))
            computed.append(tokens.inputs.size if tokens.compact is None else tokens.compact.tokens)
            return backward(tokens, *args, **options)

        trainer.optimizer.update = spy  # type: ignore[method-assign]
        trainer.model.loss_and_gradients = count  # type: ignore[method-assign]
        metrics = trainer.train_step(batch).metrics
        assert (kind in kinds) == compact
        [whole] = seen
        return whole, metrics, sum(computed)

    (found, metrics, fewer), (plain, others, more) = gradient(compact=True), gradient(compact=False)
    assert fewer <= 0.9 * more
    assert np.linalg.norm(plain) > 0
    assert np.linalg.norm(found - plain) <= near * np.linalg.norm(plain)
    for name in ("loss", "kl", "entropy", "ratio_mean", "grad_norm", "logprob_diff_mean"):
        assert (metrics[name] is None) == (others[name] is None)
        assert metrics[name] is None or metrics[name] == pytest.approx(
            others[name], rel=10 * near, abs=near
        ), name
