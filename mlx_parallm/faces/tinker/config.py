"""[tinker]: Tinker's training API."""

from pathlib import Path

from pydantic import Field

from mlx_parallm.config.environment import Section


class TinkerConfig(Section):
    enabled: bool = False
    """Answer Tinker's API below /api/v1 (docs/library.md#tinkers-api); `mlx_parallm serve --tinker`
    sets it. Not with `train`."""
    directory: Path = Path("checkpoints/tinker")
    """Runs of the models that clients train: a directory each, with checkpoints and metrics."""
    max_models: int = Field(16, ge=1)
    """Models in training at the same time. One more takes the place of one whose client is gone,
    else it is refused."""
    kept_samplers: int = Field(16, ge=1)
    """Sets of sampler weights of each model that stay in memory. Named ones are read from disk
    again when they are asked for; a sampling client without a name whose weights are gone gets
    an error that says so."""
    max_samples: int = Field(4096, ge=1)
    """Samples that run or wait, over all requests; more are answered 429, which the SDK waits
    for."""
    max_result_bytes: int = Field(1 << 30, ge=1 << 20)
    """Memory for results that clients have not collected; beyond it new requests are answered
    429."""
