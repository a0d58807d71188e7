"""BackpropModule: its numbers against numpy's, its losses against the formulas, its gradients
against differences."""

import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.library import AlgorithmConfig, BackpropConfig
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.faces.library.backprop import BackpropModule
from mlx_parallm.faces.library.losses import Loss
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from mlx_parallm.types import Rollout, Trajectory
from tests.rl_training.rollouts import random_groups
from tests.rl_training.tiny_models import make_model

PLAIN = {"kl_coef": 0.0, "entropy_coef": 0.0}


def make(
    *, lora: bool = True, learning_rate: float = 1e-2, seed: int = 0, **values: Any
) -> BackpropModule:
    config = BackpropConfig(
        lora=LoraConfig(enabled=lora, rank=4, alpha=8.0) if lora else LoraConfig(enabled=False),
        **values,
    )
    return BackpropModule(
        make_model("qwen3", seed=seed), optim.AdamW(learning_rate, weight_decay=0.0), config=config
    )


def played(groups: int = 2) -> list[Trajectory]:
    return [
        Trajectory("text", rollout) for group in random_groups(groups) for rollout in group.rollouts
    ]


def sampled(trajectory: Trajectory) -> np.ndarray:
    """The behaviour policy's log-probabilities of the trained tokens."""
    rollout = trajectory.rollout
    return np.array(rollout.logprobs)[1:][np.array(rollout.mask[1:], bool)]


def recursion(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """GAE written down as its definition, from the end."""
    advantages, after = [], 0.0
    for t in reversed(range(len(rewards))):
        coming = values[t + 1] if t + 1 < len(values) else 0.0
        after = rewards[t] + gamma * coming - values[t] + gamma * lam * after
        advantages.insert(0, after)
    return advantages


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("cut_off", [False, True])
def test_advantages_are_those_of_the_definition(cut_off: bool) -> None:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=20).tolist(), rng.normal(size=20 + cut_off).tolist()
    backprop = make(normalize_advantages=False)
    np.testing.assert_allclose(
        backprop.compute_advantages(rewards, values),
        recursion(rewards, values, 0.99, 0.95),
        atol=1e-9,
    )


def test_episodes_do_not_reach_into_each_other() -> None:
    """One recursion over everything that was collected would carry the second episode's value
    into the first one."""
    backprop = make(normalize_advantages=False)
    episodes = [([0.0, 1.0], [0.4, 0.6]), ([1.0, 0.0, 2.0], [0.1, 0.2, 0.3])]
    found = backprop.compute_advantages([e[0] for e in episodes], [e[1] for e in episodes])
    for own, (rewards, values) in zip(found, episodes, strict=True):
        np.testing.assert_allclose(own, recursion(rewards, values, 0.99, 0.95), atol=1e-9)
    at_the_end = backprop.compute_advantages([1.0, 2.0], [[0.4, 0.6], [0.1, 0.2, 0.3]])
    np.testing.assert_allclose(
        at_the_end[1], recursion([0.0, 0.0, 2.0], [0.1, 0.2, 0.3], 0.99, 0.95), atol=1e-9
    )


def test_normalised_advantages_have_mean_0_and_deviation_1_over_all_episodes() -> None:
    found = np.concatenate(make().compute_advantages([[1.0, 0.0], [2.0]], [[0.1, 0.2], [0.3]]))
    assert found.mean() == pytest.approx(0, abs=1e-9)
    assert found.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_returns_are_discounted_sums() -> None:
    backprop = make(gamma=0.5)
    np.testing.assert_allclose(backprop.compute_returns([1.0, 2.0, 4.0]), [3.0, 4.0, 4.0])
    several = backprop.compute_returns([[1.0], [2.0, 2.0]])
    assert [part.tolist() for part in several] == [[1.0], [3.0, 2.0]]


