"""`llm`, Simon Willison's command. packages: llm==0.36"""

import json
import os
import tempfile
from pathlib import Path

from cells import MODEL, QUESTION, SCHEMA, SCRIPTED, V1, cell, check, check_json, command

CODE = "def get_weather(city: str) -> str:\n    '''The weather of a city.'''\n    return 'sunny'\n"
home = tempfile.mkdtemp()
os.environ["LLM_USER_PATH"] = home
models = [
    {
        "model_id": name,
        "model_name": MODEL,
        "api_base": url,
        "supports_tools": True,
        "supports_schema": True,
    }
    for name, url in (("tiny", V1), ("scripted", SCRIPTED))
]
Path(home, "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML


@cell("chat")
def _():
    command("llm", "-m", "tiny", "--no-stream", "-o", "max_tokens", "8", QUESTION)


@cell("stream")
def _():
    command("llm", "-m", "tiny", "-o", "max_tokens", "8", QUESTION)


@cell("tool loop")
def _():
    shown = command("llm", "-m", "scripted", "--functions", CODE, "--tools-debug", QUESTION)
    check("sunny" in shown and '"Paris"' in shown, shown)


@cell("schema")
def _():
    check_json(
        command(
            "llm", "-m", "tiny", "-o", "max_tokens", "64", "--schema", json.dumps(SCHEMA), QUESTION
        )
    )
