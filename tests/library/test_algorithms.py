"""PPO, GRPO and REINFORCE in Python: the real engine, manager and trainer on the tiny model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.optimizers as optim
import numpy as np
import pytest

from mlx_parallm.config.library import AlgorithmConfig, BackpropConfig, training_keys
from mlx_parallm.config.load import load_config, parse_config
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.environments.kinds.simple_text import SimpleTextEnvironment
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.errors import CheckpointError, ConfigError, RolloutRejectedError
from mlx_parallm.faces.library.algorithms import (
    ALGORITHM_FILE,
    ALGORITHMS,
    BaseAlgorithm,
    GRPOAlgorithm,
    PPOAlgorithm,
    REINFORCEAlgorithm,
    TrainingMetrics,
    create_algorithm,
    load_algorithm_from_checkpoint,
)
from mlx_parallm.faces.library.backprop import BackpropModule
from mlx_parallm.inference.module import InferenceModule
from mlx_parallm.losses.types import LossInputs, LossOutputs, aggregate
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.run_files.directory import RunDirectory
from mlx_parallm.run_files.trainer_state import STATE_FILE
from mlx_parallm.runs.explain import explain
from mlx_parallm.runs.run import open_run
from mlx_parallm.runs.show_checkpoint import describe
from mlx_parallm.types import Trajectory
from tests.tiny_models import EXPERTS, QWEN3, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("Sort: dbca", "Reverse: hfkdo", "Sum: 1+2")


class ShareOfALetter:
    """As the specification's example: no base class."""

    def __init__(self, letter: str = "a") -> None:
        self.letter = letter

    def compute_rewards(
        self, trajectories: list[Trajectory], method: str = "absolute"
    ) -> list[float]:
        return [t.response.count(self.letter) / max(len(t.response), 1) for t in trajectories]


class Length:
    """Differs between answers of any policy."""

    def compute_rewards(
        self, trajectories: list[Trajectory], method: str = "absolute"
    ) -> list[float]:
        return [float(sum(t.rollout.tokens) % 97) for t in trajectories]


@pytest.fixture
def inference() -> Iterator[InferenceModule]:
    with InferenceModule("builtin:tiny") as module:
        yield module


def make(
    kind: type[BaseAlgorithm],
    inference: InferenceModule,
    computer: Any,
    *,
    tokens: int = 4,
    **settings: Any,
) -> BaseAlgorithm:
    env = SimpleTextEnvironment(inference, prompts=PROMPTS)
    manager = RolloutManager(env, RolloutConfig(num_parallel=16, max_tokens=tokens))
    backprop_settings = settings.pop(
        "backprop", {"kl_coef": 0.0, "lora": LoraConfig(rank=4, alpha=8.0)}
    )
    backprop = BackpropModule(
        inference, optim.AdamW(3e-3), config=BackpropConfig(**backprop_settings)
    )
    callbacks = settings.pop("callbacks", ())
    return kind(env, manager, computer, backprop, AlgorithmConfig(**settings), callbacks=callbacks)


def arrays(algorithm: BaseAlgorithm) -> list[np.ndarray]:
    return [np.array(array) for array in algorithm.backprop.policy.slots.read()]


# ---------------------------------------------------------------------- one iteration


