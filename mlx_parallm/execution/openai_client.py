"""Client of an OpenAI-compatible endpoint, with bounded concurrency and retries. No MLX.

`InferenceModule(backend="openai")`, judges and `mlx_parallm eval` use it.
"""

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from mlx_parallm.errors import EndpointError
from mlx_parallm.system.foreign_http import Bounds, async_client, json_of

RETRIED = (429, 502, 503, 504)
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 60.0


class UnusableAnswerError(EndpointError):
    """An answer came, and is not a JSON object or beyond the bounds."""


class OpenAIEndpoint:
    """One server. It belongs to the asyncio loop that first uses it.

    Args:
        base_url: URL with the version, e.g. "http://127.0.0.1:8000/v1".
        timeout_s: longest time from sending a request to the last byte of its answer.
        retries: further tries after 429, 502, 503, 504 or a lost connection. The pause is the
            server's Retry-After, or doubles from half a second.
        max_in_flight: requests at once; others wait.
        bounds: of an answer.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        timeout_s: float = 600.0,
        retries: int = 3,
        max_in_flight: int = 64,
        bounds: Bounds | None = None,
    ) -> None:
        """Raises EndpointError: `base_url` is not a URL."""
        self.base_url = base_url.rstrip("/")
        if not self.base_url.startswith(("http://", "https://")):
            raise EndpointError(
                f"{base_url!r} is not a URL: expected e.g. http://127.0.0.1:8000/v1"
            )
        self._retries, self._timeout_s = retries, timeout_s
        self._slots = asyncio.Semaphore(max_in_flight)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(
            max_connections=max_in_flight, max_keepalive_connections=max_in_flight
        )
        self._bounds = bounds or Bounds()
        self._http = async_client(
            self._bounds,
            timeout=httpx.Timeout(timeout_s, pool=None),
            headers=headers,
            limits=limits,
        )

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer's JSON, e.g. of `post("/chat/completions", {"model": …, "messages":
        […]})`.

        Raises EndpointError: refused, or still unavailable after the last try.
        """
        return await self._answer("POST", path, body, retries=self._retries)

    async def models(self) -> list[str]:
        """Return the ids of the endpoint's models. One try only: a check that the endpoint is
        there."""
        reply = await self._answer("GET", "/models", None, retries=0)
        listed = reply.get("data")
        return [
            str(entry["id"])
            for entry in (listed if isinstance(listed, list) else ())
            if isinstance(entry, Mapping) and "id" in entry
        ]

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, retries: int
    ) -> dict[str, Any]:
        async with self._slots:
            for attempt in range(retries + 1):
                reply = await self._try(method, path, body, FIRST_PAUSE_S * 2**attempt)
                if isinstance(reply, httpx.Response):
                    return self._object(path, reply)
                problem, pause_s = reply
                if attempt == retries or pause_s > LONGEST_PAUSE_S:
                    break
                await asyncio.sleep(pause_s)
        asks = f"; it asks to wait {pause_s:.0f} s" if pause_s > LONGEST_PAUSE_S else ""
        tries = f" (tried {attempt + 1} times)" if attempt else ""
        raise EndpointError(f"{problem}{tries}{asks}", status=problem.status)

    async def _try(
        self, method: str, path: str, body: Mapping[str, Any] | None, usual_pause_s: float
    ) -> httpx.Response | tuple[EndpointError, float]:
        """Return the answer; or, if another try may help, the problem and the pause before it."""
        where = f"{self.base_url}{path}"
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._http.request(method, self.base_url + path, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise EndpointError(f"{where}: no answer within {self._timeout_s:g} s") from error
        except httpx.TransportError as error:
            problem = EndpointError(
                f"{where} cannot be reached: {str(error) or type(error).__name__}"
            )
            return problem, min(usual_pause_s, LONGEST_PAUSE_S)
        except httpx.RequestError as error:  # it has answered, beyond the bounds
            raise UnusableAnswerError(f"{where}: {error}") from error
        except (httpx.InvalidURL, ValueError) as error:
            raise EndpointError(f"{where}: {error}") from error
        if reply.is_success:
            return reply
        problem = EndpointError(
            f"{where}: HTTP {reply.status_code}: {_message(reply)}", status=reply.status_code
        )
        if reply.status_code not in RETRIED:
            raise problem
        requested = _retry_after_s(reply.headers.get("Retry-After", ""))
        return problem, min(usual_pause_s, LONGEST_PAUSE_S) if requested is None else requested

    def _object(self, path: str, reply: httpx.Response) -> dict[str, Any]:
        try:
            value = json_of(reply, self._bounds)
            reason = ""
        except ValueError as error:
            value, reason = _beginning(reply), f" ({error})"
        if not isinstance(value, dict):
            raise UnusableAnswerError(
                f"{self.base_url}{path} answered {str(value)[:80]!r}: is"
                f" this an OpenAI endpoint?{reason}"
            )
        return value


def _message(reply: httpx.Response) -> str:
    """Return OpenAI's error text, or the beginning of the body."""
    try:
        value = json_of(reply)
    except ValueError:
        value = None
    error = value.get("error", value.get("detail")) if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    words = str(message or _beginning(reply) or reply.reason_phrase)[:3000]
    return " ".join(words.split())[:300]


def _beginning(reply: httpx.Response) -> str:
    return reply.content[:3000].decode(errors="replace")


def _retry_after_s(value: str) -> float | None:
    """Return the seconds of a Retry-After header, a number or an HTTP date; None: it is neither."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
