"""POST /v1/messages and /v1/messages/count_tokens: a chat in the words of Anthropic's Messages
API."""

import uuid

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from mlx_parallm.errors import RequestError
from mlx_parallm.server.api.chat import answer_chat
from mlx_parallm.server.context import Context
from mlx_parallm.server.generation import render_conversation, resolve_model
from mlx_parallm.server.messages.answer import MessageForm
from mlx_parallm.server.messages.body import IN_CHAT, CountTokensBody, MessagesBody
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.protocol.to_chat import renamed

router = json_router("openai")


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request, context: Context) -> Response:
    """Answer a chat whose messages are lists of blocks."""
    model = resolve_model(context, body.model)
    form = MessageForm(f"msg_{uuid.uuid4().hex}", model.id, body.stop_sequences)
    try:
        return await answer_chat(body.to_chat(), request, context, response_id=form.id, form=form)
    except RequestError as error:
        raise renamed(error, IN_CHAT) from error


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, context: Context) -> Response:
    """Count the tokens of the prompt of these messages."""
    resolve_model(context, body.model)
    return JSONResponse({"input_tokens": len(render_conversation(context, body.to_chat()))})
