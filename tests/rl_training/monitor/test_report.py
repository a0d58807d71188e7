import io
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from mlx_parallm.rl_training.evaluation.comparison import (
    Comparison,
    accuracy_table,
    answers_table,
    compare,
    plain_report,
)
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import estimate
from mlx_parallm.rl_training.monitor.drawing import began_and_now
from mlx_parallm.rl_training.monitor.report import (
    next_commands,
    print_report,
    problems_of,
    smooth,
    write_reward_curve,
)


def lines(count=60):
    return [
        {
            "step": number,
            "reward_mean": 0.75 - 0.4 * math.exp(-number / 20) + 0.05 * math.sin(number * 1.7),
            "kl": 0.001 * number,
            "entropy": 0.5 + 0.4 * math.exp(-number / 15),
        }
        for number in range(1, count + 1)
    ]


def colours(path):
    image = Image.open(path).convert("RGB")
    assert image.size == (1080, 720)
    return {colour for count, colour in image.getcolors(1 << 20) if count > 30}


def test_the_curve_is_a_picture_with_every_line(tmp_path):
    path = write_reward_curve(lines(), tmp_path / "reward.png", title="quickstart")
    drawn = colours(path)
    for ink in ((0x1B, 0x3A, 0x57), (0x9D, 0xBA, 0xD5), (0xB3, 0x54, 0x1E), (0x4B, 0x7F, 0x52)):
        assert ink in drawn
    assert [entry.name for entry in tmp_path.iterdir()] == ["reward.png"]


def test_the_curve_shows_what_was_not_measured(tmp_path):
    only_rewards = [
        {"step": line["step"], "reward_mean": line["reward_mean"], "kl": None} for line in lines(3)
    ]
    drawn = colours(write_reward_curve(only_rewards, tmp_path / "reward.png", title="short"))
    assert (0xB3, 0x54, 0x1E) not in drawn


def test_without_rewards_there_is_no_curve(tmp_path):
    with pytest.raises(ValueError, match="no step has a reward_mean"):
        write_reward_curve([{"step": 1}], tmp_path / "reward.png", title="x")
    assert list(tmp_path.iterdir()) == []


def test_a_curve_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    path = tmp_path / "reward.png"
    path.write_bytes(b"old")

    def full(self, target, **_):
        target.write_bytes(b"half a picture")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space"):
        write_reward_curve(lines(), path, title="x")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_smoothing_is_a_centred_mean():
    assert smooth([0.0, 3.0, 6.0, 3.0], 1) == [1.5, 3.0, 4.0, 4.5]
    assert smooth([1.0, 2.0], 5) == [1.5, 1.5]


def record(texts, keys=("a", "b", "c"), rewards=None, sampled=()):
    """A line of evaluations.jsonl, of one environment."""
    prompts, expected = ("Add 1 and 2.", "Add 2 and 2.", "Add 9 and 9."), ("3", "4", "18")
    rewards = rewards or [float(text == right) for text, right in zip(texts, expected, strict=True)]
    problems, examples = [], []
    for number, (key, reward) in enumerate(zip(keys, rewards, strict=True)):
        problems.append({"key": key, "greedy": reward, "sampled": list(sampled)})
        told = {"text": texts[number], "reward": reward, "error": None}
        examples.append(
            {"key": key, "prompt": prompts[number], "expected": expected[number], **told}
        )
    return {"environments": {"sum": {"numbers": {}, "problems": problems, "examples": examples}}}


@pytest.fixture
def comparisons():
    return compare(record(("3", "5", "8")), record(("3", "4", "8")))


def test_the_same_problems_are_compared(comparisons):
    [row] = comparisons
    assert row.rewards == ((1.0, 1.0), (0.0, 1.0), (0.0, 0.0))
    assert list(row.measured) == [("sum", [1.0, 0.0, 0.0], [1.0, 1.0, 0.0])]
    assert [(then["text"], now["text"]) for then, now in row.examples] == [
        ("3", "3"),
        ("5", "4"),
        ("8", "8"),
    ]
    [moved] = compare(record(("3", "4", "18"), keys=("x", "y", "c")), record(("3", "4", "18")))
    assert [now["prompt"] for _, now in moved.examples] == ["Add 9 and 9."]
    assert moved.rewards == ((1.0, 1.0),)
    assert compare({"environments": {}}, record(("3", "4", "18"))) == []


