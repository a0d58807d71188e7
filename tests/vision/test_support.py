"""Which models see, and what is said where one does not. None of these needs mlx-vlm."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from pydantic import ValidationError

from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.models.loaded_images import with_images
from mlx_parallm.models.loading import load_model, read_config
from mlx_parallm.rl_training.factory import build_policy
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.systems.vision import leaf
from mlx_parallm.systems.vision.config import VisionConfig
from mlx_parallm.systems.vision.leaf import image_support
from tests.images.checkpoints import save_qwen_vl, save_smolvlm
from tests.tiny_models import TINY_ASSETS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")


def support(path: Path, enabled: Any, **changes: Any) -> Any:
    config = Config.model_validate({"vision": {"enabled": enabled}})
    return image_support(config.section(VisionConfig), path, read_config(path) | changes)


def test_a_model_of_texts_has_none() -> None:
    assert support(TINY_ASSETS, "auto") is None
    with pytest.raises(ModelError, match="no part that sees"):
        support(TINY_ASSETS, True)


def test_a_family_that_is_not_known_is_named(checkpoint: Path) -> None:
    assert support(checkpoint, "auto", model_type="paligemma") is None
    with pytest.raises(ModelError, match="'paligemma'"):
        support(checkpoint, True, model_type="paligemma")


def test_without_the_extra_the_text_part_is_used(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaf, "is_installed", lambda module: module != "mlx_vlm")
    assert support(checkpoint, "auto") is None
    with pytest.raises(ConfigError, match=r"mlx-vlm: .*\[vision\]"):
        support(checkpoint, True)


def test_a_checkpoint_without_its_tower_is_its_text_part(checkpoint: Path, tmp_path: Path) -> None:
    arrays = dict(mx.load(str(checkpoint / "model.safetensors")))
    kept = {name: array for name, array in arrays.items() if "vision_model" not in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), kept)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert support(tmp_path, "auto") is None
    with pytest.raises(ModelError, match="arrays"):
        support(tmp_path, True)


def test_it_is_switched_off(checkpoint: Path) -> None:
    assert support(checkpoint, False) is None
    with pytest.raises(ValidationError, match='"tower"'):
        Config.model_validate({"vision": {"enabled": False, "train": "tower"}})


def test_a_tower_that_is_to_be_trained_has_to_be_there() -> None:
    config = Config.model_validate({"vision": {"train": "connector"}})
    with pytest.raises(ModelError, match=r'vision\.train.*"connector"'):
        image_support(config.section(VisionConfig), TINY_ASSETS, read_config(TINY_ASSETS))


@pytest.mark.parametrize("save", [save_smolvlm, save_qwen_vl])
def test_the_preflight_counts_the_tower(save: Any, tmp_path: Path) -> None:
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")
    path = save(tmp_path / "model")
    model = ModelConfig(base_path=str(path))
    config = Config.model_validate({"model": {"base_path": str(path)}})
    encoder: Any = with_images(
        load_model(model), image_support(config.section(VisionConfig), path, read_config(path))
    )
    arrays = tree_flatten(encoder.image_parts.encoder._model.parameters())
    parts = PlannedRun.of(config, read_config(path)).memory.parts
    assert parts["tower"] == sum(array.nbytes for _, array in arrays)
    blind = Config.model_validate({**config.model_dump(), "vision": {"enabled": False}})
    assert PlannedRun.of(blind, read_config(path)).memory.parts["tower"] == 0
    for lora in ({"rank": 4}, {"enabled": False}):
        for train in ("connector", "tower"):
            values = {"vision": {"train": train}, "rl_training": {"lora": lora}}
            config = Config.model_validate({"model": {"base_path": str(path)}} | values)
            seeing = image_support(config.section(VisionConfig), path, read_config(path))
            training = config.rl_training
            loaded = with_images(load_model(model), seeing)
            policy = build_policy(loaded, training, make_algorithm(training))
            assert PlannedRun.of(config, read_config(path)).shape.trained == policy.parameters, (
                train
            )
