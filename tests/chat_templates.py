"""Small chat templates, each with one model family's way to write tools and the arguments of
calls."""

TURN = (
    "{{ '<|im_start|>' + message.role + '\\n' + (message.reasoning_content or '') +"
    " message.content }}"
)
TOOLS = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
END = (
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|im_start|>assistant\\n' }}{% endif %}"
)
LOOP = TOOLS + "{% for message in messages %}" + TURN
CALLS = (
    "{% for tool_call in message.tool_calls or [] %}{% set call ="
    " tool_call.function or tool_call %}"
)


def _of(call: str) -> str:
    return LOOP + CALLS + call + "{% endfor %}" + END


PLAIN = "{% for message in messages %}" + TURN + END
TEMPLATES = {
    "qwen": _of(
        '{{ \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
        "{% if call.arguments is string %}{{ call.arguments }}{% else %}{{ call.arguments |"
        " tojson }}{% endif %}"
        "{{ '}\\n</tool_call>' }}"
    ),
    "llama3": _of(
        '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{'
        ' call.arguments | tojson }}{{ "}" }}'
    ),
    "mistral": _of(
        "{% set arguments = call.arguments %}"
        "{% if arguments is not string %}{% set arguments = arguments | tojson | safe %}{% endif %}"
        "{{ '[TOOL_CALLS]' ~ call.name ~ '[ARGS]' ~ arguments }}"
    ),
    "hermes": _of(
        "\n<tool_call>\n{{ {'name': call.name, 'arguments': call.arguments} | tojson"
        " }}\n</tool_call>"
    ),
    "coder": _of(
        "<function={{ call.name }}>{% if call.arguments is mapping %}{% for name, value in"
        " call.arguments | items %}"
        "<parameter={{ name }}>{% set text = value | tojson | safe if value is mapping or (value"
        " is sequence and"
        " value is not string) else value | string %}{{ text }}</parameter>{% endfor %}"
        "{% else %}{{ call.arguments }}{% endif %}</function>"
    ),
    "deepseek": _of(
        "{{ '<call>' + call['name'] + '\\n```json\\n' + call['arguments'] + '\\n```' }}"
    ),
    "glm": _of(
        "<tool_call>{{ call.name }}{% if call.arguments is mapping %}{% for k, v in"
        " call.arguments.items() %}"
        "<arg_key>{{ k }}</arg_key><arg_value>"
        "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}"
        "{% else %}{{ call.arguments }}{% endif %}</tool_call>"
    ),
    "kimi": _of("<|call|>{{ tool_call['id'] }}<|arguments|>{{ call['arguments'] }}<|end|>").replace(
        "message.role", "('system' if message.role == 'developer' else message.role)", 1
    ),
    "plain": PLAIN,
}
