"""`mlx_parallm traces`: record, import, look at and scan traces of agents."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm.errors import TraceError
from mlx_parallm.system.signals import unblock_shutdown_signals

if TYPE_CHECKING:
    from mlx_parallm.system.redaction import Redactor

SHOWN = 20
DRAIN_S, CONNECTIONS = 5.0, 10_000
Run = Callable[[Namespace], int]
FORMATS = (
    "auto",
    "atif",
    "openai",
    "responses",
    "recorded",
    "collected",
    "rollouts",
    "claude-code",
    "codex",
    "otlp",
    "verifiers",
    "art",
)


def traces(parser: ArgumentParser) -> Run:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    runs = {name: add(commands) for name, add in ACTIONS.items()}

    def run(args: Namespace) -> int:
        if args.action != "record":  # the only one that serves
            unblock_shutdown_signals()
        return runs[args.action](args)

    return run


def _record(commands: Any) -> Run:
    """Record what clients of another OpenAI-compatible server ask and are answered."""
    parser = commands.add_parser(
        "record", help="record the clients of another server", description=_record.__doc__
    )
    parser.add_argument(
        "--upstream", metavar="URL", required=True, help="the other server, e.g. https://host/v1"
    )
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, required=True, help="where sessions are written"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind; loopback only")
    parser.add_argument("--port", type=int, default=8100, help="port; 0 takes a free one")
    _add_redaction(parser)

    def run(args: Namespace) -> int:
        from mlx_parallm.errors import ConfigError
        from mlx_parallm.server.auth import is_loopback_name
        from mlx_parallm.server.thread import serve_until_signal
        from mlx_parallm.systems.traces.proxy import recording_proxy
        from mlx_parallm.systems.traces.recorder import SessionRecorder

        if not is_loopback_name(args.host):
            raise ConfigError(
                f"--host {args.host}: the recorder has no key of its own, so it binds loopback only"
            )

        def announce(url: str) -> None:
            sys.stderr.write(
                f"recording into {args.dir}: base_url={url}/sessions/NAME/v1 stands for"
                f" {args.upstream}\n"
            )
            sys.stderr.flush()

        serve_until_signal(
            lambda: recording_proxy(SessionRecorder(args.dir, _finder(args)), args.upstream),
            args.host,
            args.port,
            announce,
            drain_s=DRAIN_S,
            connections=CONNECTIONS,
        )
        return 0

    return run


def _add_redaction(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--no-redact",
        action="store_true",
        help="keep secrets and user names (default: placeholders)",
    )
    parser.add_argument(
        "--redact-personal",
        action="store_true",
        help="hide e-mail addresses, payment cards, IBANs and phone numbers too",
    )


def _finder(args: Namespace) -> "Redactor | None":
    from mlx_parallm.systems.traces.privacy import secret_finder

    return None if args.no_redact else secret_finder(personal=args.redact_personal)


def _import(commands: Any) -> Run:
    """Turn logs of agents into traces, one JSON object a line. What was left out is counted,
    with the reason."""
    parser = commands.add_parser(
        "import", help="turn logs of agents into traces", description=_import.__doc__
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        type=Path,
        nargs="+",
        help="files, a recorder's or a run's directory",
    )
    parser.add_argument(
        "--from", dest="source", choices=FORMATS, default="auto", help="their format"
    )
    parser.add_argument(
        "--to", metavar="FILE", type=Path, required=True, help="where the traces are written"
    )
    parser.add_argument("--license", metavar="NAME", help="noted in every trace")
    _add_redaction(parser)

    def run(args: Namespace) -> int:
        from mlx_parallm.systems.traces.importers.report import ImportReport
        from mlx_parallm.systems.traces.privacy import RedactionHit
        from mlx_parallm.systems.traces.reading import read_traces, redacted, write_traces

        report, hits, traces = ImportReport(), list[RedactionHit](), []
        for path in args.paths:
            for trace in redacted(
                read_traces(path, report, source=args.source), _finder(args), hits
            ):
                if args.license:
                    trace.note(license=args.license)
                traces.append(trace)
        review = write_traces(traces, args.to, hits)
        lines = [*report.draw(), f"written: {args.to}"]
        if review is not None:
            lines.append(f"redacted: {len(hits)} places; review them in {review}")
        sys.stdout.write("\n".join(lines) + "\n")
        return 0

    return run


def _show(commands: Any) -> Run:
    """Show traces: how long they are, their tools, rewards and labels."""
    parser = commands.add_parser("show", help="show traces", description=_show.__doc__)
    parser.add_argument(
        "path", metavar="PATH", type=Path, help="traces, or anything that can be imported"
    )
    parser.add_argument("--id", help="one trace as a whole")
    parser.add_argument("--limit", type=int, default=SHOWN, help=f"most traces (default {SHOWN})")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")

    def run(args: Namespace) -> int:
        _print(_lines(args))
        return 0

    return run


def _print(lines: Iterable[str]) -> None:
    """Print until the reader closes the pipe (`| head`)."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # else Python complains when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lines(args: Namespace) -> Iterator[str]:
    from mlx_parallm.system.terminal import escaped
    from mlx_parallm.systems.traces.importers.report import ImportReport
    from mlx_parallm.systems.traces.reading import read_traces

    shown, total, report = 0, 0, ImportReport()
    for trace in read_traces(args.path, report):
        total += 1
        if (args.id is not None and trace.id != args.id) or shown >= args.limit:
            continue
        shown += 1
        if args.json:
            yield json.dumps(trace.to_json())
        elif args.id is not None:
            yield from (escaped(line, lines=True) for line in _conversation(trace))
        else:
            yield escaped(_summary(trace))
    if args.id is not None and not shown:
        raise TraceError(f"{args.path} holds no trace {args.id!r}")
    if not args.json and args.id is None:
        yield f"{shown} of {total} traces"
        if report.is_lossy:
            yield from (escaped(line) for line in report.draw())


