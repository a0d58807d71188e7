"""A chat answer's text → reasoning, content and tool calls, piece by piece while it streams. No MLX.

    engine's text → AnswerSplitter.feed … finish → AnswerParts (what may be shown now) → api/chat.py

An answer that is not streamed goes through the same code in one piece; where the text is cut makes no difference. The
tokenizer brings the markers and the parser of calls (mlx-lm's knowledge of the model). Nothing is lost: text between
tool markers that is no call becomes part of the text that it interrupted. (A parser may leave out text beside a call.)
Whitespace beside a marker belongs to the marker.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_parallm.execution.tool_calls import read_calls
from mlx_parallm.types import FinishReason

State = str  # "content", "reasoning", or one of these: inside tool markers that interrupted it
_INTERRUPTED: dict[State, State] = {"tool": "content", "tool in reasoning": "reasoning"}


@dataclass(slots=True)
class AnswerParts:
    """The parts of one choice that may be shown now. `tool_calls` as in an OpenAI message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, state: State, text: str) -> None:
        if state == "reasoning":
            self.reasoning += text
        else:
            self.content += text

    def plus(self, later: "AnswerParts") -> "AnswerParts":
        calls = self.tool_calls + later.tool_calls
        return AnswerParts(self.reasoning + later.reasoning, self.content + later.content, calls)

    def message(self) -> dict[str, Any]:
        content = None if self.tool_calls and not self.content else self.content
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": content, "refusal": None} | self._reasoning() | calls

    def delta(self, first_call: int) -> dict[str, Any]:
        """`first_call`: how many tool calls of the choice were sent before."""
        shown = self._reasoning()
        if self.content:
            shown["content"] = self.content
        if self.tool_calls:
            shown["tool_calls"] = [{"index": index, **call} for index, call in enumerate(self.tool_calls, first_call)]
        return shown

    def _reasoning(self) -> dict[str, Any]:
        """The reasoning under both names that clients read: vLLM's new one, and DeepSeek's."""
        return {"reasoning": self.reasoning, "reasoning_content": self.reasoning} if self.reasoning else {}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to read the answers to one request. `tools`: what may be called, empty = calls are text like any other."""

    think_markers: tuple[str, str] | None = None
    tool_markers: tuple[str, str] | None = None  # the end may be "": then a call ends with the answer, or at the next
    structural_markers: tuple[str, ...] = ()
    parse: Callable[[str, Any], Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    parallel: bool = True  # False: only an answer's first call is given
    forced: bool = False  # the whole answer is calls, without markers
    starts_reasoning: bool = False  # the prompt has opened the reasoning
    needs_special_tokens: bool = False  # text without them would not show the markers
    on_malformed: Callable[[], None] = lambda: None

    def read(self, text: str, reason: FinishReason) -> AnswerParts:
        """A whole answer."""
        splitter = AnswerSplitter(self)
        parts = splitter.feed(text)
        return parts.plus(splitter.finish(complete=reason == "stop"))

    def transitions(self) -> dict[State, dict[str, State]]:
        """State → marker → the state after it. (mlx-lm's `make_text_state_machine`, whose tool state only its own end
        ends; a model that forgets it would lose the rest of its answer there.)"""
        found: dict[State, dict[str, State]] = {state: {} for state in ("content", "reasoning", *_INTERRUPTED)}
        found["content"].update(dict.fromkeys(self.structural_markers, "content"))
        if self.tool_markers is not None:
            start, end = self.tool_markers
            for inside, outside in _INTERRUPTED.items():
                found[outside][start] = found[inside][start] = inside
                if end:
                    found[inside][end] = outside
        if self.think_markers is not None:
            start, end = self.think_markers
            found["content"][start] = "reasoning"
            found["reasoning"][end] = found["tool in reasoning"][end] = "content"
        return found


class AnswerSplitter:
    """Splits the text of one choice. It keeps back text that may begin a marker, whitespace that may belong to one, and
    a tool call that has not ended."""

    def __init__(self, form: AnswerFormat) -> None:
        self._form = form
        self._transitions = form.transitions()
        self._patterns = {state: _pattern(markers) for state, markers in self._transitions.items()}
        self._state: State = "reasoning" if form.starts_reasoning else "content"
        self._region: list[str] = []  # the tool region's text, its start marker first
        if form.forced:
            self._state, self._region = "tool", [""]
        self._pending = ""  # may begin a marker
        self._space = ""  # whitespace that the next marker would take
        self._after_marker = form.starts_reasoning
        self.calls_made = 0

    def feed(self, text: str) -> AnswerParts:
        """Takes the next piece of text; returns what it made showable."""
        parts = AnswerParts()
        text, at = self._pending + text, 0
        while (found := self._patterns[self._state].search(text, at)) is not None:
            self._take(text[at : found.start()], parts)
            self._cross(found.group(), parts)
            at = found.end()
        end = len(text) - self._undecided(text[at:])
        self._take(text[at:end], parts)
        self._pending = text[end:]
        return parts

    def delta(self, text: str, reason: FinishReason | None) -> dict[str, Any]:
        """The delta of a chunk whose engine delta has this text; `reason` when it is the last one."""
        sent = self.calls_made
        parts = self.feed(text)
        if reason is not None:
            parts = parts.plus(self.finish(complete=reason == "stop"))
        return parts.delta(sent)

    def finish(self, *, complete: bool) -> AnswerParts:
        """The rest. `complete`: the model itself ended the answer, so a tool call that lacks only its end counts; a
        call that a limit cut off may have half its arguments, and is text."""
        parts = AnswerParts()
        self._take(self._pending, parts)
        if self._state in _INTERRUPTED:
            self._end_region("", parts, readable=complete)
        parts.add(self._state, self._space)
        self._pending = self._space = ""
        return parts

    def _take(self, text: str, parts: AnswerParts) -> None:
        """Text of the present state, without a marker."""
        if self._state in _INTERRUPTED:
            self._region.append(text)
            return
        text = self._space + text
        if self._after_marker:
            text = text.lstrip()
        shown = text.rstrip() if self._transitions[self._state] else text
        self._space = text[len(shown) :]
        self._after_marker = self._after_marker and not text
        parts.add(self._state, shown)

    def _cross(self, marker: str, parts: AnswerParts) -> None:
        after = self._transitions[self._state][marker]
        if self._state in _INTERRUPTED:
            ends = self._form.tool_markers is not None and marker == self._form.tool_markers[1]
            self._end_region(marker if ends else "", parts)
            if ends:
                return
        if after in _INTERRUPTED:
            self._region = [marker]
        else:
            self._space, self._after_marker = "", True
        self._state = after

    def _end_region(self, end: str, parts: AnswerParts, *, readable: bool = True) -> None:
        """Goes back to the state that the region interrupted, which gets the text unless it is a call."""
        start, *body = self._region
        self._state = _INTERRUPTED[self._state]
        calls = _openai_calls(self._form, "".join(body)) if readable else []
        if not calls:
            if readable:
                self._form.on_malformed()
            return self._take("".join([start, *body, end]), parts)
        self._space, self._after_marker = "", True
        if not self._form.parallel:
            calls = calls[: 1 - self.calls_made]
        self.calls_made += len(calls)
        parts.tool_calls += calls

    def _undecided(self, text: str) -> int:
        """Characters at the end of the text that may begin a marker."""
        markers = self._transitions[self._state]
        for length in range(min(max(map(len, markers), default=1) - 1, len(text)), 0, -1):
            if any(marker.startswith(text[-length:]) for marker in markers):
                return length
        return 0


def _pattern(markers: Mapping[str, State]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")  # without markers it matches nothing


def _openai_calls(form: AnswerFormat, text: str) -> list[dict[str, Any]]:
    """Returns the calls in a tool region; [] when there is none, or when part of it cannot be read."""
    assert form.parse is not None
    return [_openai_call(*call) for call in read_calls(form.parse, text, form.tools)]


def _openai_call(name: str, arguments: Mapping[str, Any], call_id: str | None) -> dict[str, Any]:
    written = json.dumps(arguments, ensure_ascii=False)
    if any("\ud800" <= character <= "\udfff" for character in written):  # half a surrogate pair: no UTF-8 has it
        written = json.dumps(arguments)
    # Mistral's template takes nine letters and digits as an id, no more and no less; everybody else takes anything.
    call_id = call_id or uuid.uuid4().hex[:9]
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": written}}