def test_an_iteration_trains_serves_and_tells(inference: InferenceModule) -> None:
    told: list[TrainingMetrics] = []
    algorithm = make(
        GRPOAlgorithm,
        inference,
        Length(),
        batch_size=8,
        group_size=4,
        callbacks=[lambda _, metrics: told.append(metrics)],
    )
    metrics = algorithm.train(num_iterations=2, progress_bar=False)
    assert metrics == told
    assert [line.iteration for line in metrics] == [1, 2] and algorithm.iteration == 2
    assert all(
        line.num_trajectories >= 8 and line.reward_min <= line.reward_mean <= line.reward_max
        for line in metrics
    )
    assert metrics[0].line["optimizer_updates"] == 4, "ppo_epochs"
    assert metrics[0].line["staleness_max"] == metrics[1].line["staleness_max"] == 0, (
        "sampled by the newest weights"
    )
    assert metrics[1].line["logprob_diff_max"] < 1e-3, (
        "and the trainer finds them as likely as the engine did"
    )
    assert inference.adapter == "policy"
    [trajectory] = algorithm.rollout_manager.collect_rollouts(1, group_size=1)
    sampled = np.array(trajectory.rollout.logprobs)[np.array(trajectory.rollout.mask, bool)]
    [own] = algorithm.backprop.get_logprobs([trajectory])
    np.testing.assert_allclose(own, sampled, atol=1e-3)
    assert set(trajectory.rollout.policy_versions) == {inference.weights.version}  # type: ignore[union-attr]
    assert algorithm.train(1, progress_bar=True)[0].iteration == 3, "it continues"


def test_experts_of_a_mixture_are_recorded_and_repeated(tmp_path: Path) -> None:
    """By an engine whose keys and values are rounded, so that "auto" repeats them."""
    shape = QWEN3 | EXPERTS | {"model_type": "qwen3_moe", "num_key_value_heads": 2, "head_dim": 32}
    save_checkpoint(tmp_path / "model", shape)
    config = parse_config({"server": {"kv_bits": 8}})
    with InferenceModule(str(tmp_path / "model"), config=config) as inference:
        answers = inference.generate(["ab", "cd"], max_new_tokens=5)
        assert answers.token_ids is not None
        for ids, experts in zip(answers.token_ids, answers.metadata["routed_experts"], strict=True):
            assert experts.shape == (len(ids), 2, 2)
        algorithm = make(GRPOAlgorithm, inference, Length(), batch_size=8, group_size=4)
        [line] = algorithm.train(num_iterations=1, progress_bar=False)
        assert algorithm.backprop.policy.experts.sampled
        assert line.line["experts_differing"] is not None
        assert 0 < line.line["expert_load_entropy"] <= 1


def test_a_group_is_the_answers_to_one_prompt(inference: InferenceModule) -> None:
    """And not the whole batch: an advantage compares with the others of the prompt."""
    algorithm = make(GRPOAlgorithm, inference, Length(), batch_size=12, group_size=4)
    groups = algorithm._collect(3)
    opened = [{r.tokens[: r.mask.index(1)] for r in group.rollouts} for group in groups]
    assert [len(prompts) for prompts in opened] == [1, 1, 1] and len(set.union(*opened)) == 3
    assert [len(group.rollouts) for group in groups] == [4, 4, 4]
    assert [group.index for group in groups] == [0, 1, 2]
    assert all(
        rollout.scores["reward"] == sum(rollout.tokens) % 97
        for group in groups
        for rollout in group.rollouts
    )


def test_only_the_upper_part_is_learned_from_when_asked(inference: InferenceModule) -> None:
    algorithm = make(
        GRPOAlgorithm, inference, Length(), batch_size=8, group_size=4, filter_percentile=50
    )
    for group in algorithm._collect(2):
        middle = np.percentile([rollout.reward for rollout in group.rollouts], 50)
        assert [rollout.zero_advantage for rollout in group.rollouts] == [
            r.reward < middle for r in group.rollouts
        ]


def test_the_algorithms_differ_in_what_the_daemon_is_told(inference: InferenceModule) -> None:
    found = {}
    for name, kind in ALGORITHMS.items():
        algorithm = make(
            kind,
            inference,
            Length(),
            batch_size=8,
            mini_batch_size=4,
            learning_rate=2e-4,
            kl_coef=0.03,
        )
        keys = (
            algorithm.config.over(algorithm.backprop.config),
            algorithm.config.training_keys(kind.name, 64),
        )
        found[name] = algorithm.backprop._run_config(kind.name, *keys).rl_training
        assert found[name].learning_rate == 2e-4 and found[name].kl_beta == 0.03, (
            "the AlgorithmConfig's word"
        )
        assert (found[name].batch_size, found[name].atropos.rollout_batch_size) == (4, 8)
    assert [found[name].loss for name in ("ppo", "grpo", "reinforce")] == [
        "clip",
        "clip",
        "reinforce",
    ]
    assert [found[name].update_epochs for name in ("ppo", "grpo", "reinforce")] == [4, 4, 1]
    assert found["grpo"].advantage == "std" and found["reinforce"].advantage_whiten


