"""Rows that are drawn by what they teach: the estimate, the draws, and what a run keeps of them."""

import json
import math
import os
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_parallm.config.environment import AdaptiveConfig, EnvironmentConfig
from mlx_parallm.environments.curriculum import pass_rates
from mlx_parallm.environments.curriculum.draws import RowDraws, Weights
from mlx_parallm.environments.curriculum.log import DRAWS_FILE
from mlx_parallm.environments.curriculum.pass_rates import (
    Kinds,
    PassRates,
    Population,
    RewardRange,
)
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.rl_training.sources import together
from tests.environments.scripted_client import ScriptedClient

HISTORIES = int(os.environ.get("MLX_PARALLM_HISTORIES", "60"))  # 10,000: half an hour
SIZE = 4


def log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def test_the_chance_that_a_group_differs_is_that_of_the_posterior():
    rates = PassRates([None] * 2, group_size=2, half_life=20)
    rates.add(0, right=0.0, wrong=2.0)
    # Beta(0.2, 2.2): 2 E[p (1 - p)] = 2 · 0.2 · 2.2 / (2.4 · 3.4); Beta(0.2, 0.2): 0.08 / 0.56
    np.testing.assert_allclose(rates.teaches, [0.88 / 8.16, 0.08 / 0.56], rtol=1e-12)
    assert rates.mean(0) == pytest.approx(0.2 / 2.4)
    rng = random.Random(0)
    for _ in range(HISTORIES):
        size, right, wrong = rng.randint(2, 64), 100 * rng.random() ** 3, 100 * rng.random() ** 3
        rates = PassRates([None], group_size=size, half_life=1.0)
        rates.add(0, right=right, wrong=wrong)
        a, b = right + 0.2, wrong + 0.2
        alike = math.exp(log_beta(a + size, b) - log_beta(a, b)) + math.exp(
            log_beta(a, b + size) - log_beta(a, b)
        )
        assert rates.teaches[0] == pytest.approx(1 - alike, abs=1e-9)


def test_answers_count_by_the_version_that_gave_them(monkeypatch):
    monkeypatch.setattr(pass_rates, "PRIOR_GROUPS", 1e12)  # it stays as it is
    rates = PassRates([None] * 2, group_size=SIZE, half_life=10)
    rates.add(0, right=4.0, wrong=0.0, version=0)
    assert rates.mean(0) == pytest.approx(4.2 / 4.4)
    rates.add(1, right=0.0, wrong=4.0, version=10)  # every answer before counts half
    assert rates.mean(0) == pytest.approx(2.2 / 2.4)
    rates.add(0, right=0.0, wrong=4.0, version=0)  # as old as the first ones
    assert rates.mean(0) == pytest.approx(2.2 / 4.4)
    rates.add(0, right=2.0, wrong=0.0)  # of an unknown one: the newest
    assert rates.mean(0) == pytest.approx(4.2 / 6.4)
    rates.add(1, right=0.0, wrong=0.0, version=1000)
    assert rates.mean(0) == pytest.approx(0.5)
    assert rates.kinds() == Kinds(unseen=2)


def test_the_prior_is_the_distribution_of_rows_that_were_not_seen():
    population = Population()
    assert population.prior() == pytest.approx((0.2, 0.2))  # E[p] = 1 / 2, E[p²] = 3 / 7
    for right in (4.0, 2.0, 0.0, 0.0):
        population.add(right, 4 - right)
    # with 4 groups of (1 / 2, 3 / 7): E[p] = 3.5 / 8, E[p²] = (1 + 2 / 12 + 12 / 7) / 8
    mean, square = 3.5 / 8, (1 + 1 / 6 + 12 / 7) / 8
    strength = (mean - square) / (square - mean**2)
    assert population.prior() == pytest.approx((mean * strength, (1 - mean) * strength))
    population.age(0.0)
    assert population.prior() == pytest.approx((0.2, 0.2))
    rng = np.random.default_rng(0)
    for rate in rng.beta(0.3, 0.9, size=5000):
        right = float(rng.binomial(8, rate))
        population.add(right, 8 - right)
    assert population.prior() == pytest.approx((0.3, 0.9), rel=0.15)
    hopeless = PassRates([None] * 50, group_size=8, half_life=1e9)
    for row in range(40):
        hopeless.add(row, right=0.0, wrong=8.0, version=row)
    assert hopeless.teaches[49] < 0.12 < PassRates([None], group_size=8, half_life=1).teaches[0]


