"""Anthropic's Python client. packages: anthropic==2.10.0"""

from anthropic import Anthropic
from cells import (
    MODEL,
    PARAMETERS,
    QUESTION,
    SCHEMA,
    SCRIPTED_URL,
    URL,
    cell,
    check,
    check_idle,
    check_json,
    check_loop,
    get_weather,
)

tiny, scripted = (
    Anthropic(base_url=URL, max_retries=0),
    Anthropic(base_url=SCRIPTED_URL, max_retries=0),
)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}
CONFIG = {"format": {"type": "json_schema", "schema": SCHEMA}}


def loop(**fields: object) -> str:
    messages = list(MESSAGES)
    while True:
        answer = scripted.messages.create(
            model=MODEL, max_tokens=200, messages=messages, tools=[TOOL], **fields
        )
        if answer.stop_reason != "tool_use":
            return answer.content[-1].text
        uses = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": u.id, "content": get_weather(**u.input)}
            for u in uses
        ]
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": results},
        ]


@cell("chat")
def _():
    answer = tiny.messages.create(
        model=MODEL, max_tokens=8, messages=MESSAGES, system="You are short."
    )
    check(answer.usage.output_tokens > 0, answer)
    check(tiny.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0, "a count")


@cell("stream")
def _():
    with tiny.messages.stream(model=MODEL, max_tokens=8, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        check(stream.get_final_message().content[0].text == text, text)


@cell("tool loop")
def _():
    check_loop(loop())


@cell("schema")
def _():
    answer = tiny.messages.create(
        model=MODEL, max_tokens=64, messages=MESSAGES, output_config=CONFIG
    )
    check_json(answer.content[-1].text)


@cell("tools + schema")
def _():
    answer = loop(output_config=CONFIG)
    check_json(answer)
    check_loop(answer)


@cell("cancel")
def _():
    stream = tiny.messages.create(
        model=MODEL,
        max_tokens=1500,
        messages=MESSAGES,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    check_idle()
