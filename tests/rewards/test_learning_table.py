"""The benchmark of learning reads a run's files, and refuses a run that has not been evaluated
at its end."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.real_model_learning import read_run, table
from scripts.bench.real_model_trl import beside_peer


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
    with pytest.raises(SystemExit, match="1 held-out problems have no score"):
        read_run(write_run(tmp_path, (0, [0.0, 0.5]), (3, [1.0, None])))


def test_what_a_run_needed_beside_trl(tmp_path: Path) -> None:
    ours = {"task": "a", "variant": "float32", "seed": 0, "resident_gb": 1.0}
    ours |= read_run(write_run(tmp_path, (0, [0.0]), (2, [0.5]), (3, [1.0])))
    ours["heldout"] = [(0, 0.1), (2, 0.5), (3, 0.9)]
    theirs = ours | {
        "variant": "trl",
        "heldout": [(0, 0.1), (3, 0.4)],
        "answers": [8] * 3,
        "times": [15.0] * 3,
    }
    # Ours is above 0.4 after two steps: 8 + 16 answers (those of dropped groups too) in 3.5 + 4.5
    # s.
    both = [ours, theirs | {"resident_gb": 2.0, "memory_gb": None}]
    steps = "4.00 ÷ 4.00 = 1.00"
    row = (
        "| float32 | 0 | 0.400 | 24 ÷ 24 = 1.00 | 0.13 ÷ 0.75 = 0.18 |"
        f" {steps} | 1.00 ÷ 2.00 = 0.50 |"
    )
    assert beside_peer(both).splitlines()[2:] == [row]
    assert "| 48 ÷ not reached | 0.23 ÷ not reached |" in beside_peer(both, 0.8)
    on_cuda = [ours | {"memory_gb": 3.0}, theirs | {"memory_gb": 12.0}]
    assert beside_peer(on_cuda).endswith("| 3.00 ÷ 12.00 = 0.25 |\n")
    assert len(beside_peer([ours, theirs | {"seed": 1}]).splitlines()) == 2
