"""Write train.jsonl and heldout.jsonl: a topic, and two constraints on the form of the answer.

    python examples/instruction_following/make_rows.py OUT [--train 240] [--heldout 60] [--seed 0]

No topic and no pair of HELD_OUT_PAIRS occurs in both files; half of the held-out rows have such a
pair.
"""

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

TRAIN_TOPICS = (
    "rain",
    "bread",
    "music",
    "winter",
    "coffee",
    "gardens",
    "horses",
    "bridges",
    "sleep",
    "paper",
    "trains",
    "honey",
    "clouds",
    "chess",
    "soap",
    "rivers",
    "glass",
    "bicycles",
    "forests",
    "salt",
    "clocks",
    "birds",
    "cheese",
    "stars",
    "libraries",
    "shoes",
    "tea",
    "markets",
    "snow",
    "islands",
)
HELDOUT_TOPICS = [
    "volcanoes",
    "butter",
    "lamps",
    "whales",
    "kites",
    "deserts",
    "pianos",
    "apples",
    "robots",
    "castles",
    "mirrors",
    "ants",
    "maps",
    "boats",
]
PHRASES = ("That is all.", "Have a nice day.", "Ask me again.", "Hope this helps.", "The end.")
WORDS = ("water", "people", "time", "good", "small")
KEYS = (("title", "text"), ("name", "use"), ("question", "answer"))
KINDS = (
    "lower",
    "upper",
    "at_most",
    "at_least",
    "sentences",
    "ends_with",
    "keyword",
    "no_comma",
    "json",
)
IMPOSSIBLE = ({"lower", "upper"}, {"at_most", "at_least"}, {"json", "ends_with"},
              {"json", "sentences"}, {"json", "no_comma"}, {"json", "upper"})  # fmt: skip
HELD_OUT_PAIRS = (
    {"lower", "ends_with"},
    {"upper", "at_most"},
    {"sentences", "no_comma"},
    {"keyword", "at_least"},
)
PAIRS = [pair for pair in itertools.combinations(KINDS, 2) if set(pair) not in IMPOSSIBLE]


def make_constraint(kind: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the sentence of the prompt and the constraint that the reward reads."""
    if kind == "at_most":
        number = rng.choice((12, 15, 18))
        return f"Use at most {number} words.", {"kind": kind, "words": number}
    if kind == "at_least":
        number = rng.choice((20, 24, 28))
        return f"Use at least {number} words.", {"kind": kind, "words": number}
    if kind == "sentences":
        number = rng.choice((1, 2, 3))
        return f"Write exactly {number} sentence{'s' * (number > 1)}.", {
            "kind": kind,
            "number": number,
        }
    if kind == "ends_with":
        phrase = rng.choice(PHRASES)
        return f'End with "{phrase}"', {"kind": kind, "phrase": phrase}
    if kind == "keyword":
        word, times = rng.choice(WORDS), rng.choice((1, 2))
        return f'Use the word "{word}" exactly {("once", "twice")[times - 1]}.', {
            "kind": kind, "word": word, "times": times}  # fmt: skip
    if kind == "json":
        keys = rng.choice(KEYS)
        return f'Answer with only a JSON object with the keys "{keys[0]}" and "{keys[1]}".', {
            "kind": kind, "keys": list(keys)}  # fmt: skip
    sentence = {
        "lower": "Use only lower case letters.",
        "upper": "Use only CAPITAL LETTERS.",
        "no_comma": "Do not use commas.",
    }
    return sentence[kind], {"kind": kind}


def make_rows(number: int, *, heldout: bool, seed: int) -> list[dict[str, Any]]:
    """Return rows with `prompt`, `topic` and `constraints`."""
    rng = random.Random(f"{seed} {heldout}")
    trained_pairs = [pair for pair in PAIRS if set(pair) not in HELD_OUT_PAIRS]
    new = [pair for pair in PAIRS if set(pair) in HELD_OUT_PAIRS]
    rows = []
    for index in range(number):
        topic = rng.choice(HELDOUT_TOPICS if heldout else TRAIN_TOPICS)
        pair = list(rng.choice(new if heldout and index % 2 else trained_pairs))
        rng.shuffle(pair)
        made = [make_constraint(kind, rng) for kind in pair]
        prompt = " ".join([f"Tell me about {topic}.", *(sentence for sentence, _ in made)])
        rows.append(
            {"prompt": prompt, "topic": topic, "constraints": [wanted for _, wanted in made]}
        )
    return rows


def write_rows(directory: Path, train: int = 240, heldout: int = 60, seed: int = 0) -> None:
    """Write both files into a directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", train), ("heldout", heldout)):
        rows = make_rows(number, heldout=name == "heldout", seed=seed)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=240)
    parser.add_argument("--heldout", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_rows(args.out, args.train, args.heldout, args.seed)
