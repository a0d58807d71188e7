"""Samples of the policy for people to read: first, best and worst completion of a step. No MLX.

`samples.jsonl` in the run directory has one line for each; `samples.html` shows the last steps in a
browser, one file without scripts, everything escaped. The terminal and trackers show the same.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from mlx_parallm.errors import CheckpointError
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.system.files import write_atomically
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import BETWEEN, Rollout, RolloutGroup

log = get_logger("train")

SAMPLES_FILE = "samples.jsonl"
SAMPLES_PAGE = "samples.html"
STEPS_ON_PAGE = 50
# keys that older lines lack
OLD_DEFAULTS: dict[str, Any] = {"version": None, "scores": {}, "turns": 1}
LONGEST_NOTE = 400  # characters of what a reward has noted about an answer, on the page
LONGEST_TEXT = 8_000  # characters of a prompt or a completion on the page; samples.jsonl has all

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #1b2733 }
h1 { font-size: 1.3rem } h2 { font-size: 1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #cfd8e0 }
article { display: grid; grid-template-columns: 11rem 1fr 1fr; gap: 1rem; padding: .6rem 0;
  border-bottom: 1px solid #eef }
article > p { margin: 0; overflow-wrap: anywhere } b { font-size: 1.1rem } small { color: #5b6b7a; display: block }
pre { margin: 0; padding: .5rem; background: #f5f7f9; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem;
  overflow-y: auto }
@media (max-width: 50rem) { article { grid-template-columns: 1fr } }
@media (prefers-color-scheme: dark) { body { background: #14191e; color: #d8e0e8 } pre { background: #1e252c }
  article, h2 { border-color: #2c3640 } small { color: #93a3b3 } }
"""

Decode = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""The parts of one sequence → the text of each in its place."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer on a page. Neighbours with the same `heading` form a section."""

    heading: str
    label: str  # "best", "greedy", …
    reward: float | None  # None: nothing scored it
    notes: tuple[str, ...]  # environment, stop reason, error …
    prompt: str
    completion: str
    scores: Mapping[str, float] = field(default_factory=dict)  # parts of the reward


@dataclass(frozen=True, slots=True)
class Sample:
    """`completion`: everything after the prompt, with an environment's texts between two turns
    in ⟦ ⟧."""

    step: int
    which: Literal["first", "best", "worst"]
    environment: str
    group_id: str
    reward: float | None  # None: nothing scored it
    stop_reason: str | None
    tokens: int  # sampled
    turns: int
    version: int | None  # newest policy version that sampled a token
    scores: Mapping[str, float]  # parts of the reward
    prompt: str
    completion: str
    # what rewards have noted about it, by column: a judge's reason
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def shown(self) -> Shown:
        version = "version ?" if self.version is None else f"version {self.version}"
        turns = f" in {self.turns} turns" if self.turns > 1 else ""
        ended = f"{self.tokens} tokens{turns}, ended by {self.stop_reason or '?'}"
        noted = [f"{column}: {_note(value)}" for column, value in self.extra.items()]
        notes = (self.environment, version, ended, self.group_id, *noted)
        return Shown(
            f"step {self.step}",
            self.which,
            self.reward,
            notes,
            self.prompt,
            self.completion,
            self.scores,
        )


class SampleLog:
    """Writes the samples of every `every`-th step (0 = never), on the trainer's thread.

    Args:
        path: samples.jsonl; samples.html is written beside it.
        step: the one that a resumed run continues from; lines of later steps are removed.
    """

    def __init__(self, path: Path, decode: Decode, *, every: int, step: int = 0) -> None:
        self._file, self._decode, self._every = MetricsFile(path), decode, every
        self._page = path.with_name(SAMPLES_PAGE)
        self._shown = deque(self._earlier(step), maxlen=3 * STEPS_ON_PAGE)

    def _earlier(self, step: int) -> list[Sample]:
        """Cut the file to `step` steps; return the samples that the page shows of them. A damaged
        file is set aside: a run continues without it."""
        try:
            self._file.cut(step)
            old = self._file.last(3 * STEPS_ON_PAGE) if self._every else []
            return [Sample(**(OLD_DEFAULTS | line)) for line in old]
        except (CheckpointError, TypeError) as error:
            log.warning("samples of earlier steps are set aside", reason=str(error))
            self._file.path.replace(self._file.path.with_suffix(".damaged"))
            return []

    def write(self, step: int, groups: Sequence[RolloutGroup]) -> list[Sample]:
        """Write and return the samples of this step; empty if none are due. Raises
        CheckpointError: a full disk."""
        if not self._every or step % self._every:
            return []
        samples = choose_samples(step, groups, self._decode)
        for sample in samples:
            self._file.append(sample.to_json())
        if samples:
            self._write_page(samples)
        return samples

    def _write_page(self, samples: Sequence[Sample]) -> None:
        """Replace the page, newest step first."""
        self._shown.extend(samples)
        newest = sorted(self._shown, key=lambda sample: -sample.step)
        note = (
            f"First, best and worst answer of every {self._every} steps; the"
            f" last {STEPS_ON_PAGE} of them."
        )
        write_page(
            self._page, self._page.parent.name, [sample.shown() for sample in newest], note=note
        )


