"""The benchmark of learning reads a run's files, and refuses a run that has not been evaluated
at its end."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.real_model_learning import read_run, table


def write_run(directory: Path, *evaluations: tuple[int, list[float | None]]) -> Path:
    def line(step: int, scores: list[float | None]) -> dict[str, Any]:
        problems = [{"key": f"k{index}", "greedy": score} for index, score in enumerate(scores)]
        answers = [{"text": f"t{index}", "reward": score} for index, score in enumerate(scores)]
        return {
            "step": step,
            "score": 0.0,
            "environments": {"rows": {"problems": problems, "examples": answers}},
        }

    (directory / "evaluations.jsonl").write_text(
        "".join(json.dumps(line(*e)) + "\n" for e in evaluations)
    )
    steps = [
        {
            "step": n,
            "reward_mean": n / 10,
            "time_rollout_s": 1.0 * n,
            "time_train_s": 2.0,
            "memory_gb": 1.0 + n,
        }
        | {"time_publish_s": 0.5, "sequences": 8 * n}
        for n in (1, 2, 3)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return directory


def test_numbers_of_a_run(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path, (0, [0.0, 0.5]), (3, [1.0, 0.5])))
    assert (found["before"], found["after"], found["curve"]) == (
        [0.0, 0.5],
        [1.0, 0.5],
        [0.1, 0.2, 0.3],
    )
    assert (found["step_s"], found["memory_gb"]) == (4.0, 4.0)  # the median of 3, 4, 5; the largest
    assert [answer["text"] for answer in found["best"]] == ["t0"]
    row = table(
        [{"task": "a", "variant": "float32", "seed": 0, "seconds": 90.0} | found]
    ).splitlines()[-1]
    assert (
        row.startswith("| a | float32 | 0 | 0.250 [")
        and "| +50.0 [" in row
        and row.endswith("| 4.0 | 4.00 |  | 1.5 |")
    )


def test_a_run_without_an_end_or_a_score_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="after the last step"):
        read_run(write_run(tmp_path, (0, [0.0, 0.5]), (2, [1.0, 0.5])))
    with pytest.raises(SystemExit, match="1 held-out problems"):
        read_run(write_run(tmp_path, (0, [0.0, 0.5]), (3, [1.0, None])))
