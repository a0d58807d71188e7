"""kind = "pictures": small pictures, drawn from a seed, each with a question that has one exact
answer.

A problem is a pure function of (task, index, seed, split), and its picture is drawn here, pixel by
pixel, so it is the same on every machine. A hash of what is to be seen divides the problems of a
task into nine tenths for training and one tenth held out; of `number` the held-out tenth are
numbers that no training picture shows. `builtin:tiny-vision` was pretrained on the training split
(`scripts/build_tiny_vision_model.py`, docs/models.md#the-tiny-model-that-sees).
"""

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.base import Split
from mlx_parallm.environments.kinds.tasks import Problem, TasksSource, split_of
from mlx_parallm.environments.row_images import stored
from mlx_parallm.system.packages import require

SIDE = 48  # pixels
COLOURS: Mapping[str, tuple[int, int, int]] = MappingProxyType(
    {
        "red": (220, 30, 30),
        "green": (30, 160, 40),
        "blue": (40, 60, 220),
        "yellow": (240, 220, 40),
        "orange": (250, 140, 20),
        "purple": (140, 40, 170),
        "pink": (250, 130, 190),
        "brown": (120, 70, 30),
    }
)
QUESTIONS: Mapping[str, str] = MappingProxyType(
    {
        "dots": "How many are there?",
        "colour": "Which one?",
        "number": "Read it.",
        "larger": "Which side?",
    }
)
MOST_DOTS = 8
_CELL = SIDE // 4  # each of 16 cells has at most one dot
_DIGITS = (  # rows of 5 pixels, the highest bit on the left
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
_SCALE = 3  # pixels of a digit's pixel

Pixels = np.ndarray  # [SIDE, SIDE, 3] uint8


@dataclass(frozen=True, slots=True)
class PictureProblem:
    """A picture, a question about it, and the one right answer."""

    task: str
    pixels: Pixels
    question: str
    answer: str
    key: str  # the content, whose hash decides the split, and a part of the pixels' hash


def _background(rng: random.Random) -> Pixels:
    return np.full((SIDE, SIDE, 3), rng.randint(200, 255), np.uint8)


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.choice(list(COLOURS.values()))


def _paint(pixels: Pixels, shape: str, x: float, y: float, radius: float, colour: Any) -> None:
    """Paint a disc, a square or a triangle around (x, y), in place."""
    right = np.arange(SIDE)[None] - x
    down = np.arange(SIDE)[:, None] - y
    if shape == "disc":
        inside = right**2 + down**2 <= radius**2
    elif shape == "square":
        inside = (abs(right) <= radius) & (abs(down) <= radius)
    else:
        inside = (abs(down) <= radius) & (2 * abs(right) <= down + radius)
    pixels[inside] = colour


def _dots(rng: random.Random) -> tuple[Pixels, str, str]:
    """Dots of one colour, at most one in each cell of four by four."""
    pixels, colour = _background(rng), _colour(rng)
    count = rng.randint(1, MOST_DOTS)
    cells = sorted(rng.sample(range(16), count))
    for cell in cells:
        x, y = (place * _CELL + _CELL / 2 + rng.uniform(-2, 2) for place in (cell % 4, cell // 4))
        _paint(pixels, "disc", x, y, rng.uniform(3, 4), colour)
    return pixels, str(count), ",".join(map(str, cells))


def _one_colour(rng: random.Random) -> tuple[Pixels, str, str]:
    """One shape of a colour that has a name."""
    pixels, name = _background(rng), rng.choice(list(COLOURS))
    shape, radius = rng.choice(["disc", "square", "triangle"]), rng.randint(6, 14)
    x, y = (rng.randint(radius, SIDE - 1 - radius) for _ in "xy")
    _paint(pixels, shape, x, y, radius, COLOURS[name])
    return pixels, name, f"{name}/{shape}/{radius}/{x}/{y}"


def _number(rng: random.Random) -> tuple[Pixels, str, str]:
    """A number of two digits; the content is the number, at any place."""
    pixels, colour, number = _background(rng), _colour(rng), str(rng.randint(10, 99))
    left, top = 7 + rng.randint(-4, 4), 13 + rng.randint(-4, 4)
    for place, digit in enumerate(map(int, number)):
        rows = np.array(_DIGITS[digit])[:, None] >> np.arange(4, -1, -1)
        inside = np.kron(rows & 1, np.ones((_SCALE, _SCALE))) > 0
        start = left + place * 6 * _SCALE
        pixels[top : top + 7 * _SCALE, start : start + 5 * _SCALE][inside] = colour
    return pixels, number, number


def _larger(rng: random.Random) -> tuple[Pixels, str, str]:
    """Two shapes side by side, whose sizes differ by a sixth or more."""
    pixels, shape = _background(rng), rng.choice(["disc", "square"])
    large = rng.randint(7, 11)
    sizes = [large, rng.randint(3, large - 2)]
    rng.shuffle(sizes)
    heights = [rng.randint(12, SIDE - 12) for _ in sizes]
    for place, (size, y) in enumerate(zip(sizes, heights, strict=True)):
        _paint(pixels, shape, SIDE / 4 + place * SIDE / 2 - 0.5, y, size, _colour(rng))
    side = "left" if sizes[0] > sizes[1] else "right"
    return pixels, side, f"{shape}/{sizes}/{heights}"


TASKS: Mapping[str, Callable[[random.Random], tuple[Pixels, str, str]]] = MappingProxyType(
    {"dots": _dots, "colour": _one_colour, "number": _number, "larger": _larger}
)


def make_problem(task: str, index: int, *, seed: int, split: Split) -> PictureProblem:
    """Return problem number `index` of one of TASKS, deterministic in its arguments."""
    rng = random.Random(f"pictures/{task}/{seed}/{split}/{index}")
    while True:
        pixels, answer, seen = TASKS[task](rng)
        if split_of(what := f"{task}:{seen}") == split:
            key = f"{what}/{hashlib.sha256(pixels.tobytes()).hexdigest()[:12]}"
            return PictureProblem(task, pixels, QUESTIONS[task], answer, key)


class PicturesSource(TasksSource):
    tasks = TASKS

    def __init__(self, config: EnvironmentConfig, *, seed: int, name: str | None = None) -> None:
        """Raises ConfigError: an unknown task, options (these tasks have none), no Pillow."""
        super().__init__(config, seed=seed, name=name)
        require('kind = "pictures"', "PIL")

    def problem(self, index: int, seed: int, split: Split) -> Problem:
        from PIL import Image

        drawn = make_problem(self.config.name, index, seed=seed, split=split)
        image = stored(Image.fromarray(drawn.pixels), Path(), "environments: pictures")
        content = [{"type": "image", "image": image}, {"type": "text", "text": drawn.question}]
        return Problem(drawn.task, ({"role": "user", "content": content},), drawn.answer, drawn.key)
