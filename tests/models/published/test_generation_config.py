"""generation_config.json: what ends a text, what a request's sampling defaults are, what is named
because nothing here reads it."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.published.generation_config import (
    APPLIED,
    NEUTRAL,
    UNDERSTOOD,
    end_tokens,
    sampling_defaults,
)
from tests.tokenizer_families import save_tokenizer


def write(folder: Path, settings: Any) -> Path:
    text = settings if isinstance(settings, str) else json.dumps(settings)
    (folder / "generation_config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("settings", "values", "not_applied"),
    [
        ({}, {}, {}),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "do_sample": True},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
            {},
        ),
        (
            {"repetition_penalty": 1.05, "max_new_tokens": 512, "top_k": 50.0, "temperature": None},
            {"repetition_penalty": 1.05, "max_tokens": 512, "top_k": 50},
            {},
        ),
        (
            {
                "do_sample": False,
                "max_length": 4096,
                "suppress_tokens": [1],
                "forced_eos_token_id": 2,
            },
            {},
            {
                "do_sample": False,
                "max_length": 4096,
                "suppress_tokens": [1],
                "forced_eos_token_id": 2,
            },
        ),
        (
            {"begin_suppress_tokens": [], "max_length": 20, "num_beams": 1, "use_cache": True},
            {},
            {},
        ),
        ({"num_beams": 4, "chat_format": "chatml"}, {}, {"num_beams": 4, "chat_format": "chatml"}),
        ({"eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "5"}, {}, {}),
    ],
)
def test_the_keys_of_vllm_are_defaults_and_others_are_named(
    settings: dict[str, Any], values: Any, not_applied: Any, tmp_path: Path
) -> None:
    found = sampling_defaults(write(tmp_path, settings))
    assert (found.values, found.not_applied) == (values, not_applied)


def test_no_key_of_transformers_vanishes(tmp_path: Path) -> None:
    """Each is applied, or understood as changing no answer, or named."""
    keys = [key for key in vars(GenerationConfig()) if not key.startswith("_")]
    assert len(keys) > 60
    for key in keys:
        found = sampling_defaults(write(tmp_path, {key: 1 if key in APPLIED else 0.25}))
        assert (key in found.not_applied) != (key in UNDERSTOOD), key
        assert (len(found.values) == 1) == (key in APPLIED), key
    for key, value in NEUTRAL.items():
        assert not sampling_defaults(write(tmp_path, {key: value})).not_applied


@pytest.mark.parametrize(
    "settings",
    [
        "{",
        "[]",
        *({k: v} for k in APPLIED for v in ("1", True, -5, [1], float("nan"))),
        {"top_k": 1.5},
    ],
)
def test_what_no_request_could_have_is_refused_by_name(settings: Any, tmp_path: Path) -> None:
    key = "cannot be read" if isinstance(settings, str) else next(iter(settings))
    with pytest.raises(ModelError, match=rf"generation_config\.json.*{key}"):
        sampling_defaults(write(tmp_path, settings))


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 1}, [3, 4]),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, [0]),
        ({"temperature": 1.0}, {"eos_token_id": 1}, [1]),
        (None, {"eos_token_id": [1, 2], "text_config": {"eos_token_id": 5}}, [1, 2]),
        (None, {"text_config": {"eos_token_id": 5}}, [5]),
        (None, {"eos_token_id": None, "decoder": {"eos_token_id": [6]}}, [6]),
        (None, {}, []),
    ],
)
def test_the_ends_are_those_of_transformers(
    generation: Any, config: dict[str, Any], ends: list[int], tmp_path: Path
) -> None:
    """And the tokenizer's own, as in vLLM."""
    save_tokenizer(tmp_path, "llama3")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    if generation is not None:
        write(tmp_path, generation)
    assert end_tokens(tmp_path, config) == ends
    tokenizer = load_tokenizer(tmp_path, ModelConfig(base_path=str(tmp_path)))
    assert tokenizer.eos_token_ids == {*ends, tokenizer.eos_token_id}


def test_an_end_that_is_no_token_id_is_refused(tmp_path: Path) -> None:
    for wrong in ("</s>", [1, "2"], 1.5, True, {}):
        with pytest.raises(ModelError, match="eos_token_id"):
            end_tokens(write(tmp_path, {"eos_token_id": wrong}), {})
