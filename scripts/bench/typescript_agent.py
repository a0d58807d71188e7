"""A TypeScript agent trains the model that it talks to (examples/typescript/agent.ts): the reward
rises in 40 steps.

    .venv/bin/python -m scripts.bench.typescript_agent --seeds 0 1 2      # needs Node.js with npm

The agent asks for one of 456,976 words at a time, so nearly every reward is of a word that was
never asked for before.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from scripts.server_process import command, server_process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "typescript"
CONFIG = ROOT / "examples" / "rewards_by_id" / "letters.toml"
LONGEST_S = 600


def install() -> None:
    """Raises SystemExit: no npm."""
    if shutil.which("npm") is None:
        raise SystemExit("this needs Node.js with npm")
    subprocess.run(["npm", "ci", "--silent"], cwd=EXAMPLE, check=True)


def train(seed: int, steps: int, directory: Path) -> list[float]:
    """Return each step's mean reward. Raises CalledProcessError: the agent failed; SystemExit:
    the server did."""

    def words(port: int) -> list[str]:
        settings = {
            "server.port": str(port),
            "rl_training.seed": str(seed),
            "rl_training.total_steps": str(steps),
            "rl_training.checkpoint_dir": f'"{directory}"',
            "rl_training.run_name": '"run"',
        }
        changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        return [command("mlx_parallm"), "train", "--config", str(CONFIG), *changes]

    with server_process(words, directory / "train.log") as (url, process):
        agent = ["node", "--import", "tsx", "agent.ts", url]
        subprocess.run(agent, cwd=EXAMPLE, check=True, stdout=subprocess.DEVNULL, timeout=LONGEST_S)
        process.wait(LONGEST_S)
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward_mean"] for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    install()
    for seed in args.seeds:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            rewards = train(seed, args.steps, Path(directory))
        tenth = max(1, args.steps // 10)
        first, last = statistics.fmean(rewards[:tenth]), statistics.fmean(rewards[-tenth:])
        steps = (
            f"the first {tenth} of {len(rewards)} steps {first:.3f}, of the last {tenth} {last:.3f}"
        )
        print(f"seed {seed}: reward of {steps}; {time.perf_counter() - began:.0f} s", flush=True)
        if last <= first:
            raise SystemExit(f"seed {seed}: the reward did not rise")


if __name__ == "__main__":
    main()