def test_rows_are_of_the_kind_that_their_next_group_will_probably_be():
    rates = PassRates([1.0, 0.0, 0.5, None], group_size=SIZE, half_life=10)
    assert rates.kinds() == Kinds(easy=1, hopeless=1, learnable=1, unseen=1)


def test_what_is_hopeless_at_a_level_is_so_at_harder_ones():
    rates = PassRates([None] * 5, group_size=SIZE, half_life=10, ordered=True)
    rates.add(2, right=0.0, wrong=4.0)
    assert [rates.mean(level) < 0.5 for level in range(5)] == [False, False, True, True, True]
    rates.add(3, right=8.0, wrong=0.0)
    assert [rates.mean(level) > 0.5 for level in range(5)] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("threshold", "groups", "right"),
    [
        (None, [[0, 1, 1, 0], [1, 1], [0, 0, 0]], [2, 2, 0]),
        (None, [[0.5, 0.5], [0.2, 0.2]], [2, 0]),  # alike: the nearer end
        (None, [[-1, 1], [0, 1]], [1, 1.5]),  # the range has grown to -1 … 1
        (None, [[3, 0], [3, 3], [1, 0]], [1, 2, 1 / 3]),
        (None, [[-1e308, 1e308]], [1]),
        (0.7, [[0.5, 0.8], [0.5, 0.5], [0.7]], [1, 0, 1]),
        (0.0, [[-2.0, 0.0]], [1]),
    ],
)
def test_rewards_as_right_answers(threshold, groups, right):
    rewards = RewardRange(threshold)
    assert [rewards.right([float(each) for each in group]) for group in groups] == pytest.approx(
        right
    )


def test_draws_are_in_proportion_to_the_weights_as_those_of_one_sum():
    rng = np.random.default_rng(0)
    for rows in (1, 2, 1023, 1024, 1025, 5000):
        plain = rng.random(rows) * (rng.random(rows) < 0.3)
        plain[rng.integers(rows)] = 1.0
        weights = Weights(np.zeros(rows))
        assert weights.draw(0.5) is None
        weights.put(slice(0, rows), plain)
        numbers = [*rng.random(50).tolist(), 0.0, np.nextafter(1.0, 0.0)]
        ends = np.cumsum(plain) / plain.sum()
        for number in numbers:
            row = weights.draw(number)
            assert plain[row] > 0
            before = ends[row - 1] if row else 0.0
            assert before - 1e-9 <= number <= ends[row] + 1e-9


# ---------------------------------------------------------------------- draws


def rollout(reward, version=1):
    scored = reward is not None
    scores = {"reward": reward, "right": reward} if scored else {}
    segment = SimpleNamespace(policy_versions=(-1, version))
    return SimpleNamespace(scores=scores, is_scored=scored, segments=(segment,))


def result(index, rewards, *, version=1, failure=None, may_pass=False):
    group = SimpleNamespace(rollouts=[rollout(each, version) for each in rewards])
    return SimpleNamespace(
        plan=SimpleNamespace(index=index), group=group, failure=failure, may_pass=may_pass
    )


def draws_of(keys, *, name="rows", seed=0, levels=False, **settings):
    return RowDraws(
        name, keys, AdaptiveConfig(**settings), group_size=SIZE, seed=seed, levels=levels
    )


