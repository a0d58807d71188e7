"""CrewAI. packages: crewai==1.15.30"""

from typing import Literal

import pydantic
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop
from cells import get_weather as weather
from crewai import LLM, Agent
from crewai.tools import tool


class Weather(pydantic.BaseModel):
    city: Literal["Paris"]
    sunny: Literal[True]


@tool("get_weather")
def get_weather(city: Literal["Paris"]) -> str:
    """The weather of a city."""
    return weather(city)


def llm(url: str) -> LLM:
    return LLM(model=f"openai/{MODEL}", base_url=url, api_key="none")


def agent(**fields: object) -> Agent:
    return Agent(role="one", goal="weather", backstory="none", llm=llm(SCRIPTED), **fields)


@cell("chat")
def _():
    check(llm(V1).call(QUESTION), "an answer")


@cell("tool loop")
def _():
    check_loop(agent(tools=[get_weather]).kickoff(QUESTION).raw)


@cell("tools + schema")
def _():
    answer = agent(tools=[get_weather]).kickoff(QUESTION, response_format=Weather).pydantic
    check(answer == Weather(city="Paris", sunny=True), answer)
    check_loop(answer)
