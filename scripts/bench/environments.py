"""Train in environments that others wrote, by TOML alone: gymnasium's, TextArena's, OpenEnv's.

    python scripts/bench/environments.py --steps 20
    python scripts/bench/environments.py --openenv build/openenv/bin/python --checkout DIR
    python scripts/bench/environments.py --cases "gymnasium FrozenLake" --steps 150 --seeds 0 1 2

Each case is an [[environments]] entry and nothing else of its own; `builtin:tiny` is trained. The
environments of OpenEnv are those of its repository, unchanged: DIR is its folder `envs`, and the
Python is one in which `openenv-core` (and what an environment needs) is installed; without them
these cases are left out. `reward` is the mean of the first and of the last tenth of the steps,
`lost` the groups that were dropped for a reason, which `run.log` names.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

BIN = Path(sys.executable).parent
LAKE = {"id": "FrozenLake-v1", "make": {"is_slippery": False}}
MOVES = ["left", "down", "right", "up"]
GUESS = {"id": "GuessTheNumber-v0", "regex": r"\[(1?[1-9]|10|20)\]"}
LEGS = {"dataset_name": "leg_counting", "dataset_config": {}, "size": 10}
CASES: Mapping[str, dict[str, Any]] = {
    "gymnasium FrozenLake": {"kind": "gymnasium", "options": LAKE | {"action_names": MOVES}},
    "gymnasium CliffWalking": {
        "kind": "gymnasium",
        "options": {
            "id": "CliffWalking-v1",
            "action_names": ["up", "right", "down", "left"],
        },
    },
    "gymnasium Blackjack": {
        "kind": "gymnasium",
        "options": {"id": "Blackjack-v1", "action_names": ["stick", "hit"]},
    },
    "textarena GuessTheNumber": {"kind": "textarena", "options": GUESS},
    "textarena TicTacToe, all seats": {
        "kind": "textarena",
        "options": {"id": "TicTacToe-v0", "regex": r"\[[0-8]\]"},
    },
    "textarena KuhnPoker, policy@-2": {
        "kind": "textarena",
        "options": {
            "id": "KuhnPoker-v0",
            "opponent": "policy@-2",
            "regex": r"\[(check|bet|call|fold)\]",
        },
    },
    "openenv echo_env (tools)": {"kind": "openenv", "app": "echo_env"},
    "openenv grid_world_env": {"kind": "openenv", "app": "grid_world_env"},
    "openenv maze_env": {"kind": "openenv", "app": "maze_env"},
    "openenv connect4_env": {"kind": "openenv", "app": "connect4_env"},
    "openenv reasoning_gym_env": {
        "kind": "openenv",
        "app": "reasoning_gym_env",
        "reset": LEGS,
        "observation_text": "{question}",
    },
}
REWARDS = {"openenv echo_env (tools)": ["builtin:length"]}  # its server gives none


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--openenv", help="a Python in which openenv-core is installed")
    parser.add_argument("--checkout", type=Path, help="the folder envs of OpenEnv's repository")
    parser.add_argument("--rollouts", type=int, default=32, help="of a step, four groups")
    parser.add_argument("--max-steps", type=int, default=12, help="turns of an episode")
    parser.add_argument("--processes", type=int, default=4, help="servers of an OpenEnv case")
    args = parser.parse_args()
    console = Console(width=110)
    table = Table(title=f"{args.steps} steps of {args.rollouts} rollouts on builtin:tiny")
    table.add_column("environment")
    for column in ("seed", "steps", "reward, first", "reward, last", "groups", "lost", "seconds"):
        table.add_column(column, justify="right")
    for case, seed in itertools.product(args.cases, args.seeds):
        entry = entry_of(case, args)
        if entry is None:
            console.print(f"{case}: left out, without --openenv and --checkout")
            continue
        row = run(case, entry, args, seed)
        console.print(case, f"seed {seed}:", row)
        table.add_row(case, str(seed), *row)
    console.print(table)


def entry_of(case: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the [[environments]] entry of a case; None: there is no such server here."""
    case_of = CASES[case]
    if case_of["kind"] == "gymnasium":
        limits = {"constrained": True, "max_steps": args.max_steps}
        return {**case_of, "options": {**case_of["options"], **limits}}
    if case_of["kind"] != "openenv":
        return dict(case_of)
    if args.openenv is None or args.checkout is None:
        return None
    options = {name: value for name, value in case_of.items() if name not in ("kind", "app")}
    options["command"] = (
        f"{args.openenv} -m uvicorn {case_of['app']}.server.app:app --app-dir {args.checkout}"
        " --log-level warning --port {port}"
    )
    options |= {"processes": args.processes, "max_steps": args.max_steps}
    entry: dict[str, Any] = {"kind": "openenv", "options": options}
    if case in REWARDS:
        entry |= {"rewards": REWARDS[case], "reward_options": {"length": {"target": 20}}}
    return entry


def run(case: str, entry: Mapping[str, Any], args: argparse.Namespace, seed: int) -> list[str]:
    """Train, and return the cells of the row."""
    config = {
        "model": {"base_path": "builtin:tiny"},
        "server": {"port": 0, "batch_size": 64},
        "rl_training": {
            "total_steps": args.steps,
            "learning_rate": 2e-3,
            "batch_size": args.rollouts,
            "blocks_per_eval": 0,
            "seed": seed,
            "run_name": "run",
            "atropos": {"rollout_batch_size": args.rollouts, "max_token_length": 3072},
        },
        "logging": {"sample_every": 0},
        "environments": [{"group_size": args.rollouts // 4, "max_tokens": 24, **entry}],
    }
    with tempfile.TemporaryDirectory() as directory:
        config["rl_training"]["checkpoint_dir"] = directory  # type: ignore[index]
        path = Path(directory, "run.toml")
        path.write_text(tomli_w.dumps(config))
        began = time.monotonic()
        done = subprocess.run(
            [BIN / "mlx_parallm_train", "--config", path], capture_output=True, text=True
        )
        seconds = time.monotonic() - began
        if done.returncode:
            raise SystemExit(f"{case}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        place = Path(directory, "run")
        lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        lost = (place / "run.log").read_text().count("group dropped")
    rewards = [line["reward_mean"] for line in lines]
    tenth = max(1, len(rewards) // 10)
    groups = sum(sum(e["groups"] for e in line["environments"].values()) for line in lines)
    return [
        str(len(lines)),
        f"{statistics.fmean(rewards[:tenth]):.3f}",
        f"{statistics.fmean(rewards[-tenth:]):.3f}",
        str(groups),
        str(lost),
        f"{seconds:.0f}",
    ]


if __name__ == "__main__":
    main()
