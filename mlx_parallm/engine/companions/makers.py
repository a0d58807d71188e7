"""The companions of an engine's sequences, a line each."""

from collections.abc import Callable

from mlx_parallm.engine.companions.companion import EngineCompanion, ModelToServe
from mlx_parallm.engine.companions.images import features_of
from mlx_parallm.engine.companions.routing import recorded_routing
from mlx_parallm.models.adapters.served import LoraContext

Maker = Callable[[LoraContext], EngineCompanion]

COMPANIONS: tuple[Callable[[ModelToServe], Maker | None], ...] = (
    features_of,
    recorded_routing,
)
"""Each sees a model before its tree is wrapped for serving, and returns what makes its companion
afterwards; None: it has none. Raises ConfigError."""


def makers_of(served: ModelToServe) -> list[Maker]:
    """Return what makes the companions of a model that is not wrapped yet. Raises ConfigError."""
    made = (of_model(served) for of_model in COMPANIONS)
    return [maker for maker in made if maker is not None]
