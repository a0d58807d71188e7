"""The commands that work on what is there already: runs, checkpoints, adapters, this machine.
Imports no MLX."""

import atexit
import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from mlx_parallm.cli.command import Run, add_set, ended_in_order, load, piped, toml_value
from mlx_parallm.system.packages import require, require_mlx
from mlx_parallm.system.patterns import Pattern, PatternError

REPLAY_END_S = 60.0  # a step of a large model ends


def explain(parser: ArgumentParser) -> Run:
    """`mlx_parallm explain`: why a run does not learn, from what it wrote."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<run>, or one of its steps"
    )
    parser.add_argument("--json", action="store_true", help="for machines")

    def run(args: Namespace) -> int:
        from mlx_parallm.runs import explain
        from mlx_parallm.runs.run import open_run

        explanation = explain.explain(open_run(args.run_dir))
        sys.stdout.write(
            explain.as_json(explanation) if args.json else explain.as_text(explanation)
        )
        return 0 if explanation.healthy else 1

    return run


def rollouts(parser: ArgumentParser) -> Run:
    """`mlx_parallm rollouts`: the answers of a run, and what became of its groups."""
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<run>, or one of its steps"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--worst", action="store_true", help="lowest reward first; default: the newest first"
    )
    what.add_argument("--best", action="store_true", help="highest reward first")
    what.add_argument(
        "--show",
        metavar="ID",
        help=(
            "one group (its id, or how it begins) as a whole, or its"
            " n-th answer (ID#n) token by token"
        ),
    )
    what.add_argument(
        "--counts",
        action="store_true",
        help="groups by state, environment and version; why dropped",
    )
    what.add_argument(
        "--rejects",
        action="store_true",
        help="the newest groups that were refused, with the reason",
    )
    parser.add_argument("--environment", metavar="NAME", help="answers of this environment only")
    parser.add_argument(
        "--state",
        choices=["waiting", "taken", "dropped", "quarantined"],
        help="of such groups only",
    )
    parser.add_argument(
        "--step",
        metavar="A:B",
        type=_range,
        help="of groups that steps A to B took or dropped; or A",
    )
    parser.add_argument(
        "--reward",
        metavar="A:B",
        type=_range,
        help="with a reward from A to B: 0, 0.5:, --reward=-1:0",
    )
    words = parser.add_mutually_exclusive_group()
    words.add_argument(
        "--text", help="with this text in the prompt or the answer, in upper or lower case"
    )
    words.add_argument(
        "--regex", metavar="PATTERN", type=_pattern, help="the same with a regular expression"
    )
    parser.add_argument(
        "--limit", metavar="N", type=int, help="at most so many; default: 10, with --json all"
    )
    parser.add_argument(
        "--json", action="store_true", help="for machines: a JSON object on each line"
    )

    def run(args: Namespace) -> int:
        chosen = [
            name
            for name in ("environment", "state", "step", "reward", "text", "regex")
            if vars(args)[name]
        ]
        if chosen and (args.show is not None or args.counts or args.rejects):
            parser.error(
                f"--{chosen[0]} chooses among answers, which --show,"
                " --counts and --rejects do not list"
            )
        if args.limit is not None and args.limit < 1:
            parser.error("--limit: at least 1")
        _look(args)
        return 0

    return piped(run)


def _look(args: Namespace) -> None:
    from mlx_parallm.runs import rollouts, rollouts_text
    from mlx_parallm.runs.run import open_run
    from mlx_parallm.system.terminal import as_text

    with closing(rollouts.Answers(open_run(args.run_dir))) as answers:
        rows: Iterable[dict[str, Any]]
        if args.show is not None:
            rows = [answers.show(args.show)]
            parts = rollouts_text.draw_group(rows[0])
        elif args.counts:
            rows = [answers.counts()]
            parts = rollouts_text.draw_counts(rows[0])
        elif args.rejects:
            rows = answers.rejects(args.limit or rollouts_text.SHOWN)
            parts = rollouts_text.draw_rejects(rows)
        else:
            text = args.text and args.text.casefold()
            wanted = rollouts.Wanted(
                order="worst" if args.worst else "best" if args.best else "newest",
                environment=args.environment,
                state=args.state,
                steps=args.step or rollouts.EVERY,
                rewards=args.reward or rollouts.EVERY,
                text=args.regex.search
                if args.regex
                else (lambda answer: text in answer.casefold())
                if text
                else None,
                limit=args.limit or (None if args.json else rollouts_text.SHOWN_ANSWERS),
                once=not args.json,
            )
            rows = answers.rows(wanted)
            parts = rollouts_text.draw_rows(rows, answers)
        if not args.json:
            sys.stdout.write(as_text(parts))
            return
        for value in rows:
            sys.stdout.write(json.dumps(value) + "\n")
        for note in answers.notes:
            sys.stderr.write(f"note: {note}\n")


def compare(parser: ArgumentParser) -> Run:
    """`mlx_parallm compare`: training runs side by side."""
    parser.add_argument(
        "runs", metavar="RUN_DIR", type=Path, nargs="+", help="two run directories or more"
    )
    parser.add_argument(
        "--png",
        metavar="FILE",
        type=Path,
        help="also draw the curves of all runs over each other",
    )

    def run(args: Namespace) -> int:
        if len(args.runs) < 2:
            parser.error("one run cannot be compared: two run directories or more")
        from mlx_parallm.runs import compare
        from mlx_parallm.system.terminal import as_text

        runs = compare.read_runs(args.runs)
        if args.png is not None:
            compare.write_png(runs, args.png)
        sys.stdout.write(as_text(compare.draw(runs)))
        if args.png is not None:
            sys.stdout.write(f"curves: {args.png}\n")
        return 0

    return piped(run)


def _range(text: str) -> tuple[float | None, float | None]:
    """Read `A:B`, `A:`, `:B` or `A`."""
    first, colon, last = text.partition(":")
    try:
        bounds = [float(bound) if bound else None for bound in (first, last if colon else first)]
    except ValueError:
        bounds = []
    if not first + last or not bounds or any(bound != bound for bound in bounds):
        raise ArgumentTypeError(f"{text!r} is no range: A:B, A:, :B or one number")
    return bounds[0], bounds[1]


def _pattern(text: str) -> Pattern:
    try:
        return Pattern(text)
    except PatternError as error:
        raise ArgumentTypeError(str(error)) from error


def show_checkpoint(parser: ArgumentParser) -> Run:
    """`mlx_parallm checkpoint`: what a checkpoint holds, and whether all of it is there."""
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="one of a run's steps, or the run: its latest"
    )
    parser.add_argument("--json", action="store_true", help="for machines")

    def run(args: Namespace) -> int:
        from mlx_parallm.runs.show_checkpoint import as_text, describe

        description = describe(args.path)
        sys.stdout.write(
            json.dumps(description, indent=1) + "\n" if args.json else as_text(description)
        )
        return 0 if description["complete"] else 1

    return run


def evaluate(parser: ArgumentParser) -> Run:
    """`mlx_parallm eval`: held-out problems answered, outside training."""
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file with environments, or a shipped one's name"
    )
    parser.add_argument(
        "--url", metavar="URL", help="ask this endpoint, e.g. http://127.0.0.1:8000/v1"
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help="directory, hub id or builtin:tiny; with --url the model's name",
    )
    parser.add_argument(
        "--lora-path", metavar="A", help="adapter to answer with, e.g. checkpoints/my-run/best"
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="with --url: file that holds the endpoint's API key",
    )
    parser.add_argument(
        "--problems", type=int, metavar="N", help="held-out problems of each environment"
    )
    parser.add_argument(
        "--samples", type=int, metavar="K", help="sampled answers to each problem, for pass@k"
    )
    parser.add_argument(
        "--concurrency", type=int, default=64, metavar="N", help="answers under way at once (64)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write results.json, samples.jsonl and samples.html",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="instead: how result B differs from A (--output's)",
    )
    add_set(parser)

    def run(args: Namespace) -> int:
        if (args.config is None) == (args.compare is None):
            parser.error("either --config, to evaluate, or --compare A B")
        if args.url and args.lora_path:
            parser.error(
                "--lora-path is for a model on this machine; an endpoint's adapters have"
                " names of their own: --model"
            )
        if args.concurrency < 1:
            parser.error("--concurrency: at least 1")
        require_mlx()
        from mlx_parallm.runs import eval as evaluation
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.system.terminal import Console

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

    return ended_in_order(run)


def _evaluation_flags(args: Namespace) -> list[str]:
    settings = {
        "evaluation.problems": args.problems,
        "evaluation.samples": args.samples,
        "model.base_path": None if args.url else args.model,
        "model.lora_path": args.lora_path,
        "server.api_key_file": args.api_key_file,
    }
    return [f"{key}={toml_value(value)}" for key, value in settings.items() if value is not None]


def replay(parser: ArgumentParser) -> Run:
    """`mlx_parallm replay`: other settings on the rollouts of a run."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="STEP",
        help="its checkpoint to start from; default: its start",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="at most so many steps; default: all that are recorded",
    )
    add_set(parser)
    parser.add_argument(
        "--variant",
        metavar="KEY=VALUE",
        nargs="+",
        action="append",
        default=[],
        help=(
            "settings of one variant, beside --set; again for another one."
            " Default: one, with --set alone"
        ),
    )

    def run(args: Namespace) -> int:
        if args.steps is not None and args.steps < 1:
            parser.error("--steps: at least 1")
        require_mlx()
        from mlx_parallm.system.blas import request_bitwise_reproducible_blas

        request_bitwise_reproducible_blas()  # the same command gives the same numbers
        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.runs.replay import replay as play
        from mlx_parallm.runs.replay import show
        from mlx_parallm.system.terminal import Console

        atexit.register(release_streams)
        variants = [[*args.set, *settings] for settings in args.variant] or [args.set]
        results = play(
            args.run,
            variants,
            start=args.start,
            steps=args.steps,
            progress=lambda line: sys.stderr.write(f"{line.strip()}\n"),
        )
        show(results, Console())
        return 0

    return ended_in_order(run, REPLAY_END_S)


