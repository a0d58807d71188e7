"""First, best and worst completion of a step."""

import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.rl_training.events import RunInfo
from mlx_parallm.rl_training.monitor.display import TrainingDisplay
from mlx_parallm.rl_training.monitor.readable import (
    SHOWN_CHARACTERS,
    samples_table,
    shortened,
    without_template,
)
from mlx_parallm.run_files import samples as samples_module
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.run_files.samples import (
    LONGEST_TEXT,
    SAMPLES_PAGE,
    SampleLog,
    choose_samples,
    merged,
)
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import RolloutGroup
from tests.environments.templates import QWEN3
from tests.rl_training.rollouts import make_group, make_rollout


def letters(parts: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(chr(97 + token) for token in part) for part in parts]


def group(name: str, rewards: list[float]) -> RolloutGroup:
    """Rollout i of the prompt "abc" answers with its own number as a letter, twice."""
    rollouts = [
        make_rollout((i, i), prompt=(0, 1, 2), reward=reward) for i, reward in enumerate(rewards)
    ]
    return RolloutGroup(name, "test", tuple(rollouts))


def test_the_three_that_are_chosen() -> None:
    found = choose_samples(7, [group("a", [0.5, 0.2]), group("b", [0.1, 0.4, 0.9])], letters)
    assert [(s.which, s.group_id, s.reward, s.completion) for s in found] == [
        ("first", "a", 0.5, "aa"),
        ("best", "b", 0.9, "cc"),
        ("worst", "b", 0.1, "aa"),
    ]
    assert {(s.prompt, s.step, s.tokens, s.environment) for s in found} == {("abc", 7, 2, "test")}
    assert choose_samples(7, [], letters) == []


def test_what_the_environment_said_is_marked() -> None:
    rollout = make_rollout((3, 4, 5, 6, 7), prompt=(0, 1, 2))
    turns = dataclasses.replace(rollout, mask=(0, 0, 0, 1, 1, 0, 0, 1))
    [sample, *_] = choose_samples(7, [RolloutGroup("g", "test", (turns,))], letters)
    assert (sample.completion, sample.turns) == ("de⟦fg⟧h", 2)
    assert "3 tokens in 2 turns, ended by ?" in sample.shown().notes


def test_what_a_reward_has_noted_is_shown(tmp_path: Path) -> None:
    judged = group("g", [0.5])
    note = {"score": 0.5, "reason": "short, but <polite>"}
    rollout = dataclasses.replace(judged.rollouts[0], extra={"judge": note, "long": "x" * 9999})
    log = SampleLog(tmp_path / "samples.jsonl", letters, every=1)
    [sample, *_] = log.write(1, [dataclasses.replace(judged, rollouts=(rollout,))])
    assert sample.extra["judge"] == note
    page = (tmp_path / SAMPLES_PAGE).read_text()
    assert "short, but &lt;polite&gt;" in page and "x" * 500 not in page


def test_every_n_steps_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path, letters, every=2)
    written = [log.write(step, [make_group("g", [0.0, 1.0])]) for step in range(1, 7)]
    assert [len(samples) for samples in written] == [0, 3, 0, 3, 0, 3]
    assert [line["which"] for line in MetricsFile(path).read()][:3] == ["first", "best", "worst"]
    SampleLog(path, letters, every=2, step=3)
    assert [line["step"] for line in MetricsFile(path).read()] == [2, 2, 2], (
        "later ones than the resumed step go"
    )
    SampleLog(tmp_path / "none", letters, every=0).write(1, [make_group("g", [0.0, 1.0])])
    assert not (tmp_path / "none").exists()


