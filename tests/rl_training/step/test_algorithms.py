"""Presets, what they fill in, what they refuse, and the batch-level step of REINFORCE++."""

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from mlx_parallm.config.algorithm import LOSSES as LOSS_KINDS
from mlx_parallm.config.algorithm import PRESETS, AlgorithmName, bounds_of
from mlx_parallm.config.load import Config, load_config, parse_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.policy_gradient import LOSSES, policy_loss
from mlx_parallm.losses.selection import SELECTING
from mlx_parallm.rl_training.options import configured_shaping, make_algorithm
from mlx_parallm.rl_training.step.algorithms import (
    ALGORITHMS,
    shaping_of,
    whitened,
)
from mlx_parallm.rl_training.step.prepare import PreparedBatch
from mlx_parallm.types import RolloutGroup
from tests.losses import fixtures
from tests.rl_training.making import make_config, make_trainer
from tests.rl_training.rollouts import make_batch, random_groups

GROUPS = [[1, 0, 0], [0.5, 0.25, 1]]
REWARDS = [reward for group in GROUPS for reward in group]


def configured(**values: Any) -> Config:
    return parse_config({"rl_training": values})


def refused(**values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        configured(**values)
    return str(caught.value)


def loss_value(**values: Any) -> float:
    return make_algorithm(configured(**values).rl_training).loss(fixtures.inputs(0.6)).loss.item()


def test_the_registries_and_the_configuration_name_the_same() -> None:
    assert set(ALGORITHMS) == set(get_args(AlgorithmName)) >= set(PRESETS)
    assert list(LOSSES) == list(LOSS_KINDS)
    for name in LOSS_KINDS:
        settings = bounds_of(name)
        asked = inspect.signature(LOSSES[name]).parameters.keys() - {"terms"}
        assert asked == set(settings) - set(SELECTING)
        loss = policy_loss(fixtures.inputs(0.6), fixtures.options(name)).loss
        assert math.isfinite(loss.item())


@pytest.mark.parametrize(
    ("name", "loss", "options"),
    [
        ("grpo", "clip", {"clip_ratio": 0.2}),
        ("dapo", "clip", {"clip_ratio": 0.2, "clip_ratio_high": 0.28}),
        ("dr_grpo", "clip", {"clip_ratio": 0.2, "aggregation": "constant"}),
        (
            *("gspo", "clip"),
            {
                "clip_ratio": 3e-4,
                "clip_ratio_high": 4e-4,
                "aggregation": "sequence",
                "ratio_level": "sequence",
            },
        ),
        ("cispo", "cispo", {"clip_ratio": 1.0, "clip_ratio_high": 4.0}),
        ("sapo", "sapo", {"aggregation": "sequence"}),
        ("dppo", "dppo", {"dppo_low": 0.2, "dppo_high": 0.2, "dppo_kl": 1e-3}),
        ("gmpo", "gmpo", {"clip_ratio": 0.4, "clip_ratio_high": 0.4, "aggregation": "sequence"}),
        ("vespo", "vespo", {}),
        (
            *("luspo", "clip"),
            {
                "clip_ratio": 2e-3,
                "clip_ratio_high": 2.5e-3,
                "aggregation": "sequence_sum",
                "ratio_level": "sequence",
            },
        ),
        ("gpg", "reinforce", {}),
        ("maxrl", "clip", {"clip_ratio": 0.2}),
        ("reinforce", "reinforce", {"aggregation": "sequence_sum"}),
        ("rloo", "clip", {"clip_ratio": 0.2}),
        ("reinforce_pp", "clip", {"clip_ratio": 0.2}),
        ("importance_sampling", "importance_sampling", {}),
    ],
)
def test_a_preset_is_its_loss(name: str, loss: str, options: dict[str, Any]) -> None:
    expected = policy_loss(fixtures.inputs(0.6), fixtures.options(loss, **options)).loss.item()
    assert loss_value(algorithm=name) == expected
    assert loss_value() == loss_value(algorithm="grpo")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("grpo", [1.414214, -0.707107, -0.707107]),
        ("dr_grpo", [0.666667, -0.333333, -0.333333]),
        ("dppo", [0.666667, -0.333333, -0.333333]),
        ("rloo", [1, -0.5, -0.5]),
        ("gpg", [0.666667, -0.333333, -0.333333]),
        ("maxrl", [1.999994, -0.999997, -0.999997]),
        ("reinforce", [1, 0, 0]),
        ("reinforce_pp", [1, 0, 0]),
        ("ppo", [1, 0, 0]),
    ],
)
def test_a_preset_is_its_advantage(name: str, first: list[float]) -> None:
    advantages = make_algorithm(configured(algorithm=name).rl_training).advantages
    assert advantages([1, 0, 0]) == pytest.approx(first, abs=1e-6)


