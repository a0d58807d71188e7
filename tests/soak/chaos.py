"""Good requests among all that can go wrong: hang-ups, bad JSON, 10 MB bodies, unknown models,
prompts of no length or too much. Every good one must be answered as it was alone, everything else
with its own error, and nothing may be left.

    .venv/bin/python -m tests.soak.chaos --requests 2000
"""

import argparse
import asyncio
import collections
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from mlx_parallm.daemon import Serving
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.system.log import configure_logging
from tests.soak.fuzz_openapi import tiny_server

CONTEXT = 256
AT_ONCE = 24
PROMPTS = [
    f"{word}: {text}"
    for word in ("Sort", "Reverse", "Count")
    for text in ("hgfa", "dcba", "xyz", "q w e", "é")
]
LAST_STEP = 8 << 20  # bytes of arrays that the last step may leave behind until the next one
JSON = {"Content-Type": "application/json"}
WRONG: dict[str, tuple[bytes | dict[str, Any], int]] = {
    "bad JSON": (b'{"model": "default", "prompt": "a", ', 400),
    "not UTF-8": (b'{"model": "default", "prompt": "\xff"}', 400),
    "10 MB": ({"model": "default", "prompt": "a" * 10_000_000}, 400),
    "40 MB": ({"model": "default", "prompt": "a" * 40_000_000}, 413),
    "unknown adapter": ({"model": "nobody", "prompt": "a"}, 404),
    "no prompt": ({"model": "default", "prompt": []}, 400),
    "empty ids": ({"model": "default", "prompt": [[]]}, 400),
    "too long": ({"model": "default", "prompt": [5] * (CONTEXT + 1)}, 400),
    "wrong ids": ({"model": "default", "prompt": [10**9]}, 400),
    "wrong field": ({"model": "default", "prompt": "a", "temperature": -1}, 400),
}
RARE = ("10 MB", "40 MB")  # a second's work for the client, each
HANGUPS = ("hang up", "hang up on a stream", "hang up on a group")


@dataclass
class Report:
    requests: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[str] = field(default_factory=list)


def run_chaos(serving: Serving, requests: int, seed: int = 0) -> Report:
    """A quarter of the requests is good. Raises AssertionError when something is left over."""
    return asyncio.run(_chaos(serving, requests, seed))


async def _chaos(serving: Serving, requests: int, seed: int) -> Report:
    generator, report = random.Random(seed), Report()
    async with httpx.AsyncClient(base_url=serving.url, timeout=120) as client:
        expected = [await _answer(client, prompt, stream=False) for prompt in PROMPTS]
        assert len({token for answer in expected for token in answer}) >= 20, (
            "the answers say too little"
        )
        at_rest = await asyncio.to_thread(check_at_rest, serving)
        kinds = [kind for kind in WRONG if kind not in RARE] * 4 + [*RARE] + [*HANGUPS] * 8
        todo = iter(
            [("good" if number % 4 == 0 else generator.choice(kinds)) for number in range(requests)]
        )

        async def worker() -> None:
            for kind in todo:
                report.requests[kind] += 1
                try:
                    await _one(client, generator, kind, expected, report)
                except httpx.HTTPError as error:
                    report.faults.append(f"{kind}: {error!r}")

        await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
        left = await asyncio.to_thread(check_at_rest, serving)
        if left > at_rest + LAST_STEP:
            report.faults.append(f"active memory: {at_rest} bytes before, {left} after")
    return report


async def _one(
    client: httpx.AsyncClient,
    generator: random.Random,
    kind: str,
    expected: list[list[int]],
    report: Report,
) -> None:
    if kind == "good":
        number = generator.randrange(len(PROMPTS))
        answer = await _answer(client, PROMPTS[number], stream=generator.random() < 0.5)
        if answer != expected[number]:
            report.faults.append(f"{PROMPTS[number]!r}: {answer} instead of {expected[number]}")
    elif kind in WRONG:
        body, status = WRONG[kind]
        sent = {"content": body, "headers": JSON} if isinstance(body, bytes) else {"json": body}
        response = await client.post("/v1/completions", **sent)  # type: ignore[arg-type]
        if response.status_code != status or set(response.json()["error"]) != {
            "message",
            "type",
            "param",
            "code",
        }:
            report.faults.append(f"{kind}: {response.status_code} {response.text[:200]}")
    else:
        await _hang_up(client, generator, kind)


async def _answer(client: httpx.AsyncClient, prompt: str, *, stream: bool) -> list[int]:
    """Greedy token ids."""
    body = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "return_token_ids": True,
    }
    body |= {"ignore_eos": True}
    if not stream:
        response = (await client.post("/v1/completions", json=body)).raise_for_status()
        return list(response.json()["choices"][0]["token_ids"])
    ids: list[int] = []
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as streamed:
        async for line in streamed.aiter_lines():
            if line.startswith("data: {"):
                ids += httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"][0][
                    "token_ids"
                ]
    return ids


async def _hang_up(client: httpx.AsyncClient, generator: random.Random, kind: str) -> None:
    body = {"model": "default", "prompt": "Sort: hgfa", "max_tokens": 200, "ignore_eos": True}
    if kind == "hang up on a group":
        body |= {"n": 12}
    try:
        async with asyncio.timeout(generator.uniform(0.001, 0.2)):
            if kind != "hang up on a stream":
                await client.post("/v1/completions", json=body)
                return
            async with client.stream(
                "POST", "/v1/completions", json=body | {"stream": True}
            ) as streamed:
                async for _ in streamed.aiter_lines():
                    pass
    except TimeoutError:
        pass


def check_at_rest(serving: Serving) -> int:
    """Nothing runs, waits or is left over; returns MLX's active bytes once the idle engine gave
    back what it may."""
    import mlx.core as mx

    deadline = time.monotonic() + 30
    while (stats := serving.client.stats()).running or stats.waiting or _in_flight(serving):
        assert time.monotonic() < deadline, f"still busy: {stats}"
        time.sleep(0.01)
    assert serving.client.wait_idle(30)

    def rest(engine: Any) -> int:
        for _ in range(2):  # the step that lets go of finished rows
            if engine.has_work:
                engine.step()
        engine.check_integrity()
        engine.reset_prefix_cache()
        engine.release_memory()
        return int(mx.get_active_memory())

    assert httpx.get(serving.url + "/health").status_code == 200
    return int(serving.client.call(rest).result(30))


def _in_flight(serving: Serving) -> bool:
    return "requests_in_flight 0.0" not in httpx.get(serving.url + "/metrics").text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    configure_logging(level="warning")
    started = time.perf_counter()
    with (
        mlx_thread(),
        tiny_server(f"server.max_model_len={CONTEXT}", "server.request_timeout_s=0") as serving,
    ):
        report = run_chaos(serving, args.requests, args.seed)
        stats = serving.client.stats()
    print(", ".join(f"{kind} ×{count}" for kind, count in report.requests.most_common()))
    print(
        f"{args.requests} requests in {time.perf_counter() - started:.0f}"
        f" s, {len(report.faults)} faults"
    )
    print(
        f"engine: {stats.requests_finished} finished, {stats.requests_aborted} aborted,"
        f" {stats.requests_failed} failed"
    )
    for fault in report.faults[:20]:
        print("-", fault)
    raise SystemExit(bool(report.faults))


if __name__ == "__main__":
    main()
