"""Errors as the OpenAI API shows them: `{"error": {message, type, param, code}}`, whatever went
wrong.

`error_response` builds one; `install_error_handlers` adds the handlers of a FastAPI application:
our own error tree, failed validation, unknown routes and methods. The outermost middleware answers
unexpected errors.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from typing_extensions import TypedDict

from mlx_parallm.errors import (
    DeviceFaultError,
    EngineUnavailableError,
    ModelNotFoundError,
    ParallmError,
    RefusedError,
    RequestError,
    StoreError,
)

HEALTH = "/health"  # the one path without key and gate
RETRY_AFTER_SECONDS = 1
TIMED_OUT = 504  # not 408, which says that the client was too slow in sending
CLIENT_CLOSED_REQUEST = 499  # nginx's number; the client has gone
LONGEST_MESSAGE, LONGEST_PARAM = 2000, 200  # characters
ERROR_SCHEMA = {  # components.schemas.Error of the OpenAPI document
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ERROR_CONTENT: dict[str, Any] = {
    "application/json": {"schema": {"$ref": "#/components/schemas/Error"}}
}


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None


_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    410: "gone",
    413: "request_too_large",
    422: "unprocessable",
    429: "rate_limit_exceeded",
    500: "server_error",
    501: "not_implemented",
    503: "server_unavailable",
    TIMED_OUT: "timeout",
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ClientDisconnectedError(ParallmError):
    """The client hung up before its answer was ready."""


class ServerBusyError(ParallmError):
    """The queue is full: send again a little later."""


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, Any]]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, param = (
        _shown(message, LONGEST_MESSAGE),
        None if param is None else _shown(param, LONGEST_PARAM),
    )
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": param,
            "code": code or _CODES.get(status),
        }
    }


def _shown(text: str, longest: int) -> str:
    """Return a text that can be sent: cut to `longest`, without half surrogate pairs. A message
    that quotes a request may be as long as the request."""
    cut = text if len(text) <= longest else f"{text[:longest]}…"
    return cut.encode(errors="backslashreplace").decode()


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    sent = dict(headers or {})
    if status in (429, 503):
        sent.setdefault("Retry-After", str(RETRY_AFTER_SECONDS))
    if status == TIMED_OUT:
        sent.setdefault("X-Should-Retry", "false")  # the openai client would do the same work again
    return JSONResponse(error_body(message, status, param=param, code=code), status, sent)


def status_of(error: ParallmError) -> int:
    """The HTTP status for an error of our own tree."""
    if isinstance(error, ModelNotFoundError):
        return 404
    if isinstance(error, RefusedError):
        return error.status
    if isinstance(error, RequestError):
        return 400
    if isinstance(error, EngineUnavailableError | DeviceFaultError | StoreError):
        return 503
    if isinstance(error, ServerBusyError):
        return 429
    if isinstance(error, ClientDisconnectedError):
        return CLIENT_CLOSED_REQUEST
    return 500


def parallm_error_response(error: ParallmError) -> JSONResponse:
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return error_response(str(error), status_of(error), param=param, code=code)


def install_error_handlers(app: FastAPI) -> None:
    async def on_parallm_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ParallmError)
        return parallm_error_response(error)

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return parallm_error_response(request_error(error.errors()))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code in (404, 405) and message in ("Not Found", "Method Not Allowed"):
            message = f"{message}: {request.method} {request.url.path}"
        code = "request_too_large" if error.status_code == 413 else None
        return error_response(message, error.status_code, code=code, headers=error.headers)

    app.add_exception_handler(ParallmError, on_parallm_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_error)


def request_error(errors: Any) -> RequestError:
    """One sentence for pydantic's list of errors: the first field that is wrong.

    A field of union type fails once per member; then the members' messages are all given.
    """
    entries = [_located(entry) for entry in errors]
    field, first = entries[0]
    kind = first["type"]
    if kind == "json_invalid":
        return RequestError(
            f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json"
        )
    if not field:
        return RequestError(
            "the body must be a JSON object, sent with Content-Type: application/json"
        )
    name = field if len(entries) == 1 else field.split(".")[0]
    if kind == "extra_forbidden":
        return RequestError(
            f"unrecognized request argument: {field!r}", param=field, code="unknown_parameter"
        )
    if kind == "missing":
        return RequestError(
            f"missing required argument: {field!r}",
            param=field,
            code="missing_required_parameter",
        )
    reasons = dict.fromkeys(
        entry["msg"].removeprefix("Value error, ") for key, entry in entries if _under(key, name)
    )
    return RequestError(
        f"invalid value for {name!r}: " + " or: ".join(list(reasons)[:4]), param=name
    )


def _located(entry: Any) -> tuple[str, Any]:
    location = (
        entry["loc"][1:]
        if entry["loc"] and entry["loc"][0] in ("body", "query", "path")
        else entry["loc"]
    )
    return ".".join(str(part) for part in location), entry


def _under(key: str, name: str) -> bool:
    return key == name or key.startswith(name + ".")
