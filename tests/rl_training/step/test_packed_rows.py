"""Micro-batches of packed rows: the cut, its budget, the rule when it pays, and training that comes out the same."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlx_parallm.models.layout import PackedRows, padded_length
from mlx_parallm.rl_training.step import trainer as trainer_base
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.collate import SHORT_ROW, MiniBatch, collate, parts_packed, used
from tests.rl_training.making import make_config, make_trainer, perturb_adapter
from tests.rl_training.rollouts import make_batch, make_rollout, random_groups


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
    assert isinstance(part.compact, PackedRows) and part.tokens == 3 * 64 < row_part.tokens == 6 * 64
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
    assert not is_packed(cut([*sequences([60, 9, 20]), TrainSequence(unsampled, (0.0,) * 3, False)]))
    assert is_packed(cut(sequences([60, 9, 20])))
    # 600 short ones in the rows of two long ones: a quarter fewer tokens, but 2,048 attention scores for each
    short_and_long = sequences([9] * 600 + [2000] * 2)
    assert not is_packed(cut(short_and_long, token_budget=16384))


def test_prompts_are_shared_where_that_computes_less() -> None:
    groups = random_groups(1, 8)
    [group] = groups
    shared = [make_rollout(rollout.tokens[-3:], prompt=(7,) * 40) for rollout in group.rollouts]
    given = [TrainSequence(rollout, (1.0,) * len(rollout.tokens), True) for rollout in shared]
    mini = cut(given, share_prompts=True)
    assert is_packed(mini) and not isinstance(mini.micro_batches[0].compact, PackedRows)


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "grpo", "kl_beta": 0.2, "token_budget": 96},
        {"algorithm": "ppo", "sampler_correction": "tis"},
        {"lora": False},
    ],
)
def test_a_step_is_the_same_step(values: dict[str, Any]) -> None:
    batch = make_batch(random_groups(4))

    def gradient(*, packing: bool) -> tuple[np.ndarray, dict[str, float | None], int]:
        trainer = make_trainer(make_config(batch_size=16, packing=packing, **values))
        perturb_adapter(trainer.policy)
        trainer.optimizer.reload()
        seen: list[np.ndarray] = []
        computed: list[int] = []
        update, backward = trainer.optimizer.update, trainer.model.loss_and_gradients

        def spy(gradients: list, *args: object) -> object:
            seen.append(np.concatenate([np.array(g, np.float64).ravel() for g in gradients]))
            return update(gradients, *args)

        def count(tokens: Any, *args: object) -> Any:
            computed.append(tokens.inputs.size if tokens.compact is None else tokens.compact.tokens)
            return backward(tokens, *args)

        trainer.optimizer.update = spy  # type: ignore[method-assign]
        trainer.model.loss_and_gradients = count  # type: ignore[method-assign]
        metrics = trainer.train_step(batch).metrics
        [whole] = seen
        return whole, metrics, sum(computed)

    (packed, metrics, fewer), (padded, others, more) = gradient(packing=True), gradient(packing=False)
    assert fewer <= 0.9 * more
    assert np.linalg.norm(padded) > 0
    assert np.linalg.norm(packed - padded) <= 1e-6 * np.linalg.norm(padded)
    for name in ("loss", "kl", "entropy", "ratio_mean", "grad_norm", "logprob_diff_mean"):
        assert (metrics[name] is None) == (others[name] is None)
        assert metrics[name] is None or metrics[name] == pytest.approx(others[name], rel=1e-5, abs=1e-6), name


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
