"""The commands: parse → configuration → one call. Imports no MLX; `--help` answers in a fraction of a second.

mlx_parallm_train → `daemon.run_training` · mlx_parallm_serve → `daemon.run_server` · mlx_parallm_merge_lora →
`tools.merge_lora.merge` · mlx_parallm_doctor → `tools.{doctor,contracts}.run` · mlx_parallm_explain →
`rl_training.explain.explain` · mlx_parallm_rollouts → `tools.rollouts`. An error made on purpose (`ParallmError`) is
one line on stderr and exit code 2; anything else is a bug and keeps its traceback.
"""

import argparse
import atexit
import faulthandler
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm import __version__
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.system.redaction import Redactor, environment_secrets
from mlx_parallm.system.signals import block_shutdown_signals

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config

EXIT_ERROR = 2


def train(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_train`: serve a model and train it at the same time."""
    parser = new_parser("mlx_parallm_train", "Serve a model over an OpenAI-compatible API and train it meanwhile.")
    parser.add_argument("--config", metavar="FILE", help="a TOML file, or the name of a shipped one (quickstart, …)")
    parser.add_argument(
        "--resume", metavar="DIR", help='a run directory or one of its steps; "auto": the latest, else a fresh start'
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start again, from the newest checkpoint, when the process is killed or aborts; N times without a new one",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="load, show a scored group of each environment, measure a few steps, say what the run will need; keep"
        " nothing",
    )
    _add_own_data(parser)
    add_set(parser)
    args = parser.parse_args(argv)
    if args.dry_run and args.resume:
        parser.error("--dry-run starts anew: it takes no --resume")
    if args.restarts < 0:
        parser.error("--restarts: at least 0")

    def run() -> int:
        if args.write_config:
            return _write_config(args)
        config = _training_config(args)
        from mlx_parallm.rl_training.run_directory import directory_of, with_run_name

        resume = args.resume or config.rl_training.resume
        config = with_run_name(config, args.config or args.data, resume)
        if args.dry_run:
            _before_mlx(config)
            from mlx_parallm.daemon import run_dry_run

            return run_dry_run(config)
        if args.restarts > 0:
            from mlx_parallm.cli.supervisor import supervise

            arguments = sys.argv[1:] if argv is None else argv
            run_directory = directory_of(config, resume)
            return supervise(arguments, config, run_directory, resume=resume, restarts=args.restarts)
        _before_mlx(config)
        from mlx_parallm.daemon import run_training

        return run_training(config, resume=resume)

    return exit_code(run)


def serve(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_serve`: serve a model, with adapters if wanted, without training."""
    parser = new_parser("mlx_parallm_serve", "Serve a model over an OpenAI-compatible API.")
    parser.add_argument("--model-path", metavar="M", help="directory, hub id or builtin:tiny")
    parser.add_argument(
        "--lora-path",
        metavar="[NAME=]A",
        action="extend",
        nargs="+",
        default=[],
        help="adapter file or directory: A alone becomes the served model, NAME=A is served beside it under NAME",
    )
    parser.add_argument("--host", help="address to bind; anything but loopback needs an API key")
    parser.add_argument("--port", type=int, help="0 takes a free one and prints it")
    parser.add_argument("--api-key-file", metavar="FILE", help="file that holds the API key")
    parser.add_argument(
        "--atropos-queue",
        metavar="DIR",
        type=Path,
        help="serve a durable Atropos queue under /atropos, kept in DIR, for an outside trainer",
    )
    parser.add_argument("--config", metavar="FILE", help="a TOML file with [server] and [model]")
    add_set(parser)
    args = parser.parse_args(argv)
    if not args.model_path and not args.config:
        parser.error("--model-path is required (or --config with model.base_path)")

    def run() -> int:
        own, named = _split_adapters(args.lora_path)
        given = {
            "model.base_path": args.model_path,
            "model.lora_path": own,
            "server.host": args.host,
            "server.port": args.port,
            "server.api_key_file": args.api_key_file,
        }
        flags = [f"{key}={toml_value(value)}" for key, value in given.items() if value is not None]
        config = load(args.config, args.set + flags)
        _before_mlx(config)
        from mlx_parallm.daemon import run_server

        return run_server(config, named, args.atropos_queue)

    return exit_code(run)


def merge_lora(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_merge_lora`: write a base model with an adapter added to its weights."""
    parser = new_parser("mlx_parallm_merge_lora", "Add an adapter to its base model and save the result as a model.")
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
    args = parser.parse_args(argv)

    def run() -> int:
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

    return exit_code(run)


def doctor(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_doctor`: what this machine is, how fast it is, and what to do about anything slow."""
    parser = new_parser(
        "mlx_parallm_doctor",
        "Show device, BLAS and its measured speed, memory, versions. Exit code 0: nothing to mend; 1: see the advice.",
    )
    parser.add_argument(
        "--contracts",
        action="store_true",
        help="instead: try what this product promises on this device with --model, in about a minute, and print a block"
        " to paste into an issue; exit code 1: something does not hold",
    )
    parser.add_argument("--model", metavar="M", help="with --contracts: directory, hub id or builtin:tiny")
    add_set(parser)
    args = parser.parse_args(argv)
    if args.contracts != bool(args.model):
        parser.error("--contracts and --model M go together")

    def run() -> int:
        from mlx_parallm.models.threads import release_streams

        atexit.register(release_streams)
        if args.contracts:
            config = load(None, [*args.set, f"model.base_path={toml_value(args.model)}"])
            from mlx_parallm.tools import contracts

            return contracts.run(config)
        from mlx_parallm.tools import doctor

        return doctor.run()

    return exit_code(run)


def explain(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_explain`: why a run does not learn, from what it wrote."""
    parser = new_parser(
        "mlx_parallm_explain",
        "Say what a run did and which of the known ways to not learn it shows, with the numbers and the setting to"
        " change. Works while it runs, too. Exit code 0: nothing found; 1: something is named.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<run>, or one of its steps")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args(argv)

    def run() -> int:
        from mlx_parallm.rl_training.monitor import explain

        explanation = explain.explain(args.run_dir)
        sys.stdout.write(explain.as_json(explanation) if args.json else explain.as_text(explanation))
        return 1 if explanation.findings else 0

    return exit_code(run)


def rollouts(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm_rollouts`: what became of the groups of a run."""
    parser = new_parser(
        "mlx_parallm_rollouts",
        "Show what became of every group of rollouts of a run: counts by state, environment and policy version; one"
        " group; or what was refused. Reads only, also while the run goes on.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="checkpoints/<run>, or one of its steps")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--show",
        metavar="ID",
        help="one group (its id, or how it begins), or its n-th rollout (ID#n): tokens, masks, logprobs, scores",
    )
    what.add_argument("--rejects", action="store_true", help="the newest groups that were refused, with the reason")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args(argv)

    def run() -> int:
        from mlx_parallm.tools import rollouts

        if args.show is not None:
            found, parts = rollouts.show(args.run_dir, args.show), rollouts.draw_group
        elif args.rejects:
            found, parts = rollouts.rejects(args.run_dir, rollouts.SHOWN), rollouts.draw_rejects
        else:
            found, parts = rollouts.summary(args.run_dir), rollouts.draw_summary
        sys.stdout.write(json.dumps(found, indent=1) + "\n" if args.json else rollouts.as_text(parts(found)))
        return 0

    return exit_code(run)


def new_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mlx-parallm {__version__}")
    return parser


def add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="SECTION.KEY=VALUE",
        action="append",
        default=[],
        help="override one key of the configuration; may be repeated",
    )


def exit_code(run: Callable[[], int]) -> int:
    # Without a PATH a compiler is found but cannot find its own parts, and MLX's compiled kernels die with it.
    os.environ["PATH"] = os.environ.get("PATH") or os.defpath
    try:
        return run()
    except ParallmError as error:
        sys.stderr.write(f"error: {Redactor(environment_secrets()).text(str(error))}\n")
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 130


def _before_mlx(config: "Config") -> None:
    """What must happen while no thread but this one runs and MLX is not loaded (docs/design.md)."""
    faulthandler.enable()  # a crash in native code says in which thread and where
    block_shutdown_signals()
    if config.rl_training.deterministic:
        from mlx_parallm.system.blas import request_bitwise_reproducible_blas

        request_bitwise_reproducible_blas()


def _add_own_data(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("your model, your data, your reward", "instead of --config; see docs/your_data.md")
    own.add_argument("--model", metavar="M", help="directory, hub id or builtin:tiny")
    own.add_argument("--data", metavar="ROWS", help="a JSONL file with a column prompt, or hf:owner/name")
    own.add_argument(
        "--reward",
        metavar="FILE.py:F",
        action="append",
        default=[],
        help="reward function f(prompts, completions, **columns) -> list of numbers; may be repeated, their sum counts",
    )
    own.add_argument("--algorithm", metavar="A", help="dpo, sft, …: learn from the rows (docs/training_on_data.md)")
    own.add_argument("--write-config", metavar="FILE", help="write the TOML that these flags amount to, and stop")


def _training_config(args: argparse.Namespace) -> "Config":
    """From the flags of `train`: a file, a run's own configuration, or model, data and reward."""
    base = [f"model.base_path={toml_value(args.model)}"] if args.model else []
    if args.data or args.reward or args.algorithm:
        config = load(None, args.set, text=_own_data(args))
        return _as_it_began(config, args) if args.resume == "auto" else config
    source = args.config
    if source is None:
        if args.resume is None or args.resume == "auto":
            raise ConfigError(
                "--config is required, or --model with --data and --reward"
                " (a run directory given to --resume brings its own configuration)"
            )
        from mlx_parallm.rl_training.run_directory import saved_config

        return load(str(saved_config(Path(args.resume).expanduser())), args.set + base, saved=True)
    return load(source, args.set + base)


def _as_it_began(config: "Config", args: argparse.Namespace) -> "Config":
    """What the run that `--resume auto` finds was started with. Some values that the flags amount to follow from the
    model's size, and that is a guess until the model has been downloaded: written anew they could differ."""
    from mlx_parallm.cli.dataset_config import what_flags_said
    from mlx_parallm.rl_training.run_directory import CONFIG_FILE, directory_of, with_run_name

    saved = directory_of(with_run_name(config, args.data, "auto"), "auto") / CONFIG_FILE
    if not saved.is_file():
        return config
    began = load(str(saved), args.set, saved=True)
    for (flag, given), (_, found) in zip(what_flags_said(config), what_flags_said(began), strict=False):
        if given != found:
            raise ConfigError(f"{flag} is {given}, but {saved.parent} was started with {found}: remove or rename it")
    return began


def _own_data(args: argparse.Namespace) -> str:
    from mlx_parallm.cli.dataset_config import toml_for, toml_for_rows

    if args.config:
        raise ConfigError(
            "--config and --data with --reward are two ways to say one thing: give one of them (see --write-config);"
            " to change a file's: --set environments.0.data=… and --set 'environments.0.rewards=[\"python:…\"]'"
        )
    if args.resume not in (None, "auto"):
        raise ConfigError(f"--resume {args.resume} brings its own configuration: leave out --data and --reward")
    for flag, value in (("--model", args.model), ("--data", args.data)):
        if not value:
            raise ConfigError(f"{flag} is missing: --model M --data ROWS --reward FILE.py:FUNCTION go together")
    if args.algorithm:
        return toml_for_rows(args.model, args.data, args.algorithm, args.reward)
    return toml_for(args.model, args.data, args.reward)


def _write_config(args: argparse.Namespace) -> int:
    if args.set:
        raise ConfigError("--write-config writes what --model, --data and --reward amount to: put --set into the file")
    text, file = _own_data(args), Path(args.write_config)
    try:
        with file.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except OSError as error:
        raise ConfigError(f"--write-config {file}: {error.strerror or error}") from error
    sys.stdout.write(f"wrote {file}; train with: mlx_parallm_train --config {file}\n")
    return 0


def load(source: str | None, overrides: list[str], text: str = "", *, saved: bool = False) -> "Config":
    from mlx_parallm.config.load import load_config
    from mlx_parallm.system.hardware import defaults, detect

    return load_config(source, overrides, defaults(detect()), text=text, saved=saved)


def _split_adapters(given: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """`A` (at most one) and `name=A` (any number) → (A, {name: A})."""
    own: list[str] = []
    named: dict[str, str] = {}
    for entry in given:
        name, separator, path = entry.partition("=")
        if not separator or Path(entry).exists():
            own.append(entry)
        elif not name or not path or name in named:
            raise ConfigError(f"--lora-path {entry!r}: expected name=path, each name once")
        else:
            named[name] = path
    if len(own) > 1:
        raise ConfigError(f"--lora-path: {', '.join(own)}: name all but one of them (name=path)")
    return (own[0] if own else None), named


def toml_value(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)  # a JSON string or integer is a TOML one
