"""What a person sees of a run: a live panel on a terminal, one log line for each step elsewhere.

It subscribes to the run's events. A display never ends a run: an error inside it turns it into the plain one. It
installs no signal handler and swallows no KeyboardInterrupt.
"""

import functools
import itertools
import json
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mlx_parallm.rl_training.evaluation.log import sentence
from mlx_parallm.rl_training.events import (
    CheckpointSaved,
    EvaluationFinished,
    Noted,
    RunEvents,
    RunFinished,
    RunInfo,
    RunStarted,
    SamplesWritten,
    StepFinished,
    Waiting,
)
from mlx_parallm.rl_training.metrics import of_rows
from mlx_parallm.rl_training.monitor.health import HEALTHY, WINDOW, diagnose
from mlx_parallm.rl_training.monitor.samples import Sample, samples_table, shortened
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.terminal import Console

log = get_logger("display")

BLOCKS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 40
PACE_STEPS = 20
"""Steps that the ETA is computed from."""
REFRESHES_PER_SECOND = 2
NOTES = 3
UNKNOWN = "–"
LINE_KEYS = ("step", "policy_version", "reward_mean", "kl", "entropy", "eval/score", "publish_ms")
ROW_KEYS = ("step", "policy_version", "loss", "rewards/accuracies", "rewards/margins", "heldout_score", "publish_ms")
"""Keys of a run that learns from rows of a file and has no rewards."""

P = ParamSpec("P")
T = TypeVar("T")
Sources = Callable[[], Sequence[str | None]]


def curl_line(info: RunInfo) -> str:
    """Return a command that talks to the model, in lines that can be copied from a terminal of 80 columns."""
    body = {"model": info.model_name, "messages": [{"role": "user", "content": info.example_prompt}]}
    quoted = json.dumps(body, separators=(",", ":"), ensure_ascii=False).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $MLX_PARALLM_API_KEY" \\\n' if info.needs_key else ""
    return f"curl {info.base_url}/v1/chat/completions \\\n -H 'Content-Type: application/json' \\\n{key} -d '{quoted}'"


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Draw values as at most `width` block characters, each a mean. Values within [0, 1] are drawn on that scale."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(position * len(finite) / count) for position in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] for value in means)


