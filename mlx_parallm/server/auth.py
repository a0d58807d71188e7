"""Decide who may talk to the server: clients with the API key, or, without a key, this machine
only.

A server without a key on loopback could be driven by any web page through DNS rebinding, so then
only requests whose Host (and Origin, if a browser sends one) is a loopback name are answered.
`check_bind` refuses a public address without a key.

A page of another port of this machine is another origin too. Browsers send some of its requests
without asking first (`no-cors`: a form, an image, a POST without a body), so a request that changes
something must prove that its page was let in: it comes from the page of this very server, from
`server.cors_origins`, or it is JSON, which a browser sends only after a preflight request. The same
holds if a browser adds the key by itself (Basic authentication).

Which paths need no key: those that an `AddedRouter` calls public (`create_app` gathers them), and
`HEALTH`.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_parallm.errors import ConfigError, RefusedError
from mlx_parallm.server.errors import HEALTH, error_response

ANY_ORIGIN = "*"
SHORTEST_KEY = 8
CLIENT = "client"  # in the state of a request
_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:@/\\\[\]]+)(?::\d{0,5})?")
_CROSS_SITE, _SAME_SITE = b"cross-site", b"same-site"  # the latter: another port of the same name
_ORIGIN = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://(?P<authority>[^\s/?#]+)")


def check_bind(host: str, api_key: str | None) -> None:
    """Raises ConfigError when `host` can be reached from other machines and there is no key, or
    a short one."""
    if is_loopback_name(host):
        return
    if api_key is not None and len(api_key) < SHORTEST_KEY:
        raise ConfigError(
            f"server.host = {host!r} can be reached from other machines, and an API key of"
            f" {len(api_key)} characters"
            f" is soon guessed: take {SHORTEST_KEY} or more (`openssl rand -hex 16` makes one)"
        )
    if api_key is None:
        raise ConfigError(
            f"server.host = {host!r} can be reached from other machines, so it needs an API key:"
            " set MLX_PARALLM_API_KEY or server.api_key_file, or bind 127.0.0.1"
        )


def check_origins(origins: Sequence[str], api_key: str | None) -> None:
    """Raises ConfigError: server.cors_origins holds something else than an origin, or "*"
    without a key."""
    for origin in origins:
        if origin == ANY_ORIGIN and api_key is None:
            raise ConfigError(
                'server.cors_origins = ["*"] lets every web page in, so it needs an API key: set'
                " MLX_PARALLM_API_KEY "
                "or server.api_key_file, or name the origins"
            )
        if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"server.cors_origins: {origin!r} is not an origin like"
                ' "https://app.example.org" (no path, no slash)'
            )


def is_loopback_name(host: str) -> bool:
    """True for localhost and loopback addresses, any case, IPv6 with or without brackets,
    trailing dot allowed."""
    name = host.lower().removesuffix(".")
    if name == "localhost":
        return True
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_loopback_authority(authority: str) -> bool:
    """True for a Host header `name[:port]` that names this machine."""
    match = _AUTHORITY.fullmatch(authority)
    return match is not None and is_loopback_name(match["host"])


def is_loopback_origin(origin: str) -> bool:
    """True for an Origin header `scheme://name[:port]` of this machine; "null" is not one."""
    match = _ORIGIN.fullmatch(origin)
    return match is not None and is_loopback_authority(match["authority"])


class PublicPaths:
    """Paths that hold no data: a GET of them needs neither the key nor a loaded model."""

    def __init__(self, paths: Iterable[str] = ()) -> None:
        listed = tuple(paths)
        self._exact = frozenset(listed)
        self._below = tuple(path for path in listed if path.endswith("/"))

    def allows(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return scope["method"] in ("GET", "HEAD") and (
            path in self._exact or path.startswith(self._below)
        )


@dataclass(frozen=True, slots=True)
class UserKeys:
    """Keys of people who may use `paths` and nothing else. A path that ends with a slash means
    everything below it."""

    keys: Sequence[str]
    paths: tuple[str, ...]

    def of(self, path: str) -> list[bytes]:
        """Return the keys that open this path."""
        below = tuple(each for each in self.paths if each.endswith("/"))
        opens = path in self.paths or (below and path.startswith(below))
        return [key.encode() for key in self.keys] if opens else []


class AuthMiddleware:
    """Answers 401 (key missing or wrong) or 403 (foreign Host or Origin, when there is no key).

    Without a key the pages of `origins` are let in beside this machine's, and requests to the names
    in `hosts`. The key comes as a Bearer token, in x-api-key or in api-key; below `basic_prefixes`
    also as the password of Basic authentication. It guards everything but `public`. `users`:
    further keys, each for some paths.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_key: str | None,
        origins: Sequence[str],
        basic_prefixes: Sequence[str],
        public: PublicPaths,
        hosts: Sequence[str] = (),
        users: Sequence[UserKeys] = (),
    ) -> None:
        self._app = app
        self._users = users
        self._origins = frozenset(origins)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._basic_prefixes = basic_prefixes
        self._public = public
        self._key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._key is None:
            reason = _foreign(scope, self._origins, self._hosts)
            if reason is not None:
                await error_response(reason, 403, code="foreign_request")(scope, receive, send)
                return
        elif (
            self._basic_prefixes
            and _is_basic(scope)
            and (reason := _unasked(scope, self._origins)) is not None
        ):
            await error_response(reason, 403, code="foreign_request")(scope, receive, send)
            return
        elif not self._public.allows(scope) and not self._has_key(scope, self._key):
            headers = {"WWW-Authenticate": "Bearer"}
            response = error_response(
                "missing or wrong API key", 401, code="invalid_api_key", headers=headers
            )
            await response(scope, receive, send)
            return
        scope.setdefault("state", {})[CLIENT] = self._client(scope)
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> str | None:
        """Return a stand-in for a request's user key; None: the server's own key, or none."""
        bearer = bearer_key(scope)
        keys = [key.encode() for users in self._users for key in users.keys]
        if bearer is None or sum(hmac.compare_digest(bearer, key) for key in keys) == 0:
            return None
        return hashlib.sha256(bearer).hexdigest()

    def _has_key(self, scope: Scope, key: bytes) -> bool:
        path: str = scope["path"]
        if path == HEALTH:
            return True
        if (bearer := bearer_key(scope)) is not None:
            keys = [key, *(user for users in self._users for user in users.of(path))]
            # all of them, whichever fits: the time says nothing
            return sum(hmac.compare_digest(bearer, each) for each in keys) > 0
        credentials = _header(scope, b"authorization")
        if len(credentials) != 1:
            return False
        scheme, _, value = credentials[0].partition(b" ")
        if scheme.lower() == b"basic" and any(
            f"{path}/".startswith(f"{prefix}/") for prefix in self._basic_prefixes
        ):
            return hmac.compare_digest(_basic_password(value.strip()), key)
        return False


