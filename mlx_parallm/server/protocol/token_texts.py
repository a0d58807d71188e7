"""Token id → its text and bytes, as log-probability entries show them; each token is decoded once."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.models.tokenizer import Tokenizer


class TokenTexts:
    """Used by the server's thread only; holds at most one entry a vocabulary item."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int]] = {}

    def text(self, token_id: int, as_id: bool = False) -> str:
        """The token's text, or "token_id:<id>" for `return_tokens_as_token_ids`."""
        if as_id:
            return f"token_id:{token_id}"
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._tokenizer.token_text(token_id)
        return text

    def bytes(self, token_id: int) -> list[int]:
        """The token's bytes; half a character's are exact where the tokenizer is byte-level."""
        values = self._bytes.get(token_id)
        if values is None:
            values = self._bytes[token_id] = list(self._tokenizer.token_bytes(token_id))
        return values