class Player:
    """Plays groups of rows whose pass rates it knows, several at once; a failure now and then."""

    def __init__(self, draws, rates, *, seed, first=0):
        self.draws, self.rates = draws, rates
        self.rng, self.version, self.next, self.cursor = random.Random(seed), 1, first, first
        self.in_flight, self.rows = {}, {}

    def start(self):
        self.in_flight[self.next] = self.draws.draw(self.next, self.cursor)
        self.rows[self.next] = self.in_flight[self.next]
        self.next += 1

    def finish(self):
        index = self.rng.choice(list(self.in_flight))
        rate = self.rates[self.in_flight.pop(index) % len(self.rates)]
        rewards = [float(self.rng.random() < rate) for _ in range(SIZE)]
        if self.rng.random() < 0.1:
            rewards[0] = None
        failed = self.rng.random() < 0.05
        self.draws.finished(
            result(
                index,
                rewards,
                version=self.version,
                failure="no reward" if failed else None,
                may_pass=self.rng.random() < 0.5,
            )
        )
        self.version += self.rng.random() < 0.3
        self.cursor = min(self.in_flight, default=self.next)

    def play(self, moves):
        for _ in range(moves):
            if not self.in_flight or (len(self.in_flight) < 4 and self.rng.random() < 0.5):
                self.start()
            else:
                self.finish()


def test_a_run_that_is_killed_draws_the_rows_that_it_would_have_drawn(tmp_path):
    """Any history, killed anywhere, its file torn anywhere in its last line, its rows perhaps in
    another order."""
    rng = random.Random(1)
    for history in range(HISTORIES):
        run = tmp_path / str(history)
        run.mkdir()
        keys = [f"row{number}" for number in range(rng.randint(1, 12))]
        rates = [rng.choice((0.0, 0.5, 1.0)) for _ in keys]
        first, seed = draws_of(keys, seed=history, floor=rng.choice((0.1, 0.37, 1))), rng.random()
        first.keep(run)
        player = Player(first, rates, seed=seed)
        player.play(rng.randint(1, 60))
        log = (run / DRAWS_FILE).read_bytes()
        (run / DRAWS_FILE).write_bytes(log + b'{"environment": "rows", "gro'[: rng.randint(0, 28)])

        second = draws_of(keys, seed=history, floor=first._config.floor)
        second.keep(run)
        assert (run / DRAWS_FILE).read_bytes() == log
        assert second.next_group == first.next_group
        again = {index: second.draw(index, player.cursor) for index in player.in_flight}
        assert again == player.in_flight
        # and every later one, in the same company
        player.draws, rest = second, random.Random(seed)
        mirror = Player(first, rates, seed=0, first=player.next)
        mirror.__dict__ |= {
            "version": player.version,
            "cursor": player.cursor,
            "in_flight": dict(player.in_flight),
            "rng": random.Random(7),
        }
        first._log, player.rng = None, random.Random(7)
        player.play(40), mirror.play(40)
        assert [player.rows[index] for index in mirror.rows] == list(mirror.rows.values()), rest


