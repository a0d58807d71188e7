"""The tokenizer of a GGUF file as tokenizer.json, tokenizer_config.json and generation_config.json.

Two kinds of vocabulary are read: "gpt2", byte-level BPE with merges, and "llama", SentencePiece's
BPE with scores.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import gguf

from mlx_parallm.errors import ModelError
from mlx_parallm.execution.taught_tools import TEMPLATE as TAUGHT
from mlx_parallm.models.gguf.pre_tokenizers import PRE_TOKENIZERS, Rules

TEMPLATE = "tokenizer.chat_template"
PREFIX = "tokenizer.ggml."
STOPS = ("eos", "eot", "eom")
SPACE = "\u2581"  # SentencePiece's
# if the file says nothing, as in llama.cpp
SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}
FILL_IN_THE_MIDDLE = ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")
SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
}


class GGUFKeys(Protocol):
    """The part of a `GGUFFile` that is needed here."""

    path: Path

    def get(self, key: str, default: Any = None) -> Any: ...

    def without_meaning(self, prefix: str) -> list[str]: ...


def write_tokenizer(directory: Path, file: GGUFKeys, config: dict[str, Any]) -> list[str]:
    """Write the three files, and the ids of special tokens into `config`. Return notes for a
    reader.

    Raises ModelError: a vocabulary or a pre-tokenizer of a kind that is not read; a key that is not
    understood.
    """
    if (kind := file.get(f"{PREFIX}model")) not in ("gpt2", "llama"):
        raise ModelError(
            f"{file.path}: a vocabulary of kind {kind!r} is not read, only gpt2 (byte-level BPE)"
            " and llama (SentencePiece's BPE): use the safetensors that the file was made from"
        )
    pieces = kind == "llama"
    tokens, types = file.get(f"{PREFIX}tokens"), file.get(f"{PREFIX}token_type") or []
    if len(types) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens, but {len(types)} types of tokens")
    usual = SENTENCEPIECE_IDS if pieces else {}
    keys = ("bos", "unknown", "padding", "seperator", "mask")
    ids = {key: file.get(f"{PREFIX}{key}_token_id", usual.get(key)) for key in keys}
    stops = [
        stop
        for key in STOPS
        if (stop := file.get(f"{PREFIX}{key}_token_id", usual.get(key))) is not None
    ]
    _check_special(stops, list(ids.values()), len(tokens), file.path)
    add_bos, add_eos = (
        bool(file.get(f"{PREFIX}add_bos_token", pieces)),
        bool(file.get(f"{PREFIX}add_eos_token", False)),
    )
    for key in FILL_IN_THE_MIDDLE:  # the tokens themselves are in the vocabulary
        file.get(f"{PREFIX}{key}_token_id")
    data, notes = (
        _sentencepiece(file, tokens, types, ids["unknown"])
        if pieces
        else _byte_level(file, tokens, types)
    )
    start, end = ids["bos"] if add_bos else None, stops[0] if add_eos else None
    data["post_processor"] = _post_processor(tokens, start, end)
    _write(directory / "tokenizer.json", data)
    names = {
        "bos": "bos_token",
        "unknown": "unk_token",
        "padding": "pad_token",
        "seperator": "sep_token",
    }
    special = {
        name: tokens[ids[key]]
        for key, name in (names | {"mask": "mask_token"}).items()
        if ids[key] is not None
    }
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": add_bos,
            "add_eos_token": add_eos,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": tokens[stops[0]],
            "model_max_length": config["max_position_embeddings"],
            **special,
            **_templates(file),
        },
    )
    eos = stops[0] if len(stops) == 1 else stops
    config |= {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["padding"]}
    sampling = {
        name: value for key, name in SAMPLING.items() if (value := file.get(key)) is not None
    }
    generation = {"bos_token_id": ids["bos"], "eos_token_id": eos, "pad_token_id": ids["padding"]}
    _write(
        directory / "generation_config.json",
        generation | ({"do_sample": True} | sampling if sampling else {}),
    )
    if unknown := file.without_meaning("tokenizer."):
        raise ModelError(
            f"{file.path}: {unknown[0]} is not understood, and the tokenizer may need it"
        )
    return notes


def _check_special(stops: list[int], others: list[int | None], tokens: int, path: Path) -> None:
    """Raises ModelError: nothing ends an answer, or an id is not a token's."""
    if not stops:
        raise ModelError(f"{path} has no {PREFIX}eos_token_id: an answer would never end")
    if strange := [row for row in [*stops, *others] if row is not None and not 0 <= row < tokens]:
        raise ModelError(f"{path}: a special token is {strange[0]}, but there are {tokens} tokens")


def _rules_of(pre: str, path: Path) -> Rules:
    rules = next((rules for rules, name in PRE_TOKENIZERS.items() if name == pre), None)
    if rules is None:
        supported = ", ".join(PRE_TOKENIZERS.values())
        raise ModelError(
            f"{path}: how the pre-tokenizer {pre!r} splits a text is"
            f" not known here, only {supported}"
        )
    return rules


