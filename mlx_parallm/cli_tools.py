"""Commands on what a run has left behind, beside those of cli.py and made like them. Imports no MLX.

mlx_parallm_show_checkpoint → `tools.show_checkpoint` · mlx_parallm_convert_adapter → `tools.convert_adapter.convert`
mlx_parallm_replay → `tools.replay.replay`
"""

import atexit
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm import cli


def show_checkpoint(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_show_checkpoint`: what a checkpoint holds, and whether all of it is there."""
    parser = cli.new_parser(
        "mlx_parallm_show_checkpoint",
        "Show step, version, metrics, adapter, optimizer and sizes of a checkpoint, and whether all of it is there."
        " Exit code 0: complete; 1: damaged.",
    )
    parser.add_argument("path", metavar="PATH", type=Path, help="one of a run's steps, or the run: its latest")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args(argv)

    def run() -> int:
        from mlx_parallm.tools.show_checkpoint import as_text, describe

        found = describe(args.path)
        sys.stdout.write(json.dumps(found, indent=1) + "\n" if args.json else as_text(found))
        return 0 if found["complete"] else 1

    return cli.exit_code(run)


def convert_adapter(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_convert_adapter`: an adapter in another format."""
    parser = cli.new_parser(
        "mlx_parallm_convert_adapter", "Write an adapter in another format; any of them is read. LoRA, rsLoRA, DoRA."
    )
    parser.add_argument("source", metavar="SRC", help="the adapter's directory or file, e.g. checkpoints/my-run/best")
    parser.add_argument("target", metavar="DST", type=Path, help="new directory")
    parser.add_argument(
        "--format",
        choices=["npz", "mlx-lm", "peft"],
        required=True,
        help="npz: mlx-lm's arrays for numpy; mlx-lm: what training writes; peft: for transformers, vLLM, SGLang",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an adapter that is at DST")
    args = parser.parse_args(argv)

    def run() -> int:
        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.tools.convert_adapter import convert

        atexit.register(release_streams)
        report = convert(args.source, args.target, args.format, overwrite=args.overwrite)
        sys.stdout.write(f"{report.path}: {report.layers} {report.kind} layers in {args.format}'s format\n")
        return 0

    return cli.exit_code(run)


def replay(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_replay`: other settings on the rollouts of a run."""
    parser = cli.new_parser(
        "mlx_parallm_replay",
        "Train again on the rollouts that a run has kept, without generating, and show the metrics side by side.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--from", dest="start", metavar="STEP", help="its checkpoint to start from; default: its start")
    parser.add_argument("--steps", type=int, metavar="N", help="at most so many steps; default: all that are recorded")
    cli.add_set(parser)
    parser.add_argument(
        "--variant",
        metavar="KEY=VALUE",
        nargs="+",
        action="append",
        default=[],
        help="settings of one variant, beside --set; again for another one. Default: one, with --set alone",
    )
    args = parser.parse_args(argv)
    if args.steps is not None and args.steps < 1:
        parser.error("--steps: at least 1")

    def run() -> int:
        from mlx_parallm.blas import request_bitwise_reproducible_blas

        request_bitwise_reproducible_blas()  # the same command gives the same numbers
        from rich.console import Console

        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.tools.replay import replay as play
        from mlx_parallm.tools.replay import show

        atexit.register(release_streams)
        variants = [[*args.set, *own] for own in args.variant] or [args.set]
        found = play(
            args.run,
            variants,
            start=args.start,
            steps=args.steps,
            told=lambda line: sys.stderr.write(f"{line.strip()}\n"),
        )
        show(found, Console())
        return 0

    return cli.exit_code(run)
