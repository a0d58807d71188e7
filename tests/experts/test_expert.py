"""Experts: probabilities worked by hand, memory, names, files."""

import math
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.systems.experts import (
    ExpertConfig,
    ExpertRegistry,
    GRUExpert,
    LSTMExpert,
    RecurrentPPO,
    RecurrentPPOConfig,
    RNNExpertBase,
    load_expert,
    save_expert,
)
from mlx_parallm.systems.experts.expert import make_expert
from mlx_parallm.systems.experts.registry import arc_solver, physics_controller, planner, scheduler
from mlx_parallm.systems.experts.vector_tasks import ConstantTask

KINDS = ("gru", "lstm")


def small(kind: str = "gru", **changes: object) -> RNNExpertBase:
    settings = {
        "name": "e",
        "obs_dim": 3,
        "action_dim": 2,
        "hidden_dim": 8,
        "num_layers": 2,
    } | changes
    return make_expert(kind, ExpertConfig(**settings))  # type: ignore[arg-type]


def shaken(expert: RNNExpertBase) -> RNNExpertBase:
    """The same with heads that depend on the observation."""
    for head in ("policy_mean", "policy_log_std", "policy_logits"):
        if head in expert:
            expert[head].weight = mx.random.normal(expert[head].weight.shape) * 0.5
    return expert


def test_the_log_probability_of_a_squashed_action() -> None:
    """Mean 0, deviation 1, u = 0.5: log N = -1.043939, log(1 - tanh² 0.5) = -0.240229 → -0.803710.

    Bounds 0 and 4 make the action 2 · (tanh 0.5 + 1) = 2.924234, and the density half: -0.803710 -
    ln 2 = -1.496857.
    """
    for low, high, action, expected in (
        (-1.0, 1.0, math.tanh(0.5), -0.803710),
        (0.0, 4.0, 2.924234, -1.496857),
    ):
        expert = small(action_dim=1, action_low=low, action_high=high)
        expert.policy_log_std.bias = mx.zeros(1)
        log_prob, _, _ = expert.scores(mx.ones((1, 1, 3)), mx.array([[[0.5]]]), None)
        assert log_prob.item() == pytest.approx(expected, abs=1e-5)
        assert expert.environment_action(mx.array(0.5)).item() == pytest.approx(action, abs=1e-6)


def test_the_density_of_actions_sums_to_one() -> None:
    expert = shaken(small(action_dim=1, action_low=-2.0, action_high=3.0))
    grid = np.linspace(-2 + 1e-4, 3 - 1e-4, 4001, dtype=np.float32)
    raw = np.arctanh(2 * (grid + 2) / 5 - 1)
    log_prob, _, _ = expert.scores(mx.ones((4001, 1, 3)), mx.array(raw[:, None, None]), None)
    assert np.trapezoid(np.exp(np.array(log_prob[:, 0], np.float64)), grid) == pytest.approx(
        1.0, abs=1e-3
    )


