"""AutoLabeler: learns from the labels so far, proposes labels, and knows which runs to ask a person
about.

A logistic regression (scikit-learn) on words, tools and counts of a run, whose probabilities are
calibrated by cross-validation (Platt's sigmoid). A proposal has the name "auto", so that a person's
label always counts more.
"""

import math
from collections.abc import Sequence
from typing import Any

from mlx_parallm.errors import ConfigError
from mlx_parallm.rewards.learned import LEAST_OF_EACH, WORD
from mlx_parallm.system.packages import require
from mlx_parallm.systems.traces.builders import AUTO, score_of
from mlx_parallm.systems.traces.rewards import trajectory_of
from mlx_parallm.systems.traces.session import label_about
from mlx_parallm.systems.traces.trace import Trace

SURE = 0.9
GOOD_FROM = 0.5  # the least score of a good run
FOLDS = 5
TRIES = 1000  # iterations of the fit


class AutoLabeler:
    """A classifier of good and bad runs: learns from `traces` with a score, not from labels named
    "auto".

    Raises ConfigError: fewer than 10 good or 10 bad ones, or scikit-learn is missing.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        labelled = [(trace, score) for trace in traces if (score := judged(trace)) is not None]
        labels = [score >= GOOD_FROM for _, score in labelled]
        self.positive, self.negative = sum(labels), len(labels) - sum(labels)
        if min(self.positive, self.negative) < LEAST_OF_EACH:
            raise ConfigError(
                f"auto-labeler: {self.positive} good and {self.negative} bad labels; it takes"
                f" {LEAST_OF_EACH} of each"
            )
        self.surest = 0.0
        self._model = _classifier().fit([_features(trace) for trace, _ in labelled], labels)

    def probabilities(self, traces: Sequence[Trace]) -> list[float]:
        """Return the calibrated probability that each trace is good."""
        if not traces:
            return []
        rows = self._model.predict_proba(list(map(_features, traces)))
        return [float(good) for _, good in rows]

    def propose(self, traces: Sequence[Trace], sure: float = SURE) -> tuple[int, int]:
        """Label the traces without a judgement of which it is sure; return how many, and how many
        are left.

        `surest` is then the highest probability, of good or bad, that one of them got.
        """
        open_ = [trace for trace in traces if judged(trace) is None]
        labelled, self.surest = 0, 0.0
        for trace, good in zip(open_, self.probabilities(open_), strict=True):
            self.surest = max(self.surest, good, 1 - good)
            if max(good, 1 - good) < sure:
                continue
            by = f"auto:{self.positive}+{self.negative}"
            trace.add_label(label_about(trace, AUTO, good, by))
            labelled += 1
        return labelled, len(open_) - labelled

    def unsure_first(self, traces: Sequence[Trace]) -> list[Trace]:
        """Return the traces without a judgement, those near probability 0.5 first."""
        open_ = [trace for trace in traces if judged(trace) is None]
        pairs = zip(self.probabilities(open_), open_, strict=True)
        return [trace for _, trace in sorted(pairs, key=lambda pair: abs(pair[0] - 0.5))]


def judged(trace: Trace) -> float | None:
    """Return the score of a trace without its automatic labels; None: no other has a value."""
    others = [label.to_json() for label in trace.labels if label.name != AUTO]
    bare = trace.model_copy()
    bare.note(labels=others or None)
    return score_of(bare)


def _classifier() -> Any:
    require("the auto-labeler", "sklearn")
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.feature_extraction import DictVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MaxAbsScaler

    model = make_pipeline(DictVectorizer(), MaxAbsScaler(), LogisticRegression(max_iter=TRIES))
    # One sigmoid for the predictions of all folds together. A sigmoid of each fold's own (ensemble)
    # would see 4 of 20 labels, which Platt's prior pulls to 1/4 and 3/4: it claimed 0.77 where 0.92
    # were right, and left most alone.
    return CalibratedClassifierCV(model, method="sigmoid", cv=FOLDS, ensemble=False)


def _features(trace: Trace) -> dict[str, float]:
    """Name → number: what can be counted, each tool, and the words of the answer and of failed
    calls."""
    seen = trajectory_of(trace)
    calls = seen.tool_calls
    failed = [call for call in calls if not call["ok"]]
    numbers = {
        "calls": math.log1p(len(calls)),
        "failed": math.log1p(len(failed)),
        "steps": math.log1p(seen.step_count),
        "characters": math.log1p(len(seen.text)),
        "last call failed": float(bool(calls) and not calls[-1]["ok"]),
    }
    for call in calls:
        name = f"tool {call['name']}"
        numbers[name] = numbers.get(name, 0.0) + 1.0
    errors = " ".join(str(call["result"]) for call in failed)
    for kind, text in (("answer", seen.text), ("error", errors)):
        numbers |= {f"{kind} {word}": 1.0 for word in WORD.findall(text.lower())}
    return numbers
