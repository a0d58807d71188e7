"""Scored groups on the Atropos wire, and the queue's settings."""

from typing import Any

from mlx_parallm.faces.atropos.queue import AtroposSettings
from mlx_parallm.types import RolloutGroup
from tests.rollout_store.groups import VOCAB_SIZE

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


def scored_data(
    *, size: int = 2, first_token: int = 20, prompt: int = 2, sampled: int = 3, **changes: Any
) -> dict[str, Any]:
    """A group as atroposlib's BaseEnv posts it: labels with -100, log-probabilities with 1.0,
    the rest null."""
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
    """What `wire.from_scored_data` reads as this group, but for [G] advantages, which become
    rows."""
    rows = None
    if group.advantages is not None:
        pairs = zip(group.advantages, group.rollouts, strict=True)
        rows = [
            list(entry) if isinstance(entry, tuple) else [entry] * len(rollout.tokens)
            for entry, rollout in pairs
        ]
    return {
        "tokens": [list(rollout.tokens) for rollout in group.rollouts],
        "masks": [
            [
                token if sampled else -100
                for token, sampled in zip(rollout.tokens, rollout.mask, strict=True)
            ]
            for rollout in group.rollouts
        ],
        "scores": [rollout.reward for rollout in group.rollouts],
        "inference_logprobs": [
            [
                value if sampled else 1.0
                for value, sampled in zip(rollout.logprobs or (), rollout.mask, strict=True)
            ]
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
