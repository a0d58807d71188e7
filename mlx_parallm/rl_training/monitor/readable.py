"""Samples in a terminal: a table, without the chat template's markup. No MLX."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from mlx_parallm.errors import RequestError
from mlx_parallm.run_files.samples import Sample, merged, number_of
from mlx_parallm.system.terminal import beginning_of, end_of
from mlx_parallm.types import ChatTokenizer

SHOWN_CHARACTERS = 300  # shown of a prompt's end and of a completion's beginning
TURN = "\x00turn\x00"  # marks the begin of a turn; a model may write a NUL
Readable = Callable[[str], str]


def samples_table(samples: Sequence[Sample], readable: Readable = str) -> Table:
    """Return the samples as a table for a terminal."""
    table = Table(title=f"samples of step {samples[0].step}", title_justify="left")
    table.add_column("")
    table.add_column("reward", justify="right")
    for name in ("prompt", "completion"):
        table.add_column(name, overflow="fold")
    for which, sample in merged(samples):
        words = (which, number_of(sample.reward), *shortened(sample, readable))
        table.add_row(*(Text(word) for word in words))
    return table


def shortened(sample: Sample, readable: Readable = str) -> tuple[str, str]:
    """Return the end of the prompt (the question) and the beginning of the completion, each on
    one short line."""
    prompt, completion = readable(sample.prompt), readable(sample.completion)
    return end_of(prompt, SHOWN_CHARACTERS), beginning_of(completion, SHOWN_CHARACTERS)


def without_template(tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> Readable:
    """Return a function that turns the chat template's text back into messages: "user: Hi
    assistant: Hello".

    One message alone comes without its role. Special tokens that are left are removed.
    """
    marks = {mark: f"{TURN}{role}: " for mark, role in _marks(tokenizer, template_kwargs).items()}
    gone = {tokenizer.token_text(token): "" for token in tokenizer.special_ids} if marks else {}
    words = {text: new for text, new in (gone | marks).items() if text}
    pattern = (
        re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
        if words
        else None
    )

    def readable(text: str) -> str:
        if pattern is None:
            return text
        plain = pattern.sub(lambda match: words[match[0]], text)
        plain = re.sub(rf"\s*{TURN}assistant: \s*(?=⟧|$)", "", plain)  # the turn that follows
        if plain.count(TURN) == 1:
            plain = re.sub(rf"^{TURN}\w+: ", "", plain)
        return plain.replace(f"⟦{TURN}", "⟦").replace(TURN, " ").strip()

    return readable


def _marks(tokenizer: ChatTokenizer, template_kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the text that the template writes before a message, with the message's role; empty
    without a template."""
    marks: dict[str, str] = {}
    ends = [tokenizer.token_text(token) for token in tokenizer.eos_token_ids]
    for roles in (("system", "user", "assistant", "user"), ("user", "assistant", "user")):
        words = [f"MESSAGE-{number}-OF-THE-TEMPLATE" for number in range(len(roles))]
        messages = [
            {"role": role, "content": word} for role, word in zip(roles, words, strict=True)
        ]
        try:
            text = tokenizer.render_chat_text(messages, template_kwargs=template_kwargs)
        except RequestError:
            continue
        between = re.split("|".join(words), text)
        if len(between) != len(roles) + 1:  # a template that leaves one out
            continue
        for mark, role in zip(between, (*roles, "assistant"), strict=True):
            marks[mark] = role
            for end in ends:  # if the policy has sampled it, it is not part of what follows
                marks[mark.removeprefix(end)] = role
    return {mark: role for mark, role in marks.items() if mark.strip()}