def test_the_table_shows_the_end_of_a_long_prompt_and_the_beginning_of_a_long_completion() -> None:
    long = RolloutGroup(
        "g", "test", (make_rollout((1,) * 500, prompt=(0,) * 499 + (25,), reward=0.25),)
    )
    [sample, *_] = choose_samples(3, [long], letters)
    prompt, completion = shortened(sample)
    assert prompt == "…" + "a" * (SHOWN_CHARACTERS - 2) + "z"
    assert completion == "b" * (SHOWN_CHARACTERS - 1) + "…"
    paper = io.StringIO()
    Console(file=paper, width=100).print(samples_table([sample]))
    assert "samples of step 3" in paper.getvalue() and "0.25" in paper.getvalue()


def test_the_table_is_printed_above_the_live_display() -> None:
    console = Console(
        file=io.StringIO(), force_terminal=True, width=100, height=40, color_system=None
    )
    display = TrainingDisplay(console)
    display.start(RunInfo("run", "builtin:tiny", "http://127.0.0.1:1", 10, "hello"))
    display.samples(2, choose_samples(2, [group("a", [0.5, 0.2])], letters))
    display.stop()
    written = console.file.getvalue()  # type: ignore[attr-defined]
    assert 0 < written.index("samples of step 2") < written.rindex("talk to it while it learns")


def test_without_a_terminal_it_is_a_line_each() -> None:
    configure_logging(level="info")
    with capture_logs() as logs:
        TrainingDisplay(Console(file=io.StringIO())).samples(
            2, choose_samples(2, [group("a", [0.5, 0.2])], letters)
        )
    assert [(entry["event"], entry["which"], entry["reward"]) for entry in logs] == [
        ("sample", "first, best", 0.5),
        ("sample", "worst", 0.2),
    ]


def page_of(directory: Path) -> str:
    return (directory / SAMPLES_PAGE).read_text(encoding="utf-8")


def test_the_page_shows_the_newest_step_first_and_a_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "STEPS_ON_PAGE", 5)
    log = SampleLog(tmp_path / "samples.jsonl", letters, every=1)
    for step in range(1, 8):
        log.write(step, [group(f"g{step}", [0.5, 0.2])])
    page = page_of(tmp_path)
    assert (
        page.index("<h2>step 7</h2>")
        < page.index("<h2>step 6</h2>")
        < page.index("<h2>step 3</h2>")
    )
    assert "<h2>step 2</h2>" not in page
    assert page.count("<article>") == 3 * 5
    assert "version 0" in page and "2 tokens, ended by ?" in page
    SampleLog(tmp_path / "samples.jsonl", letters, every=1, step=4).write(
        5, [group("again", [0.5, 0.2])]
    )
    page = page_of(tmp_path)
    assert page.count("<h2>") == 5, (
        "a resume shows what was before it, and nothing of the steps that were left"
    )
    assert list(tmp_path.glob("*.tmp-*")) == []


