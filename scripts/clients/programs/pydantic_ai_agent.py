"""Pydantic AI. packages: pydantic-ai-slim[openai]==2.68.0"""

from typing import Literal

import pydantic
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop, get_weather
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

tiny = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=V1))
scripted = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=SCRIPTED))
SHORT = {"max_tokens": 200}


class Weather(pydantic.BaseModel):
    city: Literal["Paris"]
    sunny: Literal[True]


class Sunny(pydantic.BaseModel):
    sunny: bool


@cell("chat")
async def _():
    await Agent(scripted).run(QUESTION, model_settings=SHORT)


@cell("stream")
async def _():
    async with Agent(scripted).run_stream(QUESTION) as answer:
        check("Paris" in "".join([text async for text in answer.stream_text(delta=True)]), "a text")


@cell("tool loop")
async def _():
    check_loop((await Agent(scripted, tools=[get_weather]).run(QUESTION)).output)


@cell("schema")
async def _():
    for output in (NativeOutput(Sunny), Sunny):  # the second is a forced call
        check(
            isinstance(
                (await Agent(tiny, output_type=output).run(QUESTION, model_settings=SHORT)).output,
                Sunny,
            ),
            "",
        )


@cell("tools + schema")
async def _():
    agent = Agent(scripted, tools=[get_weather], output_type=NativeOutput(Weather))
    answer = (await agent.run(QUESTION)).output
    check(answer == Weather(city="Paris", sunny=True), answer)
    check_loop(answer)


@cell("responses")
async def _():
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=SCRIPTED))
    check_loop((await Agent(model, tools=[get_weather]).run(QUESTION)).output)