def merge_lora(parser: ArgumentParser) -> Run:
    """`mlx_parallm merge`: write a base model with an adapter added to its weights."""
    parser.add_argument(
        "--base-model", required=True, metavar="B", help="directory, hub id or builtin:tiny"
    )
    parser.add_argument(
        "--lora-path", required=True, metavar="A", help="the adapter's file or directory"
    )
    parser.add_argument(
        "--output-path",
        "--output",
        required=True,
        type=Path,
        metavar="O",
        help="new directory; never overwritten",
    )
    parser.add_argument(
        "--format",
        choices=["safetensors", "mlx"],
        default="safetensors",
        help=(
            "safetensors: the checkpoint's own tensor names, for transformers and mlx-lm; mlx:"
            " mlx-lm's names"
        ),
    )
    parser.add_argument(
        "--q-bits",
        type=int,
        choices=[4, 8],
        help="quantise the sum, as `mlx_lm.convert -q` does; always with mlx-lm's names",
    )
    parser.add_argument(
        "--push-to-hub", metavar="ID", help="also upload the result to this hub repository"
    )

    def run(args: Namespace) -> int:
        require_mlx()
        from mlx_parallm.deploy.merge_lora import merge
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        report = merge(
            args.base_model,
            args.lora_path,
            args.output_path,
            layout=args.format,
            bits=args.q_bits,
            push_to_hub=args.push_to_hub,
        )
        origin = ", from a dequantised base" if report.dequantized else ""
        sys.stdout.write(f"{report.path}: {report.layers} layers merged, {report.dtype}{origin}\n")
        if report.url:
            sys.stdout.write(f"uploaded to {report.url}\n")
        return 0

    return run


