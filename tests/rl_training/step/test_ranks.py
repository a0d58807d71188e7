"""Several ranks train as one does. Here the ranks are threads of this process; tests/integration
has real ones."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.cli.supervisor import supervise
from mlx_parallm.config.load import Config
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.daemon import run_dry_run
from mlx_parallm.distributed.ranks import PARTS, SMALLEST_CUT, _digest, agree, join
from mlx_parallm.errors import ConfigError, RankLostError
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.ranks import ALONE, Ranks
from mlx_parallm.rl_training.step.trainer import StepResult, Trainer
from mlx_parallm.system.hardware import RANK_VARIABLES, launched_rank
from mlx_parallm.types import PromptExperts, Rollout, RoutedExperts
from tests.rl_training.data.test_data_training import open_source
from tests.rl_training.making import (
    make_config,
    make_policy,
    make_trainer,
    perturb_adapter,
    weights,
)
from tests.rl_training.rollouts import make_batch, random_groups

T = TypeVar("T")
TIMEOUT_S = 60.0


class ThreadRanks(Ranks):
    """Meets the other ranks, threads of this process, at a barrier."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self._table, self._barrier = table, barrier

    def exchange(self, value: T, *, stop: bool = False) -> list[T] | None:
        everyone = self._meet((stop, value))
        return None if any(stops for stops, _ in everyone) else [value for _, value in everyone]

    def sum(self, arrays: list[mx.array]) -> list[mx.array] | None:
        mx.eval(arrays)
        sums = [sum(parts[1:], parts[0]) for parts in zip(*self._meet(arrays), strict=True)]
        mx.eval(sums)
        return sums

    def _meet(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(TIMEOUT_S)
        everyone = list(self._table)
        self._barrier.wait(TIMEOUT_S)
        return everyone


@dataclass
class Watched:
    """What one rank did."""

    result: StepResult
    weights: dict[str, np.ndarray]
    gradients: list[list[np.ndarray]] = field(default_factory=list)  # of each update
    passes: int = 0


def train(
    ranks: Ranks,
    config: RLTrainingConfig,
    batch: TrainBatch,
    *,
    architecture: str = "qwen3",
    **step: Any,
) -> Watched:
    algorithm = make_algorithm(config)
    policy = make_policy(config, architecture=architecture, needs_values=algorithm.has_values)
    trainer = Trainer(policy, config, algorithm, ranks=ranks)
    perturb_adapter(trainer.policy)
    trainer.optimizer.reload()
    gradients, update = [], trainer.optimizer.update
    backward, passes = trainer.model.loss_and_gradients, []

    def watched_update(found: list[mx.array], *others: Any) -> Any:
        gradients.append([np.array(gradient) for gradient in found])
        return update(found, *others)

    def watched_backward(*arguments: Any, **options: Any) -> Any:
        passes.append(1)
        return backward(*arguments, **options)

    trainer.optimizer.update = watched_update  # type: ignore[method-assign]
    trainer.model.loss_and_gradients = watched_backward  # type: ignore[method-assign]
    result = trainer.train_step(batch, **step)
    return Watched(result, weights(trainer), gradients, len(passes))


def together(count: int, work: Callable[[Ranks], T]) -> list[T]:
    table, barrier = [None] * count, threading.Barrier(count)
    ranks = [ThreadRanks(rank, table, barrier) for rank in range(count)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda own: in_mlx_thread(lambda: work(own)), ranks))


ADAPTIVE = {"entropy_weight": 0.1, "entropy_target": 50.0, "update_epochs": 2}


@pytest.mark.parametrize(
    ("count", "values"),
    [
        (2, {}),
        (3, {"kl_beta": 0.1, "update_epochs": 2, "batch_size": 8}),
        (2, {"lora": False, "token_budget": 48, "top_entropy_quantile": 0.4, **ADAPTIVE}),
        (2, {"algorithm": "ppo", "sampler_correction": "tis", "kl_beta": 0.1, "kl_in": "reward"}),
        (
            3,
            {
                "algorithm": "ppo",
                "sampler_correction": "tis",
                "ppo": {"target_kl": 1e-3},
                "batch_size": 8,
            },
        ),
    ],
)
def test_ranks_together_have_the_gradients_of_one(count: int, values: dict[str, Any]) -> None:
    config = make_config(**({"batch_size": 16} | values))
    batch = make_batch(random_groups(4))
    one = train(ALONE, config, batch)
    many = together(count, lambda ranks: train(ranks, config, batch))
    assert all(rank.passes > 0 for rank in many)
    for rank in many:
        first = [np.concatenate([g.ravel() for g in run.gradients[0]]) for run in (rank, one)]
        assert np.linalg.norm(first[0] - first[1]) <= 1e-6 * np.linalg.norm(first[1])
        assert len(rank.gradients) == len(one.gradients)
        for name, array in many[0].weights.items():
            assert np.array_equal(rank.weights[name], array)
        assert rank.result.position.to_json() == many[0].result.position.to_json()
    known = {name: value for name, value in one.result.metrics.items() if value is not None}
    assert {name: many[0].result.metrics[name] for name in known} == pytest.approx(
        known, rel=1e-3, abs=1e-5
    )


