"""The tokenizer in the file gives in a real llama.cpp the ids that it gives here; one that
cannot is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.deploy.export import llama_server, pipeline, vocabulary
from mlx_parallm.deploy.export.gguf_file import write_vocabulary
from mlx_parallm.deploy.export.model import ModelSource
from mlx_parallm.deploy.export.texts import CHATS, COUNT, texts
from mlx_parallm.deploy.export.verify import compare_chats, compare_texts
from mlx_parallm.deploy.export.vocabulary import read_vocabulary
from mlx_parallm.errors import ModelError
from mlx_parallm.execution.taught_tools import TEMPLATE as TAUGHT
from mlx_parallm.models.gguf.from_gguf import GGUFFile
from mlx_parallm.models.gguf.hf_tokenizer import write_tokenizer
from mlx_parallm.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from mlx_parallm.models.loading import load_tokenizer
from tests.export.llama import needs_llama
from tests.tiny_models import QWEN3

ROWS = 900
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def checkpoint(path: Path, tokenizer: Tokenizer, **special: Any) -> Path:
    """The files that a vocabulary is read from."""
    path.mkdir()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", **special)
    fast.chat_template = ("{{ bos_token }}" if "bos_token" in special else "") + TEMPLATE
    fast.save_pretrained(path)
    config = QWEN3 | {"vocab_size": ROWS, "eos_token_id": fast.convert_tokens_to_ids("<|im_end|>")}
    (path / "config.json").write_text(json.dumps(config))
    return path


def byte_level(rules: vocabulary.Rules) -> Tokenizer:
    """A BPE tokenizer that splits by a row of the table, trained on the texts."""
    pieces, whole = rules
    parts: list[Any] = []
    for piece in pieces:
        if piece == "digits":
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        elif piece in ("words", "bytes"):
            parts.append(
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=piece == "words")
            )
        else:
            parts.append(pre_tokenizers.Split(Regex(piece), behavior="isolated"))
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    tokenizer.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=ROWS - 50, initial_alphabet=alphabet, special_tokens=SPECIAL
    )
    tokenizer.train_from_iterator([*texts(), *texts()], trainer)
    return tokenizer


def sentencepiece(*, prefix: bool) -> Tokenizer:
    """A BPE tokenizer as those that come from SentencePiece: bytes as tokens, every split of a
    token is a merge."""
    plain = Tokenizer(models.BPE())
    plain.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=ROWS - 350, special_tokens=SPECIAL, limit_alphabet=200)
    plain.train_from_iterator([*texts(), *texts()], trainer)
    learned = json.loads(plain.to_str())["model"]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [piece for piece in learned["vocab"] if piece not in SPECIAL]
    vocab = {piece: place for place, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[len(SPECIAL) + 256 :]
        for cut in range(1, len(piece))
        if piece[:cut] in vocab and piece[cut:] in vocab
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("\u2581")] if prefix else []), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


def read(path: Path) -> tuple[Any, vocabulary.Vocabulary]:
    tokenizer = load_tokenizer(path, ModelConfig(base_path=str(path)))
    return tokenizer, read_vocabulary(
        tokenizer, json.loads((path / "config.json").read_text()), path
    )


def equal_texts(path: Path, pre: str | None = None) -> int:
    tokenizer, found = read(path)
    faults: list[str] = []
    write_vocabulary(path / "v.gguf", found if pre is None else found.with_pre(pre))
    with llama_server.running(path / "v.gguf") as server:
        equal, all_ = compare_texts(server, tokenizer, faults)
        chats = compare_chats(server, tokenizer, faults)
    assert all_ == COUNT
    assert bool(faults) == (equal < all_ or chats[0] < chats[1])
    if pre is None:
        assert chats == (len(CHATS), len(CHATS)), faults
    return equal


@needs_llama
@pytest.mark.parametrize(
    ("rules", "name"),
    [
        pytest.param(rules, name, marks=[] if name == "qwen2" else pytest.mark.slow, id=name)
        for rules, name in PRE_TOKENIZERS.items()
    ],
)
def test_each_pre_tokenizer_gives_the_same_ids(
    tmp_path: Path, rules: vocabulary.Rules, name: str
) -> None:
    path = checkpoint(tmp_path / "model", byte_level(rules))
    assert read(path)[1].pre == name
    assert equal_texts(path) == COUNT
    if name == "qwen2":  # the name of another one is seen
        assert equal_texts(path, "gpt-2") < COUNT


@needs_llama
@pytest.mark.parametrize("prefix", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sentencepiece_gives_the_same_ids(tmp_path: Path, prefix: bool) -> None:
    path = checkpoint(
        tmp_path / "model", sentencepiece(prefix=prefix), bos_token="<s>", unk_token="<unk>"
    )
    found = read(path)[1]
    assert (found.kind, found.add_bos, found.add_space_prefix) == ("llama", True, prefix)
    assert equal_texts(path) == COUNT


def with_rules(path: Path, pattern: str) -> Path:
    """The tokenizer of Llama 3's rules, which says that it has others."""
    path = checkpoint(
        path,
        byte_level(next(rules for rules, name in PRE_TOKENIZERS.items() if name == "llama-bpe")),
    )
    data = json.loads((path / "tokenizer.json").read_text())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    (path / "tokenizer.json").write_text(json.dumps(data))
    return path