def convert(parser: ArgumentParser) -> Run:
    """`mlx_parallm convert`: an adapter in another format, or a GGUF file as a Hugging Face
    folder."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="an adapter's directory or file, e.g. checkpoints/my-run/best; or MODEL.gguf",
    )
    parser.add_argument("target", metavar="DST", type=Path, help="new directory")
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="of an adapter; npz: mlx-lm's arrays for numpy; mlx-lm: what training writes; peft:"
        " for transformers,"
        " vLLM, SGLang; peft-adalora: an AdaLoRA adapter's, with its singular values",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an adapter that is at DST"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="of a GGUF file's weights in DST; default: bfloat16, with --keep-quantization float16",
    )
    parser.add_argument(
        "--keep-quantization",
        action="store_true",
        help="keep a GGUF file's 4 and 8 bits where MLX has such blocks (Q4_0, Q4_1, Q8_0; Q4_K"
        " with --dtype float32);"
        " other weights are unpacked, and counted",
    )

    def run(args: Namespace) -> int:
        from_gguf = str(args.source).endswith(".gguf")
        if from_gguf and (args.format or args.overwrite):
            parser.error(
                "--format and --overwrite are for adapters: a GGUF file"
                " becomes a Hugging Face folder"
            )
        if not from_gguf and (args.dtype or args.keep_quantization or not args.format):
            parser.error(
                "an adapter needs --format npz|mlx-lm|peft|peft-adalora; --dtype and"
                " --keep-quantization are for a GGUF file"
            )
        if from_gguf:
            require("reading GGUF", "gguf")
        require_mlx()
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        if from_gguf:
            from mlx_parallm.models.gguf.from_gguf import convert_gguf

            keep = args.keep_quantization
            dtype = args.dtype or ("float16" if keep else "bfloat16")
            converted = convert_gguf(Path(args.source), args.target, dtype=dtype, keep=keep)
            sys.stdout.write("\n".join(converted.lines()) + "\n")
            return 0
        from mlx_parallm.deploy import convert_adapter

        report = convert_adapter.convert(
            args.source, args.target, args.format, overwrite=args.overwrite
        )
        sys.stdout.write(
            f"{report.path}: {report.layers} {report.kind} layers in {args.format}'s format\n"
        )
        return 0

    return run


def doctor(parser: ArgumentParser) -> Run:
    """`mlx_parallm doctor`: what this machine is, how fast it is, and what to do about anything
    slow."""
    parser.add_argument(
        "--contracts",
        action="store_true",
        help="instead: try what this product promises on this device with --model, in about a"
        " minute, and print a block"
        " to paste into an issue; exit code 1: something does not hold",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help="directory, hub id or builtin:tiny: what of its config.json is understood; where torch"
        " is installed, compares it with transformers on a text",
    )
    parser.add_argument(
        "--first-hour",
        action="store_true",
        help="instead: contracts, a chat beside training, kill -9 and resume, memory and threads"
        " over time, on builtin:tiny and --model; prints a block to paste into"
        " an issue and writes a JSON file",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="N",
        help="--first-hour: of chat beside training, all models together (default: 10)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        default="first_hour.json",
        help="--first-hour: the file that is written (default: first_hour.json)",
    )
    add_set(parser)

    def run(args: Namespace) -> int:
        if args.first_hour:
            from mlx_parallm.cli import first_hour

            return first_hour.run(args.model, args.set, args.minutes, Path(args.json))
        if args.contracts and not args.model:
            parser.error("--contracts needs --model M")
        if not args.model:
            from mlx_parallm.cli import doctor_report

            return doctor_report.run()
        config = load(None, [*args.set, f"model.base_path={toml_value(args.model)}"])
        if args.contracts:
            from mlx_parallm.system.hardware import use_whole_float32

            use_whole_float32()
        require_mlx()
        from mlx_parallm.cli import contracts
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        if not args.contracts:
            from mlx_parallm.cli import model_report

            return model_report.run(config.model)
        return contracts.run(config)

    return run
