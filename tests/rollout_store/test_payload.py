import math
import struct
import zlib

import pytest
from hypothesis import given

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.payload import decode_group, encode_group
from mlx_parallm.types import RolloutGroup
from tests.rollout_store.groups import float32, groups, make_group, make_rollout


@given(groups())
def test_a_group_comes_back_equal(group: RolloutGroup) -> None:
    assert decode_group(encode_group(group)) == group


@given(groups())
def test_floats_come_back_to_the_last_bit(group: RolloutGroup) -> None:
    def bits(values: tuple[float, ...]) -> list[bytes]:  # -0.0 == 0.0, but not here
        return [struct.pack("d", value) for value in values]

    for before, after in zip(group.rollouts, decode_group(encode_group(group)).rollouts, strict=True):
        assert bits(after.logprobs) == bits(before.logprobs)
        assert bits((after.temperature, after.reward)) == bits((before.temperature, before.reward))


def test_float32_logprobs_take_four_bytes_a_token() -> None:
    single = [float32(-math.sqrt(i + 2)) for i in range(2000)]  # incompressible mantissas
    exact = [-math.sqrt(i + 2) for i in range(2000)]
    sizes = []
    for values in (single, exact):
        rollout = make_rollout(prompt=1, sampled=2000, logprobs=(0.0, *values))
        sizes.append(len(encode_group(make_group(rollouts=(rollout,)))))
    assert sizes[1] - sizes[0] > 2.5 * 2000  # 4 bytes a token, less what zlib saves


def test_metadata_that_json_does_not_know_is_refused() -> None:
    with pytest.raises(RolloutRejectedError, match="cannot be stored"):
        encode_group(make_group(metadata={"task": object()}))


def test_an_integer_beyond_64_bits_is_refused() -> None:
    with pytest.raises(RolloutRejectedError, match="64 bits"):
        encode_group(make_group(rollouts=(make_rollout(policy_versions=(2**70,) * 5),)))


def test_a_payload_that_was_cut_is_noticed() -> None:
    raw = zlib.decompress(encode_group(make_group()))
    with pytest.raises(ValueError, match="cut short"):
        decode_group(zlib.compress(raw[:-3]))