def test_nothing_that_a_model_writes_is_markup_on_the_page(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'&amp;" + "x" * LONGEST_TEXT
    usual = make_rollout((1, 1), prompt=(0,))
    rollouts = [
        dataclasses.replace(usual, scores={"reward": reward, "<b>": 0.25}) for reward in (0.5, 0.75)
    ]
    groups = [RolloutGroup("<i>", "<u>", tuple(rollouts))]
    SampleLog(tmp_path / "samples.jsonl", lambda parts: [evil] * len(parts), every=1).write(
        1, groups
    )
    page = page_of(tmp_path)
    for tag in ("<script", "<i>", "<u>", "<b>0.25", "<b> 0"):
        assert tag not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;amp;" in page
    assert "&lt;b&gt; 0.25" in page, "a part of the reward"
    assert f"… ({len(evil):,} characters)" in page
    assert len(page) < 10 * LONGEST_TEXT


def test_lines_of_an_earlier_version_are_still_shown(tmp_path: Path) -> None:
    line = choose_samples(1, [group("a", [0.5, 0.2])], letters)[0].to_json()
    old = {key: value for key, value in line.items() if key not in ("version", "scores")}
    MetricsFile(tmp_path / "samples.jsonl").append(old)
    SampleLog(tmp_path / "samples.jsonl", letters, every=2, step=1).write(
        2, [group("b", [0.5, 0.2])]
    )
    assert "version ?" in page_of(tmp_path)


def test_the_best_and_the_worst_are_others_than_the_first_where_there_are_others() -> None:
    def chosen(rewards: list[float]) -> list[tuple[str, str]]:
        found = choose_samples(1, [group("a", rewards)], letters)
        return [(which, sample.completion) for which, sample in merged(found)]

    assert chosen([1.0, 0.0, 1.0]) == [("first", "aa"), ("best", "cc"), ("worst", "bb")]
    assert chosen([1.0, 0.0]) == [("first, best", "aa"), ("worst", "bb")], "one row for one answer"
    assert chosen([0.5]) == [("first, best, worst", "aa")]


GEMMA = """{%- for message in messages %}{% if message.role == 'system' %}{{ raise_exception('none') }}{% endif %}
{{- '<start_of_turn>' + message.role + '\\n' + message.content + '<end_of_turn>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>assistant\\n' }}{% endif %}"""


@pytest.mark.parametrize(
    ("template", "end"), [(None, "<|im_end|>"), (QWEN3, "<|im_end|>"), (GEMMA, "<end_of_turn>")]
)
def test_the_table_shows_messages_and_not_the_chat_template(template: str | None, end: str) -> None:
    """A prompt of one message was shown as "<|im_start|>user Sort: cab<|im_end|>
    <|im_start|>assistant"."""
    config = ModelConfig(base_path="builtin:tiny", chat_template=template)
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny"), config)
    readable = without_template(tokenizer, {})
    question = {"role": "user", "content": "Sort: cab"}
    talk = [
        question,
        {"role": "assistant", "content": "abc"},
        {"role": "user", "content": "Sort: fed"},
    ]
    assert readable(tokenizer.render_chat_text([question])) == "Sort: cab"
    assert (
        readable(tokenizer.render_chat_text(talk))
        == "user: Sort: cab assistant: abc user: Sort: fed"
    )
    assert readable("assistant: abc") == "assistant: abc", "what the policy writes itself stays"
    asked_again = tokenizer.render_chat_text(talk)[
        len(tokenizer.render_chat_text([question])) + len("abc") :
    ]
    assert readable(f"abc⟦{asked_again}⟧def<|im_end|>") == "abc⟦user: Sort: fed⟧def"
    if end == "<|im_end|>":  # sampled, and so before the mark
        assert (
            readable(f"abc{end}⟦{asked_again.removeprefix(end)}⟧def{end}")
            == "abc⟦user: Sort: fed⟧def"
        )


def test_a_system_message_is_told_apart() -> None:
    tokenizer = load_tokenizer(
        resolve_model_path("builtin:tiny"), ModelConfig(base_path="builtin:tiny")
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sum: 1+2"}]
    assert (
        without_template(tokenizer, {})(tokenizer.render_chat_text(messages))
        == "system: Be brief. user: Sum: 1+2"
    )


def test_without_a_chat_template_the_text_is_left_alone() -> None:
    tokenizer = load_tokenizer(
        resolve_model_path("builtin:tiny"), ModelConfig(base_path="builtin:tiny")
    )
    tokenizer.has_chat_template = False
    assert without_template(tokenizer, {})("assistant: a <|im_end|>") == "assistant: a <|im_end|>"


@pytest.mark.parametrize("text", ['rubbish\n{"step": 1}\n', '{"step": 1}\n', None])
def test_damaged_samples_are_set_aside(text: str | None, tmp_path: Path) -> None:
    """They ended a resume, after it had replaced config.toml."""
    path = tmp_path / "samples.jsonl"
    path.mkdir() if text is None else path.write_text(text)
    log = SampleLog(path, letters, every=1, step=4)
    log.write(5, [group("a", [0.5, 0.2])])
    assert {line["step"] for line in MetricsFile(path).read()} == {5}
    aside = tmp_path / "samples.damaged"
    assert aside.is_dir() if text is None else aside.read_text() == text