def client_of(request: HTTPConnection) -> str | None:
    """Return whose request it is: a secret name of a user's key; None: of the server's own key, or
    of a server without one. A client cannot read another's data on the server."""
    client: str | None = request.scope.get("state", {}).get(CLIENT)
    return client


def bearer_key(scope: Scope) -> bytes | None:
    """Return the key that a request brings as a Bearer token, in x-api-key or in api-key; None: it
    brings none, or several."""
    credentials = _header(scope, b"authorization")
    if not credentials:  # Anthropic's and Azure's headers
        named = [*_header(scope, b"x-api-key"), *_header(scope, b"api-key")]
        return named[0].strip() if len(named) == 1 else None
    scheme, _, value = credentials[0].partition(b" ")
    return value.strip() if len(credentials) == 1 and scheme.lower() == b"bearer" else None


def _basic_password(value: bytes) -> bytes:
    try:
        return base64.b64decode(value, validate=True).partition(b":")[2]
    except (binascii.Error, ValueError):
        return b""


def _foreign(scope: Scope, allowed: Collection[str], allowed_hosts: Collection[str]) -> str | None:
    hosts = [host.decode("latin-1") for host in _header(scope, b"host")]
    foreign = next((host for host in hosts if not _is_ours(host, allowed_hosts)), None)
    if not hosts or foreign is not None:
        return (
            "without an API key this server answers only requests to a loopback Host (e.g."
            " 127.0.0.1 or localhost)"
        ) + (
            f", not {foreign!r}: add its name to server.allowed_hosts, or set an API key"
            if foreign
            else ""
        )
    origins = [origin.decode("latin-1") for origin in _header(scope, b"origin")]
    foreign = next(
        (each for each in origins if each not in allowed and not _is_own_page(each, hosts)), None
    )
    if foreign is not None:
        return (
            "without an API key this server answers only pages of this machine (a loopback"
            f" Origin), not {foreign!r}: "
            "add it to server.cors_origins, or set an API key"
        )
    if not origins and _CROSS_SITE in _sites(scope):  # an image or a link: no Origin is sent
        return "without an API key this server answers no requests of foreign pages"
    return _unasked(scope, allowed)


