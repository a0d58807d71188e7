"""Seconds a step and peak memory of training the real model: what the dry run predicts, and what
the run then needs.

Both are whole processes, as a user starts them (dry_run.py explains the numbers). The dtype is
stated in every case, since "auto" is float32 on a CPU.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.bench import dry_run
from scripts.server_process import command

QUANTIZED = "rl_training.lora.quantize_base=true"
CASES = {
    "GRPO, float32": ("grpo", "model.dtype=float32"),
    "GRPO, bfloat16": ("grpo", "model.dtype=bfloat16"),
    "GRPO, 4-bit base": ("grpo", f"model.dtype=float32 model.quantized_cache=off {QUANTIZED}"),
    "SFT, float32": ("sft", "model.dtype=float32"),
    "DPO, float32": ("dpo", "model.dtype=float32"),
}
SCORE = "def early_letters(completions, **columns):\n"
SCORE += (
    "    return [sum(c in 'abcdefghijklm' for c in text) / max(1, len(text)) for text in"
    " completions]\n"
)
ANSWER = "The road was long, and the travellers stopped at an inn by the river to rest. " * 2


def measure(model: Path, wanted: str, steps: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a row for each case whose name contains `wanted`."""
    load = os.getloadavg()[0]
    for name, (kind, settings) in CASES.items():
        if wanted not in name:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch)
            words = [
                *settings.split(),
                f"rl_training.total_steps={steps}",
                "evaluation.problems=0",
                "server.port=0",
            ]
            words += [
                f"rl_training.checkpoint_dir={directory / 'runs'}",
                "rl_training.run_name=run",
            ]
            start = [command("mlx_parallm_train"), "--config", str(_config(directory, model, kind))]
            start += [part for word in words for part in ("--set", word)]
            predicted = dry_run.predicted_numbers(dry_run.dry_run(start))
            real = dry_run.run(start, directory / "runs/run")
        yield (
            name,
            {
                "load": round(load, 2),
                "steps": steps - 1,
                "predicted": asdict(predicted),
                "measured": asdict(real),
            },
        )


def _config(directory: Path, model: Path, kind: str) -> Path:
    """Write rows and a configuration: 16 answers of at most 48 tokens a step, or 16 rows, or 8
    pairs."""
    question = "Write about {0} travellers and their road to town {0}."
    rows: list[dict[str, str]] = [{"prompt": question.format(number)} for number in range(100)]
    if kind == "sft":
        rows = [row | {"completion": ANSWER} for row in rows]
    if kind == "dpo":
        rows = [row | {"chosen": ANSWER, "rejected": ANSWER[::-1][:80]} for row in rows]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "score.py").write_text(SCORE)
    text = f'[model]\nbase_path = "{model}"\n[rl_training]\nalgorithm = "{kind}"\n'
    if kind == "grpo":
        text += (
            "batch_size = 16\n[rl_training.atropos]\nrollout_batch_size"
            " = 16\nmax_token_length = 192\n"
        )
        text += '[[environments]]\nkind = "dataset"\ndata = "rows.jsonl"\nmax_tokens = 48\n'
        text += 'rewards = ["python:score.py:early_letters"]\n'
    else:
        text += f"batch_size = {8 if kind == 'dpo' else 16}\n"
        text += '[data]\npath = "rows.jsonl"\neval_fraction = 0\nmax_length = 512\n'
    (directory / "run.toml").write_text(text)
    return directory / "run.toml"
