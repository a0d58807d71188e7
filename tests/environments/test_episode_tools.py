"""Tools in episodes of every kind of environment: calls are made, results come back masked, the
environment sees the answer alone. The policy is scripted; tools are functions."""

import asyncio
import json
import re
import threading

import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.tools import ToolsConfig
from mlx_parallm.environments.episode import CURRENT
from mlx_parallm.environments.episode_tools import EpisodeTools, open_tools
from mlx_parallm.environments.kinds.tools import ToolsEnvironment
from mlx_parallm.environments.prompt_room import check_room
from mlx_parallm.environments.registry import build_sources, create_environment
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.tool_client import ToolClient
from mlx_parallm.system.log import configure_logging
from tests.environments.scripted_client import ScriptedClient
from tests.environments.templates import QWEN3, with_template
from tests.environments.test_state_episodes import InEpisode

SCORED = {"rewards": ("builtin:length",), "reward_options": {"length": {"target": 5}}}
ADD = '```json\n{"tool": "add", "arguments": {"a": 2, "b": 3}}\n```'
TAKES_TOOLS = (
    """{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}"""
    + QWEN3
)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def secret() -> str:
    """Tell the secret."""
    return "xyzzy"


class Talks(BaseEnvironment):
    """Two questions, the second after the first answer."""

    def reset(self, index=0):
        return State(
            [{"role": "user", "content": "What is 2 + 3?"}], metadata={"turns": 2, "seen": []}
        )

    def update_state(self, state, response):
        state = super().update_state(state, response)
        state.metadata["seen"].append(len(state.metadata["tool_calls"]))
        asked = {"role": "user", "content": "And once more?"}
        state.prompt = [*state.prompt, {"role": "assistant", "content": response}, asked]
        state.done = state.step_count >= 2
        return state


class TalksItself(Talks):
    """The same, by its own step that blocks."""

    def __init__(self):
        super().__init__(InEpisode())

    def step(self, state):
        return self.advance(state, state.prompt, self.inference.generate([state.prompt])[0])


@pytest.fixture(scope="module")
def tools():
    with ToolClient(functions=[add, secret]) as client:
        yield EpisodeTools.of(client)


def answering(tokenizer, *answers):
    """A policy that says `answers` in turn in each episode: which is next, it sees from what its
    prompt holds."""

    def answer(request, _):
        text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        return answers[text.count("<|im_start|>assistant\n") - 1]

    return ScriptedClient(tokenizer, answer)


async def played(tokenizer, client, source, tools, *, size=1):
    source.take_tools(tools)
    plan = GroupPlan("g", source, 0, size, seed=1, index=0)
    policy = EpisodePolicy(client, tokenizer, temperature=1.0, max_token_length=2000)
    [result] = await EpisodeRunner(policy).run([plan])
    assert result.failure is None, result.failure
    return result


def sampled_text(tokenizer, rollout):
    tokens = [token for token, sampled in zip(rollout.tokens, rollout.mask, strict=True) if sampled]
    return tokenizer.decode(tokens, skip_special_tokens=False)


def environment(kind, **fields):
    fields = {**SCORED, **fields}
    [source] = build_sources([EnvironmentConfig(kind=kind, name="e", **fields)], seed=0)
    return source


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"What is 2 + {n}?", "answer": "5"}) + "\n" for n in range(9))
    )
    return path


def kinds(rows):
    talk = {"conversations": [{"turns": ["What is 2 + 3?"]}] * 9}
    return {
        "dataset": environment("dataset", data=str(rows)),
        "conversation": environment("conversation", options=talk),
        "simple_text": environment("simple_text", options={"prompts": ["What is 2 + 3?"]}),
        "tasks": build_sources([EnvironmentConfig(kind="tasks", name="sum")], seed=0)[0],
    }


