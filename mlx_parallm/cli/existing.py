"""The commands that work on what is there already: runs, checkpoints, adapters, this machine. Imports no MLX."""

import atexit
import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from mlx_parallm.cli.command import Run, add_set, load, toml_value


def explain(parser: ArgumentParser) -> Run:
    """`mlx_parallm explain`: why a run does not learn, from what it wrote."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<run>, or one of its steps")
    parser.add_argument("--json", action="store_true", help="for machines")

    def run(args: Namespace) -> int:
        from mlx_parallm.rl_training.monitor import explain

        explanation = explain.explain(args.run_dir)
        sys.stdout.write(explain.as_json(explanation) if args.json else explain.as_text(explanation))
        return 1 if explanation.findings else 0

    return run


def rollouts(parser: ArgumentParser) -> Run:
    """`mlx_parallm rollouts`: what became of the groups of a run."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<run>, or one of its steps")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--show",
        metavar="ID",
        help="one group (its id, or how it begins), or its n-th rollout (ID#n): tokens, masks, logprobs, scores",
    )
    what.add_argument("--rejects", action="store_true", help="the newest groups that were refused, with the reason")
    parser.add_argument("--json", action="store_true", help="for machines")

    def run(args: Namespace) -> int:
        from mlx_parallm.tools import rollouts

        if args.show is not None:
            found, parts = rollouts.show(args.run_dir, args.show), rollouts.draw_group
        elif args.rejects:
            found, parts = rollouts.rejects(args.run_dir, rollouts.SHOWN), rollouts.draw_rejects
        else:
            found, parts = rollouts.summary(args.run_dir), rollouts.draw_summary
        sys.stdout.write(json.dumps(found, indent=1) + "\n" if args.json else rollouts.as_text(parts(found)))
        return 0

    return run


def show_checkpoint(parser: ArgumentParser) -> Run:
    """`mlx_parallm checkpoint`: what a checkpoint holds, and whether all of it is there."""
    parser.add_argument("path", metavar="PATH", type=Path, help="one of a run's steps, or the run: its latest")
    parser.add_argument("--json", action="store_true", help="for machines")

    def run(args: Namespace) -> int:
        from mlx_parallm.tools.show_checkpoint import as_text, describe

        found = describe(args.path)
        sys.stdout.write(json.dumps(found, indent=1) + "\n" if args.json else as_text(found))
        return 0 if found["complete"] else 1

    return run


def evaluate(parser: ArgumentParser) -> Run:
    """`mlx_parallm eval`: held-out problems answered, outside training."""
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
    add_set(parser)

    def run(args: Namespace) -> int:
        if (args.config is None) == (args.compare is None):
            parser.error("either --config, to evaluate, or --compare A B")
        if args.url and args.lora_path:
            parser.error(
                "--lora-path is for a model on this machine; an endpoint's adapters have names of their own: --model"
            )
        if args.concurrency < 1:
            parser.error("--concurrency: at least 1")
        from rich.console import Console

        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.tools import eval as evaluation

        if args.compare:
            first, second = args.compare
            evaluation.compare(first, second, Console())
            return 0

        configure_logging(level="warning")
        config = load(args.config, [*args.set, *_evaluation_flags(args)])
        if args.url:
            result = evaluation.evaluate_endpoint(config, args.url, args.model, args.concurrency)
        else:
            result = evaluation.evaluate_here(config, args.concurrency)
        if args.output:
            evaluation.write(result, args.output)
        evaluation.show(result.to_json(), Console())
        return 0

    return run


def _evaluation_flags(args: Namespace) -> list[str]:
    given = {
        "evaluation.problems": args.problems,
        "evaluation.samples": args.samples,
        "model.base_path": None if args.url else args.model,
        "model.lora_path": args.lora_path,
        "server.api_key_file": args.api_key_file,
    }
    return [f"{key}={toml_value(value)}" for key, value in given.items() if value is not None]


def replay(parser: ArgumentParser) -> Run:
    """`mlx_parallm replay`: other settings on the rollouts of a run."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("--from", dest="start", metavar="STEP", help="its checkpoint to start from; default: its start")
    parser.add_argument("--steps", type=int, metavar="N", help="at most so many steps; default: all that are recorded")
    add_set(parser)
    parser.add_argument(
        "--variant",
        metavar="KEY=VALUE",
        nargs="+",
        action="append",
        default=[],
        help="settings of one variant, beside --set; again for another one. Default: one, with --set alone",
    )

    def run(args: Namespace) -> int:
        if args.steps is not None and args.steps < 1:
            parser.error("--steps: at least 1")
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
            progress=lambda line: sys.stderr.write(f"{line.strip()}\n"),
        )
        show(found, Console())
        return 0

    return run


def merge_lora(parser: ArgumentParser) -> Run:
    """`mlx_parallm merge`: write a base model with an adapter added to its weights."""
    parser.add_argument("--base-model", required=True, metavar="B", help="directory, hub id or builtin:tiny")
    parser.add_argument("--lora-path", required=True, metavar="A", help="the adapter's file or directory")
    parser.add_argument(
        "--output-path", "--output", required=True, type=Path, metavar="O", help="new directory; never overwritten"
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", "mlx"],
        default="safetensors",
        help="safetensors: the checkpoint's own tensor names, for transformers and mlx-lm; mlx: mlx-lm's names",
    )
    parser.add_argument("--push-to-hub", metavar="ID", help="also upload the result to this hub repository")

    def run(args: Namespace) -> int:
        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.tools.merge_lora import merge

        atexit.register(release_streams)
        report = merge(
            args.base_model, args.lora_path, args.output_path, layout=args.format, push_to_hub=args.push_to_hub
        )
        origin = ", from a dequantised base" if report.dequantized else ""
        sys.stdout.write(f"{report.path}: {report.layers} layers merged, {report.dtype}{origin}\n")
        if report.url:
            sys.stdout.write(f"uploaded to {report.url}\n")
        return 0

    return run


def convert_adapter(parser: ArgumentParser) -> Run:
    """`mlx_parallm convert`: an adapter in another format."""
    parser.add_argument("source", metavar="SRC", help="the adapter's directory or file, e.g. checkpoints/my-run/best")
    parser.add_argument("target", metavar="DST", type=Path, help="new directory")
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        required=True,
        help="npz: mlx-lm's arrays for numpy; mlx-lm: what training writes; peft: for transformers, vLLM, SGLang",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an adapter that is at DST")

    def run(args: Namespace) -> int:
        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.tools.convert_adapter import convert

        atexit.register(release_streams)
        report = convert(args.source, args.target, args.format, overwrite=args.overwrite)
        sys.stdout.write(f"{report.path}: {report.layers} {report.kind} layers in {args.format}'s format\n")
        return 0

    return run


def doctor(parser: ArgumentParser) -> Run:
    """`mlx_parallm doctor`: what this machine is, how fast it is, and what to do about anything slow."""
    parser.add_argument(
        "--contracts",
        action="store_true",
        help="instead: try what this product promises on this device with --model, in about a minute, and print a block"
        " to paste into an issue; exit code 1: something does not hold",
    )
    parser.add_argument("--model", metavar="M", help="with --contracts: directory, hub id or builtin:tiny")
    add_set(parser)

    def run(args: Namespace) -> int:
        if args.contracts != bool(args.model):
            parser.error("--contracts and --model M go together")
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        if args.contracts:
            config = load(None, [*args.set, f"model.base_path={toml_value(args.model)}"])
            from mlx_parallm.tools import contracts

            return contracts.run(config)
        from mlx_parallm.tools import doctor

        return doctor.run()

    return run
