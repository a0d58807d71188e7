"""`mlx_parallm_explain` on run directories in every state: going on, killed, without a step,
none at all."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_parallm import cli
from mlx_parallm.config.load import Config
from mlx_parallm.environments.base import NEVER_DONE
from mlx_parallm.rl_training.rollout_buffer import NO_VARIANCE, TOO_OLD
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.directory import STORE_FILE, RunDirectory
from mlx_parallm.run_files.metrics import METRICS_FILE, complete
from mlx_parallm.runs.explain import Explanation, explain
from mlx_parallm.runs.run import open_run
from tests.rl_training.rollouts import make_group

AGO = 600.0
WELL = {
    "reward_mean": 0.5,
    "reward_std": 0.5,
    "groups": 16,
    "groups_without_variance": 0.2,
    "time_rollout_s": 1.0,
}


def line(step, **changed):
    return json.dumps(complete(WELL | {"step": step} | changed)) + "\n"


@pytest.fixture
def directory(tmp_path):
    """A run of 50 steps, ten minutes ago, that is not held by a process."""
    config = Config.model_validate(
        {"rl_training": {"total_steps": 50, "checkpoint_dir": tmp_path, "run_name": "run"}}
    )
    opened = RunDirectory.open(tmp_path, "run", None)
    opened.write_config(config.saved_as(opened.path.name))
    opened.close()
    age(opened.path / "config.toml", AGO)
    return opened.path


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def explained(path: Path) -> Explanation:
    return explain(open_run(path))


def write(directory, text):
    (directory / METRICS_FILE).write_text(text)


def names(explanation):
    return [finding.diagnosis.name for finding in explanation.findings]


def test_steps_are_named_and_stretches_joined(directory):
    lines = [
        line(step, truncated_fraction=0.5 if 10 <= step < 20 or step >= 40 else 0.0)
        for step in range(1, 51)
    ]
    write(directory, "".join(lines))
    (finding,) = explained(directory).findings
    assert finding.diagnosis.name == "truncation"
    assert finding.steps == ((7, 22), (37, 50))


def test_a_half_written_line_is_no_harm(directory, capsys):
    write(directory, line(1) + line(2) + '{"step": 3, "rew')
    assert cli.explain([str(directory)]) == 0
    told = capsys.readouterr().out
    assert "(of the first and the last step)" in told
    assert "run: 2 of 50 steps, stopped or killed" in told
    assert "healthy: nothing found" in told


def test_a_run_that_goes_on_is_left_alone(directory):
    write(directory, line(1))
    held = RunDirectory.hold(directory)
    try:
        assert explained(directory).state == "running"
        age(directory / METRICS_FILE, AGO)
        assert names(explained(directory)) == ["environment-stalled"]
        write(directory, line(50))
        assert names(explained(directory)) == []  # its last step is made: it waits for nothing
    finally:
        held.close()
    assert explained(directory).state == "stopped or killed"


def test_a_pause_is_no_stalled_environment(directory):
    """By a client's POST /pause or on the dashboard; until somebody resumes, or another process
    continues."""
    write(directory, line(1))
    age(directory / METRICS_FILE, AGO)
    log = directory / "run.log"
    held = RunDirectory.hold(directory)
    try:
        log.write_text('{"event": "paused", "by": "POST /pause"}\nnot json "paused"\n')
        (finding,) = explained(directory).findings
        assert (
            finding.diagnosis.name == "paused"
            and "paused by POST /pause: step 2" in finding.diagnosis.sentence
        )
        for later in ("resumed", "configuration written"):
            log.write_text(
                f'{{"event": "paused", "by": "the dashboard"}}\n{{"event": "{later}"}}\n'
            )
            assert names(explained(directory)) == ["environment-stalled"]
    finally:
        held.close()


def test_a_step_of_the_run_means_the_run(directory):
    write(directory, line(1))
    (directory / "step_000001").mkdir()
    (directory / "latest").symlink_to("step_000001")
    assert explained(directory / "latest").run == "run"


@pytest.fixture
def store(directory):
    opened = RolloutStore(directory / STORE_FILE)
    yield opened
    opened.close()


def test_without_a_step_and_a_group_it_was_the_environment(directory):
    (finding,) = explained(directory).findings
    assert finding.diagnosis.name == "environment-stalled"
    assert (
        "no group of rollouts ever came, step 1 waits for its batch" in finding.diagnosis.sentence
    )


def test_without_a_step_the_log_tells_of_episodes_that_nothing_ends(directory):
    """The environment was called stalled: its first group took minutes."""
    reason = "64 turns and nothing set state.done: Guess.update_state has to set it"
    entry = {"level": "warning", "event": NEVER_DONE, "environment": "guess", "reason": reason}
    (directory / "run.log").write_text('{"event": "resumed"}\n' + json.dumps(entry) + "\n")
    (finding,) = explained(directory).findings
    assert (finding.diagnosis.name, finding.diagnosis.sentence) == (
        "episodes-never-end", f"episodes never end: {reason}",
    )  # fmt: skip


def test_without_a_step_the_refused_groups_say_why(directory, store):
    for number in range(4):
        store.reject({"n": number}, source="environments", reason="reward: KeyError: 'answer'")
    store.close()
    first, *_ = explained(directory).findings
    assert first.diagnosis.name == "groups-refused"
    assert (
        "4 of 4; the most frequent reason: reward: KeyError: 'answer'" in first.diagnosis.sentence
    )


@pytest.mark.parametrize(
    ("rewards", "count", "reason", "found"),
    [
        ([0.5] * 4, 40, NO_VARIANCE, "reward-constant"),
        ([0.0, 1.0], 6, TOO_OLD, "stale-rollouts"),
        ([0.0, 1.0], 1, None, None),  # in training: no stall
    ],
)
def test_without_a_step_the_groups_that_came_are_looked_at(
    directory, store, rewards, count, reason, found
):
    groups = [make_group(f"g{number}", rewards) for number in range(count)]
    for group in groups:
        store.add(group, source="environments")
    ids = [group.group_id for group in groups]
    if reason is None:
        store.take(ids, 1)
    else:
        store.drop(ids, 1, reason)
    store.close()
    assert found in names(explained(directory)) if found else names(explained(directory)) == []


def test_a_damaged_database_does_not_hide_the_rest(directory):
    write(directory, "".join(line(step) for step in range(1, 51)))
    (directory / STORE_FILE).write_bytes(b"rubbish" * 100)
    explanation = explained(directory)
    assert names(explanation) == []
    assert (
        explanation.notes[0].startswith("the rollouts cannot be read: ")
        and "not a database" in explanation.notes[0]
    )
    (directory / METRICS_FILE).unlink()
    assert names(explained(directory)) == [], "rollouts that cannot be read are not missing"


def test_nothing_found_and_nothing_gained_is_said(directory):
    write(directory, "".join(line(step, learning_rate=1e-3) for step in range(1, 31)))
    assert explained(directory).notes == (
        "the reward has not risen by more than chance, 0.500 to 0.500 at a learning_rate of"
        " 0.001; what to try:"
        " docs/troubleshooting.md#nothing-found",
    )
    write(directory, "".join(line(step, reward_mean=0.5 + step / 60) for step in range(1, 31)))
    assert explained(directory).notes == ()


def test_a_reward_that_rises_slowly_is_not_called_still(directory):
    """33 steps of the quickstart went from 0.328 to 0.476, less than half a deviation: "the
    reward has not risen"."""
    lines = [
        line(step, reward_mean=0.33 if step < 15 else 0.48, groups=24) for step in range(1, 31)
    ]
    write(directory, "".join(lines))
    assert explained(directory).notes == (
        (
            "the reward rises slowly, 0.330 to 0.480; what to try:"
            " docs/troubleshooting.md#nothing-found"
        ),
    )


