"""The commands on existing things: runs, checkpoints, adapters, this machine.
Imports no MLX."""

import atexit
import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

from mlx_parallm.cli.command import ended_in_order, load, piped
from mlx_parallm.config.arguments import (
    Arguments,
    Configured,
    Count,
    Directory,
    KeyFile,
    Model,
    Name,
    RunDirectory,
    Url,
    flag,
    place,
    setting,
    toml_value,
)
from mlx_parallm.system.packages import require, require_mlx
from mlx_parallm.system.patterns import Pattern, PatternError

REPLAY_END_S = 60.0  # a step of a large model ends
Adapter = Annotated[str, "A"]
Range = tuple[float | None, float | None]


class Explain(Arguments):
    """`mlx_parallm explain`: why a run does not learn, from what it wrote."""

    run_dir: RunDirectory = place()
    """checkpoints/<run>, or one of its steps"""
    json: bool = False
    """for machines"""

    def run(self) -> int:
        from mlx_parallm.runs import explain
        from mlx_parallm.runs.run import open_run

        explanation = explain.explain(open_run(self.run_dir))
        sys.stdout.write(
            explain.as_json(explanation) if self.json else explain.as_text(explanation)
        )
        return 0 if explanation.healthy else 1


def _range(text: str) -> Range:
    """Read `A:B`, `A:`, `:B` or `A`."""
    first, colon, last = text.partition(":")
    try:
        bounds = [float(bound) if bound else None for bound in (first, last if colon else first)]
    except ValueError:
        bounds = []
    if not first + last or not bounds or any(bound != bound for bound in bounds):
        raise ArgumentTypeError(f"{text!r} is not a range: A:B, A:, :B or one number")
    return bounds[0], bounds[1]


def _pattern(text: str) -> Pattern:
    try:
        return Pattern(text)
    except PatternError as error:
        raise ArgumentTypeError(str(error)) from error


class Rollouts(Arguments):
    """`mlx_parallm rollouts`: the answers of a run, and what became of its groups."""

    run_dir: RunDirectory = place()
    """checkpoints/<run>, or one of its steps"""
    worst: bool = flag(one_of="order")
    """lowest reward first; default: the newest first"""
    best: bool = flag(one_of="order")
    """highest reward first"""
    show: str | None = flag(one_of="order", metavar="ID")
    """one group (its id, or how it begins) as a whole, or its n-th answer (ID#n) token by token"""
    counts: bool = flag(one_of="order")
    """groups by state, environment and version; why dropped"""
    rejects: bool = flag(one_of="order")
    """the newest groups that were refused, with the reason"""
    environment: Name | None = None
    """answers of this environment only"""
    state: Literal["waiting", "taken", "dropped", "quarantined"] | None = None
    """only groups of this kind"""
    step: Range | None = flag(metavar="A:B", type=_range)
    """only groups that steps A to B (or step A) took or dropped"""
    reward: Range | None = flag(metavar="A:B", type=_range)
    """with a reward from A to B: 0, 0.5:, --reward=-1:0"""
    text: str | None = flag(one_of="words")
    """with this text in the prompt or the answer, in upper or lower case"""
    regex: Pattern | None = flag(one_of="words", metavar="PATTERN", type=_pattern)
    """the same with a regular expression"""
    limit: Count | None = None
    """at most so many; default: 10, with --json all"""
    json: bool = False
    """for machines: a JSON object on each line"""

    @piped
    def run(self) -> int:
        choices = ("environment", "state", "step", "reward", "text", "regex")
        chosen = [name for name in choices if vars(self)[name]]
        if chosen and (self.show is not None or self.counts or self.rejects):
            self.error(
                f"--{chosen[0]} chooses among answers, which --show,"
                " --counts and --rejects do not list"
            )
        _look(self)
        return 0


def _matcher(args: Rollouts) -> Callable[[str], bool] | None:
    """Return whether an answer has the text, or the pattern, that is looked for."""
    if (pattern := args.regex) is not None:
        return lambda answer: pattern.search(answer) is not None
    if not args.text:
        return None
    text = args.text.casefold()
    return lambda answer: text in answer.casefold()