def test_ppo_learns_values_and_reinforce_makes_one_pass(inference: InferenceModule) -> None:
    [line] = make(PPOAlgorithm, inference, Length(), batch_size=8, ppo_epochs=2).train(
        1, progress_bar=False
    )
    assert (
        line.value_loss is not None and line.value_loss > 0 and line.line["optimizer_updates"] == 2
    )


def test_all_weights_are_trained_and_served(inference: InferenceModule) -> None:
    algorithm = make(
        REINFORCEAlgorithm,
        inference,
        Length(),
        batch_size=8,
        backprop={"lora": LoraConfig(enabled=False), "kl_coef": 0.01},
    )
    [line] = algorithm.train(1, progress_bar=False)
    assert (
        line.line["optimizer_updates"] == 1
        and inference.adapter is None
        and line.kl == pytest.approx(0, abs=1e-6)
    )
    [trajectory] = algorithm.rollout_manager.collect_rollouts(1, group_size=1)
    sampled = np.array(trajectory.rollout.logprobs)[np.array(trajectory.rollout.mask, bool)]
    np.testing.assert_allclose(algorithm.backprop.get_logprobs([trajectory])[0], sampled, atol=1e-3)


def test_updates_by_hand_between_iterations(inference: InferenceModule) -> None:
    """They publish too; what was sampled by them is not too old for the next iteration."""
    algorithm = make(GRPOAlgorithm, inference, Length(), batch_size=8, group_size=4, ppo_epochs=1)
    algorithm.train(1, progress_bar=False)
    trajectories = algorithm.rollout_manager.collect_rollouts(4, group_size=1)
    for _ in range(3):
        algorithm.backprop.update(
            algorithm.backprop.compute_loss(trajectories, [1.0, -1.0, 1.0, -1.0])
        )
    [line] = algorithm.train(1, progress_bar=False)
    assert line.line["dropped_stale"] == 0 and line.line["staleness_max"] == 0


def test_the_reference_follows_when_asked(inference: InferenceModule) -> None:
    values = {"kl_coef": 0.01, "lora": LoraConfig(rank=4, alpha=8.0)}
    algorithm = make(
        GRPOAlgorithm,
        inference,
        Length(),
        batch_size=8,
        group_size=4,
        update_ref_every=2,
        backprop=values,
    )
    kls = [line.kl for line in algorithm.train(3, progress_bar=False)]
    assert kls[1] is not None and kls[2] is not None and kls[1] > 0
    reference = algorithm.backprop.policy.reference_arrays
    assert reference is not None, "it was copied after the second iteration"


# ---------------------------------------------------------------------- refusals