def choose_samples(step: int, groups: Sequence[RolloutGroup], decode: Decode) -> list[Sample]:
    """Return a batch's first rollout, the one with the highest reward and the one with the
    lowest; if several have it, one that is not the first rollout."""
    pairs = [(group, rollout) for group in groups for rollout in group.rollouts]
    if not pairs:
        return []

    def reward(pair: tuple[RolloutGroup, Rollout]) -> float:
        return pair[1].reward

    others = [pair for pair in (*pairs[1:], pairs[0]) if pair[1].is_scored]
    chosen: list[tuple[Literal["first", "best", "worst"], tuple[RolloutGroup, Rollout]]]
    chosen = [("first", pairs[0])]
    if others:
        chosen += [("best", max(others, key=reward)), ("worst", min(others, key=reward))]
    return [_sample(step, which, group, rollout, decode) for which, (group, rollout) in chosen]


def merged(samples: Sequence[Sample]) -> list[tuple[str, Sample]]:
    """Return each answer to a problem once, with all its names: ("first, best", sample)."""
    by_answer: dict[tuple[str, str, float | None], tuple[list[str], Sample]] = {}
    for sample in samples:
        which, _ = by_answer.setdefault(
            (sample.group_id, sample.completion, sample.reward), ([], sample)
        )
        which.append(sample.which)
    return [(", ".join(which), sample) for which, sample in by_answer.values()]


def number_of(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:.3g}"


def _sample(
    step: int,
    which: Literal["first", "best", "worst"],
    group: RolloutGroup,
    rollout: Rollout,
    decode: Decode,
) -> Sample:
    sampled = [
        version
        for segment in rollout.segments
        for version, mask in zip(segment.policy_versions, segment.mask, strict=True)
        if mask and version >= 0
    ]
    begins = rollout.mask.index(1) if 1 in rollout.mask else len(rollout.tokens)
    after = groupby(
        zip(rollout.tokens[begins:], rollout.mask[begins:], strict=True), key=itemgetter(1)
    )
    parts = [(on, [token for token, _ in part]) for on, part in after]
    prompt, *texts = decode([rollout.tokens[:begins], *(tokens for _, tokens in parts)])
    return Sample(
        step=step,
        which=which,
        environment=group.environment,
        group_id=group.group_id,
        reward=rollout.reward if rollout.is_scored else None,
        stop_reason=rollout.stop_reason,
        tokens=rollout.sampled_tokens,
        turns=sum(sampled for segment in rollout.segments for sampled, _ in groupby(segment.mask)),
        version=max(sampled, default=None),
        scores=dict(rollout.scores),
        prompt=prompt,
        completion="".join(
            text if on else BETWEEN.format(text) for (on, _), text in zip(parts, texts, strict=True)
        ),
        extra=dict(rollout.extra),
    )


def _note(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_NOTE else f"{text[:LONGEST_NOTE]} …"


def write_page(path: Path, title: str, shown: Iterable[Shown], *, note: str = "") -> None:
    """Write the page atomically. Raises CheckpointError: it cannot be written."""
    sections = [
        f"<section><h2>{escape(heading)}</h2>\n{''.join(map(_article, part))}</section>\n"
        for heading, part in groupby(shown, key=lambda one: one.heading)
    ]
    head = f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
    lead = f"<h1>{escape(title)}</h1>\n<p>{escape(note)}</p>\n"
    text = f"{head}\n<style>{STYLE}</style>\n<body>\n{lead}{''.join(sections)}</body></html>\n"
    write_atomically(path, text.encode("utf-8", "replace"))


def _article(one: Shown) -> str:
    parts = {name: value for name, value in one.scores.items() if name != "reward"}
    small = [*one.notes, *(f"{name} {value:.3g}" for name, value in parts.items())]
    notes = "".join(f"<small>{escape(note)}</small>" for note in small)
    texts = "".join(f"<pre>{escape(_cut(text))}</pre>" for text in (one.prompt, one.completion))
    return f"<article><p><b>{number_of(one.reward)}</b> {escape(one.label)}{notes}</p>{texts}</article>\n"


def _cut(text: str) -> str:
    return (
        text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text):,} characters)"
    )
