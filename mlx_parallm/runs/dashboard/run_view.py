"""RunView: one `Run` as values for the page. Reads only; no answer is larger than the page needs.

Metrics are kept as columns of numbers, and only new lines of the file are read. A cursor names a
file and a row of it: the file is another one after a rollback or a resume has cut it, and then the
page gets everything again.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from threading import Lock
from typing import Any

import numpy as np

from mlx_parallm.errors import (
    CheckpointError,
    ParallmError,
    PatternTimeoutError,
    RequestError,
    StoreError,
)
from mlx_parallm.rl_training.monitor.display import headline, trained_tokens_per_s
from mlx_parallm.runs.compare import differing, settings_of
from mlx_parallm.runs.dashboard.bounded import cut, sendable
from mlx_parallm.runs.dashboard.evaluations import EvaluationsView
from mlx_parallm.runs.dashboard.images import thumbnails
from mlx_parallm.runs.explain import explain
from mlx_parallm.runs.rollouts import Answers, Wanted
from mlx_parallm.runs.run import Run, open_run
from mlx_parallm.system.patterns import Pattern, PatternError
from mlx_parallm.system.redaction import Redactor

MOST_NUMBERS = 24_000
"""Most points of one answer about metrics: some 200 kB."""
MOST_ANSWERS = 256
LISTED_CHARACTERS, SHOWN_CHARACTERS = 700, 20_000
"""Most characters of a prompt or an answer: in a list, and of a turn of a group."""
MOST_CHARACTERS = 160_000
"""Most characters of all texts of one answer of the API."""
MOST_TOKENS = 2048
SEARCH_S, PATTERN_S = 2.0, 0.2
"""A search answers with its results by then, and says where to continue; one text is given up
after PATTERN_S."""
HEALTH_PAUSE = 400
"""Health is judged again after this many times the seconds that it took: at most a quarter of a
percent of one core."""
READ_BYTES = 1 << 20
MOST_MARKS = 100
MOST_SPANS, MOST_TIMELINE_STEPS = 3000, 64
CHATS_FILE = "feedback.sqlite"  # runs that learn from use (docs/traces.md#learning-from-use)
MARK_KEY = "rolled_back_to"
WATCHED = ("metrics", "evaluations", "rollouts", "marks", "spans")
"""Parts of a run whose changes the page is told of."""


class MetricColumns:
    """The numbers of metrics lines, by key: [rows] float64 each, NaN if a line has none.
    Nested keys are joined by a slash."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.marks: list[tuple[int, str]] = []
        self.last: Mapping[str, Any] = {}
        self._values: dict[str, array[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        self._take(line, "")
        self._put("headline", headline(line)[1])
        self._put("trained_tok_s", trained_tokens_per_s(line))
        self.steps.append(int(line["step"]))
        if line.get(MARK_KEY) is not None:
            self.marks.append((self.steps[-1], f"rolled back to {line[MARK_KEY]}"))
        self.last = line

    def _take(self, line: Mapping[str, Any], prefix: str) -> None:
        """Add the numbers of a line. The first chart of a long run waits for this: types are
        compared, which is faster than isinstance."""
        rows, columns = len(self.steps), self._values
        for key, value in line.items():
            kind = type(value)
            if kind is float or kind is int or kind is bool:
                name = prefix + key
                column = columns.get(name)
                if column is not None and len(column) == rows:
                    column.append(value)
                elif name != "step":
                    self._put(name, value)
            elif kind is dict:
                self._take(value, f"{prefix}{key}/")

    def _put(self, key: str, number: float | None) -> None:
        """Add the number of the row that is being made; a column is filled up with NaN when it
        gets its next number."""
        if number is None:
            return
        column = self._values.setdefault(key, array("d"))
        column.extend([math.nan] * (len(self.steps) - len(column)))
        column.append(number)

    @property
    def keys(self) -> list[str]:
        return list(self._values)

    def rows(
        self, keys: Sequence[str], first: int, most: int
    ) -> tuple[list[int], dict[str, list[float | None]]]:
        """Return steps and columns from row `first` on. More than `most` rows, or than
        MOST_NUMBERS, become fewer: each is the mean of its steps, under the last of them.
        `keys`: a * stands for anything."""
        chosen = [key for key in self._values if any(fnmatchcase(key, wanted) for wanted in keys)]
        count = len(self.steps) - first
        most = max(1, min(most, MOST_NUMBERS // max(1, len(chosen))))
        size = max(1, math.ceil(count / most))
        ends = range(first + size, first + count + size, size)
        steps = [self.steps[min(end, len(self.steps)) - 1] for end in ends]
        return steps, {
            key: [_mean(self._values[key][end - size : end]) for end in ends] for key in chosen
        }


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return _short(math.fsum(finite) / len(finite)) if finite else None


def _short(value: float) -> float:
    """Round to six digits, as many as a chart shows."""
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class Search:
    """Conditions of the page on the rollouts; an empty string is none."""

    order: str = "newest"
    environment: str = ""
    state: str = ""
    first_step: int | None = None
    last_step: int | None = None
    lowest: float | None = None
    highest: float | None = None
    version: int | None = None
    reason: str = ""  # a part of the reason of dropping
    text: str = ""
    pattern: str = ""
    older_than: str = ""
    limit: int = MOST_ANSWERS


class RunView:
    """One run. Any thread; each call may read files, of a directory that may not be there yet."""

    def __init__(self, run: Run, redactor: Redactor) -> None:
        self.path, self._run = run.path, run
        self._redactor = redactor
        self._numbers_lock, self._rollouts_lock, self._health_lock = Lock(), Lock(), Lock()
        self.evaluations = EvaluationsView(run, redactor)
        self._reset((-1, -1))
        self._answers: Answers | None = None
        # how often it was judged, of which words, when it may be again, the answer
        self._health: tuple[int, dict[str, str], float, dict[str, Any]] = (0, {}, 0.0, {})

    def _reset(self, file: tuple[int, int]) -> None:
        self._file, self._position, self._columns = file, 0, MetricColumns()

    # ------------------------------------------------------------------ what changed

    def versions(self) -> dict[str, str]:
        """Return a word for each kind of data, another one after each change; and whether a
        process has the run."""
        words, (count, judged, due, _) = self._words(), self._health
        ripe = words != judged and (time.monotonic() >= due or words["state"] != judged["state"])
        return words | {"health": f"{count}{'+' if ripe else ''}"}

    def _words(self) -> dict[str, str]:
        return {part: self._run.version(part) for part in WATCHED} | {"state": self.state()}

    def state(self) -> str:
        """Return the state by a look at two names, which every tab's stream does often."""
        if self._run.fresh().running:
            return "running"
        return "finished" if self._run.has_final else "stopped"

    def read(self) -> None:
        """Read new numbers, so that the next request need not wait."""
        with self._numbers_lock, suppress(CheckpointError):
            self._read()

    def read_newest_group(self) -> None:
        """Load an answer's needs, such as the tokenizer: the first look at a group need not
        wait for it."""
        with suppress(ParallmError):
            self.groups(Search(limit=1))

    @property
    def learns_from_chats(self) -> bool:
        """Whether the run has a file of chats that people had with it."""
        return (self.path / CHATS_FILE).is_file()

    def summary(self) -> dict[str, Any]:
        """Return the run's entry in the list. A damaged run is in it, as far as it can be read: the
        routes of its numbers name the damage."""
        self.read()
        last = dict(self._columns.last)
        run = self._run.fresh()
        config = run.config
        # they decide step by step
        clients = None if config is None else run.client_trainer
        return self._shown(
            {
                "name": self.path.name,
                "path": str(self.path),
                "state": self.state(),
                "steps": last.get("step", 0),
                "ended": last.get("ended"),
                "total_steps": config.rl_training.total_steps
                if config is not None and clients is None
                else None,
                "model": None if config is None else config.model.base_path,
                "algorithm": clients.name
                if clients
                else None
                if config is None
                else config.rl_training.algorithm,
                "judged_by": headline(last)[0] if last else "reward",
                "environments": list(last.get("environments") or {}),
            }
        )

    # ------------------------------------------------------------------ numbers

    def metrics(self, keys: Sequence[str], after: str, most: int) -> dict[str, Any]:
        """Return the columns `keys` of the steps behind the cursor `after` ("" = all of them).

        `reset`: true when the page has to drop its data. `keys`: all keys. Raises
        CheckpointError.
        """
        with self._numbers_lock:
            self._read()
            columns, name = self._columns, f"{self._file[0]}.{self._file[1]}"
            file, _, row = after.partition("-")
            same = file == name and row.isdecimal() and int(row) <= len(columns.steps)
            first = int(row) if same else 0
            steps, values = columns.rows(keys, first, most)
            return {
                "cursor": f"{name}-{len(columns.steps)}",
                "reset": not same,
                "steps": steps,
                "columns": values,
                "keys": columns.keys,
                "marks": self._shown(self._marks(columns)),
            }

    def _marks(self, columns: MetricColumns) -> list[dict[str, Any]]:
        """Return the run's events: rollbacks, and people's commands; the newest
        MOST_MARKS, by step.

        A rollback is in both files, in metrics.jsonl with the step after it; runs of older versions
        have it only there.
        """
        ordered = list[dict[str, Any]]()
        with suppress(CheckpointError):  # a damaged line: the charts are worth more
            ordered = self._run.marks(MOST_MARKS)
        marked = {mark["step"] + 1 for mark in ordered if mark.get("kind") == "rollback"}
        marks = [
            {"step": step, "kind": "rollback", "text": text, "time": None}
            for step, text in columns.marks
            if step not in marked
        ]
        return sorted([*marks[-MOST_MARKS:], *ordered], key=lambda mark: mark["step"])

    def _read(self) -> None:
        """Take in new lines of metrics.jsonl; all of them if it is another file than before."""
        file = self._run.metrics_file
        try:
            stat = file.path.stat()
        except FileNotFoundError:
            self._reset((-1, -1))
            return
        if (stat.st_dev, stat.st_ino) != self._file or stat.st_size < self._position:
            self._reset((stat.st_dev, stat.st_ino))
        # in parts, so that no more than one is in memory; then a longer line
        for most in (READ_BYTES, -1):
            lines: Sequence[Mapping[str, Any]] = ({},)
            while lines:
                lines, self._position = file.after(self._position, most)
                for line in lines:
                    self._columns.add(line)

    def health(self) -> dict[str, Any]:
        """Return the findings of `mlx_parallm explain`. Judged again when the run begins or ends;
        when something else has changed, not too often."""
        with self._health_lock:
            words, (count, judged, due, answer) = self._words(), self._health
            if words == judged or (time.monotonic() < due and words["state"] == judged["state"]):
                return answer
            began = time.monotonic()
            try:
                explanation = explain(open_run(self.path))
            except (ParallmError, OSError):
                # so that the next change is asked about again
                self._health = (count + 1, words, began, answer)
                raise
            now = time.monotonic()
            answer = {
                "state": explanation.state,
                "gained": explanation.gained,
                "findings": [finding.to_json() for finding in explanation.findings],
                "notes": list(explanation.notes),
                "to_read": [asdict(reading) for reading in explanation.to_read],
            }
            answer = self._shown(answer)
            self._health = (count + 1, words, now + HEALTH_PAUSE * (now - began), answer)
            return answer

    def timeline(self, steps: int, last: int | None) -> dict[str, Any]:
        """Return the spans of `steps` steps up to `last` (None: the newest) and how many tokens
        each policy version sampled; at most MOST_SPANS, and MOST_TIMELINE_STEPS."""
        if not self._run.has("spans"):
            return {"spans": [], "tokens": {}}
        if last is None:
            with self._numbers_lock:
                self._read()
                last = self._columns.last.get("step", 0)
        first = max(1, last - min(steps, MOST_TIMELINE_STEPS) + 1)
        spans, tokens = list[list[Any]](), dict[str, dict[str, int]]()
        for line in self._run.spans(first, last):
            if line["name"] == "versions":
                tokens[str(line["step"])] = line["tokens"]
            elif len(spans) < MOST_SPANS:
                spans.append([line["name"], line["step"], line["begin"], line["end"]])
        return {"spans": spans, "tokens": tokens}

    # ------------------------------------------------------------------ rollouts

    def groups(self, search: Search) -> dict[str, Any]:
        """Return the answers that fit, by group, the newest group first or by the groups' mean
        rewards.

        `older`: the group behind which a further search continues; None: there is nothing more.
        Raises RequestError: a wrong pattern, no rollouts.
        """
        fits, limit = _condition(search), min(max(search.limit, 1), MOST_ANSWERS)
        wanted = Wanted(
            environment=search.environment or None,
            state=search.state or None,
            steps=(search.first_step, search.last_step),
            older_than=search.older_than or None,
        )
        with self._rollouts_lock:
            answers = self._opened()
            rows, older = _until(answers.rows(wanted), limit, fits)
            notes = answers.notes
        most = min(LISTED_CHARACTERS, MOST_CHARACTERS // max(1, len(rows)))
        groups = [
            _listed(list(rows_of_group), most)
            for _, rows_of_group in groupby(rows, key=lambda row: row["group_id"])
        ]
        if search.order in ("best", "worst"):
            best = search.order == "best"
            worst = -math.inf if best else math.inf  # an unknown one comes last
            groups.sort(key=lambda group: _number(group["reward_mean"], worst), reverse=best)
        return self._shown({"groups": groups, "older": older, "notes": notes})

    def group(self, group_id: str) -> dict[str, Any]:
        """Return one group with its conversations. Raises RequestError: no such group."""
        group = self._group_of(group_id)
        rollouts = group["rollouts"] or []
        turns = sum(len(rollout["conversation"]) for rollout in rollouts)
        most = min(SHOWN_CHARACTERS, MOST_CHARACTERS // max(1, turns))
        for rollout in rollouts:
            rollout["segments"] = [len(segment["tokens"]) for segment in rollout["segments"]]
            rollout["conversation"] = [
                turn | {"text": cut(turn["text"], most)} for turn in rollout["conversation"]
            ]
            rollout["prompt"], rollout["completion"] = (
                cut(rollout[key], most) for key in ("prompt", "completion")
            )
        rewards = [rollout["reward"] for rollout in rollouts]
        group["thumbnails"] = thumbnails(rollouts)
        return self._shown(group | _rewards(rewards))

    def tokens(self, group_id: str, number: int, segment: int, first: int) -> dict[str, Any]:
        """Return at most MOST_TOKENS tokens of one answer with their numbers; lists have
        one entry a token.

        Raises RequestError: no such group, answer or segment.
        """
        group = self._group_of(f"{group_id}#{number}")
        if not group["rollouts"]:
            raise RequestError(
                f"the tokens of group {group_id} are lost: {group['lost']}", param="id"
            )
        segments = group["rollouts"][0]["segments"]
        if segment >= len(segments):
            raise RequestError(
                f"the answer has segments 0 to {len(segments) - 1}, no {segment}", param="segment"
            )
        chosen, window = segments[segment], slice(first, first + MOST_TOKENS)
        texts = chosen["token_texts"] or [f"⟨{token}⟩" for token in chosen["tokens"]]
        logprobs, versions = chosen["logprobs"] or (), chosen["policy_versions"] or ()
        mask = list(chosen["mask"][window])
        sampled = [
            value if is_sampled else None
            for value, is_sampled in zip(logprobs[window], mask, strict=False)
        ]
        kept = self._run.token_values(group["group_id"], number, segment)
        return self._shown(
            {
                "group_id": group["group_id"],
                "number": number,
                "segments": len(segments),
                "segment": segment,
                "first": first,
                "total": len(chosen["tokens"]),
                "texts": texts[window],
                "ids": list(chosen["tokens"][window]),
                "mask": mask,
                "versions": [version if version >= 0 else None for version in versions[window]],
                "values": {"logprobs": sampled or None} | _token_values(kept, window),
                "thumbnails": thumbnails(group["rollouts"][:1]),
            }
        )

    def _group_of(self, wanted: str) -> dict[str, Any]:
        with self._rollouts_lock:
            try:
                return self._opened().show(wanted)
            except StoreError as error:
                raise RequestError(str(error), param="id") from error

    def _opened(self) -> Answers:
        """Open the rollouts once they are there. Raises RequestError: not found."""
        if self._answers is None:
            if self.state() == "running" and not self._run.has("config"):
                raise RequestError("the run is starting: there are no rollouts yet")
            try:
                self._answers = Answers(open_run(self.path))
            except StoreError as error:
                raise RequestError(str(error)) from error
        return self._answers

    def _shown(self, value: Any) -> Any:
        return sendable(self._redactor.value(value))


def differing_settings(views: Sequence[RunView]) -> dict[str, Any]:
    """Return each setting whose value is not the same in all runs, with a value for each run.
    Secrets are not in it."""
    runs = [settings_of(Run(view.path)) for view in views]
    settings = differing([each for each, _ in runs])
    return {"settings": sendable(settings), "faults": [fault for _, fault in runs]}


# ---------------------------------------------------------------------- rows to groups


def _condition(search: Search) -> Callable[[Mapping[str, Any]], bool]:
    """Raises RequestError: the pattern is not a regular expression."""
    text = search.text.casefold()
    try:
        pattern = Pattern(search.pattern, seconds=PATTERN_S) if search.pattern else None
    except PatternError as error:
        raise RequestError(str(error), param="regex") from error

    def matches(shown: str) -> bool:
        if pattern is None:
            return text in shown.casefold()
        try:
            return pattern.search(shown) is not None
        except PatternTimeoutError as error:
            raise RequestError(str(error), param="regex") from error

    def fits(row: Mapping[str, Any]) -> bool:
        reward = row["reward"]
        return (
            (search.lowest is None or (reward is not None and reward >= search.lowest))
            and (search.highest is None or (reward is not None and reward <= search.highest))
            and (search.version is None or row["version"] == search.version)
            and (not search.reason or search.reason.casefold() in (row["reason"] or "").casefold())
            and (
                not (text or pattern)
                or any(matches(row[key] or "") for key in ("prompt", "completion"))
            )
        )

    return fits


def _until(
    rows: Iterator[dict[str, Any]], limit: int, fits: Callable[[Mapping[str, Any]], bool]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return the rows that fit, each with all rewards of its group, until there are `limit` or
    SEARCH_S are over; and the last group that was looked at, None if it is the last of all."""
    deadline, group_id = math.inf, None
    fitting, rewards = list[dict[str, Any]](), list[float | None]()
    for row in rows:
        # from the first row on: before it, a tokenizer is loaded
        deadline = min(deadline, time.monotonic() + SEARCH_S)
        if group_id != row["group_id"]:
            if group_id is not None and (len(fitting) >= limit or time.monotonic() > deadline):
                return fitting, group_id
            group_id, rewards = row["group_id"], []
        rewards.append(row["reward"])
        if fits(row):
            fitting.append(row | {"rewards": rewards})
    return fitting, None


def _number(value: float | None, unknown: float) -> float:
    return unknown if value is None else value


OF_A_GROUP = ("group_id", "environment", "source", "state", "step", "reason", "received", "prompt")
OF_AN_ANSWER = (
    "number",
    "reward",
    "parts",
    "advantage",
    "why",
    "version",
    "tokens",
    "stop_reason",
    "error",
    "completion",
)


def _listed(rows: list[dict[str, Any]], most: int) -> dict[str, Any]:
    answers = [{key: row[key] for key in OF_AN_ANSWER} for row in rows]
    for answer in answers:
        answer["completion"] = cut(answer["completion"], most)
    group = {key: rows[0][key] for key in OF_A_GROUP} | {"prompt": cut(rows[0]["prompt"], most)}
    return group | _rewards(rows[0]["rewards"]) | {"answers": answers}


def _rewards(rewards: Sequence[float | None]) -> dict[str, Any]:
    """`kind`: "right" if none is below 1, "wrong" if none is above 0 (as the metrics count
    them), "same" if all are equal, else "mixed"; "unknown" if no reward is known. Answers
    without a score count nowhere."""
    if not rewards:
        return {"reward_mean": None, "kind": "lost"}
    values = [reward for reward in rewards if reward is not None]
    if not values:
        return {"reward_mean": None, "kind": "unknown"}
    low, high = min(values), max(values)
    kind = "same" if low == high else "mixed"
    if low >= 1 or high <= 0:
        kind = "right" if low >= 1 else "wrong"
    return {"reward_mean": math.fsum(values) / len(values), "kind": kind}


def _token_values(kept: Mapping[str, np.ndarray], window: slice) -> dict[str, list[float]]:
    """Return the trainer's numbers of the tokens in the window, without columns in which nothing
    is known; with the importance ratio exp(trainer - sampler), k3 of KL(trainer || reference),
    exp(d) - d - 1 with d = reference - trainer (joschu.net/blog/kl-approx.html), and the gap
    teacher - trainer."""
    columns = {name: column[window].astype(np.float64) for name, column in kept.items()}
    if columns:
        trainer, reference = columns["trainer_logprobs"], columns["reference_logprobs"]
        with np.errstate(over="ignore"):
            columns["ratio"] = np.exp(trainer - columns.pop("logprobs"))
            columns["kl"] = np.expm1(reference - trainer) - (reference - trainer)
        columns["teacher_gap"] = columns["teacher_logprobs"] - trainer
    return {name: column.tolist() for name, column in columns.items() if np.isfinite(column).any()}