def _unasked(scope: Scope, allowed: Collection[str]) -> str | None:
    """Return why a request is refused, if a page of another origin may have sent it without a
    preflight request; else None."""
    origins = [origin.decode("latin-1") for origin in _header(scope, b"origin")]
    hosts = [host.decode("latin-1") for host in _header(scope, b"host")]
    same = all(origin in allowed or _authority(origin) in hosts for origin in origins)
    # only a browser sends Sec-Fetch-Site; with a link a person opens the page
    if not origins:
        sites = _sites(scope)
        same = sites.isdisjoint({_CROSS_SITE, _SAME_SITE})
        same = same or (
            _reads(scope)
            and _CROSS_SITE not in sites
            and b"navigate" in _header(scope, b"sec-fetch-mode")
        )
    elif _reads(scope):  # the page does not see the answer
        return None
    if same or _is_json(scope):
        return None
    return (
        "a page of another origin cannot do this: only the page of this server may, and pages of"
        " server.cors_origins;"
        " pages that this server lets in send Content-Type: application/json"
    )


def refuse_pages(request: Request) -> None:
    """A dependency of routes whose GET changes something. Raises RefusedError: a page of another
    origin has sent it, or a link of it was followed."""
    if not _sites(request.scope).isdisjoint({_CROSS_SITE, _SAME_SITE}):
        raise RefusedError("a page of another origin cannot do this", 403)


def _is_json(scope: Scope) -> bool:
    """True when the body is JSON by its Content-Type. Only the first part of `text/plain;
    a=json` counts: a browser sends such a body without a preflight request."""
    kinds = [value.partition(b";")[0].strip().lower() for value in _header(scope, b"content-type")]
    return bool(kinds) and all(
        kind == b"application/json" or kind.endswith(b"+json") for kind in kinds
    )


def _is_basic(scope: Scope) -> bool:
    return any(value.lower().startswith(b"basic ") for value in _header(scope, b"authorization"))


def _reads(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD", "OPTIONS")


def _sites(scope: Scope) -> set[bytes]:
    return {site.strip().lower() for site in _header(scope, b"sec-fetch-site")}


def _authority(origin: str) -> str | None:
    match = _ORIGIN.fullmatch(origin)
    return match["authority"] if match is not None else None


def _is_own_page(origin: str, hosts: Collection[str]) -> bool:
    """True for a page of this machine, or of the host that the request names. That host has
    already been checked: it is loopback's or an allowed one."""
    return is_loopback_origin(origin) or _authority(origin) in hosts


def _is_ours(authority: str, allowed: Collection[str]) -> bool:
    match = _AUTHORITY.fullmatch(authority)
    return match is not None and (
        is_loopback_name(match["host"]) or match["host"].lower() in allowed
    )


def _header(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]
