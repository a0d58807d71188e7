"""Text and ids. That text streamed is text whole: tests/engine/test_streaming_boundary.py."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.tokenizer import Tokenizer, _rust_decoder
from tests.tiny_models import TINY_ASSETS


def test_half_a_character_is_held_back_and_shown_at_the_end(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.encode("🙂", add_special_tokens=False)
    assert len(ids) > 1
    detokenizer = tiny_tokenizer.detokenizer()
    assert [detokenizer.add(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert set(detokenizer.finish()) == {"\ufffd"}


def test_special_tokens_do_not_show_and_bytes_are_exact(tiny_tokenizer: Tokenizer) -> None:
    (eos, *_) = tiny_tokenizer.eos_token_ids
    ids = [*tiny_tokenizer.encode("ab", add_special_tokens=False), eos]
    assert tiny_tokenizer.decode(ids) == "ab"
    assert tiny_tokenizer.decode(
        ids, skip_special_tokens=False
    ) == "ab" + tiny_tokenizer.token_text(eos)
    smile = tiny_tokenizer.encode("🙂", add_special_tokens=False)
    assert b"".join(tiny_tokenizer.token_bytes(token) for token in smile) == "🙂".encode()


def test_chat_ids_hold_each_special_token_once(tiny_tokenizer: Tokenizer) -> None:
    ids = tiny_tokenizer.render_chat([{"role": "user", "content": "1+1="}])
    text = tiny_tokenizer.render_chat_text([{"role": "user", "content": "1+1="}])
    assert tiny_tokenizer.decode(ids, skip_special_tokens=False) == text
    assert text.endswith("assistant\n")


@pytest.mark.parametrize("skip", [True, False])
def test_it_decodes_as_transformers_does(tiny_tokenizer: Tokenizer, skip: bool) -> None:
    chat = tiny_tokenizer.render_chat([{"role": "user", "content": "a , b 🙂 don 't ."}])
    ids = [*chat, *tiny_tokenizer.eos_token_ids]
    hf = tiny_tokenizer._hf
    wanted = hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert tiny_tokenizer.decode(tuple(ids), skip_special_tokens=skip) == wanted


def test_a_tokenizer_with_a_decoder_of_its_own_keeps_it(tiny_tokenizer: Tokenizer) -> None:
    hf = tiny_tokenizer._hf
    assert _rust_decoder(hf) is hf.backend_tokenizer
    kind = type(hf)
    own = type("Own", (kind,), {"_decode": lambda self, ids, **options: "mine"})
    assert _rust_decoder(own(tokenizer_object=hf.backend_tokenizer)) is None


def test_a_text_beyond_the_context_is_tokenised_without_a_warning(
    tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' "will result in indexing errors" is untrue here: such a request is refused
    before it runs."""
    hf = tiny_tokenizer._hf
    monkeypatch.setattr(hf, "model_max_length", 4)
    monkeypatch.setattr(hf, "deprecation_warnings", {})  # it warns once in the life of a tokenizer
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(tiny_tokenizer.encode("Sort: hgfa and some more")) > 4
    assert not caplog.records, caplog.text
    hf.encode("Sort: hgfa and some more")
    assert "longer than the specified maximum" in caplog.text  # the trap does catch it


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5", "phi3"])
def test_a_generic_class_means_what_tokenizer_json_says(family: str, tmp_path: Path) -> None:
    """transformers takes the family's own class there, and its words are others: the instruction
    of this model was one token and became seven."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_ASSETS / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    tokenizer = load_tokenizer(tmp_path, ModelConfig(base_path=str(tmp_path)))
    text = "<|im_start|>user\nReverse: hfkdo<|im_end|>\n"
    written = RustTokenizer.from_file(str(TINY_ASSETS / "tokenizer.json"))
    assert list(tokenizer.encode(text)) == written.encode(text, add_special_tokens=False).ids
