"""Is every known way to not learn named, and nothing on runs in which all is well?

    python scripts/bench/diagnoses.py                        both tables
    python scripts/bench/diagnoses.py --runs RUN_DIR RUN_DIR  and these runs, where nothing may be named
    python scripts/bench/diagnoses.py --names "SFT" "DPO"     some of them
    python scripts/bench/diagnoses.py --seed 7                other samples, tasks and rows

Makes the runs of tests/integration/provocations.py on the tiny model (stalls of --stalled-after
seconds; 60 is what users have) and explains each from its directory alone. Prints the tables as
Markdown; exit code 1 when one was not named, or a healthy one was. About 15 minutes on two cores.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from mlx_parallm.rl_training.monitor import health  # noqa: E402
from mlx_parallm.runs.explain import Finding, explain  # noqa: E402
from mlx_parallm.runs.run import open_run  # noqa: E402
from tests.integration.provocations import HEALTHY, PROVOCATIONS  # noqa: E402

USUAL_STALL_S = health.STALLED_AFTER_S


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--runs", type=Path, nargs="+", default=[], help="directories of runs that learned"
    )
    parser.add_argument("--names", nargs="+", default=[*PROVOCATIONS, *HEALTHY])
    parser.add_argument("--stalled-after", type=float, default=USUAL_STALL_S)
    parser.add_argument("--seed", type=int, default=0, help="of the runs and of their rows")
    args = parser.parse_args()
    runs = PROVOCATIONS | HEALTHY
    sick = [name for name in args.names if runs[name].diagnosis]
    healthy = [name for name in args.names if not runs[name].diagnosis]
    with tempfile.TemporaryDirectory() as directory:
        wrong, false = (
            _table(names, Path(directory), args.stalled_after, args.seed) if names else 0
            for names in (sick, healthy)
        )
    for run in args.runs:
        named = [finding.diagnosis.name for finding in explain(open_run(run)).findings]
        false += bool(named)
        print(f"| {run} | nothing | {', '.join(named) or 'nothing'} | |")
    print(f"\n{len(sick) - wrong} of {len(sick)} sick runs named rightly; {false} false alarms in")
    print(f"{len(healthy) + len(args.runs)} healthy ones")
    return 1 if wrong or false else 0


def _table(names: list[str], directory: Path, stalled_after_s: float, seed: int) -> int:
    """Print a row for each run as it ends; return how many are not as they should be."""
    command = [sys.executable, "-m", "tests.integration.provocations", str(directory), *names]
    command += ["--stalled-after", str(stalled_after_s), "--seed", str(seed)]
    print("\n| run | expected | named | numbers of the expected one |\n|---|---|---|---|")
    wrong = 0
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        for result in map(json.loads, process.stdout):
            wrong += not _row(result, stalled_after_s)
    return wrong + (process.returncode != 0)


def _row(result: dict[str, str], stalled_after_s: float) -> bool:
    name = result["name"]
    provocation = (PROVOCATIONS | HEALTHY)[name]
    health.STALLED_AFTER_S = stalled_after_s if provocation.stalls else USUAL_STALL_S
    findings = explain(open_run(Path(result["run"]))).findings
    diagnosed = {finding.diagnosis.name: finding for finding in findings}
    expected = provocation.diagnosis
    right = expected in diagnosed if expected else not diagnosed
    numbers = _numbers(diagnosed[expected]) if expected in diagnosed else ""
    cells = [name, expected or "nothing", ", ".join(diagnosed) or "nothing", numbers]
    print(f"| {' | '.join(cells)} |{'' if right else ' **wrong**'}", flush=True)
    return right


def _numbers(finding: Finding) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in finding.diagnosis.numbers.items())


if __name__ == "__main__":
    sys.exit(main())
