import pytest

from mlx_parallm.rl_training.health import HEALTHY, WINDOW, diagnose

WELL = {
    "step": 1,
    "reward_mean": 0.5,
    "groups": 16,
    "groups_without_variance": 0.25,
    "truncated_fraction": 0.02,
    "ratio_mean": 1.001,
    "kl": 0.01,
    "logprob_diff_max": 2e-5,
    "skipped_steps": 0,
    "publish_timeouts": 0,
    "dropped_stale": 0,
}


def window(steps=WINDOW, **changed):
    return [WELL | changed for _ in range(steps)]


def test_nothing_wrong_is_healthy():
    assert diagnose(window()) == HEALTHY
    assert diagnose([]) == HEALTHY
    assert diagnose([{"step": 1}], [None, None]) == HEALTHY


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"groups_without_variance": 1.0},
            "all groups without variance: every answer to a prompt earns the same",
        ),
        (
            {"groups_without_variance": 1.0, "reward_mean": 0.0},
            "all groups without variance: no answer is right: the task is too hard, or the reward never fires",
        ),
        (
            {"groups_without_variance": 1.0, "reward_mean": 1.0},
            "all groups without variance: every answer is right: the task is solved",
        ),
        (
            {"groups_without_variance": 0.85},
            "85% of the groups without variance: every answer to a prompt earns the same",
        ),
        ({"ratio_mean": 1.34}, "ratio far from 1: mean 1.34 (stale rollouts or too large a step)"),
        ({"ratio_mean": 0.7}, "ratio far from 1: mean 0.70 (stale rollouts or too large a step)"),
        ({"truncated_fraction": 0.4}, "truncation: 40% of the answers hit the length limit (raise max_tokens)"),
        (
            {"logprob_diff_max": 0.3},
            "log-probability mismatch: engine and trainer differ by up to 0.3 on the same weights",
        ),
        (
            {"kl": 0.8},
            "KL running away: 0.8 nats a token from the reference (lower learning_rate or raise kl_beta)",
        ),
    ],
)
def test_what_lasts_is_told(changed, sentence):
    assert diagnose(window(**changed)) == sentence


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("skipped_steps", "loss or gradient not finite: 1 updates skipped in 5 steps (lower learning_rate)"),
        ("publish_timeouts", "weights not published 1 times in 5 steps: the lock was busy (raise lock_timeout_ms)"),
    ],
)
def test_an_event_is_told_while_it_is_in_the_window(key, sentence):
    event = [WELL, WELL, WELL | {key: 1}, WELL, WELL]
    assert diagnose(event) == sentence
    assert diagnose(event + [WELL] * WINDOW) == HEALTHY


def test_kl_that_grows_fast_is_told_before_it_is_large():
    rising = [WELL | {"kl": kl} for kl in (0.02, 0.04, 0.08, 0.16, 0.3)]
    assert diagnose(rising).startswith("KL running away: 0.3 nats")
    assert diagnose([WELL | {"kl": kl} for kl in (0.2, 0.22, 0.25, 0.27, 0.3)]) == HEALTHY


def test_one_stale_group_is_normal_and_many_are_not():
    assert diagnose([*window(4), WELL | {"dropped_stale": 1}]) == HEALTHY
    assert diagnose(window(dropped_stale=8)) == (
        "40 groups dropped as stale in 5 steps: rollouts come slower than max_staleness"
    )


def test_sources_speak_first_and_sentences_add_up():
    stalled = "environment sum stalled: nothing finished for 75 s with 2 groups in flight (oldest: sum-0-0)"
    line = diagnose(window(truncated_fraction=0.5, skipped_steps=1), [None, stalled])
    first, second, third = line.split("; ")
    assert first == stalled
    assert second.startswith("loss or gradient not finite: 5 updates skipped in 5 steps")
    assert third.startswith("truncation: 50%")
    assert diagnose([], [stalled]) == stalled


def test_a_mean_over_the_window_forgives_one_bad_step():
    assert diagnose([*window(4), WELL | {"truncated_fraction": 0.5, "ratio_mean": 1.3}]) == HEALTHY


def test_numbers_that_are_missing_or_not_finite_are_not_judged():
    assert diagnose(window(kl=float("nan"), ratio_mean=None, logprob_diff_max="?")) == HEALTHY
