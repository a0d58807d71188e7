"""Commands on what a run has left behind, beside those of cli.py and made like them. Imports no MLX.

mlx_parallm_show_checkpoint → `tools.show_checkpoint` · mlx_parallm_convert_adapter → `tools.convert_adapter.convert`
mlx_parallm_replay → `tools.replay.replay` · mlx_parallm_eval → `tools.eval`
"""

import argparse
import atexit
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_parallm.cli import commands as cli


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
        from mlx_parallm.system.blas import request_bitwise_reproducible_blas

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


def evaluate(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_eval`: held-out problems answered, outside training."""
    parser = cli.new_parser(
        "mlx_parallm_eval",
        "Answer the held-out problems of a configuration's environments, with a model on this machine or over any"
        " OpenAI-compatible endpoint, and print accuracy and pass@k with 95% intervals; or compare two such results.",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with environments, or a shipped one's name")
    parser.add_argument("--url", metavar="URL", help="ask this endpoint, e.g. http://127.0.0.1:8000/v1")
    parser.add_argument("--model", metavar="M", help="directory, hub id or builtin:tiny; with --url the model's name")
    parser.add_argument("--lora-path", metavar="A", help="adapter to answer with, e.g. checkpoints/my-run/best")
    parser.add_argument("--api-key-file", metavar="FILE", help="with --url: file that holds the endpoint's API key")
    parser.add_argument("--problems", type=int, metavar="N", help="held-out problems of each environment")
    parser.add_argument("--samples", type=int, metavar="K", help="sampled answers to each problem, for pass@k")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N", help="answers under way at once (64)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write results.json, samples.jsonl and samples.html")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"), help="instead: how result B differs from A (--output's)"
    )
    cli.add_set(parser)
    args = parser.parse_args(argv)
    if (args.config is None) == (args.compare is None):
        parser.error("either --config, to evaluate, or --compare A B")
    if args.url and args.lora_path:
        parser.error(
            "--lora-path is for a model on this machine; an endpoint's adapters have names of their own: --model"
        )
    if args.concurrency < 1:
        parser.error("--concurrency: at least 1")

    def run() -> int:
        from rich.console import Console

        if args.compare:
            from mlx_parallm.tools.eval_compare import compare

            first, second = args.compare
            compare(first, second, Console())
            return 0
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.tools import eval as evaluation

        configure_logging(level="warning")
        config = cli.load(args.config, [*args.set, *_evaluation_flags(args)])
        if args.url:
            result = evaluation.evaluate_endpoint(config, args.url, args.model, args.concurrency)
        else:
            result = evaluation.evaluate_here(config, args.concurrency)
        if args.output:
            evaluation.write(result, args.output)
        evaluation.show(result.to_json(), Console())
        return 0

    return cli.exit_code(run)


def _evaluation_flags(args: argparse.Namespace) -> list[str]:
    given = {
        "evaluation.problems": args.problems,
        "evaluation.samples": args.samples,
        "model.base_path": None if args.url else args.model,
        "model.lora_path": args.lora_path,
        "server.api_key_file": args.api_key_file,
    }
    return [f"{key}={cli.toml_value(value)}" for key, value in given.items() if value is not None]
