"""Outlines. packages: outlines==1.3.3 openai==3.51.0"""

from typing import Literal

import openai
import outlines
import pydantic
from cells import MODEL, QUESTION, V1, cell, check

client = openai.OpenAI(base_url=V1, max_retries=0)
as_openai, as_vllm = outlines.from_openai(client, MODEL), outlines.from_vllm(client, MODEL)


class Sunny(pydantic.BaseModel):
    sunny: bool


@cell("chat")
def _():
    check(isinstance(as_openai(QUESTION, max_tokens=8), str), "a text")


@cell("stream")
def _():
    check(len(list(as_openai.stream(QUESTION, max_tokens=8))) > 1, "parts")


@cell("schema")
def _():
    for model in (as_openai, as_vllm):
        Sunny.model_validate_json(model(QUESTION, Sunny, max_tokens=64))


@cell("vLLM's choice and regex")
def _():
    check(as_vllm(QUESTION, Literal["a", "b"], max_tokens=8) in ("a", "b"), "a choice")
    answer = as_vllm(QUESTION, outlines.regex("[0-9]{3}"), max_tokens=8)
    check(answer.isdigit() and len(answer) == 3, answer)
