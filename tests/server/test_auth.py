"""The API key, the Host and Origin rules without one, and which addresses may be bound."""

import base64

import httpx
import pytest
from fastapi import APIRouter
from openai import AuthenticationError

from mlx_parallm.errors import ConfigError
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.server.auth import check_bind, is_loopback_authority, is_loopback_origin
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server

KEY = "s3cret-ü"


@pytest.fixture(scope="module")
def guarded(tiny_tokenizer):
    added, other = APIRouter(prefix="/atropos"), APIRouter()
    added.add_api_route("/status", lambda: {"queue_size": 0}, methods=["GET"])
    other.add_api_route("/atroposity", lambda: {}, methods=["GET"])
    routers = (AddedRouter(added, basic_auth=True), AddedRouter(other))
    with running_server(FakeEngine(), tiny_tokenizer, api_key=KEY, routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def unguarded(tiny_tokenizer):
    with running_server(FakeEngine(), tiny_tokenizer) as server:
        yield server


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def bearer(key):
    return b"Bearer " + key.encode()


def walk(routes):
    """Every route that has a path, however routers hold each other."""
    for route in routes:
        if hasattr(route, "path"):
            yield route
        inner = getattr(route, "original_router", None) or getattr(route, "app", None)
        yield from walk(getattr(inner, "routes", ()))


def test_the_key_guards_every_route_but_health(guarded):
    with guarded.http() as http:
        assert http.get("/health").status_code == 200
        paths = {
            *(route.path for route in walk(guarded.app.routes)),
            *guarded.app.openapi()["paths"],
            "/nowhere",
        }
        admin = {
            "/pause",
            "/resume",
            "/abort_requests",
            "/reset_prefix_cache",
            "/server_info",
            "/weight_info",
        }
        assert {
            "/v1/models",
            "/metrics",
            "/generate",
            "/atropos/status",
            "/openapi.json",
            "/docs",
            *admin,
        } <= paths
        for path in paths - {"/health"}:
            for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS"):
                refused = http.request(method, path.replace("{name:path}", "fake"))
                assert (path, refused.status_code) == (path, 401)
                assert refused.json()["error"]["code"] == "invalid_api_key"


def test_basic_authentication_is_for_the_routes_below_a_prefix():
    """An empty prefix would let every route take the key as a password."""
    with pytest.raises(ValueError, match="prefix"):
        AddedRouter(APIRouter(), basic_auth=True)


@pytest.mark.parametrize("credentials", [b"Bearer wrong", b"Bearer", b"", b"s3cret", b"Basic !!!"])
def test_a_wrong_key_is_401(guarded, credentials):
    with guarded.http() as http:
        assert http.get("/v1/models", headers={"Authorization": credentials}).status_code == 401
        assert (
            http.get("/atropos/status", headers={"Authorization": credentials}).status_code == 401
        )


def test_the_right_key_opens(guarded):
    with guarded.http(headers={"Authorization": bearer(KEY)}) as http:
        assert http.get("/v1/models").status_code == 200
        # a key needs no loopback
        assert http.get("/v1/models", headers={"Host": "example.org"}).status_code == 200
        assert http.get("/atropos/status").json() == {"queue_size": 0}


def test_the_openai_client_sees_an_authentication_error(guarded):
    with pytest.raises(AuthenticationError, match="API key"):
        guarded.openai(api_key="wrong").models.list()


def test_basic_auth_opens_atropos_only(guarded):
    url = guarded.url.replace("http://", "http://env:")
    with guarded.http() as http:
        right, wrong = {"Authorization": basic("env", KEY)}, {"Authorization": basic(KEY, "env")}
        assert http.get("/atropos/status", headers=right).status_code == 200
        assert http.get("/atropos/status", headers=wrong).status_code == 401
        assert http.get("/v1/models", headers=right).status_code == 401
        assert http.get("/atroposity", headers=right).status_code == 401
    assert (
        httpx.get(url.replace("env:", "env:s3cret-%C3%BC@") + "/atropos/status").status_code == 200
    )


@pytest.mark.parametrize(
    "host", ["example.org", "localhost.example.org", "127.0.0.1.nip.io", "0.0.0.0", "192.168.0.2"]
)
def test_a_foreign_host_is_403_without_a_key(unguarded, host):
    with unguarded.http() as http:
        for path in ("/v1/models", "/health"):
            refused = http.get(path, headers={"Host": host})
            assert (
                refused.status_code == 403 and refused.json()["error"]["type"] == "permission_error"
            )


def test_a_foreign_origin_is_403_without_a_key(unguarded):
    with unguarded.http() as http:
        assert http.get("/v1/models", headers={"Origin": "https://example.org"}).status_code == 403
        assert http.get("/v1/models", headers={"Origin": "null"}).status_code == 403
        assert (
            http.get("/v1/models", headers={"Origin": "http://localhost:3000"}).status_code == 200
        )
        for site in ("cross-site", "Cross-Site"):  # an <img>
            assert http.get("/v1/models", headers={"Sec-Fetch-Site": site}).status_code == 403
        # typed by the user
        assert http.get("/v1/models", headers={"Sec-Fetch-Site": "none"}).status_code == 200


@pytest.mark.parametrize(
    "authority",
    [
        "localhost",
        "LocalHost:8000",
        "localhost.",
        "127.0.0.1:80",
        "127.9.9.9",
        "[::1]",
        "[::1]:8000",
        "[::ffff:127.0.0.1]",
    ],
)
def test_loopback_authorities(authority):
    assert is_loopback_authority(authority) and is_loopback_origin(f"http://{authority}")


@pytest.mark.parametrize(
    "authority",
    [
        "",
        ":80",
        "127.0.0.1@evil.org",
        "evil.org:80",
        "[::2]:80",
        "localhost:80:80",
        "localhost x",
        "[::1",
        "2130706433",
    ],
)
def test_other_authorities(authority):
    assert not is_loopback_authority(authority) and not is_loopback_origin(f"http://{authority}")


OTHER_PAGE = {
    "Origin": "http://127.0.0.1:18812",
    "Sec-Fetch-Site": "same-site",
    "Sec-Fetch-Mode": "no-cors",
}
HIDDEN_PAGE = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}  # an image, a script


