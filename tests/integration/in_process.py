"""A whole run in this process: without the seconds that its own daemon takes to start."""

import threading
from io import StringIO
from pathlib import Path

from rich.console import Console

from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.models.threads import in_mlx_thread


def train_here(config: Path, *overrides: str, resume: str | None = None) -> None:
    """`mlx_parallm_train --config … --set … --resume …`, to the end of the run."""

    def run() -> None:
        console, given = Console(file=StringIO()), load_config(config, list(overrides))
        training = training_run(given, resume=resume, stop=threading.Event(), console=console)
        try:
            training.execute()
        finally:
            training.close()

    in_mlx_thread(run)
