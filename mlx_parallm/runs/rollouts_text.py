"""Print what `rollouts.py` returns: one function for each of its values."""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mlx_parallm.rollout_store.companions import COMPANIONS
from mlx_parallm.runs.rollouts import STATES, Answers, Json
from mlx_parallm.system.terminal import PLAIN_WIDTH, Console, beginning_of, end_of

SHOWN_ANSWERS = 10
SHOWN = 20
"""Most policy versions and reasons in the text; JSON has all."""
TEXT_LINES = 3
"""Lines that a prompt or an answer may take on a terminal."""
LABEL = 10
"""Width of the column of labels."""


def draw_rows(rows: Iterable[Json], answers: Answers) -> Iterator[RenderableType]:
    """Draw a block for each of `rows`, which are of `answers`."""
    console = Console()
    room = TEXT_LINES * (console.width - LABEL) if console.is_terminal else PLAIN_WIDTH - LABEL
    nothing = True
    yield _totals(answers.counts())
    for row in rows:
        nothing = False
        yield Text("\n").append(row["id"], style="bold").append(_facts(row))
        facts = _grid()
        for label, text in (("parts", _parts(row)), ("why", row["why"]), ("error", row["error"])):
            if text:
                facts.add_row(label, Text(text))
        if row["prompt"] is not None:
            facts.add_row("prompt", Text(end_of(row["prompt"], room)))
            facts.add_row("answer", Text(beginning_of(row["completion"], room)))
        yield facts
    yield Text("no answer fits" if nothing else "")
    for note in answers.notes:
        yield Text(note, style="yellow")
    if not nothing:
        yield Text(
            "--show ID: one of them as a whole; --help: filters, --worst, --best, --counts",
            style="dim",
        )


