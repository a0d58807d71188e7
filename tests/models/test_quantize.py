"""Quantise on load: mlx-lm's own result bit for bit, layer by layer, and kept for the next
start."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_whole
from mlx_lm.utils import quantize_model

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.models import quantize
from mlx_parallm.models.loading import check_model, load_model
from mlx_parallm.models.quantize import load_quantized, quantize_layers
from tests.active_memory import active_memory
from tests.tiny_models import EXPERTS, QWEN3, make_model, save_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "m", dtype=mx.bfloat16)


def arrays(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def assert_same(a: dict[str, mx.array], b: dict[str, mx.array]) -> None:
    assert {name: array.dtype for name, array in a.items()} == {
        name: array.dtype for name, array in b.items()
    }
    assert [name for name in a if not mx.array_equal(a[name], b[name])] == []


def model_config(checkpoint: Path) -> ModelConfig:
    return ModelConfig(base_path=str(checkpoint), quantized_cache=str(checkpoint.parent / "cache"))


@pytest.mark.parametrize(
    "architecture",
    [QWEN3, {**QWEN3, **EXPERTS, "model_type": "qwen3_moe"}],
    ids=["dense", "experts, of which the router gets 8 bits"],
)
def test_the_result_is_mlx_lms_own_bit_for_bit(
    tmp_path: Path, architecture: dict[str, Any]
) -> None:
    path = save_checkpoint(tmp_path / "m", architecture, dtype=mx.bfloat16)
    expected, settings = quantize_model(*load_whole(path), 64, 4)
    for _ in ("made", "from the cache"):
        model, config = load_quantized(path, cache=tmp_path / "cache")
        assert_same(arrays(model), arrays(expected))
        assert config["quantization"] == settings["quantization"]


def test_a_layer_is_finished_before_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is alive when a layer is evaluated: the quantised ones so far, and the weights of
    this one."""
    model = make_model(
        QWEN3
        | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "head_dim": 64}
    )
    lazy = {
        name: mx.random.normal(array.shape, key=mx.random.key(1))
        for name, array in arrays(model).items()
    }
    whole = sum(array.nbytes for array in lazy.values())
    largest = max(array.nbytes for array in lazy.values())
    model.load_weights(list(lazy.items()))
    lazy.clear()
    mx.clear_cache()
    before = active_memory()
    mx.reset_peak_memory()
    quantize_layers(model)
    small = sum(array.nbytes for array in arrays(model).values())
    # drawing random numbers takes copies of one layer
    assert mx.get_peak_memory() - before <= small + 3 * largest
    assert small + 3 * largest < 0.6 * whole


def test_the_second_start_reads_the_kept_copy(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model_config(checkpoint)
    first = load_model(config, quantize=True)
    monkeypatch.setattr(quantize, "quantize_layers", None)
    second = load_model(config, quantize=True)
    assert_same(arrays(first.model), arrays(second.model))
    assert second.path == checkpoint
    entry = next((checkpoint.parent / "cache").iterdir())
    assert entry.name.startswith("m-4bit-")
    assert {array.dtype for array in arrays(load_whole(entry)[0]).values()} == {
        mx.uint32,
        mx.bfloat16,
    }


HARMS: dict[str, Callable[[Path], object]] = {
    "weights damaged": lambda entry: (entry / "model.safetensors").write_bytes(b"\xff" * 100_000),
    "weights cut": lambda entry: os.truncate(entry / "model.safetensors", 1000),
    "source lost": lambda entry: (entry / "source.json").unlink(),
    "source damaged": lambda entry: (entry / "source.json").write_text("{"),
}


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_copy_that_cannot_be_read_is_made_again(checkpoint: Path, harm: Any) -> None:
    config = model_config(checkpoint)
    first = load_model(config, quantize=True)
    (entry,) = (checkpoint.parent / "cache").iterdir()
    harm(entry)
    assert_same(arrays(load_model(config, quantize=True).model), arrays(first.model))
    assert list((checkpoint.parent / "cache").iterdir()) == [entry]
    assert quantize._from_cache(entry, quantize._key(checkpoint)) is not None


def test_another_checkpoint_is_another_copy(checkpoint: Path) -> None:
    config = model_config(checkpoint)
    load_model(config, quantize=True)
    save_checkpoint(checkpoint.parent / "other", seed=1, dtype=mx.bfloat16)
    shutil.copy(checkpoint.parent / "other" / "model.safetensors", checkpoint)
    second = load_model(config, quantize=True)
    assert_same(
        arrays(second.model),
        arrays(
            load_model(config.model_copy(update={"quantized_cache": "off"}), quantize=True).model
        ),
    )
    assert len(list((checkpoint.parent / "cache").iterdir())) == 2


def test_what_a_killed_process_left_is_removed(checkpoint: Path) -> None:
    cache = checkpoint.parent / "cache"
    name = quantize._entry_name(checkpoint, quantize._key(checkpoint))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (cache / f".{name}.{ended.pid}").mkdir(parents=True)
    load_model(model_config(checkpoint), quantize=True)
    assert [path.name for path in cache.iterdir()] == [name]


def test_a_cache_that_cannot_be_written_costs_a_warning_only(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        quantize, "log", SimpleNamespace(warning=lambda text, **_: said.append(text))
    )
    (checkpoint.parent / "cache").write_text("a file where a directory should be")
    load_model(model_config(checkpoint), quantize=True)
    assert "cannot be kept for the next start" in said[-1]


def test_a_quantised_checkpoint_is_not_quantised_again(checkpoint: Path) -> None:
    load_model(model_config(checkpoint), quantize=True)
    (entry,) = (checkpoint.parent / "cache").iterdir()
    for refuse in (
        load_model,
        lambda config, quantize: check_model(config, train=True, quantize=quantize),
    ):
        with pytest.raises(
            ConfigError,
            match="quantize_base",
        ):
            refuse(ModelConfig(base_path=str(entry)), quantize=True)


def test_a_model_without_a_layer_to_quantise(tmp_path: Path) -> None:
    narrow = QWEN3 | {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    save_checkpoint(tmp_path / "m", narrow)
    with pytest.raises(ModelError, match="multiple of 64"):
        load_model(model_config(tmp_path / "m"), quantize=True)


def test_where_copies_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert ModelConfig().quantized_cache_directory() == tmp_path / "mlx_parallm" / "quantized"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert (
        ModelConfig().quantized_cache_directory()
        == Path.home() / ".cache" / "mlx_parallm" / "quantized"
    )
    assert ModelConfig(quantized_cache="off").quantized_cache_directory() is None
    assert (
        json.loads(ModelConfig(quantized_cache="~/x").model_dump_json())["quantized_cache"] == "~/x"
    )
    assert ModelConfig(quantized_cache="~/x").quantized_cache_directory() == Path.home() / "x"
