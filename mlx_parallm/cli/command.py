"""Parts that the commands share: loading a configuration, errors of one line. Imports no MLX.

An error that is raised on purpose (`ParallmError`), or a package that is not installed, is one line
on stderr and exit code 2; anything else is a bug and keeps its traceback.
"""

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from mlx_parallm.errors import (
    EXIT_AGAIN,
    DeviceFaultError,
    MemoryShortError,
    ParallmError,
    RanksStandStillError,
)
from mlx_parallm.system.device.traits import fails_at_exit
from mlx_parallm.system.signals import END_S, EndLimit, Shutdown, StopRequested

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config

EXIT_ERROR = 2

Run = Callable[[Namespace], int]
"""Carry out a command and return its exit code."""
ArgumentsT = TypeVar("ArgumentsT")


def load(
    source: str | None, overrides: list[str], text: str = "", *, saved: bool = False
) -> "Config":
    """Return the configuration of a file, a shipped name or a TOML text, with overrides. Raises
    ConfigError."""
    from mlx_parallm.config.load import hardware_defaults, load_config
    from mlx_parallm.models.checkpoint_files import billions_in
    from mlx_parallm.system.hardware import detect

    plain = load_config(source, overrides, text=text, saved=saved)
    defaults = hardware_defaults(detect(), billions_in(plain.model.base_path))
    return load_config(source, overrides, defaults, text=text, saved=saved)


def leave(code: int) -> NoReturn:
    """End the process here and now, when all that is written is flushed: nothing of Python or of
    native libraries is cleaned up."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_of_training(code: int) -> int:
    """Return the exit code of a run that has closed everything. The process ends here where
    MLX's own end fails."""
    if not fails_at_exit():
        return code
    leave(code or EndLimit.exit_code)


def exit_code(run: Run, args: Namespace) -> int:
    # Without a PATH a compiler is found but cannot find its own parts, and MLX's compiled kernels
    # die with it.
    os.environ["PATH"] = os.environ.get("PATH") or os.defpath
    try:
        return run(args)
    except ParallmError as error:
        # here: its forms of secrets are compiled, and `terminal` loads rich
        from mlx_parallm.system.redaction import Redactor, environment_secrets
        from mlx_parallm.system.terminal import escaped

        sys.stderr.write(
            f"error: {escaped(Redactor(environment_secrets()).text(str(error)), lines=True)}\n"
        )
        if isinstance(error, DeviceFaultError):
            leave(EXIT_AGAIN)  # the driver's own clean-up may block on the device
        again = isinstance(error, MemoryShortError | RanksStandStillError)
        return EXIT_AGAIN if again else EXIT_ERROR
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        from mlx_parallm.system.hardware import lack_of_room
        from mlx_parallm.system.packages import missing, wrong_wheel

        line = missing(error) if isinstance(error, ImportError) else wrong_wheel(error)
        if (line := lack_of_room(error) or line) is None:
            raise  # a fault of this package
        sys.stderr.write(f"error: {line}\n")
        return EXIT_ERROR
    except StopRequested as stopped:
        sys.stderr.write(f"stopped in order by {stopped}\n")
        leave(EndLimit.exit_code)  # MLX may still compute, and Python's exit would wait


def ended_in_order(
    limit_s: float = END_S,
) -> Callable[[Callable[[ArgumentsT], int]], Callable[[ArgumentsT], int]]:
    """Decorate a command that loads and computes in the main thread: a shutdown signal ends it
    there.

    Output is written at once; `limit_s` bounds the rest.
    """

    def decorate(run: Callable[[ArgumentsT], int]) -> Callable[[ArgumentsT], int]:
        def until_signal(args: ArgumentsT) -> int:
            with Shutdown() as shutdown, shutdown.interrupts(limit_s):
                return run(args)

        return until_signal

    return decorate


def piped(run: Callable[[ArgumentsT], int]) -> Callable[[ArgumentsT], int]:
    """Decorate a command that only prints: the reader may close the pipe (`| head`), and then the
    command ends without an error."""

    def until_closed(args: ArgumentsT) -> int:
        try:
            code = run(args)
            sys.stdout.flush()
            return code
        except BrokenPipeError:
            # else Python complains when it flushes
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    return until_closed
