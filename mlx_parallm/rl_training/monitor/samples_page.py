"""samples.html: what was written, for a browser. One file, no script, everything escaped. No MLX."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

from mlx_parallm.system.files import write_atomically

LONGEST_TEXT = 8_000  # characters of a prompt or a completion; files of samples have all

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


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer on the page; those that follow each other under one `heading` are a section."""

    heading: str
    label: str  # "best", "greedy", …
    reward: float
    notes: tuple[str, ...]  # environment, stop reason, error …
    prompt: str
    completion: str
    scores: Mapping[str, float] = field(default_factory=dict)  # parts of the reward


def write_page(path: Path, title: str, shown: Iterable[Shown], *, note: str = "") -> None:
    """Replaces `path` atomically. Raises CheckpointError: it cannot be written."""
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
    return f"<article><p><b>{one.reward:.3g}</b> {escape(one.label)}{notes}</p>{texts}</article>\n"


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]} … ({len(text):,} characters)"
