"""Is every known way to not learn named, and none on runs that learn?

    python scripts/bench/diagnoses.py                              provocations only
    python scripts/bench/diagnoses.py --healthy RUN_DIR RUN_DIR    and these runs, where nothing may be named
    python scripts/bench/diagnoses.py --seeds 0 1 2                and quickstart with these seeds, run here

Makes the runs of tests/integration/provocations.py (stalls of --stalled-after seconds; 60 is what
users have) and explains each from its directory alone. Prints a table; exit code 1 when one was not
named, or a healthy one was.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from mlx_parallm.rl_training.monitor import health  # noqa: E402
from mlx_parallm.rl_training.monitor.evidence import WINDOW  # noqa: E402
from mlx_parallm.runs.explain import Finding, explain  # noqa: E402
from mlx_parallm.runs.run import open_run  # noqa: E402
from tests.integration.provocations import PROVOCATIONS  # noqa: E402

BIN = Path(sys.executable).parent
USUAL_STALL_S = health.STALLED_AFTER_S
console = Console(width=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--healthy", type=Path, nargs="+", default=[], help="directories of runs that learned"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="quickstart runs to make")
    parser.add_argument("--stalled-after", type=float, default=USUAL_STALL_S)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        wrong = provoked(Path(directory), args.stalled_after)
        runs = [*args.healthy, *(quickstart(seed, Path(directory)) for seed in args.seeds)]
        wrong += healthy(runs) if runs else 0
    console.print(f"{wrong} wrong" if wrong else "all right", style="red" if wrong else "green")
    return 1 if wrong else 0


def provoked(directory: Path, stalled_after_s: float) -> int:
    command = [sys.executable, "-m", "tests.integration.provocations", str(directory)]
    command += ["--stalled-after", str(stalled_after_s)]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    table = Table(title="provoked runs")
    for column in ("provoked by", "expected", "named", "steps", "numbers", "s", ""):
        table.add_column(column, overflow="fold")
    wrong = 0
    for result in map(json.loads, done.stdout.splitlines()):
        expected = PROVOCATIONS[result["name"]].diagnosis
        health.STALLED_AFTER_S = (
            stalled_after_s if PROVOCATIONS[result["name"]].stalls else USUAL_STALL_S
        )
        explanation = explain(open_run(Path(result["run"])))
        diagnosed = {finding.diagnosis.name: finding for finding in explanation.findings}
        right = expected in diagnosed if expected else not diagnosed
        wrong += not right
        numbers = _numbers(diagnosed[expected]) if expected in diagnosed else ""
        cells = [
            result["name"],
            expected or "nothing",
            ", ".join(diagnosed),
            str(explanation.steps),
            numbers,
        ]
        table.add_row(*cells, f"{result['seconds']:.1f}", "ok" if right else "[red]WRONG[/]")
    console.print(table)
    return wrong


def healthy(runs: list[Path]) -> int:
    health.STALLED_AFTER_S = USUAL_STALL_S
    table = Table(title="runs that learned")
    for column in ("run", "steps", "reward, first 5", "last 5", "named"):
        table.add_column(column)
    wrong = 0
    for run in runs:
        explanation = explain(open_run(run))
        named = ", ".join(finding.diagnosis.name for finding in explanation.findings)
        ends = (explanation.rewards[:WINDOW], explanation.rewards[-WINDOW:])
        first, last = (f"{sum(rewards) / len(rewards):.3f}" for rewards in ends)
        table.add_row(explanation.run, str(explanation.steps), first, last, named or "nothing")
        wrong += bool(named)
    console.print(table)
    return wrong


def quickstart(seed: int, directory: Path) -> Path:
    name = f"quickstart-{seed}"
    settings = {"checkpoint_dir": directory, "run_name": name, "seed": seed}
    flags = [
        part for key, value in settings.items() for part in ("--set", f"rl_training.{key}={value}")
    ]
    command = [
        str(BIN / "mlx_parallm_train"),
        "--config",
        "quickstart",
        "--set",
        "server.port=0",
        *flags,
    ]
    command += ["--set", "evaluation.problems=0"]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=True)
    return directory / name


def _numbers(finding: Finding) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in finding.diagnosis.numbers.items())


if __name__ == "__main__":
    sys.exit(main())