def test_ranks_repeat_recorded_experts() -> None:
    """Those of prompts too: the gradients are one process's, and others than the routers'."""
    replay = {"router_replay": "on", "router_replay_prompts": True}
    groups = [
        replace(group, rollouts=tuple(map(with_experts, group.rollouts)))
        for group in random_groups(4)
    ]
    batch, found = make_batch(groups), []
    for values in ({"router_replay": "off"}, {"router_replay": "on"}, replay):
        config = make_config(batch_size=16, **values)
        one = train(ALONE, config, batch, architecture="qwen3_moe")
        found.append(np.concatenate([g.ravel() for g in one.gradients[0]]))
    for rank in together(2, lambda ranks: train(ranks, config, batch, architecture="qwen3_moe")):
        first = np.concatenate([g.ravel() for g in rank.gradients[0]])
        assert rank.passes > 0
        assert np.linalg.norm(first - found[2]) <= 1e-5 * np.linalg.norm(found[2])
    off, sampled, everything = found
    assert np.linalg.norm(off - sampled) > 1e-3 * np.linalg.norm(off)
    assert np.linalg.norm(everything - sampled) > 1e-3 * np.linalg.norm(off)


def with_experts(rollout: Rollout) -> Rollout:
    """Two random experts of four, in three layers, for each token."""
    rng = np.random.default_rng(rollout.tokens[-1])
    count = len(rollout.tokens) - 1
    ids = rng.permuted(np.tile(np.arange(4), (count, 3, 1)), axis=2)[..., :2]
    sampled = np.array(rollout.mask[1:], bool)
    prompt = PromptExperts(0, RoutedExperts.of(ids[~sampled]))
    return replace(
        rollout,
        routed_experts=RoutedExperts.of(ids[sampled]),
        prompt_experts=(prompt,) if len(prompt.experts) else (),
    )


@pytest.mark.parametrize("loss", ["sigmoid", "aot_unpaired"])
def test_pairs_stay_together_on_every_rank(loss: str, tmp_path: Path) -> None:
    """A loss of pairs would be another number with a chosen one here and its rejected one there,
    and pairs are sorted with those of other ranks."""
    config, source = open_source("dpo", tmp_path, batch_size=6, preference={"loss_type": loss})
    batch = source.batches(make_trainer(config.rl_training)).collect(1)
    one = train(ALONE, config.rl_training, batch)
    for rank in together(2, lambda ranks: train(ranks, config.rl_training, batch)):
        first = [np.concatenate([g.ravel() for g in run.gradients[0]]) for run in (rank, one)]
        assert rank.passes > 0
        assert np.linalg.norm(first[1]) > 0
        assert np.linalg.norm(first[0] - first[1]) <= 1e-6 * np.linalg.norm(first[1])


def test_scores_before_the_step_are_everybodys() -> None:
    """Sequences without log-probabilities are scored by whoever has them; each rank then knows
    all."""
    config = make_config(batch_size=16, kl_beta=0.1)
    batch = make_batch(random_groups(4))
    unscored = [
        replace(s, rollout=replace(s.rollout, logprobs=None), fresh=False) for s in batch.sequences
    ]
    batch = replace(batch, sequences=tuple(unscored))
    one = train(ALONE, config, batch).result.position.scores
    many = together(2, lambda ranks: train(ranks, config, batch).result.position.scores)
    assert "ref_logprobs" in one and len(one) == 2
    for scores in many:
        for name, column in one.items():
            assert np.abs(column).max() > 0.1
            np.testing.assert_allclose(scores[name], column, atol=1e-5)
            assert np.array_equal(scores[name], many[0][name])


