"""Every curve of the page is a metric: one that each line has, or one that the module describes."""

import re
from pathlib import Path

from mlx_parallm.run_files import metrics
from mlx_parallm.runs.dashboard import run_view
from tests.source_trees import PACKAGE

PAGES = PACKAGE / "runs" / "dashboard" / "static"


def test_every_curve_is_a_metric() -> None:
    text = (PAGES / "overview.js").read_text()
    charts = re.sub(r'"[^"]*"', '""', text.partition("const CHARTS")[2].partition("];")[0])
    curves = re.findall(r'(\w+): ""', "".join(re.findall(r"keys: \{([^}]*)\}", charts)))
    described = Path(metrics.__file__).read_text() + Path(run_view.__file__).read_text()
    assert len(curves) > 30
    assert [
        c for c in curves if c not in metrics.KEYS and not re.search(rf"[`\"]{c}[`\"]", described)
    ] == []


def test_the_curves_of_a_judge_are_those_that_a_judge_logs() -> None:
    text = (PAGES / "overview.js").read_text()
    kinds = re.findall(r'"(\w+)"', text.partition("const JUDGED = [")[2].partition("]")[0])
    logged = (PACKAGE / "rewards" / "group_judge.py").read_text()
    assert kinds and all(f'numbers["{kind}"] =' in logged for kind in kinds)
