"""A study: one training, varied, by several seeds; its measures as a table and a figure.

    python -m scripts.bench.study                                  # the studies, a line each
    python -m scripts.bench.study staleness --seeds 0 1 2 --figure docs/benchmarks/staleness.png
    python -m scripts.bench.study algorithms --only "PPO" --set rl_training.total_steps=20

`scripts/bench/studies/NAME.toml` says what is varied and what is measured: `Study` and `Measure` below
are its keys. Each run is the real `mlx_parallm train` in its own directory; within a seed
the variants take turns. Printed: a line a run, then Markdown for the page: the command, and a row a
variant with the median of the seeds and, in brackets, the lowest and the highest.
"""

import argparse
import importlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

ROOT = Path(__file__).parents[2]
STUDIES = Path(__file__).with_name("studies")
Settings = dict[str, Any]
Lines = list[dict[str, Any]]
SECONDS = ("time_rollout_s", "time_train_s", "time_publish_s")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Measure(Section):
    """One number of a run, from the lines of its metrics.jsonl. Lines without the key are left out."""

    of: (
        str | list[str]
    )  # a key of metrics.jsonl ("environments.sort.trained": nested); a list: the sum
    over: int = 0  # the first n values, or the last -n; 0: all
    how: Literal["mean", "median", "sum", "max", "min"] = "mean"
    off: float | None = None  # the distance from this value, instead of the value
    per: str | None = None  # divided by this other measure
    reach: float | None = (
        None  # where the mean of `window` values first is this, or more; in `axis`
    )
    stay: bool = False  # with reach: and stays there
    window: int = 1
    axis: Literal["step", "seconds", "tokens"] = "step"
    digits: int = 3

    def __call__(self, lines: Lines) -> float | None:
        """Return the number; None: no line has the key, or the value is never reached."""
        places = {"step": _steps, "seconds": _seconds, "tokens": _tokens}[self.axis](lines)
        pairs = [
            (place, value)
            for place, line in zip(places, lines, strict=True)
            if (value := self._value(line)) is not None
        ]
        if self.reach is not None:
            return self._reached(pairs, self.reach)
        values = [value for _, value in pairs]
        values = values[: self.over] if self.over > 0 else values[self.over :]
        numbers = {
            "mean": statistics.fmean,
            "median": statistics.median,
            "sum": sum,
            "max": max,
            "min": min,
        }
        return float(numbers[self.how](values)) if values else None

    def _value(self, line: dict[str, Any]) -> float | None:
        keys = [self.of] if isinstance(self.of, str) else self.of
        values = [_at(line, key) for key in keys]
        if not any(value is not None for value in values):
            return None
        value = float(sum(value or 0.0 for value in values))
        return value if self.off is None else abs(value - self.off)

    def _reached(self, pairs: Sequence[tuple[float, float]], mark: float) -> float | None:
        means = smooth([value for _, value in pairs], self.window)
        short = [place for place, mean in enumerate(means) if mean < mark]
        if self.stay:
            first = short[-1] + 1 if short else 0
        else:
            first = next((i for i in range(len(means)) if i not in short), len(means))
        return pairs[first][0] if first < len(pairs) else None


class Figure(Section):
    """A curve a variant: the mean over its seeds, in a band from the lowest to the highest."""

    of: str = "reward_mean"
    axis: Literal["step", "seconds", "tokens"] = "step"
    window: int = 10
    title: str = ""


class Study(Section):
    """A file of `studies/`."""

    about: str  # a line
    config: str | dict[str, Any]  # a shipped configuration's name, or a configuration
    prepare: str | None = None  # "function" of studies/inputs.py: (directory, seed, variant names)
    seeds: list[int] = [0, 1, 2]
    settings: Settings = {}  # of every run; {dir} is its directory
    axes: dict[str, dict[str, Settings]]  # what is varied: column → variant → settings
    measures: dict[str, Measure]  # columns of the table
    figure: Figure = Field(default_factory=Figure)


def _at(line: Mapping[str, Any], key: str) -> float | None:
    """Return the number at a key; a dot goes into a table, where no key has that whole name."""
    found: Any = line.get(key)
    if found is None and "." in key:
        outer, _, inner = key.partition(".")
        found = _at(line[outer], inner) if isinstance(line.get(outer), dict) else None
    return float(found) if isinstance(found, int | float) else None


def _steps(lines: Lines) -> list[float]:
    return [float(line["step"]) for line in lines]


def _seconds(lines: Lines) -> list[float]:
    return list(itertools.accumulate(sum(line.get(k) or 0.0 for k in SECONDS) for line in lines))


