"""--dry-run: what it says of environments that are broken, of groups that teach nothing, and
what it predicts."""

import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from rich.console import Console

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.config.load import Config, load_config, parse_config
from mlx_parallm.daemon import training_run
from mlx_parallm.environments.kinds.tasks import TasksSource
from mlx_parallm.environments.registry import ENVIRONMENTS, class_of
from mlx_parallm.environments.runner import GroupPlan, GroupResult
from mlx_parallm.errors import ConfigError, EnvironmentFailedError
from mlx_parallm.models import loading
from mlx_parallm.models.loading import load_tokenizer, read_config, resolve_model_path
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training import dry_run
from mlx_parallm.rl_training.dry_run import (
    OTHER_FILES,
    DryRun,
    Forecast,
    Probe,
    ProbeDone,
    at_most,
    float32_note,
    has_several_turns,
    longest_to_expect,
    probe_config,
    remarks,
    shortcomings,
    show_forecast,
    show_group,
    show_memory,
    visible,
)
from mlx_parallm.rl_training.plan import memory_watch
from mlx_parallm.rl_training.plan.preflight import MemoryEstimate, PlannedRun, in_words
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.system.device import traits
from mlx_parallm.system.hardware import GIB
from mlx_parallm.system.terminal import duration
from mlx_parallm.types import Rollout, RolloutGroup, Trajectory, Turn
from tests.rl_training.plan.test_preflight import QWEN3_06B
from tests.rl_training.rollouts import make_rollout
from tests.tokenizer_families import make_tokenizer

KEY = "environments.0"


def group(*rollouts: tuple[float, str]) -> GroupResult:
    config = EnvironmentConfig(kind="tasks", name="sum", max_tokens=7)
    plan = GroupPlan("g", TasksSource(config, seed=0), 0, len(rollouts), seed=0)
    made = tuple(
        Rollout(
            (5, 6, 2), (0, 1, 1), (0.0, -1.0, -1.0), (0, 0, 0), 1.0, {"reward": reward}, stop_reason
        )
        for reward, stop_reason in rollouts
    )
    return GroupResult(
        plan, RolloutGroup("g", "sum", made), tuple(Trajectory("x", rollout) for rollout in made)
    )


@pytest.mark.parametrize(
    ("rollouts", "words"),
    [
        ([(0.0, "stop"), (1.0, "stop")], []),
        ([(0.5, "stop"), (0.5, "stop")], ["every completion of this group scores 0.5"]),
        ([(0.0, "length"), (1.0, "length")], ["no completion ended by itself", "max_tokens = 7"]),
        (
            [(0.0, "length"), (1.0, "stop")],
            ["1 of 2 completions were cut off", "raise environments.0.max_tokens"],
        ),
        ([(0.0, "length"), *[(1.0, "stop")] * 9], []),
    ],
)
def test_remarks_on_a_group(rollouts: list[tuple[float, str]], words: list[str]) -> None:
    found = remarks(group(*rollouts), KEY)
    assert len(found) == bool(words)
    assert all(word in found[0] for word in words)


@pytest.mark.parametrize(
    ("rewards", "weights", "words"),
    [
        (
            ("builtin:code", "builtin:length"),
            (),
            "builtin:code counts 2 in the reward, the others 1: environments.0",
        ),
        (("builtin:code", "builtin:length"), (1.0, 1.0), None),
        (("builtin:code",), (), None),
        (("builtin:format", "builtin:length"), (), None),
    ],
)
def test_a_part_that_counts_more_than_others_by_default_is_told(
    rewards: tuple[str, ...], weights: tuple[float, ...], words: str | None
) -> None:
    made = group((0.0, "stop"), (1.0, "stop"))
    config = made.plan.source.config.model_copy(
        update={"rewards": rewards, "reward_weights": weights}
    )
    source = TasksSource(config, seed=0)
    found = remarks(replace(made, plan=replace(made.plan, source=source)), KEY)
    assert [text.startswith(words) for text in found] == [True] if words else found == []


def test_at_80_columns_a_completion_has_half_of_the_width(tokenizer: Tokenizer) -> None:
    """Its column was one letter wide beside a reward of three parts."""
    made = group((0.7, "stop"))
    scores = {"rewards/correct": 1.0, "rewards/near": 1.0, "rewards/used_tool": 0.0, "reward": 0.7}
    answer = replace(made.trajectories[0], text="x" * 40)
    shown = replace(answer, rollout=replace(answer.rollout, scores=scores))
    out = io.StringIO()
    Console(file=out, width=80).print(
        show_group(replace(made, trajectories=(shown,)), (5,), tokenizer)
    )
    assert "x" * 40 in out.getvalue() and "correct 1 · near 1 · used_tool 0" in out.getvalue()


