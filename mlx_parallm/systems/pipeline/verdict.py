"""The verdict on a policy: whether its held-out answers are better than the base's.

Nothing is its own examiner. What was trained on a reward that was learned, on a reward model or on
a judge is judged by the traces' own good answers; and whoever judges, by answers that differ from
prompt to prompt, on enough prompts to tell.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.environments.dataset_rows import prompt_key as rows_key
from mlx_parallm.rl_training.evaluation.examiner import one_answer
from mlx_parallm.rl_training.evaluation.pass_at_k_and_intervals import (
    FEWEST,
    Difference,
    difference,
    finite_or_none,
    gain_is_sure,
)
from mlx_parallm.rl_training.monitor.row_signs import is_lost
from mlx_parallm.run_files.samples import SAMPLES_FILE
from mlx_parallm.systems.pipeline.references import COLUMN, References, agrees
from mlx_parallm.systems.pipeline.work import Json
from mlx_parallm.types import BETWEEN

Verdict = Literal["better", "not better", "worse", "cannot tell"]
MOST_STRANGERS = 0.3
"""How much larger the share of answers that are like none that the reward was fitted on may be
than that of the good answers."""
LEAST_OWN = 0.02
"""By how much answers agree more with the references of their own prompt than with others'."""
MEASURE = {"kto": "auc", "dpo": "rewards/accuracies", "sft": "loss"}
"""What is measured on held-out rows."""
LEAST_FALL = 0.01
"""Share of the loss before training by which it has to change on held-out rows."""
OTHERS = 20  # prompts whose references an answer is compared with

IsKnown = Callable[[str], bool]
Pair = tuple[float | None, float | None]
"""A number before and after; None: there is none."""


@dataclass(frozen=True)
class HeldOutAnswer:
    """The answers to one held-out prompt, before and after. Rewards and agreements: None where
    there is none."""

    prompt: str
    before: str
    after: str
    rewards: Pair
    agreements: Pair = (None, None)
    references: References = field(default_factory=list)


def verdict_on(
    answers: Sequence[HeldOutAnswer], *, own_examiner: bool, is_known: IsKnown | None = None
) -> Json:
    """Return the verdict with its reasons and numbers, as JSON.

    Args:
        own_examiner: the policy was trained on the reward that scored the answers, and that is no
            rule: the good answers of the traces judge.
        is_known: whether a text is like those that the reward was fitted on.
    """
    rewards = _both(each.rewards for each in answers)
    result: Json = {}
    judged = [each.agreements if own_examiner else each.rewards for each in answers]
    values = _both(judged)
    if own_examiner:
        result["what"] = (
            "agreement of greedy answers to held-out prompts with the traces' good ones"
        )
        if rewards[0]:
            result["reward"] = {"before": _mean(rewards[0]), "after": _mean(rewards[1])}
    else:
        result["what"] = "reward of greedy answers to held-out prompts"
    if not values[0]:
        why = "no held-out prompt has a good answer to compare with" if own_examiner else "no score"
        empty: Json = {"before": None, "after": None, "problems": 0, "enough": False}
        return result | empty | _outcome("cannot tell", [why])
    change = difference(*values)
    result |= {
        "before": _mean(values[0]),
        "after": _mean(values[1]),
        "low": change.low,
        "high": change.high,
        "p": change.p,
        "enough": change.enough,
        "problems": change.problems,
    }
    verdict, reasons = _of_change(change)
    if verdict in ("better", "worse") and not gain_is_sure(
        judged if verdict == "better" else [pair[::-1] for pair in judged]
    ):
        verdict, reasons = "cannot tell", [_unscored(judged)]
    if verdict == "better" and (against := list(_against(answers, is_known))):
        verdict, reasons = "not better", against
    return result | _outcome(verdict, reasons)


