"""kind = "dataset": rows, prompts, splits, and errors that name file and line."""

import itertools
import json
import re
import sys
from types import ModuleType

import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.environments.dataset_rows import prompt_key
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.runner import EpisodeRunner, GroupPlan, task_in_words
from mlx_parallm.environments.turn_policy import EpisodePolicy
from mlx_parallm.errors import ConfigError
from tests.environments.scripted_client import ScriptedClient

SCORE = (
    "def right(completions, answer=None, **kw):\n    return [1.0 if 'yes' in str(c) else 0.0"
    " for c in completions]\n"
)
CHAT = [{"role": "user", "content": "2+2?"}]


@pytest.fixture
def make(tmp_path):
    """Rows (or the text of the file) and keys of [[environments]] → source."""
    (tmp_path / "score.py").write_text(SCORE)
    numbers = itertools.count()

    def build(rows, seed=0, **keys):
        file = tmp_path / f"rows{next(numbers)}.jsonl"
        file.write_text(
            rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows)
        )
        entry = {
            "kind": "dataset",
            "name": "rows",
            "data": str(file),
            "rewards": [f"python:{tmp_path / 'score.py'}:right"],
            **keys,
        }
        [source] = build_sources(parse_config({"environments": [entry]}).environments, seed=seed)
        return source

    return build


def numbered(count):
    return [{"prompt": f"Say {number}", "answer": str(number)} for number in range(count)]


def contents(source, count, split="train"):
    return [source.task(index, split).messages[-1]["content"] for index in range(count)]


def test_every_epoch_has_every_training_row_once_in_an_order_of_its_own(make):
    rows = numbered(40)
    source = make(rows)
    size = len(source.rows.train)
    first, second = contents(source, size), contents(source, 2 * size)[size:]
    assert len(set(first)) == size
    assert set(first) == set(second)
    assert first != second
    assert contents(make(rows), 2 * size) == first + second
    assert contents(make(rows, seed=1), size) != first
    # whatever was asked for before
    assert source.task(3 * size + 1).key == make(rows).task(3 * size + 1).key


def test_a_teacher_gets_every_column_of_a_row(make):
    """What its prompt may name, and the completion that lmbda takes."""
    row = {"prompt": "Say 1", "answer": "1", "hint": "one", "completion": "1", "teacher": "big"}
    source = make([row], heldout_fraction=0.0)
    assert task_in_words(source.task(0), source)["row"] == row


def test_rows_without_rewards_are_for_teachers_alone(make):
    """With distillation.reward = false a data set needs none, and one answer a prompt is enough;
    its reward is 0. Anything else is refused with the reason."""
    entry = {"kind": "dataset", "name": "rows", "data": "rows.jsonl", "group_size": 1}
    teachers = {"teachers": [{"name": "base", "kind": "base"}]}

    def parsed(reward, rewards=(), **sections):
        training = {"distillation": teachers | {"reward": reward}}
        entries = [entry | {"rewards": list(rewards)}]
        return parse_config({"environments": entries, "rl_training": training} | sections)

    assert parsed(False).environments[0].rewards == ()
    with pytest.raises(ConfigError, match=r"distillation.reward"):
        parsed(True)
    with pytest.raises(ConfigError, match=r"evaluation.problems"):
        parsed(False, evaluation={"problems": 3})
    with pytest.raises(ConfigError, match=r"evaluation.environments"):
        bare = {name: value for name, value in entry.items() if name != "group_size"}
        parsed(False, evaluation={"problems": 3, "environments": [bare]})
    with pytest.raises(ConfigError, match="group_size"):
        parse_config({"environments": [entry | {"rewards": ["builtin:length"]}]})
    for algorithm in ("ppo", "reinforce", "reinforce_pp"):
        parse_config(
            {
                "environments": [entry | {"rewards": ["builtin:length"]}],
                "rl_training": {"algorithm": algorithm},
            }
        )


