"""Whole steps in loops that g++ makes: the same training, and no loop is made anew because a
number has changed."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.models import blockwise
from mlx_parallm.models.cpu import kernels
from mlx_parallm.rl_training.step import optimizer
from mlx_parallm.rl_training.step.batch import TrainBatch
from tests.rl_training.making import (
    assert_same_training,
    make_config,
    make_trainer,
    perturb_adapter,
    weights,
)
from tests.rl_training.rollouts import make_batch, random_groups

pytestmark = [
    pytest.mark.slow,  # g++ makes the loops
    pytest.mark.skipif(
        not kernels.available(),
        reason="without MLX on the CPU and a C++ compiler nothing is fused",
    ),
]


def numbered(step: int) -> TrainBatch:
    """Every number that a loss reads is another one at each step: counts of tokens, temperature,
    KTO's three."""
    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(rollout, temperature=0.6 + 0.1 * step) for rollout in group.rollouts
            ),
        )
        for group in random_groups(4, seed=step)
    ]
    constants = {"kl": 0.1 * step, "desirable": 3.0 + step, "undesirable": 4.0 + step}
    return replace(make_batch(groups, step=step), constants=constants)


def counted(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what the module has compiled."""
    plain, sizes = kernels.fused, list[int]()

    def fused(function: Callable[..., Any], size: int) -> Callable[..., Any]:
        found = plain(function, size)
        sizes.extend([size] * (found is not function))
        return found

    monkeypatch.setattr(module, "fused", fused)
    return sizes


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "grpo", "kl_beta": 0.1},
        pytest.param({"algorithm": "ppo"}, marks=pytest.mark.long),
        pytest.param({"algorithm": "kto"}, marks=pytest.mark.long),
    ],
)
def test_steps_with_other_numbers_take_the_same_loops(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = {module: counted(module, monkeypatch) for module in (blockwise, optimizer)}
    steps = {
        "lr_schedule": "linear",
        "max_grad_norm": 0.1,
        "batch_size": 16,
        "token_budget": 10_000,
    }
    config = make_config(
        learning_rate=1e-3, blocks_per_eval=0, **steps, **values
    )  # blocks, head and loss are one graph
    trainers = [make_trainer(config), make_trainer(config)]
    for trainer in trainers:
        perturb_adapter(trainer.policy)
        trainer.optimizer.reload()
    for step in (1, 2, 3):
        for trainer, fewest in zip(trainers, (1 << 18, 0), strict=True):
            if config.kl_beta:
                trainer.change({"kl_beta": config.kl_beta * step})
            monkeypatch.setattr(kernels, "FEWEST_TO_FUSE", fewest)
            clipped = trainer.train_step(numbered(step)).metrics["grad_norm"] > config.max_grad_norm
        assert clipped, "by another factor at each step"
        assert_same_training(*map(weights, trainers))
        assert not list(tmp_path.rglob("*.so"))
        # where MLX puts a loop that it has not loaded yet
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert all(len(sizes) >= 3 for sizes in compiled.values())
    constant = random.random()
    mx.eval(mx.compile(lambda x: x * constant + 1.0)(mx.zeros((2,))))
    assert list(tmp_path.rglob("*.so")), "a loop with another constant in it is seen"
