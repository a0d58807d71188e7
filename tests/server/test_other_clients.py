"""The most used of scripts/clients/programs, where `python -m scripts.clients.run` has made
their environments."""

import json
from collections.abc import Iterator

import pytest

from scripts.clients.coding_task import CLIENTS
from scripts.clients.run import PROGRAMS, RESULTS, Program, servers

MOST_USED = {
    *(
        "openai_python.py",
        "openai_node.mjs",
        "anthropic_python.py",
        "ai_sdk.mjs",
        "langchain_python.py",
    ),
    *("litellm_python.py", "pydantic_ai_agent.py", "llama_index_agent.py", "instructor_python.py"),
    "openai_agents_sdk.py",
}
pytestmark = pytest.mark.slow


def installed(name: str) -> Program | None:
    program = Program(PROGRAMS / name)
    made = CLIENTS / program.path.stem / "packages.json"
    return program if made.is_file() and json.loads(made.read_text()) == program.packages else None


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    with servers() as variables:
        yield variables


@pytest.mark.parametrize("name", sorted(MOST_USED))
def test_a_clients_program_does_what_the_table_says(
    name: str, request: pytest.FixtureRequest
) -> None:
    if (program := installed(name)) is None:
        pytest.skip(f"not installed: python -m scripts.clients.run {name.split('.')[0]}")
    cells = program.run(program.environment(CLIENTS), request.getfixturevalue("variables"))
    assert "program" not in cells, cells["program"]
    recorded = json.loads(RESULTS.read_text())[program.path.stem]["cells"]
    assert {cell for cell, why in cells.items() if why is None} == {
        c for c, why in recorded.items() if why is None
    }
