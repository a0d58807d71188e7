"""POST /v1/responses and its siblings: a chat in the form of OpenAI's Responses API."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import JSONResponse, Response

from mlx_parallm.errors import RefusedError, RequestError
from mlx_parallm.server.api.chat import answer_chat
from mlx_parallm.server.auth import client_of
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.errors import ERROR_CONTENT
from mlx_parallm.server.generation import encode_conversation, resolve_model
from mlx_parallm.server.protocol.openai import ChatBody
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.protocol.to_chat import renamed
from mlx_parallm.server.responses.answer import CANCELLED, ResponseForm
from mlx_parallm.server.responses.body import IN_CHAT, ResponsesBody, ToolNames
from mlx_parallm.server.sse import AnswerResponse
from mlx_parallm.server.stored_responses import ClientResponses, Item, StoredItem

router = json_router("openai")
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"description": "It has ended", "content": ERROR_CONTENT}
}


@router.post("/v1/responses")
async def create_response(body: ResponsesBody, request: Request, context: Context) -> Response:
    """Answer a chat whose messages are items. It is kept for `previous_response_id` unless
    `store` is false."""
    model = resolve_model(context, body.model)
    store = _responses(request, context)
    earlier, new_items, chat, names = _chat_of(body, context, store)
    shown = body.with_defaults(context.sampling_defaults)
    form = ResponseForm(
        shown, names, f"resp_{uuid.uuid4().hex}", model.id, earlier, new_items, store
    )
    try:
        if body.stream:
            return await answer_chat(chat, request, context, response_id=form.id, form=form)
        with store.holding(form):
            return await answer_chat(chat, request, context, response_id=form.id, form=form)
    except RequestError as error:
        raise error if isinstance(error, RefusedError) else renamed(error, IN_CHAT) from error


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: ResponsesBody, request: Request, context: Context) -> Response:
    """Count the tokens of the prompt of this request."""
    resolve_model(context, body.model)
    chat = _chat_of(body, context, _responses(request, context))[2]
    count = len((await encode_conversation(context, chat)).token_ids)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": count})


@router.get("/v1/responses/{response_id}")
async def show_response(
    response_id: str, request: Request, context: Context, stream: Annotated[bool, Query()] = False
) -> Response:
    """A response that is kept, or that is being generated."""
    if stream:
        raise RequestError(
            "'stream' is of POST /v1/responses: the events of a response are not kept",
            param="stream",
        )
    responses = _responses(request, context)
    running = responses.running(response_id)
    return AnswerResponse(running.snapshot() if running else responses.find(response_id).load())


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, context: Context) -> Response:
    _responses(request, context).delete(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    context: Context,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """The items that a response answers, the newest first."""
    listed: Sequence[StoredItem] = _responses(request, context).find(response_id).input
    if order == "desc":
        listed = listed[::-1]
    if after is not None:
        position = next((number for number, item in enumerate(listed, 1) if item.id == after), None)
        if position is None:
            raise RequestError(f"'after': no item {after!r} in this response", param="after")
        listed = listed[position:]
    page = [item.load() for item in listed[:limit]]
    ends = (
        {"first_id": page[0]["id"], "last_id": page[-1]["id"]}
        if page
        else {"first_id": None, "last_id": None}
    )
    return AnswerResponse({"object": "list", "data": page, **ends, "has_more": len(listed) > limit})


@router.post("/v1/responses/{response_id}/cancel", responses=_CONFLICT)
async def cancel_response(response_id: str, request: Request, context: Context) -> Response:
    """End a response that is being generated; its own request gets the text so far."""
    responses = _responses(request, context)
    running = responses.running(response_id)
    if running is None:
        responses.find(response_id)
        raise RefusedError(f"{response_id!r} has ended already", 409, "response_id")
    for request_id in context.running.find([response_id]):
        context.engine.abort(request_id)
    return AnswerResponse(running.snapshot() | {"status": CANCELLED})


def _responses(request: Request, context: ServerContext) -> ClientResponses:
    return context.responses.of(client_of(request))


def _chat_of(
    body: ResponsesBody, context: ServerContext, responses: ClientResponses
) -> tuple[tuple[StoredItem, ...], list[Item], ChatBody, ToolNames]:
    """The items of earlier responses, those of this request, and the chat that they make."""
    earlier = responses.conversation(body.previous_response_id)
    new_items = responses.resolve(body.items)
    chat, names = body.to_chat(
        [*(item.load() for item in earlier), *new_items],
        first=len(earlier),
        shown=context.shown,
    )
    return earlier, new_items, chat, names
