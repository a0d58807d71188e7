"""Agno. packages: agno==3.1.10 openai==3.51.0"""

from typing import Literal

import pydantic
from agno.agent import Agent
from agno.models.openai import OpenAIResponses
from agno.models.openai.like import OpenAILike
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop, get_weather

tiny = OpenAILike(id=MODEL, base_url=V1, api_key="none", max_tokens=64)
scripted = OpenAILike(
    id=MODEL, base_url=SCRIPTED, api_key="none", supports_native_structured_outputs=True
)


class Weather(pydantic.BaseModel):
    city: Literal["Paris"]
    sunny: Literal[True]


@cell("chat")
def _():
    check(Agent(model=tiny).run(QUESTION).metrics.output_tokens > 0, "tokens")


@cell("stream")
def _():
    check(len(list(Agent(model=tiny).run(QUESTION, stream=True))) > 1, "events")


@cell("tool loop")
def _():
    check_loop(Agent(model=scripted, tools=[get_weather]).run(QUESTION).content)


@cell("tools + schema")
def _():
    answer = Agent(model=scripted, tools=[get_weather], output_schema=Weather).run(QUESTION).content
    check(answer == Weather(city="Paris", sunny=True), answer)
    check_loop(answer)


@cell("responses")
def _():
    model = OpenAIResponses(id=MODEL, base_url=SCRIPTED, api_key="none")
    check_loop(Agent(model=model, tools=[get_weather]).run(QUESTION).content)
