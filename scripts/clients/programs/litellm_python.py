"""LiteLLM. packages: litellm==1.106.0 mcp==2.3.0"""

import json

import litellm
from cells import (
    MODEL,
    QUESTION,
    SCHEMA,
    SCRIPTED,
    SCRIPTED_URL,
    TOOL,
    V1,
    cell,
    check,
    check_json,
    check_loop,
    get_weather,
)

litellm.suppress_debug_info = True
MESSAGES = [{"role": "user", "content": QUESTION}]
FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
}
PLACE = {"model": f"openai/{MODEL}", "api_key": "none", "messages": MESSAGES}


def loop(**fields: object) -> str:
    messages = list(MESSAGES)
    while True:
        message = litellm.completion(
            **PLACE | {"messages": messages}, api_base=SCRIPTED, tools=[TOOL], **fields
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
    answer = litellm.completion(**PLACE, api_base=V1, max_tokens=8)
    check(answer.usage.completion_tokens > 0, answer)


@cell("stream")
def _():
    check(
        len(list(litellm.completion(**PLACE, api_base=V1, max_tokens=8, stream=True))) > 2,
        "chunks",
    )


@cell("tool loop")
def _():
    check_loop(loop())


@cell("schema")
def _():
    answer = litellm.completion(**PLACE, api_base=V1, max_tokens=64, response_format=FORMAT)
    check_json(answer.choices[0].message.content)


@cell("tools + schema")
def _():
    answer = loop(response_format=FORMAT)
    check_json(answer)
    check_loop(answer)


@cell("responses")
def _():
    fields = {
        "model": f"openai/{MODEL}",
        "api_key": "none",
        "input": QUESTION,
        "max_output_tokens": 8,
    }
    check(litellm.responses(**fields, api_base=V1).output, "an output")


@cell("messages")
def _():
    fields = {
        "model": f"anthropic/{MODEL}",
        "api_key": "none",
        "messages": MESSAGES,
        "max_tokens": 8,
    }
    check(litellm.completion(**fields, api_base=SCRIPTED_URL).choices[0].message.content, "a text")


@cell("embeddings")
def _():
    response = litellm.embedding(
        model=f"openai/{MODEL}", api_key="none", api_base=V1, input=["a", "b"]
    )
    check(len(response.data) == 2, response)
