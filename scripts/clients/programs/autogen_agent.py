"""AutoGen. packages: autogen-agentchat==0.7.5 autogen-ext[openai]==0.7.5"""

import json
from typing import Literal

import pydantic
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop, get_weather

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}
MESSAGES = [UserMessage(content=QUESTION, source="user")]


class Weather(pydantic.BaseModel):
    city: Literal["Paris"]
    sunny: Literal[True]


class Sunny(pydantic.BaseModel):
    sunny: bool


def client(url: str, **fields: object) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model=MODEL, base_url=url, api_key="none", model_info=INFO, **fields
    )


@cell("chat")
async def _():
    check((await client(V1, max_tokens=8).create(MESSAGES)).usage.completion_tokens > 0, "tokens")


@cell("stream")
async def _():
    check(
        len([chunk async for chunk in client(V1, max_tokens=8).create_stream(MESSAGES)]) > 1,
        "chunks",
    )


@cell("tool loop")
async def _():
    agent = AssistantAgent("one", client(SCRIPTED), tools=[get_weather], reflect_on_tool_use=True)
    check_loop((await agent.run(task=QUESTION)).messages[-1].to_text())


@cell("schema")
async def _():
    answer = (await client(V1, max_tokens=64).create(MESSAGES, json_output=Sunny)).content
    check(isinstance(json.loads(answer)["sunny"], bool), answer)


@cell("tools + schema")
async def _():
    agent = AssistantAgent(
        "one",
        client(SCRIPTED),
        tools=[FunctionTool(get_weather, description="Weather.", strict=True)],
        output_content_type=Weather,
    )
    answer = (await agent.run(task=QUESTION)).messages[-1].content
    check(answer == Weather(city="Paris", sunny=True), answer)
    check_loop(answer)
