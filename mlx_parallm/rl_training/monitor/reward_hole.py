"""The sign of a reward with a hole: full marks for less than the task asks, in ever more answers.
No MLX.

`step/full_marks.py` counts answers that are nothing but a piece of their prompt, and texts that
earn full marks for any prompt. Some tasks have such answers (quote a line; always refuse), so a
count alone says nothing: the sign is that it grew while the run learned. Whether the reward has a
hole is for people, who read the answers.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.rl_training.evaluation.evaluate import SOLVED
from mlx_parallm.rl_training.monitor.evidence import Evidence, Sign, Window
from mlx_parallm.rl_training.step.full_marks import FullMarks, is_piece

CHEAP, FEWEST_FULL = 0.2, 8
"""Share of the full marks, and how many, that a piece of the prompt has earned."""
ONE_TEXT, FEWEST_PROMPTS = 0.8, 8
"""Share of the prompts with full marks, and how many, that one and the same text has earned them
for."""
GREW = 2.0
"""Times the share of the first steps."""
SHORTER = 0.85
"""Share of the first answers' length below which the finding mentions it."""
SHOWN_ANSWERS = 5


@dataclass(frozen=True)
class Reading:
    """An answer that earned full marks in the newest evaluation. `piece`: it is nothing but a
    piece of its prompt."""

    environment: str
    prompt: str
    answer: str
    piece: bool


def reward_hole(evidence: Evidence) -> Sign | None:
    """Judge each environment of the newest step."""
    for name in evidence.window[-1].get("full_marks") or {}:
        then, now = _counts(evidence.start or evidence.window, name), _counts(evidence.window, name)
        if signs := _signs(then, now):
            lengths = (
                evidence.first("completion_tokens_mean") or 0.0,
                evidence.mean("completion_tokens_mean") or 0.0,
            )
            if lengths[1] < SHORTER * lengths[0]:
                signs.append(f"answers went from {lengths[0]:.1f} to {lengths[1]:.1f} tokens")
            numbers = {
                "pieces_first": then.pieces / max(1, then.answers),
                "pieces": now.pieces / max(1, now.answers),
            }
            numbers |= {"full_marks": now.full, "full_marks_pieces": now.full_pieces}
            return Sign(
                f"reward hole in {name}: {'; '.join(signs)}",
                numbers | evidence.means("reward_mean"),
            )
    return None


def _signs(then: FullMarks, now: FullMarks) -> list[str]:
    pieces = _grew((then.pieces, then.answers), (now.pieces, now.answers))
    same = _grew((then.prompts_alike, then.prompts), (now.prompts_alike, now.prompts))
    signs = []
    if pieces and now.full_pieces >= max(FEWEST_FULL, CHEAP * now.full):
        signs.append(
            f"{now.full_pieces} of {now.full} answers with full marks are"
            " nothing but a piece of their prompt"
        )
    if same and now.prompts >= FEWEST_PROMPTS and now.prompts_alike >= ONE_TEXT * now.prompts:
        signs.append(
            f"one text earned the full marks of {now.prompts_alike} of {now.prompts} prompts"
        )
    return signs


def _counts(lines: Window, environment: str) -> FullMarks:
    each = ((line.get("full_marks") or {}).get(environment) or {} for line in lines)
    return sum((FullMarks(**counts) for counts in each), FullMarks())


def _grew(then: tuple[int, int], now: tuple[int, int]) -> bool:
    """Whether a share (of, all) is at least `GREW` times its former value."""
    return now[0] / max(1, now[1]) >= GREW * then[0] / max(1, then[1]) and now[0] > then[0]


def full_marks_to_read(evaluations: Sequence[Mapping[str, Any]]) -> tuple[Reading, ...]:
    """Return some answers of the newest evaluation that earned full marks, those first that are
    pieces of their prompt.

    Words are compared without case and punctuation."""
    readings = []
    for name, part in (evaluations[-1]["environments"] if evaluations else {}).items():
        for example in part.get("examples", ()):
            if example["reward"] >= SOLVED:
                piece = is_piece(_words(example["text"]), _words(example["prompt"]))
                readings.append(Reading(name, example["prompt"], example["text"], piece))
    # the same answer counts once
    once = dict.fromkeys(sorted(readings, key=lambda each: not each.piece))
    return tuple(once)[:SHOWN_ANSWERS]


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))
