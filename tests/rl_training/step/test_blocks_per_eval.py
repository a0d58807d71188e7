"""How many blocks an evaluation of the training step computes, and how many evaluations that makes."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models import blocks_per_eval
from mlx_parallm.models.blocks_per_eval import BlockLimits, BlockSize, blocks_of, graph_nodes
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.collate import MicroBatchBudget
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.system.device import traits
from tests.rl_training.making import make_config, perturb_adapter
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.step.test_blockwise import batch, objective, with_full_weights, with_lora
from tests.rl_training.tiny_models import SHAPE, make_model

PLENTY = 1 << 30
SIZE = BlockSize(hidden=16, intermediate=32, heads=2, kv_heads=1, head_dim=8)
KEPT, WORK = SIZE.kept(64), SIZE.work(64)


@pytest.mark.parametrize(
    ("changes", "on_cpu", "nodes", "wanted"),
    [
        ({}, False, 0, 8),
        ({"most_bytes": 0}, False, 0, 1),
        ({"most_bytes": int(4 * 100 * KEPT * 3.5)}, False, 0, 3),
        ({"most_blocks": 2}, False, 0, 2),
        ({}, False, 400, 8),
        ({}, False, blocks_per_eval.MOST_NODES // 3 // 5, 5),
        ({}, False, 10 * blocks_per_eval.MOST_NODES, 1),
    ],
)
def test_each_bound_holds(
    changes: dict[str, int], on_cpu: bool, nodes: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traits, "on_cpu", lambda: on_cpu)
    limits = BlockLimits(**{"size": SIZE, "most_bytes": PLENTY} | changes)
    assert limits.blocks(8, tokens=100, span=64, nodes=nodes) == wanted == limits.used


def test_a_cpu_bounds_the_work_of_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traits, "on_cpu", lambda: True)
    limits = BlockLimits(SIZE, most_bytes=PLENTY << 10)
    per_block = int(blocks_per_eval.CPU_WORK / WORK)
    assert [limits.blocks(8, per_block // each, 64) for each in (1, 3, 5, 100)] == [1, 1, 5, 8]


def test_a_configured_number_wins() -> None:
    assert [blocks_of(number, {}) for number in (0, 1, 7)] == [0, 1, 7]
    assert isinstance(blocks_of(None, {"hidden_size": 8}), BlockLimits)


def test_a_graph_is_counted_and_not_evaluated() -> None:
    x = mx.ones((3,))
    mx.eval(x)
    assert graph_nodes(mx.abs(mx.abs(mx.negative(x)))) == 3


@pytest.mark.parametrize("prepare", [with_lora, with_full_weights])
def test_gradients_are_the_same_whichever_number_is_chosen(prepare: Callable[..., Any]) -> None:
    """By memory for 1 to 4 blocks, and by a number that changes from call to call."""
    model, tokens = prepare(make_model()), batch()
    _, _, wanted = BlockwiseModel(model, blocks_per_eval=1).loss_and_gradients(tokens, objective)
    limits = BlockLimits(BlockSize.of({"hidden_size": 16}), most_bytes=PLENTY)
    parts = BlockwiseModel(model, blocks_per_eval=limits)
    scores = []
    for blocks in (1, 2, 3, 4):
        limits.most_blocks = blocks
        _, _, found = parts.loss_and_gradients(tokens, objective)
        assert limits.used == min(blocks, len(model.layers))
        scores.append(parts.score(tokens)[0])
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
    for one, other in itertools.pairwise(scores):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_blocks_give_way_to_a_time_limit_before_tokens_do() -> None:
    limits = BlockLimits(SIZE, most_bytes=PLENTY)
    budget = MicroBatchBudget(1024, 250, limits)
    seen = []
    for longest in (10, 10, 10, 10, 400, 200, 100, 2000, 2000):
        limits.blocks(8, budget.tokens, 64)
        budget.observe(longest, tokens=budget.tokens, rows=4)
        seen.append((budget.tokens, limits.most_blocks))
    assert seen[:4] == [(1024, 1), (1024, 2), (1024, 4), (1024, 8)]
    assert seen[4:7] == [(1024, 4), (1024, 4), (1024, 8)]
    assert seen[7] == (1024, 1) and seen[8] == (102, 1)


def trainer_of(blocks: int | None, algorithm: str, *, lora: bool) -> Trainer:
    """Make a trainer of eight layers."""
    config = make_config(
        lora=lora, algorithm=algorithm, kl_beta=0.1 * (algorithm == "grpo"), blocks_per_eval=blocks
    )
    chosen, options = make_algorithm(config), config
    policy = TrainedPolicy(
        make_model(num_hidden_layers=8),
        options,
        source=Path(__file__).parent,
        model_config=SHAPE | {"model_type": "qwen3"},
        needs_reference=chosen.needs_reference or config.kl_beta > 0,
    )
    perturb_adapter(policy)
    return Trainer(policy, options.model_copy(update={"batch_size": 8}), chosen, eval_bytes=PLENTY)


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("algorithm", ["grpo", "sft", "dpo"])
def test_a_small_step_is_a_few_evaluations(
    algorithm: str, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU is asked, with memory enough: 22 to 33 of them with one block each, 8 to 10 with all
    together."""
    monkeypatch.setattr(traits, "on_cpu", lambda: False)
    counted = [0]
    evaluate = mx.eval

    def counting(*arrays: Any) -> None:
        counted[0] += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counting)
    batch, found = make_batch(random_groups(2)), []
    if algorithm != "grpo":
        batch = replace(batch, groups=())
    for blocks in (1, None):
        trainer = trainer_of(blocks, algorithm, lora=lora)
        counted[0] = 0
        metrics = trainer.train_step(batch).metrics
        assert metrics["optimizer_updates"] == 1
        found.append((counted[0], metrics["grad_norm"]))
    (many, one), (few, other) = found
    assert few <= 10 < 20 < many and other == pytest.approx(one, rel=1e-5)
