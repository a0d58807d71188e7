"""`mlx_parallm explain`: why a run does not learn, read from its directory alone.
No MLX.

    `Run` (metrics lines, evaluations, whether it continues), `GroupCounts` (of its store) →
    `Explanation` → text or JSON

Each window of the run goes through `health.find`; windows with the same diagnosis become one
finding with its steps. Faults before the first step are read from the
store: nothing came, or everything was refused or too old. The run may still be running, may have
been killed in the middle of a line, or may have made no step.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

from mlx_parallm.environments.base import NEVER_DONE
from mlx_parallm.errors import StoreError
from mlx_parallm.losses.advantages import group_advantages, token_advantages
from mlx_parallm.rl_training.evaluation.comparison import compare
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import difference
from mlx_parallm.rl_training.monitor import health
from mlx_parallm.rl_training.monitor.drawing import began_and_now, sparkline
from mlx_parallm.rl_training.monitor.evidence import WINDOW, Arrivals, Evidence, reward_limit
from mlx_parallm.rl_training.monitor.health import Diagnosis
from mlx_parallm.rl_training.monitor.reward_hole import Reading, full_marks_to_read
from mlx_parallm.rl_training.rollout_buffer import TOO_OLD
from mlx_parallm.rl_training.step.batch import StatisticsCollector
from mlx_parallm.rollout_store.checks import OTHER_MODEL
from mlx_parallm.rollout_store.store import RolloutStore, StoreCounts
from mlx_parallm.run_files.metrics import of_rows
from mlx_parallm.runs.run import Metrics, Run
from mlx_parallm.system.log import CONFIGURED, PAUSED, RESUMED
from mlx_parallm.system.terminal import Console, beginning_of

LOOKED_AT = 256
"""Most groups and rejects that are read from the store."""
NOTHING = StoreCounts(0, 0, 0, 0)
SPANS_SHOWN = 3
SHOWN = 100
"""Characters of a prompt and of an answer that are printed for a reader."""
SOME_STEPS = 20
"""A run that has not gained by then is worth a note."""


@dataclass(frozen=True)
class GroupCounts:
    """The groups in a run's store, counted."""

    counts: StoreCounts = NOTHING
    # (reason, times among the newest), most frequent first
    refused: tuple[tuple[str, int], ...] = ()
    too_old: int = 0
    mismatched: int = 0
    last_received: float | None = None
    statistics: Metrics | None = (
        None  # its groups, in the form of a metrics line; only for a run without steps
    )
    unreadable: str | None = None


@dataclass(frozen=True)
class Finding:
    """`steps`: (first, last) of each stretch that shows it; empty = the run as a whole."""

    diagnosis: Diagnosis
    steps: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self.diagnosis) | {"page": self.diagnosis.page, "steps": self.steps}


@dataclass(frozen=True)
class HeldOutChange:
    """One environment's held-out score in the first and the newest evaluation, over the same
    problems.

    `risen`: by more than chance; `fallen`: the same downwards; `enough`: of so many problems that
    it can be told."""

    environment: str
    steps: tuple[int, int]
    first: float
    last: float
    risen: bool
    fallen: bool
    enough: bool
    doubt: str | None = None  # why it does not say that the answers are better

    def __str__(self) -> str:
        chance = "" if self.risen or self.fallen or self.doubt else ", which may be chance"
        change = (
            f"{self.first:.3f} after step {self.steps[0]}, {self.last:.3f} after step"
            f" {self.steps[1]}{chance}"
        )
        doubt = f"; {self.doubt}" if self.doubt else ""
        return f"held out, {self.environment}: {change}{doubt}"


