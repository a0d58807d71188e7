"""Recorded experts in an engine: `Completion.routed_experts` and `Completion.prompt_experts`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from mlx_parallm.engine.companions.companion import ModelToServe, SequenceRecord, TokenRecorder
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.adapters.served import LoraContext
from mlx_parallm.models.experts.replay import REPEATED, REPEATED_PROMPTS
from mlx_parallm.models.experts.routing import (
    ForwardRouting,
    prepare_routing,
    routed,
    routing_shape,
    why_not_routed,
)
from mlx_parallm.types import NARROW_IDS, PromptExperts, RoutedExperts


class ExpertRecord(SequenceRecord):
    """The experts of a sequence's tokens, as in `RoutedExperts.ids`."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self._layers, self._each, number = shape
        self._wide = number > NARROW_IDS
        self.token_bytes = self._layers * self._each * (1 + self._wide)

    def fields(self, since: int, prompt: Sequence[tuple[int, bytes]]) -> dict[str, Any]:
        ids = bytes(self.data[since * self.token_bytes :])
        parts = tuple(PromptExperts(start, self._experts(part)) for start, part in prompt)
        return {"routed_experts": self._experts(ids) if ids else None, "prompt_experts": parts}

    def _experts(self, ids: bytes) -> RoutedExperts:
        return RoutedExperts(self._layers, self._each, ids, self._wide)


class RecordedRouting(TokenRecorder):
    """
    Args:
        shape: (layers, experts a token, experts) of a model that `prepare_routing` has prepared.
        prompts: those of the prompts' computed tokens are recorded too.
    """

    no_drafts = "the experts of sampled tokens are recorded"

    def __init__(self, shape: tuple[int, int, int], *, prompts: bool = False) -> None:
        self._shape, self.records_prompts = shape, prompts

    def record(self) -> SequenceRecord:
        return ExpertRecord(self._shape)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], mx.array]]:
        """[tokens, layers, k] uint8, or uint16 of more experts than a byte counts."""
        routing = ForwardRouting()
        kind = mx.uint16 if self._shape[2] > NARROW_IDS else mx.uint8
        with routed(routing):
            yield lambda: routing.by_token().astype(kind)


def recorded_routing(served: ModelToServe) -> Callable[[LoraContext], RecordedRouting] | None:
    """Return what makes the companion, if the server gives experts back, or a trainer repeats them
    (`REPEATED`). Raises ConfigError: the server would, and the model's cannot be recorded."""
    server, model = served.server, served.loaded.model
    if not (server.enable_return_routed_experts or REPEATED in served.recorded):
        return None
    prepare_routing(model)
    if server.enable_return_routed_experts and (reason := why_not_routed(model)):
        raise ConfigError(f"server.enable_return_routed_experts = true, but {reason}: leave it out")
    if (shape := routing_shape(model)) is None:
        return None
    prompts = server.record_prompt_experts or REPEATED_PROMPTS in served.recorded
    return lambda lora: RecordedRouting(shape, prompts=prompts)
