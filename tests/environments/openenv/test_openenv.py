"""Environments behind OpenEnv's protocol: real sockets, a server of ours, a scripted policy."""

import asyncio
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.openenv import session
from mlx_parallm.environments.openenv.actions import Actions, Observations, text_field
from mlx_parallm.environments.openenv.servers import _check_schema
from mlx_parallm.environments.openenv.session import ActionRefusedError, ServerSession, _step_result
from mlx_parallm.environments.openenv.source import _tool_result
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError, EndpointError, RolloutRejectedError
from mlx_parallm.execution.tool_results import ToolResult
from mlx_parallm.system import patterns
from tests.environments.scripted_client import ScriptedClient

pytest.importorskip("websockets")
from tests.environments.openenv.protocol_server import (
    Calculator,
    Count,
    ProtocolServer,
    Words,
    action_schema,
)

PROGRAM = Path(__file__).with_name("protocol_server.py")


@pytest.fixture
def serving():
    servers = []

    def serve(environment=Count, **options):
        servers.append(ProtocolServer(environment, **options))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def source(server=None, fields=None, seed=0, **options):
    options = ({"url": server.url} if server is not None else {}) | options
    entry = EnvironmentConfig(kind="openenv", options=options, **fields or {})
    [built] = build_sources([entry], seed=seed)
    return built


def says(tokenizer, answer):
    """A policy; `answer` gets its whole prompt and the number of its turn."""

    def reply(request, _):
        text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return answer(text, text.count("<|im_start|>assistant\n") - 1)

    return ScriptedClient(tokenizer, reply)


async def played(tokenizer, built, answer, *, size=2, index=0, max_steps=None):
    client = says(tokenizer, answer)
    plan = GroupPlan("g", built, index, size, seed=1, index=index, max_steps=max_steps)
    [result] = await EpisodeRunner(EpisodePolicy(client, tokenizer, 1.0, 2000)).run([plan])
    return result, client


def right(text, turn):
    return json.dumps({"number": int(re.search(r"say (\d)", text)[1])})


# ---------------------------------------------------------------------- an episode


async def test_actions_are_sampled_by_the_servers_schema(tokenizer, serving):
    server = serving()
    built = source(server, keep_state=True)
    result, client = await played(
        tokenizer, built, lambda text, turn: right(text, 0) if turn else '{"number": 77}'
    )
    assert result.failure is None, result.failure
    number = built.task(0).columns["reset"]["seed"] % 10
    for trajectory, rollout in zip(result.trajectories, result.group.rollouts, strict=True):
        facts = trajectory.metadata
        assert (facts["return"], facts["rewards"], facts["done"]) == (1.0, [0.0, 1.0], True)
        assert facts["actions"] == [{"number": 77}, {"number": number}]
        assert facts["state"]["step_count"] == 2 and facts["state"]["episode_id"].startswith("g/")
        assert rollout.reward == 1.0 and rollout.turn_rewards == (0.0, 1.0)
        first, second = trajectory.history
        schema = {"properties": {"number": {"title": "Number", "type": "integer"}}}
        schema = {"additionalProperties": False, **schema, "required": ["number"]}
        schema |= {"title": "CountAction", "type": "object"}
        opening, shown = first.prompt.removeprefix(
            "Answer with one JSON object of this schema: "
        ).split("\n\n")
        assert json.loads(opening) == schema  # without the metadata that every action may have
        assert shown == f"say {number}"  # the one field that is full
        assert second.prompt == json.dumps({"off": 77 - number})
    structures = {request.params.structure for request in client.requests}
    [structure] = structures
    assert structure.kind == "json_schema" and json.loads(structure.source) == schema
    assert [message["type"] for message in server.messages].count("reset") == 2
    assert server.is_left()


async def test_an_action_may_be_the_text_of_an_answer(tokenizer, serving, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):  # none leads to this machine
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    built = source(serving(Words), instructions="Say the number.")
    result, client = await played(tokenizer, built, lambda text, turn: f" {turn}\n", size=1)
    assert result.failure is None, result.failure
    [trajectory] = result.trajectories
    assert trajectory.metadata["actions"] == [{"text": "0"}, {"text": "1"}]
    assert trajectory.history[0].prompt.startswith("Say the number.\n\nsay ")
    assert client.requests[0].params.structure is None


async def test_what_is_no_action_takes_a_turn(tokenizer, serving):
    built = source(serving(), action_of=r"number (?P<number>\w+)")
    answers = ["what?", "number x", "number 1", "a number 2, or number 3"]
    result, _ = await played(tokenizer, built, lambda text, turn: answers[turn], size=1)
    assert result.failure is None, result.failure
    [trajectory] = result.trajectories
    assert trajectory.metadata["actions"] == [{"number": 1}, {"number": 3}]
    assert trajectory.metadata["invalid_actions"] == 2
    assert "number:" not in trajectory.history[1].prompt
    assert "number: Field required" in trajectory.history[2].prompt
    assert len(result.group.rollouts[0].turn_rewards) == 4


