"""The best tokens of a teacher that a sender asked, in its group's metadata: read and checked."""

import math
from collections.abc import Sequence
from typing import Any

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.companion import RolloutCompanion
from mlx_parallm.types import LOGPROB_TOLERANCE, RolloutGroup

KEY = "distill"
"""Key of the group's metadata."""


def best_tokens(
    ids: Sequence[Sequence[Sequence[int]]] | None,
    logprobs: Sequence[Sequence[Sequence[float]]] | None,
    sequences: Sequence[Sequence[int]],
    episodes: Sequence[int] | None,
) -> dict[str, Any]:
    """Return the best tokens at each position of `sequences` and their log-probabilities,
    [sequences][T][K], in the order of the group's segments.

    `episodes`: the number of each sequence's episode; None: each is one. Raises
    RolloutRejectedError.
    """
    size = len(sequences)
    if ids is None or logprobs is None:
        raise RolloutRejectedError("distill_token_ids and distill_logprobs belong together")
    tables: dict[str, Sequence[Sequence[Any]]] = {
        "distill_token_ids": ids,
        "distill_logprobs": logprobs,
    }
    for name, table in tables.items():
        if len(table) != size:
            raise RolloutRejectedError(f"{len(table)} {name} for {size} sequences")
        for number, row in enumerate(table):
            if len(row) != (length := len(sequences[number])):
                raise RolloutRejectedError(
                    f"sequence {number}: {len(row)} {name} for {length} tokens"
                )
    for number, rows in enumerate(zip(ids, logprobs, strict=True)):
        for position, (tokens, values) in enumerate(zip(*rows, strict=True)):
            good = all(math.isfinite(value) and value <= LOGPROB_TOLERANCE for value in values)
            if len(tokens) != len(values) or not good:
                raise RolloutRejectedError(
                    f"sequence {number}: distill_logprobs[{position}] is not a log-probability for"
                    f" each of its {len(tokens)} tokens: {str(values)[:80]}"
                )
    episodes = list(range(size)) if episodes is None else episodes
    firsts = {episode: number for number, episode in reversed(list(enumerate(episodes)))}
    order = sorted(range(size), key=lambda number: (firsts[episodes[number]], number))
    return {
        "token_ids": [ids[number] for number in order],
        "logprobs": [logprobs[number] for number in order],
    }


class BestTokens(RolloutCompanion):
    """`best_tokens` in the group's metadata: each of the vocabulary, and once at a position."""

    def check_group(self, group: RolloutGroup, vocab_size: int) -> None:
        for number, row in enumerate(group.metadata.get(KEY, {}).get("token_ids", ())):
            for position, ids in enumerate(row):
                where = f"sequence {number}: distill_token_ids[{position}]"
                if wrong := [token for token in ids if not 0 <= token < vocab_size]:
                    raise RolloutRejectedError(
                        f"{where} has id {wrong[0]}, outside the vocabulary of {vocab_size}"
                    )
                if len(set(ids)) < len(ids):
                    raise RolloutRejectedError(f"{where} names a token twice")