@dataclass(frozen=True)
class Explanation:
    run: str
    state: str
    steps: int
    total_steps: int | None
    rewards: tuple[float, ...]
    gained: bool
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = field(default=())
    heldout: tuple[HeldOutChange, ...] = ()
    to_read: tuple[Reading, ...] = ()

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong: a finding may also say that the run has learned what there
        is to learn."""
        return all(finding.diagnosis.good for finding in self.findings)


def explain(run: Run) -> Explanation:
    """Raises CheckpointError: a damaged file of metrics or evaluations."""
    lines, evaluations = run.metrics, run.evaluations
    # clients decide on samples and steps; their rewards are unknown
    by_clients = run.client_trainer is not None
    groups = count_groups(run, whole=not lines and not by_clients)
    notes = [f"the rollouts cannot be read: {groups.unreadable}"] if groups.unreadable else []
    evidence = Evidence(lines[-WINDOW:], lines[:WINDOW])
    heldout = held_out(evaluations)
    outside = () if by_clients else outside_of_steps(run, groups)
    findings = (*over_the_run(lines), *(Finding(diagnosis) for diagnosis in outside))
    if lines and of_rows(lines[-1]):
        scores = [line["heldout_score"] for line in lines if line.get("heldout_score") is not None]
        notes += [f"held-out score: first {scores[0]:.3f}, last {scores[-1]:.3f}"] if scores else []
    elif not (findings or evidence.gained or by_clients) and run.steps >= SOME_STEPS:
        notes += slowness(evidence, heldout, lines)
    notes += two_curves(evidence, heldout)
    notes += [] if run.ended is None else [f"rl_training.until ended it: {run.ended}"]
    notes += (
        []
        if any(finding.diagnosis.name == "reward-below-1" for finding in findings)
        else limits(lines)
    )
    return Explanation(
        run=run.name,
        state=run.state,
        steps=run.steps,
        total_steps=run.total_steps,
        rewards=tuple(line["reward_mean"] for line in lines if line.get("reward_mean") is not None),
        gained=evidence.gained,
        findings=findings,
        notes=tuple(notes),
        heldout=heldout,
        to_read=full_marks_to_read(evaluations)
        if any(f.diagnosis.name == "reward-hole" for f in findings)
        else (),
    )


def slowness(
    evidence: Evidence, heldout: Sequence[HeldOutChange], lines: Sequence[Metrics]
) -> Iterator[str]:
    """Yield a word about a run in which nothing is found and whose reward has not gained much."""
    then, now = evidence.first("reward_mean"), evidence.mean("reward_mean")
    if then is None or now is None or any(score.risen for score in heldout):
        return
    rate = max((line.get("learning_rate") or 0.0 for line in lines), default=0.0)
    at = f" at a learning_rate of {rate:.2g}" if rate else ""
    how = "rises slowly" if evidence.rises else "has not risen by more than chance"
    yield f"the reward {how}, {then:.3f} to {now:.3f}{at}; what to try: {health.PAGE}#nothing-found"


def held_out(evaluations: Sequence[Metrics]) -> tuple[HeldOutChange, ...]:
    """Compare the newest evaluation with the first one, environment by environment; () of fewer
    than two."""
    if len(evaluations) < 2:
        return ()
    first, last = evaluations[0], evaluations[-1]
    changes = []
    for row in compare(first, last):
        before, after = ([pair[side] for pair in row.rewards] for side in (0, 1))
        change = difference(before, after)
        values = (sum(before) / len(before), sum(after) / len(after))
        up, down = change.significant and change.mean > 0, change.significant and change.mean < 0
        doubt = row.doubt if change.mean > 0 else None
        if down and not row.is_sure(higher=False):
            down, doubt = False, f"{row.unscored}: with theirs it may be no worse"
        changes.append(
            HeldOutChange(
                row.environment,
                (first["step"], last["step"]),
                *values,
                risen=up and doubt is None,
                fallen=down,
                enough=change.enough,
                doubt=doubt,
            )
        )
    return tuple(changes)


def two_curves(evidence: Evidence, heldout: Sequence[HeldOutChange]) -> Iterator[str]:
    """Yield which curve to believe, where training reward and held-out score differ."""
    heldout = [score for score in heldout if score.enough]
    risen, fallen = any(score.risen for score in heldout), any(score.fallen for score in heldout)
    if fallen or risen > evidence.rises or (heldout and evidence.gained and not risen):
        yield (
            "training reward and held-out score differ: believe the held-out score, which is of the"
            " same problems each time; the training reward is of new ones in each step, sampled"
            " at the training's temperature"
        )


def limits(lines: Sequence[Metrics]) -> Iterator[str]:
    """Yield if the best answers of the whole run earned the same, below 1: perhaps none can
    earn more."""
    for name in (lines[-1].get("environments") or {}) if lines else ():
        limit, times, steps = reward_limit(lines, name)
        if steps >= SOME_STEPS and 0 < limit < 1 - health.SAME_REWARD and times > steps / 2:
            yield (
                f"no answer of {name} earned more than {limit:.3g}, which one"
                f" earned in {times} of {steps} steps"
            )


def over_the_run(lines: Sequence[Metrics]) -> Iterator[Finding]:
    """Yield the findings of a run's windows, one for each name, in the order of first
    appearance."""
    diagnoses: dict[str, Diagnosis] = {}
    spans: dict[str, list[tuple[int, int]]] = {}
    for end in range(1, len(lines) + 1):
        window = lines[max(0, end - WINDOW) : end]
        first, last = int(window[0]["step"]), int(window[-1]["step"])
        for diagnosis in health.find(window, lines[: min(end, WINDOW)]):
            diagnoses[diagnosis.name] = diagnosis
            stretches = spans.setdefault(diagnosis.name, [])
            if stretches and first <= stretches[-1][1] + 1:
                stretches[-1] = (stretches[-1][0], last)
            else:
                stretches.append((first, last))
    return (Finding(diagnosis, tuple(spans[name])) for name, diagnosis in diagnoses.items())


def outside_of_steps(run: Run, groups: GroupCounts) -> Iterator[Diagnosis]:
    """Yield findings that no metrics line shows."""
    counts, step = groups.counts, run.steps + 1
    received = counts.waiting + counts.taken + counts.dropped + counts.rejected
    reason, times = next(iter(groups.refused), ("", 0))
    refused = Arrivals(
        step, received=received, rejected=counts.rejected, reason=reason, times=times
    )
    yield from health.find_waiting(refused)
    if groups.statistics is not None:
        yield from health.find([groups.statistics])
    if not run.waits or groups.unreadable:
        return
    stale, mismatched = (
        round(sum(line.get(key) or 0 for line in run.metrics))
        for key in ("dropped_stale", "dropped_misfit")
    )
    arrivals = Arrivals(
        step,
        usable=counts.waiting,
        stale=groups.too_old - stale,
        mismatched=groups.mismatched - mismatched,
        received=received,
        silent_s=_silent_s(run, groups, received),
        paused=paused_by(run),
        endless="" if run.metrics else _endless(run),
    )
    yield from health.find_waiting(arrivals)[:1]


def paused_by(run: Run) -> str:
    """Return who has paused the run's engine, as run.log says; "" while it runs, or in a process
    that began later."""
    by = ""
    for entry in run.events(PAUSED, RESUMED, CONFIGURED):
        by = str(entry.get("by", "a client")) if entry["event"] == PAUSED else ""
    return by


def _endless(run: Run) -> str:
    """Return what run.log tells about episodes that nothing ends; "" if it is silent about them."""
    return str(next(run.events(NEVER_DONE), {}).get("reason", ""))


def _silent_s(run: Run, groups: GroupCounts, received: int) -> float | None:
    """Return the seconds since anything came, if that is too long. A first step that trains
    (its groups are taken) is fine."""
    written = run.file("metrics").stat().st_mtime if run.metrics else run.started
    last_received = groups.last_received or 0.0
    silent_s = max(max(run.until, last_received) - max(run.started, written, last_received), 0.0)
    seconds = [
        (line.get("time_rollout_s") or 0.0) + (line.get("time_train_s") or 0.0)
        for line in run.metrics
    ]
    usual = statistics.median(seconds) if seconds else 0.0
    # how long it waited may not be known
    never = not received and not run.metrics and not run.running
    training = not run.metrics and groups.counts.taken
    long = silent_s >= max(health.STALLED_AFTER_S, health.STALLED_TIMES * usual)
    return silent_s if not training and (long or never) else None


def count_groups(run: Run, *, whole: bool) -> GroupCounts:
    """Count the groups of the run's store. `whole`: with their statistics."""
    if not run.has("rollouts"):
        return GroupCounts()
    try:
        with closing(run.open_rollouts()) as store:
            refused = Counter(reject.reason for reject in store.rejects(LOOKED_AT))
            reasons = store.drop_reasons()
            return GroupCounts(
                counts=store.counts(),
                refused=tuple(refused.most_common()),
                too_old=reasons.get(TOO_OLD, 0),
                mismatched=reasons.get(OTHER_MODEL, 0),
                last_received=store.last_received(),
                statistics=_statistics(store) if whole else None,
            )
    except StoreError as error:
        return GroupCounts(unreadable=str(error))


