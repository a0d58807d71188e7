"""Groups for tests: hand-made ones, Hypothesis strategies, and the same on the Atropos wire."""

import struct
from typing import Any

from hypothesis import strategies as st

from mlx_parallm.integrations.atropos.queue import AtroposSettings
from mlx_parallm.types import Rollout, RolloutGroup

VOCAB_SIZE = 512
ATROPOS_SETTINGS = AtroposSettings(
    batch_size=8,
    max_token_length=32,
    vocab_size=VOCAB_SIZE,
    checkpoint_dir="checkpoints/run",
    checkpoint_interval=50,
    total_steps=1000,
    wandb_group=None,
    wandb_project=None,
    temperature=1.0,
    missing_logprobs="reject",
)


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


def scored_data(
    *, size: int = 2, first_token: int = 20, prompt: int = 2, sampled: int = 3, **changes: Any
) -> dict[str, Any]:
    """A group as atroposlib's BaseEnv posts it: labels with -100, log-probabilities with 1.0, the rest null."""
    tokens = [[first_token + i + k for k in range(prompt + sampled)] for i in range(size)]
    values: dict[str, Any] = {
        "tokens": tokens,
        "masks": [[-100] * prompt + row[prompt:] for row in tokens],
        "scores": [float(i) for i in range(size)],
        "advantages": None,
        "ref_logprobs": None,
        "messages": None,
        "generation_params": None,
        "inference_logprobs": [[1.0] * prompt + [-0.25 - 0.5 * i] * sampled for i in range(size)],
        "overrides": None,
        "group_overrides": None,
        "images": None,
        "env_id": None,
    }
    return values | changes


def as_sent(group: RolloutGroup) -> dict[str, Any]:
    """What `wire.from_scored_data` reads as this group, but for [G] advantages, which become rows."""
    rows = None
    if group.advantages is not None:
        pairs = zip(group.advantages, group.rollouts, strict=True)
        rows = [list(entry) if isinstance(entry, tuple) else [entry] * len(rollout.tokens) for entry, rollout in pairs]
    return {
        "tokens": [list(rollout.tokens) for rollout in group.rollouts],
        "masks": [
            [token if sampled else -100 for token, sampled in zip(rollout.tokens, rollout.mask, strict=True)]
            for rollout in group.rollouts
        ],
        "scores": [rollout.reward for rollout in group.rollouts],
        "inference_logprobs": [
            [value if sampled else 1.0 for value, sampled in zip(rollout.logprobs or (), rollout.mask, strict=True)]
            for rollout in group.rollouts
        ],
        "advantages": rows,
        "overrides": [
            {"temperature": rollout.temperature, "set_advantage_to_zero": rollout.zero_advantage}
            for rollout in group.rollouts
        ],
        "group_id": group.group_id,
        "environment": group.environment,
        "policy_versions": [list(rollout.policy_versions) for rollout in group.rollouts],
    }


finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | finite | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Rollouts that can be trained on: token 0 given, at least one sampled."""
    mask = (0, *draw(st.lists(st.sampled_from((0, 1)), min_size=0, max_size=6)), 1)
    logprob = st.floats(max_value=0.0, allow_infinity=False, allow_nan=False, width=32) | st.floats(-1e300, 0.0)
    length = len(mask)

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=length, max_size=length)))

    return Rollout(
        tokens=column(st.integers(0, 200_000)),
        mask=mask,
        logprobs=tuple(value if sampled else 0.0 for value, sampled in zip(column(logprob), mask, strict=True)),
        policy_versions=column(st.integers(0, 2**40)),
        temperature=draw(st.floats(0.01, 2.0)),
        scores={"reward": draw(finite)} | draw(st.dictionaries(st.text(max_size=4), finite, max_size=2)),
        stop_reason=draw(st.none() | st.sampled_from(("stop", "length"))),
        processed_logprobs=draw(st.none() | st.just(column(finite))),
        error=draw(st.none() | st.text(max_size=5)),
        zero_advantage=draw(st.booleans()),
    )


@st.composite
def groups(draw: st.DrawFn) -> RolloutGroup:
    members = tuple(draw(st.lists(rollouts(), min_size=1, max_size=3)))
    scalar = st.tuples(*[finite] * len(members))
    per_token = st.tuples(*[st.tuples(*[finite] * len(rollout.tokens)) for rollout in members])
    return RolloutGroup(
        group_id=draw(st.text(min_size=1, max_size=8)),
        environment=draw(st.text(min_size=1, max_size=8)),
        rollouts=members,
        advantages=draw(st.none() | scalar | per_token),
        index=draw(st.none() | st.integers(0, 2**40)),
        metadata=draw(st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    )
