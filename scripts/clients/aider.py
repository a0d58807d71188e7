"""Aider solves the coding task against this server, by chat completions: it edits by text, and its
test is a command.

.venv/bin/python -m scripts.clients.aider      # installs Aider into .clients once, as
                                               scripts.clients.run does
"""

from pathlib import Path

from scripts.clients.coding_task import (
    CLIENTS,
    DONE,
    FAULTY,
    MENDED,
    PROMPT,
    TEST,
    coding_task,
    run_agent,
)
from scripts.clients.run import PROGRAMS, Program


def edit(name: str, old: str, new: str) -> str:
    return f"{name}\n```python\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```\n"


def answers(directory: Path) -> list[str]:
    first = "I write it.\n\n" + edit("calc.py", "", FAULTY) + "\n" + edit("test_calc.py", "", TEST)
    return [first, f"The test has found a fault.\n\n{edit('calc.py', FAULTY, MENDED)}\n{DONE}\n"]


def main() -> None:
    program = Program(PROGRAMS / "aider_cli.py")
    aider = program.environment(CLIENTS) / "bin" / "aider"
    with coding_task(answers, counted_text="ZeroDivisionError", steps=2) as task:
        words = [
            "--model",
            f"openai/{task.model}",
            "--openai-api-base",
            f"{task.url}/sessions/aider/v1",
        ]
        words += [
            "--openai-api-key",
            "none",
            "--edit-format",
            "diff",
            "--no-git",
            "--yes-always",
            "--no-check-update",
        ]
        words += [
            "--no-show-model-warnings",
            "--analytics-disable",
            "--map-tokens",
            "0",
            "--no-pretty",
        ]
        words += ["--auto-test", "--test-cmd", "python3 test_calc.py", "--message", PROMPT]
        run_agent(
            program.packages[0],
            task,
            [str(aider), *words, "calc.py", "test_calc.py"],
            {"HOME": str(task.directory.parent), "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        )


if __name__ == "__main__":
    main()
