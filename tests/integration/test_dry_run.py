"""`mlx_parallm_train --dry-run` as a user starts it: the shipped configurations, and
environments that are broken."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.integration.processes import BIN, train, write_config
from tests.signals_reset import default_signals

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = [
    pytest.param(name, marks=pytest.mark.long)
    for name in ("qwen3_4b_dataset", "qwen3_0.6b_dataset")
]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_configurations_as_shipped_but_for_the_model(name: str, tmp_path: Path) -> None:
    """From another directory: the example's paths are relative to the configuration file."""
    settings = [
        "model.base_path=builtin:tiny",
        "environments.0.max_tokens=12",
        "rl_training.token_budget=4096",
    ]
    flags = [part for setting in settings for part in ("--set", setting)]
    result = subprocess.run(
        [str(BIN / "mlx_parallm_train"), "--config", name, "--dry-run", *flags],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=150,
        preexec_fn=default_signals,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(tmp_path.iterdir()) == [], "a dry run leaves nothing behind"
    shown = result.stdout
    assert re.search(r"rows: the prompt, \d+ tokens", shown) and "<|im_start|>user⏎" in shown
    assert re.search(r"│ 7 +│", shown), "a whole group"
    measured = re.search(r"a step +│ [\d.]+ s \(mean of \d+ real steps\)", shown)
    assert measured or "a step could not be filled" in shown, (
        "the tiny model may find no answer that scores"
    )
    assert re.search(r"disk +│ needed [\d.]+ MiB", shown) and re.search(
        r"memory +│ needed [\d.]+ [MG]iB", shown
    )


def test_a_healthy_configuration_is_measured(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=100)
    with train(config, "--dry-run") as daemon:
        assert daemon.wait() == 0
    assert re.search(r"a step +│ [\d.]+ s \(mean of \d+ real steps\)", daemon.output)
    assert re.search(r"time +│ [\d.]+ (s|min) to total_steps = 100", daemon.output)
    assert daemon.output.count("the prompt,") == 2 and not (tmp_path / "checkpoints").exists()


def test_a_broken_environment_ends_with_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=3, atropos="")
    config.write_text(config.read_text().replace("max_token_length = 256", "max_token_length = 8"))
    with train(config, "--dry-run") as daemon:
        assert daemon.wait() == 2
    error = [line for line in daemon.output.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and daemon.output.rstrip().endswith(error[0])
    assert "error: environments: reverse: no prompt leaves room" in error[0]
    assert "; sort: no prompt leaves room" in error[0]
    assert not (tmp_path / "checkpoints").exists()


def test_a_dry_run_takes_no_resume(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=3)
    with train(config, "--dry-run", "--resume", "auto") as daemon:
        assert daemon.wait() == 2
    assert (
        "error: --dry-run starts anew: leave out --resume" in daemon.output
        and "usage:" not in daemon.output
    )
