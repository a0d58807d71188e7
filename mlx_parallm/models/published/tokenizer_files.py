"""Reads the tokenizer files of a checkpoint that mlx-lm's loader leaves out.

Vision models had their chat template in chat_template.json, beside the processor's settings.
Of several named templates mlx-lm does not look for the format of tool calls.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_parallm.errors import ModelError
from mlx_parallm.models.mlx_lm_api import TokenizerWrapper, infer_tool_parser, load_hf_tokenizer

TOKENIZER_FILE = "tokenizer.json"
PROCESSOR_TEMPLATE = "chat_template.json"
GENERIC_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that mean: as tokenizer.json says. transformers puts the family's own class in their
place where the hub's checkpoints of a family name a wrong one (qwen2, qwen3_5 and others), and
that class splits words in its own way."""


def load_wrapper(
    path: Path, settings: Mapping[str, Any], eos_token_ids: list[int]
) -> TokenizerWrapper:
    """Return mlx-lm's tokenizer with the template and the format of tool calls that the files have.

    Args:
        settings: of transformers' AutoTokenizer.

    Raises ModelError: chat_template.json cannot be read, or the vocabulary is missing. Also what
    transformers raises.
    """
    # with mistral-common installed, transformers would take its tokenizer, which is of another kind
    settings = {"mistral_format": False, **settings}
    if _named_class(path).startswith("MistralCommon"):
        # a family whose class is "TokenizersBackend", which reads tekken.json by itself
        settings.setdefault("tokenizer_type", "granite")
    wrapper = load_hf_tokenizer(path, dict(settings), eos_token_ids=eos_token_ids)
    _check_words(path, wrapper._tokenizer)
    more = _left_out(path, wrapper)
    if not more:
        return wrapper
    return load_hf_tokenizer(path, {**settings, **more}, eos_token_ids=eos_token_ids)


def _check_words(path: Path, tokenizer: Any) -> None:
    """transformers makes a tokenizer of special tokens alone if the files of a vocabulary are
    missing, or have other names than its class reads."""
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    if tokenizer.decode(ids, skip_special_tokens=True).strip():
        return
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
    words = set(tokenizer.get_vocab()) - added - set(tokenizer.all_special_tokens)
    written = _words_of_file(path)
    if len(words) <= _FEW and not (written and written <= words):
        files = sorted({TOKENIZER_FILE, *tokenizer.vocab_files_names.values()})
        raise ModelError(
            f"{path} has no vocabulary that transformers' {type(tokenizer).__name__} reads; it"
            f" looks for {', '.join(files)}"
        )


def _words_of_file(path: Path) -> set[str]:
    """Return the words of tokenizer.json, which may be few: of a model of sums or of proteins."""
    file = path / TOKENIZER_FILE
    if not file.is_file():
        return set()
    written = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = written.get("model", {}).get("vocab", ())
    named = (word if isinstance(word, str) else word[0] for word in vocabulary)
    return set(named) - {token["content"] for token in written.get("added_tokens", ())}


_TEXT = "The quick brown fox 0123456789"
_FEW = 64
"""Language codes, and the like, that a class has by itself."""


def is_generic(path: Path) -> bool:
    """Tell whether tokenizer_config.json names a class that means: as tokenizer.json says."""
    if not (path / TOKENIZER_FILE).is_file():
        return False  # then the family's class says how words are split
    return _named_class(path) in GENERIC_TOKENIZERS


def _named_class(path: Path) -> str:
    """Return the class that tokenizer_config.json names; "": none."""
    try:
        settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""  # the tokenizer's loader reports the fault
    return str(settings.get("tokenizer_class")) if isinstance(settings, dict) else ""


def _left_out(path: Path, wrapper: TokenizerWrapper) -> dict[str, Any]:
    """Return settings with which the tokenizer has to be loaded again; {}: nothing is missing."""
    template = wrapper._tokenizer.chat_template
    if not wrapper.has_chat_template and (path / PROCESSOR_TEMPLATE).is_file():
        return {"chat_template": _processor_template(path / PROCESSOR_TEMPLATE)}
    if isinstance(template, dict) and wrapper.tool_parser is None:
        source = template.get("tool_use") or template.get("default")
        stand_in = SimpleNamespace(chat_template=source, get_vocab=wrapper._tokenizer.get_vocab)
        parser = infer_tool_parser(stand_in)
        return {} if parser is None else {"tool_parser_type": parser}
    return {}


def _processor_template(file: Path) -> str:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    if not isinstance(template, str):
        raise ModelError(f'{file} cannot be read: expected {{"chat_template": "a template"}}')
    return template
