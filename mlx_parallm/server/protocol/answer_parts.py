"""A chat answer's text → reasoning, content and tool calls, piece by piece while it streams. No
MLX.

    engine's text → AnswerSplitter.feed … finish → AnswerParts (shown now) → api/chat.py

An answer that is not streamed goes through the same code in one piece; the cuts of the text make
no difference. The tokenizer brings the markers and the format of calls (mlx-lm's knowledge of the
model). Nothing is lost: text between tool markers that is not a call becomes content. Whitespace
beside a marker belongs to the marker. A marker within an argument of a call is text of that
argument.

Reasoning comes first, and once: behind its end, or behind other text, its markers are text. A call
within it is a draft, and text, if the reasoning continues; it is a call if the answer ends with it
(the model forgot to end its reasoning).

A streamed call is shown as it grows (begun_calls.py). So one answer differs from its stream: of a
malformed call the stream may have shown the beginning, as a call, before it shows all of it as
content.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_parallm.execution.call_formats import ReadCalls, bare_calls
from mlx_parallm.execution.call_text import MARKUP, inside_value
from mlx_parallm.execution.json_values import write_json
from mlx_parallm.execution.tool_calls import read_region
from mlx_parallm.server.protocol.begun_calls import BegunCall, BegunCalls, begun_calls, new_call_id
from mlx_parallm.types import FinishReason

# "opening" (nothing but markers so far), "content", "reasoning", or one of these: content without
# markers; inside tool markers; in a call without tool markers; in reasoning, from a tool marker on
State = str
_FINAL = "final content"
_TOOL, _BARE, _DRAFT = "tool", "bare call", "draft"
_REGIONS = (_TOOL, _BARE)


@dataclass(slots=True)
class AnswerParts:
    """The parts of one choice that may be shown now. `tool_calls` as in an OpenAI delta: pieces
    of calls, by index."""

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

    def whole_calls(self) -> list[dict[str, Any]]:
        """The calls as in an OpenAI message."""
        calls: dict[int, dict[str, Any]] = {}
        for piece in self.tool_calls:
            if (call := calls.get(piece["index"])) is None:
                kept = {key: value for key, value in piece.items() if key != "index"}
                calls[piece["index"]] = kept | {"function": dict(piece["function"])}
            else:
                call["function"]["arguments"] += piece["function"]["arguments"]
        return list(calls.values())

    def message(self) -> dict[str, Any]:
        content = None if self.tool_calls and not self.content else self.content
        calls = {"tool_calls": self.whole_calls()} if self.tool_calls else {}
        return (
            {"role": "assistant", "content": content, "refusal": None} | self._reasoning() | calls
        )

    def delta(self) -> dict[str, Any]:
        shown = self._reasoning()
        if self.content:
            shown["content"] = self.content
        if self.tool_calls:
            shown["tool_calls"] = self.tool_calls
        return shown

    def _reasoning(self) -> dict[str, Any]:
        """The reasoning under both names that clients read: vLLM's new one, and DeepSeek's."""
        return (
            {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
            if self.reasoning
            else {}
        )


MOST_CALLS = 64  # calls at the end of an answer whose reasoning was not closed
MOST_WORK = 10_000_000
"""Characters that are read, in one answer, to tell whether markers are in arguments: a
degenerate answer has no end of them. Beyond it every marker counts."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of the answers to one request. `tools`: callable functions; empty = calls are
    text like any other."""

    think_markers: tuple[str, str] | None = None
    # the end may be "": then a call ends with the answer, or at the next
    tool_markers: tuple[str, str] | None = None
    structural_markers: tuple[str, ...] = ()
    parse: Callable[[str, Any], Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_format: str = ""  # the name of mlx-lm's parser, for begun_calls.py
    parallel: bool = True  # False: only an answer's first call is given
    forced: bool = False  # a grammar makes it call: a part that is cut off is a call, too
    # a grammar makes it call or follow a schema: once content has begun, markers are text
    structured: bool = False
    starts_reasoning: bool = False  # the prompt has opened the reasoning
    needs_special_tokens: bool = False  # text without them would not show the markers
    on_malformed: Callable[[], None] = lambda: None

    def read(self, text: str, reason: FinishReason) -> AnswerParts:
        """A whole answer."""
        splitter = AnswerSplitter(self, streamed=False)
        parts = splitter.feed(text)
        return parts.plus(splitter.finish(complete=reason == "stop"))

    def transitions(self) -> dict[State, dict[str, State]]:
        """State → marker → the state after it. Made like mlx-lm's `make_text_state_machine`, but
        there only the end of the calls ends the tool state, so a model that forgets it loses the
        rest of its answer."""
        next_states: dict[State, dict[str, State]] = {
            state: {} for state in ("opening", "content", "reasoning", _FINAL, _DRAFT, *_REGIONS)
        }
        next_states["content"].update(dict.fromkeys(self.structural_markers, "content"))
        if self.tool_markers is not None:
            start, end = self.tool_markers
            next_states["content"][start] = next_states[_TOOL][start] = _TOOL
            if end:
                next_states[_TOOL][end] = "content"
            starts, end = bare_calls(self.tool_format, self.tools)
            next_states["content"].update(dict.fromkeys(starts, _BARE))
            next_states[_BARE][end] = "content"
        next_states["opening"].update(next_states["content"])
        next_states["opening"].update(dict.fromkeys(self.structural_markers, "opening"))
        if self.think_markers is not None:
            start, end = self.think_markers
            next_states["opening"][start] = "reasoning"
            next_states["reasoning"][end] = next_states[_DRAFT][end] = "content"
            if self.tool_markers is not None:
                start = self.tool_markers[0]
                next_states["reasoning"][start] = next_states[_DRAFT][start] = _DRAFT
        return next_states


def joined(parts: Sequence[AnswerParts]) -> AnswerParts:
    """The parts of one choice as one."""
    calls = [call for part in parts for call in part.tool_calls]
    return AnswerParts(
        "".join(part.reasoning for part in parts), "".join(part.content for part in parts), calls
    )


class AnswerSplitter:
    """Split the text of one choice. Hold back text that may be part of a marker, whitespace that
    may belong to one, and the unfinished part of a call (all of it, if not `streamed`)."""

    def __init__(self, answer_format: AnswerFormat, *, streamed: bool = True) -> None:
        self._format, self._streamed = answer_format, streamed
        self._transitions = answer_format.transitions()
        self._patterns = {state: _pattern(markers) for state, markers in self._transitions.items()}
        self._state: State = "reasoning" if answer_format.starts_reasoning else "opening"
        self._region: list[str] = []  # the tool region's text, its start marker first
        self._draft = ""  # the reasoning's text from a tool marker on
        self._begun: BegunCalls | None = None  # the region's calls …
        self._sent: list[str] = []  # … and their arguments as shown so far
        # where in the region the first marker within an argument ended
        self._first_inside: int | None = None
        self._work = 0  # spent of MOST_WORK
        self._pending = ""  # may begin a marker
        self._space = ""  # whitespace that the next marker would take
        self._after_marker = answer_format.starts_reasoning
        self.calls_made = 0

    def feed(self, text: str) -> AnswerParts:
        """Take the next piece of text; return the newly showable parts."""
        parts = AnswerParts()
        text, at = self._pending + text, 0
        while (marker := self._patterns[self._state].search(text, at)) is not None:
            self._take(text[at : marker.start()], parts)
            if marker.group() not in self._transitions[self._state]:
                at = marker.start()  # the text before it made it text
                continue
            again = self._cross(marker.group(), parts)
            at = marker.end()
            if again:
                text, at = again + text[at:], 0
        end = len(text) - self._undecided(text[at:])
        self._take(text[at:end], parts)
        self._pending = text[end:]
        return parts

    def take(self, text: str, reason: FinishReason | None) -> AnswerParts:
        """Call `feed`, and `finish` too when `reason` says that this piece is the last one."""
        parts = self.feed(text)
        return parts if reason is None else parts.plus(self.finish(complete=reason == "stop"))

    def finish(self, *, complete: bool) -> AnswerParts:
        """The rest. `complete`: the model itself ended the answer, so a tool call that lacks
        only its end counts; of one that a limit cut off there is the beginning."""
        parts, thinking = AnswerParts(), self._state in ("reasoning", _DRAFT)
        if self._begun is not None and self._state in _REGIONS and not complete:
            self._region.append(self._pending)
            self._begun.cut(self._pending)
        else:
            self._take(self._pending, parts)
        if self._state == _DRAFT:
            self._end_draft(parts, may_call=complete)
        self._pending = ""
        while self._state in _REGIONS:
            if again := self._end_region("", parts, cut_off=not complete):
                parts = parts.plus(self.feed(again))
                self._take(self._pending, parts)
                self._pending = ""
        if complete or thinking or not self._format.forced:
            parts.add(self._state, self._space)
        else:
            parts.content = ""  # it was to be a call
            if not self.calls_made and len(self._format.tools) == 1:
                self._show(
                    _first_piece(0, new_call_id(), self._format.tools[0]["function"]["name"]), parts
                )
                self.calls_made = 1
        self._pending = self._space = ""
        return parts

    def _take(self, text: str, parts: AnswerParts) -> None:
        """Text of the present state, without a marker."""
        if self._state in _REGIONS:
            self._region.append(text)
            if self._begun is not None:
                self._begun.feed(text)
                if self._streamed:
                    self._show_begun(parts)
            return
        if self._state == _DRAFT:
            self._draft += text
            self._drop_draft(parts)
            return
        text = self._space + text
        if self._after_marker:
            text = text.lstrip()
        shown = text.rstrip() if self._transitions[self._state] else text
        self._space = text[len(shown) :]
        self._after_marker = self._after_marker and not text
        parts.add(self._state, shown)
        if shown and self._state == "opening":
            self._state = "content"
        if shown and self._format.structured and self._state == "content":
            self._state = _FINAL

    def _cross(self, marker: str, parts: AnswerParts) -> str:
        """Take a marker. Return text to parse again outside the call."""
        after, again = self._transitions[self._state][marker], ""
        if after == _DRAFT:
            self._draft, self._state = self._draft + marker, _DRAFT
            return ""
        if self._state == _DRAFT:
            self._end_draft(parts)
        if self._state in _REGIONS:
            if self._is_inside_argument(marker):
                self._take(marker, parts)
                if self._first_inside is None:
                    self._first_inside = sum(map(len, self._region))
                return ""
            ends = after == "content"
            again = self._end_region(marker if ends else "", parts)
            if again:
                return again if ends else again + marker
            if ends:
                return ""
        if after in _REGIONS:
            self._region, self._sent, self._first_inside = [marker], [], None
            assert self._format.parse is not None
            self._begun = begun_calls(
                self._format.tool_format, self._format.parse, self._format.tools
            )
            if after == _BARE:
                self._begun.feed(marker)
        else:
            self._space, self._after_marker = "", True
        self._state = after
        return ""

    def _drop_draft(self, parts: AnswerParts) -> None:
        """Go back to the reasoning if it continues behind the calls."""
        assert self._format.tool_markers is not None
        start, end = self._format.tool_markers
        at = self._draft.rfind(end) if end else -1
        if self._draft.rfind(start) < at and self._draft[at + len(end) :].strip():
            self._end_draft(parts)

    def _end_draft(self, parts: AnswerParts, *, may_call: bool = False) -> None:
        """Take the draft as reasoning, but for the calls that it ends with if it `may_call`."""
        text, self._draft, self._state = self._draft, "", "reasoning"
        assert self._format.tool_markers is not None
        start = self._format.tool_markers[0]
        begins = [match.start() for match in re.finditer(re.escape(start), text)]
        ends = replace(self._format, think_markers=None, starts_reasoning=False)
        ends = replace(ends, on_malformed=lambda: None)
        for at in begins[-MOST_CALLS:] if may_call else ():
            made = ends.read(text[at:], "stop")
            if made.tool_calls and not (made.content + made.reasoning).strip():
                self._take(text[:at], parts)
                self._space, self._after_marker = "", True
                parts.tool_calls += made.tool_calls
                self.calls_made = len(made.whole_calls())
                return
        self._take(text, parts)

    def _is_inside_argument(self, marker: str) -> bool:
        text = "".join(self._region[1:])
        self._region[1:] = [text]
        self._work += len(text)
        if self._work >= MOST_WORK:
            return False
        if self._state == _BARE and marker not in self._region[0]:
            # the tag closes the region only if the region then reads as a call
            return marker != self._region[0] and not self._read_region(marker, cut_off=False).calls
        if not inside_value(self._format.tool_format, text):
            return False
        ends = self._transitions[self._state][marker] == "content"
        unclear = ends and self._format.tool_format not in MARKUP  # quotation marks may be text
        return not (unclear and self._read_region("", cut_off=False).calls)

    def _read_region(self, end: str, *, cut_off: bool) -> ReadCalls:
        """The calls of the region, and the text behind them."""
        start, *body = self._region
        markers = self._format.tool_markers
        if cut_off and (markers is None or markers[1]):  # else a complete one is a call
            return ReadCalls([])
        text = "".join([start, *body, end] if self._state == _BARE else body)
        assert self._format.parse is not None
        return read_region(self._format.parse, text, self._format.tools)

    def _end_region(self, end: str, parts: AnswerParts, *, cut_off: bool = False) -> str:
        """Go back to content, which gets the region's text unless it is a call, or a call that was
        cut off. Of a malformed call the text behind the first marker that seemed to be in an
        argument is returned, and so is text behind a call without an end marker: it is to be read
        again."""
        calls, again = self._read_region(end, cut_off=cut_off)
        whole = "".join([*self._region, end])
        self._state = "content"
        assert self._begun is not None
        for index, (name, arguments, call_id) in enumerate(calls):
            self._complete(index, name, arguments, call_id)
        if calls:
            del self._begun.calls[max(len(calls), len(self._sent)) :]
        elif not cut_off:
            self._format.on_malformed()
            if self._first_inside is not None:
                whole, again = whole[: self._first_inside], whole[self._first_inside :]
        shown, begun = bool(self._sent), bool(self._begun.calls)
        all_shown = shown and self._begun.shows_all
        if calls or (cut_off and begun):
            self._show_begun(parts)
        self.calls_made += len(self._sent)
        self._begun, self._sent = None, []
        if not calls and not (cut_off and begun):
            # the beginning of a call is not content
            if not (all_shown or (cut_off and (self._format.forced or self._format.structured))):
                self._take(whole, parts)
            if not shown:
                return again
        self._space, self._after_marker = "", True
        return again

    def _complete(
        self, index: int, name: str, arguments: Mapping[str, Any], call_id: str | None
    ) -> None:
        """Match a finished call with its begun one; the part shown of it
        stays."""
        assert self._begun is not None
        if index == len(self._begun.calls):
            self._begun.calls.append(BegunCall(name, call_id or new_call_id()))
        call, sent = self._begun.calls[index], self._sent[index] if index < len(self._sent) else ""
        if call.name == name and _is_that(call.arguments, arguments):
            return  # as the model wrote it
        written = write_json(arguments)
        # half a surrogate pair: no UTF-8 has it
        if any("\ud800" <= character <= "\udfff" for character in written):
            written = write_json(arguments, ensure_ascii=True)
        if index >= len(self._sent):
            call.name = name
        if call.name == name and written.startswith(sent):
            call.arguments = written
        else:
            self._format.on_malformed()

    def _show_begun(self, parts: AnswerParts) -> None:
        """Show the new parts of the region's calls."""
        assert self._begun is not None
        for index, call in enumerate(self._begun.calls):
            place = self.calls_made + index
            if place and not self._format.parallel:
                return
            if index == len(self._sent):
                self._sent.append("")
                self._show(_first_piece(place, call.id, call.name), parts)
            if new := call.arguments[len(self._sent[index]) :]:
                self._sent[index] = call.arguments
                self._show({"index": place, "function": {"arguments": new}}, parts)

    @staticmethod
    def _show(piece: dict[str, Any], parts: AnswerParts) -> None:
        """Add a piece; the first one of a call takes the arguments that come with it."""
        last = parts.tool_calls[-1] if parts.tool_calls else None
        if last is not None and last["index"] == piece["index"]:
            last["function"]["arguments"] += piece["function"]["arguments"]
        else:
            parts.tool_calls.append(piece)

    def _undecided(self, text: str) -> int:
        """Characters at the end of the text that may begin a marker."""
        markers = self._transitions[self._state]
        for length in range(min(max(map(len, markers), default=1) - 1, len(text)), 0, -1):
            if any(marker.startswith(text[-length:]) for marker in markers):
                return length
        return 0


def _pattern(markers: Mapping[str, State]) -> re.Pattern[str]:
    # without markers it matches nothing
    return re.compile("|".join(map(re.escape, markers)) or "(?!)")


def _first_piece(index: int, call_id: str, name: str) -> dict[str, Any]:
    return {
        "index": index,
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }


def _is_that(written: str, arguments: Mapping[str, Any]) -> bool:
    """True when the text is the JSON of these arguments."""
    try:
        return bool(json.loads(written) == arguments)
    except (ValueError, RecursionError):
        return False
