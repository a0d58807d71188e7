"""Whole runs in which the part that sees learns: it is served as it is trained, it comes back from a
checkpoint bit by bit, and a saved model sees with it."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.load import Config
from mlx_parallm.deploy.merge_lora import merge
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loaded_images import image_support, with_images
from mlx_parallm.models.loading import LoadedModel, load_model
from mlx_parallm.models.lora import save_adapter
from tests.images.checkpoints import save_qwen_vl, save_smolvlm
from tests.integration.in_process import train_here
from tests.integration.processes import metrics
from tests.vision.drawn import data_url, noise
from tests.vision.qwen3_checkpoints import save_qwen3
from tests.vision.test_training import GRPO, SFT, colour, write_run

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

ROOT = Path(__file__).resolve().parents[2]
TOWER = 'vision.train="tower"'
FULL = "rl_training.lora.enabled=false"


def rows() -> list[dict[str, object]]:
    return [
        {"prompt": "Which colour?", "images": [data_url(colour(name))], "completion": name}
        for name in ("red", "blue")
    ]


@pytest.mark.parametrize(
    ("train", "full"), [("tower", False), ("tower", True), ("connector", True)]
)
def test_engine_and_trainer_see_alike_after_each_update(
    train: str, full: bool, tmp_path: Path
) -> None:
    checkpoint = save_qwen_vl(tmp_path / "model") if full else save_smolvlm(tmp_path / "model")
    shown = [{"prompt": "Which?", "images": [data_url(noise(40, 20))]}]
    config = write_run(tmp_path, checkpoint, GRPO, shown, blocks=1)
    settings = [f'vision.train="{train}"', "rl_training.total_steps=3", "rl_training.kl_beta=0.01"]
    train_here(config, *settings, *([FULL, "rl_training.learning_rate=1e-3"] if full else []))
    for line in metrics(tmp_path / "run"):
        assert line["logprob_diff_max"] <= 1e-4 and line["grad_norm"] > 0
    assert line["kl"] > 0, "the reference sees with what it had at the start"


@pytest.mark.long
@pytest.mark.parametrize("train", ["none", "tower"])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe"])
def test_newer_families_learn_from_pictures(family: str, train: str, tmp_path: Path) -> None:
    checkpoint = save_qwen3(tmp_path / "model", family)
    pictures = [data_url(noise(40, 20)), data_url(noise(16, 24, 1))]
    shown = [{"prompt": "Which?", "images": pictures, "completion": "red"}]
    settings = f'vision.train="{train}"', "rl_training.total_steps=2"
    (tmp_path / "sft").mkdir()
    train_here(write_run(tmp_path, checkpoint, GRPO, shown, blocks=1), *settings)
    for line in metrics(tmp_path / "run"):
        assert line["logprob_diff_max"] <= 1e-4 and line["grad_norm"] > 0
    config = write_run(tmp_path / "sft", checkpoint, SFT, shown * 2)
    train_here(config, 'rl_training.algorithm="sft"', "rl_training.batch_size=2", *settings)
    first, second = metrics(tmp_path / "sft" / "run")
    assert second["loss"] < first["loss"]


def sft(path: Path, checkpoint: Path, *settings: str, resume: str | None = None) -> None:
    path.mkdir(exist_ok=True)
    config = write_run(path, checkpoint, SFT, rows())
    fixed = ['rl_training.algorithm="sft"', "rl_training.batch_size=2", TOWER]
    train_here(config, *fixed, *settings, resume=resume)


def arrays(directory: Path) -> dict[str, mx.array]:
    return {
        name: array
        for file in sorted(directory.glob("*.safetensors"))
        for name, array in dict(mx.load(str(file))).items()
    }


def loaded(path: Path) -> LoadedModel:
    config = Config.model_validate({"model": {"base_path": str(path)}, "vision": {"enabled": True}})
    return with_images(load_model(config.model), image_support(config.image_hooks(), path))


@pytest.mark.parametrize("full", [False, True])
def test_a_run_that_was_interrupted_learns_the_same(full: bool, tmp_path: Path) -> None:
    checkpoint = save_smolvlm(tmp_path / "model")
    settings = [FULL, "rl_training.learning_rate=1e-3"] if full else []
    steps = "rl_training.total_steps={}", "rl_training.checkpoint_interval=2"
    sft(tmp_path / "whole", checkpoint, *settings, steps[0].format(4), steps[1])
    sft(tmp_path / "parts", checkpoint, *settings, steps[0].format(2), steps[1])
    sft(tmp_path / "parts", checkpoint, *settings, steps[0].format(4), steps[1], resume="auto")
    whole = arrays(tmp_path / "whole" / "run" / "final")
    parts = arrays(tmp_path / "parts" / "run" / "final")
    assert whole.keys() == parts.keys()
    assert any(name.startswith("vision_model.encoder") for name in whole)
    assert all(mx.array_equal(whole[name], parts[name]).item() for name in whole)
    if full:
        base, trained = loaded(checkpoint), loaded(tmp_path / "whole" / "run" / "final")
        before, after = (dict(tree_flatten(each.model.parameters())) for each in (base, trained))
        assert all(mx.array_equal(after[name], whole[name]).item() for name in after)
        seeing = [name for name in after if name.startswith(("vision_model.", "connector."))]
        moved = [name for name in seeing if not mx.array_equal(before[name], after[name]).item()]
        assert len(moved) > 0.8 * len(seeing), "the key's biases have no gradient"


def test_a_merged_adapter_sees_with_what_its_tower_has_learned(tmp_path: Path) -> None:
    checkpoint = save_smolvlm(tmp_path / "model")
    base = dict(tree_flatten(loaded(checkpoint).model.parameters()))
    layers = {}
    for path in ("connector.modality_projection.proj", "language_model.model.layers.0.mlp.up_proj"):
        outputs, inputs = base[f"{path}.weight"].shape
        pair = mx.random.normal((inputs, 2)), mx.random.normal((2, outputs))
        layers[path] = LoraPair(*pair, 0.5)
    (tmp_path / "adapter").mkdir()
    save_adapter(tmp_path / "adapter", layers, num_layers=2)
    merge(str(checkpoint), tmp_path / "adapter", tmp_path / "merged", layout="mlx")
    merged = dict(tree_flatten(loaded(tmp_path / "merged").model.parameters()))
    assert merged.keys() == base.keys()
    for name, array in merged.items():
        pair = layers.get(name.removesuffix(".weight"))
        added = 0 if pair is None else 0.5 * (pair.a @ pair.b).T
        assert mx.allclose(array, base[name] + added, atol=1e-5).item(), name


DISTILLATION = """
[rl_training.distillation]
mode = "advantage"
reward = false