def export_of(path: Path, **options: Any) -> pipeline.ExportPipeline:
    return pipeline.ExportPipeline(
        ModelSource(str(path), name="m"),
        "f32",
        pipeline.Destination(path.parent / "out"),
        **options,
    )


@needs_llama
@pytest.mark.slow
def test_a_pre_tokenizer_outside_the_table_is_found_by_trying_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = next(rules for rules, name in PRE_TOKENIZERS.items() if name == "llama-bpe")[0][0]
    same = with_rules(tmp_path / "same", ours.replace("'t|'re", "'t|'t|'re"))
    tokenizer, found = read(same)
    assert found.pre is None
    opened = type("Opened", (), {"tokenizer": tokenizer, "notes": []})()
    assert export_of(same)._try_pre(opened, found) == "llama-bpe"
    assert "found by trying: 200 of 200" in opened.notes[0]

    monkeypatch.setattr(pipeline, "candidates", lambda: ["llama-bpe", "gpt-2"])
    other = with_rules(tmp_path / "other", r"\p{L}{1,2}|\P{L}+")
    tokenizer, found = read(other)
    opened = type("Opened", (), {"tokenizer": tokenizer, "notes": []})()
    with pytest.raises(ModelError, match=r"best, '.*', fits \d+"):
        export_of(other)._try_pre(opened, found)
    with pytest.raises(ModelError, match="--pre NAME"):
        export_of(other, check="off")._try_pre(opened, found)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "model", byte_level((("words",), False)))
    config = json.loads((path / "config.json").read_text())
    tokenizer, _ = read(path)
    with pytest.raises(ModelError, match=r"849.*800"):
        read_vocabulary(tokenizer, config | {"vocab_size": 800}, path)
    tokenizer.eos_token_ids = frozenset()
    with pytest.raises(ModelError, match="no EOS token"):
        read_vocabulary(tokenizer, config, path)
    unigram = Tokenizer(models.Unigram([("a", -1.0), ("<|im_end|>", -2.0)], unk_id=0))
    with pytest.raises(ModelError, match="Unigram"):
        read(checkpoint(tmp_path / "unigram", unigram))
    (path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config.json"):
        read(path)


def test_every_stop_token_is_named(tmp_path: Path) -> None:
    import gguf

    path = checkpoint(tmp_path / "model", byte_level((("words",), False)))
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [4, 1, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    )
    tokenizer = load_tokenizer(path, ModelConfig(base_path=str(path)))
    found = read_vocabulary(tokenizer, json.loads((path / "config.json").read_text()), path)
    assert found.stop_texts() == ["<|im_end|>", "</s>", "<unk>"]
    write_vocabulary(path / "v.gguf", found)
    fields = gguf.GGUFReader(path / "v.gguf").fields
    assert [
        fields[f"tokenizer.ggml.{name}_token_id"].contents() for name in ("eos", "eot", "eom")
    ] == [4, 1, 2]
    assert fields["general.sampling.top_k"].contents() == 20
    assert fields["general.sampling.temp"].contents() == pytest.approx(0.6)
    # it has no tools: what it is taught here comes before it
    assert fields["tokenizer.chat_template"].contents() == TAUGHT + TEMPLATE


@needs_llama
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_comes_back(tmp_path: Path, prefix: bool) -> None:
    """The tokenizer made of a file: the ids of the first one and of llama.cpp, the same texts
    back, the same chats."""
    path = checkpoint(
        tmp_path / "model", sentencepiece(prefix=prefix), bos_token="<s>", unk_token="<unk>"
    )
    first, vocabulary = read(path)
    write_vocabulary(path / "v.gguf", vocabulary)
    back = tmp_path / "back"
    back.mkdir()
    config = {"max_position_embeddings": 2048, "vocab_size": ROWS, "model_type": "llama"}
    assert write_tokenizer(back, GGUFFile(path / "v.gguf"), config) == []
    (back / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(back, ModelConfig(base_path=str(back)))
    assert [tokenizer.encode(text) for text in texts()] == [first.encode(text) for text in texts()]
    with llama_server.running(path / "v.gguf") as server:
        faults: list[str] = []
        assert compare_texts(server, tokenizer, faults) == (COUNT, COUNT)
        assert compare_chats(server, tokenizer, faults) == (len(CHATS), len(CHATS))
    for text in texts():
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_ids, tokenizer.bos_token_id) == (
        first.eos_token_ids,
        first.bos_token_id,
    )
