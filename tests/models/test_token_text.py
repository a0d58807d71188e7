"""What a token stands for in its place, and the tokens of a text behind a prompt, over families of
tokenizers.

The kind: a piece that is decoded or encoded alone loses, or gets, what its place would give it.
Looked at: Llama 2's dummy space from the normaliser (before each stretch between special tokens)
and Metaspace's ("first", "always", "never"), Gemma's without one, byte fallback, a decoder that
does not know byte fallback, Unigram, special tokens that swallow the white space behind them
(Phi-3), byte level with and without a prefix space, Llama 3's splits, added words with spaces and
with letters of GPT-2's alphabet, WordPiece's joints, clean-up of spaces, tokenizers in Python.
"""

import random
from collections.abc import Callable, Sequence

import pytest

from mlx_parallm.models.text.token_text import TokenPieces, byte_level_alphabet
from mlx_parallm.models.tokenizer import CONTEXT, Tokenizer
from tests.tokenizer_families import ANY_TEXT, FAMILIES, SENTENCEPIECE, make_tokenizer

PARTS = [
    "Hello",
    " world",
    "world",
    "wor",
    "ld",
    " ",
    "  ",
    "\n",
    "é",
    "€",
    "🙂",
    "你好",
    "世界",
    "x",
    ".",
    ", ",
    "42",
]
PARTS += [
    "    return",
    "<|user|>",
    "<|assistant|>\n",
    "</s>",
    " é",
    "two words",
    "don't",
    "\n\n",
    "\t",
    "👩‍🚀",
]
DRAWS = 250

Make = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    known: dict[str, Tokenizer] = {}

    def of(family: str) -> Tokenizer:
        if family not in known:
            known[family] = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), family)
        return known[family]

    return of


def texts(seed: str, parts: list[str] = PARTS) -> list[tuple[str, str]]:
    """Prompts and what follows them, cut anywhere."""
    rng = random.Random(seed)
    drawn = [
        (
            "".join(rng.choices(parts, k=rng.randint(0, 5))),
            "".join(rng.choices(parts, k=rng.randint(1, 5))),
        )
        for _ in range(DRAWS)
    ]
    return [
        ("Hello", " world"),
        ("Hello wor", "ld"),
        ("Hello ", "world"),
        ("<|assistant|>\n", "world"),
        *drawn,
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_in_their_places_are_the_text(make: Make, family: str) -> None:
    """Joined, the tokens' bytes are the text's, and their texts too where characters are whole.
    Any ids, at random too; shown or not, a stream gives the same."""
    tokenizer = make(family)
    rng = random.Random(family)
    samples = [tokenizer.encode(prompt + text) for prompt, text in texts(family)]
    samples += [
        rng.choices(range(tokenizer.vocab_size), k=rng.randint(1, 12)) for _ in range(DRAWS)
    ]
    for ids in samples:
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skip)
            reader = tokenizer.detokenizer(skip_special_tokens=skip)
            data, shown, streamed = b"", [], ""
            for token in ids:
                hidden = skip and token in tokenizer.special_ids
                data += b"" if hidden else reader.bytes_of(token)
                shown.append("" if hidden else reader.text_of(token))
                assert reader.length == len(streamed)
                streamed += reader.add(token)
            assert streamed + reader.finish() == whole == data.decode(errors="replace")
            if "\ufffd" not in "".join(shown):
                assert "".join(shown) == whole
        assert "".join(tokenizer.decode_parts([ids[:3], ids[3:4], ids[4:]])) == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_is_as_the_tokenizer_s_own_decoder_shows_it(make: Make, family: str) -> None:
    """Where that one is right: not where it takes a run of bytes apart that is not a character,
    reads "é" among GPT-2's letters, or does not know byte fallback."""
    tokenizer = make(family)
    for prompt, text in texts(family):
        ids = tokenizer.encode(prompt + text)
        for skip in (True, False):
            own = tokenizer._hf.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            if family in ("metaspace decoder", "added words") and own != prompt + text:
                continue
            assert tokenizer.decode(ids, skip_special_tokens=skip) == own


