"""Record what TRL's GOLD makes of a few logits and token offsets, for tests/losses/test_gold.py.

    PYTHON_WITH_TRL scripts/parity/gold.py tests/data/gold.json

Needs trl 1.16 and torch, which nothing of this package depends on.
"""

import importlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROWS, OURS, THEIRS = 3, 6, 8
VOCABULARIES = ["a", "b", "c", "d", "e", "f"], ["x", "a", "y", "c", "b", "z", "w", "d"]
OFFSETS = [
    ([3, 5, 6], [5, 6]),
    ([1, 2, 3], [1, 2, 3]),
    ([2, 4, 7], [3, 7]),
    ([3], [1, 2, 3]),
    ([1, 4, 6, 9], [2, 4, 8]),
]
"""Ends of the two sides' tokens, in bytes."""


def logits(rows: int, width: int, twist: float) -> list[list[float]]:
    return [[2 * math.sin(1.3 * r + twist * v + 0.4) for v in range(width)] for r in range(rows)]


def main() -> None:
    torch: Any = importlib.import_module("torch")
    gold: Any = importlib.import_module("trl.experimental.gold.gold_trainer")
    settings = {
        "uld_crossentropy_weight": 0.0,
        "uld_distillation_weight": 1.0,
        "uld_student_temperature": 1.0,
        "uld_teacher_temperature": 1.0,
        "uld_skip_student_eos": False,
        "uld_skip_teacher_eos": False,
        "use_extended_uld": False,
        "uld_token_merge_strategy": "bayesian",
    }
    sides = [
        SimpleNamespace(get_vocab=lambda words=words: {word: n for n, word in enumerate(words)})
        for words in VOCABULARIES
    ]
    teacher = torch.tensor(logits(ROWS, THEIRS, 1.7), dtype=torch.float64)
    found: dict[str, Any] = {"losses": {}}
    for way, beta in (("uld", 0.5), ("hybrid", 0.5), ("hybrid", 0.1), ("hybrid", 1.0)):
        config = SimpleNamespace(**settings, uld_use_hybrid_loss=way == "hybrid", beta=beta)
        loss = gold.ULDLoss(config, *sides)
        student = torch.tensor(logits(ROWS, OURS, 2.1), dtype=torch.float64, requires_grad=True)
        # behind a prompt of one token, whose logits predict the first answer token
        labels = torch.tensor([[-100, *range(ROWS)]])
        pad = torch.zeros((1, 1, OURS), dtype=torch.float64)
        theirs = torch.zeros((1, 1, THEIRS), dtype=torch.float64)
        value = loss(
            torch.cat([student[None], pad], dim=1),
            torch.cat([teacher[None], theirs], dim=1),
            labels,
            labels,
            labels.clamp_min(0),
            labels.clamp_min(0),
        )
        value.backward()
        found["losses"][f"{way} {beta}"] = [value.item(), student.grad.tolist()]
    found["groups"] = [
        gold.ULDLoss._align_by_byte_offsets(
            [(0, end) for end in ours], [(0, end) for end in theirs]
        )
        for ours, theirs in OFFSETS
    ]
    config = SimpleNamespace(**settings, uld_use_hybrid_loss=False, beta=0.5)
    probabilities = torch.softmax(teacher, dim=-1)
    merged = gold.ULDLoss(config)._merge_probabilities_with_alignment_groups(
        probabilities, [[0, 1], [2]], [4, 1, 0]
    )
    found["merged"] = [math.log(merged[0, 1].item()), math.log(merged[1, 0].item())]
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
