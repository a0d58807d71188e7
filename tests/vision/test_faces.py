"""The faces in Python show pictures too: inference, and TRL's trainers with a column `images`."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mlx_parallm import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from mlx_parallm.config.load import Config
from mlx_parallm.environments.row_images import stored, with_data_urls, with_stored_images
from mlx_parallm.errors import ConfigError, RequestError, RolloutRejectedError
from mlx_parallm.faces.atropos.wire import from_scored_data
from mlx_parallm.faces.library.backprop import BackpropModule
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.rl_training.group_fit import LogprobMismatchCheck
from tests.images.checkpoints import save_smolvlm
from tests.vision.drawn import data_url

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

QUICK: dict[str, Any] = {
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")


def colour(name: str) -> Image.Image:
    return Image.new("RGB", (24, 24), name)


def question(*pictures: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Which colour?"}]}]


def test_inference_sees_pictures(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "red.png"
    colour("red").save(file)
    with InferenceModule(str(checkpoint), config=Config()) as inference:

        def ask(*pictures: Any) -> tuple[list[int], list[float]]:
            options: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6}
            result = inference.generate([question(*pictures)], return_logprobs=True, **options)
            assert result.token_ids is not None and result.logprobs is not None
            return list(result.token_ids[0]), result.logprobs[0].tolist()

        red, blue = ask(colour("red")), ask(colour("blue"))
        assert red != blue
        assert ask(str(file)) == red, "a file is the same picture"
        assert ask(colour("blue")) == blue, "the cache of greedy answers tells pictures apart"
        with pytest.raises(RequestError, match=r"absent\.png"):
            ask(tmp_path / "absent.png")
        prompts = [question(colour("red")), question(colour("blue"))]
        sampled, _ = inference.get_logprobs(prompts, [red[0]] * 2)
        assert np.abs(sampled - red[1]).max() <= 1e-4, "given as it was sampled"
        first, other = inference.get_logprobs(prompts, ["red"] * 2)
        assert len(first) == 3 and np.abs(first - other).max() > 1e-3, "the picture counts"
        logits = inference.get_logits(prompts[:1], [red[0]])[0]
        best = logits[np.arange(len(red[0])), red[0]] - np.logaddexp.reduce(logits, axis=-1)
        assert np.abs(best - red[1]).max() <= 1e-4


def test_a_group_of_atropos_carries_its_images(checkpoint: Path) -> None:
    with InferenceModule(str(checkpoint), config=Config()) as inference:
        sampled = inference.generate(
            [question(colour("red"))], return_logprobs=True, max_new_tokens=6, seed=1
        )
        assert sampled.token_ids is not None and sampled.logprobs is not None
        prompt, answer = list(sampled.metadata["prompt_token_ids"][0]), [*sampled.token_ids[0]]
        picture = data_url(colour("red"))
        data: dict[str, Any] = {
            "tokens": [prompt + answer] * 2,
            "masks": [[-100] * len(prompt) + answer] * 2,
            "inference_logprobs": [[1.0] * len(prompt) + sampled.logprobs[0].tolist()] * 2,
            "scores": [0.0, 1.0],
            "images": [picture, [picture.partition(",")[2]]],
            "messages": [question(picture)] * 2,
        }
        assert inference.tokenizer is not None
        reader = inference.tokenizer.image_reader
        read = partial(from_scored_data, policy_version=0, environment="e", reader=reader)
        group = read(data)
        assert [len(each.images) for each in group.rollouts] == [1, 1]
        assert group.rollouts[0].images == group.rollouts[1].images
        assert "base64" not in str(group.metadata)
        trainer = BackpropModule(inference, value_head=False).trainer
        assert LogprobMismatchCheck(trainer).distance(group.rollouts) < 1e-4
        blue = read({**data, "images": [data_url(colour("blue"))] * 2})
        assert LogprobMismatchCheck(trainer).distance(blue.rollouts) > 1e-2
        assert blue.group_id != group.group_id
        for images, reason in (
            (
                [picture, None],
                "sequence 1: its messages have images, and the field images has none",
            ),
            ([[picture, picture]] * 2, "image tokens, and its 2 images have"),
            (["data:image/png;base64,QUJD"] * 2, "sequence 0: an image: it is not an image"),
            (["cat.png"] * 2, "sequence 0: an image: the data URL is not base64"),
        ):
            with pytest.raises(RolloutRejectedError, match=reason):
                read({**data, "images": images})


def test_an_endpoint_gets_data_urls(tmp_path: Path) -> None:
    file = tmp_path / "red.jpg"
    colour("red").save(file)
    stored = with_stored_images(question(file), "messages")
    assert with_stored_images(stored, "messages") is stored, "once is enough"
    [image, text] = with_data_urls(stored)[0]["content"]
    assert image["image_url"]["url"] == data_url(file.read_bytes(), "image/jpeg")
    assert text == question(file)[0]["content"][1]
    assert with_data_urls("a text") == "a text"
    for name in ("sha256:../../../../etc/hostname", "sha256:/etc/hostname", "sha256:abc"):
        with pytest.raises(RolloutRejectedError, match="not a name of a stored image"):
            with_data_urls(({"role": "user", "content": [{"type": "image", "image": name}]},))


def test_an_image_of_a_row_is_an_image(tmp_path: Path) -> None:
    """It would be kept, and sent to the server that answers."""
    (tmp_path / "secret").write_text("password")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (
        ("secret", "not an image"),
        ("pipe", "not a regular"),
        ("/dev/zero", "regular"),
    ):
        with pytest.raises(ConfigError, match=reason):
            stored(name, tmp_path, "row 1")


def test_grpo_trainer_takes_images(checkpoint: Path, tmp_path: Path) -> None:
    shown: list[Any] = []

    def reward(completions: Sequence[Any], images: Sequence[Any], **columns: Any) -> list[float]:
        shown.extend(images)
        return [float(len(set(completion[0]["content"]))) for completion in completions]

    rows = [
        {"prompt": [{"role": "user", "content": "Which colour?"}], "images": [colour(name)]}
        for name in ("red", "blue")
    ]
    arguments = GRPOConfig(
        str(tmp_path / "run"), max_steps=1, num_generations=4, max_completion_length=4, **QUICK
    )
    with GRPOTrainer(str(checkpoint), reward, arguments, rows) as trainer:
        trainer.train()
        assert trainer.state.log_history[0]["grad_norm"] > 0
    assert len(shown) == 4 and all(len(images) == 1 for images in shown)


def test_dpo_trainer_takes_images(checkpoint: Path, tmp_path: Path) -> None:
    def row(good: str, bad: str) -> dict[str, Any]:
        said = {name: [{"role": "assistant", "content": name}] for name in (good, bad)}
        prompt = [{"role": "user", "content": "Which colour?"}]
        return {
            "prompt": prompt,
            "images": [colour(good)],
            "chosen": said[good],
            "rejected": said[bad],
        }

    rows = [row("red", "blue"), row("blue", "red")] * 2
    arguments = DPOConfig(str(tmp_path / "run"), max_steps=2, **QUICK)
    with DPOTrainer(str(checkpoint), arguments, train_dataset=rows) as trainer:
        assert trainer.train().global_step == 2


def test_texts_beside_images_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "Which colour?", "images": [colour("red")]}]
    with pytest.raises(ConfigError, match=r"row 0: .*images"):
        GRPOTrainer(str(checkpoint), len, GRPOConfig(str(tmp_path / "run")), rows)  # type: ignore[arg-type]
