"""`mlx_parallm rollouts`: what became of the groups of a run, and what is in one of them. Reads only.

    summary   groups by environment and state, by policy version; why groups were dropped or refused
    show      one group, or one rollout of it: a line a token (text, mask, log-probability, version), scores
    rejects   the quarantine with its reasons

Each returns JSON values; `draw_…` of the same name makes text of them, and `as_text` prints that.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from mlx_parallm.config.load import load_config
from mlx_parallm.errors import ConfigError, ModelError, StoreError
from mlx_parallm.rl_training.run_directory import CONFIG_FILE, STORE_FILE, find_run
from mlx_parallm.rollout_store.store import GroupRecord, RolloutStore
from mlx_parallm.types import Rollout

STATES = ("waiting", "taken", "dropped", "quarantined")
SHOWN = 20
"""Most policy versions and reasons in the text; JSON has all."""

PLAIN_WIDTH = 1000
"""Width where there is no terminal."""

Json = Mapping[str, Any]


def summary(path: Path) -> dict[str, Any]:
    """Count the groups. Raises ConfigError: no run directory; StoreError: no rollouts, or they cannot be read."""
    run, store = _open(path)
    with closing(store):
        lines, refused = store.accounts(), store.reject_reasons()
        counts = dict.fromkeys(STATES, 0)
        environments: dict[tuple[str, str], dict[str, Any]] = {}
        versions: dict[int | None, Counter[str]] = {}
        for line in lines:
            counts[line.state] += line.groups
            entry = environments.setdefault(
                (line.environment, line.source),
                {"environment": line.environment, "source": line.source}
                | dict.fromkeys((*STATES, "sequences", "pruned"), 0)
                | {"received_first": line.received_first, "received_last": line.received_last},
            )
            for name, number in ((line.state, line.groups), ("sequences", line.sequences), ("pruned", line.pruned)):
                entry[name] += number
            entry["received_first"] = min(entry["received_first"], line.received_first)
            entry["received_last"] = max(entry["received_last"], line.received_last)
            versions.setdefault(line.version, Counter())[line.state] += line.groups
        return {
            "run": run.name,
            "size_bytes": store.size_bytes(),
            "groups": counts | {"rejected": sum(refused.values())},
            "environments": list(environments.values()),
            "versions": [
                {"version": version} | {state: versions[version][state] for state in STATES}
                for version in sorted(versions, key=lambda version: -1 if version is None else version)
            ],
            "dropped": store.drop_reasons(),
            "rejected": [{"source": s, "reason": reason, "groups": n} for (s, reason), n in refused.items()],
        }


def show(path: Path, wanted: str) -> dict[str, Any]:
    """Return one group, or one rollout of it.

    Args:
        wanted: the group's id or the beginning of it; with `#n` only its n-th rollout, from 0.

    `text` and `token_texts` are None when the run's tokenizer is not on this machine, and `rollouts` when the group's
    tokens are pruned. Raises ConfigError, StoreError: no run; none or several such groups; no such rollout.
    """
    run, store = _open(path)
    with closing(store):
        try:
            record, number = store.find(wanted), None
        except StoreError:
            group_id, separator, digits = wanted.rpartition("#")
            if not separator or not digits.isdecimal():
                raise
            record, number = store.find(group_id), int(digits)
    tokenizer = _tokenizer(run)
    result: dict[str, Any] = {"run": run.name} | _row(record)
    if record.group is None:
        return result | {"rollouts": None}
    group = record.group
    if number is not None and number >= len(group.rollouts):
        raise StoreError(f"group {group.group_id} has rollouts 0 to {len(group.rollouts) - 1}, no {number}")
    advantages = group.advantages or (None,) * len(group.rollouts)
    chosen = range(len(group.rollouts)) if number is None else [number]
    rollouts = [_rollout(group.rollouts[i], tokenizer) | {"number": i, "advantage": advantages[i]} for i in chosen]
    return result | {"index": group.index, "metadata": dict(group.metadata), "rollouts": rollouts}


def rejects(path: Path, limit: int) -> dict[str, Any]:
    """Return the newest entries of the quarantine, newest first; `payload` is what was sent, where it was kept."""
    run, store = _open(path)
    with closing(store):
        entries = [asdict(entry) for entry in store.rejects(limit)]
    return {"run": run.name, "rejects": [entry | {"payload": _json_value(entry["payload"])} for entry in entries]}


def _json_value(value: Any) -> Any:
    """Turn NaN and infinities, which a rejected group may hold, into words."""
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else repr(value)


def _open(path: Path) -> tuple[Path, RolloutStore]:
    run = find_run(path)
    if not (run / STORE_FILE).is_file():
        raise StoreError(f"{run}: no {STORE_FILE}: the run has received nothing yet")
    return run, RolloutStore(run / STORE_FILE, read_only=True)


def _row(record: GroupRecord) -> dict[str, Any]:
    return {
        "group_id": record.group_id,
        "environment": record.environment,
        "source": record.source,
        "state": record.state,
        "step": record.step,
        "reason": record.reason,
        "received": record.received,
        "first_version": record.first_version,
        "last_version": record.last_version,
    }


def _rollout(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    return {
        "scores": dict(rollout.scores),
        "stop_reason": rollout.stop_reason,
        "error": rollout.error,
        "temperature": rollout.temperature,
        "zero_advantage": rollout.zero_advantage,
        "segments": [
            {
                "tokens": segment.tokens,
                "mask": segment.mask,
                "logprobs": segment.logprobs,
                "policy_versions": segment.policy_versions,
                "text": tokenizer and tokenizer.decode(segment.tokens, skip_special_tokens=False),
                "token_texts": tokenizer
                and [tokenizer.decode([token], skip_special_tokens=False) for token in segment.tokens],
            }
            for segment in rollout.segments
        ],
    }


def _tokenizer(run: Path) -> Any:
    """Load the tokenizer of the run's model if it is on this machine; download nothing."""
    from mlx_parallm.models.loading import load_tokenizer, resolve_model_path

    try:
        model = load_config(run / CONFIG_FILE, saved=True).model
        return load_tokenizer(resolve_model_path(model.base_path, model.revision, fetch=False), model)
    except (ConfigError, ModelError):
        return None


