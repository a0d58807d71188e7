"""A signal while a command is still being imported ends it without a traceback, with the exit code
of its kind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import BIN
from tests.signals_reset import default_signals

TRAIN = ("--config", "quickstart", "--set", "server.port=0")
COMMANDS: dict[str, tuple[str, ...]] = {
    "a script": (str(BIN / "mlx_parallm_train"), *TRAIN),
    "the front door": (str(BIN / "mlx_parallm"), "train", *TRAIN),
    "a module": ("-m", "mlx_parallm", "train", *TRAIN),
    "a dry run": (str(BIN / "mlx_parallm"), "train", "--dry-run", *TRAIN),
    "one that reads": (str(BIN / "mlx_parallm"), "explain", "nowhere"),
}
MOMENTS = (
    ("ctypes", signal.SIGINT),
    ("argparse", signal.SIGINT),
    ("argparse", signal.SIGTERM),
    ("mlx_parallm.system.files", signal.SIGINT),
)
"""The module that Python says it has imported, and the signal that comes then."""


@pytest.mark.slow
@pytest.mark.parametrize(("module", "number"), MOMENTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_before_its_code_is_loaded_leaves_no_traceback(
    name: str, module: str, number: signal.Signals, tmp_path: Path
) -> None:
    command = (sys.executable, "-X", "importtime", *COMMANDS[name])
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, preexec_fn=default_signals, env=os.environ
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition(b"|")[2].strip() == module.encode():
                break
        process.send_signal(number)
        output = process.communicate(timeout=60)[1].decode()
    assert "Traceback" not in output and "Exception ignored" not in output, output
    in_order = 130 if name == "a dry run" else 0
    ends = -signal.SIGTERM if number == signal.SIGTERM else 130
    assert process.returncode == (ends if name == "one that reads" else in_order), output[-500:]
