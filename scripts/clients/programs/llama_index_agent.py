"""LlamaIndex. packages: llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1"""

import pydantic
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop, get_weather
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

FIELDS = {
    "model": MODEL,
    "is_chat_model": True,
    "is_function_calling_model": True,
    "max_retries": 0,
}
tiny = OpenAILike(api_base=V1, api_key="none", max_tokens=64, **FIELDS)
scripted = OpenAILike(api_base=SCRIPTED, api_key="none", **FIELDS)


class Sunny(pydantic.BaseModel):
    """Whether the sun shines."""

    sunny: bool


@cell("chat")
def _():
    check(
        tiny.chat([ChatMessage(role="user", content=QUESTION)]).raw.usage.completion_tokens > 0,
        "tokens",
    )


@cell("stream")
def _():
    check(len(list(tiny.stream_chat([ChatMessage(role="user", content=QUESTION)]))) > 1, "chunks")


@cell("tool loop")
async def _():
    check_loop(await FunctionAgent(tools=[get_weather], llm=scripted).run(QUESTION))


@cell("schema")
def _():
    answer = tiny.as_structured_llm(Sunny).complete(QUESTION).raw
    check(isinstance(answer, Sunny), answer)
