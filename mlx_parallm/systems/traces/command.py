"""`mlx_parallm traces`: record, import, look at and scan traces of agents."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mlx_parallm.config.arguments import (
    Arguments,
    Directory,
    File,
    Function,
    KeyFile,
    Name,
    Url,
    flag,
    place,
)
from mlx_parallm.errors import TraceError
from mlx_parallm.system.signals import unblock_shutdown_signals

if TYPE_CHECKING:
    from mlx_parallm.system.redaction import Redactor

SHOWN = 20
DRAIN_S, CONNECTIONS = 5.0, 10_000
Format = Literal[
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
]
Anything = Annotated[Path, "PATH"]


class Redacting(Arguments):
    """An action that hides secrets in what it writes."""

    no_redact: bool = False
    """keep secrets and user names; default: placeholders"""
    redact_personal: bool = False
    """hide e-mail addresses, payment cards, IBANs and phone numbers too"""

    def finder(self) -> "Redactor | None":
        from mlx_parallm.systems.traces.privacy import secret_finder

        return None if self.no_redact else secret_finder(personal=self.redact_personal)

    def read(
        self, paths: "Iterable[Path]", report: Any, hits: list[Any], source: str = "auto"
    ) -> Iterator[Any]:
        """Yield the traces of paths, redacted; `report` and `hits` grow."""
        from mlx_parallm.systems.traces.reading import read_traces, redacted

        finder = self.finder()
        for path in paths:
            yield from redacted(read_traces(path, report, source=source), finder, hits)


class Record(Redacting):
    """Record what clients of another OpenAI-compatible server ask and are answered."""

    upstream: Url
    """the other server, e.g. https://host/v1"""
    dir: Directory
    """where sessions are written"""
    host: str = "127.0.0.1"
    """address to bind; loopback only"""
    port: int = 8100
    """port; 0 takes a free one"""

    def run(self) -> int:
        from mlx_parallm.errors import ConfigError
        from mlx_parallm.server.auth import is_loopback_name
        from mlx_parallm.server.thread import serve_until_signal
        from mlx_parallm.systems.traces.proxy import recording_proxy
        from mlx_parallm.systems.traces.recorder import SessionRecorder

        if not is_loopback_name(self.host):
            raise ConfigError(
                f"--host {self.host}: the recorder has no key of its own, so it binds loopback only"
            )

        def announce(url: str) -> None:
            sys.stderr.write(
                f"recording into {self.dir}: base_url={url}/sessions/NAME/v1 stands for"
                f" {self.upstream}\n"
            )
            sys.stderr.flush()

        serve_until_signal(
            lambda: recording_proxy(SessionRecorder(self.dir, self.finder()), self.upstream),
            self.host,
            self.port,
            announce,
            drain_s=DRAIN_S,
            connections=CONNECTIONS,
        )
        return 0


class Import(Redacting):
    """Turn logs of agents into traces, one JSON object a line. What was left out is counted,
    with the reason."""

    paths: list[Anything] = place()
    """files, a recorder's or a run's directory"""
    source: Format = flag("--from", default="auto")
    """their format"""
    to: File
    """where the traces are written"""
    license: Name | None = None
    """noted in every trace"""

    def run(self) -> int:
        from mlx_parallm.systems.traces.importers.report import ImportReport
        from mlx_parallm.systems.traces.reading import write_traces

        report, hits = ImportReport(), list[Any]()
        traces = list(self.read(self.paths, report, hits, self.source))
        for trace in traces if self.license else ():
            trace.note(license=self.license)
        review = write_traces(traces, self.to, hits)
        lines = [*report.draw(), f"written: {self.to}"]
        if review is not None:
            lines.append(f"redacted: {len(hits)} places; review them in {review}")
        sys.stdout.write("\n".join(lines) + "\n")
        return 0


class Show(Arguments):
    """Show traces: how long they are, their tools, rewards and labels."""

    path: Anything = place()
    """traces, or anything that can be imported"""
    id: str | None = None
    """one trace as a whole"""
    limit: int = SHOWN
    """most traces"""
    json: bool = False
    """one JSON object a line"""

    def run(self) -> int:
        _print(_lines(self))
        return 0


def _print(lines: Iterable[str]) -> None:
    """Print until the reader closes the pipe (`| head`)."""
    try:
        for line in lines:
            sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # else Python complains when it flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _lines(args: Show) -> Iterator[str]:
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
        judgement = "comment" if value is None else f"{label.name} {value}"
        parts.append(f"{judgement} by {label.by}")
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


class Scan(Arguments):
    """Look for secrets that are still in files. Exit code 0: none; 1: some, one line each."""

    paths: list[File] = place()
    """JSONL or text files"""

    def run(self) -> int:
        from mlx_parallm.systems.traces.privacy import leftovers

        lines = list(leftovers(self.paths))
        _print(lines)
        return 1 if lines else 0


