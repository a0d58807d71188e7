"""PPO in the trainer: the value head learns beside the policy, at its own rate, and comes back
from a checkpoint."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import CheckpointError
from mlx_parallm.losses.advantages import raw_rewards
from mlx_parallm.rl_training.checkpoint import Checkpointer
from mlx_parallm.rl_training.monitor.health import find
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.run_files.trainer_state import TrainerState
from tests.rl_training.making import assert_same_training, make_config, make_trainer, weights
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.scoring import on_policy
from tests.rl_training.test_checkpoint import NoStore

HEAD = ("value_head.weight", "value_head.bias")


def ppo(**values: Any) -> RLTrainingConfig:
    return make_config(algorithm="ppo", **values)


def rewarded(seed: int = 0, step: int = 1) -> TrainBatch:
    return make_batch(random_groups(4, seed=seed), step=step, estimate=raw_rewards)


@pytest.mark.parametrize("lora", [True, False])
def test_the_value_head_learns_what_the_rewards_are(lora: bool) -> None:
    trainer = make_trainer(
        ppo(lora=lora, learning_rate=2e-3, ppo={"value_clip": 0.0, "value_learning_rate": 0.3})
    )
    lines = [trainer.train_step(rewarded(step=step)).metrics for step in range(1, 7)]
    assert lines[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6), "V = 0 everywhere"
    assert lines[-1]["value_loss"] < 0.7 * lines[0]["value_loss"]
    assert lines[-1]["explained_variance"] > 0.35
    assert all(0 <= line["approx_kl"] < 1 for line in lines)


def test_the_first_losses_are_those_of_the_formulas() -> None:
    """V = 0, γ = λ = 1: returns are the rewards, advantages the whitened rewards of each token."""
    trainer = make_trainer(ppo(batch_size=16, ppo={"gae_lambda": 1.0, "value_coefficient": 0.25}))
    batch = rewarded()
    metrics = trainer.train_step(batch).metrics
    rewards = np.concatenate(
        [[s.rollout.reward] * sum(s.rollout.mask[1:]) for s in batch.sequences]
    )
    assert metrics["value_loss"] == pytest.approx(0.5 * np.square(rewards).mean(), rel=1e-5)
    advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
    logprobs = np.concatenate(
        make_trainer(ppo(batch_size=16)).logprobs([s.rollout for s in batch.sequences])
    )
    sampled = np.concatenate(
        [np.array(s.rollout.logprobs)[np.array(s.rollout.mask, bool)] for s in batch.sequences]
    )
    ratio = np.exp(logprobs - sampled)
    surrogate = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages).mean()
    assert metrics["policy_loss"] == pytest.approx(surrogate, abs=1e-4)
    assert metrics["loss"] == pytest.approx(surrogate + 0.25 * metrics["value_loss"], abs=1e-4)
    assert metrics["approx_kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), abs=1e-4)


def test_with_a_sampler_correction_the_kl_is_to_the_policy_that_the_step_began_with() -> None:
    metrics = (
        make_trainer(ppo(batch_size=16, sampler_correction="tis")).train_step(rewarded()).metrics
    )
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_kl"] > 0.1, "of made-up log-probabilities"


def test_the_head_has_a_rate_of_its_own() -> None:
    """AdamW's first step is the learning rate in every number that has a gradient."""
    trainer = make_trainer(ppo(batch_size=16, learning_rate=1e-2, ppo={"value_learning_rate": 0.2}))
    before = weights(trainer)
    trainer.train_step(rewarded())
    moved = {name: np.abs(array - before[name]) for name, array in weights(trainer).items()}
    for name in HEAD:
        np.testing.assert_allclose(moved[name], 0.2, rtol=1e-3)
    others = [array for name, array in moved.items() if name.endswith("lora_b")]
    assert max(array.max() for array in others) == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize("rate", [0.2, 1e-2], ids=["its own rate", "the adapter's rate"])
def test_how_far_the_policy_moved_is_told_without_the_head(rate: float) -> None:
    """The head's rate is a thousand times the policy's: its steps would hide that the policy
    hardly moves."""
    trainer = make_trainer(
        ppo(batch_size=16, learning_rate=1e-2, ppo={"value_learning_rate": rate})
    )
    before = weights(trainer)
    metrics = trainer.train_step(rewarded()).metrics
    served = {name: array for name, array in weights(trainer).items() if name not in HEAD}
    moved = np.concatenate([(array - before[name]).ravel() for name, array in served.items()])
    assert metrics["update_norm"] == pytest.approx(np.linalg.norm(moved), rel=1e-4)
    assert metrics["weights_moved"] == pytest.approx((moved != 0).mean(), abs=1e-6)


def in_state(step: int) -> TrainerState:
    return TrainerState(step=step, policy_version=step, versions=[[0, 0], [step, step]])


def checkpointer(run: Path, trainer: Trainer) -> Checkpointer:
    return Checkpointer(run, trainer.policy, trainer.optimizer, keep=3)


