"""Errors below /v1/messages in Anthropic's shape, whichever layer of the server made them."""

import json
import re
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PATH = re.compile(r"(/sessions/[^/]+)?/v1/messages(/.*)?")
_TYPES = {
    "invalid_api_key": "authentication_error",
    "forbidden": "permission_error",
    "foreign_request": "permission_error",
    "not_found": "not_found_error",
    "model_not_found": "not_found_error",
    "request_too_large": "request_too_large",
    "rate_limit_exceeded": "rate_limit_error",
    "server_unavailable": "overloaded_error",
    "model_not_ready": "overloaded_error",
    "timeout": "timeout_error",
}


def anthropic_error(error: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic's error of OpenAI's body; `param` and `code` stay beside it."""
    fields = error["error"]
    kind = "api_error" if fields["type"] == "server_error" else "invalid_request_error"
    shown = {"type": _TYPES.get(fields["code"], kind), "message": fields["message"]}
    return {"type": "error", "error": shown | {"param": fields["param"], "code": fields["code"]}}


class AnthropicErrors:
    """Rewrites an error's JSON body on its way out. A stream's last event is written by its
    `StreamForm`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _PATH.fullmatch(scope["path"]):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        parts: list[bytes] = []

        async def rewritten(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and message["status"] >= 400:
                start = message
            elif start is None:
                await send(message)
            else:
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    body = json.dumps(anthropic_error(json.loads(b"".join(parts)))).encode()
                    headers = [
                        (key, value) for key, value in start["headers"] if key != b"content-length"
                    ]
                    headers.append((b"content-length", str(len(body)).encode()))
                    await send({**start, "headers": headers})
                    await send({"type": "http.response.body", "body": body})

        await self._app(scope, receive, rewritten)
