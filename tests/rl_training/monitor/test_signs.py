"""The signs of rewards, rows, tools and teachers at their edges: sick, healthy, and beside what
would be blamed in their place."""

from dataclasses import replace

import pytest

from mlx_parallm.rl_training.monitor.evidence import WINDOW
from mlx_parallm.rl_training.monitor.health import HEALTHY, diagnose, find
from mlx_parallm.rl_training.step.batch import StatisticsCollector
from mlx_parallm.types import UNSCORED, RolloutGroup
from tests.rl_training.monitor.test_health import CONSTANT, WELL, names, window
from tests.rl_training.rollouts import make_group, make_rollout

ROWS = WELL | {
    **dict.fromkeys(("reward_mean", "reward_std", "rollout_entropy", "kl", "ratio_mean")),
    **{"groups": 0, "sequences": 64, "loss": 0.3, "completion_tokens_mean": 10.0},
    **{"rewards/accuracies": 0.9, "rewards/margins": 1.0, "logps/chosen": -8.0},
}


def rows(steps=WINDOW, first=1, **changed):
    return [ROWS | {"step": first + step} | changed for step in range(steps)]


def course(key, values, **changed):
    return [ROWS | {"step": step, key: value} | changed for step, value in enumerate(values, 1)]


WRONG = {"groups_all_wrong": 1.0, "reward_mean": 0.0, "groups_without_variance": 1.0}
UNMOVED = {"update_norm": 0.0, "grad_norm": 0.0}
NO_VARIANCE = {"groups_without_variance": 1.0, "reward_std_in_groups": 0.3}
TAUGHT = {"teacher_share": 1.0, "teacher_sequences": 16.0, "teacher_unscored": 0.0}


START = window(most_frequent_answer=0.1)
CASES = {
    # the rate is innocent
    "all wrong, kept": (window(**CONSTANT | WRONG | UNMOVED), (), ["too-hard"]),
    "no score": (
        window(
            **CONSTANT | {"reward_mean": None, "reward_std": None},
            **{"sequences": 64, "unscored_fraction": 1.0, "dropped_without_variance": 16},
        ),
        (),
        ["not-scored"],
    ),
    "a judge away now and then": (window(sequences=64, unscored_fraction=0.2), (), []),
    "no gradient": (window(**UNMOVED, optimizer_updates=4), (), ["zero-advantages"]),
    "no advantages": (window(**NO_VARIANCE), (), ["zero-advantages"]),
    "no gradient, nothing trained": (window(**UNMOVED, optimizer_updates=0), (), []),
    "teacher sends NaN": (
        window(**UNMOVED, **CONSTANT | TAUGHT | {"teacher_share": 0.0}),
        (),
        ["teacher-silent", "reward-constant"],
    ),
    "teacher reads other text": (
        window(**TAUGHT | {"teacher_aligned": 0.62, "teacher_spread": 1.0}),
        (),
        ["teacher-misaligned"],
    ),
    # rewards
    "differ by 2e-4": (window(reward_std=2e-4), (), ["reward-hardly-differs"]),
    "differ by 2e-4 of 1000": (
        window(reward_std=0.2, reward_mean=1000.0),
        (),
        ["reward-hardly-differs"],
    ),
    "small by design, gained": (
        window(reward_std=2e-4, reward_mean=8e-4),
        window(reward_std=2e-4, reward_mean=4e-4),
        [],
    ),
    "small and equal": (window(**CONSTANT), (), ["reward-constant"]),
    "fell": (window(reward_mean=0.1), START, ["reward-fell"]),
    "fell to all wrong": (
        window(**WRONG, reward_std=0.0),
        window(reward_mean=0.15, reward_std=0.35, groups_all_wrong=0.6),
        ["reward-fell"],
    ),
    "lost what little it earned": (
        window(reward_mean=0.036, reward_std=0.09, groups=20),
        window(reward_mean=0.203, reward_std=0.36, groups=17),
        ["reward-fell"],
    ),
    "rewards below 0 that differ": (
        window(reward_mean=-0.9, reward_std=0.4, groups=17),
        window(reward_mean=-0.8, reward_std=0.4, groups=17),
        [],
    ),
    "fell by chance": (window(3, reward_mean=0.3, groups=2), window(groups=2), []),
    # one answer
    "one answer": (window(most_frequent_answer=0.9), START, ["one-answer"]),
    "one answer, groups alike": (
        window(most_frequent_answer=0.9, groups_same_answer=0.9, groups_without_variance=0.9),
        START,
        ["one-answer"],
    ),
    "one answer that is right": (window(most_frequent_answer=0.9, reward_mean=0.97), START, []),
    "one answer that pays": (window(most_frequent_answer=0.9, reward_mean=0.8), START, []),
    # sequence ratios
    "GSPO's bounds": (
        window(sequence_clip_fraction=0.35, clip_fraction=0.35),
        (),
        ["sequences-clipped"],
    ),
    "GSPO's own clipping": (window(sequence_clip_fraction=0.15, clip_fraction=0.15), (), []),
    # rows of a file
    "DPO well": (rows(), rows(), []),
    "chosen lost": (
        course("logps/chosen", [-0.71, -3, -8, -12, -15.3]),
        course("logps/chosen", [-0.71, -3, -8, -12, -15.3]),
        ["chosen-answers-unlikely"],
    ),
    "chosen lost, held out": (
        rows(first=40, **{"eval/logps/chosen": -15.3}),
        rows(**{"eval_before/logps/chosen": -0.71}),
        ["chosen-answers-unlikely"],
    ),
    "a few nats of a long answer": (
        rows(first=40, **{"logps/chosen": -160.0}),
        rows(**{"logps/chosen": -130.0}),
        [],
    ),
    "longer answers": (
        rows(first=40, **{"logps/chosen": -40.0, "completion_tokens_mean": 50.0}),
        rows(),
        [],
    ),
    "loss up, held out": (
        rows(first=40, **{"eval/loss": 2.5}),
        rows(**{"eval_before/loss": 2.0}),
        ["loss-rises"],
    ),
    "loss up, pairs in order": (
        rows(first=40, **{"eval/loss": 0.9, "eval/rewards/accuracies": 0.8}),
        rows(**{"eval_before/loss": 0.69, "eval_before/rewards/accuracies": 0.5}),
        [],
    ),
    "loss up": (rows(first=40, loss=0.9), rows(), ["loss-rises"]),
    "DFT's loss up": (rows(first=40, loss=0.9, nll=1.0), rows(nll=2.0), []),
    "as by chance": (
        rows(first=40, **{"rewards/accuracies": 0.51}),
        rows(),
        ["not-told-apart"],
    ),
    "as by chance at first": (rows(first=4, **{"rewards/accuracies": 0.5}), rows(), []),
    # teachers
    "teacher at random": (
        window(**TAUGHT, teacher_kl=5.5, teacher_agreement=0.004, teacher_spread=2.0),
        (),
        ["teacher-nonsense"],
    ),
    "teacher far and sure": (
        window(**TAUGHT, teacher_kl=4.5, teacher_agreement=0.4, teacher_spread=2.0),
        (),
        [],
    ),
    "teacher of some environments": (
        window(**TAUGHT | {"teacher_share": 0.3, "teacher_unscored": 40.0}),
        (),
        [],
    ),
    # tools and experts
    "a tool stalls": (
        window(**{"tools/calls/web": 25.0, "tools/unanswered/web": 20.0, "tools/failed/web": 0.0}),
        (),
        ["tool-stalls"],
    ),
    "one call was late": (
        window(**{"tools/calls/web": 25.0, "tools/unanswered/web": 1.0, "tools/failed/web": 3.0}),
        (),
        [],
    ),
    "a tool is broken": (
        window(**{"tools/calls/web": 25.0, "tools/unanswered/web": 0.0, "tools/failed/web": 25.0}),
        (),
        ["tool-fails"],
    ),
    "delegations fail": (
        window(**{"metrics/failed_delegations/mean": 1.0}),
        (),
        ["delegations-fail"],
    ),
    "some delegations fail": (window(**{"metrics/failed_delegations/mean": 0.2}), (), []),
}


