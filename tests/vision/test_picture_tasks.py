"""The pictures that are drawn, read again by other means; and the model that comes with the package,
which sees them through the whole program."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import ConfigError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.models.checkpoint_files import directory_of
from mlx_parallm.models.loading import read_config
from mlx_parallm.systems.vision.config import VisionConfig
from mlx_parallm.systems.vision.leaf import image_support
from mlx_parallm.systems.vision.picture_tasks import COLOURS, TASKS, PictureProblem, make_problem

PHRASES = {
    "dots": "How many dots?",
    "colour": "Which colour?",
    "number": "Which number?",
    "larger": "Which side is larger?",
}
MODEL = "builtin:tiny-vision"


def drawn(task: str, count: int) -> Iterator[tuple[PictureProblem, np.ndarray]]:
    """Problems, and where something is drawn on their background: [48, 48]."""
    for index in range(count):
        problem = make_problem(task, index, seed=3, split="train")
        colours, counts = np.unique(problem.pixels.reshape(-1, 3), axis=0, return_counts=True)
        background = colours[(colours == colours[:, :1]).all(axis=1) & (counts > 48)]
        yield problem, (problem.pixels != background[-1]).any(axis=2)


def test_what_is_seen_is_the_answer() -> None:
    for problem, shape in drawn("dots", 40):
        cells = shape.reshape(4, 12, 4, 12).sum(axis=(1, 3))
        assert (cells > 10).sum() == int(problem.answer)
    for problem, shape in drawn("colour", 40):
        [colour] = np.unique(problem.pixels[shape], axis=0)
        assert COLOURS[problem.answer] == tuple(colour)
    for problem, shape in drawn("larger", 40):
        left, right = shape[:, :24].sum(), shape[:, 24:].sum()
        assert problem.answer == ("left" if left > right else "right") and left != right
    # by hand: pixels that are set in a 5 × 7 digit
    bits = {
        "0": 19,
        "1": 10,
        "2": 14,
        "3": 14,
        "4": 14,
        "5": 17,
        "6": 15,
        "7": 11,
        "8": 17,
        "9": 15,
    }
    for problem, shape in drawn("number", 40):
        assert shape.sum() == 9 * sum(bits[digit] for digit in problem.answer)


def test_what_is_held_out_is_never_trained_on() -> None:
    for task in TASKS:
        train, heldout = (
            {make_problem(task, index, seed=seed, split=split).key for index in range(150)}
            for seed, split in ((1, "train"), (0, "heldout"))
        )
        assert not train & heldout and len(heldout) > 50
    shown, kept = (
        {make_problem("number", index, seed=1, split=split).answer for index in range(400)}
        for split in ("train", "heldout")
    )
    assert not shown & kept and len(shown) > 60 and len(kept) > 5


def test_a_wrong_name_is_refused() -> None:
    config = EnvironmentConfig.model_validate({"kind": "pictures", "name": "dogs"})
    with pytest.raises(ConfigError, match=r"'dogs'.*'dots'"):
        build_sources([config], seed=0)


def test_a_task_shows_a_stored_picture() -> None:
    config = EnvironmentConfig.model_validate({"kind": "pictures", "name": "colour"})
    [source] = build_sources([config], seed=0)
    task = source.task(4)
    assert task.key == source.task(4).key != source.task(5).key
    assert [part["type"] for part in task.messages[0]["content"]] == ["image", "text"]
    assert task.messages[0]["content"][0]["image"].startswith("sha256:")
    assert task.answer in COLOURS


def test_the_shipped_model_sees() -> None:
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")
    from PIL import Image

    path = directory_of(MODEL)
    assert path is not None and (path / "model.safetensors").stat().st_size < 3e6
    support: Any = image_support(VisionConfig(), path, read_config(path))
    problem = make_problem("dots", 0, seed=0, split="heldout")
    read = support.reader.image_of(Image.fromarray(problem.pixels))
    assert (read.arrays["tiles"][0].transpose(1, 2, 0) == problem.pixels).all(), "not resized"
    support.reader.close()
    right = 0
    with InferenceModule(MODEL) as inference:
        for task, phrase in PHRASES.items():
            problems = [make_problem(task, index, seed=0, split="heldout") for index in range(10)]
            prompts = [
                [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "image": Image.fromarray(problem.pixels)},
                            {"type": "text", "text": phrase},
                        ],
                    }
                ]
                for problem in problems
            ]
            texts = inference.generate(prompts, temperature=0.0, max_new_tokens=8)
            right += sum(
                text.strip() == problem.answer
                for text, problem in zip(texts, problems, strict=True)
            )
    assert right >= 34, f"{right} of 40"
