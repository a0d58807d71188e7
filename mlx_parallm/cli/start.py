"""`train` and `serve`: flags → configuration → one call of the daemon. Imports no MLX."""

import faulthandler
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from mlx_parallm.cli.command import end_of_training, load
from mlx_parallm.config.arguments import (
    AtLeast,
    Configured,
    File,
    Function,
    KeyFile,
    Model,
    flag,
    setting,
    toml_value,
)
from mlx_parallm.config.leaves import Leaf, leaves
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.files import is_directory, is_file
from mlx_parallm.system.packages import require_mlx
from mlx_parallm.system.signals import block_shutdown_signals

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config
    from mlx_parallm.config.server import ServerConfig
    from mlx_parallm.system.log import RunLog

DATA_FLAGS = "your model, your data, your reward"


class Train(Configured):
    """`mlx_parallm train`: serve a model and train it at the same time."""

    groups: ClassVar = {DATA_FLAGS: "instead of --config; see docs/your_data.md"}

    config: Annotated[str, "FILE"] | None = None
    """a TOML file, or the name of a shipped one (quickstart, …)"""
    resume: Annotated[str, "DIR"] | None = None
    """a run directory or one of its steps; "auto": the latest, else a fresh start"""
    restarts: Annotated[int, "N", AtLeast(0)] = 0
    """start again, from the newest checkpoint, after a fault of the GPU, a kill or a hang; N times
    without a new one"""
    ranks: Annotated[int, "N"] | None = None
    """train with N processes on this machine, each with its own engine
    (docs/operations.md#several-processes)"""
    until: Annotated[str, "CONDITION"] | None = setting("rl_training.until")
    """end before total_steps, at a number of metrics.jsonl, e.g. "eval/score >= 0.8"
    (docs/watching.md#ending-at-a-number)"""
    dry_run: bool = False
    """load, show a scored group of each environment, measure a few steps, say what the run will
    need; keep nothing"""
    model: Model | None = flag(group=DATA_FLAGS)
    """directory, hub id or builtin:tiny"""
    data: Annotated[str, "ROWS"] | None = flag(group=DATA_FLAGS)
    """a JSONL file with a column prompt, or hf:owner/name"""
    reward: list[Function] = flag(group=DATA_FLAGS)
    """reward function f(prompts, completions, **columns) -> list of numbers; may be repeated, their
    sum counts"""
    algorithm: Annotated[str, "A"] | None = flag(group=DATA_FLAGS)
    """dpo, sft, …: learn from the rows (docs/your_data.md#training-on-data)"""
    write_config: File | None = flag(group=DATA_FLAGS)
    """write the TOML that these flags amount to, and stop"""

    def run(self) -> int:
        if self.dry_run and self.resume:
            raise ConfigError(
                "--dry-run starts anew: leave out --resume to try the configuration, or"
                " --dry-run to continue the run"
            )
        several = _several_ranks(self)
        if self.write_config is not None:
            return _write_config(self, self.write_config)
        config = _training_config(self)
        require_mlx()
        from mlx_parallm.run_files.directory import directory_of
        from mlx_parallm.system.device.heartbeat import supervised
        from mlx_parallm.system.hardware import launched_rank

        resume = self.resume or config.rl_training.resume
        config = _named(config, self.config or self.data, resume)
        training = config.rl_training
        if self.dry_run:
            _before_mlx(deterministic=training.deterministic)
            from mlx_parallm.daemon import run_dry_run

            return run_dry_run(config)
        if training.restart_every and several:
            raise ConfigError(
                "rl_training.restart_every starts one process anew: leave it or --ranks out"
            )
        if self.restarts > 0 or several or (training.restart_every and not supervised()):
            from mlx_parallm.system.log import RunLog, configure_logging

            place = directory_of(training.checkpoint_dir, training.run_name, resume)
            with RunLog(config.redactor()) as run_log:
                level, redactor = config.logging.level, run_log.redactor
                configure_logging(level=level, redactor=redactor, run_log=run_log)
                continues = training.on_rank_lost == "continue" if several else None
                waits = {"rest_s": training.restart_pause_s, "silence_s": training.max_silence_s}
                return _run_children(self, config.server, place, resume, continues, run_log, waits)
        if (
            self.ranks is None
            and config.rl_training.on_rank_lost == "continue"
            and launched_rank() is not None
        ):
            raise ConfigError(
                'rl_training.on_rank_lost = "continue" needs --ranks N: under mlx.launch a lost'
                " rank ends the run, and"
                " --resume auto continues with the hosts that are left"
            )
        _before_mlx(deterministic=training.deterministic)
        from mlx_parallm.daemon import run_training

        return end_of_training(run_training(config, resume=resume))


