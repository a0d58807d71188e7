"""The verdict on small real trainings of each algorithm: on rows that teach, that contradict each
other, that are few, under a rate that does nothing; and on numbers of a run that ruined a model."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlx_parallm.systems.pipeline.verdict import in_words, verdict_on_lines
from tests.rl_training.data.test_data_training import make_config, make_trainer, source_of

STEPS = 8


def rows(algorithm: str, kind: str) -> list[dict[str, Any]]:
    """`kind`: "plain"; "contradictory", of two answers each is chosen as often; "few"."""
    random, made = Random(1), []
    for number in range(20 if kind == "few" else 60):
        good, bad = "abcdef"[: 1 + number % 5], "uvwxyz"[: 1 + number % 3]
        if kind == "contradictory":
            good, bad = random.sample(["abcd", "uvwx"], 2)
        prompt = f"q{number}"
        if algorithm == "sft":
            made.append({"prompt": prompt, "completion": good})
        elif algorithm == "kto":
            label = number % 2 == 0
            made.append({"prompt": prompt, "completion": good if label else bad, "label": label})
        else:
            made.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return made


@pytest.mark.parametrize(
    ("algorithm", "kind", "rate", "verdict", "why"),
    [
        ("sft", "plain", 1e-2, "better", ""),
        ("sft", "plain", 1e-9, "not better", "their loss is what it was"),
        ("sft", "few", 1e-2, "cannot tell", "too few"),
        ("dpo", "plain", 1e-2, "better", ""),
        # every pair is apart, by a rounding
        ("dpo", "plain", 1e-9, "not better", "their loss is what it was"),
        ("dpo", "contradictory", 1e-2, "not better", "may be chance"),
        ("dpo", "few", 1e-2, "cannot tell", "too few"),
        ("kto", "plain", 1e-2, "better", ""),
        ("kto", "plain", 1e-9, "not better", "their loss is what it was"),
        ("kto", "contradictory", 1e-2, "not better", "may be chance"),
        ("kto", "few", 1e-2, "cannot tell", "too few"),
    ],
)
def test_the_verdict_on_a_small_training(
    algorithm: str, kind: str, rate: float, verdict: str, why: str, tmp_path: Path
) -> None:
    lines = "\n".join(map(json.dumps, rows(algorithm, kind)))
    (tmp_path / "rows.jsonl").write_text(lines)
    values = {"learning_rate": rate, "total_steps": STEPS, "batch_size": 8}
    source = source_of(config := make_config(algorithm, tmp_path, **values))
    source.check_examples(8)
    trainer = make_trainer(config)
    batches, held_out = source.batches(trainer), source.heldout(trainer, STEPS)
    held_out.before()
    for step in range(1, STEPS + 1):
        trainer.train_step(batches.collect(step))
    metrics = [held_out.measure(1), held_out.measure(STEPS)]
    result = verdict_on_lines(algorithm, metrics, held_out.rows)
    assert (result["verdict"], why in in_words(result)) == (verdict, True), in_words(result)
    assert result["better"] == (verdict == "better")


@pytest.mark.parametrize(("method", "share"), [("dpo", "rewards/accuracies"), ("kto", "auc")])
def test_a_ruined_model_is_not_better(method: str, share: str) -> None:
    """Every pair is apart, and the good answers' log-probability went from -0.71 to -15.3."""
    first = {"loss": 0.69, share: 0.5, "logps/chosen": -0.71}
    last = {"loss": 0.1, share: 1.0, "logps/chosen": -15.3}
    lines = [
        {f"eval_before/{key}": value for key, value in first.items()},
        {f"eval/{key}": value for key, value in last.items()},
    ]
    result = verdict_on_lines(method, lines, 20)
    assert result["verdict"] == "not better" and "gives them no more" in in_words(result)
    lines[1]["eval/logps/chosen"] = -2.0
    assert verdict_on_lines(method, lines, 20)["verdict"] == "better"
