"""reference = "ema": the moving average of what is trained, in float32, over checkpoints too."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import CheckpointError
from mlx_parallm.rl_training.step.policy import REFERENCE_FILE
from mlx_parallm.run_files.metrics import MetricsFile
from tests.rl_training.making import make_config, make_policy, make_trainer
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.test_checkpoint import NoStore, make_checkpointer, state_at

EMA = {"reference": "ema", "reference_decay": 0.75, "kl_beta": 0.1}


@pytest.mark.parametrize("lora", [True, False])
def test_it_is_the_average_of_the_weights_after_each_step(lora: bool) -> None:
    trainer = make_trainer(make_config(lora=lora, reference_update_every=2, **EMA))
    slots = trainer.policy.slots
    expected = [np.array(array, np.float64) for array in slots.read()]
    for step in range(1, 5):
        trainer.train_step(make_batch(random_groups(2, seed=step), step=step))
        if step % 2 == 0:
            now = [np.array(array, np.float64) for array in slots.read()]
            expected = [
                0.75 * mean + 0.25 * array for mean, array in zip(expected, now, strict=True)
            ]
        with trainer.policy.reference():
            for array, mean in zip(slots.read(), expected, strict=True):
                np.testing.assert_allclose(np.array(array), mean, rtol=1e-5, atol=1e-6)
    moved = [
        np.abs(np.array(array) - mean).max()
        for array, mean in zip(slots.read(), expected, strict=True)
    ]
    assert max(moved) > 1e-3, "the policy is ahead of its average"


def test_an_average_of_bfloat16_weights_is_kept_in_float32() -> None:
    """1% of a change of one unit in the last place would be lost a hundred times over."""
    config = make_config(lora=False, reference="ema", reference_decay=0.99)
    policy = make_policy(config, dtype=mx.bfloat16)
    policy.slots.write([mx.full(array.shape, 1.0, mx.bfloat16) for array in policy.slots.read()])
    policy.reference_arrays = policy.slots.read()
    policy.slots.write(
        [mx.full(array.shape, 1.0078125, mx.bfloat16) for array in policy.slots.read()]
    )
    for _ in range(100):
        policy.blend_reference(config.reference_decay)
    expected = 1.0078125 - 0.0078125 * 0.99**100
    assert all(array.dtype == mx.float32 for array in policy.reference_arrays)
    assert policy.reference_arrays[0].reshape(-1)[0].item() == pytest.approx(expected, abs=1e-6)
    with policy.reference():
        assert all(array.dtype == mx.bfloat16 for array in policy.slots.read())


@pytest.mark.parametrize("lora", [True, False])
def test_it_comes_back_to_the_bit(lora: bool, tmp_path: Path) -> None:
    config = make_config(lora=lora, **EMA)
    trainer = make_trainer(config)
    for step in (1, 2, 3):
        trainer.train_step(make_batch(random_groups(2, seed=step), step=step))
    path = make_checkpointer(tmp_path, trainer).save(state_at(3))
    other = make_trainer(config)
    make_checkpointer(tmp_path, other).resume(
        path, NoStore(), MetricsFile(tmp_path / "metrics.jsonl")
    )
    for a, b in zip(trainer.policy.reference_arrays, other.policy.reference_arrays, strict=True):
        assert a.dtype == b.dtype and mx.array_equal(a, b).item()
    batch = make_batch(random_groups(4, seed=9), step=4)
    kl = trainer.train_step(batch).metrics["kl"]
    assert kl > 1e-6
    assert other.train_step(batch).metrics["kl"] == pytest.approx(kl, rel=1e-4)
    (path / REFERENCE_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"reference\.safetensors"):
        make_checkpointer(tmp_path, other).resume(
            path, NoStore(), MetricsFile(tmp_path / "metrics.jsonl")
        )


def test_without_a_kl_a_loss_may_need_the_reference() -> None:
    """Full weights and no kl_beta: a frozen copy only where it is asked for."""
    config = make_config(lora=False)
    assert make_policy(config).reference_arrays is None
    policy = make_policy(config, needs_reference=True)
    start = policy.slots.read()
    policy.slots.write([array + 1.0 for array in start])
    with policy.reference():
        assert all(
            mx.array_equal(a, b).item() for a, b in zip(policy.slots.read(), start, strict=True)
        )
