"""Data sets of traces: who is in which row, what is learned of it token by token, which side it
is on."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.cli.table import main
from mlx_parallm.config.data import DataConfig
from mlx_parallm.errors import ConfigError, TraceError
from mlx_parallm.rl_training.data.examples import read_examples
from mlx_parallm.rl_training.data.learned_tokens import encode_all, form_of
from mlx_parallm.systems.traces.builders import (
    DatasetOptions,
    build_dataset,
    prompt_key,
    score_of,
    without_prompts,
    write_dataset,
)
from mlx_parallm.systems.traces.schema import Label
from mlx_parallm.systems.traces.session import Session
from mlx_parallm.systems.traces.trace import Trace, manual_label, new_trace
from tests.server.scripted_answers import HERMES_TEMPLATE, tokenizer_with
from tests.traces.log_formats import traces_of
from tests.traces.messages import assistant, user

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"q": [1, "ü"]}'}}


def trace(name: str, question: str, answer: str, score: float | None = None, **extra: Any) -> Trace:
    messages = [user(question), assistant(answer)]
    made = new_trace(messages, session_id=name, source="test", **extra)
    if score is not None:
        made.add_label(Label(name="feedback", value=score, by="user", at=1.0))
    return made


def rows(traces: list[Trace], kind: Any, **options: Any) -> list[dict[str, Any]]:
    return build_dataset(traces, DatasetOptions(kind, **{"test_fraction": 0.0, **options})).train


def branched() -> list[Trace]:
    """A session of two branches: the first answer is shared, so the second trace has it as
    copied context."""
    session, ends = Session("b"), dict[str, str]()

    def say(*texts: str) -> list[dict[str, Any]]:
        roles = ("user", "assistant")
        return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]

    def follow(asked: list[dict[str, Any]], answer: str) -> None:
        session.follow(asked, assistant(answer), ends, at=1.0)

    follow(say("one"), "first")
    follow(say("one", "first", "two"), "left")
    follow(say("one", "first", "other"), "right")
    return traces_of(session)


def learned(
    path: Path, rows: list[dict[str, Any]], tokenizer: Any, algorithm: str, **template: Any
) -> list[list[str]]:
    """The texts that training learns of each row, by the trainer's own reader and mask."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), eval_fraction=0)
    examples, _ = read_examples(config, algorithm)
    found = []
    for unit in encode_all(examples, tokenizer, config, template, form=form_of(algorithm)):
        texts, run = [], list[int]()
        for token, trained in zip(
            [*unit.sequences[0].tokens, 0], [*unit.sequences[0].mask, False], strict=True
        ):
            if trained:
                run.append(int(token))
            elif run:
                texts.append(tokenizer.decode(run, skip_special_tokens=False))
                run = []
        found.append(texts)
    return found


