"""OpenAI's Agents SDK. packages: openai-agents==0.24.0"""

from typing import Literal

import pydantic
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop, get_weather
from openai import AsyncOpenAI

set_tracing_disabled(True)
tool = function_tool(get_weather)
SHORT = ModelSettings(max_tokens=64)


class Weather(pydantic.BaseModel):
    city: Literal["Paris"]
    sunny: Literal[True]


class Sunny(pydantic.BaseModel):
    sunny: bool


def agent(kind: type, url: str, **fields: object) -> Agent:
    return Agent(name="one", model=kind(MODEL, AsyncOpenAI(base_url=url, max_retries=0)), **fields)


def cells_of(kind: type, api: str) -> None:
    @cell(api)
    async def _():
        check(
            (await Runner.run(agent(kind, V1, model_settings=SHORT), QUESTION)).raw_responses,
            "an answer",
        )

    @cell(f"{api}: stream")
    async def _():
        result = Runner.run_streamed(agent(kind, V1, model_settings=SHORT), QUESTION)
        check(len([event async for event in result.stream_events()]) > 2, "events")

    @cell(f"{api}: tool loop")
    async def _():
        check_loop((await Runner.run(agent(kind, SCRIPTED, tools=[tool]), QUESTION)).final_output)

    @cell(f"{api}: schema")
    async def _():
        typed_agent = agent(kind, V1, output_type=Sunny, model_settings=SHORT)
        check(
            isinstance((await Runner.run(typed_agent, QUESTION)).final_output, Sunny), "an object"
        )

    @cell(f"{api}: tools + schema")
    async def _():
        answer = (
            await Runner.run(agent(kind, SCRIPTED, tools=[tool], output_type=Weather), QUESTION)
        ).final_output
        check(answer == Weather(city="Paris", sunny=True), answer)
        check_loop(answer)


cells_of(OpenAIChatCompletionsModel, "chat")
cells_of(OpenAIResponsesModel, "responses")