def test_what_does_not_fit_is_refused(inference: InferenceModule) -> None:
    with pytest.raises(ConfigError, match=r"batch_size.*group_size"):
        make(GRPOAlgorithm, inference, Length(), batch_size=9)
    with pytest.raises(ConfigError, match="at least 2"):
        make(GRPOAlgorithm, inference, Length(), group_size=1)
    with pytest.raises(ConfigError, match="ppo_epochs can only be 1"):
        make(REINFORCEAlgorithm, inference, Length(), ppo_epochs=4)
    with pytest.raises(
        ConfigError,
        match="ppo_epochs",
    ):
        make(REINFORCEAlgorithm, inference, Length(), backprop={"ppo_epochs": 2})
    with pytest.raises(ConfigError, match="'a2c'"):
        create_algorithm("a2c")
    algorithm = make(GRPOAlgorithm, inference, Length(), batch_size=8)
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        algorithm.save_checkpoint()
    parts = (algorithm.env, algorithm.rollout_manager, algorithm.reward_computer)
    with pytest.raises(ConfigError, match="another environment"):
        PPOAlgorithm(
            SimpleTextEnvironment(inference, prompts=PROMPTS), *parts[1:], algorithm.backprop
        )
    with pytest.raises(ConfigError, match="another model"):
        PPOAlgorithm(*parts, BackpropModule("some/other-model"))
    with pytest.raises(ConfigError, match="value_head=False"):
        PPOAlgorithm(*parts, BackpropModule("builtin:tiny", value_head=False)).train(1)
    with pytest.raises(ConfigError, match="wandb needs"):
        AlgorithmConfig(use_wandb=True)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([1.0], "1 scores for 8"),
        (["good"] * 8, "expected a list of 8 numbers"),
        ([None, float("nan")] * 4, "scored none of 8 trajectories"),
    ],
)
def test_rewards_that_are_no_rewards(
    inference: InferenceModule, given: list[Any], match: str
) -> None:
    class Wrong:
        def compute_rewards(self, trajectories: Any, method: str = "absolute") -> Any:
            return given

    with pytest.raises(RolloutRejectedError, match=match):
        make(PPOAlgorithm, inference, Wrong(), batch_size=8).train(1, progress_bar=False)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.slow
def test_a_checkpoint_is_the_daemons_and_training_goes_on_from_it(tmp_path: Path) -> None:
    settings = {
        "batch_size": 8,
        "group_size": 4,
        "checkpoint_dir": tmp_path,
        "run_name": "run",
        "save_every": 1,
    }
    with InferenceModule("builtin:tiny") as inference:
        algorithm = make(GRPOAlgorithm, inference, Length(), **settings)
        algorithm.train(3, progress_bar=False)
        algorithm.save_checkpoint(iteration=3, best=True)
        with pytest.raises(ConfigError, match="after iteration 3, not 7"):
            algorithm.save_checkpoint(iteration=7)
        kept, updates = arrays(algorithm), algorithm.backprop.trainer.optimizer.updates
        assert inference.weights is not None
        version = inference.weights.version
        run = tmp_path / "run"
        assert {"step_000003", "latest", "final", "best", "config.toml", "metrics.jsonl"} <= {
            p.name for p in run.iterdir()
        }
        assert describe(run)["complete"]
        # "3 of 1000 steps, finished": the number was the daemon's default
        found = explain(open_run(run))
        assert (found.steps, found.total_steps, found.state) == (3, 3, "running")
        layers = load_adapter(run / "best").layers
        assert all(np.array_equal(np.array(pair.b), np.array(algorithm.backprop.policy.adapter()[path].b))
                   for path, pair in layers.items())  # fmt: skip
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
        with pytest.raises(CheckpointError, match="in use"):
            load_algorithm_from_checkpoint(run, *_parts(inference))
        algorithm.close()
    with InferenceModule("builtin:tiny") as inference:
        again = load_algorithm_from_checkpoint(run, *_parts(inference))
        # it fell to 1
        assert inference.weights is not None and inference.weights.version >= version > 1
        assert type(again) is GRPOAlgorithm and again.iteration == 3 and again.group_size == 4
        for old, new in zip(kept, arrays(again), strict=True):
            np.testing.assert_array_equal(old, new)
        assert again.backprop.trainer.optimizer.updates == updates
        [trajectory] = again.rollout_manager.collect_rollouts(1, group_size=1)
        sampled = np.array(trajectory.rollout.logprobs)[np.array(trajectory.rollout.mask, bool)]
        np.testing.assert_allclose(again.backprop.get_logprobs([trajectory])[0], sampled, atol=1e-3)
        [line] = again.train(1, progress_bar=False)
        assert line.iteration == 4
        again.close()
    assert [
        json.loads(text)["step"] for text in (run / "metrics.jsonl").read_text().splitlines()
    ] == [1, 2, 3, 4]
    with pytest.raises(CheckpointError, match="algorithm"):
        load_algorithm_from_checkpoint(tmp_path / "elsewhere", *_parts(inference))


