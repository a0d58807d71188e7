"""Haystack. packages: haystack-ai==3.4.0"""

from cells import (
    MODEL,
    PARAMETERS,
    QUESTION,
    SCHEMA,
    SCRIPTED,
    V1,
    cell,
    check,
    check_json,
    check_loop,
    get_weather,
)
from haystack.components.agents import Agent
from haystack.components.embedders import OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

KEY = Secret.from_token("none")
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}
MESSAGES = [ChatMessage.from_user(QUESTION)]
tool = Tool(name="get_weather", description="Weather.", parameters=PARAMETERS, function=get_weather)


def generator(url: str, **fields: object) -> OpenAIChatGenerator:
    return OpenAIChatGenerator(
        api_key=KEY,
        model=MODEL,
        api_base_url=url,
        generation_kwargs=fields,
        tools_strict=True,
        max_retries=0,
    )


@cell("chat")
def _():
    reply = generator(V1, max_tokens=8).run(MESSAGES)["replies"][0]
    check(reply.meta["usage"]["completion_tokens"] > 0, reply)


@cell("stream")
def _():
    chunks: list[object] = []
    generator(V1, max_tokens=8).run(MESSAGES, streaming_callback=chunks.append)
    check(len(chunks) > 2, chunks)


@cell("tool loop")
def _():
    check_loop(
        Agent(chat_generator=generator(SCRIPTED), tools=[tool]).run(MESSAGES)["messages"][-1].text
    )


@cell("schema")
def _():
    check_json(
        generator(V1, max_tokens=64, response_format=FORMAT).run(MESSAGES)["replies"][0].text
    )


@cell("tools + schema")
def _():
    agent = Agent(chat_generator=generator(SCRIPTED, response_format=FORMAT), tools=[tool])
    answer = agent.run(MESSAGES)["messages"][-1].text
    check_json(answer)
    check_loop(answer)


@cell("embeddings")
def _():
    check(
        OpenAITextEmbedder(api_key=KEY, model=MODEL, api_base_url=V1).run("a")["embedding"],
        "a vector",
    )
