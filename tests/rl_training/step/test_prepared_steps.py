"""Steps whose batch is scored before the first update: sampler correction, KL in the reward,
filters, interruptions."""

import json
import math
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.losses.policy_gradient import policy_loss
from mlx_parallm.losses.types import LossInputs, LossOutputs
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.algorithms import loss_options
from mlx_parallm.rl_training.step.batch import TrainBatch
from mlx_parallm.rl_training.step.prepare import StepPosition
from mlx_parallm.rl_training.step.trainer import Trainer
from mlx_parallm.types import Rollout
from tests.rl_training.making import (
    assert_same_training,
    make_config,
    make_trainer,
    perturb_adapter,
    weights,
)
from tests.rl_training.rollouts import make_batch, random_groups
from tests.rl_training.scoring import (
    assert_same_metrics,
    on_policy,
    policy_logprobs,
    reference_logprobs,
)


class Seen:
    """Trainers of one configuration whose loss writes down what it was given, as flat arrays of
    the trained tokens."""

    def __init__(self, **config: Any) -> None:
        self.config = make_config(
            **{"batch_size": 16, "token_budget": 100_000, "packing": False} | config
        )
        self._waiting: list[tuple[np.ndarray, dict[str, mx.array]]] = []
        self.kl_betas: list[float] = []
        self.entropy_weights: list[float | None] = []

    def trainer(self) -> Trainer:
        algorithm = make_algorithm(self.config)

        def loss(inputs: LossInputs) -> LossOutputs:
            kept = np.array(inputs.mask)
            columns = {
                name: value for name, value in vars(inputs).items() if isinstance(value, mx.array)
            }
            # the latter are being differentiated
            del columns["mask"], columns["logprobs"], columns["entropy"]
            self._waiting.append((kept, columns))
            self.kl_betas.append(inputs.kl_beta)
            self.entropy_weights.append(inputs.entropy_weight)
            return algorithm.loss(inputs)

        self._waiting: list[tuple[np.ndarray, dict[str, mx.array]]] = []
        trainer = make_trainer(self.config, algorithm=replace(algorithm, loss=loss, fuse=False))
        perturb_adapter(trainer.policy)
        trainer.optimizer.reload()
        return trainer

    def constants(self) -> list[dict[str, np.ndarray]]:
        """What did not come from the differentiated pass, of each micro-batch."""
        return [
            {name: np.array(value)[kept] for name, value in columns.items()}
            for kept, columns in self._waiting
        ]


def by_length(trainer: Trainer, batch: TrainBatch, rows: list[np.ndarray]) -> np.ndarray:
    """Of a step that is one micro-batch: its order is that of the lengths."""
    order = sorted(
        range(len(rows)), key=lambda row: (len(batch.sequences[row].rollout.tokens), row)
    )
    return np.concatenate([rows[row] for row in order])


def rollout_logprobs(batch: TrainBatch) -> list[np.ndarray]:
    return [np.array(s.rollout.logprobs)[np.array(s.rollout.mask, bool)] for s in batch.sequences]


def with_noise(trainer: Trainer, batch: TrainBatch, size: float) -> TrainBatch:
    """On-policy but for what a sampler rounds."""
    rng = np.random.default_rng(5)
    sequences = []
    for sequence in on_policy(trainer, batch).sequences:
        rollout = sequence.rollout
        values = np.array(rollout.logprobs) + np.array(rollout.mask) * rng.normal(
            0, size, len(rollout.tokens)
        )
        sequences.append(
            replace(sequence, rollout=replace(rollout, logprobs=tuple(values.tolist())))
        )
    return replace(batch, sequences=tuple(sequences))


