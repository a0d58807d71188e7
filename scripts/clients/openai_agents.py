"""OpenAI's Agents SDK solves a coding task of three steps against this server, by the Responses
API, streamed.

.venv/bin/pip install openai-agents==0.24.0
.venv/bin/python -m scripts.clients.openai_agents
"""

import asyncio
import subprocess
import time
from pathlib import Path

from scripts.clients.coding_task import (
    DONE,
    FAULTY,
    MENDED,
    PROMPT,
    TEST,
    Task,
    coding_task,
    report,
)
from scripts.clients.scripted_model import tool_call


def answers(directory: Path) -> list[str]:
    return [
        "I write it. " + tool_call("write_file", name="calc.py", text=FAULTY),
        tool_call("write_file", name="test_calc.py", text=TEST)
        + tool_call("run", name="test_calc.py"),
        "",  # two calls at once have two results
        tool_call("write_file", name="calc.py", text=MENDED),
        tool_call("run", name="test_calc.py"),
        DONE,
    ]


async def work(task: Task) -> str:
    try:
        from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
        from openai import AsyncOpenAI
    except ImportError:
        raise SystemExit(
            "this needs openai-agents: .venv/bin/pip install openai-agents==0.24.0"
        ) from None

    @function_tool
    def write_file(name: str, text: str) -> str:
        """Write a file."""
        (task.directory / name).write_text(text)
        return "written"

    @function_tool
    def run(name: str) -> str:
        """Run a Python file."""
        command = ["python3", name]
        done = subprocess.run(
            command, cwd=task.directory, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{task.url}/sessions/agents/v1", api_key="none") as client:
        model = OpenAIResponsesModel(task.model, client)
        agent = Agent(
            name="coder", instructions="You write code.", tools=[write_file, run], model=model
        )
        result = Runner.run_streamed(agent, PROMPT)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)


def main() -> None:
    with coding_task(answers) as task:
        began = time.perf_counter()
        report("openai-agents", task, asyncio.run(work(task)), time.perf_counter() - began)


if __name__ == "__main__":
    main()
