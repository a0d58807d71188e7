"""`mlx_parallm pipeline`. Imports no MLX before it runs."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path

from mlx_parallm.cli.command import ended_in_order
from mlx_parallm.system.packages import require_mlx

LIMIT_S = 120.0  # for the training that it runs to save
METHODS = ("grpo", "kto", "dpo", "sft")
PROFILES = ("AUTO_DETECT", "CPU_ONLY", "GPU_ENABLED", "RYZEN_OPTIMIZED")


def pipeline(parser: ArgumentParser) -> Callable[[Namespace], int]:
    """Add the arguments, and return what carries the command out."""
    parser.add_argument(
        "--traces",
        metavar="PATH",
        type=Path,
        nargs="+",
        required=True,
        help=(
            "a recorder's directory, a file of traces, or logs that"
            " `mlx_parallm traces import` reads"
        ),
    )
    parser.add_argument(
        "--base-model", metavar="M", required=True, help="directory, hub id or builtin:tiny"
    )
    parser.add_argument("--method", choices=METHODS, default="grpo", help="default: grpo")
    parser.add_argument(
        "--reward",
        metavar="FILE.py:F",
        action="append",
        default=[],
        help=(
            "reward function: labels the traces, is grpo's reward, judges"
            " held-out answers; may be repeated"
        ),
    )
    parser.add_argument(
        "--rule",
        metavar="FILE.py:F",
        action="append",
        default=[],
        help="a function of an ExecutionTrace that labels the traces; may be repeated",
    )
    parser.add_argument("--deploy", metavar="TARGET", help="ollama:NAME, or a directory")
    parser.add_argument(
        "--type", help="of the exported file; default: what the hardware is good for"
    )
    parser.add_argument(
        "--name", default="model", help="of the work directory and the file (default: model)"
    )
    parser.add_argument(
        "--work",
        metavar="DIR",
        type=Path,
        help="default: rl_training/NAME; a second call goes on there",
    )
    parser.add_argument(
        "--hardware", choices=PROFILES, default="AUTO_DETECT", help="default: AUTO_DETECT"
    )
    parser.add_argument(
        "--epochs", type=int, default=3, help="passes over the rows: kto, dpo, sft (default 3)"
    )
    parser.add_argument(
        "--test-fraction", type=float, default=0.1, help="share of prompts held out (default 0.1)"
    )
    parser.add_argument(
        "--good-from", type=float, default=0.5, help="least score of a good trace (default 0.5)"
    )
    parser.add_argument(
        "--problems", type=int, default=200, help="most held-out prompts that are answered (200)"
    )
    parser.add_argument(
        "--no-redact",
        action="store_true",
        help="keep secrets and user names (default: placeholders)",
    )
    parser.add_argument(
        "--even-if-worse",
        action="store_true",
        help="deploy also what does not answer better than the base",
    )
    parser.add_argument(
        "--ollama-url", metavar="URL", help="of `ollama serve`; default: http://127.0.0.1:11434"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a key of the training's configuration",
    )

    def run(args: Namespace) -> int:
        require_mlx()
        from mlx_parallm.deploy.export.ollama import DEFAULT_URL
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.systems.pipeline.pipeline import TrainingPipeline
        from mlx_parallm.systems.traces.rewards import references_of

        configure_logging(level="warning")
        TrainingPipeline(
            args.name,
            args.base_model,
            args.method,
            traces=args.traces,
            work=args.work,
            profile=args.hardware,
            rewards=tuple(references_of(args.reward, Path.cwd())),
            rules=tuple(references_of(args.rule, Path.cwd())),
            deploy=args.deploy,
            type=args.type,
            epochs=args.epochs,
            test_fraction=args.test_fraction,
            good_from=args.good_from,
            most_problems=args.problems,
            redact=not args.no_redact,
            even_if_worse=args.even_if_worse,
            ollama_url=args.ollama_url or DEFAULT_URL,
            settings=tuple(args.set),
        ).run_full_pipeline(say=_say)
        return 0

    return ended_in_order(run, LIMIT_S)


def _say(line: str) -> None:
    from mlx_parallm.system.terminal import escaped

    sys.stdout.write(escaped(line) + "\n")
    sys.stdout.flush()
