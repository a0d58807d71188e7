"""tokens.sqlite: a bound on its size that holds through a long run, also after a resume with a
smaller one."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_parallm.rl_training.events import RunEvents, SamplesWritten, StepFinished
from mlx_parallm.rl_training.monitor.recording import TokenLog
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.prepare import StepTokens
from mlx_parallm.run_files.samples import choose_samples
from mlx_parallm.run_files.token_records import TOKENS_FILE, read_tokens
from mlx_parallm.system import log as logs
from mlx_parallm.types import Rollout, RolloutGroup

LENGTH = 500
BOUND = 200_000


def write(log: TokenLog, steps: range) -> None:
    """Each step: a group of two answers of LENGTH tokens, some 21 kB."""
    events = RunEvents()
    log.subscribe(events)
    for step in steps:
        mask = (0, *[1] * (LENGTH - 1))
        values: dict[str, Any] = {"temperature": 1.0, "stop_reason": "stop"}
        texts = [((n + 5,) * LENGTH, mask, (-0.5,) * LENGTH, (step,) * LENGTH) for n in (0, 1)]
        rollouts = [
            Rollout(*text, scores={"reward": float(n)}, **values) for n, text in enumerate(texts)
        ]
        group = RolloutGroup(f"g{step}", "sums", tuple(rollouts))
        sequences = tuple(
            TrainSequence(rollout, (1.0,) * LENGTH, fresh=True) for rollout in rollouts
        )
        count = sum(sequence.trained for sequence in sequences)
        batch = TrainBatch(step, (group,), sequences, BatchStatistics())
        columns = {"trainer_logprobs": np.full(count, step, np.float32)}
        events.emit(StepFinished({"step": step}, batch, StepTokens(columns)))
        events.emit(
            SamplesWritten(step, choose_samples(step, [group], lambda parts: [*map(str, parts)]))
        )
    log.close()


def steps_in(run: Path) -> list[int]:
    with closing(sqlite3.connect(run / TOKENS_FILE)) as connection:
        return [
            step for (step,) in connection.execute("SELECT DISTINCT step FROM tokens ORDER BY step")
        ]


def test_the_oldest_steps_go_first_and_the_bound_holds(tmp_path: Path) -> None:
    write(TokenLog(tmp_path, most_bytes=BOUND), range(1, 101))
    kept = steps_in(tmp_path)
    assert kept == list(range(kept[0], 101)) and 4 <= len(kept) <= 9
    assert (tmp_path / TOKENS_FILE).stat().st_size <= BOUND
    assert read_tokens(tmp_path, "g100", 1, 0)["trainer_logprobs"][-1] == 100
    assert read_tokens(tmp_path, "g1", 1, 0) == {}
    write(TokenLog(tmp_path, step=99, most_bytes=BOUND // 2), range(100, 102))
    later = steps_in(tmp_path)
    assert later == list(range(later[0], 102)) and len(later) < len(kept)
    assert (tmp_path / TOKENS_FILE).stat().st_size <= BOUND // 2, (
        "a file from before gets smaller, too"
    )


def test_a_step_that_never_fits_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure_logging(level="warning")
    write(TokenLog(tmp_path, most_bytes=40_000), range(1, 4))
    printed = "".join(capsys.readouterr())
    assert printed.count("logging.tokens_gb") == 1
    assert steps_in(tmp_path) == []


def test_after_a_failed_write_the_next_step_is_written(tmp_path: Path) -> None:
    log = TokenLog(tmp_path)
    (tmp_path / TOKENS_FILE).mkdir()
    write(log, range(1, 2))
    (tmp_path / TOKENS_FILE).rmdir()
    write(log, range(2, 4))
    assert steps_in(tmp_path) == [2, 3]
