"""docs/benchmarks/real_model.md from the results: every number of the page comes from the JSON
file beside it."""

import json
from typing import Any

from scripts.bench.real_model import learning

BUSY = 0.5
WANTED = {
    ("1 client", "mlx_lm.server"): 1.0,
    ("8 clients", "mlx_lm.server"): 1.5,
    ("32 clients", "mlx_lm.server"): 3.0,
    ("8 clients", "llama.cpp f32"): 1.0,
    ("32 clients", "llama.cpp f32"): 1.0,
}
SHARES = {"GRPO, bfloat16": 0.6, "GRPO, 4-bit base": 0.4}
"""Wanted peak memory, divided by that of float32."""
HEAD = """# A real model beside its peers

SmolLM2-135M-Instruct (unpacked from its Q4_1 GGUF file) on a CPU. Written by `python -m scripts.bench.real_model`; its
docstring says how to measure a part again, and the numbers are in [real_model.json](real_model.json). A row is **busy**
if the load of the machine was above 0.5 before its section began: other work shared the cores, and only its ratios mean
something.
"""


LEARNING = """GRPO with the defaults of `train --model --data --reward` on rows that are not the held-out ones. Scores are those of
greedy answers; intervals are 95 %, bootstrap over the held-out problems. Seconds are of a shared machine.
Of tool calls "full marks" is what the Berkeley leaderboard counts; the score has parts for a right function and right
parameters. They train and answer with `tool_choice = "required"`. A task's rows were made with `--task`, a variant's with
`--variants`, and those of tool calling with `--set rl_training.total_steps=30`. The 4-bit base rounds weights that came from
4 bits of another kind, so it begins lower. bfloat16 is not here: a step takes ten minutes on this CPU.

```bash check
python -m scripts.bench.real_model_learning --model build/smollm2/float32 --out RESULTS --problems 60
python -m scripts.bench.real_model --learning RESULTS
```

![mean reward of the sampled answers](real_model_learning.png)
"""
ANSWERS = """Chats through the chat template, at most 48 tokens each, ours in float32. There are 100; the
table says how many were compared so far:

```bash check
python -m scripts.bench.real_model build/smollm2/float32 --gguf build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
    --section answers
```

A near tie: both programs give the two tokens log-probabilities less than 0.01 nats apart. For a quantised file
llama.cpp rounds activations to 8 bits, which this engine does not.
"""
TRAINING = """The process (Python, MLX, the server: 240 MiB) and the adapter with its gradients and Adam's moments in
float32 (205 MiB) are the same in the first three cases. Without them bfloat16 takes 0.49 of float32. The 4-bit case computes
in float32, so its keys, values and activations are no smaller: 0.59. A larger model has more weights beside these.
A CPU has no fast product in bfloat16: `dtype = "auto"` is float32 there.
"""


def render(results: dict[str, Any]) -> str:
    """Return the page; a section that was not measured is named as such."""
    parts = [
        HEAD,
        "## Learning\n",
        _learning(results.get("learning", {})),
        "## Greedy answers\n",
        _answers(results.get("answers", {})),
        "## Serving\n",
        _serving(results.get("serving", {})),
        "## Training\n",
    ]
    parts += [_training(results.get("training", {}))]
    return "\n".join(parts)


def _learning(rows: dict[str, Any]) -> str:
    return "\n".join([LEARNING, *learning.table(rows), ""]) if rows else "Not measured yet.\n"


def _answers(rows: dict[str, Any]) -> str:
    if not rows:
        return "Not measured yet.\n"
    lines = [
        ANSWERS,
        "| file of llama.cpp | chats | tokens | equal answers | near ties | others | machine |",
    ]
    lines.append("|" + "---|" * 7)
    for name, row in rows.items():
        near = sum(parts["near_tie"] for parts in row["differ"])
        cells = [name, *(f"{number:,}" for number in (row["chats"], row["tokens"], row["equal"]))]
        cells += [str(near), str(len(row["differ"]) - near)]
        lines.append("| " + " | ".join([*cells, _machine(row)]) + " |")
    for name, row in rows.items():
        if row["differ"]:
            lines += ["", f"Where the answers part, {name} file ({row['by']}):\n"]
            lines += [
                "| chat | token | here | llama.cpp | nats between the two, here | there |",
                "|" + "---|" * 6,
            ]
            lines += [_parting(parts) for parts in row["differ"]]
    return "\n".join([*lines, ""])


