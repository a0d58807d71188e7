"""Semantic Kernel. packages: semantic-kernel==1.45.0"""

import pydantic
from cells import MODEL, QUESTION, V1, calls, cell, check, get_weather
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function


class Sunny(pydantic.BaseModel):
    sunny: bool


class Plugin:
    @kernel_function(name="weather", description="The weather of Paris.")
    def weather(self) -> str:
        return get_weather("Paris")


def service(url: str) -> OpenAIChatCompletion:
    return OpenAIChatCompletion(
        ai_model_id=MODEL, async_client=AsyncOpenAI(base_url=url, max_retries=0)
    )


def history() -> ChatHistory:
    chat = ChatHistory()
    chat.add_user_message(QUESTION)
    return chat


@cell("chat")
async def _():
    settings = OpenAIChatPromptExecutionSettings(max_tokens=8)
    check(await service(V1).get_chat_message_contents(history(), settings), "an answer")


@cell("stream")
async def _():
    settings = OpenAIChatPromptExecutionSettings(max_tokens=8)
    stream = service(V1).get_streaming_chat_message_contents(history(), settings)
    check(len([chunk async for chunk in stream]) > 2, "chunks")


@cell("schema")
async def _():
    settings = OpenAIChatPromptExecutionSettings(max_tokens=64, response_format=Sunny)
    Sunny.model_validate_json(
        str((await service(V1).get_chat_message_contents(history(), settings))[0])
    )


@cell("forced call")  # a function goes by PLUGIN-FUNCTION, so the scripted model cannot call it
async def _():
    kernel = Kernel()
    kernel.add_plugin(Plugin(), "Plugin")
    forced = FunctionChoiceBehavior.Required(maximum_auto_invoke_attempts=1)
    settings = OpenAIChatPromptExecutionSettings(max_tokens=64, function_choice_behavior=forced)
    check(
        await service(V1).get_chat_message_contents(history(), settings, kernel=kernel),
        "an answer",
    )
    check(calls and set(calls) == {"Paris"}, calls)
