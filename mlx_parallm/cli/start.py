"""`train` and `serve`: flags → configuration → one call of the daemon. Imports no MLX."""

import faulthandler
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.cli.command import Run, add_set, end_of_training, load, toml_value
from mlx_parallm.config.leaves import leaves
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.device.heartbeat import supervised
from mlx_parallm.system.files import is_directory, is_file
from mlx_parallm.system.hardware import launched_rank
from mlx_parallm.system.packages import require_mlx
from mlx_parallm.system.signals import block_shutdown_signals

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config
    from mlx_parallm.config.server import ServerConfig
    from mlx_parallm.system.log import RunLog


def train(parser: ArgumentParser) -> Run:
    """`mlx_parallm train`: serve a model and train it at the same time."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file, or the name of a shipped one (quickstart, …)",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help='a run directory or one of its steps; "auto": the latest, else a fresh start',
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help=(
            "start again, from the newest checkpoint, after a fault of the GPU, a kill or a hang; N"
            " times without a new one"
        ),
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help=(
            "train with N processes on this machine, each with an engine of its own"
            " (docs/operations.md#several-processes)"
        ),
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="load, show a scored group of each environment, measure a few steps, say what"
        " the run will need; keep nothing",
    )
    _add_dataset_flags(parser)
    add_set(parser)

    def run(args: Namespace) -> int:
        if args.dry_run and args.resume:
            raise ConfigError(
                "--dry-run starts anew: leave out --resume to try the configuration, or"
                " --dry-run to continue the run"
            )
        if args.restarts < 0:
            parser.error("--restarts: at least 0")
        several = _several_ranks(args)
        if args.write_config:
            return _write_config(args)
        config = _training_config(args)
        require_mlx()
        from mlx_parallm.run_files.directory import directory_of

        resume = args.resume or config.rl_training.resume
        config = _named(config, args.config or args.data, resume)
        training = config.rl_training
        if args.dry_run:
            _before_mlx(deterministic=training.deterministic)
            from mlx_parallm.daemon import run_dry_run

            return run_dry_run(config)
        if training.restart_every and several:
            raise ConfigError(
                "rl_training.restart_every starts one process anew: leave it or --ranks out"
            )
        if args.restarts > 0 or several or (training.restart_every and not supervised()):
            from mlx_parallm.system.log import RunLog, configure_logging

            place = directory_of(training.checkpoint_dir, training.run_name, resume)
            with RunLog(config.redactor()) as run_log:
                level, redactor = config.logging.level, run_log.redactor
                configure_logging(level=level, redactor=redactor, run_log=run_log)
                continues = training.on_rank_lost == "continue" if several else None
                waits = {"rest_s": training.restart_pause_s, "silence_s": training.max_silence_s}
                return _run_children(args, config.server, place, resume, continues, run_log, waits)
        if (
            args.ranks is None
            and config.rl_training.on_rank_lost == "continue"
            and launched_rank() is not None
        ):
            raise ConfigError(
                'rl_training.on_rank_lost = "continue" needs --ranks N: under mlx.launch a lost'
                " rank ends the run, and"
                " --resume auto goes on with the hosts that are left"
            )
        _before_mlx(deterministic=training.deterministic)
        from mlx_parallm.daemon import run_training

        return end_of_training(run_training(config, resume=resume))

    return run


def serve(parser: ArgumentParser) -> Run:
    """`mlx_parallm serve`: serve a model, with adapters if wanted, without training."""
    parser.add_argument("--model-path", metavar="M", help="directory, hub id or builtin:tiny")
    parser.add_argument(
        "--lora-path",
        metavar="[NAME=]A",
        action="extend",
        nargs="+",
        default=[],
        help=(
            "adapter file or directory: A alone becomes the served model, NAME=A"
            " is served beside it under NAME"
        ),
    )
    parser.add_argument(
        "--reward-model",
        metavar="R",
        help="run or checkpoint of a reward model, for /v1/score",
    )
    parser.add_argument("--host", help="address to bind; anything but loopback needs an API key")
    parser.add_argument("--port", type=int, help="0 takes a free one and prints it")
    parser.add_argument("--api-key-file", metavar="FILE", help="file that holds the API key")
    switches = [leaf for leaf in leaves() if leaf.serve_help is not None]
    for leaf in switches:
        parser.add_argument(f"--{leaf.name}", action="store_true", help=leaf.serve_help)
    parser.add_argument("--config", metavar="FILE", help="a TOML file with [server] and [model]")
    add_set(parser)

    def run(args: Namespace) -> int:
        if not args.model_path and not args.config:
            parser.error("--model-path is required (or --config with model.base_path)")
        unnamed, named = _split_adapters(args.lora_path)
        settings = {
            "model.base_path": args.model_path,
            "model.lora_path": unnamed,
            "server.reward_model": args.reward_model,
            "server.host": args.host,
            "server.port": args.port,
            "server.api_key_file": args.api_key_file,
        }
        settings |= {
            f"{leaf.name}.{leaf.clients_train}": True for leaf in switches if vars(args)[leaf.name]
        }
        flags = [
            f"{key}={toml_value(value)}" for key, value in settings.items() if value is not None
        ]
        config = load(args.config, args.set + flags)
        require_mlx()
        _before_mlx(deterministic=config.rl_training.deterministic)
        from mlx_parallm.daemon import run_server

        return run_server(config, named)

    return run


def _run_children(
    args: Namespace,
    server: "ServerConfig",
    place: Path,
    resume: str | None,
    continues: bool | None,
    run_log: "RunLog",
    waits: Mapping[str, float],
) -> int:
    """Run the training in other processes: as several ranks, or with restarts.

    Args:
        place: the run's directory.
        continues: several ranks, which go on when one of them is lost; None: one process.
        waits: of a supervisor: `rest_s` and `silence_s`.
    """
    from mlx_parallm.cli.rank_launcher import run_ranks
    from mlx_parallm.cli.supervisor import supervise

    if continues is None:
        return supervise(
            args.argv,
            server,
            place,
            resume=resume,
            restarts=args.restarts,
            run_log=run_log,
            **waits,
        )
    return run_ranks(
        args.argv,
        server,
        place,
        resume=resume,
        count=args.ranks,
        continues=continues,
        run_log=run_log,
    )


def _several_ranks(args: Namespace) -> bool:
    """Raises ConfigError: --ranks is out of its range, or beside a flag that is for one process."""
    if args.ranks is None:
        return False
    if args.ranks < 1:
        raise ConfigError(f"--ranks {args.ranks}: at least 1")
    if args.ranks > 1 and args.dry_run:
        raise ConfigError("--dry-run measures one process: leave out --ranks")
    if args.ranks > 1 and args.restarts:
        raise ConfigError(
            "--restarts starts one process anew; with --ranks, rl_training.on_rank_lost ="
            ' "continue" goes on without a'
            " rank that died"
        )
    return args.ranks > 1


def _before_mlx(*, deterministic: bool) -> None:
    """Do what needs a process with one thread and without MLX (docs/design.md)."""
    faulthandler.enable()  # a crash in native code says in which thread and where
    block_shutdown_signals()
    os.umask(os.umask(0) | 0o077)  # prompts and answers: the files are this user's alone
    if deterministic:
        from mlx_parallm.system.blas import request_bitwise_reproducible_blas

        request_bitwise_reproducible_blas()


def _add_dataset_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "your model, your data, your reward", "instead of --config; see docs/your_data.md"
    )
    group.add_argument("--model", metavar="M", help="directory, hub id or builtin:tiny")
    group.add_argument(
        "--data", metavar="ROWS", help="a JSONL file with a column prompt, or hf:owner/name"
    )
    group.add_argument(
        "--reward",
        metavar="FILE.py:F",
        action="append",
        default=[],
        help=(
            "reward function f(prompts, completions, **columns) -> list of numbers; may be"
            " repeated, their sum counts"
        ),
    )
    group.add_argument(
        "--algorithm",
        metavar="A",
        help="dpo, sft, …: learn from the rows (docs/your_data.md#training-on-data)",
    )
    group.add_argument(
        "--write-config",
        metavar="FILE",
        help="write the TOML that these flags amount to, and stop",
    )


def _training_config(args: Namespace) -> "Config":
    """Return the configuration from the flags of `train`: a file, a run's own configuration, or
    model, data and reward."""
    base = [f"model.base_path={toml_value(args.model)}"] if args.model else []
    if args.data or args.reward or args.algorithm:
        config = load(None, args.set, text=_dataset_toml(args))
        return _as_it_began(config, args) if args.resume == "auto" else config
    source = args.config
    if source is None:
        if args.resume is None or args.resume == "auto":
            raise ConfigError(
                "--config is required, or --model with --data and --reward"
                " (a run directory given to --resume brings its own configuration)"
            )
        from mlx_parallm.run_files.directory import saved_config

        return load(str(saved_config(Path(args.resume).expanduser())), args.set + base, saved=True)
    return load(source, args.set + base)


def _named(config: "Config", source: str | None, resume: str | None) -> "Config":
    """Return the configuration with a name of the run, where it has none."""
    from mlx_parallm.run_files.directory import name_after

    if config.rl_training.run_name is not None or source is None:
        return config
    named = config.rl_training.model_copy(update={"run_name": name_after(source, resume)})
    return config.model_copy(update={"rl_training": named})


def _as_it_began(config: "Config", args: Namespace) -> "Config":
    """Return the configuration with which the run that `--resume auto` finds was started. Some
    values depend on the model's size, which is a guess until the model has been downloaded:
    computed again they could differ."""
    from mlx_parallm.run_files.directory import CONFIG_FILE, directory_of

    training = _named(config, args.data, "auto").rl_training
    saved = directory_of(training.checkpoint_dir, training.run_name, "auto") / CONFIG_FILE
    if not saved.is_file():
        return config
    began = load(str(saved), args.set, saved=True)
    before = _dataset_flags(began)
    for flag, value in _dataset_flags(config).items():
        if value != before.get(flag, value):
            raise ConfigError(
                f"{flag} is {value}, but {saved.parent} was started with {before[flag]}:"
                " remove or rename it"
            )
    return began


def _dataset_flags(config: "Config") -> dict[str, object]:
    """Return --model, --algorithm, --data and --reward as a configuration has them."""
    flags: dict[str, object] = {
        "--model": config.model.base_path,
        "--algorithm": config.rl_training.algorithm,
    }
    if not config.environments:
        return flags | {"--data": config.data.path}
    return flags | {
        "--data": config.environments[0].data,
        "--reward": config.environments[0].rewards,
    }


def _dataset_toml(args: Namespace) -> str:
    from mlx_parallm.cli.dataset_config import dataset_toml

    if args.config:
        raise ConfigError(
            "--config and --data with --reward are two ways to say one thing: give one of them"
            " (see --write-config);"
            " to change a file's: --set environments.0.data=… and --set"
            " 'environments.0.rewards=[\"python:…\"]'"
        )
    if args.resume not in (None, "auto"):
        raise ConfigError(
            f"--resume {args.resume} brings its own configuration: leave out --data and --reward"
        )
    for flag, value in (("--model", args.model), ("--data", args.data)):
        if not value:
            raise ConfigError(
                f"{flag} is missing: --model M --data ROWS --reward FILE.py:FUNCTION go together"
            )
    return dataset_toml(args.model, args.data, args.reward, args.algorithm)


def _write_config(args: Namespace) -> int:
    if args.set:
        raise ConfigError(
            "--write-config writes what --model, --data and --reward"
            " amount to: put --set into the file"
        )
    text, file = _dataset_toml(args), Path(args.write_config)
    try:
        with file.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except OSError as error:
        raise ConfigError(f"--write-config {file}: {error.strerror or error}") from error
    sys.stdout.write(f"wrote {file}; train with: mlx_parallm train --config {file}\n")
    return 0


def _split_adapters(paths: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """`A` (at most one) and `name=A` (any number) → (A, {name: A})."""
    unnamed: list[str] = []
    named: dict[str, str] = {}
    for entry in paths:
        name, separator, path = entry.partition("=")
        if not separator or is_file(entry) or is_directory(entry):
            unnamed.append(entry)
        elif not name or not path or name in named:
            raise ConfigError(f"--lora-path {entry!r}: expected name=path, each name once")
        else:
            named[name] = path
    if len(unnamed) > 1:
        raise ConfigError(
            f"--lora-path: {', '.join(unnamed)}: name all but one of them (name=path)"
        )
    return (unnamed[0] if unnamed else None), named
