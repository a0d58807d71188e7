"""Text and ids: nothing is lost between them, whole or token by token."""

import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer
from tests.tiny_models import TINY_ASSETS

TEXTS = ["12+34=46", " leading and trailing ", "naïve café 你好 🙂🏽 \n\n\ttabs", "", "a" * 50]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(TINY_ASSETS, ModelConfig())


@pytest.mark.parametrize("text", TEXTS)
def test_incremental_text_adds_up_to_the_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join(pieces) + detokenizer.finish() == text
    assert all("\ufffd" not in piece for piece in pieces)


def test_half_a_character_is_held_back_and_shown_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_special_tokens_do_not_show_and_bytes_are_exact(tokenizer: Tokenizer) -> None:
    (eos, *_) = tokenizer.eos_token_ids
    ids = [*tokenizer.encode("ab", add_special_tokens=False), eos]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab" + tokenizer.token_text(eos)
    smile = tokenizer.encode("🙂", add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in smile) == "🙂".encode()


def test_chat_ids_hold_each_special_token_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.render_chat([{"role": "user", "content": "1+1="}])
    text = tokenizer.render_chat_text([{"role": "user", "content": "1+1="}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert text.endswith("assistant\n")
