"""The micro-batch follows the measured time of an evaluation."""

from typing import Any

import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.models import blockwise
from mlx_parallm.rl_training.step.collate import FIRST_TOKENS, MicroBatchBudget
from mlx_parallm.system.log import configure_logging
from tests.rl_training.making import assert_same_training, make_config, make_trainer, weights
from tests.rl_training.rollouts import make_batch, random_groups


def pace(**values: Any) -> MicroBatchBudget:
    return MicroBatchBudget(RLTrainingConfig(**({"max_eval_ms": 1000} | values)))


def test_without_a_limit_and_in_deterministic_mode_the_clock_changes_nothing() -> None:
    for found in (pace(max_eval_ms=None), pace(deterministic=True, max_staleness=0)):
        found.observe(9999.0, tokens=8192, rows=8)
        assert found.tokens == 8192


def test_begins_small_and_doubles_while_there_is_time() -> None:
    found = pace()
    assert found.tokens == FIRST_TOKENS
    seen = []
    for _ in range(5):
        found.observe(400.0, tokens=found.tokens, rows=4)
        seen.append(found.tokens)
    assert seen == [1024, 2048, 4096, 8192, 8192]
    found = pace()
    found.observe(1.0, tokens=8, rows=1)
    assert found.tokens == FIRST_TOKENS, "a small micro-batch says nothing about a full one"
    found.observe(600.0, tokens=512, rows=4)
    assert found.tokens == FIRST_TOKENS, "twice as much would not fit"


def test_too_long_an_evaluation_lowers_it() -> None:
    found = pace()
    found.tokens = 4096
    found.observe(2000.0, tokens=4000, rows=8)
    assert found.tokens == 1600


def test_a_single_sequence_that_is_too_long_is_said_once() -> None:
    configure_logging(level="warning")
    found = pace()
    with capture_logs() as logs:
        for _ in range(3):
            found.observe(1500.0, tokens=300, rows=1)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    assert "max_token_length" in logs[0]["event"]


def test_training_is_the_same_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(random_groups(4))
    config = make_config(batch=16, blocks_per_eval=1, token_budget=64)
    whole = make_trainer(config)
    whole.train_step(batch)
    limited = make_trainer(config.model_copy(update={"max_eval_ms": 1000}))
    sizes: list[int] = []
    cut = limited.model.loss_and_gradients

    def observed(tokens: Any, *others: Any) -> Any:
        sizes.append(tokens.inputs.size)
        now[1] = 0.05 * tokens.inputs.size  # seconds an evaluation: 16 tokens take 0.8 s
        return cut(tokens, *others)

    now = [0.0, 0.0]

    def clock() -> float:
        now[0] += now[1]
        return now[0]

    monkeypatch.setattr(blockwise, "perf_counter", clock)
    monkeypatch.setattr(limited.model, "loss_and_gradients", observed)
    limited.train_step(batch)
    assert max(sizes[:1]) > 16
    assert max(sizes[1:]) <= 16
    assert_same_training(weights(whole), weights(limited))
