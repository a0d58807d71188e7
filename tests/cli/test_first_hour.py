"""`mlx_parallm doctor --first-hour`: its block and its row; as a process, with seconds for
minutes."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_parallm.cli import first_hour
from mlx_parallm.cli.first_hour import Beside, Chats, Contract, FirstHour, MachineSample, block
from scripts.generate_machines_table import BEGIN, END, TARGET, read, render

GOOD = Beside(
    "builtin:tiny",
    10,
    steps=40,
    step_s=0.5,
    trained_tok_s=1000.0,
    served_tok_s=500.0,
    killed_at=20,
    resumed_s=9.5,
    in_order=True,
    exit_code=0,
    chats=Chats(2, 0, [0.1, 0.3], [50.0, 60.0]),
    samples=[
        MachineSample(0, 10**9, 20, 30),
        MachineSample(2, 3 * 10**9, 22, 31),
        MachineSample(4, 2 * 10**9, 20, 30),
    ],
)


def hour(**changed: object) -> FirstHour:
    contracts = {"builtin:tiny": [Contract("MLX's operations", "passed", "12 operations")]}
    made = FirstHour(["mlx 1", "a machine"], "2026-11-28", contracts=contracts, beside=[GOOD])
    return FirstHour(**vars(made) | changed)  # type: ignore[arg-type]


def test_the_block_has_the_curves() -> None:
    text = block(hour())
    assert "* a machine" in text and "| MLX's operations | passed | 12 operations |" in text
    for row in (
        "| steps | 40, in order |",
        "| kill -9 | 9.5 s to continue |",
        "| first token, median and p95 | 0.20 s, 0.30 s |",
        "| memory, GB | 1.00 → 3.00 → 2.00, most 3.00 |",
        "| threads | 20 → 22 → 20, most 22 |",
    ):
        assert row in text
    assert "panics" not in text and hour().holds


@pytest.mark.parametrize(
    ("changed", "shown"),
    [
        ({"panics": ["Kernel-1.panic"]}, "kernel panics meanwhile: Kernel-1.panic"),
        ({"contracts": {"m": [Contract("memory", "FAILED", "9 GB")]}}, "| **FAILED** | 9 GB |"),
        ({"beside": [Beside("m", 1.0, problem="exit | 1")]}, "| end | exit / 1 |"),
        ({"beside": [Beside("m", 1.0, steps=3, killed_at=1)]}, "3, **not in order** |"),
    ],
)
def test_what_failed_is_shown(changed: dict[str, object], shown: str) -> None:
    made = hour(**changed)
    assert shown in block(made) and not made.holds


def test_reports_of_kernel_panics_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_hour, "PANICS", tmp_path)
    for name in ("Kernel-old.panic", "panic-full-new.panic", "app.ips"):
        (tmp_path / name).touch()
    os.utime(tmp_path / "Kernel-old.panic", (1, 1))
    assert first_hour._panics(time.time() - 60) == ["panic-full-new.panic"]


def test_the_page_of_machines_is_made_of_their_files() -> None:
    """`.venv/bin/python scripts/generate_machines_table.py` writes it."""
    page = TARGET.read_text(encoding="utf-8")
    assert render(page, read()) == page


def test_a_row_a_model() -> None:
    tried = dataclasses.asdict(hour(beside=[GOOD, dataclasses.replace(GOOD, model="m")]))
    tried["contracts"]["m"] = [{"contract": "memory", "result": "FAILED", "measured": ""}]
    tried["facts"] = ["mlx-parallm 0 · mlx 1", "Linux · a cpu · 2026-11-28"]
    table = render(BEGIN + END, {"a.json": tried}).splitlines()[3:5]
    assert table[0].startswith("| Linux · a cpu | mlx 1 | builtin:tiny: 1 hold | 10 minutes: 2 ")
    assert "| 40 steps in order, 0.50 s each, 1,000 tokens/s | 0.20 s, p95 0.30 s |" in table[0]
    assert table[1].startswith("|  |  | m: 0 hold; **not: memory** |")


@pytest.mark.slow
@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    target = tmp_path / "hour.json"
    options = ["--first-hour", "--minutes", "0.3", "--json", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "mlx_parallm", "doctor", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [beside] = json.loads(target.read_text())["beside"]
    assert beside["in_order"] and beside["resumed_s"] > 0 and beside["chats"]["answered"] > 0
    assert "| kill -9 | " in done.stdout and not beside["problem"]