@pytest.mark.parametrize(
    ("kind", "level"),
    [("tis", "token"), ("tis", "sequence"), ("mis", "token"), ("mis", "sequence")],
)
def test_the_ratio_is_against_the_trainers_own_and_the_weight_is_the_samplers(
    kind: str, level: str
) -> None:
    seen = Seen(sampler_correction=kind, sampler_correction_level=level, sampler_correction_cap=1.3)
    trainer = seen.trainer()
    batch = with_noise(trainer, make_batch(random_groups(4)), 0.4)
    own, sent = policy_logprobs(trainer, batch), rollout_logprobs(batch)
    metrics = trainer.train_step(batch).metrics
    expected = []
    for a, b in zip(own, sent, strict=True):
        apart = a.astype(np.float64) - b
        weight = np.exp(apart if level == "token" else np.full_like(apart, apart.sum()))
        inside = (weight <= 1.3) & (weight >= 1 / 1.3)
        expected.append(np.minimum(weight, 1.3) if kind == "tis" else np.where(inside, weight, 0.0))
    (given,) = seen.constants()
    np.testing.assert_allclose(given["old_logprobs"], by_length(trainer, batch, own), atol=1e-5)
    np.testing.assert_allclose(
        given["weights"], by_length(trainer, batch, expected), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        given["rollout_logprobs"], by_length(trainer, batch, sent), rtol=1e-6
    )
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    flat = np.concatenate(
        [np.exp(a.astype(np.float64) - b) for a, b in zip(own, sent, strict=True)]
    )
    if level == "token":
        cut = flat > 1.3 if kind == "tis" else (flat > 1.3) | (flat < 1 / 1.3)
        assert metrics["sampler_weights_cut"] == pytest.approx(cut.mean(), abs=1e-6)
    assert 0 < metrics["sampler_weights_cut"] < 1


def test_without_a_correction_one_ratio_does_both_and_nothing_is_scored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = Seen(sampler_correction="none")
    trainer = seen.trainer()
    batch = on_policy(trainer, make_batch(random_groups(2)), shift=-0.2)
    monkeypatch.setattr(
        trainer.model, "score", lambda _: pytest.fail("a forward pass that nobody needs")
    )
    metrics = trainer.train_step(batch).metrics
    assert set(seen.constants()[0]) == {"rollout_logprobs", "advantages"}
    assert metrics["ratio_mean"] == pytest.approx(math.exp(0.2), abs=1e-4)
    assert metrics["sampler_weights_cut"] is None


def test_a_correction_multiplies_the_gradient() -> None:
    """All tokens shifted by -0.2: weights of e^0.2, and so is the loss; cut to 1.1 it is 1.1
    times."""

    def loss(**config: Any) -> float:
        trainer = Seen(**config).trainer()
        batch = on_policy(trainer, make_batch(random_groups(2)), shift=0.0 if not config else -0.2)
        value = trainer.train_step(batch).metrics["loss"]
        assert value is not None
        return value

    plain = loss()
    assert loss(sampler_correction="tis") == pytest.approx(math.exp(0.2) * plain, rel=1e-4)
    assert loss(sampler_correction="tis", sampler_correction_cap=1.1) == pytest.approx(
        1.1 * plain, rel=1e-4
    )
    assert loss(sampler_correction="mis", sampler_correction_cap=1.1) == 0.0


def test_the_mismatch_in_nats() -> None:
    """KL(engine || trainer) of a shift d = trainer - engine = 0.2: e^0.2 - 1 - 0.2 = 0.021403."""
    trainer = Seen().trainer()
    metrics = trainer.train_step(
        on_policy(trainer, make_batch(random_groups(2)), shift=-0.2)
    ).metrics
    assert metrics["mismatch_kl"] == pytest.approx(0.021403, abs=1e-5)
    assert metrics["logprob_diff_mean"] == pytest.approx(0.2, abs=1e-5)


