"""The parts of a pipeline under the names of the original plan: each is used, not only imported."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.systems.pipeline import (
    BaseReward,
    CodeExecutionReward,
    DatasetPipeline,
    EfficiencyReward,
    ExecutionTrace,
    FormatComplianceReward,
    GRPODatasetBuilder,
    GRPOExample,
    KTODatasetBuilder,
    KTOExample,
    RewardEngine,
    RewardResult,
    RLTrainer,
    SyntaxValidationReward,
    TaskCompletionReward,
    ToolSuccessReward,
    TrainingConfig,
)
from mlx_parallm.systems.traces.reading import write_lines
from mlx_parallm.systems.traces.trace import Trace, new_trace

PARTS = {
    CodeExecutionReward: "code",
    SyntaxValidationReward: "syntax",
    ToolSuccessReward: "tool_success",
    TaskCompletionReward: "task_completion",
    EfficiencyReward: "efficiency",
    FormatComplianceReward: "format",
}


def trace(
    answer: str, question: str = "Write it.", score: float | None = None, number: int = 0
) -> Trace:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    made = new_trace(messages, session_id=f"{question}-{number}", source="test")
    if score is not None:
        made.note(rewards={"reward": {"score": score, "weight": 1.0}})
    return made


def test_each_reward_is_its_part() -> None:
    """Every class says what the engine says of its part, of a Trace and of an ExecutionTrace;
    the engine takes them."""
    good, bad = trace("```python\nprint(1)\n```"), trace("```python\nprint(\n```\n<b>x</b>")
    engine = RewardEngine([part() for part in PARTS])
    for part, name in PARTS.items():
        for each in (good, bad, ExecutionTrace(bad)):
            result = part().compute(each)
            assert result == RewardResult(
                name, engine.compute_all(each)[name], engine.weights[name]
            )
    assert (
        CodeExecutionReward().compute(good).score == 1.0
        and CodeExecutionReward().compute(bad).score == 0.0
    )
    assert SyntaxValidationReward().compute(bad).score == 0.0
    assert FormatComplianceReward().compute(bad).score == pytest.approx(0.8)
    assert FormatComplianceReward(threshold=0.9).compute(bad).score == 0.0
    mixed = RewardEngine([FormatComplianceReward(threshold=0.9), "syntax"])
    assert mixed.compute_all(bad) == {"format": 0.0, "syntax": 0.0}
    with pytest.raises(ConfigError):
        FormatComplianceReward(nothing=1)


async def test_a_reward_of_ones_own_beside_the_built_in_ones_in_a_running_loop(
    tmp_path: Path,
) -> None:
    """As in a notebook, whose cells run in a loop."""

    class Short(BaseReward):
        weight = 3.0

        def compute(self, trace: ExecutionTrace) -> RewardResult | float | None:
            if trace.final_response == "?":
                return None
            return RewardResult(score=float(len(trace.final_response) < 5))

    class Odd(BaseReward):
        name = "odd"

        async def compute(self, trace: ExecutionTrace) -> float:  # type: ignore[override]
            await asyncio.sleep(0)
            return len(trace.final_response) % 2

    engine = RewardEngine([Short(), "format", Odd()], weights={"odd": 0.5})
    assert engine.compute_all(trace("abc")) == {"Short": 1.0, "format": 1.0, "odd": 1.0}
    assert engine.compute_combined(trace("abcdef")) == pytest.approx(1.0 / 4.5)
    assert RewardEngine([Short()]).compute_for_group(
        [trace("abc"), trace("?"), trace("abcdef")]
    ) == [1.0, None, -1.0]
    with pytest.raises(TypeError, match="abstract"):
        BaseReward()  # type: ignore[abstract]
    write_lines(traces(), tmp_path / "t.jsonl")
    found = DatasetPipeline(tmp_path / "t.jsonl", rewards=["builtin:format"])
    assert all(label.name == "reward" for each in found.traces for label in each.labels)


def traces() -> list[Trace]:
    return [
        trace(f"{'good' if good else 'bad'} {question}", f"Say {question}.", float(good), number)
        for number, question in enumerate("abcdefgh")
        for good in (True, False)
    ]


def test_rows_by_builder_and_from_files(tmp_path: Path) -> None:
    """The builders, the pipeline over files with a rule or a reward, and the rows as the
    examples' types say."""
    dataset = KTODatasetBuilder(test_fraction=0.0, near_duplicates=1.0).build_dataset(traces())
    wanted = KTOExample(
        prompt=[{"role": "user", "content": "Say a."}],
        completion=[{"role": "assistant", "content": "good a"}],
        label=True,
    )
    assert (
        wanted in dataset.train
        and sum(row["label"] for row in dataset.train) == 8 == len(dataset.train) / 2
    )
    builder = GRPODatasetBuilder(test_fraction=0.0, near_duplicates=1.0)
    [first, *_] = grouped = builder.build_dataset(map(ExecutionTrace, traces())).train
    assert len(grouped) == 8 and set(GRPOExample.__annotations__) <= set(first)
    builder.save(builder.build_dataset(traces()), tmp_path / "grpo")
    assert len((tmp_path / "grpo" / "train.jsonl").read_text().splitlines()) == 8

    write_lines(
        [trace(f"{word} {n}", f"Say {n}.", None, n) for n in range(8) for word in ("good", "bad")],
        tmp_path / "t.jsonl",
    )
    (tmp_path / "score.py").write_text(
        "def good(completions): return [float('good' in c[0]['content']) for c in completions]"
    )
    (tmp_path / "rule.py").write_text("def good(trace): return 'good' in trace.final_response")
    for labels in (
        {"rewards": [f"{tmp_path}/score.py:good"]},
        {"rules": [f"{tmp_path}/rule.py:good"]},
    ):
        found = DatasetPipeline(tmp_path / "t.jsonl", **labels)
        rows = found.build_kto_dataset(
            tmp_path / "kto", test_fraction=0.0, near_duplicates=1.0
        ).train
        assert {row["completion"][0]["content"].split()[0] for row in rows if row["label"]} == {
            "good"
        }
        assert len((tmp_path / "kto" / "train.jsonl").read_text().splitlines()) == len(rows) == 16
        assert len(found.build_grpo_dataset(test_fraction=0.0).train) == 8
        assert len(found.build("sft", test_fraction=0.0, near_duplicates=1.0).train) == 8


