"""Every finished structured answer is checked: an invalid one is sampled again, then an error or
marked.

The fault that began it: `patternProperties` beside `properties` led the grammar into a dead end,
and `{"score":0, ` came with finish_reason "stop". Other members of its kind that were looked at,
with 200 random texts each from the
grammar: overlapping and closed `patternProperties` in allOf and $ref, `propertyNames`,
`minProperties` with a name written twice, leap seconds, a local part of 100 characters, numbers
beyond a double, integers beyond 64 bits, the escapes s and b, named groups, `(?=` in a character
class, `items` as a list, `exclusiveMinimum: true`, dead ends of Lark grammars.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.json_schema import violation
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from tests.conftest import TINY, TinyEngine
from tests.server.serving import RunningServer, running_server

CHAT: Any = {"messages": [{"role": "user", "content": "Sort: hgfa"}]}
# the grammar lacks `not`
RARE = {"type": "string", "enum": ["a", "b", "c", "d"], "not": {"enum": ["a", "b"]}}
NEVER = {
    "type": "array",
    "items": {"const": "a"},
    "minItems": 2,
    "maxItems": 2,
    "uniqueItems": True,
}
CUT = 'start: "x" ("," T)?\nT: /ab/ & ~"ab"'  # nothing can follow the comma
HEADER = "X-Unenforced-Schema-Keywords"


@pytest.fixture(scope="module")
def servers(tiny_engine: TinyEngine) -> Iterator[dict[str, RunningServer]]:
    def serve(**fields: Any) -> Any:
        tokenizer = load_tokenizer(resolve_model_path(TINY.base_path), TINY)
        return running_server(tiny_engine.client, tokenizer, config=ServerConfig(**fields))

    with (
        serve(structured_output_retries=100) as patient,
        serve(structured_output_retries=1) as usual,
        serve(structured_output_retries=0) as hasty,
        serve(structured_output_retries=0, invalid_structured_output="mark") as marking,
    ):
        yield {"patient": patient, "usual": usual, "hasty": hasty, "marking": marking}


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    with server.http() as http:
        return http.post(path, json=body)


def events(response: httpx.Response) -> list[Any]:
    lines = [
        line.removeprefix("data: ")
        for line in response.text.split("\n")
        if line.startswith("data: ")
    ]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_that_is_sampled_again_brings_its_own_tokens(
    servers: dict[str, RunningServer], path: str
) -> None:
    prompt: Any = {"prompt": "Sort: hgfa"} if path == "/v1/completions" else CHAT
    logprobs: Any = {"logprobs": 1} if path == "/v1/completions" else {"logprobs": True}
    asked = (
        {"guided_json": RARE, "n": 8, "seed": 1, "max_tokens": 40, "return_token_ids": True}
        | prompt
        | logprobs
    )
    answers = [post(servers["patient"], path, **asked) for _ in range(2)]
    first, second = [answer.json() for answer in answers]
    assert answers[0].headers[HEADER] == "not"
    assert {text_of(c) for c in first["choices"]} <= {'"c"', '"d"'}
    assert [c["index"] for c in first["choices"]] == [*range(8)]
    for choice, again in zip(first["choices"], second["choices"], strict=True):
        assert choice["token_ids"] == again["token_ids"], (
            "the seed decides about what is sampled again, too"
        )
        shown = choice["logprobs"].get("content") or choice["logprobs"]["token_logprobs"]
        assert len(shown) == len(choice["token_ids"]) == len(choice["processed_logprobs"])
        assert choice["weight_versions"][-1]["end"] == len(choice["token_ids"])
    shown = sum(len(choice["token_ids"]) for choice in first["choices"])
    usage = first["usage"]
    rejected = usage["completion_tokens_details"]["rejected_tokens"]
    assert rejected > 0 and usage["completion_tokens"] == shown + rejected
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    streamed = post(
        servers["patient"], path, **asked, stream=True, stream_options={"include_usage": True}
    )
    assert streamed.headers[HEADER] == "not"
    chunks = events(streamed)
    for index, choice in enumerate(first["choices"]):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert "".join(
            c.get("text") or c.get("delta", {}).get("content") or "" for c in own
        ) == text_of(choice)
        assert [token for c in own for token in c.get("token_ids") or ()] == choice["token_ids"]
        assert own[-1]["finish_reason"] == "stop"
    assert {**chunks[-1]["usage"], "prompt_tokens_details": {}} == {
        **usage,
        "prompt_tokens_details": {},
    }
    assert "mlx_parallm_resampled_choices_total" in post_metrics(servers["patient"])


def post_metrics(server: RunningServer) -> str:
    with server.http() as http:
        return http.get("/metrics").text


# route, body, the field that the error names
SPELLED: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": ("/v1/completions", {"prompt": "a", "guided_json": NEVER}, "guided_json"),
    "chat": (
        "/v1/chat/completions",
        CHAT
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": NEVER},
            }
        },
        "response_format.json_schema.schema",
    ),
    "responses": (
        "/v1/responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": NEVER}}},
        "text.format.schema",
    ),
    "messages": (
        "/v1/messages",
        CHAT
        | {"max_tokens": 50, "output_config": {"format": {"type": "json_schema", "schema": NEVER}}},
        "output_config.format.schema",
    ),
    "tokens": (
        "/inference/v1/generate",
        {
            "token_ids": [5, 6],
            "sampling_params": {"max_tokens": 50, "structured_outputs": {"json": NEVER}},
        },
        "structured_outputs.json",
    ),
    "generate, vLLM's": (
        "/generate",
        {"prompt": "a", "max_tokens": 50, "guided_json": NEVER},
        "guided_json",
    ),
    "generate, SGLang's": (
        "/generate",
        {"text": "a", "sampling_params": {"max_new_tokens": 50, "json_schema": json.dumps(NEVER)}},
        "sampling_params.json_schema",
    ),
    "dead end": (
        "/v1/completions",
        {"prompt": "a", "guided_grammar": CUT, "seed": 1, "n": 8},
        "guided_grammar",
    ),
}


@pytest.mark.parametrize("name", SPELLED)
def test_one_that_stays_invalid_is_an_error_on_every_route(
    servers: dict[str, RunningServer], name: str
) -> None:
    path, body, param = SPELLED[name]
    server = servers["usual" if name != "dead end" else "hasty"]
    answer = post(server, path, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["code"] == "json_validate_failed", error
    if name != "dead end":
        assert "2 tries" in error["message"] and "non-unique" in error["message"]
    if path == "/generate":
        return
    held_back = post(server, path, **body, stream=True)
    if name != "dead end":  # the header would have said so, and nothing has been sent
        assert held_back.status_code == 400 and held_back.json()["error"]["param"] == param
    at_once = post(servers["hasty"], path, **body, stream=True)
    assert at_once.status_code == 200
    failure = str(events(at_once)[-1])
    assert "non-unique" in failure or "nothing follow" in failure
    if name != "dead end":  # others of its eight choices end well
        assert not any(
            f'"{reason}"' in at_once.text
            for reason in ("stop", "end_turn", "tool_calls", "tool_use")
        )


@pytest.mark.parametrize("name", [name for name in SPELLED if name != "dead end"])
def test_it_can_be_marked_instead(servers: dict[str, RunningServer], name: str) -> None:
    path, body, _ = SPELLED[name]
    for stream in (False, True) if path != "/generate" else (False,):
        answer = post(servers["marking"], path, **body, **({"stream": True} if stream else {}))
        assert answer.status_code == 200, answer.text
        assert "schema_error" in answer.text and "non-unique" in answer.text
        assert answer.headers[HEADER] == "uniqueItems"


def test_a_text_that_its_grammar_cuts_off_never_ends_by_stop(
    servers: dict[str, RunningServer],
) -> None:
    """Sampled again it is complete; where it is not sampled again, not even `mark` lets it pass."""
    asked = {"prompt": "a", "guided_grammar": CUT, "n": 8, "seed": 1, "max_tokens": 9}
    fine = post(servers["patient"], "/v1/completions", **asked).json()
    assert {choice["text"] for choice in fine["choices"]} == {"x"}
    assert post(servers["marking"], "/v1/completions", **asked).status_code == 400


def test_what_a_client_cuts_off_is_not_checked(servers: dict[str, RunningServer]) -> None:
    asked = {"prompt": "a", "guided_json": NEVER, "max_tokens": 50}
    stopped = post(servers["usual"], "/v1/completions", **asked, stop=["["]).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"], stopped["stop_reason"]) == ("", "stop", "[")
    cut = post(servers["usual"], "/v1/completions", **asked | {"max_tokens": 3}).json()["choices"][
        0
    ]
    assert cut["finish_reason"] == "length" and "schema_error" not in cut


def test_a_greedy_answer_is_not_sampled_again(servers: dict[str, RunningServer]) -> None:
    answer = post(
        servers["patient"], "/v1/completions", prompt="a", guided_json=NEVER, temperature=0
    )
    assert answer.status_code == 400 and "tries" not in answer.json()["error"]["message"]


def resampled(server: RunningServer) -> float:
    lines = post_metrics(server).splitlines()
    return next(
        float(line.split()[-1])
        for line in lines
        if line.startswith("mlx_parallm_resampled_choices_total ")
    )


@pytest.mark.parametrize("temperatures", [(0.0, 1.0), (1.0, 0.0)])
def test_of_a_list_of_sampling_params_only_greedy_answers_are_not_sampled_again(
    servers: dict[str, RunningServer], temperatures: tuple[float, ...]
) -> None:
    """SGLang's list: the first temperature decided for all, so that none, or a greedy one 100
    times, was sampled."""
    fields = {"json_schema": json.dumps(NEVER), "max_new_tokens": 40}
    sampling = [fields | {"temperature": temperature} for temperature in temperatures]
    before = resampled(servers["usual"])
    answer = post(servers["usual"], "/generate", text=["a", "b"], sampling_params=sampling)
    assert answer.status_code == 400
    assert resampled(servers["usual"]) - before == 1


@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_patterns_beside_properties(servers: dict[str, RunningServer], temperature: float) -> None:
    """The smallest input of the fault; and where an `allOf` hides it from the rewriting, the
    header says so."""
    integer = {"type": "integer"}
    patterns = {
        "patternProperties": {"^score$": {"type": "integer", "minimum": 3}},
        "additionalProperties": False,
    }
    plain = {"type": "object", "properties": {"score": integer}} | patterns
    merged = {"type": "object", "allOf": [{"properties": {"score": integer}}, patterns]}
    for schema, named in ((plain, None), (merged, "patternProperties")):
        asked = {
            "prompt": "a",
            "guided_json": schema,
            "n": 15,
            "seed": 1,
            "max_tokens": 60,
            "temperature": temperature,
        }
        answer = post(servers["patient"], "/v1/completions", **asked)
        assert answer.headers.get(HEADER) == named
        ended = [c["text"] for c in answer.json()["choices"] if c["finish_reason"] == "stop"]
        assert ended and [violation(json.dumps(schema), text) for text in ended] == [None] * len(
            ended
        )


def test_sglangs_fields_of_structure_count_or_are_refused(
    servers: dict[str, RunningServer],
) -> None:
    def ask(**sampling: Any) -> httpx.Response:
        return post(
            servers["usual"],
            "/generate",
            text="a",
            sampling_params={"max_new_tokens": 40} | sampling,
        )

    assert ask(regex="[a-c]{3}").json()["text"].strip("abc") == ""
    assert ask(ebnf='root ::= "xy"').json()["text"] == "xy"
    assert ask(json_schema={"enum": ["q"]}).json()["text"] == '"q"'
    assert ask(structural_tag="{}").json()["error"]["param"] == "sampling_params.structural_tag"
    assert ask(regex="a", ebnf='root ::= "b"').status_code == 400
