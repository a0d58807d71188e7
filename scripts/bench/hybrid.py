"""The hybrid system, measured: routing over a real MCP server, and joint training against each part
alone.

    python examples/hybrid/make_planner.py --output P/planner_0 --seed 0
    python examples/hybrid/make_planner.py --output P/half_planner_0 --seed 0 --knows 0.4 --steps 300
    python examples/experts/train_physics_expert.py --seed 0 --checkpoint-dir P/expert_0
    python examples/experts/train_physics_expert.py --seed 0 --timesteps 5000 \\
        --checkpoint-dir P/half_expert_0
    (and the same of seeds 1 and 2)
    python scripts/bench/hybrid.py routing P --seeds 0 1 2
    python scripts/bench/hybrid.py joint P --seeds 0 1 2 --steps 30
    python scripts/bench/hybrid.py figures P --output docs

A run is `mlx_parallm train` as a process. What it leaves is measured on held-out tasks, greedy:

    route    the share of tasks whose first action is the right one with the right arguments: the planner alone
    hits     the share of 500 unseen targets that the expert hits: the expert alone
    solved   what both reach together

Solved tasks are rewarded. `routing` begins with a planner that chooses by chance and a trained
expert. `joint` begins with a planner that knows what is right in 0.4 of the tasks and chooses by
chance in the others, and with an expert that has learned for 5,000 steps and hardly hits: beside it
the planner sees seldom that a delegation pays.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx_parallm  # noqa: F401  (puts a fast BLAS under MLX, so it comes before MLX)

# isort: split
import tomli_w

from examples.experts.train_physics_expert import hit_rates
from mlx_parallm.errors import ToolFailedError
from mlx_parallm.execution.action_grammar import parse_actions
from mlx_parallm.execution.tool_client import MCPServer, ToolClient
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.systems.experts import ExpertRegistry, load_expert
from mlx_parallm.systems.orchestrator import Orchestrator, OrchestratorConfig
from mlx_parallm.systems.orchestrator.tasks import routing_task
from mlx_parallm.systems.orchestrator.tool_server import math_solve, physics_simulate

EXPERT = "physics_controller"
HELDOUT = 300
TOOLS = "python:mlx_parallm.systems.orchestrator.tool_server"
SERVER = [sys.executable, "-m", "mlx_parallm.systems.orchestrator.tool_server"]
MODES = ("planner", "experts", "alternate", "both")


def mostly_targets(index: int, split: str = "train", seed: int = 0) -> dict[str, Any]:
    """Return routing task `index` of a mixture with six targets in eight places, a product and a
    word."""
    kinds = ("physics", "math", "physics", "physics", "general", "physics", "physics", "physics")
    wanted, number = kinds[index % 8], 1000 * index
    while (task := routing_task(number, split, seed))["type"] != wanted:  # type: ignore[arg-type]
        number += 1
    return task


def configuration(
    planner: Path, expert: Path, run: Path, *, learn: str, steps: int, seed: int, live: bool
) -> Any:
    tools: Any = (
        {"mcp": [{"command": SERVER}]}
        if live
        else {"functions": [f"{TOOLS}:{t}" for t in TOOL_NAMES]}
    )
    tasks = "builtin:routing" if live else f"python:{Path(__file__).resolve()}:mostly_targets"
    ppo = {
        "epochs": 10,
        "batch_size": 250,
        "learning_rate": 1e-3,
        "gamma": 0.9,
        "value_clip": 0.0,
        "target_kl": 0.05,
    }
    return {
        "model": {"base_path": str(planner)},
        "tools": tools,
        "server": {"port": 0, "batch_size": 128, "max_concurrent_requests": 512},
        "rl_training": {
            "total_steps": steps,
            "learning_rate": 1.5e-3 if live else 5e-4,
            "batch_size": 32,
            "update_epochs": 1,
            "token_budget": 16384,
            "blocks_per_eval": 0,
            "kl_beta": 0.0,
            "entropy_weight": 0.01,
            "dynamic_sampling": False,
            "max_staleness": 0,
            "checkpoint_interval": 1000,
            "checkpoint_dir": str(run.parent),
            "run_name": run.name,
            "seed": seed,
            "lora": {"rank": 16, "alpha": 32.0, "target_modules": "all-linear"},
            "atropos": {"api_url": "embedded", "rollout_batch_size": 128, "max_token_length": 160},
        },
        "environments": [
            {
                "kind": "hybrid",
                "group_size": 8,
                "max_tokens": 32,
                "rewards": ["python:mlx_parallm.systems.orchestrator.environment:solved"],
                "options": {
                    "tasks": tasks,
                    "experts": {EXPERT: str(expert)},
                    "instructions": "",
                    "max_steps": 4,
                    "learn": learn,
                    **({"alternate_every": 5} if learn == "alternate" else {}),
                    **({"min_steps": 600, "ppo": ppo} if learn != "planner" else {}),
                },
            }
        ],
    }


TOOL_NAMES = ("math_solve", "physics_simulate")


def train(config: dict[str, Any], run: Path) -> None:
    """Run `mlx_parallm train` unless the run is there."""
    if (run / "final").exists():
        return
    run.parent.mkdir(parents=True, exist_ok=True)
    file = run.with_suffix(".toml")
    file.write_text(tomli_w.dumps(config), encoding="utf-8")
    log = run.with_suffix(".log")
    with log.open("w") as out:
        subprocess.run(
            [sys.executable, "-m", "mlx_parallm", "train", "--config", str(file)],
            stdout=out,
            stderr=out,
            check=True,
        )


def trained_expert(run: Path, start: Path) -> Path:
    expert = run / "final" / "learners" / "hybrid" / EXPERT / "expert.safetensors"
    return expert if expert.is_file() else start


def right_first(task: dict[str, Any], text: str) -> bool:
    """Whether the first action is the right one, with the arguments of the task."""
    action = next(
        (a for a in parse_actions(text, {"math_solve": ["expression"]}) if a.kind != "think"),
        None,
    )
    if action is None or action.error is not None:
        return False
    goal = task["goal"]
    if task["type"] == "math":
        if (action.kind, action.name) != ("tool", "math_solve"):
            return False
        try:
            return (
                float(math_solve(str(action.arguments.get("expression"))))
                == goal["expected_answer"]
            )
        except (ToolFailedError, ValueError):
            return False
    if task["type"] == "physics":
        right = {"target": goal["target"], "wind": goal["wind"]}
        return (action.kind, action.name) == ("delegate", EXPERT) and {
            "wind": 0,
            **action.arguments,
        } == right
    return action.kind == "answer" and action.text == goal["expected_answer"]


def measure(
    planner: Path, adapter: Path | None, expert: Path, *, live: bool, make: Any
) -> dict[str, float]:
    """Play held-out tasks: live ones greedily, others at temperature 1; the expert's most likely
    actions."""
    tasks = [make(index, "heldout") for index in range(HELDOUT)]
    registry = ExpertRegistry()
    registry.register(load_expert(expert), EXPERT)
    servers = [MCPServer("tools", command=SERVER)] if live else []
    with ToolClient(servers, () if live else (math_solve, physics_simulate)) as client:
        episodes = [Orchestrator(OrchestratorConfig(max_steps=4), registry, client) for _ in tasks]
        for episode, task in zip(episodes, tasks, strict=True):
            episode.reset(task)
        talks = [[{"role": "user", "content": task["prompt"]}] for task in tasks]
        firsts: list[str] = []
        sampling: dict[str, Any] = {"temperature": 0.0} if live else {"temperature": 1.0, "seed": 7}
        with InferenceModule(str(planner), adapter_path=adapter) as inference:
            while waiting := [n for n, episode in enumerate(episodes) if not episode.done]:
                texts = list(
                    inference.generate([talks[n] for n in waiting], max_new_tokens=32, **sampling)
                )
                firsts = firsts or texts
                for n, text in zip(waiting, texts, strict=True):
                    step = episodes[n].step_text(text)
                    talks[n] += [
                        {"role": "assistant", "content": text},
                        {"role": "user", "content": step.text},
                    ]
    delegated = [
        e for e, t in zip(episodes, tasks, strict=True) if t["type"] == "physics" and e.delegations
    ]
    return {
        "tasks": len(tasks),
        "solved": sum(episode.solved for episode in episodes) / len(tasks),
        "route": sum(right_first(t, text) for t, text in zip(tasks, firsts, strict=True))
        / len(tasks),
        "hits": hit_rates(load_expert(expert))[0],
        "delegated": len(delegated),
        "delegated_hits": sum(e.solved for e in delegated) / max(len(delegated), 1),
    }


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z
        * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        / (1 + z * z / count)
    )
    return middle - half, middle + half


def rewards(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward_mean"] for line in lines]


def results(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())


def note(path: Path, **row: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)


def one(place: Path, name: str, seed: int, steps: int, learn: str, *, live: bool) -> None:
    run, half = place / "runs" / f"{name}_{learn}_{seed}", "" if live else "half_"
    planner, expert = (
        place / f"{half}planner_{seed}",
        place / f"{half}expert_{seed}" / "best.safetensors",
    )
    table = place / f"{name}.jsonl"
    kept = [(row["seed"], row["learn"]) for row in results(table)]
    make = routing_task if live else mostly_targets
    if (seed, "start") not in kept:
        note(
            table, seed=seed, learn="start", **measure(planner, None, expert, live=live, make=make)
        )
    if (seed, learn) in kept:
        return
    train(configuration(planner, expert, run, learn=learn, steps=steps, seed=seed, live=live), run)
    curve = rewards(run)
    after = measure(planner, run / "final", trained_expert(run, expert), live=live, make=make)
    first, last = sum(curve[:5]) / 5, sum(curve[-5:]) / 5
    note(
        table, seed=seed, learn=learn, steps=steps, first_rewards=first, last_rewards=last, **after
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("routing", "joint", "figures"))
    parser.add_argument("place", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--output", type=Path, default=Path("docs"))
    arguments = parser.parse_args()
    if arguments.what == "figures":
        from hybrid_figures import draw

        draw(arguments.place, arguments.output)
        return
    for seed in arguments.seeds:
        if arguments.what == "routing":
            one(arguments.place, "routing", seed, arguments.steps, "planner", live=True)
            continue
        for learn in arguments.modes:
            one(arguments.place, "joint", seed, arguments.steps, learn, live=False)


if __name__ == "__main__":
    main()
