"""mlx_parallm compare: runs with hand-made metrics and evaluations, side by side."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlx_parallm import cli
from mlx_parallm.rl_training.monitor.report import INKS
from mlx_parallm.runs.compare import curve, differing, read_runs

SUMS = '[[environments]]\nkind = "tasks"\nname = "sum"\n'


def make_run(
    path: Path,
    rewards: Sequence[float] = (),
    *,
    settings: str = "total_steps = 4",
    rest: str = SUMS,
    answers: Sequence[Sequence[float]] = (),
    environment: str = "sum",
    numbers: dict[str, Any] | None = None,
) -> Path:
    """`answers`: of each evaluation the greedy rewards by problem; it is after the step of its
    number."""
    path.mkdir(parents=True)
    (path / "config.toml").write_text(
        f'[rl_training]\nrun_name = "{path.name}"\n{settings}\n{rest}'
    )
    lines = [
        {
            "step": step,
            "reward_mean": reward,
            "kl": 0.01 * step,
            "entropy": 1.0 / step,
            "tokens": 500,
            "groups": 2,
        }
        | {
            "sequences": 8,
            "optimizer_updates": 2,
            "time_rollout_s": 1.5,
            "time_train_s": 0.5,
            "time_publish_s": None,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluations = [
        {
            "step": step,
            "version": step,
            "seconds": 1.0,
            "score": sum(rewards) / len(rewards),
            "environments": {
                environment: {
                    "numbers": numbers
                    or {"accuracy": 0.8, "accuracy_low": 0.49, "accuracy_high": 0.943},
                    "problems": [
                        {"key": f"p{n}", "greedy": r, "sampled": []} for n, r in enumerate(rewards)
                    ],
                    "examples": [],
                }
            },
        }
        for step, rewards in enumerate(answers)
    ]
    (path / "evaluations.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in evaluations)
    )
    return path


def compare(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert cli.main(["compare", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def cells(text: str, label: str) -> list[str]:
    [line] = [line for line in text.splitlines() if line.startswith(label)]
    return [cell for cell in line.removeprefix(label).split("  ") if cell.strip()]


def test_numbers_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run(tmp_path / "a", (0.1, 0.3, 0.9, 0.5), answers=[[0.0], [1.0]])
    (a / "final").mkdir()
    b = make_run(tmp_path / "b", (0.2, 0.4), settings="total_steps = 4\nlearning_rate = 0.5")
    with (b / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewa')  # it is being written
    text = compare(capsys, a, b)
    assert text.startswith(f"A  {a}\nB  {b}\n")
    rows = {
        "rl_training.learning_rate": None,
        "steps": ["4 of 4, finished", "2 of 4, stopped or killed"],
        # four steps: means of two, (0.1 + 0.3) / 2 and (0.9 + 0.5) / 2; two steps: means of one
        "reward, began → now": ["0.200 → 0.700", "0.200 → 0.400"],
        "reward, best": ["0.700 (to step 4)", "0.400 (to step 2)"],
        "KL, began → now": ["0.0150 → 0.0350", "0.0100 → 0.0200"],
        "entropy, began → now": ["0.750 → 0.292", "1.000 → 0.500"],
        "tokens trained": ["2,000", "1,000"],
        "updates": ["8", "4"],
        "time of the steps": ["8 s (2 a step)", "4 s (2 a step)"],
        "step ": ["1", "–"],
        "sum accuracy": ["0.800 [0.490, 0.943]", "–"],
    }
    for label, expected in rows.items():
        found = [cell.strip() for cell in cells(text, label)]
        assert expected in (None, found), label
    assert [cell.strip() for cell in cells(text, "rl_training.learning_rate")][1] == "0.5"


def test_settings_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = '[[environments]]\nkind = "tasks"\nname = "reverse"\nweight = 2.0\n'
    a = make_run(
        tmp_path / "a", rest='[server]\nport = 1\n[model]\nbase_path = "x"\n' + SUMS + words
    )
    b = make_run(tmp_path / "b", settings="total_steps = 9", rest=SUMS + "group_size = 3\n")
    runs = read_runs([a, b])
    assert differing([run.settings for run in runs]) == {
        "model.base_path": ["x", "builtin:tiny"],
        "rl_training.total_steps": ["4", "9"],
        "environments.sum.group_size": ["8", "3"],
        "environments.reverse": ["there", "–"],
    }
    same = make_run(
        tmp_path / "c" / "a", rest='[server]\nport = 2\n[model]\nbase_path = "x"\n' + SUMS + words
    )
    assert "no setting differs" in compare(capsys, a, same)
    (same / "config.toml").write_text("[rl_training]\nalgorithm = 7\n")
    text = compare(capsys, a, same, b)
    assert "B: its settings are not known: " in text
    assert [cell.strip() for cell in cells(text, "rl_training.total_steps")] == ["4", "–", "9"]


def test_a_secret_of_a_configuration_is_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run(tmp_path / "a", rest='[server]\napi_key = "very-secret-key"\n')
    assert "very-secret" not in compare(capsys, a, make_run(tmp_path / "b", rest=""))


@pytest.mark.parametrize(
    ("after", "words"),
    [
        # eight problems gained and one lost: p = 2 · (1 + 9) / 2⁹ = 0.0390625
        ([1.0] * 8 + [0.0], "B is better than A: sum (at the 5% level"),
        # two gained and none lost: p = 2 / 2² = 0.5
        ([1.0] * 2 + [0.0] * 6 + [1.0], "no significant difference: sum (at"),
        # rewards in between: the interval of the difference leaves out 0, or holds it
        (
            [0.4] * 8 + [0.9],
            "B is better than A: sum (mean reward); no significant difference: sum (at",
        ),
    ],
)
def test_whether_a_difference_is_more_than_chance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after: list[float], words: str
) -> None:
    before = [0.0] * 8 + [1.0]
    a = make_run(tmp_path / "a", (0.1,), answers=[[1.0] * 9, before])
    b = make_run(tmp_path / "b", (0.1,), answers=[after])
    text = compare(capsys, a, b)
    assert words in text
    assert "held-out problems that both answered (A after step 1, B after step 0)" in text
    if words.startswith("B is better than A: sum (at"):
        assert "0.0391" in text


def test_evaluations_that_share_no_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = make_run(tmp_path / "a", (0.1,), answers=[[1.0]])
    b = make_run(tmp_path / "b", (0.1,), answers=[[1.0]], environment="sort")
    text = compare(capsys, a, b)
    assert "A and B answered no held-out problem in common: not comparable" in text
    assert cells(text, "sort accuracy")[0].strip() == "–"


def test_curves_share_their_axes() -> None:
    every, ends = [(1, 0.0), (2, 1.0), (4, 1.0)], (0.0, 1.0)
    assert curve([(1, 0.0), (2, 1.0)], every, ends, 4) == "▁█  "
    assert curve([(4, 0.5)], every, ends, 4) == "   ▅"  # round(0.5 · 7) = 4: the fifth of eight
    assert curve([(1, 0.0), (2, 1.0), (4, 1.0)], every, ends, 2) == "▅█"
    assert curve([(1, 3.0)], [(1, 3.0)], (3.0, 3.0), 3) == "▁"


def test_a_curve_has_no_gaps() -> None:
    """30 steps were spread over 48 columns, with spaces in between."""
    steps = [(step, step % 2) for step in range(1, 31)]
    assert curve(steps, steps, (0.0, 1.0), 48) == "█▁" * 15
    evaluations = [(0, 0.0), (2, 1.0), (4, 0.0)]
    assert curve(evaluations, [*evaluations, (5, 1.0)], (0.0, 1.0), 48) == "▁▁██▁ "


def test_the_scale_of_a_curve_is_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reward is drawn from 0 to 1, as in the panel: 0.433 was ▁."""
    a, b = make_run(tmp_path / "a", (0.433, 1.0)), make_run(tmp_path / "b", (0.433, 0.433))
    lines = compare(capsys, a, b).partition("curves: ")[2].splitlines()
    # 0.433 · 7 = 3.03: the fourth of eight
    assert [line.split() for line in lines[1:3]] == [
        ["reward", "A", "0.433", "▄█", "1.000"],
        ["0", "to", "1", "B", "0.433", "▄▄", "0.433"],
    ]
    assert [line.split() for line in lines[3:5]] == [
        ["KL", "A", "0.010", "▁█", "0.020"],
        ["0.01", "to", "0.02", "B", "0.010", "▁█", "0.020"],
    ]


