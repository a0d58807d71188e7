"""Pictures in results of tools: each API shows them to a model that sees, where transformers'
template of the model puts them; what cannot be shown is refused by its place."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.environments.row_forms import known_row
from mlx_parallm.environments.row_images import with_row_images
from mlx_parallm.errors import RequestError
from mlx_parallm.execution.chat_messages import read_messages
from mlx_parallm.execution.prompt_images import image_refs, image_sources
from mlx_parallm.execution.taught_tools import with_taught_tools
from mlx_parallm.server.messages.body import MessagesBody
from mlx_parallm.server.responses.body import ResponsesBody
from mlx_parallm.weights import SharedWeights
from tests.images.checkpoints import save_smolvlm
from tests.vision.drawn import data_url, noise

URL = data_url(noise(24, 24, 2))
# as Qwen3-VL's
TEMPLATE = """
{%- macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}
{%- if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- endmacro %}
{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' + shown(message.content) + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>\n{% endif %}
{%- else %}<|im_start|>{{ message.role }}\n{{ shown(message.content) }}
{%- for call in message.tool_calls or [] %}{% set tool_call = call.function %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
{{- tool_call.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            for call in ("c", "d")
        ],
    },
    {
        "role": "tool",
        "tool_call_id": "c",
        "content": [
            {"type": "text", "text": "It is "},
            {"type": "image_url", "image_url": {"url": URL}},
            {"type": "text", "text": " here."},
        ],
    },
    {"role": "tool", "tool_call_id": "d", "content": "Nothing."},
]
SOURCE = {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}
MESSAGES: dict[str, Any] = {
    "max_tokens": 4,
    "tools": [
        {"name": "look", "description": "Look.", "input_schema": TOOL["parameters"]},
    ],
    "messages": [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": call, "name": "look", "input": {}} for call in "cd"
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [
                        {"type": "text", "text": "It is "},
                        {"type": "image", "source": SOURCE},
                        {"type": "text", "text": " here."},
                    ],
                },
                {"type": "tool_result", "tool_use_id": "d", "content": "Nothing."},
            ],
        },
    ],
}
RESPONSES: dict[str, Any] = {
    "max_output_tokens": 4,
    "tools": [{"type": "function", **TOOL}],
    "input": [
        {"role": "user", "content": "Look."},
        *({"type": "function_call", "call_id": c, "name": "look", "arguments": "{}"} for c in "cd"),
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [
                {"type": "input_text", "text": "It is "},
                {"type": "input_image", "image_url": URL, "detail": "auto"},
                {"type": "input_text", "text": " here."},
            ],
        },
        {"type": "function_call_output", "call_id": "d", "output": "Nothing."},
    ],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: the extra `vision`")
    path = save_smolvlm(tmp_path_factory.mktemp("models") / "smolvlm")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    model = {"model": {"base_path": str(checkpoint)}, "server": {"port": 0}}
    serving = Serving(Config.model_validate(model))
    try:
        serving.listen()
        loaded = serving.load()
        weights = SharedWeights(loaded.model, keep_versions=1)
        serving.open(loaded, weights, adapters={}, main_adapter=None)
        yield serving.url
    finally:
        serving.close()


def post(url: str, path: str, **body: Any) -> Any:
    fixed = {"model": "default", "temperature": 0.0, "return_token_ids": True, "ignore_eos": True}
    answer = httpx.post(f"{url}{path}", json=fixed | body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_prompt_is_the_templates_own_in_every_api(url: str, checkpoint: Path) -> None:
    chat = post(
        url,
        "/v1/chat/completions",
        messages=CHAT,
        tools=[{"type": "function", "function": TOOL}],
        max_tokens=4,
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    alone = [{"role": "user", "content": [CHAT[2]["content"][1]]}]
    shown = post(url, "/v1/chat/completions", messages=alone, max_tokens=1)["prompt_token_ids"]
    picture = tokenizer.decode(shown).removeprefix("<|im_start|>user\n").partition("<|im_end|>")[0]
    places = [
        {**m, "content": [p if p["type"] == "text" else {"type": "image"} for p in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in read_messages(CHAT, shown=["image"])
    ]
    for message in places:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = {}
    expected = tokenizer.apply_chat_template(
        places,
        tools=[{"type": "function", "function": TOOL}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert "It is <image> here.\n</tool_response>\n<tool_response>\nNothing." in expected
    assert tokenizer.decode(chat["prompt_token_ids"]) == expected.replace("<image>", picture)
    said = chat["choices"][0]["message"]["content"]
    response = post(url, "/v1/responses", **RESPONSES)
    message = post(url, "/v1/messages", **MESSAGES)
    [block] = [each for each in message["content"] if each["type"] == "text"]
    assert response["output"][0]["content"][0]["text"] == block["text"] == said
    read = message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]
    count = chat["usage"]["prompt_tokens"]
    assert response["usage"]["input_tokens"] == read == count
    fixed = {"model": "default", "temperature": 0.0, "ignore_eos": True, "stream": True}
    for path, body in (("/v1/messages", MESSAGES), ("/v1/responses", RESPONSES)):
        streamed = httpx.post(f"{url}{path}", json=fixed | body, timeout=60).text
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line[:6] == "data: "]
        deltas = [each["delta"] for each in events if "delta" in each["type"] and each["delta"]]
        texts = [d if isinstance(d, str) else d.get("text", "") for d in deltas]
        assert "".join(texts) == said


def test_what_cannot_be_shown_is_refused_by_its_place(url: str) -> None:
    broken = json.loads(json.dumps(MESSAGES).replace(SOURCE["data"], "####"))
    answer = httpx.post(f"{url}/v1/messages", json={"model": "default", **broken})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages.2.content.0.content.1"
    broken = json.loads(json.dumps(RESPONSES).replace(URL, "data:,"))
    answer = httpx.post(f"{url}/v1/responses", json={"model": "default", **broken})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "input.3.output.1"


def test_a_model_of_texts_names_what_it_does_not_read() -> None:
    with pytest.raises(RequestError, match="image") as refused:
        MessagesBody.model_validate(MESSAGES).to_chat()
    assert refused.value.param == "messages.2.content.0.content.1"
    body = ResponsesBody.model_validate(RESPONSES)
    with pytest.raises(RequestError, match="input_image") as refused:
        body.to_chat(body.items)
    assert refused.value.param == "input.3.output.1"
    with pytest.raises(RequestError, match="image_url") as refused:
        read_messages(CHAT)
    assert refused.value.param == "messages.2.content.1"


def test_taught_tools_show_the_pictures_of_their_results() -> None:
    taught = with_taught_tools(read_messages(CHAT, shown=["image"]), [])
    [_, _, shown] = taught
    assert [part.get("text") for part in shown["content"]] == [
        "<tool_response>\nIt is ",
        None,
        " here.\n</tool_response>\n<tool_response>\nNothing.\n</tool_response>",
    ]
    [source] = image_sources(taught)
    assert source.value == URL


@pytest.mark.parametrize("form", ["messages", "responses"])
def test_rows_keep_the_pictures_of_results(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    row: dict[str, Any] = {"prompt": CHAT}
    if form == "responses":
        row, _ = known_row({"responses_create_params": {"input": RESPONSES["input"]}}, "row 1")
    read = read_messages(row["prompt"], shown=["image"])
    stored = with_row_images(read, row, "row 1", str(tmp_path / "rows.jsonl"))
    assert len(image_refs(stored)) == 1
