"""The body of /v1/messages, and the chat that it asks for."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from mlx_parallm.config.accepted import Accepted
from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import PartsText
from mlx_parallm.execution.parts.kinds import Shown, kind_of
from mlx_parallm.server.protocol.fields import FIELDS, Body, ListOf, QueueFields, SamplingFields
from mlx_parallm.server.protocol.openai import LONGEST_WORD, MAX_MESSAGES, MAX_TOOLS, ChatBody
from mlx_parallm.server.protocol.to_chat import (
    chat_body,
    joined_text,
    refuse_choices,
    shared_fields,
)

Block = dict[str, Any]
IN_CHAT = {  # a field of the chat → the one that a client of this API has written
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_FUNCTION = {
    "name": "name",
    "input_schema": "parameters",
    "description": "description",
    "strict": "strict",
}


class ConversationTurn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]


class ThinkingConfig(Body):
    """`budget_tokens` is the chat's `thinking_token_budget`. `display` is read by nothing: the
    reasoning is always shown."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = Field(None, ge=0)
    display: str | None = Field(None, max_length=LONGEST_WORD)


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = Field(None, max_length=LONGEST_WORD)
    format: OutputFormat | None = None


class MessageToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountTokensBody(Body):
    """The part that becomes the prompt."""

    accepted: ClassVar[Accepted] = FIELDS | Accepted.read(__package__, "fields.toml")

    model: str | None = None
    messages: ListOf[ConversationTurn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | ListOf[Block] | None = None
    tools: ListOf[Block] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None  # older spelling of output_config.format
    context_management: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _edits_nothing(self) -> "CountTokensBody":
        """The one edit of a context that is none: to keep all thinking."""
        edits = (self.context_management or {}).get("edits") or []
        for edit in edits if isinstance(edits, list) else [edits]:
            kind = edit.get("type") if isinstance(edit, dict) else None
            if (
                not isinstance(kind, str)
                or not kind.startswith("clear_thinking")
                or edit.get("keep") != "all"
            ):
                where = "context_management.edits"
                raise RequestError(
                    f"{where}: this server edits no context (got {kind!r})",
                    param=where,
                    code="unsupported_parameter",
                )
        return self

    def to_chat(self, *, shown: Shown = (), thinks: bool = True) -> ChatBody:
        """Return the chat. `shown`: what the model reads beside text. `thinks`: the end of its
        reasoning can be forced; without that a budget holds by itself. Raises RequestError, which
        names this body's field."""
        fields = self.chat_fields(shown)
        if thinks and self.thinking is not None and self.thinking.budget_tokens is not None:
            fields.setdefault("thinking_token_budget", self.thinking.budget_tokens)
        return chat_body(fields, IN_CHAT)

    def chat_fields(self, shown: Shown) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append(
                {"role": "system", "content": joined_text(self.system, "system", _text)}
            )
        unanswered: set[str] = set()  # ids of the last answer's calls
        for position, turn in enumerate(self.messages):
            where = f"messages.{position}"
            if (
                turn.role == "assistant"
                and position
                and self.messages[position - 1].role != "assistant"
            ):
                _check_answered(unanswered, where)
            chat = _chat_turn(turn, where, unanswered, shown)
            if turn.role == "assistant":
                unanswered |= {call["id"] for call in chat[0].get("tool_calls", ())}
            messages += chat
        if self.messages[-1].role != "assistant":
            _check_answered(unanswered, f"messages.{len(self.messages) - 1}")
        choice = self.tool_choice or MessageToolChoice(type="auto")
        form = self.output_config.format or self.output_format
        fields: dict[str, Any] = shared_fields(self) | {
            "messages": messages,
            "tools": [
                _chat_tool(tool, f"tools.{position}") for position, tool in enumerate(self.tools)
            ],
            "tool_choice": self._chat_choice(choice),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "reasoning_effort": self.output_config.effort,
            "response_format": form
            and {"type": "json_schema", "json_schema": {"schema": form.schema_}},
            "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        }
        if self.thinking is not None:
            fields["enable_thinking"] = self.thinking.type != "disabled"
        return fields

    def _chat_choice(self, choice: MessageToolChoice) -> Any:
        if choice.type == "tool":
            return {"type": "function", "function": {"name": choice.name or ""}}
        return _CHOICES[choice.type] if self.tools or choice.type == "any" else None


class MessagesBody(CountTokensBody, QueueFields, SamplingFields):
    """Anthropic's fields, and the sampling fields of the other routes."""

    max_tokens: int = Field(ge=1)
    stop_sequences: ListOf[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    stream: bool = False
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _one_answer(self) -> "MessagesBody":
        refuse_choices(self)
        return self

    def chat_fields(self, shown: Shown) -> dict[str, Any]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        counted = {"include_usage": True, "continuous_usage_stats": True}
        return super().chat_fields(shown) | {
            "max_completion_tokens": self.max_tokens,
            "stop": [*self.stop_sequences, *stop],
            "stream": self.stream,
            "stream_options": counted if self.stream else None,
            "return_token_ids": self.return_token_ids,
        }


def _chat_turn(
    turn: ConversationTurn, where: str, unanswered: set[str], shown: Shown
) -> list[dict[str, Any]]:
    """The messages of a chat: an assistant's blocks are one, a tool's result is one of its own.

    `unanswered`: ids of the calls in the assistant's turn before; those that are answered are
    removed. Raises
    RequestError: another kind of block, a result without its call.
    """
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    where = f"{where}.content"
    if turn.role == "assistant":
        return [_chat_answer(turn.content, where)]
    messages: list[dict[str, Any]] = []
    for index, block in enumerate(turn.content):
        place = f"{where}.{index}"
        if turn.role == "user" and block.get("type") == "tool_result":
            messages.append(_chat_result(block, place, unanswered, shown))
            continue
        if not messages or messages[-1]["role"] != turn.role:
            messages.append({"role": turn.role, "content": []})
        messages[-1]["content"].append(_part(block, place, shown if turn.role == "user" else ()))
    for message in messages:
        parts = message["content"]
        if isinstance(parts, list) and not any(map(kind_of, parts)):
            message["content"] = PartsText(part["text"] for part in parts)
    return messages


def _part(block: Any, place: str, shown: Shown) -> dict[str, Any]:
    """Return a block as a part of a chat. Raises RequestError: it is none, or of a kind that is
    not read."""
    kind = kind_of(block, shown)
    if kind is not None and block["type"] == kind.name:
        return kind.part(_source(block, place)) | {"place": place}
    return {"type": "text", "text": _text(block, place)}


def _source(block: Block, place: str) -> str:
    """Return a block's source as a URL. Raises RequestError: one of another kind."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64":
        media_type = _string(source, "media_type", f"{place}.source")
        return f"data:{media_type};base64,{_string(source, 'data', f'{place}.source')}"
    if isinstance(source, dict) and kind == "url":
        return _string(source, "url", f"{place}.source")
    reason = f"{place}.source: expected type base64 or url, got {kind!r}"
    raise RequestError(reason, param=f"{place}.source", code="unsupported_content")


def _check_answered(unanswered: set[str], where: str) -> None:
    """Raises RequestError: calls of the assistant's turn before have no result."""
    if unanswered:
        ids = ", ".join(sorted(unanswered))
        raise RequestError(
            f"{where}: the tool_use blocks before it have no tool_result: {ids}", param=where
        )


def _chat_result(block: Block, place: str, unanswered: set[str], shown: Shown) -> dict[str, Any]:
    call_id = _string(block, "tool_use_id", place)
    if call_id not in unanswered:
        reason = (
            f"{place}.tool_use_id: {call_id!r} answers no tool_use block of the assistant's turn"
            " before it (each is answered once)"
        )
        raise RequestError(reason, param=f"{place}.tool_use_id")
    unanswered.remove(call_id)
    content = block.get("content") or ""
    if isinstance(content, list) and any(kind_of(each, shown) for each in content):
        content = [
            _part(each, f"{place}.content.{index}", shown) for index, each in enumerate(content)
        ]
    else:
        content = joined_text(content, f"{place}.content", _text)
    error = {"is_error": True} if block.get("is_error") is True else {}
    return {"role": "tool", "tool_call_id": call_id, "content": content, **error}


def _chat_answer(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reasoning, calls = "", []
    for index, block in enumerate(blocks):
        place, kind = f"{where}.{index}", block.get("type")
        if kind == "thinking":
            reasoning += _string(block, "thinking", place)
        elif kind == "redacted_thinking":  # another server's; it cannot be read here
            continue
        elif kind == "tool_use":
            function = {
                "name": _string(block, "name", place),
                "arguments": block.get("input") or {},
            }
            calls.append(
                {"id": _string(block, "id", place), "type": "function", "function": function}
            )
        else:
            message["content"] += _text(block, place)
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else type(block).__name__
    if kind != "text":
        reason = f"{where}: this server takes no block of type {kind!r} here"
        raise RequestError(reason, param=where, code="unsupported_content")
    return _string(block, "text", where)


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(
            f"{where}.{name}: a block of type {block.get('type')!r} needs this string", param=where
        )
    return value


def _chat_tool(tool: Block, where: str) -> dict[str, Any]:
    """Raises RequestError: a tool that only Anthropic's servers can run, or whose schema only
    its models know."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise RequestError(
            (
                f"{where}: this server takes only tools with an input_schema, which the client"
                f" runs, and not {kind!r}"
            ),
            param=where,
            code="unsupported_tool",
        )
    _string(tool, "name", where)
    function = {
        _FUNCTION[key]: value
        for key, value in tool.items()
        if key in _FUNCTION and value is not None
    }
    return {"type": "function", "function": function}