def test_all_turns_of_a_group_are_shown_and_the_limit_that_ended_them_is_named(
    tokenizer: Tokenizer,
) -> None:
    made = group((0.0, "length"), (1.0, "length"))
    turns = (Turn("Hi", "Ho"), Turn("And?", "No"))
    talks = tuple(
        replace(each, text="No", history=turns, out_of_room=True) for each in made.trajectories
    )
    out = io.StringIO()
    Console(file=out, width=100).print(
        show_group(replace(made, trajectories=talks), (5,), tokenizer)
    )
    assert all(words in out.getvalue() for words in ("Ho", "⟦And?⟧", "No"))
    [found] = remarks(replace(made, trajectories=talks), KEY)
    assert found.startswith(
        "2 of 2 completions were cut off: raise rl_training.atropos.max_token_length"
    )


def test_episodes_that_their_environment_does_not_end_are_not_the_models_fault() -> None:
    """ "the model does not sample its end token within max_tokens" was said of them."""
    made = group((0.0, "length"), (1.0, "length"))
    made = replace(
        made, group=replace(made.group, metadata={"never_done": 2, "never_done_turns": 14})
    )
    [found] = remarks(made, KEY)
    assert found.startswith(
        "no episode was ended by the environment, all 2 were cut off after 7 turns: each answer was"
        " a call of a tool, or play() asked again"
    )


@pytest.fixture
def tokenizer() -> Tokenizer:
    config = parse_config({}).model
    return load_tokenizer(resolve_model_path(config.base_path), config)


def test_special_tokens_stand_out(tokenizer: Tokenizer) -> None:
    text = visible(tokenizer, tokenizer.render_chat([{"role": "user", "content": "two\nlines"}]))
    marked = [
        text.plain[span.start : span.end] for span in text.spans if "magenta" in str(span.style)
    ]
    assert "<|im_start|>" in marked and "<|im_end|>" in marked
    assert "two⏎\nlines" in text.plain and not any("two" in part for part in marked)


def test_stretches_between_special_tokens_keep_their_spaces(tmp_path: Path) -> None:
    """A SentencePiece text loses the space at its beginning, which a stretch behind a special
    token is not."""
    tokenizer = make_tokenizer(tmp_path, "mistral")
    ids = tokenizer.render_chat([{"role": "user", "content": " world"}])
    assert visible(tokenizer, ids).plain == tokenizer.decode(
        ids, skip_special_tokens=False
    ).replace("\n", "⏎\n")


def steps(seconds: list[float], **line: Any) -> Probe:
    clock: Iterator[float] = iter(seconds)
    probe = Probe(clock=lambda: next(clock))
    with pytest.raises(ProbeDone):
        for _ in seconds:
            probe.after_step({"gave_up": None, **line})
    return probe


def test_a_probe_measures_from_the_end_of_the_first_step() -> None:
    probe = steps([100.0, 107.0, 115.0])
    assert probe.seconds == 7.5
    quick = steps([float(number) / 2 for number in range(40)])
    assert len(quick.times) == 17 and quick.seconds == 0.5, "quick steps are measured for 8 s"
    assert steps([3.0], gave_up="no group with different rewards").seconds is None
    with pytest.raises(ProbeDone):
        probe.after_step({"gave_up": "no group with different rewards"})
    assert probe.seconds == 7.5, "those before a step that could not be filled count"


def test_forecast_adds_up_and_says_what_is_missing() -> None:
    forecast = Forecast(
        memory_seen=6 * GIB,
        memory_most=9 * GIB,
        memory_present=8 * GIB,
        steps=100,
        checkpoint=GIB,
        checkpoints=3,
        disk_present=2 * GIB,
        seconds=36.0,
        disk_step=1000,
    )
    assert forecast.duration_s == 3600 and forecast.disk == 3 * GIB + 100_000 + OTHER_FILES
    pruned = replace(forecast, rollouts_most=40_000)
    assert pruned.disk == 3 * GIB + 40_000 + OTHER_FILES
    config = parse_config({})
    shape = PlannedRun.of(config, read_config(resolve_model_path("builtin:tiny"))).shape
    memory, disk = shortcomings(forecast, PlannedRun(config, shape, Lengths(512, 512)))
    assert "may need 9.00 GiB" in memory and "8.00 GiB are there; even " in memory
    assert "keep_checkpoints" in disk


