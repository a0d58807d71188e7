"""One sequence that quotes a text, and one that does not, with drafts from the prompt and without
(`server.prompt_lookup`).

    .venv/bin/python -m scripts.bench.prompt_lookup --model build/smollm2/float32

Two servers, asked in turns. "quote": the chat holds --words words of docs/design.md, twice, and the
answer at temperature 0 goes on with them (a pretrained model repeats what it has read twice).
"random": answers at temperature 1 to short questions. Printed are tokens a second of the answer
without its prompt (from the first streamed piece to the last), the ratio by round, tokens a step,
and whether both servers said the same.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx

from scripts.server_process import command, server_process

ROOT = Path(__file__).parents[2]
DRAFTS = (0, 16)
QUESTIONS = ("Tell me about the sea.", "Write a letter to a friend.", "Name three animals.")


def prompts(words: int) -> dict[str, list[dict[str, Any]]]:
    text = " ".join((ROOT / "docs" / "design.md").read_text(encoding="utf-8").split()[:words])
    beginning = " ".join(text.split()[:12])
    quote = {"prompt": f"{text}\n\n{text}\n\n{beginning}", "temperature": 0.0}
    return {
        "quote": [quote],
        "random": [
            {"prompt": question, "temperature": 1.0, "seed": seed}
            for seed, question in enumerate(QUESTIONS)
        ],
    }


def answer(client: httpx.Client, body: dict[str, Any], tokens: int) -> tuple[str, float]:
    """Return the text, and its tokens a second after the first piece."""
    text, began, ended = "", 0.0, 0.0
    fields = {"model": "default", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=fields | body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                ended = time.perf_counter()
                began = began or ended
                text += choices[0]["text"]
    return text, (tokens - 1) / (ended - began)


def counted(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    names = ("steps", "draft_tokens", "accepted_draft_tokens")
    return {
        name: float(line.split()[-1])
        for line in lines
        for name in names
        if line.startswith((f"mlx_parallm_{name}_total ", f"mlx_parallm_engine_{name}_total "))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    def words(drafts: int, port: int) -> list[str]:
        return [
            command("mlx_parallm"),
            "serve",
            *("--model-path", args.model),
            *("--set", f"server.port={port}"),
            *("--set", f"server.prompt_lookup={drafts}"),
        ]

    rates: dict[tuple[str, int], list[float]] = defaultdict(list)
    same = defaultdict(bool, dict.fromkeys(prompts(1), True))
    with (
        server_process(lambda port: words(DRAFTS[0], port)) as (plain, _),
        server_process(lambda port: words(DRAFTS[1], port)) as (drafting, _),
    ):
        clients = [httpx.Client(base_url=url, timeout=600) for url in (plain, drafting)]
        for kind, bodies in prompts(args.words).items():
            before = counted(clients[1])
            for turn in range(args.rounds):
                for body in bodies:
                    texts = []
                    for drafts, client in zip(DRAFTS, clients, strict=True):
                        text, rate = answer(client, body, args.tokens)
                        texts.append(text)
                        if turn or args.rounds == 1:  # the first round warms up
                            rates[kind, drafts].append(rate)
                    same[kind] &= texts[0] == texts[1]
            after = counted(clients[1])
            made = {name: after[name] - before[name] for name in after}
            without, with_drafts = (rates[kind, drafts] for drafts in DRAFTS)
            ratios = [b / a for a, b in zip(without, with_drafts, strict=True)]
            print(
                f"{kind}: {statistics.median(without):.1f} tokens/s without,"
                f" {statistics.median(with_drafts):.1f} with drafts, ratio"
                f" {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f});"
                f" the same text: {same[kind]}; {made}",
                flush=True,
            )


if __name__ == "__main__":
    main()
