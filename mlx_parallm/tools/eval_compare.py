"""`mlx_parallm_eval --compare A B`: two results, problem by problem. No MLX."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlx_parallm.environments.estimates import difference
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.monitor.report import compare as pairs_of

RESULTS_FILE = "results.json"


def compare(a: Path, b: Path, console: Console) -> None:
    """Prints how B differs from A over the problems that both answered. Raises ConfigError: no results, none shared."""
    first, second = _load(a), _load(b)
    rows = pairs_of(first, second)
    if not rows:
        raise ConfigError(f"{a} and {b} share no problem: were they made with the same environments?")
    table = Table(title=Text(f"A: {first['model']} ({a})\nB: {second['model']} ({b})"), title_justify="left")
    for name in ("environment", "problems", "A", "B", "B - A", "95% interval", "p"):
        table.add_column(name, justify="left" if name == "environment" else "right")
    for name, before, after in (measure for row in rows for measure in row.measured):
        found = difference(before, after)
        means = (f"{sum(values) / len(values):.3f}" for values in (before, after))
        interval = f"{found.low:+.3f} to {found.high:+.3f}"
        p = "–" if found.p is None else f"{found.p:.3g}"
        table.add_row(Text(name), str(len(before)), *means, f"{found.mean:+.3f}", interval, p)
    console.print(table)
    console.print("interval: paired bootstrap over the problems; p: exact McNemar test", style="dim")


def _load(path: Path) -> dict[str, Any]:
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare {path}: {error}") from error
    if not isinstance(found, dict) or not {"model", "environments"} <= set(found):
        raise ConfigError(f"--compare {file}: these are no results of mlx_parallm_eval")
    return found