def test_relative_advantages_compare_with_the_own_group_alone() -> None:
    rewards = [1.0, 0.0, 0.0, 5.0, 5.0, 5.0]  # the batch's mean would make the first group look bad
    mean = make(normalize_advantages=False).compute_relative_advantages(rewards, group_size=3)
    np.testing.assert_allclose(mean, [2 / 3, -1 / 3, -1 / 3, 0, 0, 0], atol=1e-9)
    std = make().compute_relative_advantages(rewards, group_size=3)
    np.testing.assert_allclose(std, [1.414214, -0.707107, -0.707107, 0, 0, 0], atol=1e-6)
    with pytest.raises(ConfigError, match=r"6 rewards .*4"):
        make().compute_relative_advantages(rewards, group_size=4)
    with pytest.raises(ConfigError, match="list of numbers"):
        make().compute_relative_advantages(["good", "bad"], group_size=2)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="number of answers"):
        make().compute_relative_advantages(rewards, group_size=None)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- losses


def test_the_ppo_loss_is_that_of_the_formula() -> None:
    backprop, trajectories = make(**PLAIN), played()
    advantages = np.random.default_rng(1).normal(size=len(trajectories))
    loss = backprop.compute_ppo_loss(trajectories, advantages)
    now = backprop.get_logprobs(trajectories)
    ratio = np.exp(np.concatenate(now) - np.concatenate([sampled(t) for t in trajectories]))
    each = np.repeat(advantages, [len(row) for row in now])
    expected = -np.minimum(ratio * each, np.clip(ratio, 0.8, 1.2) * each).mean()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    clipped = ((each > 0) & (ratio > 1.2)) | ((each < 0) & (ratio < 0.8))
    assert loss.metrics["clip_fraction"] == pytest.approx(clipped.mean(), abs=1e-6)


def test_a_number_for_each_token_counts_for_that_token() -> None:
    backprop, trajectories = make(**PLAIN), played(1)
    logprobs = backprop.get_logprobs(trajectories)
    advantages = [np.linspace(-1.0, 1.0, len(row)) for row in logprobs]
    expected = -(np.concatenate(logprobs) * np.concatenate(advantages)).mean()
    assert backprop.compute_loss(trajectories, advantages).item() == pytest.approx(
        expected, abs=1e-6
    )


def test_losses_add_up() -> None:
    backprop, trajectories = make(kl_coef=0.1, entropy_coef=0.01), played()
    advantages, returns = [1.0, -1.0] * 4, [0.5, 0.25] * 4
    policy = backprop.compute_ppo_loss(trajectories, advantages)
    value = backprop.compute_value_loss(trajectories, returns)
    assert value.item() == pytest.approx(
        0.5 * np.mean(np.repeat(np.square(returns), _lengths(trajectories))), abs=1e-6
    )
    assert (policy + 0.5 * value).item() == pytest.approx(
        policy.item() + 0.5 * value.item(), abs=1e-6
    )
    bare = make(**PLAIN).compute_ppo_loss(trajectories, advantages)
    entropy = backprop.compute_entropy(trajectories).item()
    assert policy.item() == pytest.approx(bare.item() - 0.01 * entropy, abs=1e-5), (
        "the KL is 0 at first"
    )
    with pytest.raises(ConfigError, match="same trajectories"):
        policy + backprop.compute_value_loss(trajectories[:4], returns[:4])


def _lengths(trajectories: list[Trajectory]) -> list[int]:
    return [len(sampled(trajectory)) for trajectory in trajectories]


