"""Steps that learn from a teacher: columns, advantages and gradients against plain forwards."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.algorithm import PRESETS
from mlx_parallm.rl_training.step.distillation import AGREES, LOGPROBS
from mlx_parallm.rl_training.step.prepare import StepPosition
from tests.losses.test_distillation import log_softmax, oracle
from tests.rl_training.distillation.making import (
    base_logits,
    base_logprobs,
    plain_logits,
    sampled,
    several_turns,
    taught_trainer,
)
from tests.rl_training.making import assert_same_training, make_config, make_trainer, weights
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.scoring import StopAfter, on_policy

LAYOUTS = [
    {"token_budget": 10_000},
    {"token_budget": 20, "packing": False},
    {"token_budget": 40, "blocks_per_eval": 0},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("turns", [1, 2])
def test_the_teachers_column_is_its_plain_forward(layout: dict[str, Any], turns: int) -> None:
    trainer = taught_trainer(config=layout)
    batch = make_batch(random_groups(4))
    batch = several_turns(batch) if turns > 1 else batch
    scores = trainer.companions["teachers"].score(batch, lambda: False)
    assert scores[LOGPROBS] == pytest.approx(base_logprobs(trainer, batch), abs=2e-5)
    best = [
        z.argmax(-1) == tokens
        for z, tokens in zip(base_logits(trainer, batch), sampled(batch), strict=True)
    ]
    assert (scores[AGREES] == np.concatenate(best)).all()


def test_the_teachers_logits_are_at_the_rollouts_temperature() -> None:
    trainer = taught_trainer(mode="loss", top_k=0, reward=False)
    groups = random_groups(2)
    warm = [
        replace(group, rollouts=tuple(replace(r, temperature=0.7) for r in group.rollouts))
        for group in groups
    ]
    batch = on_policy(trainer, make_batch(warm), temperature=0.7)
    students, teachers = plain_logits(trainer, batch), base_logits(trainer, batch)
    values = [
        oracle(student / 0.7, teacher / 0.7, None, 1.0)
        for student, teacher in zip(students, teachers, strict=True)
    ]
    metrics = trainer.train_step(batch).metrics
    assert metrics["distill_loss"] == pytest.approx(np.concatenate(values).mean(), abs=2e-5)
    chosen = [
        np.take_along_axis(log_softmax(teacher / 0.7), tokens[:, None], -1)[:, 0]
        for teacher, tokens in zip(teachers, sampled(batch), strict=True)
    ]
    found = trainer.step_tokens.columns["teacher_logprobs"]
    assert found == pytest.approx(np.concatenate(chosen), abs=2e-5)


@pytest.mark.parametrize("top_k", [0, 5])
def test_the_distributions_are_compared_at_a_temperature_of_their_own(top_k: int) -> None:
    """Sampled at 0.9 and compared at 1, as TRL's GKD does; the sampled tokens' scores stay at
    0.9."""
    trainer = taught_trainer(mode="loss", top_k=top_k, beta=0.5, reward=False, temperature=1.0)
    warm = [
        replace(group, rollouts=tuple(replace(r, temperature=0.9) for r in group.rollouts))
        for group in random_groups(2)
    ]
    batch = on_policy(trainer, make_batch(warm), temperature=0.9)
    students, teachers = plain_logits(trainer, batch), base_logits(trainer, batch)
    values = []
    for student, teacher in zip(students, teachers, strict=True):
        ids = np.argsort(-teacher, -1)[:, :top_k] if top_k else None
        values.append(oracle(student, teacher, ids, 0.5))
    metrics = trainer.train_step(batch).metrics
    assert metrics["distill_loss"] == pytest.approx(np.concatenate(values).mean(), abs=2e-5)
    chosen = [
        np.take_along_axis(log_softmax(teacher / 0.9), tokens[:, None], -1)[:, 0]
        for teacher, tokens in zip(teachers, sampled(batch), strict=True)
    ]
    found = trainer.step_tokens.columns["teacher_logprobs"]
    assert found == pytest.approx(np.concatenate(chosen), abs=2e-5)


def test_a_servers_numbers_are_at_temperature_1() -> None:
    section = {"mode": "loss", "temperature": 0.5, "teachers": [{"name": "t", "kind": "group"}]}
    with pytest.raises(ValueError, match='"group"'):
        make_config(distillation=section)


def test_the_same_prompt_of_a_group_changes_nothing() -> None:
    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(
                    r,
                    tokens=(9, 8, 7, *r.tokens),
                    mask=(0, 0, 0, *r.mask),
                    logprobs=(0.0, 0.0, 0.0, *r.logprobs),
                    policy_versions=(0, 0, 0, *r.policy_versions),
                )
                for r in group.rollouts
            ),
        )
        for group in random_groups(3, size=8)
    ]
    trainer, batch = taught_trainer(config={"batch_size": 8}), make_batch(groups)
    scores = trainer.companions["teachers"].score(batch, lambda: False)
    assert scores[LOGPROBS] == pytest.approx(base_logprobs(trainer, batch), abs=2e-5)


@pytest.mark.parametrize("reward", [True, False])
def test_advantages_are_the_rewards_and_the_teachers(reward: bool) -> None:
    trainer = taught_trainer(weight=0.5, reward=reward)
    batch = on_policy(trainer, make_batch(random_groups(4)))
    expected_policy = np.concatenate(trainer.logprobs([s.rollout for s in batch.sequences]))
    teacher = base_logprobs(trainer, batch)
    own = np.concatenate(
        [np.array(s.advantages)[np.array(s.rollout.mask, bool)] for s in batch.sequences]
    )
    result = trainer.train_step(batch)
    expected = own * reward - 0.5 * (expected_policy - teacher)
    assert trainer.step_tokens.columns["advantages"] == pytest.approx(expected, abs=1e-4)
    assert trainer.step_tokens.columns["teacher_logprobs"] == pytest.approx(teacher, abs=2e-5)
    gap = expected_policy - teacher
    assert result.metrics["teacher_kl"] == pytest.approx(gap.mean(), abs=1e-4)
    assert result.metrics["teacher_spread"] == pytest.approx(gap.std(), abs=1e-4)
    assert result.metrics["teacher_share"] == 1.0
    assert result.metrics["teacher_sequences"] == len(batch.sequences)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("beta", "top_k"), [(1.0, 0), (0.0, 5), (0.5, 0), (0.5, 7), (1.0, 39), (1.0, 64)]
)
def test_the_divergence_of_a_step_and_its_slope(
    layout: dict[str, Any], beta: float, top_k: int
) -> None:
    """Against float64 by the whole vocabulary, and against the slope of a plain graph."""
    trainer = taught_trainer(
        mode="loss",
        beta=beta,
        top_k=top_k,
        reward=False,
        weight=2.0,
        config=layout | {"batch_size": 16, "max_grad_norm": 0.0},
    )
    batch = several_turns(on_policy(trainer, make_batch(random_groups(4))))
    students, teachers = plain_logits(trainer, batch), base_logits(trainer, batch)
    values = []
    for student, teacher in zip(students, teachers, strict=True):
        ids = None if top_k in (0, 39, 64) else np.argsort(-teacher, -1)[:, :top_k]
        values.append(oracle(student, teacher, ids, beta))
    at = trainer.ask_companions(batch, None)
    scores = trainer._score(batch, at, lambda: False)
    prepared = trainer._prepare(batch, scores)
    mini_batch = trainer._mini_batch(batch, trainer._order(batch, 0), 0)
    sums = trainer.accumulate(mini_batch, trainer._loss(batch, prepared, mini_batch))
    assert sums.totals["distill_loss"] == pytest.approx(np.concatenate(values).mean(), abs=2e-5)
    expected = plain_slopes(trainer, batch, teachers, beta, top_k)
    for found, slope in zip(trainer.gradients, expected, strict=True):
        assert np.array(found) == pytest.approx(2.0 * np.array(slope), abs=1e-5)


def plain_slopes(
    trainer: Any, batch: Any, teachers: list[np.ndarray], beta: float, top_k: int
) -> list[mx.array]:
    """Slopes of the mean JSD(β), written with probabilities, through the model's plain forward."""
    slots = trainer.policy.slots
    total = sum(len(z) for z in teachers)

    def of(chances: mx.array, ids: mx.array | None) -> mx.array:
        if ids is None:
            return chances
        chosen = mx.take_along_axis(chances, ids, -1)
        return mx.concatenate([chosen, 1 - chosen.sum(-1, keepdims=True)], -1)

    def kl(p: mx.array, q: mx.array) -> mx.array:
        return (p * (mx.log(p) - mx.log(q))).sum()

    def loss(parameters: list[mx.array]) -> mx.array:
        with slots.bound(parameters):
            value = mx.array(0.0)
            for sequence, teacher in zip(batch.sequences, teachers, strict=True):
                if not len(teacher):
                    continue
                logits = trainer.policy.model(mx.array(sequence.rollout.tokens)[None, :-1])[0]
                places = mx.array(np.flatnonzero(np.array(sequence.rollout.mask[1:])))
                ids = (
                    None
                    if top_k in (0, 39, 64)
                    else mx.array(np.argsort(-teacher, -1)[:, :top_k].astype(np.int32))
                )
                p = of(mx.softmax(logits[places], axis=-1), ids)
                q = of(mx.softmax(mx.array(teacher.astype(np.float32)), axis=-1), ids)
                m = beta * q + (1 - beta) * p
                value = value + (
                    kl(q, p)
                    if beta == 0
                    else kl(p, q)
                    if beta == 1
                    else beta * kl(q, m) + (1 - beta) * kl(p, m)
                )
            return value / total

    return mx.grad(loss)(slots.read())


