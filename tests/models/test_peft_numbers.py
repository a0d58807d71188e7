"""Adapters of PEFT beside PEFT's own numbers (float64, `scripts/parity/adapters.py`), on a plain
base and on the same one in 4 bits, which hold its matrices exactly."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.lora import linear_shapes, load_adapter, prepare_for_serving
from mlx_parallm.weights import SharedWeights
from scripts.parity.adapters import BASE, GROUP, adapter_tensor, base_tensor

HEAD, *CASES = json.loads((Path(__file__).parents[1] / "data" / "adapters.json").read_text())
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
    arrays = {key: mx.array(adapter_tensor(key, shape)) for key, shape in case["tensors"].items()}
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), arrays)
    (tmp_path / "adapter_config.json").write_text(json.dumps(case["config"]))
    model = load_model(ModelConfig(base_path=str(base))).model
    weights = SharedWeights(model, keep_versions=1)
    assert len(linear_shapes(model)) == 15
    weights.add_adapter("a", load_adapter(tmp_path).layers)
    context = prepare_for_serving(model)
    ids = mx.array(HEAD["ids"])[None]
    found = {}
    for name, slot in (("base", None), ("adapter", weights.find("a"))):
        context.activate([slot])
        scores = token_logprobs(model(ids)[0, :-1], ids[0, 1:])
        found[name] = np.abs(np.array(scores) - case["logprobs"]).max()
    assert found["adapter"] < 2e-5 < 0.01 < found["base"]
