"""The grammar of a chat answer that must call a tool, follow a schema, or do either: Lark over the
structures in it.

    (reasoning)? (call+ | schema)          what is asked for decides which of the two there are

The reasoning is there if the model thinks; its text is free up to its end marker. Calls are
written in the model's own format if this file has its grammar, else in the generic one
(`GENERIC`): a JSON object between <tool_call> and </tool_call>. Markers that are special tokens are
those tokens, others are text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.taught_tools import MARKERS, read_taught_call
from mlx_parallm.execution.thinking import Thinking, thinking_after
from mlx_parallm.types import Structure

MISTRALS_ARGUMENTS = "[ARGS]"
NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class GrammarTokenizer(Protocol):
    """The part of `models.tokenizer.Tokenizer` that grammars need."""

    eos_token_ids: frozenset[int]
    special_ids: frozenset[int]
    tool_markers: tuple[str, str] | None
    parse_tool_call: Callable[[str, Any], Any] | None
    tool_format: str

    @property
    def think_markers(self) -> tuple[str, str] | None: ...

    @property
    def template_takes_tools(self) -> bool: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode_within(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def hides(self, marker: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of calls: `name` is that of mlx-lm's parser, `markers` enclose one call or
    several of them."""

    name: str
    markers: tuple[str, str]
    parse: Callable[[str, Any], Any]


GENERIC = ToolFormat("json_tools", MARKERS, read_taught_call)


def tool_format(tokenizer: GrammarTokenizer) -> ToolFormat:
    """The format in which the model is asked to call: its own, or the generic one if its chat
    template takes no tools or the format of its calls is unknown."""
    markers, parse = tokenizer.tool_markers, tokenizer.parse_tool_call
    if markers is None or parse is None or not tokenizer.template_takes_tools:
        return GENERIC
    return ToolFormat(tokenizer.tool_format, markers, parse)


