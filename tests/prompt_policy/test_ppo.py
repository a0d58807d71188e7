"""Networks, PPO, checkpoints, and what is known about a prompt; numbers worked by hand."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_parallm.errors import CheckpointError
from mlx_parallm.systems.prompt_policy import Experience, PPOConfig, PPOTrainer
from mlx_parallm.systems.prompt_policy.experience import Novelty
from mlx_parallm.systems.prompt_policy.mutation_ppo import advantages_of, parts_of
from mlx_parallm.systems.prompt_policy.networks import PolicyNetwork, ValueNetwork
from tests.prompt_policy.helpers import SIZE, experience, vector

SMALL = PPOConfig(input_dim=SIZE, hidden_dim=8, min_buffer_size=8, batch_size=8, n_epochs=2)


def trained(seed: int, count: int = 32, **changes: object) -> list[Experience]:
    """Experiences of a trainer's own choices, by halves of the sphere: action 0 pays there,
    action 1 here."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(count):
        state = vector(seed * 1000 + number)
        action = int(rng.integers(5))
        reward = float(action == (state[0] > 0))
        found.append(
            Experience(
                state, action, reward, state, True, float(np.log(0.2)), 0.0, sequence=number + 1
            )
        )
    return found


def test_the_networks_have_the_specified_layers() -> None:
    defaults = PPOConfig()
    policy = PolicyNetwork(
        defaults.input_dim,
        defaults.action_dim,
        defaults.hidden_dim,
        dropout=0.1,
        key=mx.random.key(0),
    )
    value = ValueNetwork(defaults.input_dim, defaults.hidden_dim, dropout=0.1, key=mx.random.key(0))
    assert [tuple(layer.weight.shape) for layer in policy.hidden.linear] == [
        (256, 1536),
        (256, 256),
        (128, 256),
    ]
    assert policy.head.weight.shape == (5, 128) and value.head.weight.shape == (1, 128)
    bound = (6 / (1536 + 256)) ** 0.5  # Xavier, uniform
    weight = np.array(policy.hidden.linear[0].weight)
    assert (
        0.99 * bound < np.abs(weight).max() <= bound
        and not np.array(policy.hidden.linear[0].bias).any()
    )
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.01)
    mask = mx.array([[True, False, True, False, False]])
    shares = np.exp(np.array(policy.eval()(mx.zeros((1, 1536)), mask)))[0]
    # zeros in, zeros out: even between what is allowed
    assert shares.tolist() == pytest.approx([0.5, 0, 0.5, 0, 0])


def test_advantages_follow_episodes_however_they_interleave() -> None:
    """γ = 1, λ = 0.5, V = 0.5. Episode a: rewards 0, 1 done → δ = [0, 0.5] → [0.25, 0.5].
    Episode b: reward 0.2, cut → 0.2 + V' - 0.5 = 0.45 with V' = 0.75. Without an id: reward 1,
    done → 0.5."""
    config = PPOConfig(gamma=1, gae_lambda=0.5)
    steps = [
        experience(0, reward=0.0, done=False, episode_id="a"),
        experience(1, reward=0.2, done=False, episode_id="b"),
        experience(2, reward=1.0, done=True, episode_id="a"),
        experience(3, reward=1.0, done=True),
    ]
    advantages, returns = advantages_of(steps, np.full(4, 0.5), np.full(4, 0.75), config)
    assert advantages.tolist() == pytest.approx([0.25, 0.45, 0.5, 0.5])
    assert returns.tolist() == pytest.approx([0.75, 0.95, 1.0, 1.0])


def test_an_id_that_is_used_again_after_its_end_is_another_episode() -> None:
    """ "a+" is its own id. The last step of "a" is cut before a state of value 0."""
    names, ends = ("a", "a", "a+"), (True, False, True)
    steps = [
        experience(n, reward=n / 2, episode_id=name, done=done)
        for n, (name, done) in enumerate(zip(names, ends, strict=True))
    ]
    advantages, _ = advantages_of(steps, np.zeros(3), np.zeros(3), PPOConfig())
    assert advantages.tolist() == [0.0, 0.5, 1.0]


