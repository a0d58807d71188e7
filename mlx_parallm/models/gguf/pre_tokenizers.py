"""How byte-level BPE splits a text before it merges, by llama.cpp's names: GGUF files are read
and written by it."""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Rules = tuple[tuple[str, ...], bool]

# How a tokenizer splits, and whether a whole word needs no merges → llama.cpp's name
# (src/llama-vocab.cpp; MIT). Each gives the same ids in a real llama.cpp
# (tests/export/test_vocabulary.py).
PRE_TOKENIZERS: dict[Rules, str] = {
    ((_LLAMA3, "bytes"), True): "llama-bpe",
    ((_LLAMA3, "bytes"), False): "dbrx",
    ((_QWEN2, "bytes"), False): "qwen2",
    ((_QWEN35, "bytes"), False): "qwen35",
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
}
