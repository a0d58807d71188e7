"""InferenceModule inside an episode, and with tools."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.episode import CURRENT, Episode
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, RequestError, RolloutRejectedError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.types import Completion
from tests.conftest import TinyEngine
from tests.server.scripted_answers import HERMES_TEMPLATE, ScriptedEngine, tokenizer_with

SUM = [{"role": "user", "content": "Sum: 47+38"}]


@pytest.fixture(scope="module")
def inference(tiny_engine: TinyEngine, tiny_tokenizer: Any) -> Iterator[InferenceModule]:
    with InferenceModule.over(tiny_engine.client, tiny_tokenizer) as module:
        yield module


@contextmanager
def episode(client: Any, adapter: str | None = None) -> Iterator[list[Any]]:
    """Is given "said" as an answer to every turn; yields what it was asked."""
    turns: list[Any] = []

    def generate(prompt: Any, params: Any) -> Completion:
        turns.append((prompt, dict(params)))
        text = "USE_TOOL[add](1, 2)" if "tools" in str(turns[-1]) else "said"
        return Completion(0, text, (1, 2), (-0.5, -1.0), None, None, (3, 4), "stop")

    async def agenerate(prompt: Any, params: Any) -> Completion:
        return generate(prompt, params)

    asking = {"generate": generate, "agenerate": agenerate}
    token = CURRENT.set(SimpleNamespace(client=client, adapter=adapter, since=0.0, **asking))  # type: ignore[arg-type]
    try:
        yield turns
    finally:
        CURRENT.reset(token)


async def test_inside_an_episode_generate_is_its_next_turn(inference: InferenceModule) -> None:
    with episode(inference.client) as turns:
        result = inference.generate(["What?"], max_new_tokens=7, stop="!", return_logprobs=True)
        assert (result[0], result.token_ids, result.logprobs[0].tolist()) == (
            "said",
            [(1, 2)],
            [-0.5, -1.0],
        )
        assert result.metadata["policy_versions"] == [(3, 4)]
        assert (await inference.agenerate([SUM]))[0] == "said"
        assert turns == [("What?", {"max_tokens": 7, "stop": ("!",)}), (SUM, {})]
        tool = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
        responses, [[call]] = inference.batch_generate_with_tools([SUM], [tool])
        assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2}) and responses == [
            "USE_TOOL[add](1, 2)"
        ]
        # the tiny template takes no tools
        assert turns[2][0][0]["role"] == "system" and turns[2][1] == {"tools": ()}
        for refused in ({"num_return_sequences": 2}, {"return_logits": True}):
            with pytest.raises(RolloutRejectedError):
                inference.generate(["a"], **refused)
        for prompts in (["a", "b"], [[1, 2]]):
            with pytest.raises(RolloutRejectedError):
                inference.generate(prompts)
    # this module is the base: a judge, say
    with episode(inference.client, adapter="policy") as turns:
        assert inference.generate(SUM, 4, do_sample=False)[0] != "said" and not turns


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokens = dict.fromkeys(("<tool_call>", "</tool_call>"), True)
    return tokenizer_with(
        tmp_path_factory.mktemp("hermes"),
        tokens,
        chat_template=HERMES_TEMPLATE.replace("default(true)", "default(false)"),
    )


def test_tools_in_the_models_own_format(hermes: Any) -> None:
    engine = ScriptedEngine(hermes)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    engine.texts = (f"Let me see. {call}", "weather(city=Bonn)")
    with InferenceModule.over(engine, hermes) as inference:  # type: ignore[arg-type]
        prompts = ["Rain?", [{"role": "user", "content": "Snow?"}]]
        responses, calls = inference.batch_generate_with_tools(
            prompts, ["weather"], num_return_sequences=2
        )
        assert responses == [*engine.texts] * 2
        assert [[(c.name, c.arguments, c.raw_text) for c in found] for found in calls[:2]] == [
            [("weather", {"city": "Köln"}, call)],
            [("weather", {"city": "Bonn"}, "weather(city=Bonn)")],
        ]
        told = hermes.decode(engine.asked[0].prompt_token_ids, skip_special_tokens=False)
        assert (
            '"name": "weather"' in told
            and "Rain?" in told
            and told.endswith("<|im_start|>assistant\n")
        )
        responses, [xml, _] = inference.batch_generate_with_tools(
            prompts[0], ["weather"], formats="xml"
        )
        assert not xml and not xml.malformed
        engine.texts = ("<tool_call>{broken</tool_call>",)
        [[broken]] = [c.malformed for c in inference.batch_generate_with_tools("a", ["weather"])[1]]
        assert broken.raw_text == engine.texts[0]
        asked = len(engine.asked)
        with pytest.raises(ConfigError, match="none of: auto"):
            inference.batch_generate_with_tools("a", ["weather"], formats="yaml")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="available_tools is empty"):
            inference.batch_generate_with_tools("a", [])
        assert len(engine.asked) == asked


def test_stop_strings_and_calls_count_behind_the_reasoning(tmp_path: Path) -> None:
    tokens = {"<think>": False, "</think>": False, "<tool_call>": True, "</tool_call>": True}
    thinker = tokenizer_with(tmp_path, tokens, chat_template=HERMES_TEMPLATE)
    engine = ScriptedEngine(thinker)  # type: ignore[arg-type]
    draft = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    engine.texts = (f"{draft}? no</think>{draft.replace('Bonn', 'Köln')}",)
    with InferenceModule.over(engine, thinker) as inference:  # type: ignore[arg-type]
        chat = [{"role": "user", "content": "Rain?"}]
        [_], [[call]] = inference.batch_generate_with_tools([chat], ["weather"], stop="? no")
        assert call.arguments == {"city": "Köln"}
        assert engine.asked[-1].params.reasoning == ("", "</think>")
        inference.generate(["Rain?"], stop="x")  # a text is no chat
        assert engine.asked[-1].params.reasoning is None


async def test_an_episodes_turn_shows_the_marks_of_calls_that_are_special_tokens(
    hermes: Any,
) -> None:
    engine = ScriptedEngine(hermes)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    engine.texts = (call,)
    config = EnvironmentConfig(kind="svrl", name="own")
    policy = EpisodePolicy(engine, hermes, temperature=1.0, max_token_length=2000)  # type: ignore[arg-type]
    turns = Episode(policy, config, group_id="group", seed=0, number=0, group_size=1)  # type: ignore[arg-type]
    token = CURRENT.set(turns)
    try:
        with InferenceModule.over(engine, hermes) as inference:  # type: ignore[arg-type]
            rain = [{"role": "user", "content": "Rain?"}]
            [text], [[found]] = await asyncio.to_thread(
                inference.batch_generate_with_tools, rain, ["weather"]
            )
            assert (text, found.name, found.arguments) == (call, "weather", {"city": "Köln"})
            asked = [
                *rain,
                {"role": "assistant", "content": text},
                {"role": "tool", "content": "wet"},
            ]
            await asyncio.to_thread(inference.batch_generate_with_tools, [asked], ["weather"])
    finally:
        CURRENT.reset(token)
    rollout = turns.trajectory(None).rollout
    sampled = hermes.encode(call, add_special_tokens=False)
    # one segment: what was sampled is the context
    assert not rollout.earlier and sum(rollout.mask) == 2 * len(sampled)
    assert engine.asked[1].prompt_token_ids[
        : len(engine.asked[0].prompt_token_ids) + len(sampled)
    ] == (
        *engine.asked[0].prompt_token_ids,
        *sampled,
    )
