"""Scored sessions become a group of rollouts, which the trainer's store takes and the trainer
learns from."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.sources import SourceContext
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.systems.traces.source import SessionRewards, session_rewards
from tests.conftest import TinyEngine
from tests.rollout_store.groups import VOCAB_SIZE
from tests.server.serving import RunningServer, running_server
from tests.traces.messages import assistant, user

QUESTION: Any = user("Sum: 2+3")


def configuration(directory: Path, **keys: Any) -> Config:
    # Without LoRA the base is the policy, as in these tests' engine.
    values = {
        "traces.directory": directory / "traces",
        "traces.group_size": 2,
        "rl_training.lora.enabled": False,
    }
    return load_config(None, [f"{key}={value}" for key, value in {**values, **keys}.items()])


def source_of(
    config: Config, directory: Path, store: RolloutStore, told: list[str]
) -> SessionRewards | None:
    context = SourceContext(config, directory, store, VOCAB_SIZE, [], lambda: 0, lambda: 0)
    context.on_reward.append(lambda: told.append("reward"))
    return session_rewards(context)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def server(
    tmp_path: Path,
    store: RolloutStore,
    tiny_engine: TinyEngine,
    tiny_tokenizer: Any,
    told: list[str],
) -> Iterator[RunningServer]:
    source = source_of(configuration(tmp_path), tmp_path, store, told)
    assert source is not None
    with running_server(tiny_engine.client, tiny_tokenizer, routers=[source.router]) as running:
        yield running


def play(server: RunningServer, name: str, *questions: str, **options: Any) -> list[str]:
    """Ask in turns; return the ids of the answers."""
    with OpenAI(base_url=f"{server.url}/sessions/{name}/v1", api_key="none", timeout=60) as client:
        messages, ids = [QUESTION], []
        for question in (*questions, ""):
            answer = client.chat.completions.create(
                model="default", messages=messages, max_tokens=6, **options
            )
            ids.append(answer.id)
            content = answer.choices[0].message.content
            messages = [*messages, assistant(content), user(question)]
        return ids


def score(server: RunningServer, name: str, value: float, **more: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/sessions/{name}/feedback", json={"score": value, **more})
    answer.raise_for_status()
    training: dict[str, Any] = answer.json()["training"]
    return training


def test_scored_sessions_of_one_prompt_are_a_group(
    server: RunningServer, store: RolloutStore, told: list[str], tmp_path: Path
) -> None:
    """Each sampled token once, with the engine's log-probability; what stands between is masked."""
    play(server, "a", "Sum: 4+4")
    play(server, "b")
    assert score(server, "a", 1.0) == {"state": "waiting", "sessions": 1, "group_size": 2}
    answer = score(server, "b", 0.0)
    assert (answer["state"], answer["sessions"], told) == ("queued", ["a", "b"], ["reward"])
    assert score(server, "a", 0.5)["state"] == "trained"
    [group] = store.waiting()
    assert (group.environment, [rollout.reward for rollout in group.rollouts]) == (
        "sessions",
        [1.0, 0.0],
    )
    two, one = group.rollouts
    assert sum(two.mask) > sum(one.mask)
    assert two.logprobs is not None
    for mask, logprob in zip(two.mask, two.logprobs, strict=True):
        assert (logprob == 0.0) if not mask else (-math.inf < logprob <= 0.0)
    runs = "".join(map(str, two.mask)).strip("0").replace("0", " ").split()
    assert len(runs) == 2  # one sequence: the second prompt continues with the first answer
    assert two.earlier == ()


def test_a_group_by_name_and_by_answer(server: RunningServer, store: RolloutStore) -> None:
    first, _ = play(server, "a", "Sum: 1+1")
    play(server, "b", "Sum: 2+2")
    assert score(server, "a", 1.0, response_id=first, group="mine")["state"] == "waiting"
    assert score(server, "b", 0.0, group="other")["state"] == "waiting"
    assert score(server, "b", 0.0, group="mine")["state"] == "queued"
    [group] = store.waiting()
    assert [sum(rollout.mask) > 0 for rollout in group.rollouts] == [True, True]
    assert len(group.rollouts[0].tokens) < len(group.rollouts[1].tokens)


def test_what_cannot_be_trained_on(server: RunningServer, store: RolloutStore) -> None:
    with OpenAI(base_url=f"{server.url}/sessions/s/v1", api_key="none", timeout=60) as client:
        secret: Any = user("key AKIA2E0A8F3B244C9986")
        client.chat.completions.create(model="default", messages=[secret], max_tokens=4)
    answer = score(server, "s", 1.0)
    assert answer["state"] == "refused" and "holds redacted secrets" in answer["reason"]
    play(server, "t")
    with OpenAI(base_url=f"{server.url}/sessions/t/v1", api_key="none", timeout=60) as client:
        client.chat.completions.create(
            model="default", messages=[QUESTION], max_tokens=4, temperature=0.5
        )
    assert "several temperatures" in score(server, "t", 1.0)["reason"]
    assert store.waiting() == []


def test_groups_that_never_fill_a_batch_are_refused(tmp_path: Path, store: RolloutStore) -> None:
    with pytest.raises(ConfigError, match="choose a divisor"):
        source_of(configuration(tmp_path, **{"traces.group_size": 7}), tmp_path, store, [])
    assert source_of(load_config(None, []), tmp_path, store, []) is None