def verdict_on_rows(
    what: str,
    before: float | None,
    after: float | None,
    rows: int,
    *,
    lower_is_better: bool = False,
    losses: Pair | None = None,
    chosen: Pair | None = None,
) -> Json:
    """Return the verdict by a measure of held-out rows; None: it is not there.

    Args:
        lower_is_better: the measure is a loss; else a share of the rows, or of pairs of them.
        losses: before and after. A share is 1 where every pair is apart by a rounding.
        chosen: log-probability of the good answers before and after. They can be told from the bad
            ones by a model that says nothing any more, so the share alone proves nothing.
    """
    before, after = finite_or_none(before), finite_or_none(after)
    result: Json = {"what": what, "before": before, "after": after, "problems": rows}
    if before is None or after is None:
        why = "it is not a finite number" if rows else "no row is held out"
        return result | _outcome("cannot tell", [why])
    loss, logps = _known(losses), _known(chosen)
    if (losses and loss is None) or (chosen and logps is None):
        why = "the loss or the good answers' log-probability is not a finite number"
        return result | _outcome("cannot tell", [why])
    if rows < FEWEST:
        few = (
            f"{rows} held-out rows are too few to tell a difference from chance: at least {FEWEST}"
        )
        return result | _outcome("cannot tell", [few])
    if loss and abs(loss[1] - loss[0]) < LEAST_FALL * abs(loss[0]):
        same = f"their loss is what it was, {loss[0]:.4g} → {loss[1]:.4g}"
        return result | _outcome("not better", [same])
    if logps and is_lost(*logps):
        lost = (
            f"the good answers' log-probability went from {logps[0]:.3g} to {logps[1]:.3g}: the"
            " model gives them no more"
        )
        return result | _outcome("not better", [lost])
    if lower_is_better:
        may_be_chance = abs(after - before) <= LEAST_FALL * abs(before)
    else:
        may_be_chance = _differ_by_chance(before, after, rows)
    if may_be_chance:
        return result | _outcome("not better", ["the difference may be chance"])
    return result | _outcome("better" if (after < before) == lower_is_better else "worse", [])


def _known(pair: Pair | None) -> tuple[float, float] | None:
    """Return the two numbers of a pair; None: one of them is missing."""
    before, after = map(finite_or_none, pair or (None, None))
    return None if before is None or after is None else (before, after)


def _differ_by_chance(before: float, after: float, rows: int) -> bool:
    """Whether two shares of as many rows are within what 95 of 100 cases of chance hold.

    One row more on either side, in both shares (Agresti and Caffo 2000): of few rows, a share of 1
    would have no spread. Worked: 3 and 6 of 6 are 0.5 and 0.875, of which chance holds 0.415.
    """
    one, other = ((share * rows + 1) / (rows + 2) for share in (before, after))
    spread = math.sqrt((one * (1 - one) + other * (1 - other)) / (rows + 2))
    return abs(other - one) <= 1.96 * spread


def verdict_on_lines(method: str, lines: Sequence[Mapping[str, Any]], rows: int) -> Json:
    """Return the verdict on a training of `method` from its metrics lines: its measure of `rows`
    held-out rows, before the first step and after the last."""
    name = MEASURE[method]
    if (measure := _held_out(lines, name)) is None:
        return verdict_on_rows("nothing: no row is held out", None, None, 0)
    return verdict_on_rows(
        f"{name} of held-out rows",
        *measure,
        rows,
        lower_is_better=name == "loss",
        losses=_held_out(lines, "loss"),
        chosen=_held_out(lines, "logps/chosen"),
    )


def _held_out(lines: Sequence[Mapping[str, Any]], name: str) -> Pair | None:
    """Return a number of the held-out rows before the first step and after the last; None: one of
    them is missing."""
    before = [line[key] for line in lines if (key := f"eval_before/{name}") in line]
    after = [line[key] for line in lines if (key := f"eval/{name}") in line]
    return (before[0], after[-1]) if before and after else None


def pair_answers(problems: Sequence[Json], before: Path, after: Path) -> list[HeldOutAnswer]:
    """Return the answers of two evaluations' directories to the problems that both have
    answered."""
    earlier, later = _by_key(before), _by_key(after)
    paired = []
    for row in problems:
        key = rows_key(row["prompt"])
        if key in earlier and key in later:
            both = earlier[key], later[key]
            scores = [each["scores"].get("rewards/agreement") for each in both]
            rewards = [None if each["error"] else each["reward"] for each in both]
            texts = [each["completion"].rpartition(BETWEEN[-1] + "\n")[2] for each in both]
            paired.append(
                HeldOutAnswer(
                    both[1]["prompt"],
                    texts[0],
                    texts[1],
                    (rewards[0], rewards[1]),
                    (scores[0], scores[1]),
                    row.get(COLUMN) or [],
                )
            )
    return paired


