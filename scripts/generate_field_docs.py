"""Writes docs/serving.md#every-field-of-a-request from the request bodies: `.venv/bin/python
scripts/generate_field_docs.py`.

The names come from the installed `openai` package and from the list of vLLM's extras below; what
becomes of each comes from the bodies themselves and server/protocol/fields.toml.
tests/server/test_fields.py fails while the file differs from what this prints, and sends every
field to a server.
"""

import json
from pathlib import Path
from typing import Any

from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from mlx_parallm.server.protocol.fields import FIELDS
from mlx_parallm.server.protocol.openai import ChatBody, CompletionBody

TARGET = Path(__file__).resolve().parents[1] / "docs" / "serving.md"
BODIES: dict[str, Any] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
OPENAI = {
    "/v1/completions": {
        *completion_create_params.CompletionCreateParamsBase.__annotations__,
        "stream",
    },
    "/v1/chat/completions": {
        *chat_create_params.CompletionCreateParamsBase.__annotations__,
        "stream",
    },
}
# vLLM's main branch of 2026: entrypoints/openai/{completion,chat_completion}/protocol.py, and the
# guided_* fields that it had before `structured_outputs`.
_VLLM_BOTH = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    allowed_token_ids bad_words prompt_logprobs logprob_token_ids add_special_tokens response_format structured_outputs
    guided_json guided_regex guided_choice guided_grammar priority request_id session_id return_tokens_as_token_ids
    return_token_ids cache_salt kv_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval
"""
_VLLM_CHAT = """
    echo add_generation_prompt continue_final_message documents chat_template chat_template_kwargs mm_processor_kwargs
    media_io_kwargs include_reasoning
"""
VLLM = {
    "/v1/completions": {*_VLLM_BOTH.split(), "prompt_embeds"},
    "/v1/chat/completions": {*_VLLM_BOTH.split(), *_VLLM_CHAT.split()},
}
SUPPORTED, WITHOUT, REJECTED = "supported", "accepted, without effect", "rejected"
MARK = (
    "<!-- generated from here on by scripts/generate_field_docs.py: edit"
    " server/protocol/fields.toml or the bodies instead -->\n"
)
HEADER = """
## Every field of a request

The fields of OpenAI's schema, of vLLM's extras and of other servers (llama.cpp, Ollama, LM Studio) that clients send by
habit, and what this server does with each. *Rejected*: error 400 that names the field, since ignoring it would change
the answer. *Without effect*: it cannot change the answer. `null` is the same as absence everywhere. A field that is not
in this table is rejected as unknown, whatever its value.

`/inference/v1/generate`, `/generate` and `/v1/chat/completions/tokens` ignore fields that they do not know, as the
clients of these routes expect.
Headers: `X-Request-ID` is echoed, logged and a name for `/abort_requests`; `X-Session-ID` is logged.

| field | of | `/v1/completions` | `/v1/chat/completions` |
|---|---|---|---|
"""


def names() -> list[str]:
    """Every field of the table: OpenAI's first."""
    openai, vllm = set().union(*OPENAI.values()), set().union(*VLLM.values())
    ours = {name for body in BODIES.values() for name in body.model_fields}
    others = {*FIELDS.refused, *FIELDS.harmless} - openai - vllm - ours
    return [*sorted(openai), *sorted(vllm - openai), *sorted(ours - vllm - openai), *sorted(others)]


def fate(route: str, name: str) -> str:
    """Return how that route treats that field."""
    if name in BODIES[route].model_fields:
        return SUPPORTED
    return WITHOUT if name in FIELDS.harmless else REJECTED


def render(page: str) -> str:
    """Return the page with the section made anew."""
    return page.partition(MARK)[0] + MARK + HEADER + "".join(_row(name) for name in names())


def _row(name: str) -> str:
    owner = "OpenAI" if any(name in of for of in OPENAI.values()) else "vLLM"
    if not any(name in of for group in (OPENAI, VLLM) for of in group.values()):
        owner = (
            "this server"
            if any(name in body.model_fields for body in BODIES.values())
            else "others"
        )
    return (
        f"| `{name}` | {owner} | {_cell('/v1/completions', name)} |"
        f" {_cell('/v1/chat/completions', name)} |\n"
    )


def _cell(route: str, name: str) -> str:
    cell = fate(route, name)
    if cell != REJECTED:
        return cell
    if name not in OPENAI[route] | VLLM[route] and name not in FIELDS.refused:
        return "–"
    off, instead = FIELDS.refused.get(name, ((), ""))
    if instead:
        cell += f": {instead}"
    neutral = ", ".join(f"`{json.dumps(value)}`" for value in off)
    return f"{cell.replace(REJECTED, f'{REJECTED}, but for {neutral}', 1)}" if neutral else cell


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}")