def test_the_configuration_is_written_once_and_a_failed_load_frees_the_directory(
    inference: InferenceModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = RunDirectory.write_config

    def counted(directory: RunDirectory, text: str) -> None:
        written.append(load_config(None, text=text).rl_training.total_steps)
        write(directory, text)

    monkeypatch.setattr(RunDirectory, "write_config", counted)
    settings = {"batch_size": 4, "group_size": 4, "checkpoint_dir": tmp_path}
    algorithm = make(GRPOAlgorithm, inference, Length(), run_name="run", **settings)
    algorithm.train(2, progress_bar=False)
    saved = algorithm.save_checkpoint()
    assert written == [2]
    untrained = make(GRPOAlgorithm, inference, Length(), run_name="new", **settings)
    assert (untrained.save_checkpoint().parent / ALGORITHM_FILE).is_file() and written == [2, 1]
    algorithm.close()
    (saved / STATE_FILE).write_text("{")
    with pytest.raises(CheckpointError, match=STATE_FILE) as failed:
        load_algorithm_from_checkpoint(saved, *_parts(inference))
    assert failed.tb is not None and not RunDirectory.in_use(tmp_path / "run")


def _parts(inference: InferenceModule) -> tuple[Any, ...]:
    env = SimpleTextEnvironment(inference, prompts=PROMPTS)
    backprop = BackpropModule(
        inference,
        optim.AdamW(3e-3),
        config=BackpropConfig(kl_coef=0.0, lora=LoraConfig(rank=4, alpha=8.0)),
    )
    return env, RolloutManager(env, RolloutConfig(max_tokens=4)), Length(), backprop


def test_a_loss_of_ones_own_and_no_environment_twice(inference: InferenceModule) -> None:
    seen: list[tuple[int, ...]] = []

    def own(inputs: LossInputs) -> LossOutputs:
        seen.append(inputs.logprobs.shape)
        loss = aggregate(-inputs.logprobs * inputs.advantages, inputs)
        return LossOutputs(loss, {"own": loss})

    env, manager, computer, backprop = _parts(inference)
    config = AlgorithmConfig(batch_size=4, group_size=4, ppo_epochs=1)
    [metrics] = GRPOAlgorithm(None, manager, computer, backprop, config, loss=own).train(
        1, progress_bar=False
    )
    assert seen and metrics.line["own"] == pytest.approx(metrics.loss)
    assert manager.environments[0] is env


def test_trackers_need_a_place() -> None:
    with pytest.raises(ConfigError, match="checkpoint_dir"):
        AlgorithmConfig(trackers=("tensorboard",))
    assert AlgorithmConfig(
        use_wandb=True, checkpoint_dir="x", trackers=("trackio",)
    ).all_trackers == (
        "trackio",
        "wandb",
    )
    assert training_keys("grpo", BackpropConfig(blocks_per_eval=0))["blocks_per_eval"] == 0


# ---------------------------------------------------------------------- learning, and the examples


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=name, marks=[] if name == "grpo" else pytest.mark.long)
        for name, kind in ALGORITHMS.items()
    ],
)
def test_it_learns(kind: type[BaseAlgorithm], inference: InferenceModule) -> None:
    """PPO, GRPO and REINFORCE learn one letter on the shipped model."""
    values = {"kl_coef": 0.0, "entropy_coef": 0.0, "gamma": 1.0}
    algorithm = make(
        kind, inference, ShareOfALetter("q"), tokens=6, batch_size=32, ppo_epochs=1, backprop=values
    )
    rewards = [line.reward_mean for line in algorithm.train(12, progress_bar=False)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.15, rewards


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "pareto",
        "backprop",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ppo_text", "grpo_svrl")),
    ],
)
def test_the_examples_run(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--quick"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout and "Traceback" not in done.stderr, done.stderr[-2000:]
    assert not list(tmp_path.iterdir()), "an example leaves nothing behind"
