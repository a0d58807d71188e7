"""Train in environments that others wrote, by TOML alone: gymnasium's, TextArena's, OpenEnv's.

    python scripts/bench/environments.py --openenv build/openenv/bin/python --checkout DIR
    python scripts/bench/environments.py --learn --seeds 0 1 2 --openenv … --checkout DIR
    python scripts/bench/environments.py --self-play --seeds 0 1 2
    python scripts/bench/environments.py --cases "gymnasium FrozenLake" --steps 150

Each case is an [[environments]] entry and nothing else of its own; `builtin:tiny` is trained. The
environments of OpenEnv are those of its repository, unchanged: DIR is its folder `envs`, and the
Python is one in which `openenv-core` (and what an environment needs) is installed; without them
these cases are left out. `reward` is the mean of the first and of the last tenth of the steps,
`lost` the groups that were dropped for a reason, which `run.log` names.

`--learn` trains those cases that builtin:tiny can learn in a minute or two, each as long as that
takes. `--self-play` trains all seats of a game, and at the end the last version plays 200 games
against the one of K versions before, half of them from each seat.
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
NIM = {"id": "Nim-v0", "make": {"piles": [2, 3]}, "regex": r"\[[01] [1-3]\]"}
TWO_THIRDS = {
    "id": "IteratedTwoThirdsAverage-v0",
    "make": {"num_rounds": 1},
    "regex": r"\[[1-9][0-9]\]",
}
LETTERS = {
    "dataset_name": "letter_counting",
    "dataset_config": {"min_words": 1, "max_words": 1},
    "size": 1,
}
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
    "textarena Blackjack": {
        "kind": "textarena",
        "options": {
            "id": "Blackjack-v0",
            "make": {"num_hands": 1},
            "regex": r"\[(Hit|Stand)\]",
        },
    },
    "textarena Nim, a scripted opponent": {
        "kind": "textarena",
        "options": NIM | {"opponent": f"python:{Path(__file__).resolve()}:any_move"},
    },
    "textarena TwoThirds, the base": {
        "kind": "textarena",
        "options": TWO_THIRDS | {"opponent": "base"},
    },
    "openenv echo_env (tools)": {
        "kind": "openenv",
        "app": "echo_env",
        "rewards": ["builtin:length"],  # its server gives none
        "reward_options": {"length": {"target": 20}},
        "max_tokens": 24,
    },
    "openenv grid_world_env": {
        "kind": "openenv",
        "app": "grid_world_env",
        "options": {
            "instructions": "",
            "observation_text": "Pick a digit. {x} {y}",
            "action_of": f"python:{Path(__file__).resolve()}:move",
        },
        "max_tokens": 4,
    },
    "openenv maze_env": {
        "kind": "openenv",
        "app": "maze_env",
        "options": {
            "instructions": "Find the exit.",
            "observation_text": "{current_position} {legal_actions}",
            "action_of": "^(?P<action>[0-3])",  # its server fails on other numbers
        },
        "max_tokens": 4,
    },
    "openenv connect4_env": {
        "kind": "openenv",
        "app": "connect4_env",
        "options": {"instructions": "Connect four.", "observation_text": "{legal_actions}"},
    },
    "openenv reasoning_gym_env": {
        "kind": "openenv",
        "app": "reasoning_gym_env",
        "options": {"reset": LETTERS, "observation_text": "{question}"},
    },
}
LEARNT: Mapping[str, dict[str, int]] = {
    "textarena TwoThirds, the base": {"steps": 20, "rollouts": 16},
    "openenv reasoning_gym_env": {"steps": 20, "rollouts": 16},
    "openenv echo_env (tools)": {"steps": 20, "rollouts": 8},
    "gymnasium CliffWalking": {"steps": 20, "rollouts": 16},
    "gymnasium Blackjack": {"steps": 40, "rollouts": 32},
    "textarena Nim, a scripted opponent": {"steps": 30, "rollouts": 8},
}
"""What `--learn` trains, and how long."""
GAMES: Mapping[str, dict[str, Any]] = {
    "TwoThirds": {"options": TWO_THIRDS, "steps": 16, "before": 16, "rollouts": 32},
    "Nim": {"options": NIM, "steps": 20, "before": 20, "rollouts": 16},
}
"""What `--self-play` plays; `before`: how many versions older the other player is."""


def move(text: str) -> dict[str, str] | None:
    """Return the move of grid_world_env that a digit stands for."""
    names = {"1": "DOWN", "2": "RIGHT", "3": "UP", "4": "LEFT"}
    return {"action": names[text[0]]} if text[:1] in names else None


def any_move(observation: str) -> str:
    """Return a move of Nim that is allowed: one object of the first pile that has some."""
    piles = observation.rpartition("Current Pile:")[2].split("pile ")[1:]
    return next(f"[{pile[0]} 1]" for pile in piles if not pile[3:].startswith("0"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, help="of each run (20)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *GAMES])
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--self-play", action="store_true")
    parser.add_argument("--openenv", help="a Python in which openenv-core is installed")
    parser.add_argument("--checkout", type=Path, help="the folder envs of OpenEnv's repository")
    parser.add_argument("--rollouts", type=int, help="of a step, four groups (16)")
    parser.add_argument("--max-steps", type=int, default=12, help="turns of an episode")
    parser.add_argument("--processes", type=int, default=2, help="servers of an OpenEnv case")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()
    console = Console(width=120)
    if args.self_play:
        play(args, console)
        return
    table = Table(title="builtin:tiny, an entry of environments each")
    table.add_column("environment")
    columns = ("seed", "steps", "rollouts", "reward, first", "reward, last", "groups", "lost", "s")
    for column in columns:
        table.add_column(column, justify="right")
    cases = args.cases or list(LEARNT if args.learn else CASES)
    for case, seed in itertools.product(cases, args.seeds):
        entry = entry_of(case, args)
        if entry is None:
            console.print(f"{case}: left out, without --openenv and --checkout")
            continue
        size = LEARNT.get(case, {}) if args.learn else {}
        steps = args.steps or size.get("steps", 20)
        rollouts = args.rollouts or size.get("rollouts", 16)
        began = time.monotonic()
        lines, lost, _ = train(case, config_of(entry, args, seed, steps, rollouts))
        rewards = [line["reward_mean"] for line in lines]
        tenth = max(1, len(rewards) // 10)
        groups = sum(sum(e["groups"] for e in line["environments"].values()) for line in lines)
        row = (
            str(seed),
            str(len(lines)),
            str(rollouts),
            f"{statistics.fmean(rewards[:tenth]):.3f}",
            f"{statistics.fmean(rewards[-tenth:]):.3f}",
            str(groups),
            str(lost),
            f"{time.monotonic() - began:.0f}",
        )
        console.print(case, *row)
        table.add_row(case, *row)
    console.print(table)


def play(args: argparse.Namespace, console: Console) -> None:
    """Train all seats of each game, and let the last version play the earlier one."""
    table = Table(title="200 games of the last version against an earlier one")
    table.add_column("game")
    for column in ("seed", "steps", "versions", "won", "drawn", "lost", "s"):
        table.add_column(column, justify="right")
    for game, seed in itertools.product(args.cases or GAMES, args.seeds):
        options, before = GAMES[game]["options"], GAMES[game]["before"]
        steps, rollouts = (
            args.steps or GAMES[game]["steps"],
            args.rollouts or GAMES[game]["rollouts"],
        )
        entry = {"kind": "textarena", "options": options, "max_tokens": 8}
        rewards = {"reward_options": {"result": {"baseline": "role"}}}
        config = config_of({**entry, **rewards}, args, seed, steps, rollouts)
        config["server"]["keep_versions"] = before + 1
        earlier = {**options, "opponent": f"policy@-{before}"}
        config["evaluation"] = {
            "problems": 200,
            "at_start": False,
            "greedy": False,
            "samples": 1,
            "environments": [{**entry, "name": "earlier", "options": earlier}],
        }
        began = time.monotonic()
        lines, _, evaluations = train(game, config)
        version = evaluations[-1]["version"]
        problems = evaluations[-1]["environments"]["earlier"]["problems"]
        results = [problem["sampled"][0] for problem in problems]
        row = (
            str(seed),
            str(len(lines)),
            f"{version}, {max(0, version - before)}",
            str(sum(result > 0 for result in results)),
            str(sum(result == 0 for result in results)),
            str(sum(result < 0 for result in results)),
            f"{time.monotonic() - began:.0f}",
        )
        console.print(game, *row)
        table.add_row(game, *row)
    console.print(table)


def entry_of(case: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """Return the [[environments]] entry of a case; None: there is no such server here."""
    entry = {name: value for name, value in CASES[case].items() if name != "app"}
    options = dict(entry.get("options", {}))
    if entry["kind"] == "gymnasium":
        options |= {"constrained": True, "max_steps": args.max_steps}
    elif entry["kind"] == "openenv":
        if args.openenv is None or args.checkout is None:
            return None
        options |= {
            "command": f"{args.openenv} -m uvicorn {CASES[case]['app']}.server.app:app"
            f" --app-dir {args.checkout} --log-level warning --port {{port}}",
            "processes": args.processes,
            "max_steps": args.max_steps,
        }
    return {**entry, "options": options}


def config_of(
    entry: Mapping[str, Any], args: argparse.Namespace, seed: int, steps: int, rollouts: int
) -> dict[str, Any]:
    return {
        "model": {"base_path": "builtin:tiny"},
        "server": {"port": 0, "batch_size": rollouts},
        "rl_training": {
            "total_steps": steps,
            "learning_rate": args.learning_rate,
            "batch_size": rollouts,
            "blocks_per_eval": 0,
            "seed": seed,
            "max_oversampling": 1,  # groups whose rewards are all alike are not replaced
            "run_name": "run",
            "atropos": {"rollout_batch_size": rollouts, "max_token_length": 3072},
        },
        "logging": {"sample_every": 0},
        "environments": [{"group_size": rollouts // 4, "max_tokens": 16, **entry}],
    }


def train(
    case: str, config: dict[str, Any]
) -> tuple[list[dict[str, Any]], int, list[dict[str, Any]]]:
    """Train; return the lines of metrics, how many groups were lost, and the evaluations."""
    with tempfile.TemporaryDirectory() as directory:
        config["rl_training"]["checkpoint_dir"] = directory
        path = Path(directory, "run.toml")
        path.write_text(tomli_w.dumps(config))
        done = subprocess.run(
            [BIN / "mlx_parallm_train", "--config", path], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{case}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        place = Path(directory, "run")
        lost = (place / "run.log").read_text().count("group dropped")
        return _lines(place / "metrics.jsonl"), lost, _lines(place / "evaluations.jsonl")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


if __name__ == "__main__":
    main()
