"""Labels for a file of traces: by a function, or by a person at the terminal. A label is added,
never replaced.

    mlx_parallm traces label traces.jsonl --rule python:rules.py:solved mlx_parallm traces label
    traces.jsonl --judge http://127.0.0.1:8000/v1 --judge-model M --relative mlx_parallm traces
    label traces.jsonl --auto mlx_parallm traces label traces.jsonl

The file is written whole after each label of a person, so that nothing is lost when the terminal
closes.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mlx_parallm.errors import ConfigError, TraceError
from mlx_parallm.execution.user_code import absolute, is_reference, load_function_of, user_code
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.systems.traces.reading import detect, read_traces, write_lines
from mlx_parallm.systems.traces.session import label_about, prompt_hash
from mlx_parallm.systems.traces.trace import MANUAL, Trace, manual_label
from mlx_parallm.types import MAX_REWARD

ANSWERS = {"g": True, "b": False}
QUESTION = "[g]ood, [b]ad, [s]kip, [q]uit; a note may follow, as in 'b wrong file': "


def read_labelable(path: Path) -> list[Trace]:
    """Raises TraceError: this is not a file of traces, which alone can be rewritten."""
    if path.is_dir() or detect(path) != "atif":
        raise TraceError(
            f"{path} is not a file of traces: `mlx_parallm traces import"
            f" {path} --to traces.jsonl` makes one"
        )
    return list(read_traces(path, source="atif"))


def add_rule_labels(traces: Iterable[Trace], rule: str, name: str) -> tuple[int, int]:
    """Let a function label every trace; return how many it labelled, and how many it left alone
    (None).

    Args:
        rule: "python:file.py:name": takes a `Trace`, returns a number, a bool, or None.

    Raises ConfigError: no such function; it fails, or returns something else.
    """
    if not is_reference(rule):
        raise ConfigError(f'--rule {rule}: expected "python:file.py:name"')
    function = load_function_of(["trace"], absolute(rule, [Path.cwd()]), "--rule")
    labelled = left = 0
    for trace in traces:
        with user_code(f"{rule}, on trace {trace.id}"):
            value = function(trace)
        if value is None:
            left += 1
            continue
        if not isinstance(value, bool | int | float) or not abs(value) <= MAX_REWARD:  # NaN too
            raise ConfigError(
                f"{rule} returned {value!r} for trace {trace.id}: expected a number, a bool or None"
            )
        trace.add_label(label_about(trace, name, float(value), f"rule:{rule.rpartition(':')[2]}"))
        labelled += 1
    return labelled, left


def label_by_hand(
    path: Path,
    traces: list[Trace],
    lines: Iterator[str],
    show: Callable[[Trace], None],
    ask: Callable[[str], None],
    *,
    order: Iterable[Trace] | None = None,
    redactor: Redactor | None = None,
) -> int:
    """Walk a person through the traces without a judgement; return how many they labelled.

    Args:
        order: which to ask about, and in which order; default: all, as they are in the file.
        redactor: hides secrets in notes.
        lines: what is typed.
        show: shows a trace.
        ask: prints a question.
    """
    done = 0
    for trace in traces if order is None else order:
        if any(label.name == MANUAL for label in trace.labels):
            continue
        show(trace)
        while True:
            ask(QUESTION)
            word, _, note = (next(lines, "q").strip() or " ").partition(" ")
            if word == "q":
                return done
            if word == "s":
                break
            if word in ANSWERS:
                text = note.strip() if redactor is None else redactor.text(note.strip())
                label = manual_label(ANSWERS[word], text, at=time.time())
                trace.add_label(
                    label.model_copy(update={"prompt_hash": prompt_hash(trace.messages)})
                )
                write_lines(traces, path)
                done += 1
                break
    return done