def _by_key(answers: Path) -> dict[str, Json]:
    lines = read_lines(answers / SAMPLES_FILE)
    return {line["key"].rpartition(":")[2]: line for line in lines if line["which"] == "greedy"}


def read_lines(file: Path) -> list[Json]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def count_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def in_words(result: Mapping[str, object]) -> str:
    """Return a verdict in a line: the numbers, what they mean, and why."""
    reasons = result.get("reasons")
    why = f" ({'; '.join(reasons)})" if isinstance(reasons, list) and reasons else ""
    numbers = ""
    if isinstance(result.get("before"), float) and isinstance(result.get("after"), float):
        numbers = f" {result['before']:.3f} → {result['after']:.3f}"
    problems = f" on {result['problems']} prompts" if result.get("problems") else ""
    return f"{result['what']}:{numbers}{problems}: {result.get('verdict', '')}{why}"


def _outcome(verdict: Verdict, reasons: list[str]) -> Json:
    return {
        "verdict": verdict,
        "better": verdict == "better",
        "worse": verdict == "worse",
        "reasons": reasons,
    }


def _of_change(change: Difference) -> tuple[Verdict, list[str]]:
    if not change.enough:
        return "cannot tell", [
            f"{change.problems} held-out prompts are too few to tell a difference from chance: at"
            f" least {FEWEST}"
        ]
    if change.significant:
        return ("better" if change.mean > 0 else "worse"), []
    return "not better", ["the difference may be chance"]


def _against(answers: Sequence[HeldOutAnswer], is_known: IsKnown | None) -> list[str]:
    """Return what speaks against answers whose number is higher."""
    reasons = []
    after = [each.after for each in answers]
    wanted = [
        str(each.references[0]) if each.references else each.prompt + str(n)
        for n, each in enumerate(answers)
    ]
    if (same := one_answer(after)) is not None and one_answer(wanted) is None:
        reasons.append(f"{same[1]} of {len(after)} prompts get one answer: {same[0][:40]!r}")
    if (blind := _blind(answers)) is not None:
        reasons.append(blind)
    if is_known is not None:
        good = [text for each in answers for text in each.references if isinstance(text, str)]
        strange = sum(not is_known(text) for text in after) / len(after)
        usual = sum(not is_known(text) for text in good) / len(good) if good else 0.0
        if strange > usual + MOST_STRANGERS:
            reasons.append(
                f"{strange:.0%} of the answers are like none that the reward was fitted on"
                f" ({usual:.0%} of the good ones)"
            )
    return reasons


def _blind(answers: Sequence[HeldOutAnswer]) -> str | None:
    """Say that answers agree with the references of other prompts as well as with their own: they
    do not depend on the prompt. None: they do, or the references are the same for all."""
    texts = [
        (each.after, [text for text in each.references if isinstance(text, str)])
        for each in answers
    ]
    texts = [(answer, references) for answer, references in texts if references]
    if len({tuple(references) for _, references in texts}) < 2:
        return None
    same, others = [], []
    for place, (answer, references) in enumerate(texts):
        rest = [wanted for n, (_, wanted) in enumerate(texts) if n != place][:OTHERS]
        same.append(agrees(answer, [*references]))
        others.append(_mean([agrees(answer, [*wanted]) for wanted in rest]))
    change = difference(others, same)
    if change.mean >= LEAST_OWN and change.significant:
        return None
    return (
        f"the answers agree with the good answers to other prompts ({_mean(others):.2f}) about as"
        f" well as with those to their own ({_mean(same):.2f})"
    )


def _both(
    pairs: Iterable[Pair],
) -> tuple[list[float], list[float]]:
    """Return the values before and after of those that have both."""
    whole = [numbers for pair in pairs if (numbers := _known(pair)) is not None]
    return [before for before, _ in whole], [after for _, after in whole]


def _unscored(pairs: Sequence[Pair]) -> str:
    """Say how many prompts have a score on one side alone."""
    once = sum((finite_or_none(a) is None) != (finite_or_none(b) is None) for a, b in pairs)
    return (
        f"{once} of {len(pairs)} prompts have a score before or after alone: with theirs the"
        " difference may be none"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