@pytest.mark.parametrize("kind", ["dataset", "conversation", "simple_text", "tasks"])
async def test_every_kind_has_tools_by_one_place(tokenizer, tools, rows, kind):
    client = answering(tokenizer, ADD, "It is 5.")
    result = await played(tokenizer, client, kinds(rows)[kind], tools, size=2)
    for trajectory in result.trajectories:
        [call] = trajectory.metadata["tool_calls"]
        assert {key: call[key] for key in ("name", "arguments", "text", "error", "ok")} == {
            "name": "add",
            "arguments": {"a": 2, "b": 3},
            "text": "5",
            "error": None,
            "ok": True,
        }
        assert trajectory.text == trajectory.metadata["answer_text"] == "It is 5."
        [rollout] = trajectory.rollout.segments
        # the result 5 is not part of it
        assert sampled_text(tokenizer, rollout) == f"{ADD}<|im_end|>It is 5.<|im_end|>"
        assert "You can use these tools:\n- add: Add two numbers." in tokenizer.decode(
            rollout.tokens
        )
    opening, *others = client.requests
    assert opening.params.n == 2 and len(others) == 2  # one prefill for the group, then a turn each


async def test_an_episode_whose_tool_gave_no_answer_is_not_scored(tokenizer, rows):
    """The tool stalled, the policy did nothing wrong; an error that the tool reports is scored."""
    released = threading.Event()

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        if a == 0:
            raise ValueError("no zero")
        released.wait(60)
        return a + b

    def answer(request, number):
        text = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        if text.count("<|im_start|>assistant\n") > 1:
            return "It is 5."
        return [ADD, ADD.replace("2", "0"), "It is 5."][number]

    with ToolClient(functions=[add], function_timeout_s=1.0) as client:
        source = environment("dataset", data=str(rows))
        scripted = ScriptedClient(tokenizer, answer)
        result = await played(tokenizer, scripted, source, EpisodeTools.of(client), size=3)
        released.set()
    assert [rollout.is_scored for rollout in result.group.rollouts] == [False, True, True]
    reason = result.group.rollouts[0].extra["left_out"]
    assert "add" in reason and "within 1 s" in reason


@pytest.mark.parametrize("kind", [Talks, TalksItself])
async def test_an_environment_goes_on_from_what_really_went_before(tokenizer, tools, kind):
    """It knows of question and answer; the second prompt continues the tokens of the calls
    between them."""
    source = environment("simple_text", options={"prompts": ["x"]})
    source.template = kind()
    source.opens_together = kind is Talks
    client = answering(tokenizer, ADD, "5", '{"tool": "nothing"}', ADD, "still 5")
    [trajectory] = (await played(tokenizer, client, source, tools)).trajectories
    [rollout] = trajectory.rollout.segments
    said = ["5", "still 5"]
    assert [call["error"] for call in trajectory.metadata["tool_calls"]] == [
        None,
        "unknown_tool",
        None,
    ]
    assert trajectory.metadata["seen"] == [1, 3] and trajectory.step_count == 2
    assert trajectory.metadata["answer_text"] == said[1]
    expected = [ADD, "5", '{"tool": "nothing"}', ADD, "still 5"]
    assert sampled_text(tokenizer, rollout) == "".join(f"{text}<|im_end|>" for text in expected)
    roles = [message["role"] for message in trajectory.messages]
    called = ["assistant", "tool", "assistant"]
    assert roles == ["user", *called, "user", "assistant", "tool", *called]


async def test_a_template_that_takes_tools_gets_them_and_the_role(tools):
    tokenizer = with_template(TAKES_TOOLS)
    client = answering(tokenizer, ADD, "5")
    source = environment("simple_text", options={"prompts": ["What is 2 + 3?"]})
    [trajectory] = (await played(tokenizer, client, source, tools)).trajectories
    [rollout] = trajectory.rollout.segments
    text = tokenizer.decode(rollout.tokens, skip_special_tokens=False)
    assert text.startswith('<|im_start|>tools\n[{"') and '"name": "add"' in text
    assert "<|im_start|>tool\n5<|im_end|>" in text and "You can use" not in text