def test_the_entropy_is_the_mean_of_minus_the_log_probability() -> None:
    expert = shaken(small())
    output = expert.step(mx.ones((20000, 3)), key=mx.random.key(0))
    error = np.array(-output.log_prob - output.entropy)
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(20000)
    discrete = shaken(small(discrete_actions=True, num_actions=4))
    output = discrete.step(mx.ones((20000, 3)), key=mx.random.key(0))
    assert output.entropy[0].item() == pytest.approx(-np.array(output.log_prob).mean(), abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_it_begins_with_orthogonal_weights(kind: str) -> None:
    """Encoder: columns of length √2 at right angles. Each gate: W Wᵀ = 1. An LSTM begins by
    remembering."""
    expert = small(kind, hidden_dim=8)
    np.testing.assert_allclose(
        expert.encoder.weight.T @ expert.encoder.weight, 2 * np.eye(3), atol=1e-5
    )
    wide = small(kind, obs_dim=20, hidden_dim=8).encoder.weight
    np.testing.assert_allclose(wide @ wide.T, 2 * np.eye(8), atol=1e-5)
    for layer in expert.layers:
        for weight in (layer.Wx, layer.Wh):
            for gate in mx.split(weight, weight.shape[0] // 8):
                np.testing.assert_allclose(gate @ gate.T, np.eye(8), atol=1e-5)
        if kind == "lstm":
            assert layer.bias.tolist() == [0.0] * 8 + [1.0] * 8 + [0.0] * 16
        else:
            assert not layer.b.any() and not layer.bhn.any()
    assert expert.step(mx.random.normal((5, 3))).value.tolist() == [0.0] * 5


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_says_what_was_said_at_each_step(kind: str, discrete: bool) -> None:
    """Ten steps with the memory carried on = one replay of the row, also from the middle."""
    expert = shaken(small(kind, discrete_actions=discrete, num_actions=4 if discrete else 0))
    observations, state, steps = mx.random.normal((5, 10, 3)), None, []
    states = []
    for t in range(10):
        states.append(state)
        steps.append(expert.step(observations[:, t], state))
        state = steps[-1].hidden
    raw = mx.stack([step.raw for step in steps], axis=1)
    for first in (0, 4):
        log_probs, entropy, values = expert.scores(
            observations[:, first:], raw[:, first:], states[first]
        )
        for t in range(first, 10):
            np.testing.assert_allclose(log_probs[:, t - first], steps[t].log_prob, atol=1e-5)
            np.testing.assert_allclose(entropy[:, t - first], steps[t].entropy, atol=1e-5)
            np.testing.assert_allclose(values[:, t - first], steps[t].value, atol=1e-5)
    forgetful, _, _ = expert.scores(observations[:, 4:], raw[:, 4:], None)
    assert np.abs(np.array(forgetful[:, 0] - steps[4].log_prob)).max() > 1e-3


def test_the_experts_own_memory() -> None:
    expert, seen = shaken(small()), np.ones(3)
    first, second = expert(seen, deterministic=True), expert(seen, deterministic=True)
    assert first["action"].shape == (2,) and first["value"].shape == ()
    assert np.abs(np.array(first["action"] - second["action"])).max() > 1e-4
    expert.reset_hidden()
    np.testing.assert_array_equal(expert(seen, deterministic=True)["action"], first["action"])
    with pytest.raises(ValueError, match="reads 3 numbers"):
        expert(np.ones(4))
    with pytest.raises(ValueError, match="reset_hidden"):
        expert(np.ones((2, 3)))


@pytest.mark.parametrize(
    "changes",
    [
        {"obs_dim": 0},
        {"num_layers": 0},
        {"dropout": 1.0},
        {"discrete_actions": True, "num_actions": 1},
        {"action_low": 1.0, "action_high": 1.0},
        {"action_high": math.inf},
        # what would have no effect
        {"num_actions": 3},
        {"discrete_actions": True, "num_actions": 3, "action_high": 2.0},
        {"discrete_actions": True, "num_actions": 3, "action_low": -2.0},
        {"num_layers": 1, "dropout": 0.1},
    ],
)
def test_impossible_shapes(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="expert 'e'"):
        small(**changes)


def test_the_ready_made_ones() -> None:
    assert isinstance(physics_controller(), GRUExpert) and isinstance(planner(), LSTMExpert)
    assert (scheduler(4).config.obs_dim, scheduler(4).config.action_dim) == (17, 6)
    assert arc_solver()(np.zeros(1805))["action"].item() in range(20)


def test_a_registry(tmp_path: Path) -> None:
    registry = ExpertRegistry()
    first = registry.register(shaken(small()), "first")
    registry.create("lstm", ExpertConfig("second", obs_dim=3, hidden_dim=8))
    assert registry.list() == ["first", "second"] and "first" in registry and len(registry) == 2
    once = registry.step("first", np.ones(3), deterministic=True)["action"]
    registry.step("first", np.ones(3))
    registry.reset_all()
    np.testing.assert_array_equal(
        registry.step("first", np.ones(3), deterministic=True)["action"], once
    )
    assert set(registry.get_all_parameters()) == {"first", "second"}
    with pytest.raises(ConfigError, match="already"):
        registry.register(first, "first")
    with pytest.raises(ConfigError, match="'third'"):
        registry.get("third")
    registry.save(tmp_path)
    others = ExpertRegistry()
    others.load(tmp_path)
    np.testing.assert_array_equal(
        others.step("first", np.ones(3), deterministic=True)["action"], once
    )
    assert isinstance(others.get("second"), LSTMExpert)
    with pytest.raises(ConfigError, match="has no expert"):
        others.load(tmp_path / "nowhere")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_file_and_its_other_name(tmp_path: Path, suffix: str) -> None:
    expert = shaken(small("lstm"))
    save_expert(tmp_path / f"best{suffix}", expert)
    assert [path.name for path in tmp_path.iterdir()] == [f"best{suffix}"]
    for asked in (".npz", ".safetensors"):
        loaded = load_expert(tmp_path / f"best{asked}")
        assert loaded.config == expert.config
        np.testing.assert_array_equal(
            loaded(np.ones(3), True)["action"], expert(np.ones(3), True)["action"]
        )
        expert.reset_hidden()


class Careful(GRUExpert):
    """An expert of a user's: the same network, other behaviour."""

    def environment_action(self, raw: mx.array) -> mx.array:
        return 0.5 * super().environment_action(raw)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_subclass_comes_back_as_itself_or_not_at_all(tmp_path: Path, suffix: str) -> None:
    """By the registry, by `load_expert`, by the trainer's checkpoint; a file never decides what
    code is run."""
    own = Careful(ExpertConfig("own", obs_dim=4, hidden_dim=8))
    save_expert(tmp_path / f"own{suffix}", own)
    with pytest.raises(CheckpointError, match="load_expert"):
        load_expert(tmp_path / f"own{suffix}", LSTMExpert)
    assert type(load_expert(tmp_path / f"own{suffix}", LSTMExpert, Careful)) is Careful
    registry = ExpertRegistry()
    registry.register(own)
    registry.register(GRUExpert(own.config), "plain")
    registry.save(tmp_path / "experts")
    registry.load(tmp_path / "experts")
    assert (type(registry.get("own")), type(registry.get("plain"))) == (Careful, GRUExpert)
    seen = np.ones(4)
    np.testing.assert_array_equal(
        registry.step("own", seen, True)["action"], own(seen, True)["action"]
    )
    with pytest.raises(CheckpointError, match=r"registry\.load"):
        ExpertRegistry().load(tmp_path / "experts")
    other = ExpertRegistry()
    other.load(tmp_path / "experts", Careful)
    assert type(other.get("own")) is Careful
    trainer = RecurrentPPO(own, ConstantTask(2), RecurrentPPOConfig(horizon=2))
    trainer.save(tmp_path / "latest")
    trainer.load(tmp_path / "latest")
    with pytest.raises(CheckpointError, match="Careful"):
        RecurrentPPO(GRUExpert(own.config), ConstantTask(2)).load(tmp_path / "latest")


def test_files_that_are_no_experts(tmp_path: Path) -> None:
    path, expert = tmp_path / "e.safetensors", small()
    with pytest.raises(CheckpointError, match="there is no such expert"):
        load_expert(path)
    save_expert(path, expert)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"nonsense" * 10):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"e\.safetensors"):
            load_expert(path)
    expert.encoder.bias = mx.full((8,), math.nan)
    save_expert(path, expert)
    with pytest.raises(CheckpointError, match=r"encoder\.bias"):
        load_expert(path)
    with pytest.raises(CheckpointError, match="saved as"):
        save_expert(tmp_path / "e.bin", expert)
