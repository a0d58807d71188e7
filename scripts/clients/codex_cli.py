"""Codex CLI solves a coding task of three steps against this server, by the Responses API.

    .venv/bin/python -m scripts.clients.codex_cli        # needs Node.js; installs Codex into .clients once

The sandbox of Codex is off: the script is known, and it works in an empty directory.
"""

import os
import subprocess
import time
from pathlib import Path

from scripts.clients.coding_task import DONE, FAULTY, MENDED, PROMPT, TEST, coding_task, node_client, report
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
        "I write it. " + tool_call("exec_command", cmd=write("calc.py", FAULTY) + write("test_calc.py", TEST)),
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
        command = [codex, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT]
        began = time.perf_counter()
        run = subprocess.run(
            command,
            cwd=task.directory,
            env=os.environ | {"CODEX_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        report(f"codex {VERSION}", task, run.stdout + run.stderr, time.perf_counter() - began)


if __name__ == "__main__":
    main()
