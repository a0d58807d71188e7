"""Writes rows.jsonl beside itself: 200 problems of three numbers. Any file of this form will do."""

import json
import random
from pathlib import Path

rng = random.Random(0)
with Path(__file__).with_name("rows.jsonl").open("w") as file:
    for _ in range(200):
        a, b, c = rng.randint(12, 99), rng.randint(3, 12), rng.randint(100, 999)
        row = {"prompt": f"What is {a} * {b} + {c}? End with the number.", "answer": str(a * b + c)}
        file.write(json.dumps(row) + "\n")
