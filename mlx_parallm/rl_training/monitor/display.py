"""The display of a run: a live panel on a terminal (docs/watching.md#the-panel), else one log line
for each step.

Beside a panel the same lines go to run.log alone. It subscribes to the run's events. A display
never ends a run: an error inside it turns it into the plain one. It installs no signal handler and
swallows no KeyboardInterrupt.
"""

import functools
import json
import logging
import math
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
from mlx_parallm.rl_training.monitor.drawing import (
    CURVE_WIDTH,
    began_and_now,
    command_lines,
    sparkline,
)
from mlx_parallm.rl_training.monitor.evidence import WINDOW
from mlx_parallm.rl_training.monitor.health import HEALTHY, sentences
from mlx_parallm.rl_training.monitor.readable import Readable, samples_table, shortened
from mlx_parallm.run_files.evaluations import sentence
from mlx_parallm.run_files.metrics import of_rows
from mlx_parallm.run_files.samples import Sample, merged
from mlx_parallm.system.log import FILE_ONLY, get_logger, words_of
from mlx_parallm.system.terminal import Console

log = get_logger("display")

PACE_STEPS = 20
"""Steps that the ETA is computed from."""
REFRESHES_PER_SECOND = 2
EXAMPLE_LENGTH = 120
"""Most characters of an example prompt: a command of many lines would push the rest off the
screen."""
UNKNOWN = "–"
WAITING = Text("waiting for the first step", style="dim")
LINE_KEYS = ("step", "policy_version", "reward_mean", "kl", "entropy", "eval/score", "publish_ms")
ROW_KEYS = (
    "step",
    "policy_version",
    "loss",
    "rewards/accuracies",
    "rewards/margins",
    "eval/loss",
    "heldout_score",
    "publish_ms",
)
"""Keys of a run that learns from rows of a file and has no rewards."""

P = ParamSpec("P")
T = TypeVar("T")
Sources = Callable[[], Sequence[str | None]]


def curl_line(info: RunInfo, width: int | None = None) -> str:
    """Return a command that asks the model; with a width in lines that can be pasted from a
    terminal that wide."""
    content = info.example_prompt
    if isinstance(content, str) and len(content) > EXAMPLE_LENGTH:
        content = content[:EXAMPLE_LENGTH].rpartition(" ")[0] or content[:EXAMPLE_LENGTH]
    body = {"model": info.model_name, "messages": [{"role": "user", "content": content}]}
    quoted = json.dumps(body, separators=(",", ":"), ensure_ascii=False).replace("'", "'\\''")
    key = ['-H "Authorization: Bearer $MLX_PARALLM_API_KEY"'] if info.needs_key else []
    parts = [
        f"curl {info.base_url}/v1/chat/completions",
        "-H 'Content-Type: application/json'",
        *key,
        f"-d '{quoted}'",
    ]
    return command_lines(parts, width)


