"""[evaluation] in a whole run, and the command on what it left: its best checkpoint answers as
the run said."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.in_process import train_here
from tests.integration.processes import BIN, metrics, write_config

STEPS, EVERY, PROBLEMS = 12, 3, 24


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]


def rewards(record: dict[str, Any]) -> dict[str, float]:
    parts = record["environments"].values()
    return {problem["key"]: problem["greedy"] for part in parts for problem in part["problems"]}


def differing(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Problems that were answered rightly by one of two evaluations only."""
    one, other = rewards(a), rewards(b)
    assert one.keys() == other.keys()
    return sum(one[key] != other[key] for key in one)


@pytest.mark.slow
@pytest.mark.long
def test_the_best_checkpoint_is_the_one_that_answered_best_while_training_went_on(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, steps=STEPS, interval=1000)
    settings = (
        f"evaluation.problems={PROBLEMS}",
        f"evaluation.every={EVERY}",
        "rl_training.keep_checkpoints=1",
    )
    train_here(
        config,
        *settings,
        "rl_training.learning_rate=5e-3",
        "rl_training.keep_best=eval/score",
        "logging.sample_every=4",
    )
    run = tmp_path / "checkpoints" / "run"
    lines, found = {line["step"]: line for line in metrics(run)}, evaluations(run)
    done = [line for line in found if "skipped" not in line]
    assert {line["step"] for line in found} == {0, *range(EVERY, STEPS + 1, EVERY)}
    assert done[-1]["step"] == lines[STEPS]["eval/step"] == STEPS
    for line in done[1:]:
        assert line["version"] == lines[line["step"]]["policy_version"], (
            "of the weights of its own step"
        )
    late = [
        line for line in lines.values() if "eval/step" in line and line["eval/step"] < line["step"]
    ]
    assert late, "training continued meanwhile"
    assert all(line["policy_version"] > line["eval/version"] for line in late)

    _, step = max((line["score"], line["step"]) for line in done if line["step"])
    best = (run / "best").resolve()
    assert best.name == f"step_{step:06d}", [(line["step"], line["score"]) for line in done]
    [then] = [line for line in done if line["step"] == step]
    assert max(differing(then, line) for line in done) > 3, "versions answer differently"
    assert (run / "samples.html").read_text().count("<article>") == 9

    out = tmp_path / "results"
    command = [
        str(BIN / "mlx_parallm_eval"),
        "--config",
        str(run / "config.toml"),
        "--lora-path",
        str(run / "best"),
    ]
    ended = subprocess.run(
        [*command, "--output", str(out)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 0, ended.stderr
    # the same weights in other company: the last bits of a log-probability may differ, and with
    # them a near tie
    assert differing(then, json.loads((out / "results.json").read_text())) <= 1
