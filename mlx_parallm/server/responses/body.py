"""The body of /v1/responses, and the chat that it asks for."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mlx_parallm.config.accepted import Accepted
from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import CUSTOM_ARGUMENT
from mlx_parallm.execution.parts.kinds import Shown
from mlx_parallm.server.protocol.fields import (
    FIELDS,
    MAX_TOP_LOGPROBS,
    Body,
    ListOf,
    QueueFields,
    SamplingFields,
)
from mlx_parallm.server.protocol.openai import LONGEST_WORD, MAX_MESSAGES, MAX_TOOLS, ChatBody
from mlx_parallm.server.protocol.to_chat import chat_body, refuse_choices, shared_fields
from mlx_parallm.server.responses.items import chat_messages, flat_name
from mlx_parallm.server.stored_responses import Item

LOGPROBS, SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Parts of calls that only OpenAI's own tools make.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
# OpenAI's servers search. Codex CLI always offers it, so it is left out; `tools` of the response
# shows that.
LEFT_OUT = ("web_search", "web_search_preview")
SPARE_DEPTH = 100  # stack frames that writing the response may add
IN_CHAT = {  # a field of the chat → the one that a client of this API has written
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


_FUNCTION = ("name", "parameters", "description", "strict")


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            param = "text.format.schema"
            raise RequestError(
                f"{param!r} belongs to type json_schema, which needs it", param=param
            )
        return self


class TextConfig(Body):
    format: TextFormat | None = None
    verbosity: str | None = Field(None, max_length=LONGEST_WORD)


class ReasoningConfig(Body):
    """`context` and `mode` are OpenAI's own models': only what changes nothing is taken."""

    effort: str | None = Field(None, max_length=LONGEST_WORD)
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None

    @property
    def summarises(self) -> bool:
        return (self.summary or self.generate_summary or "none") != "none"


class ResponseStreamOptions(Body):
    include_obfuscation: bool = False  # padding against traffic analysis; not done here


@dataclass(frozen=True, slots=True)
class ToolNames:
    """Which functions of the chat were custom tools in the request, and which belonged to a
    namespace."""

    custom: frozenset[str] = frozenset()
    # flat name → namespace, name
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def fields(self, flat: str) -> dict[str, Any]:
        """`name`, and `namespace` if it has one."""
        namespace, name = self.namespaces.get(flat, (None, flat))
        return {"name": name} | ({"namespace": namespace} if namespace else {})


class ResponsesBody(QueueFields, SamplingFields):
    """OpenAI's fields, and the sampling fields of the other routes."""

    accepted: ClassVar[Accepted] = FIELDS | Accepted.read(__package__, "fields.toml")

    input: str | Annotated[ListOf[Item], Field(max_length=4 * MAX_MESSAGES)] = Field(
        default_factory=list
    )
    instructions: str | None = None
    tools: ListOf[Item] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    max_output_tokens: int | None = Field(None, ge=1)
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    include: ListOf[Include] = Field(default_factory=list)
    previous_response_id: str | None = None
    store: bool = True
    metadata: dict[str, Any] = Field(default_factory=dict)
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    enable_thinking: bool | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=1)
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        refuse_choices(self)
        self._can_be_shown()
        if not self.input and self.previous_response_id is None:
            raise RequestError("'input' must not be empty", param="input")
        return self

    def _can_be_shown(self) -> None:
        """Raises RequestError: a field that is repeated or kept, and that no JSON text holds."""
        repeated = {
            "metadata",
            "tools",
            "tool_choice",
            "text",
            "user",
            "prompt_cache_key",
            "safety_identifier",
        }
        repeated |= {"input"} if self.store else set()
        for name, value in self.model_dump(include=repeated & self.model_fields_set).items():
            for _ in range(SPARE_DEPTH):
                value = [value]
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"{name!r} is not valid Unicode: a lone surrogate", param=name
                ) from error
            except (RecursionError, ValueError) as error:
                raise RequestError(f"{name!r} is nested too deeply", param=name) from error

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, str):
            return [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": self.input}],
                }
            ]
        return self.input

    @property
    def offered_tools(self) -> list[Item]:
        """The tools that the model gets."""
        return [tool for tool in self.tools if tool.get("type") not in LEFT_OUT]

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0

    def to_chat(
        self, items: Sequence[Item], *, first: int = 0, shown: Shown = ()
    ) -> tuple[ChatBody, ToolNames]:
        """The chat with these items (the earlier ones too; `first`: where this request's begin;
        `shown`: what the model reads).

        Raises RequestError, which names this body's field.
        """
        tools, names = chat_tools(self.offered_tools)
        messages = chat_messages(items, first=first, shown=shown)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        chat = shared_fields(self) | {
            "messages": messages,
            "tools": tools,
            "tool_choice": chat_choice(self.tool_choice)
            if tools or self.tool_choice != "auto"
            else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "response_format": self._response_format(),
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "return_token_ids": self.return_token_ids,
        }
        return chat_body(chat, IN_CHAT), names

    def _response_format(self) -> dict[str, Any] | None:
        form = self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        schema = {
            "name": form.name,
            "description": form.description,
            "strict": form.strict,
            "schema": form.schema_,
        }
        return {"type": "json_schema", "json_schema": schema}


