"""`mlx_parallm doctor --first-hour`: one command that says how this machine bears what the product
does, for an issue and for docs/benchmarks/machines.md. No MLX in this process.

    contracts   MLX's operations and the promises, each in its own process (contracts.py)
    beside      a chat that continues while a training does, for some minutes; memory, threads and
                files over time; `kill -9` half way, and the resume
    panics      macOS's reports of kernel panics from that time

The training's rewards are noise and its learning rate is tiny: each step trains on all of its
answers, and the last minute's work is the first one's. A part that fails is a line of the report,
and the next one is tried. `FirstHour` is
written: a JSON file, and a block of Markdown.
"""

import contextlib
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import psutil

from mlx_parallm.config.arguments import toml_value
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.foreign_http import BeyondBoundsError, sync_client
from mlx_parallm.system.terminal import Console

FORMAT = 1  # version of the JSON file
COMMAND = (sys.executable, "-m", "mlx_parallm")
TINY = "builtin:tiny"
TINY_SHARE = 0.3  # share of the minutes, beside another model
CONTRACTS_S, START_S, END_S = 900.0, 600.0, 180.0
SAMPLE_S = 2.0
HTTP_S = 120.0
RESTARTS = 3
NO_ANSWER = (httpx.HTTPError, BeyondBoundsError)
FACTS = "import json; from mlx_parallm.cli.doctor_report import facts; print(json.dumps(facts()))"
PANICS = Path("/Library/Logs/DiagnosticReports")
QUESTION = [{"role": "user", "content": "Reverse the word: harbour"}]
CONFIG = """
[server]
batch_size = 16

[rl_training]
total_steps = 1000000
batch_size = 16
learning_rate = 1e-6
checkpoint_interval = 5
run_name = "run"
serve_priority = "balanced"

[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 256

[[environments]]
kind = "dataset"
data = {rows}
rewards = [{reward}]
group_size = 4
max_tokens = 32
"""
REWARD = """
import random


def noise(prompts, completions, **columns):
    return [random.random() for _ in completions]
"""
ROWS = [{"prompt": f"Write {number} words about the sea."} for number in range(2, 66)]


@dataclass
class Contract:
    contract: str
    result: str  # "passed", "FAILED" or "not judged"
    measured: str


@dataclass
class MachineSample:
    """The training's process, some seconds after its start."""

    second: float
    bytes: int
    threads: int
    files: int


@dataclass
class Chats:
    """Answers that were streamed while the model trained."""

    answered: int = 0
    failed: int = 0  # while the process was being started again they do not count
    first_token_s: list[float] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)


@dataclass
class Beside:
    """A training with a chat beside it. `resumed_s`: from kill -9 to the next finished step; None:
    there was none. `in_order`: the numbers of the steps follow one another, also over the kill."""

    model: str
    minutes: float
    steps: int = 0
    step_s: float | None = None
    trained_tok_s: float | None = None
    served_tok_s: float | None = None
    killed_at: int | None = None
    resumed_s: float | None = None
    in_order: bool = False
    exit_code: int | None = None
    problem: str = ""
    chats: Chats = field(default_factory=Chats)
    samples: list[MachineSample] = field(default_factory=list)


@dataclass
class FirstHour:
    facts: list[str]
    date: str
    format: int = FORMAT
    contracts: dict[str, list[Contract]] = field(default_factory=dict)
    beside: list[Beside] = field(default_factory=list)
    panics: list[str] | None = None  # None: not a Mac

    @property
    def holds(self) -> bool:
        """Whether nothing failed."""
        results = [each.result for of in self.contracts.values() for each in of]
        return (
            "FAILED" not in results
            and all(not each.problem and each.in_order for each in self.beside)
            and not self.panics
        )


