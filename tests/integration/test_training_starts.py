"""mlx_parallm_train started and ended again and again: by its last step, by SIGTERM, by SIGINT; exit code 0."""

import concurrent.futures
import signal
from pathlib import Path

import pytest

from tests.integration.processes import Daemon, free_port, metrics, wait_for_step

# Every other daemon of these tests must end with 0 too, after each of these endings: test_training_daemon.py.
pytestmark = [pytest.mark.slow, pytest.mark.long]
STARTS = 10  # a thread that leaves its streams behind aborts every second exit and more
ENDINGS = (None, signal.SIGTERM, signal.SIGINT)  # None: the run has made all its steps

CONFIG = """
[server]
port = {port}

[rl_training]
total_steps = {steps}
checkpoint_dir = "{directory}"
run_name = "run"
batch_size = 4
max_empty_rounds = 1

[rl_training.lora]
rank = 2

[rl_training.atropos]
rollout_batch_size = 4

[[environments]]
kind = "tasks"
name = "sort"
group_size = 4
max_tokens = 4
"""


def once(directory: Path, ending: signal.Signals | None) -> tuple[int, str]:
    """One run: exit code and what it printed."""
    port = free_port()
    file = directory / "run.toml"
    file.write_text(CONFIG.format(port=port, steps=1_000_000 if ending else 1, directory=directory))
    with Daemon("mlx_parallm_train", "--config", str(file), port=port) as daemon:
        if ending is not None:
            wait_for_step(daemon, directory / "run", 1)
            daemon.send(ending)
        return daemon.wait(timeout=60), daemon.output


@pytest.mark.timeout(600)
def test_training_runs_all_exit_zero(tmp_path: Path) -> None:
    """MLX with MKL aborts at exit when a thread leaves its streams behind: the trainer's or the engine's."""
    directories = [tmp_path / str(number) for number in range(STARTS)]
    for directory in directories:
        directory.mkdir()
    endings = [ENDINGS[number % len(ENDINGS)] for number in range(STARTS)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(once, directories, endings))
    assert [code for code, _ in ended] == [0] * STARTS, [output for code, output in ended if code][:1]
    for directory, ending in zip(directories, endings, strict=True):
        assert metrics(directory / "run")
        assert (directory / "run" / "final").exists() is (ending is None)
        assert (directory / "run" / "latest" / "trainer_state.json").is_file()
