"""A run directory that a former version wrote: it is read, and resumed."""

import shutil
import threading
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.rl_training.checkpoints.trainer_state import TrainerState
from mlx_parallm.rl_training.run_directory import checkpoint_at, find_run
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.log import configure_logging
from tests.integration.processes import Daemon, free_port, metrics

DATA = Path(__file__).parents[1] / "data"
OLD_RUN, LAST_STEP = DATA / "run_0_1", 2


def test_an_old_run_is_read() -> None:
    run = find_run(OLD_RUN)
    config, checkpoint = load_config(run / "config.toml", saved=True), checkpoint_at(run)
    assert checkpoint is not None
    state, adapter = TrainerState.read(checkpoint), load_adapter(checkpoint)
    assert (state.step, state.schema_version) == (2, 1)
    assert {pair.a.shape[1] for pair in adapter.layers.values()} == {config.rl_training.lora.rank}
    with closing(RolloutStore(run / "rollouts.sqlite", read_only=True)) as store:
        assert store.groups(store.taken_by(2))


def test_a_run_without_its_rollouts_goes_on_and_says_what_is_lost(tmp_path: Path) -> None:
    run, stop = tmp_path / OLD_RUN.name, threading.Event()
    shutil.copytree(OLD_RUN, run, symlinks=True)
    (run / "rollouts.sqlite").unlink()
    config = load_config(run / "config.toml", saved=True)
    config = config.model_copy(
        update={"rl_training": config.rl_training.model_copy(update={"total_steps": 3})}
    )
    stop.set()  # it builds everything and ends
    configure_logging(level="warning")
    with capture_logs() as logs:
        in_mlx_thread(lambda: start(config, run, stop))
    [warning] = [entry for entry in logs if "accepted groups are lost" in entry["event"]]
    assert warning["file"] == str(run / "rollouts.sqlite")


def start(config: Config, run: Path, stop: threading.Event) -> None:
    training = training_run(
        config, http=False, resume=str(run), stop=stop, console=Console(quiet=True)
    )
    try:
        training.start()
    finally:
        training.close()


@pytest.mark.slow
def test_an_old_run_goes_on(tmp_path: Path) -> None:
    run, last = tmp_path / OLD_RUN.name, LAST_STEP
    shutil.copytree(OLD_RUN, run, symlinks=True)
    before = metrics(run)
    assert [line["step"] for line in before] == list(range(1, last + 1))
    port = free_port()
    settings = ["--set", f"rl_training.total_steps={last + 1}", "--set", f"server.port={port}"]
    with Daemon("mlx_parallm_train", "--resume", str(run), *settings, port=port) as daemon:
        assert daemon.wait() == 0, daemon.output
    after = metrics(run)
    assert [line["step"] for line in after] == list(range(1, last + 2))
    assert after[:2] == before[:2]
    assert (run / "final" / "adapters.safetensors").is_file()
