"""The report of a pipeline: one HTML file that needs nothing else."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from mlx_parallm.system.files import write_atomically
from mlx_parallm.systems.pipeline.hardware import HardwareConfig
from mlx_parallm.systems.pipeline.verdict import in_words
from mlx_parallm.systems.pipeline.work import Json, StageOutcome

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0"
    " 1rem;color:#222}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ddd;padding:.3rem"
    " .6rem;text-align:left;"
    "vertical-align:top}pre{background:#f6f6f6;padding:.6rem;overflow:auto;white-space:pre-wrap}"
    ".big{font-size:1.4rem}.good{color:#06713b}.bad{color:#a11}svg{width:100%;height:12rem;background:#f6f6f6}"
    "@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}pre,svg{background:#242424}"
    "td,th{border-color:#444}}"
)
WIDTH, HEIGHT, EDGE = 600, 160, 10
LONGEST = 2000  # characters of a text that is shown


def write_report(
    path: Path, results: Json, outcomes: Sequence[StageOutcome], hardware: HardwareConfig
) -> None:
    """Write the page. Raises CheckpointError."""
    by_stage = {outcome.stage: outcome.result for outcome in outcomes}
    title = f"{results['agent_name']}: {results['method']} on {results['base_model']}"
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(results['start_time'])}</p>",
        _verdict(results),
        "<h2>Stages</h2>"
        + _table(("stage", "", "seconds", "hash of its inputs"), map(_row, outcomes)),
        "<h2>Hardware</h2>" + _list(hardware.summary()),
    ]
    if "traces" in by_stage:
        parts.append("<h2>Traces</h2>" + _list(by_stage["traces"]["report"]))
    if "dataset" in by_stage:
        shown = (
            "kind",
            "rows",
            "problems",
            "labels",
            "rewards",
            "characters",
            "left_out",
            "sources",
            "licenses",
        )
        card = {name: by_stage["dataset"][name] for name in shown if by_stage["dataset"].get(name)}
        parts.append(
            "<h2>Data set</h2>" + _table((), ((k, json.dumps(v)) for k, v in card.items()))
        )
    if "train" in by_stage:
        for name, values in by_stage["train"]["curve"].items():
            parts.append(f"<h2>Training: {escape(name)}</h2>{_curve(values)}")
    for stage, heading in (("evaluate", "Held-out answers"), ("export", "The exported file")):
        if stage in by_stage:
            parts.append(f"<h2>{heading}</h2>{_comparison(by_stage[stage])}")
    if "export" in by_stage:
        parts.append(
            f"<pre>{escape(json.dumps(by_stage['export']['verification'], indent=1))}</pre>"
        )
    if "dry_run" in by_stage:
        parts.append(
            "<details><summary>Dry"
            f" run</summary><pre>{escape(by_stage['dry_run']['log'])}</pre></details>"
        )
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    page = f"{head}\n<style>{STYLE}</style>\n<body>\n{''.join(parts)}\n</body></html>\n"
    write_atomically(path, page.encode("utf-8", "replace"))


def _verdict(results: Json) -> str:
    if results["error"]:
        return f'<p class="big bad">stopped: {escape(results["error"])}</p>'
    lines = []
    for name in ("evaluation", "exported"):
        comparison = results[name] or {}
        if "verdict" in comparison:
            css = "good" if comparison["better"] else "bad"
            lines.append(f'<p class="big {css}">{escape(in_words(comparison))}</p>')
    if results["deployed"]:
        lines.append(f"<p>deployed: <code>{escape(results['deployed']['command'])}</code></p>")
    return "".join(lines)


def _row(outcome: StageOutcome) -> tuple[str, ...]:
    how = "unchanged, skipped" if outcome.skipped else "done"
    return outcome.stage, f"{outcome.about}: {how}", f"{outcome.seconds:.1f}", outcome.inputs[:12]


def _comparison(comparison: Json) -> str:
    if comparison.get("before") is None:
        return f"<p>{escape(in_words(comparison))}</p>"
    text = (
        f"<p>{escape(comparison['what'])}: {comparison['before']:.3f} by the base,"
        f" {comparison['after']:.3f} after training"
    )
    if "low" in comparison:
        p = "" if comparison["p"] is None else f", p = {comparison['p']:.2g}"
        low, high = comparison["low"], comparison["high"]
        interval = f"95% interval of the difference {low:+.3f} to {high:+.3f}{p}"
        if not comparison.get("enough", True):
            interval = "too few to tell a difference from chance"
        text += f" ({comparison['problems']} prompts; {interval})"
    rows = (
        [str(example[name]) for name in ("prompt", "before", "after")]
        for example in comparison.get("examples", ())
    )
    return f"{text}.</p>" + (
        _table(("prompt", "base", "trained"), rows) if comparison.get("examples") else ""
    )


def _curve(values: Sequence[float | None]) -> str:
    """Draw values over the steps; a step without a value is left out."""
    points = [(at, value) for at, value in enumerate(values) if value is not None]
    if len(points) < 2:
        return "<p>too few steps to draw</p>"
    low, high = min(value for _, value in points), max(value for _, value in points)
    scale_x, scale_y = (
        (WIDTH - 2 * EDGE) / max(1, len(values) - 1),
        (HEIGHT - 2 * EDGE) / ((high - low) or 1.0),
    )
    line = " ".join(
        f"{EDGE + at * scale_x:.1f},{HEIGHT - EDGE - (value - low) * scale_y:.1f}"
        for at, value in points
    )
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none"><polyline'
        f' points="{line}" fill="none" stroke="#2a7" stroke-width="2"'
        f' vector-effect="non-scaling-stroke"/></svg><p>{len(values)} steps, from'
        f" {points[0][1]:.4g} to {points[-1][1]:.4g} (lowest {low:.4g}, highest {high:.4g})</p>"
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell)[:LONGEST])}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{f'<tr>{top}</tr>' if head else ''}{body}</table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