def test_every_row_comes_back_within_rows_over_floor_groups():
    rng = random.Random(2)
    for history in range(max(4, HISTORIES // 6)):
        rows, floor = rng.randint(1, 20), rng.choice((0.1, 0.25, 1.0))
        draws = draws_of([str(row) for row in range(rows)], seed=history, floor=floor)
        player = Player(draws, [rng.choice((0.0, 1.0)) for _ in range(rows)], seed=history)
        last = dict.fromkeys(range(rows), 0)
        longest = 2 * math.ceil(rows / floor)  # at the end of one turn, and of the next
        for _ in range(4 * longest):
            player.start()
            last[player.rows[player.next - 1]] = player.next
            assert player.next - min(last.values()) <= longest
            player.finish()


def test_rows_that_teach_are_drawn_and_the_others_seldom():
    rates = [0.0] * 60 + [0.5] * 20 + [1.0] * 20
    drawn = Counter()
    player = Player(draws_of([str(row) for row in range(100)]), rates, seed=0)
    for number in range(1500):
        player.start()
        drawn[rates[player.rows[number]]] += number >= 500
        player.finish()
    assert drawn[0.5] > 650  # of 1000; one row in five
    assert drawn[0.0] > 50 and drawn[1.0] > 20  # and never none
    assert player.draws.kinds().learnable >= 15


def test_a_row_is_not_drawn_while_it_is_played_and_others_are_there():
    draws = draws_of([str(row) for row in range(8)], floor=0.01)
    assert sorted(draws.draw(index, 0) for index in range(8)) == list(range(8))
    assert draws.draw(8, 0) in range(8)  # all are
    draws.rewind()
    assert len({draws.draw(index, 0) for index in range(9, 17)}) == 8


def test_a_row_that_is_added_has_its_place_in_the_turn_through_all():
    draws = draws_of(["a"], floor=1)
    assert draws.draw(0, 0) == 0
    assert draws.know("b", most=2) and not draws.know("c", most=2)
    assert {draws.draw(index, 0) for index in range(1, 4)} == {0, 1}


def test_what_has_no_score_does_not_count():
    draws = draws_of(["a"])
    for index, (rewards, keys) in enumerate(
        [([None] * 4, {}), ([math.nan, math.inf], {}), ([], {}), ([], {"may_pass": True})]
    ):
        draws.draw(index, index)
        draws.finished(result(index, rewards, failure="gone" if keys else None, **keys))
    assert draws.kinds() == Kinds(unseen=1)
    draws.draw(4, 4)
    draws.finished(result(4, [], failure="the prompt leaves no room"))
    assert draws.kinds() == Kinds(hopeless=1), "it would fail again"


def test_a_named_reward_tells_right_from_wrong():
    draws = draws_of(["a"], reward="right")
    draws.draw(0, 0)
    group = result(0, [1.0] * SIZE)
    for each in group.group.rollouts:
        each.scores["reward"] = -5.0  # a z-score, say
    draws.finished(group)
    assert draws.kinds() == Kinds(easy=1)


def test_levels_rise_with_the_policy():
    draws, able = draws_of([f"level {n}" for n in range(10)], levels=True, half_life=5), 1
    means, player = [], Player(draws, [], seed=0)
    for able in (1, 4, 8):
        player.rates = [0.95] * able + [0.5] + [0.0] * (9 - able)
        levels = []
        for _ in range(300):
            player.start()
            levels.append(player.rows[player.next - 1] % 10)
            player.finish()
        means.append(sum(levels[150:]) / 150)
    assert means == sorted(means) and means[-1] > means[0] + 3
    tasks = list(player.rows.values())
    assert len(set(tasks)) == len(tasks), "each group has a task of its own"


# ---------------------------------------------------------------------- what a run keeps


def played(run, keys, *, name="rows", groups=6):
    draws = draws_of(keys, name=name)
    draws.keep(run)
    player = Player(draws, [0.5] * len(keys), seed=0)
    player.play(groups)
    return draws


def test_rows_that_changed_between_runs(tmp_path, warned):
    keys = ["a", "b", "b", "c"]
    before = played(tmp_path, keys, groups=60)
    moved = draws_of(["c", "b", "new", "b", "a"])
    moved.keep(tmp_path)
    rates = lambda draws, order: [draws._rates.mean(draws._row_of[key]) for key in order]  # noqa: E731
    assert rates(moved, ["a", "b", "b#2", "c"]) == rates(before, ["a", "b", "b#2", "c"])
    assert moved.kinds().unseen == 1
    fewer = draws_of(["a"])
    fewer.keep(tmp_path)
    assert [(line["event"], line["rows"]) for line in warned] == [
        ("rows that were drawn are no longer in the data: what they earned is forgotten", 3)
    ]
    with pytest.raises(CheckpointError, match="draws of another data set"):
        draws_of(["x", "y"]).keep(tmp_path)


def test_environments_share_a_file_and_nothing_else(tmp_path):
    both = [draws_of(["a", "b"], name="one"), draws_of(["a", "c"], name="two")]
    for each in both:
        each.keep(tmp_path)
    both[0].draw(0, 0), both[1].draw(0, 0)
    both[0].finished(result(0, [1.0] * SIZE))
    again = [draws_of(["a", "b"], name="one"), draws_of(["a", "c"], name="two")]
    for each in again:
        each.keep(tmp_path)
    assert together(each.numbers() for each in again) == {
        "rows_easy": 1,
        "rows_learnable": 0,
        "rows_hopeless": 0,
        "rows_unseen": 3,
        "rows_by_environment": {
            "one": {"easy": 1, "learnable": 0, "hopeless": 0, "unseen": 1},
            "two": {"easy": 0, "learnable": 0, "hopeless": 0, "unseen": 2},
        },
    }
    assert together([both[0].numbers()] * 2)["rows_by_environment"]["one"]["unseen"] == 2
    draws_of(["q"], name="three").keep(tmp_path)  # one that is gone is carried


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        '{"group": 1, "row": "a"}',
        '{"environment": "rows", "group": "1", "row": "a"}',
        '{"environment": "rows", "group": 1, "row": 5}',
        '{"environment": "rows", "group": 1, "rewards": [NaN], "version": 1}',
        '{"environment": "rows", "group": 1, "rewards": ["1"], "version": 1}',
        '{"environment": "rows", "group": 1, "rewards": 1, "version": 1}',
        '{"environment": "rows", "group": 1, "rewards": [], "version": "1"}',
        '{"environment": "rows", "group": 1, "rewards": [], "version": -1}',
        '{"environment": "rows", "group": 1, "rewards": {}, "version": 1}',
        f'{{"environment": "rows", "group": 1, "rewards": [{"9" * 400}], "version": 1}}',
        f'{{"environment": "rows", "group": 1, "rewards": [], "version": {"9" * 400}}}',
        '{"environment": "rows", "group": true, "row": "a"}',
        '{"environment": "rows", "group": -5, "row": "a"}',
        "[" * 100_000,
    ],
)
def test_a_damaged_line_is_named(tmp_path, line):
    entry = json.dumps({"environment": "rows", "group": 0, "row": "a"})
    (tmp_path / DRAWS_FILE).write_text(f"{entry}\n{line}\n")
    with pytest.raises(CheckpointError, match=r"draws\.jsonl:2: no draw of a row"):
        draws_of(["a"]).keep(tmp_path)