def test_a_filter_of_the_sampler_moves_neither_ratio_nor_weight() -> None:
    """top_p that keeps 0.8 of the mass: raw log-probabilities are the trainer's, processed ones
    are ln 0.8 above."""
    seen = Seen(sampler_correction="tis")
    trainer = seen.trainer()
    batch = on_policy(trainer, make_batch(random_groups(2)))
    sequences = []
    for sequence in batch.sequences:
        rollout = sequence.rollout
        processed = tuple(
            min(value - math.log(0.8), 0.0) if sampled else 0.0
            for value, sampled in zip(rollout.logprobs, rollout.mask, strict=True)
        )
        sequences.append(replace(sequence, rollout=replace(rollout, processed_logprobs=processed)))
    filtered = replace(batch, sequences=tuple(sequences))
    metrics = trainer.train_step(filtered).metrics
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["logprob_diff_max"] < 1e-4
    np.testing.assert_allclose(seen.constants()[0]["weights"], 1.0, atol=1e-4)
    sent = [
        replace(s, rollout=replace(s.rollout, logprobs=s.rollout.processed_logprobs))
        for s in sequences
    ]
    wrong = Seen(sampler_correction="none").trainer()
    assert wrong.train_step(replace(batch, sequences=tuple(sent))).metrics[
        "ratio_mean"
    ] == pytest.approx(0.8, abs=1e-3)


def test_kl_in_the_reward_moves_advantages_and_leaves_the_loss_alone() -> None:
    seen = Seen(kl_beta=0.5, kl_in="reward", sampler_correction="none")
    trainer = seen.trainer()
    batch = with_noise(trainer, make_batch(random_groups(4)), 0.1)
    sent, reference = rollout_logprobs(batch), reference_logprobs(trainer, batch)
    k1 = [a - b for a, b in zip(sent, reference, strict=True)]
    mean = np.concatenate(k1).mean()
    plain = [np.array(s.advantages)[np.array(s.rollout.mask, bool)] for s in batch.sequences]
    expected = [a + 0.5 * (mean - k) for a, k in zip(plain, k1, strict=True)]
    metrics = trainer.train_step(batch).metrics
    (given,) = seen.constants()
    np.testing.assert_allclose(given["advantages"], by_length(trainer, batch, expected), atol=1e-5)
    np.testing.assert_allclose(
        given["ref_logprobs"], by_length(trainer, batch, reference), atol=1e-5
    )
    assert seen.kl_betas == [0.0]
    assert metrics["kl"] > 0
    assert metrics["kl_coefficient"] == 0.5
    assert abs(mean) > 1e-3


def test_the_coefficient_is_adapted_after_each_step_and_goes_on_after_a_resume() -> None:
    """Target 1e-3 far below the policy's KL, so each step of 8 sequences adds 20 % · 8 / 100."""
    seen = Seen(kl_beta=0.5, kl_target=1e-3, kl_horizon=100, sampler_correction="none")
    trainer = seen.trainer()
    batch = on_policy(trainer, make_batch(random_groups(2)))
    k1 = np.concatenate(rollout_logprobs(batch)) - np.concatenate(
        reference_logprobs(trainer, batch)
    )
    grow = 1 + math.copysign(0.2, k1.mean() / 1e-3 - 1) * 8 / 100
    coefficients = [trainer.train_step(batch).metrics["kl_coefficient"] for _ in range(3)]
    assert coefficients == pytest.approx([0.5, 0.5 * grow, 0.5 * grow**2])
    assert seen.kl_betas == pytest.approx(coefficients)
    resumed = seen.trainer()
    resumed.restore(json.loads(json.dumps(trainer.state())))
    assert resumed.train_step(batch).metrics["kl_coefficient"] == pytest.approx(0.5 * grow**3)
    fixed = make_trainer(make_config(kl_beta=0.25))
    fixed.restore({"kl_coefficient": 0.7})
    assert fixed.state() == {"kl_coefficient": 0.25}