def forced_format(tokenizer: GrammarTokenizer) -> ToolFormat:
    """The format of calls that a grammar writes."""
    model_format = tool_format(tokenizer)
    return model_format if model_format.name in _CALLS else GENERIC


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that the answer may be. `tools`: OpenAI's definitions, of which there is one at
    least."""

    tools: Sequence[Mapping[str, Any]]
    format: ToolFormat
    parallel: bool


def required_calls(
    tokenizer: GrammarTokenizer, tools: Sequence[Mapping[str, Any]], prompt_token_ids: Sequence[int]
) -> Structure | None:
    """Return the structure of an answer that calls one of the tools or several, perhaps after its
    reasoning: `tool_choice = "required"` of rollouts. `tools`: OpenAI's definitions, of which there
    is one at least. Raises RequestError.

    The calls are in the model's own format also if its grammar is not here: rewards read that
    one, and any text may be between its markers."""
    definitions = [
        tool if "function" in tool else {"type": "function", "function": tool} for tool in tools
    ]
    calls = Calls(definitions, tool_format(tokenizer), parallel=True)
    return answer_grammar(tokenizer, thinking_after(tokenizer, prompt_token_ids), calls, None)


def answer_grammar(
    tokenizer: GrammarTokenizer,
    thinking: Thinking | None,
    calls: Calls | None,
    schema: Structure | None,
) -> Structure | None:
    """Return the structure that the whole answer must match: the calls, the schema, or either of
    them. None: both are None."""
    if calls is None and (thinking is None or schema is None):
        return schema
    writer = _Writer(tokenizer)
    bodies = []
    if calls is not None:
        bodies.append(writer.calls(calls))
    if schema is not None:
        bodies.append(writer.part(schema))
    start = "body"
    if thinking is not None:
        start = writer.reasoning(thinking) + " body"
    rules = [
        f"start: {start}",
        f"body: {' | '.join(bodies)}",
        *writer.rules,
        "ANY: /(.|\\n)*/",
        "WS: /[ \\n]{1,4}/",
    ]
    param = schema.param if schema is not None else "tools"
    return Structure("answer", "\n".join(rules), param, parts=tuple(writer.parts))


class _Writer:
    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self.tokenizer = tokenizer
        self.rules: list[str] = []
        self.parts: list[Structure] = []

    def part(self, structure: Structure) -> str:
        self.parts.append(structure)
        return f"@part_{len(self.parts) - 1}"

    def marker(self, text: str) -> str:
        """A marker as Lark: its special tokens by id, the rest as text."""
        tokenizer = self.tokenizer
        ids = tokenizer.encode_within(text)
        if not any(token in tokenizer.special_ids for token in ids):
            return literal(text)
        return " ".join(
            f"<[{token}]>"
            if token in tokenizer.special_ids
            else literal(tokenizer.token_text(token))
            for token in ids
        )

    def up_to(self, end: str, name: str) -> str:
        """Any text and the marker `end` behind it; the rule `name`."""
        marker = self.marker(end)
        if marker == literal(end):
            self.rules.append(f"{name}[lazy]: ANY {marker}")
        else:
            self.rules.append(f"{name}: ANY {marker}")
        return name

    def reasoning(self, thinking: Thinking) -> str:
        start, end = thinking.markers
        thought = f"{self.up_to(end, 'thinking')} WS?"
        if thinking.opened:
            return thought
        self.rules.append(f"thought: {self.marker(start)} {thought}")
        return "thought?"

    def calls(self, calls: Calls) -> str:
        call, between = _CALLS.get(calls.format.name, _any_call)(self, calls)
        self.rules.append(f"call: {call}")
        return "call" if between is None or not calls.parallel else f"call ({between} call)*"

    def arguments(self, tool: Mapping[str, Any]) -> str:
        """The arguments of a call as JSON."""
        return self.part(arguments_schema(tool))

    def json_call(self, tool: Mapping[str, Any]) -> str:
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        head = '{"name": ' + name + ', "arguments": '
        return f'{literal(head)} {self.arguments(tool)} "}}"'


def arguments_schema(tool: Mapping[str, Any]) -> Structure:
    """The schema of a tool's arguments; a function without parameters takes none. Raises
    RequestError."""
    function = tool["function"]
    try:
        source = json.dumps({"type": "object", **(function.get("parameters") or NO_ARGUMENTS)})
    except RecursionError as error:
        raise RequestError("'tools' is nested too deeply", param="tools") from error
    return Structure("json_schema", source, "tools", strict=function.get("strict") is True)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


Written = tuple[str, str | None]
"""One call with its markers, and the separator of two; None: there is one call, or it
holds several."""


def _json_calls(writer: _Writer, calls: Calls) -> Written:
    start, end = map(writer.marker, calls.format.markers)
    return f'{start} "\\n" ({" | ".join(map(writer.json_call, calls.tools))}) "\\n" {end}', '"\\n"'


def _mistral_calls(writer: _Writer, calls: Calls) -> Written:
    """Newer templates write name[ARGS]{…} after the marker, older ones a list of objects."""
    start = writer.marker(calls.format.markers[0])
    if MISTRALS_ARGUMENTS not in (writer.tokenizer.chat_template or ""):
        writer.rules.append(f"object: {' | '.join(map(writer.json_call, calls.tools))}")
        more = '(", " object)*' if calls.parallel else ""
        return f'{start} "[" object {more} "]"', None
    marker = writer.marker(MISTRALS_ARGUMENTS)
    each = (
        f"{literal(tool['function']['name'])} {marker} {writer.arguments(tool)}"
        for tool in calls.tools
    )
    return f"{start} ({' | '.join(each)})", ""


def _any_call(writer: _Writer, calls: Calls) -> Written:
    """A format whose grammar is not here: whatever is between its markers."""
    tokenizer, (start, end) = writer.tokenizer, calls.format.markers
    if end and writer.marker(end) == literal(end):
        return f"{writer.marker(start)} {writer.up_to(end, 'inside')}", '"\\n"?'
    outside = {*tokenizer.eos_token_ids, *tokenizer.encode_within(end)}
    inside = ",".join(map(str, sorted(tokenizer.special_ids - outside)))
    writer.rules.append(f"inside: SOME {f'| <[{inside}]>' if inside else ''}")
    writer.rules.append("SOME: /(.|\\n)+/")
    return f"{writer.marker(start)} inside* {writer.marker(end) if end else ''}", (
        '"\\n"?'
    ) if end else None


_CALLS: Mapping[str, Callable[[_Writer, Calls], Written]] = {
    "json_tools": _json_calls,
    "mistral": _mistral_calls,
}
