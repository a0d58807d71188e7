"""Recorded experts beside a rollout: its tokens' and those of its prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.companion import Part, RolloutCompanion, SpanRecorder
from mlx_parallm.types import (
    Completion,
    PromptExperts,
    Rollout,
    RolloutGroup,
    RoutedExperts,
    joined_experts,
)


class ExpertRecorder(SpanRecorder):
    """The experts of an episode's turns, and of the tokens that each turn's prompt adds: earlier
    turns recorded those before."""

    def __init__(self) -> None:
        self._sampled: list[RoutedExperts | None] = []  # one for each turn
        self._prompts: list[PromptExperts] = []
        self._last_sampled = 0

    def add_sampled(self, completion: Completion, end: int) -> None:
        if not completion.token_ids:
            return
        self._sampled.append(completion.routed_experts)
        parts = (part.behind(self._last_sampled) for part in completion.prompt_experts)
        self._prompts += [part for part in parts if part is not None]
        self._last_sampled = end - 1

    def fields(self) -> dict[str, Any]:
        return {
            "routed_experts": joined_experts(self._sampled),
            "prompt_experts": tuple(self._prompts),
        }


class Experts(RolloutCompanion):
    """`Rollout.routed_experts` and `Rollout.prompt_experts`. A group's columns begin with the
    experts of its prompts, each distinct stretch once."""

    def recorder(self) -> SpanRecorder:
        return ExpertRecorder()

    def of_answer(self, parts: Sequence[Part]) -> dict[str, Any]:
        sampled = [part.routed_experts for part in parts if part.token_ids]
        prompts = (part.prompt_experts for part in parts if part.prompt_experts)
        return {"routed_experts": joined_experts(sampled), "prompt_experts": next(prompts, ())}

    def metadata(self, completion: Completion) -> dict[str, Any]:
        """Experts [T, layers, k] of the sampled tokens."""
        recorded = completion.routed_experts
        return {} if recorded is None else {"routed_experts": recorded.array()}

    def check(self, segment: Rollout) -> None:
        length = len(segment.tokens)
        if (experts := segment.routed_experts) is not None and len(experts) != sum(segment.mask):
            raise RolloutRejectedError(
                f"experts of {len(experts)} tokens for {sum(segment.mask)} sampled ones"
            )
        end = 0
        for part in segment.prompt_experts:
            if part.start < end or part.stop >= length:
                raise RolloutRejectedError(
                    f"experts of the prompt's tokens {part.start} to {part.stop - 1}, behind those"
                    f" up to {end - 1}, of {length} tokens: the last one has none"
                )
            end = part.stop

    def fit(self, group: RolloutGroup, experts: tuple[int, int, int] | None) -> RolloutGroup:
        """Return a group from outside, whose recorded experts the trainer can repeat.

        Args:
            experts: (layers, experts a token, experts) of the trained model; None: its trainer
                repeats none, so the recorded ones are left out, and listed in
                `metadata["ignored_fields"]`.

        Raises RolloutRejectedError: they are of another model.
        """
        segments = [segment for rollout in group.rollouts for segment in rollout.segments]
        recorded = [s.routed_experts for s in segments if s.routed_experts is not None]
        recorded += [part.experts for segment in segments for part in segment.prompt_experts]
        if experts is None:
            if not recorded:
                return group
            ignored = [*group.metadata.get("ignored_fields", ()), "routed_experts"]
            return replace(
                group,
                rollouts=tuple(_without_experts(rollout) for rollout in group.rollouts),
                metadata={**group.metadata, "ignored_fields": ignored},
            )
        layers, each, count = experts
        for one in recorded:
            if (one.layers, one.each) != (layers, each):
                raise RolloutRejectedError(
                    f"routed_experts of {one.layers} layers and {one.each} experts a token; the"
                    f" model has {layers} and {each}"
                )
            if len(one) and (highest := int(one.array().max())) >= count:
                raise RolloutRejectedError(
                    f"routed_experts: expert {highest}, but a layer of the model has {count}"
                )
        return group

    def pack_group(self, group: RolloutGroup) -> tuple[dict[str, Any], Iterable[bytes], Any]:
        numbers: dict[RoutedExperts, int] = {}
        for rollout in group.rollouts:
            for segment in rollout.segments:
                for part in segment.prompt_experts:
                    numbers.setdefault(part.experts, len(numbers))
        header = {"prompt_experts": [_shape(each) for each in numbers]} if numbers else {}
        return header, [each.ids for each in numbers], numbers

    def pack(self, segment: Rollout, shared: Any) -> tuple[dict[str, Any], Iterable[bytes]]:
        header, columns = dict[str, Any](), []
        if (experts := segment.routed_experts) is not None:
            header["routed_experts"] = _shape(experts)
            columns.append(experts.ids)
        if segment.prompt_experts:
            parts = [[part.start, shared[part.experts]] for part in segment.prompt_experts]
            header["prompt_experts"] = parts
        return header, columns

    def unpack_group(self, header: Mapping[str, Any], read: Callable[[], bytes]) -> Any:
        return [_experts(shape, read()) for shape in header.get("prompt_experts", ())]

    def unpack(
        self, header: Mapping[str, Any], shared: Any, read: Callable[[], bytes]
    ) -> dict[str, Any]:
        shape, parts = header.get("routed_experts"), header.get("prompt_experts", ())
        return {
            "routed_experts": None if shape is None else _experts(shape, read()),
            "prompt_experts": tuple(PromptExperts(start, shared[n]) for start, n in parts),
        }


def _without_experts(rollout: Rollout) -> Rollout:
    earlier = tuple(_without_experts(segment) for segment in rollout.earlier)
    return replace(rollout, routed_experts=None, prompt_experts=(), earlier=earlier)


def _shape(experts: RoutedExperts) -> list[Any]:
    return [experts.layers, experts.each, experts.wide]


def _experts(shape: list[Any], ids: bytes) -> RoutedExperts:
    layers, each, wide = shape
    return RoutedExperts(layers, each, ids, wide)
