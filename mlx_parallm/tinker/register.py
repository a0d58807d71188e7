"""The line that the daemon has: the part where it is asked for, whose packages are imported only then."""

from typing import TYPE_CHECKING

from mlx_parallm.config.load import Config
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.packages import require

if TYPE_CHECKING:
    from mlx_parallm.tinker.part import TinkerPart

PACKAGES = ("google.protobuf", "zstandard")


def tinker_part(config: Config) -> "TinkerPart | None":
    """The part for the daemon; None = not asked for. Raises ConfigError: no package, or server.kv_bits is set."""
    if not config.tinker.enabled:
        return None
    require("tinker.enabled = true", *PACKAGES)
    if bits := config.server.kv_bits:
        raise ConfigError(
            f"server.kv_bits = {bits}: Tinker's clients train on the sampler's log-probabilities, and the learner's"
            " keys and values are not quantised: leave kv_bits out"
        )
    from mlx_parallm.tinker.part import TinkerPart

    return TinkerPart(config)
