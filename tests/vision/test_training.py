"""Training on rows with images: GRPO and SFT through whole runs in this process."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlx_parallm.config.data import DataConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.data.examples import read_examples
from mlx_parallm.rollout_store.store import RolloutStore
from tests.images.checkpoints import save_qwen_vl, save_smolvlm
from tests.images.gemma3 import save_gemma3
from tests.images.lfm2_vl import save_lfm2_vl
from tests.integration.in_process import train_here
from tests.integration.processes import metrics
from tests.vision.drawn import data_url, file_of

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")

RUN = """
[model]
base_path = "{model}"

[server]
port = 0
batch_size = 16

[vision]
enabled = true

[rl_training]
run_name = "run"
checkpoint_dir = "{directory}"
learning_rate = 1e-2
blocks_per_eval = {blocks}
max_staleness = 0
batch_size = 16
seed = 1

[rl_training.lora]
rank = 8
"""
GRPO = """
[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 256

[[environments]]
kind = "dataset"
data = "{directory}/rows.jsonl"
rewards = ["python:{directory}/reward.py:long_words"]
group_size = 8
max_tokens = 4
heldout_fraction = 0.0
"""
REWARD = """
def long_words(completions, images, **kwargs):
    assert len(images) == len(completions) and all(len(each) for each in images)
    return [float(len(set(completion[0]["content"]))) for completion in completions]
"""
SFT = """
[data]
path = "{directory}/rows.jsonl"
eval_fraction = 0.0
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")


def colour(name: str) -> Image.Image:
    return Image.new("RGB", (24, 24), name)


def write_run(
    path: Path, checkpoint: Path, text: str, rows: list[dict[str, Any]], blocks: int = 0
) -> Path:
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "reward.py").write_text(REWARD)
    config = path / "run.toml"
    config.write_text((RUN + text).format(model=checkpoint, directory=path, blocks=blocks))
    return config


@pytest.mark.parametrize(
    "save",
    [save_smolvlm, save_qwen_vl, save_gemma3, pytest.param(save_lfm2_vl, marks=pytest.mark.long)],
)
def test_grpo_samples_and_learns_from_one_picture(save: Any, tmp_path: Path) -> None:
    checkpoint = save(tmp_path / "model")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(file_of(colour("red")))
    look = {"type": "text", "text": "What is it?"}
    rows = [
        {"prompt": "Which colour?", "images": ["pictures/red.png"]},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, look, {"type": "image"}]}],
            "images": [data_url(colour("blue")), "pictures/red.png"],
        },
    ]
    config = write_run(tmp_path, checkpoint, GRPO, rows, blocks=1)
    train_here(config, "rl_training.total_steps=2")
    first, second = metrics(tmp_path / "run")
    assert first["logprob_diff_max"] <= 1e-4 and second["logprob_diff_max"] <= 1e-4
    assert first["grad_norm"] > 0 and first["tokens"] > 0
    with closing(RolloutStore(tmp_path / "run" / "rollouts.sqlite")) as store:
        groups = store.groups(sorted(store.known_ids()))
    names = {rollout.images for group in groups for rollout in group.rollouts}
    assert {len(images) for images in names} == {1, 2}
    [[red]] = [images for images in names if len(images) == 1]
    assert all(images[-1] == red and red.startswith("sha256:") for images in names)