def _statistics(store: RolloutStore) -> Metrics:
    collector = StatisticsCollector()
    for group in store.groups(sorted(store.known_ids())[:LOOKED_AT]):
        if token_advantages(group, group_advantages) is None:
            collector.add_without_variance(group)
        else:
            collector.add_trained(group, 0)
    return collector.result().to_json()


# ---------------------------------------------------------------------- telling


def as_json(explanation: Explanation) -> str:
    """One object; `diagnoses` is empty when nothing was found."""
    rewards = explanation.rewards
    data: dict[str, Any] = {
        "run": explanation.run,
        "state": explanation.state,
        "steps": explanation.steps,
        "total_steps": explanation.total_steps,
        "gained": explanation.gained,
        "notes": explanation.notes,
    }
    data["heldout"] = [asdict(score) for score in explanation.heldout]
    data["to_read"] = [asdict(reading) for reading in explanation.to_read]
    data["reward"] = (
        dict(zip(("first", "last"), began_and_now(rewards)[:2], strict=True)) if rewards else None
    )
    data["diagnoses"] = [finding.to_json() for finding in explanation.findings]
    return json.dumps(data, indent=1) + "\n"


def as_text(explanation: Explanation) -> str:
    """For people; coloured on a terminal."""
    console = Console()
    with console.capture() as capture:
        for line in _lines(explanation):
            console.print(line, soft_wrap=True, highlight=False)
    return capture.get()


