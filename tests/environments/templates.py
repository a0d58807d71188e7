"""Chat templates that do what models' own do to earlier turns, on the tiny model's tokenizer."""

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.models.tokenizer import Tokenizer

QWEN3 = """{%- set ns = namespace(asked=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < ns.asked %}
{%- set content = content.split('</think>')[-1] %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
"""Leaves out what the assistant thought before the last question; a tool's answer is no
question."""


def with_template(template: str) -> Tokenizer:
    config = ModelConfig(base_path="builtin:tiny", chat_template=template)
    return load_tokenizer(resolve_model_path(config.base_path), config)
