"""Mirascope. packages: mirascope[openai]==2.8.2"""

import pydantic
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop, get_weather
from mirascope import llm

weather = llm.tool(get_weather)


class Sunny(pydantic.BaseModel):
    """Whether the sun shines."""

    sunny: bool


def model(url: str, api: str = "", **fields: object) -> llm.Model:
    llm.register_provider("openai" + api, scope="openai/", base_url=url, api_key="none")
    return llm.model(f"openai/{MODEL}{api}", **fields)


@cell("chat")
def _():
    check(model(V1, ":completions", max_tokens=8).call(QUESTION).text() is not None, "a text")


@cell("responses")
def _():
    check(model(V1, max_tokens=8).call(QUESTION).text() is not None, "a text")


@cell("stream")
def _():
    check(len(list(model(V1, max_tokens=8).stream(QUESTION).text_stream())) > 0, "parts")


@cell("schema")
def _():
    answer = model(V1, max_tokens=64).call(QUESTION, format=Sunny).parse()
    check(isinstance(answer, Sunny), answer)


@cell("tool loop")
def _():
    answer = model(SCRIPTED).call(QUESTION, tools=[weather])
    while answer.tool_calls:
        answer = answer.resume(answer.execute_tools())
    check_loop(answer.text())