def test_the_probe_has_a_place_of_its_own(tmp_path: Path) -> None:
    overrides = [
        f"rl_training.checkpoint_dir={tmp_path}/runs",
        f"model.lora_path={tmp_path}/runs/latest/adapters.safetensors",
    ]
    config = load_config("grpo_qwen3_lora", overrides)
    probe = probe_config(config, tmp_path / "scratch")
    assert probe.server.port == 0 and probe.rl_training.atropos.api_url == "embedded"
    assert (
        probe.rl_training.checkpoint_dir == tmp_path / "scratch"
        and probe.rl_training.resume is None
    )
    assert probe.model.lora_path is None, "one that training would make does not exist yet"


# ---------------------------------------------------------------------- whole dry runs, in this
# process


def own_data(directory: Path, score: str) -> Config:
    (directory / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "Sort: {a}cb", "n": 1}}\n' for a in "defghijklm")
    )
    (directory / "score.py").write_text(score)
    (directory / "own.toml").write_text(
        """
        [server]
        port = 0
        [rl_training]
        batch_size = 16
        [rl_training.atropos]
        rollout_batch_size = 16
        max_token_length = 64
        [[environments]]
        kind = "dataset"
        data = "rows.jsonl"
        rewards = ["python:score.py:score"]
        max_tokens = 6
        """
    )
    return load_config(directory / "own.toml", [f"rl_training.checkpoint_dir={directory}/runs"])


def dry(config: Config, scratch: Path) -> str:
    """What a dry run prints."""
    out = io.StringIO()
    scratch.mkdir()
    run = DryRun(
        config,
        training_run,
        scratch=scratch,
        stop=threading.Event(),
        console=Console(file=out, width=150),
    )
    try:
        run.execute()
    finally:
        run.close()
    return out.getvalue()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('n')", "KeyError"),
        ("return [1.0]", "1 scores for 8"),
    ],
)
def test_a_broken_reward_function_is_one_line(tmp_path: Path, body: str, words: str) -> None:
    config = own_data(tmp_path, f"def score(completions, **columns):\n    {body}\n")
    with pytest.raises(EnvironmentFailedError) as caught:
        dry(config, tmp_path / "scratch")
    assert words in str(caught.value) and "environments.0 (rows)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_equal_scores_and_no_end_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "PROBE_S", 0.0)
    config = own_data(
        tmp_path, "def score(completions, **columns):\n    return [0.25] * len(completions)\n"
    )
    cut = config.environments[0].model_copy(update={"max_tokens": 1})
    text = dry(config.model_copy(update={"environments": (cut,)}), tmp_path / "scratch")
    assert "every completion of this group scores 0.25" in text
    assert "no completion ended by itself" in text and "truncated" in text
    assert "a step could not be filled" in text and "not known: no step was measured" in text


def test_checkpoints_of_rows_are_counted_by_the_passes_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "PROBE_S", 0.0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say yes.", "completion": "yes"}\n' * 4)
    overrides = [
        *(
            "model.base_path=builtin:tiny",
            f"data.path={tmp_path}/rows.jsonl",
            "data.eval_fraction=0.0",
        ),
        *(
            "rl_training.algorithm=sft",
            "rl_training.batch_size=2",
            "rl_training.checkpoint_interval=1",
        ),
        f"rl_training.checkpoint_dir={tmp_path}/runs",
    ]
    text = dry(load_config(None, overrides), tmp_path / "scratch")
    assert "to total_steps = 2" in text and "2 × checkpoint of" in text


def test_too_large_for_the_machine_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_watch, "memory_present", lambda: (2**20, 2**20))
    config = own_data(
        tmp_path, "def score(completions, **columns):\n    return [0.25] * len(completions)\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"1\.0 MiB .*no setting",
    ):
        dry(config, tmp_path / "scratch")


ONE_TURN = make_rollout((5, 6), prompt=(1, 2))
SEVERAL = replace(ONE_TURN, mask=(0, 1, 0, 1))


def test_several_turns_are_seen_in_what_was_sampled() -> None:
    assert not has_several_turns(ONE_TURN) and not has_several_turns(
        replace(ONE_TURN, mask=(0, 0, 0, 0))
    )
    assert has_several_turns(SEVERAL)
    assert has_several_turns(replace(ONE_TURN, earlier=(ONE_TURN,))), (
        "a template that rewrites earlier turns"
    )


def test_every_kind_says_whether_its_episodes_may_have_several_turns() -> None:
    """The probe's episodes may all have had one."""
    one_turn = {kind for kind in ENVIRONMENTS if not class_of(kind).several_turns}
    assert one_turn == {"dataset", "tasks", "reasoning_gym", "simple_text", "pictures"}


