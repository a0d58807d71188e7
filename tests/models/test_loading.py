"""Checkpoints in Hugging Face layout: found, loaded as float32 on CPU, quantised on request, and
refused in words."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError, RequestError
from mlx_parallm.models import loading
from mlx_parallm.models.loading import load_model, load_tokenizer, resolve_model_path
from mlx_parallm.system.device.traits import is_cpu
from tests.tiny_models import LLAMA3_ROPE, TINY_ASSETS, make_model, save_checkpoint


def test_a_half_precision_checkpoint_is_float32_on_cpu(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", dtype=mx.float16)
    loaded = load_model(ModelConfig(base_path=str(tmp_path / "m")))
    dtypes = {array.dtype for _, array in tree_flatten(loaded.model.parameters())}
    assert dtypes == ({mx.float32} if is_cpu() else {mx.float16})
    assert loaded.max_model_len == 2048
    kept = load_model(ModelConfig(base_path=str(tmp_path / "m"), dtype="float16"))
    assert {array.dtype for _, array in tree_flatten(kept.model.parameters())} == {mx.float16}


def test_loading_reads_the_weights_that_were_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "m", LLAMA3_ROPE, seed=3)
    tokens = mx.array([[1, 2, 3]])
    loaded = load_model(ModelConfig(base_path=str(tmp_path / "m")))
    assert mx.allclose(loaded.model(tokens), make_model(LLAMA3_ROPE, seed=3)(tokens), atol=1e-5)


def test_a_model_class_without_its_parents_constructor_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """recurrent_gemma of mlx-lm 0.32.2."""
    read = loading.load_hf_model

    def unconstructed(*arguments: Any, **options: Any) -> tuple[nn.Module, Any]:
        model, config = read(*arguments, **options)
        del model.__dict__["_no_grad"]
        return model, config

    monkeypatch.setattr(loading, "load_hf_model", unconstructed)
    loaded = load_model(ModelConfig(base_path=str(save_checkpoint(tmp_path / "m"))))
    assert not tree_flatten(loaded.model.trainable_parameters())


def test_the_builtin_model_loads_with_its_tokenizer() -> None:
    assert resolve_model_path("builtin:tiny") == TINY_ASSETS
    loaded = load_model(ModelConfig())
    tokenizer = load_tokenizer(loaded.path, ModelConfig())
    assert tokenizer.vocab_size <= loaded.vocab_size
    assert tokenizer.eos_token_ids
    assert tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("base_path", "message"),
    [
        ("/nowhere/at/all", "neither a directory nor a hub id"),
        ("builtin:huge", "neither a directory nor a hub id"),
        ("{tmp}/unknown", "cannot be loaded"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, base_path: str, message: str) -> None:
    (tmp_path / "unknown").mkdir()
    (tmp_path / "unknown" / "config.json").write_text('{"model_type": "perceptron"}')
    mx.save_safetensors(str(tmp_path / "unknown" / "model.safetensors"), {"weight": mx.zeros(1)})
    with pytest.raises(ModelError, match=message):
        load_model(ModelConfig(base_path=base_path.format(tmp=tmp_path)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", -1),
        ("rope_theta", 0),
        ("num_hidden_layers", 10**6),
        ("hidden_size", 0),
    ],
)
def test_numbers_that_no_model_has_are_named(key: str, value: float, tmp_path: Path) -> None:
    """The first two were tracebacks; with the third the process did not react for minutes."""
    path = save_checkpoint(tmp_path / "model")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    for check in (
        lambda: loading.check_model(ModelConfig(base_path=str(path)), train=True),
        lambda: load_model(ModelConfig(base_path=str(path))),
    ):
        with pytest.raises(
            ModelError, match=rf"config.json: {key} = {value}: expected more than 0"
        ):
            check()


def test_chat_templates_from_text_and_file(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tail }}"
    file = tmp_path / "template.jinja"
    file.write_text(template)
    messages = [{"role": "user", "content": "hi"}]
    for source in (template, str(file)):
        tokenizer = load_tokenizer(TINY_ASSETS, ModelConfig(chat_template=source))
        assert tokenizer.render_chat_text(messages, template_kwargs={"tail": "!"}) == "[user]hi!"
    # Free text of any length is not a path (OSError 36 above 255 bytes), and a null character is none
    # of a path either.
    for free in (
        template + "{# " + "x" * 300 + " #}",
        template + "{# \0 #}",
        "~nobody/" + template,
        "a/" * 3000 + template,
    ):
        tokenizer = load_tokenizer(TINY_ASSETS, ModelConfig(chat_template=free))
        assert tokenizer.render_chat_text(messages, template_kwargs={"tail": "!"}).endswith(
            "[user]hi!"
        )
    (tmp_path / "binary.jinja").write_bytes(b"\xff\xfe")
    for missing, reason in (
        (tmp_path / "none.jinja", "no file"),
        (tmp_path, "no file"),
        (tmp_path / "binary.jinja", "cannot"),
    ):
        with pytest.raises(ModelError, match=rf"model.chat_template: .*{reason}"):
            load_tokenizer(TINY_ASSETS, ModelConfig(chat_template=str(missing)))
    broken = load_tokenizer(
        TINY_ASSETS, ModelConfig(chat_template="{{ raise_exception('no system role') }}")
    )
    with pytest.raises(RequestError, match="no system role"):
        broken.render_chat_text(messages)


def test_a_directory_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    """`serve` started and answered 400 "no chat template"; `train` blamed the prompts."""
    model = save_checkpoint(tmp_path / "m")
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"m has no tokenizer\.json"):
        load_tokenizer(model, ModelConfig(base_path=str(model)))