def test_the_weight_of_the_bonus_adapts_after_each_update_and_goes_on_after_a_resume() -> None:
    """As TRL's controller, by hand, with two updates a step: no bonus in the first one, nor after
    an update whose entropy was above the target."""
    adaptive = {"entropy_weight": 0.1, "update_epochs": 2}
    seen = Seen(**adaptive, entropy_target=50.0, entropy_max=0.112)
    trainer = seen.trainer()
    batch = on_policy(trainer, make_batch(random_groups(2)))
    found = [trainer.train_step(batch).metrics["entropy_coefficient"] for _ in range(2)]
    assert found == pytest.approx([0.11, 0.112])
    assert seen.entropy_weights == pytest.approx([0, 0.105, 0.11, 0.112])
    above = Seen(**adaptive, entropy_target=1e-6, entropy_min=0.104)
    resumed = above.trainer()
    resumed.restore(json.loads(json.dumps(trainer.state())))
    assert resumed.train_step(batch).metrics["entropy_coefficient"] == pytest.approx(0.104)
    assert above.entropy_weights == [0, 0]
    fixed = make_trainer(make_config(entropy_weight=0.3))
    fixed.restore(trainer.state())
    assert "entropy_coefficient" not in fixed.state()


@pytest.mark.parametrize("aggregation", ["token", "sequence_sum"])
def test_the_bonus_is_over_the_tokens_that_count(aggregation: str) -> None:
    """Of 3 and 2 tokens with the entropies 1, 2, 6 and 4, 3, those of 6 and 4 count: their mean is
    5, their sum over two sequences too."""
    entropy = mx.array([[1.0, 2.0, 6.0], [4.0, 3.0, 0.0]])
    inputs = LossInputs(
        logprobs=mx.zeros((2, 3)),
        rollout_logprobs=mx.zeros((2, 3)),
        advantages=mx.zeros((2, 3)),
        mask=mx.array([[True] * 3, [True, True, False]]),
        token_normalizer=5.0,
        sequence_normalizer=2.0,
        entropy=entropy,
        counted=mx.array([[0.0, 0, 1], [1, 0, 1]]),
        counted_normalizer=2.0,
        entropy_weight=0.1,
    )
    settings = {"loss_aggregation": aggregation, "entropy_target": 1.0}
    outputs = policy_loss(inputs, loss_options(make_config(**settings)))
    assert outputs.loss.item() == pytest.approx(-0.5)
    assert outputs.metrics["bonus_entropy"].item() == pytest.approx(5.0)


