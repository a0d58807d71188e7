"""LangChain: chat models, and the agent with a typed result. packages: langchain==1.4.7
langchain-openai==1.7.3"""

from typing import Literal

import pydantic
from cells import MODEL, QUESTION, SCRIPTED, V1, cell, check, check_loop, get_weather
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

tiny = ChatOpenAI(model=MODEL, base_url=V1, max_tokens=64, max_retries=0)
scripted = ChatOpenAI(model=MODEL, base_url=SCRIPTED, max_retries=0)
ASKED = {"messages": [("user", QUESTION)]}


class Weather(pydantic.BaseModel):
    """The weather."""

    city: Literal["Paris"]
    sunny: Literal[True]


class Sunny(pydantic.BaseModel):
    """Whether the sun shines."""

    sunny: bool


@cell("chat")
def _():
    check(tiny.invoke(QUESTION).usage_metadata["output_tokens"] > 0, "tokens")


@cell("stream")
def _():
    check(len(list(tiny.stream(QUESTION))) > 2, "chunks")


@cell("tool loop")
def _():
    check_loop(create_agent(scripted, [get_weather]).invoke(ASKED)["messages"][-1].content)


@cell("schema")
def _():
    for method in ("json_schema", "function_calling"):
        answer = tiny.with_structured_output(Sunny, method=method).invoke(QUESTION)
        check(isinstance(answer, Sunny), answer)


@cell("tools + schema")
def _():
    agent = create_agent(scripted, [get_weather], response_format=ProviderStrategy(Weather))
    answer = agent.invoke(ASKED)["structured_response"]
    check(answer == Weather(city="Paris", sunny=True), answer)
    check_loop(answer)


@cell("responses")
def _():
    responses = ChatOpenAI(model=MODEL, base_url=SCRIPTED, use_responses_api=True, max_retries=0)
    check_loop(create_agent(responses, [get_weather]).invoke(ASKED)["messages"][-1].content)


@cell("embeddings")
def _():
    embeddings = OpenAIEmbeddings(model=MODEL, base_url=V1, check_embedding_ctx_length=False)
    check(len(embeddings.embed_documents(["a", "b"])) == 2, "two vectors")