@pytest.mark.parametrize("values", [{}, {"lora": False}, {"optimizer": "muon"}])
def test_a_resumed_run_has_the_same_bits(values: dict[str, Any], tmp_path: Path) -> None:
    trainer = make_trainer(ppo(**values))
    for step in (1, 2):
        trainer.train_step(rewarded(seed=step, step=step))
    path = checkpointer(tmp_path / "run", trainer).save(in_state(2))
    other = make_trainer(ppo(**values))
    checkpointer(tmp_path / "run", other).resume(
        path, NoStore(), MetricsFile(tmp_path / "metrics.jsonl")
    )
    for name, array in weights(trainer).items():
        np.testing.assert_array_equal(weights(other)[name], array, err_msg=name)
    states = [one.optimizer.state() for one in (trainer, other)]
    assert any(name.startswith("value_head.weight.") for name in states[0])
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_array_equal(states[1][name], array, err_msg=name)
    assert np.abs(weights(other)["value_head.weight"]).max() > 0


def test_the_target_kl_ends_a_steps_updates() -> None:
    """The first mini-batch is under the policy that sampled (KL 0 of recomputed
    log-probabilities); a large step takes the next one too far. What is left out changes nothing
    and is counted; the next step begins anew."""
    values = {"batch_size": 8, "update_epochs": 3, "learning_rate": 5e-2}
    trainer = make_trainer(ppo(**values, ppo={"target_kl": 1e-3}))
    batch = on_policy(trainer, rewarded())
    first = trainer.train_step(batch)
    assert first.finished
    assert first.metrics["optimizer_updates"] == 1
    assert first.metrics["mini_batches_left_out"] == 5
    assert first.metrics["approx_kl"] < 1e-6, "of the mini-batch that was applied"
    once = make_trainer(ppo(**values | {"update_epochs": 1}))
    once.train_step(batch, should_stop=lambda: once.optimizer.updates == 1)
    assert_same_training(weights(trainer), weights(once))
    again = trainer.train_step(on_policy(trainer, rewarded(step=2)))
    assert again.metrics["optimizer_updates"] == 1
    free = make_trainer(ppo(**values))
    assert free.train_step(batch).metrics["optimizer_updates"] == 6


def test_a_target_kl_that_allows_no_update_is_told() -> None:
    """Rollouts of another policy than the step's: the first mini-batch is beyond the target, in
    every step."""
    trainer = make_trainer(ppo(ppo={"target_kl": 1e-3}))
    before = weights(trainer)
    lines = [trainer.train_step(rewarded(step=step)).metrics for step in (1, 2, 3)]
    for line in lines:
        assert (line["optimizer_updates"], line["mini_batches_left_out"], line["loss"]) == (
            0,
            2,
            None,
        )
        assert line["stopped_at_kl"] > 1.5e-3 and line["logprob_diff_mean"] > 0.1
    assert all(np.array_equal(array, before[name]) for name, array in weights(trainer).items())
    [found] = [diagnosis for diagnosis in find(lines) if diagnosis.name == "no-update"]
    assert found.numbers["stopped_at_kl"] == pytest.approx(
        np.mean([line["stopped_at_kl"] for line in lines])
    )
    others = [line | {"optimizer_updates": 1} for line in lines[:2]]
    assert "no-update" not in {diagnosis.name for diagnosis in find([lines[0], *others])}


def test_what_is_served_knows_nothing_of_it(tmp_path: Path) -> None:
    found = {}
    for algorithm in ("grpo", "ppo"):
        trainer = make_trainer(make_config(algorithm=algorithm))
        path = checkpointer(tmp_path / algorithm, trainer).save(in_state(1))
        found[algorithm] = mx.load(str(path / "adapters.safetensors")).keys()
        assert (path / "value_head.safetensors").exists() == (algorithm == "ppo")
    assert found["grpo"] == found["ppo"]
    full = make_trainer(ppo(lora=False))
    assert not any(name.startswith("value_head") for name in full.policy.full_parameters())
    path = checkpointer(tmp_path / "full", full).save(in_state(1))
    saved = mx.load(str(path / "model.safetensors"))
    assert saved.keys() == make_trainer(make_config(lora=False)).policy.full_parameters().keys()
    assert full.train_step(rewarded()).finished, "the tree has its head back"


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    path = checkpointer(tmp_path / "run", make_trainer(make_config())).save(in_state(1))
    with pytest.raises(CheckpointError, match="has no value head"):
        checkpointer(tmp_path / "run", make_trainer(ppo())).resume(
            path, NoStore(), MetricsFile(tmp_path / "m")
        )


def test_its_keys_belong_to_ppo() -> None:
    with pytest.raises(ValueError, match=r'ppo\.target_kl.*"ppo"'):
        make_config(ppo={"target_kl": 0.1})
    assert make_config(ppo=make_config().ppo.model_dump()).algorithm == "grpo", (
        "a saved configuration says everything"
    )