def test_the_curves_of_all_runs_are_in_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / f"cost ${name}$", [0.1 * name] * 30) for name in (1, 5, 9)]
    text = compare(capsys, *runs, "--png", tmp_path / "runs.png")
    assert f"curves: {tmp_path / 'runs.png'}\n" in text
    image = Image.open(tmp_path / "runs.png").convert("RGB")
    drawn = {colour for count, colour in image.getcolors(1 << 20) if count > 30}
    for ink in INKS[:3]:
        assert tuple(bytes.fromhex(ink[1:])) in drawn
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["runs.png"]


def test_names_of_others_reach_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;pwned\x07"
    runs = [
        make_run(tmp_path / name, (0.1,), answers=[[1.0]], environment=hostile) for name in "ab"
    ]
    text = compare(capsys, *runs)
    assert "]0;pwned" in text and "\x1b" not in text and "\x07" not in text


def test_a_run_on_rows_is_judged_by_its_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path / name, rest="") for name in "ab"]
    for run, losses in zip(runs, ((3.0, 1.0), (2.0, 2.5)), strict=True):
        lines = [
            {"step": n, "loss": loss, "groups": 0, "sequences": 4}
            for n, loss in enumerate(losses, 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = compare(capsys, *runs)
    assert [cell.strip() for cell in cells(text, "loss, began → now")] == [
        "3.000 → 1.000",
        "2.000 → 2.500",
    ]
    assert [cell.strip() for cell in cells(text, "loss, best")] == [
        "1.000 (to step 2)",
        "2.000 (to step 1)",
    ]


def test_a_small_kl_is_no_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [make_run(tmp_path / name, (0.5, 0.5)) for name in "ab"]
    lines = [
        {"step": n, "reward_mean": 0.5, "kl": kl, "groups": 2}
        for n, kl in enumerate((0.0, 3.1e-5), 1)
    ]
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "0.0000 → 3.1e-05" in [
        cell.strip() for cell in cells(compare(capsys, *runs), "KL, began → now")
    ]


def test_loss_and_reward_have_axes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewarded, lost = (
        make_run(tmp_path / "rewarded", (0.0, 1.0)),
        make_run(tmp_path / "lost", rest=""),
    )
    lines = [
        {"step": n, "loss": loss, "groups": 0, "sequences": 4}
        for n, loss in enumerate((9.0, 5.0), 1)
    ]
    (lost / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    curves = compare(capsys, rewarded, lost).partition("curves:")[2]
    rows = [" ".join(row.split()) for row in curves.splitlines()]
    assert "reward, 0 to 1 A 0.000 ▁█ 1.000" in rows and "loss, 5 to 9 B 9.000 █▁ 5.000" in rows
    compare(capsys, rewarded, lost, "--png", tmp_path / "runs.png")
    alone = compare(
        capsys, rewarded, make_run(tmp_path / "b", (0.5,)), "--png", tmp_path / "alone.png"
    )
    assert (
        alone
        and Image.open(tmp_path / "runs.png").height > Image.open(tmp_path / "alone.png").height
    )


def test_what_cannot_be_compared_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (make_run(tmp_path / name) for name in "ab")
    assert "–" in compare(capsys, a, b), "runs that have made no step"
    for arguments, words in (
        ([a, tmp_path / "none"], "none is not a run directory"),
        ([a, b, a], "a is named twice"),
        ([a, b, "--png", tmp_path / "x.png"], "no run has made a step: nothing to draw"),
        ([a] * 27, "27 runs: at most 26"),
    ):
        assert cli.main(["compare", *map(str, arguments)]) == 2
        told = capsys.readouterr()
        assert words in told.err and told.err.count("\n") == 1 and not told.out
    stepped = make_run(tmp_path / "c", (0.5,))
    assert cli.main(["compare", str(a), str(stepped), "--png", str(tmp_path / "no" / "x.png")]) == 2
    assert "x.png: No such file or directory" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", str(a)])
    assert end.value.code == 2 and "two run directories or more" in capsys.readouterr().err
