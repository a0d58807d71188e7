"""A mixture in bfloat16 on a CPU: MLX multiplies stacked experts in float32 only there."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.experts.routing import prepare_routing, why_not_routed
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.mlx_lm_api import SwitchLinear
from mlx_parallm.system.device.traits import on_cpu
from tests.tiny_models import EXPERTS, QWEN3, save_checkpoint

IDS = mx.array([[5, 9, 2, 7, 1]])


@pytest.mark.skipif(not on_cpu(), reason="a GPU multiplies narrow experts")
def test_a_narrow_mixture_computes_on_a_cpu(tmp_path: Path) -> None:
    config = QWEN3 | EXPERTS | {"model_type": "qwen3_moe"}
    save_checkpoint(tmp_path / "m", config, dtype=mx.bfloat16)
    wide, narrow = (
        load_model(ModelConfig(base_path=str(tmp_path / "m"), dtype=dtype)).model
        for dtype in ("float32", "bfloat16")
    )
    logits = narrow(IDS)
    assert logits.dtype == mx.bfloat16
    exact = np.array(wide(IDS))
    off = np.abs(np.array(logits.astype(mx.float32)) - exact).max()
    assert 0 < off < 0.1 * np.abs(exact).max()
    dtypes = {
        isinstance(module, SwitchLinear): array.dtype
        for module in narrow.modules()
        for _, array in tree_flatten(module.parameters())
        if not module.children() or isinstance(module, SwitchLinear)
    }
    assert dtypes[True] == mx.float32 and dtypes[False] == mx.bfloat16
    prepare_routing(narrow)
    assert why_not_routed(narrow) == ""
