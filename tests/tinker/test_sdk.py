"""The unmodified SDK, in its own environment (scripts/setup_tinker), against a server as a process."""

import subprocess
from pathlib import Path

import pytest

from tests.tinker.test_daemon import serve

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "mlx_parallm" / "assets" / "tiny"  # what builtin:tiny is, and the name that clients are told
PYTHON = ROOT / "build" / "tinker" / "bin" / "python"

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.skipif(not PYTHON.exists(), reason="scripts/setup_tinker makes the SDK's environment (1.6 GB)")
def test_every_method_of_the_sdk_that_the_page_lists(tmp_path: Path) -> None:
    with serve(tmp_path) as daemon:
        daemon.wait_until_ready()
        command = [PYTHON, "scripts/tinker/client_methods.py", f"http://127.0.0.1:{daemon.port}", str(TINY)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "FAIL" not in done.stdout and done.stdout.count("ok  ") >= 30
