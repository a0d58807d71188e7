"""The tokenizer as GGUF has it, read from its tokenizer.json.

llama.cpp splits a text before it merges bytes by rules that are built into it; `tokenizer.ggml.pre`
names them. A wrong name loads without an error and gives other tokens. So the name follows from how
the tokenizer itself splits (`PRE_TOKENIZERS`); if that is not in the table, `candidates()` are
to be tried with a real llama.cpp.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf

from mlx_parallm.errors import ModelError
from mlx_parallm.execution.taught_tools import TEMPLATE
from mlx_parallm.models.gguf.pre_tokenizers import PRE_TOKENIZERS, Rules
from mlx_parallm.models.published.generation_config import read_generation_config
from mlx_parallm.models.tokenizer import Tokenizer

UNUSED = "[PAD{}]"  # rows of the embedding that have no token
BYTE = "<0x{:02X}>"
SPACE = "\u2581"  # SentencePiece's
STOPS_IN_FILE = 3  # GGUF has three fields for tokens that end an answer

# Others that llama.cpp has rules for, to be tried. Its rules for tekken and gpt-4o leave combining
# marks out, as in Hindi and Thai: of our 200 texts 9 have other ids.
FURTHER = [
    "tekken",
    "gpt-4o",
    "deepseek-llm",
    "deepseek-coder",
    "deepseek-v3",
    "falcon",
    "glm4",
    "bailingmoe",
    "seed-coder",
    "default",
]


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer in GGUF's terms: a list has an entry for each row of the embedding.

    Attributes:
        kind: "gpt2": byte-level BPE; "llama": SentencePiece's BPE, with scores.
        pre: the pre-tokenizer's name; None = it is not in the table.
        stops: the ids that end an answer, the first one the tokenizer's own.
        chat_template: Jinja; None = the model has none.
        sampling: generation_config.json's values, by GGUF's names.
    """

    kind: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    bos: int | None
    stops: tuple[int, ...]
    pad: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    chat_template: str | None
    sampling: dict[str, float]

    def with_pre(self, pre: str) -> "Vocabulary":
        return replace(self, pre=pre)

    def stop_texts(self) -> list[str]:
        return [self.tokens[stop] for stop in self.stops]

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.kind)
        writer.add_tokenizer_pre(self.pre or "default")
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.kind == "llama":
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.add_space_prefix)
        else:  # an empty list is refused: two tokens that are never side by side
            writer.add_token_merges(
                self.merges or [f"{self.tokens[self.stops[0]]} {self.tokens[self.stops[0]]}"]
            )
        for value, add in (
            (self.bos, writer.add_bos_token_id),
            (self.pad, writer.add_pad_token_id),
            (self.unknown, writer.add_unk_token_id),
        ):
            if value is not None:
                add(value)
        fields = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
        for stop, add in zip(self.stops, fields, strict=False):
            add(stop)
        writer.add_add_bos_token(self.add_bos)
        writer.add_add_eos_token(self.add_eos)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)
        if "temp" in self.sampling:
            writer.add_sampling_temp(self.sampling["temp"])
        if "top_p" in self.sampling:
            writer.add_sampling_top_p(self.sampling["top_p"])
        if "top_k" in self.sampling:
            writer.add_sampling_top_k(int(self.sampling["top_k"]))


def _with_tools(tokenizer: Tokenizer) -> str | None:
    """Return the chat template; one without tools that shows a system message gets those that it
    is taught here, so that the file is used as it was trained."""
    template = tokenizer.chat_template
    if template is None or tokenizer.template_takes_tools or not tokenizer.template_shows_system:
        return template
    return TEMPLATE + template


