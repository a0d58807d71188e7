"""mlx_parallm_eval over the shipped tiny model: over HTTP from a real server, and in a process
of its own."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mlx_parallm import cli
from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.evaluation import EvaluationConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.environments.episode_tools import EpisodeTools
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.trajectory import SequenceRecorder
from mlx_parallm.environments.turn_policy import TurnRequest
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.inference.openai import OpenAIBackend
from mlx_parallm.rl_training.evaluation.evaluate import draw_problems, evaluate
from mlx_parallm.runs.eval import EndpointPolicy, _examiners, _trained_on, compare

TOML = """
[evaluation]
problems = 10
samples = 2

[[environments]]
kind = "tasks"
name = "sum"
max_tokens = 8

[[environments]]
kind = "tasks"
name = "reverse"
max_tokens = 8
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "eval.toml"
    file.write_text(TOML)
    return file


def results(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return found


def answers(directory: Path) -> dict[tuple[str, str, str], tuple[str, float]]:
    rows = [json.loads(line) for line in (directory / "samples.jsonl").read_text().splitlines()]
    return {
        (row["environment"], row["key"], row["which"]): (row["completion"], row["reward"])
        for row in rows
    }


def test_over_http_and_here_the_same_model_gives_the_same_greedy_answers(
    server: Any, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    code = cli.evaluate(
        ["--config", str(config), "--url", f"{server.url}/v1", "--output", str(there)]
    )
    assert code == 0
    told = capsys.readouterr().out
    assert re.search(r"sum +│ accuracy +│ [01]\.\d{3} │ \d\.\d{3} to \d\.\d{3} +│ +10 │ +0", told)
    assert "pass@2" in told
    found = results(there)
    assert (found["model"], found["settings"]["samples"]) == ("builtin:tiny", 2)
    assert found["completion_tokens"] > 60
    assert len(answers(there)) == 2 * 10 * 3
    assert {reward for _, reward in answers(there).values()} <= {0.0, 1.0}
    assert len({text for text, _ in answers(there).values()}) >= 20

    here_flags = ["--config", str(config), "--model", "builtin:tiny", "--output", str(here)]
    assert cli.evaluate(here_flags) == 0
    greedy = {key: value for key, value in answers(here).items() if key[2] == "greedy"}
    assert greedy == {key: value for key, value in answers(there).items() if key[2] == "greedy"}
    for name in ("sum", "reverse"):
        numbers = [
            results(place)["environments"][name]["numbers"]["accuracy"] for place in (here, there)
        ]
        assert (
            numbers[0]
            == numbers[1]
            == sum(value for key, (_, value) in greedy.items() if key[0] == name) / 10
        )
    capsys.readouterr()
    assert cli.evaluate(["--compare", str(here), str(there)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"sum +10 .* \+0\.000 +\+0\.000 to \+0\.000 +1 ", told)
    assert "no significant difference: sum" in told


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, _: Any) -> None:
        self.seen.append(tag)


def test_the_page_has_every_answer_and_no_script(server: Any, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = [
        "--config",
        str(config),
        "--url",
        f"{server.url}/v1",
        "--problems",
        "2",
        "--samples",
        "0",
    ]
    assert cli.evaluate([*flags, "--output", str(out)]) == 0
    page = (out / "samples.html").read_text()
    tags = Tags()
    tags.feed(page)
    assert tags.seen.count("article") == 4
    assert "script" not in tags.seen
    assert results(out)["settings"]["samples"] == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--url", "http://127.0.0.1:1/v1"], "cannot be reached"),
        (
            ["--url", "{server}/v1", "--model", "nobody"],
            "every answer failed: .*The model 'nobody' does not exist",
        ),
        (["--url", "not-a-url"], "is not a URL"),
        (["--problems", "0"], "evaluation.problems is 0"),
        (
            ["--set", "evaluation.greedy=false", "--samples", "0"],
            "neither greedy answers nor samples",
        ),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    flags: list[str], words: str, server: Any, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [flag.replace("{server}", server.url) for flag in flags]
    assert cli.evaluate(["--config", str(config), *given]) == 2
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--config", "x", "--compare", "a", "b"],
        ["--config", "x", "--url", "u", "--lora-path", "a"],
    ],
)
def test_flags_that_do_not_go_together(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.evaluate(flags)
    assert ended.value.code == 2


def written(path: Path, rewards: dict[str, float], name: str = "sum") -> Path:
    problems = [{"key": key, "greedy": reward, "sampled": []} for key, reward in rewards.items()]
    part = {"numbers": {}, "problems": problems, "examples": []}
    path.write_text(json.dumps({"model": path.stem, "environments": {name: part}}))
    return path


def test_a_comparison_pairs_problems_and_names_the_chance(tmp_path: Path) -> None:
    """Nine changed sides, eight of them for the better: p = 0.0390625 (pass_at_k_and_intervals.py)."""
    before = {f"k{i}": float(i == 8) for i in range(11)} | {"only here": 1.0}
    after = {f"k{i}": float(i < 8) for i in range(11)} | {"only there": 0.0}
    console = Console(width=160, record=True)
    compare(written(tmp_path / "a.json", before), written(tmp_path / "b.json", after), console)
    text = console.export_text()
    assert re.search(r"sum +11 +0\.091 +0\.727 +\+0\.636 .* 0\.0391 *\n", text)
    assert "B is better than A: sum (at the 5% level" in text
    assert "McNemar" in text
    other = written(tmp_path / "c.json", before, name="sort")
    with pytest.raises(ConfigError, match="share no problem"):
        compare(tmp_path / "a.json", other, console)
    (tmp_path / "d.json").write_text("[]")
    with pytest.raises(ConfigError, match="mlx_parallm eval"):
        compare(tmp_path / "a.json", tmp_path / "d.json", console)
    with pytest.raises(ConfigError, match="No such file"):
        compare(tmp_path / "a.json", tmp_path / "nothing.json", console)


class Endpoint:
    """Replies in their order, and keeps what it is asked."""

    base_url = "http://x/v1"

    def __init__(self, *replies: dict[str, Any]) -> None:
        self.replies, self.asked = list(replies), []  # type: ignore[var-annotated]

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(
            (path, {key: value for key, value in body.items() if key != "return_token_ids"})
        )
        return self.replies.pop(0)

    def policy(self, inference: Any = None, **options: Any) -> EndpointPolicy:
        backend = OpenAIBackend("m", self.base_url, lambda url: self)  # type: ignore[arg-type,return-value]
        return EndpointPolicy(backend, inference, **options)


def chat(text: str, reason: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"message": {"content": text}, "finish_reason": reason, **more}
    return {"choices": [choice], "usage": {"completion_tokens": 3}}


def turn(prompt: Any) -> TurnRequest:
    config = EnvironmentConfig(
        kind="tasks",
        name="sum",
        max_tokens=7,
        stop=("\n",),
        chat_template_kwargs={"enable_thinking": False},
    )
    return TurnRequest("t", prompt, config, seed=2**31 + 5, overrides={}, options={})


async def test_a_turn_is_one_request_and_records_the_tokens_that_the_endpoint_names() -> None:
    messages = ({"role": "system", "content": "Be brief"}, {"role": "user", "content": "Why?\n"})
    endpoint = Endpoint(chat("Because.", "length", token_ids=[4, 5]), {"choices": [{"text": " 4"}]})
    policy = endpoint.policy(template_kwargs={"enable_thinking": True, "x": 1}).with_sampling(
        0.5, 0.9
    )
    sequences: list[SequenceRecorder] = []
    completion = await policy.sample(turn(messages), sequences, None)
    assert (completion.text, completion.finish_reason, completion.token_ids) == (
        "Because.",
        "length",
        (4, 5),
    )
    assert (await policy.sample(turn("2 + 2 ="), sequences, None)).text == " 4"
    assert len(sequences) == 2, "no turn continues another one's tokens"
    assert policy.backend.completion_tokens == 3
    common = {
        "model": "m",
        "chat_template_kwargs": {"enable_thinking": False, "x": 1},
        "max_tokens": 7,
    }
    common |= {"temperature": 0.5, "top_p": 0.9, "stop": ["\n"], "seed": 5}
    assert endpoint.asked == [
        ("/chat/completions", common | {"messages": list(messages)}),
        ("/completions", common | {"prompt": "2 + 2 ="}),
    ]


ENVIRONMENTS = """
from mlx_parallm.environments.state import BaseEnvironment, State

class TwoTurns(BaseEnvironment):
    def reset(self, *, index=0):
        return State([{'role': 'user', 'content': 'hello'}], metadata={'answer': 'second'})

    def update_state(self, state, text):
        state.add_turn('', text)
        state.prompt = [*state.prompt, {'role': 'assistant', 'content': text}, {'role': 'user', 'content': 'again'}]
        state.done = state.step_count == 2
        return state

class AsksItself(TwoTurns):
    def step(self, state):
        return self.update_state(state, self.inference.generate([state.prompt])[0])
"""


@pytest.mark.parametrize("kind", ["TwoTurns", "AsksItself"])
async def test_a_second_turn_holds_the_first(tmp_path: Path, kind: str) -> None:
    """Played by the runner of the engine's environments, also where the environment asks by
    itself."""
    (tmp_path / "two_turns.py").write_text(ENVIRONMENTS)
    config = EnvironmentConfig(
        kind=f"python:{tmp_path}/two_turns.py:{kind}",
        name="two",
        rewards=("builtin:answer_match",),
    )
    problems = draw_problems(build_sources([config], seed=0), 1)
    endpoint = Endpoint(chat("first"), chat("second"))
    with InferenceModule("m", backend="openai", base_url=Endpoint.base_url) as inference:
        problems[0].source.attach(inference)
        [found] = await evaluate(endpoint.policy(inference), problems, EvaluationConfig(problems=1))
    assert found.numbers().get("accuracy") == 1.0, found.first_error
    assert endpoint.asked[1][1]["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "again"},
    ]


async def test_an_endpoints_calls_are_made_and_answered_as_its_api_has_it() -> None:
    def add(a: int, b: int) -> int:
        return a + b

    function = {"name": "add", "arguments": '{"a": 2, "b": 40}'}
    called = {
        "content": "Let me see.",
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    reply = {
        "choices": [{"message": called, "finish_reason": "tool_calls"}],
        "usage": {"completion_tokens": 3},
    }
    endpoint = Endpoint(reply, chat("42"))
    rewards = {"rewards": ("builtin:regex",), "reward_options": {"regex": {"pattern": "42"}}}
    options = {"tasks": [{"prompt": f"What is {n} + 40?"} for n in range(30)]}
    config = EnvironmentConfig(kind="tools", name="tools", options=options, **rewards)
    with (
        ToolClient(functions=[add]) as client,
        InferenceModule("m", backend="openai", base_url=Endpoint.base_url) as inference,
    ):
        problems = draw_problems(build_sources([config], seed=0, tools=EpisodeTools.of(client)), 1)
        policy = endpoint.policy(inference)
        [found] = await evaluate(policy, problems, EvaluationConfig(problems=1))
        assert client.metrics()["calls"] == 1
    assert found.numbers().get("accuracy") == 1.0, found.first_error
    assert policy.backend.completion_tokens == 6
    (path, first), (_, second) = endpoint.asked
    assert path == "/chat/completions" and first["tools"][0]["function"]["name"] == "add"
    assert second["messages"][1]["content"] == "Let me see."
    [call] = second["messages"][1]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 40}'}
    assert second["messages"][2] == {"role": "tool", "tool_call_id": call["id"], "content": "42"}


async def test_an_endpoint_has_to_call_where_the_rows_say_so(tmp_path: Path) -> None:
    function = {"name": "add", "arguments": '{"a": 2, "b": 40}'}
    called = {
        "content": "",
        "tool_calls": [{"id": "x", "type": "function", "function": function}],
    }
    reply = {
        "choices": [{"message": called, "finish_reason": "tool_calls"}],
        "usage": {"completion_tokens": 3},
    }
    rows = tmp_path / "rows.jsonl"
    row = {
        "prompt": "2 + 40?",
        "tools": [{"name": "add", "parameters": {"type": "object"}}],
        "calls": [{"add": {"a": [2], "b": [40]}}],
    }
    rows.write_text(json.dumps(row) + "\n")
    for choice in ("required", "auto"):
        config = EnvironmentConfig(
            kind="dataset",
            name="calls",
            data=str(rows),
            heldout_fraction=1,
            rewards=("builtin:tool_call",),
            tool_choice=choice,
        )
        endpoint = Endpoint(reply)
        with InferenceModule("m", backend="openai", base_url=Endpoint.base_url) as inference:
            problems = draw_problems(build_sources([config], seed=0), 1)
            await evaluate(endpoint.policy(inference), problems, EvaluationConfig(problems=1))
        [(_, body)] = endpoint.asked
        assert body.get("tool_choice", "auto") == choice


def test_a_judge_may_have_trained_what_it_judges(tmp_path: Path) -> None:
    """Outside its run a policy was trained on what its run's configuration names; on anything
    where that is not beside it; on nothing here where it is the hub's."""
    run = tmp_path / "run"
    (adapter := run / "final").mkdir(parents=True)
    (moved := tmp_path / "moved").mkdir()
    entry = 'kind = "dataset"\ndata = "rows.jsonl"\nrewards = ["builtin:math"]\n'
    (run / "config.toml").write_text(f"[[environments]]\n{entry}")
    judged = EnvironmentConfig(kind="dataset", name="x", data="x", rewards=["builtin:judge"])
    problems = [SimpleNamespace(source=SimpleNamespace(name="x", config=judged))]
    for lora, unknown, examiners in (
        (adapter, False, ()),
        (moved, True, ("judge",)),
        (None, False, ()),
    ):
        path = None if lora is None else str(lora)
        trained = _trained_on(ModelConfig(base_path="builtin:tiny", lora_path=path))
        assert (trained is None) == unknown
        assert _examiners(problems, trained) == {"x": examiners}
