"""The OpenAPI document says what the server answers: by its own words, and by requests made up
from it."""

import pytest

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.server.app import create_app
from mlx_parallm.server.context import ServerDeps, ServerState
from tests.soak.fuzz_openapi import fuzz, tiny_server


def test_every_route_declares_the_errors_it_can_answer() -> None:
    document = create_app(ServerDeps(ServerState(), ServerConfig())).openapi()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            declared = set(operation["responses"])
            expected = {"503"} if path == "/health" else {"401", "403", "500", "503", "504"}
            expected |= {"400", "413"} if "requestBody" in operation else set()
            assert expected <= declared, f"{method} {path}: {expected - declared}"
            assert "422" not in declared, f"{method} {path}"
    for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
        responses = document["paths"][path]["post"]["responses"]
        assert {"404", "429"} <= set(responses)
        assert responses["429"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
    streaming = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(streaming) == {"application/json", "text/event-stream"}
    assert not {"HTTPValidationError", "ValidationError"} & set(document["components"]["schemas"])


@pytest.mark.slow
def test_made_up_requests_are_never_a_500_and_never_surprise() -> None:
    """The short form of tests/soak/fuzz_openapi.py."""
    with tiny_server() as serving:
        findings = fuzz(serving.url, cases=120)
    assert findings.problems == {}
    assert findings.cases >= 120
    answered = {status for counts in findings.statuses.values() for status in counts}
    assert {200, 400, 404} <= answered


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_penalty_that_leaves_float32_is_refused_and_the_largest_one_works(server, path) -> None:
    """0 × infinity is not a number, and no number is not JSON: found by the requests below."""
    prompt = (
        {"prompt": "a"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    body = {
        **prompt,
        "max_tokens": 3,
        "logprobs": 1 if "prompt" in prompt else True,
        "temperature": 1e-5,
    }
    with server.http() as http:
        huge = http.post(path, json={**body, "repetition_penalty": 1e300})
        assert huge.status_code == 400 and huge.json()["error"]["param"] == "repetition_penalty"
        largest = http.post(path, json={**body, "repetition_penalty": 1e30})
        assert largest.status_code == 200 and len(largest.json()["choices"]) == 1


def test_numbers_that_no_array_holds(server) -> None:
    with server.http() as http:
        flat = http.post(
            "/v1/completions", json={"prompt": "a", "min_tokens": 1, "temperature": 1e300}
        )
        assert flat.status_code == 400 and flat.json()["error"]["param"] == "temperature"
        every = {"prompt": "a", "max_tokens": 20, "seed": 1, "temperature": 3.0, "top_p": 0.9}
        texts = {
            http.post("/v1/completions", json={**every, "top_k": k}).json()["choices"][0]["text"]
            for k in (0, 10**30)
        }
        assert len(texts) == 1
