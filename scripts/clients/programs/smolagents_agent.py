"""Hugging Face's smolagents. packages: smolagents[openai]==1.26.0"""

from cells import MODEL, QUESTION, V1, cell, check
from smolagents import ChatMessage, MessageRole, OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: the city's name.
    """
    return "sunny"


tiny = OpenAIModel(MODEL, api_base=V1, api_key="none", max_tokens=400)
MESSAGES = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]


@cell("chat")
def _():
    check(tiny.generate(MESSAGES).token_usage.output_tokens > 0, "tokens")


@cell("stream")
def _():
    check(len(list(tiny.generate_stream(MESSAGES))) > 2, "chunks")


@cell("forced call")
def _():
    calls = tiny.generate(MESSAGES, tools_to_call_from=[get_weather]).tool_calls
    check(calls and calls[0].function.name == "get_weather", calls)
