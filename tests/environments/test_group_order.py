import itertools

import pytest

from mlx_parallm.environments.group_order import Schedule, derive_seed, group_id


def shares(weights, groups=3000, seed=0):
    schedule = Schedule(weights, seed=seed)
    counts = [0] * len(weights)
    for index in range(groups):
        counts[schedule.environment_of(index)] += 1
    return [count / groups for count in counts]


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 1.0], [3.0, 1.0], [0.5, 0.25, 0.25], [10.0, 1.0, 1.0]]
)
def test_weights_are_respected(weights):
    expected = [weight / sum(weights) for weight in weights]
    assert shares(weights) == pytest.approx(expected, abs=0.003)


def test_each_environment_counts_its_own_tasks_and_every_group_belongs_to_one():
    schedule = Schedule([2.0, 1.0], seed=1)
    groups = [list(itertools.islice(schedule.groups_of(environment), 30)) for environment in (0, 1)]
    for environment in (0, 1):
        assert [task for _, task in groups[environment]] == list(range(30))
        assert all(
            schedule.environment_of(index) == environment for index, _ in groups[environment]
        )
    assert sorted(index for index, _ in groups[0] + groups[1] if index < 40) == list(range(40))


def test_a_jump_arrives_where_a_walk_does():
    schedule = Schedule([2.0, 1.0, 4.0], seed=9)
    walked = list(itertools.islice(schedule.groups_of(1), 50))
    for first in (0, 3, 77, 150):
        assert next(schedule.groups_of(1, first)) == next(
            group for group in walked if group[0] >= first
        )


def test_the_run_seed_shifts_the_order():
    def order(seed):
        return [Schedule([1.0, 1.0], seed=seed).environment_of(index) for index in range(64)]

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_seeds_and_group_ids_are_distinct_and_fixed():
    seeds = {derive_seed("group", run, index) for run in range(10) for index in range(200)}
    assert len(seeds) > 1990
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed("group", 0, 0) == 1638773142
    assert group_id("sum", 7, 12) == "sum-7-12"
    assert derive_seed("group", 0, 0) != derive_seed("turn", 0, 0)