RIGHT, WRONG = {"greedy": 1.0, "sampled": []}, {"greedy": 0.0, "sampled": []}


def evaluation(step, right, of=40, texts=()):
    problems = [{"key": str(n)} | (RIGHT if n < right else WRONG) for n in range(of)]
    examples = [
        {
            "key": str(n),
            "prompt": prompt,
            "text": text,
            "reward": reward,
            "expected": None,
            "error": None,
        }
        for n, (prompt, text, reward) in enumerate(texts)
    ]
    part = {"numbers": {}, "problems": problems, "examples": examples}
    return json.dumps(
        {
            "step": step,
            "version": step,
            "seconds": 1.0,
            "score": right / of,
            "environments": {"e": part},
        }
    )


@pytest.mark.parametrize(
    ("right", "reward", "words", "differ"),
    [
        # only the held-out score rises
        ((8, 30), 0.0, "held out, e: 0.200 after step 0, 0.750 after step 30", True),
        ((8, 30), 0.4, "held out, e: 0.200 after step 0, 0.750 after step 30", False),  # both
        ((8, 9), 0.4, "0.225 after step 30, which may be chance", True),  # only the training reward
        # it has fallen
        ((30, 8), 0.0, "held out, e: 0.750 after step 0, 0.200 after step 30", True),
        ((8, 9), 0.0, "which may be chance", False),  # neither
    ],
    ids=["held out", "both", "training", "fallen", "neither"],
)
def test_both_curves_are_told_and_which_one_to_believe(
    directory, capsys, right, reward, words, differ
):
    write(
        directory,
        "".join(line(step, reward_mean=0.3 + reward * (step > 15)) for step in range(1, 31)),
    )
    (directory / "evaluations.jsonl").write_text(
        f"{evaluation(0, right[0])}\n{evaluation(30, right[1])}\n"
    )
    explanation = explained(directory)
    assert any("believe the held-out score" in note for note in explanation.notes) == differ
    slow = any("has not risen" in note for note in explanation.notes)
    assert slow == (reward == 0 and right != (8, 30)), (
        "no word about a reward that has stalled where the score rises"
    )
    cli.explain([str(directory)])
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(("problems", "differ"), [(1, False), (5, False), (40, True)])
def test_few_held_out_problems_contradict_no_curve(directory, problems, differ):
    """The README's three rows hold out one problem: 0.25 to 1 there, and the training reward
    rose to 1 as well."""
    write(
        directory, "".join(line(step, reward_mean=0.3 + 0.4 * (step > 15)) for step in range(1, 31))
    )
    (directory / "evaluations.jsonl").write_text(
        f"{evaluation(0, 0, problems)}\n{evaluation(30, 1, problems)}\n"
    )
    assert (
        any("believe the held-out score" in note for note in explained(directory).notes) == differ
    )


