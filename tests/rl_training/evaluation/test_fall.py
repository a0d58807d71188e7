"""Weights whose evaluation falls go back to the best ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.errors import CheckpointError, ConfigError, RefusedError
from mlx_parallm.rl_training.evaluation.schedule import FallGuard
from mlx_parallm.rl_training.events import EvaluationFinished, RunEvents, Warned
from mlx_parallm.run_files.evaluations import EvaluationLog
from tests.integration.in_process import train_here
from tests.integration.processes import metrics, write_config


def line(step: int, version: int, score: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "version": version,
        "seconds": 1.0,
        "score": score,
        "environments": {},
    }


def guarded(
    tmp_path: Path, max_fall: float, refusal: str | None = None
) -> tuple[EvaluationLog, RunEvents, list[int], list[str]]:
    """A guard with what it goes back to, and its warnings."""
    log, events = EvaluationLog(tmp_path, "eval/score"), RunEvents()
    targets, warnings = list[int](), list[str]()

    def roll_back(version: int) -> None:
        if refusal is not None:
            raise RefusedError(refusal, 409)
        targets.append(version)

    FallGuard(log, max_fall, roll_back).subscribe(events)
    events.subscribe(Warned, lambda event: warnings.append(event.text))
    return log, events, targets, warnings


def test_only_a_fall_beyond_the_bound_goes_back_to_the_first_best(tmp_path: Path) -> None:
    log, events, targets, _ = guarded(tmp_path, 0.1)
    for entry in (line(0, 1, 0.5), line(3, 4, 0.5), line(6, 7, 0.41)):
        log.add(entry)
        events.emit(EvaluationFinished(entry))
    assert targets == []
    log.add(low := line(9, 10, 0.39))
    events.emit(EvaluationFinished(low))
    assert targets == [1]


def test_an_evaluation_without_a_scored_answer_is_no_fall(tmp_path: Path) -> None:
    """The next one was compared with its null: a traceback."""
    log, events, targets, _ = guarded(tmp_path, 0.1)
    for entry in (line(0, 1, 0.5), line(3, 4, None), line(6, 7, 0.45), line(9, 10, 0.2)):
        log.add(entry)
        events.emit(EvaluationFinished(entry))
    assert targets == [1]


@pytest.mark.parametrize(
    ("damage", "where"),
    [
        ({"step": 4}, "version: "),
        (line(4, 5, 0.5) | {"score": "0.5"}, "score: "),
        (line(4, 5, 0.5) | {"environments": 5}, "environments: "),
        (line(4, 5, 0.5) | {"environments": {"sum": {}}}, "environments.sum.numbers: "),
    ],
)
def test_a_line_that_is_no_evaluation_is_told(
    damage: dict[str, Any], where: str, tmp_path: Path
) -> None:
    """It was a traceback, after the resume had replaced config.toml."""
    text = json.dumps(line(2, 3, 0.5)) + "\n" + json.dumps(damage) + "\n"
    (tmp_path / "evaluations.jsonl").write_text(text + '{"step": 6, "skipped": "why"}\n')
    with pytest.raises(CheckpointError, match=f"evaluation of step 4 is damaged: {where}"):
        EvaluationLog(tmp_path)


def test_a_refused_rollback_is_a_warning(tmp_path: Path) -> None:
    log, events, targets, warnings = guarded(tmp_path, 0.0, "another one is not done yet")
    for entry in (line(0, 1, 0.5), line(3, 4, 0.4)):
        log.add(entry)
        events.emit(EvaluationFinished(entry))
    assert (targets, warnings) == ([], ["the evaluation fell, and nothing goes back"])


@pytest.mark.parametrize("missing", ["every", "problems", "keep_best"])
def test_it_needs_evaluations_and_the_best_checkpoint(missing: str) -> None:
    evaluation = {"max_fall": 0.1, "problems": 8, "every": 2}
    training: dict[str, Any] = {"keep_best": missing != "keep_best"}
    evaluation = {key: value for key, value in evaluation.items() if key != missing}
    with pytest.raises(ConfigError, match=r"max_fall|problems is not set"):
        parse_config(
            {
                "evaluation": evaluation,
                "rl_training": training,
                "environments": [{"kind": "tasks", "name": "sum"}],
            }
        )


REWARD = """
def wrong(prompts, completions, **columns):
    return [float("0" in answer) for answer in completions]
"""


@pytest.mark.long
def test_a_run_that_unlearns_goes_back_to_its_start(tmp_path: Path) -> None:
    """It is rewarded for something else than what is evaluated."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(f'{{"prompt": "Sum: {a}+{b}"}}\n' for a in range(2, 9) for b in range(9))
    )
    (tmp_path / "reward.py").write_text(REWARD)
    config = write_config(tmp_path, steps=12, interval=1000)
    text = config.read_text()
    config.write_text(
        text[: text.index("[[environments]]")]
        + f'[[environments]]\nkind = "dataset"\nname = "zeros"\ngroup_size = 8\ndata = "{rows}"\n'
        + f'rewards = ["python:{tmp_path}/reward.py:wrong"]\n'
        + "[evaluation]\nproblems = 40\nevery = 3\nmax_fall = 0.05\n"
        + '[[evaluation.environments]]\nkind = "tasks"\nname = "reverse"\n'
    )

    train_here(config, "rl_training.learning_rate=2e-2")
    went_back = [
        each for each in metrics(tmp_path / "checkpoints" / "run") if each["rolled_back_to"]
    ]
    assert went_back
    assert {each["rolled_back_to"] for each in went_back} == {"version 0"}
