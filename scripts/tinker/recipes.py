"""Recipes of the tinker cookbook, unmodified, against a server on `builtin:tiny`: does each run,
and does it learn?

    .venv/bin/python -m scripts.tinker.recipes [NAME …] [--seeds N] [--seed FIRST] [--steps N]

Needs scripts/setup_tinker. Starts its own server. Prints a line a run: exit code, seconds, and
the recipe's own measure, means of the first and of the last quarter of the steps. The exit code is
1 when a run fails.

`math_rl` gives the tiny model a reward once in thirty answers, too rarely to learn from. `math_rl
from chat_sl` begins with the checkpoint of another recipe, a short run of `chat_sl` on sums, as one
does with a base model. What differs from run to run: the rows of those conversations (by the seed),
LoRA's first weights and the samples.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.server_process import command, server_process

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "mlx_parallm" / "models" / "tiny"
SDK_PYTHON = ROOT / "build" / "tinker" / "bin" / "python"
REWARD, LOSS, LENGTH = "env/all/reward/total", "train_mean_nll", "env/all/ac_tokens_per_turn"
SUMS = 4096  # conversations
SHOWN = 3000  # characters of a run that failed


@dataclass(frozen=True)
class Recipe:
    """A module of tinker_cookbook.recipes with its options; `{rows}` is a file of conversations.

    `steps`: how many it needs to show what it learns. `start`: the recipe whose checkpoint it
    begins with.
    """

    module: str
    options: str
    measure: str
    steps: int
    start: str | None = None
    seeded: bool = False


MATH = "env=arithmetic group_size=8 groups_per_batch=12 learning_rate=5e-4 max_tokens=5 "
LEARN = (
    "env=arithmetic group_size=8 groups_per_batch=12 learning_rate=1e-3"
    " max_tokens=5 save_every=0 eval_every=0 "
)
# the default until cookbook 0.6, whose own is not published
SAMPLED = "loss_fn=importance_sampling "
STREAM = "stream_minibatch_config.groups_per_batch=12 stream_minibatch_config.num_minibatches=2 "
ROWS = "learning_rate=2e-3 save_every=0 "
RECIPES = {
    "math_rl": Recipe("math_rl", MATH + SAMPLED, REWARD, 6, seeded=True),
    "math_rl async": Recipe(
        "math_rl", MATH + SAMPLED + "max_steps_off_policy=2", REWARD, 6, seeded=True
    ),
    "math_rl streaming, ppo": Recipe(
        "math_rl", MATH + STREAM + "loss_fn=ppo", REWARD, 6, seeded=True
    ),
    "math_rl cispo, post KL": Recipe(
        "math_rl", MATH + "compute_post_kl=True loss_fn=cispo", REWARD, 6, seeded=True
    ),
    "math_rl from chat_sl": Recipe(
        "math_rl", LEARN + SAMPLED, REWARD, 30, start="chat_sl", seeded=True
    ),
    "guess_number": Recipe(
        "multiplayer_rl.guess_number",
        "batch_size=2 group_size=4 max_tokens=8 eval_every=0",
        REWARD,
        2,
    ),
    "shorter": Recipe(
        "preference.shorter",
        "batch_size=8 max_tokens=32 learning_rate=1e-3 eval_every=0",
        LENGTH,
        16,
    ),
    "prompt_distillation": Recipe(
        "prompt_distillation", ROWS + "file_path={rows} batch_size=64", LOSS, 12
    ),
    "chat_sl": Recipe("chat_sl", ROWS + "dataset={rows} batch_size=64", LOSS, 40),
}


@contextlib.contextmanager
def tinker_process(folder: Path, *settings: str) -> Iterator[str]:
    """The address of `mlx_parallm serve --tinker` on the tiny model, while the block runs.
    `settings`: KEY=VALUE."""
    flags = [
        part
        for each in (f'tinker.directory="{folder}/runs"', *settings)
        for part in ("--set", each)
    ]
    serve = [command("mlx_parallm"), "serve", "--model-path", "builtin:tiny", "--tinker", *flags]
    with server_process(lambda port: [*serve, "--port", str(port)], folder / "server.log") as (
        url,
        _,
    ):
        yield url


def sums(seed: int) -> str:
    """Conversations as the environment of math_rl opens them, with the right answer: JSON lines."""
    draw, lines = random.Random(seed), []
    for _ in range(SUMS):
        a, b = draw.randrange(101), draw.randrange(101)
        texts = ("What is 4 + 5?", "9", f"What is {a} + {b}?", str(a + b))
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    return "".join(lines)


def measured(log: Path, key: str) -> tuple[float, float, int]:
    """Means of the first and of the last quarter, and the number of steps. Raises ValueError:
    the recipe made none."""
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    values = [line[key] for line in lines if key in line]
    if not values:
        raise ValueError(f"{log}: no line has {key}")
    part = max(len(values) // 4, 1)
    return sum(values[:part]) / part, sum(values[-part:]) / part, len(values)


def last_state(log: Path) -> str:
    """The path of the last checkpoint that a recipe saved."""
    lines = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    return str([line["state_path"] for line in lines if line.get("state_path")][-1])


@dataclass
class Runs:
    """Runs recipes against the server at `url`, one after another, with logs in `folder`."""

    url: str
    folder: Path
    python: str
    failed: int = 0

    def run(self, name: str, seed: int, steps: int | None = None) -> Path | None:
        """Return the directory of its log; None where it failed, which is printed. `steps`:
        None = the recipe's."""
        recipe = RECIPES[name]
        log = self.folder / f"{name.replace(' ', '_').replace(',', '')}-{seed}"
        rows = self.folder / f"rows-{seed}.jsonl"
        rows.write_text(sums(seed))
        options = recipe.options.format(rows=rows).split()
        options += [f"model_name={TINY}", "renderer_name=qwen3_instruct", f"log_path={log}"]
        options += ["behavior_if_log_dir_exists=delete", f"max_steps={steps or recipe.steps}"]
        options += [f"seed={seed}"] if recipe.seeded else []
        if recipe.start is not None:
            begun = self.run(recipe.start, seed)
            if begun is None:
                return None
            options.append(f"load_checkpoint_path={last_state(begun)}")
        environment = os.environ | {
            "TINKER_BASE_URL": self.url,
            "TINKER_API_KEY": "tml-local",
            "TINKER_TELEMETRY": "0",
        }
        environment |= {"HF_HUB_OFFLINE": "1"}
        started = time.perf_counter()
        words = [self.python, "-m", f"tinker_cookbook.recipes.{recipe.module}.train", *options]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        print(
            f"{name:24} seed {seed}  exit {done.returncode}  {seconds:6.1f} s", end="  ", flush=True
        )
        if done.returncode:
            self.failed += 1
            print(f"FAILED\n{done.stderr[-SHOWN:]}", flush=True)
            return None
        first, last, count = measured(log, recipe.measure)
        print(f"{count} steps, {recipe.measure} {first:.3f} -> {last:.3f}", flush=True)
        return log


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of: {', '.join(RECIPES)}; default: all")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each")
    parser.add_argument("--seed", type=int, default=0, help="the first run's")
    parser.add_argument(
        "--steps", type=int, help="of each; default: as many as it needs to show what it learns"
    )
    parser.add_argument("--python", default=str(SDK_PYTHON))
    options = parser.parse_args()
    if unknown := set(options.names) - set(RECIPES):
        parser.error(
            f"unknown recipe {', '.join(sorted(unknown))}: choose from {', '.join(RECIPES)}"
        )
    if not Path(options.python).exists():
        parser.error(f"{options.python} does not exist: scripts/setup_tinker makes it")
    with tempfile.TemporaryDirectory() as scratch, tinker_process(Path(scratch)) as url:
        runs = Runs(url, Path(scratch), options.python)
        for name in options.names or RECIPES:
            for seed in range(options.seed, options.seed + options.seeds):
                runs.run(name, seed, options.steps)
    return int(runs.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