def read_vocabulary(tokenizer: Tokenizer, config: Mapping[str, Any], directory: Path) -> Vocabulary:
    """Return the tokenizer of a model of `config`. `directory`: the checkpoint's, for
    generation_config.json.

    Raises ModelError: no fast tokenizer, one of a kind that is not written, no token that ends an
    answer.
    """
    text = tokenizer.to_json()
    if text is None:
        raise ModelError(
            "the tokenizer has no tokenizer.json and cannot be made one: GGUF needs it"
        )
    data = json.loads(text)
    model = data["model"]
    if model["type"] != "BPE":
        raise ModelError(
            f"a tokenizer of type {model['type']} cannot be exported as GGUF: only BPE"
        )
    stops = tuple(
        sorted(tokenizer.eos_token_ids, key=lambda stop: (stop != tokenizer.eos_token_id, stop))
    )
    if not stops:
        raise ModelError(
            "the tokenizer has no EOS token: an answer of the exported model would never end"
        )
    rows = int(config["vocab_size"])
    if (
        highest := max([*model["vocab"].values(), *(added["id"] for added in data["added_tokens"])])
    ) >= rows:
        raise ModelError(
            f"the tokenizer has token {highest}, the model's embedding has only {rows} rows"
        )
    if tokenizer.has_chat_template and tokenizer.chat_template is None:
        raise ModelError(
            "the chat template is code of mlx-lm's: pass --chat-template"
            " FILE with the same one in Jinja"
        )
    kind = "llama" if model.get("byte_fallback") else "gpt2"
    tokens, types = _tokens(data, rows, kind)
    if len(set(tokens)) < rows:
        raise ModelError(
            "two of the tokenizer's tokens have the same text, which llama.cpp refuses"
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    bare, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    start, end = full[: len(full) - len(bare)], full[len(bare) :]
    bos = tokenizer.bos_token_id
    return Vocabulary(
        kind=kind,
        pre="default" if kind == "llama" else PRE_TOKENIZERS.get(_rules(data)),
        tokens=tokens,
        types=types,
        merges=merges if kind == "gpt2" else [],
        scores=_scores(tokens, model["merges"]) if kind == "llama" else [],
        bos=bos,
        stops=stops,
        pad=tokenizer.pad_token_id,
        unknown=model["vocab"].get(model.get("unk_token") or ""),
        add_bos=bool(start) and start[0] == bos,
        add_eos=bool(end) and end[-1] in stops,
        add_space_prefix=tokens[bare[0]].startswith(SPACE),
        chat_template=_with_tools(tokenizer),
        sampling=_sampling(directory),
    )


def candidates() -> list[str]:
    """Return the pre-tokenizers that a real llama.cpp may be tried with."""
    return [*PRE_TOKENIZERS.values(), *FURTHER]


def describe_rules(tokenizer: Tokenizer) -> str:
    """Say how the tokenizer splits, for the message about one that is not in the table."""
    pieces, whole = _rules(json.loads(tokenizer.to_json() or "{}"))
    return " then ".join(pieces) + (", whole words without merges" if whole else "")


def _tokens(data: Mapping[str, Any], rows: int, kind: str) -> tuple[list[str], list[int]]:
    tokens = [UNUSED.format(row) for row in range(rows)]
    types = [int(gguf.TokenType.UNUSED)] * rows
    unknown = data["model"].get("unk_token")
    in_bytes = {BYTE.format(byte) for byte in range(256)} if kind == "llama" else set()
    for token, row in data["model"]["vocab"].items():
        tokens[row] = token
        types[row] = int(
            gguf.TokenType.BYTE
            if token in in_bytes
            else gguf.TokenType.UNKNOWN
            if token == unknown
            else gguf.TokenType.NORMAL
        )
    for added in data["added_tokens"]:
        special = added["special"]
        tokens[added["id"]] = added["content"] if special else added["content"].replace(SPACE, " ")
        types[added["id"]] = int(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
    return tokens, types


def _scores(tokens: list[str], merges: list[Any]) -> list[float]:
    """SentencePiece merges the pair with the highest score first: minus the place of the merge
    that makes a token."""
    ranks: dict[str, int] = {}
    for place, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), place)
    return [-float(ranks.get(token, len(merges))) for token in tokens]


def _rules(data: Mapping[str, Any]) -> Rules:
    """Return how a text is split, piece by piece: a regular expression, "digits", "bytes" or
    "words" (GPT-2's expression). A piece without such a name is JSON, so it is in no table."""
    return tuple(_pieces(data.get("normalizer"), data.get("pre_tokenizer"))), bool(
        data["model"].get("ignore_merges")
    )


def _pieces(normalizer: Any, pre_tokenizer: Any) -> Iterator[str]:
    # llama.cpp does none, and most text is in NFC
    if normalizer is not None and normalizer != {"type": "NFC"}:
        yield json.dumps(normalizer)
    for part in (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer]):
        match part:
            case {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }:
                yield pattern
            case {"type": "Digits", "individual_digits": True}:
                yield "digits"
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": regex}:
                yield "words" if regex else "bytes"
            case _:
                yield json.dumps(part)


def _sampling(directory: Path) -> dict[str, float]:
    settings = read_generation_config(directory)
    if settings.get("do_sample") is False:
        return {}
    names = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}
    return {
        ours: float(settings[name])
        for name, ours in names.items()
        if settings.get(name) is not None
    }
