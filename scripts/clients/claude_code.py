"""Claude Code solves a coding task of three steps against this server, by the Messages API.

.venv/bin/python -m scripts.clients.claude_code      # needs Node.js; installs Claude Code into
                                                     .clients once
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

VERSION = "2.1.197"


def answers(directory: Path) -> list[str]:
    calc = str(directory / "calc.py")
    fault, mended = FAULTY.splitlines()[1], MENDED.splitlines()[1]
    test = f"cat > test_calc.py <<'EOF'\n{TEST}EOF\npython3 test_calc.py"
    return [
        "I write it. " + tool_call("Write", file_path=calc, content=FAULTY),
        tool_call("Bash", command=test, description="Write and run the test"),
        tool_call("Edit", file_path=calc, old_string=fault, new_string=mended),
        tool_call("Bash", command="python3 test_calc.py", description="Run the test"),
        DONE,
    ]


def main() -> None:
    claude = node_client("@anthropic-ai/claude-code", VERSION, "claude")
    with coding_task(answers) as task:
        home = task.directory.parent / "home"
        home.mkdir()
        settings = {
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": f"{task.url}/sessions/claude",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": task.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": task.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
        command = [
            claude,
            "-p",
            PROMPT,
            "--permission-mode",
            "acceptEdits",
            "--allowedTools",
            "Bash",
            "Write",
            "Edit",
        ]
        run_agent(f"claude {VERSION}", task, command, settings)


if __name__ == "__main__":
    main()