async def test_functions_templates_tasks_and_rewards_of_the_users(tokenizer, serving, tmp_path):
    (tmp_path / "own.py").write_text(
        "def action(text):\n    return {'number': len(text)}\n"
        "def score(trajectories, word, state):\n"
        "    return [len(word[0]) + t.metadata['return'] for t in trajectories]\n"
    )
    rows = [{"prompt": f"Think of {word}.", "word": word} for word in ("tea", "milk", "rice")] * 9
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = serving()
    built = source(
        server,
        {"rewards": (f"python:{tmp_path}/own.py:score",), "system_prompt": "Be brief."},
        tasks=str(tmp_path / "rows.jsonl"),
        reset={"level": 2},
        action_of=f"python:{tmp_path}/own.py:action",
        observation_text="({hint}{off})",
        max_steps=1,
        keep_state=True,
    )
    result, _ = await played(tokenizer, built, lambda text, turn: "four")
    assert result.failure is None, result.failure
    [trajectory, _] = result.trajectories
    word, seed = (trajectory.metadata[name] for name in ("word", "seed"))
    assert trajectory.history[0].prompt.endswith(f"Think of {word}.\n\n(say {seed % 10})")
    assert result.group.rollouts[0].reward == len(word) + (seed % 10 == 4)
    assert result.group.rollouts[0].turn_rewards == ()
    assert trajectory.rollout.stop_reason == "length"  # max_steps has cut it
    reset = next(m["data"] for m in reversed(server.messages) if m["type"] == "reset")
    assert {name: reset[name] for name in ("word", "level", "seed")} == {
        "word": word,
        "level": 2,
        "seed": seed,
    }
    keys = {split: {built.task(n, split).key for n in range(27)} for split in ("train", "heldout")}
    assert not keys["train"] & keys["heldout"]


async def test_a_group_that_begins_differently_is_reported_once(tokenizer, serving, warned):
    drawn = iter(range(100))

    class Random(Count):
        def reset(self, seed=0, **values):
            return super().reset(next(drawn))

    built = source(serving(Random))
    for _ in range(2):
        await played(tokenizer, built, right)
    [warning] = [entry for entry in warned if "begin differently" in entry["event"]]
    assert warning["environment"] == "openenv"


# ---------------------------------------------------------------------- tools


def call(name, **arguments):
    return f"```json\n{json.dumps({'tool': name, 'arguments': arguments})}\n```"


async def test_tools_of_a_server_are_called_as_those_of_the_configuration(tokenizer, serving):
    built = source(serving(Calculator))
    answers = [call("add", a=2, b=3), call("add", a=2), call("nothing"), call("submit", n=5), "?"]
    result, _ = await played(tokenizer, built, lambda text, turn: answers[turn])
    assert result.failure is None, result.failure
    for trajectory, rollout in zip(result.trajectories, result.group.rollouts, strict=True):
        calls = trajectory.metadata["tool_calls"]
        assert [(note["name"], note["text"], note["error"]) for note in calls] == [
            ("add", "5", None),
            ("add", "2 validation errors", "arguments"),
            ("nothing", "there is no tool 'nothing'; there are: add, submit", "unknown_tool"),
            ("submit", "thanks", None),
        ]
        assert [turn.response for turn in trajectory.history] == answers[:4]  # then it was done
        assert rollout.turn_rewards == (0.0, 0.0, 0.0, 1.0) and rollout.reward == 1.0
        assert len(trajectory.metadata["actions"]) == 3
        assert "Use the tools to solve the task." in trajectory.history[0].prompt
    assert not built._sessions


async def test_an_answer_without_a_call_ends_an_episode_of_tools(tokenizer, serving):
    built = source(serving(Calculator), {"tools": ("add",)}, instructions="What is 2 + 3?")
    assert [definition["name"] for definition in built.tools.definitions] == ["add"]
    answers = [call("add", a=2, b=3), "It is 5."]
    result, _ = await played(tokenizer, built, lambda text, turn: answers[turn], size=1)
    assert result.trajectories[0].metadata["answer_text"] == "It is 5."
    with pytest.raises(ConfigError, match=r"'ad'.*'add'"):
        source(serving(Calculator), {"tools": ("ad",)})


# ---------------------------------------------------------------------- many at once, and losses