def _byte_level(
    file: GGUFKeys, tokens: list[str], types: list[int]
) -> tuple[dict[str, Any], list[str]]:
    """Return tokenizer.json without its post-processor, and notes."""
    pieces, ignore_merges = _rules_of(str(file.get(f"{PREFIX}pre")), file.path)
    if file.get(f"{PREFIX}add_space_prefix", False):
        raise ModelError(f"{file.path}: {PREFIX}add_space_prefix with byte-level BPE is not read")
    used = _used(tokens, types)
    pairs = [merge.split(" ", 1) for merge in file.get(f"{PREFIX}merges") or []]
    kept = [pair for pair in pairs if "".join(pair) in used and all(part in used for part in pair)]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    model = {"vocab": used, "merges": kept, "ignore_merges": ignore_merges}
    data = _tokenizer_json(used, types, model) | {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_piece(piece) for piece in pieces]},
        "decoder": byte_level,
    }
    dropped = len(pairs) - len(kept)
    return data, [f"{dropped} merges make no token and are left out"] if dropped else []


def _sentencepiece(
    file: GGUFKeys, tokens: list[str], types: list[int], unknown: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Return tokenizer.json without its post-processor, and no notes.

    SentencePiece joins the two neighbours that make the token with the highest score. So every
    split of a token into two others is a merge, in the order of scores. A character without a token
    becomes its bytes. With a prefix a text begins with a space, also after a special token.
    """
    file.get(f"{PREFIX}pre")  # "default": llama.cpp splits by it only for the other kind
    prefix = bool(file.get(f"{PREFIX}add_space_prefix", True))
    scores = file.get(f"{PREFIX}scores") or []
    if len(scores) != len(tokens):
        raise ModelError(f"{file.path}: {len(tokens)} tokens, but {len(scores)} scores")
    if file.get(f"{PREFIX}remove_extra_whitespaces", False):
        raise ModelError(f"{file.path}: {PREFIX}remove_extra_whitespaces is not read")
    used = _used(tokens, types)
    plain = {token: row for token, row in used.items() if types[row] == gguf.TokenType.NORMAL}
    ranked = sorted(plain, key=lambda token: (-scores[plain[token]], plain[token]))
    merges = [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in plain and token[cut:] in plain
    ]
    model: dict[str, Any] = {
        "vocab": used,
        "merges": merges,
        "byte_fallback": True,
        "fuse_unk": True,
    }
    if unknown is not None:
        model["unk_token"] = tokens[unknown]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    first = {"type": "Prepend", "prepend": SPACE}
    parts: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    ]
    parts += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    parts += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    data = _tokenizer_json(used, types, model) | {
        "normalizer": {"type": "Sequence", "normalizers": [*([first] * prefix), spaces]},
        "decoder": {"type": "Sequence", "decoders": parts},
    }
    return data, []


def _used(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Return the rows by their tokens; a row without one (UNUSED) is left out. Raises
    ModelError: two are the same."""
    used = {token: row for row, token in enumerate(tokens) if types[row] != gguf.TokenType.UNUSED}
    if len(used) != sum(kind != gguf.TokenType.UNUSED for kind in types):
        raise ModelError("two tokens of the file have the same text")
    return used


def _tokenizer_json(
    used: Mapping[str, int], types: list[int], model: dict[str, Any]
) -> dict[str, Any]:
    added = [
        {
            "id": row,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[row] == gguf.TokenType.CONTROL,
        }
        for token, row in used.items()
        if types[row] in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    ]
    usual: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": usual | model,
    }


def _piece(name: str) -> dict[str, Any]:
    match name:
        case "bytes" | "words":
            return {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": name == "words",
            }
        case "digits":
            return {"type": "Digits", "individual_digits": True}
        case _:
            return {
                "type": "Split",
                "pattern": {"Regex": name},
                "behavior": "Isolated",
                "invert": False,
            }


def _post_processor(tokens: list[str], bos: int | None, eos: int | None) -> dict[str, Any]:
    if bos is None and eos is None:
        return {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": False,
            "use_regex": True,
        }
    start = [] if bos is None else [bos]
    end = [] if eos is None else [eos]

    def template(*texts: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for place, text in enumerate(texts):
            for token in start:
                parts.append({"SpecialToken": {"id": tokens[token], "type_id": place}})
            parts.append({"Sequence": {"id": text, "type_id": place}})
            for token in end:
                parts.append({"SpecialToken": {"id": tokens[token], "type_id": place}})
        return parts

    special = {
        tokens[row]: {"id": tokens[row], "ids": [row], "tokens": [tokens[row]]}
        for row in [*start, *end]
    }
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": special,
    }


def _templates(file: GGUFKeys) -> dict[str, Any]:
    """Return the chat template, or the list of all if the file has several."""
    default = file.get(TEMPLATE)
    if isinstance(default, str):
        default = default.removeprefix(TAUGHT)  # an export put it there
    names = file.get("tokenizer.chat_templates") or []
    named = {name: file.get(f"{TEMPLATE}.{name}") for name in names}
    if not named:
        return {} if default is None else {"chat_template": default}
    every: Mapping[str, Any] = ({} if default is None else {"default": default}) | named
    return {
        "chat_template": [{"name": name, "template": template} for name, template in every.items()]
    }


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
