"""The companions of rollouts, a line each."""

from typing import Any

from mlx_parallm.rollout_store.companion import RolloutCompanion
from mlx_parallm.rollout_store.distillation import BestTokens
from mlx_parallm.rollout_store.images import StoredImages
from mlx_parallm.rollout_store.routing import Experts
from mlx_parallm.types import Completion, Request, Rollout, RolloutGroup

_EXPERTS = Experts()
COMPANIONS: tuple[RolloutCompanion, ...] = (
    _EXPERTS,
    StoredImages(),
    BestTokens(),
)


def unkept_of(request: Request) -> str | None:
    """Name what a request has that is not kept for training, nor then its answers; None: they may
    be kept."""
    return next(filter(None, (each.unkept(request) for each in COMPANIONS)), None)


def of_prompt(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of other rollouts of the same prompt."""
    return {name: value for each in COMPANIONS for name, value in each.of_prompt(rollout).items()}


def answer_metadata(completion: Completion) -> dict[str, Any]:
    """Return what a program in Python gets beside an answer, by name."""
    return {name: value for each in COMPANIONS for name, value in each.metadata(completion).items()}


def shown_of(rollout: Rollout) -> dict[str, list[str]]:
    """Return what people see beside the texts of a rollout, by its name."""
    return {each.shown: each.names(rollout) for each in COMPANIONS if each.shown}


def first_shown(rollout: Rollout) -> str:
    """Name the first thing that a rollout shows beside its texts; "": it shows none."""
    return next((name for name, names in shown_of(rollout).items() if names), "")


def with_fitting_experts(group: RolloutGroup, experts: tuple[int, int, int] | None) -> RolloutGroup:
    """Return a group from outside, whose recorded experts the trainer can repeat: `Experts.fit`."""
    return _EXPERTS.fit(group, experts)