class Serve(Configured):
    """`mlx_parallm serve`: serve a model, with adapters if wanted, without training."""

    model_path: Model | None = setting("model.base_path")
    """directory, hub id or builtin:tiny"""
    lora_path: list[Annotated[str, "[NAME=]A"]] = flag(action="extend", nargs="+")
    """adapter file or directory: A alone becomes the served model, NAME=A is served beside it under
    NAME"""
    reward_model: Annotated[str, "R"] | None = setting("server.reward_model")
    """run or checkpoint of a reward model, for /v1/score"""
    host: str | None = setting("server.host")
    """address to bind; anything but loopback needs an API key"""
    port: int | None = setting("server.port")
    """0 takes a free one and prints it"""
    api_key_file: KeyFile | None = setting("server.api_key_file")
    """file that holds the API key"""
    config: Annotated[str, "FILE"] | None = None
    """a TOML file with [server] and [model]"""

    @classmethod
    def added_to(cls, parser: ArgumentParser) -> Callable[[Namespace], int]:
        for leaf in _switches():
            parser.add_argument(f"--{leaf.name}", action="store_true", help=leaf.serve_help)
        return super().added_to(parser)

    def run(self) -> int:
        if not self.model_path and not self.config:
            self.error("--model-path is required (or --config with model.base_path)")
        unnamed, named = _split_adapters(self.lora_path)
        flags = [] if unnamed is None else [f"model.lora_path={toml_value(unnamed)}"]
        flags += [
            f"{leaf.name}.{leaf.clients_train}=true"
            for leaf in _switches()
            if vars(self)[leaf.name]
        ]
        config = load(self.config, [*self.overrides, *flags])
        require_mlx()
        _before_mlx(deterministic=config.rl_training.deterministic)
        from mlx_parallm.daemon import run_server

        return run_server(config, named)


def _switches() -> list[Leaf]:
    """Return the leaves with a flag of `mlx_parallm serve`."""
    return [leaf for leaf in leaves() if leaf.serve_help is not None]


def _run_children(
    args: Train,
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
        continues: several ranks, which continue when one of them is lost; None: one process.
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
        count=args.ranks or 1,
        continues=continues,
        run_log=run_log,
    )


def _several_ranks(args: Train) -> bool:
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
            ' "continue" continues without a'
            " rank that died"
        )
    return args.ranks > 1


def _before_mlx(*, deterministic: bool) -> None:
    """Do the work that needs a single thread and no MLX yet (docs/design.md)."""
    faulthandler.enable()  # a crash in native code says in which thread and where
    block_shutdown_signals()
    if deterministic:
        from mlx_parallm.system.blas import request_bitwise_reproducible_blas

        request_bitwise_reproducible_blas()


def _training_config(args: Train) -> "Config":
    """Return the configuration from the flags of `train`: a file, a run's own configuration, or
    model, data and reward."""
    base = [f"model.base_path={toml_value(args.model)}"] if args.model else []
    if args.data or args.reward or args.algorithm:
        config = load(None, args.overrides, text=_dataset_toml(args))
        return _as_it_began(config, args) if args.resume == "auto" else config
    source = args.config
    if source is None:
        if args.resume is None or args.resume == "auto":
            raise ConfigError(
                "--config is required, or --model with --data and --reward"
                " (a run directory given to --resume brings its own configuration)"
            )
        from mlx_parallm.run_files.directory import saved_config

        return load(
            str(saved_config(Path(args.resume).expanduser())), args.overrides + base, saved=True
        )
    return load(source, args.overrides + base)


def _named(config: "Config", source: str | None, resume: str | None) -> "Config":
    """Return the configuration with a name of the run, if it has none."""
    from mlx_parallm.run_files.directory import name_after

    if config.rl_training.run_name is not None or source is None:
        return config
    named = config.rl_training.model_copy(update={"run_name": name_after(source, resume)})
    return config.model_copy(update={"rl_training": named})


def _as_it_began(config: "Config", args: Train) -> "Config":
    """Return the configuration with which the run that `--resume auto` finds was started. Some
    values depend on the model's size, which is a guess until the model has been downloaded:
    computed again they could differ."""
    from mlx_parallm.run_files.directory import CONFIG_FILE, directory_of

    training = _named(config, args.data, "auto").rl_training
    saved = directory_of(training.checkpoint_dir, training.run_name, "auto") / CONFIG_FILE
    if not saved.is_file():
        return config
    began = load(str(saved), args.overrides, saved=True)
    before = _dataset_flags(began)
    for name, value in _dataset_flags(config).items():
        if value != before.get(name, value):
            raise ConfigError(
                f"{name} is {value}, but {saved.parent} was started with {before[name]}:"
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


def _dataset_toml(args: Train) -> str:
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
    if not args.model or not args.data:
        raise ConfigError(
            f"{'--data' if args.model else '--model'} is missing: --model M --data ROWS"
            " --reward FILE.py:FUNCTION go together"
        )
    return dataset_toml(args.model, args.data, args.reward, args.algorithm)


def _write_config(args: Train, file: Path) -> int:
    if args.set:
        raise ConfigError(
            "--write-config writes what --model, --data and --reward"
            " amount to: put --set into the file"
        )
    text = _dataset_toml(args)
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
