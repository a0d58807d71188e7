"""Answers of the OpenAI routes as plain dictionaries, built once and dumped once (no response
models to validate).

Token-exact: ids and log-probabilities are the engine's, EOS included; every choice
carries the spans of policy versions it was sampled under.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from mlx_parallm.types import (
    Completion,
    CompletionDelta,
    PromptLogprobs,
    RequestOutput,
    ServedModel,
    TopLogprob,
    weight_spans,
)

MINIMUM_LOGPROB = -9999.0  # JSON has no -inf; vLLM's stand-in


class TokenReader(Protocol):
    """Follow the tokens of a text and return each one's text in its place
    (`models.token_text`)."""

    length: int  # characters before the next token's

    def bytes_of(self, token_id: int) -> bytes: ...

    def text_of(self, token_id: int) -> str: ...

    def add(self, token_id: int) -> object: ...


def finite(logprob: float) -> float:
    """A number that JSON can hold."""
    return logprob if logprob > MINIMUM_LOGPROB else MINIMUM_LOGPROB


def openai_head(
    kind: str, response_id: str, model: ServedModel, *, usage_follows: bool
) -> dict[str, Any]:
    """`usage_follows`: a stream whose last chunk has the usage; OpenAI's others say null then."""
    head = {"id": response_id, "object": kind, "created": int(time.time()), "model": model.id}
    return head | {"usage": None} if usage_follows else head


def processed_logprobs(part: Completion | CompletionDelta) -> dict[str, Any]:
    """The field of that name, where sampling reshaped the distribution, and `forced_tokens`, where
    a grammar was on."""
    values, forced = part.processed_logprobs, part.forced
    fields: dict[str, Any] = {}
    if values is not None:
        fields["processed_logprobs"] = [finite(logprob) for logprob in values]
    if forced is not None:
        fields["forced_tokens"] = list(forced)
    return fields


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int = 0,
    rejected_tokens: int = 0,
    details: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the counts of an answer.

    Args:
        completion_tokens: of the choices that are shown.
        cached_tokens: of the prompts, found in the prefix cache.
        rejected_tokens: of choices that broke their schema and were sampled again; they count as
            completion tokens.
        details: more for `completion_tokens_details`.
    """
    completion_tokens += rejected_tokens
    details = {
        **(details or {}),
        **({"rejected_tokens": rejected_tokens} if rejected_tokens else {}),
    }
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    return counts | {"completion_tokens_details": details} if details else counts


def usage_of(
    outputs: Iterable[RequestOutput], details: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Each prompt counts once, every choice's tokens count. `details`: as of `usage`."""
    outputs = list(outputs)
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(completion.token_ids) for output in outputs for completion in output.completions),
        sum(output.completions[0].cached_tokens for output in outputs),
        sum(output.rejected_tokens for output in outputs),
        details,
    )


def version_spans(policy_versions: tuple[int, ...]) -> list[dict[str, int]]:
    """vLLM's `weight_versions`: which tokens [start, end) each policy version sampled."""
    return [
        {"version": span.version, "start": span.start, "end": span.end}
        for span in weight_spans(policy_versions)
    ]


def last_version(outputs: Iterable[RequestOutput], default: int) -> int:
    """The version that sampled the last token; `default` without tokens."""
    versions = [
        c.policy_versions[-1] for output in outputs for c in output.completions if c.policy_versions
    ]
    return max(versions, default=default)


def chat_logprobs(
    reader: TokenReader,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[Sequence[TopLogprob]] | None,
    as_ids: bool,
) -> dict[str, Any]:
    """Chat's form: one entry a token; `token` is "token_id:<id>" when `as_ids`. The reader takes
    the tokens."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        shown = _shown(reader, token_id, as_ids)
        return {
            "token": shown,
            "logprob": finite(logprob),
            "bytes": list(reader.bytes_of(token_id)),
        }

    tops: Sequence[Sequence[TopLogprob]] = top_logprobs or [()] * len(token_ids)
    content = []
    for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True):
        alternatives = [entry(t.token_id, t.logprob) for t in top]
        content.append({**entry(token_id, logprob), "top_logprobs": alternatives})
        reader.add(token_id)
    return {"content": content, "refusal": None}


def _shown(reader: TokenReader, token_id: int, as_id: bool) -> str:
    """The token's text in its place, or "token_id:<id>" for `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}" if as_id else reader.text_of(token_id)


def completion_logprobs(
    reader: TokenReader,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[Sequence[TopLogprob] | None] | None,
    *,
    as_ids: bool,
    start: int = 0,
) -> dict[str, list[Any]]:
    """The completions route's form: four parallel lists. A token without a log-probability (a
    prompt's first) shows null. The reader takes the tokens.

    `start`: characters of the text before those that the reader has taken.
    """
    tops: Sequence[Sequence[TopLogprob] | None] = top_logprobs or [()] * len(token_ids)
    tokens, offsets, alternatives = [], [], []
    for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True):
        tokens.append(_shown(reader, token_id, as_ids))
        offsets.append(start + reader.length)
        shown: dict[str, float] | None = None
        if logprob is not None:  # the top ones and the sampled one, which may not be among them
            shown = {}
            for t in top or ():
                # the likeliest of tokens with one text
                shown.setdefault(_shown(reader, t.token_id, as_ids), finite(t.logprob))
            shown.setdefault(tokens[-1], finite(logprob))
        alternatives.append(shown)
        reader.add(token_id)
    return {
        "tokens": tokens,
        "token_logprobs": [None if logprob is None else finite(logprob) for logprob in logprobs],
        "top_logprobs": alternatives,
        "text_offset": offsets,
    }


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Concatenate two outputs of `completion_logprobs`."""
    return {key: first[key] + second[key] for key in first}


def prompt_logprob_entries(
    reader: TokenReader, token_ids: Sequence[int], scores: PromptLogprobs
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: a position's given token and its top-k, each {logprob, rank,
    decoded_token}.

    `rank` is 1-based; null for a given token outside the top-k, whose rank is not computed. The
    reader takes the tokens.
    """
    entries: list[dict[str, Any] | None] = []
    for token_id, logprob, top in zip(token_ids, scores.logprobs, scores.top_logprobs, strict=True):
        entry: dict[str, Any] | None = None
        if logprob is not None:
            shown = {
                "logprob": finite(logprob),
                "rank": None,
                "decoded_token": reader.text_of(token_id),
            }
            entry = {str(token_id): shown}
            for rank, t in enumerate(top or (), 1):
                shown = {
                    "logprob": finite(t.logprob),
                    "rank": rank,
                    "decoded_token": reader.text_of(t.token_id),
                }
                entry[str(t.token_id)] = shown
        entries.append(entry)
        reader.add(token_id)
    return entries