def test_a_mean_is_rounded_as_the_evaluations_own():
    """0.98, 1, 0.99, 0.98 have the mean 0.9875: added from the left it is 0.98749999, which was
    shown as 0.987."""
    rewards = [0.98, 1.0, 0.99, 0.98]
    assert f"{estimate(rewards).mean:.3f}" == "0.988"
    console = Console(file=io.StringIO(), width=100)
    console.print(accuracy_table([Comparison("sum", tuple(zip(rewards, rewards, strict=True)))]))
    assert console.file.getvalue().count("0.988") == 2
    assert began_and_now(rewards * 2)[:2] == (0.9875, 0.9875)


def test_tables_show_prompt_expected_before_and_after(comparisons):
    console = Console(file=io.StringIO(), width=100)
    console.print(answers_table(comparisons))
    console.print(accuracy_table(comparisons))
    text = console.file.getvalue()
    [line] = [line for line in text.splitlines() if "Add 2 and 2." in line]
    assert [part.strip() for part in line.strip("│").split("│")] == [
        "Add 2 and 2.",
        "4",
        "✗ 5",
        "✓ 4",
    ]
    [line] = [line for line in text.splitlines() if "0.333" in line]
    cells = re.split(r" {2,}", line.strip())
    assert cells == ["sum", "3", "0.333", "0.667", "+0.333", "too few", "1"]


def test_a_first_evaluation_in_the_midst_is_not_called_before(comparisons):
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=120, color_system=None)
        print_report(console, comparisons, [], None, first="after step 2")
        text = console.file.getvalue()
        assert (
            "the same prompts, after step 2" in text
            and "at the end" in text
            and "before" not in text
        )


def test_a_reward_in_between_is_not_part_of_the_answer():
    """The cell was "0.2 44": the answer 44 earned 0.2."""
    row = compare(
        record(("44", "4", "18"), rewards=(0.2, 0.0, 1.0)),
        record(("3", "4", "18"), rewards=(1.0, 0.0, 1.0)),
    )
    console = Console(file=io.StringIO(), width=160)
    console.print(answers_table(row))
    assert "│ reward 0.2: 44 " in console.file.getvalue()


def test_an_answer_cannot_smuggle_in_markup():
    row = compare(record(("[red]", "[/]", "x" * 500)), record(("3", "4", "18")))
    console = Console(file=io.StringIO(), width=160)
    console.print(answers_table(row))
    assert "✗ [red]" in console.file.getvalue()
    assert "✗ [/]" in console.file.getvalue()
    assert "xxx…" in console.file.getvalue()


def test_of_several_turns_the_beginning_and_the_last_answer_are_shown():
    talk = record(("1\n⟦No. " + "x" * 500 + "⟧\n3", "4", "18"), rewards=(1.0, 1.0, 1.0))
    told = plain_report(compare(talk, talk))
    assert "  Add 1 and 2.  [3]  1 ⟦No. xxx" in told and "x… 3 (right) -> 1 ⟦No." in told


def test_the_plain_report_says_the_same(comparisons):
    assert plain_report(comparisons) == (
        "held out, sum: 0.333 -> 0.667 (+0.333, too few for an interval) on 3 problems\n"
        "  Add 1 and 2.  [3]  3 (right) -> 3 (right)\n"
        "  Add 2 and 2.  [4]  5 (wrong) -> 4 (right)\n"
        "  Add 9 and 9.  [18]  8 (wrong) -> 8 (wrong)"
    )


def test_an_interval_needs_more_problems_than_chance_moves_together():
    """One problem that went from 0.25 to 1 had the 95% interval +0.750 to +0.750."""
    for problems, words in (
        (1, "too few for an interval) on 1 problem\n"),
        (6, "95% interval +0.750 to +0.750) on 6"),
    ):
        compared = Comparison("sum", ((0.25, 1.0),) * problems, (), greedy=True)
        assert words in plain_report([compared]) + "\n"


def test_commands_that_are_not_on_the_path_are_given_with_theirs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    command = Path(shlex.split(next_commands(tmp_path, "b", lora=True)[0])[0])
    assert command.name == "mlx_parallm"
    assert command.resolve().is_file()