def _summary(trace: Any) -> str:
    calls = [call.function_name for step in trace.steps for call in step.tool_calls or ()]
    answers = sum(step.sampled for step in trace.steps)
    parts = [f"{trace.id}: {answers} answers"]
    if calls:
        parts.append(f"{len(calls)} calls of {', '.join(sorted(set(calls)))}")
    parts += [f"{name} {value['score']:g}" for name, value in trace.get("rewards", {}).items()]
    for label in trace.labels:
        value = label.label if label.value is None else f"{label.value:g}"
        parts.append(
            f"{label.name} {value} by {label.by}" if value is not None else f"comment by {label.by}"
        )
    parts += [name for name in ("aborted", "sidechain") if trace.get(name)]
    return ", ".join(parts)


def _conversation(trace: Any) -> Iterator[str]:
    yield _summary(trace)
    for message in trace.messages:
        yield f"\n[{message['role']}]"
        if message.get("reasoning_content"):
            yield f"(thinks) {message['reasoning_content']}"
        if message.get("content"):
            content = message["content"]
            yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        for call in message.get("tool_calls") or ():
            yield f"→ {call['function']['name']}({call['function']['arguments']})"


def _scan(commands: Any) -> Run:
    """Look for secrets that still stand in files. Exit code 0: none; 1: some, one line each."""
    parser = commands.add_parser(
        "scan", help="look for secrets that still stand in files", description=_scan.__doc__
    )
    parser.add_argument("paths", metavar="FILE", type=Path, nargs="+", help="JSONL or text files")

    def run(args: Namespace) -> int:
        from mlx_parallm.systems.traces.privacy import leftovers

        lines = list(leftovers(args.paths))
        _print(lines)
        return 1 if lines else 0

    return run


