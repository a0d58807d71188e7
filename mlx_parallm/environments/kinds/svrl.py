"""kind = "svrl": the policy may check its work with tools that cost part of a budget before it
answers.

    prompt (task, tools, costs, budget, last verifications) → answer → its USE_TOOL calls are made
    and paid → prompt …
        → FINAL ANSWER, budget spent, or max_steps

The State's metadata holds the cost, and the reward reads it there
(`rewards.parts.SVRLRewardComputer`): `budget`, `spent`, `max_steps`, `final_answer`, and
`tool_calls`, one dictionary for each call with `name`, `arguments` (the text for the tool), `ok`,
`result`, `cost` (0 for a call that was not made) and `skipped` (the budget did not allow it).
Everything that belongs to an episode is in its State, so that classes may be combined.
"""

import ast
import dataclasses
import inspect
import json
import math
import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpleeval import InvalidExpression, SimpleEval

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.dataset_rows import TaskData, read_tasks
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.kinds.tasks import split_of
from mlx_parallm.environments.state import BaseEnvironment, Inference, Prompt, State
from mlx_parallm.errors import ConfigError, RolloutRejectedError, ToolFailedError
from mlx_parallm.execution.chat_messages import read_messages
from mlx_parallm.execution.sandbox.sandbox import Sandbox
from mlx_parallm.execution.tool_calls import parse_tool_calls
from mlx_parallm.execution.user_code import (
    did_you_mean,
    is_reference,
    load_function_of,
    name_of,
    user_code,
)

SHOWN_VERIFICATIONS = 3
FINAL_ANSWER = re.compile(r"FINAL ANSWER:[ \t]*([^\n]*)", re.IGNORECASE)
LONGEST_RESULT = 500  # characters of a tool's result that are shown
LONGEST_EXPRESSION, LARGEST = 200, 1e300
MOST_BITS = 4096  # bits of the largest integer power that a calculation may make
CODE_TIMEOUT_S = 5.0
# so that there are no names, no texts, no calls
_NUMBERS_AND_SIGNS = re.compile(r"[0-9.eE+\-*/%()\s]*")


@dataclass(frozen=True)
class VerificationTool:
    """A tool that takes the text between the parentheses of a call and returns its result. An
    exception is a failed call."""

    name: str
    call: Callable[[str], str]
    cost: float = 1.0
    description: str = ""
    blocking: bool = False  # it takes long enough to delay the other episodes


