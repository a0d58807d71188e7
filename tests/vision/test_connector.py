"""Where the connector alone learns, each family's tower runs once an image, and what stands behind
it gives the same features and gradients as the whole."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlx_parallm.config.load import Config
from mlx_parallm.models.images.encoder import TowerOutputs
from mlx_parallm.models.loaded_images import image_support, with_images
from mlx_parallm.models.loading import load_model
from tests.images.checkpoints import save_qwen_vl, save_smolvlm
from tests.images.gemma3 import save_gemma3
from tests.images.lfm2_vl import save_lfm2_vl
from tests.vision.drawn import noise
from tests.vision.qwen3_checkpoints import save_qwen3

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "smolvlm": save_smolvlm,
    "gemma3": save_gemma3,
    "lfm2_vl": save_lfm2_vl,
    "qwen2_vl": save_qwen_vl,
    "qwen2_5_vl": lambda path: save_qwen_vl(path, model_type="qwen2_5_vl"),
    "qwen3_vl": lambda path: save_qwen3(path, "qwen3_vl"),
}


def seeing(path: Path, train: str = "connector") -> Any:
    """The images' parts of a checkpoint of which the connector is to be trained."""
    values = {"model": {"base_path": str(path)}, "vision": {"train": train}}
    config = Config.model_validate(values)
    return with_images(load_model(config.model), image_support(config.image_hooks(), path))


def count_passes(encoder: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the forwards of a tower's first block from here on."""
    blocks = [
        value[0]
        for part in encoder.modules.values()
        for module in part.modules()
        for name, value in module.items()
        if name in ("layers", "blocks") and isinstance(value, list)
    ]
    assert len(blocks) == 1
    passes, kind = [0], type(blocks[0])
    call = kind.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        passes[0] += self is blocks[0]
        return call(self, *args, **kwargs)

    monkeypatch.setattr(kind, "__call__", counted)
    return passes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_connector_runs_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = seeing(FAMILIES[family](tmp_path / "model"))
    encoder, model = loaded.image_parts.encoder, loaded.model
    assert encoder.frozen_tower
    passes, outputs = count_passes(encoder, monkeypatch), TowerOutputs(encoder)
    images = [loaded.image_parts.reader.image_of(noise(90, 50, seed)) for seed in (1, 2)]
    modules = dict(model.named_modules())
    learned = [modules[path] for path in encoder.trained]
    views = len(images[0].arrays.get("shapes", (0,)))
    for _ in range(3):
        for image in images:
            features = encoder.encode(image, outputs.of(image))
            assert features.shape[0] == image.tokens
            mx.eval(features)
        for module in learned:
            module.update(tree_map(lambda array: 1.1 * array, module.parameters()))
    assert passes == [2 * views]

    trained = dict(tree_flatten([m.parameters() for m in learned]))

    def loss(arrays: dict[str, mx.array], output: mx.array | None) -> mx.array:
        before = [module.parameters() for module in learned]
        new = tree_unflatten(list(arrays.items()))
        for module, values in zip(learned, new, strict=True):
            module.update(values)
        value = encoder.encode(images[0], output).square().sum()
        for module, values in zip(learned, before, strict=True):
            module.update(values)
        return value

    whole, kept = (mx.grad(loss)(trained, output) for output in (None, outputs.of(images[0])))
    assert passes == [3 * views], "and one for the graph over everything"
    for name, gradient in kept.items():
        off = mx.linalg.norm(gradient - whole[name]).item()
        assert off <= 1e-6 * mx.linalg.norm(whole[name]).item() + 1e-12, name
    assert max(mx.abs(gradient).max().item() for gradient in kept.values()) > 0


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_mergers_that_waited_give_what_the_towers_own_forward_gives(
    family: str, tmp_path: Path
) -> None:
    parts = seeing(FAMILIES[family](tmp_path / "model")).image_parts
    image = parts.reader.image_of(noise(90, 50, 1))
    pixels = (image.arrays["patches"].astype(np.float32) / 255).reshape(
        len(image.arrays["patches"]), 3, -1
    )
    processor = parts.reader._processor
    _, mean, deviation = processor.pixels
    pixels = (pixels - np.array(mean)[:, None]) / np.array(deviation)[:, None]
    flat = mx.array(pixels.reshape(len(pixels), -1).astype(np.float32))
    output = parts.encoder.modules["vision_tower"](flat, mx.array(image.arrays["grid"]))
    if isinstance(output, tuple):
        output = mx.concatenate([output[0], *output[1]], axis=-1)
    features = parts.encoder.encode(image)
    assert features.shape == output.shape
    assert mx.abs(features - output).max().item() <= 1e-5 * mx.abs(output).max().item()