def test_an_update_goes_in_parts_of_whole_episodes() -> None:
    """Episodes of rows 0+2+5, 1, 3, 4, 6: size 3 takes 0+2+5, then 1+3+4, and 6 is too few for a
    part of its own."""
    names = ("a", None, "a", None, None, "a", None)
    steps = [experience(n, episode_id=name, done=n not in (0, 2)) for n, name in enumerate(names)]
    assert parts_of(steps, 3) == [[0, 2, 5], [1, 3, 4, 6]]
    assert parts_of(steps, 2) == [[0, 2, 5], [1, 3], [4, 6]]
    assert parts_of(steps, 100) == [list(range(7))]
    assert [len(part) for part in parts_of([experience(n) for n in range(1000)], 256)] == [
        256,
        256,
        256,
        232,
    ]


def test_the_second_part_is_judged_by_what_the_first_has_taught() -> None:
    """Two parts of one update are two updates, but for the running statistics that are taken of
    all at the end."""
    one, other, steps = (
        *(PPOTrainer(SMALL.model_copy(update={"update_size": 16})) for _ in range(2)),
        trained(1),
    )
    together = one.update(steps)
    apart = [other.update(steps[:16]), other.update(steps[16:])]
    for name in ("policy_loss", "value_loss", "importance", "grad_norm"):
        assert together[name] == pytest.approx((apart[0][name] + apart[1][name]) / 2, rel=1e-5), (
            name
        )
    assert together["first_ratio"] == apart[0]["first_ratio"]
    weights = [trainer.networks.policy.head.weight for trainer in (one, other)]
    assert np.array_equal(np.array(weights[0]), np.array(weights[1]))


def test_the_policy_that_acts_is_the_one_that_was_optimised() -> None:
    """Without dropout, on the experiences of the update: the same probabilities as in training
    mode, but for the factor 256 / 255 that MLX takes the running variance with."""
    trainer, steps = PPOTrainer(SMALL.model_copy(update={"learning_rate": 1e-2})), trained(1, 256)
    trainer.update(steps)
    states = mx.array(np.stack([step.state for step in steps]))
    acting, value = (
        np.array(trainer.networks.policy(states)),
        np.array(trainer.networks.value(states)),
    )
    trainer.networks.train()
    assert np.allclose(np.exp(acting), np.exp(np.array(trainer.networks.policy(states))), atol=0.01)
    assert np.allclose(value, np.array(trainer.networks.value(states)), atol=0.02)


def test_the_first_ratio_is_one_with_dropout_and_batch_normalisation() -> None:
    trainer = PPOTrainer(SMALL.model_copy(update={"dropout": 0.5}))
    for _ in range(2):  # also once running statistics and batches differ
        metrics = trainer.update(trained(1))
        assert (
            metrics["first_ratio"] == pytest.approx(1, abs=1e-6)
            and metrics["first_ratio_error"] < 1e-5
        )
        assert metrics["approx_kl"] > 0  # later ratios are not 1


def test_it_learns_what_pays_and_the_learning_rate_falls() -> None:
    config = SMALL.model_copy(
        update={
            "learning_rate": 1e-2,
            "n_epochs": 6,
            "lr_step": 2,
            "batch_size": 64,
            "hidden_dim": 32,
        }
    )
    trainer, unseen = PPOTrainer(config), trained(9, 200)
    rates = [trainer.update(trained(seed, 512))["learning_rate"] for seed in range(3)]
    assert rates == pytest.approx([1e-2, 1e-2, 9e-3])
    actions = np.array(trainer.networks.act(mx.array(np.stack([e.state for e in unseen])), None)[0])
    # 0.5 is chance of the two that pay
    assert np.mean(actions == [e.state[0] > 0 for e in unseen]) > 0.8


