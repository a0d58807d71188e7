"""The same script text under TRL and here: only its import line and its model path differ. Prints
both curves.

    .venv/bin/python scripts/bench/trl_scripts.py --theirs PYTHON [--only grpo sft dpo] [--seeds 3] [--same-rows]

`--theirs`: a Python that has TRL (`setup_peers trl` makes build/peers-trl). All weights of the tiny
model are trained in float32, on the same rows; TRL's random numbers differ from ours, so curves are
compared by the means and the spread of seeds. `--same-rows` gives TRL's SFT and DPO our order of
rows: then the curves have to agree in all digits. Our environment has no package `datasets`: a
module of that name makes a data set a list there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "mlx_parallm" / "models" / "tiny"
POINTS = 5  # of a curve that is printed: means over a fifth of the steps each

HEAD = """\
import itertools, json, random, sys
from datasets import Dataset
from trl import {config}, {trainer}

MODEL = "tiny"
SEED = int(sys.argv[1])
rng = random.Random(1)
words = ["".join(pair) for pair in itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=2)]
pairs = [rng.sample(words, 2) for _ in range(600)]
common = dict(output_dir="run", seed=SEED, logging_steps=1, report_to="none", gradient_checkpointing=False,
              bf16=False, use_cpu=True, save_strategy="no", disable_tqdm=True, model_init_kwargs={{"dtype": "float32"}})
"""
TAIL = """
trainer.train()
json.dump(trainer.state.log_history, open("log.json", "w"))
"""
SCRIPTS = {
    "grpo": (
        "GRPOConfig",
        "GRPOTrainer",
        "reward",
        """
dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": f"Which is first: {a} or {b}?"}], "right": a}
                             for a, b in pairs])

def letters(completions, right, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(c in answer for c in text[:4]) / 4 for text, answer in zip(texts, right)]

training_args = GRPOConfig(max_steps=40, per_device_train_batch_size=32, num_generations=8, max_completion_length=8,
                           learning_rate=3e-4, **common)
trainer = GRPOTrainer(model=MODEL, reward_funcs=letters, args=training_args, train_dataset=dataset)
""",
    ),
    "sft": (
        "SFTConfig",
        "SFTTrainer",
        "loss",
        """
dataset = Dataset.from_list([{"prompt": f"Which is first: {a} or {b}?", "completion": a} for a, b in pairs])
training_args = SFTConfig(max_steps=50, per_device_train_batch_size=16, learning_rate=3e-4, **common)
trainer = SFTTrainer(model=MODEL, args=training_args, train_dataset=dataset)
""",
    ),
    "dpo": (
        "DPOConfig",
        "DPOTrainer",
        "rewards/margins",
        """
dataset = Dataset.from_list([{"prompt": f"Which is first: {a} or {b}?", "chosen": a, "rejected": b} for a, b in pairs])
training_args = DPOConfig(max_steps=50, per_device_train_batch_size=16, learning_rate=1e-4, **common)
trainer = DPOTrainer(model=MODEL, args=training_args, train_dataset=dataset)
""",
    ),
}


SAME_ROWS = """
import numpy as np
from torch.utils.data import DataLoader

class SameRows({trainer}):
    def get_train_dataloader(self):  # as rl_training/data/batches.py: a permutation an epoch, cut into equal parts
        rows, batches = len(self.train_dataset), []
        steps = -(-rows // self.args.per_device_train_batch_size)
        for epoch in range(3):
            order = np.random.default_rng([SEED, epoch]).permutation(rows)
            batches += [part.tolist() for part in np.array_split(order, steps)]
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)
"""


def script(name: str, *, ours: bool, same_rows: bool) -> str:
    """The text; for our side with another import line, for both with the model's path."""
    config, trainer, _, body = SCRIPTS[name]
    if same_rows and not ours:
        wanted = SAME_ROWS.format(trainer=trainer)
        body = wanted + body.replace(f"= {trainer}(", "= SameRows(")
    text = (HEAD.format(config=config, trainer=trainer) + body + TAIL).replace(
        '"tiny"', repr(str(TINY))
    )
    return text.replace("from trl import", "from mlx_parallm import") if ours else text


DATASETS = """
class Dataset:
    from_list = staticmethod(list)
"""
DRIVER = """
import os, pathlib, runpy, sys
for seed in sys.argv[1:]:  # one process: importing torch takes longer than the runs
    pathlib.Path(seed).mkdir()
    os.chdir(seed)
    sys.argv = ["script.py", seed]
    runpy.run_path("../script.py", run_name="__main__")
    os.chdir("..")
"""


def run(name: str, seeds: int, python: str, *, ours: bool, same_rows: bool) -> list[list[float]]:
    """The curves of one side: the metric of each step, for each seed."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "script.py").write_text(script(name, ours=ours, same_rows=same_rows))
        (place / "driver.py").write_text(DRIVER)
        if ours:
            (place / "datasets.py").write_text(DATASETS)
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(place),
        }
        command = [python, "driver.py", *map(str, range(seeds))]
        done = subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(
                f"{name}, {'ours' if ours else 'TRL'}, ended with"
                f" {done.returncode}:\n{done.stderr[-3000:]}"
            )
        logs = [json.loads((place / str(seed) / "log.json").read_text()) for seed in range(seeds)]
    return [[entry[SCRIPTS[name][2]] for entry in log if SCRIPTS[name][2] in entry] for log in logs]


def fifths(curve: list[float]) -> list[float]:
    size = len(curve) // POINTS
    return [statistics.fmean(curve[i * size : (i + 1) * size]) for i in range(POINTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description="The same TRL script under TRL and here.")
    parser.add_argument(
        "--theirs", default=str(ROOT / "build" / "peers-trl" / "bin" / "python"), metavar="PYTHON"
    )
    parser.add_argument("--only", nargs="+", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--same-rows", action="store_true", help="TRL's SFT and DPO train on our order of rows"
    )
    args = parser.parse_args()
    if args.same_rows:
        args.only = [name for name in args.only if name != "grpo"]
    for name in args.only:
        sides = (("TRL", args.theirs), ("here", sys.executable))
        curves_of = {
            side: run(name, args.seeds, python, ours=side == "here", same_rows=args.same_rows)
            for side, python in sides
        }
        means = {side: [fifths(curve) for curve in curves] for side, curves in curves_of.items()}
        print(
            f"\n{name}: {SCRIPTS[name][2]}, {len(curves_of['TRL'][0])} steps, mean of {args.seeds}"
            " seeds ± their std"
        )
        for side, rows in means.items():
            columns = list(zip(*rows, strict=True))
            print(
                f"  {side:5}",
                "  ".join(
                    f"{statistics.fmean(c):.4f} ± {statistics.pstdev(c):.4f}" for c in columns
                ),
            )
        print(flush=True)


if __name__ == "__main__":
    main()
