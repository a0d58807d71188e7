"""Mozilla's any-llm. packages: any-llm-sdk[openai]==1.40.2"""

import json

from any_llm import completion, embedding, responses
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

FIELDS = {"model": MODEL, "provider": "openai", "api_key": "none"}
MESSAGES = [{"role": "user", "content": QUESTION}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}


def loop(**fields: object) -> str:
    messages = list(MESSAGES)
    while True:
        message = (
            completion(**FIELDS, api_base=SCRIPTED, messages=messages, tools=[TOOL], **fields)
            .choices[0]
            .message
        )
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


@cell("chat")
def _():
    check(
        completion(**FIELDS, api_base=V1, messages=MESSAGES, max_tokens=8).usage.completion_tokens
        > 0,
        "tokens",
    )


@cell("stream")
def _():
    stream = completion(**FIELDS, api_base=V1, messages=MESSAGES, max_tokens=8, stream=True)
    check(len(list(stream)) > 2, "chunks")


@cell("tool loop")
def _():
    check_loop(loop())


@cell("schema")
def _():
    answer = completion(
        **FIELDS, api_base=V1, messages=MESSAGES, max_tokens=64, response_format=FORMAT
    )
    check_json(answer.choices[0].message.content)


@cell("tools + schema")
def _():
    answer = loop(response_format=FORMAT)
    check_json(answer)
    check_loop(answer)


@cell("responses")
def _():
    check(
        responses(**FIELDS, api_base=V1, input_data=QUESTION, max_output_tokens=8).output,
        "an output",
    )


@cell("embeddings")
def _():
    check(len(embedding(**FIELDS, api_base=V1, inputs=["a", "b"]).data) == 2, "two vectors")