ROWS: dict[str, dict[str, Any]] = {"dataset": {"data": "x.jsonl", "rewards": ["python:x.py:f"]}}


@pytest.mark.parametrize(
    ("kind", "seen", "several", "completion"),
    [
        ("dataset", 20, False, 64),  # max_tokens of one turn
        ("dataset", 80, False, 80),  # more was seen
        ("dataset", 20, True, 472),  # several turns: all that max_token_length leaves
    ],
)
def test_the_longest_sequence_of_several_turns_fills_all_the_room(
    kind: str, seen: int, several: bool, completion: int
) -> None:
    """A run of several turns passed its "at most 349.2 MiB" with 397.0 MiB: one turn of
    max_tokens was expected."""
    entry = {"kind": kind, "name": "e", "max_tokens": 64} | ROWS[kind]
    config = Config.model_validate(
        {"environments": [entry], "rl_training": {"atropos": {"max_token_length": 512}}}
    )
    run = PlannedRun.of(config, QWEN3_06B)
    assert longest_to_expect(run, Lengths(40, seen), several_turns=several) == Lengths(
        40, completion
    )


def test_at_most_has_room_for_what_a_formula_does_not_know() -> None:
    seen, longest = MemoryEstimate({"a": GIB}), MemoryEstimate({"a": 2 * GIB})
    assert at_most(GIB, [seen, longest]) == round(2 * GIB * 1.15) + 64 * 2**20
    assert at_most(GIB, [longest, seen]) == round(GIB * 1.15) + 64 * 2**20, (
        "longer sequences never need less"
    )


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2834, "0.28 s"),
        (9.94, "9.9 s"),
        (55.1, "55 s"),
        (89.4, "89 s"),
        (150, "2 min"),
        (10_332, "2 h 52 min"),
    ],
)
def test_times_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_one_number_of_a_dry_run_is_called_at_most() -> None:
    config = parse_config({})
    shape = PlannedRun.of(config, read_config(resolve_model_path("builtin:tiny"))).shape
    forecast = Forecast(GIB, 2 * GIB, 3 * GIB, 10, 1, 1, GIB, seconds=5.5, measured_steps=3)
    console = Console(file=io.StringIO(), width=200)
    console.print(show_memory(PlannedRun(config, shape).memory, GIB, Lengths(1984, 64)))
    console.print(show_forecast(forecast, Path("runs"), Lengths(15, 64)))
    shown = console.file.getvalue()
    assert shown.count("at most") == 1
    assert (
        "at most 2.00 GiB, with sequences of 79 tokens" in shown
        and "55 s to total_steps = 10" in shown
    )
    assert "by formula, sequences of 2048 tokens" in " ".join(shown.split()), (
        "another number, for other lengths"
    )


@pytest.mark.parametrize(
    ("on_cpu", "settings", "words"),
    [
        (True, {}, 'model.dtype = "bfloat16"'),
        (True, {"dtype": "float32"}, 'model.dtype = "bfloat16"'),
        (True, {"dtype": "bfloat16"}, None),
        (False, {}, None),  # a GPU keeps the checkpoint's dtype
    ],
)
def test_weights_that_become_float32_are_named(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, settings: dict[str, str], words: str | None
) -> None:
    monkeypatch.setattr(traits, "is_cpu", lambda: on_cpu)
    narrow = QWEN3_06B | {"torch_dtype": "bfloat16"}
    shape = PlannedRun.of(parse_config({"model": settings}), narrow).shape
    note = float32_note(shape)
    assert note is None if words is None else words in str(note)
    own = PlannedRun.of(parse_config({"model": {"dtype": "bfloat16"}}), narrow).shape.weights
    if words:
        assert shape.weights == 2 * own and f"instead of {in_words(own)}" in str(note)
    else:
        assert shape.weights == own
    wide = PlannedRun.of(
        parse_config({"model": settings}), narrow | {"torch_dtype": "float32"}
    ).shape
    assert float32_note(wide) is None
    tiny = read_config(resolve_model_path("builtin:tiny")) | {"torch_dtype": "bfloat16"}
    assert float32_note(PlannedRun.of(parse_config({"model": settings}), tiny).shape) is None, (
        "a megabyte is not a word worth"
    )


def test_a_checkpoint_keeps_its_dtype_but_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_cpu, dtype in ((True, mx.float32), (False, None)):
        monkeypatch.setattr(traits, "is_cpu", lambda on_cpu=on_cpu: on_cpu)
        assert loading._dtype("auto") is dtype and loading._dtype("bfloat16") is mx.bfloat16