@pytest.mark.parametrize("family", ANY_TEXT)
def test_every_text_comes_back(make: Make, family: str) -> None:
    tokenizer = make(family)
    for prompt, text in texts(family, [part for part in PARTS if "<" not in part]):
        if "<" in prompt:
            continue
        whole = prompt + text
        shown = tokenizer.decode(tokenizer.encode(whole))
        # Metaspace puts none before it then, so the two texts have the same tokens
        if whole.startswith(" "):
            assert shown in (whole, whole[1:])
        else:
            assert shown.removeprefix(" " if "prefix" in family else "") == whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_completion_has_the_tokens_that_it_has_behind_its_prompt(make: Make, family: str) -> None:
    """Where the prompt's tokens begin the whole's, the rest of those; where the join merges, no
    space is put in or lost. Families that normalise white space: as far as a text comes back at
    all."""
    tokenizer = make(family)
    merged = 0
    for prompt, completion in texts(family):
        before, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + completion)
        behind = tokenizer.encode_after(prompt, completion)
        if whole[: len(before)] == before:
            assert before + behind == whole
            continue
        merged += 1
        if family in ANY_TEXT:
            show = [
                tokenizer.decode(ids, skip_special_tokens=False)
                for ids in (before, [*before, *behind])
            ]
            # behind a special token a dummy space is the tokenizer's own
            stretches = completion.split("<")[0]
            assert show[1].startswith(show[0] + stretches)
            assert len(behind) > 0
    assert merged, "the draws hold joins that merge"


@pytest.mark.parametrize("family", [name for name in ANY_TEXT if name != "metaspace decoder"])
def test_a_join_that_merges_keeps_the_prompt_and_adds_no_space(make: Make, family: str) -> None:
    tokenizer = make(family)
    prompt = tokenizer.encode("Hello wor")
    ids = [*prompt, *tokenizer.encode_after("Hello wor", "ld, world")]
    assert tokenizer.decode(ids).lstrip() == "Hello world, world"
    one = [*tokenizer.encode("Hello"), *tokenizer.encode_after("Hello", " world")]
    assert tokenizer.decode(one).lstrip() == "Hello world" and one == tokenizer.encode(
        "Hello world"
    )
    line = tokenizer.encode_after("user: hi\nassistant:\n", "world")
    assert tokenizer.decode(line, opens_text=False) == "world"


@pytest.mark.parametrize("family", ["llama2", "mistral", "gemma", "llama3"])
def test_a_long_prompt_is_read_at_its_end_only(make: Make, family: str) -> None:
    tokenizer, encoded = make(family), []
    prompt = "The world is large; " * (CONTEXT // 8) + "say the wor"
    whole = tokenizer.encode(prompt + "ds are", add_special_tokens=False)

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer._hf, name)

        def encode(self, text: str, **options: object) -> list[int]:
            encoded.append(len(text))
            return list(tokenizer._hf.encode(text, **options))

    own = Tokenizer.__new__(Tokenizer)
    own.__dict__ |= vars(tokenizer) | {"_hf": Counted()}
    ids = own.encode_after(prompt + "ds", " are")
    assert ids == whole[-len(ids) :] and max(encoded) < CONTEXT + 64