@pytest.mark.parametrize(
    "headers", [OTHER_PAGE, HIDDEN_PAGE, OTHER_PAGE | {"Origin": "null"}], ids=str
)
@pytest.mark.parametrize(
    "kind", [None, "text/plain", "text/plain; a=application/json", "multipart/form-data"]
)
def test_a_page_of_another_port_changes_nothing(unguarded, headers, kind):
    """What browsers send without a preflight request: a POST without a body, a form, plain text.
    Tried on every route of every method that changes something, and on GET for pages whose
    Origin is not sent."""
    sent = headers | ({"Content-Type": kind} if kind else {})
    with unguarded.http() as http:
        paths = {
            (path, method)
            for path, each in unguarded.app.openapi()["paths"].items()
            for method in each
        }
        assert {
            ("/pause", "post"),
            ("/abort_requests", "post"),
            ("/v1/responses/{response_id}", "delete"),
        } <= paths
        for path, method in paths:
            if method != "get" or "Origin" not in headers:
                answer = http.request(method, path, headers=sent)
                assert answer.status_code == 403, (method, path)
        assert http.get("/is_paused").json() == {"is_paused": False}


def test_pages_that_may(unguarded):
    """The server's own page, one that has asked before (JSON), a link that somebody follows, and
    what is not a browser."""
    with unguarded.http() as http:
        own = {"Origin": str(http.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
        assert http.post("/abort_requests", headers=own).status_code == 200
        assert http.post("/abort_requests").status_code == 200
        asked = OTHER_PAGE | {
            "Sec-Fetch-Mode": "cors",
            "Content-Type": "application/json; charset=utf-8",
        }
        assert http.post("/abort_requests", headers=asked).status_code == 200
        assert (
            http.get("/v1/models", headers=HIDDEN_PAGE | {"Sec-Fetch-Mode": "navigate"}).status_code
            == 200
        )


def test_a_page_cannot_use_the_key_that_the_browser_adds(guarded):
    """Basic authentication comes with every request to the server, whoever has sent it."""
    known = {"Authorization": basic("me", KEY)}
    with guarded.http(headers=known) as http:
        assert http.get("/atropos/status").status_code == 200
        assert http.get("/atropos/status", headers=HIDDEN_PAGE).status_code == 403
        assert (
            http.get("/atropos/status", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        )


@pytest.mark.parametrize(
    "origin", ["null", "localhost", "http://localhost/evil.org", "file://", "http://"]
)
def test_other_origins(origin):
    assert not is_loopback_origin(origin)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.0.2", "example.org"])
def test_a_public_address_needs_a_key(host):
    with pytest.raises(ConfigError, match="API key"):
        check_bind(host, None)
    with pytest.raises(ConfigError, match="1 characters"):
        check_bind(host, "k")
    check_bind(host, "a-longer-key")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_none(host):
    check_bind(host, None)
