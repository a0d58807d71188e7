"""Each known way to not learn, provoked in a real run, is named: by `explain`, and on the health
line while it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.rl_training.monitor import health
from mlx_parallm.rl_training.monitor.judge_signs import JUDGE_RULES
from mlx_parallm.runs.explain import Explanation, explain
from mlx_parallm.runs.run import open_run
from tests.integration.http_environment import needs_atropos
from tests.integration.processes import BIN
from tests.integration.provocations import ELSEWHERE, HEALTHY, PROVOCATIONS, lead

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
STALLED_AFTER_S = 2.0
COST = {"oversampling", "nothing-trained"}
"""What groups without variance cost, beside whatever made them so."""
ALLOWED = {
    "nothing-trained": {"no-variance", "reward-constant"},
    "oversampling": {"solved", "no-variance"},
    # what it is in the steps before
    "reward-fell": {"log-probability-mismatch", "ratio-mismatch", "too-hard", "one-answer"},
    "one-answer": {"entropy-collapse", "no-variance", "same-answers"},
    "kl-running-away": {"ratio-mismatch"},  # the same steps, too large
    # what it ends in
    "entropy-collapse": {
        *("ratio-mismatch", "no-variance", "reward-constant", "same-answers", "one-answer")
    },
    "same-answers": {"entropy-collapse", "no-variance", "reward-constant"},
    "log-probability-mismatch": {"ratio-mismatch"},
    "ratio-mismatch": {"truncation"},
}


SHORT = {
    *("nothing", "constant reward", "shifted logprobs", "other tokenizer"),
}
"""One of each source of evidence; the rule of every diagnosis is tested by itself in
tests/rl_training/monitor."""
NAMES = [
    name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in PROVOCATIONS
]


@pytest.fixture(scope="module")
def provoked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Path], dict[str, str]]:
    """The runs of the tests that were chosen: their directories, and what each logged."""
    chosen = [
        item
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_it_is_named"
    ]
    names = [item.callspec.params["name"] for item in chosen if isinstance(item, pytest.Function)]
    directory = tmp_path_factory.mktemp("provoked")
    command = [
        sys.executable,
        "-m",
        "tests.integration.provocations",
        str(directory),
        *dict.fromkeys([*names, "constant reward"]),
    ]
    done = subprocess.run(
        [*command, "--stalled-after", str(STALLED_AFTER_S)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    logs = dict(part.split("\n", 1) for part in done.stderr.split("=== ")[1:])
    return {result["name"]: Path(result["run"]) for result in results}, logs


@pytest.fixture
def explained(provoked: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    def read(name: str) -> Explanation:
        if PROVOCATIONS[name].stalls:
            monkeypatch.setattr(health, "STALLED_AFTER_S", STALLED_AFTER_S)
        return explain(open_run(provoked[0][name]))

    return read


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_named(name: str, provoked: Any, explained: Any) -> None:
    expected = PROVOCATIONS[name].diagnosis
    found = {finding.diagnosis.name: finding for finding in explained(name).findings}
    if expected is None:
        assert not found
        return
    assert expected in found
    assert set(found) - {expected} <= ALLOWED.get(expected, set()) | COST
    assert found[expected].diagnosis.numbers
    if expected not in ELSEWHERE:
        assert lead(found[expected].diagnosis) in provoked[1][name]
    else:
        assert found[expected].diagnosis.setting


@needs_atropos
def test_every_rule_is_provoked() -> None:
    diagnoses = {provocation.diagnosis for provocation in PROVOCATIONS.values()} - {None}
    # read in run.log, which a daemon alone writes: tests/rl_training/monitor/test_explain.py; of a
    # planner that delegates, which the tiny model does not: tests/orchestrator/test_environment.py
    # by a learned reward's own metric: tests/rl_training/evaluation/test_examiner.py; and by those
    # of a judge: tests/rl_training/monitor/test_judge_signs.py; of a teacher of another family:
    # tests/rl_training/monitor/test_signs.py
    elsewhere = {"paused", "delegations-fail", "unlike-the-labels", "teacher-misaligned"}
    elsewhere |= {name for name, *_ in JUDGE_RULES}
    assert {rule.name for rule in health.RULES} == diagnoses | elsewhere


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nothing_is_named_where_all_is_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.integration.provocations", str(tmp_path), *HEALTHY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == len(HEALTHY)
    assert {run["name"]: run["named"] for run in runs if run["named"]} == {}


def test_the_command_says_it(provoked: Any) -> None:
    run = provoked[0]["constant reward"]
    done = subprocess.run(
        [BIN / "mlx_parallm_explain", run], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "reward constant: every answer earned 0.5" in done.stdout
    assert f"{health.PAGE}#reward-constant" in done.stdout