def test_groups_without_variance_say_something_to_a_baseline_that_is_not_the_group() -> None:
    found = {
        name: make_algorithm(configured(algorithm=name).rl_training)
        for name in ("grpo", "reinforce", "ppo")
    }
    found["reinforce_pp"] = make_algorithm(configured(algorithm="reinforce_pp").rl_training)
    assert {name: made.advantages([0.5, 0.5]) for name, made in found.items()} == {
        **{"grpo": None, "reinforce": (0.5, 0.5), "ppo": (0.5, 0.5), "reinforce_pp": (0.5, 0.5)}
    }
    assert {name: made.advantages([0, 0]) for name, made in found.items()} == {
        **{"grpo": None, "reinforce": None, "ppo": (0, 0), "reinforce_pp": (0, 0)}
    }


def test_options_stand_beside_the_preset() -> None:
    # dapo's clip-higher
    assert loss_value(loss="dual_clip", algorithm="dapo") == pytest.approx(0.251462, abs=1e-6)
    # bounds of its own
    assert loss_value(loss="cispo", algorithm="dapo") == loss_value(algorithm="cispo")
    assert loss_value(
        ratio_level="sequence", loss_aggregation="sequence", clip_ratio_high=0.28
    ) == pytest.approx(-0.007851, abs=1e-6)
    # the weight of the KL is the trainer's to give, in LossInputs
    assert loss_value(kl_beta=0.5) == loss_value()
    assert make_algorithm(configured(kl_beta=0.5).rl_training).needs_reference
    algorithm = make_algorithm(configured(kl_estimator="k1", entropy_weight=0.1).rl_training)
    inputs = replace(fixtures.inputs(0.6), kl_beta=0.5)
    expected = policy_loss(inputs, fixtures.options(kl_estimator="k1", entropy_weight=0.1))
    assert algorithm.loss(inputs).loss.item() == expected.loss.item()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"algorithm": "reinforce", "clip_ratio": 0.2},
            "clip_ratio is set, but algorithm = 'reinforce' does not read",
        ),
        (
            {"algorithm": "reinforce", "ratio_level": "token"},
            "ratio_level is set, but algorithm = 'reinforce'",
        ),
        ({"algorithm": "vespo", "sampler_correction": "tis"}, "vespo's weight is against"),
        ({"loss": "python:mine.py:f", "entropy_weight": 0.1}, "weighs inputs.entropy itself"),
        ({"loss": "python:mine.py:f", "entropy_target": 0.0}, "weighs inputs.entropy itself"),
        ({"entropy_delta": 0.1}, "entropy_delta is set, but only read with entropy_target"),
        (
            {"entropy_target": 1.0, "entropy_min": 0.3, "entropy_max": 0.2},
            "entropy_min .0.3. is above",
        ),
        (
            {"algorithm": "maxrl", "overlong_buffer": 4, "overlong_length": 8},
            "overlong_buffer makes that of a wrong answer less",
        ),
        ({"algorithm": "dppo", "ratio_level": "sequence"}, "it reads advantage, .*dppo_low"),
        ({"algorithm": "grpo", "dual_clip": 3.0}, "dual_clip is set, but algorithm = 'grpo'"),
        (
            {"loss": "sapo", "clip_ratio": 0.1},
            "clip_ratio is set, but loss = 'sapo' does not read it",
        ),
        (
            {"algorithm": "ppo", "advantage": "mean"},
            "advantage is set, but algorithm = 'ppo' does not read it",
        ),
        (
            {"algorithm": "dpo", "clip_ratio": 0.2},
            "algorithm = 'dpo' does not read it .it reads none of these keys",
        ),
        (
            {"loss": "python:mine.py:f", "clip_ratio": 0.3},
            "clip_ratio is set, but loss = 'python:mine.py:f'",
        ),
        (
            {"loss": "two_sided", "ratio_delta": 1.1},
            "ratio_delta .1.1. has to be above 1 . clip_ratio_high .1.2.",
        ),
        ({"loss": "clipp"}, "'clipp' is not one of 'clip', 'dual_clip', .*python:file.py:function"),
        ({"advantage": "median"}, "'median' is not one of 'std', .*'none', or \"python:"),
        ({"algorithm": "grpoo"}, "rl_training.algorithm.*'grpo', 'dapo'"),
        ({"algorithm": ["grpo"]}, "rl_training.algorithm"),
        ({"loss": 3}, "rl_training.loss"),
        ({"overlong_buffer": 16}, "overlong_buffer and overlong_length belong together"),
        ({"overlong_length": 16}, "overlong_buffer and overlong_length belong together"),
        ({"overlong_buffer": 16, "overlong_length": 8}, "longer than overlong_length"),
        *(
            ({"algorithm": name, key: value}, f"{key} is set, but algorithm = '{name}' does not")
            for name in ("ppo", "online_dpo", "dpo", "sft", "reward_model")
            for key, value in (("credit", "turn"), ("turn_gamma", 0.9))
        ),
        ({"turn_gamma": 0.9}, 'turn_gamma is set, but only read with credit = "turn"'),
        ({"credit": "turn", "turn_gamma": 1.1}, "rl_training.turn_gamma"),
        ({"credit": "token"}, "rl_training.credit"),
    ],
)
def test_what_nothing_would_read_is_an_error(values: dict[str, Any], message: str) -> None:
    assert re.search(message, refused(**values))


