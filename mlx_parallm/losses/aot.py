"""The margins of AOT, a DPO whose distributions are compared and not its pairs (arXiv:2406.05882):
numbers are paired by their ranks, which is optimal transport in one dimension. No MLX.

    aot            c - r of each pair, sorted, less c_ref - r_ref of each pair, sorted
    aot_unpaired   c - c_ref of each chosen completion, sorted, less r - r_ref of each rejected one,
                   sorted

A rank depends on all pairs that are sorted together, and then nothing else does: the slope of a
loss of margins by a completion's log-probability is that of its own margin, whatever completion
stands in the margin's other place. So margins are computed once, before a step's first update
(`LossInputs.row_constants`), and micro-batches need no others.
"""

from collections.abc import Mapping, Sequence

import numpy as np


def sorted_margins(
    kinds: Sequence[str],
    logprobs: Sequence[np.ndarray],
    reference: Sequence[np.ndarray],
    *,
    together: int | None = None,
    ld_alpha: float | None = None,
) -> Mapping[str, np.ndarray]:
    """Return for each of the kinds the margin that each row stands in, [2P] float32.

    Args:
        kinds: "aot", "aot_unpaired", or both.
        logprobs: of the trained tokens of each row, [tokens] each; row 2i is chosen, 2i + 1
            rejected.
        reference: the same of the reference.
        together: pairs that are sorted with each other, in the order of the rows; None: all.
        ld_alpha: as in `dpo_loss`.

    Worked, of two pairs with c = -4, -5, r = -6, -6, c_ref = -4.5, -4, r_ref = -5.5, -7: c - r is
    2 and 1, c_ref - r_ref 1 and 3, so aot has 2 - 3 = -1 for the first pair and 1 - 1 = 0 for the
    second. c - c_ref is 0.5 and -1, r - r_ref -0.5 and 1: aot_unpaired has 0.5 - 1 = -0.5, which
    the first chosen and the second rejected row stand in, and -1 + 0.5 = -0.5 for the two others.
    """
    sums, ref_sums = (_sums(rows, ld_alpha) for rows in (logprobs, reference))
    pairs = len(sums) // 2
    size = together or max(pairs, 1)
    parts = [slice(2 * start, 2 * (start + size)) for start in range(0, pairs, size)]
    return {
        kind: np.concatenate([_margins(kind, sums[part], ref_sums[part]) for part in parts])
        for kind in kinds
    }


def _margins(kind: str, sums: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """[2P] of pairs that are sorted together."""
    if kind == "aot":
        first, second = (each[0::2] - each[1::2] for each in (sums, reference))
    else:
        first, second = (sums - reference)[0::2], (sums - reference)[1::2]
    one, other = (np.argsort(each, kind="stable") for each in (first, second))
    margins = np.empty(len(sums), np.float32)
    margins[2 * one] = first[one] - second[other]
    margins[2 * (one if kind == "aot" else other) + 1] = first[one] - second[other]
    return margins


def _sums(rows: Sequence[np.ndarray], ld_alpha: float | None) -> np.ndarray:
    """The log-probability of each row, [2P] float64."""
    weight = 1.0 if ld_alpha is None else ld_alpha
    shared = np.repeat([min(map(len, rows[i : i + 2])) for i in range(0, len(rows), 2)], 2)
    return np.array(
        [
            row[:end].sum(dtype=np.float64) + weight * row[end:].sum(dtype=np.float64)
            for row, end in zip(rows, shared, strict=True)
        ]
    )
