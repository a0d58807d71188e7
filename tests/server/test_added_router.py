"""A router from outside of the server: key, loading gate, body limit, metrics and OpenAPI
document apply to it too."""

import base64
from typing import Any

from fastapi import APIRouter

from mlx_parallm.server.app import AddedRouter
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