def test_what_does_not_fit_is_refused() -> None:
    backprop, trajectories = make(**PLAIN), played(1)
    with pytest.raises(ConfigError, match="3 advantages for 4"):
        backprop.compute_loss(trajectories, [1.0] * 3)
    with pytest.raises(ConfigError, match=r"advantages\[0\]"):
        backprop.compute_loss(trajectories, [np.zeros(99), 0.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match=r"advantages\[1\]"):
        backprop.compute_loss(trajectories, [0.0, math.nan, 0.0, 0.0])
    with pytest.raises(ConfigError, match="'an answer'"):
        backprop.compute_loss(["an answer"], [1.0])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="advantages is None"):
        backprop.compute_loss(trajectories, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"advantages\[0\] is 'good'"):
        backprop.compute_loss(trajectories, ["good", 0.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match="LossInputs"):
        backprop.compute_custom_loss(trajectories, [0.0] * 4, None)  # type: ignore[arg-type]


def test_a_loss_of_ones_own_is_a_loss() -> None:
    """−log π · A twice, by the module and by hand."""
    backprop, trajectories = make(**PLAIN), played(1)

    def reinforce(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(aggregate(-inputs.logprobs * inputs.advantages, inputs))

    advantages = [1.0, -1.0, 0.5, 2.0]
    own = backprop.compute_custom_loss(trajectories, advantages, reinforce)
    assert own.item() == pytest.approx(
        backprop.compute_loss(trajectories, advantages).item(), abs=1e-6
    )
    assert backprop.update(own)["grad_norm"] > 0
    wrong = backprop.compute_custom_loss(trajectories, advantages, lambda inputs: 3.0)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="expected LossOutputs"):
        wrong.item()


def test_an_update_goes_down_the_gradient() -> None:
    """AdamW's first step is the rate against the sign of the gradient: compared with differences
    of the loss."""
    backprop, trajectories = make(**PLAIN, learning_rate=1e-4, max_grad_norm=0.0), played()
    loss = backprop.compute_ppo_loss(trajectories, [1.0, -1.0, 0.5, -2.0] * 2)
    slots = backprop.policy.slots
    place = next(i for i, name in enumerate(slots.names) if name.endswith("q_proj.lora_b"))
    before = np.array(slots.read([place])[0])

    def at(index: tuple[int, int], change: float) -> float:
        moved = before.copy()
        moved[index] += change
        slots.write([mx.array(moved)], [place])
        return loss.item()

    entries = [(0, 0), (1, 3), (2, 7), (3, 11)]
    slopes = [(at(entry, 0.02) - at(entry, -0.02)) / 0.04 for entry in entries]
    slots.write([mx.array(before)], [place])
    value = loss.item()
    metrics = backprop.update(loss)
    assert metrics["loss"] == pytest.approx(value, abs=1e-6)
    step = np.array(slots.read([place])[0]) - before
    told = [
        (slope, step[entry])
        for slope, entry in zip(slopes, entries, strict=True)
        if abs(slope) > 1e-4
    ]
    assert len(told) >= 2
    assert all(-np.sign(slope) * moved == pytest.approx(1e-4, rel=0.05) for slope, moved in told)
    assert loss.item() < value
    assert backprop.get_statistics()["updates"] == 1


def test_a_loss_may_be_updated_by_again() -> None:
    """PPO's epochs: the values before stay those of the first time, so the clip of the value
    loss acts later."""
    backprop, trajectories = make(**PLAIN, ppo_clip_range=0.05), played()
    loss = backprop.compute_value_loss(trajectories, [1.0] * len(trajectories))
    fractions = [backprop.update(loss)["value_clip_fraction"] for _ in range(3)]
    assert fractions[0] == 0.0 and fractions[2] == 1.0, "AdamW moves a value by its rate, 0.1"
    fresh = backprop.compute_value_loss(trajectories, [1.0] * len(trajectories))
    assert backprop.update(fresh)["value_clip_fraction"] == 0.0


def test_values_are_learned() -> None:
    backprop, trajectories = make(clip_value_loss=False), played()
    assert all(np.all(values == 0) for values in backprop.compute_values(trajectories))
    for _ in range(8):
        backprop.update(backprop.compute_value_loss(trajectories, [0.5] * len(trajectories)))
    assert np.concatenate(backprop.compute_values(trajectories)).mean() == pytest.approx(
        0.5, abs=0.15
    )


# ---------------------------------------------------------------------- the reference


def test_a_kl_that_divides_by_the_sampler_needs_its_log_probabilities() -> None:
    """The trainer's own stood in: the ratio was 1, and the number k3's."""
    backprop, trajectories = make(**PLAIN, kl_estimator="k3_ratio"), played()
    assert backprop.compute_kl(trajectories).item() == pytest.approx(0.0, abs=1e-7)
    with pytest.raises(ConfigError, match=r'"k3_ratio".*kl_estimator'):
        backprop.compute_kl(
            [replace(trajectory.rollout, logprobs=None) for trajectory in trajectories]
        )


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_stays_until_it_is_updated(lora: bool) -> None:
    backprop, trajectories = (
        make(lora=lora, **PLAIN, learning_rate=2e-3 if lora else 2e-4),
        played(),
    )
    before = backprop.get_logprobs(trajectories)
    assert backprop.compute_kl(trajectories).item() == pytest.approx(0.0, abs=1e-7)
    for _ in range(3):
        backprop.update(backprop.compute_loss(trajectories, [1.0, -1.0] * 4))
    moved = np.concatenate(before) - np.concatenate(backprop.get_logprobs(trajectories))
    kl = backprop.compute_kl(trajectories)
    assert kl.item() == pytest.approx(np.minimum(np.exp(moved) - 1 - moved, 10).mean(), rel=1e-4)
    assert kl.item() > 1e-3
    backprop.update_ref_model("copy")
    assert backprop.compute_kl(trajectories).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("lora", [True, False])
def test_ema_keeps_its_share_of_the_reference(lora: bool) -> None:
    backprop, trajectories = make(lora=lora, **PLAIN, ema_alpha=0.75), played()
    first = [np.array(array) for array in backprop.policy.slots.read()]
    for _ in range(2):
        backprop.update(backprop.compute_loss(trajectories, [1.0, -1.0] * 4))
    backprop.update_ref_model("ema")
    names, now = backprop.policy.slots.names, backprop.policy.slots.read()
    assert backprop.policy.reference_arrays is not None
    compared = 0
    for name, old, new, ref in zip(
        names, first, now, backprop.policy.reference_arrays, strict=True
    ):
        if lora and not name.endswith(".lora_b"):
            continue  # adapter off says nothing of A
        np.testing.assert_allclose(
            np.array(ref), 0.75 * old + 0.25 * np.array(new), atol=1e-6, err_msg=name
        )
        compared += not np.array_equal(old, np.array(new))
    assert compared > 2
    with pytest.raises(ConfigError, match="'copy' or 'ema'"):
        backprop.update_ref_model("mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("lora", [True, False])
def test_a_reference_of_ones_own(lora: bool) -> None:
    config = BackpropConfig(lora=LoraConfig(rank=4) if lora else LoraConfig(enabled=False))
    other, trajectories = make_model("qwen3", seed=5), played()
    backprop = BackpropModule(make_model("qwen3"), ref_model=other, config=config)
    apart = [
        np.concatenate(BackpropModule(model, config=config).get_logprobs(trajectories))
        for model in (other, make_model("qwen3"))
    ]
    d = apart[0] - apart[1]
    assert backprop.compute_kl(trajectories).item() == pytest.approx(
        np.minimum(np.exp(d) - 1 - d, 10).mean(), rel=1e-4
    )
    np.testing.assert_array_equal(np.concatenate(backprop.get_logprobs(trajectories)), apart[1])
    before = backprop.compute_kl(trajectories).item()
    backprop.update_ref_model("ema")  # the other model, an ema_alpha of it
    mixed = dict(tree_flatten(make_model("qwen3", seed=5).parameters()))
    alpha, own = config.ema_alpha, dict(tree_flatten(make_model("qwen3").parameters()))
    mixed = {
        name: alpha * array.astype(mx.float32) + (1 - alpha) * own[name].astype(mx.float32)
        for name, array in mixed.items()
    }
    average = make_model("qwen3")
    average.load_weights([(name, a.astype(own[name].dtype)) for name, a in mixed.items()])
    e = np.concatenate(BackpropModule(average, config=config).get_logprobs(trajectories)) - apart[1]
    assert backprop.compute_kl(trajectories).item() == pytest.approx(
        np.minimum(np.exp(e) - 1 - e, 10).mean(), rel=1e-3
    )
    assert backprop.compute_kl(trajectories).item() != before
    backprop.update(backprop.compute_loss(trajectories, [1.0, -1.0] * 4))
    backprop.update_ref_model("ema")  # with an adapter that is no longer 0
    assert np.isfinite(backprop.compute_kl(trajectories).item())
    backprop.update_ref_model("copy")
    assert backprop.compute_kl(trajectories).item() == pytest.approx(0.0, abs=1e-6)
    wrong = make_model("llama")
    with pytest.raises(ConfigError, match="not of this model's shape"):
        BackpropModule(make_model("qwen3"), ref_model=wrong).compute_values(trajectories)


# ---------------------------------------------------------------------- segments, configuration


def test_an_episode_of_several_segments_is_one_trajectory() -> None:
    early, late = played(1)[:2]
    whole = Rollout(
        **{name: getattr(late.rollout, name) for name in late.rollout.__slots__}
        | {"earlier": (early.rollout,)}
    )
    backprop = make(**PLAIN)
    [together] = backprop.get_logprobs([whole])
    np.testing.assert_array_equal(together, np.concatenate(backprop.get_logprobs([early, late])))
    apart: Loss = backprop.compute_loss([early, late], [2.0, 2.0])
    assert backprop.compute_loss([whole], [2.0]).item() == pytest.approx(apart.item(), abs=1e-7)


def test_one_number_has_many_names() -> None:
    for name in ("clip_ratio", "eps_clip", "clip_epsilon", "ppo_clip_range"):
        assert BackpropConfig(**{name: 0.3}).ppo_clip_range == 0.3
        assert AlgorithmConfig(**{name: 0.3}).ppo_clip_range == 0.3
    with pytest.raises(ConfigError, match=r"ppo_clip_range.*'eps_clip'"):
        BackpropConfig(clip_ratio=0.2, eps_clip=0.3)
    with pytest.raises(ConfigError, match=r"'gama'.*'gamma'"):
        BackpropConfig(gama=1.0)
    with pytest.raises(ConfigError, match=r"gamma: .*1"):
        BackpropConfig(gamma=2.0)
    with pytest.raises(ConfigError, match=r"use_amp.*bfloat16"):
        AlgorithmConfig(use_amp=True)


def test_the_defaults_are_those_of_the_specification() -> None:
    config = BackpropConfig()
    assert (config.gamma, config.gae_lambda, config.ppo_clip_range, config.kl_coef) == (
        0.99,
        0.95,
        0.2,
        0.1,
    )
    assert (config.ppo_epochs, config.entropy_coef, config.max_grad_norm, config.ema_alpha) == (
        4,
        0.01,
        1.0,
        0.99,
    )
    training = make(learning_rate=3e-4).run_config.rl_training
    assert (training.ppo.gamma, training.ppo.gae_lambda, training.clip_ratio, training.kl_beta) == (
        0.99,
        0.95,
        0.2,
        0.1,
    )
    assert training.learning_rate == pytest.approx(3e-4)


def test_an_optimizer_is_read_for_its_numbers() -> None:
    model = make_model("qwen3")
    run = BackpropModule(model, optim.Adam(2e-4, betas=[0.8, 0.9])).run_config.rl_training
    assert (run.optimizer, run.adam_beta1, run.adam_beta2, run.weight_decay) == (
        "adamw",
        0.8,
        0.9,
        0.0,
    )
    assert BackpropModule(model, optim.Lion(1e-4)).run_config.rl_training.optimizer == "lion"
    with pytest.raises(ConfigError, match="SGD: expected one of"):
        BackpropModule(model, optim.SGD(1e-3))
    with pytest.raises(ConfigError, match="schedule"):
        BackpropModule(model, optim.Adam(optim.cosine_decay(1e-3, 10)))
    assert BackpropModule(model, optim.Adam(1e-3, eps=1e-5)).run_config.rl_training.adam_eps == 1e-5
    with pytest.raises(ConfigError, match=r"betas = \[0.8, 0.9\]"):
        BackpropModule(model, optim.Lion(1e-4, betas=[0.8, 0.9]))


def test_an_entropy_bonus_raises_the_entropy() -> None:
    backprop, trajectories = make(**PLAIN, learning_rate=3e-3), played()
    before = backprop.compute_entropy(trajectories)
    value = before.item()
    for _ in range(3):
        backprop.update(-1.0 * backprop.compute_entropy(trajectories))
    assert before.item() > value + 0.01