async def test_episodes_wait_for_a_session_of_a_server_that_is_full(
    tokenizer, serving, monkeypatch
):
    monkeypatch.setattr(session, "CLOSE_TIMEOUT_S", 30.0)  # no session is left open by a late end
    server = serving(most=2)
    result, _ = await played(tokenizer, source(server), right, size=8)
    assert result.failure is None, result.failure
    assert [rollout.reward for rollout in result.group.rollouts] == [2.0] * 8
    limited = serving(before=lambda socket, message: limited.wait_for_sessions(3))
    await played(tokenizer, source(limited, max_sessions=3), right, size=9)
    assert limited.most_live == 3


async def test_episodes_are_shared_out_among_servers(tokenizer, serving):
    servers = [serving(), serving()]
    built = source(url=[server.url for server in servers])
    await played(tokenizer, built, right, size=8)
    resets = [[m["type"] for m in server.messages].count("reset") for server in servers]
    assert resets == [4, 4]


@pytest.mark.parametrize("way", ["hangs", "dies", "fails", "speaks nonsense"])
async def test_a_lost_episode_has_a_reason(tokenizer, serving, way):
    def before(socket, message):
        if message["type"] != "step":
            return None
        if way == "hangs":
            released.wait(20)
        if way in ("hangs", "dies"):
            socket.socket.shutdown(2)
        if way == "fails":
            raise ZeroDivisionError("by zero")
        return "<html>"

    class Fails(Count):
        def step(self, data):
            raise ZeroDivisionError("by zero")

    released = threading.Event()
    server = serving(Fails if way == "fails" else Count, before=None if way == "fails" else before)
    built = source(server, **{"message_timeout_s": 0.3} if way == "hangs" else {})
    result, _ = await played(tokenizer, built, right, size=1)
    released.set()
    reason = {
        "hangs": "no answer to step within 0.3 s",
        "dies": "the connection was lost in step",
        "fails": r"step: by zero \(EXECUTION_ERROR\)",
        "speaks nonsense": "the answer to step is not OpenEnv's: <html>",
    }[way]
    assert re.search(f"{server.url}: {reason}", result.failure)
    assert result.trajectories[0].error == result.failure
    assert result.may_pass == (way != "fails")
    assert [s.sessions for s in built.servers.servers] == [0]


async def test_an_episode_that_has_not_begun_goes_to_another_server(tokenizer, serving):
    """One server is gone, one hangs up in reset: all episodes are played by the third."""
    gone, works = serving(), serving()
    hangs_up = serving(before=lambda socket, message: socket.socket.shutdown(2))
    built = source(url=[gone.url, hangs_up.url, works.url])
    gone.close()
    result, _ = await played(tokenizer, built, right, size=6)
    assert result.failure is None, result.failure
    assert {t.metadata["server"] for t in result.trajectories} == {works.url}
    works.close()
    result, _ = await played(tokenizer, built, right, size=1)
    assert "no connection" in result.failure or "lost in reset" in result.failure
    assert result.may_pass


async def test_no_session_becomes_free(tokenizer, serving):
    server = serving(most=0)
    built = source(server, {"timeout_s": 1.0})
    result, _ = await played(tokenizer, built, right, size=1)
    assert "0.5 s" in result.failure
    assert "Server at capacity" in result.failure


