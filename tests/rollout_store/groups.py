"""Groups for tests: hand-made ones, and Hypothesis strategies."""

import struct
from typing import Any

from hypothesis import strategies as st

from mlx_parallm.types import MAX_REWARD, Rollout, RolloutGroup

VOCAB_SIZE = 512


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def make_rollout(
    reward: float = 1.0, *, prompt: int = 2, sampled: int = 3, version: int = 0, **changes: Any
) -> Rollout:
    length = prompt + sampled
    values: dict[str, Any] = {
        "tokens": tuple(range(10, 10 + length)),
        "mask": (0,) * prompt + (1,) * sampled,
        "logprobs": (0.0,) * prompt + tuple(float32(-0.1 * (i + 1)) for i in range(sampled)),
        "policy_versions": (version,) * length,
        "temperature": 1.0,
        "scores": {"reward": reward},
    }
    return Rollout(**(values | changes))


def make_group(group_id: str = "g0", *, size: int = 2, **changes: Any) -> RolloutGroup:
    values: dict[str, Any] = {
        "group_id": group_id,
        "environment": "sums",
        "rollouts": tuple(make_rollout(float(i)) for i in range(size)),
    }
    return RolloutGroup(**(values | changes))


finite = st.floats(allow_nan=False, allow_infinity=False)
score = st.floats(-MAX_REWARD, MAX_REWARD)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Rollouts that can be trained on: token 0 given, at least one sampled."""
    mask = (0, *draw(st.lists(st.sampled_from((0, 1)), min_size=0, max_size=6)), 1)
    logprob = st.floats(-1e8, 0.0, width=32) | st.floats(-1e9, 0.0)
    length = len(mask)

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    return Rollout(
        tokens=column(st.integers(0, 200_000)),
        mask=mask,
        logprobs=tuple(
            value if sampled else 0.0 for value, sampled in zip(column(logprob), mask, strict=True)
        ),
        policy_versions=column(st.integers(0, 2**40)),
        temperature=draw(st.floats(0.01, 2.0)),
        scores={"reward": draw(score)}
        | draw(st.dictionaries(st.text(max_size=4), score, max_size=2)),
        stop_reason=draw(st.none() | st.sampled_from(("stop", "length"))),
        processed_logprobs=draw(st.none() | st.just(column(finite))),
        forced=draw(st.none() | st.just(column(st.sampled_from((0, 1))))),
        error=draw(st.none() | st.text(max_size=5)),
        zero_advantage=draw(st.booleans()),
        extra=draw(st.dictionaries(st.text(max_size=4), json_values, max_size=2)),
    )


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    members = tuple(draw(st.lists(rollouts(), min_size=1, max_size=3)))
    scalar = st.tuples(*[score] * len(members))
    per_token = st.tuples(*[st.tuples(*[score] * len(rollout.tokens)) for rollout in members])
    return RolloutGroup(
        group_id=draw(st.text(min_size=1, max_size=8)),
        environment=draw(st.text(min_size=1, max_size=8)),
        rollouts=members,
        advantages=draw(st.none() | scalar | per_token),
        index=draw(st.none() | st.integers(0, 2**40)),
        metadata=draw(st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    )
