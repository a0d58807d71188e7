"""The built wheel in an empty virtual environment: commands, shipped configurations, the tiny
model."""

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--wheel-dir", directory, ROOT], check=True)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with this wheel; the dependencies are borrowed from the one that runs
    the tests."""
    directory = tmp_path_factory.mktemp("empty") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--python",
        python,
        "install",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*pip, wheel], check=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    # Only this line is read: the borrowed folder's own .pth files, the editable install among them,
    # are not.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for library in Path(sys.prefix, "lib").glob("lib*.so*"):  # MKL lies here
        (directory / "lib" / library.name).symlink_to(library)
    return directory


def run(venv: Path, cwd: Path, *command: str) -> str:
    result = subprocess.run(
        [venv / "bin" / command[0], *command[1:]],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_what_is_needed_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "mlx_parallm/models/tiny/model.safetensors" in names
    assert "mlx_parallm/models/tiny_vision/model.safetensors" in names
    shipped = {
        f"mlx_parallm/config/shipped/train_configs/{file.name}"
        for file in (ROOT / "train_configs").glob("*.toml")
    }
    assert shipped <= names
    static = ROOT / "mlx_parallm" / "runs" / "dashboard" / "static"
    assert {str(file.relative_to(ROOT)) for file in static.rglob("*") if file.is_file()} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [
        name for name in names if name.startswith(("tests/", "scripts/")) or name.endswith(".pyc")
    ]


def test_commands_and_configurations_work_from_the_wheel(venv: Path, tmp_path: Path) -> None:
    for command in ("train", "serve", "merge_lora", "doctor"):
        assert "usage:" in run(venv, tmp_path, f"mlx_parallm_{command}", "--help")
    program = (
        "import mlx_parallm\nfrom mlx_parallm.config.load import find_config\n"
        "from mlx_parallm.models.loading import resolve_model_path\n"
        "print(mlx_parallm.__file__)\nprint(find_config('quickstart'))\nprint(resolve_model_path('builtin:tiny'))"
    )
    for line in run(venv, tmp_path, "python", "-c", program).splitlines():
        assert line.startswith(str(venv)), line


def test_the_quickstart_runs_from_the_wheel(venv: Path, tmp_path: Path) -> None:
    overrides = (
        "rl_training.total_steps=2",
        "evaluation.problems=0",
        "server.port=0",
        "rl_training.run_name=w",
    )
    run(
        venv,
        tmp_path,
        "mlx_parallm_train",
        "--config",
        "quickstart",
        *(f"--set={item}" for item in overrides),
    )
    assert (tmp_path / "checkpoints" / "w" / "final" / "adapters.safetensors").exists()


def test_own_data_and_reward_train_from_the_wheel(venv: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Reverse: abc"}\n{"prompt": "Sort: cab"}\n')
    (tmp_path / "score.py").write_text(
        "def count(completions, **columns):\n    return [len(set(c)) for c in completions]"
    )
    flags = ("--model", "builtin:tiny", "--data", "rows.jsonl", "--reward", "score.py:count")
    run(
        venv,
        tmp_path,
        "mlx_parallm_train",
        *flags,
        "--set=rl_training.total_steps=1",
        "--set=rl_training.run_name=w",
    )
    assert (tmp_path / "checkpoints" / "w" / "final" / "adapters.safetensors").exists()
