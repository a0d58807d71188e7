"""Data sets from traces: rows that `mlx_parallm train` and TRL read, split by session, without
near-duplicates.

    sft          messages, tools; an assistant's message that was not sampled in this trace has
                 weight 0
    preference   prompt, chosen, rejected, tools: the best and the worst of the traces of one prompt
    kto          prompt, completion, label, tools
    grpo         prompt, completions, rewards, pass_rate, tools: all scored traces of one prompt
    prompts      prompt, tools, pass_rate, and the task's columns: the messages before the first
                 answer
    atif         the traces themselves

Arguments of calls and tool definitions are JSON text: Arrow would give every object the keys of all
others.

A row holds the whole history of its answers (`row_messages`), or its trace is left out with a
reason: each trace is in a row or counted. Traces of sub-agents and aborted calls are left out;
copied context is never learned.

What a trace is worth is its newest label of a person, else its newest feedback, else its other
labels' newest, else the classifier's, else its weighted rewards.
"""

import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args

from mlx_parallm import __version__
from mlx_parallm.config.environment import PASS_RATE
from mlx_parallm.errors import ConfigError, TraceError
from mlx_parallm.system.files import write_directory
from mlx_parallm.system.packages import require
from mlx_parallm.systems.traces.privacy import leftovers
from mlx_parallm.systems.traces.row_messages import (
    RowChat,
    divided,
    row_chat,
    whole_characters,
)
from mlx_parallm.systems.traces.schema import Json, dump_line, present, without
from mlx_parallm.systems.traces.session import next_key, prompt_hash
from mlx_parallm.systems.traces.trace import MANUAL, Trace

