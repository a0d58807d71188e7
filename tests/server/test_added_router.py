"""A router from outside of the server: key, loading gate, body limit, metrics and OpenAPI
document apply to it too."""

import base64
from typing import Any

import pytest
from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily

from mlx_parallm.server.app import AddedRouter, create_app
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server

KEY = "sk-added"
BEARER = {"Authorization": f"Bearer {KEY}"}
BASIC = {"Authorization": "Basic " + base64.b64encode(f"any:{KEY}".encode()).decode()}


def dashboard(**needs: Any) -> AddedRouter:
    router = APIRouter(prefix="/dashboard", tags=["dashboard"])

    @router.post("/notes/{name}")
    def keep(name: str, note: dict[str, str]) -> dict[str, str]:
        return {name: note["text"]}

    return AddedRouter(router, **needs)


def test_all_layers_apply_to_it(tiny_tokenizer: Any) -> None:
    options: dict[str, Any] = {"api_key": KEY, "max_body_bytes": 1000, "routers": [dashboard()]}
    with (
        running_server(FakeEngine(), tiny_tokenizer, **options) as server,
        server.http(headers=BEARER) as http,
    ):
        assert http.post("/dashboard/notes/a", json={"text": "x"}).json() == {"a": "x"}
        assert http.post("/dashboard/notes/a", json={"text": "x"}, headers=BASIC).status_code == 401
        assert http.post("/dashboard/notes/a", json={"text": "x" * 1000}).status_code == 413
        assert (
            http.post("/dashboard/notes/a", json=[]).json()["error"]["type"]
            == "invalid_request_error"
        )
        assert 'route="/dashboard/notes/{name}",status="200"' in http.get("/metrics").text
        operation = http.get("/openapi.json").json()["paths"]["/dashboard/notes/{name}"]["post"]
        assert {"200", "400", "401", "413", "503"} <= set(
            operation["responses"]
        ) and "422" not in operation["responses"]


def test_while_loading_it_is_503_but_for_what_it_names(tiny_tokenizer: Any) -> None:
    added = dashboard(while_loading={"/dashboard/notes/a": {"a": "wait"}})
    with (
        running_server(FakeEngine(), tiny_tokenizer, loaded=False, routers=[added]) as server,
        server.http() as http,
    ):
        assert http.post("/dashboard/notes/a", json={}).json() == {"a": "wait"}
        assert http.post("/dashboard/notes/b", json={}).status_code == 503
        server.state.failed("no such model")
        assert http.post("/dashboard/notes/a", json={}).status_code == 503


class Following:
    """An observer that notes what it is calls."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def begun(self, body: Any) -> None:
        self._calls.append(f"begun {body.messages[0].content}")

    def sampled(self, requests: Any, choices: Any) -> None:
        self._calls.append(f"sampled {len(choices[0])}")

    async def aborted(self) -> None:
        self._calls.append("aborted")

    async def whole(self, answer: Any) -> None:
        self._calls.append(f"whole {answer['object']}")

    def events(self, events: Any) -> Any:
        return events


def test_a_part_follows_the_chats_that_it_wants(tiny_tokenizer: Any) -> None:
    calls: list[str] = []

    def observe(request: Request) -> Following | None:
        return Following(calls) if "X-Follow" in request.headers else None

    added = AddedRouter(APIRouter(), observe=observe)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    asked = [
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"model": "default", "input": "hi"}),
        ("/v1/messages", {"model": "default", "max_tokens": 5, **chat}),
    ]
    with (
        running_server(FakeEngine(), tiny_tokenizer, routers=[added]) as server,
        server.http() as http,
    ):
        for path, body in asked:
            assert http.post(path, json=body).status_code == 200
            assert calls == []
            assert http.post(path, json=body, headers={"X-Follow": "1"}).status_code == 200
            assert calls == ["begun hi", "sampled 1", "whole chat.completion"]
            calls.clear()
        text = {"prompt": "hi", "model": "default"}
        assert http.post("/v1/completions", json=text, headers={"X-Follow": "1"}).is_success
        assert calls == []
    with pytest.raises(ValueError, match="one observer"):
        create_app(server.app.state.context.deps, [added, added])


def test_a_part_counts_and_has_keys_for_some_paths(tiny_tokenizer: Any) -> None:
    counter = CounterMetricFamily("part_things", "Things", value=3)
    added = dashboard(
        metrics=lambda: [counter],
        user_keys=("sk-of-anna",),
        user_paths=("/dashboard/notes/", "/v1"),
    )
    anna = {"Authorization": "Bearer sk-of-anna"}
    with (
        running_server(FakeEngine(), tiny_tokenizer, api_key=KEY, routers=[added]) as server,
        server.http(headers=anna) as http,
    ):
        assert http.post("/dashboard/notes/a", json={"text": "x"}).json() == {"a": "x"}
        wrong = {"Authorization": "Bearer sk-of-ben"}
        assert http.post("/dashboard/notes/a", json={}, headers=wrong).status_code == 401
        assert [http.get(path).status_code for path in ("/v1/models", "/metrics")] == [401, 401]
        assert "part_things_total 3.0" in http.get("/metrics", headers=BEARER).text