CONFIGS = {
    "tis": {"sampler_correction": "tis"},
    "mis": {
        "sampler_correction": "mis",
        "sampler_correction_level": "sequence",
        "sampler_correction_cap": 20.0,
    },
    "kl in the reward": {"kl_beta": 0.1, "kl_in": "reward", "kl_target": 0.01},
    "whitened": {
        "algorithm": "reinforce_pp",
        "kl_beta": 0.1,
        "kl_in": "reward",
        "sampler_correction": "tis",
    },
    "ppo": {"algorithm": "ppo", "kl_beta": 0.05, "kl_in": "reward", "sampler_correction": "tis"},
    "top_entropy": {"top_entropy_quantile": 0.3},
    "adaptive entropy": {"entropy_weight": 0.1, "entropy_target": 50.0},
    "clip_cov": {"algorithm": "clip_cov", "cov_share": 0.3, "cov_low": -1.0},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_interrupted_step_goes_on_with_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped inside the second mini-batch, whose weights would score otherwise; the other
    process scores nothing."""
    seen = Seen(batch_size=4, token_budget=48, update_epochs=2, **CONFIGS[name])
    whole = seen.trainer()
    batch = with_noise(whole, make_batch(random_groups(2)), 0.2)
    expected = whole.train_step(batch)
    all_given = seen.constants()

    first = seen.trainer()
    stopped = first.train_step(batch, should_stop=lambda: first.optimizer.updates == 1)
    done = len(seen.constants())
    assert not stopped.finished
    assert stopped.position.updates == 1
    second = seen.trainer()
    second.policy.slots.write(first.policy.slots.read())
    second.optimizer.restore(first.optimizer.state())
    second.restore(json.loads(json.dumps(first.state())))
    monkeypatch.setattr(
        second.model, "score", lambda _: pytest.fail("scored under weights that have moved")
    )
    position = StepPosition.from_json(json.loads(json.dumps(stopped.position.to_json())))
    finished = second.train_step(batch, position=position)
    rest = seen.constants()
    for given, wanted in zip(rest, all_given[len(all_given) - len(rest) :], strict=True):
        assert given.keys() == wanted.keys()
        for column in given:
            assert given[column].tobytes() == wanted[column].tobytes(), column
    assert len(rest) + done > len(all_given) - len(rest)
    assert_same_training(weights(second), weights(whole))
    assert_same_metrics(finished.metrics, expected.metrics)
    assert second.state() == pytest.approx(whole.state())


def test_a_correction_that_is_turned_on_inside_a_step_scores_there() -> None:
    """What was scored for it before stays; the rest is scored under the weights of the resume."""
    batch = make_batch(random_groups(4))
    silent = [
        replace(s, rollout=replace(s.rollout, logprobs=None), fresh=False)
        for s in batch.sequences[:3]
    ]
    batch = replace(batch, sequences=(*silent, *batch.sequences[3:]))
    first = Seen(batch_size=8, sampler_correction="none").trainer()
    stopped = first.train_step(batch, should_stop=lambda: first.optimizer.updates == 1)
    assert set(stopped.position.scores) == {"stand_ins"}
    second = Seen(batch_size=8, sampler_correction="tis").trainer()
    finished = second.train_step(batch, position=stopped.position)
    assert set(finished.position.scores) == {"stand_ins", "old_logprobs"}
    assert finished.metrics["sampler_weights_cut"] is not None


@pytest.mark.parametrize("left", ["nothing", "no token"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_without_a_token_is_finished(name: str, left: str) -> None:
    """A step that was given up may be empty; its batch may hold answers of no token."""
    batch = make_batch(random_groups(1))
    silent = [
        replace(s, rollout=replace(s.rollout, mask=(0,) * len(s.rollout.tokens)))
        for s in batch.sequences
    ]
    result = make_trainer(make_config(**CONFIGS[name])).train_step(
        replace(batch, sequences=tuple(silent if left == "no token" else ()))
    )
    assert (result.finished, result.metrics["optimizer_updates"], result.metrics["tokens"]) == (
        True,
        0,
        0,
    )


@pytest.mark.parametrize("correction", ["none", "tis"])
def test_tokens_of_high_entropy_are_of_the_step_however_it_is_cut(correction: str) -> None:
    """The others do not count; the weights of a sampler correction stay."""
    counts = []
    for cut in ({}, {"batch_size": 4, "token_budget": 48}):
        seen = Seen(top_entropy_quantile=0.4, sampler_correction=correction, **cut)
        trainer = seen.trainer()
        batch = with_noise(trainer, make_batch(random_groups(4)), 0.2)
        entropies = [scores[1] for scores in trainer.token_scores(rollouts_of(batch))]
        least = np.quantile(np.concatenate(entropies), 0.6)
        trainer.train_step(batch)
        given = seen.constants()
        if not cut:
            expected = by_length(trainer, batch, entropies) >= least
            np.testing.assert_array_equal(given[0]["counted"] > 0, expected)
            assert ("weights" in given[0]) == (correction == "tis")
        counts.append(sum(int((part["counted"] > 0).sum()) for part in given))
    assert counts[0] == counts[1] > 0


def test_what_is_chosen_by_covariance_is_of_the_step_however_it_is_cut() -> None:
    for algorithm, settings in (("kl_cov", {}), ("clip_cov", {"cov_low": 0.0})):
        chosen = []
        for cut in ({}, {"batch_size": 4, "token_budget": 48}):
            seen = Seen(algorithm=algorithm, cov_share=0.2, **settings, **cut)
            trainer = seen.trainer()
            trainer.train_step(with_noise(trainer, make_batch(random_groups(4)), 0.2))
            given = seen.constants()
            picked = [sorted(part["advantages"][part["selected"] > 0].tolist()) for part in given]
            chosen.append(sorted(value for part in picked for value in part))
        assert chosen[0] == chosen[1] and len(chosen[0]) > 0


def rollouts_of(batch: TrainBatch) -> list[Rollout]:
    return [sequence.rollout for sequence in batch.sequences]
