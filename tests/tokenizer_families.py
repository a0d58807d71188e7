"""Tokenizers of each family, trained on the spot on a few sentences and loaded as a model's own is.

Their vocabularies have few words, so much falls back to bytes or to characters, as rare text does
with a real one.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Rust

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer

CORPUS = [
    "Hello world, hello wor ld! The world is large; worlds are larger.",
    "1 + 2 = 3, 12 + 30 = 42. def f(x):\n    return x + 1\n",
    "user: say the word. assistant: the word is world.",
    "Ein kurzer Satz über die Welt. L'été, c'est déjà fini. 你好 世界 说",
] * 20
WORDS = 420
TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>\n{% endfor"
    " %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKS = ["<|system|>", "<|user|>", "<|assistant|>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _trained(model: Any, trainer: Any, normalizer: Any = None, pre: Any = None) -> dict[str, Any]:
    rust = Rust(model)
    if normalizer is not None:
        rust.normalizer = normalizer
    if pre is not None:
        rust.pre_tokenizer = pre
    rust.train_from_iterator(CORPUS, trainer)
    return dict(json.loads(rust.to_str())["model"])


def _sentencepiece(normalizer: Any, pre: Any, decoder: Any) -> Rust:
    """BPE with byte fallback, as the Llama 2, Mistral and Gemma tokenizers are."""
    learner = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    learned = _trained(
        models.BPE(), trainers.BpeTrainer(vocab_size=WORDS, show_progress=False), pre=learner
    )
    words = ["<unk>", "<s>", "</s>", *BYTES, *learned["vocab"], "▁▁", "▁▁▁▁"]
    merges = [tuple(pair) for pair in learned["merges"]] + [("▁", "▁"), ("▁▁", "▁▁")]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    rust = Rust(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if normalizer is not None:
        rust.normalizer = normalizer
    if pre is not None:
        rust.pre_tokenizer = pre
    rust.decoder = decoder
    return rust


def _to_space(*more: Any) -> Any:
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )


def _llama2() -> Rust:
    """The dummy space comes from the normaliser, before each stretch between special tokens
    (`legacy`)."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(normalizer, None, _to_space(decoders.Strip(" ", 1, 0)))


def _metaspace(scheme: str) -> Rust:
    """Mistral's (`legacy` = False): "first"."""
    pre = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    strip = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
    return _sentencepiece(None, pre, _to_space(*strip))


def _gemma() -> Rust:
    pre = pre_tokenizers.Split(" ", "merged_with_previous")
    return _sentencepiece(normalizers.Replace(" ", "▁"), pre, _to_space())


def _metaspace_decoder() -> Rust:
    pre = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    return _sentencepiece(None, pre, decoders.Metaspace(prepend_scheme="always"))


def _unigram() -> Rust:
    pre = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
    )
    rust = Rust(models.Unigram())
    rust.normalizer, rust.pre_tokenizer, rust.decoder = (
        normalizers.NFKC(),
        pre,
        decoders.Metaspace(),
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def _byte_level(*, prefix: bool = False, splits: str | None = None) -> Rust:
    rust = Rust(models.BPE())
    pre: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=splits is None)
    if splits is not None:
        pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(splits), "isolated"), pre])
    rust.pre_tokenizer, rust.decoder = pre, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    specials = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, show_progress=False, initial_alphabet=alphabet, special_tokens=specials
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _word_piece(*, cleanup: bool) -> Rust:
    rust = Rust(models.WordPiece(unk_token="<unk>"))
    rust.pre_tokenizer, rust.decoder = (
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece("##", cleanup),
    )
    trainer = trainers.WordPieceTrainer(
        vocab_size=WORDS, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


FAMILIES: dict[str, tuple[Callable[[], Rust], dict[str, Any]]] = {
    "llama2": (_llama2, {}),
    "llama2 cleaned up": (_llama2, {"clean_up_tokenization_spaces": True}),
    "mistral": (lambda: _metaspace("first"), {}),
    "metaspace always": (lambda: _metaspace("always"), {}),
    "metaspace never": (lambda: _metaspace("never"), {}),
    "metaspace decoder": (_metaspace_decoder, {}),
    "phi3": (_llama2, {"rstrip": True}),
    "gemma": (_gemma, {"words": ["▁▁", "▁▁▁▁", "\n\n", "<table>"]}),  # words of its vocabulary too
    "unigram": (_unigram, {}),
    "gpt2": (_byte_level, {"clean_up_tokenization_spaces": True}),
    "gpt2 with a prefix space": (lambda: _byte_level(prefix=True), {}),
    "llama3": (lambda: _byte_level(splits=LLAMA3), {}),
    "added words": (_byte_level, {"words": ["two words", " é", "é", "<tool call>", "Ġx"]}),
    "word piece": (lambda: _word_piece(cleanup=False), {}),
    "word piece cleaned up": (lambda: _word_piece(cleanup=True), {}),
}
SENTENCEPIECE = [
    name for name, (make, _) in FAMILIES.items() if make in (_llama2, _gemma) or "metaspace" in name
]
SENTENCEPIECE += ["mistral", "unigram"]
ANY_TEXT = [
    name
    for name in FAMILIES
    if name not in ("unigram", "word piece", "word piece cleaned up", "phi3")
]
"""Families that give back every text; the others normalise white space, or leave it out behind a
special token."""


def save_tokenizer(path: Path, family: str) -> Path:
    """Write the files of a tokenizer. Its chat template is TEMPLATE, and `<s>` is put before a
    text."""
    path.mkdir(parents=True, exist_ok=True)
    make, settings = FAMILIES[family]
    rust = make()
    rust.add_special_tokens(["<unk>", "<s>", "</s>"])
    rust.add_special_tokens(
        [AddedToken(mark, rstrip=settings.get("rstrip", False)) for mark in MARKS]
    )
    rust.add_tokens(settings.get("words", []))
    from tokenizers.processors import TemplateProcessing

    start = [("<s>", rust.token_to_id("<s>"))]
    rust.post_processor = TemplateProcessing(single="<s> $A", special_tokens=start)
    rust.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": settings.get("clean_up_tokenization_spaces", False),
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def make_tokenizer(path: Path, family: str) -> Tokenizer:
    """Return the tokenizer of a family, loaded as that of a model. Training is not the same each
    time: a path keeps the one that it has."""
    if not (path / "tokenizer.json").exists():
        save_tokenizer(path, family)
    config = path / "config.json"
    if not config.exists():
        config.write_text(json.dumps({"model_type": "llama"}))
    return load_tokenizer(path, ModelConfig(base_path=str(path)))
