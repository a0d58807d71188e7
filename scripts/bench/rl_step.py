"""Seconds of one GRPO step: the real daemon against mlx-lm-lora (the same BLAS; and as installed)
and TRL on torch.

    scripts/bench/setup_peers trl                                   # build/peers, build/peers-trl
    .venv/bin/python -m scripts.bench.rl_step [--rounds 3] [--steps 12] [--only ours --only TRL]
    .venv/bin/python -m scripts.bench.rl_step --only "ours, 2 ranks" --only ours --only TRL
    .venv/bin/python -m scripts.bench.rl_step --only "ours, 2 ranks, on-policy" --only "ours, on-policy"

The same random Qwen3 (256 wide, 4 layers, 3.2 M parameters, one token a character), the same
prompts, 8 prompts × 8 samples of 32 tokens a step, all weights trained in float32, AdamW 1e-4, no
KL, temperature 1. The reward is the share of letters in the answer. A step is the time between two
lines of a trainer's own log; the first three are not counted. In a round every contender runs once,
one after the other, and a ratio is taken within a round.

"ours" overlaps a step's rollouts with the training of the one before (max_staleness = 1, the
default); "ours, on-policy" does not, like its peers. mlx-lm-lora samples with top-k 20 and top-p
0.95, which its command line cannot turn off. "2 ranks" is `--ranks 2`: two processes that sample
and train, with one BLAS thread each on two cores. The ratio is to the first contender.
"""

import argparse
import itertools
import json
import os
import random
import re
import statistics
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import mlx_parallm  # the fast BLAS comes before MLX

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlx_parallm.system.hardware import usable_cores
from scripts.bench.peers import PYTHON, ROOT, environment