def test_the_rows_of_groups_train_without_rewards(tmp_path: Path) -> None:
    """The good answer of each group becomes likelier beside the bad one; a group of equal rewards
    and a completion without a score count nowhere."""
    builder = GRPODatasetBuilder(test_fraction=0.0, near_duplicates=1.0)
    rows = builder.build_dataset(traces()).train
    rows[0]["rewards"][0] = None
    rows.append({**rows[1], "rewards": [0.5, 0.5]})
    arguments = {"learning_rate": 1e-3, "num_train_epochs": 3}
    trainer = RLTrainer(TrainingConfig("builtin:tiny", lora={"r": 4}, arguments=arguments))
    result = trainer.train(rows)
    assert result.global_step == 3 and result.metrics["groups"] == 7
    assert result.metrics["groups_without_variance"] == 2
    trainer.save_model(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 4
    good, bad = (
        _likelihood(tmp_path / "adapter", rows[2]["prompt"], rows[2]["completions"][n])
        - _likelihood(None, rows[2]["prompt"], rows[2]["completions"][n])
        for n in ((0, 1) if rows[2]["rewards"][0] else (1, 0))
    )
    assert good > bad
    with pytest.raises(ConfigError, match="completions and rewards"):
        trainer.train([{"prompt": "x"}])
    for change, words in (
        ({"logprobs": [[-1.0], [-1.0]]}, "1 logprobs for"),
        ({"rewards": ["1", "0"]}, "expected numbers"),
        ({"rewards": [], "completions": []}, "expected a list of answers"),
        ({"prompt": None}, "prompt is None"),
        ({"completions": [3, "x"]}, "completions is 3"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer.train([{**rows[1], **change}])
    texts = {"completions": ["good", "bad"], "rewards": [1.0, 0.0]}  # beside a prompt of messages
    longer = {**rows[2], "completions": ["a " * 3000, "b"]}
    counts = trainer.train([{**rows[1], **texts}, longer]).metrics
    assert (counts["groups"], counts["groups_too_long"]) == (1, 1)


def _likelihood(adapter: Path | None, prompt: Any, completion: Any) -> float:
    lora = {} if adapter is None else {"adapter_path": str(adapter)}
    with InferenceModule("builtin:tiny", **lora) as model:
        [logprobs] = model.get_logprobs([prompt], [completion[0]["content"]])
    return float(sum(logprobs))


@pytest.mark.slow
def test_the_trainer_of_rows(tmp_path: Path) -> None:
    """KTO for one step on rows that the builder made; the adapter is where PEFT looks for it."""
    rows = KTODatasetBuilder(test_fraction=0.0, near_duplicates=1.0).build_dataset(traces()).train
    arguments = {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "report_to": "none",
    }
    config = TrainingConfig(
        "builtin:tiny", "kto", tmp_path / "run", lora={"r": 2}, arguments=arguments
    )
    trainer = RLTrainer(config)
    assert trainer.train(rows).global_step == 1
    trainer.save_model(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["r"] == 2


def test_the_trainer_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="grpo, kto, dpo, sft"):
        RLTrainer(TrainingConfig("builtin:tiny", "ppo"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="scored groups"):
        RLTrainer(TrainingConfig("builtin:tiny", arguments={"beta": 1})).train([])
    with pytest.raises(ConfigError, match="rewards are for"):
        RLTrainer(TrainingConfig("builtin:tiny", "kto"), ["builtin:length"])
    with pytest.raises(RuntimeError, match=r"train\(rows\)"):
        RLTrainer(TrainingConfig("builtin:tiny", "kto")).save_model(tmp_path)