async def test_a_plain_text_has_tools_too(tokenizer, tools):
    answers = iter(["TOOL: add(2, b=3)", "ANSWER: 5"])
    client = ScriptedClient(tokenizer, lambda *_: next(answers))
    source = environment("simple_text", options={"prompts": ["2 + 3 = "]}, prompt_format="text")
    chosen = EpisodeTools(tools.client, tools.definitions, formats=("tool_line",))
    [trajectory] = (await played(tokenizer, client, source, chosen)).trajectories
    first, second = (tokenizer.decode(request.prompt_token_ids) for request in client.requests)
    assert "TOOL: NAME(key=value)" in first and first.endswith("2 + 3 = ")
    assert second == f"{first}TOOL: add(2, b=3)\nRESULT: 5\n"
    assert trajectory.metadata["answer_text"] == "ANSWER: 5"


async def test_rounds_are_bounded_and_the_last_calls_are_made(tokenizer, tools):
    source = environment("simple_text", options={"prompts": ["x"]})
    bounded = EpisodeTools(tools.client, tools.definitions, max_rounds=2)
    client = answering(tokenizer, *[ADD] * 5)
    [trajectory] = (await played(tokenizer, client, source, bounded)).trajectories
    assert len(trajectory.metadata["tool_calls"]) == 2 == len(client.requests)
    assert trajectory.metadata["answer_text"] is None and trajectory.text == ADD


async def test_the_policy_has_only_the_tools_of_its_environment(tokenizer, tools):
    config = EnvironmentConfig(
        kind="simple_text",
        name="e",
        options={"prompts": ["x"]},
        tools=("add",),
        rewards=("builtin:tool_success",),
    )
    [source] = build_sources([config], seed=0, tools=tools)
    client = answering(tokenizer, '{"tool": "secret"}', "hm")
    [trajectory] = (await played(tokenizer, client, source, tools)).trajectories
    [call] = trajectory.metadata["tool_calls"]
    assert call["error"] == "unknown_tool" and "add" in call["text"]
    assert "secret" not in tokenizer.decode(client.requests[0].prompt_token_ids)


