"""opencode solves a coding task of three steps against this server, by chat completions, streamed.

.venv/bin/python -m scripts.clients.opencode      # needs Node.js; installs opencode into .clients
                                                  once
"""

import json
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

VERSION = "1.18.33"


def answers(directory: Path) -> list[str]:
    calc = str(directory / "calc.py")
    fault, mended = FAULTY.splitlines()[1], MENDED.splitlines()[1]
    test = f"cat > test_calc.py <<'EOF'\n{TEST}EOF\npython3 test_calc.py"
    return [
        "I write it. " + tool_call("write", filePath=calc, content=FAULTY),
        tool_call("bash", command=test, description="Write and run the test"),
        tool_call("edit", filePath=calc, oldString=fault, newString=mended),
        tool_call("bash", command="python3 test_calc.py", description="Run the test"),
        DONE,
    ]


def main() -> None:
    opencode = node_client("opencode-ai", VERSION, "opencode")
    with coding_task(answers) as task:
        home = task.directory.parent / "home"
        home.mkdir()
        options = {"baseURL": f"{task.url}/sessions/opencode/v1", "apiKey": "none"}
        limit = {"context": 200_000, "output": 4096}
        model = {"name": task.model, "tool_call": True, "limit": limit}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": options,
            "models": {task.model: model},
        }
        config = {
            "provider": {"local": provider},
            "permission": {"*": "allow"},
            "autoupdate": False,
        }
        (task.directory / "opencode.json").write_text(json.dumps(config))
        environment = {
            "HOME": str(home),
            "PWD": str(task.directory),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
        }
        for name in ("CONFIG", "DATA", "CACHE", "STATE"):
            environment[f"XDG_{name}_HOME"] = str(home / name.lower())
        run_agent(
            f"opencode {VERSION}",
            task,
            [opencode, "run", "--model", f"local/{task.model}", PROMPT],
            environment,
        )


if __name__ == "__main__":
    main()
