"""The checks one by one, at their edges. What provokes each in a real run is in
tests/integration/test_diagnoses.py."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from mlx_parallm.rl_training.monitor import health
from mlx_parallm.rl_training.monitor.display import TrainingDisplay
from mlx_parallm.rl_training.monitor.evidence import WINDOW
from mlx_parallm.rl_training.monitor.health import HEALTHY, PAGE, RULES, diagnose, find
from mlx_parallm.run_files.metrics import KEYS
from tests.rl_training.monitor.test_display import INFO

ROOT = Path(__file__).parents[3]
WELL = {
    "step": 1,
    "reward_mean": 0.5,
    "reward_std": 0.5,
    "groups": 16,
    "groups_without_variance": 0.25,
    "groups_all_wrong": 0.1,
    "groups_all_right": 0.15,
    "truncated_fraction": 0.02,
    "eos_fraction": 0.98,
    "entropy": 0.4,
    "rollout_entropy": 0.4,
    "ratio_mean": 1.001,
    "clip_fraction": 0.05,
    "kl": 0.01,
    "learning_rate": 1e-4,
    "update_norm": 0.01,
    "weight_norm": 5.0,
    "weights_moved": 0.9,
    "logprob_diff_max": 2e-5,
    "logprob_diff_mean": 2e-7,
    "skipped_steps": 0,
    "publish_timeouts": 0,
    "dropped_stale": 0,
    "dropped_misfit": 0,
    "groups_without_logprobs": 0,
    "time_rollout_s": 2.0,
}
LEARNED = WELL | {
    "reward_mean": 0.97,
    "reward_std": 0.15,
    "groups_without_variance": 0.95,
    "groups_all_right": 0.9,
}
SOLVED = LEARNED | {
    "reward_mean": 1.0,
    "reward_std": 0.0,
    "groups_without_variance": 1.0,
    "groups_all_right": 1.0,
}
CONSTANT = {"groups_without_variance": 1.0, "reward_std": 0.0, "groups_all_right": 0.0}


def window(steps=WINDOW, **changed):
    return [WELL | changed for _ in range(steps)]


def names(lines, start=()):
    return [diagnosis.name for diagnosis in find(lines, start)]


def test_nothing_wrong_is_healthy():
    assert diagnose(window()) == HEALTHY
    assert diagnose([]) == HEALTHY
    assert diagnose([{"step": 1}], [None, None]) == HEALTHY


@pytest.mark.parametrize(
    ("changed", "name", "sentence"),
    [
        (CONSTANT, "reward-constant", "reward constant: every answer earned 0.5 in 5 steps"),
        (
            {"groups_without_variance": 1.0},
            "no-variance",
            "no variance: in all groups every answer to a prompt earns the same",
        ),
        (
            {"groups_without_variance": 0.85},
            "no-variance",
            "no variance: in 85% of the groups every answer to a prompt earns the same",
        ),
        (
            CONSTANT | {"groups_all_wrong": 1.0, "reward_mean": 0.0},
            "too-hard",
            "too hard: no answer earns more than 0 in all of the groups, or the reward never fires",
        ),
        (
            CONSTANT | {"groups_all_right": 0.9, "groups_all_wrong": 0.0, "reward_mean": 0.95},
            "too-easy",
            "too easy: every answer earned 1 in 90% of the groups from the start",
        ),
        (
            {"ratio_mean": 1.34},
            "ratio-mismatch",
            "ratio mismatch: 1.34 on average and 5% of the tokens clipped",
        ),
        (
            {"ratio_mean": 0.7},
            "ratio-mismatch",
            "ratio mismatch: 0.70 on average and 5% of the tokens clipped",
        ),
        (
            {"clip_fraction": 0.4},
            "ratio-mismatch",
            "ratio mismatch: 1.00 on average and 40% of the tokens clipped",
        ),
        (
            {"truncated_fraction": 0.4},
            "truncation",
            "truncation: 40% of the answers hit the length limit (raise",
        ),
        (
            {"truncated_fraction": 0.4, "out_of_room_fraction": 0.3},
            "truncation",
            (
                "truncation: 40% of the answers hit the length limit of prompt and all turns"
                " (raise max_token_length)"
            ),
        ),
        (
            {
                "truncated_fraction": 1.0,
                "eos_fraction": 0.0,
                "never_done_fraction": 1.0,
                "never_done_turns": 41.6,
            },
            "episodes-never-end",
            (
                "episodes never end: 42 turns on average, and nothing set state.done in all of"
                " them (set state.done"
            ),
        ),
        (
            {"truncated_fraction": 1.0, "eos_fraction": 0.0},
            "eos-never-sampled",
            "EOS never sampled: all of the answers run into the length limit",
        ),
        (
            {"logprob_diff_mean": 0.3, "logprob_diff_max": 0.4},
            "log-probability-mismatch",
            (
                "log-probability mismatch: rollouts and trainer differ by 0.3 on average, 0.4 at"
                " most, on the same weights"
            ),
        ),
        (
            {"logprob_diff_mean": 1.5, "logprob_diff_max": 9.0, "mismatch_fresh": False},
            "log-probability-mismatch",
            (
                "log-probability mismatch: rollouts and trainer differ by 1.5 on average, 9 at"
                " most, on weights a few"
            ),
        ),
        (
            {"dropped_without_variance": 13, "groups_all_right": 0.7, "groups_all_wrong": 0.1},
            "oversampling",
            (
                "oversampling: 80 groups sampled, 15 trained on; 70% all right, 10% all wrong"
                " (harder problems"
            ),
        ),
        (
            {"dropped_without_variance": 12, "gave_up": "the bound"},
            "oversampling",
            (
                "oversampling: 80 groups sampled, 20 trained on; 15% all right, 10% all wrong; 5"
                " of 5 steps cut short"
            ),
        ),
        (
            {"kl": 1.3},
            "kl-running-away",
            "KL running away: 1.3 nats a token from the reference (lower learning_rate",
        ),
        (
            {"update_norm": 1e-9},
            "learning-rate-too-small",
            (
                "learning rate too small: an update moves the weights by 2e-10 of their size"
                " (raise learning_rate)"
            ),
        ),
        (
            {"weights_moved": 2e-5},
            "learning-rate-too-small",
            (
                "learning rate too small: an update moves the weights by 0.002 of their size;"
                " 2e-05 of the weights changed"
            ),
        ),
    ],
)
def test_what_lasts_is_told(changed, name, sentence):
    """And what it costs, gained or not."""
    assert names(window(**changed)) == [name]
    assert diagnose(window(**changed)).startswith(sentence)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        (
            "skipped_steps",
            "loss or gradient not finite: 1 updates skipped in 5 steps (lower learning_rate)",
        ),
        (
            "publish_timeouts",
            "weights not published 1 times in 5 steps: the lock was busy (raise lock_timeout_ms)",
        ),
    ],
)
def test_an_event_is_told_while_it_is_in_the_window(key, sentence):
    event = [WELL, WELL, WELL | {key: 1}, WELL, WELL]
    assert diagnose(event) == sentence
    assert diagnose(event + [WELL] * WINDOW) == HEALTHY


def test_a_run_that_has_learned_is_not_ill():
    """Little entropy, groups without variance, a policy far from the reference: all of it is
    success, too."""
    start = window()
    for line, found in ((LEARNED, []), (SOLVED, ["solved"])):
        end = [line | {"rollout_entropy": 0.01, "kl": 1.5}] * WINDOW
        assert names(end, start) == found
        assert names([*start, *end], start) == found
    assert "too-easy" in names([SOLVED] * WINDOW, [SOLVED] * WINDOW)


def test_a_task_that_is_solved_is_said_to_be_so():
    """Five steps at reward 1, with a gradient of 0, were called healthy."""
    [found] = find([SOLVED | {"grad_norm": 0.0}] * WINDOW, window())
    assert found.sentence == (
        "solved: every answer of 5 steps in a row earned 1, the best"
        " reward; nothing is left to learn"
    )
    assert found.setting == "stop here, or use harder problems"
    assert found.numbers == {
        "steps_solved": 5,
        "reward_mean": 1.0,
        "groups_all_right": 1.0,
        "grad_norm": 0.0,
    }


def test_one_text_that_earns_everything_leaves_nothing_proved():
    """A reward that a constant answer games looks like a task that is solved."""
    line = SOLVED | {"most_frequent_answer": 0.97, "grad_norm": 0.0}
    [found] = find([line] * WINDOW, window())
    assert found.name == "solved" and "nothing is left" not in found.sentence
    assert found.sentence.endswith(
        "97% of the answers are one and the same: read it before you believe it"
    )


def test_the_last_three_steps_are_enough_to_be_solved():
    """A run of five steps that ends so, and nothing but "no variance" was found in it."""
    before = WELL | {"groups_without_variance": 0.75, "groups_all_right": 0.5}
    lines = [before, before, SOLVED, SOLVED, SOLVED]
    assert names(lines, lines) == ["solved"]
    assert find(lines, lines)[0].numbers["steps_solved"] == 3
    assert names([*window(3), SOLVED, SOLVED], window()) == []
    assert names([SOLVED, SOLVED, SOLVED, SOLVED, WELL], window()) == []
    assert names([WELL, WELL, *[SOLVED | {"groups_all_right": 0.99}] * 3], window()) == []


def test_entropy_that_is_gone_without_a_gain_is_a_collapse():
    start = window()
    assert names(window(rollout_entropy=0.01), start) == ["entropy-collapse"]
    assert names(window(rollout_entropy=0.01, entropy=None), start) == ["entropy-collapse"]
    # it began as sure of itself
    assert names(window(rollout_entropy=0.01), window(rollout_entropy=0.02)) == []
    assert names(window(rollout_entropy=0.1), window(rollout_entropy=2.0)) == []


def test_answers_that_are_all_the_same_are_named_unless_nothing_better_is_known():
    """Entropy from 0.85 to 0.14 and the same answers in each group were called healthy."""
    start = window(groups_same_answer=0.05, rollout_entropy=0.85, reward_max=1.0)
    same = {"groups_same_answer": 0.9, "rollout_entropy": 0.14, "reward_max": 1.0}
    [found] = find(window(**same), start)
    assert (
        found.sentence
        == "same answers: in 90% of the groups all answers are one and the same; at first in 5%"
    )
    assert "checkpoint" in found.setting
    assert found.numbers == {
        **{"groups_same_answer_first": 0.05, "groups_same_answer": 0.9, "reward_mean": 0.5},
        **{"rollout_entropy_first": 0.85, "rollout_entropy": 0.14},
    }
    gained = {
        "reward_mean": 0.76
    }  # by more than half of 0.5, but by less than what the best answers earn: 1 - 0.76 < 0.25
    assert names(window(**same, **gained), start) == []
    assert names(window(**same, reward_mean=0.74), start) == ["same-answers"]
    # right from the start
    assert names(window(**same, reward_mean=0.96), window(reward_mean=0.96)) == []
    assert names(window(groups_same_answer=0.75), start) == []
    assert names(window(1, **same, groups=4), start) == []


PARTS = {"rewards/correct/mean": 0.4, "rewards/correct/std": 0.49}


@pytest.mark.parametrize(
    ("part", "mean", "std", "earned"),
    [
        ("used_tool", 0.0, 0.0, "0 from used_tool"),
        ("format", 0.5, 0.0, "0.5 from format"),
        ("format", 1.0, 0.0, None),  # nothing to learn, and nothing wrong
        ("used_tool", 0.0, 0.1, None),
        ("overlong", 0.0, 0.0, None),  # a penalty that nobody has earned
        ("overlong#2", 0.0, 0.0, None),
        ("length_penalty", 0.0, 0.0, None),
        ("PenaliseLists", 0.0, 0.0, "0 from PenaliseLists"),
        ("repetition_penalty", -0.5, 0.0, "-0.5 from repetition_penalty"),
    ],
)
def test_a_part_of_the_reward_that_never_differs_is_named(part, mean, std, earned):
    steps = window(**PARTS, **{f"rewards/{part}/mean": mean, f"rewards/{part}/std": std})
    assert names(steps, steps) == (["reward-part-constant"] if earned else [])
    if earned:
        sentence = (
            f"reward part constant: every answer earned {earned} in the first and the last 5 steps"
        )
        assert diagnose(steps, start=steps).startswith(sentence)
        assert find(steps, steps)[0].numbers == {f"rewards/{part}/mean": mean}
        assert names(steps[:4], steps[:4]) == []
        assert (
            names(
                steps, window(**PARTS, **{f"rewards/{part}/mean": 0.2, f"rewards/{part}/std": 0.4})
            )
            == []
        )


def test_a_reward_of_one_part_is_judged_as_a_whole():
    alone = {"rewards/correct/mean": 0.5, "rewards/correct/std": 0.0}
    assert names(window(**CONSTANT, **alone)) == ["reward-constant"]


def limited(*best, **changed):
    return [
        WELL | changed | {"environments": {"rows": {"groups": 16, "reward_max": each}}}
        for each in best
    ]


def test_a_reward_that_stays_below_what_accuracy_counts_is_named():
    """The best answers earned 0.7, so accuracy could not leave 0: it was called healthy."""
    wrong = {"eval/rows/accuracy": 0.0, "eval/rows/reward": 0.3}
    [found] = find(limited(0.7, 0.7, 0.5, 0.7, 0.7), limited(0.7, **wrong))
    assert (
        found.sentence
        == "reward below 1: no answer of rows earned more than 0.7, so its accuracy stays 0"
    )
    assert found.numbers == {"reward_max": 0.7, "eval/accuracy": 0.0, "reward_mean": 0.5}
    assert "reward_weights" in found.setting
    assert names(limited(*[0.7] * 5)) == [], "without an evaluation there is no accuracy"
    assert names(limited(*[0.7] * 5), limited(0.7, **wrong | {"eval/rows/accuracy": 0.1})) == []
    assert names(limited(0.7, 0.7, 1.0, 0.7, 0.7), limited(0.7, **wrong)) == [], "one earned 1"
    assert names(limited(0.61, 0.64, 0.62, 0.6, 0.66), limited(0.63, **wrong)) == [], (
        "no limit is in sight"
    )
    assert names(limited(*[0.0] * 5), limited(0.0, **wrong)) == [], "too hard, perhaps"


def test_kl_is_forgiven_to_a_run_that_gains_up_to_a_point():
    better = {"reward_mean": 0.9}
    assert names(window(kl=1.5, **better), window()) == []
    assert names(window(kl=3.5, **better), window()) == ["kl-running-away"]
    assert names([WELL | {"kl": kl} for kl in (0.02, 0.04, 0.08, 0.16, 0.3)]) == []
    assert names(window(kl=None)) == []  # no reference, nothing to be far from


def test_the_small_rates_at_the_ends_of_a_schedule_are_meant():
    late = window(learning_rate=1e-9, update_norm=1e-8)
    assert names(late, window()) == []
    assert names(late, window(learning_rate=1e-9)) == ["learning-rate-too-small"]
    assert names(window(learning_rate=0.0, update_norm=0.0), window()) == []
    # nothing was trained
    assert names(window(update_norm=None, weight_norm=None, weights_moved=None)) == []


def test_a_few_groups_say_nothing():
    assert names(window(1, groups=4, **CONSTANT)) == []
    assert names(window(1, groups=32, **CONSTANT)) == ["reward-constant"]
    assert names(window(3, groups=4, **CONSTANT)) == ["reward-constant"]


def test_rewards_that_are_constant_in_a_step_and_move_between_steps_are_not_constant():
    moving = [WELL | CONSTANT | {"reward_mean": 0.3 + 0.02 * step} for step in range(WINDOW)]
    assert names(moving) == ["no-variance"]


def test_one_stale_group_is_normal_many_are_not_and_one_of_another_model_is_not():
    assert diagnose([*window(4), WELL | {"dropped_stale": 1}]) == HEALTHY
    assert diagnose(window(dropped_stale=8)).startswith("stale rollouts: 40 groups dropped")
    assert diagnose([*window(4), WELL | {"dropped_misfit": 1}]).startswith(
        "another model's groups: 1 dropped in 5"
    )
    assert diagnose(window(groups_without_logprobs=4)).startswith(
        "no log-probabilities: 20 of 80 groups"
    )


def test_what_is_learned_between_sampling_and_training_is_no_mismatch():
    assert names(window(logprob_diff_mean=0.3, logprob_diff_max=4.0, mismatch_fresh=False)) == []
    apart = {"logprob_diff_mean": 1.5, "logprob_diff_max": 9.0, "mismatch_fresh": False}
    # its cause is named, not what follows from it
    assert names(window(**apart, kl=2.0)) == ["kl-running-away"]
    one_fresh = [
        *window(4, logprob_diff_mean=0.3, mismatch_fresh=False),
        WELL | {"logprob_diff_mean": 0.1},
    ]
    assert names(one_fresh) == ["log-probability-mismatch"]
    assert names(window(dropped_without_variance=11)) == []


def test_a_long_wait_is_a_stall_unless_every_step_waits_so_or_it_gave_up():
    waited = [*window(4), WELL | {"time_rollout_s": 75.0}]
    assert diagnose(waited).startswith(
        "environment stalled: a step waited 75 s for its rollouts, 2 s is usual"
    )
    assert names(window(time_rollout_s=75.0)) == []
    assert (
        names([*window(4), WELL | {"time_rollout_s": 75.0, "gave_up": "8 refills in a row"}]) == []
    )


def test_sources_speak_first_and_sentences_add_up():
    stalled = (
        "environment sum stalled: nothing finished for 75 s with 2"
        " groups in flight (oldest: sum-0-0)"
    )
    line = diagnose(window(truncated_fraction=0.5, skipped_steps=1), [None, stalled])
    first, second, third = line.split("; ")
    assert first == stalled
    assert second.startswith("loss or gradient not finite: 5 updates skipped in 5 steps")
    assert third.startswith("truncation: 50%")
    assert diagnose([], [stalled]) == stalled


def test_a_resumed_run_knows_how_it_began():
    def shown(*before):
        display = TrainingDisplay(Console(file=io.StringIO()), interactive=False)
        display.start(INFO, before)
        for _ in range(WINDOW):
            display.update(SOLVED)
        return display.health()

    assert shown(*window()).startswith("solved")
    assert shown().startswith("too easy")


def test_a_mean_over_the_window_forgives_one_bad_step():
    assert (
        diagnose([*window(4), WELL | {"truncated_fraction": 0.5, "ratio_mean": 1.3, "kl": 2.0}])
        == HEALTHY
    )


def test_numbers_that_are_missing_or_not_finite_are_not_judged():
    assert diagnose(window(kl=float("nan"), ratio_mean=None, logprob_diff_max="?")) == HEALTHY
    for key in WELL:
        without = [{name: value for name, value in WELL.items() if name != key}] * WINDOW
        assert diagnose(without) == HEALTHY, key


def test_every_number_that_is_judged_is_in_the_metrics():
    judged = set(
        re.findall(r'(?:values|total|mean|first)\("(\w+)"\)', Path(health.__file__).read_text())
    )
    assert judged
    assert judged <= set(KEYS)


def test_every_rule_has_its_section_and_says_what_to_change():
    headings = re.findall(r"^## (.+)$", (ROOT / PAGE).read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    parts = {"nothing-found", "sft,-dpo,-kto-and-reward-models"}
    assert {rule.name for rule in RULES} == anchors - parts
    assert all(rule.setting for rule in RULES)


def test_nothing_is_named_in_a_run_that_learned():
    """All 220 steps of quickstart with seed 2: what is judged, to three digits."""
    table = json.loads((ROOT / "tests/data/quickstart_metrics.json").read_text())
    lines = [dict(zip(table["keys"], row, strict=True)) for row in table["rows"]]
    assert lines[-1]["reward_mean"] - lines[0]["reward_mean"] > 0.4
    for end in range(1, len(lines) + 1):
        assert names(lines[max(0, end - WINDOW) : end], lines[: min(end, WINDOW)]) == [], (
            f"step {end}"
        )


def test_experts_that_collapse_are_named_beside_the_first_steps():
    start = window(expert_load_entropy=0.95, experts_unused=0.2, expert_load_max=2.0)
    fewer = window(expert_load_entropy=0.93, experts_unused=0.4, expert_load_max=4.0)
    narrow = window(expert_load_entropy=0.8, experts_unused=0.2, expert_load_max=9.0)
    assert names(window(expert_load_entropy=0.9, experts_unused=0.3), start) == []
    assert names(window(expert_load_entropy=0.1, experts_unused=0.9)) == []
    assert names(fewer, start) == names(narrow, start) == ["experts-collapse"]
    [one] = find(fewer, start)
    assert one.sentence == (
        "experts collapse: 40% of them get no token (20% in the first steps), the entropy of their"
        " load went from 0.95 to 0.93 of its highest"
    )
    assert one.numbers["expert_load_max"] == 4.0
    assert names(narrow[:2], start) == [], "two steps are not course"