# ---------------------------------------------------------------------- text


def as_text(parts: Iterator[RenderableType]) -> str:
    """Return the text; coloured on a terminal, elsewhere as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with console.capture() as capture:
        for part in parts:
            console.print(part, highlight=False)
    return capture.get()


def draw_summary(values: Json) -> Iterator[RenderableType]:
    counts = ", ".join(f"{number} {state}" for state, number in values["groups"].items())
    yield Text(f"{values['run']}: groups: {counts}; {values['size_bytes'] / 1e6:.1f} MB", style="bold")
    if values["environments"]:
        names = ("environment", "source", *STATES, "sequences", "pruned")
        rows = [[*(entry[name] for name in names), _time(entry["received_last"])] for entry in values["environments"]]
        yield _table((*names, "last received"), rows)
    if versions := values["versions"]:
        rows = [["?" if e["version"] is None else e["version"], *(e[state] for state in STATES)] for e in versions]
        yield _table(("policy version", *STATES), rows[-SHOWN:])
        if len(rows) > SHOWN:
            yield Text(f"and {len(rows) - SHOWN} older versions (--json)", style="dim")
    yield from _reasons("dropped: why", list(values["dropped"].items()))
    yield from _reasons("rejected: why", [(f"{e['source']}: {e['reason']}", e["groups"]) for e in values["rejected"]])


def draw_group(values: Json) -> Iterator[RenderableType]:
    step = "" if values["step"] is None else f" by step {values['step']}"
    reason = f" ({values['reason']})" if values["reason"] else ""
    first, last = values["first_version"], values["last_version"]
    versions = "?" if first is None else str(first) if first == last else f"{first} to {last}"
    yield Text(f"{values['group_id']}: {values['state']}{step}{reason}", style="bold")
    yield Text(
        f"environment {values['environment']}, source {values['source']}, received {_time(values['received'])},"
        f" policy version {versions}"
    )
    if values["rollouts"] is None:
        yield Text("the tokens were pruned (rollouts.keep, rollouts.max_gb)")
        return
    for rollout in values["rollouts"]:
        scores = ", ".join(f"{name} {value:g}" for name, value in rollout["scores"].items())
        yield Text(f"\nrollout {rollout['number']}: {scores}", style="bold").append(_notes(rollout), style="not bold")
        for number, segment in enumerate(rollout["segments"], 1):
            if len(rollout["segments"]) > 1:
                yield Text(f"segment {number} of {len(rollout['segments'])}")
            yield _tokens(segment)


def draw_rejects(values: Json) -> Iterator[RenderableType]:
    if not values["rejects"]:
        yield Text("no group was rejected")
        return
    rows = [[_time(entry["received"]), entry["source"], entry["reason"]] for entry in values["rejects"]]
    yield _table(("received", "source", "reason"), rows)
    yield Text("--json prints what was sent", style="dim")


def _notes(rollout: Json) -> str:
    advantage = rollout["advantage"]
    notes = [f"temperature {rollout['temperature']:g}"]
    notes += [f"advantage {advantage:g}"] if isinstance(advantage, float) else []
    notes += [f"ended by {rollout['stop_reason']}"] if rollout["stop_reason"] else []
    notes += [f"error: {rollout['error']}"] if rollout["error"] else []
    notes += ["not trained on (zero_advantage)"] if rollout["zero_advantage"] else []
    return "".join(f" · {part}" for part in notes)


def _tokens(segment: Json) -> Table:
    rows = []
    texts = segment["token_texts"] or [""] * len(segment["tokens"])
    for position, (token, mask) in enumerate(zip(segment["tokens"], segment["mask"], strict=True)):
        logprob = "" if segment["logprobs"] is None or not mask else f"{segment['logprobs'][position]:.4f}"
        text = repr(texts[position])[1:-1] if texts[position] else ""
        rows.append([position, token, text, mask, logprob, segment["policy_versions"][position] if mask else ""])
    return _table(("", "token", "text", "mask", "logprob", "version"), rows)


def _reasons(title: str, counted: Sequence[tuple[str, int]]) -> Iterator[RenderableType]:
    if counted:
        ordered = sorted(counted, key=lambda entry: -entry[1])
        yield _table(("groups", title), [[number, reason] for reason, number in ordered[:SHOWN]])
        if len(ordered) > SHOWN:
            yield Text(f"and {len(ordered) - SHOWN} more reasons (--json)", style="dim")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        numeric = any(isinstance(row[number], int) for row in rows)
        free_text = column in ("source", "reason", "text") or column.endswith("why")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=not free_text, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    return table


def _time(received: float) -> str:
    return datetime.fromtimestamp(received).isoformat(sep=" ", timespec="seconds")