@pytest.mark.parametrize("family", SENTENCEPIECE)
def test_sentencepiece_keeps_its_space_and_its_bytes(make: Make, family: str) -> None:
    """The faults' own inputs."""
    tokenizer = make(family)
    vocabulary = tokenizer._hf.get_vocab()
    world = vocabulary.get("▁world", vocabulary.get("▁w"))
    word = " world" if "▁world" in vocabulary else " w"
    assert tokenizer.token_text(world) == word and tokenizer.token_bytes(world) == word.encode()
    assert tokenizer.token_texts([world, world]) == [
        word if family in ("gemma", "metaspace never") else word[1:],
        word,
    ]
    assert tokenizer.decode([world], opens_text=False) == word
    if family == "unigram":
        return
    smile = [vocabulary[f"<0x{byte:02X}>"] for byte in "🙂".encode()]
    assert [tokenizer.token_bytes(token) for token in smile] == [
        bytes([byte]) for byte in "🙂".encode()
    ]
    assert tokenizer.token_text(smile[0]) == "\ufffd"
    reader = tokenizer.detokenizer()
    assert [reader.add(token) for token in [world, *smile, smile[0], world]][1:] == [
        "",
        "",
        "",
        "🙂",
        "",
        "\ufffd" + word,
    ]


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if "prefix" not in name and "word piece" not in name]
)
def test_what_follows_a_prompt_is_read_as_it_was_tokenised(make: Make, family: str) -> None:
    """Text → tokens behind a prompt → text. Llama 2's and Phi-3's tokenizers put their space
    behind a special token too, where it is not text; Mistral's and Gemma's do not."""
    tokenizer = make(family)
    assert tokenizer.opens_text(tokenizer.encode("")), "<s> alone"
    behind = "llama2" in family or family in (
        "phi3",
        "metaspace always",
        "metaspace decoder",
        "unigram",
    )
    for prompt in ("Hello", "<|user|>Hello</s><|assistant|>", "<|user|>Hello</s><|assistant|>\n"):
        ids = tokenizer.encode(prompt)
        opens = tokenizer.opens_text(ids)
        assert opens == (behind and ids[-1] in tokenizer.special_ids)
        for text in ("world", ", world"):
            shown = tokenizer.decode(tokenizer.encode_after(prompt, text), opens_text=opens)
            assert (shown.lstrip() if family == "unigram" else shown) == text


@pytest.mark.parametrize("family", ["gpt2", "added words"])
def test_added_words_show_as_they_are_written(make: Make, family: str) -> None:
    tokenizer = make(family)
    for text in ("two words", "a é b", "caféé", "x<tool call> y"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_where_each_token_of_a_known_text_stands(make: Make, family: str) -> None:
    """A prompt that is shown as it was sent: `<s>` before it takes no place, nor does a dummy
    space."""
    tokenizer = make(family)
    for prompt, text in texts(family):
        whole = prompt + text
        reader, last = tokenizer.text_reader(whole), 0
        for token in tokenizer.encode(whole):
            assert last <= reader.length <= len(whole)
            last, shown = reader.length, reader.text_of(token)
            hidden = token in tokenizer.special_ids and not whole.startswith(shown, last)
            if family in ANY_TEXT and not hidden and "\ufffd" not in shown:
                assert whole.startswith(shown, last), (whole, shown, last)
            reader.add(token)
        if family in ANY_TEXT:
            assert reader.length == len(whole)


class InPython:
    """A tokenizer over tiktoken's ranks, as Kimi's and Qwen 1's code has them: one gives
    letters, one gives bytes."""

    all_special_ids = (256,)

    def __init__(self, *, raw: bool) -> None:
        letter = {byte: character for character, byte in byte_level_alphabet().items()}
        self.raw, self.letters = raw, [letter[byte] for byte in range(256)]
        if not raw:
            self.byte_decoder = byte_level_alphabet()
        self.added_tokens_decoder = {256: "<end>"}

    def convert_ids_to_tokens(self, token: int) -> str | bytes:
        return bytes([token]) if self.raw else self.letters[token]


@pytest.mark.parametrize("raw", [True, False])
def test_tokenizers_in_python_have_exact_bytes(raw: bool) -> None:
    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    pieces = TokenPieces(InPython(raw=raw), decode, {256}, 257)
    assert (
        b"".join(map(pieces.inner, "🙂 é".encode()))
        == "🙂 é".encode()
        == b"".join(map(pieces.first, "🙂 é".encode()))
    )
    assert (pieces.inner(256), pieces.inner(300)) == (b"<end>", b"")


def test_ids_beyond_the_vocabulary_stand_for_nothing(make: Make) -> None:
    """A model's embedding is often padded."""
    tokenizer = make("llama2")
    beyond, [*hello] = tokenizer.vocab_size + 5, tokenizer.encode("Hello")
    assert (
        tokenizer.decode([beyond, *hello, beyond]) == "Hello"
        and tokenizer.token_bytes(beyond) == b""
    )
