"""Compare the token ids of 2,000 texts with a real llama.cpp on the same GGUF file.

    nice -n 5 .venv/bin/python -m scripts.bench.real_model.ids FOLDER FILE.gguf

FOLDER: what `mlx_parallm convert FILE.gguf FOLDER` made. The texts are paragraphs of this
repository, the pieces of the export's verification, random characters of nine ranges (Chinese,
Arabic, emoji, digits, control characters, …), and mixtures of them, always the same ones for one
state of the repository.
"""

import argparse
import random
from itertools import zip_longest
from pathlib import Path

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.deploy.export import llama_server
from mlx_parallm.deploy.export.texts import PIECES, SEPARATORS
from mlx_parallm.models.loading import load_tokenizer

COUNT = 2000
SHOWN = 8
RANGES = (
    *((0x4E00, 0x9FFF), (0x600, 0x6FF), (0x1F300, 0x1FAFF), (0x20, 0x7E), (0x30, 0x39)),
    *((0xA0, 0x17F), (0x900, 0x97F), (0x1, 0x1F), (0x2000, 0x206F)),
)
SPACES = (" ", "\t", "\n\n", "   ", "\r\n")


def texts(draw: random.Random) -> list[str]:
    files = [*sorted(Path("docs").glob("*.md")), *sorted(Path("mlx_parallm/models").rglob("*.py"))]
    paragraphs = [
        part for file in files for part in file.read_text(encoding="utf-8").split("\n\n") if part
    ]

    def noise() -> str:
        low, high = draw.choice(RANGES)
        return "".join(chr(draw.randint(low, high)) for _ in range(draw.randint(1, 25)))

    makers = (
        lambda: draw.choice(paragraphs)[:600],
        lambda: draw.choice(SEPARATORS).join(
            draw.choice(PIECES) for _ in range(draw.randint(1, 3))
        ),
        lambda: draw.choice(SEPARATORS).join(noise() for _ in range(draw.randint(1, 4))),
        lambda: draw.choice(paragraphs)[:120] + draw.choice(SPACES) + noise() + draw.choice(PIECES),
    )
    return [makers[number % len(makers)]() for number in range(COUNT)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("gguf", type=Path)
    arguments = parser.parse_args()
    compared = texts(random.Random(37))
    tokenizer = load_tokenizer(arguments.folder, ModelConfig(base_path=str(arguments.folder)))
    with llama_server.running(arguments.gguf) as server:
        pairs = [(text, server.tokenize(text), tokenizer.encode(text)) for text in compared]
    differ = [pair for pair in pairs if pair[1] != pair[2]]
    print(
        f"{COUNT - len(differ)} of {COUNT} texts have equal ids"
        f" ({len(set(compared))} different texts)"
    )
    for text, theirs, ours in differ[:SHOWN]:
        first = next(place for place, (a, b) in enumerate(zip_longest(theirs, ours)) if a != b)
        print(
            f"{text[:60]!r} at token {first}: llama.cpp {theirs[first : first + 4]}, here"
            f" {ours[first : first + 4]}"
        )


if __name__ == "__main__":
    main()
