"""`builtin:reward_model`: the scores of a trained reward model, and what becomes of bad input."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError, EndpointError, RolloutRejectedError
from mlx_parallm.models.heads.value_head import VALUE_HEAD_FILE
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.scoring.card import find_reward_model
from mlx_parallm.models.scoring.reward_model import (
    RewardScorer,
    TrainedRewardModel,
    load_shared_scorers,
    shared_scorer,
)
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rewards.base import UNSCORED
from mlx_parallm.rewards.functions import RewardFunctions
from mlx_parallm.rewards.trained_reward_model import reward_model
from mlx_parallm.types import Rollout, Trajectory
from tests.active_memory import active_memory
from tests.conftest import TinyEngine
from tests.models.test_reward_model import make_config, save
from tests.scripted_http import scripted_http
from tests.server.serving import running_server

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


def test_it_shares_the_arrays_of_the_policys_base(
    tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    model = tmp_path / "run"
    save(model / "final", tiny_tokenizer, make_config(tmp_path))
    base = load_model(ModelConfig(base_path="builtin:tiny"))
    mx.eval(base.model.parameters())
    size = sum(array.nbytes for _, array in tree_flatten(base.model.parameters()))
    before = active_memory()
    scorer = shared_scorer(str(find_reward_model(model)), base)
    scorer.wait()
    assert active_memory() - before < size / 2
    part = reward_model(path=str(model))
    [score] = asyncio.run(part([QUESTION], [answered("3")]))
    assert scorer is shared_scorer(str(find_reward_model(model))), "the part has taken this one"
    direct = TrainedRewardModel.load(model)
    assert score == pytest.approx(
        direct.score([direct.tokens([*QUESTION, *answered("3")])])[0], abs=2e-6
    )


def test_a_later_run_scores_with_the_files_as_they_are_then(
    tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    save(tmp_path / "final", tiny_tokenizer, make_config(tmp_path))
    part, scores = reward_model(path=str(tmp_path)), []
    load_shared_scorers([str(tmp_path)], None)
    first = shared_scorer(str(find_reward_model(tmp_path)))
    load_shared_scorers([str(tmp_path)], None)
    assert shared_scorer(str(find_reward_model(tmp_path))) is first
    for _ in range(2):
        load_shared_scorers([str(tmp_path)], None)
        scores += asyncio.run(part([QUESTION], [answered("3")]))
        file = str(tmp_path / "final" / VALUE_HEAD_FILE)
        arrays = dict(mx.load(file).items())
        arrays["value_head.bias"] = arrays["value_head.bias"] + 1
        mx.eval(arrays)
        mx.save_safetensors(file, arrays)
    assert scores[1] == pytest.approx(scores[0] + 1, abs=1e-5)


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
    with pytest.raises(RolloutRejectedError, match="tokens"):
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
    with pytest.raises(ConfigError, match=r"nowhere .*directory"):
        RewardFunctions.from_config(config, columns=None)


# ---------------------------------------------------------------------- a server's


@pytest.fixture(scope="module")
def url(model: Path, tiny_engine: TinyEngine, tiny_tokenizer: Tokenizer) -> Iterator[str]:
    scorer = RewardScorer(model)
    try:
        with running_server(tiny_engine.client, tiny_tokenizer, scorer=scorer) as server:
            yield server.url
    finally:
        scorer.close()


def test_a_server_gives_the_same_scores(model: Path, url: str) -> None:
    texts = ["3", "12 perhaps", "3"]
    rows = [QUESTION] * 3, [answered(text) for text in texts]
    here = asyncio.run(reward_model(path=str(model))(*rows))
    for address in (url, f"{url}/v1/"):
        part = reward_model(url=address)
        assert asyncio.run(part(*rows)) == pytest.approx(here, abs=2e-6)
        assert asyncio.run(part(*rows)) == pytest.approx(here, abs=2e-6), "in another loop"


def test_one_answer_that_a_server_refuses_costs_no_other(url: str) -> None:
    part, numbers = reward_model(url=url), dict[str, float]()
    answers = [answered("3"), answered("1 " * 4000), answered("4")]
    scores = asyncio.run(part([QUESTION] * 3, answers, log_metric=numbers.__setitem__))
    assert [isinstance(score, float) for score in scores] == [True, False, True]
    assert scores[1] == UNSCORED and numbers == {"reward_model/unscored": 1}
    with pytest.raises(RolloutRejectedError, match="tokens"):
        asyncio.run(part([QUESTION], answers[1:2]))
    with pytest.raises(RolloutRejectedError, match="was trained on messages"):
        asyncio.run(part(["Sum: 1+2 "], ["3"]))


def test_a_server_that_is_away_or_has_no_reward_model_says_so(url: str) -> None:
    rows = [QUESTION], [answered("3")]
    with pytest.raises(EndpointError, match="cannot be reached"):
        asyncio.run(reward_model(url="http://127.0.0.1:9", retries=0)(*rows))
    with pytest.raises(EndpointError, match="other"):
        asyncio.run(reward_model(url=url, model="other")(*rows))


@pytest.mark.parametrize(
    "data", [[], [{"index": 0, "score": "high"}], [{"index": 0, "score": 1e999}], None]
)
def test_an_answer_that_is_no_score_rejects_the_group(data: Any) -> None:
    with scripted_http(lambda path, body: (200, {}, {"data": data})) as (address, _):
        part = reward_model(url=address)
        with pytest.raises(RolloutRejectedError, match="reward_model: "):
            asyncio.run(part([QUESTION], [answered("3")]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "set path, a run here, or url"),
        ({"path": "a", "url": "http://b"}, "one of them"),
        ({"url": "b:80"}, "expected e.g. http://"),
        ({"path": "a", "model": "m"}, "belong to a url"),
        ({"url": "http://b", "api_key_file": "/nowhere/key"}, "api_key_file"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        reward_model(**options)