def _build(commands: Any) -> Run:
    """Make a data set of traces: rows for training, split by session, without near-duplicates."""
    parser = commands.add_parser(
        "build", help="make a data set of traces", description=_build.__doc__
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        type=Path,
        nargs="+",
        help="traces, or anything that can be imported",
    )
    parser.add_argument(
        "--kind", choices=("sft", "preference", "kto", "grpo", "prompts", "atif"), required=True
    )
    parser.add_argument(
        "--to",
        metavar="DIR",
        type=Path,
        required=True,
        help="gets train.jsonl, test.jsonl, dataset.json",
    )
    parser.add_argument(
        "--test-fraction", type=float, default=0.1, help="share that is held out (default 0.1)"
    )
    parser.add_argument(
        "--near-duplicates",
        type=float,
        default=0.9,
        help="similarity of rows that count as one; 1 = equal",
    )
    parser.add_argument(
        "--good-from", type=float, default=0.5, help="least score of a good trace (default 0.5)"
    )
    parser.add_argument(
        "--least-gap", type=float, default=0.1, help="between chosen and rejected (default 0.1)"
    )
    parser.add_argument(
        "--balance",
        type=float,
        default=0.0,
        help="kto: most times that one side may be the other",
    )
    parser.add_argument("--sidechains", action="store_true", help="keep the runs of sub-agents")
    parser.add_argument(
        "--order",
        choices=("recorded", "easy_first", "hard_first"),
        default="recorded",
        help="of the rows to train on: by their prompts' pass rate, or as recorded (default)",
    )
    parser.add_argument("--license", metavar="NAME", help="of the data set")
    parser.add_argument(
        "--push",
        metavar="OWNER/NAME",
        help="upload it to the Hugging Face hub, as a private data set",
    )
    _add_redaction(parser)

    def run(args: Namespace) -> int:
        from mlx_parallm.systems.traces.builders import (
            DatasetOptions,
            build_dataset,
            check_leftovers,
            push_dataset,
            write_dataset,
        )
        from mlx_parallm.systems.traces.importers.report import ImportReport
        from mlx_parallm.systems.traces.privacy import RedactionHit
        from mlx_parallm.systems.traces.reading import read_traces, redacted

        finder = _finder(args)
        options = DatasetOptions(
            args.kind,
            test_fraction=args.test_fraction,
            near_duplicates=args.near_duplicates,
            good_from=args.good_from,
            least_gap=args.least_gap,
            balance=args.balance,
            sidechains=args.sidechains,
            order=args.order,
        )
        hits, report = list[RedactionHit](), ImportReport()
        traces = (
            trace
            for path in args.paths
            for trace in redacted(read_traces(path, report), finder, hits)
        )
        card = write_dataset(build_dataset(traces, options), args.to, license=args.license)
        lines = [
            (
                f"{args.kind}: {card['rows']['train']} rows to train on,"
                f" {card['rows']['test']} held out: {args.to}"
            )
        ]
        lines += [f"left out {count}: {reason}" for reason, count in card["left_out"].items()]
        lines += [
            f"not learned, {count} answers: {reason}"
            for reason, count in card["answers_left_out"].items()
        ]
        if card["fields_left_out"]:
            names = ", ".join(
                f"{name} ({count})" for name, count in card["fields_left_out"].items()
            )
            lines.append(f"fields of messages that the rows do not hold: {names}")
        if report.is_lossy:
            lines += [f"read: {line}" for line in report.draw()]
        if hits:
            lines.append(f"redacted: {len(hits)} places")
        _print(lines)
        if args.push:
            check_leftovers(args.to)
            _print([f"pushed: {push_dataset(args.to, args.push)}"])
        return 0

    return run


