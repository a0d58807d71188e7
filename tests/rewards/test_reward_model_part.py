"""`builtin:reward_model`: the scores of a trained reward model, and what becomes of bad input."""

import asyncio
from pathlib import Path

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.models.scoring.reward_model import TrainedRewardModel
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.rewards.reward_model import reward_model
from mlx_parallm.types import Rollout, Trajectory
from tests.models.test_reward_model import make_config, save

QUESTION = [{"role": "user", "content": "Sum: 1+2"}]


def answered(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Tokenizer) -> Path:
    directory = tmp_path_factory.mktemp("reward_model")
    save(directory / "run" / "final", tiny_tokenizer, make_config(directory))
    return directory / "run"


def test_a_part_gives_the_models_scores(model: Path) -> None:
    part = reward_model(path=str(model))
    texts = ["3", "12 perhaps", "3"]
    scores = asyncio.run(part([QUESTION] * 3, [answered(text) for text in texts]))
    direct = TrainedRewardModel.load(model)
    expected = direct.score([direct.tokens([*QUESTION, *answered(text)]) for text in texts])
    assert scores == pytest.approx(expected, abs=2e-6)
    assert scores[0] == pytest.approx(scores[2], abs=1e-6)
    middle = (expected[0] + expected[1]) / 2
    binary = reward_model(path=str(model), threshold=middle)
    ones = asyncio.run(binary([QUESTION] * 3, [answered(text) for text in texts]))
    assert ones == [float(score >= middle) for score in expected]


def test_a_trajectory_is_read_whole(model: Path) -> None:
    """Of several turns the earlier ones count too."""
    messages = [*QUESTION, *answered("4"), {"role": "user", "content": "Again."}, *answered("3")]
    rollout = Rollout((), (), (), (), 1.0, {})
    trajectory = Trajectory("3", rollout, messages=tuple(messages))
    part = reward_model(path=str(model))
    [score] = asyncio.run(part([QUESTION], [answered("3")], [trajectory]))
    direct = TrainedRewardModel.load(model)
    assert score == pytest.approx(direct.score([direct.tokens(messages)])[0], abs=2e-6)


def test_an_answer_that_is_too_long_is_left_unscored_and_counted(model: Path) -> None:
    part, numbers = reward_model(path=str(model)), dict[str, float]()
    answers = [answered("3"), answered("1 " * 4000)]
    scores = asyncio.run(part([QUESTION] * 2, answers, log_metric=numbers.__setitem__))
    assert isinstance(scores[0], float)
    assert scores[1] == UNSCORED
    assert numbers == {"reward_model/unscored": 1}
    with pytest.raises(RolloutRejectedError, match="tokens, and this reward model reads"):
        asyncio.run(part([QUESTION], answers[1:]))


def test_prompts_of_another_form_say_so(model: Path) -> None:
    with pytest.raises(RolloutRejectedError, match="was trained on messages"):
        asyncio.run(reward_model(path=str(model))(["Sum: 1+2 "], ["3"]))


def test_a_wrong_path_is_refused_before_the_run_begins(model: Path) -> None:
    config = EnvironmentConfig(
        kind="simple_text",
        rewards=("builtin:reward_model",),
        reward_options={"reward_model": {"path": str(model / "nowhere")}},
    )
    with pytest.raises(ConfigError, match="nowhere is no reward model: there is no such directory"):
        RewardFunctions.from_config(config, columns=None)
