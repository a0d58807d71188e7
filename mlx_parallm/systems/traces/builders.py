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
from mlx_parallm.systems.traces.schema import Json, dump_line, without
from mlx_parallm.systems.traces.session import next_key, prompt_hash
from mlx_parallm.systems.traces.trace import MANUAL, Trace

Kind = Literal["sft", "preference", "kto", "grpo", "prompts", "atif"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Order = Literal["recorded", "easy_first", "hard_first"]
ORDERS: tuple[Order, ...] = get_args(Order)
FEEDBACK = "feedback"
AUTO = "auto"  # of the classifier: anybody else's label counts more
PERMUTATIONS = 128  # of MinHash: its estimate of similarity is off by 0.09 at most
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
class _Row:
    data: Json
    side: str  # decides train or test: the opening of its session
    good: bool = True
    traces: int = 1  # that are in it


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
    usable = []
    for trace in _with_subagents(list(traces)):
        dataset.traces += 1
        chat = _usable(trace, options)
        if isinstance(chat, str):
            dataset.left_out[chat] += 1
        else:
            usable.append(trace)
            dataset.fields += chat.notes
            dataset.answers += chat.not_learned
    rows = list(_BUILDERS[options.kind](usable, dataset))
    if options.kind != "atif":
        rows = [replace(row, data=whole_characters(row.data, dataset.fields)) for row in rows]
    rows = _by_pass_rate(_different(rows, dataset), usable, options)
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
    for trace in usable:
        dataset.sources[str(trace.get("source", "unknown"))] += 1
        dataset.licenses[str(trace.get("license", "unknown"))] += 1
    for row in rows:
        digest = hashlib.sha256(row.side.encode(errors="surrogatepass")).digest()
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
    """Return a key that is equal for two traces that `is_usable`, or rows of any kind, when their
    messages before the first sampled answer are equal."""
    if not isinstance(of, dict):
        before = _parts(of)[0]
    elif "prompt" in of:
        before = of["prompt"]
    else:
        before = divided(of["messages"])[0]
    return json.dumps(before, sort_keys=True)


def _by_pass_rate(rows: list[_Row], traces: Sequence[Trace], options: DatasetOptions) -> list[_Row]:
    """Write the pass rate into rows of prompts, and put all rows into the order that is wanted."""
    if options.kind == "atif":
        return rows
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for trace in traces:
        if (score := score_of(trace)) is not None:
            verdicts[prompt_key(trace)].append(score >= options.good_from)
    rates = {key: statistics.fmean(passed) for key, passed in verdicts.items()}
    measured = [(row, rates.get(prompt_key(row.data))) for row in rows]
    if options.kind in ("prompts", "grpo"):
        for row, rate in measured:
            if rate is not None:
                row.data[PASS_RATE] = rate
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
    keys = set(map(prompt_key, held_out))
    is_like = _like(list(held_out), dataset.options.near_duplicates)
    rows, dataset.train = dataset.train, []
    for row in rows:
        if (key := prompt_key(row)) not in keys and not is_like(key):
            dataset.train.append(row)
    _count(dataset, "its prompt, or one like it, is held out", len(rows) - len(dataset.train))
    return dataset


def _like(rows: Sequence[Json], threshold: float) -> Callable[[str], bool]:
    """A function that says whether a `prompt_key` is nearly equal to one of the rows'."""
    if threshold >= 1:
        return lambda key: False
    index = _minhash_index(threshold)
    for number, row in enumerate(rows):
        index(f"{number}", _shingles(_text_of_row(json.loads(prompt_key(row)))), True)

    def is_like(key: str) -> bool:
        text = _text_of_row(json.loads(key))
        return len(text.split()) > SHINGLE and index(None, _shingles(text), True)

    return is_like


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


def _parts(trace: Trace) -> tuple[list[Json], list[Json]]:
    """The messages before the first answer that is learned, and those from it to the last one."""
    return (chat := row_chat(trace)).before, chat.answered


def _tools(trace: Trace) -> Json:
    return {"tools": json.dumps(trace.tools, ensure_ascii=False)} if trace.tools else {}


def _side(trace: Trace) -> str:
    """The same for all traces of one opening, so for all of a session's that continue from it."""
    return str(trace.get("group_id") or prompt_hash(trace.messages))


def _sides(traces: Sequence[Trace]) -> Callable[[Trace], str]:
    """A session whose traces begin differently (after a compaction) is on one side: that of its
    first trace."""
    first: dict[str, str] = {}
    for trace in traces:
        first.setdefault(str(trace.session_id or trace.id), _side(trace))
    return lambda trace: first[str(trace.session_id or trace.id)]


def _sft(traces: Sequence[Trace], dataset: Dataset) -> Iterator[_Row]:
    side, once = _sides(traces), _LearnedOnce(dataset)
    for trace in traces:
        score = score_of(trace)
        if score is not None and score < dataset.options.good_from:
            dataset.left_out[f"a score below {dataset.options.good_from:g}"] += 1
            continue
        parts = once.parts(trace)
        if parts is None:
            continue
        before, answered = parts
        if not before:
            dataset.left_out["it begins with an answer: there is no prompt"] += 1
            continue
        yield _Row({"messages": before + answered, **_tools(trace)}, side(trace))


def _kto(traces: Sequence[Trace], dataset: Dataset) -> Iterator[_Row]:
    side, once = _sides(traces), _LearnedOnce(dataset)
    for trace in _scored(traces, dataset):
        good = (score_of(trace) or 0.0) >= dataset.options.good_from
        if (parts := once.parts(trace, good)) is not None:
            row = {"prompt": parts[0], "completion": parts[1], "label": good}
            yield _Row(row | _tools(trace), side(trace), good)


LEARNED_BEFORE = "each of its answers is learned in an earlier row"
LOGS = ("openai-chat", "claude-code", "codex", "otlp")
"""Sources whose sessions repeat others: resumed, forked, or logged again as they grow. Sessions of
other sources are their own samples, and two may begin with equal answers."""


class _LearnedOnce:
    """Finds answers that an earlier row of the data set learns, after the same messages."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._learned: set[tuple[str, bool, str]] = set()

    def parts(self, trace: Trace, good: bool = True) -> tuple[list[Json], list[Json]] | None:
        """Return a trace's messages before its first answer that is still to be learned, and
        those from it on; None, which is counted, if there is none."""
        before, answered = _parts(trace)
        messages, scope, chain, repeated = before + answered, _scope(trace), "", 0
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
            return before, answered
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


def _scored(traces: Sequence[Trace], dataset: Dataset) -> Iterator[Trace]:
    for trace in traces:
        before, _ = _parts(trace)
        if score_of(trace) is None:
            dataset.left_out["no label and no reward"] += 1
        elif not before or before[-1]["role"] == "assistant":
            dataset.left_out["there is no prompt before its first answer"] += 1
        else:
            yield trace


def _groups(traces: Sequence[Trace], dataset: Dataset) -> Iterator[list[Trace]]:
    """Scored traces with the same messages before the first answer; of equal answers one."""
    groups: dict[str, list[Trace]] = defaultdict(list)
    for trace in _scored(traces, dataset):
        before, _ = _parts(trace)
        groups[json.dumps([before, trace.tools], sort_keys=True)].append(trace)
    for group in groups.values():
        answers = {json.dumps(_parts(trace)[1]): trace for trace in group}
        if len(answers) < 2:
            dataset.left_out["the only answer to its prompt"] += len(group)
            continue
        again = len(group) - len(answers)
        _count(dataset, "an answer to its prompt that is there already", again)
        yield list(answers.values())


def _preference(traces: Sequence[Trace], dataset: Dataset) -> Iterator[_Row]:
    side = _sides(traces)
    for group in _groups(traces, dataset):
        ranked = sorted(group, key=lambda trace: score_of(trace) or 0.0)
        worst, best = ranked[0], ranked[-1]
        least_gap = dataset.options.least_gap
        if (score_of(best) or 0.0) - (score_of(worst) or 0.0) < least_gap:
            dataset.left_out[f"scores of one prompt closer than {least_gap:g}"] += len(group)
            continue
        prompt, chosen = _parts(best)
        row = {"prompt": prompt, "chosen": chosen, "rejected": _parts(worst)[1], **_tools(best)}
        _count(dataset, "neither the best nor the worst of its prompt", len(group) - 2)
        yield _Row(row, side(best), traces=2)


def _grpo(traces: Sequence[Trace], dataset: Dataset) -> Iterator[_Row]:
    side = _sides(traces)
    for group in _groups(traces, dataset):
        prompt, _ = _parts(group[0])
        row: Json = {"prompt": prompt, "completions": [_parts(trace)[1] for trace in group]}
        row |= {"rewards": list(map(score_of, group)), **_tools(group[0])}
        yield _Row(row, side(group[0]), traces=len(group))


def _prompts(traces: Sequence[Trace], dataset: Dataset) -> Iterator[_Row]:
    side, seen = _sides(traces), set[str]()
    for trace in traces:
        before, _ = _parts(trace)
        key = json.dumps(before, sort_keys=True)
        if not before or key in seen:
            reason = "a prompt that is there already" if before else "it begins with an answer"
            dataset.left_out[reason] += 1
            continue
        seen.add(key)
        columns = without(trace.get("columns", {}), "prompt", "tools", PASS_RATE)
        yield _Row({**columns, "prompt": before, **_tools(trace)}, side(trace))


def _atif(traces: Sequence[Trace], dataset: Dataset) -> Iterator[_Row]:
    side = _sides(traces)
    for trace in traces:
        yield _Row(trace.to_json(), side(trace))


_BUILDERS: dict[str, Callable[[Sequence[Trace], Dataset], Iterator[_Row]]] = {
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
    if dataset.options.kind == "atif":
        return list(rows)
    threshold, seen, kept = dataset.options.near_duplicates, set[bytes](), list[_Row]()
    index = _minhash_index(threshold) if threshold < 1 else None
    for number, row in enumerate(rows):
        line = dump_line(row.data)
        if line in seen:
            dataset.left_out["an equal row is there"] += row.traces
            continue
        seen.add(line)
        if index is not None:
            text = _text_of_row(row.data)
            # A short text has few shingles, so one other word makes it a different one.
            if len(text.split()) > SHINGLE and index(f"{number}", _shingles(text), row.good):
                dataset.left_out[f"a row like it (similarity {threshold:g}) is there"] += row.traces
                continue
        kept.append(row)
    return kept


def _shingles(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1))}


def _minhash_index(threshold: float) -> Callable[[str | None, set[str], bool], bool]:
    """A function that says whether such a text is there, and adds it under its name, if it has
    one, where it is not. Raises ConfigError."""
    require("near_duplicates below 1", "datasketch")
    from datasketch import MinHash, MinHashLSH

    indices = [MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS) for _ in range(2)]
    hashes: dict[str, Any] = {}

    def is_there(name: str | None, shingles: set[str], good: bool) -> bool:
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