def attempt(action: Callable[[], T]) -> T | Exception:
    """Boundary: a display that fails must not end a run."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001
        return error


def _guarded(
    method: Callable[Concatenate["TrainingDisplay", P], None],
) -> Callable[Concatenate["TrainingDisplay", P], None]:
    """When the terminal fails, training continues with the plain display."""

    @functools.wraps(method)
    def guarded(self: "TrainingDisplay", *args: P.args, **kwargs: P.kwargs) -> None:
        if isinstance(error := attempt(lambda: method(self, *args, **kwargs)), Exception):
            self._fall_back(error)

    return guarded


class TrainingDisplay:
    def __init__(
        self,
        console: Console | None = None,
        *,
        interactive: bool | None = None,
        sources: Sources = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            interactive: a live panel or lines; default: a panel where the console is a terminal.
            sources: returns the health of the rollout sources (`RolloutManager.health`); called at each update.
        """
        self._console = console or Console(stderr=True)
        self._interactive = self._console.is_terminal if interactive is None else interactive
        self._sources = sources
        self._clock = clock
        self._info: RunInfo | None = None
        self._live: Live | None = None
        self._curve: list[float] = []
        self._curve_of = "reward"
        self._heldout: list[float] = []  # of the evaluations
        self._window: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._first: list[Mapping[str, Any]] = []
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._logged_health = HEALTHY
        self._ended = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="display", daemon=True)

    def subscribe(self, events: RunEvents) -> None:
        events.subscribe(RunStarted, lambda event: self.start(event.info, event.lines))
        events.subscribe(Waiting, lambda event: self.tick())
        events.subscribe(StepFinished, lambda event: self.update(event.line))
        events.subscribe(SamplesWritten, lambda event: self.samples(event.step, event.samples))
        events.subscribe(EvaluationFinished, lambda event: self.note(sentence(event.line)))
        events.subscribe(CheckpointSaved, lambda event: self.note(f"saved {event.path}"))
        events.subscribe(Noted, lambda event: self.note(event.text))
        events.subscribe(RunFinished, lambda event: self.stop())

    @_guarded
    def start(self, info: RunInfo, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Args:
        lines: metrics of earlier steps of a resumed run: how it began shows whether it has learned.
        """
        self._info = info
        for line in lines:
            self._add(line)
        if not info.start_step:  # the first step of a resume may be the rest of one
            self._pace.append((0, self._clock()))
        if not self._interactive:
            log.info("training", run=info.run_name, model=info.model, steps=info.total_steps)
            log.info("talk to the model", command=curl_line(info).replace("\\\n ", ""))
            return
        self._live = Live(console=self._console, get_renderable=self._render, auto_refresh=False)
        self._live.start(refresh=True)
        self._refresher.start()

    @_guarded
    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show one finished step: a line of metrics.jsonl."""
        self._add(metrics)
        self._pace.append((int(metrics["step"]), self._clock()))
        if self._live is None:
            self._log_step(metrics)

    def _add(self, metrics: Mapping[str, Any]) -> None:
        self._window.append(metrics)
        if len(self._first) < WINDOW:
            self._first.append(metrics)
        self._curve_of, value = headline(metrics)
        if isinstance(value, int | float):
            self._curve.append(float(value))
        if isinstance(score := metrics.get("eval/score"), int | float):
            self._heldout.append(float(score))

    @_guarded
    def tick(self) -> None:
        """Without a terminal, log a change of health while the trainer waits.

        Only the words are compared: the numbers may count seconds.
        """
        if self._live is None and _words_of(health := self.health()) != _words_of(self._logged_health):
            self._logged_health = health
            (log.info if health == HEALTHY else log.warning)("health", health=health)

    @_guarded
    def note(self, text: str) -> None:
        """Show an event that is not a step: a checkpoint, an evaluation."""
        if self._live is None:
            log.info(text)
        else:
            self._notes.append(text)

    @_guarded
    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show what the policy wrote: a table above the live panel, or a line each."""
        if self._live is not None:
            self._live.console.print(samples_table(samples))
            return
        for sample in samples:
            prompt, completion = shortened(sample)
            log.info(
                "sample", step=step, which=sample.which, reward=sample.reward, prompt=prompt, completion=completion
            )

    @_guarded
    def stop(self) -> None:
        """Leave the last panel on the terminal and the cursor visible. May be called again."""
        self._ended.set()
        if self._refresher.is_alive():
            self._refresher.join()
        if self._live is not None:
            self._live.stop()
        self._live = None

    def health(self) -> str:
        return diagnose(list(self._window), self._sources(), list(self._first))

    def _refresh(self) -> None:
        """Run on our own thread: rich's prints a traceback and dies when the terminal goes away."""
        while not self._ended.wait(1 / REFRESHES_PER_SECOND) and (live := self._live) is not None:
            if isinstance(error := attempt(live.refresh), Exception):
                self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        log.warning("display failed, continuing with plain lines", error=f"{type(error).__name__}: {error}")
        live, self._live, self._interactive = self._live, None, False
        if live is not None and isinstance(again := attempt(live.stop), Exception):
            log.warning("the terminal could not be restored", error=str(again))

    def _log_step(self, metrics: Mapping[str, Any]) -> None:
        keys = ROW_KEYS if of_rows(metrics) else LINE_KEYS
        shown = {key: _rounded(metrics[key]) for key in keys if key in metrics}
        self._logged_health = self.health()
        log.info(
            "step",
            **shown,
            served_tok_s=_rounded(metrics.get("serve_tok_s")),
            trained_tok_s=_rounded(trained_tokens_per_s(metrics)),
            eta=self._eta(),
            health=self._logged_health,
        )

    def _eta(self) -> str:
        if self._info is None or len(self._pace) < 2 or self._pace[-1][0] <= self._pace[0][0]:
            return UNKNOWN
        (first, begin), (last, end) = self._pace[0], self._pace[-1]
        seconds = round((self._info.total_steps - last) * (end - begin) / (last - first))
        minutes, seconds = divmod(max(0, seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _render(self) -> RenderableType:
        """Return the panel; called on any thread."""
        if self._info is None or self._live is None:  # no panel after a failure of the panel
            return Text("")
        return self._panel(self._info, dict(self._window[-1]) if self._window else {})

    def _panel(self, info: RunInfo, last: Mapping[str, Any]) -> RenderableType:
        health = self.health()
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        rows.add_row("step", self._progress(info, int(last.get("step", info.start_step))))
        rows.add_row(self._curve_of, _curve_text(self._curve))
        if self._heldout:
            rows.add_row("held out", _curve_text(self._heldout))
        if len(environments := last.get("environments") or {}) > 1:
            rows.add_row("", _facts([(name, _environment_text(numbers)) for name, numbers in environments.items()]))
        facts = (
            ("KL", _number(last, "kl", ".4f")),
            ("entropy", _number(last, "entropy", ".3f")),
            ("publish", _number(last, "publish_ms", ".2f", " ms")),
            ("policy version", _number(last, "policy_version", ".0f")),
        )
        rows.add_row("policy", _facts(facts))
        speeds = (
            ("served", _number(last, "serve_tok_s", ",.0f")),
            ("trained", _number({"x": trained_tokens_per_s(last)}, "x", ",.0f")),
        )
        rows.add_row("tokens/s", _facts(speeds))
        rows.add_row("health", Text(health, style="green" if health == HEALTHY else "bold red"))
        for note in list(self._notes):
            rows.add_row("", Text(note, style="dim"))
        title = Rule(Text(f"mlx_parallm · {info.run_name} · {info.model}"), align="left", style="cyan")
        talk = Text(curl_line(info), style="cyan", overflow="fold")
        return Group(title, rows, Text("talk to it while it learns:", style="dim"), talk)

    def _progress(self, info: RunInfo, step: int) -> RenderableType:
        width = max(8, min(CURVE_WIDTH - 8, self._console.width - 40))
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(f"{step}/{info.total_steps}", style="bold"),
            ProgressBar(total=max(1, info.total_steps), completed=step, width=width),
            Text(f"ETA {self._eta()}"),
        )
        return line


def _curve_text(series: Sequence[float]) -> Text:
    values = list(series)  # another thread appends
    if not values:
        return Text("waiting for the first step", style="dim")
    began = sum(values[:5]) / len(values[:5])
    now = sum(values[-5:]) / len(values[-5:])
    text = Text(f"{values[-1]:.3f} ", style="bold")
    text.append(sparkline(values), style="green")
    return text.append(f" {began:.2f} → {now:.2f}", style="dim")


def headline(metrics: Mapping[str, Any]) -> tuple[str, Any]:
    """Return name and value of the number that a run is judged by: its reward; with rows its accuracy or its loss."""
    if not of_rows(metrics):
        return "reward", metrics.get("reward_mean")
    right = metrics.get("rewards/accuracies")
    return ("loss", metrics.get("loss")) if right is None else ("accuracy", right)


def trained_tokens_per_s(metrics: Mapping[str, Any]) -> float | None:
    """Return tokens per second of training; rollout and publish time do not count."""
    tokens, seconds = metrics.get("tokens"), metrics.get("time_train_s")
    return tokens / seconds if tokens and seconds else None


def _facts(pairs: Sequence[tuple[str, str]]) -> Text:
    text = Text()
    for name, value in pairs:
        text.append(" · " if text else "", style="dim").append(f"{name} ", style="dim").append(value)
    return text


def _words_of(text: str) -> str:
    return re.sub(r"[0-9.,]+", "", text)


def _environment_text(numbers: Mapping[str, Any]) -> str:
    return f"{_number(numbers, 'reward_mean', '.2f')} in {numbers['groups']:.0f}"


def _number(metrics: Mapping[str, Any], key: str, form: str, unit: str = "") -> str:
    value = metrics.get(key)
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else UNKNOWN


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value
