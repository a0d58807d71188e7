"""model.rope_length: one way to turn every text, in ropes that depend on a text's length. That it
is transformers' way for such a text, `test_parity.py` shows (rope=longrope,long, rope=dynamic,long).
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.errors import AdapterError, ModelError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.rope_length import check_rope_length, record_rope_length
from mlx_parallm.models.loading import LoadedModel, load_model
from mlx_parallm.models.lora import load_adapter, save_adapter
from mlx_parallm.models.published.rope import fixed_ropes
from tests.models.published.test_parity import cases, write

BY_LENGTH = [
    (name, case)
    for name in ("llama", "phi3")
    for case in cases(name)
    if case["option"].endswith(",long")
]
LAYER = "model.layers.0.self_attn.o_proj"


def load(path: Path, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(base_path=str(path), **settings))


def logits(loaded: LoadedModel, case: dict[str, Any]) -> Any:
    return np.array(loaded.model(mx.array(case["ids"])[None]))


@pytest.mark.parametrize(("name", "case"), BY_LENGTH)
def test_the_configuration_that_is_saved_is_that_model_without_a_setting(
    name: str, case: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path / "model", case)
    long = load(tmp_path / "model", rope_length=case["rope_length"])
    assert long.max_model_len >= len(case["ids"])
    write(tmp_path / "saved", case | {"config": long.config})
    assert np.array_equal(logits(load(tmp_path / "saved"), case), logits(long, case))
    again = load(tmp_path / "saved", rope_length=case["rope_length"])
    assert np.array_equal(logits(again, case), logits(long, case))
    short = load(tmp_path / "model", rope_length=8)  # as for short texts, and no longer ones
    with pytest.raises(ModelError, match=r"model\.rope_length"):
        logits(short, case)


@pytest.mark.parametrize("name", ["llama", "phimoe"])
def test_what_has_no_such_ropes_is_refused(name: str) -> None:
    told = {"llama": "do not depend on a text's length", "phimoe": "phimoe"}[name]
    with pytest.raises(ModelError, match=told):
        fixed_ropes(cases(name)[0]["config"], 64)
    [longrope] = [case for _, case in BY_LENGTH if "phi3" in str(case["architecture"])]
    with pytest.raises(ModelError, match="for texts of at most 128"):
        fixed_ropes(longrope["config"], 129)


def test_an_adapter_keeps_the_length_that_it_was_trained_with(tmp_path: Path) -> None:
    """Loading beside other ropes is refused; merge writes the ropes into config.json."""
    case = next(case for name, case in BY_LENGTH if name == "llama")
    write(tmp_path / "model", case)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    long = load(tmp_path / "model", rope_length=24)
    (tmp_path / "adapter").mkdir()
    pair = LoraPair(mx.full((32, 2), 0.3), mx.full((2, 32), 0.1), 1.0)
    save_adapter(tmp_path / "adapter", {LAYER: pair}, num_layers=3)
    record_rope_length(tmp_path / "adapter", long.config)
    adapter = load_adapter(tmp_path / "adapter")
    check_rope_length(adapter.config, adapter.path, 24)
    for other in (None, 32):
        with pytest.raises(AdapterError, match=r"model\.rope_length"):
            check_rope_length(adapter.config, adapter.path, other)
    for wrong in ("24", 0, True):
        with pytest.raises(AdapterError, match="is not a number of tokens"):
            check_rope_length({"rope_length": wrong}, adapter.path, 24)
    merge(str(tmp_path / "model"), tmp_path / "adapter", tmp_path / "merged")
    weight = long.model.layers[0].self_attn.o_proj.weight
    long.model.layers[0].self_attn.o_proj.weight = weight + 2 * 0.03
    merged = load(tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["rope_length"] == 24
    assert np.allclose(logits(merged, case), logits(long, case), atol=1e-5)
