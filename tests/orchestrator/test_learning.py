"""Joint training: the schedule, PPO on kept steps, the acting weights, checkpoints."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.systems.experts import ExpertRegistry, RecurrentPPOConfig
from mlx_parallm.systems.experts.registry import physics_controller
from mlx_parallm.systems.orchestrator import Orchestrator
from mlx_parallm.systems.orchestrator.control import ExpertSteps, direct
from mlx_parallm.systems.orchestrator.learning import (
    STEPS,
    ActingExperts,
    ExpertLearner,
    LearningSchedule,
    piece_of,
)
from mlx_parallm.systems.orchestrator.tool_server import physics_simulate
from mlx_parallm.types import RolloutGroup

PPO = RecurrentPPOConfig(
    epochs=4, batch_size=64, learning_rate=3e-3, gamma=0.9, value_clip=0.0, target_kl=None
)


def learner(schedule: LearningSchedule, seed: int = 0) -> tuple[ExpertLearner, ActingExperts]:
    mx.random.seed(seed)
    registry = ExpertRegistry()
    registry.register(physics_controller("aim"))
    mx.eval(registry.get("aim").parameters())
    acting = ActingExperts(registry, direct)
    return ExpertLearner(acting, schedule, PPO, seed=0), acting


def groups(acting: ActingExperts, count: int, seed: int = 0) -> list[RolloutGroup]:
    """`count` delegations to the acting expert, as the store has them."""
    kept = []
    with ToolClient(functions=[physics_simulate]) as client:
        for number in range(count):
            orchestrator = Orchestrator(
                None, acting.registry, client, explore=True, seed=1000 * seed + number
            )
            orchestrator.reset(
                {"prompt": "Hit it.", "goal": {"target": 120.0, "wind": 0.0, "tolerance": 1.0}}
            )
            orchestrator.step("DELEGATE: aim(target=120, wind=0)")
            kept.append([steps.to_json() for steps in orchestrator.expert_steps])
    kept = json.loads(json.dumps(kept))
    return [RolloutGroup("g", "hybrid", (), metadata={STEPS: kept})]


def weights(expert: Any) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(expert.parameters())}


def test_the_schedule() -> None:
    table = {
        learn: LearningSchedule(learn, alternate_every=2)
        for learn in ("planner", "experts", "alternate", "both")
    }
    planner = {
        learn: [schedule.planner(step) for step in range(1, 6)] for learn, schedule in table.items()
    }
    experts = {
        learn: [schedule.experts(step) for step in range(1, 6)] for learn, schedule in table.items()
    }
    assert (
        planner["planner"] == planner["both"] == experts["experts"] == experts["both"] == [True] * 5
    )
    assert experts["planner"] == planner["experts"] == [False] * 5
    assert planner["alternate"] == [True, True, False, False, True]
    assert experts["alternate"] == [False, False, True, True, False]
    with pytest.raises(ConfigError):
        LearningSchedule("none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        LearningSchedule(min_steps=0)


def test_the_value_behind_a_cut_is_part_of_the_last_reward() -> None:
    steps = ExpertSteps(
        "x", [[0.0]] * 2, [[0.1]] * 2, [-1.0] * 2, [0.5] * 2, [1.0, 2.0], last_value=10.0
    )
    piece = piece_of(steps, RecurrentPPOConfig(gamma=0.9), np.zeros((1, 4)))
    assert piece.rewards.tolist() == [1.0, 11.0]
    discrete = ExpertSteps("x", [[0.0]], [3], [-1.0], [0.5], [1.0])
    assert piece_of(discrete, PPO, np.zeros((1, 4))).raw_actions.dtype == np.int32


@pytest.mark.slow
def test_an_expert_gets_better_and_acts_with_what_it_learned() -> None:
    learning, acting = learner(LearningSchedule("both", min_steps=64))
    before, returns = weights(acting.registry.get("aim")), []
    assert acting.explore and learning.trains_policy(1)
    for step in range(1, 13):
        numbers = learning.learn(step, groups(acting, 16, step))
        returns.append(numbers["experts/aim/return"])
    assert np.mean(returns[-3:]) > np.mean(returns[:3]) + 0.1, returns
    after = weights(acting.registry.get("aim"))
    assert any((before[name] != after[name]).any() for name in before)
    trained = weights(learning.trainers["aim"].expert)
    assert all((trained[name] == after[name]).all() for name in after)
    assert numbers["experts/aim/episodes"] == 16 and numbers["experts/aim/learned_steps"] > 0


def test_the_learning_rate_falls_over_the_run() -> None:
    learning, acting = learner(LearningSchedule("both", min_steps=1))
    trainer = learning.trainers["aim"]
    for step, share in ((1, 1.0), (4, 0.4), (5, 0.2)):
        learning.learn(step, groups(acting, 2, step), total_steps=5)
        assert float(trainer.optimizer.learning_rate) == pytest.approx(
            trainer.config.learning_rate * share
        )
    learning.learn(6, groups(acting, 2, 6))  # a run without an end
    assert float(trainer.optimizer.learning_rate) == pytest.approx(trainer.config.learning_rate)


def test_steps_wait_until_there_are_enough() -> None:
    learning, acting = learner(LearningSchedule("both", min_steps=30))
    first = learning.learn(1, groups(acting, 2, 1))
    assert "experts/aim/learned_steps" not in first
    later = learning.learn(2, groups(acting, 3, 2))
    made = [
        group
        for seed, count in ((1, 2), (2, 3))
        for group in groups(learner(learning.schedule)[1], count, seed)
    ]
    lengths = [
        len(one["rewards"])
        for group in made
        for rollout in group.metadata[STEPS]
        for one in rollout
    ]
    assert later["experts/aim/learned_steps"] == sum(lengths)


def test_frozen_experts_stay_as_they_are() -> None:
    learning, acting = learner(LearningSchedule("alternate", alternate_every=1, min_steps=1))
    before = weights(acting.registry.get("aim"))
    assert not acting.explore and learning.trains_policy(1) and not learning.trains_policy(2)
    learning.learn(1, groups(acting, 4))
    assert acting.explore  # the next step is the experts'
    assert all(
        (before[name] == value).all() for name, value in weights(acting.registry.get("aim")).items()
    )
    learning.learn(2, groups(acting, 4))
    assert not acting.explore
    assert any(
        (before[name] != value).any() for name, value in weights(acting.registry.get("aim")).items()
    )


def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path) -> None:
    schedule = LearningSchedule("both", min_steps=45)

    def steps(
        learning: ExpertLearner, acting: ActingExperts, first: int, last: int
    ) -> dict[str, np.ndarray]:
        for step in range(first, last + 1):
            # fewer than 45 steps: some wait in the checkpoint
            learning.learn(step, groups(acting, 3, step))
        return weights(acting.registry.get("aim"))

    through = learner(schedule)
    expected = steps(*through, 1, 6)
    half, rest = learner(schedule), learner(schedule, seed=9)
    steps(*half, 1, 3)
    half[0].save(tmp_path)
    rest[0].load(tmp_path, 3)
    assert rest[1].explore
    found = steps(*rest, 4, 6)
    assert all((expected[name] == found[name]).all() for name in expected)
    (tmp_path / "waiting.json").unlink()
    with pytest.raises(CheckpointError, match="waiting"):
        rest[0].load(tmp_path, 3)
