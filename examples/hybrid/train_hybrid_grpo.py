"""Train a planner by GRPO with live MCP tools and a physics expert, which may learn as well.

    python examples/hybrid/train_hybrid_grpo.py --model M --physics-expert
    best.npz

It writes a configuration, CHECKPOINT_DIR/hybrid.toml, shows the command `mlx_parallm train --config
…`, and becomes it: the planner is served while it learns, checkpoints are below CHECKPOINT_DIR/run,
and `--resume` continues from the latest.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w

from mlx_parallm.cli.dataset_config import find_hidden_size, learning_rate_for
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.system.files import write_atomically
from mlx_parallm.systems.experts.saving import load_expert
from mlx_parallm.systems.orchestrator.learning import Learning

EXPERT = "physics_controller"
TOOL_SERVER = "mlx_parallm.systems.orchestrator.tool_server"
RUN, CONFIG = "run", "hybrid.toml"


def configuration(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of the run. Raises ConfigError, CheckpointError: no such expert,
    a number below 1."""
    if (
        min(arguments.iterations, arguments.prompts, arguments.max_tokens) < 1
        or arguments.group_size < 2
    ):
        raise ConfigError(
            "--iterations, --prompts and --max-tokens: at least 1; --group-size: at least 2"
        )
    expert = arguments.physics_expert.resolve()
    load_expert(expert)
    options: dict[str, Any] = {
        "tasks": arguments.tasks,
        "experts": {EXPERT: str(expert)},
        "learn": arguments.learn,
    }
    if arguments.no_instructions:
        options["instructions"] = ""
    sequences = arguments.prompts * arguments.group_size
    return {
        "model": {"base_path": arguments.model},
        "tools": {"mcp": [{"name": "tools", "command": [sys.executable, "-m", TOOL_SERVER]}]},
        "server": {"batch_size": sequences, "max_concurrent_requests": 2 * sequences},
        "rl_training": {
            "algorithm": "grpo",
            "total_steps": arguments.iterations,
            "learning_rate": arguments.lr or learning_rate_for(find_hidden_size(arguments.model)),
            "batch_size": sequences,
            "dynamic_sampling": False,  # a group with equal rewards still teaches the expert
            "checkpoint_interval": max(1, min(50, arguments.iterations // 2)),
            "checkpoint_dir": str(arguments.checkpoint_dir.resolve()),
            "run_name": RUN,
            "seed": arguments.seed,
            "atropos": {
                "api_url": "embedded",
                "rollout_batch_size": sequences,
                "max_token_length": arguments.max_token_length,
            },
        },
        "environments": [
            {
                "kind": "hybrid",
                "group_size": arguments.group_size,
                "max_tokens": arguments.max_tokens,
                "options": options,
            }
        ],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--model", required=True, help="directory, hub id or builtin:tiny")
    parser.add_argument(
        "--physics-expert", type=Path, required=True, help="what train_physics_expert wrote"
    )
    parser.add_argument(
        "--iterations", type=int, default=500, help="steps of GRPO (default %(default)s)"
    )
    parser.add_argument(
        "--group-size", type=int, default=4, help="episodes of one task (default %(default)s)"
    )
    parser.add_argument(
        "--prompts", type=int, default=16, help="tasks of a step (default %(default)s)"
    )
    parser.add_argument(
        "--lr", type=float, help="of the planner's adapter (default: by the size of the model)"
    )
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints/hybrid_grpo"))
    parser.add_argument(
        "--learn", choices=get_args(Learning), default="both", help="(default %(default)s)"
    )
    parser.add_argument(
        "--tasks",
        default="builtin:routing",
        help="JSONL or python:file.py:name (default %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=128, help="of one turn (default %(default)s)"
    )
    parser.add_argument(
        "--max-token-length", type=int, default=2048, help="of an episode (default %(default)s)"
    )
    parser.add_argument("--no-instructions", action="store_true", help="show the task alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--resume", action="store_true", help="go on from CHECKPOINT_DIR/run/latest"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="as in mlx_parallm train"
    )
    return parser.parse_args(arguments)


def command(options: argparse.Namespace) -> list[str]:
    """Write the configuration; return the words after `mlx_parallm`. Raises ConfigError,
    CheckpointError."""
    overrides = [word for setting in options.set for word in ("--set", setting)]
    if options.resume:
        return ["train", "--resume", str(options.checkpoint_dir / RUN), *overrides]
    text = tomli_w.dumps(configuration(options))
    path = options.checkpoint_dir / CONFIG
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise ConfigError(f"--checkpoint-dir {options.checkpoint_dir}: {error.strerror}") from error
    return ["train", "--config", str(path), *overrides]


def main(arguments: Sequence[str] | None = None) -> None:
    try:
        words = command(parse(arguments))
    except ParallmError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(shlex.join(["mlx_parallm", *words]), flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "mlx_parallm", *words])


if __name__ == "__main__":
    main()