def _lines(explanation: Explanation) -> Iterator[Text]:
    of = f" of {explanation.total_steps}" if explanation.total_steps is not None else ""
    yield Text(
        f"{explanation.run}: {explanation.steps}{of} steps, {explanation.state}", style="bold"
    )
    rewards = explanation.rewards
    if rewards:
        began, now, steps = began_and_now(rewards)
        curve = (
            Text("reward ")
            .append(f"{began:.3f} ", style="dim")
            .append(sparkline(rewards), style="green")
        )
        means = (
            f"means of the first and the last {steps} steps"
            if steps > 1
            else "of the first and the last step"
        )
        yield curve.append(f" {now:.3f}").append(f" ({means})", style="dim")
    yield from (Text(str(change)) for change in explanation.heldout)
    for finding in explanation.findings:
        diagnosis = finding.diagnosis
        yield Text("")
        yield Text(diagnosis.sentence, style="bold green" if diagnosis.good else "bold red").append(
            _steps(finding.steps), style="not bold"
        )
        numbers = "  ".join(f"{name} {value:.4g}" for name, value in diagnosis.numbers.items())
        yield Text("  numbers  ", style="dim").append(numbers, style="not dim")
        yield Text("  change   ", style="dim").append(diagnosis.setting, style="not dim")
        yield Text("  page     ", style="dim").append(diagnosis.page, style="not dim")
    for reading in explanation.to_read:
        yield Text(
            f"  {'a piece of its prompt' if reading.piece else 'full marks'}  ", style="dim"
        ).append(
            f"{beginning_of(reading.prompt, SHOWN)}  →  {beginning_of(reading.answer, SHOWN)}",
            style="not dim",
        )
    if not explanation.findings and explanation.steps:
        yield Text("healthy: nothing found", style="green")
    elif not explanation.findings:
        yield Text("no step yet, and nothing found that would keep it from one")
    for note in explanation.notes:
        yield Text(note, style="dim")


def _steps(spans: Sequence[tuple[int, int]]) -> str:
    if not spans:
        return ""
    shown = ", ".join(
        f"{first}–{last}" if last > first else str(first) for first, last in spans[:SPANS_SHOWN]
    )
    more = f" and {len(spans) - SPANS_SHOWN} more" if len(spans) > SPANS_SHOWN else ""
    return f"  [steps {shown}{more}]"