class SVRLEnvironment(BaseEnvironment):
    """Self-verification under a budget. Calls are written `USE_TOOL[name](input)`, the answer
    `FINAL ANSWER: …`."""

    several_turns = True
    default_rewards = ("builtin:svrl",)

    def __init__(
        self,
        inference: Inference | None = None,
        tools: Sequence[str | VerificationTool | Callable[[str], str]]
        | Mapping[str, str | VerificationTool | Callable[[str], str]]
        | None = None,
        budget: float = 10.0,
        *,
        max_steps: int = 50,
        tasks: TaskData | None = None,
        costs: Mapping[str, float] | None = None,
        facts: Mapping[str, str] | str | Path | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            tools: names of built-in ones ("verify_calculation", "check_facts", "run_code"),
                functions from text to text or references to them ("python:file.py:name"),
                `VerificationTool`s; or a table of them, name → tool. Default: the built-in ones,
                with check_facts only if there are `facts`.
            budget: most that an episode may spend; a call that costs more than is left is not made.
            max_steps: most turns of the policy.
            tasks: rows {"prompt", "answer", …}, or a JSONL file of them; default:
                `arithmetic_task`.
            costs: costs by tool name, which replace the default ones (built-in: 1.0, 2.0, 1.5;
                functions: 1.0).
            facts: the table of "check_facts": term → its fact, or a JSON file.

        Raises ConfigError: an unknown tool, two of one name, or a cost, budget or number of steps
        out of its range.
        """
        super().__init__(inference)
        if not budget > 0 or max_steps < 1:
            raise ConfigError(
                "svrl: budget has to be above 0 and max_steps at least"
                f" 1, not {budget} and {max_steps}"
            )
        self.budget, self.max_steps, self._seed = float(budget), max_steps, seed
        self.tools = {tool.name: tool for tool in _make_tools(tools, facts, costs or {})}
        self.blocking = any(tool.blocking for tool in self.tools.values())
        self._rows = (
            None if tasks is None else read_tasks(tasks, "prompt", seed=seed, what="svrl: tasks")
        )

    def use_tools(self, tools: EpisodeTools | None) -> None:
        if tools is not None and tools.definitions:
            raise ConfigError(
                "svrl has tools of its own and reads calls by itself: set `tools = []` for it"
            )

    def reset(self, *, index: int | None = None, split: Split = "train") -> State:
        """Begin task `index` of a split; without an index the next one."""
        index = self._index_or_next(index)
        if self._rows is None:
            row = arithmetic_task(index, split, self._seed)
        else:
            row = dict(self._rows.row(index, split).columns)
        state = State(
            prompt=row["prompt"], metadata={k: v for k, v in row.items() if k != "prompt"}
        )
        self._account(state)
        return state

    def build_prompt(self, state: State) -> Prompt:
        """Return the task, the tools with their costs, the budget, and the results of the last
        verifications."""
        account = self._account(state)
        about = [
            "Before you answer you may verify. A call is written USE_TOOL[name](input). Tools:",
            *(
                f"- {tool.name}, cost {tool.cost:g}: {tool.description}"
                for tool in self.tools.values()
            ),
            f"Budget left: {account['budget'] - account['spent']:g} of {account['budget']:g}.",
            *self.last_verifications(state),
            "End with FINAL ANSWER: and the answer.",
        ]
        return _with(super().build_prompt(state), "\n".join(about))

    def last_verifications(self, state: State) -> list[str]:
        """Return the last calls and their results, a line each."""
        calls = self._account(state)["tool_calls"][-SHOWN_VERIFICATIONS:]
        return [f"{_written(call)} -> {call['result'][:LONGEST_RESULT]}" for call in calls]

    def update_state(self, state: State, response: str) -> State:
        """Make and pay the calls before the final answer. The episode ends with that answer,
        when nothing is left to spend, or with the last step."""
        state = super().update_state(state, response)
        account = self._account(state)
        answer = FINAL_ANSWER.search(response)
        calls = parse_tool_calls(
            response if answer is None else response[: answer.start()], (), "use_tool"
        )
        for call in calls:
            record = self._call(
                call.name, _input_of(call.raw_text), account["budget"] - account["spent"]
            )
            account["tool_calls"].append(record)
            account["spent"] += record["cost"]
        account["tool_calls"] += [
            _record("", call.raw_text, f"malformed: {call.reason}") for call in calls.malformed
        ]
        if answer is not None:
            account["final_answer"] = answer[1].strip()
        state.done = (
            answer is not None
            or account["spent"] >= account["budget"]
            or state.step_count >= self.max_steps
        )
        return state

    def _account(self, state: State) -> dict[str, Any]:
        """Return the State's metadata, with an account in it whichever class made the State."""
        for name, value in {
            "budget": self.budget,
            "spent": 0.0,
            "max_steps": self.max_steps,
        }.items():
            state.metadata.setdefault(name, value)
        state.metadata.setdefault("tool_calls", [])
        state.metadata.setdefault("final_answer", None)
        return state.metadata

    def _call(self, name: str, arguments: str, left: float) -> dict[str, Any]:
        """Return the record of one call, made if the tool exists and the budget allows it."""
        tool = self.tools.get(name)
        if tool is None:
            return _record(name, arguments, f"there is no such tool, only {', '.join(self.tools)}")
        if tool.cost > left:
            return _record(
                name, arguments, f"not made: it costs {tool.cost:g}, {left:g} is left", skipped=True
            )
        try:
            with user_code(name, RolloutRejectedError):
                ok, result = True, str(tool.call(arguments))
        except (ToolFailedError, RolloutRejectedError) as error:
            ok, result = False, f"failed: {error}"
        return _record(name, arguments, result, ok=ok, cost=tool.cost)


def arithmetic_task(index: int, split: Split = "train", seed: int = 0) -> dict[str, str]:
    """Return task `index`: two numbers of two digits multiplied, and one of three digits added
    or subtracted."""
    rng = random.Random(f"arithmetic/{seed if split == 'train' else 'heldout'}/{index}")
    while True:
        a, b, c = rng.randrange(12, 100), rng.randrange(12, 100), rng.randrange(100, 1000)
        sign = rng.choice("+-")
        expression = f"{a} * {b} {sign} {c}"
        if split_of(f"arithmetic:{expression}") == split:
            return {
                "prompt": f"What is {expression}?",
                "answer": str(a * b + (c if sign == "+" else -c)),
            }


def _make_tools(
    requested: Sequence[Any] | Mapping[str, Any] | None,
    facts: Mapping[str, str] | str | Path | None,
    costs: Mapping[str, float],
) -> list[VerificationTool]:
    built_in: dict[str, Callable[[], VerificationTool]] = {
        "verify_calculation": calculator,
        "run_code": code_runner,
    }
    if facts is not None:
        built_in["check_facts"] = lambda: fact_table(facts)
    if isinstance(requested, str):
        raise ConfigError(
            f"svrl: tools is a list or a table of tools, not {requested!r}: [{requested!r}]"
        )
    if isinstance(requested, Mapping):
        tools = [
            dataclasses.replace(_made(entry, built_in), name=name)
            for name, entry in requested.items()
        ]
    else:
        tools = [
            _made(entry, built_in) for entry in (list(built_in) if requested is None else requested)
        ]
    names = [tool.name for tool in tools]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"svrl: two tools are called {twice[0]!r}")
    if unknown := [name for name in costs if name not in names]:
        raise ConfigError(
            f"svrl: costs has {unknown[0]!r}, which is none of the"
            f" tools{did_you_mean(unknown[0], names)}"
        )
    tools = [
        dataclasses.replace(tool, cost=float(costs.get(tool.name, tool.cost))) for tool in tools
    ]
    if free := [tool.name for tool in tools if not tool.cost >= 0]:
        raise ConfigError(f"svrl: the cost of {free[0]!r} has to be at least 0")
    return tools


