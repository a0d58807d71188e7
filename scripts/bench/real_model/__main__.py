"""Measure a real model beside its peers, merge the results into a JSON file and write
docs/benchmarks/real_model.md.

    scripts/bench/setup_peers                                                 # once: mlx_lm.server
    python -m scripts.bench.real_model MODEL --gguf MODEL.Q4_1.gguf           # all sections
    python -m scripts.bench.real_model MODEL --section training --case DPO    # a part, merged into what was measured
    python -m scripts.bench.real_model --page                                 # the page alone, from the JSON file

`learning.py`: held-out scores before and after GRPO. `serving.py`: tokens a second of streamed chats, in alternating rounds. `training.py`: seconds a
step and peak memory, predicted by the dry run and measured. `answers.py`: greedy answers beside
llama.cpp's. Each row keeps its date and the load of the machine before its section began.
"""

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from scripts.bench import real_model_learning
from scripts.bench.real_model import answers, learning, page, serving, training

RESULTS = Path("docs/benchmarks/real_model.json")
PAGE = Path("docs/benchmarks/real_model.md")
CURVES = PAGE.with_name("real_model_learning.png")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a Hugging Face folder")
    parser.add_argument(
        "--gguf",
        type=Path,
        help="the quantised file, for llama.cpp; without it that peer is left out",
    )
    parser.add_argument("--section", choices=["answers", "serving", "training"])
    parser.add_argument("--case", default="", help="only training cases whose name contains this")
    parser.add_argument("--clients", type=int, nargs="+", default=list(serving.CLIENTS))
    parser.add_argument(
        "--rounds", type=int, default=3, help="counted ones of serving; one more warms up"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="of a training case; the first is not counted"
    )
    parser.add_argument("--page", action="store_true", help="write the page and measure nothing")
    parser.add_argument(
        "--learning",
        type=Path,
        help="results of scripts.bench.real_model_learning: merge its finished runs, measure nothing",
    )
    arguments = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if arguments.learning:
        _merge_learning(results, arguments.learning)
    elif not arguments.page:
        if arguments.model is None or not (arguments.model / "config.json").exists():
            parser.error(f"{arguments.model} is not a Hugging Face folder: it has no config.json")
        _measure(results, arguments, arguments.model.resolve())
    _write(PAGE, page.render(results))


def _measure(results: dict[str, Any], arguments: argparse.Namespace, model: Path) -> None:
    """Measure the sections that were asked for, by default all."""
    if arguments.section in ("answers", None):
        for name, row in answers.measure(model, arguments.gguf):
            _keep(results, "answers", name, row)
    if arguments.section in ("serving", None):
        for name, row in serving.measure(
            model, arguments.gguf, arguments.clients, arguments.rounds
        ):
            _keep(results, "serving", name, row)
    if arguments.section in ("training", None):
        for name, row in training.measure(model, arguments.case, arguments.steps):
            _keep(results, "training", name, row)


def _merge_learning(results: dict[str, Any], directory: Path) -> None:
    """Merge the finished runs of a directory. Raises SystemExit: it has none."""
    runs = real_model_learning.finished(directory)
    if not runs:
        raise SystemExit(f"{directory} has no finished run")
    for run in runs:
        _keep(results, "learning", learning.name_of(run), learning.row_of(run))
    learning.draw(list(results["learning"].values()), CURVES)


def _keep(results: dict[str, Any], section: str, name: str, row: dict[str, Any]) -> None:
    stamp = {"date": datetime.now(UTC).date().isoformat(), "cores": os.cpu_count()}
    results.setdefault(section, {})[name] = row | stamp
    _write(RESULTS, json.dumps(results, indent=1) + "\n")
    print(name, json.dumps(row), flush=True)


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    partial.rename(path)


if __name__ == "__main__":
    main()
