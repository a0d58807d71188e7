"""POST /v1/messages and /v1/messages/count_tokens: a chat in the words of Anthropic's Messages
API."""

import uuid

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.thinking import ends_thinking
from mlx_parallm.server.api.chat import answer_chat
from mlx_parallm.server.context import Context, ServerContext
from mlx_parallm.server.generation import encode_conversation, resolve_model
from mlx_parallm.server.messages.answer import MessageForm
from mlx_parallm.server.messages.body import IN_CHAT, CountTokensBody, MessagesBody
from mlx_parallm.server.protocol.openai import ChatBody
from mlx_parallm.server.protocol.strict_json import json_router
from mlx_parallm.server.protocol.to_chat import renamed

router = json_router("openai")


@router.post("/v1/messages")
async def create_message(body: MessagesBody, request: Request, context: Context) -> Response:
    """Answer a chat whose messages are lists of blocks."""
    model = resolve_model(context, body.model)
    form = MessageForm(f"msg_{uuid.uuid4().hex}", model.id, body.stop_sequences)
    try:
        chat = _chat_of(body, context)
        return await answer_chat(chat, request, context, response_id=form.id, form=form)
    except RequestError as error:
        raise renamed(error, IN_CHAT) from error


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, context: Context) -> Response:
    """Count the tokens of the prompt of these messages."""
    resolve_model(context, body.model)
    prompt = await encode_conversation(context, _chat_of(body, context))
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


def _chat_of(body: CountTokensBody, context: ServerContext) -> ChatBody:
    return body.to_chat(shown=context.shown, thinks=ends_thinking(context.tokenizer))
