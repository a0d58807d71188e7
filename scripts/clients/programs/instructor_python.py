"""Instructor. packages: instructor==1.17.0"""

import instructor
import pydantic
from cells import MODEL, QUESTION, V1, cell, check
from openai import OpenAI

FIELDS = {
    "model": MODEL,
    "max_tokens": 400,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_retries": 0,
}


class Sunny(pydantic.BaseModel):
    """Whether the sun shines."""

    sunny: bool


def typed(mode: instructor.Mode) -> Sunny:
    answer = instructor.from_openai(OpenAI(base_url=V1), mode=mode).create(
        response_model=Sunny, **FIELDS
    )
    check(isinstance(answer, Sunny), answer)
    return answer


@cell("schema")
def _():
    typed(instructor.Mode.JSON_SCHEMA)


@cell("forced call")
def _():
    typed(instructor.Mode.TOOLS)


@cell("stream")
def _():
    client = instructor.from_openai(OpenAI(base_url=V1), mode=instructor.Mode.JSON_SCHEMA)
    check(
        list(client.create_partial(response_model=Sunny, **FIELDS))[-1].sunny is not None, "parts"
    )