assert mlx_parallm.__version__
TRL_PYTHON = ROOT / "build/peers-trl/bin/python"
PROMPTS, GROUP, LONGEST, LEARNING_RATE, UNCOUNTED = 8, 8, 32, 1e-4, 3
END, PAD = "<|end|>", "<|pad|>"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
CONTENDERS = (
    *("ours", "ours, on-policy", "ours, 2 ranks", "ours, 2 ranks, on-policy"),
    *("mlx-lm-lora, MKL", "mlx-lm-lora, as installed", "TRL"),
)
TARGETS = {
    ("ours", "mlx-lm-lora, MKL"): 1.5,
    ("ours", "mlx-lm-lora, as installed"): 13.0,
    ("ours, 2 ranks", "ours"): 1.5,
    ("ours, 2 ranks, on-policy", "ours, on-policy"): 1.5,
    ("ours, 2 ranks", "TRL"): 1.0,
}
OURS = """
[model]
base_path = "{directory}/model"
[server]
port = 0
batch_size = 64
[rl_training]
learning_rate = {rate}
batch_size = {rows}
blocks_per_eval = 0
total_steps = {steps}
max_staleness = {staleness}
checkpoint_interval = 1000000
checkpoint_dir = "{run}"
run_name = "run"
lora.enabled = false
atropos.rollout_batch_size = {rows}
atropos.max_token_length = 128
[logging]
sample_every = 0
[[environments]]
kind = "dataset"
data = "{directory}/ours.jsonl"
heldout_fraction = 0.0
prompt_format = "text"
rewards = ["python:{directory}/reward.py:letters"]
group_size = {group}
max_tokens = {longest}
"""
REWARD = """
def letters(prompts, completions, *others, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]
"""
LORA_REWARD = (
    "from mlx_lm_lora.trainer.grpo_reward_functions import register_reward_function\n"
    + REWARD.replace("def", "@register_reward_function()\ndef").replace(
        "*others, **columns", "answer, types=None"
    )
)
TRL = """
import json, os
os.environ["HF_HUB_OFFLINE"], os.environ["TOKENIZERS_PARALLELISM"] = "1", "false"
import torch
torch.set_num_threads({cores})
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from reward import letters
rows = [json.loads(line) for line in open("{directory}/ours.jsonl")]
options = GRPOConfig(
    output_dir="{run}", use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
    per_device_train_batch_size={rows}, num_generations={group}, max_completion_length={longest}, temperature=1.0,
    beta=0.0, learning_rate={rate}, lr_scheduler_type="constant", max_steps={steps}, logging_steps=1,
    save_strategy="no", report_to="none", loss_type="grpo", max_grad_norm=1.0, dataloader_pin_memory=False,
    disable_tqdm=True, seed=0,
)
GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained("{directory}/model", dtype=torch.float32), reward_funcs=letters,
    args=options, train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained("{directory}/model"),
).train()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--slow-steps", type=int, default=5, help="of mlx-lm-lora as installed")
    parser.add_argument("--only", action="append", choices=CONTENDERS, help="may be repeated")
    args = parser.parse_args()
    console, chosen = Console(width=120), args.only or CONTENDERS
    seconds_of: dict[str, list[float]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        prepare(directory)
        for number in range(args.rounds):
            for contender in chosen:
                steps = args.slow_steps if contender.endswith("as installed") else args.steps
                run = Path(name, f"round{number}", contender)
                seconds = measure(
                    contender, directory, run, steps, console if number == 0 else None
                )
                seconds_of[contender].append(seconds)
                console.print(f"round {number + 1}, {contender}: {seconds:.3f} s a step")
    show(console, seconds_of)


def show(console: Console, seconds_of: dict[str, list[float]]) -> None:
    title = (
        f"seconds a GRPO step, {PROMPTS} × {GROUP} samples of {LONGEST}"
        f" tokens, {usable_cores()} cores"
    )
    table = Table(title=title)
    first, ours = next(iter(seconds_of.items()))
    for column in ("contender", "s/step", "rounds", f"its time / {first}", "target"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, seconds in seconds_of.items():
        ratio = statistics.median(t / o for t, o in zip(seconds, ours, strict=True))
        rounds = ", ".join(f"{value:.2f}" for value in seconds)
        target = f"≥ {TARGETS[first, name]}" if (first, name) in TARGETS else ""
        table.add_row(name, f"{statistics.median(seconds):.3f}", rounds, f"{ratio:.2f}", target)
    console.print(table)


def measure(
    contender: str, directory: Path, run: Path, steps: int, console: Console | None
) -> float:
    """Median seconds between two steps."""
    values = {
        "directory": directory,
        "run": run,
        "steps": steps,
        "rate": LEARNING_RATE,
        "cores": usable_cores(),
    }
    values |= {"rows": PROMPTS * GROUP, "group": GROUP, "longest": LONGEST}
    if contender.startswith("ours"):
        config = directory / "ours.toml"
        config.write_text(
            OURS.format(staleness=0 if contender.endswith("on-policy") else 1, **values)
        )
        command, environ = (
            [str(Path(sys.executable).with_name("mlx_parallm_train")), "--config", str(config)],
            None,
        )
        command += ["--ranks", "2"] if "2 ranks" in contender else []
        times = our_times(command, run / "run/metrics.jsonl")
    elif contender == "TRL":
        script = directory / "trl_grpo.py"
        script.write_text(TRL.format(**values))
        command, environ = [str(TRL_PYTHON), str(script)], os.environ | {"PYTHONUNBUFFERED": "1"}
        times = times_of_lines(command, environ, re.compile(r"'?step_time'?"))
    else:
        command = lora_command(directory, run, steps)
        environ = environment("mkl" if contender.endswith("MKL") else "reference") | {
            "PYTHONUNBUFFERED": "1"
        }
        environ |= {"MKL_NUM_THREADS": str(usable_cores())}
        times = times_of_lines(command, environ, re.compile(r"^Iter \d+:\s*$"))
    if console is not None:
        console.print(f"{contender}: {' '.join(command)}", soft_wrap=True)
    if len(times) < UNCOUNTED + 1:
        raise SystemExit(f"{contender}: {len(times)} steps were logged by {' '.join(command)}")
    counted = times[UNCOUNTED - 1 :]  # the first interval is the fourth step's
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(counted))


def lora_command(directory: Path, run: Path, steps: int) -> list[str]:
    options = {
        "model": directory / "model",
        "train-mode": "grpo",
        "train-type": "full",
        "num-layers": -1,
    }
    options |= {
        "data": directory / "lora",
        "group-size": GROUP,
        "batch-size": PROMPTS,
        "iters": steps,
        "beta": 0,
    }
    options |= {
        "max-completion-length": LONGEST,
        "temperature": 1.0,
        "learning-rate": LEARNING_RATE,
        "seed": 0,
    }
    options |= {"steps-per-report": 1, "adapter-path": run / "lora", "reward-functions": "letters"}
    options |= {"reward-functions-file": directory / "lora_reward.py"}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [str(PYTHON.with_name("mlx_lm_lora.train")), "--train", *flags]


def our_times(command: list[str], metrics: Path) -> list[float]:
    """Return when each line of the metrics file was there."""
    times: list[float] = []
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        error_lines: list[str] = []
        reader = threading.Thread(target=lambda: error_lines.extend(process.stderr or ()))
        reader.start()
        while process.poll() is None:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            times += [time.perf_counter()] * (lines - len(times))
            time.sleep(0.005)
        reader.join()
    if process.returncode:
        raise SystemExit("".join(error_lines))
    return times


def times_of_lines(
    command: list[str], environ: dict[str, str], pattern: re.Pattern[str]
) -> list[float]:
    """Return when each line that shows the pattern was printed."""

    def stamped() -> Iterator[float]:
        for line in process.stdout or ():
            printed.append(line)
            if pattern.search(line):
                yield time.perf_counter()

    printed: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as process:
        times = list(stamped())
    if process.returncode:
        raise SystemExit("".join(printed[-40:]))
    return times


def prepare(directory: Path) -> None:
    """model/, the rows and the reward functions."""
    save_model(directory / "model")
    letters = random.Random(0)
    words = [
        "".join(letters.choices(string.ascii_lowercase, k=letters.randint(5, 10)))
        for _ in range(256)
    ]
    ours = [json.dumps({"prompt": f"rev\n{word}\n"}) for word in words]
    lora = [json.dumps({"prompt": word, "answer": word[::-1], "system": "rev"}) for word in words]
    (directory / "lora").mkdir()
    (directory / "ours.jsonl").write_text("\n".join(ours) + "\n")
    (directory / "lora/train.jsonl").write_text("\n".join(lora) + "\n")
    (directory / "reward.py").write_text(REWARD)
    (directory / "lora_reward.py").write_text(LORA_REWARD)


def save_model(directory: Path) -> None:
    """The end of text is an id that the model cannot sample, so every answer has the longest
    length."""
    symbols = [*sorted(c for c in string.printable if c.isprintable() or c == "\n"), PAD]
    directory.mkdir(parents=True)
    shape = {
        **{
            "model_type": "qwen3",
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "intermediate_size": 768,
        },
        **{
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
        },
        **{"vocab_size": len(symbols), "max_position_embeddings": 2048, "rope_theta": 10000.0},
        **{"tie_word_embeddings": True},
    }
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(shape))
    arrays = {
        name: 0.02 * mx.random.normal(a.shape) if a.ndim > 1 else a
        for name, a in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(directory / "model.safetensors"), arrays, metadata={"format": "pt"})
    others = {
        "architectures": ["Qwen3ForCausalLM"],
        "eos_token_id": len(symbols),
        "pad_token_id": len(symbols) - 1,
    }
    (directory / "config.json").write_text(json.dumps(shape | others | {"torch_dtype": "float32"}))
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate([*symbols, END])}, []))
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=TEMPLATE
    )
    wrapped.save_pretrained(directory)


if __name__ == "__main__":
    main()
