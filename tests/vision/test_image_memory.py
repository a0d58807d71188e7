"""What the preflight says that images take, against what they take."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.models.loaded_images import image_support, tower_sizes, with_images
from mlx_parallm.models.loading import load_model, read_config
from mlx_parallm.rl_training.factory import build_policy
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.plan.images import USUAL_IMAGE
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.rl_training.step.batch import TrainSequence
from mlx_parallm.rl_training.step.images import step_images
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.types import Rollout
from tests.active_memory import active_memory
from tests.images.checkpoints import save_qwen_vl, save_smolvlm
from tests.vision.drawn import noise
from tests.vision.test_connector import FAMILIES

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

FULL = {"enabled": False}


def configured(path: Path, train: str, **training: Any) -> Config:
    values = {"model": {"base_path": str(path)}, "vision": {"train": train}}
    return Config.model_validate(values | {"rl_training": training})


def peak(call: Any) -> int:
    """The largest of three peaks: MLX frees arrays when their tasks end, now and then later."""
    peaks = []
    for _ in range(3):
        mx.clear_cache()
        before = active_memory()
        mx.reset_peak_memory()
        call()
        peaks.append(mx.get_peak_memory() - before)
    return max(peaks)


@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "lfm2_vl", "qwen2_vl", "qwen3_vl"])
def test_a_pass_through_a_tower_takes_what_is_said(family: str, tmp_path: Path) -> None:
    path = FAMILIES[family](tmp_path / "model")
    config = configured(path, "tower", lora=FULL)
    training = config.rl_training
    loaded = with_images(load_model(config.model), image_support(config.image_hooks(), path))
    policy = build_policy(loaded, training, make_algorithm(training))
    assert loaded.image_parts is not None
    own_reader: Any = loaded.image_parts.reader
    image = own_reader.image_of(noise(600, 600, 1))
    reader: Any = SimpleNamespace(stored=lambda name: image)
    turns: list[int] = []
    images = step_images(
        replace(loaded.image_parts, reader=reader),
        policy.model,
        policy.slots,
        between_blocks=lambda: turns.append(1),
    )
    assert images is not None
    encoder, table = images._parts.encoder, images._table
    _, sizes, shape = tower_sizes(config.image_hooks(), config.model, 4, None)
    assert shape is not None and shape.trained == sum(sizes)
    assert len(encoder.encode(image)) <= shape.most / shape.per_token
    assert encoder.encode(image).shape[1] == shape.features
    forward = peak(lambda: mx.eval(encoder.encode(image)))
    assert shape.forward_bytes(image.tokens, 4, scores=True) == pytest.approx(forward, rel=0.35)

    images._place(["a picture"])

    def learn() -> None:
        images.begin_gradients()
        with images.seen(table.vocabulary + np.arange(image.tokens)[None]):
            images.add_slopes(mx.ones((image.tokens, shape.features)))
        slots, made = zip(*images.pull_back(), strict=True)
        mx.eval(made)
        names = [policy.slots.names[slot].split(".") for slot in slots]
        blocks = [int(n) for name in names for n in name if n.isdigit() and "blocks" in name]
        blocks += [int(n) for name in names for n in name if n.isdigit() and "layers" in name]
        assert blocks == sorted(blocks, reverse=True) and len(set(blocks)) == shape.blocks

    learn()  # the features
    assert turns == [1], "after the forward"
    assert shape.backward_bytes(image.tokens, 4) == pytest.approx(peak(learn), rel=0.35)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tower_takes_adapters(family: str, tmp_path: Path) -> None:
    path = FAMILIES[family](tmp_path / "model")
    config = configured(path, "tower", lora={"rank": 2})
    training = config.rl_training
    loaded = with_images(load_model(config.model), image_support(config.image_hooks(), path))
    assert loaded.image_parts is not None
    reader: Any = loaded.image_parts.reader
    image = reader.image_of(noise(60, 60, 1))
    before = loaded.image_parts.encoder.encode(image)
    policy = build_policy(loaded, training, make_algorithm(training))
    assert any("vision" in name for name in policy.slots.names)
    after = loaded.image_parts.encoder.over(policy.model).encode(image)
    assert mx.abs(after - before).max().item() <= 1e-4, "they begin with B = 0"


@pytest.mark.parametrize("save", [save_smolvlm, save_qwen_vl])
def test_what_trains_to_see_is_in_the_preflight(save: Any, tmp_path: Path) -> None:
    path = save(tmp_path / "model")
    model = read_config(path)

    def parts(train: str, lengths: Lengths | None) -> Any:
        config = configured(path, train, lora=FULL)
        return replace(PlannedRun.of(config, model), lengths=lengths).memory.parts

    assert parts("none", None)["training: images"] == 0, "nobody has said that there are any"
    assert parts("tower", Lengths(100, 10))["training: images"] == 0
    unseen = parts("tower", None)
    assert unseen["training: images"] > 0
    texts, shown = Lengths(100, 10), Lengths(100, 10, largest=16, shown=32)
    frozen, connector, tower = (parts(train, shown) for train in ("none", "connector", "tower"))
    assert frozen["generating"] > parts("none", texts)["generating"]
    assert 0 < frozen["training: images"] < connector["training: images"]
    assert connector["training: images"] <= tower["training: images"]
    config = configured(path, "tower", lora=FULL)
    run = PlannedRun.of(config, model)
    assert run.longest.largest == min(run.longest.prompt, USUAL_IMAGE)
    token = run.placeholder
    assert token is not None
    tokens = (1, *[token] * 9, 2, *[token] * 6, 3, 4)
    mask = (*[0] * (len(tokens) - 1), 1)
    rollout = Rollout(tokens, mask, None, (0,) * len(tokens), 1.0, {}, images=("a", "b"))
    row = TrainSequence(rollout, (0.0,) * len(tokens), fresh=False)
    batch: Any = SimpleNamespace(groups=(), sequences=(row,))
    seen = Lengths(0, 0).with_batch(batch, token)
    assert (seen.largest, seen.shown) == (8, 15)
    assert seen.within(Lengths(5, 5)).shown == 9