def run(model: str | None, overrides: Sequence[str], minutes: float, target: Path) -> int:
    """Try everything, write the JSON file, and print the block. Return 0 when nothing failed."""
    if minutes <= 0:
        raise ConfigError(f"--minutes {minutes:g}: more than 0")
    if target.exists():
        raise ConfigError(f"{target} is there already: name another file by --json")
    # end all started processes, as after Ctrl-C
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    console, began = Console(stderr=True), time.time()
    about = subprocess.run([*COMMAND[:1], "-c", FACTS], capture_output=True, text=True, check=False)
    if about.returncode:
        raise ConfigError(f"MLX cannot be loaded here: {about.stderr.strip()[-500:]}")
    hour = FirstHour(json.loads(about.stdout), f"{date.today()}")
    shares = {TINY: minutes} if model in (None, TINY) else {TINY: TINY_SHARE * minutes}
    if model not in (None, TINY):
        shares[str(model)] = (1 - TINY_SHARE) * minutes
    with _display_on():
        for name in shares:
            console.print(f"contracts of {_shown(name)}")
            hour.contracts[_shown(name)] = _contracts(name, overrides)
        for name, part in shares.items():
            console.print(f"chat beside training, {_shown(name)}: {part:.1f} minutes")
            hour.beside.append(_Training(name, overrides, part).run())
    hour.panics = _panics(began) if sys.platform == "darwin" else None
    target.write_text(json.dumps(asdict(hour), separators=(",", ":")) + "\n")
    sys.stdout.write(block(hour))
    console.print(f"wrote {target}")
    return 0 if hour.holds else 1


def _shown(model: str) -> str:
    """A model's name without the folders of this machine."""
    return Path(model).name if Path(model).is_dir() else model


@contextlib.contextmanager
def _display_on() -> Iterator[None]:
    """Keep a Mac's display on: that is where long work has failed."""
    if sys.platform != "darwin":
        yield
        return
    with subprocess.Popen(["caffeinate", "-d"]) as keeper:
        try:
            yield
        finally:
            keeper.terminate()


def _panics(since: float) -> list[str]:
    """Return the names of the reports of kernel panics that were written since."""
    with contextlib.suppress(OSError):
        return sorted(
            each.name
            for each in PANICS.iterdir()
            if "panic" in each.name.lower() and each.stat().st_mtime >= since
        )
    return []


# ---------------------------------------------------------------------- contracts