def chat_tools(tools: Sequence[Item]) -> tuple[list[dict[str, Any]], ToolNames]:
    """Functions of a chat. A custom tool is a function of one string; the functions of a namespace
    stand alone.

    Raises RequestError: a tool that only OpenAI's servers can run.
    """
    functions: list[dict[str, Any]] = []
    custom: set[str] = set()
    namespaces: dict[str, tuple[str, str]] = {}

    def add(tool: Any, where: str, namespace: str | None) -> None:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in ("function", "custom"):
            raise RequestError(
                f"{where}: this server runs no tools: it takes tools of type function, custom and"
                " namespace, which "
                f"the client runs, and not {kind!r}",
                param=where,
                code="unsupported_tool",
            )
        name = tool.get("name")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}.name: a tool needs a name", param=f"{where}.name")
        flat = flat_name(name, namespace)
        if namespace:
            namespaces[flat] = (namespace, name)
        if kind == "custom":
            custom.add(flat)
        function = (
            {"name": name} | _custom_function(tool, where) if kind == "custom" else _function(tool)
        )
        functions.append({"type": "function", "function": function | {"name": flat}})

    for position, tool in enumerate(tools):
        where = f"tools.{position}"
        if tool.get("type") != "namespace":
            add(tool, where, None)
            continue
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("tools"), list):
            raise RequestError(
                f"{where}: a namespace needs a 'name' and a list of 'tools'", param=where
            )
        for index, member in enumerate(tool["tools"]):
            add(member, f"{where}.tools.{index}", tool["name"])
    return functions, ToolNames(frozenset(custom), namespaces)


def _function(tool: Item) -> dict[str, Any]:
    return {key: value for key, value in tool.items() if key in _FUNCTION and value is not None}


def _custom_function(tool: Item, where: str) -> dict[str, Any]:
    form = tool.get("format") or {}
    if not isinstance(form, dict):
        raise RequestError(f"{where}.format: must be an object", param=f"{where}.format")
    text: dict[str, Any] = {"type": "string"}
    if form.get("type") == "grammar":
        text["description"] = (
            f"A text of this {form.get('syntax')} grammar:\n{form.get('definition')}"
        )
    function = {
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: text},
            "required": [CUSTOM_ARGUMENT],
        }
    }
    return function | ({"description": tool["description"]} if tool.get("description") else {})


def chat_choice(choice: str | Item | None) -> Any:
    """`tool_choice` in the chat's form, which has a function's name one level deeper."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return _named(choice)
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        tools = [_named(tool) if isinstance(tool, dict) else tool for tool in choice["tools"]]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise RequestError(
        f"'tool_choice': this server has no tool of type {kind!r}", param="tool_choice"
    )


def _named(choice: Item) -> Item:
    return {
        "type": "function",
        "function": {"name": flat_name(str(choice.get("name")), choice.get("namespace"))},
    }
