"""The companions of a policy, a line each."""

from collections.abc import Callable

from mlx_parallm.models.loading import LoadedModel
from mlx_parallm.models.parameters import ParameterSlots
from mlx_parallm.rl_training.step.companion import StepCompanion
from mlx_parallm.rl_training.step.images import images_of, step_images
from mlx_parallm.rl_training.step.policy import TrainedPolicy
from mlx_parallm.rl_training.step.routing import experts_of

Maker = Callable[[TrainedPolicy, Callable[[], None]], StepCompanion | None]
"""(policy, the trainer's `between_blocks`) → its companion; None: it has none of this kind."""

COMPANIONS: tuple[Maker, ...] = (
    images_of,
    experts_of,
)


def companions_of(
    policy: TrainedPolicy, between_blocks: Callable[[], None]
) -> dict[str, StepCompanion]:
    """Return the companions of a policy, by their names."""
    made = (maker(policy, between_blocks) for maker in COMPANIONS)
    return {each.name: each for each in made if each is not None}


def companions_of_scorer(
    loaded: LoadedModel, slots: ParameterSlots, between_blocks: Callable[[], None]
) -> tuple[StepCompanion, ...]:
    """Return the companions of a model that scores sequences and is not trained: what it reads
    beside tokens. `slots`: of its tree."""
    images = step_images(loaded.image_parts, loaded.model, slots, between_blocks)
    return () if images is None else (images,)
