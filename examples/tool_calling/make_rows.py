"""Write train.jsonl and heldout.jsonl: questions of the Berkeley Function Calling Leaderboard, each
with its tools.

    python examples/tool_calling/make_rows.py OUT [--categories simple_python …] [--train 200]
    [--heldout 60] [--seed 0]

The questions are those of the package bfcl-eval (Apache-2.0,
https://github.com/ShishirPatil/gorilla), which pip downloads into build/bfcl, 2 MB. No function
that a held-out row offers is offered in a training row.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WHEEL = "bfcl_eval-2026.3.23-py3-none-any.whl"
SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
CACHE = Path(__file__).parents[2] / "build" / "bfcl"
CATEGORIES = ("simple_python", "multiple", "parallel", "irrelevance")
DATA = "bfcl_eval/data"
ASK = "Answer with a tool call."
EXAMPLE = (
    {"role": "user", "content": f"Remind me at 7 to water the plants. {ASK}"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {
                    "name": "set_reminder",
                    "arguments": {"hour": 7, "text": "water the plants"},
                },
            }
        ],
    },
)
"""One turn that shows how a call is written: a small model makes none without it."""
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""JSON schema's names of BFCL's types, as BFCL itself translates them for models that take
tools."""


def get_wheel(cache: Path = CACHE) -> Path:
    """Return the wheel, downloaded once. Raises SystemExit: pip fails, or it is another file."""
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            name, version, *_ = WHEEL.split("-")
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--disable-pip-version-check",
                "--quiet",
                "--no-deps",
            ]
            if code := subprocess.call([*command, "--dest", directory, f"{name}=={version}"]):
                sys.exit(f"pip download {name}=={version}: exit {code}")
            downloaded = Path(directory) / WHEEL
            if hashlib.sha256(downloaded.read_bytes()).hexdigest() != SHA256:
                sys.exit(f"{WHEEL}: its SHA-256 is not {SHA256}")
            downloaded.replace(wheel)
    return wheel


def read_rows(wheel: Path, categories: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows with `prompt`, `tools`, `calls` and `id`."""
    rows = []
    with zipfile.ZipFile(wheel) as files:
        for category in categories:
            answers = {}
            if category != "irrelevance":  # where no call is right
                for entry in _lines(files, f"{DATA}/possible_answer/BFCL_v4_{category}.json"):
                    answers[entry["id"]] = entry["ground_truth"]
            for entry in _lines(files, f"{DATA}/BFCL_v4_{category}.json"):
                [[message]] = entry["question"]
                tools = [
                    {**tool, "parameters": to_json_schema(tool["parameters"])}
                    for tool in entry[("function")]
                ]
                rows.append(
                    {
                        "prompt": [*EXAMPLE, message | {"content": f"{message['content']} {ASK}"}],
                        "tools": [{"type": "function", "function": tool} for tool in tools],
                        "calls": answers.get(entry["id"], []),
                        "id": entry["id"],
                    }
                )
    return rows


def _lines(files: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files.read(name).decode().splitlines()]


def to_json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of BFCL with JSON schema's names of types."""
    changed = dict(schema)
    if "type" in schema:
        changed["type"] = TYPES.get(schema["type"], schema["type"])
    if "properties" in schema:
        changed["properties"] = {
            name: to_json_schema(each) for name, each in schema["properties"].items()
        }
    if "items" in schema:
        changed["items"] = to_json_schema(schema["items"])
    return changed


def offered(row: Mapping[str, Any]) -> set[str]:
    """Return the names of the functions that a row offers."""
    return {tool["function"]["name"] for tool in row["tools"]}


def split(
    rows: Sequence[Mapping[str, Any]], train: int, heldout: int, seed: int
) -> tuple[list[Any], list[Any]]:
    """Return training and held-out rows that have no function in common, at most so many of
    each."""
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    held = shuffled[:heldout]
    taken = set().union(*map(offered, held))
    return [row for row in shuffled[heldout:] if not offered(row) & taken][:train], held


def write_rows(
    directory: Path,
    train: int = 200,
    heldout: int = 60,
    seed: int = 0,
    categories: Sequence[str] = ("simple_python",),
) -> None:
    """Write both files into a directory, which is made."""
    rows = split(read_rows(get_wheel(), categories), train, heldout, seed)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "heldout"), rows, strict=True):
        text = "".join(
            json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in part
        )
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=["simple_python"])
    parser.add_argument("--train", type=int, default=200)
    parser.add_argument("--heldout", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_rows(args.out, args.train, args.heldout, args.seed, args.categories)