def _made(entry: Any, built_in: Mapping[str, Callable[[], VerificationTool]]) -> VerificationTool:
    """Return the tool of an entry of `tools`. Raises ConfigError."""
    if isinstance(entry, VerificationTool):
        return entry
    if isinstance(entry, str) and not is_reference(entry):
        if entry not in built_in:
            why = (
                ": it needs facts"
                if entry == "check_facts"
                else did_you_mean(entry, list(built_in))
            )
            raise ConfigError(f"svrl: tools has no {entry!r}{why}")
        return built_in[entry]()
    call = load_function_of(("text",), entry, "svrl: tools") if isinstance(entry, str) else entry
    if not callable(call):
        raise ConfigError(
            f"svrl: tools has {call!r}: expected a name, a function or a VerificationTool"
        )
    description = " ".join((inspect.getdoc(call) or "").partition("\n\n")[0].split())
    return VerificationTool(name_of(call), call, description=description, blocking=True)


def _record(
    name: str,
    arguments: str,
    result: str,
    *,
    ok: bool = False,
    cost: float = 0.0,
    skipped: bool = False,
) -> dict[str, Any]:
    return {
        "name": name,
        "arguments": arguments,
        "ok": ok,
        "cost": cost,
        "skipped": skipped,
        "result": result,
    }


def _written(call: Mapping[str, Any]) -> str:
    return (
        f"USE_TOOL[{call['name']}]({call['arguments']})" if call["name"] else str(call["arguments"])
    )


