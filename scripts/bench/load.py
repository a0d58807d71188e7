"""The sender of the serving benchmarks, its own process: it counts what it sent, what came
back and what failed.

Each client is one task that sends its requests one after the other; nothing is retried. stdin: a
JSON list of request bodies per client; stdout: a `Report`. A body with `prompt` is a completion:
only responses of 200 with the asked number of tokens count as received. A body with `messages` is a
chat that is streamed: its tokens are those of the stream's `usage`, and an answer that ended before
`max_tokens` is counted as short.

    python scripts/bench/load.py http://127.0.0.1:8000 < bodies.json
"""

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx


@dataclass
class Report:
    """`seconds` from the first request to the last answer; `tokens` received; `failures`: the
    errors, one a request.

    Streamed chats only: `first_token_s`, seconds from a request to its first text; `short`, answers
    that ended early.
    """

    seconds: float = 0.0
    tokens: int = 0
    sent: int = 0
    failures: list[str] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    short: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def send(url: str, clients: list[list[dict[str, Any]]]) -> Report:
    """Run the sender in its own process. Raises CalledProcessError."""
    command = [sys.executable, str(Path(__file__)), url]
    result = subprocess.run(
        command, input=json.dumps(clients), stdout=subprocess.PIPE, text=True, check=True
    )
    return Report(**json.loads(result.stdout))


async def _send_all(url: str, clients: list[list[dict[str, Any]]]) -> Report:
    report = Report()
    limits = httpx.Limits(max_connections=len(clients))
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
        (await http.get("/health")).raise_for_status()
        started = time.perf_counter()
        await asyncio.gather(*[_one_client(http, bodies, report) for bodies in clients])
        report.seconds = time.perf_counter() - started
    return report


async def _one_client(
    http: httpx.AsyncClient, bodies: list[dict[str, Any]], report: Report
) -> None:
    for body in bodies:
        report.sent += 1
        try:
            if "messages" in body:
                await _stream_chat(http, body, report)
                continue
            response = await http.post("/v1/completions", json=body)
            response.raise_for_status()
            received = int(response.json()["usage"]["completion_tokens"])
            if received != body["max_tokens"]:
                raise ValueError(f"{received} tokens instead of {body['max_tokens']}")
            report.tokens += received
        except (httpx.HTTPError, ValueError, KeyError) as error:
            report.failures.append(repr(error))


async def _stream_chat(http: httpx.AsyncClient, body: dict[str, Any], report: Report) -> None:
    """Add one streamed chat to the report. Raises HTTPError, ValueError: no text or no `usage`
    in the stream."""
    started = time.perf_counter()
    first, received = None, None
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/chat/completions", json=streamed) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if first is None and any(
                choice.get("delta", {}).get("content") for choice in chunk.get("choices", [])
            ):
                first = time.perf_counter() - started
            if chunk.get("usage"):
                received = int(chunk["usage"]["completion_tokens"])
    if first is None or received is None:
        raise ValueError(f"the stream has first text {first}, usage {received}")
    report.first_token_s.append(first)
    report.tokens += received
    report.short += received < body["max_tokens"]


if __name__ == "__main__":
    result = asyncio.run(_send_all(sys.argv[1], json.load(sys.stdin)))
    sys.stdout.write(json.dumps(asdict(result)))
