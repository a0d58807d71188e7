"""Parts that the training scripts of this folder share: the command line, progress, checkpoints,
one-line errors."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_parallm.errors import ParallmError
from mlx_parallm.system.signals import Shutdown
from mlx_parallm.system.terminal import Console
from mlx_parallm.systems.experts.expert import ExpertConfig, RNNExpertBase, make_expert
from mlx_parallm.systems.experts.recurrent_ppo import RecurrentPPO, RecurrentPPOConfig
from mlx_parallm.systems.experts.saving import load_expert, save_expert
from mlx_parallm.systems.experts.vector_tasks import VectorTask

SAVE_EVERY = 8  # updates
LIMIT_S = 60.0  # after a signal: an update and the saving
BEST = "best.safetensors"
LATEST = "latest"


def parser_of(
    description: str, *, timesteps: int, learning_rate: float, name: str
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--timesteps", type=int, default=timesteps, help=f"steps in all (default {timesteps:,})"
    )
    parser.add_argument(
        "--lr", type=float, default=learning_rate, help=f"learning rate (default {learning_rate})"
    )
    parser.add_argument("--kind", choices=("gru", "lstm"), default="gru")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", type=Path, default=Path("checkpoints") / name)
    parser.add_argument("--resume", action="store_true", help="continue from CHECKPOINT_DIR/latest")
    return parser


def exit_in_words(main: Callable[[], None]) -> None:
    """Run `main`; an error of this package is one line and exit code 2."""
    try:
        main()
    except ParallmError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a script
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def show(line: str) -> None:
    print(line)  # noqa: T201 - a script


def train_expert(
    arguments: argparse.Namespace,
    config: ExpertConfig,
    task: VectorTask,
    ppo: RecurrentPPOConfig,
    *,
    score: Callable[[RNNExpertBase], float],
    enough: float | None = None,
) -> RNNExpertBase:
    """Train with progress; keep the best expert by `score` and the trainer's latest state. A
    shutdown signal ends the process after the update, with both saved.

    `enough`: a mean return of the episodes at which training may end. Raises ConfigError,
    CheckpointError.
    """
    mx.random.seed(arguments.seed)
    trainer = RecurrentPPO(make_expert(arguments.kind, config), task, ppo, seed=arguments.seed)
    directory: Path = arguments.checkpoint_dir
    best, reached = -float("inf"), float("nan")
    if arguments.resume:
        trainer.load(directory / LATEST)
        best = score(load_expert(directory / BEST))  # a worse one does not take its place

    def keep() -> None:
        nonlocal best
        trainer.save(directory / LATEST)
        if (now := score(trainer.expert)) >= best:
            best = now
            save_expert(directory / BEST, trainer.expert)

    columns = (
        TextColumn("{task.completed:,.0f} steps"),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Shutdown() as shutdown, Progress(*columns, console=Console(stderr=True)) as progress:
        shutdown.limit_s = LIMIT_S
        bar = progress.add_task("", total=arguments.timesteps, completed=trainer.steps, words="")

        def report(metrics: dict[str, float]) -> bool:
            nonlocal reached  # no episode ends in some updates
            reached = metrics.get("episode_return", reached)
            words = (
                f"return {reached:.2f}  entropy {metrics['entropy']:.2f} "
                f" {metrics['steps_per_second']:,.0f} steps/s"
            )
            progress.update(bar, completed=trainer.steps, words=words)
            if trainer.updates % SAVE_EVERY == 0:
                keep()
            return shutdown.stop.is_set() or (enough is not None and reached >= enough)

        trainer.train(arguments.timesteps, report=report)
        keep()
    if shutdown.stop.is_set():
        show(f"stopped after {trainer.steps:,} steps; --resume continues")
        sys.exit(0)
    return trainer.expert
