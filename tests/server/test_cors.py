"""CORS: off unless configured; what a browser page of another origin may do, with an API key and
without."""

import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.daemon import Serving
from mlx_parallm.errors import ConfigError
from mlx_parallm.server.auth import check_origins
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server

APP, OTHER, KEY = "https://app.example.org", "https://evil.example.org", "k"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


@pytest.fixture(scope="module")
def guarded(tiny_tokenizer):
    with running_server(
        FakeEngine(), tiny_tokenizer, api_key=KEY, config=ServerConfig(cors_origins=(APP,))
    ) as server:
        yield server


@pytest.fixture(scope="module")
def unguarded(tiny_tokenizer):
    with running_server(
        FakeEngine(), tiny_tokenizer, config=ServerConfig(cors_origins=(APP,))
    ) as server:
        yield server


def preflight(server, origin, path="/v1/completions"):
    with server.http() as http:
        return http.options(path, headers={"Origin": origin, **PREFLIGHT})


def test_it_is_off_by_default(tiny_tokenizer):
    with running_server(FakeEngine(), tiny_tokenizer, api_key=KEY) as server:
        assert preflight(server, APP).status_code == 401
        with server.http(headers={"Authorization": f"Bearer {KEY}", "Origin": APP}) as http:
            answer = http.get("/v1/models")
            assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_a_preflight_request_needs_no_key_and_nothing_else_goes_without(guarded):
    allowed = preflight(guarded, APP)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, APP)
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    refused = preflight(guarded, OTHER)
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    with guarded.http(headers={"Origin": APP}) as http:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/pause"),
            ("OPTIONS", "/v1/completions"),
        ):
            assert (path, http.request(method, path).status_code) == (path, 401)


def test_the_page_reads_answers_and_errors_of_its_own_origin_only(guarded):
    with guarded.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
        body = {"prompt": "a", "max_tokens": 1}
        for origin, shown in ((APP, APP), (OTHER, None)):
            answer = http.post("/v1/completions", json=body, headers={"Origin": origin})
            assert (
                answer.status_code == 200
                and answer.headers.get("access-control-allow-origin") == shown
            )
        error = http.post("/v1/completions", json={}, headers={"Origin": APP})
        assert error.status_code == 400 and error.headers["access-control-allow-origin"] == APP
        assert "X-Request-ID" in error.headers["access-control-expose-headers"]


def test_without_a_key_only_the_named_origin_is_let_in_beside_this_machine(unguarded):
    with unguarded.http() as http:
        for origin, status in (
            (APP, 200),
            ("http://localhost:3000", 200),
            (OTHER, 403),
            ("null", 403),
        ):
            assert (origin, http.get("/v1/models", headers={"Origin": origin}).status_code) == (
                origin,
                status,
            )
        rebound = http.get("/v1/models", headers={"Origin": APP, "Host": "app.example.org"})
        assert rebound.status_code == 403


def test_any_origin_needs_a_key():
    check_origins(["*"], KEY)
    check_origins([APP, "http://localhost:3000"], None)
    with pytest.raises(ConfigError, match="API key"):
        Serving(Config.model_validate({"server": {"port": 0, "cors_origins": ["*"]}}))
    for wrong in ("app.example.org", f"{APP}/", f"{APP}/page", ""):
        with pytest.raises(ConfigError, match="not an origin"):
            check_origins([wrong], KEY)


def test_any_origin_with_a_key(tiny_tokenizer):
    with running_server(
        FakeEngine(), tiny_tokenizer, api_key=KEY, config=ServerConfig(cors_origins=("*",))
    ) as server:
        assert preflight(server, OTHER).headers["access-control-allow-origin"] == "*"
        with server.http(headers={"Origin": OTHER}) as http:
            assert http.get("/v1/models").status_code == 401