def rated(rates):
    return [
        row | {"pass_rate": rate} for row, rate in zip(numbered(len(rates)), rates, strict=True)
    ]


def test_a_curriculum_by_pass_rates(make, tmp_path):
    rows = rated([number / 40 for number in range(40)] + [None])
    easy = make(rows, curriculum="easy_first", heldout_fraction=0)
    for epoch in range(2):
        numbers = [
            int(text.split()[1]) for text in contents(easy, 82)[41 * epoch : 41 * (epoch + 1)]
        ]
        assert numbers == [*range(39, -1, -1), 40]
    measured = tmp_path / "measured"
    measured.mkdir()
    keys = [f"rows:{prompt_key(row['prompt'])}" for row in numbered(3)]
    problems = [
        {"key": key, "greedy": greedy, "sampled": sampled}
        for key, greedy, sampled in zip(
            keys, (1.0, 0.0, 0.0), ([0.0, 0.0], [1.0, 0.0], []), strict=True
        )
    ]
    (measured / "results.json").write_text(
        json.dumps({"environments": {"rows": {"problems": problems}}})
    )
    source = make(
        numbered(3), curriculum="easy_first", pass_rates=str(measured), heldout_fraction=0
    )
    assert contents(source, 1) == ["Say 1"]  # sampled answers count more than the greedy one


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (numbered(2), {"curriculum": "easy_first"}, "has no column 'pass_rate'.*mlx_parallm eval"),
        (rated([0.5, 1.5]), {"curriculum": "adaptive"}, "rows.*jsonl:2: column 'pass_rate' is 1.5"),
        (numbered(2), {"curriculum": "adaptive", "pass_rates": "nowhere"}, "these are not results"),
        (numbered(2), {"pass_rates": "nowhere"}, "pass_rates needs curriculum"),
        (numbered(2), {"curriculum": "weighted"}, 'gone: set "adaptive", which begins with'),
    ],
)
def test_a_curriculum_that_cannot_be(make, rows, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(rows, heldout_fraction=0, **keys)


def test_held_out_rows_follow_from_the_prompts_alone(make):
    rows = numbered(300)
    heldout = {task.key.partition(":")[2] for task in make(rows).heldout(100)}
    assert 15 < len(heldout) < 50
    assert heldout == {task.key.partition(":")[2] for task in make(rows[::-1], seed=5).heldout(100)}
    source = make([*rows, *numbered(300)])  # every prompt twice: both of a pair on one side
    assert not {row.key for row in source.rows.train} & {row.key for row in source.rows.heldout}
    assert len(source.heldout(100)) == len(heldout)
    assert [task.answer for task in source.heldout(2)] == [
        task.messages[-1]["content"].removeprefix("Say ") for task in source.heldout(2)
    ]


def test_a_small_data_set_keeps_one_prompt_and_a_fraction_of_zero_none(make):
    assert len(make(numbered(3), heldout_fraction=0.001).rows.heldout) == 1
    assert len(make(numbered(2), heldout_fraction=0.99).rows.train) == 1
    assert len(make(numbered(1)).rows.train) == 1
    source = make(numbered(3), heldout_fraction=0.0)
    assert (len(source.rows.train), source.heldout(5)) == (3, [])
    with pytest.raises(ConfigError, match="has no held-out rows"):
        source.task(0, "heldout")


def test_a_file_of_held_out_rows(make, tmp_path):
    (tmp_path / "test.jsonl").write_text('{"prompt": "Say it"}\n')
    source = make(numbered(5), heldout_data=str(tmp_path / "test.jsonl"))
    assert (
        len(source.rows.train),
        [task.messages[-1]["content"] for task in source.heldout(9)],
    ) == (5, ["Say it"])


@pytest.mark.parametrize(
    ("row", "keys", "messages"),
    [
        ({"prompt": "Hi"}, {}, [("user", "Hi")]),
        (
            {"prompt": "Hi"},
            {"system_prompt": "Be short."},
            [("system", "Be short."), ("user", "Hi")],
        ),
        (
            {"prompt": CHAT},
            {"system_prompt": "Be short."},
            [("system", "Be short."), ("user", "2+2?")],
        ),
        ({"messages": CHAT}, {}, [("user", "2+2?")]),
        ({"q": "Hi", "messages": CHAT}, {"prompt_column": "q"}, [("user", "Hi")]),
        (
            {"q": "Hi", "n": 3},
            {"prompt_template": "{q} {{{n}}}\nAnswer:"},
            [("user", "Hi {3}\nAnswer:")],
        ),
    ],
)
def test_prompts(make, row, keys, messages):
    source = make([row], heldout_fraction=0.0, **keys)
    assert [(m["role"], m["content"]) for m in source.task(0).messages] == messages


def test_a_row_that_lacks_a_column_has_none_in_it(make):
    source = make([{"prompt": "a"}, {"prompt": "b", "level": 3}], heldout_fraction=0.0)
    assert sorted(str(row.columns["level"]) for row in source.rows.train) == ["3", "None"]


GOOD = '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        (GOOD + "\n{'prompt': 1}\n", {}, r"rows\d+\.jsonl:3: not JSON: Expecting property name"),
        ("[\n", {}, r":1: not JSON: .*\(a JSON array\? write one object a line\)"),
        ('["prompt"]\n', {}, r":1: expected one JSON object, got list"),
        (GOOD + '{"answer": "x"}\n', {}, r":2: column 'prompt' is missing; expected a string or a list"),
        (GOOD + '{"prompt": 5}\n', {}, r":2: column 'prompt' is 5"),
        (GOOD + '{"prompt": [{"role": "user"}]}\n', {}, r":2: message 0 is not .*role"),
        (GOOD + '{"prompt": ["hello"]}\n', {}, r":2: message 0 is not .*'hello'"),
        ('{"prompt": [{"role": "assistant", "content": "x"}]}\n', {}, ":1: the last message is the assistant's"),
        ('{"question": "a"}\n', {}, r"no column 'prompt' or 'messages', only question: set prompt_column = "),
        (GOOD, {"prompt_column": "q"}, "no column 'q', only prompt"),
        (GOOD, {"prompt_template": "{promt}"}, r"names {promt}, which is not a column .*did you mean {prompt}\?"),
        (GOOD, {"prompt_template": "{prompt.upper}"}, r"names {prompt.upper}, which is not a column"),
        (GOOD, {"prompt_template": "{prompt"}, "prompt_template '{prompt': expected '}'"),
        ('{"a": 1}\n{"b": 1}\n', {"prompt_template": "{a}"}, ":2: column 'a' of prompt_template is missing"),
        ('{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}\n',
         {"system_prompt": "z"}, ":1: the row has a system message, and system_prompt is set as well"),
        (json.dumps({"prompt": CHAT}), {"prompt_format": "text"}, ":1: the prompt is a list of messages"),
        ("", {}, "has no rows to train on"),
        (GOOD, {"data": "nowhere.jsonl"}, "there is no file nowhere.jsonl"),
        (GOOD, {"data": "rows.csv"}, "rows.csv is not JSONL"),
        (GOOD, {"rewards": []}, "needs rewards"),
        (GOOD, {"reward_weights": [1.0, 2.0]}, "2 reward_weights for 1 rewards"),
        (GOOD, {"options": {"size": 3}}, "takes no options"),
        (GOOD, {"kind": "tasks", "name": "sum"}, "data belongs to kind"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_its_place(make, text, keys, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make(text, **keys)
    assert "\n" not in str(caught.value)


def test_a_data_set_of_the_hub(make, monkeypatch):
    asked = []

    def load_dataset(name, subset, *, split):
        asked.append((name, subset, split))
        if split == "validation":
            raise ValueError("Unknown split\n'validation'")
        return [{"prompt": f"{split} {number}", "answer": "1"} for number in range(3)]

    package = ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    source = make("", data="hf:openai/gsm8k", name=None, data_subset="main", heldout_split="test")
    assert source.name == "openai-gsm8k"
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert [task.messages[-1]["content"] for task in source.heldout(9)] == [
        "test 0",
        "test 1",
        "test 2",
    ]
    with pytest.raises(
        ConfigError,
        match=r"'openai/gsm8k'.*'validation'",
    ):
        make("", data="hf:openai/gsm8k", data_split="validation")


def test_a_data_set_of_the_hub_without_the_package(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"'\.\[datasets\]'"):
        make("", data="hf:openai/gsm8k")


async def play(tokenizer, source, answer, **options):
    client = ScriptedClient(tokenizer, answer)
    runner = EpisodeRunner(
        EpisodePolicy(client, tokenizer, temperature=1.0, max_token_length=256, **options)
    )
    [result] = await runner.run([GroupPlan("g", source, 0, 2, seed=1)])
    return result, client.requests[0].prompt_token_ids


async def test_a_group_is_scored_by_the_functions(make, tokenizer):
    result, _ = await play(
        tokenizer, make(numbered(1), heldout_fraction=0.0), lambda _, n: ("yes", "no")[n]
    )
    assert result.failure is None
    assert [rollout.scores for rollout in result.group.rollouts] == [
        {"reward": 1.0, "rewards/right": 1.0},
        {"reward": 0.0, "rewards/right": 0.0},
    ]
    assert result.group.metadata["answer"] == "0"


async def test_a_function_that_never_ends_is_told_by_its_time(make, tokenizer, tmp_path):
    text = "import asyncio\nasync def right(completions):\n    await asyncio.Event().wait()\n"
    (tmp_path / "slow.py").write_text(text)
    source = make(
        numbered(1),
        heldout_fraction=0.0,
        rewards=[f"python:{tmp_path / 'slow.py'}:right"],
        timeout_s=0.05,
    )
    result, _ = await play(tokenizer, source, lambda *_: "yes")
    assert re.fullmatch("reward: .*timeout_s = 0.05 s", result.failure)


async def test_text_goes_to_the_model_as_it_is_and_chat_through_the_template(make, tokenizer):
    row = [{"prompt": "Once upon"}]
    _, text = await play(
        tokenizer, make(row, heldout_fraction=0.0, prompt_format="text"), lambda *_: "yes"
    )
    assert list(text) == tokenizer.encode("Once upon")
    _, chat = await play(tokenizer, make(row, heldout_fraction=0.0), lambda *_: "yes")
    assert list(chat) == tokenizer.render_chat([{"role": "user", "content": "Once upon"}])


async def test_an_environments_template_options_are_laid_over_the_models(
    make, tokenizer, monkeypatch
):
    given = []
    monkeypatch.setattr(
        tokenizer, "render_chat", lambda messages, **options: given.append(options) or [1, 2]
    )
    source = make(numbered(1), heldout_fraction=0.0, chat_template_kwargs={"enable_thinking": True})
    options = {"template_kwargs": {"enable_thinking": False, "x": 1}}
    await play(tokenizer, source, lambda *_: "yes", **options)
    assert given == [{"template_kwargs": {"enable_thinking": True, "x": 1}}]


@pytest.mark.parametrize("fraction", [0.001, 0.999])
def test_rows_of_one_prompt_are_all_trained_on(make, fraction):
    source = make(
        [{"prompt": "2+2?", "answer": str(number)} for number in range(4)],
        heldout_fraction=fraction,
    )
    assert (len(source.rows.train), source.heldout(9)) == (4, [])


def test_a_reward_needs_its_columns_in_the_held_out_rows_too(make, tmp_path):
    (tmp_path / "score.py").write_text(
        "def right(completions, answer):\n    return [0.0 for _ in answer]\n"
    )
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "3+3?"}\n')
    with pytest.raises(ConfigError, match="'answer'"):
        make(numbered(4), heldout_data=str(tmp_path / "heldout.jsonl"))
