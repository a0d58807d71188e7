"""A chat template renders here as transformers renders it, from each file that may hold it.

PUBLISHED_CHATS sets the number of conversations for each template. The templates are the parts of
published ones in which such programs differ: parts that are trimmed or joined, thinking that is on
or off where nobody says, reasoning, calls and their results, alternating roles.
"""

import copy
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError, RequestError
from mlx_parallm.execution.chat_messages import read_messages
from mlx_parallm.models.loading import load_tokenizer
from tests.tokenizer_families import save_tokenizer

CHATS = int(os.environ.get("PUBLISHED_CHATS", "40"))
TEXTS = [
    "hi",
    "  spaced  ",
    "\nline\n",
    '{"a": 1}',
    "é 🙂",
    "שלום",
    "a & b < c",
    "",
    "<think>x</think>y",
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a <city> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}},
]
CALLS = [{"city": "São Paulo", "n": 3}, {}, {"list": [1.5, "x"], "deep": {"a": ["b"]}}]
PARTS = (
    "{% macro shown(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}"
    "{% if p.type == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
TRIMMED = PARTS.replace("{{ c }}", "{{ c | trim }}").replace("p['text']", "p['text'] | trim + ' '")
TEMPLATES = {
    # Qwen2.5's and Qwen3's
    "hermes": "{{ bos_token }}{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "</tools>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{{ m.thinking or '' }}{% if m.reasoning_content is string %}<think>{{ m.reasoning_content.strip('\n') }}</think>"
    "{% endif %}{% for call in m.tool_calls or [] %}{% set tool_call = call.function %}"
    "<tool_call>{{ tool_call.name }} {{ tool_call.arguments | tojson }}</tool_call>{% endfor %}"
    "</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and"
    " enable_thinking is false %}<think>\n\n</think>{% endif %}{% endif %}",
    # Gemma 4's and a small Qwen3.5's: no thinking unless it is asked for
    "off": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking is defined and"
    " enable_thinking else '<think></think>' }}{% endif %}",
    # Qwen2-VL's
    "parts": PARTS + "{% for m in messages %}<|{{ m.role }}|>{{ shown(m.content) }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # Gemma 3's and 4's
    "trimmed": TRIMMED + "{% for m in messages %}<|{{ m.role }}|>{{ shown(m.content) }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    # Gemma's and Mistral's
    "alternating": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m['content'] | trim }}"
    "</s>{% endfor %}{% generation %}{% endgeneration %}",
    # Llama 3's
    "headers": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{{ '<|' + m['role'] + '|>\n\n' + m['content'] | trim + '</s>' }}{% endfor %}{{ ns.n }}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n\n' }}{% endif %}",
}
WITH_CALLS = ("hermes",)
WITH_PARTS = ("parts", "trimmed")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path, "llama3")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    last = max(token["id"] for token in tokenizer["added_tokens"])
    last = max(last, *tokenizer["model"]["vocab"].values())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for number, text in enumerate(("<think>", "</think>"), last + 1):
        tokenizer["added_tokens"].append({"id": number, "content": text, "special": False, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return tmp_path


def write(folder: Path, template: Any) -> None:
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"chat_template": template}
    if template is None:
        del settings["chat_template"]
    file.write_text(json.dumps(settings))


def conversation(rng: random.Random, name: str) -> tuple[list[dict[str, Any]], Any]:
    def content() -> Any:
        if name in WITH_PARTS and rng.random() < 0.6:
            return [
                {"type": "text", "text": text} for text in rng.choices(TEXTS, k=rng.randint(1, 3))
            ]
        return rng.choice(TEXTS)

    tools = TOOLS if name in WITH_CALLS and rng.random() < 0.6 else None
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": content()})
    for turn in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": content()})
        answer = {"role": "assistant", "content": content()}
        for reasoning in ("reasoning", "thinking", "reasoning_content"):
            if rng.random() < 0.15:
                answer[reasoning] = rng.choice(TEXTS)
        if tools and rng.random() < 0.5:
            call = {"name": rng.choice(["weather", "now"]), "arguments": rng.choice(CALLS)}
            answer["tool_calls"] = [{"id": f"c{turn}", "type": "function", "function": call}]
            answer["content"] = rng.choice([None, ""])
            messages += [answer, {"role": "tool", "tool_call_id": f"c{turn}", "content": "42"}]
        elif turn or rng.random() < 0.7:
            messages.append(answer)
    return messages, tools


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_is_what_transformers_renders(name: str, folder: Path) -> None:
    write(folder, TEMPLATES[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder, ModelConfig(base_path=str(folder)))
    rng = random.Random(name)
    rendered = 0
    for _ in range(CHATS):
        messages, tools = conversation(rng, name)
        last = messages[-1]["content"] or ""
        text = last if isinstance(last, str) else last[-1]["text"]
        # transformers trims a text that is continued where the template does; here it stays
        continued = messages[-1]["role"] == "assistant" and rng.random() < 0.5
        continued = continued and text != "" and text == text.strip()
        options = {"add_generation_prompt": not continued, "continue_final_message": continued}
        given = copy.deepcopy(messages)
        try:
            text = theirs.apply_chat_template(given, tools=tools, tokenize=False, **options)
        except (TemplateError, ValueError):
            with pytest.raises(RequestError):
                ours.render_chat_text(messages, tools=tools, **options)
            continue
        assert ours.render_chat_text(messages, tools=tools, **options) == text
        read = read_messages(json.loads(json.dumps(messages)))
        assert ours.render_chat_text(read, tools=tools, **options) == text  # as a request is read
        assert ours.render_chat(messages, tools=tools, **options) == theirs.apply_chat_template(
            given, tools=tools, return_dict=False, **options
        )
        rendered += 1
    assert rendered > CHATS // 8


def test_parts_that_a_template_does_not_show_are_joined(folder: Path) -> None:
    """Gemma 3 reads the first part of a system message alone; Qwen3 prints a list as nothing."""
    first = "{{ messages[0].content[0].text if messages[0].content is not string else"
    write(folder, first + " messages[0].content }}|{{ messages[-1].content }}")
    ours = load_tokenizer(folder, ModelConfig(base_path=str(folder)))
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    chat = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    assert ours.render_chat_text(chat) == "one two|one two"


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


@pytest.mark.parametrize("place", ["string", "list", "jinja", "directory", "processor", "both"])
def test_each_place_of_a_template(place: str, folder: Path) -> None:
    """The file wins over tokenizer_config.json, a named template is taken for tools, and
    chat_template.json, which only transformers' processors read, counts where there is no other."""
    plain, uses_tools = TEMPLATES["headers"], TEMPLATES["hermes"]
    lists = place in ("list", "directory")
    write(folder, {"string": plain, "list": named(default=plain, tool_use=uses_tools)}.get(place))
    if place in ("jinja", "both", "directory"):
        (folder / "chat_template.jinja").write_text(plain)
    if place == "directory":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(uses_tools)
    if place == "both":
        write(folder, "{{ 'the older one' }}")
    if place in ("processor", "both"):
        text = plain if place == "processor" else "{{ 'of the processor' }}"
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    theirs = AutoTokenizer.from_pretrained(folder)
    if place == "processor":
        theirs.chat_template = plain
    ours = load_tokenizer(folder, ModelConfig(base_path=str(folder)))
    chat = [{"role": "user", "content": "hi"}]
    for tools in (None, TOOLS) if lists else (None,):
        text = theirs.apply_chat_template(chat, tools=tools, tokenize=False)
        assert ours.render_chat_text(chat, tools=tools, add_generation_prompt=False) == text
    assert (ours.tool_format == "json_tools") == lists


def test_a_processors_template_that_cannot_be_read_is_named(folder: Path) -> None:
    write(folder, None)
    for text in ("{", "[]", '{"chat_template": 7}'):
        (folder / "chat_template.json").write_text(text)
        with pytest.raises(ModelError, match=r"chat_template\.json"):
            load_tokenizer(folder, ModelConfig(base_path=str(folder)))
