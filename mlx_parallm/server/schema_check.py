"""The check of finished answers: the schema of a choice that ended by itself, and what happens to
one that is not.

    answer_check(context, params) → AnswerCheck ─ with_header ─► X-Unenforced-Schema-Keywords:
    uniqueItems, not
                                                ─ fault(completion) ─► generation.py: sampled again,
                                                then an error,
                                                  or "schema_error": "/tags: … non-unique elements"
                                                  in the choice

A choice that was cut off, by a limit or by the client's own stop string, is not checked: it is
incomplete anyway.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from fastapi.responses import Response

from mlx_parallm.engine.grammar import DEAD_END
from mlx_parallm.engine.json_schema import violation
from mlx_parallm.errors import InvalidAnswerError, RequestError
from mlx_parallm.server.context import ServerContext
from mlx_parallm.server.protocol.answer_parts import AnswerParts
from mlx_parallm.system.foreign_json import validator
from mlx_parallm.types import Completion, CompletionDelta, FinishReason, SamplingParams, Structure

HEADER = "X-Unenforced-Schema-Keywords"
STRICT = "strict"  # in the header: calls of strict functions that no grammar makes
LONGEST_HEADER = 1000  # characters
LONGEST_SHOWN = 200  # characters of an invalid answer in an error


def _as_content(text: str, _reason: FinishReason) -> AnswerParts:
    return AnswerParts(content=text)


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """The check of one request's answers.

    Args:
        unenforced: keywords that the grammar does not hold; () = it holds all that this server
            knows of.
        content: the content's schema, unless there are calls; `called`: the arguments of
            calls, by function.
        must_call: an answer without a call is a fault.
        read: a text's parts.
        retries: how often an invalid choice is sampled again.
        marks: a choice that stays invalid is shown with its fault. Else the request fails.
        ends: the end tokens; any other stop was the client's.
    """

    active: bool = False
    unenforced: tuple[str, ...] = ()
    param: str | None = None
    content: Structure | None = None
    called: Mapping[str, Structure] = field(default_factory=dict)
    must_call: bool = False
    read: Callable[[str, FinishReason], AnswerParts] = _as_content
    retries: int = 0
    marks: bool = False
    ends: Collection[int] = ()

    @property
    def holds_streams_back(self) -> bool:
        """Whether a stream waits until its choices have been checked, because they may have to
        be sampled again."""
        return bool(self.retries and self.unenforced) and self.unenforced != (STRICT,)

    def fault(self, part: Completion | CompletionDelta, text: str) -> str | None:
        """Return the fault of a choice whose whole text is `text`; `part` is its end.

        None: nothing is, or it was cut off, or failed for another reason.
        """
        if not self.active:
            return None
        if part.finish_reason == "error":
            return part.error if part.error == DEAD_END else None
        if part.finish_reason != "stop" or not (
            part.stop_reason is None or part.stop_reason in self.ends
        ):
            return None
        parts = self.read(text, "stop")
        calls = [call["function"] for call in parts.whole_calls()]
        if self.must_call and not calls:
            return "the answer calls no function"
        pairs = [(self.called.get(call["name"]), call["arguments"]) for call in calls]
        checked = (
            (s.source, text)
            for s, text in pairs or [(self.content, parts.content)]
            if s is not None
        )
        return next(filter(None, (violation(source, text) for source, text in checked)), None)

    def settle(self, completion: Completion) -> Completion:
        """Return a choice as it is shown after all tries. Raises InvalidAnswerError."""
        fault = self.fault(completion, completion.text)
        if fault is None:
            return completion
        if self.marks and completion.finish_reason == "stop":
            return replace(completion, error=fault)
        raise self.error(fault, completion.text)

    def error(self, fault: str, text: str) -> InvalidAnswerError:
        tries = "" if self.retries == 0 else f" after {self.retries + 1} tries"
        lacking = (
            f" (the grammar does not hold {', '.join(self.unenforced)})" if self.unenforced else ""
        )
        shown = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
        return InvalidAnswerError(
            (
                f"the model's answer does not match what it must match{tries}: {fault}{lacking}."
                f" It was: {shown!r}"
            ),
            param=self.param,
            code="json_validate_failed",
        )

    def with_header(self, response: Response) -> Response:
        return with_names(response, HEADER, self.unenforced)


def with_names(response: Response, header: str, names: Collection[str]) -> Response:
    """Put names into a header of an answer, as far as a header can hold them."""
    if names:
        written = ", ".join(names).encode("ascii", "backslashreplace").decode()
        shown = "".join(c if c.isprintable() else "?" for c in written)
        response.headers[header] = shown[:LONGEST_HEADER]
    return response


NO_CHECK = AnswerCheck()


async def answer_check(
    context: ServerContext,
    params: SamplingParams,
    *,
    content: Structure | None,
    called: Mapping[str, Structure] | None = None,
    must_call: bool = False,
    read: Callable[[str, FinishReason], AnswerParts] = _as_content,
) -> AnswerCheck:
    """Build the check of a request's answers. Raises RequestError: no grammar follows the
    structure, or no schema."""
    structure, schemas = params.structure, dict(called or {})
    if structure is None and not schemas:
        return NO_CHECK
    config = context.deps.config
    unenforced: tuple[str, ...] = (STRICT,)
    if structure is not None:
        unenforced = await context.engine.unenforced(structure)
    else:
        for each in schemas.values():
            _check_schema(each)
    return AnswerCheck(
        active=True,
        unenforced=unenforced,
        param="tools" if structure is None else structure.param,
        content=content if content is not None and content.kind == "json_schema" else None,
        called=schemas,
        must_call=must_call,
        read=read,
        # a greedy answer is the same again
        retries=config.structured_output_retries if params.temperature > 0 else 0,
        marks=config.invalid_structured_output == "mark" or structure is None,
        ends=context.tokenizer.eos_token_ids,
    )


def _check_schema(structure: Structure) -> None:
    try:
        validator(structure.source)
    except ValueError as error:
        raise RequestError(
            f"{structure.param}: {error}", param=structure.param, code="invalid_grammar"
        ) from error
