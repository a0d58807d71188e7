"""This project's own: recorded sessions, and the rollouts of a training run (`rollouts.sqlite`)."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

from mlx_parallm.errors import TraceError
from mlx_parallm.rl_training.monitor.readable import without_template
from mlx_parallm.runs.run import FILES, Run
from mlx_parallm.system.files import regular_files
from mlx_parallm.systems.traces.importers.chats import atif
from mlx_parallm.systems.traces.importers.report import ImportReport, session_traces
from mlx_parallm.systems.traces.schema import Json, present
from mlx_parallm.systems.traces.session import SESSIONS, Session, read_sessions
from mlx_parallm.systems.traces.trace import Trace, new_trace
from mlx_parallm.types import Rollout, weight_spans

COLLECTED = "????-??-??/*.json"


def recorded(path: Path, report: ImportReport) -> Iterator[Trace]:
    """A recorder's directory, or one of its session files. A turn or label is a line."""
    sessions = [Session.read(path)] if path.is_file() else read_sessions(path)
    for session in sessions:
        yield from _recorded(session, report)


def _recorded(session: Session, report: ImportReport) -> Iterator[Trace]:
    for fault in session.faults:
        report.leave_out(fault.place, fault.value, f"a damaged line: {fault.reason}"[:200])
    labels = {
        f"{session.name} label {n}": each.to_json() for n, each in enumerate(session.labels, 1)
    }
    for place, label in labels.items():
        report.read(place, label)
    places = {name: f"{session.name} turn {name}" for name in session.turns}
    for name, turn in session.turns.items():
        report.read(places[name], turn.to_json())
        report.expect(places[name], turn.spoken)
    for (place, name), value in session.unknown.items():
        report.drop(place, f"field {name!r} of a turn is not known"[:100], value)
    held = list[Json]()
    for trace in session_traces(session, places, report):
        held += trace.get("labels", [])
        yield trace
    for place, label in labels.items():
        if label in held:
            report.carry(place)
        else:
            report.skip(place, "a label of an answer that no trace holds")


def collected(path: Path, report: ImportReport) -> Iterator[Trace]:
    """A `TraceCollector`'s directory: `YYYY-MM-DD/ID.json`."""
    for file in regular_files(path, COLLECTED):
        yield from atif(file, report)


def rollouts(path: Path, report: ImportReport) -> Iterator[Trace]:
    """The rollouts of a run directory. Messages are the texts between the template's turns, as
    the run's tokenizer reads them; tokens are kept. Raises TraceError: no run, or its model's
    tokenizer is not on this machine."""
    run = Run(path.parent if path.name == FILES["rollouts"] else path)
    if not run.has("rollouts"):
        raise TraceError(f"{run.path} is not a run directory: it has no {FILES['rollouts']}")
    decode = _decoder(run)
    with closing(run.open_rollouts()) as store:
        for record in store.records():
            place = f"group {record.group_id}"
            report.read(place)
            if record.group is None:
                report.skip(place, record.lost or "its tokens are gone")
                continue
            for number, rollout in enumerate(record.group.rollouts):
                report.traces += 1
                trace = _rollout_trace(rollout, f"{record.group_id}#{number}", record, decode)
                report.expect(place, trace.steps)
                yield trace
            report.carry(place)


def _decoder(run: Run) -> Any:
    from mlx_parallm.models.loading import load_tokenizer, resolve_model_path  # here: it loads MLX

    config = run.load_config().model
    path = resolve_model_path(config.base_path, config.revision, fetch=False, dtype=config.dtype)
    tokenizer = load_tokenizer(path, config)
    readable = without_template(tokenizer, config.chat_template_kwargs)
    return lambda parts: [readable(text) for text in tokenizer.decode_parts(parts)]


def _rollout_trace(rollout: Rollout, name: str, record: Any, decode: Any) -> Trace:
    messages: list[Json] = []
    for segment in rollout.segments:
        is_last = segment is rollout.segments[-1]
        by_mask = groupby(range(len(segment.tokens)), key=segment.mask.__getitem__)
        runs = [list(places) for _, places in by_mask]
        texts = decode([segment.tokens[places[0] : places[-1] + 1] for places in runs])
        for places, text in zip(runs, texts, strict=True):
            sampled = segment.mask[places[0]]
            message: Json = {"role": "assistant" if sampled else "user", "content": text}
            if sampled:
                ends = is_last and places is runs[-1]
                reason = rollout.stop_reason if ends else None
                message["step"] = _sampled_step(segment, places, reason)
            messages.append(message)
    return new_trace(
        messages,
        session_id=name,
        source="rollouts",
        source_id=record.group_id,
        task=record.environment,
        group_id=record.group_id,
        rewards={key: {"score": value, "weight": 1.0} for key, value in rollout.scores.items()},
        policy_version=record.last_version,
    )


def _sampled_step(segment: Rollout, places: Sequence[int], reason: str | None) -> Json:
    """The step of a stretch of sampled tokens. `reason`: why the episode ended behind it."""
    first, last = places[0], places[-1] + 1
    spans = weight_spans(segment.policy_versions[first:last])
    versions = [[span.version, span.start, span.end] for span in spans]
    about = {"policy_versions": versions, "temperature": segment.temperature}
    metrics: Json = {
        "prompt_token_ids": list(segment.tokens[:first]),
        "completion_token_ids": list(segment.tokens[first:last]),
        "extra": about | present({"finish_reason": reason}),
    }
    if segment.logprobs is not None:
        metrics["logprobs"] = list(segment.logprobs[first:last])
    return {"metrics": metrics, "llm_call_count": 1}


def is_collection(path: Path) -> bool:
    return path.is_dir() and next(path.glob(COLLECTED), None) is not None


def is_recording(path: Path) -> bool:
    return (path / SESSIONS).is_dir() or path.parent.name == SESSIONS
