"""The draws of rows alone, without a model: how many groups until rows whose pass rates are known, and
rise as they are trained, have taught so much.

    python -m scripts.bench.row_draws                    # the package's power of the chance
    python -m scripts.bench.row_draws --power 1 2 3 4 6

A row is hopeless, learnable (pass rate 0.13 to 0.75 at first) or solved (0.93 to 0.99). A group of
pass rate p teaches 4 p (1 - p), which is 1 at one half: the logit of its row rises by a quarter of
it, those of all rows by 0.004 of it. Printed: groups until 260 were taught, as a part of those that
uniform drawing needs, and of the learnable rows alone (oracle), which is the bound.
"""

import argparse
import itertools
import math
import random
import statistics
from collections.abc import Iterator

from mlx_parallm.config.environment import AdaptiveConfig
from mlx_parallm.environments.curriculum.draws import SHARPNESS, RowDraws

GROUP, GROUPS_A_STEP, TAUGHT = 8, 2, 260.0
OWN, ALL = 0.25, 0.004
KINDS = {
    "60 % hopeless, 20 % solved": (180, 60, 60),
    "the same of 3,000": (1800, 600, 600),
    "half learnable, a quarter each of the others": (75, 150, 75),
    "90 % hopeless": (270, 15, 15),
}


def rates(counts: tuple[int, int, int], rng: random.Random) -> list[float]:
    hopeless, learnable, solved = counts
    logits = [math.log(p / (1 - p)) for p in (rng.uniform(0.13, 0.75) for _ in range(learnable))]
    logits += [math.log(p / (1 - p)) for p in (rng.uniform(0.93, 0.99) for _ in range(solved))]
    return logits + [-math.inf] * hopeless


def epochs(rows: int, rng: random.Random) -> Iterator[int]:
    while True:
        yield from rng.sample(range(rows), rows)


def groups_needed(counts: tuple[int, int, int], way: str, seed: int, power: float) -> int:
    """Play until enough is taught: `way` is uniform, oracle or adaptive."""
    rng = random.Random(seed)
    logits, risen, taught = rates(counts, rng), 0.0, 0.0
    rows = len(logits)
    adaptive = RowDraws(
        way,
        list(map(str, range(rows))),
        AdaptiveConfig(),
        group_size=GROUP,
        seed=seed,
        sharpness=power,
    )
    order = epochs(counts[1] if way == "oracle" else rows, rng)
    for first in itertools.count(0, GROUPS_A_STEP):
        groups = range(first, first + GROUPS_A_STEP)
        drawn = [adaptive.draw(k, first) if way == "adaptive" else next(order) for k in groups]
        for index, row in zip(groups, drawn, strict=True):
            rate = 1 / (1 + math.exp(min(-logits[row] - risen, 700.0)))
            rewards = [float(rng.random() < rate) for _ in range(GROUP)]
            if way == "adaptive":
                adaptive.earned(index, rewards, version=first // GROUPS_A_STEP)
            teaches = 4 * rate * (1 - rate)
            taught, logits[row], risen = (
                taught + teaches,
                logits[row] + OWN * teaches,
                risen + ALL * teaches,
            )
        if taught >= TAUGHT:
            return groups.stop
    raise AssertionError("itertools.count ends never")


def needed(counts: tuple[int, int, int], way: str, seeds: int, power: float = SHARPNESS) -> float:
    return statistics.fmean(groups_needed(counts, way, seed, power) for seed in range(seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--power", type=float, nargs="+", default=[SHARPNESS])
    parser.add_argument("--seeds", type=int, default=8)
    options = parser.parse_args()
    powers = [f"power {power:g}" for power in options.power]
    print("| rows | oracle | " + " | ".join(powers) + " |")
    print("|---" * (len(powers) + 2) + "|")
    for name, counts in KINDS.items():
        uniform = needed(counts, "uniform", options.seeds)
        parts = [needed(counts, "oracle", options.seeds) / uniform]
        for power in options.power:
            parts.append(needed(counts, "adaptive", options.seeds, power) / uniform)
        print(f"| {name} | " + " | ".join(f"{part:.2f}" for part in parts) + " |", flush=True)


if __name__ == "__main__":
    main()