@pytest.mark.parametrize(
    ("algorithm", "row"),
    [
        ("sft", {"messages": ["<image>Which?<image>", "red"]}),
        ("sft", {"conversations": ["<image>Which?<image>", "red"]}),
        ("kto", {"messages": ["<image>Which?<image>", "red"], "label": True}),
        ("dpo", {"prompt": "<image>Which?<image>", "chosen": "red", "rejected": "blue"}),
    ],
)
def test_a_mark_in_a_text_is_the_place_of_a_picture(
    algorithm: str, row: dict[str, Any], tmp_path: Path
) -> None:
    """LLaVA's and LLaMA-Factory's rows."""
    keys = {"messages": ("role", "content"), "conversations": ("from", "value")}
    for name, (role, text) in keys.items():
        if name in row:
            row[name] = [
                {role: speaker, text: said}
                for speaker, said in zip(("user", "assistant"), row[name], strict=True)
            ]
    file = tmp_path / "rows.jsonl"
    pictures = [data_url(colour("red")), data_url(colour("blue"))]

    def read(**more: Any) -> Any:
        file.write_text(json.dumps(row | more) + "\n")
        return read_examples(DataConfig(path=str(file), eval_fraction=0), algorithm)[0][0]

    example = read(images=pictures)
    content = [*example.prompt, *example.completions[0]][0]["content"]
    assert [part["type"] for part in content] == ["image", "text", "image"]
    assert content[0] != content[2] and content[1]["text"] == "Which?"
    assert "<image>" in str(read())
    for more, message in (
        ({"images": pictures[:1]}, "2 places for images, and the row has 1"),
        ({"images": pictures, "videos": ["a.mp4"]}, "column 'videos': only texts and images"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(**more)


def test_sft_tells_pictures_apart(checkpoint: Path, tmp_path: Path) -> None:
    rows = [
        {"prompt": "Which colour?", "images": [data_url(colour(name))], "completion": name}
        for name in ("red", "blue")
    ]
    config = write_run(tmp_path, checkpoint, SFT, rows)
    train_here(
        config,
        'rl_training.algorithm="sft"',
        "rl_training.batch_size=2",
        "rl_training.total_steps=30",
    )
    losses = [line["loss"] for line in metrics(tmp_path / "run")]
    # the texts before the answers are equal: without the pictures half of the first letter is lost
    assert losses[0] > 2 and losses[-1] < 0.05, losses


def chosen_rows(algorithm: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for good, bad in (("red", "blue"), ("blue", "red")):
        row = {"prompt": "Which colour?", "images": [data_url(colour(good))]}
        if algorithm == "dpo":
            rows.append({**row, "chosen": good, "rejected": bad})
        else:
            rows += [
                {**row, "completion": good, "label": True},
                {**row, "completion": bad, "label": False},
            ]
    return rows


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_preferences_are_learned_from_pictures(
    checkpoint: Path, tmp_path: Path, algorithm: str
) -> None:
    # the texts of good and bad answers are the same: a model that sees no picture stays at
    # log 2 (DPO), where chosen and rejected are equally likely
    config = write_run(tmp_path, checkpoint, SFT, chosen_rows(algorithm))
    train_here(
        config,
        f'rl_training.algorithm="{algorithm}"',
        f"rl_training.batch_size={2 if algorithm == 'dpo' else 4}",
        "rl_training.total_steps=30",
    )
    lines = metrics(tmp_path / "run")
    assert lines[-1]["loss"] < 0.1 * lines[0]["loss"], [line["loss"] for line in lines]


PICTURES = """
from PIL import Image

from mlx_parallm.environments.state import BaseEnvironment, State


class Colours(BaseEnvironment):
    def reset(self, index, split):
        colour = ("red", "blue")[index % 2]
        picture = {"type": "image", "image": Image.new("RGB", (24, 24), colour)}
        question = {"type": "text", "text": "Which colour?"}
        return State([{"role": "user", "content": [picture, question]}], metadata={"colour": colour})

    def is_terminal(self, state):
        return state.step_count == 2

    def build_prompt(self, state):
        if not state.step_count:
            return state.prompt
        again = {"type": "image", "image": Image.new("RGB", (24, 24), "green")}
        said = {"role": "assistant", "content": state.response}
        return [*state.prompt, said, {"role": "user", "content": [again]}]

"""
ENVIRONMENT = """
[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 256

[[environments]]
kind = "python:{directory}/environment.py:Colours"
rewards = ["python:{directory}/reward.py:letters"]
group_size = 8
max_tokens = 4
"""


def test_an_environment_in_python_shows_pictures(checkpoint: Path, tmp_path: Path) -> None:
    config = write_run(tmp_path, checkpoint, ENVIRONMENT, [])
    (tmp_path / "environment.py").write_text(PICTURES)
    (tmp_path / "reward.py").write_text(
        "def letters(completions, **kwargs):\n"
        "    return [float(len(set(str(each)))) for each in completions]\n"
    )
    train_here(config, "rl_training.total_steps=1", "evaluation.problems=0")
    for line in metrics(tmp_path / "run"):
        assert line["logprob_diff_max"] <= 1e-4
    with closing(RolloutStore(tmp_path / "run" / "rollouts.sqlite")) as store:
        groups = store.groups(sorted(store.known_ids()))
    shown = {rollout.images for group in groups for rollout in group.rollouts}
    assert len(shown) == 2 and {len(images) for images in shown} == {2}
    assert len({images[1] for images in shown}) == 1, "the second turn's picture is the green one"


BAD = {
    "no file": ({"prompt": "x", "images": ["absent.png"]}, "rows.jsonl:1: the image absent.png"),
    "another number": (
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}],
            "images": [data_url(colour("red"))],
        },
        "2 places for images, and the row has 1",
    ),
    "two columns": ({"prompt": "x", "images": [], "image": "y"}, "keep one of them"),
    "a number": ({"prompt": "x", "images": [3]}, "an image is int; expected a path"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named(checkpoint: Path, tmp_path: Path, name: str) -> None:
    row, reason = BAD[name]
    config = write_run(tmp_path, checkpoint, GRPO, [row])
    with pytest.raises(ConfigError, match=reason):
        train_here(config)


def test_a_model_of_texts_refuses_rows_with_images(tmp_path: Path) -> None:
    row = {"prompt": "x", "images": [data_url(colour("red"))]}
    config = write_run(tmp_path, Path("builtin:tiny"), GRPO, [row])
    config.write_text(config.read_text().replace("enabled = true", "enabled = false"))
    with pytest.raises(ConfigError, match=r"rows: .*images"):
        train_here(config)
    row["completion"] = "y"
    config = write_run(tmp_path, Path("builtin:tiny"), SFT, [row] * 2)
    config.write_text(config.read_text().replace("enabled = true", "enabled = false"))
    with pytest.raises(ConfigError, match=r"rows.jsonl.*messages\.0\.content\.0"):
        train_here(config, 'rl_training.algorithm="sft"', "rl_training.batch_size=1")
