"""A run whose file of rollouts is gone: it is resumed, and says what is lost."""

import shutil
import threading
from pathlib import Path

from rich.console import Console
from structlog.testing import capture_logs

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.system.log import configure_logging

TWO_STEPS = Path(__file__).parents[1] / "data" / "two_steps"


def test_a_run_without_its_rollouts_goes_on_and_says_what_is_lost(tmp_path: Path) -> None:
    run, stop = tmp_path / TWO_STEPS.name, threading.Event()
    shutil.copytree(TWO_STEPS, run, symlinks=True)
    (run / "rollouts.sqlite").unlink()
    config = load_config(run / "config.toml", saved=True)
    config = config.model_copy(
        update={"rl_training": config.rl_training.model_copy(update={"total_steps": 3})}
    )
    stop.set()  # it builds everything and ends
    configure_logging(level="warning")
    with capture_logs() as logs:
        in_mlx_thread(lambda: start(config, run, stop))
    [warning] = [entry for entry in logs if "rollouts.sqlite" in entry["event"]]
    assert warning["file"] == str(run / "rollouts.sqlite")


def start(config: Config, run: Path, stop: threading.Event) -> None:
    training = training_run(
        config, http=False, resume=str(run), stop=stop, console=Console(quiet=True)
    )
    try:
        training.start()
    finally:
        training.close()
