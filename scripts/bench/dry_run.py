"""Compare what `mlx_parallm_train --dry-run` predicts with the run that follows: peak memory,
seconds a step, disk.

    python -m scripts.bench.dry_run                the shipped model; 29 M random parameters with a data set
    python -m scripts.bench.dry_run --case bench   (quickstart, bench, memory) one of them
    python -m scripts.bench.dry_run --case memory  the preflight's formula against short runs of many kinds

The formula's figures are those that each run prints at its end: what the preflight says for the
longest sequences that the run saw. For the 14 B shape see scripts/bench/step_14b.py. Memory is
the peak resident set of the process on a CPU (both sides: the dry run's word, the run's rusage),
MLX's own peak on a GPU. A run's seconds are waiting + training + publishing of its steps but the
first, from metrics.jsonl. Disk is the size of the run directory, hard links counted once. Ratios
are predicted / measured.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlx_parallm.rl_training.plan.preflight import PROCESS_BYTES
from scripts.bench.models import save_bench_model

BIN = Path(sys.executable).parent
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SCORE = (
    "def early_letters(completions, **columns):\n    return [mean(text) for text in"
    " completions]\n\n\n"
)
SCORE += "def mean(text):\n    return sum(c in 'abcdefghijklm' for c in text) / max(1, len(text))\n"
LORA = "rl_training.token_budget=1024"
CASES = {
    "quickstart": "",
    "LoRA, micro-batches of 512 tokens": "rl_training.token_budget=512",
    "LoRA, 2,048 tokens": "rl_training.token_budget=2048",
    "LoRA, 2,048 tokens, all blocks at once": "rl_training.token_budget=2048"
    " rl_training.blocks_per_eval=0",
    "QLoRA": f"{LORA} rl_training.lora.quantize_base=true model.quantized_cache=off",
    "QLoRA, bfloat16": f"{LORA} rl_training.lora.quantize_base=true model.quantized_cache=off model.dtype=bfloat16",
    "all weights": f"{LORA} rl_training.lora.enabled=false",
    "PPO, LoRA": f"{LORA} rl_training.algorithm=ppo",
    "DPO, LoRA": LORA,
}
"""Of the model of 29 M parameters, but for the first: what differs from `bench_config`."""
console = Console(width=140)


@dataclass(frozen=True)
class Numbers:
    memory: float
    seconds: float
    disk: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--case", choices=["quickstart", "bench", "memory"])
    args = parser.parse_args()
    if args.case == "memory":
        with tempfile.TemporaryDirectory() as directory:
            measure_memory(Path(directory))
        return
    table = Table(title="predicted / measured = ratio")
    for column in ("case", "by formula, before loading", "peak memory", "seconds a step", "disk"):
        table.add_column(column, justify="left" if column == "case" else "right")
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        if args.case in ("quickstart", None):
            flags = [
                "--config",
                "quickstart",
                "--set",
                "rl_training.total_steps=40",
                "--set",
                "evaluation.problems=0",
            ]
            measure("quickstart, 40 steps", flags, scratch / "quickstart", table)
        if args.case in ("bench", None):
            config = bench_config(scratch)
            measure("29 M parameters, 8 steps", ["--config", str(config)], scratch / "bench", table)
    console.print(table)


def measure_memory(scratch: Path) -> None:
    """A line for each of `CASES`: predicted / measured, of MLX's arrays and of the whole
    process."""
    console.print("memory by formula / measured = ratio: MLX's arrays; the process")
    files = {"quickstart": "quickstart", "DPO, LoRA": str(pairs_config(scratch))}
    config = str(bench_config(scratch))
    for number, (name, case) in enumerate(CASES.items()):
        settings = [
            *case.split(),
            "rl_training.total_steps=3",
            "evaluation.problems=0",
            "server.port=0",
        ]
        settings += [
            f"rl_training.checkpoint_dir={scratch / str(number)}",
            "rl_training.run_name=run",
        ]
        command = [str(BIN / "mlx_parallm_train"), "--config", files.get(name, config)]
        output, resident = finished(
            [*command, *(part for setting in settings for part in ("--set", setting))]
        )
        sizes = re.findall(
            r"([\d.]+) (\wiB)",
            next(line for line in output.splitlines() if line.startswith("memory:")),
        )
        predicted = [float(number) * UNITS[unit] for number, unit in sizes][1]
        lines = (scratch / str(number) / "run" / "metrics.jsonl").read_text().splitlines()
        arrays = max(json.loads(line)["memory_gb"] for line in lines) * 1e9
        by_formula = predicted if on_gpu() else predicted - PROCESS_BYTES
        cells = [(by_formula, arrays), (by_formula + PROCESS_BYTES, resident)]
        shown = [f"{a / 2**20:,.0f} / {b / 2**20:,.0f} MiB = {a / b:.2f}" for a, b in cells]
        console.print(f"{name}: {'; '.join(shown)}", highlight=False)


def measure(name: str, flags: list[str], directory: Path, table: Table) -> None:
    settings = [
        "server.port=0",
        f"rl_training.checkpoint_dir={directory}",
        "rl_training.run_name=run",
    ]
    command = [
        str(BIN / "mlx_parallm_train"),
        *flags,
        *(part for s in settings for part in ("--set", s)),
    ]
    text = dry_run(command)
    if directory.exists():
        raise SystemExit(f"the dry run left {directory}")
    console.print(text.partition("a few real steps")[2], highlight=False)
    formula = size(r"needed at most\s+│\s+([\d.]+) (\wiB)", text)
    predicted = predicted_numbers(text)
    real = run(command, directory / "run")
    cells = [f"{formula / 2**20:,.0f} MiB = {formula / real.memory:.2f}"]
    for field, scale, unit in (
        ("memory", 2**20, "MiB"),
        ("seconds", 1, "s"),
        ("disk", 2**20, "MiB"),
    ):
        before, after = getattr(predicted, field) / scale, getattr(real, field) / scale
        cells.append(f"{before:,.2f} / {after:,.2f} {unit} = {before / after:.2f}")
    table.add_row(name, *cells)


def dry_run(command: list[str]) -> str:
    """Return what the command prints with --dry-run. Raises SystemExit: it failed."""
    text = subprocess.run(
        [*command, "--dry-run"],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "200"},
    )
    if text.returncode != 0:
        raise SystemExit(f"{text.stdout}{text.stderr}\nexit code {text.returncode}")
    return text.stdout


def predicted_numbers(text: str) -> Numbers:
    """Read the prediction from the tables of a dry run, which shows a step of more than a minute
    in whole minutes."""
    shown = re.search(r"a step\s+│ ([\d.]+) (s|min) \(", text)
    assert shown is not None, text
    seconds = float(shown[1]) * {"s": 1, "min": 60}[shown[2]]
    memory = size(r"memory\s+│ needed ([\d.]+) (\wiB)", text)
    return Numbers(memory, seconds, size(r"disk\s+│ needed ([\d.]+) (\wiB)", text))


def finished(command: list[str]) -> tuple[str, float]:
    """Run a command; return what it printed, and the bytes of its largest resident set."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        resident = wait_for(process)
        log.seek(0)
        output = log.read()
    if process.returncode != 0:
        raise SystemExit(output)
    return output, resident


