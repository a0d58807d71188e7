"""Folders with the tokenizer files of published models: one of each family, in each layout that
transformers reads. Their words are those of `tests.tokenizer_families`."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import (
    BertTokenizer,
    CohereTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    Qwen2Tokenizer,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from tests import tokenizer_families as families

ADDED = [
    AddedToken("<left>", lstrip=True, special=True),
    AddedToken("two words", normalized=True),
    AddedToken("<whole>", rstrip=True, single_word=True),
    AddedToken("<|im_start|>", special=True),
    AddedToken("<think>"),
]
CONFIG = "tokenizer_config.json"
PLACEHOLDERS = ("<unk>", "<s>", "</s>")
COHERE = ("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _model(rust: Any) -> dict[str, Any]:
    return dict(json.loads(rust.to_str())["model"])


def _words(model: dict[str, Any]) -> list[str]:
    vocabulary = model["vocab"]
    return [word for word in sorted(vocabulary, key=vocabulary.get) if word not in PLACEHOLDERS]


def _pairs(rust: Any, first: Sequence[str], last: Sequence[str] = ()) -> dict[str, Any]:
    """The vocabulary and merges of a BPE, with these words before and behind it."""
    model = _model(rust)
    words = dict.fromkeys([*first, *_words(model), *last])
    return {
        "vocab": {word: number for number, word in enumerate(words)},
        "merges": [tuple(pair) for pair in model["merges"]],
    }


def _scored(first: Sequence[str], last: Sequence[str] = ()) -> dict[str, Any]:
    """The vocabulary of a Unigram, with these words before and behind it."""
    words = [tuple(pair) for pair in _model(families._unigram())["vocab"]]
    kept = [pair for pair in words if pair[0] not in PLACEHOLDERS]
    return {"vocab": [*((word, 0.0) for word in first), *kept, *((word, 0.0) for word in last)]}


def _bytes(*last: str) -> dict[str, Any]:
    return _pairs(families._byte_level(), (), last)


def _pieces(first: Sequence[str] = PLACEHOLDERS) -> dict[str, Any]:
    return _pairs(families._gemma(), first)


def _bert(**options: Any) -> Any:
    words = [*BERT, *_words(_model(families._word_piece(cleanup=True)))]
    return BertTokenizer(vocab={word: number for number, word in enumerate(words)}, **options)


FAMILIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt2": ("gpt2", lambda: GPT2Tokenizer(**_bytes("<|endoftext|>"))),
    "gpt2 with a prefix space": (
        "gpt2",
        lambda: GPT2Tokenizer(**_bytes("<|endoftext|>"), add_prefix_space=True),
    ),
    "qwen2": ("qwen2", lambda: Qwen2Tokenizer(**_bytes("<|endoftext|>"))),
    "qwen3": ("qwen3", lambda: Qwen2Tokenizer(**_bytes("<|endoftext|>"))),
    "neox": ("gpt_neox", lambda: GPTNeoXTokenizer(**_bytes("<|endoftext|>"))),
    "cohere": ("cohere", lambda: CohereTokenizer(**_bytes(*COHERE, "<|END_OF_TURN_TOKEN|>"))),
    "llama2": ("llama", lambda: LlamaTokenizer(**_pieces(), legacy=True)),
    "llama2, not legacy": ("llama", lambda: LlamaTokenizer(**_pieces(), legacy=False)),
    "llama2 with both ends": (
        "llama",
        lambda: LlamaTokenizer(**_pieces(), add_bos_token=True, add_eos_token=True),
    ),
    "mistral": ("mistral", lambda: LlamaTokenizer(**_pieces(), legacy=False)),
    "phi3": ("phi3", lambda: LlamaTokenizer(**_pieces(), legacy=False)),
    "gemma": (
        "gemma3_text",
        lambda: GemmaTokenizer(**_pieces(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))),
    ),
    "t5": ("t5", lambda: T5Tokenizer(**_scored(("<pad>", "</s>", "<unk>")), extra_ids=3)),
    "xlm-roberta": (
        "xlm-roberta",
        lambda: XLMRobertaTokenizer(**_scored(("<s>", "<pad>", "</s>", "<unk>"), ("<mask>",))),
    ),
    "bert": ("bert", lambda: _bert(do_lower_case=False)),
    "bert in small letters": ("bert", lambda: _bert(do_lower_case=True)),
}


def publish(path: Path, family: str) -> Path:
    """Write the files as transformers 5 does."""
    model_type, make = FAMILIES[family]
    tokenizer = make()
    tokenizer.add_tokens(ADDED)
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def layouts(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield the published folder in other layouts, each a folder beside it."""
    saved = json.loads((path / CONFIG).read_text())
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}

    def copy(name: str, **changed: Any) -> Path:
        other = path.with_name(f"{path.name}--{name}")
        shutil.copytree(path, other)
        fields = {key: value for key, value in {**saved, **changed}.items() if value is not None}
        (other / CONFIG).write_text(json.dumps(fields))
        return other

    def older(name: str, **changed: Any) -> Path:
        """With the files of transformers 2 to 4 beside tokenizer.json."""
        other = copy(name, **changed)
        (other / "added_tokens.json").write_text(json.dumps(added))
        named = ("bos_token", "eos_token", "unk_token", "pad_token")
        special = {key: saved[key] for key in named if saved.get(key)}
        special["additional_special_tokens"] = ["<left>", "<|im_start|>"]
        (other / "special_tokens_map.json").write_text(json.dumps(special))
        return other

    yield "as saved", path
    for name in ("PreTrainedTokenizerFast", "TokenizersBackend", f"{saved['tokenizer_class']}Fast"):
        yield name, copy(name, tokenizer_class=name)
    yield "no class", copy("no class", tokenizer_class=None)
    alone = copy("alone")
    (alone / CONFIG).unlink()
    yield "tokenizer.json alone", alone
    nameless = copy("no model type")
    (nameless / "config.json").write_text("{}")
    yield "no model type", nameless
    yield "older files", older("older")
    flags = {
        str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in tokenizer["added_tokens"]
    }
    yield "added_tokens_decoder", older("decoder", added_tokens_decoder=flags)
    yield "both ends", copy("both ends", add_bos_token=True, add_eos_token=True)
    yield "prefix space", copy("prefix", add_prefix_space=True)
    yield "not legacy", copy("not legacy", legacy=False)
    limited = copy("limited")
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (limited / "tokenizer.json").write_text(json.dumps({**tokenizer, "truncation": cut}))
    yield "cut to four tokens", limited
    if tokenizer["model"]["type"] != "Unigram":
        yield from _without_rules(path, older("files"), tokenizer["model"])


def _without_rules(path: Path, files: Path, model: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield folders without tokenizer.json: the class says how words are split."""
    (files / "tokenizer.json").unlink()
    if model["type"] == "WordPiece":
        words = sorted(model["vocab"], key=model["vocab"].get)
        (files / "vocab.txt").write_text("\n".join(words) + "\n")
        yield "vocab.txt", files
        return
    (files / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = (m if isinstance(m, str) else " ".join(m) for m in model["merges"])
    (files / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    yield "vocab.json and merges.txt", files
    generic = path.with_name(f"{path.name}--generic files")
    shutil.copytree(files, generic)
    fields = json.loads((files / CONFIG).read_text()) | {"tokenizer_class": "TokenizersBackend"}
    (generic / CONFIG).write_text(json.dumps(fields))
    yield "vocab.json and merges.txt of a generic class", generic
