"""/v1/embeddings: pooled hidden states of the served model, under the adapter and the weights
that it answers with."""

import base64
import math
from typing import Any, Literal

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from mlx_parallm.engine.validation import MAX_CHOICES
from mlx_parallm.errors import RequestError
from mlx_parallm.server.context import Context
from mlx_parallm.server.generation import (
    UNNAMED,
    build_requests,
    encode_prompts,
    new_id,
    resolve_model,
    run,
)
from mlx_parallm.server.protocol.fields import Body, QueueFields
from mlx_parallm.server.protocol.openai import Prompt
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.types import Pooling, SamplingParams

router = json_router("openai")


class EmbeddingBody(QueueFields, Body):
    model: str | None = None
    input: Prompt
    dimensions: int | None = Field(None, ge=1)  # length to which the vector is cut
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    pooling: Pooling | None = None  # default: server.embedding_pooling
    normalize: bool = True  # to length 1, as OpenAI's are


@router.post("/v1/embeddings")
async def create_embedding(body: EmbeddingBody, request: Request, context: Context) -> Response:
    model = resolve_model(context, body.model)
    if (
        isinstance(body.input, list)
        and len(body.input) > MAX_CHOICES
        and not isinstance(body.input[0], int)
    ):
        raise RequestError(
            f"'input' has {len(body.input)} entries, and at most {MAX_CHOICES} are taken",
            param="input",
        )
    try:
        texts = [
            text.last(body.truncate_prompt_tokens) for text in encode_prompts(context, body.input)
        ]
    except RequestError as error:
        raise RequestError(
            str(error).replace("'prompt'", "'input'"), param="input", code=error.code
        ) from error
    params = SamplingParams(
        max_tokens=0, pooling=body.pooling or context.deps.config.embedding_pooling
    )
    outputs = await run(
        context, request, build_requests(new_id(UNNAMED), texts, params, model, body, request)
    )
    data = [
        {"object": "embedding", "index": index, "embedding": _shown(output.embedding or (), body)}
        for index, output in enumerate(outputs)
    ]
    tokens = sum(len(text.token_ids) for text in texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": model.id, "usage": usage})


def _shown(vector: tuple[float, ...], body: EmbeddingBody) -> Any:
    """The vector as floats, or as base64 of little-endian float32."""
    size = len(vector) if body.dimensions is None else body.dimensions
    if size > len(vector):
        raise RequestError(
            f"'dimensions' is {size}, but the model's vectors have {len(vector)}",
            param="dimensions",
        )
    numbers = np.array(vector[:size], np.float32)
    length = math.sqrt(float(np.square(numbers, dtype=np.float64).sum()))
    if body.normalize and length:
        numbers = (numbers / length).astype(np.float32)
    if body.encoding_format == "float":
        return numbers.tolist()
    return base64.b64encode(numbers.astype("<f4").tobytes()).decode()