def attempt(action: Callable[[], T]) -> T | Exception:
    """Boundary: a display that fails must not end a run."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001
        return error


def _guarded(
    method: Callable[Concatenate["TrainingDisplay", P], None],
) -> Callable[Concatenate["TrainingDisplay", P], None]:
    """Make a method of the display that switches to the plain display when the terminal fails."""

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
        readable: Readable = str,
        pages: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            interactive: a live panel or lines; default: a panel if the console is a terminal.
            sources: returns the health of the rollout sources (`RolloutManager.health`); called at
            each update.
            readable: turns chat templates' texts back into messages, in samples.
            pages: addresses that show the run in a browser.
        """
        self._console = console or Console(stderr=True)
        self._interactive = self._console.is_terminal if interactive is None else interactive
        self._sources, self._readable, self._pages = sources, readable, pages
        self._clock = clock
        self._info: RunInfo | None = None
        self._live: Live | None = None
        self._curve: list[float] = []
        self._curve_of = "reward"
        self._heldout: list[float] = []  # the evaluations' scores
        self._began = 0.0
        self._saved: int | None = None  # step of the newest checkpoint
        self._window: deque[Mapping[str, Any]] = deque(maxlen=WINDOW)
        self._first: list[Mapping[str, Any]] = []
        self._pace: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)
        self._logged_health = HEALTHY
        self._ended = threading.Event()
        self._refresher = threading.Thread(target=self._refresh, name="display", daemon=True)

    def subscribe(self, events: RunEvents) -> None:
        events.subscribe(RunStarted, lambda event: self.start(event.info, event.lines))
        events.subscribe(Waiting, lambda event: self.tick())
        events.subscribe(StepFinished, lambda event: self.update(event.line))
        events.subscribe(SamplesWritten, lambda event: self.samples(event.step, event.samples))
        events.subscribe(EvaluationFinished, lambda event: self.note(sentence(event.line)))
        events.subscribe(CheckpointSaved, self.saved)
        events.subscribe(Noted, lambda event: self.note(event.text))
        events.subscribe(RunFinished, lambda event: self.stop())

    @_guarded
    def start(self, info: RunInfo, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        """Args:
        lines: metrics of earlier steps of a resumed run: how it began shows whether it has learned.
        """
        self._info, self._began = info, self._clock()
        self._saved = info.start_step or None
        for line in lines:
            self._add(line)
        if not info.start_step:  # the first step of a resume may be the rest of one
            self._pace.append((0, self._clock()))
        self._log("training", run=info.run_name, model=info.model, steps=info.total_steps)
        if info.base_url and info.example_prompt:
            # a field of the log would have its quotes escaped
            self._log(f"talk to the model: {curl_line(info)}")
        for page in self._pages:
            self._log("watch the run in a browser", url=page.partition("#")[0])
        if not self._interactive:
            return
        self._live = Live(console=self._console, get_renderable=self._render, auto_refresh=False)
        self._live.start(refresh=True)
        self._refresher.start()

    @_guarded
    def update(self, metrics: Mapping[str, Any]) -> None:
        """Show one finished step: a line of metrics.jsonl."""
        self._add(metrics)
        self._pace.append((int(metrics["step"]), self._clock()))
        self._log_step(metrics)

    def _add(self, metrics: Mapping[str, Any]) -> None:
        self._window.append(metrics)
        if len(self._first) < WINDOW:
            self._first.append(metrics)
        self._curve_of, value = headline(metrics)
        if isinstance(value, int | float):
            self._curve.append(float(value))
        if isinstance(score := _heldout(metrics), int | float):
            self._heldout.append(float(score))

    @_guarded
    def tick(self) -> None:
        """Log a change of health while the trainer waits.

        Only the words are compared: the numbers may count seconds.
        """
        if words_of(health := self.health()) != words_of(self._logged_health):
            self._logged_health = health
            self._log(
                "health", logging.INFO if health == HEALTHY else logging.WARNING, health=health
            )

    @_guarded
    def note(self, text: str) -> None:
        """Show an event that is not a step, above the panel: an evaluation."""
        self._log(text)
        if self._live is not None:
            self._live.console.print(Text(text, style="dim"))

    @_guarded
    def saved(self, event: CheckpointSaved) -> None:
        """The panel has a line for the newest checkpoint."""
        self._saved = event.step
        self._log(f"saved {event.path}")

    @_guarded
    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Show answers of the policy: a table above the live panel, or a line each."""
        for which, sample in merged(samples):
            prompt, completion = shortened(sample, self._readable)
            self._log(
                "sample",
                step=step,
                which=which,
                reward=sample.reward,
                prompt=prompt,
                completion=completion,
            )
        if self._live is not None:
            self._live.console.print(samples_table(samples, self._readable))

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
        return "; ".join(self._findings()) or HEALTHY

    def _findings(self) -> list[str]:
        return sentences(list(self._window), self._sources(), list(self._first))

    def _refresh(self) -> None:
        """Run on our own thread: rich's prints a traceback and dies when the terminal goes away."""
        while not self._ended.wait(1 / REFRESHES_PER_SECOND) and (live := self._live) is not None:
            if isinstance(error := attempt(live.refresh), Exception):
                self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        log.warning(
            "display failed, continuing with plain lines",
            error=f"{type(error).__name__}: {error}",
        )
        live, self._live, self._interactive = self._live, None, False
        if live is not None and isinstance(again := attempt(live.stop), Exception):
            log.warning("the terminal could not be restored", error=str(again))

    def _log(self, event: str, level: int = logging.INFO, **fields: Any) -> None:
        """Write a line of the log; if the panel shows it, into run.log alone."""
        log.log(level, event, **fields, **({FILE_ONLY: True} if self._interactive else {}))

    def _log_step(self, metrics: Mapping[str, Any]) -> None:
        keys = ROW_KEYS if of_rows(metrics) else LINE_KEYS
        shown = {key: _rounded(metrics[key]) for key in keys if metrics.get(key) is not None}
        if "eval/loss" in shown and shown.get("heldout_score") == _rounded(-metrics["eval/loss"]):
            del shown["heldout_score"]  # the loss, with another sign
        self._logged_health = self.health()
        self._log(
            "step",
            **shown,
            served_tok_s=_rounded(metrics.get("serve_tok_s")),
            trained_tok_s=_rounded(trained_tokens_per_s(metrics)),
            eta=self._eta(),
            health=self._logged_health,
        )

    def _seconds_a_step(self) -> float | None:
        if len(self._pace) < 2 or self._pace[-1][0] <= self._pace[0][0]:
            return None
        (first, begin), (last, end) = self._pace[0], self._pace[-1]
        pace = (end - begin) / (last - first)
        # a step that takes longer than the ones before is the newest that is known
        return max(pace, (self._clock() - begin) / (last - first + 1))

    def _eta(self) -> str:
        seconds = self._seconds_a_step()
        if self._info is None or seconds is None:
            return UNKNOWN
        return _duration((self._info.total_steps - self._pace[-1][0]) * seconds)

    def _render(self) -> RenderableType:
        """Return the panel; called on any thread."""
        if self._info is None or self._live is None:  # no panel after a failure of the panel
            return Text("")
        return self._panel(self._info, dict(self._window[-1]) if self._window else {})

    def _panel(self, info: RunInfo, last: Mapping[str, Any]) -> RenderableType:
        rows = Table.grid(padding=(0, 1))
        rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        step = int(last.get("step", info.start_step))
        rows.add_row("step", self._progress(info, step))
        pace = self._seconds_a_step()
        elapsed = _duration(self._clock() - self._began)
        rows.add_row(
            "time", f"{elapsed} so far · {UNKNOWN if pace is None else f'{pace:.3g} s'} a step"
        )
        rows.add_row(self._curve_of, _curve_text(self._curve) if self._curve else WAITING)
        evaluation = info.next_evaluation(step)
        if self._heldout or evaluation is not None:
            heldout = _curve_text(self._heldout) if self._heldout else Text("")
            after = (
                ""
                if evaluation is None
                else f"{' · ' if heldout else ''}next after step {evaluation}"
            )
            rows.add_row("held out", heldout.append(after, style="dim"))
        if len(environments := last.get("environments") or {}) > 1:
            shown = [(name, _environment_text(numbers)) for name, numbers in environments.items()]
            rows.add_row("environments", _facts(shown))
        facts = (
            ("KL", _number(last, "kl", ".4f")),
            ("entropy", _number(last, "entropy", ".3f")),
            ("learning rate", _number(last, "learning_rate", ".3g")),
        )
        rows.add_row("learning", _facts(facts))
        served = (
            ("version", _number(last, "policy_version", ".0f")),
            ("publish", _number(last, "publish_ms", ".2f", " ms")),
        )
        rows.add_row("policy", _facts(served))
        speeds = (
            ("served", _number(last, "serve_tok_s", ",.0f")),
            ("trained", _number({"x": trained_tokens_per_s(last)}, "x", ",.0f")),
        )
        rows.add_row("tokens/s", _facts(speeds))
        newest = "none yet" if self._saved is None else f"of step {self._saved}"
        following = info.next_checkpoint(step)
        after = "" if following is None else f" · next after step {following}"
        rows.add_row("checkpoint", Text(newest).append(after, style="dim"))
        rows.add_row("health", self._health_text(info))
        title = Rule(
            Text(f"mlx_parallm · {info.run_name} · {info.model}"), align="left", style="cyan"
        )
        if not info.base_url:  # no server
            return Group(title, rows)
        talk = [
            Text("talk to it while it learns:", style="dim"),
            Text(curl_line(info, self._console.width), style="cyan"),
        ]
        # a picture's command is a thousand characters: it would push the rest off the screen
        if not isinstance(info.example_prompt, str):
            talk = [Text("talk to it while it learns: the command is in run.log", style="dim")]
        watch = [
            Text("watch it: ", style="dim").append(page, style="not dim cyan")
            for page in self._pages
        ]
        return Group(title, rows, *(talk if info.example_prompt else ()), *watch)

    def _health_text(self, info: RunInfo) -> Text:
        """The gravest finding, and a pointer to the others: the lines below have to stay on the
        screen."""
        findings = self._findings()
        if not findings:
            return Text(HEALTHY, style="green")
        text = Text(findings[0], style="bold red")
        if len(findings) > 1:
            more = f" (+{len(findings) - 1}: mlx_parallm explain {info.run_name})"
            text.append(more, style="not bold dim")
        return text

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
    """Return the newest value, the curve, and from where to where it went; for two values or
    more."""
    values = list(series)  # another thread appends
    text = Text(f"{values[-1]:.3f} ", style="bold")
    text.append(sparkline(values), style="green")
    began, now, _ = began_and_now(values)
    return text.append(f" {began:.2f} → {now:.2f}" if len(values) > 1 else "", style="dim")


def _heldout(metrics: Mapping[str, Any]) -> Any:
    """The held-out number that people read: a score, an accuracy, or the loss, of which the score
    is the negative."""
    score = metrics.get("eval/score", metrics.get("heldout_score"))
    loss = metrics.get("eval/loss")
    return loss if loss is not None and score == -loss else score


def headline(metrics: Mapping[str, Any]) -> tuple[str, Any]:
    """Return name and value of the number that a run is judged by: its reward; with rows its
    accuracy or its loss. A line may name another one (`judged_by`)."""
    if name := metrics.get("judged_by"):
        return str(name).replace("_", " "), metrics.get(name)
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
        text.append(" · " if text else "", style="dim").append(f"{name} ", style="dim").append(
            value
        )
    return text


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _environment_text(numbers: Mapping[str, Any]) -> str:
    groups = round(numbers["groups"])
    return f"{_number(numbers, 'reward_mean', '.2f')} ({groups} group{'s' * (groups != 1)})"


def _number(metrics: Mapping[str, Any], key: str, form: str, unit: str = "") -> str:
    value = metrics.get(key)
    return f"{value:{form}}{unit}" if isinstance(value, int | float) else UNKNOWN


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and math.isfinite(value) else value