def test_a_reward_reaches_the_steps_that_led_to_it() -> None:
    """Two steps: action 0 of the first leads to a prompt whose step pays 1, whatever is chosen
    there."""
    trainer = PPOTrainer(
        SMALL.model_copy(update={"learning_rate": 1e-2, "n_epochs": 8, "batch_size": 64})
    )
    start, paying, other, rng = vector(0), vector(1), vector(2), np.random.default_rng(0)
    steps, log_prob = [], float(np.log(0.2))
    for number in range(128):
        first, second = rng.integers(5, size=2).tolist()
        middle = paying if first == 0 else other
        steps += [
            Experience(start, first, 0.0, middle, False, log_prob, 0.0, episode_id=str(number)),
            Experience(
                middle,
                second,
                float(first == 0),
                middle,
                True,
                log_prob,
                0.0,
                episode_id=str(number),
            ),
        ]
    trainer.update(steps)
    assert np.exp(np.array(trainer.networks.policy(mx.array(start[None]))))[0, 0] > 0.35


def test_a_masked_action_is_never_chosen_and_no_nan_comes_of_it() -> None:
    allowed = np.array([True, False, True, True, True])
    trainer = PPOTrainer(SMALL)
    steps = [experience(n, action=2 * (n % 3), allowed=allowed, reward=n % 2) for n in range(16)]
    metrics = trainer.update(steps)
    assert all(np.isfinite(value) for value in metrics.values())
    log_probs = np.array(trainer.networks.policy(mx.array(vector()[None]), mx.array(allowed[None])))
    assert np.exp(log_probs)[0, 1] == 0


def test_an_old_choice_counts_less_or_at_most_twice() -> None:
    """The untrained policy is nearly even: π ≈ 0.2. Chosen with 0.05 → weight held at 2; with
    0.4 → about 0.5."""
    trainer = PPOTrainer(SMALL)
    weights = trainer._batch(
        [experience(0, log_prob=np.log(0.05)), experience(1, log_prob=np.log(0.4))]
    ).weights
    assert weights[0] == 2.0 and weights[1] == pytest.approx(0.5, abs=0.1)


def test_a_checkpoint_repeats_what_comes_after_it_to_the_bit(tmp_path: Path) -> None:
    one, other = PPOTrainer(SMALL), PPOTrainer(SMALL.model_copy(update={"seed": 7}))
    for step in trained(1):
        one.observe(step)
    one.update(trained(1))
    one.save(tmp_path / "kept")
    other.load(tmp_path / "kept")
    assert other.summary().to_json() == one.summary().to_json() and other.trained_through == 32
    assert other.uncertainty(vector()) == one.uncertainty(vector()) < 1
    assert other.update(trained(2)) == one.update(trained(2))
    elsewhere = PPOTrainer(SMALL, store_id="another")  # its store numbers other experiences
    elsewhere.load(tmp_path / "kept")
    assert (
        elsewhere.trained_through == 0 == elsewhere.summary().through
        and elsewhere.summary().experiences == 32
    )
    for (_, a), (_, b) in zip(
        tree_flatten(one.networks.parameters()),
        tree_flatten(other.networks.parameters()),
        strict=True,
    ):
        assert np.array_equal(np.array(a), np.array(b))


def test_what_is_no_checkpoint_of_this_policy_is_refused_and_nothing_changes(
    tmp_path: Path,
) -> None:
    trainer = PPOTrainer(SMALL)
    trainer.save(tmp_path / "kept")
    before = tree_map(np.array, trainer.networks.parameters())
    with pytest.raises(CheckpointError, match="checkpoint"):
        trainer.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="sizes"):
        PPOTrainer(SMALL.model_copy(update={"hidden_dim": 16})).load(tmp_path / "kept")
    (tmp_path / "kept" / "optimizer.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError):
        trainer.load(tmp_path / "kept")
    for (_, a), (_, b) in zip(
        tree_flatten(before), tree_flatten(trainer.networks.parameters()), strict=True
    ):
        assert np.array_equal(a, np.array(b))


def test_uncertainty_falls_with_experiences_of_such_prompts_alone() -> None:
    """With λ = 4: after n experiences of one prompt sqrt(4 / (4 + n)); of an orthogonal one it
    stays 1."""
    novelty = Novelty(2, 0)
    novelty._projection = np.eye(2)
    for _ in range(12):
        novelty.add(np.array([2.0, 0.0]))
    assert novelty.uncertainty(np.array([1.0, 0.0])) == pytest.approx((4 / 16) ** 0.5)
    assert novelty.uncertainty(np.array([0.0, 3.0])) == pytest.approx(1)
    assert novelty.uncertainty(np.zeros(2)) == 1