def test_credit_of_turns() -> None:
    for values, gamma in (
        ({}, None),
        ({"credit": "episode"}, None),
        ({"credit": "turn"}, 1.0),
        ({"credit": "turn", "turn_gamma": 0.0}, 0.0),
    ):
        training = configured(**values).rl_training
        shaping = shaping_of(make_algorithm(training), configured_shaping(training))
        assert shaping.turn_gamma == gamma


def test_a_saved_configuration_says_everything_and_reads_back(tmp_path: Path) -> None:
    for name in PRESETS:
        config = configured(algorithm=name)
        (tmp_path / "saved.toml").write_text(config.to_toml())
        assert load_config(tmp_path / "saved.toml") == config
        assert config.rl_training.loss == PRESETS[name]["loss"]
        assert f'loss_aggregation = "{PRESETS[name]["loss_aggregation"]}"' in config.to_toml()
    own = configured(
        loss="python:mine.py:f", clip_ratio=0.2, loss_aggregation="token", advantage="std"
    ).rl_training
    # an earlier version saved all
    assert (own.clip_ratio, own.loss_aggregation, own.advantage) == (None, None, "std")


def test_naming_another_loss_on_the_command_line_takes_its_bounds(tmp_path: Path) -> None:
    """A replay of a run, whose configuration says everything, under another loss."""
    (file := tmp_path / "config.toml").write_text(
        configured(algorithm="dapo", clip_ratio=0.1).to_toml()
    )

    def bounds(*loss: str) -> tuple[float | None, float | None]:
        training = load_config(file, [f"rl_training.loss={name}" for name in loss]).rl_training
        return training.clip_ratio, training.clip_ratio_high

    assert bounds() == bounds("clip") == bounds("dual_clip") == (0.1, 0.28)
    assert bounds("cispo") == (1.0, 4.0)
    assert bounds("sapo") == bounds("python:mine.py:f") == (None, None)
    file.write_text(configured(algorithm="cispo").to_toml())
    assert bounds() == (1.0, 4.0) and bounds("clip") == (0.2, None)


