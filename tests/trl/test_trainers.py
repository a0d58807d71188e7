"""The trainers on the tiny model: real runs of a few steps, their directories, callbacks
and answers."""

import _thread
import json
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx.nn as nn
import pytest

import mlx_parallm
from mlx_parallm import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GKDConfig,
    GKDTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    LoraConfig,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from mlx_parallm.cli.table import main
from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.errors import CheckpointError, ConfigError
from mlx_parallm.faces.trl.trainers import OF_A_RUN
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate, masked
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.models.scoring.reward_model import TrainedRewardModel
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.rl_training.run.running import END_S
from mlx_parallm.system.signals import EndLimit
from mlx_parallm.system.terminal import Console

MODEL = "builtin:tiny"
QUICK: dict[str, Any] = {
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "learning_rate": 1e-3,
}
PROMPTS = [{"prompt": [{"role": "user", "content": f"Reverse: {word}"}], "answer": word[::-1]} for word in
           ("abc", "dog", "cat", "xyz", "sun", "map", "red", "bit")]  # fmt: skip
SIDES = ("chosen", "rejected")
PAIRS = [
    {"prompt": f"Say {letter}", "chosen": letter, "rejected": f"z{letter}"} for letter in "abcdefgh"
]


def letters(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [
        float(len(set(c[0]["content"]) & set(a))) for c, a in zip(completions, answer, strict=True)
    ]


def sometimes(completions: list[Any], **columns: Any) -> list[float | None]:
    return [None if number % 2 else 1.0 for number, _ in enumerate(completions)]


class Heard:
    """A callback with most of the methods; it keeps what it heard."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.logs: list[dict[str, float]] = []
        self.evaluated: list[int] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append("begin")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append(f"step {state.global_step}")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any
    ) -> None:
        self.calls.append("log")
        self.logs.append(logs)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **kwargs: Any
    ) -> None:
        self.calls.append("evaluate")
        self.evaluated.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append("save")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls.append("end")


def grpo(directory: Path, **options: Any) -> GRPOTrainer:
    given = {
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 4,
        "logging_steps": 2,
    } | options
    parts = {
        name: given.pop(name) for name in ("callbacks", "loss", "eval_dataset") if name in given
    }
    rewards = given.pop("reward_funcs", [letters, sometimes])
    args = GRPOConfig(str(directory), **QUICK | given)
    return GRPOTrainer(
        MODEL, rewards, args, train_dataset=PROMPTS, peft_config=LoraConfig(r=4), **parts
    )


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (directory / "metrics.jsonl").read_text().splitlines()]


def evaluated(directory: Path) -> list[dict[str, Any]]:
    """The problems of the newest evaluation."""
    newest = (directory / "evaluations.jsonl").read_text().splitlines()[-1]
    return list(json.loads(newest)["environments"]["eval_dataset"]["problems"])


def test_the_package_imports_no_mlx_until_a_name_is_asked_for() -> None:
    assert set(mlx_parallm.__all__) <= set(dir(mlx_parallm))
    with pytest.raises(AttributeError, match="GRPOTrainr"):
        mlx_parallm.GRPOTrainr  # noqa: B018


def of_another_run(run: Path) -> list[Path]:
    """Add what another judge has said and draws of other rows to a run, of which every file is one
    that overwrite_output_dir removes."""
    left = [path for path in run.iterdir() if path.name not in (".lock", "my_rewards.py")]
    assert [path.name for path in left if not any(map(path.match, OF_A_RUN))] == []
    more = [run / name for name in ("judgements.sqlite", "judgements.sqlite-wal", "draws.jsonl")]
    for path in more:
        path.touch()
    return more


@pytest.mark.slow
@pytest.mark.long
def test_grpo_trains_serves_evaluates_saves_and_goes_on(tmp_path: Path) -> None:
    heard, run = Heard(), tmp_path / "run"
    options: dict[str, Any] = {"reward_weights": [1.0, 0.5], "seed": 3}
    trainer = grpo(run, serve=True, port=0, callbacks=[heard], eval_dataset=PROMPTS[:2], **options)
    assert trainer.url is None
    before = trainer.evaluate()["eval_reward"]
    assert before >= 0 and not run.exists()
    output = trainer.train()
    # 2 of 8 prompts a step
    assert (output.global_step, trainer.state.max_steps, trainer.state.epoch) == (4, 4, 1.0)
    assert heard.calls == [
        *("evaluate", "begin", "step 1", "step 2", "log", "step 3", "step 4", "log", "save", "end"),
    ]
    answer = httpx.post(
        f"{trainer.url}/v1/chat/completions",
        json={"model": "default", "messages": PROMPTS[0]["prompt"], "max_tokens": 4},
    )
    assert answer.status_code == 200
    numbers = trainer.evaluate()
    assert numbers["eval_problems"] == 2 and numbers["eval_pass@1_low"] <= numbers["eval_pass@1"]
    rewards = [answer for problem in evaluated(run) for answer in problem["sampled"]]
    assert numbers["eval_pass@1"] == sum(reward >= 1 for reward in rewards) / 8
    assert numbers["eval_reward"] == pytest.approx(sum(rewards) / 8)
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text()
    names = {name.removesuffix("_low").removesuffix("_high") for name in numbers} - {"eval_pass@4"}
    assert [name for name in names if f"`{name}`" not in page] == []

    # two steps' means, by TRL's names, from the run's own lines
    first = trainer.state.log_history[0]
    two = lines(run)[:2]
    assert first["reward_std"] == pytest.approx(
        sum(line["reward_std_in_groups"] for line in two) / 2
    )
    assert first["num_tokens"] == sum(line["tokens"] for line in two)
    assert first["step"] == 2 and first["reward"] == pytest.approx(
        (two[0]["reward_mean"] + two[1]["reward_mean"]) / 2
    )
    parts = [line["rewards/letters/mean"] for line in two]
    assert first["rewards/letters/mean"] == pytest.approx(sum(parts) / 2)
    assert heard.logs[0]["grad_norm"] == pytest.approx(
        (two[0]["grad_norm"] + two[1]["grad_norm"]) / 2
    )

    trainer.save_model(tmp_path / "saved")
    peft = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    # AutoPeftModelForCausalLM loads the base by it
    assert (peft["r"], peft["base_model_name_or_path"]) == (4, MODEL)
    saved, own = load_adapter(tmp_path / "saved"), load_adapter(run / "final")
    assert all(
        mx.array_equal(saved.layers[name].a, pair.a).item() for name, pair in own.layers.items()
    )
    trainer.close()
    trainer.close()

    with pytest.raises(ConfigError, match="resume_from_checkpoint"):
        grpo(run, eval_dataset=PROMPTS[:2], **options).train()
    longer = grpo(run, max_steps=6, eval_dataset=PROMPTS[:2], **options)
    with longer:
        assert longer.train(resume_from_checkpoint=True).global_step == 6
    assert [line["step"] for line in lines(run)] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in longer.state.log_history] == [2, 4, 6]
    (run / "my_rewards.py").touch()
    planted = of_another_run(run)
    with grpo(run, max_steps=1, overwrite_output_dir=True) as again:
        assert again.train().global_step == 1
        with pytest.raises(ConfigError, match="another run is open in it"):
            grpo(run, max_steps=1, overwrite_output_dir=True).train()
    assert len(lines(run)) == 1 and (run / "my_rewards.py").exists()
    assert [path for path in planted if path.exists()] == []
    assert [path.name for path in run.glob("step_*")] == ["step_000001"]


def test_evaluations_come_after_their_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, run = Heard(), tmp_path / "run"
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 1,
        "disable_tqdm": None,
    }
    options |= {"load_best_model_at_end": True, "overrides": {"rl_training.deterministic": True}}
    with grpo(
        run, max_steps=4, logging_steps=1, callbacks=[heard], eval_dataset=PROMPTS[:2], **options
    ) as trainer:
        trainer.train()
        trainer.save_model(tmp_path / "saved")
        entries = len(trainer.state.log_history)
        assert trainer.evaluate() == {
            name: trainer.state.log_history[-1][name] for name in trainer.evaluate()
        }
        assert len(trainer.state.log_history) == entries, "of the same weights there is one entry"
        heard.calls, heard.evaluated = heard.calls[:-2], heard.evaluated[:-2]
    first_two = ["step 1", "log", "step 2", "log", "evaluate"]
    last_two = ["step 3", "log", "step 4", "log", "evaluate"]
    assert [call for call in heard.calls if call != "save"] == [
        "begin",
        *first_two,
        *last_two,
        "end",
    ]
    assert heard.evaluated == [2, 4]
    evaluated = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [(entry["step"], entry["epoch"]) for entry in evaluated] == [(2, 0.5), (4, 1.0)]
    written = [json.loads(text) for text in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [2, 4, 4, 4] and set(
        written[0]["environments"]
    ) == {"eval_dataset"}
    report = capsys.readouterr().err
    assert "after step 2 -> at the end" in report and "eval_dataset (mean reward):" in report
    saved, best = load_adapter(tmp_path / "saved"), load_adapter(run / "best")
    assert all(
        mx.array_equal(saved.layers[name].a, pair.a).item() for name, pair in best.layers.items()
    )

    monkeypatch.delattr(sys.modules["this_process"], "eval_dataset")  # as in another program
    assert (
        main(["eval", "--config", str(run / "config.toml"), "--lora-path", str(run / "final")]) == 2
    )
    assert "trainer.evaluate()" in capsys.readouterr().err


def test_rewards_are_trls_sum(tmp_path: Path) -> None:
    """Two functions with weights 1 and 0.5; the second scores every other completion, so its
    mean is 1."""
    with grpo(tmp_path / "run", max_steps=1, reward_weights=[1.0, 0.5]) as trainer:
        trainer.train()
        [line] = lines(tmp_path / "run")
    assert line["rewards/sometimes/mean"] == 1.0
    assert line["reward_mean"] == pytest.approx(line["rewards/letters/mean"] + 0.5 * 0.5)


@pytest.mark.slow
def test_a_callback_ends_the_training_and_one_that_fails_is_heard(tmp_path: Path) -> None:
    class Stop:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    class Save:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 1

    with grpo(tmp_path / "stopped", callbacks=[Stop, Save()]) as trainer:
        assert trainer.train().global_step == 2
    assert {path.name for path in (tmp_path / "stopped").glob("step_*")} == {
        "step_000001",
        "step_000002",
    }

    class Fails:
        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ValueError("no such table")

    with pytest.raises(ConfigError, match=r"Fails.on_log.*test_trainers.py"):
        grpo(tmp_path / "failed", callbacks=[Fails()], logging_steps=1).train()

    class Evaluates:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_evaluate = True  # nothing would read it

    with pytest.raises(ConfigError, match=r"Evaluates\.on_step_end: .*should_evaluate"):
        grpo(tmp_path / "evaluates", callbacks=[Evaluates()]).train()
    with pytest.raises(ConfigError, match=r"int .*methods"):
        grpo(tmp_path / "none", callbacks=[7])


@pytest.mark.usefixtures("heeded_interrupt")
def test_an_interrupt_saves_first(tmp_path: Path) -> None:
    class Interrupt:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                _thread.interrupt_main()

    trainer = grpo(tmp_path / "run", max_steps=400, callbacks=[Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    steps = len(lines(tmp_path / "run"))
    assert 2 <= steps < 400
    assert (tmp_path / "run" / "latest").resolve().name.startswith(f"step_{steps:06d}")


def test_an_epoch_has_the_rows_that_are_trained_on(tmp_path: Path) -> None:
    """Rows longer than max_length counted too: the others came more often than num_train_epochs."""
    rows = [{"text": "ab" * (40 if number % 2 else 2)} for number in range(8)]
    options: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "max_length": 20,
    }
    args = SFTConfig(str(tmp_path / "run"), **QUICK, **options, logging_steps=1, warmup_ratio=0.5)
    with SFTTrainer(MODEL, args, train_dataset=rows, eval_dataset=rows) as trainer:
        assert trainer.schedule.max_steps == 8  # as far as is known before they are tokenised
        assert trainer.train().global_step == 4
        assert (trainer.state.max_steps, trainer.state.epoch) == (4, 2.0)
        assert [entry["epoch"] for entry in trainer.state.log_history] == [0.5, 1.0, 1.5, 2.0]
    saved = load_config(tmp_path / "run" / "config.toml", saved=True)
    assert (saved.rl_training.total_steps, saved.rl_training.warmup_steps) == (4, 2)


def test_packed_rows_are_one_row_of_the_batch(tmp_path: Path) -> None:
    """TRL's packing: epochs, steps and the batch count packs."""
    rows = [{"text": "ab" * (1 + number % 3)} for number in range(12)]
    options: dict[str, Any] = {"num_train_epochs": 2, "per_device_train_batch_size": 2}
    args = SFTConfig(str(tmp_path / "run"), **QUICK, **options, packing=True, max_length=12)
    with SFTTrainer(MODEL, args, train_dataset=rows) as trainer:
        assert trainer.schedule.max_steps == 12  # as far as is known before they are tokenised
        assert trainer.config.data.pack_rows
        steps = trainer.train().global_step
        assert (steps, trainer.state.epoch) == (trainer.state.max_steps, 2.0)
        assert 2 <= steps <= 6
    with pytest.raises(ConfigError, match="max_length is the size of a pack"):
        SFTConfig(str(tmp_path), packing=True, max_length=None)
    with pytest.raises(ConfigError, match="packing_strategy"):
        SFTConfig(str(tmp_path), packing=True, packing_strategy="wrapped")


def test_the_program_outlives_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlx_parallm train` ends its process a minute after the last checkpoint; a program goes
    on."""
    limits: list[float] = []
    monkeypatch.setattr(EndLimit, "start", lambda limit, seconds, *rest: limits.append(seconds))
    args = SFTConfig(str(tmp_path / "run"), **QUICK, max_steps=2, per_device_train_batch_size=2)
    with SFTTrainer(
        MODEL, args, train_dataset=[{"text": f"{letter} is a letter"} for letter in "abcd"]
    ) as trainer:
        trainer.train()
        tokens = trainer.state.num_input_tokens_seen
        assert trainer.train(resume_from_checkpoint=True).global_step == 2
        assert trainer.state.num_input_tokens_seen == tokens  # counted once
    assert not limits
    args = args.model_copy(update={"output_dir": str(tmp_path / "daemon")})
    config = SFTTrainer(MODEL, args, train_dataset=[{"text": "a"}, {"text": "b"}]).config

    def run_and_end() -> None:
        run = training_run(
            config, http=False, resume=None, stop=threading.Event(), console=Console(quiet=True)
        )
        run.execute()
        run.close()

    in_mlx_thread(run_and_end)
    assert limits == [END_S + config.server.drain_timeout_s]


def test_the_weight_of_the_entropy_bonus_adapts(tmp_path: Path) -> None:
    """Each update is far below the target, so each adds entropy_coef_delta."""
    adaptive = {"use_adaptive_entropy": True, "entropy_target": 50.0, "entropy_coef_delta": 0.01}
    with grpo(tmp_path / "run", max_steps=2, logging_steps=1, entropy_coef=0.1, **adaptive) as run:
        run.train()
        logs = [log for log in run.state.log_history if "entropy" in log]
    assert [log["entropy_coef"] for log in logs] == pytest.approx([0.11, 0.12])
    assert "entropy_coefficient" not in logs[0]


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    def twice(inputs: LossInputs) -> LossOutputs:
        ratio = mx.exp(masked(inputs.logprobs - inputs.rollout_logprobs, inputs.mask))
        loss = aggregate(-2.0 * ratio * inputs.advantages, inputs)
        return LossOutputs(loss, {"twice": loss})

    with grpo(tmp_path / "run", max_steps=1, loss=twice) as trainer:
        trainer.train()
        assert trainer.state.log_history[-1]["twice"] == pytest.approx(
            trainer.state.log_history[-1]["loss"]
        )
    assert 'loss = "python:this_process:twice"' in (tmp_path / "run" / "config.toml").read_text()


def test_dpo_with_all_weights(tmp_path: Path) -> None:
    args = DPOConfig(
        str(tmp_path / "run"),
        **QUICK,
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
    )
    trainer = DPOTrainer(model=MODEL, args=args, train_dataset=PAIRS, eval_dataset=PAIRS[:4])
    before = trainer.evaluate()
    # log 2: the policy is the reference
    assert before["eval_loss"] == pytest.approx(0.6931472, abs=1e-5)
    with trainer:
        assert trainer.train().global_step == 4
        assert trainer.evaluate()["eval_loss"] < before["eval_loss"]
        trainer.save_model(tmp_path / "saved")
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["epoch"] for entry in entries] == [0.5, 1.0, 1.5, 2.0]
    assert entries[-1]["rewards/margins"] > entries[0]["rewards/margins"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        f.name for f in (tmp_path / "saved").iterdir()
    }
    assert not [
        *(tmp_path / "saved").glob("trainer_state*"),
        *(tmp_path / "saved").glob("SHA256SUMS"),
    ]


def test_sft_and_kto(tmp_path: Path) -> None:
    args = SFTConfig(
        str(tmp_path / "sft"),
        **QUICK,
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
    )
    rows = [{"body": f"{letter} is a letter"} for letter in "abcdefgh"]
    with SFTTrainer(
        MODEL,
        args,
        train_dataset=rows,
        eval_dataset=rows[:2],
        formatting_func=lambda row: row["body"] + ".",
    ) as trainer:
        trainer.train()
    with SFTTrainer(
        MODEL,
        args.model_copy(
            update={"output_dir": str(tmp_path / "uneven"), "max_steps": 3}
            | {"logging_steps": 2, "eval_strategy": "no"}
        ),
        train_dataset=[{"text": row["body"]} for row in rows],
    ) as uneven:
        found = uneven.train().training_loss
    three = [line["loss"] for line in lines(tmp_path / "uneven")]
    # not of two entries: of steps 1 and 2, and of 3
    assert found == pytest.approx(sum(three) / 3, rel=1e-6)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]
    labelled = [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": i % 2 == 0}
        for i, row in enumerate(PAIRS)
    ]
    with KTOTrainer(
        MODEL, KTOConfig(str(tmp_path / "kto"), **QUICK, max_steps=2), train_dataset=labelled
    ) as kto:
        assert kto.train().global_step == 2


@pytest.mark.parametrize("lora", [None, {"r": 4, "lora_alpha": 8}])
def test_what_a_reward_trainer_saves_is_a_reward_model(
    lora: dict[str, int] | None, tmp_path: Path
) -> None:
    pairs = [
        {"prompt": [{"role": "user", "content": f"Say {a}"}]}
        | {
            side: [{"role": "assistant", "content": text}]
            for side, text in (("chosen", a), ("rejected", "z" + a))
        }
        | {"margin": 0.1}
        for a in "abcdefgh"
    ]
    args = RewardConfig(
        str(tmp_path / "run"),
        **QUICK | {"learning_rate": 1e-3},
        max_steps=6,
        center_rewards_coefficient=0.01,
    )
    with RewardTrainer(
        MODEL, args, train_dataset=pairs, eval_dataset=pairs[:4], peft_config=lora
    ) as trainer:
        before = trainer.evaluate()
        assert before["eval_rewards/accuracies"] == 0.5
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < before["eval_loss"]
        trainer.save_model(tmp_path / "saved")
    scores = []
    for place in ("run", "saved"):
        model = TrainedRewardModel.load(tmp_path / place)
        chats = [[*pair["prompt"], *pair[side]] for pair in pairs for side in SIDES]
        scores.append(model.score([model.tokens(chat) for chat in chats]))
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    margins = [good - bad for good, bad in zip(scores[1][0::2], scores[1][1::2], strict=True)]
    assert sum(margin > 0 for margin in margins) >= 6


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after a few steps of SFT on the right answers: another model of its
    tokenizer."""
    place = tmp_path_factory.mktemp("teacher")
    rows = [
        {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["answer"]}]}
        for row in PROMPTS
    ]
    args = SFTConfig(str(place / "run"), **QUICK, max_steps=12)
    with SFTTrainer(MODEL, args, train_dataset=rows) as trainer:
        trainer.train()
        trainer.save_model(place / "model")
    return place / "model"


def test_distillation_brings_the_student_nearer(teacher: Path, tmp_path: Path) -> None:
    """No reward: what falls is the divergence from the teacher. With a reward function its score
    is measured, and eval_dataset is scored by it."""
    args = DistillationConfig(
        str(tmp_path / "run"), **QUICK, max_steps=12, max_completion_length=6, logging_steps=1
    )
    with DistillationTrainer(
        MODEL, teacher, args, train_dataset=PROMPTS, peft_config={"r": 8, "lora_alpha": 16}
    ) as trainer:
        trainer.train()
    kept = lines(tmp_path / "run")
    assert {line["teacher_share"] for line in kept} == {1.0}
    assert {line["sequences"] for line in kept} == {8}  # one a prompt
    first, last = (sum(line["distill_loss"] for line in part) for part in (kept[:3], kept[-3:]))
    assert last < 0.5 * first
    measured = DistillationTrainer(
        MODEL,
        teacher,
        DistillationConfig(str(tmp_path / "measured"), **QUICK, max_completion_length=6),
        reward_funcs=letters,
        train_dataset=PROMPTS,
        eval_dataset=PROMPTS[:2],
    )
    assert set(measured.evaluate()) >= {"eval_reward", "eval_pass@1"}


def test_gkd_trains_on_a_share_of_the_rows_own_completions(teacher: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [*row["prompt"], {"role": "assistant", "content": row["answer"]}]}
        for row in PROMPTS
    ]
    args = GKDConfig(str(tmp_path / "run"), **QUICK, max_steps=6, max_new_tokens=6, lmbda=0.5)
    with GKDTrainer(MODEL, teacher, args, train_dataset=rows) as trainer:
        trainer.train()
    shares = [line["given_sequences"] / line["sequences"] for line in lines(tmp_path / "run")]
    assert 0.2 < sum(shares) / len(shares) < 0.8
    assert all(line["distill_loss"] > 0 for line in lines(tmp_path / "run"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: DistillationTrainer(MODEL, train_dataset=PROMPTS), "teacher_model is missing"),
        (
            lambda: DistillationTrainer(MODEL, object(), train_dataset=PROMPTS),  # type: ignore[arg-type]
            "teacher_model is a object",
        ),
        (
            lambda: GKDTrainer(MODEL, MODEL, train_dataset=PROMPTS, eval_dataset=PROMPTS),
            "eval_dataset needs reward_funcs",
        ),
        (lambda: GKDTrainer(MODEL, MODEL, train_dataset=PROMPTS), "there is no completion"),
        (lambda: GKDTrainer(MODEL, formatting_func=str, train_dataset=PROMPTS), "formatting_func"),
        (lambda: GRPOTrainer(MODEL, train_dataset=PROMPTS), "reward_funcs is missing"),
        (
            lambda: GRPOTrainer(MODEL, "some/reward-model", train_dataset=PROMPTS),
            "reward models are not loaded",
        ),
        (lambda: GRPOTrainer(MODEL, letters), "train_dataset is missing"),
        (lambda: DPOTrainer(MODEL, train_dataset=PAIRS, rollout_func=letters), "rollout_func"),
        (lambda: GRPOTrainer(MODEL, letters, train_dataset=PROMPTS, tool=1), "no argument 'tool'"),
        (lambda: GRPOTrainer(object(), letters, train_dataset=PROMPTS), "model is a object"),  # type: ignore[arg-type]
        (
            lambda: DPOTrainer(MODEL, SFTConfig(), train_dataset=PAIRS),
            "args is a SFTConfig, not a DPOConfig",
        ),
        (lambda: DPOTrainer(MODEL, ref_model=MODEL, train_dataset=PAIRS), "ref_model"),
        (lambda: DPOTrainer(MODEL, processing_class=3, train_dataset=PAIRS), "not a tokenizer"),
        (lambda: SFTTrainer(MODEL, train_dataset=PAIRS).save_model("x"), "train first"),
        (lambda: SFTTrainer(MODEL, train_dataset=PAIRS).evaluate(), "no eval_dataset"),
    ],
)
def test_arguments_that_cannot_work(
    call: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, CheckpointError), match=words):
        call()
    assert list(tmp_path.iterdir()) == []


def test_what_scripts_ask_of_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """trainer.model is the module: before training as it will begin, in a callback and
    afterwards as it is; its names are the same, A is the same number, and B has left 0. Beside
    it what else transformers' Trainer has: each works, or says what to use. Looked at: model,
    processing_class, state, args, data sets, callback_handler, accelerator,
    is_world_process_zero, log and save_metrics; optimizer, dataloaders, predict, hub."""
    args = DPOConfig(
        str(tmp_path / "run"), **QUICK, max_steps=2, per_device_train_batch_size=4, logging_steps=1
    )
    heard = Heard()
    trainer = DPOTrainer(
        MODEL, args, train_dataset=PAIRS, peft_config=LoraConfig(r=4), callbacks=[heard]
    )
    before = dict(trainer.model.named_parameters())
    a, b = (next(name for name in before if name.endswith(end)) for end in ("lora_a", "lora_b"))
    assert isinstance(trainer.model, nn.Module) and not before[b].any().item()
    trained, total = trainer.model.get_nb_trainable_parameters()
    assert trained == sum(before[name].size for name in before if "lora_" in name) < total
    assert trainer.model.config.model_type == "qwen3"
    seen: list[float] = []

    class Watching:
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.append(mx.abs(trainer.model.get_parameter(b)).max().item())

    trainer.add_callback(Watching())
    with trainer:
        output = trainer.train()
        assert seen[0] > 0 and trainer.model.get_parameter(b).any().item()
    after = dict(trainer.model.named_parameters())
    assert after.keys() == before.keys() and not mx.array_equal(after[a], before[a])
    base = next(name for name in before if "lora_" not in name)
    assert mx.array_equal(after[base], before[base])
    logits = trainer.model(mx.array([[1, 5, 6]]))
    assert logits.shape == (1, 3, trainer.model.config.vocab_size)

    assert trainer.tokenizer.decode(trainer.processing_class("abc")["input_ids"]).endswith("abc")
    assert (trainer.train_dataset, trainer.eval_dataset, trainer.args, trainer.beta) == (
        PAIRS,
        None,
        args,
        0.1,
    )
    assert trainer.is_world_process_zero() and trainer.accelerator.is_main_process
    assert (
        trainer.accelerator.unwrap_model(trainer.model) is trainer.model
        and trainer.accelerator.num_processes == 1
    )
    assert trainer.callback_handler.callbacks[0] is heard and trainer.pop_callback(Heard) is heard
    assert (trainer.state.num_train_epochs, trainer.state.train_batch_size) == (3.0, 4)
    trainer.log({"mine": 1.0})
    assert trainer.state.log_history[-1] == {"mine": 1.0, "epoch": 1.0, "step": 2}
    trainer.log_metrics("train", output.metrics)
    assert "train_loss = " in capsys.readouterr().out
    trainer.save_metrics("train", output.metrics)
    trainer.save_state()
    assert json.loads((tmp_path / "run" / "all_results.json").read_text()) == output.metrics
    assert json.loads((tmp_path / "run" / "log_history.json").read_text())["global_step"] == 2
    for name, words in (
        *(
            ("optimizer", "learning_rate"),
            ("ref_model", "without the adapter"),
            ("get_train_dataloader", "padding"),
        ),
        *(
            ("predict", "evaluate"),
            ("push_to_hub", "merge --push-to-hub"),
            ("no_such_thing", "this one has not"),
        ),
    ):
        assert not hasattr(trainer, name)
        with pytest.raises(AttributeError, match=words):
            getattr(trainer, name)
    for name, words in (
        ("generate", "trainer.url"),
        ("save_pretrained", "save_model"),
        ("device", "one memory"),
    ):
        with pytest.raises(AttributeError, match=words):
            getattr(trainer.model, name)
    with pytest.raises(ConfigError, match="eval_dataset"):
        trainer.evaluate(PAIRS)


def test_which_rows_sft_learns_the_prompts_of(tmp_path: Path) -> None:
    turns = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    parts, text = {"prompt": "a", "completion": "b"}, {"text": "c"}
    for options, rows, learned in (
        ({}, [turns], False),
        ({"assistant_only_loss": True}, [turns], False),
        ({"assistant_only_loss": False}, [turns], True),
        ({"assistant_only_loss": False}, [parts, text], False),
        ({"completion_only_loss": True}, [parts], False),
        ({"completion_only_loss": False}, [parts, text], True),
        ({"completion_only_loss": False}, [turns], False),
        ({"completion_only_loss": False, "assistant_only_loss": False}, [turns, parts], True),
    ):
        trainer = SFTTrainer(MODEL, SFTConfig(str(tmp_path), **options), train_dataset=rows)
        assert trainer.config.data.learn_prompts is learned, options
    with pytest.raises(ConfigError, match="have to be the same"):
        args = SFTConfig(str(tmp_path), completion_only_loss=False)
        SFTTrainer(MODEL, args, train_dataset=[turns, parts])
    with pytest.raises(ConfigError, match="contradict"):
        SFTConfig(str(tmp_path), completion_only_loss=False, assistant_only_loss=True)


def test_short_data_sets_and_texts_without_a_prompt(tmp_path: Path) -> None:
    """Two of eight rows fit into max_length: one batch of two in the place of eight, as TRL's
    last batch has the rest. None that fits is an error that says so, also of eval_dataset. Pairs
    of texts without a prompt are trained on."""
    rows = [{"prompt": "a", "completion": "b" * (3 if number > 5 else 400)} for number in range(8)]
    with SFTTrainer(
        MODEL,
        SFTConfig(str(tmp_path / "a"), **QUICK, max_length=64),
        train_dataset=rows,
        peft_config={"r": 2},
    ) as trainer:
        assert (trainer.train().global_step, trainer.schedule.batch_size) == (3, 2)
    for train, held in ((rows[:6], None), (rows[6:], rows[:1])):
        with pytest.raises(ConfigError, match=r"\((train|eval)_dataset, row 0"):
            SFTTrainer(
                MODEL,
                SFTConfig(str(tmp_path / "b"), **QUICK, max_length=64),
                train_dataset=train,
                eval_dataset=held,
                peft_config={"r": 2},
            ).train()
    pairs = [{"chosen": f"Say {c}: {c}", "rejected": f"Say {c}: z{c}"} for c in "abcd"]
    args = DPOConfig(str(tmp_path / "c"), **QUICK, max_steps=1, full_determinism=True)
    with DPOTrainer(MODEL, args, train_dataset=pairs, peft_config={"r": 2}) as dpo:
        assert dpo.train().global_step == 1


def test_reward_functions_that_do_not_apply_end_no_run(tmp_path: Path) -> None:
    """TRL: their advantage is 0. Ten groups in a row, of which eight ended the run; each is
    counted."""

    def nothing(completions: list[Any], **columns: Any) -> list[None]:
        return [None] * len(completions)

    with grpo(tmp_path / "run", reward_funcs=[nothing], max_steps=5) as trainer:
        assert trainer.train().global_step == 5
    entries = lines(tmp_path / "run")
    assert {(entry["reward_mean"], entry["groups_without_variance"]) for entry in entries} == {
        (None, 1.0)
    }
