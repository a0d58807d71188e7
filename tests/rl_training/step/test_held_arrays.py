"""An adapter is more than what is trained of it: a frozen part is in its checkpoints, goes to the
other ranks, and is put back after a teacher's."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm.models.parameters import ParameterSlots
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from tests.rl_training.making import make_config, make_policy, make_trainer

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"use_rslora": True},
    {"use_dora": True},
    {"use_adalora": True, "adalora": {"target_r": 2}},
    {"loraplus_ratio": 4.0},
    {"qat_bits": 4},
)


def arrays_of(policy: TrainedPolicy) -> dict[str, mx.array]:
    return dict(zip(policy.held.names, policy.held.read(), strict=True))


def equal(one: dict[str, mx.array], other: dict[str, mx.array]) -> bool:
    return one.keys() == other.keys() and all(mx.array_equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("keys", KINDS, ids=lambda keys: next(iter(keys), "lora"))
@pytest.mark.parametrize("part", [None, "lora_a", "lora_b"])
def test_a_checkpoint_has_every_array_of_an_adapter(
    keys: dict[str, Any], part: str | None, tmp_path: Path
) -> None:
    config = make_config(lora=keys, sampler_correction="tis")
    policies = [make_policy(config) for _ in range(2)]
    trained = policies[0].slots.names
    for policy in policies:
        if part is not None:  # as a variant with a frozen part would
            for name, module in policy.model.named_modules():
                if f"{name}.{part}" in trained:
                    module.freeze(recurse=False, keys=part)
            policy.slots = ParameterSlots(policy.model)
        policy.held.write([mx.random.normal(array.shape) * 0.1 for array in policy.held.read()])
    ours, theirs = arrays_of(policies[0]), arrays_of(policies[1])
    assert set(trained) <= ours.keys() and not equal(ours, theirs)

    policies[1].save(tmp_path)
    teacher = policies[0].saved(tmp_path)
    assert equal(arrays_of(policies[0]), ours), "a teacher's arrays stay in the tree"
    with policies[0].held.bound(teacher):
        assert equal(arrays_of(policies[0]), theirs)
    policies[0].load(tmp_path)
    assert equal(arrays_of(policies[0]), theirs)


def test_the_other_ranks_get_a_frozen_part() -> None:
    trainer = make_trainer(make_config())
    held = arrays_of(trainer.policy)
    sent = {name: array + 1 for name, array in trainer.arrays().items()}
    assert {f"weights.{name}" for name in held} <= sent.keys()
    trainer.restore_arrays(sent)
    assert equal(arrays_of(trainer.policy), {name: array + 1 for name, array in held.items()})