class Build(Redacting):
    """Make a data set of traces: rows for training, split by session, without near-duplicates."""

    paths: list[Anything] = place()
    """traces, or anything that can be imported"""
    kind: Literal["sft", "preference", "kto", "grpo", "prompts", "atif"]
    """of rows"""
    to: Directory
    """gets train.jsonl, test.jsonl, dataset.json"""
    test_fraction: float = 0.1
    """share that is held out"""
    near_duplicates: float = 0.9
    """similarity of rows that count as one; 1 = equal"""
    good_from: float = 0.5
    """least score of a good trace"""
    least_gap: float = 0.1
    """between chosen and rejected"""
    balance: float = 0.0
    """kto: most times that one side may be the other"""
    sidechains: bool = False
    """keep the runs of sub-agents"""
    order: Literal["recorded", "easy_first", "hard_first"] = "recorded"
    """of the rows to train on: by their prompts' pass rate, or as recorded"""
    license: Name | None = None
    """of the data set"""
    push: Annotated[str, "OWNER/NAME"] | None = None
    """upload it to the Hugging Face hub, as a private data set"""

    def run(self) -> int:
        from mlx_parallm.systems.traces.builders import (
            DatasetOptions,
            build_dataset,
            check_leftovers,
            push_dataset,
            write_dataset,
        )
        from mlx_parallm.systems.traces.importers.report import ImportReport

        options = DatasetOptions(
            **{each.name: vars(self)[each.name] for each in fields(DatasetOptions)}
        )
        hits, report = list[Any](), ImportReport()
        traces = self.read(self.paths, report, hits)
        card = write_dataset(build_dataset(traces, options), self.to, license=self.license)
        train, test = card["rows"]["train"], card["rows"]["test"]
        lines = [f"{self.kind}: {train} rows to train on, {test} held out: {self.to}"]
        lines += [f"left out {count}: {reason}" for reason, count in card["left_out"].items()]
        answers = card["answers_left_out"].items()
        lines += [f"not learned, {count} answers: {reason}" for reason, count in answers]
        if left_out := card["fields_left_out"]:
            names = ", ".join(f"{name} ({count})" for name, count in left_out.items())
            lines.append(f"fields of messages that the rows do not hold: {names}")
        if report.is_lossy:
            lines += [f"read: {line}" for line in report.draw()]
        if hits:
            lines.append(f"redacted: {len(hits)} places")
        _print(lines)
        if self.push:
            check_leftovers(self.to)
            _print([f"pushed: {push_dataset(self.to, self.push)}"])
        return 0


class AddLabels(Redacting):
    """Label traces, by functions, a judge, a classifier, or by you. Earlier labels stay."""

    path: File = place()
    """traces, as `import` writes them"""
    rule: str | None = flag(one_of="how", metavar="python:FILE.py:NAME")
    """a function of a trace"""
    reward: Function | None = flag(one_of="how")
    """a reward function, as in training; or builtin:NAME"""
    judge: Url | None = flag(one_of="how")
    """a model at an OpenAI-compatible endpoint, with its /v1"""
    auto: bool = flag(one_of="how")
    """a classifier proposes labels, learned from those there are"""
    unsure_first: bool = flag(one_of="how")
    """by hand: what the classifier is least sure of, first"""
    name: str = "rule"
    """what the rule judges"""
    judge_model: Annotated[str, "M"] | None = None
    """the endpoint's name of the model"""
    relative: bool = False
    """the judge compares the runs of one prompt, twice"""
    criteria: Annotated[str, "TEXT"] | None = None
    """for the judge: what makes an answer good"""
    api_key_file: KeyFile | None = None
    """of the judge's endpoint"""
    sure: float = 0.9
    """least probability of a proposal"""

    def run(self) -> int:
        from mlx_parallm.systems.traces.labeling import read_labelable
        from mlx_parallm.systems.traces.reading import write_lines

        if not 0.5 <= self.sure <= 1:
            self.error("--sure: from 0.5 to 1")
        traces = read_labelable(self.path)
        if (line := _labelled(self, traces)) is None:
            _by_hand(self, traces)
        else:
            write_lines(traces, self.path)
            _print([line])
        return 0


def _labelled(args: AddLabels, traces: list[Any]) -> str | None:
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
        by = args.judge_model or "judge"
        return add_judge_labels(traces, model, by, relative=args.relative).line()
    if args.auto:
        from mlx_parallm.systems.traces.auto_label import AutoLabeler

        labeler = AutoLabeler(traces)
        labelled, left = labeler.propose(traces, args.sure)
        return (
            f"learned from {labeler.positive} good and {labeler.negative} bad: {labelled} labelled,"
            f" of {left} it is not sure (its surest: {labeler.surest:.2f}, --sure {args.sure:g};"
            " --unsure-first asks you about them)"
        )
    return None


def _by_hand(args: AddLabels, traces: list[Any]) -> None:
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
    redactor = args.finder()
    done = label_by_hand(
        args.path, traces, iter(sys.stdin.readline, ""), show, ask, order=order, redactor=redactor
    )
    _print(["", f"{done} labelled"])


class Traces(Arguments):
    """`mlx_parallm traces ACTION`."""

    actions: ClassVar = {
        "record": Record,
        "import": Import,
        "show": Show,
        "label": AddLabels,
        "build": Build,
        "scan": Scan,
    }

    @classmethod
    def added_to(cls, parser: ArgumentParser) -> Callable[[Namespace], int]:
        run = super().added_to(parser)

        def unblocked(namespace: Namespace) -> int:
            if namespace.action != "record":  # the only one that serves
                unblock_shutdown_signals()
            return run(namespace)

        return unblocked