def _parting(row: dict[str, Any]) -> str:
    """Return the row of an answer: both tokens, and by how much each side prefers its own one."""
    (ours, other), (here, there) = row["here"], row["there"]
    apart = "not listed" if here is None or there is None else f"{there - here:.4f}"
    texts = [
        f"`{json.dumps(text, ensure_ascii=False)}`".replace("|", "\\|") for text in row["texts"]
    ]
    return (
        "| "
        + " | ".join([str(row["chat"]), str(row["token"]), *texts, f"{ours - other:.4f}", apart])
        + " |"
    )


def _serving(rows: dict[str, Any]) -> str:
    if not rows:
        return "Not measured yet.\n"
    lines = [
        (
            "Greedy chats of at most 100 tokens, streamed; medians over"
            " rounds, a ratio within its round.\n"
        )
    ]
    lines += [
        (
            "| clients | server | tokens/s | first text, s | ours ÷ it | wanted | short | failed"
            " | rounds | machine |"
        ),
        "|" + "---|" * 10,
    ]
    for case, row in rows.items():
        for name, rate in row["rate"].items():
            ratio = "" if name == "ours" else f"**{row['ratio'][name]:.2f}**"
            target = _target(row["ratio"][name], WANTED.get((case, name)))
            cells = [case, name, f"{rate:.1f}", f"{row['first_token_s'][name]:.2f}", ratio, target]
            counts = [str(row.get(key, {}).get(name, 0)) for key in ("short", "failed")]
            lines.append(
                "| " + " | ".join([*cells, *counts, str(row["rounds"]), _machine(row)]) + " |"
            )
    notes = (
        "`short`: answers that ended before 100 tokens. `failed`: requests without an answer,"
        " which a rate leaves out."
    )
    return "\n".join([*lines, "", notes, ""])


def _target(ratio: float, wanted: float | None) -> str:
    return "" if wanted is None else f"≥ {wanted:g} {'met' if ratio >= wanted else 'MISSED'}"


def _training(rows: dict[str, Any]) -> str:
    if not rows:
        return "Not measured yet.\n"
    lines = [
        (
            "LoRA; 16 answers of at most 48 tokens a step, 16 rows (SFT), 8 pairs (DPO). Each"
            " cell is predicted by the dry"
        )
    ]
    lines += ["run / measured = ratio. Wanted: seconds within 25 %, memory within 15 %.\n"]
    lines += [
        "| case | seconds a step | peak memory, MiB | memory ÷ float32 | counted steps | machine |",
        "|" + "---|" * 6,
    ]
    for case, row in rows.items():
        seconds = _prediction(row, "seconds", 1, 0.25)
        memory = _prediction(row, "memory", 2**20, 0.15)
        lines.append(
            f"| {case} | {seconds} | {memory} | {_share(rows, case)} | {row['steps']} |"
            f" {_machine(row)} |"
        )
    return "\n".join([*lines, "", TRAINING])


def _prediction(row: dict[str, Any], field: str, scale: float, allowed: float) -> str:
    before, after = row["predicted"][field] / scale, row["measured"][field] / scale
    ratio = before / after
    return (
        f"{before:,.1f} / {after:,.1f} = **{ratio:.2f}**"
        f" {'met' if abs(ratio - 1) <= allowed else 'MISSED'}"
    )


def _share(rows: dict[str, Any], case: str) -> str:
    if case not in SHARES or "GRPO, float32" not in rows:
        return ""
    share = rows[case]["measured"]["memory"] / rows["GRPO, float32"]["measured"]["memory"]
    return f"{share:.2f}, ≤ {SHARES[case]:g} {'met' if share <= SHARES[case] else 'MISSED'}"


def _machine(row: dict[str, Any]) -> str:
    state = "busy" if row["load"] > BUSY else "idle"
    return f"{row['cores']} cores, {state} (load {row['load']:g}), {row['date']}"
