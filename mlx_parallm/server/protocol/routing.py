"""The experts of a mixture in requests and answers.

Both of the field's forms have a row for each token but the last, since the row of token t are the
experts of the forward over it, which predicts token t + 1:

    as_npy     vLLM's `routed_experts`: base64 of a .npy file, [tokens - 1, layers, k]
    as_int32   SGLang's `meta_info.routed_experts`: base64 of int32, the same numbers, flat

Rows of a prompt's tokens whose experts are not recorded hold `NOT_RECORDED`; that of its last one
predicts the first sampled token and is recorded always.
"""

import base64
import io
import tokenize
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from pydantic import BaseModel, Field, model_validator

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.errors import RequestError
from mlx_parallm.server.protocol.fields import CompanionFields
from mlx_parallm.types import Completion, PromptExperts, RoutedExperts

NOT_RECORDED = -1
FIELD = "return_routed_experts"
# a header is a text of the sender's, and names any shape
_NO_NPY = (
    ValueError,
    EOFError,
    OSError,
    SyntaxError,
    tokenize.TokenError,
    ArithmeticError,
    MemoryError,
    RecursionError,
)


class ExpertFields(CompanionFields):
    return_routed_experts: bool = False

    def check_streamed(self) -> None:
        super().check_streamed()
        if self.return_routed_experts:
            raise RequestError(f"{FIELD!r} is not available when stream = true", param=FIELD)

    def given_back(
        self, completion: Completion, prompt_tokens: int, *, server: ServerConfig | None = None
    ) -> dict[str, Any]:
        fields = super().given_back(completion, prompt_tokens, server=server)
        always = server is not None and server.enable_return_routed_experts
        if not (always or self.return_routed_experts):
            return fields
        if (recorded := completion.routed_experts) is not None:
            prompt = completion.prompt_experts
            return fields | {"routed_experts": self._written(recorded, prompt_tokens, prompt)}
        if self.return_routed_experts and completion.token_ids:
            raise RequestError(
                f"{FIELD!r}: this server records no experts: start it with"
                " server.enable_return_routed_experts = true, for a mixture of experts",
                param=FIELD,
            )
        return fields

    def _written(
        self, recorded: RoutedExperts, prompt_tokens: int, prompt: Sequence[PromptExperts]
    ) -> str:
        return as_npy(recorded, prompt_tokens, prompt)


class FlatExpertFields(ExpertFields):
    routed_experts_start_len: int = Field(0, ge=0)

    def _written(
        self, recorded: RoutedExperts, prompt_tokens: int, prompt: Sequence[PromptExperts]
    ) -> str:
        return as_int32(recorded, prompt_tokens, self.routed_experts_start_len, prompt)


class RefusedExperts(BaseModel):
    """The field of a route whose answer has no place for experts."""

    return_routed_experts: bool | None = None

    @model_validator(mode="after")
    def _asks_for_no_experts(self) -> Self:
        if self.return_routed_experts:
            raise RequestError(
                f"{FIELD}: a SampleResponse has no field for experts: sample by POST"
                " /inference/v1/generate, which returns them",
                param=FIELD,
            )
        return self


def as_npy(
    recorded: RoutedExperts, prompt_tokens: int, prompt: Sequence[PromptExperts] = ()
) -> str:
    """`prompt`: `Completion.prompt_experts`."""
    rows = _rows(recorded, prompt_tokens, prompt)
    file = io.BytesIO()
    np.save(file, rows.astype(np.int32 if recorded.wide else np.int16), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def as_int32(
    recorded: RoutedExperts,
    prompt_tokens: int,
    start: int = 0,
    prompt: Sequence[PromptExperts] = (),
) -> str:
    """`start`: SGLang's `routed_experts_start_len`, the first token with a row."""
    rows = _rows(recorded, prompt_tokens, prompt)[start:]
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def _rows(
    recorded: RoutedExperts, prompt_tokens: int, prompt: Sequence[PromptExperts]
) -> np.ndarray:
    ids = recorded.array().astype(np.int32)
    rows = np.full((prompt_tokens - 1, *ids.shape[1:]), NOT_RECORDED, np.int32)
    for part in prompt:
        rows[part.start : part.stop] = part.experts.array()
    return np.concatenate([rows, ids])


def read_npy(text: str, mask: Sequence[int]) -> tuple[RoutedExperts, tuple[PromptExperts, ...]]:
    """Return the experts of the sampled tokens out of `as_npy`'s form, and those of the others, as
    far as they are there. Raises ValueError: it is something else, or a sampled token has none."""
    try:
        file = base64.b64decode(text, validate=True)
        if not file.startswith(MAGIC_PREFIX):
            raise ValueError("it does not begin as one")  # numpy would open a zip or a pickle
        rows = np.load(io.BytesIO(file), allow_pickle=False)
    except _NO_NPY as error:
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
    present = (rows >= 0).all(axis=(1, 2)) & (np.asarray(mask[1:]) == 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], present, [False]])))
    parts = [
        PromptExperts(int(start), RoutedExperts.of(rows[start:stop]))
        for start, stop in edges.reshape(-1, 2)
    ]
    return RoutedExperts.of(ids), tuple(parts)