async def test_a_cancelled_episode_closes_its_session(tokenizer, serving):
    asked = threading.Event()

    def before(socket, message):
        if message["type"] == "step":
            asked.set()
            released.wait(20)

    released = threading.Event()
    server = serving(before=before)
    built = source(server)
    task = asyncio.create_task(played(tokenizer, built, right, size=1))
    assert await asyncio.to_thread(asked.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    assert [each.sessions for each in built.servers.servers] == [0]
    assert server.is_left()


# ---------------------------------------------------------------------- a command


async def test_a_server_is_started_and_started_again(tokenizer, warned):
    built = source(command=f"{sys.executable} {PROGRAM} {{port}}")
    [server] = built.servers.servers
    result, _ = await played(tokenizer, built, right, size=2)
    assert result.failure is None, result.failure
    first = server.process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    result, _ = await played(tokenizer, built, right, size=2)
    assert result.failure is None, result.failure
    assert server.process.pid != first.pid
    assert sum("started again" in entry["event"] for entry in warned) == 1
    built.servers.close()
    assert server.process.returncode is not None


def test_a_server_may_write_without_end():
    """Its end is kept for the reason, and what it writes fills neither a pipe nor a disk."""
    writes = "import sys; sys.stderr.write('x' * (1 << 20)); sys.exit('no licence')"
    with pytest.raises(ConfigError, match=r"1: x+no licence$") as refused:
        source(command=[sys.executable, "-c", writes, "{port}"])
    assert len(str(refused.value)) < 1_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "where is the server"),
        ({"url": "localhost:1"}, "has to begin with http"),
        ({"url": "http://127.0.0.1:1", "ready_timeout_s": 0.1}, "no OpenEnv server answers"),
        ({"command": "server --port 8000"}, r"has to say where the port goes: \{port\}"),
        ({"command": "no-such-program {port}"}, "no-such-program"),
        ({"command": [sys.executable, "-c", "exit('no licence')", "{port}"]}, "1: no licence"),
        ({"url": "http://x", "max_steps": 0}, "max_steps has to be at least 1"),
        ({"url": "http://x", "max_sessions": 0}, "max_sessions has to be at least 1"),
        ({"url": "http://x", "observation_text": "text"}, "neither a template"),
        ({"url": "http://x", "port": 8}, "no option 'port'"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        source(**options)


# ---------------------------------------------------------------------- actions and observations


def test_the_field_of_a_text_is_found():
    string = {"type": "string"}
    assert text_field(Words.schema) == "text"
    assert text_field(Count.schema) is None
    assert text_field(action_schema("A", ["a", "b"], a=string, b=string)) is None
    assert text_field(action_schema("A", ["a"], a={**string, "enum": ["x"]})) is None
    assert text_field(action_schema("A", ["a"], a=string, b=string)) == "a"


def test_an_answer_as_an_action():
    fields = {"move": {"type": "string"}, "count": {"type": "integer"}}
    schema = action_schema("A", ["move"], **fields)
    assert Actions(schema, None).read(" up ") == {"move": "up"}
    assert Actions(schema, "json").read('{"move": "up"}') == {"move": "up"}
    assert Actions(schema, "json").read('{"move": "u') is None
    assert Actions(schema, "json").read("[" * 100_000) is None
    pattern = r"<(?P<move>\w+)(?: (?P<count>\w+))?>"
    assert Actions(schema, pattern).read("<a 1> <b 2>") == {"move": "b", "count": 2}
    assert Actions(schema, pattern).read("<a>") == {"move": "a"}
    assert Actions(schema, pattern).read("<a no>") == {"move": "a", "count": "no"}
    assert Actions(schema, pattern).read("none") is None
    for option, message in {
        "metadata": "no field 'metadata'",
        "(?P<mov>x)": "no field 'mov'",
        "[": "unterminated",
    }.items():
        with pytest.raises(ConfigError, match=message):
            Actions(schema, option)


def test_an_answer_that_the_pattern_never_ends_on_loses_its_episode(monkeypatch):
    monkeypatch.setattr(patterns, "SEARCH_S", 0.05)
    schema = action_schema("A", ["move"], move={"type": "string"})
    with pytest.raises(RolloutRejectedError, match="action_of"):
        Actions(schema, r"^(?P<move>a|b|ab)*[^ab]{2}$").read("ab" * 2000 + "c")


@pytest.mark.parametrize(
    "schema",
    [
        [],
        {"properties": []},
        {"properties": {"a": True}, "required": ["a"]},
        {"properties": {}, "required": 3},
        {"title": 5},
    ],
)
def test_what_is_no_schema_of_actions_is_told_apart(schema):
    with pytest.raises(TypeError):
        _check_schema(schema)


def test_answers_that_are_not_openenvs_are_errors_of_the_server():
    session = ServerSession("http://h", None, 1.0)
    with pytest.raises(EndpointError, match="not OpenEnv's"):
        session._read("step", "[" * 100_000)
    fault = {"code": "VALIDATION_ERROR", "message": "no", "errors": [{"loc": 5, "msg": "bad"}]}
    with pytest.raises(ActionRefusedError, match="5: bad"):
        session._read("step", json.dumps({"type": "error", "data": fault}))
    for reward in ("NaN", "1e999", "1" * 30):
        with pytest.raises(RolloutRejectedError, match="the reward is"):
            _step_result(json.loads(f'{{"observation": {{}}, "reward": {reward}}}'), "http://h")
    assert _tool_result({"error": "boom"}) == ToolResult("boom", error="tool")
    assert _tool_result({"result": {"content": [{"type": "text"}]}}).error is None


def test_an_observation_as_text():
    assert Observations(None).text({"a": "x", "b": None, "c": ""}) == "x"
    assert Observations(None).text({"a": "x", "b": 0}) == '{"a": "x", "b": 0}'
    assert Observations(None).text({}) == ""
    assert len(Observations(None).text({"a": "x" * 1_000_000})) == 1_000_000
    with pytest.raises(RolloutRejectedError, match=r"1,000,001.*1,000,000"):
        Observations(None).text({"a": "x" * 1_000_001})
    assert Observations("{a}").text({"a": 1, "b": "x" * 1_000_001}) == "1"
    assert Observations("{a} of {b[0]}{c}").text({"a": 1, "b": [2], "c": None}) == "1 of 2"
    with pytest.raises(RolloutRejectedError, match=r"KeyError.*'c'"):
        Observations("{c}").text({"a": 1})
    with pytest.raises(ConfigError, match="stand for braces"):
        Observations("{")
