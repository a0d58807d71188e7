"""EvaluationsView: evaluations.jsonl as values for the page: numbers, and the same problems in
two evaluations."""

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher
from threading import Lock
from typing import Any

from mlx_parallm.errors import RequestError
from mlx_parallm.rl_training.evaluation.comparison import reward_of
from mlx_parallm.runs.dashboard.bounded import cut, sendable
from mlx_parallm.runs.run import Run
from mlx_parallm.system.redaction import Redactor

MOST_PROBLEMS, MOST_EVALUATIONS = 1000, 200
MOST_KEPT = 8
"""Answers that are kept for the next tab."""
LONGEST_DIFF = 4000
"""Characters of a text that is compared word by word."""


class EvaluationsView:
    """The evaluations of one run. Any thread; each call may read the file."""

    def __init__(self, run: Run, redactor: Redactor) -> None:
        self._run, self._redactor = run, redactor
        self._lock = Lock()
        self._kept: dict[tuple[Any, ...], Any] = {}  # for one version of the file

    def _once(self, name: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return what `make` returned for these evaluations: every tab asks for the same, and
        word diffs take long."""
        version = self._run.version("evaluations")
        with self._lock:
            for old in [key for key in self._kept if key[0] != version] or list(self._kept)[
                :-MOST_KEPT
            ]:
                del self._kept[old]
            if (version, *name) not in self._kept:
                self._kept[version, *name] = make()
            return self._kept[version, *name]

    def all(self) -> list[dict[str, Any]]:
        """Return each evaluation's numbers, with the ends of their intervals."""
        return self._once(("all",), self._all)

    def _all(self) -> list[dict[str, Any]]:
        return [
            {key: line.get(key) for key in ("step", "version", "score")}
            | {
                "environments": {
                    name: part["numbers"] for name, part in line["environments"].items()
                }
            }
            for line in self._run.fresh().evaluations
        ]

    def heldout(self, before: int, after: int) -> dict[str, Any]:
        """Compare two evaluations, by their places in the list; negative ones count from the end.

        `problems`: [key, reward before, reward after] of each; `examples`: those whose answers were
        kept, with their rewards over all evaluations and a diff by words. Raises RequestError: no
        such evaluation.
        """
        return self._once((before, after), lambda: self._heldout(before, after))

    def _heldout(self, before: int, after: int) -> dict[str, Any]:
        lines = self._run.fresh().evaluations
        if not lines:
            return {"evaluations": [], "environments": {}}
        chosen = []
        for name, place in (("before", before), ("after", after)):
            if not -len(lines) <= place < len(lines):
                raise RequestError(
                    f"there are {len(lines)} evaluations, no number {place}", param=name
                )
            chosen.append(lines[place])
        shown = {
            "evaluations": [{key: line[key] for key in ("step", "version")} for line in lines],
            "environments": {
                name: _compared(name, lines, chosen)
                for name in chosen[1]["environments"]
                if name in chosen[0]["environments"]
            },
        }
        return sendable(self._redactor.value(shown))


def _compared(
    name: str, lines: Sequence[Mapping[str, Any]], chosen: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Compare one environment between two evaluations."""
    before, after = (line["environments"][name] for line in chosen)
    earlier = {problem["key"]: reward_of(problem) for problem in before["problems"]}
    texts = {example["key"]: example for example in before["examples"]}
    over_time = [
        {
            problem["key"]: reward_of(problem)
            for problem in line["environments"].get(name, {"problems": []})["problems"]
        }
        for line in lines[-MOST_EVALUATIONS:]
    ]
    examples = []
    for example in after["examples"]:
        key = example["key"]
        was, now = (
            cut((side.get(key) or {}).get("text"), LONGEST_DIFF) for side in (texts, {key: example})
        )
        examples.append(
            {
                "key": key,
                "prompt": cut(example["prompt"], LONGEST_DIFF),
                "expected": cut(example["expected"], LONGEST_DIFF),
                "rewards": [rewards.get(key) for rewards in over_time],
                "before": (texts.get(key) or {}).get("reward"),
                "after": example["reward"],
                "diff": None if was is None or now is None else word_diff(was, now),
            }
        )
    problems = [
        [problem["key"], earlier[problem["key"]], reward_of(problem)]
        for problem in after["problems"]
        if problem["key"] in earlier
    ]
    return {"problems": problems[:MOST_PROBLEMS], "examples": examples}


def word_diff(before: str, after: str) -> list[tuple[str, str]]:
    """Return parts of both texts in order: ("same" | "gone" | "new", text), by words, spaces and
    signs."""
    was, now = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (before, after))
    parts = list[tuple[str, str]]()
    for kind, a, b, c, d in SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        if kind == "equal":
            parts.append(("same", "".join(was[a:b])))
            continue
        parts += [
            (name, "".join(words))
            for name, words in (("gone", was[a:b]), ("new", now[c:d]))
            if words
        ]
    return parts