# ---------------------------------------------------------------------- in the manager


def test_a_manager_draws_rows_and_learns_from_its_groups(managed, tokenizer, tmp_path):
    """Beside an environment of another kind; what it has played is known to the next one."""
    rows = [{"prompt": f"Say {n}", "kind": n % 3} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(
        "def right(completions, kind, **kw):\n"
        "    return [[0.0, float(n % 2), 1.0][kind[0]] for n in range(len(completions))]\n"
    )
    entries = [
        EnvironmentConfig(
            kind="dataset",
            name="rows",
            data=str(tmp_path / "rows.jsonl"),
            curriculum="adaptive",
            heldout_fraction=0,
            rewards=[f"python:{tmp_path}/score.py:right"],
            group_size=4,
        ),
        EnvironmentConfig(kind="tasks", name="sum", group_size=4),
    ]

    def sources():
        made = build_sources(entries, seed=0)
        made[0].draws.keep(tmp_path)
        return made

    first = sources()
    manager, inbox = managed(ScriptedClient(tokenizer, lambda *_: "1"), sources=first)
    manager.request_groups(90)
    inbox.wait(groups=90)
    manager.stop()
    drawn = [json.loads(line) for line in (tmp_path / DRAWS_FILE).read_text().splitlines()]
    assert {line["environment"] for line in drawn} == {"rows"}
    names = {group.group_id for group in inbox.groups if group.environment == "rows"}
    assert {f"rows-0-{line['group']}" for line in drawn if line.get("rewards")} >= names
    assert first[0].draws.kinds() == Kinds(easy=4, learnable=4, hopeless=4)
    assert sources()[0].draws.numbers() == first[0].draws.numbers()


def test_what_adaptive_needs(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    entry = {"kind": "dataset", "data": str(tmp_path / "rows.jsonl"), "rewards": ["builtin:length"]}
    entry["reward_options"] = {"length": {"target": 5}}
    for keys, message in [
        ({"adaptive": {"floor": 0.2}}, 'needs curriculum = "adaptive"'),
        ({"curriculum": "adaptive", "adaptive": {"floor": 0}}, "greater than 0"),
        ({"curriculum": "adaptive", "adaptive": {"half_life": 0}}, "greater than 0"),
        ({"curriculum": "adaptive", "reward_method": "gdpo"}, "name the reward"),
        ({"curriculum": "adaptive", "adaptive": {"reward": "format"}}, "no reward 'format'"),
    ]:
        with pytest.raises((ValueError, ConfigError), match=message):
            build_sources([EnvironmentConfig(**entry | keys)], seed=0)
    named = {"curriculum": "adaptive", "reward_method": "gdpo", "adaptive": {"reward": "length"}}
    build_sources([EnvironmentConfig(**entry | named)], seed=0)