@pytest.mark.parametrize(("end", "start", "found"), CASES.values(), ids=CASES)
def test_signs(end, start, found):
    assert names(end, start) == found


def test_the_server_and_its_share_are_named():
    steps = window(**{"tools/calls/web": 25.0, "tools/unanswered/web": 20.0})
    assert diagnose(steps).startswith(
        "tool stalls: 100 of 125 calls of web got no answer in time (80%)"
    )


@pytest.mark.parametrize(
    ("right", "wrong", "advice"),
    [(0.9, 0.0, "harder problems"), (0.0, 0.9, "easier problems"), (0.0, 0.0, "a reward that")],
)
@pytest.mark.parametrize("dropped", [14, 16])
def test_the_advice_is_for_what_the_groups_are(right, wrong, advice, dropped):
    """All right, all wrong, and one equal reward for all: harder problems help the first alone."""
    steps = window(
        dropped_without_variance=dropped,
        groups_all_right=right,
        groups_all_wrong=wrong,
        groups_without_variance=0.9,
        reward_mean=right or 0.3 * (not wrong),
    )
    [cost] = [one for one in find(steps) if one.name in ("oversampling", "nothing-trained")]
    assert cost.setting.startswith(advice)
    if not right:
        assert "harder" not in diagnose(steps)


def test_a_well_run_has_none_of_them():
    assert diagnose(window(**TAUGHT, teacher_kl=1.0, teacher_agreement=0.5)) == HEALTHY


def counted(*groups):
    collector = StatisticsCollector()
    for group in groups:
        collector.add_without_variance(group)
    return collector


def test_the_most_frequent_answer_is_counted_over_all_prompts():
    def group(name, prompt, *answers):
        return RolloutGroup(
            name, "test", tuple(make_rollout(answer, prompt=prompt) for answer in answers)
        )

    one, other = group("a", (1,), (5, 6), (5, 7)), group("b", (2,), (5, 6), (5, 6))
    assert counted(one, other).result().most_frequent_answer == 3 / 4
    # one prompt: its groups' own number says it
    assert counted(one).result().most_frequent_answer is None
    same = [group(str(number), (number,), (5, 6), (5, 6)) for number in range(4)]
    assert "every prompt gets the same answer" in counted(*same).lost_in_words()
    assert "harder" in counted(make_group("a", [1.0, 1.0])).lost_in_words()
    rollout = replace(make_rollout(), scores={UNSCORED: 1.0})
    unscored = RolloutGroup("u", "test", (rollout, rollout))
    assert "#not-scored" in counted(unscored, unscored).lost_in_words()
