"""The sender of the serving benchmarks, a process of its own: it counts what it sent, what came back and what failed.

Each client is one task that sends its requests one after the other; nothing is retried. stdin: a JSON list of request
bodies per client; stdout: a `Report`. Only responses of 200 with the asked number of tokens count as received.

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
    """`seconds` from the first request to the last answer; `tokens` received; `failures`: the errors, one a request."""

    seconds: float = 0.0
    tokens: int = 0
    sent: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def send(url: str, clients: list[list[dict[str, Any]]]) -> Report:
    """Runs the sender in a process of its own. Raises CalledProcessError."""
    command = [sys.executable, str(Path(__file__)), url]
    result = subprocess.run(command, input=json.dumps(clients), stdout=subprocess.PIPE, text=True, check=True)
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


async def _one_client(http: httpx.AsyncClient, bodies: list[dict[str, Any]], report: Report) -> None:
    for body in bodies:
        report.sent += 1
        try:
            response = await http.post("/v1/completions", json=body)
            response.raise_for_status()
            received = int(response.json()["usage"]["completion_tokens"])
            if received != body["max_tokens"]:
                raise ValueError(f"{received} tokens instead of {body['max_tokens']}")
            report.tokens += received
        except (httpx.HTTPError, ValueError, KeyError) as error:
            report.failures.append(repr(error))


if __name__ == "__main__":
    result = asyncio.run(_send_all(sys.argv[1], json.load(sys.stdin)))
    sys.stdout.write(json.dumps(asdict(result)))