[[rl_training.distillation.teachers]]
name = "seer"
kind = "model"
path = "{teacher}"
"""


def test_a_teacher_sees_the_pictures_with_a_tower_of_its_own(tmp_path: Path) -> None:
    checkpoint = save_smolvlm(tmp_path / "model")
    shown = [{"prompt": "Which?", "images": [data_url(noise(24, 40))]}]
    text = GRPO + DISTILLATION.replace("{teacher}", str(checkpoint))
    config = write_run(tmp_path, checkpoint, text, shown)
    train_here(config, TOWER, "rl_training.total_steps=2")
    first, second = metrics(tmp_path / "run")
    assert first["teacher_share"] == second["teacher_share"] == 1
    assert abs(first["teacher_kl"]) <= 1e-4 and first["teacher_spread"] <= 1e-4, "the same weights"
    assert second["teacher_spread"] > 1e-3, "the policy has moved, and the teacher has not"


def test_a_teacher_that_sees_nothing_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint, blind = save_smolvlm(tmp_path / "model"), save_smolvlm(tmp_path / "blind")
    file = blind / "model.safetensors"
    kept = {n: a for n, a in dict(mx.load(str(file))).items() if "text_model" in n or "head" in n}
    mx.eval(kept)
    mx.save_safetensors(str(file), kept, metadata={"format": "pt"})
    shown = [{"prompt": "Which?", "images": [data_url(noise(24, 40))]}]
    text = GRPO + DISTILLATION.replace("{teacher}", str(blind))
    config = write_run(tmp_path, checkpoint, text, shown)
    with pytest.raises(ConfigError, match="'seer'"):
        train_here(config, "rl_training.total_steps=1")


@pytest.mark.long
def test_the_tower_alone_raises_the_reward(tmp_path: Path) -> None:
    shipped = (ROOT / "train_configs" / "vision.toml").read_text()
    environment = '[[environments]]\nkind = "pictures"\nname = "colour"\ngroup_size = 8\n'
    config = tmp_path / "run.toml"
    config.write_text(shipped.partition("[[environments]]")[0] + environment + "max_tokens = 8\n")
    where = f'rl_training.checkpoint_dir="{tmp_path}"', 'rl_training.run_name="run"'
    alone = TOWER, "rl_training.lora.target_modules=[]", "evaluation.problems=0"
    train_here(config, *where, *alone, "rl_training.total_steps=30", "server.port=0")
    names = dict(mx.load(str(tmp_path / "run" / "final" / "adapters.safetensors")))
    assert names and all(name.startswith(("vision_model.", "connector.")) for name in names)
    means = [line["reward_mean"] for line in metrics(tmp_path / "run")]
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.15, means
