"""What a step has to tell: the engine's events, by request. Frozen, no MLX."""

from dataclasses import dataclass

from mlx_parallm.errors import ParallmError
from mlx_parallm.types import CompletionDelta, RequestOutput


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What one choice of a streamed request gained."""

    request_id: str
    delta: CompletionDelta


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a generation request, streamed or not."""

    request_id: str
    output: RequestOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be run at all."""

    request_id: str
    error: ParallmError


Event = StreamDelta | Finished | Failed