def draw_group(values: Json) -> Iterator[RenderableType]:
    first, last = values["first_version"], values["last_version"]
    versions = "?" if first is None else str(first) if first == last else f"{first} to {last}"
    yield Text(f"{values['group_id']}: {values['why']}", style="bold")
    yield Text(
        f"environment {values['environment']}, source {values['source']}, received"
        f" {_time(values['received'])},"
        f" policy version {versions}"
    )
    if values["rollouts"] is None:
        yield Text(f"no rollout is shown: {values['lost']}")
        return
    if (expected := values["metadata"].get("answer")) is not None:
        yield Text(f"expected answer: {expected}")
    prompts = [rollout["conversation"][0]["text"] for rollout in values["rollouts"]]
    one_prompt = len({*prompts}) == 1
    if one_prompt and prompts[0] is not None:
        yield _labelled("prompt", prompts[0])
    for rollout in values["rollouts"]:
        yield Text(f"\n#{rollout['number']}", style="bold").append(_facts(rollout, ended=True))
        rows = [("parts", _parts(rollout)), ("error", rollout["error"])]
        rows += [(each.shown, ", ".join(rollout[each.shown])) for each in COMPANIONS if each.shown]
        rows += [
            (column, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
            for column, value in rollout["extra"].items()
        ]
        rows += [("", rollout["why"].removeprefix(values["why"]).removeprefix("; "))]
        rows += [(turn["role"], turn["text"]) for turn in rollout["conversation"][one_prompt:]]
        yield from (_labelled(label, text) for label, text in rows if text)
    if len(values["rollouts"]) > 1:
        yield Text(
            f"\n--show '{values['group_id']}#0': its first answer, token by token", style="dim"
        )
        return
    segments = values["rollouts"][0]["segments"]
    for number, segment in enumerate(segments, 1):
        yield Text(f"\nsegment {number} of {len(segments)}" if len(segments) > 1 else "")
        yield _tokens(segment)


def draw_counts(values: Json) -> Iterator[RenderableType]:
    yield _totals(values)
    entries, versions = values["environments"], values["versions"]
    states = [state for state in STATES if values["groups"][state]]
    if entries:
        names = (
            "environment",
            "source",
            *states,
            "sequences",
            *(["pruned"] if any(e["pruned"] for e in entries) else []),
        )
        yield Text("")
        yield _table(
            (*names, "last received"),
            [[*(e[name] for name in names), _time(e["received_last"])] for e in entries],
        )
        rows = [
            ["?" if e["version"] is None else e["version"], *(e[state] for state in states)]
            for e in versions
        ]
        yield Text("")
        yield _table(("policy version", *states), rows[-SHOWN:])
        if len(rows) > SHOWN:
            yield Text(f"and {len(rows) - SHOWN} older versions (--json)", style="dim")
    yield from _reasons("dropped: why", list(values["dropped"].items()))
    yield from _reasons(
        "rejected: why",
        [(f"{e['source']}: {e['reason']}", e["groups"]) for e in values["rejected"]],
    )


def draw_rejects(entries: Sequence[Json]) -> Iterator[RenderableType]:
    if not entries:
        yield Text("no group was rejected")
        return
    rows = [[_time(entry["received"]), entry["source"], entry["reason"]] for entry in entries]
    yield _table(("received", "source", "reason"), rows)
    yield Text("--json prints the sent text", style="dim")


# ---------------------------------------------------------------------- parts


def _totals(values: Json) -> Text:
    counts = ", ".join(f"{number} {state}" for state, number in values["groups"].items() if number)
    return Text(
        f"{values['run']}: groups: {counts or 'none'}; {values['size_bytes'] / 1e6:.1f} MB",
        style="bold",
    )


def _facts(row: Json, *, ended: bool = False) -> Text:
    """Return the numbers of an answer on one line; `ended`: also how long it is and what ended
    it."""
    reward = "–" if row["reward"] is None else f"{row['reward']:.4g}"
    facts = [f"reward {reward}", f"advantage {_advantage(row['advantage'])}"]
    if not ended:
        facts.append(row["environment"])
        facts += [f"{row['alike']} alike in this group"] if row.get("alike", 1) > 1 else []
    facts += [f"version {row['version']}"] if row["version"] is not None else []
    facts += [f"{row['tokens']} tokens"] if ended else []
    if row["stop_reason"] and (ended or row["stop_reason"] != "stop"):
        facts.append(f"ended by {row['stop_reason']}")
    facts += [f"temperature {row['temperature']:g}"] if row["temperature"] != 1 else []
    return Text("  " + " · ".join(facts), style="not bold")


def _advantage(value: float | Sequence[float] | None) -> str:
    if value is None:
        return "–"
    return f"{value:+.3f}" if isinstance(value, float) else f"{value[0]:+.3f} to {value[1]:+.3f}"


def _parts(row: Json) -> str:
    return " · ".join(f"{name} {score:.4g}" for name, score in row["parts"].items())


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=LABEL - 1)
    grid.add_column(overflow="fold")
    return grid


def _labelled(label: str, text: str) -> Table:
    grid = _grid()
    grid.add_row(label, Text(text))
    return grid


def _tokens(segment: Json) -> Table:
    rows = []
    texts = segment["token_texts"] or [""] * len(segment["tokens"])
    for position, (token, mask) in enumerate(zip(segment["tokens"], segment["mask"], strict=True)):
        logprob = (
            ""
            if segment["logprobs"] is None or not mask
            else f"{segment['logprobs'][position]:.4f}"
        )
        text = repr(texts[position])[1:-1] if texts[position] else ""
        rows.append(
            [
                position,
                token,
                text,
                mask,
                logprob,
                segment["policy_versions"][position] if mask else "",
            ]
        )
    return _table(("", "token", "text", "mask", "logprob", "version"), rows)


def _reasons(title: str, counted: Sequence[tuple[str, int]]) -> Iterator[RenderableType]:
    if counted:
        yield Text("")
        ordered = sorted(counted, key=lambda entry: -entry[1])
        yield _table(("groups", title), [[number, reason] for reason, number in ordered[:SHOWN]])
        if len(ordered) > SHOWN:
            yield Text(f"and {len(ordered) - SHOWN} more reasons (--json)", style="dim")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        numeric = any(isinstance(row[number], int) for row in rows)
        free_text = column in ("environment", "source", "reason", "text") or column.endswith("why")
        table.add_column(
            column, justify="right" if numeric else "left", no_wrap=not free_text, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    return table


def _time(received: float) -> str:
    return datetime.fromtimestamp(received).isoformat(sep=" ", timespec="seconds")
