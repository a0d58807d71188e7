"""Which text a token stands for in its place. The one answer for texts, streams, stop strings and
log-probabilities.

A token decoded alone loses what its place gives it: SentencePiece's ` world` its space, `<0xF0>`
its byte, WordPiece's `##ing` its joint. So each token has two forms in bytes: inside a text
(`TokenPieces.inner`), and as the first token of a text (`TokenPieces.first`), where SentencePiece
and WordPiece show no space. A text is those bytes joined and read as UTF-8; bytes that are no
character show as U+FFFD. Both forms are computed once a token, so a token costs O(1).
"""

import codecs
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

Decode = Callable[[Sequence[int]], str]
"""Token ids → the text that the tokenizer's own decoder makes of them, special tokens shown."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SLACK = 16
"""Bytes that a normaliser may have left out of a text between two tokens."""
_MOST_ANCHORS = 4096
"""Tokens that are tried as an anchor before the decoder counts as one that shows each token
alone."""


class TokenPieces:
    """Hold the bytes of each token, computed when they are first asked for.

    Args:
        tokenizer: transformers' tokenizer.
        decode: its decoder.
        special_ids: tokens that show as they are written, wherever they stand (WordPiece puts a
            space before them, as before any word).
        size: ids from here on stand for nothing (a model's vocabulary may be padded).
    """

    def __init__(
        self, tokenizer: Any, decode: Decode, special_ids: Collection[int], size: int
    ) -> None:
        self._tokenizer, self._decode, self._size = tokenizer, decode, size
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None else str(backend.decoder)
        self._added = {
            number: str(token) for number, token in tokenizer.added_tokens_decoder.items()
        }
        self._special_ids = special_ids
        self._word_piece = "WordPiece" in decoder
        self._byte_tokens = (
            backend is None
            or "ByteFallback" in decoder
            or getattr(backend.model, "byte_fallback", False) is True
        )
        self.byte_of: dict[str, int] | None = None
        """GPT-2's alphabet (character → byte), if the vocabulary is written in it."""
        if "ByteLevel" in decoder:
            self.byte_of = byte_level_alphabet()
        elif backend is None:  # in Python, such as those over tiktoken's files
            self.byte_of = getattr(tokenizer, "byte_decoder", None)
        self._inner: dict[int, bytes] = {}
        self._first: dict[int, bytes] = {}

    def inner(self, token_id: int) -> bytes:
        """Return what the token adds to a text that has begun; b"": nothing."""
        piece = self._inner.get(token_id)
        if piece is None:
            piece = self._inner[token_id] = self._read(token_id)
        return piece

    def first(self, token_id: int) -> bytes:
        """Return the token's text at the beginning of a text: without the space that the
        decoder leaves out there.

        One space at most: Metaspace's decoder leaves out all those of a first token, of which one
        is a dummy.
        """
        piece = self._first.get(token_id)
        if piece is None:
            piece = self.inner(token_id)
            if self._word_piece:
                piece = self._decode([token_id]).encode()
            written = self._added.get(token_id, "").startswith(" ")
            if piece.startswith(b" ") and self.byte_of is None and not written:
                shown = self._decode([token_id]).encode()
                if shown != piece and shown.lstrip(b" ") == piece.lstrip(b" "):
                    piece = piece[1:]
            self._first[token_id] = piece
        return piece

    def text(self, token_ids: Sequence[int], *, opens_text: bool, hidden: Collection[int]) -> str:
        """Return the text that a `Detokenizer` with these options makes of all of them."""
        shown, cached = [token for token in token_ids if token not in hidden], self._inner
        for token in set(shown).difference(cached):
            self.inner(token)
        pieces = [cached[token] for token in shown]
        if (
            opens_text
            and (begin := next((at for at, piece in enumerate(pieces) if piece), None)) is not None
        ):
            pieces[begin] = self.first(shown[begin])
        return b"".join(pieces).decode(errors="replace")

    def _read(self, token_id: int) -> bytes:
        if token_id in self._special_ids and token_id in self._added and not self._word_piece:
            return self._added[token_id].encode()
        raw = (
            self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < self._size else None
        )
        if raw is None or isinstance(raw, bytes):
            return raw or b""
        if self.byte_of is not None:
            spelled = self._spelled(raw)
            # An added word stands as it is written ("é"), unless it is one of the vocabulary too
            # ("Ġx").
            if spelled is not None and (token_id not in self._added or _is_text(spelled)):
                return spelled
            return raw.encode()
        if self._byte_tokens and (byte := _BYTE_TOKEN.fullmatch(raw)) is not None:
            return bytes.fromhex(byte[1])
        return self._between(token_id).encode()

    def _spelled(self, word: str) -> bytes | None:
        """Return the bytes that a word in GPT-2's alphabet spells; None: it has other letters,
        or there is none."""
        if self.byte_of is None or not all(letter in self.byte_of for letter in word):
            return None
        return bytes(self.byte_of[letter] for letter in word)

    def _between(self, token_id: int) -> str:
        """Return the token's text between two others, as the decoder shows it."""
        if self._anchor is None:
            return self._decode([token_id])
        anchor, left, right = self._anchor
        text = self._decode([anchor, token_id, anchor])
        if text.startswith(left) and text.endswith(right) and len(text) >= len(left) + len(right):
            return text[len(left) : len(text) - len(right)]
        return self._decode([token_id])

    @cached_property
    def _anchor(self) -> tuple[int, str, str] | None:
        """A token that others can come between, its text as the first one and as a later one.
        None: there is none."""
        for token in range(min(self._size, _MOST_ANCHORS)):
            raw = None if token in self._added else self._tokenizer.convert_ids_to_tokens(token)
            if not isinstance(raw, str) or _BYTE_TOKEN.fullmatch(raw):
                continue
            left, both = self._decode([token]), self._decode([token, token])
            if left.strip() and both.startswith(left) and both[len(left) :].strip():
                return token, left, both[len(left) :]
        return None


class Detokenizer:
    """Read tokens one after another: text is given out as soon as its characters are complete.

    Args:
        opens_text: the first token begins a text; False: it is in a text that has begun, after
            a prompt.
        hidden: tokens that do not show.
    """

    def __init__(
        self, pieces: TokenPieces, *, opens_text: bool = True, hidden: Collection[int] = ()
    ) -> None:
        self._pieces, self._hidden, self._opens_at_start = pieces, hidden, opens_text
        self._opens = opens_text
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.length = 0
        """Characters given out so far: the next token's text begins here."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that this token has, or would have, in this place. A hidden one's
        too."""
        return self._pieces.first(token_id) if self._opens else self._pieces.inner(token_id)

    def text_of(self, token_id: int) -> str:
        """Return the text of `bytes_of`; part of a character shows as U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def add(self, token_id: int) -> str:
        """Take the next token; return the text that is complete with it (may be empty)."""
        if token_id in self._hidden or not self._pieces.inner(token_id):
            return ""
        text = self._characters.decode(self.bytes_of(token_id))
        self._opens = False
        self.length += len(text)
        return text

    def finish(self) -> str:
        """Return the rest, half a character as U+FFFD. Further `add`s start from nothing."""
        rest = self._characters.decode(b"", final=True)
        self._opens, self.length = self._opens_at_start, 0
        return rest


class TextReader:
    """Follow the tokens of a text that is known, such as a prompt's, through that text.

    Args:
        special_ids: tokens that do not show if the text does not have them, such as one put
            before it.
    """

    def __init__(self, pieces: TokenPieces, text: str, special_ids: Collection[int]) -> None:
        self._pieces, self._special_ids = pieces, special_ids
        self._text, self._at = text.encode(errors="replace"), 0
        self.length = 0
        """Characters before the next token's text."""

    @property
    def place(self) -> int:
        """Bytes before the next token's text."""
        return self._at

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that this token has, or would have, in this place."""
        inner = self._pieces.inner(token_id)
        # the space may not be the text's
        forms = (inner, self._pieces.first(token_id), inner.removeprefix(b" "))
        return next((form for form in forms if self._text.startswith(form, self._at)), inner)

    def text_of(self, token_id: int) -> str:
        """Return the text of `bytes_of`; part of a character shows as U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def add(self, token_id: int) -> None:
        """Take the next token. One that a normaliser has changed is looked for nearby."""
        piece = self.bytes_of(token_id)
        slack = 0 if token_id in self._special_ids else _SLACK
        start = self._text.find(piece, self._at, self._at + len(piece) + slack)
        if start < 0:
            return
        end = start + len(piece)
        begun = sum(byte & 0xC0 != 0x80 for byte in self._text[self._at : end])
        self.length += begun + self._inside(self._at) - self._inside(end)
        self._at = end

    def _inside(self, at: int) -> bool:
        """True: a character continues here."""
        return at < len(self._text) and self._text[at] & 0xC0 == 0x80


def byte_level_alphabet() -> dict[str, int]:
    """Return the inverse of GPT-2's printable alphabet of bytes: character → byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    hidden = [byte for byte in range(256) if byte not in printable]
    pairs = [(chr(byte), byte) for byte in printable]
    return dict(pairs + [(chr(256 + position), byte) for position, byte in enumerate(hidden)])


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
