"""/tokenize and /detokenize, vLLM's shapes, at the root and under /v1."""

from fastapi.responses import JSONResponse, Response

from mlx_parallm.errors import RequestError
from mlx_parallm.server.context import Context
from mlx_parallm.server.generation import check_size, check_text, encode_conversation, resolve_model
from mlx_parallm.server.protocol.openai import DetokenizeBody, TokenizeBody
from mlx_parallm.server.protocol.strict_json import json_router

router = json_router("tokens")


@router.post("/v1/tokenize")
@router.post("/tokenize")
async def tokenize(body: TokenizeBody, context: Context) -> Response:
    resolve_model(context, body.model)
    if body.prompt is None:
        token_ids = list((await encode_conversation(context, body)).token_ids)
    else:
        check_text(body.prompt, "prompt")
        check_size(context, body.prompt, "prompt")
        special = True if body.add_special_tokens is None else body.add_special_tokens
        token_ids = context.tokenizer.encode(body.prompt, add_special_tokens=special)
    return JSONResponse(
        {
            "count": len(token_ids),
            "max_model_len": context.engine.max_model_len,
            "tokens": token_ids,
            "token_strs": context.tokenizer.token_texts(token_ids)
            if body.return_token_strs
            else None,
        }
    )


@router.get("/tokenizer_info")
async def tokenizer_info(context: Context) -> Response:
    """Answer with the special tokens, sizes and chat template, by the names of
    tokenizer_config.json. Clients that render and count tokens by themselves need them
    (lm-eval's `tokenizer_backend = "remote"`)."""
    tokenizer = context.tokenizer
    special = {
        f"{name}_token": None if token_id is None else tokenizer.token_text(token_id)
        for name, token_id in (
            ("bos", tokenizer.bos_token_id),
            ("eos", tokenizer.eos_token_id),
            ("pad", tokenizer.pad_token_id),
        )
    }
    sizes = {"vocab_size": tokenizer.vocab_size, "model_max_length": context.engine.max_model_len}
    return JSONResponse(special | sizes | {"chat_template": tokenizer.chat_template})


@router.post("/v1/detokenize")
@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, context: Context) -> Response:
    resolve_model(context, body.model)
    room, size = context.engine.max_model_len, context.tokenizer.vocab_size
    if len(body.tokens) > room:
        message = (
            f"'tokens' holds {len(body.tokens)} ids: this model's maximum"
            f" context length is {room} tokens"
        )
        raise RequestError(message, param="tokens", code="context_length_exceeded")
    if max(body.tokens, default=0) >= size:
        raise RequestError(
            f"'tokens' holds {max(body.tokens)}, but the vocabulary has {size} tokens",
            param="tokens",
        )
    return JSONResponse(
        {"prompt": context.tokenizer.decode(body.tokens, skip_special_tokens=False)}
    )
