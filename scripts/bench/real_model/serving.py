"""Tokens a second and seconds to the first text of streamed chats: this server, mlx_lm.server and
llama.cpp in turn.

All servers stay up, one works at a time. In every round each contender gets the same chats; round 0
warms up and is not counted. Decoding is greedy, so lengths are alike; a token counts as the
server's own `usage` counts it.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlx_parallm.deploy.export.gguf_file import write_model
from mlx_parallm.deploy.export.model import ModelSource, open_model
from mlx_parallm.deploy.export.vocabulary import read_vocabulary
from scripts.bench import peers
from scripts.bench.load import Report, send
from scripts.server_process import command, server_process

CLIENTS = (1, 8, 32)
TOKENS = 100
CONTEXT = 256
TOPICS = (
    "a lighthouse",
    "two rivers",
    "an old clock",
    "the first snow",
    "a lost map",
    "a quiet market",
    "the night train",
)


def measure(
    model: Path, gguf: Path | None, clients: Sequence[int], rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each number of clients."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        serve = [
            command("mlx_parallm"),
            "serve",
            "--model-path",
            str(model),
            "--set",
            f"server.batch_size={max(CLIENTS)}",
        ]
        urls = {
            "ours": stack.enter_context(server_process(lambda port: [*serve, "--port", str(port)]))[
                0
            ],
            "mlx_lm.server": stack.enter_context(peers.mlx_lm_server(model, "mkl")),
            "llama.cpp f32": stack.enter_context(
                peers.llama_server(float32_file(model, Path(scratch)), max(CLIENTS), CONTEXT)
            ),
        }
        if gguf is not None:
            urls[f"llama.cpp {gguf.stem.rpartition('.')[2]}"] = stack.enter_context(
                peers.llama_server(gguf.resolve(), max(CLIENTS), CONTEXT)
            )
        for number in clients:
            reports: dict[str, list[Report]] = {name: [] for name in urls}
            for turn in range(rounds + 1):
                for name, url in urls.items():
                    report = send(
                        url,
                        _chats(number, turn, str(model) if name == "mlx_lm.server" else "default"),
                    )
                    if turn:
                        reports[name].append(report)
            yield f"{number} client{'s'[: number - 1]}", {"load": round(load, 2)} | _row(reports)


def _chats(clients: int, turn: int, model: str) -> list[list[dict[str, Any]]]:
    """Return one chat a client, different in every round; the same for every contender."""
    return [
        [
            {
                "model": model,
                "messages": [{"role": "user", "content": _question(turn * max(CLIENTS) + client)}],
                "max_tokens": TOKENS,
                "temperature": 0.0,
            }
        ]
        for client in range(clients)
    ]


def _question(number: int) -> str:
    return (
        f"Write a long story about {TOPICS[number % len(TOPICS)]} and {number + 2} travellers."
        " Describe every place."
    )


def _row(reports: dict[str, list[Report]]) -> dict[str, Any]:
    """Return medians over rounds; a ratio is taken within its round.

    A peer's failed requests are counted, and its rate is that of the others. Raises SystemExit: a
    request to this server failed.
    """
    row: dict[str, Any] = {"rate": {}, "first_token_s": {}, "ratio": {}, "short": {}, "failed": {}}
    row["rounds"] = len(reports["ours"])
    for name, rounds in reports.items():
        failures = [failure for report in rounds for failure in report.failures]
        row["failed"][name] = len(failures)
        if failures and name == "ours":
            raise SystemExit(f"{name}: {len(failures)} requests failed: {failures[0]}")
        row["rate"][name] = round(statistics.median(report.rate for report in rounds), 1)
        first = [seconds for report in rounds for seconds in report.first_token_s]
        row["first_token_s"][name] = round(statistics.median(first), 3)
        row["short"][name] = sum(report.short for report in rounds)
        ratios = [
            ours.rate / report.rate for ours, report in zip(reports["ours"], rounds, strict=True)
        ]
        row["ratio"][name] = round(statistics.median(ratios), 2)
    return row


def float32_file(model: Path, scratch: Path) -> Path:
    """Write the model as a GGUF file in float32."""
    opened = open_model(ModelSource(str(model)))
    vocabulary = read_vocabulary(opened.tokenizer, opened.config, opened.path)
    write_model(scratch / "model.gguf", opened, vocabulary, "f32")
    return scratch / "model.gguf"
