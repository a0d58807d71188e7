"""What the grammar of an answer does not enforce: named in a header, and checked when the answer is there.

    schema_check(params) → SchemaCheck ─ with_header ─► X-Unenforced-Schema-Keywords: uniqueItems, not
                                       ─ add … result ─► "schema_error": "/tags: … non-unique elements" in a choice

A choice that was cut off is not checked: it is incomplete anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from fastapi.responses import Response

from mlx_parallm.engine.json_schema import violation
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.protocol.answer_parts import AnswerParts, joined
from mlx_parallm.types import FinishReason, SamplingParams, Structure

HEADER = "X-Unenforced-Schema-Keywords"
LONGEST_HEADER = 1000  # characters


@dataclass(slots=True)
class SchemaCheck:
    """One answer's. `unenforced`: keywords; () = the grammar enforces everything, and there is nothing to check.

    `content`: the schema of what is no call, `called`: those of calls by function.
    """

    unenforced: tuple[str, ...] = ()
    content: Structure | None = None
    called: Mapping[str, Structure] = field(default_factory=dict)
    _parts: dict[int, list[AnswerParts]] = field(default_factory=dict)  # of each choice, so far

    def add(self, index: int, parts: AnswerParts) -> None:
        """Takes what choice `index` gained."""
        if self.unenforced:
            self._parts.setdefault(index, []).append(parts)

    def result(self, index: int, reason: FinishReason | None) -> dict[str, str]:
        """The field `schema_error` of a choice that has ended and breaks its schema."""
        if not self.unenforced or reason != "stop":
            return {}
        parts = joined(self._parts.pop(index, []))
        calls = [call["function"] for call in parts.whole_calls()]
        pairs = [(self.called.get(call["name"]), call["arguments"]) for call in calls] or [
            (self.content, parts.content)
        ]
        checked = ((s.source, text) for s, text in pairs if s is not None and s.kind == "json_schema")
        error = next(filter(None, (violation(source, text) for source, text in checked)), None)
        return {} if error is None else {"schema_error": error}

    def with_header(self, response: Response) -> Response:
        if self.unenforced:
            names = ", ".join(self.unenforced).encode("ascii", "backslashreplace").decode()
            response.headers[HEADER] = "".join(c if c.isprintable() else "?" for c in names)[:LONGEST_HEADER]
        return response


async def schema_check(
    context: ServerContext,
    params: SamplingParams,
    content: Structure | None,
    called: Mapping[str, Structure] | None = None,
) -> SchemaCheck:
    """Raises RequestError: the structure has no grammar."""
    structure = params.structure
    if structure is None or structure.kind not in ("json_schema", "answer"):
        return SchemaCheck()
    unenforced = await context.engine.unenforced(structure)
    return SchemaCheck(unenforced, content, called or {}) if unenforced else SchemaCheck()
