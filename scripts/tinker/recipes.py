"""Recipes of the tinker cookbook, unmodified, against a server on `builtin:tiny`: does each run, and does it learn?

    .venv/bin/python scripts/tinker/recipes.py [NAME …] [--seeds N] [--steps N]

Needs scripts/setup_tinker. Starts a server of its own on a free port. Prints a line a run: exit code, seconds, and the
recipe's own measure: means of the first and of the last quarter of the steps.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "mlx_parallm" / "assets" / "tiny")
ROWS = [("Sort: hgfa", "afgh"), ("Sort: dbca", "abcd"), ("Reverse: abcd", "dcba"), ("Count: aaa", "3")]
MATH = ["tinker_cookbook.recipes.math_rl.train", "env=arithmetic", "group_size=8", "groups_per_batch=24"]
MATH += ["learning_rate=5e-4", "max_tokens=5"]
SMALL = ["max_tokens=8", "eval_every=0"]  # their evaluation plays hundreds of games
RECIPES = {
    "math_rl": (MATH, "env/all/reward/total"),
    "math_rl async": ([*MATH, "max_steps_off_policy=2"], "env/all/reward/total"),
    "math_rl streaming, ppo": (
        [
            *MATH,
            "stream_minibatch_config.groups_per_batch=16",
            "stream_minibatch_config.num_minibatches=2",
            "loss_fn=ppo",
        ],
        "env/all/reward/total",
    ),
    "math_rl cispo, post KL": ([*MATH, "compute_post_kl=True", "loss_fn=cispo"], "env/all/reward/total"),
    "guess_number": (
        ["tinker_cookbook.recipes.multiplayer_rl.guess_number.train", "batch_size=4", "group_size=4", *SMALL],
        "env/all/reward/total",
    ),
    "shorter": (["tinker_cookbook.recipes.preference.shorter.train", "batch_size=8", *SMALL], "env/all/reward/total"),
    "prompt_distillation": (
        ["tinker_cookbook.recipes.prompt_distillation.train", "file_path={rows}", "batch_size=8", "num_epochs=8"],
        "train_mean_nll",
    ),
    "chat_sl": (
        ["tinker_cookbook.recipes.chat_sl.train", "dataset={rows}", "batch_size=8", "num_epochs=8"],
        "train_mean_nll",
    ),
}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def server(folder):
    port = free_port()
    command = [
        str(ROOT / ".venv/bin/mlx_parallm"),
        "serve",
        "--model-path",
        "builtin:tiny",
        "--tinker",
        "--port",
        str(port),
    ]
    command += ["--set", f'tinker.directory="{folder}/runs"']
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "server.log").open("w"))
    url = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return process, url
        except OSError:
            time.sleep(0.1)  # another process: nothing says when it is ready
    raise SystemExit((folder / "server.log").read_text())


def measured(log, key):
    """Means of the first and the last quarter."""
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    values = [line[key] for line in lines if key in line]
    part = max(len(values) // 4, 1)
    return (sum(values[:part]) / part, sum(values[-part:]) / part) if values else None


def run(name, url, folder, seed, steps, python):
    arguments, key = RECIPES[name]
    rows = folder / "rows.jsonl"
    chats = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ROWS * 8]
    rows.write_text("".join(json.dumps(row) + "\n" for row in chats))
    log = folder / f"{name.replace(' ', '_')}-{seed}"
    command = [python, "-m", *(each.format(rows=rows) for each in arguments), f"model_name={TINY}", f"log_path={log}"]
    command += ["renderer_name=qwen3_instruct", "behavior_if_log_dir_exists=delete"]
    command += [f"max_steps={steps}"] if steps else []
    environment = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    environment |= {"HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    change = measured(log, key) if done.returncode == 0 else None
    shown = f"{key} {change[0]:.3f} -> {change[1]:.3f}" if change else ""
    print(f"{name:26} seed {seed}  exit {done.returncode}  {seconds:5.1f} s  {shown}", flush=True)
    if done.returncode:
        print(done.stderr[-3000:])
    return done.returncode


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="0: as many as the recipe has")
    parser.add_argument("--python", default=str(ROOT / "build/tinker/bin/python"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        process, url = server(Path(scratch))
        try:
            names = options.names or list(RECIPES)
            jobs = [(name, seed) for name in names for seed in range(options.seeds)]
            failed = [run(n, url, Path(scratch), s, options.steps, options.python) for n, s in jobs]
        finally:
            process.terminate()
            process.wait()
    return int(any(failed))


if __name__ == "__main__":
    sys.exit(main())