@pytest.mark.parametrize("mode", ["advantage", "loss"])
@pytest.mark.parametrize("algorithm", sorted(PRESETS))
def test_every_algorithm_learns_from_a_teacher(algorithm: str, mode: str) -> None:
    correction = "none" if algorithm == "vespo" else "tis"  # its weight is one already
    trainer = taught_trainer(
        mode=mode,
        reward=False,
        config={"algorithm": algorithm, "sampler_correction": correction, "update_epochs": 2},
    )
    batch = on_policy(trainer, make_batch(random_groups(4)))
    before = weights(trainer)
    metrics = trainer.train_step(batch).metrics
    assert metrics["skipped_steps"] == 0
    assert np.isfinite(metrics["loss"])
    assert ("distill_loss" in metrics) == (mode == "loss")
    after = weights(trainer)
    assert any(np.abs(after[name] - before[name]).max() > 1e-4 for name in before)


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_steps_bring_the_policy_to_its_teacher(mode: str) -> None:
    trainer = taught_trainer(
        mode=mode, reward=False, config={"algorithm": "importance_sampling", "learning_rate": 3e-3}
    )
    gaps = []
    for step in range(12):
        batch = replace(on_policy(trainer, make_batch(random_groups(4, seed=step))), step=step + 1)
        divergences = [
            oracle(student, teacher, None, 1.0).mean()
            for student, teacher in zip(
                plain_logits(trainer, batch), base_logits(trainer, batch), strict=True
            )
        ]
        gaps.append(np.mean(divergences))
        trainer.train_step(batch)
    if mode == "loss":
        assert gaps[-1] < 0.5 * gaps[0]
    else:
        assert np.isfinite(gaps).all(), "random texts are not the policy's: no bound of the KL"


@pytest.mark.parametrize("mode", ["advantage", "loss"])
def test_an_interrupted_step_goes_on_with_the_same_scores(mode: str) -> None:
    settings = {"batch_size": 4, "token_budget": 30, "update_epochs": 2}
    whole, stopped = (
        taught_trainer(mode=mode, top_k=5 if mode == "loss" else 64, config=settings)
        for _ in range(2)
    )
    batch = make_batch(random_groups(4))
    whole.train_step(batch)
    first = stopped.train_step(batch, should_stop=StopAfter(12))
    assert not first.finished
    assert first.position.updates
    position = StepPosition.from_json(first.position.to_json())
    stopped.companions.clear()  # nobody asks again
    stopped.train_step(batch, position=position)
    assert_same_training(weights(stopped), weights(whole))


def test_without_teachers_a_step_says_so() -> None:
    trainer = taught_trainer()
    trainer.companions.clear()
    with pytest.raises(Exception, match="teachers"):
        trainer.train_step(make_batch(random_groups(1)))


def test_a_run_without_teachers_is_as_before() -> None:
    trainer = make_trainer(make_config())
    metrics = trainer.train_step(make_batch(random_groups(1))).metrics
    assert not [name for name in metrics if name.startswith("teacher")]
