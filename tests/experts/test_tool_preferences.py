"""The preference pairs of train_mistral_dpo, and the command that it becomes."""

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from examples.experts.train_mistral_dpo import (
    sample_pairs,
    training_command,
    write_pairs,
)
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.action_grammar import parse_actions

SIDES = ("chosen", "rejected")
NUMBER = r"-?\d+(?:\.\d+)?"


def test_pairs_prefer_the_right_tool_to_a_guess_and_to_the_wrong_one() -> None:
    pairs = sample_pairs(100, seed=0)
    assert len({pair["prompt"] for pair in pairs}) == 100
    kinds = []
    for pair in pairs:
        sum_ = re.fullmatch(r'TOOL: math_solve\(expression="(\d+) ([+*-]) (\d+)"\)', pair["chosen"])
        rejected = pair["rejected"]
        assert all(
            len(parse_actions(pair[side])) == 1 and not parse_actions(pair[side])[0].error
            for side in SIDES
        )
        if sum_:
            a, sign, b = sum_.groups()
            assert f"{a} {sign} {b}" in pair["prompt"]
            result = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            wrong = f"DELEGATE: physics_controller(target={a}, wind={b})"
            assert rejected == wrong or (
                rejected.startswith("ANSWER: ") and int(rejected[8:]) != result
            )
        else:
            shot = re.fullmatch(
                rf"DELEGATE: physics_controller\(target=({NUMBER}), wind=({NUMBER})\)",
                pair["chosen"],
            )
            assert shot and all(f"{number} m" in pair["prompt"] for number in shot.groups())
            assert 50 <= float(shot[1]) <= 200 and -5 <= float(shot[2]) <= 5
            wrong = f'TOOL: math_solve(expression="{shot[1]} * {shot[2]}")'
            assert rejected == wrong or rejected.startswith("ANSWER: ")
        kinds.append((bool(sum_), rejected.startswith("ANSWER: ")))
    assert {kind: kinds.count(kind) for kind in set(kinds)} == dict.fromkeys(
        set(kinds), 25
    ) and len(set(kinds)) == 4
    assert sample_pairs(60, seed=0) == pairs[:60] and sample_pairs(60, seed=1) != pairs[:60]


def test_a_file_of_ones_own_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "new" / "pairs.jsonl"
    write_pairs(path, 10, seed=0)
    write_pairs(path, 10, seed=0)  # the very same: kept
    assert [json.loads(line) for line in path.read_text().splitlines()] == sample_pairs(10, seed=0)
    with pytest.raises(ConfigError, match="exists with other rows"):
        write_pairs(path, 12, seed=0)
    assert len(path.read_text().splitlines()) == 10
    with pytest.raises(ConfigError, match="--pairs 1"):
        write_pairs(tmp_path / "one.jsonl", 1, seed=0)
    with pytest.raises(ConfigError, match="--data"):
        write_pairs(path / "below_a_file.jsonl", 10, seed=0)


def test_the_command_has_all_that_was_asked_for(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl", 40, seed=0)
    arguments = Namespace(
        model="builtin:tiny",
        data=tmp_path / "pairs.jsonl",
        epochs=2,
        batch_size=8,
        lr=0.002,
        beta=0.2,
        checkpoint_dir=tmp_path / "checkpoints" / "dpo",
        seed=3,
    )
    words = training_command(arguments)
    assert words[:7] == [
        "train",
        "--model",
        "builtin:tiny",
        "--data",
        str(arguments.data),
        "--algorithm",
        "dpo",
    ]
    settings = dict(word.split("=", 1) for word in words[8::2])
    assert int(settings["rl_training.total_steps"]) in (
        8,
        10,
    )  # 36 of 40 pairs are 5 updates of 8; hashes may hold 8 out
    assert (
        settings["rl_training.learning_rate"] == "0.002"
        and settings["rl_training.preference.beta"] == "0.2"
    )
    with pytest.raises(ConfigError, match="at least 1"):
        training_command(Namespace(**vars(arguments) | {"epochs": 0}))
    arguments.data = tmp_path / "nothing.jsonl"
    with pytest.raises(ConfigError, match=r"nothing\.jsonl"):
        training_command(arguments)


@pytest.mark.slow
@pytest.mark.long
def test_it_trains_by_the_projects_own_dpo(tmp_path: Path) -> None:
    """Twelve updates: held-out accuracy from a half to nearly all, and an adapter in the
    project's format."""
    options = {
        "model": "builtin:tiny",
        "data": "pairs.jsonl",
        "pairs": 110,
        "epochs": 1,
        "batch-size": 8,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    program = Path(__file__).parents[2] / "examples" / "experts" / "train_mistral_dpo.py"
    done = subprocess.run(
        [
            sys.executable,
            str(program),
            *words,
            "--create-sample-data",
            "--checkpoint-dir",
            "runs/dpo",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line)
        for line in (tmp_path / "runs" / "dpo" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[0]["eval_before/rewards/accuracies"] == 0.5
    assert lines[-1]["eval/rewards/accuracies"] >= 0.9
    assert (tmp_path / "runs" / "dpo" / "final" / "adapters.safetensors").is_file()
    missing = subprocess.run(
        [sys.executable, str(program), "--model", "builtin:tiny", "--data", "none.jsonl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (
        missing.returncode == 2
        and missing.stderr.startswith("error: ")
        and missing.stderr.count("\n") == 1
    )