def test_next_commands_are_shell_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    run = tmp_path / "my run"
    serve, merge = next_commands(run, "builtin:tiny", lora=True)
    assert shlex.split(serve) == [
        "mlx_parallm",
        "serve",
        "--model-path",
        "builtin:tiny",
        "--lora-path",
        str(run / "final"),
    ]
    assert shlex.split(merge)[:2] == ["mlx_parallm", "merge"]
    assert shlex.split(merge)[-2:] == ["--output-path", str(run / "merged")]
    [score] = next_commands(run, "b", lora=True, scores=True)
    assert shlex.split(score)[-3:] == ["b", "--reward-model", str(run)]
    assert next_commands(run, "b", lora=False) == [
        f"mlx_parallm serve --model-path {shlex.quote(str(run / 'final'))}"
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_report_is_printed(comparisons, tmp_path, terminal):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    print_report(
        console,
        comparisons,
        ["command one", "command two"],
        tmp_path / "reward.png",
        tmp_path / "s.html",
    )
    text = console.file.getvalue()
    assert f"reward curve: {tmp_path / 'reward.png'}" in text
    assert f"samples: {tmp_path / 's.html'}" in text
    assert "next: command one" in text and "command two" not in text, "one next command"
    assert ("│" in text) is terminal
    assert "0.667" in text


def test_rewards_that_know_no_full_mark_are_compared_by_their_mean():
    soft = compare(
        record(("a", "b", "c"), rewards=(-0.5, 0.0, 0.0)),
        record(("a", "b", "c"), rewards=(0.25, 0.0, 0.0)),
    )
    assert list(soft[0].measured) == [("sum (mean reward)", [-0.5, 0.0, 0.0], [0.25, 0.0, 0.0])]
    both = compare(
        record(("a", "b", "c"), rewards=(-0.5, 0, 0)),
        record(("a", "b", "c"), rewards=(1.0, 0.5, 0)),
    )
    assert list(both[0].measured) == [
        ("sum", [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]),
        ("sum (mean reward)", [-0.5, 0, 0], [1.0, 0.5, 0]),
    ]
    assert plain_report(soft).startswith(
        "held out, sum (mean reward): -0.167 -> 0.083 (+0.250, too few for an "
    )
    assert "a (-0.5) -> a (0.25)" in plain_report(soft)


def test_sampled_answers_are_compared_by_their_mean():
    only_sampled = record(("3", "4", "8"), rewards=(None, None, None), sampled=(1.0, 0.0))
    [row] = compare(only_sampled, only_sampled)
    assert list(row.measured) == [("sum (mean reward)", [0.5] * 3, [0.5] * 3)]


def test_in_a_narrow_terminal_no_word_breaks_and_a_command_can_be_pasted(tmp_path):
    """At 80 columns "builtin:ti" and "ny" stood on two lines."""
    run = tmp_path / "a directory with a long name" / "run"
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    command = "mlx_parallm " + next_commands(run, "builtin:tiny", lora=True)[1].split(" ", 1)[1]
    print_report(
        console,
        [],
        [command],
        run / "reward.png",
        None,
        ["no answer earned more than half a point in it"] * 2,
    )
    text = console.file.getvalue()
    assert f"reward curve:\n{run / 'reward.png'}\n" in text, "a path stays whole"
    lead, pasted = text[text.index("next:") :].split("\n", 1)
    assert lead == "next:" and max(map(len, pasted.splitlines())) <= 60
    script = f"mlx_parallm() {{ printf '%s\\0' \"$@\"; }}\n{pasted}"
    words = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert words.split("\0")[:-1] == shlex.split(command)[1:]
    piped = Console(file=io.StringIO(), width=60)
    print_report(piped, [], [command], None)
    assert piped.file.getvalue() == f"next: {command}\n"


def test_a_run_that_learned_nothing_says_so_at_its_end(tmp_path):
    """A constant reward ran to its end with 15 equal warnings and no word at the end."""
    shows = {
        "groups": 16,
        "groups_without_variance": 1.0,
        "reward_std": 0.0,
        "reward_mean": 0.5,
        "optimizer_updates": 0,
    }
    steps = [
        {"step": number, "gave_up": f"{number} refills in a row", **shows}
        for number in range(1, 16)
    ]
    first, second, more = problems_of(steps, tmp_path / "run")
    assert first.startswith(
        "nothing was learned: none of the 15 steps has changed the weights; reward constant: every"
        " answer earned 0.5 in 5 steps (the reward function"
    )
    assert first.endswith("see docs/troubleshooting.md#reward-constant")
    assert second == "15 of 15 steps had fewer rollouts, 15 because of: 15 refills in a row"
    assert more.startswith("1 more, and the steps: ")
    assert more.endswith(f"explain {tmp_path / 'run'}")
    well = [{"step": number, "optimizer_updates": 4} for number in range(1, 21)]
    assert problems_of([well[0] | {"gave_up": "12 refills"}, *well[1:]], tmp_path) == [], (
        "a run that learned"
    )
    assert problems_of(well[:1], tmp_path) == problems_of([], tmp_path) == []