def test_one_evaluation_is_compared_with_nothing(directory):
    write(directory, line(1))
    (directory / "evaluations.jsonl").write_text(evaluation(0, 8) + "\n")
    assert explained(directory).heldout == ()


def test_a_run_that_has_learned_is_well_and_one_that_trained_on_nothing_is_not(directory, capsys):
    """Both were "oversampling"; the first had exit code 1, the second 0."""
    begin = [
        line(step, reward_mean=0.025, reward_std=0.15, dropped_without_variance=4)
        for step in range(1, 6)
    ]
    end = {
        "reward_mean": 0.925,
        "groups_all_right": 0.85,
        "groups_without_variance": 0.9,
        "dropped_without_variance": 14,
    }
    write(directory, "".join(begin + [line(step, **end) for step in range(6, 40)]))
    assert cli.explain([str(directory)]) == 0
    told = capsys.readouterr().out
    assert (
        "learned: nearly all answers are right, reward 0.93 after 0.03 at first" in told
        and "oversampling" not in told
    )
    none = {
        "groups": 8,
        "dropped_without_variance": 8,
        "groups_without_variance": 1.0,
        "groups_all_wrong": 0.75,
    }
    write(
        directory,
        "".join(
            line(step, **none, groups_all_right=0.25, optimizer_updates=0) for step in range(1, 4)
        ),
    )
    assert cli.explain([str(directory)]) == 1
    told = capsys.readouterr().out
    assert "nothing was trained: in all 24 groups of 3 steps" in told and "oversampling" not in told


