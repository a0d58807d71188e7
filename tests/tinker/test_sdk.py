"""The unmodified SDK, each version in its own environment (scripts/setup_tinker), against a
server as a process."""

import subprocess
from pathlib import Path

import pytest

from tests.tinker.test_daemon import serve

ROOT = Path(__file__).resolve().parents[2]
# what builtin:tiny is, and the name that clients are told
TINY = ROOT / "mlx_parallm" / "models" / "tiny"
ENVIRONMENTS = {
    "build/tinker": "scripts/setup_tinker",
    "build/tinker30": "scripts/setup_tinker 0.30.4 build/tinker30",
}

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_method_of_the_sdk_that_the_page_lists(tmp_path: Path, environment: str) -> None:
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"the SDK's environment is missing: {ENVIRONMENTS[environment]} makes it")
    with serve(tmp_path) as daemon:
        daemon.wait_until_ready()
        command = [
            python,
            "scripts/tinker/client_methods.py",
            f"http://127.0.0.1:{daemon.port}",
            str(TINY),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "FAIL" not in done.stdout and done.stdout.count("ok  ") >= 30
