"""Tinker's training API, plugged in: the part if a configuration needs it; its packages are
imported then."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlx_parallm.config.leaves import Leaf
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.packages import require

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config
    from mlx_parallm.config.training import LearningSection
    from mlx_parallm.faces.tinker.part import TinkerPart

LEAF = Leaf(
    "tinker",
    section="mlx_parallm.faces.tinker.config:TinkerConfig",
    part="mlx_parallm.faces.tinker.leaf:tinker_part",
    clients_train="enabled",
    serve_help="answer Tinker's training API too (docs/library.md#tinkers-api)",
)

PACKAGES = ("google.protobuf", "zstandard")


def tinker_part(config: "Config") -> "TinkerPart | None":
    """Return the part for the daemon; None: `enabled` is false.

    Raises ConfigError: no package, or server.kv_bits is set.
    """
    from mlx_parallm.faces.tinker.config import TinkerConfig

    section = config.section(TinkerConfig)
    if not section.enabled:
        return None
    require("tinker.enabled = true", *PACKAGES)
    if bits := config.server.kv_bits:
        raise ConfigError(
            f"server.kv_bits = {bits}: Tinker's clients train on the sampler's log-probabilities,"
            " and the learner's"
            " keys and values are not quantised: leave kv_bits out"
        )
    from mlx_parallm.faces.tinker.part import TinkerPart
    from mlx_parallm.faces.tinker.recorder import RecorderOptions
    from mlx_parallm.system.files import GB

    def training_of(values: Mapping[str, Any]) -> "LearningSection":
        return config.rl_training.model_copy(update=dict(values))

    def with_training(values: Mapping[str, Any]) -> "Config":
        return config.model_copy(update={"rl_training": training_of(values)})

    recorded = RecorderOptions(
        config.rollouts.min_free_gb,
        round(config.logging.tokens_gb * GB / 16),
        lambda name, values: with_training(values).saved_as(name),
    )
    return TinkerPart(section, config.server, training_of, recorded)