def test_naming_another_algorithm_on_the_command_line_takes_its_preset(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[rl_training]\nclip_ratio = 0.1\nadvantage = "mean"\nkl_beta = 0.1\n')
    switched = load_config(file, ["rl_training.algorithm=reinforce"]).rl_training
    assert (switched.clip_ratio, switched.advantage, switched.kl_beta) == (None, "none", 0.1)
    kept = load_config(file, ["rl_training.algorithm=grpo"]).rl_training
    assert (kept.clip_ratio, kept.advantage) == (0.1, "mean")
    told = load_config(
        file, ['rl_training.algorithm="gspo"', "rl_training.clip_ratio=0.3"]
    ).rl_training
    assert (told.clip_ratio, told.clip_ratio_high, told.ratio_level) == (0.3, 4e-4, "sequence")


def prepared(advantages: list[float], **columns: Any) -> PreparedBatch:
    """Of the fixture's six sequences, each with one number for all its tokens."""
    values = np.concatenate(
        [np.full(n, value) for n, value in zip(fixtures.LENGTHS, advantages, strict=True)]
    )
    return PreparedBatch(
        lengths=tuple(fixtures.LENGTHS),
        rollout_logprobs=np.zeros(20, np.float32),
        advantages=values.astype(np.float32),
        fresh=np.ones(20, bool),
        has_rollout_logprobs=np.ones(20, bool),
        **columns,
    )


def test_reinforce_pp_has_verls_numbers() -> None:
    firsts = np.cumsum([0, *fixtures.LENGTHS[:-1]])
    found = whitened(prepared(REWARDS)).advantages
    assert found[firsts][[0, 3]] == pytest.approx([1.386907, 0.206561], abs=1e-6)
    baseline = make_algorithm(configured(advantage="mean", advantage_whiten=True).rl_training)
    means = [value for group in GROUPS for value in baseline.advantages(group) or ()]
    assert baseline.finish is not None
    found = baseline.finish(prepared(means)).advantages[firsts]
    assert found == pytest.approx(
        [1.550745, -0.704884, -0.704884, -0.140977, -0.704884, 0.986838], abs=1e-6
    )


def test_reinforce_pp_takes_the_kl_of_what_is_still_to_come() -> None:
    penalty = np.arange(20, dtype=np.float32) / 100
    found = whitened(prepared(REWARDS, kl_penalty=penalty)).advantages
    values, at = [], 0
    for length, reward in zip(fixtures.LENGTHS, REWARDS, strict=True):
        values += [
            reward - penalty[t : at + length].astype(float).sum() for t in range(at, at + length)
        ]
        at += length
    expected = (np.array(values) - np.mean(values)) / np.std(values, ddof=1)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_only_what_asks_for_it_has_a_batch_level_step() -> None:
    has_one = {
        name
        for name in PRESETS
        if make_algorithm(configured(algorithm=name).rl_training).finish is not None
    }
    assert has_one == {"reinforce_pp", "ppo"}


def group_of_shares(group: RolloutGroup) -> RolloutGroup:
    """The same with rewards from 0 on."""
    rollouts = (
        replace(rollout, scores={"reward": math.exp(rollout.reward)}) for rollout in group.rollouts
    )
    return replace(group, rollouts=tuple(rollouts))


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_makes_rewarded_answers_likelier(name: str) -> None:
    """Through the trainer: one step of two updates on rollouts of its own."""
    config = make_config(batch_size=8, algorithm=name, learning_rate=3e-3)
    trainer = make_trainer(config)
    groups = random_groups(4, seed=1)
    if config.advantage == "maxrl":
        groups = [group_of_shares(group) for group in groups]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    before = trainer.logprobs(rollouts)
    batch = make_batch(groups, estimate=trainer.algorithm.advantages)
    rows = [
        (0.0,) * (len(rollout.tokens) - len(row)) + tuple(row)
        for rollout, row in zip(rollouts, before, strict=True)
    ]
    sequences = tuple(
        replace(sequence, rollout=replace(sequence.rollout, logprobs=row))
        for sequence, row in zip(batch.sequences, rows, strict=True)
    )
    result = trainer.train_step(replace(batch, sequences=sequences))
    assert result.metrics["optimizer_updates"] == 2
    gained = [
        after.mean() - was.mean()
        for after, was in zip(trainer.logprobs(rollouts), before, strict=True)
    ]
    wanted = [sequence.advantages[-1] for sequence in batch.sequences]
    assert np.corrcoef(gained, wanted)[0, 1] > 0.5
