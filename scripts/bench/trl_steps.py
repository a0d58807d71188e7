"""A few updates under TRL and here, on the same rows in whole batches: losses, learning rates,
gradient norms, and how far the trained weights are apart, as a share of how far they moved.

    .venv/bin/python -m scripts.bench.trl_steps --theirs PYTHON [--only sft dpo …]

`--theirs`: a Python that has TRL (`setup_peers trl` makes build/peers-trl). An update has all eight
rows, so no order of rows is compared; GRPO's completions are given (`rollout_func`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

TINY = Path(__file__).resolve().parents[2] / "mlx_parallm" / "models" / "tiny"
HALVES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
IN_ORDER = {"train_sampling_strategy": "sequential"}
TWO = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
TWICE = {"num_iterations": 2, "warmup_steps": 1}  # the second update's ratios are not 1
SEQUENCE = {"importance_sampling_level": "sequence"}
SMOOTHED = {"label_smoothing": 0.1}
DPO_LOSSES = {
    **{kind: {} for kind in ("ipo", "hinge", "nca_pair", "bco_pair", "sppo_hard", "apo_zero")},
    **{kind: {} for kind in ("apo_down", "discopop", "sigmoid_norm", "sft")},
    **dict.fromkeys(("robust", "exo_pair", "aot"), SMOOTHED),
    "aot_unpaired": {},
}
GRPO_LOSSES = {
    **{kind: {} for kind in ("grpo", "bnpo", "dr_grpo", "sapo")},
    "dapo": {"delta": 1.5, "epsilon_high": 0.28},
    "cispo": {"epsilon_high": 1.05},
    "luspo": SEQUENCE,
}
CASES = {
    "sft": ("SFT", {}),
    "sft in halves": ("SFT", HALVES),
    "sft, cosine": ("SFT", {"lr_scheduler_type": "cosine", "max_steps": 6}),
    "sft, warm-up": ("SFT", {"warmup_steps": 2}),
    "sft, warm-up of a share, constant": (
        *("SFT",),
        {"warmup_steps": 0.3, "lr_scheduler_type": "constant_with_warmup"},
    ),
    "sft, eps, betas, no clipping": (
        *("SFT",),
        {"adam_beta1": 0.7, "adam_beta2": 0.9, "adam_epsilon": 1e-4, "max_grad_norm": 0.0},
    ),
    "sft, dft": ("SFT", {"loss_type": "dft"}),
    "dpo": ("DPO", {}),
    **{f"dpo, {kind}": ("DPO", {"loss_type": kind} | more) for kind, more in DPO_LOSSES.items()},
    "dpo + sft": ("DPO", TWO),
    "dpo + sft in halves": ("DPO", TWO | HALVES | IN_ORDER),
    **{
        f"dpo, {kind} in halves": ("DPO", {"loss_type": kind} | HALVES | IN_ORDER)
        for kind in ("aot", "aot_unpaired")
    },
    "dpo, both kinds of aot": ("DPO", {"loss_type": ["aot", "aot_unpaired"], "ld_alpha": 0.3}),
    "dpo, ld_alpha": ("DPO", {"ld_alpha": 0.3}),
    "dpo, use_weighting": ("DPO", {"use_weighting": True}),
    "dpo, use_weighting and ld_alpha": (
        *("DPO",),
        {"use_weighting": True, "ld_alpha": 0.0, "loss_type": ["ipo", "apo_zero"]},
    ),
    "kto": ("KTO", {}),
    "kto, apo_zero_unpaired": ("KTO", {"loss_type": "apo_zero_unpaired"}),
    "grpo": ("GRPO", {}),
    "grpo, two updates a batch": ("GRPO", TWICE),
    "gspo": ("GRPO", {"loss_type": "grpo"} | SEQUENCE),
    **{
        f"grpo, {kind}": ("GRPO", {"loss_type": kind} | TWICE | more)
        for kind, more in GRPO_LOSSES.items()
    },
}
SCRIPT = """
import json, random, sys
try:
    import trl
    from datasets import Dataset
    from trl.experimental import kto
    rows_of = Dataset.from_list
except ImportError:
    import mlx_parallm as trl
    kto, rows_of = trl, list