def test_a_reward_with_a_hole_is_named_with_answers_to_read(directory, capsys):
    def marks(pieces):
        counts = {"answers": 64, "pieces": pieces, "full": 18, "full_pieces": pieces}
        return {"tasks": counts | {"prompts": 8, "prompts_alike": 1}}

    begin = [line(step, full_marks=marks(0), completion_tokens_mean=20.8) for step in range(1, 6)]
    end = [line(step, full_marks=marks(6), completion_tokens_mean=14.3) for step in range(6, 31)]
    write(directory, "".join(begin + end))
    texts = [
        ("Greet me.", "hello", 1.0),
        ('Describe rain. End with the words "Rain is water."', "rain is water", 1.0),
        ("Write three words.", "four words it is", 0.0),
    ]
    (directory / "evaluations.jsonl").write_text(
        evaluation(0, 8) + "\n" + evaluation(30, 20, texts=texts) + "\n"
    )
    assert cli.explain([str(directory)]) == 1
    told = capsys.readouterr().out
    assert "30 of 90 answers with full marks are nothing but a piece of their prompt" in told
    assert "answers went from 20.8 to 14.3 tokens" in told
    read = explained(directory).to_read
    assert [(each.answer, each.piece) for each in read] == [
        ("rain is water", True),
        ("hello", False),
    ]
    assert "→  rain is water" in told


def test_a_run_with_steps_to_go_is_not_finished(directory):
    """`final` is there from the end that the run had before it was given more steps."""
    (directory / "final").mkdir()
    write(directory, "".join(map(line, range(1, 50))))
    assert explained(directory).state == "stopped or killed"
    write(directory, "".join(map(line, range(1, 51))))
    assert explained(directory).state == "finished"
    write(directory, line(1) + line(2, ended="loss < 1: 0.5"))
    assert explained(directory).state == "finished"
    assert "rl_training.until ended it: loss < 1: 0.5" in explained(directory).notes


def test_a_limit_of_the_reward_is_noted_where_no_accuracy_is_measured(directory):
    lines = [
        line(n, environments={"rows": {"groups": 16, "reward_max": 0.7 if n % 3 else 0.4}})
        for n in range(1, 31)
    ]
    write(directory, "".join(lines))
    assert (
        "no answer of rows earned more than 0.7, which one earned in 20 of 30 steps"
        in explained(directory).notes
    )


def test_the_first_and_the_last_rewards_do_not_overlap(directory, capsys):
    """Three steps of 0.1, 0.4 and 0.9 were "0.467 … 0.467", twice the mean of all three."""
    write(
        directory, "".join(line(n, reward_mean=mean) for n, mean in enumerate((0.1, 0.4, 0.9), 1))
    )
    cli.explain([str(directory), "--json"])
    assert json.loads(capsys.readouterr().out)["reward"] == {"first": 0.1, "last": 0.9}


def test_a_run_on_rows_tells_its_held_out_score_and_speaks_of_no_reward(directory):
    rows = {"reward_mean": None, "groups": 0, "sequences": 64}
    lines = [line(n, **rows, heldout_score=0.1 * n if n % 3 == 0 else None) for n in range(1, 11)]
    write(directory, "".join(lines))
    assert explained(directory).notes == ("held-out score: first 0.300, last 0.900",)


def test_json_is_for_machines(directory, capsys):
    write(directory, "".join(line(step, skipped_steps=1) for step in range(1, 6)))
    assert cli.explain([str(directory), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["steps"], told["total_steps"]) == ("run", 5, 50)
    (diagnosis,) = told["diagnoses"]
    assert diagnosis["name"] == "not-finite"
    assert diagnosis["numbers"] == {"skipped_steps": 5}
    assert diagnosis["steps"] == [[1, 5]]
    assert diagnosis["page"] == "docs/troubleshooting.md#not-finite"


def test_what_is_no_run_is_one_line(directory, capsys):
    for path in (directory.parent / "nothing", directory.parent):
        assert cli.explain([str(path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2
    assert told[0].startswith("error: ") and "is not a run directory" in told[0]
    assert told[1].endswith("; runs in it: run")


def test_it_loads_no_mlx(directory):
    write(directory, line(1))
    program = (
        "import sys\nfrom mlx_parallm.cli import explain\nexplain([sys.argv[1]])\n"
        "assert not {'mlx', 'mlx.core', 'mlx_lm'} & set(sys.modules), 'mlx'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
