"""What a training step is made of: `RolloutBuffer` → TrainBatch → `collate` → mini-batches → trainer. No MLX."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_parallm.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class TrainSequence:
    """One rollout with what the trainer adds. `fresh`: read and sampled wholly by the weights the step starts from."""

    rollout: Rollout
    advantages: tuple[float, ...]  # [T]
    fresh: bool


EnvironmentNumbers = dict[str, float | None]
"""Of one environment in one step: groups, reward_mean, trained_groups, trained_sequences, staleness, dropped_stale."""


@dataclass(frozen=True)
class BatchStatistics:
    """Numbers about every group that the step consumed by its own choice: trained on, or dropped for want of variance.

    Groups that were dropped as too old say nothing about today's policy: only their number is kept.
    """

    groups: int = 0
    sequences: int = 0
    reward_mean: float | None = None
    reward_std: float | None = None  # population, over sequences
    groups_without_variance: float = 0.0  # fraction
    groups_all_wrong: float = 0.0  # fraction: no reward above 0
    groups_all_right: float = 0.0  # fraction: no reward below 1
    truncated_fraction: float = 0.0
    out_of_room_fraction: float = 0.0  # truncated by max_token_length, as far as is known: in-process environments
    eos_fraction: float | None = None  # of the sequences that say how they ended
    completion_tokens_mean: float = 0.0
    rollout_entropy: float | None = None  # mean of -logprobs over the sampled tokens that have one, in nats
    staleness: float = 0.0  # mean over the groups that are trained on, in steps
    staleness_max: int = 0
    dropped_stale: int = 0  # groups
    dropped_misfit: int = 0  # groups of another tokenizer or model
    groups_without_logprobs: int = 0
    extra_segments: int = 0  # sequences beyond one an episode, because the chat template rewrote history
    reward_by_environment: dict[str, float | None] = field(default_factory=dict)
    environments: dict[str, EnvironmentNumbers] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)  # further scores by name: means over who has them

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_metrics(self) -> dict[str, Any]:
        """For a metrics line: `parts` become keys of their own, e.g. rewards/correct/mean."""
        values = self.to_json()
        return values | {f"{name}/mean": mean for name, mean in values.pop("parts").items()}


@dataclass(frozen=True)
class TrainBatch:
    """The rollouts of one step. `gave_up`: why it holds fewer sequences than asked for (perhaps none)."""

    step: int
    groups: tuple[RolloutGroup, ...]
    sequences: tuple[TrainSequence, ...]
    statistics: BatchStatistics
    gave_up: str = ""
    constants: Mapping[str, float] = field(default_factory=dict)  # numbers of the whole batch that its source knows

    @property
    def group_ids(self) -> tuple[str, ...]:
        return tuple(group.group_id for group in self.groups)
