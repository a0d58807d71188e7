import pytest

from mlx_parallm.environments.schedule import Placement, Schedule, derive_seed, group_id


def shares(weights, groups=3000, seed=0):
    schedule = Schedule(weights, seed=seed)
    counts = [0] * len(weights)
    for index in range(groups):
        counts[schedule.place(index).environment] += 1
    return [count / groups for count in counts]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [3.0, 1.0], [0.5, 0.25, 0.25], [10.0, 1.0, 1.0]])
def test_weights_are_respected(weights):
    expected = [weight / sum(weights) for weight in weights]
    assert shares(weights) == pytest.approx(expected, abs=0.003)


def test_every_stretch_of_groups_holds_the_weights():
    schedule = Schedule([3.0, 1.0], seed=5)
    chosen = [schedule.environment_of(index) for index in range(400)]
    for start in range(0, 380, 20):
        assert chosen[start : start + 20].count(1) in (4, 5, 6)


def test_each_environment_counts_its_own_tasks():
    schedule = Schedule([2.0, 1.0], seed=1)
    placements = [schedule.place(index) for index in range(90)]
    for environment in (0, 1):
        tasks = [placement.task for placement in placements if placement.environment == environment]
        assert tasks == list(range(len(tasks)))


def test_a_jump_places_like_a_walk():
    walked = [Schedule([2.0, 1.0, 4.0], seed=9)]
    placements: list[Placement] = [walked[0].place(index) for index in range(200)]
    jumper = Schedule([2.0, 1.0, 4.0], seed=9)
    for index in (150, 3, 199, 0, 77):
        assert jumper.place(index) == placements[index]


def test_the_run_seed_shifts_the_order():
    def order(seed):
        return [Schedule([1.0, 1.0], seed=seed).environment_of(index) for index in range(64)]

    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1


def test_seeds_are_distinct_and_fixed():
    seeds = {derive_seed("group", run, index) for run in range(10) for index in range(200)}
    assert len(seeds) > 1990
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed("group", 0, 0) == 1638773142
    assert derive_seed("group", 0, 0) != derive_seed("turn", 0, 0)


def test_group_ids_are_stable():
    assert group_id("sum", 7, 12) == "sum-7-12"
