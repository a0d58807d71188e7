"""Root /generate: token ids in, token ids and log-probabilities out, in vLLM's and SGLang's shapes."""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.generation import (
    UNNAMED,
    build_requests,
    check_count,
    encode_prompt,
    new_id,
    resolve_model,
    run,
)
from mlx_parallm.server.protocol.generate import (
    SglangBody,
    VllmBody,
    parse_generate,
    sglang_objects,
    vllm_response,
)
from mlx_parallm.server.protocol.strict_json import StrictJSONRoute


def generate_router() -> APIRouter:
    router = APIRouter(route_class=StrictJSONRoute, tags=["tokens"])
    router.add_api_route("/generate", generate, methods=["POST"], response_class=JSONResponse)
    return router


async def generate(body: dict[str, Any], request: Request, context: Context) -> Response:
    parsed = parse_generate(body)
    if isinstance(parsed, VllmBody):
        return JSONResponse(await _vllm(parsed, request, context))
    return JSONResponse(await _sglang(parsed, request, context))


async def _vllm(body: VllmBody, request: Request, context: ServerContext) -> dict[str, Any]:
    model = resolve_model(context, body.model)
    prompt = encode_prompt(context, body.prompt_value())
    [output] = await run(context, request, build_requests(new_id(UNNAMED), [prompt], body.to_params(), model, body))
    return vllm_response(body, output, model.policy_version)


async def _sglang(body: SglangBody, request: Request, context: ServerContext) -> Any:
    """One object for one prompt with n = 1, a list for anything else."""
    model = resolve_model(context, body.lora_path or body.model)
    values, batched = body.prompt_values()
    response_id = new_id(UNNAMED)
    params_of = body.params_of(len(values))
    check_count(len(values), max(params.n for params in params_of))
    requests = [
        build_requests(f"{response_id}-{position}", [encode_prompt(context, value)], params, model, body)[0]
        for position, (value, params) in enumerate(zip(values, params_of, strict=True))
    ]
    outputs = await run(context, request, requests)
    objects = [each for output in outputs for each in sglang_objects(context.texts, body, output)]
    return objects[0] if len(objects) == 1 and not batched else objects
