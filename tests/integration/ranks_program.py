"""One rank of a launch, without a daemon: `python -m tests.integration.ranks_program WHAT`.
Prints one JSON line."""

import json
import os
import signal
import sys
import threading

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
import numpy as np

from mlx_parallm.distributed import ranks as distributed
from mlx_parallm.distributed.ranks import JoinedRanks, join
from mlx_parallm.errors import ConfigError, RanksStandStillError
from mlx_parallm.models.threads import mlx_thread

assert mlx_parallm.__version__


def calls(ranks: JoinedRanks) -> dict[str, object]:
    """Every call once. Sums are of several bundles and dtypes."""
    given = [
        mx.full((3, 5), 2.0**ranks.rank),
        mx.array(7, mx.uint32),
        mx.full((4_000_000,), ranks.rank + 0.5),
    ]
    sums = ranks.sum(given)
    assert sums is not None
    found: dict[str, object] = {
        "exchanged": ranks.exchange({"rank": ranks.rank, "column": np.arange(3) + ranks.rank}),
        "sums": [[str(a.dtype), list(a.shape), float(a.reshape(-1)[-1].item())] for a in sums],
        "stopped": ranks.exchange("value", stop=ranks.rank == 0),
    }
    ranks.check()
    if ranks.rank == 0:
        ranks.tell("work")
        ranks.close()
    else:
        found["told"] = [ranks.next_task(), ranks.next_task()]
        ranks.close()
    return found


def dies(ranks: JoinedRanks) -> dict[str, object]:
    """Rank 1 is killed before a collective."""
    if ranks.rank == 1:
        os._exit(9)
    return {"sum": ranks.sum([mx.ones((1000,))]), "again": ranks.exchange(1), "lost": ranks.lost}


def vanishes(ranks: JoinedRanks) -> dict[str, object]:
    """Rank 1 gives up its connection to rank 0 when the collective begins: MLX waits for ever."""
    distributed.GRACE_S = 1.0
    if ranks.rank == 1:
        ranks.exchange(None)
        for end in (*ranks._watched, *ranks._connections):
            end.close()
        threading.Event().wait()
    return {"sum": ranks.sum([mx.ones((1000,))]), "lost": ranks.lost}


def stops(ranks: JoinedRanks) -> dict[str, object]:
    """Rank 1 is stopped before a sum; its connections stay."""
    ranks._sum_s = 2.0
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return given_up(ranks)


def stands(ranks: JoinedRanks) -> dict[str, object]:
    """All ranks come to a sum, and it never ends, as MLX's ring has done. Rank 0 is the first to
    give up."""
    ranks._sum_s = 60.0 if ranks.rank else 2.0
    if ranks.rank == 1:
        distributed._sums = lambda *_: threading.Event().wait()  # type: ignore[assignment]
    return given_up(ranks)


def given_up(ranks: JoinedRanks) -> dict[str, object]:
    found = {"sum": ranks.sum([mx.ones((1000,))]), "lost": ranks.lost}
    try:
        ranks.check()
    except RanksStandStillError:
        found["again"] = True
    return found


def main() -> None:
    if sys.argv[1] == "versions":
        distributed.VERSIONS = f"mlx-parallm 0.{os.environ['MLX_RANK']}"
    try:
        ranks = join()
    except ConfigError as error:
        sys.exit(str(error))
    assert isinstance(ranks, JoinedRanks)
    with mlx_thread():
        programs = {
            "calls": calls,
            "dies": dies,
            "vanishes": vanishes,
            "stops": stops,
            "stands": stands,
        }
        found = programs[sys.argv[1]](ranks)
        sys.stdout.write(json.dumps(found, default=lambda value: value.tolist()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
