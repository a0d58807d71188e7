"""Leftovers: parts of `[data]`'s rows that training does not read, counted by name, with the
first place; a line of the log says so."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.config.data import REWARD_MODEL
from mlx_parallm.environments.row_forms import (
    KTO_TAG,
    LAYOUT_COLUMNS,
    MESSAGE_COLUMNS,
    system_texts,
)
from mlx_parallm.execution.chat_messages import ANSWERS
from mlx_parallm.execution.parts.kinds import row_columns, source_fields
from mlx_parallm.system.log import get_logger

LEAST_WORDS = 4  # fewest words of a prompt: an answer may begin with fewer of them by chance
_OF_MESSAGES = {"role", "content", "name", "tool_call_id", "weight", *ANSWERS}
_OF_PARTS = {"type", "text", "refusal", "cache_control"}
_OF_CALLS = {"id", "type", "index", "function"}

log = get_logger("train")


class Leftovers:
    """Counts of one file.

    Attributes:
        same: places of pairs whose sides are the same; they are left out.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._columns: Counter[str] = Counter()
        self._fields: Counter[str] = Counter()
        self._stripped: list[str] = []  # places of pairs that repeated their prompt
        self._repeats: list[str] = []  # places of answers that begin with their prompt
        self.same: list[str] = []

    def count(
        self,
        row: Mapping[str, Any],
        columns: Sequence[str],
        layout: str | None,
        algorithm: str,
        *,
        chat: bool,
    ) -> None:
        """Count the columns of a row, and the fields of its messages, that nothing reads.

        Args:
            columns: of the row's form; `layout`: the row's original form; `chat`: whether
                there is a chat template.
        """
        read = {*columns}
        if chat and "text" not in columns:
            read |= {"tools", *row_columns()}
            read |= system_texts(row, "").keys()
        if algorithm == REWARD_MODEL:
            read.add("margin")
        if "label" in columns and row.get(KTO_TAG) == row["label"]:
            read.add(KTO_TAG)
        if sources := LAYOUT_COLUMNS.get(layout or ""):
            read |= {*sources, "messages", "prompt", "completion"}
            if "chosen" in columns:
                read -= {"output", "completion", "messages"} - {*columns}
        self._columns.update(
            name for name, value in row.items() if name not in read and not _is_nothing(value)
        )
        for name in columns:
            if name in MESSAGE_COLUMNS:
                self._count_fields(row[name])

    def _count_fields(self, value: Any) -> None:
        listed = [value] if isinstance(value, Mapping) else value
        for message in listed if isinstance(listed, list | tuple) else ():
            if not isinstance(message, Mapping):
                continue
            self._note(message, _OF_MESSAGES, "of a message")
            content = message.get("content")
            for part in content if isinstance(content, list | tuple) else ():
                if isinstance(part, Mapping):
                    self._note(part, _OF_PARTS.union(source_fields()), "of a part")
            calls = message.get("tool_calls")
            for call in calls if isinstance(calls, list | tuple) else ():
                if isinstance(call, Mapping) and "function" in call:
                    self._note(call, _OF_CALLS, "of a call")

    def _note(self, value: Mapping[str, Any], read: set[str], what: str) -> None:
        self._fields.update(
            f"{name} {what}"
            for name, held in value.items()
            if name not in read and not _is_nothing(held)
        )

    def without_prompt(self, prompt: Any, sides: Sequence[Any], where: str) -> Sequence[Any]:
        """Return both sides of a pair without their prompt, if both begin with it."""
        rests = [_behind(_text(prompt), _text(side)) for side in sides]
        if any(rest is None for rest in rests):
            for side in sides:
                self.note_repeat(prompt, side, where)
            return sides
        self._stripped.append(where)
        return [
            rest if isinstance(side, str) else ({**side[0], "content": str(rest).lstrip()},)
            for side, rest in zip(sides, rests, strict=True)
        ]

    def note_repeat(self, prompt: Any, completion: Any, where: str) -> None:
        """Count an answer that begins with its prompt: it is learned as it is."""
        if _behind(_text(prompt), _text(completion)) is not None:
            self._repeats.append(where)

    def report(self) -> None:
        """Log the parts that were left out."""
        if self._columns:
            log.info("columns that nothing reads", file=self._file, rows=_listed(self._columns))
        if self._fields:
            log.info(
                "fields that nothing but a chat template may read",
                file=self._file,
                fields=_listed(self._fields),
            )
        for words, places in (
            ("pairs whose chosen and rejected are the same are left out", self.same),
            ("the prompt that both sides of a pair repeat is left out of them", self._stripped),
            ("completions begin with their prompt, and are learned as they are", self._repeats),
        ):
            if places:
                log.warning(words, rows=len(places), first=places[0])


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common())


def _text(value: Any) -> str | None:
    """The text of a prompt or completion: a string, or its last or only message's."""
    if isinstance(value, str):
        return value
    content = value[-1]["content"] if value else None
    return content if isinstance(content, str) else None


def _behind(prompt: str | None, completion: str | None) -> str | None:
    """Return the part of a completion behind its prompt, which may differ in white space; None: it
    does not begin with it, or ends with it."""
    words = (prompt or "").split()
    if prompt is None or completion is None or len(words) < LEAST_WORDS:
        return None
    match = re.match(r"\s*" + r"\s+".join(map(re.escape, words)), completion)
    if match is None:
        return None
    rest = completion[match.end() :]
    goes_on = rest[:1].isalnum() and prompt.rstrip()[-1:].isalnum()  # inside of a word
    if goes_on or not rest.strip():
        return None
    # white space behind the prompt is the prompt's, if that ends with some
    return rest.lstrip() if prompt[-1:].isspace() else rest
