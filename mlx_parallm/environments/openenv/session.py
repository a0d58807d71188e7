"""One session of an OpenEnv server: a WebSocket, and the environment that the server made for it.

The protocol is that of openenv-core 0.3 (`openenv.core.env_client`): JSON texts {"type", "data"},
one answer to each. Its own client is not used: importing it takes 2.8 s and 180 MB, because its
package brings the web interface of the servers along (gradio, fastmcp, pandas), and it tells an
error of the server from a lost connection by the words alone.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from mlx_parallm.errors import EndpointError, RolloutRejectedError
from mlx_parallm.system.foreign_http import connect_socket
from mlx_parallm.system.foreign_json import read_json
from mlx_parallm.system.packages import require
from mlx_parallm.types import MAX_REWARD

CLOSE_TIMEOUT_S = 1.0
LARGEST_MESSAGE = 16 << 20  # bytes


class NoCapacityError(EndpointError):
    """The server has as many sessions as it allows."""


class ActionRefusedError(RolloutRejectedError):
    """The server does not understand an action; the session continues."""


@dataclass(frozen=True)
class ServerStep:
    """The answer of an environment. `reward`: None if it gave none."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class ServerSession:
    """Made by `connect`. One message at a time; any error but ActionRefusedError ends it."""

    def __init__(self, url: str, socket: Any, timeout_s: float) -> None:
        self.url, self._socket, self._timeout_s = url, socket, timeout_s
        self._one_at_a_time = asyncio.Lock()

    @classmethod
    async def connect(cls, url: str, *, connect_timeout_s: float, timeout_s: float) -> Self:
        """Open a session at a server's http(s) URL. Raises EndpointError.

        Args:
            timeout_s: longest wait for an answer.
        """
        from websockets.exceptions import WebSocketException

        target = f"ws{url.removeprefix('http')}/ws"
        try:
            socket = await connect_socket(
                target,
                open_timeout_s=connect_timeout_s,
                close_timeout=CLOSE_TIMEOUT_S,
                ping_interval=None,  # an environment that computes may not answer for long
                max_size=LARGEST_MESSAGE,
                max_queue=1,  # one answer to each message
            )
        except (OSError, WebSocketException) as error:  # a TimeoutError is an OSError
            raise EndpointError(f"{target}: no connection: {_words(error)}") from error
        return cls(url, socket, timeout_s)

    async def reset(self, values: Mapping[str, Any]) -> ServerStep:
        """Begin an episode. Raises NoCapacityError, EndpointError, RolloutRejectedError: the
        environment has failed."""
        return _step_result(await self._ask("reset", dict(values)), self.url)

    async def step(self, action: Mapping[str, Any]) -> ServerStep:
        """Take an action. Raises ActionRefusedError, EndpointError, RolloutRejectedError."""
        return _step_result(await self._ask("step", dict(action)), self.url)

    async def state(self) -> Mapping[str, Any]:
        """Return the state that the server tells of the episode. Raises as `step`."""
        return dict(await self._ask("state", None))

    async def close(self) -> None:
        """End the session; the server closes its environment."""
        from websockets.exceptions import WebSocketException

        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._socket.send(json.dumps({"type": "close"}))
                await self._socket.close()
        except (OSError, WebSocketException):
            self._socket.transport.abort()

    async def _ask(self, kind: str, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        from websockets.exceptions import WebSocketException

        message = {"type": kind} if data is None else {"type": kind, "data": data}
        async with self._one_at_a_time:
            try:
                async with asyncio.timeout(self._timeout_s):
                    text = await self._exchange(json.dumps(message))
            except TimeoutError as error:
                raise EndpointError(
                    f"{self.url}: no answer to {kind} within {self._timeout_s:g} s"
                ) from error
            except (OSError, WebSocketException) as error:
                raise EndpointError(
                    f"{self.url}: the connection was lost in {kind}: {_words(error)}"
                ) from error
        return self._read(kind, text)

    async def _exchange(self, message: str) -> str | bytes:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._socket.send(message)
        except ConnectionClosed:
            # the server may have said why before it closed
            answer: str | bytes = await self._socket.recv()
            return answer
        answer = await self._socket.recv()
        return answer

    def _read(self, kind: str, text: str | bytes) -> Mapping[str, Any]:
        try:
            answer = read_json(text)
            data = answer["data"]
            if not isinstance(data, Mapping):
                raise TypeError("data is not an object")
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(
                f"{self.url}: the answer to {kind} is not OpenEnv's: {text[:80]!s} ({error})"
            ) from error
        if answer.get("type") != "error":
            return data
        code, why = data.get("code"), str(data.get("message", "no reason"))
        if code == "CAPACITY_REACHED":
            raise NoCapacityError(f"{self.url}: {why}", status=503)
        if code == "VALIDATION_ERROR" and kind == "step":
            raise ActionRefusedError(_of_validation(data) or why)
        raise RolloutRejectedError(f"{self.url}: {kind}: {why} ({code})")


async def list_tools(url: str, *, timeout_s: float) -> list[dict[str, Any]]:
    """Return name, description and parameters of the tools of an MCP environment. Raises
    EndpointError, RolloutRejectedError."""
    session = await ServerSession.connect(url, connect_timeout_s=timeout_s, timeout_s=timeout_s)
    try:
        listed = (await session.step({"type": "list_tools"})).observation.get("tools", ())
    finally:
        await session.close()
    try:
        return [
            {
                "name": str(tool["name"]),
                "description": str(tool.get("description") or ""),
                "parameters": dict(tool.get("input_schema") or tool.get("inputSchema") or {}),
            }
            for tool in listed
        ]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EndpointError(f"{url}: its tools are not OpenEnv's: {str(listed)[:80]}") from error


def require_client() -> None:
    """Raises ConfigError: the WebSocket library is not installed."""
    require('environments: kind = "openenv"', "websockets")


def _step_result(data: Mapping[str, Any], url: str) -> ServerStep:
    observation, reward = data.get("observation"), data.get("reward")
    if not isinstance(observation, Mapping):
        raise EndpointError(f"{url}: the answer has no observation: {str(data)[:80]}")
    if reward is not None and not isinstance(reward, int | float):
        raise EndpointError(f"{url}: the reward is {str(reward)[:80]!r}, not a number")
    if reward is not None and not abs(reward) <= MAX_REWARD:
        raise RolloutRejectedError(
            f"{url}: the reward is {str(reward)[:20]}, not a number of at most ±{MAX_REWARD:g}"
        )
    number = None if reward is None else float(reward)
    return ServerStep(observation, number, bool(data.get("done", False)))


def _of_validation(data: Mapping[str, Any]) -> str:
    """Return an action's faults, in pydantic's words."""
    listed = data.get("errors")
    reasons = []
    for error in listed if isinstance(listed, list) else ():
        if isinstance(error, Mapping):
            place = error.get("loc")
            where = ".".join(map(str, place)) if isinstance(place, list) else place or ""
            reasons.append(f"{where}: {error.get('msg')}")
    return "; ".join(reasons)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