Kind = Literal["sft", "preference", "kto", "grpo", "prompts", "atif"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Order = Literal["recorded", "easy_first", "hard_first"]
ORDERS: tuple[Order, ...] = get_args(Order)
FEEDBACK = "feedback"
AUTO = "auto"  # label of the classifier; any other label has precedence
PERMUTATIONS = 128  # MinHash: the similarity estimate is within 0.09
SHINGLE = 5  # words
SHOWN_LEFTOVERS = 5
LABEL_WORDS = {"good": 1.0, "bad": 0.0, "up": 1.0, "down": 0.0}


@dataclass(frozen=True)
class DatasetOptions:
    """The options of a data set.

    Attributes:
        test_fraction: share of the prompts held out; all traces of a session, and all of one
            opening, are on one side.
        near_duplicates: rows at least this similar (Jaccard, of five-word shingles) count as one; 1
            = equal rows only.
        good_from: the least score of a desirable KTO row, and of an SFT row that has a score.
        least_gap: between the scores of chosen and rejected.
        balance: KTO: drop rows of the larger side until it has at most so many times the smaller; 0
            = keep all.
        sidechains: keep the runs of sub-agents, as their own traces.
        order: of the rows to train on: as their traces came, or by the pass rate of their prompts
            (the share of scored traces that are worth at least `good_from`); rows of prompts
            without a score come last.
    """

    kind: Kind
    test_fraction: float = 0.1
    near_duplicates: float = 0.9
    good_from: float = 0.5
    least_gap: float = 0.1
    balance: float = 0.0
    sidechains: bool = False
    order: Order = "recorded"


@dataclass
class Dataset:
    """Rows of both sides, and what was left out and why.

    Attributes:
        traces: that were read, each run of a sub-agent inside another one too.
        left_out: traces that are in no row, by reason.
        fields: names of fields that the traces hold and the rows do not, since they say nothing to
            a model.
        answers: answers of the traces that are not learned though a model sampled them, by reason.
    """

    options: DatasetOptions
    train: list[Json] = field(default_factory=list)
    test: list[Json] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    fields: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    licenses: Counter[str] = field(default_factory=Counter)
    traces: int = 0


@dataclass(frozen=True)
class _Run:
    """A trace of which a row can be made: the messages before the first answer that is learned,
    and those from it to the last one."""

    trace: Trace
    before: list[Json]
    answered: list[Json]
    score: float | None

    @property
    def tools(self) -> Json:
        tools = self.trace.tools
        return {"tools": json.dumps(tools, ensure_ascii=False)} if tools else {}

    @property
    def session(self) -> str:
        return str(self.trace.session_id or self.trace.id)


@dataclass(frozen=True)
class _Row:
    data: Json
    run: _Run  # the opening of its session decides train or test
    good: bool = True
    traces: int = 1  # number of traces in the row


def score_of(trace: Trace) -> float | None:
    """Return the score of a trace, from its labels; None: no label has a value."""
    values: dict[str, float] = {}
    for label in trace.labels:
        value = label.value
        if value is None:
            value = LABEL_WORDS.get((label.label or "").lower())
        if value is not None:
            values[label.name if label.name in (MANUAL, FEEDBACK, AUTO) else "other"] = value
    for name in (MANUAL, FEEDBACK, "other", AUTO):
        if name in values:
            return values[name]
    rewards = trace.get("rewards", {})
    if "reward" in rewards:
        return float(rewards["reward"]["score"])
    weights = {name: float(part.get("weight", 1.0)) for name, part in rewards.items()}
    return weighted_mean({name: float(part["score"]) for name, part in rewards.items()}, weights)


def weighted_mean(scores: Mapping[str, float], weights: Mapping[str, float]) -> float | None:
    """Return Σ weight · score / Σ weight; None: the weights add up to nothing."""
    total = sum(weights[name] for name in scores)
    return sum(weights[name] * score for name, score in scores.items()) / total if total else None


def build_dataset(traces: Iterable[Trace], options: DatasetOptions) -> Dataset:
    """Make the rows. Raises ConfigError: an option; TraceError: no row can be made."""
    _check(options)
    dataset = Dataset(options)
    runs: list[_Run] = []
    for trace in _with_subagents(list(traces)):
        dataset.traces += 1
        chat = _usable(trace, options)
        if isinstance(chat, str):
            dataset.left_out[chat] += 1
        else:
            runs.append(_Run(trace, chat.before, chat.answered, score_of(trace)))
            dataset.fields += chat.notes
            dataset.answers += chat.not_learned
    rows = list(_BUILDERS[options.kind](runs, dataset))
    if options.kind != "atif":
        rows = [replace(row, data=whole_characters(row.data, dataset.fields)) for row in rows]
        rows = _by_pass_rate(_different(rows, dataset), runs, options)
    if options.kind == "kto" and options.balance:
        rows = _balanced(rows, options.balance, dataset)
    if not rows:
        most = dataset.left_out.most_common(3)
        reasons = "; ".join(f"{count}: {reason}" for reason, count in most) or "no traces"
        raise TraceError(
            f"{dataset.traces} traces make no row of kind {options.kind!r} ({reasons})"
        )
    accounted = sum(row.traces for row in rows) + dataset.left_out.total()
    assert accounted == dataset.traces, f"{accounted} of {dataset.traces} in rows or left out"
    sides: dict[str, str] = {}
    for run in runs:
        dataset.sources[str(run.trace.get("source", "unknown"))] += 1
        dataset.licenses[str(run.trace.get("license", "unknown"))] += 1
        # a session whose traces begin differently (after a compaction) is on its first one's side
        sides.setdefault(run.session, _side(run.trace))
    for row in rows:
        digest = hashlib.sha256(sides[row.run.session].encode(errors="surrogatepass")).digest()
        held_out = int.from_bytes(digest[:4]) / 2**32 < options.test_fraction
        (dataset.test if held_out else dataset.train).append(row.data)
    return dataset


def _check(options: DatasetOptions) -> None:
    if options.kind not in KINDS:
        raise ConfigError(f"there is no data set of kind {options.kind!r}: {', '.join(KINDS)}")
    if options.order not in ORDERS or (options.kind == "atif" and options.order != "recorded"):
        raise ConfigError(
            f"order = {options.order!r}: expected one of {', '.join(ORDERS)}; traces (atif)"
            " stay as recorded"
        )
    if not 0 <= options.test_fraction < 1:
        raise ConfigError(
            f"test_fraction = {options.test_fraction}: expected 0 or more, and less than 1"
        )


def prompt_key(of: Trace | Json) -> str:
    """Return a key of the messages before the first sampled answer, of a usable trace or of a row
    of any kind."""
    if not isinstance(of, dict):
        before = row_chat(of).before
    elif "prompt" in of:
        before = of["prompt"]
    else:
        before = divided(of["messages"])[0]
    return _key(before)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _by_pass_rate(rows: list[_Row], runs: Sequence[_Run], options: DatasetOptions) -> list[_Row]:
    """Write the pass rate into rows of prompts, and put all rows into the order that is wanted."""
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for run in runs:
        if run.score is not None:
            verdicts[_key(run.before)].append(run.score >= options.good_from)
    rates = {key: statistics.fmean(passed) for key, passed in verdicts.items()}
    measured = [(row, rates.get(prompt_key(row.data))) for row in rows]
    if options.kind in ("prompts", "grpo"):
        for row, rate in measured:
            row.data.update(present({PASS_RATE: rate}))
    if options.order == "recorded":
        return rows
    sign = -1 if options.order == "easy_first" else 1
    measured.sort(key=lambda each: (each[1] is None, sign * (each[1] or 0.0)))
    return [row for row, _ in measured]


def is_usable(trace: Trace) -> bool:
    """Whether a row can be made of it."""
    return not isinstance(_usable(trace, DatasetOptions("prompts")), str)


def without_prompts(dataset: Dataset, held_out: Sequence[Json]) -> Dataset:
    """Take rows to train on out of a data set whose prompt, or one nearly equal, another data set
    holds out; return it.

    Args:
        held_out: the other one's rows, of kind "prompts".
    """
    keys = dict.fromkeys(map(prompt_key, held_out))
    is_there = _near_duplicates(dataset.options.near_duplicates)
    for number, key in enumerate(keys):
        is_there(f"{number}", json.loads(key))
    rows, dataset.train = dataset.train, []
    for row in rows:
        if (key := prompt_key(row)) not in keys and not is_there(None, json.loads(key)):
            dataset.train.append(row)
    _count(dataset, "its prompt, or one like it, is held out", len(rows) - len(dataset.train))
    return dataset


def _with_subagents(traces: Sequence[Trace]) -> Iterator[Trace]:
    """Each trace, and the runs of sub-agents that lie inside it, or that another trace names as
    such, as their own traces."""
    named = {name for trace in traces for name in _named_subagents(trace)}
    for trace in traces:
        if trace.id in named and not trace.get("sidechain"):
            trace = trace.model_copy()
            trace.note(sidechain=True)
        yield trace
        yield from _inner(trace)


def _inner(trace: Trace) -> Iterator[Trace]:
    for inner in trace.subagent_trajectories or ():
        apart = inner.model_copy()
        apart.note(sidechain=True)
        yield apart
        yield from _inner(apart)


def _named_subagents(trace: Trace) -> Iterator[str]:
    """The ids of the traces that its results name as the runs of sub-agents."""
    for step in trace.steps:
        for named in chain(*(each.subagent_trajectory_ref or () for each in step.results)):
            names = (named.get("trajectory_id"), named.get("session_id"))
            yield from (n for n in names if isinstance(n, str) and n != trace.session_id)


def _usable(trace: Trace, options: DatasetOptions) -> RowChat | str:
    """The chat of a trace, or the reason why it makes no row."""
    if trace.get("aborted"):
        return "the last call was aborted"
    if trace.get("sidechain") and not options.sidechains:
        return "the run of a sub-agent"
    if not any(step.sampled for step in trace.steps):
        return "no answer was sampled in it"
    if options.kind == "atif":
        return RowChat([], [], Counter(), Counter())
    if trace.get("untrainable"):
        return str(trace.get("untrainable"))
    try:
        chat = row_chat(trace)
    except TraceError as error:
        return str(error)
    if not chat.answered:
        return f"none of its answers is learned: {chat.why_not}"
    says = [message["content"] or message.get("tool_calls") for message in chat.before]
    return chat if any(says) or not says else "its prompt is empty"


# ---------------------------------------------------------------------- rows


def _side(trace: Trace) -> str:
    """The same for all traces of one opening, so for all of a session's that continue from it."""
    return str(trace.get("group_id") or prompt_hash(trace.messages))


def _sft(runs: Sequence[_Run], dataset: Dataset) -> Iterator[_Row]:
    once, good_from = _LearnedOnce(dataset), dataset.options.good_from
    for run in runs:
        if run.score is not None and run.score < good_from:
            dataset.left_out[f"a score below {good_from:g}"] += 1
        elif (parts := once.parts(run)) is not None:
            before, answered = parts
            if before:
                yield _Row({"messages": before + answered, **run.tools}, run)
            else:
                dataset.left_out["it begins with an answer: there is no prompt"] += 1


def _kto(runs: Sequence[_Run], dataset: Dataset) -> Iterator[_Row]:
    once = _LearnedOnce(dataset)
    for run, score in _scored(runs, dataset):
        good = score >= dataset.options.good_from
        if (parts := once.parts(run, good)) is not None:
            row = {"prompt": parts[0], "completion": parts[1], "label": good}
            yield _Row(row | run.tools, run, good)


LEARNED_BEFORE = "each of its answers is learned in an earlier row"
LOGS = ("openai-chat", "claude-code", "codex", "otlp")
"""Sources whose sessions repeat others: resumed, forked, or logged again as they grow. Sessions of
other sources are their own samples, and two may begin with equal answers."""


class _LearnedOnce:
    """Finds answers that an earlier row of the data set learns, after the same messages."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._learned: set[tuple[str, bool, str]] = set()

    def parts(self, run: _Run, good: bool = True) -> tuple[list[Json], list[Json]] | None:
        """Return a trace's messages before its first answer that is still to be learned, and
        those from it on; None, which is counted, if there is none."""
        messages, scope, chain, repeated = run.before + run.answered, _scope(run.trace), "", 0
        new_keys: set[tuple[str, bool, str]] = set()
        for message in messages:
            chain = next_key(chain, message)
            if message["role"] != "assistant" or "weight" in message:
                continue
            key = scope, good, chain
            if key in self._learned:
                message["weight"] = 0
                repeated += 1
            new_keys.add(key)
        self._learned |= new_keys
        if not repeated:
            return run.before, run.answered
        before, answered = divided(messages)
        if not answered:
            self._dataset.left_out[LEARNED_BEFORE] += 1
            return None
        self._dataset.answers["an answer that an earlier row learns"] += repeated
        return before, answered


def _scope(trace: Trace) -> str:
    """Within which an answer is learned once."""
    source = str(trace.get("source"))
    if source in LOGS:
        return ""
    # a collector's sessions have one name by default
    return f"{source} {trace.id if source == 'collector' else trace.session_id or trace.id}"


def _scored(runs: Sequence[_Run], dataset: Dataset) -> Iterator[tuple[_Run, float]]:
    for run in runs:
        if run.score is None:
            dataset.left_out["no label and no reward"] += 1
        elif not run.before or run.before[-1]["role"] == "assistant":
            dataset.left_out["there is no prompt before its first answer"] += 1
        else:
            yield run, run.score


def _groups(runs: Sequence[_Run], dataset: Dataset) -> Iterator[list[tuple[_Run, float]]]:
    """Scored traces with the same messages before the first answer; of equal answers one."""
    groups: dict[str, list[tuple[_Run, float]]] = defaultdict(list)
    for run, score in _scored(runs, dataset):
        groups[_key([run.before, run.trace.tools])].append((run, score))
    for group in groups.values():
        answers = {json.dumps(run.answered): (run, score) for run, score in group}
        if len(answers) < 2:
            dataset.left_out["the only answer to its prompt"] += len(group)
            continue
        again = len(group) - len(answers)
        _count(dataset, "an answer to its prompt that is there already", again)
        yield list(answers.values())


def _preference(runs: Sequence[_Run], dataset: Dataset) -> Iterator[_Row]:
    least_gap = dataset.options.least_gap
    for group in _groups(runs, dataset):
        ranked = sorted(group, key=lambda each: each[1])
        (worst, lowest), (best, highest) = ranked[0], ranked[-1]
        if highest - lowest < least_gap:
            dataset.left_out[f"scores of one prompt closer than {least_gap:g}"] += len(group)
            continue
        row = {"prompt": best.before, "chosen": best.answered, "rejected": worst.answered}
        _count(dataset, "neither the best nor the worst of its prompt", len(group) - 2)
        yield _Row(row | best.tools, best, traces=2)


def _grpo(runs: Sequence[_Run], dataset: Dataset) -> Iterator[_Row]:
    for group in _groups(runs, dataset):
        first, _ = group[0]
        row: Json = {"prompt": first.before, "completions": [run.answered for run, _ in group]}
        row |= {"rewards": [score for _, score in group], **first.tools}
        yield _Row(row, first, traces=len(group))


def _prompts(runs: Sequence[_Run], dataset: Dataset) -> Iterator[_Row]:
    seen = set[str]()
    for run in runs:
        key = _key(run.before)
        if not run.before or key in seen:
            reason = "a prompt that is there already" if run.before else "it begins with an answer"
            dataset.left_out[reason] += 1
            continue
        seen.add(key)
        columns = without(run.trace.get("columns", {}), "prompt", "tools", PASS_RATE)
        yield _Row({**columns, "prompt": run.before, **run.tools}, run)


def _atif(runs: Sequence[_Run], dataset: Dataset) -> Iterator[_Row]:
    return (_Row(run.trace.to_json(), run) for run in runs)


_BUILDERS: dict[str, Callable[[Sequence[_Run], Dataset], Iterator[_Row]]] = {
    "sft": _sft,
    "preference": _preference,
    "kto": _kto,
    "grpo": _grpo,
    "prompts": _prompts,
    "atif": _atif,
}


def _count(dataset: Dataset, reason: str, traces: int) -> None:
    if traces:
        dataset.left_out[reason] += traces


# ---------------------------------------------------------------------- which rows stay


def _different(rows: Sequence[_Row], dataset: Dataset) -> list[_Row]:
    """Drop rows that are equal or nearly equal to an earlier one. Rows of different labels never
    count as equal."""
    threshold, seen, kept = dataset.options.near_duplicates, set[bytes](), list[_Row]()
    is_there = _near_duplicates(threshold)
    for number, row in enumerate(rows):
        line = dump_line(row.data)
        if line in seen:
            dataset.left_out["an equal row is there"] += row.traces
            continue
        seen.add(line)
        if is_there(f"{number}", row.data, row.good):
            dataset.left_out[f"a row like it (similarity {threshold:g}) is there"] += row.traces
        else:
            kept.append(row)
    return kept


def _near_duplicates(threshold: float) -> Callable[..., bool]:
    """A function of a name, a row and its label that says whether a row like it is there, and
    adds it under its name, if it has one, where none is. Raises ConfigError."""
    if threshold >= 1:
        return lambda name, row, good=True: False
    require("near_duplicates below 1", "datasketch")
    from datasketch import MinHash, MinHashLSH

    indices = [MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS) for _ in range(2)]
    hashes: dict[str, Any] = {}

    def is_there(name: str | None, row: Any, good: bool = True) -> bool:
        words = _text_of_row(row).split()
        if len(words) <= SHINGLE:  # one other word makes a short text a different one
            return False
        starts = range(len(words) - SHINGLE + 1)
        shingles = {" ".join(words[at : at + SHINGLE]) for at in starts}
        hashed = MinHash(num_perm=PERMUTATIONS)
        hashed.update_batch([shingle.encode() for shingle in sorted(shingles)])
        if any(hashed.jaccard(hashes[other]) >= threshold for other in indices[good].query(hashed)):
            return True
        if name is not None:
            indices[good].insert(name, hashed)
            hashes[name] = hashed
        return False

    return is_there


def _text_of_row(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(_text_of_row(item) for key, item in value.items() if key != "id")
    return " ".join(map(_text_of_row, value)) if isinstance(value, list) else str(value)


def _balanced(rows: Sequence[_Row], ratio: float, dataset: Dataset) -> list[_Row]:
    """Drop rows of the larger side, which ones by a hash of them, not by their order."""
    by_side = {good: [row for row in rows if row.good is good] for good in (True, False)}
    least = min(map(len, by_side.values()))
    most = round(ratio * least)
    if not least:
        raise TraceError(
            "all rows have the same label: there is nothing to balance; leave balance at 0"
        )
    dropped: set[int] = set()
    for side in by_side.values():
        ordered = sorted(side, key=lambda row: hashlib.sha256(dump_line(row.data)).digest())
        dropped |= {id(row) for row in ordered[max(most, least) :]}
    _count(dataset, "the larger side, for balance", len(dropped))
    return [row for row in rows if id(row) not in dropped]


# ---------------------------------------------------------------------- on the disk


def dataset_statistics(dataset: Dataset) -> Json:
    """Return the counts and lengths of the training rows, and where they came from."""
    rows = dataset.train + dataset.test
    lengths, characters = [len(_text_of_row(row)) for row in rows], {}
    if lengths:
        characters = {"mean": round(statistics.fmean(lengths), 1), "longest": max(lengths)}
    summary: Json = {
        "traces": dataset.traces,
        "rows": {"train": len(dataset.train), "test": len(dataset.test)},
        "characters": characters,
        "left_out": dict(dataset.left_out.most_common()),
        "answers_left_out": dict(dataset.answers.most_common()),
        "fields_left_out": dict(dataset.fields.most_common()),
        "sources": dict(dataset.sources),
        "licenses": dict(dataset.licenses),
    }
    if dataset.options.kind == "kto":
        good = sum(row["label"] for row in rows)
        summary["labels"] = {"desirable": good, "undesirable": len(rows) - good}
    if dataset.options.kind == "grpo":
        rewards = [reward for row in rows for reward in row["rewards"]]
        mean, least, most = statistics.fmean(rewards), min(rewards), max(rewards)
        summary["rewards"] = {"mean": mean, "least": least, "most": most}
    return summary


def write_dataset(dataset: Dataset, directory: Path, *, license: str | None = None) -> Json:
    """Write `train.jsonl`, `test.jsonl` (where there is one) and `dataset.json`; return what the
    last one holds.

    Raises CheckpointError: nothing is half-written then.
    """
    files = {"train.jsonl": dataset.train} | ({"test.jsonl": dataset.test} if dataset.test else {})
    contents = {name: b"".join(map(dump_line, rows)) for name, rows in files.items()}
    card: Json = {
        "format": 1,
        "made_by": f"mlx_parallm {__version__}",
        "license": license or _only(dataset.licenses),
        "options": asdict(dataset.options),
        **dataset_statistics(dataset),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }

    def fill(temporary: Path) -> None:
        for name, content in contents.items():
            (temporary / name).write_bytes(content)
        (temporary / "dataset.json").write_text(
            json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    write_directory(directory, fill)
    return card


def _only(counts: Counter[str]) -> str:
    return next(iter(counts)) if len(counts) == 1 else "mixed"


def check_leftovers(directory: Path) -> None:
    """Raises TraceError: a secret is still in the files of a data set."""
    secrets = list(leftovers(sorted(directory.glob("*.jsonl"))))
    if secrets:
        more = len(secrets) - SHOWN_LEFTOVERS
        shown = "; ".join(secrets[:SHOWN_LEFTOVERS]) + f" and {more} more" * (more > 0)
        raise TraceError(f"not pushed: secrets still stand in {shown}")


def push_dataset(directory: Path, repository: str) -> str:
    """Upload a data set's directory as a private data set; return its URL. Raises TraceError:
    the hub refuses."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.errors import HTTPError as TransportError

    try:
        api = HfApi()
        url = api.create_repo(repository, repo_type="dataset", private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, repo_type="dataset", folder_path=directory)
    except (HfHubHTTPError, HFValidationError, TransportError, OSError) as error:
        raise TraceError(f"the hub does not take {repository}: {error}") from error
    return str(url)
