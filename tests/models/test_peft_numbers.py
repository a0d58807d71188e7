"""Adapters of PEFT beside PEFT's own numbers (float64, `scripts/parity/adapters.py`), on a plain
base and on the same one in 4 bits, which hold its matrices exactly."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.adapters.peft import save_peft
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import fit_adapter, linear_shapes, load_adapter, prepare_for_serving
from mlx_parallm.weights import SharedWeights
from scripts.parity.adapters import BASE, GROUP, adapter_tensor, base_tensor
from scripts.parity.weights import tensor

DATA = Path(__file__).parents[1] / "data"
HEAD, *CASES = json.loads((DATA / "adapters.json").read_text())
BY_NAME = json.loads((DATA / "adapters_by_name.json").read_text())
QUANTIZATION = {"bits": 4, "group_size": GROUP}


@pytest.fixture(scope="module", params=[None, QUANTIZATION], ids=["plain", "4 bits"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    arrays = {key: mx.array(base_tensor(key, shape)) for key, shape in HEAD["tensors"].items()}
    config = dict(BASE)
    if request.param:
        config["quantization"] = request.param
        for key in [key for key, array in arrays.items() if array.ndim == 2]:
            packed, scales, biases = mx.quantize(arrays[key], group_size=GROUP, bits=4)
            stem = key.removesuffix("weight")
            arrays |= {key: packed, f"{stem}scales": scales, f"{stem}biases": biases}
    mx.save_safetensors(str(path / "model.safetensors"), arrays, {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["option"])
def test_an_adapter_computes_what_peft_computes(
    base: Path, case: dict[str, Any], tmp_path: Path
) -> None:
    model = load_model(ModelConfig(base_path=str(base))).model
    assert len(linear_shapes(model)) == 15
    check(model, HEAD["ids"], case, tmp_path)


@pytest.mark.parametrize("case", BY_NAME, ids=lambda case: case["option"])
def test_layers_that_transformers_calls_otherwise(case: dict[str, Any], tmp_path: Path) -> None:
    [plain, *_] = json.loads((DATA / "parity" / f"{case['option']}.json").read_text())
    arrays = {key: mx.array(tensor(key, shape)) for key, shape in plain["tensors"].items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), arrays, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(plain["config"]))
    model = load_model(ModelConfig(base_path=str(tmp_path))).model
    check(model, plain["ids"], case, tmp_path)
    if case["option"].startswith("gpt"):  # and back again
        layers = fit_adapter(linear_shapes(model), load_adapter(tmp_path).layers, "a")
        (tmp_path / "written").mkdir()
        save_peft(tmp_path / "written", layers, dropout=0.0)
        written = mx.load(str(tmp_path / "written" / "adapter_model.safetensors"))
        assert set(written) == set(case["tensors"])


def check(model: nn.Module, token_ids: list[int], case: dict[str, Any], folder: Path) -> None:
    arrays = {key: mx.array(adapter_tensor(key, shape)) for key, shape in case["tensors"].items()}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), arrays)
    (folder / "adapter_config.json").write_text(json.dumps(case["config"]))
    layers = fit_adapter(linear_shapes(model), load_adapter(folder).layers, "a")
    weights = SharedWeights(model, keep_versions=1)
    weights.add_adapter("a", layers)
    context = prepare_for_serving(model)
    ids = mx.array(token_ids)[None]
    found = {}
    for name, slot in (("base", None), ("adapter", weights.find("a"))):
        context.activate([slot])
        scores = token_logprobs(model(ids)[0, :-1], ids[0, 1:])
        found[name] = np.abs(np.array(scores) - case["logprobs"]).max()
    assert found["adapter"] < 2e-5 < 0.01 < found["base"]
