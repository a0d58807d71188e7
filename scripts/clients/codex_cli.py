"""Codex CLI solves a coding task of three steps against this server, by the Responses API.

    .venv/bin/python -m scripts.clients.codex_cli        # needs Node.js; installs Codex into .clients once

The sandbox of Codex is off: the script is known, and it works in an empty directory.
"""

from pathlib import Path

from scripts.clients.coding_task import (
    DONE,
    FAULTY,
    MENDED,
    PROMPT,
    TEST,
    coding_task,
    node_client,
    run_agent,
)
from scripts.clients.scripted_model import tool_call

VERSION = "0.169.0"
CONFIG = """
model = "{model}"
model_provider = "local"
model_context_window = 200000
[model_providers.local]
name = "local"
base_url = "{url}/sessions/codex/v1"
wire_api = "responses"
"""


def write(path: str, text: str) -> str:
    return f"cat > {path} <<'EOF'\n{text}EOF\n"


def answers(directory: Path) -> list[str]:
    return [
        "I write it. "
        + tool_call("exec_command", cmd=write("calc.py", FAULTY) + write("test_calc.py", TEST)),
        tool_call("exec_command", cmd="python3 test_calc.py"),
        tool_call("exec_command", cmd=write("calc.py", MENDED) + "python3 test_calc.py"),
        DONE,
    ]


def main() -> None:
    codex = node_client("@openai/codex", VERSION, "codex")
    with coding_task(answers) as task:
        home = task.directory.parent / "codex"
        home.mkdir()
        (home / "config.toml").write_text(CONFIG.format(url=task.url, model=task.model))
        command = [
            codex,
            "exec",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            PROMPT,
        ]
        run_agent(f"codex {VERSION}", task, command, {"CODEX_HOME": str(home)})


if __name__ == "__main__":
    main()