def _tokens(lines: Lines) -> list[float]:
    """Sampled tokens by the end of each step, those of dropped groups too."""
    return list(
        itertools.accumulate(line["completion_tokens_mean"] * line["sequences"] for line in lines)
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last `window` values at each place."""
    return [
        statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]


def load(name: str) -> Study:
    """Raises SystemExit: no such study, or what is wrong in its file."""
    file = STUDIES / f"{name}.toml"
    if not file.is_file():
        raise SystemExit(f"no study {name!r}; there are {', '.join(names())}")
    try:
        return Study.model_validate(tomllib.loads(file.read_text()))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        raise SystemExit(f"{file}: {error}") from None


def names() -> list[str]:
    return sorted(file.stem for file in STUDIES.glob("*.toml"))


def variants(study: Study, only: Sequence[str] = ()) -> dict[tuple[str, ...], Settings]:
    """Return each combination of the axes with its settings; `only`: names of which one, on each
    axis that has any of them, is taken."""
    chosen = [
        {name: each for name, each in axis.items() if name in only} or axis
        for axis in study.axes.values()
    ]
    every: dict[tuple[str, ...], Settings] = {}
    for combination in itertools.product(*(axis.items() for axis in chosen)):
        merged: Settings = {}
        for _, settings in combination:
            merged |= settings
        every[tuple(name for name, _ in combination)] = merged
    return every


def prepare(study: Study, variant: Sequence[str], seed: int, directory: Path) -> str:
    """Write a run's inputs, and its configuration where the study holds one. Return the
    configuration's name or file."""
    if study.prepare:
        inputs = importlib.import_module("scripts.bench.studies.inputs")
        getattr(inputs, study.prepare)(directory, seed, variant)
    if isinstance(study.config, str):
        return study.config
    file = directory / "run.toml"
    file.write_text(_placed(tomli_w.dumps(study.config), directory))
    return str(file)


def overrides(study: Study, settings: Settings, seed: int, directory: Path) -> list[str]:
    """Return what the command's --set gets: "key=value"."""
    every = {
        "rl_training.seed": seed,
        "rl_training.checkpoint_dir": str(directory),
        "rl_training.run_name": "run",
        "server.port": 0,
        **study.settings,
        **settings,
    }
    texts = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in every.items()
    }
    return [f"{key}={_placed(text, directory)}" for key, text in texts.items()]


def train(study: Study, variant: Sequence[str], settings: Settings, seed: int) -> Lines:
    """Run the command once. Return the lines of its metrics.

    Raises SystemExit with the command's output: it failed.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config = prepare(study, variant, seed, directory)
        command = [sys.executable, "-m", "mlx_parallm", "train", "--config", config]
        for one in overrides(study, settings, seed, directory):
            command += ["--set", one]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
        metrics = directory / "run" / "metrics.jsonl"
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def _placed(text: str, directory: Path) -> str:
    return text.replace("{dir}", str(directory)).replace("{studies}", str(STUDIES))


def measured(study: Study, lines: Lines) -> dict[str, float | None]:
    """Return a run's measures by their names."""
    numbers = {name: measure(lines) for name, measure in study.measures.items()}
    for name, measure in study.measures.items():
        value, by = numbers[name], numbers.get(measure.per or "")
        if measure.per:
            numbers[name] = value / by if value is not None and by else None
    return numbers


def cell(values: Sequence[float | None], digits: int) -> str:
    """Return the median of the seeds, and the range of several; – where a seed has no value."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values) or not numbers:
        return "–"
    middle = f"{statistics.median(numbers):.{digits}f}"
    if len(numbers) == 1:
        return middle
    return f"{middle} [{min(numbers):.{digits}f}, {max(numbers):.{digits}f}]"


def table(study: Study, results: Mapping[tuple[str, ...], Sequence[Lines]]) -> str:
    """Return the Markdown table: a row a variant."""
    head = [*study.axes, *study.measures]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for variant, runs in results.items():
        numbers = [measured(study, lines) for lines in runs]
        cells = [
            cell([each[name] for each in numbers], measure.digits)
            for name, measure in study.measures.items()
        ]
        rows.append("| " + " | ".join([*variant, *cells]) + " |")
    return "\n".join(rows)


def draw(study: Study, results: Mapping[tuple[str, ...], Sequence[Lines]], file: Path) -> None:
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(9, 4.5), dpi=110, layout="constrained")
    axes, kind = figure.add_subplot(), study.figure
    for variant, runs in results.items():
        shortest = min(map(len, runs))
        places = [
            {"step": _steps, "seconds": _seconds, "tokens": _tokens}[kind.axis](lines)[:shortest]
            for lines in runs
        ]
        curves = [
            smooth([_at(line, kind.of) or 0.0 for line in lines], kind.window)[:shortest]
            for lines in runs
        ]
        x = [statistics.fmean(at) for at in zip(*places, strict=True)]
        (line,) = axes.plot(
            x, [statistics.fmean(at) for at in zip(*curves, strict=True)], label=", ".join(variant)
        )
        low, high = ([pick(at) for at in zip(*curves, strict=True)] for pick in (min, max))
        axes.fill_between(x, low, high, color=line.get_color(), alpha=0.12)
    axes.set_title(kind.title or study.about, loc="left")
    axes.set_xlabel(
        {"seconds": "seconds of training", "tokens": "sampled tokens"}.get(kind.axis, "step")
    )
    axes.set_ylabel(f"{kind.of}, mean of {kind.window} steps")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(file)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("name", nargs="?", help="a file of scripts/bench/studies; none: list them")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: the file's")
    parser.add_argument("--only", nargs="+", default=[], help="names of variants")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of every run"
    )
    parser.add_argument("--figure", type=Path, help="draw the curves into this file")
    options = parser.parse_args(arguments)
    if options.name is None:
        print("\n".join(f"{name}: {load(name).about}" for name in names()))
        return
    study = load(options.name)
    known = {name for axis in study.axes.values() for name in axis}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"no variant {unknown[0]!r}; there are {', '.join(sorted(known))}")
    chosen = variants(study, options.only)
    settings = dict(one.partition("=")[::2] for one in options.set)
    results: dict[tuple[str, ...], list[Lines]] = {variant: [] for variant in chosen}
    for seed, (variant, own) in itertools.product(options.seeds or study.seeds, chosen.items()):
        lines = train(study, variant, own | settings, seed)
        results[variant].append(lines)
        numbers = {
            name: None if value is None else round(value, study.measures[name].digits)
            for name, value in measured(study, lines).items()
        }
        print(f"{', '.join(variant)}, seed {seed}: {numbers}", file=sys.stderr, flush=True)
    words = sys.argv[1:] if arguments is None else arguments
    print(f"`python -m scripts.bench.study {' '.join(words)}`\n\n{table(study, results)}")
    if options.figure:
        draw(study, results, options.figure)


if __name__ == "__main__":
    main()