def _contracts(model: str, overrides: Sequence[str]) -> list[Contract]:
    """Run `doctor --contracts` in its own process and read its table."""
    command = [*COMMAND, "doctor", "--contracts", "--model", model, *_set(overrides)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CONTRACTS_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [Contract("all", "FAILED", f"not done after {CONTRACTS_S:.0f} s")]
    contracts = [
        Contract(row[0], row[1].strip("*"), row[2])
        for line in done.stdout.splitlines()
        if len(row := [cell.strip() for cell in line.strip("|").split("|")]) == 4
        and row[1].strip("*") in ("passed", "FAILED", "not judged")
    ]
    if not contracts or done.returncode not in (0, 1):
        why = done.stderr.strip().splitlines()[-1:] or [""]
        contracts.append(Contract("all", "FAILED", f"exit code {done.returncode}: {why[0][:300]}"))
    return contracts


def _set(overrides: Sequence[str]) -> list[str]:
    return [part for each in overrides for part in ("--set", each)]


# ---------------------------------------------------------------------- chat beside training


class _Training:
    """Single use."""

    def __init__(self, model: str, overrides: Sequence[str], minutes: float) -> None:
        self._name, self._overrides, self._seconds = model, overrides, 60 * minutes
        self._found = Beside(_shown(model), round(minutes, 2))
        self._stop, self._starting = threading.Event(), threading.Event()

    def run(self) -> Beside:
        with tempfile.TemporaryDirectory(prefix="mlx_parallm_first_hour_") as name:
            self._folder = Path(name)
            log = self._folder / "log.txt"
            with log.open("wb") as output:
                self._parent = psutil.Popen(self._command(), stdout=output, stderr=output)
                try:
                    self._watch()
                except _FailedError as failed:
                    self._found.problem = str(failed)
                finally:
                    self._stop.set()
                    self._end()
            self._read_metrics()
            if self._found.exit_code != 0:
                warnings = [
                    line
                    for line in log.read_text(errors="replace").splitlines()
                    if "error" in line.lower() or "warning" in line.lower()
                ]
                ended = f"the run ended with exit code {self._found.exit_code}"
                self._found.problem = "; ".join(
                    each for each in (self._found.problem, ended, *warnings[-2:]) if each
                )[:600]
        return self._found

    def _command(self) -> list[str]:
        from mlx_parallm.server.thread import bind_socket

        listener = bind_socket("127.0.0.1", 0)
        port = listener.getsockname()[1]
        listener.close()
        self._http = sync_client(base_url=f"http://127.0.0.1:{port}", timeout=HTTP_S)
        config = self._folder / "first_hour.toml"
        rows, reward = self._folder / "rows.jsonl", self._folder / "reward.py"
        rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        reward.write_text(REWARD)
        config.write_text(
            CONFIG.format(rows=toml_value(str(rows)), reward=toml_value(f"python:{reward}:noise"))
        )
        settings = [
            f"model.base_path={toml_value(self._name)}",
            f"server.port={port}",
            f"rl_training.checkpoint_dir={toml_value(str(self._folder))}",
            *self._overrides,
        ]
        fixed = ["train", "--config", str(config), "--restarts", str(RESTARTS)]
        return [*COMMAND, *fixed, *_set(settings)]

    def _watch(self) -> None:
        """Wait for the first step, chat and sample until half of the time, kill, continue to the
        end."""
        self._wait_for_step(0, START_S)
        chat = threading.Thread(target=self._chat, name="chat", daemon=True)
        chat.start()
        began, half = time.monotonic(), False
        while (second := time.monotonic() - began) < self._seconds:
            self._sample(second)
            if not half and second >= self._seconds / 2:
                half = True
                self._kill()
            self._check()
            time.sleep(min(SAMPLE_S, self._seconds / 20))
        self._sample(time.monotonic() - began)

    def _kill(self) -> None:
        self._starting.set()
        self._found.killed_at = len(self._steps())
        killed = time.monotonic()
        daemon = self._daemon()
        if daemon is None:
            raise _FailedError("the training's process is gone")
        before = self._steps()
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(END_S)
        # a resume goes back to the checkpoint: the next step after it is the sign
        self._wait_for_step(max(before[-1], 1) if before else 0, START_S, newer=False)
        self._found.resumed_s = round(time.monotonic() - killed, 1)
        self._starting.clear()

    def _wait_for_step(self, step: int, seconds: float, *, newer: bool = True) -> None:
        """Wait until a step after `step` is finished; not `newer`: `step` itself, by a process
        that answers."""
        deadline = time.monotonic() + seconds
        while True:
            steps = self._steps()
            reached = steps[-1] if steps else 0
            if (reached > step or (not newer and reached >= step)) and self._answers():
                return
            self._check()
            if time.monotonic() > deadline:
                raise _FailedError(f"no step after {step} within {seconds:.0f} s")
            time.sleep(0.2)  # another process: its steps are lines of a file

    def _answers(self) -> bool:
        with contextlib.suppress(*NO_ANSWER):
            return self._http.get("/health").status_code == 200
        return False

    def _check(self) -> None:
        if self._parent.poll() is not None:
            raise _FailedError("the training ended by itself")

    def _daemon(self) -> psutil.Process | None:
        with contextlib.suppress(psutil.Error):
            return next(iter(self._parent.children()), None)
        return None

    def _sample(self, second: float) -> None:
        if (daemon := self._daemon()) is None:
            return
        with contextlib.suppress(psutil.Error, *NO_ANSWER):
            used = self._footprint() or daemon.memory_info().rss
            threads, files = daemon.num_threads(), daemon.num_fds()
            self._found.samples.append(MachineSample(round(second, 1), used, threads, files))

    def _footprint(self) -> int:
        text = self._http.get("/metrics").text
        values = re.findall(r"^mlx_parallm_footprint_bytes\{.*\} (\S+)$", text, re.MULTILINE)
        return max((int(float(each)) for each in values), default=0)

    def _chat(self) -> None:
        chats = self._found.chats
        while not self._stop.is_set():
            try:
                first, rate = self._one_answer()
            except (ValueError, *NO_ANSWER):
                if self._starting.is_set() or self._stop.is_set():
                    self._stop.wait(0.2)
                else:
                    chats.failed += 1
                    self._stop.wait(1.0)
                continue
            chats.answered += 1
            chats.first_token_s.append(round(first, 4))
            if rate is not None:
                chats.tokens_s.append(round(rate, 2))

    def _one_answer(self) -> tuple[float, float | None]:
        """Seconds to the first token, and tokens a second after it. Raises HTTPError, ValueError:
        there was no whole answer."""
        body = {"model": "default", "messages": QUESTION, "max_tokens": 32, "stream": True}
        began, times = time.monotonic(), list[float]()
        finished = False
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if '"error"' in line[:20]:
                    raise ValueError(line)
                times += [time.monotonic()] if '"content"' in line else []
                finished = finished or line.startswith("data: [DONE]")
        if not finished or not times:
            raise ValueError("the answer has no end")
        seconds = times[-1] - times[0]
        return times[0] - began, (len(times) - 1) / seconds if seconds > 0 else None

    def _end(self) -> None:
        if self._parent.poll() is None:
            self._parent.send_signal(signal.SIGTERM)
        try:
            self._found.exit_code = self._parent.wait(END_S)
        except psutil.TimeoutExpired:
            for process in [*self._parent.children(recursive=True), self._parent]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._found.problem = f"it did not end in order within {END_S:.0f} s"

    # ------------------------------------------------------------------ what the run wrote

    def _lines(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError, ValueError):
            text = (self._folder / "run" / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return []

    def _steps(self) -> list[int]:
        return [int(line["step"]) for line in self._lines()]

    def _read_metrics(self) -> None:
        beside, lines = self._found, self._lines()
        steps = [int(line["step"]) for line in lines]
        beside.steps = len(steps)
        beside.in_order = bool(steps) and steps == list(range(1, len(steps) + 1))

        def median(values: list[float]) -> float | None:
            return round(statistics.median(values), 3) if values else None

        parts = ("time_rollout_s", "time_train_s", "time_publish_s")
        whole = [sum(line.get(key) or 0.0 for key in parts) for line in lines[1:]]
        trains = [line for line in lines[1:] if line.get("tokens") and line.get("time_train_s")]
        beside.step_s = median(whole)
        beside.trained_tok_s = median([line["tokens"] / line["time_train_s"] for line in trains])
        beside.served_tok_s = median(
            [line["serve_tok_s"] for line in lines[1:] if line.get("serve_tok_s")]
        )


class _FailedError(Exception):
    """A part of the hour failed."""


# ---------------------------------------------------------------------- the block


def block(hour: FirstHour) -> str:
    """The Markdown to paste into an issue."""
    lines = ["### mlx_parallm, the first hour", "", *(f"* {fact}" for fact in hour.facts)]
    if hour.panics is not None:
        lines.append(f"* kernel panics meanwhile: {', '.join(hour.panics) or 'none'}")
    for model, contracts in hour.contracts.items():
        lines += ["", f"| contracts, {model} | | measured |", "|---|---|---|"]
        lines += [
            f"| {each.contract} | {'**FAILED**' if each.result == 'FAILED' else each.result} |"
            f" {each.measured} |"
            for each in contracts
        ]
    lines += ["", "| chat beside training | " + " | ".join(e.model for e in hour.beside) + " |"]
    lines.append("|---" * (1 + len(hour.beside)) + "|")
    columns = [_column(each) for each in hour.beside]
    for name in columns[0] if columns else ():
        lines.append(f"| {name} | " + " | ".join(column[name] for column in columns) + " |")
    return "\n".join(lines) + "\n"


def _column(beside: Beside) -> dict[str, str]:
    chats, samples = beside.chats, beside.samples
    first = sorted(chats.first_token_s)

    def number(value: float | None, form: str = ",.0f") -> str:
        return "–" if value is None else format(value, form)

    def curve(values: list[float], form: str) -> str:
        if not values:
            return "–"
        ends = [values[0], values[len(values) // 2], values[-1]]
        return " → ".join(format(v, form) for v in ends) + f", most {max(values):{form}}"

    late = number(first[min(len(first) - 1, int(0.95 * len(first)))], ".2f") if first else "–"
    resumed = f"{beside.resumed_s:.1f} s to continue" if beside.resumed_s else "**not resumed**"
    order = "in order" if beside.in_order else "**not in order**"
    return {
        "minutes": f"{beside.minutes:g}",
        "steps": f"{beside.steps}, {order}",
        "a step": f"{number(beside.step_s, '.2f')} s",
        "trained": f"{number(beside.trained_tok_s)} tokens/s",
        "served": f"{number(beside.served_tok_s)} tokens/s",
        "chats": f"{chats.answered} answered, {chats.failed} failed",
        "first token, median and p95": (
            f"{number(statistics.median(first), '.2f') if first else '–'} s, {late} s"
        ),
        "a chat's tokens/s": number(
            statistics.median(chats.tokens_s) if chats.tokens_s else None, ",.1f"
        ),
        "kill -9": resumed if beside.killed_at is not None else "not tried",
        "memory, GB": curve([sample.bytes / 1e9 for sample in samples], ".2f"),
        "threads": curve([sample.threads for sample in samples], ".0f"),
        "open files": curve([sample.files for sample in samples], ".0f"),
        "end": beside.problem.replace("|", "/") or "in order",
    }