def _look(args: Rollouts) -> None:
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
            wanted = rollouts.Wanted(
                order="worst" if args.worst else "best" if args.best else "newest",
                environment=args.environment,
                state=args.state,
                steps=args.step or rollouts.EVERY,
                rewards=args.reward or rollouts.EVERY,
                text=_matcher(args),
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


class Compare(Arguments):
    """`mlx_parallm compare`: training runs side by side."""

    runs: list[RunDirectory] = place()
    """two run directories or more"""
    png: Annotated[Path, "FILE"] | None = None
    """also draw the curves of all runs over each other"""

    @piped
    def run(self) -> int:
        if len(self.runs) < 2:
            self.error("one run cannot be compared: two run directories or more")
        from mlx_parallm.runs import compare
        from mlx_parallm.system.terminal import as_text

        runs = compare.read_runs(self.runs)
        if self.png is not None:
            compare.write_png(runs, self.png)
        sys.stdout.write(as_text(compare.draw(runs)))
        if self.png is not None:
            sys.stdout.write(f"curves: {self.png}\n")
        return 0


class ShowCheckpoint(Arguments):
    """`mlx_parallm checkpoint`: show a checkpoint and whether it is complete."""

    path: Annotated[Path, "PATH"] = place()
    """one of a run's steps, or the run: its latest"""
    json: bool = False
    """for machines"""

    def run(self) -> int:
        from mlx_parallm.runs.show_checkpoint import as_text, describe

        description = describe(self.path)
        sys.stdout.write(
            json.dumps(description, indent=1) + "\n" if self.json else as_text(description)
        )
        return 0 if description["complete"] else 1


class Evaluate(Configured):
    """`mlx_parallm eval`: held-out problems answered, outside training."""

    config: Annotated[str, "FILE"] | None = None
    """a TOML file with environments, or a shipped one's name"""
    url: Url | None = None
    """ask this endpoint, e.g. http://127.0.0.1:8000/v1"""
    model: Model | None = setting("model.base_path")
    """directory, hub id or builtin:tiny; with --url the model's name"""
    lora_path: Adapter | None = setting("model.lora_path")
    """adapter to answer with, e.g. checkpoints/my-run/best"""
    api_key_file: KeyFile | None = setting("server.api_key_file")
    """with --url: file that holds the endpoint's API key"""
    problems: Annotated[int, "N"] | None = setting("evaluation.problems")
    """held-out problems of each environment"""
    samples: Annotated[int, "K"] | None = setting("evaluation.samples")
    """sampled answers to each problem, for pass@k"""
    concurrency: Count = 64
    """answers under way at once"""
    output: Directory | None = None
    """write results.json, samples.jsonl and samples.html"""
    compare: list[Path] = flag(nargs=2, action="store", metavar=("A", "B"))
    """instead: how result B differs from A (--output's)"""

    @ended_in_order()
    def run(self) -> int:
        if (self.config is None) != bool(self.compare):
            self.error("either --config, to evaluate, or --compare A B")
        if self.url and self.lora_path:
            self.error(
                "--lora-path is for a model on this machine; an endpoint's adapters have"
                " their own names: --model"
            )
        require_mlx()
        from mlx_parallm.runs import eval as evaluation
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.system.terminal import Console

        if self.compare:
            first, second = self.compare
            evaluation.compare(first, second, Console())
            return 0

        configure_logging(level="warning")
        flags = self.settings("model") if self.url else self.settings()
        config = load(self.config, [*self.set, *flags])
        if self.url:
            result = evaluation.evaluate_endpoint(config, self.url, self.model, self.concurrency)
        else:
            result = evaluation.evaluate_here(config, self.concurrency)
        if self.output:
            evaluation.write(result, self.output)
        evaluation.show(result.to_json(), Console())
        return 0


class ReplayRun(Configured):
    """`mlx_parallm replay`: other settings on the rollouts of a run."""

    directory: Annotated[Path, "RUN"] = place()
    """run directory"""
    start: Annotated[str, "STEP"] | None = flag("--from")
    """its checkpoint to start from; default: its start"""
    steps: Count | None = None
    """at most so many steps; default: all that are recorded"""
    variant: list[list[str]] = flag(nargs="+", metavar="KEY=VALUE", type=str)
    """settings of one variant, beside --set; again for another one. Default: one, with --set
    alone"""

    @ended_in_order(REPLAY_END_S)
    def run(self) -> int:
        require_mlx()
        from mlx_parallm.system.blas import request_bitwise_reproducible_blas

        request_bitwise_reproducible_blas()  # the same command gives the same numbers
        from mlx_parallm.models.threads import release_streams
        from mlx_parallm.runs.replay import replay as play
        from mlx_parallm.runs.replay import show
        from mlx_parallm.system.terminal import Console

        atexit.register(release_streams)
        variants = [[*self.set, *settings] for settings in self.variant] or [self.set]
        results = play(
            self.directory,
            variants,
            start=self.start,
            steps=self.steps,
            progress=lambda line: sys.stderr.write(f"{line.strip()}\n"),
        )
        show(results, Console())
        return 0


class Merge(Arguments):
    """`mlx_parallm merge`: write a base model with an adapter added to its weights."""

    base_model: Annotated[str, "B"]
    """directory, hub id or builtin:tiny"""
    lora_path: Adapter
    """the adapter's file or directory"""
    output_path: Annotated[Path, "O"] = flag("--output-path", "--output", required=True)
    """new directory; never overwritten"""
    format: Literal["safetensors", "mlx"] = "safetensors"
    """safetensors: the checkpoint's own tensor names, for transformers and mlx-lm; mlx: mlx-lm's
    names"""
    q_bits: Literal[4, 8] | None = None
    """quantise the sum, as `mlx_lm.convert -q` does; always with mlx-lm's names"""
    push_to_hub: Annotated[str, "ID"] | None = None
    """also upload the result to this hub repository"""

    def run(self) -> int:
        require_mlx()
        from mlx_parallm.deploy.merge_lora import merge
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        report = merge(
            self.base_model,
            self.lora_path,
            self.output_path,
            layout=self.format,
            bits=self.q_bits,
            push_to_hub=self.push_to_hub,
        )
        origin = ", from a dequantised base" if report.dequantized else ""
        sys.stdout.write(f"{report.path}: {report.layers} layers merged, {report.dtype}{origin}\n")
        if report.url:
            sys.stdout.write(f"uploaded to {report.url}\n")
        return 0


class Convert(Arguments):
    """`mlx_parallm convert`: an adapter in another format, or a GGUF file as a Hugging Face
    folder."""

    source: Annotated[str, "SRC"] = place()
    """an adapter's directory or file, e.g. checkpoints/my-run/best; or MODEL.gguf"""
    target: Annotated[Path, "DST"] = place()
    """new directory"""
    format: Annotated[str, "FORMAT"] | None = None
    """format of the adapter; npz: mlx-lm's arrays for numpy; mlx-lm: what training writes; peft:
    for transformers, vLLM, SGLang; peft-adalora: an AdaLoRA adapter's, with its singular values"""
    overwrite: bool = False
    """replace an adapter that is at DST"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """of a GGUF file's weights in DST; default: bfloat16, with --keep-quantization float16"""
    keep_quantization: bool = False
    """keep a GGUF file's 4 and 8 bits where MLX has such blocks (Q4_0, Q4_1, Q8_0; Q4_K with
    --dtype float32); other weights are unpacked, and counted"""

    def run(self) -> int:
        return self._gguf_file() if self.source.endswith(".gguf") else self._adapter()

    def _gguf_file(self) -> int:
        if self.format or self.overwrite:
            self.error(
                "--format and --overwrite are for adapters: a GGUF file"
                " becomes a Hugging Face folder"
            )
        require("reading GGUF", "gguf")
        require_mlx()
        from mlx_parallm.models.gguf.from_gguf import convert_gguf
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        keep = self.keep_quantization
        dtype = self.dtype or ("float16" if keep else "bfloat16")
        converted = convert_gguf(Path(self.source), self.target, dtype=dtype, keep=keep)
        sys.stdout.write("\n".join(converted.lines()) + "\n")
        return 0

    def _adapter(self) -> int:
        if self.dtype or self.keep_quantization or not self.format:
            self.error(
                "an adapter needs --format npz|mlx-lm|peft|peft-adalora; --dtype and"
                " --keep-quantization are for a GGUF file"
            )
        require_mlx()
        from mlx_parallm.deploy.convert_adapter import convert
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        report = convert(self.source, self.target, self.format, overwrite=self.overwrite)
        sys.stdout.write(
            f"{report.path}: {report.layers} {report.kind} layers in {self.format}'s format\n"
        )
        return 0


class Doctor(Configured):
    """`mlx_parallm doctor`: what this machine is, how fast it is, and what to do about anything
    slow."""

    contracts: bool = False
    """instead: try what this product promises on this device with --model, in about a minute, and
    print a block to paste into an issue; exit code 1: something does not hold"""
    model: Model | None = None
    """directory, hub id or builtin:tiny: what of its config.json is understood; where torch is
    installed, compares it with transformers on a text"""
    first_hour: bool = False
    """instead: contracts, a chat beside training, kill -9 and resume, memory and threads over time,
    on builtin:tiny and --model; prints a block to paste into an issue and writes a JSON file"""
    minutes: Annotated[float, "N"] = 10.0
    """--first-hour: of chat beside training, all models together"""
    json: Annotated[Path, "FILE"] = Path("first_hour.json")
    """--first-hour: the file that is written"""

    def run(self) -> int:
        if self.first_hour:
            from mlx_parallm.cli import first_hour

            return first_hour.run(self.model, self.set, self.minutes, self.json)
        if self.contracts and not self.model:
            self.error("--contracts needs --model M")
        if not self.model:
            from mlx_parallm.cli import doctor_report

            return doctor_report.run()
        config = load(None, [*self.set, f"model.base_path={toml_value(self.model)}"])
        if self.contracts:
            from mlx_parallm.system.hardware import use_whole_float32

            use_whole_float32()
        require_mlx()
        from mlx_parallm.cli import contracts
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        if not self.contracts:
            from mlx_parallm.cli import model_report

            return model_report.run(config.model)
        return contracts.run(config)
