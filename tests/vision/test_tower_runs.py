"""Whole runs in which the part that sees learns: it is served as it is trained, it comes back from a
checkpoint bit by bit, and a saved model sees with it."""

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.load import Config
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.images.support import image_support, with_images
from mlx_parallm.models.loading import LoadedModel, load_model
from tests.images.checkpoints import save_qwen_vl, save_smolvlm
from tests.integration.in_process import train_here
from tests.integration.processes import metrics
from tests.vision.drawn import data_url, noise
from tests.vision.test_training import GRPO, SFT, colour, write_run

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

TOWER = 'vision.train="tower"'
FULL = "rl_training.lora.enabled=false"


def rows() -> list[dict[str, object]]:
    return [
        {"prompt": "Which colour?", "images": [data_url(colour(name))], "completion": name}
        for name in ("red", "blue")
    ]


@pytest.mark.parametrize("full", [False, True])
def test_engine_and_trainer_see_alike_after_each_update(full: bool, tmp_path: Path) -> None:
    checkpoint = save_qwen_vl(tmp_path / "model") if full else save_smolvlm(tmp_path / "model")
    shown = [{"prompt": "Which?", "images": [data_url(noise(40, 20))]}]
    config = write_run(tmp_path, checkpoint, GRPO, shown, blocks=1)
    settings = [TOWER, "rl_training.total_steps=3", "rl_training.kl_beta=0.01"]
    train_here(config, *settings, *([FULL, "rl_training.learning_rate=1e-3"] if full else []))
    for line in metrics(tmp_path / "run"):
        assert line["logprob_diff_max"] <= 1e-4 and line["grad_norm"] > 0
    assert line["kl"] > 0, "the reference sees with what it had at the start"


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
    return with_images(load_model(config.model), image_support(config, path))


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
    with pytest.raises(ConfigError, match="teacher 'seer' reads no images here"):
        train_here(config, "rl_training.total_steps=1")


REWARD = """
def capitals(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter.isalpha() for letter in text) / max(len(text), 1) for text in texts]
"""


@pytest.mark.long
def test_the_tower_alone_raises_the_reward(tmp_path: Path) -> None:
    checkpoint = save_smolvlm(tmp_path / "model")
    shown = [{"prompt": "Which?", "images": [data_url(noise(24, 24, seed))]} for seed in (1, 2)]
    config = write_run(tmp_path, checkpoint, GRPO.replace("long_words", "capitals"), shown)
    (tmp_path / "reward.py").write_text(REWARD)
    train_here(config, TOWER, "rl_training.total_steps=30", "rl_training.lora.target_modules=[]")
    names = arrays(tmp_path / "run" / "final")
    assert names and not [name for name in names if "language_model" in name]
    means = [line["reward_mean"] for line in metrics(tmp_path / "run")]
    assert sum(means[-5:]) / 5 > sum(means[:5]) / 5 + 0.15, means