def _label(commands: Any) -> Run:
    """Label the traces of a file: by functions, a judge, a classifier, or by you. Earlier labels
    stay."""
    parser = commands.add_parser(
        "label", help="label traces, by functions or by hand", description=_label.__doc__
    )
    parser.add_argument("path", metavar="FILE", type=Path, help="traces, as `import` writes them")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--rule", metavar="python:FILE.py:NAME", help="a function of an ExecutionTrace"
    )
    how.add_argument(
        "--reward", metavar="FILE.py:F", help="a reward function, as in training; or builtin:NAME"
    )
    how.add_argument(
        "--judge", metavar="URL", help="a model at an OpenAI-compatible endpoint, with its /v1"
    )
    how.add_argument(
        "--auto",
        action="store_true",
        help="a classifier proposes labels, learned from those there are",
    )
    how.add_argument(
        "--unsure-first",
        action="store_true",
        help="by hand: what the classifier is least sure of, first",
    )
    parser.add_argument("--name", default="rule", help="what the rule judges (default: rule)")
    parser.add_argument("--judge-model", metavar="M", help="the endpoint's name of the model")
    parser.add_argument(
        "--relative", action="store_true", help="the judge compares the runs of one prompt, twice"
    )
    parser.add_argument(
        "--criteria", metavar="TEXT", help="for the judge: what makes an answer good"
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="of the judge's endpoint")
    parser.add_argument(
        "--sure", type=float, default=0.9, help="least probability of a proposal (default 0.9)"
    )
    _add_redaction(parser)

    def run(args: Namespace) -> int:
        from mlx_parallm.systems.traces.labeling import read_labelable
        from mlx_parallm.systems.traces.reading import write_lines

        if not 0.5 <= args.sure <= 1:
            parser.error("--sure: from 0.5 to 1")
        traces = read_labelable(args.path)
        line = _labelled(args, traces)
        if line is not None:
            write_lines(traces, args.path)
            _print([line])
            return 0
        _by_hand(args, traces)
        return 0

    return run


def _labelled(args: Namespace, traces: list[Any]) -> str | None:
    """Label by what the arguments name, and return what was done; None: a person is to label."""
    from mlx_parallm.systems.traces.labeling import add_rule_labels

    if args.rule:
        labelled, left = add_rule_labels(traces, args.rule, args.name)
        return f"{args.rule}: {labelled} labelled, {left} left alone"
    if args.reward:
        from mlx_parallm.systems.traces.rewards import add_reward_labels, references_of

        labelled, left = add_reward_labels(traces, references_of([args.reward], Path.cwd()))
        return f"{args.reward}: {labelled} labelled, {left} left alone"
    if args.judge:
        from mlx_parallm.rewards.judge import CRITERIA, judge
        from mlx_parallm.systems.traces.judging import add_judge_labels

        model = judge(
            judge=args.judge,
            model=args.judge_model,
            api_key_file=args.api_key_file,
            criteria=args.criteria or CRITERIA,
            mode="rank" if args.relative else "score",
        )
        return add_judge_labels(traces, model, args.judge_model, relative=args.relative).line()
    if args.auto:
        from mlx_parallm.systems.traces.auto_label import AutoLabeler

        labeler = AutoLabeler(traces)
        labelled, left = labeler.propose(traces, args.sure)
        return (
            f"learned from {labeler.positive} good and {labeler.negative} bad: {labelled}"
            f" labelled, of {left} it is not"
            f" sure (its surest: {labeler.surest:.2f}, --sure {args.sure:g}; --unsure-first asks"
            " you about them)"
        )
    return None


def _by_hand(args: Namespace, traces: list[Any]) -> None:
    from mlx_parallm.system.terminal import escaped
    from mlx_parallm.systems.traces.labeling import label_by_hand

    def ask(question: str) -> None:
        sys.stdout.write(question)
        sys.stdout.flush()

    def show(trace: Any) -> None:
        _print(["", *(escaped(line, lines=True) for line in _conversation(trace)), ""])

    order = None
    if args.unsure_first:
        from mlx_parallm.systems.traces.auto_label import AutoLabeler

        order = AutoLabeler(traces).unsure_first(traces)
    redactor = _finder(args)
    done = label_by_hand(
        args.path, traces, iter(sys.stdin.readline, ""), show, ask, order=order, redactor=redactor
    )
    _print(["", f"{done} labelled"])


ACTIONS = {
    "record": _record,
    "import": _import,
    "show": _show,
    "label": _label,
    "build": _build,
    "scan": _scan,
}
