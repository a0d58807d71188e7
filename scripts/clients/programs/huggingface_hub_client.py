"""Hugging Face's InferenceClient. packages: huggingface_hub==2.4.0"""

import json

from cells import (
    MODEL,
    QUESTION,
    SCHEMA,
    SCRIPTED,
    TOOL,
    V1,
    cell,
    check,
    check_json,
    check_loop,
    get_weather,
)
from huggingface_hub import InferenceClient

tiny, scripted = (InferenceClient(base_url=url, api_key="none") for url in (V1, SCRIPTED))
FIELDS = {"messages": [{"role": "user", "content": QUESTION}], "model": MODEL}


@cell("chat")
def _():
    check(tiny.chat_completion(**FIELDS, max_tokens=8).usage.completion_tokens > 0, "tokens")


@cell("stream")
def _():
    check(len(list(tiny.chat_completion(**FIELDS, max_tokens=8, stream=True))) > 2, "chunks")


@cell("tool loop")
def _():
    messages = list(FIELDS["messages"])
    first = scripted.chat_completion(messages, model=MODEL, tools=[TOOL]).choices[0].message
    call = first.tool_calls[0]
    arguments = call.function.arguments
    result = get_weather(**(json.loads(arguments) if isinstance(arguments, str) else arguments))
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": result}]
    check_loop(
        scripted.chat_completion(messages, model=MODEL, tools=[TOOL]).choices[0].message.content
    )


@cell("schema")
def _():
    schema = {"name": "weather", "schema": SCHEMA, "strict": True}
    fields = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 64}
    check_json(tiny.chat_completion(**FIELDS, **fields).choices[0].message.content)


@cell("TGI's schema")
def _():
    fields = {"response_format": {"type": "json", "value": SCHEMA}, "max_tokens": 64}
    check_json(tiny.chat_completion(**FIELDS, **fields).choices[0].message.content)