def test_a_stop_of_one_stops_all_at_the_same_place() -> None:
    config = make_config(batch_size=8)
    batch = make_batch(random_groups(4))
    asked = iter([False] * 3 + [True] * 100)

    def work(ranks: Ranks) -> Watched:
        stop = {"should_stop": lambda: next(asked)} if ranks.rank == 0 else {}
        return train(ranks, make_config(batch_size=8, token_budget=24), batch, **stop)

    runs = together(2, work)
    assert not any(run.result.finished for run in runs)
    assert runs[0].result.position.to_json() == runs[1].result.position.to_json()
    assert len(runs[0].gradients) == len(runs[1].gradients) < config.atropos.rollout_batch_size // 8


@pytest.mark.parametrize(
    "values", [{}, {"kl_beta": 0.1, "reference": "initial"}, {"optimizer": "lion"}]
)
def test_rank_0s_state_is_copied_where_it_differs(values: dict[str, Any]) -> None:
    config, batch = make_config(batch_size=16, **values), make_batch(random_groups(4))

    def work(ranks: Ranks) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        trainer = make_trainer(config)
        if ranks.rank == 0:  # as after a resume: moments, weights and reference of its own
            perturb_adapter(trainer.policy)
            trainer.optimizer.reload()
            trainer.train_step(batch)
        agree(ranks, trainer)
        return weights(trainer), {
            name: np.array(array) for name, array in trainer.optimizer.state().items()
        }

    first, second = together(2, work)
    for own, copied in zip(first, second, strict=True):
        assert own.keys() == copied.keys()
        for name, array in own.items():
            assert np.array_equal(array, copied[name]), name


def test_the_same_numbers_in_other_places_are_another_state() -> None:
    def work(ranks: Ranks) -> dict[str, np.ndarray]:
        trainer = make_trainer(make_config())
        perturb_adapter(trainer.policy)
        if ranks.rank == 1:
            slots = trainer.policy.slots
            turned = [array.reshape(-1)[::-1].reshape(array.shape) for array in slots.read()]
            mx.eval(turned)
            slots.write(turned)
        agree(ranks, trainer)
        return weights(trainer)

    first, second = together(2, work)
    assert all(np.array_equal(array, second[name]) for name, array in first.items())


def test_another_model_is_refused() -> None:
    def work(ranks: Ranks) -> str:
        config = make_config(rank=4 + ranks.rank)
        trainer = make_trainer(config)
        with pytest.raises(RankLostError) as caught:
            agree(ranks, trainer)
        return str(caught.value)

    assert all("different models" in text for text in together(2, work))


def test_parts_are_shared_out_once_each_and_evenly() -> None:
    costs = [7, 1, 5, 3, 3, 8, 2, 2, 6, 4]
    shares = []
    for rank in range(3):
        ranks = Ranks()
        ranks.rank, ranks.size = rank, 3
        shares.append(ranks.share(list(enumerate(costs)), lambda part: part[1]))
    assert sorted(part for share in shares for part in share) == list(enumerate(costs))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(cost for _, cost in share) for share in shares]
    assert max(loads) - min(loads) <= 1
    assert ALONE.share(costs, float) == costs


# ---------------------------------------------------------------------- how a process learns that
# it is one of many


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("name", RANK_VARIABLES)
def test_launchers_give_a_rank(unlaunched: pytest.MonkeyPatch, name: str) -> None:
    assert launched_rank() is None
    assert join() is ALONE
    unlaunched.setenv(name, "3")
    assert launched_rank() == 3


def test_what_belongs_to_one_process_is_refused(
    unlaunched: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    unlaunched.setenv("MLX_RANK", "0")
    with pytest.raises(ConfigError, match="--restarts"):
        supervise([], ServerConfig(), tmp_path, resume=None, restarts=1)
    with pytest.raises(ConfigError, match="--dry-run"):
        run_dry_run(Config())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_changed_number_is_seen_in_its_part_and_everywhere(dtype: mx.Dtype) -> None:
    large, small = mx.random.normal((3 * SMALLEST_CUT + 5,)).astype(dtype), mx.ones((7,), dtype)
    whole, parts = (
        _digest([large, small], None),
        [_digest([large, small], part) for part in range(PARTS)],
    )
    for place in range(0, large.size, large.size // 12):
        changed = mx.array(large)
        changed[place] = large[place] + 1
        assert _digest([changed, small], None) != whole
        seen = [part for part in range(PARTS) if _digest([changed, small], part) != parts[part]]
        assert seen == [
            next(part for part in range(PARTS) if place < (part + 1) * large.size // PARTS)
        ]
    assert all(_digest([large, small * 2], part) != parts[part] for part in range(PARTS))
    assert _digest([large[::-1], small], None) != whole
    assert _digest([small, large], None) != whole
