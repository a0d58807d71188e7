"""A published tokenizer is here what transformers makes of its folder: ids, texts, streams.

PUBLISHED_TEXTS sets the number of texts for each folder (2,000 take minutes).
"""

import base64
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import load_tokenizer
from tests.published_tokenizers import FAMILIES, layouts, publish

TEXTS = int(os.environ.get("PUBLISHED_TEXTS", "12"))
PARTS = [
    *("Hello", " world", "wor", "ld", " ", "  ", "\n", "\r\n", "\t", "\n\n", "    return"),
    *(
        "é",
        "e\u0301",
        "A\u030a",
        "€",
        "🙂",
        "👩‍🚀",
        "你好",
        "世界",
        "שלום",
        "مرحبا",
        "\u200f",
        "İ",
        "ß",
    ),
    *("\x00", "\x07", "\x1b", "\u00a0", "\u3000", "\ufeff", "\ufffd", "ﬁ", "①", "½", "▁", "Ġ"),
    *("x", ".", ", ", "42", "1234567", "don't", " ,", " n't", "two words", "def f(x):\n\treturn x"),
    *(
        "</s>",
        "<s>",
        "<unk>",
        "<|im_start|>",
        "[MASK]",
        "[INST]",
        "<0x0A>",
        "<extra_id_0>",
        "##ing",
    ),
    *("<left>", " <left>", "<left> ", "<whole>", "x<whole>", " <whole>  ", "<think>", "</think>"),
]


def drawn(seed: str) -> list[str]:
    rng = random.Random(seed)
    some = ("".join(rng.choices(PARTS, k=rng.randint(1, 8))) for _ in range(TEXTS))
    return ["", " ", *some]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_is_what_transformers_reads(family: str, tmp_path: Path) -> None:
    for name, folder in layouts(publish(tmp_path / "model", family)):
        try:
            theirs = AutoTokenizer.from_pretrained(folder)
        except ValueError:  # a generic class does not say how files without rules are read
            with pytest.raises(ModelError, match="tokenizer"):
                load_tokenizer(folder, ModelConfig(base_path=str(folder)))
            continue
        if len(theirs) < 64:  # its class reads no file that is here
            assert name.startswith("vocab.json")
            with pytest.raises(ModelError, match="has no vocabulary"):
                load_tokenizer(folder, ModelConfig(base_path=str(folder)))
            continue
        ours = load_tokenizer(folder, ModelConfig(base_path=str(folder)))
        for text in drawn(f"{family} {name}"):
            for special in (True, False):
                ids = theirs.encode(text, add_special_tokens=special)
                assert ours.encode(text, add_special_tokens=special) == ids, (name, text)
                for skip in (True, False):
                    shown = theirs.decode(
                        ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
                    )
                    assert ours.decode(ids, skip_special_tokens=skip) == shown, (name, text)
                    reader = ours.detokenizer(skip_special_tokens=skip)
                    assert "".join(map(reader.add, ids)) + reader.finish() == shown, (name, text)


@pytest.mark.parametrize(
    ("model_type", "file", "settings", "options"),
    [
        ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer"}, {}),
        ("llama", "tokenizer.model", {"tokenizer_class": "LlamaTokenizer", "legacy": False}, {}),
        ("phi3", "tokenizer.model", {"tokenizer_class": "PreTrainedTokenizerFast"}, {}),
        ("mistral", "tokenizer.model", {"add_eos_token": True, "add_bos_token": False}, {}),
        ("gemma", "tokenizer.model", {"tokenizer_class": "GemmaTokenizer"}, {"pad_id": 3}),
        ("t5", "spiece.model", {"tokenizer_class": "T5Tokenizer"}, {"model_type": "unigram"}),
    ],
)
def test_a_sentencepiece_model_alone(
    model_type: str,
    file: str,
    settings: dict[str, object],
    options: dict[str, object],
    tmp_path: Path,
) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")

    from tests.tokenizer_families import CORPUS

    (tmp_path / "texts").write_text("\n".join(CORPUS))
    bytes_too = {"byte_fallback": True, "vocab_size": 480, "model_type": "bpe"}
    unigram = {"vocab_size": 74}
    wanted = unigram if options.get("model_type") == "unigram" else bytes_too
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"),
        model_prefix=str(tmp_path / "m"),
        minloglevel=2,
        **(wanted | options),
    )
    (tmp_path / "m.model").rename(tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path, ModelConfig(base_path=str(tmp_path)))
    for text in drawn(model_type):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            shown = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == shown


@pytest.mark.parametrize(
    ("model_type", "files"),
    [
        ("qwen2", {"vocab.tiktoken": "aGVsbG8= 0\n"}),
        ("gemma3_text", {}),
        ("t5", {}),
        ("gpt2", {"vocab.txt": "hello\n"}),
        ("cohere", {"spiece.model": ""}),
    ],
)
def test_a_vocabulary_that_is_missing_or_has_another_name_is_refused(
    model_type: str, files: dict[str, str], tmp_path: Path
) -> None:
    """transformers makes a tokenizer that reads every text as nothing."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, ModelConfig(base_path=str(tmp_path)))


def test_a_vocabulary_of_a_few_words_is_one(tmp_path: Path) -> None:
    """Of a model of sums, or of proteins: no word of English is in it."""
    words = ["<unk>", "</s>", "one", "plus", "1", "2", "+", "="]
    rust = tokenizers.Tokenizer(
        WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>")
    )
    rust.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=rust, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert load_tokenizer(tmp_path, ModelConfig(base_path=str(tmp_path))).encode("1 + 2") == [
        4,
        6,
        5,
    ]


@pytest.mark.parametrize(
    "settings",
    [None, *({"tokenizer_class": name} for name in ("LlamaTokenizer", "MistralCommonBackend"))],
)
def test_tekken_is_read_whatever_is_installed(
    settings: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes mistral-common's tokenizer where that is installed, which answers other
    questions than its own tokenizer."""
    words = [bytes([byte]) for byte in range(256)] + [b"he", b"hel"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
    tekken = {
        "config": {
            "pattern": pattern,
            "num_vocab_tokens": len(words),
            "default_vocab_size": len(words) + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(word).decode()}
            for rank, word in enumerate(words)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(special)
        ],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(tekken))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    named = "transformers.models.auto.tokenization_auto.tokenizer_class_from_name"
    find = tokenization_auto.tokenizer_class_from_name

    def installed(name: str) -> Any:
        return pytest.fail("it is taken") if name == "MistralCommonBackend" else find(name)

    monkeypatch.setattr(named, installed)
    probed = "transformers.integrations.mistral.tokenizer.resolve_mistral_format"
    monkeypatch.setattr(probed, lambda *_, **options: pytest.fail(f"probed with {options}"))
    ours = load_tokenizer(tmp_path, ModelConfig(base_path=str(tmp_path)))
    for text in drawn("tekken"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        shown = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=True) == shown