def wait_for(process: "subprocess.Popen[bytes]") -> int:
    """Wait until a process has ended. Return the bytes of its largest resident set."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def run(command: list[str], directory: Path) -> Numbers:
    _, resident = finished(command)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    times = [
        sum(line[key] for key in ("time_rollout_s", "time_train_s", "time_publish_s"))
        for line in lines[1:]
    ]
    files = {
        s.st_ino: s.st_size
        for s in (f.stat() for f in directory.rglob("*") if f.is_file() and not f.is_symlink())
    }
    arrays_bytes = max(line["memory_gb"] for line in lines) * 1e9
    return Numbers(
        arrays_bytes if on_gpu() else resident, sum(times) / len(times), sum(files.values())
    )


def on_gpu() -> bool:
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.gpu


def size(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    assert match is not None, text
    return float(match[1]) * UNITS[match[2]]


def bench_config(scratch: Path) -> Path:
    """A random model, 200 prompts and a reward that tells random text apart."""
    model = save_bench_model(scratch / "model")
    rows = [
        json.dumps({"prompt": f"Write about number {n} and its neighbours {n - 1}, {n + 1}."})
        for n in range(200)
    ]
    (scratch / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (scratch / "score.py").write_text(SCORE)
    file = scratch / "bench.toml"
    file.write_text(f'''
[model]
base_path = "{model}"
[server]
batch_size = 16
[rl_training]
total_steps = 8
batch_size = 16
token_budget = 1024
kl_beta = 0.01
[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 192
[[environments]]
kind = "dataset"
data = "rows.jsonl"
rewards = ["python:score.py:early_letters"]
prompt_format = "text"
max_tokens = 64
''')
    return file


def pairs_config(scratch: Path) -> Path:
    """The same model and DPO on pairs of equal lengths."""
    rows = [
        {"prompt": f"About {n:03}:", "chosen": " yes" * 32, "rejected": " no." * 32}
        for n in range(200)
    ]
    (scratch / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = scratch / "pairs.toml"
    file.write_text(f'''
[model]
base_path = "{save_bench_model(scratch / "model")}"
[rl_training]
algorithm = "dpo"
batch_size = 8
[data]
path = "pairs.jsonl"
eval_fraction = 0
max_length = 192
''')
    return file


if __name__ == "__main__":
    main()