kind, given, model, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], sys.argv[4]
rng = random.Random(0)
words = ["".join(rng.sample("abcdefgh", 3 + n // 4 * 5)) for n in range(8)]  # halves of two lengths
right = [" " + "".join(sorted(word)) for word in words]
settings = dict(output_dir=out, max_steps=4, logging_steps=1, learning_rate=1e-3, weight_decay=0.1,
                gradient_checkpointing=False, disable_tqdm=True, report_to="none", bf16=False,
                save_strategy="no", per_device_train_batch_size=8, max_grad_norm=1.0) | given
rows = [{"prompt": f"Sort: {w}"} for w in words]
if kind == "SFT":
    rows = [r | {"completion": a} for r, a in zip(rows, right)]
if kind == "DPO":
    rows = [r | {"chosen": a, "rejected": " " + a[:0:-1] * (1 + n % 2)}
            for n, (r, a) in enumerate(zip(rows, right))]
if kind == "KTO":
    rows = [r | {"completion": a if n % 2 else " " + w, "label": bool(n % 2)}
            for n, (r, a, w) in enumerate(zip(rows, right, words))]
more = {}

def completions_of(prompts, trainer):
    seen, made = {}, {"prompt_ids": [], "completion_ids": [], "logprobs": [], "score": []}
    for prompt in prompts:
        n = seen[prompt] = (seen.get(prompt, -1) + 1) % 4
        k = ord(prompt) - ord("a")
        made["prompt_ids"].append([10, 11, 12 + k])
        made["completion_ids"].append([260 + (3 * n + j + 5 * k) % 20 for j in range(2 + n)])
        made["logprobs"].append([0.0] * (2 + n))
        made["score"].append(float((n * 7 + k) % 5))
    return made

if kind == "GRPO":
    settings |= dict(num_generations=4, max_completion_length=8, temperature=1.0, beta=0.0)
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    more = dict(rollout_func=completions_of, reward_funcs=lambda completions, score, **_: list(score))
home = kto if kind == "KTO" else trl
args = getattr(home, kind + "Config")(**settings)
trainer = getattr(home, kind + "Trainer")(model, args=args, train_dataset=rows_of(rows), **more)
trainer.train()
trainer.save_model(out + "_final")
json.dump(trainer.state.log_history, open(out + ".json", "w"))
"""


def run(python: str, name: str, out: Path) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    """Return the log lines of the updates, and the trained weights."""
    kind, given = CASES[name]
    command = [python, "-c", SCRIPT, kind, json.dumps(given), str(TINY), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out.parent)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    lines = [line for line in json.loads(out.with_suffix(".json").read_text()) if "loss" in line]
    return lines, load_file(out.parent / f"{out.name}_final" / "model.safetensors")


def mean_of(lines: list[dict[str, float]]) -> dict[str, float]:
    """Return the means of a step's updates; of the learning rate the last one."""
    means = {key: sum(line[key] for line in lines) / len(lines) for key in ("loss", "grad_norm")}
    return lines[-1] | means


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--theirs", required=True, help="a Python that has TRL")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    before = load_file(TINY / "model.safetensors")
    print("| | loss | learning rate | gradient's norm | weights |\n|---|---|---|---|---|")
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            theirs, their_weights = run(options.theirs, name, Path(folder) / "theirs")
            ours, our_weights = run(sys.executable, name, Path(folder) / "ours")
        # theirs has a line an update; ours one a step, with the means of its updates
        each = len(theirs) // len(ours)
        theirs = [mean_of(theirs[i : i + each]) for i in range(0, len(theirs), each)]
        apart = {
            key: max(
                abs(a[key] - b[key]) / max(abs(a[key]), 1e-2)
                for a, b in zip(theirs, ours, strict=True)
            )
            for key in ("loss", "learning_rate", "grad_norm")
        }
        both = [key for key in before if key in their_weights and key in our_weights]
        off = sum(np.square(their_weights[key] - our_weights[key]).sum() for key in both)
        moved = sum(np.square(their_weights[key] - before[key]).sum() for key in both)
        numbers = [*apart.values(), float(np.sqrt(off / moved))]
        print(f"| {name} | {' | '.join(f'{number:.1e}' for number in numbers)} |", flush=True)


if __name__ == "__main__":
    main()
