"""Writes pairs.jsonl and conversations.jsonl beside itself: 200 sums each. Any files of this
form will do."""

import json
import random
from pathlib import Path

rng = random.Random(0)
here = Path(__file__)
with (
    here.with_name("pairs.jsonl").open("w") as pairs,
    here.with_name("conversations.jsonl").open("w") as conversations,
):
    for _ in range(200):
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        question, answer = f"What is {a} + {b}?", f"{a} + {b} = {a + b}"
        evasive = (
            f"To add {a} and {b}, one can first think about what addition means. There are several"
            " ways to do it."
        )
        pairs.write(json.dumps({"prompt": question, "chosen": answer, "rejected": evasive}) + "\n")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        conversations.write(json.dumps({"messages": turns}) + "\n")
