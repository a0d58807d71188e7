"""The companions of rollouts, a line each."""

from typing import Any

from mlx_parallm.rollout_store.companion import RolloutCompanion
from mlx_parallm.rollout_store.distillation import BestTokens
from mlx_parallm.rollout_store.images import StoredImages
from mlx_parallm.rollout_store.routing import Experts
from mlx_parallm.types import Completion, RolloutGroup

_EXPERTS = Experts()
COMPANIONS: tuple[RolloutCompanion, ...] = (
    _EXPERTS,
    StoredImages(),
    BestTokens(),
)


def answer_metadata(completion: Completion) -> dict[str, Any]:
    """Return what a program in Python gets beside an answer, by name."""
    return {name: value for each in COMPANIONS for name, value in each.metadata(completion).items()}


def with_fitting_experts(group: RolloutGroup, experts: tuple[int, int, int] | None) -> RolloutGroup:
    """Return a group from outside, whose recorded experts the trainer can repeat: `Experts.fit`."""
    return _EXPERTS.fit(group, experts)