def test_each_answer_is_learned_once(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Copied context is in the row and has no loss, counted token by token; aborted calls and
    sub-agents are out."""
    traces = branched()
    aborted, side = trace("x", "q", "half", aborted=True), trace("y", "q", "sub", sidechain=True)
    made = rows([*traces, aborted, side], "sft")
    assert [message.get("weight") for message in made[1]["messages"]] == [None, 0, None, None]
    end = tiny_tokenizer.token_text(tiny_tokenizer.eos_token_id)
    assert learned(tmp_path / "a.jsonl", made, tiny_tokenizer, "sft") == [
        [f"first{end}", f"left{end}"],
        [f"right{end}"],
    ]
    assert len(rows([side, *traces], "sft", sidechains=True)) == 3


def test_calls_and_tools_are_rendered_as_the_server_renders_them(tmp_path: Path) -> None:
    tokens = dict.fromkeys(("<think>", "</think>", "<tool_call>", "</tool_call>"), False)
    tokenizer = tokenizer_with(tmp_path / "hermes", tokens, chat_template=HERMES_TEMPLATE)
    messages = [
        user("q"),
        assistant(None, tool_calls=[CALL]),
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        assistant("a"),
    ]
    [row] = rows([new_trace(messages, session_id="s", source="test", tools=TOOLS)], "sft")
    assert isinstance(row["tools"], str) and json.loads(row["tools"]) == TOOLS
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"q": [1, "ü"]}'
    [texts] = learned(tmp_path / "a.jsonl", [row], tokenizer, "sft", enable_thinking=False)
    # The server's rendering: content "", arguments as an object.
    call = CALL | {"function": {"name": "look", "arguments": {"q": [1, "ü"]}}}
    served = [messages[0], assistant("", tool_calls=[call])]
    plain = {"tools": TOOLS, "template_kwargs": {"enable_thinking": False}}
    before = tokenizer.render_chat_text(served[:1], **plain)
    after = tokenizer.render_chat_text(served, add_generation_prompt=False, **plain)
    assert texts[0] == after.removeprefix(before).rstrip("\n")
    config = DataConfig(path=str(tmp_path / "a.jsonl"), eval_fraction=0)
    examples = read_examples(config, "sft")[0]
    [unit] = encode_all(examples, tokenizer, config, {"enable_thinking": False}, form="segments")
    assert tokenizer.decode(
        [int(t) for t in unit.sequences[0].tokens], skip_special_tokens=False
    ).startswith(before)


def test_scores() -> None:
    """A person's newest label, else the newest feedback, else other labels, else the weighted
    rewards."""
    rewards = {"a": {"score": 1.0, "weight": 3.0}, "b": {"score": 0.0, "weight": 1.0}}
    made = trace("s", "q", "a", rewards=rewards)
    assert score_of(made) == 0.75
    for label, score in (
        (Label(name="judge", value=0.2, by="judge:x", at=1.0), 0.2),
        (Label(name="feedback", label="good", by="user", at=2.0), 1.0),
        (Label(name="feedback", value=0.4, by="user", at=3.0), 0.4),
        (manual_label(False, "", at=4.0), 0.0),
        (manual_label(True, "", at=5.0), 1.0),
    ):
        made.add_label(label)
        assert score_of(made) == score
    assert score_of(trace("s", "q", "a")) is None


def test_kto_preference_grpo_and_prompts(tmp_path: Path, tiny_tokenizer: Any) -> None:
    traces = [
        trace("1", "q", "good", 1.0),
        trace("2", "q", "bad", 0.0),
        trace("3", "q", "middle", 0.5),
        trace("4", "q", "good", 0.9),  # an answer that is there already
        trace("5", "alone", "x", 1.0),
        trace("6", "unscored", "y"),
    ]
    kto = rows(traces, "kto")
    assert [row["label"] for row in kto] == [True, False, True, True]
    assert kto[0]["prompt"] == [user("q")]
    assert kto[0]["completion"] == [assistant("good")]
    end = tiny_tokenizer.token_text(tiny_tokenizer.eos_token_id)
    assert learned(tmp_path / "k.jsonl", kto, tiny_tokenizer, "kto")[1] == [f"bad{end}"]
    [pair] = rows(traces, "preference")
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("good", "bad")
    assert learned(tmp_path / "p.jsonl", [pair], tiny_tokenizer, "dpo") == [[f"good{end}"]]
    [group] = rows(traces, "grpo")
    assert sorted(
        zip((c[0]["content"] for c in group["completions"]), group["rewards"], strict=True)
    ) == [
        ("bad", 0.0),
        ("good", 0.9),
        ("middle", 0.5),
    ]
    assert [row["prompt"][0]["content"] for row in rows(traces, "prompts")] == [
        "q",
        "alone",
        "unscored",
    ]
    assert len(rows(traces, "atif")) == 6
    balanced = rows(traces, "kto", balance=1.0)
    assert sorted(row["label"] for row in balanced) == [False, True]
    with pytest.raises(TraceError, match="closer than 2"):
        rows(traces, "preference", least_gap=2.0)
    with pytest.raises(ConfigError, match="test_fraction"):
        rows(traces, "kto", test_fraction=1.0)


def test_the_split_is_by_session_and_opening() -> None:
    """Traces of one session, and of one opening, are on one side; the share is about what was
    asked for."""
    traces = [
        trace(f"{n}-{k}", f"question {n}", f"answer {k}", 1.0) for n in range(300) for k in range(3)
    ]
    dataset = build_dataset(traces, DatasetOptions("kto", test_fraction=0.2, near_duplicates=1.0))
    train, test = (
        {row["prompt"][0]["content"] for row in side} for side in (dataset.train, dataset.test)
    )
    assert not train & test and len(train | test) == 300
    assert 40 <= len(test) <= 80
    one = new_trace([user("a"), assistant("b")], session_id="s", source="t")
    for fraction in (0.1, 0.5, 0.9):  # after a compaction the same session begins differently
        later = trace("s", f"summary {fraction}", "c")
        both = build_dataset([one, later], DatasetOptions("sft", test_fraction=fraction))
        assert {len(both.train), len(both.test)} == {0, 2}


def test_rows_whose_prompt_another_data_set_holds_out_are_not_trained_on() -> None:
    first, second = (user(text) for text in ("first", "second"))
    answer = assistant("b")
    traces = [
        new_trace([prompt, answer], session_id=f"{n}", source="test")
        for n, prompt in enumerate((first, second))
    ]
    for kind in ("sft", "prompts"):
        rows = build_dataset(traces, DatasetOptions(kind, test_fraction=0.0))
        assert {prompt_key(row) for row in rows.train} == set(map(prompt_key, traces))
        kept = without_prompts(rows, [{"prompt": [first]}])
        assert [prompt_key(row) for row in kept.train] == [prompt_key(traces[1])]
        assert kept.left_out["its prompt, or one like it, is held out"] == 1
    words = [f"word{number}" for number in range(300)]
    near = [trace("1", " ".join(words), "b"), trace("2", " ".join(words[::-1]), "b")]
    held_out = [{"prompt": [user(" ".join([*words[:-1], "other"]))]}]
    left = without_prompts(build_dataset(near, DatasetOptions("sft", test_fraction=0.0)), held_out)
    assert [row["messages"][0]["content"] for row in left.train] == [" ".join(words[::-1])]
    exact = build_dataset(near, DatasetOptions("sft", test_fraction=0.0, near_duplicates=1.0))
    assert len(without_prompts(exact, held_out).train) == 2


def test_rows_in_the_order_of_their_pass_rates() -> None:
    """Of each prompt's scored traces the share that is good; nobody scored the last."""
    scores = {
        "even": (1.0, 0.0, 0.2, 0.9),
        "easy": (0.5, 1.0),
        "hard": (0.0, 0.1, 1.0),
        "open": (None,),
    }
    traces = [
        trace(f"{question}{number}", question, f"answer {number}", score)
        for question, found in scores.items()
        for number, score in enumerate(found)
    ]
    for order, wanted in (
        ("recorded", ["even", "easy", "hard", "open"]),
        ("easy_first", ["easy", "even", "hard", "open"]),
        ("hard_first", ["hard", "even", "easy", "open"]),
    ):
        prompts = rows(traces, "prompts", order=order)
        assert [row["prompt"][0]["content"] for row in prompts] == wanted
        rates = {row["prompt"][0]["content"]: row.get("pass_rate") for row in prompts}
        assert rates == {"even": 0.5, "easy": 1.0, "hard": pytest.approx(1 / 3), "open": None}
        answers = [row["prompt"][0]["content"] for row in rows(traces, "kto", order=order)]
        assert list(dict.fromkeys(answers)) == wanted[:3]
        assert {row["pass_rate"] for row in rows(traces, "grpo", order=order)} == set(
            rates.values()
        ) - {None}
    with pytest.raises(ConfigError, match="order = 'best'"):
        rows(traces, "prompts", order="best")


def test_near_duplicates_go() -> None:
    words = [f"word{number}" for number in range(300)]
    same = trace("1", " ".join(words), "answer")
    near = trace("2", " ".join([*words[:-1], "other"]), "answer")
    far = trace("3", " ".join(reversed(words)), "answer")
    assert len(rows([same, near, far, same], "sft")) == 2
    assert len(rows([same, near, far, same], "sft", near_duplicates=1.0)) == 3


def test_the_command_writes_a_card_and_refuses_to_push_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "traces.jsonl"
    secret = "ghp_" + "a1B2" * 9
    lines = [
        trace("1", "q", f"key {secret}", license="mit"),
        trace("2", "r", "fine", license="mit"),
    ]
    source.write_text("".join(json.dumps(each.to_json()) + "\n" for each in lines))
    build = ["traces", "build", str(source), "--kind", "sft", "--test-fraction", "0", "--to"]
    assert main([*build, str(tmp_path / "clean")]) == 0
    card = json.loads((tmp_path / "clean" / "dataset.json").read_text())
    assert (card["license"], card["sources"], card["rows"]) == (
        "mit",
        {"test": 2},
        {"train": 2, "test": 0},
    )
    assert secret not in (tmp_path / "clean" / "train.jsonl").read_text()
    assert main(["traces", "scan", str(tmp_path / "clean" / "train.jsonl")]) == 0
    assert main([*build, str(tmp_path / "raw"), "--no-redact", "--push", "me/data"]) == 2
    assert "not pushed: secrets still stand in" in capsys.readouterr().err
    assert main(["traces", "scan", str(tmp_path / "raw" / "train.jsonl")]) == 1
    assert main([*build[:2], str(source), "--kind", "kto", "--to", str(tmp_path / "none")]) == 2
    assert "no label and no reward" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    again = write_dataset(
        build_dataset(lines, DatasetOptions("sft", test_fraction=0.0)), tmp_path / "clean"
    )
    assert again["rows"] == {"train": 2, "test": 0}