async def test_a_row_names_the_tools_that_its_task_shows(tokenizer, tools, tmp_path):
    """A row's list, an empty list, none; in a data set and in an environment's metadata; a name
    that there is not."""
    rows = [
        {"prompt": "[one]", "with": ["add"]},
        {"prompt": "[none]", "with": []},
        {"prompt": "[all]", "with": None},
        {"prompt": "[wrong]", "with": ["ad"]},
        {"prompt": "[text]", "with": "add"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = {**SCORED, "tools_column": "with"}
    data = EnvironmentConfig(kind="dataset", data=str(path), heldout_fraction=0, **scored)
    many = [{**row, "prompt": f"{row['prompt']} {number}"} for number in range(8) for row in rows]
    own = EnvironmentConfig(kind="tools", options={"tasks": many}, **scored)
    for source in build_sources([data, own], seed=0, tools=tools):
        shown = {}
        for index in range(40):
            client = answering(tokenizer, '{"tool": "secret"}', "hm")
            policy = EpisodePolicy(client, tokenizer, temperature=1.0, max_token_length=2000)
            [result] = await EpisodeRunner(policy).run(
                [GroupPlan("g", source, index, 1, seed=1, index=0)]
            )
            text = tokenizer.decode(client.requests[0].prompt_token_ids) if client.requests else ""
            calls = [
                call["error"]
                for each in result.trajectories
                for call in each.metadata.get("tool_calls", [])
            ]
            name = next((row["prompt"] for row in rows if row["prompt"] in text), result.failure)
            shown[name] = "- add" in text, "- secret" in text, calls
        assert shown.pop("[one]") == (True, False, ["unknown_tool"])
        assert shown.pop("[none]") == (False, False, [])
        assert shown.pop("[all]") == (True, True, [None])
        failures = " ".join(shown)
        assert len(shown) == 2 and "'ad'; did you mean 'add'" in failures
        assert "column 'with' has 'add'" in failures


async def test_prompts_without_room_are_refused_before_the_run(tokenizer, tools, rows):
    """Tools, a system prompt, the rows themselves, an environment that makes its tasks in order;
    and what fits."""
    client = answering(tokenizer, "hm")

    def check(longest, **fields):
        config = EnvironmentConfig(kind="dataset", data=str(rows), **SCORED, **fields)
        sources = build_sources([config], seed=0, tools=tools)
        check_room(sources, EpisodePolicy(client, tokenizer, 1.0, longest), "max_token_length")

    with pytest.raises(ConfigError) as raised:
        check(60)
    whole = str(raised.value)
    tokens = int(
        re.search(
            r"the shortest of 16 prompts has (\d+) tokens, and max_token_length = 60 holds", whole
        )[1]
    )
    with pytest.raises(ConfigError, match=f"has {tokens} tokens"):
        check(tokens)
    check(tokens + 1)
    assert re.search(
        r"Of it: \d+ are the same in every prompt, tools (\d+) \((add|secret) \d+, (add|secret) \d+\)",
        whole,
    )
    assert "tools_column" in whole
    check(tokens - 10, tools=("add",))
    with pytest.raises(ConfigError, match=r"\d{3} .*system_prompt \d+"):
        check(60, tools=(), system_prompt="word " * 100)
    with pytest.raises(ConfigError, match="raise the model's context"):
        client.max_model_len = 30
        check(2000)
    client.max_model_len = 4096
    source = environment("simple_text", options={"prompts": ["x"]})
    source.take_tools(tools)
    source.in_order = True
    with pytest.raises(ConfigError, match="the prompt has"):
        check_room([source], EpisodePolicy(client, tokenizer, 1.0, 40), "max_token_length")
    check_room([source], EpisodePolicy(client, tokenizer, 1.0, 800), "max_token_length")


async def test_rows_without_room_are_counted_by_line_and_key(tokenizer, tools, tmp_path):
    """One of them is far too long to be tokenised; with the run's tools another one is too long."""
    lengths = [3, 1000, 3, 400, 100_000]
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": "word " * n, "answer": "x"}) + "\n" for n in lengths)
    )
    config = EnvironmentConfig(kind="dataset", data=str(data), heldout_fraction=0, **SCORED)
    configure_logging(level="warning")
    for with_tools, places in ((None, (2, 5)), (tools, (2, 4, 5))):
        sources = build_sources([config], seed=0, tools=with_tools)
        policy = EpisodePolicy(answering(tokenizer, "hm"), tokenizer, 1.0, 700)
        with capture_logs() as entries:
            check_room(sources, policy, "max_token_length")
        [entry] = [entry for entry in entries if "no group" in entry["event"]]
        assert entry["first"] == ", ".join(f"{data}:{place}" for place in places)
        assert (entry["rows"], entry["key"]) == (len(places), "max_token_length = 700")


async def test_a_hanging_tool_holds_up_no_other_episode(tokenizer):
    """100 episodes hang at once, and one does not: it ends while they hang."""
    gate, waiting = threading.Event(), threading.Semaphore(0)

    def hang() -> str:
        waiting.release()
        gate.wait(60)
        return "at last"

    with ToolClient(functions=[add, hang]) as client:
        tools = EpisodeTools.of(client)
        hangs = '{"tool": "hang", "arguments": {}}'
        source = environment("simple_text", options={"prompts": ["x"]})
        slow = asyncio.create_task(
            played(tokenizer, answering(tokenizer, hangs, "late"), source, tools, size=100)
        )
        for _ in range(100):
            await asyncio.to_thread(waiting.acquire)
        result = await played(tokenizer, answering(tokenizer, ADD, "5"), source, tools)
        assert result.trajectories[0].text == "5" and not slow.done()
        gate.set()
        assert {each.text for each in (await slow).trajectories} == {"late"}


@pytest.mark.parametrize(
    ("fields", "with_tools", "words"),
    [
        (
            {"kind": "tools", "options": {"tasks": [{"prompt": "x"}] * 9}},
            False,
            r"needs tools: set \[\[tools.mcp\]\]",
        ),
        (
            {"kind": "simple_text", "options": {"prompts": ["x"]}, "tools": ("ad",)},
            True,
            "no tool 'ad'; did you mean",
        ),
        (
            {"kind": "simple_text", "options": {"prompts": ["x"]}, "tools": ("add",)},
            False,
            r"set \[\[tools\.mcp\]\]",
        ),
        ({"kind": "svrl"}, True, r"reads calls by itself: set `tools = \[\]`"),
        ({"kind": "svrl", "tools": ("add",)}, True, "tools of its own"),
        (
            {"kind": "simple_text", "options": {"prompts": ["x"]}, "tools_column": "t"},
            False,
            "calls no tools",
        ),
        ({"kind": "hybrid", "tools_column": "t"}, True, "calls no tools"),
    ],
)
def test_what_cannot_work(tools, fields, with_tools, words):
    config = EnvironmentConfig(name="e", **{"rewards": ("builtin:tool_success",), **fields})
    with pytest.raises(ConfigError, match=words):
        build_sources([config], seed=0, tools=tools if with_tools else None)


def test_an_environment_without_tools_beside_others(tools):
    config = EnvironmentConfig(kind="svrl", name="e", tools=())
    [source] = build_sources([config], seed=0, tools=tools)
    assert source.tools is None


def test_functions_of_a_configuration(tmp_path):
    (tmp_path / "own.py").write_text(
        'def twice(n: int) -> int:\n    """Double."""\n    return 2 * n\n'
    )
    assert open_tools(ToolsConfig()) is None
    opened = open_tools(
        ToolsConfig(
            functions=(f"python:{tmp_path}/own.py:twice",), formats="function", max_rounds=3
        )
    )
    with opened.client as client:
        assert (opened.formats, opened.max_rounds) == (("function",), 3)
        assert [definition["name"] for definition in opened.definitions] == ["twice"]
        assert client.call("twice", {"n": 4}).text == "8"
        client.call("nothing")
        assert opened.new_counts() | {"tools/seconds": 0} == {
            "tools/calls": 2,
            "tools/errors": 1,
            "tools/timeouts": 0,
            "tools/restarts": 0,
            "tools/cache_hits": 0,
            "tools/seconds": 0,
        }
        client.call("twice", {"n": 1})
        assert opened.new_counts()["tools/calls"] == 1
        client.call("twice", {"n": None})  # it raises: that function's counts are there from now on
        counts = opened.new_counts()
        named = {key: counts[key] for key in counts if key.endswith("/twice")}
        assert named == {
            "tools/calls/twice": 3,
            "tools/failed/twice": 1,
            "tools/unanswered/twice": 0,
        }
        assert opened.new_counts()["tools/calls/twice"] == 0


async def test_kind_tools_is_questions_and_nothing_else(tokenizer, tools):
    tasks = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(30)]
    kind = create_environment("tools", tasks=tasks, tools=tools)
    assert isinstance(kind, ToolsEnvironment)
    source = environment("simple_text", options={"prompts": ["x"]})
    source.template = kind
    [trajectory] = (
        await played(tokenizer, answering(tokenizer, ADD, "done"), source, None)
    ).trajectories
    assert (
        trajectory.metadata["answer_text"] == "done" and trajectory.metadata["answer"].isdecimal()
    )


async def test_a_call_may_end_the_episode(tokenizer, rows):
    """Its result is recorded, and the policy is not asked again."""

    class Ends(ToolClient):
        async def acall(self, name, arguments=None, *, before=None):
            CURRENT.get().close()
            return await super().acall(name, arguments)

    client = answering(tokenizer, ADD, "not asked")
    with Ends(functions=[add]) as functions:
        tools = EpisodeTools.of(functions)
        result = await played(tokenizer, client, kinds(rows)["dataset"], tools)
    [trajectory] = result.trajectories
    assert [turn.response for turn in trajectory.history] == [ADD]
    assert [note["text"] for note in trajectory.metadata["tool_calls"]] == ["5"]
    assert trajectory.metadata["answer_text"] is None


async def test_a_call_as_rows_write_it_is_made(tokenizer, tools):
    """A template without tools is taught `<tool_call>`, and such a call is read."""
    source = environment("simple_text", options={"prompts": ["What is 2 + 3?"]})
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    client = answering(tokenizer, call, "5")
    [trajectory] = (await played(tokenizer, client, source, tools)).trajectories
    assert [made["name"] for made in trajectory.metadata["tool_calls"]] == ["add"]
    assert "<tool_response>" in trajectory.conversation or trajectory.text == "5"
