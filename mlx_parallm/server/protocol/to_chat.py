"""Bodies of other APIs → the body of a chat. Shared fields keep their names."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import PartsText, parts_as_written
from mlx_parallm.server.errors import request_error
from mlx_parallm.server.protocol.fields import QueueFields, SamplingFields
from mlx_parallm.server.protocol.openai import ChatBody

SHARED = frozenset(
    {
        *QueueFields.model_fields,
        *SamplingFields.model_fields,
        "chat_template_kwargs",
        "enable_thinking",
        "truncate_prompt_tokens",
    }
)


class ChatFields:
    """Fields of a chat's answer that keep their names: the token ids, and at the end the ones of
    these `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self.taken: dict[str, Any] = {}
        self._names = names

    def take_ids(self, part: Mapping[str, Any]) -> None:
        """`return_token_ids`: those of the prompt come once, the answer's as they are sampled."""
        if "prompt_token_ids" in part:
            self.taken["prompt_token_ids"] = part["prompt_token_ids"]
        if "token_ids" in part:
            self.taken.setdefault("token_ids", []).extend(part["token_ids"])

    def take_end(self, answer: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        """`answer`: the whole one, or a choice's last chunk."""
        self.taken |= {
            key: source[key] for source in (answer, choice) for key in self._names if key in source
        }


def joined_text(content: Any, where: str, text: Callable[[Any, str], str]) -> str:
    """A string, or the joined texts of its parts (`PartsText`); `text`: of one part and its place.
    Raises RequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: must be a string or a list of parts", param=where)
    return PartsText(text(part, f"{where}.{index}") for index, part in enumerate(content))


def refuse_choices(body: SamplingFields) -> None:
    """Raises RequestError: the body asks for more than one choice can show."""
    if body.n != 1:
        raise RequestError(
            "'n' must be 1 here: /v1/chat/completions gives several answers", param="n"
        )
    if body.prompt_logprobs is not None:
        raise RequestError("'prompt_logprobs' is of /v1/chat/completions", param="prompt_logprobs")


def shared_fields(body: BaseModel) -> dict[str, Any]:
    """Fields that a chat has under the same name, if the client has sent them."""
    return body.model_dump(include=set(SHARED), exclude_unset=True)


def chat_body(fields: Mapping[str, Any], in_chat: Mapping[str, str]) -> ChatBody:
    """The chat of these fields. `in_chat`: the chat's names → the client's, for errors. Raises
    RequestError."""
    messages = [
        {**message, "content": parts_as_written(content)}
        if isinstance(content := message.get("content"), PartsText) and len(content.parts) > 1
        else message
        for message in fields["messages"]
    ]
    try:
        return ChatBody.model_validate({**fields, "messages": messages})
    except ValidationError as error:
        raise renamed(request_error(error.errors()), in_chat) from error
    except RequestError as error:
        raise renamed(error, in_chat) from error


def renamed(error: RequestError, in_chat: Mapping[str, str]) -> RequestError:
    """Return the error with the field names of the client's API. Its class stays."""
    text, param = str(error), error.param
    for chat, client_name in in_chat.items():
        text = text.replace(f"{chat!r}", f"{client_name!r}")
        if param is not None and (param == chat or param.startswith(f"{chat}.")):
            text = text.replace(param, client_name + param.removeprefix(chat))
            param = client_name + param.removeprefix(chat)
    return RequestError(text, param=param, code=error.code)