def _input_of(call: str) -> str:
    """Return the text between the parentheses of `USE_TOOL[name](…)`, without quotation marks
    around it."""
    text = call[call.index("(", call.index("]")) + 1 :].removesuffix(")").strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _with(prompt: Prompt, about: str) -> Prompt:
    """Return the prompt with a text below it, or below the last of its messages."""
    if isinstance(prompt, str):
        return f"{prompt}\n\n{about}"
    *earlier, last = read_messages(prompt)
    return [*earlier, {**last, "content": f"{last['content']}\n\n{about}"}]


# --- the built-in tools


def calculator(cost: float = 1.0) -> VerificationTool:
    """Make `verify_calculation`: the value of an expression; of an equation, whether it holds."""
    return VerificationTool(
        "verify_calculation",
        calculate,
        cost,
        "the value of an expression, or whether an equation holds",
    )


def fact_table(facts: Mapping[str, str] | str | Path, cost: float = 2.0) -> VerificationTool:
    """Make `check_facts`: looks up an entry, ignoring case and white space. `facts`: a mapping, or
    a JSON file of one.

    Raises ConfigError: a file that is not such a table.
    """
    table = facts if isinstance(facts, Mapping) else _read_table(Path(facts))
    entries = {_plain(name): str(value) for name, value in table.items()}

    def look_up(text: str) -> str:
        if (entry := entries.get(_plain(text))) is None:
            raise ToolFailedError("not in the table")
        return entry

    return VerificationTool("check_facts", look_up, cost, "what the table of facts says of a term")


def code_runner(cost: float = 1.5, *, timeout_s: float = CODE_TIMEOUT_S) -> VerificationTool:
    """Make `run_code`: what a Python program prints, in the sandbox. Raises ConfigError: the
    sandbox cannot protect."""
    sandbox = Sandbox(timeout_s=timeout_s)

    def run(code: str) -> str:
        result = sandbox.run(code)
        if not result.ok:
            last_words = result.stderr.strip().rpartition("\n")[2]
            raise ToolFailedError(last_words or f"it did not end well: {result.outcome}")
        return result.stdout.strip()

    return VerificationTool("run_code", run, cost, "what a Python program prints", blocking=True)


def calculate(text: str) -> str:
    """Return "84" for "12*7", and "false: it is 84" or "true" for an equation. Raises
    ToolFailedError."""
    expression, equals, claim = text.partition("=")
    value = _evaluate(expression)
    if not equals:
        return _shown(value)
    return (
        "true"
        if math.isclose(value, _evaluate(claim.lstrip("=")), rel_tol=1e-9)
        else f"false: it is {_shown(value)}"
    )


def _evaluate(expression: str) -> float:
    """Evaluate numbers, + - * / // % ** and parentheses. Raises ToolFailedError."""
    if len(expression) > LONGEST_EXPRESSION or not _NUMBERS_AND_SIGNS.fullmatch(expression):
        raise ToolFailedError(
            f"that is no expression of numbers and signs of at most {LONGEST_EXPRESSION} characters"
        )
    try:
        value = SimpleEval(operators=dict(_OPERATORS)).eval(expression.strip())
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) < LARGEST
        ):
            raise ToolFailedError("that is no number, or one too large")
    except (
        InvalidExpression,
        SyntaxError,
        ArithmeticError,
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
    ) as error:
        raise ToolFailedError(
            f"that is no expression: {str(error) or type(error).__name__}"
        ) from error
    return value


def _power(base: float, exponent: float) -> float:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and abs(base).bit_length() * abs(exponent) > MOST_BITS
    ):
        raise ToolFailedError("the power is too large")
    return base**exponent


_OPERATORS: Mapping[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _read_table(path: Path) -> Mapping[str, str]:
    try:
        table = json.loads(path.expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"facts: {path} cannot be read: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"facts: {path} is not a JSON object of terms and facts")
    return table
