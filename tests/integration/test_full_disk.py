"""A daemon whose disk fills up, on its own small file system."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Daemon, metrics, train, wait_for_step, write_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(disk)], check=False
    ).returncode:
        pytest.skip("this container may not mount a tmpfs")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.long
def test_training_ends_in_order_before_the_disk_is_full_and_goes_on_later(
    tmp_path: Path, small_disk: Path
) -> None:
    config = write_config(tmp_path, steps=500, interval=2, directory=small_disk)
    run, filler = small_disk / "run", small_disk / "filler"
    with train(config) as daemon:
        wait_for_step(daemon, run, 3)
        free = os.statvfs(small_disk)
        with filler.open("wb") as file:
            # below 5 %, not full
            os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - 1_500_000)
        assert daemon.wait() == 2
    last = daemon.output.splitlines()[-1]
    assert (
        "are free on the disk of" in last
        and "rollouts.min_free_gb" in last
        and f"--resume {run}" in last
    )
    done = metrics(run)[-1]["step"]
    assert (run / "latest").resolve().name == f"step_{done:06d}", "where it stood is saved"
    assert not list(run.glob("*.tmp-*"))
    filler.unlink()
    more = ["--set", f"rl_training.total_steps={done + 1}"]
    with Daemon("mlx_parallm_train", "--resume", str(run), *more, port=0) as daemon:
        assert daemon.wait() == 0, daemon.output
    assert [line["step"] for line in metrics(run)] == list(range(1, done + 2))
