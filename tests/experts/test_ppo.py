"""Recurrent PPO: advantages at ends and cuts worked by hand, the first ratio, memory that is
needed, resume."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.losses.ppo import Steps, loss_inputs
from mlx_parallm.systems.experts import (
    ExpertConfig,
    RecurrentPPO,
    RecurrentPPOConfig,
    RNNExpertBase,
    evaluate,
    load_expert,
)
from mlx_parallm.systems.experts.expert import make_expert
from mlx_parallm.systems.experts.recurrent_ppo import Columns, RewardScale, cut, pack
from mlx_parallm.systems.experts.running import exit_in_words
from mlx_parallm.systems.experts.saving import save_expert
from mlx_parallm.systems.experts.vector_tasks import (
    ConstantTask,
    GymnasiumTask,
    ProjectileTask,
    VectorStep,
    flight,
    projectile_observation,
)


class RecallTask:
    """The first observation is ±1; the second and last step shows nothing and pays for the
    action of that sign."""

    obs_dim, action_dim, num_actions, action_low, action_high = 1, 1, 2, -1.0, 1.0

    def __init__(self, num_envs: int, limit: bool = False) -> None:
        self.num_envs, self._limit = num_envs, limit

    def reset(self, seed: int) -> np.ndarray:
        self._random = np.random.default_rng(seed)
        self._second = False
        return self._begin()

    def _begin(self) -> np.ndarray:
        self._sign = self._random.integers(0, 2, self.num_envs)
        return (2.0 * self._sign - 1)[:, None].astype(np.float32)

    def step(self, actions: np.ndarray) -> VectorStep:
        rewards = np.where(self._second, actions == self._sign, 0).astype(float)
        blank = np.zeros((self.num_envs, 1), np.float32)
        ended, never = np.full(self.num_envs, self._second), np.zeros(self.num_envs, bool)
        self._second = not self._second
        observations = blank if self._second else self._begin()
        return VectorStep(
            observations,
            rewards,
            never if self._limit else ended,
            ended if self._limit else never,
            blank,
        )


class UnsureTask(RecallTask):
    """Its reward or its observation is NaN in one of its steps."""

    def __init__(self, part: str) -> None:
        super().__init__(2)
        self._part = part

    def step(self, actions: np.ndarray) -> VectorStep:
        step = super().step(actions)
        getattr(step, self._part)[0] = np.nan if self._second else 0
        return step


def expert_for(task: object, kind: str = "gru", hidden_dim: int = 16) -> RNNExpertBase:
    discrete = task.num_actions > 0  # type: ignore[attr-defined]
    config = ExpertConfig(
        "e",
        obs_dim=task.obs_dim,  # type: ignore[attr-defined]
        action_dim=task.action_dim,  # type: ignore[attr-defined]
        hidden_dim=hidden_dim,
        num_layers=1,
        discrete_actions=discrete,
        num_actions=task.num_actions,  # type: ignore[attr-defined]
        action_low=task.action_low,  # type: ignore[attr-defined]
        action_high=task.action_high,  # type: ignore[attr-defined]
    )
    return make_expert(kind, config)


@pytest.mark.parametrize("part", ["rewards", "observations"])
def test_what_is_no_number_is_not_learned_from(part: str) -> None:
    task = UnsureTask(part)
    ppo = RecurrentPPO(expert_for(task), task, RecurrentPPOConfig(horizon=4))
    with pytest.raises(ConfigError, match=part):
        ppo.collect()


def test_pieces_of_episodes_and_their_advantages() -> None:
    """γ = 0.5, λ = 1; one column of five steps, an end after the second. The horizon cuts the
    second episode.

    Rewards 0, 1 | 0, 0, 2 with γ V = 0.5 · 4 added by the collector: 4. Values 0.5, 0.5 | 0, 1, 2.
    First piece: A = [0 + 0.25 - 0.5 + 0.5 · 0.5, 1 - 0.5] = [0, 0.5].
    Second: A₂ = 4 - 2 = 2; A₁ = 0 + 0.5 · 2 - 1 + 0.5 · 2 = 1; A₀ = 0 + 0.5 · 1 - 0 + 0.5 · 1 = 1.
    """
    column = lambda *numbers: np.array(numbers, np.float32)[:, None]  # noqa: E731
    columns = Columns(
        first_state=np.full((1, 1, 2), 7.0, np.float32),
        observations=np.arange(5, dtype=np.float32)[:, None, None],
        raw_actions=np.arange(5, dtype=np.int32)[:, None],
        log_probs=column(0, 1, 2, 3, 4),
        values=column(0.5, 0.5, 0, 1, 2),
        rewards=column(0, 1, 0, 0, 4),
        ended=np.array([[False], [True], [False], [False], [False]]),
    )
    rows = cut(columns, gamma=0.5, gae_lambda=1.0)
    assert rows.lengths.tolist() == [2, 3]
    np.testing.assert_allclose(rows.advantages, [[0, 0.5, 0], [1, 1, 2]], atol=1e-6)
    assert rows.actions.tolist() == [[0, 1, 0], [2, 3, 4]]
    # only an episode's first piece continues from before
    assert rows.state[:, 0, 0].tolist() == [7.0, 0.0]
    steps = rows.take(np.array([1, 0]), mean=1.0, deviation=2.0)
    # what continues from before is first
    assert steps.mask.tolist() == [[True, True, False], [True, True, True]]
    np.testing.assert_allclose(np.array(steps.advantages)[1], [0, 0, 0.5])
    np.testing.assert_allclose(np.array(steps.returns)[1], [1, 2, 4])
    assert steps.state.state[:, 0, 0].tolist() == [7.0, 0.0] and not steps.state.begins.any()


def test_short_pieces_share_a_row() -> None:
    """Lengths 1, 3, 2, 1, the last with a memory: it begins row 0, the piece of 2 follows it; 3
    fills row 1."""
    line, offset = pack(np.array([1, 3, 2, 1]), np.array([False, False, False, True]))
    assert line.tolist() == [2, 1, 0, 0] and offset.tolist() == [0, 0, 1, 0]


def test_packing_is_first_fit() -> None:
    """Beside a search through all rows; and 50,000 single steps, for which that search would
    take minutes."""
    random = np.random.default_rng(0)
    for _ in range(100):
        lengths = random.integers(1, random.integers(2, 20), random.integers(1, 60))
        remembers = random.random(len(lengths)) < random.choice([0, 0.2, 1])
        room: list[int] = []
        line, offset = pack(lengths, remembers)
        for piece in sorted(
            range(len(lengths)), key=lambda piece: (not remembers[piece], -lengths[piece])
        ):
            fitting = (
                []
                if remembers[piece]
                else [n for n, left in enumerate(room) if left >= lengths[piece]]
            )
            row = fitting[0] if fitting else len(room)
            room += [] if fitting else [lengths.max()]
            assert (line[piece], offset[piece]) == (row, lengths.max() - room[row])
            room[row] -= lengths[piece]
    line, _ = pack(np.ones(50_000, int), np.zeros(50_000, bool))
    assert sorted(line) == list(range(50_000))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_an_episode_in_a_shared_row_counts_as_in_a_row_of_its_own(kind: str) -> None:
    """Log-probabilities, values and gradients of packed rows, beside those of each piece by
    itself."""
    task = ProjectileTask(4)
    ppo = RecurrentPPO(expert_for(task, kind), task, RecurrentPPOConfig(horizon=12))
    for head in (ppo.expert.policy_mean, ppo.expert.value_head):
        head.weight = mx.random.normal(head.weight.shape)
    ppo.collect()
    columns = ppo.collect()
    # short ones; what they contain does not matter here
    columns.ended[[1, 3, 4, 8], [0, 1, 1, 2]] = True
    rows = cut(columns, 0.9, 0.95)
    everything = np.arange(len(rows.lengths))
    together = rows.take(everything, 0.0, 1.0)
    assert (
        together.state.begins.any()
        and len(together.mask) < len(rows.lengths)
        and together.mask.sum() == 48
    )

    def summed(batches: list[Steps]) -> tuple[float, list[mx.array]]:
        def loss(parameters: dict[str, Any]) -> mx.array:
            ppo.expert.update(parameters)
            parts = []
            for batch in batches:
                logprobs, entropy, values = ppo.expert.scores(
                    batch.observations, batch.actions, batch.state
                )
                parts.append((batch.mask * batch.returns * (logprobs + values**2 + entropy)).sum())
            return sum(parts[1:], parts[0])

        value, gradient = mx.value_and_grad(loss)(ppo.expert.trainable_parameters())
        return value.item(), [array for _, array in tree_flatten(gradient)]

    packed, alone = (
        summed([together]),
        summed([rows.take(np.array([row]), 0.0, 1.0) for row in everything]),
    )
    assert packed[0] == pytest.approx(alone[0], rel=1e-4)
    for one, other in zip(packed[1], alone[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-4 * float(mx.abs(other).max()) + 1e-5)


@pytest.mark.parametrize("limit", [False, True])
def test_truncated_is_not_terminated(limit: bool) -> None:
    """A value head that says 3 everywhere: only an episode that was truncated has γ · 3 in its
    last reward."""
    task = RecallTask(4, limit)
    expert = expert_for(task)
    expert.value_head.weight, expert.value_head.bias = mx.zeros((1, 16)), mx.array([3.0])
    columns = RecurrentPPO(expert, task, RecurrentPPOConfig(horizon=3, gamma=0.5)).collect()
    assert columns.ended.tolist() == [[False] * 4, [True] * 4, [False] * 4]
    paid = columns.raw_actions[1] == (columns.observations[0, :, 0] > 0)
    np.testing.assert_allclose(columns.rewards[1], paid + (1.5 if limit else 0.0))
    np.testing.assert_allclose(columns.rewards[2], np.full(4, 1.5))  # cut by the horizon


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_the_first_ratio_is_one_whatever_the_horizon_cuts(kind: str) -> None:
    # some heads drawn at random have a deviation so small that rounding alone moves a ratio by 7e-5
    mx.random.seed(0)
    task = ProjectileTask(8)
    ppo = RecurrentPPO(expert_for(task, kind), task, RecurrentPPOConfig(horizon=7))
    for head in (ppo.expert.policy_mean, ppo.expert.policy_log_std):
        head.weight = mx.random.normal(head.weight.shape)
    for _ in range(3):  # episodes of ten: the second collection begins inside of one
        columns = ppo.collect()
        rows = cut(columns, 0.99, 0.95)
        inputs = loss_inputs(ppo.expert, rows.take(np.arange(len(rows.lengths)), 0.0, 1.0))
        ratio = np.exp(np.array(inputs.logprobs - inputs.rollout_logprobs))[np.array(inputs.mask)]
        np.testing.assert_allclose(ratio, 1.0, atol=1e-5)
    assert np.abs(columns.first_state).max() > 0


def share_remembered(recurrent: bool, kind: str = "gru") -> float:
    mx.random.seed(0)
    task = RecallTask(64)
    config = RecurrentPPOConfig(
        horizon=4, batch_size=256, epochs=4, learning_rate=0.01, target_kl=None, recurrent=recurrent
    )
    history = RecurrentPPO(expert_for(task, kind), task, config).train(20 * 256)
    return float(np.mean([metrics["episode_return"] for metrics in history[-3:]]))


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_what_has_to_be_remembered_is_learned(kind: str) -> None:
    assert share_remembered(True, kind) > 0.95


def test_without_memory_it_cannot_be() -> None:
    assert 0.3 < share_remembered(False) < 0.7


def test_a_constant_is_learned_and_training_may_end_early() -> None:
    mx.random.seed(0)
    task = ConstantTask(32)
    ppo = RecurrentPPO(
        expert_for(task),
        task,
        RecurrentPPOConfig(
            horizon=10, batch_size=320, epochs=4, learning_rate=0.01, reward_scale=0.1
        ),
    )
    ppo.train(20_000, report=lambda metrics: metrics["episode_return"] > 9.5)
    assert ppo.steps < 20_000
    assert 1 - evaluate(ppo.expert, ConstantTask(1), 1, seed=0)[0]["return"] / 10 < 0.1


class ThermostatTask:
    """Keep the wanted temperature: rewards 0 to 1, ten steps, a limit of time."""

    obs_dim, action_dim, num_actions, action_low, action_high = 2, 1, 0, -1.0, 1.0

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> np.ndarray:
        self._random = np.random.default_rng(seed)
        self._begin()
        return self._see()

    def _begin(self) -> None:
        self._now, self._wanted = self._random.uniform(-1, 1, (2, self.num_envs))
        self._steps = 0

    def _see(self) -> np.ndarray:
        return np.stack([self._now, self._wanted], axis=1).astype(np.float32)

    def step(self, actions: np.ndarray) -> VectorStep:
        self._now, self._steps = 0.95 * self._now + 0.3 * actions[:, 0], self._steps + 1
        rewards, last = np.exp(-8 * (self._now - self._wanted) ** 2), self._see()
        late = np.full(self.num_envs, self._steps == 10)
        if late.all():
            self._begin()
        return VectorStep(self._see(), rewards, np.zeros_like(late), late, last)


@pytest.mark.slow
def test_a_task_with_rewards_of_0_to_1_and_a_limit_of_time_is_learned_without_a_setting() -> None:
    """Returns over 100 steps are near 80 there; unscaled, the value loss leaves the policy at
    3.3 to 3.9 of 10."""
    mx.random.seed(0)
    task = ThermostatTask(16)
    ppo = RecurrentPPO(expert_for(task, hidden_dim=32), task)
    history = ppo.train(14_000)
    assert 0.03 < history[-1]["reward_scale"] < 0.12
    assert (
        np.mean(
            [episode["return"] for episode in evaluate(ppo.expert, ThermostatTask(64), 64, seed=9)]
        )
        > 6
    )


def test_the_scale_of_rewards() -> None:
    """Worked in the docstring of `RewardScale`; a fixed one, small returns, no rewards yet;
    later ones count more."""
    ones = np.ones((10, 10))
    scale = RewardScale(None, 0.99)
    assert scale.factor == 1.0
    scale.measure(0 * ones, 0)
    assert scale.factor == 1.0
    scale = RewardScale(None, 0.99)
    scale.measure(ones, 0)
    assert scale.factor == pytest.approx(0.05, rel=1e-4)
    ended = RewardScale(None, 0.99)
    ended.measure(-ones, 10)
    assert ended.factor == pytest.approx(5 / 9.174, rel=1e-3)
    small = RewardScale(None, 0.99)
    small.measure(0.01 * ones, 0)
    assert small.factor == 1.0, "returns of the order of 1 stay as they are"
    fixed = RewardScale(0.1, 0.99)
    fixed.measure(ones, 0)
    assert fixed.factor == 0.1
    for _ in range(50):
        scale.measure(10 * ones, 0)
    assert scale.factor == pytest.approx(0.005, rel=0.01)


def test_a_new_scale_changes_the_units_and_nothing_else() -> None:
    """Values, rewards and the value head go over together: advantages are in proportion,
    log-probabilities the same."""
    task = ConstantTask(4)
    ppo = RecurrentPPO(expert_for(task), task, RecurrentPPOConfig(horizon=5))
    ppo.expert.value_head.bias = mx.array([3.0])
    columns = ppo.collect()
    ratio = ppo.scale.factor
    assert 0.03 < ratio < 0.3, "no episode has ended: a return has a hundred rewards"
    scaled = ppo._rescaled(columns)
    np.testing.assert_allclose(np.array(ppo.expert.value_head.bias), [3.0 * ratio], rtol=1e-5)
    before, after = cut(columns, 0.99, 0.95), cut(scaled, 0.99, 0.95)
    np.testing.assert_allclose(after.advantages, ratio * before.advantages, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after.log_probs, before.log_probs)
    assert ppo._rescaled(scaled) is scaled, "once"


def test_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    task = RecallTask(8)
    first = RecurrentPPO(expert_for(task), task, RecurrentPPOConfig(horizon=4))
    first.train(64)
    first.save(tmp_path / "latest")
    second = RecurrentPPO(
        expert_for(task), RecallTask(8), RecurrentPPOConfig(horizon=4), seed=first.seed
    )
    second.load(tmp_path / "latest")
    assert (second.steps, second.updates) == (first.steps, first.updates)
    rows = cut(first.collect(), 0.99, 0.95)
    for ppo in (first, second):  # the same rows move both to the same weights
        ppo._order = np.random.default_rng(0)
        ppo.update(rows)
    for one, other in zip(*(dict(_flat(p.expert)).items() for p in (first, second)), strict=True):
        np.testing.assert_array_equal(one[1], other[1], err_msg=one[0])
    with pytest.raises(CheckpointError, match="holds another expert"):
        RecurrentPPO(expert_for(task, "lstm"), task).load(tmp_path / "latest")
    file = tmp_path / "latest" / "optimizer.safetensors"
    whole = dict(mx.load(str(file)))
    mx.save_safetensors(
        str(file), {name: mx.full(a.shape, float("nan")) for name, a in whole.items()}
    )
    with pytest.raises(CheckpointError, match="numbers"):
        second.load(tmp_path / "latest")
    mx.save_safetensors(str(file), whole)
    (tmp_path / "latest" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        second.load(tmp_path / "latest")


def _flat(expert: RNNExpertBase) -> list[tuple[str, np.ndarray]]:
    return [(name, np.array(value)) for name, value in tree_flatten(expert.parameters())]


def test_what_does_not_fit_is_refused() -> None:
    task = ProjectileTask(2)
    with pytest.raises(ConfigError, match=r"3.*10"):
        RecurrentPPO(make_expert("gru", ExpertConfig("e", obs_dim=3)), task)
    with pytest.raises(ConfigError, match="the task has 2 actions"):
        RecurrentPPO(make_expert("gru", ExpertConfig("e", obs_dim=10, action_dim=1)), task)
    with pytest.raises(ConfigError, match="needs use_value_head"):
        RecurrentPPO(
            make_expert("gru", ExpertConfig("e", obs_dim=10, action_dim=2, use_value_head=False)),
            task,
        )
    with pytest.raises(ConfigError, match="do not fit the task's 2"):
        RecurrentPPO(make_expert("gru", ExpertConfig("e", obs_dim=1)), RecallTask(2))
    for changes in ({"horizon": 0}, {"gamma": 1.1}, {"learning_rate": float("inf")}):
        with pytest.raises(ConfigError, match="PPO"):
            dataclasses.replace(RecurrentPPOConfig(), **changes)  # type: ignore[arg-type]


def test_the_projectile() -> None:
    """45° at 50 m/s flies 50² / 9.81 = 254.84 m and 7.208 s; wind of 5 m/s adds 18.02 m."""
    assert flight(45.0, 50.0, 0.0) == pytest.approx(254.84, abs=0.01)
    assert flight(45.0, 50.0, 5.0) == pytest.approx(272.86, abs=0.01)
    task = ProjectileTask(3)
    seen = task.reset(0)
    target, wind = seen[:, 0] * 200, seen[:, 3] * 10
    speed = np.sqrt(np.array(target, np.float64) * 9.81)  # 45° without wind
    speed[2] /= 2
    step = task.step(np.stack([np.zeros(3), speed / 50 - 1], axis=1))
    landed = flight(45.0, speed, wind)
    np.testing.assert_allclose(step.last_observations[:, 2] * 200, landed, rtol=1e-5)
    error = np.abs(landed - target)
    assert error[2] > 1
    assert step.rewards[2] == pytest.approx(0.1 * max(0, 1 - error[2] / target[2]) - 0.01, abs=1e-6)
    for _ in range(9):
        step = task.step(np.zeros((3, 2)) - 1)
    assert step.terminated[2] and not step.truncated.any()
    assert step.rewards[2] == pytest.approx(-0.51)
    assert step.observations[2, 4] == 0 and step.last_observations[2, 4] == 1
    np.testing.assert_allclose(
        projectile_observation(100, 50, 150, -5, 3), [0.5, 0.25, 0.75, -0.5, 0.3, 0, 0, 0, 0, 0]
    )


def test_gymnasium() -> None:
    pytest.importorskip("gymnasium")
    task = GymnasiumTask("CartPole-v1", 4, {"max_episode_steps": 30})
    assert (task.obs_dim, task.num_actions) == (4, 2)
    played = evaluate(expert_for(task), task, 6, seed=0)
    assert len(played) == 6 and all(
        episode["return"] == episode["length"] <= 30 for episode in played
    )
    task.reset(0)
    first, ended = None, None
    for _ in range(40):
        first = task.step(np.zeros(4, np.int32))
        if first.ended.any():
            ended = first
            break
    assert ended is not None and ended.terminated.any()
    row = int(np.flatnonzero(ended.ended)[0])
    # fallen; upright again
    assert np.abs(ended.last_observations[row, 2]) > 0.2 > np.abs(ended.observations[row, 2])
    task.close()
    pendulum = GymnasiumTask("Pendulum-v1", 2)
    assert (pendulum.action_dim, pendulum.action_low, pendulum.action_high) == (1, -2.0, 2.0)
    pendulum.close()
    for id, words in (("NoSuch-v0", "NoSuch"), ("FrozenLake-v1", "Box observation")):
        with pytest.raises(ConfigError, match=words):
            GymnasiumTask(id, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "steps", "scores"),
    [
        # what judges it; a good and a bad value of it
        ("train_simple_expert", 640, ("mean_error", 0.0, 1.0)),
        ("train_physics_expert", 2500, ("hit_rates", (1.0, 1.0), (0.0, 0.0))),
        ("train_gymnasium_expert", 640, ("mean_return", 500.0, 0.0)),
    ],
)
def test_an_example_trains_saves_and_goes_on(
    example: str,
    steps: int,
    scores: tuple[str, Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(f"examples.experts.{example}")
    program = [example, "--checkpoint-dir", str(tmp_path)]
    if example == "train_gymnasium_expert":
        pytest.importorskip("gymnasium")
        program += ["--env", "CartPole-v1", "--num-layers", "2"]
    for more in ([], ["--resume"]):
        timesteps = 2 * steps if more else steps
        monkeypatch.setattr("sys.argv", [*program, "--timesteps", str(timesteps), *more])
        module.main()
        assert "best.safetensors" in capsys.readouterr().out
        assert json.loads((tmp_path / "latest" / "state.json").read_text())["steps"] == timesteps
    config = load_expert(tmp_path / "best.npz").config
    assert config.obs_dim in (4, 10) and (config.num_layers == 2) == (
        example != "train_simple_expert"
    )
    best = load_expert(tmp_path / "best.safetensors")
    best.encoder.bias = best.encoder.bias + 1.0  # another expert than the latest
    save_expert(tmp_path / "best.safetensors", best)
    before = (tmp_path / "best.safetensors").read_bytes()
    name, good, bad = scores
    worse = iter([good, bad])
    with monkeypatch.context() as scored:
        scored.setattr(module, name, lambda *_, **__: next(worse, bad))
        module.main()
    assert (tmp_path / "best.safetensors").read_bytes() == before, (
        "a resumed run keeps the best of the run before"
    )
    monkeypatch.setattr("sys.argv", [*program, "--resume", "--kind", "lstm"])
    with pytest.raises(SystemExit) as ended:
        exit_in_words(module.main)
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].startswith("error: ")
