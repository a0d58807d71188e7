"""Run directories that former versions wrote can be resumed."""

import shutil
from pathlib import Path

import pytest

from tests.integration.processes import Daemon, free_port, metrics

pytestmark = pytest.mark.slow
DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("name", ["run_schema_1"])
def test_an_old_run_goes_on(tmp_path: Path, name: str) -> None:
    run = tmp_path / name
    shutil.copytree(DATA / name, run, symlinks=True)
    before = metrics(run)
    assert [line["step"] for line in before] == [1, 2, 3]
    port = free_port()
    settings = ["--set", "rl_training.total_steps=4", "--set", f"server.port={port}"]
    with Daemon("mlx_parallm_train", "--resume", str(run), *settings, port=port) as daemon:
        assert daemon.wait() == 0, daemon.output
    after = metrics(run)
    assert [line["step"] for line in after] == [1, 2, 3, 4]
    assert after[:2] == before[:2]
    assert (run / "final" / "adapters.safetensors").is_file()
