"""OpenAI's Python client. packages: openai==3.51.0"""

import json

import pydantic
from cells import (
    MODEL,
    QUESTION,
    SCHEMA,
    SCRIPTED,
    TOOL,
    V1,
    cell,
    check,
    check_idle,
    check_json,
    check_loop,
    get_weather,
)
from openai import OpenAI

tiny, scripted = OpenAI(base_url=V1, max_retries=0), OpenAI(base_url=SCRIPTED, max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}


class Weather(pydantic.BaseModel):
    sunny: bool


def loop(**fields: object) -> str:
    messages = list(MESSAGES)
    while True:
        message = scripted.chat.completions.create(
            model=MODEL, messages=messages, tools=[TOOL], **fields
        )
        message = message.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@cell("chat")
def _():
    answer = tiny.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, reasoning_effort="low"
    )
    check(answer.usage.completion_tokens > 0, answer)


@cell("stream")
def _():
    stream = tiny.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    check(chunks[-1].usage.completion_tokens > 0 and len(chunks) > 2, chunks)


@cell("tool loop")
def _():
    check_loop(loop())


@cell("schema")
def _():
    answer = tiny.chat.completions.parse(
        model=MODEL, messages=MESSAGES, max_tokens=64, response_format=Weather
    )
    check(isinstance(answer.choices[0].message.parsed, Weather), answer)


@cell("tools + schema")
def _():
    answer = loop(response_format=FORMAT)
    check_json(answer)
    check_loop(answer)


@cell("responses")
def _():
    with tiny.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=8) as stream:
        types = {event.type for event in stream}
    check("response.output_text.delta" in types, types)
    check(
        tiny.responses.parse(
            model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=64
        ).output_parsed,
        "",
    )


@cell("embeddings")
def _():
    check(
        len(tiny.embeddings.create(model=MODEL, input=["a", "b"], dimensions=8).data[1].embedding)
        == 8,
        "a vector",
    )


@cell("cancel")
def _():
    stream = tiny.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    check_idle()
