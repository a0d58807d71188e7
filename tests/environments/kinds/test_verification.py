"""The tools of the SVRL environment: a calculator that can be trusted and cannot be abused, a table, the sandbox."""

import json
import time

import pytest

from mlx_parallm.environments.kinds.svrl import calculate, calculator, code_runner, fact_table
from mlx_parallm.errors import ConfigError, ToolFailedError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("12*7", "84"),
        (" 2 * (3 + 4) - -1 ", "15"),
        ("7/2", "3.5"),
        ("7//2 + 7%4", "6"),
        ("2**10", "1024"),
        ("1/3", "0.333333333333"),
        ("12*7 = 84", "true"),
        ("12*7 == 84.0", "true"),
        ("12*7 = 81", "false: it is 84"),
        ("0.1 + 0.2 = 0.3", "true"),
    ],
)
def test_the_calculator_evaluates_and_verifies(text, found):
    assert calculate(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "12*",
            "four",
            "__import__('os')",
            "(1).__class__",
            "'a'*3",
            "1/0",
            "1 = 1 = 1",
            "True",
            "[1]",
            "1 if 1 else 2",
        ),
        *(
            "9**9**9",
            "(9**999)**999",
            "(-8)**0.5",
            "1e308*10",
            "+".join(["1"] * 200),
            "(" * 150,
            "2**4000*2**4000",
            "1<<9",
        ),
    ],
)
def test_what_the_calculator_cannot_do_is_said_at_once(text):
    started = time.perf_counter()
    with pytest.raises(ToolFailedError):
        calculate(text)
    assert time.perf_counter() - started < 1


def test_facts_are_looked_up_in_the_table_that_was_given(tmp_path):
    file = tmp_path / "facts.json"
    file.write_text(json.dumps({"Capital of  Peru": "Lima", "moons of Mars": 2}))
    for facts in (str(file), {"Capital of  Peru": "Lima", "moons of Mars": "2"}):
        tool = fact_table(facts)
        assert (tool.name, tool.cost) == ("check_facts", 2.0)
        assert tool.call(" capital of PERU ") == "Lima"
        assert tool.call("moons of Mars") == "2"
        with pytest.raises(ToolFailedError, match="not in the table"):
            tool.call("capital of Chile")


@pytest.mark.parametrize("text", [None, "[1]", "{"])
def test_what_is_no_table_of_facts_is_refused(tmp_path, text):
    file = tmp_path / "facts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"^facts: .*facts.json"):
        fact_table(file)


def runner(**options):
    try:
        return code_runner(**options)
    except ConfigError as error:
        pytest.skip(str(error))


def test_code_runs_in_the_sandbox():
    tool = runner()
    assert (tool.name, tool.cost, tool.blocking) == ("run_code", 1.5, True)
    assert tool.call("print(sum(range(10)))") == "45"
    with pytest.raises(ToolFailedError, match=r"^ZeroDivisionError: division by zero$"):
        tool.call("1/0")
    with pytest.raises(ToolFailedError):
        tool.call("open('/etc/passwd', 'w')")


def test_a_program_that_does_not_end_is_a_failed_call():
    tool = runner(timeout_s=0.3)
    started = time.perf_counter()
    with pytest.raises(ToolFailedError, match="timeout"):
        tool.call("while True: pass")
    assert time.perf_counter() - started < 5


def test_tools_have_the_costs_of_the_specification():
    assert (calculator().name, calculator().cost) == ("verify_calculation", 1.0)
