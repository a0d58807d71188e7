"""The experts of a mixture in requests and answers.

Both of the field's forms have a row for each token but the last, since the row of token t are the
experts of the forward over it, which predicts token t + 1:

    as_npy     vLLM's `routed_experts`: base64 of a .npy file, [tokens - 1, layers, k]
    as_int32   SGLang's `meta_info.routed_experts`: base64 of int32, the same numbers, flat

Rows of a prompt's tokens whose experts are not recorded hold `NOT_RECORDED`; that of its last one
predicts the first sampled token and is recorded always.
"""

import base64
import binascii
import io
from collections.abc import Sequence

import numpy as np

from mlx_parallm.errors import RequestError
from mlx_parallm.types import Completion, RoutedExperts

NOT_RECORDED = -1
FIELD = "return_routed_experts"


def require_recorded(completion: Completion) -> RoutedExperts:
    """Return the experts of the sampled tokens. Raises RequestError: the engine records none."""
    if completion.routed_experts is None:
        raise RequestError(
            f"{FIELD!r}: this server records no experts: start it with"
            " server.enable_return_routed_experts = true, for a mixture of experts",
            param=FIELD,
        )
    return completion.routed_experts


def as_npy(recorded: RoutedExperts, prompt_tokens: int, prompt: RoutedExperts | None = None) -> str:
    """`prompt`: of its last tokens but one (`Completion.prompt_experts`)."""
    rows = _rows(recorded, prompt_tokens, prompt)
    file = io.BytesIO()
    np.save(file, rows.astype(np.int32 if recorded.wide else np.int16), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def as_int32(
    recorded: RoutedExperts,
    prompt_tokens: int,
    start: int = 0,
    prompt: RoutedExperts | None = None,
) -> str:
    """`start`: SGLang's `routed_experts_start_len`, the first token with a row."""
    rows = _rows(recorded, prompt_tokens, prompt)[start:]
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def _rows(recorded: RoutedExperts, prompt_tokens: int, prompt: RoutedExperts | None) -> np.ndarray:
    ids = recorded.array().astype(np.int32)
    rows = np.full((prompt_tokens - 1, *ids.shape[1:]), NOT_RECORDED, np.int32)
    if prompt is not None and len(prompt):
        rows[-len(prompt) :] = prompt.array()
    return np.concatenate([rows, ids])


def read_npy(text: str, mask: Sequence[int]) -> RoutedExperts:
    """Return the experts of the sampled tokens out of `as_npy`'s form. Raises ValueError: it is
    something else, or a sampled token has none."""
    try:
        rows = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError, binascii.Error) as error:
        raise ValueError(f"no base64 of a .npy file: {error}") from error
    if not isinstance(rows, np.ndarray) or rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise ValueError("no array of whole numbers [tokens - 1, layers, experts a token]")
    if len(rows) != len(mask) - 1:
        raise ValueError(f"{len(rows)} rows for {len(mask)} tokens: one a token but the last")
    if 0 in rows.shape[1:]:
        raise ValueError(f"an array {list(rows.shape)} has no experts")
    sampled = np.flatnonzero(np.asarray(mask[1:]))
    ids = rows[sampled]
    if ids.size and ids.min() < 0:
        token = int(sampled[(ids < 0).any(axis=(1, 2))][0]) + 1
        raise ValueError(f"sampled token {token} has no recorded experts")
    return RoutedExperts.of(ids)
