import json
import math
import random
import struct
import zlib

import pytest
from hypothesis import given, settings

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.payload import decode_group, encode_group, encode_reject
from mlx_parallm.types import Rollout, RolloutGroup
from tests.rollout_store.groups import float32, groups, make_group, make_rollout


@settings(max_examples=40)
@given(groups())
def test_a_group_comes_back_equal_its_floats_to_the_last_bit(group: RolloutGroup) -> None:
    def bits(values: tuple[float, ...]) -> list[bytes]:  # -0.0 == 0.0, but not here
        return [struct.pack("d", value) for value in values]

    back = decode_group(encode_group(group))
    assert back == group
    for before, after in zip(group.rollouts, back.rollouts, strict=True):
        assert bits((*after.logprobs, after.temperature, after.reward)) == bits(
            (*before.logprobs, before.temperature, before.reward)
        )


def test_segments_and_missing_logprobs_come_back() -> None:
    segments = (make_rollout(prompt=1, scores={}), make_rollout(sampled=1, scores={}, version=3))
    unknown = make_rollout(-1.0, logprobs=None, processed_logprobs=(0.0, 0.0, -0.5, -0.5, -0.5))
    rows = ((0.5,) * 5, (-0.5,) * 5, (0.0,) * 5)
    group = make_group(
        rollouts=(unknown, make_rollout(earlier=segments), make_rollout()), advantages=rows
    )
    assert decode_group(encode_group(group)) == group


def test_float32_logprobs_take_four_bytes_a_token() -> None:
    single = [float32(-math.sqrt(i + 2)) for i in range(2000)]  # incompressible mantissas
    exact = [-math.sqrt(i + 2) for i in range(2000)]
    sizes = []
    for values in (single, exact):
        rollout = make_rollout(prompt=1, sampled=2000, logprobs=(0.0, *values))
        sizes.append(len(encode_group(make_group(rollouts=(rollout,)))))
    assert sizes[1] - sizes[0] > 2.5 * 2000  # 4 bytes a token, less what zlib saves


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metadata": {"task": object()}}, "cannot be stored"),
        ({"rollouts": (make_rollout(policy_versions=(2**70,) * 5),)}, "64 bits"),
    ],
    ids=["no JSON", "beyond 64 bits"],
)
def test_what_cannot_be_stored_is_refused(changes, reason) -> None:
    with pytest.raises(RolloutRejectedError, match=reason):
        encode_group(make_group(**changes))


def test_a_payload_that_was_cut_is_noticed() -> None:
    raw = zlib.decompress(encode_group(make_group()))
    with pytest.raises(ValueError, match="cut short"):
        decode_group(zlib.compress(raw[:-3]))


@pytest.mark.parametrize(
    "payload",
    [
        {"tokens": [[7] * (1 << 20), []]},
        {"messages": [[{"role": "user", "content": "a" * (1 << 21)}]]},
        [[[]] * (1 << 20)],
        {"scores": [random.random() for _ in range(200_000)]},
    ],
    ids=["numbers", "text", "lists", "digits"],
)
def test_of_a_large_reject_nothing_is_packed(payload: object) -> None:
    assert encode_reject(payload) is None


def test_a_reject_of_any_kind_is_packed() -> None:
    for payload in (None, 5, "text", [1, [2, {"a": None}]], {"scores": [float("inf")]}):
        assert json.loads(zlib.decompress(encode_reject(payload) or b"")) == payload
    assert json.loads(zlib.decompress(encode_reject(object) or b"")) == repr(object)


def test_rewards_and_lengths_of_turns_come_back_and_are_not_needed() -> None:
    """A group without them is stored as by versions that did not have them."""
    segment = make_rollout(scores={}, turn_lengths=(1, 2))
    rollout = make_rollout(earlier=(segment,), turn_rewards=(0.1, -2.0, 3.0))
    group = make_group(rollouts=(rollout, make_rollout()))
    assert decode_group(encode_group(group)) == group
    assert Rollout.from_json(json.loads(json.dumps(rollout.to_json()))) == rollout
    assert b"turn_" not in zlib.decompress(encode_group(make_group()))
    before = {k: v for k, v in make_rollout().to_json().items() if not k.startswith("turn_")}
    assert Rollout.from_json(before) == make_rollout()
