"""The Atropos wire format ↔ `RolloutGroup`. Only this file (and `rl_training.atropos_client`) knows its conventions.

On the wire `masks` are labels: -100 where a token was given, the token's own id where the policy sampled it; and
`inference_logprobs` hold 1.0 where there is none. Here `mask` is 0 or 1 and a missing log-probability is a reason to
refuse the group: the ratio of the loss needs the behaviour policy's own numbers.

Beyond atroposlib's ScoredData three optional fields are understood: `group_id`, `policy_versions` [G][T] and
`environment`. Fields that would change the training but that this trainer has no use for are refused (images, `sft`)
or, when the group is still what it says it is without them, listed in `metadata["ignored_fields"]` (ref_logprobs: the
trainer computes its own reference; distill_*: teacher data). Range checks are `checks.check_group`'s.
"""

import hashlib
from array import array
from collections.abc import Mapping
from math import isfinite
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.checks import LOGPROB_TOLERANCE
from mlx_parallm.types import Rollout, RolloutGroup

GIVEN = -100  # the label of a token that is not trained on
MISSING_LOGPROB = 1.0
_DUMMY_TOKENS = list(range(128))  # what atroposlib's DummyManagedServer invents for servers without token ids
_DUMMY_LOGPROB = -0.5
_KEPT_AS_METADATA = ("messages", "generation_params", "env_id")
_IGNORED = ("ref_logprobs", "distill_token_ids", "distill_logprobs")


class ScoredData(BaseModel):
    """One scored group as environments send it (atroposlib 0.4.0's ScoredData and three optional fields of ours)."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: Any = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any] | None] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: int | None = None
    distill_token_ids: Any = None
    distill_logprobs: Any = None
    group_id: str | None = None
    environment: str | None = None
    policy_versions: list[list[int]] | None = None


def from_scored_data(
    data: Mapping[str, Any], *, policy_version: int, environment: str, temperature: float = 1.0
) -> RolloutGroup:
    """A group from the wire. `tokens`, `masks`, `inference_logprobs` are [G][T]; `scores` [G].

    `policy_version` is given to every sampled token of a group without `policy_versions` (environments send none):
    callers pass the version served when the group arrives, the newest that can have sampled it. `temperature` is used
    where the group names none; precedence overrides[i] > generation_params > group_overrides > `temperature`, and a
    value <= 0 counts as 1 (both as in Atropos' own trainer). A group without `group_id` gets one from its content,
    so that a group that is sent twice is known the second time.

    Raises RolloutRejectedError with the reason in words.
    """
    try:
        wire = ScoredData.model_validate(data)
    except ValidationError as error:
        raise RolloutRejectedError(_first_faults(error)) from None
    _refuse_what_is_not_supported(wire)
    size = len(wire.tokens)
    _require_rows(wire, size)
    assert wire.inference_logprobs is not None  # _require_rows
    overrides = [entry or {} for entry in wire.overrides or []]
    rollouts = tuple(
        _rollout(wire, number, overrides[number] if number < len(overrides) else {}, policy_version, temperature)
        for number in range(size)
    )
    metadata = {key: getattr(wire, key) for key in _KEPT_AS_METADATA if getattr(wire, key) is not None}
    if ignored := [key for key in _IGNORED if getattr(wire, key) is not None]:
        metadata["ignored_fields"] = ignored
    return RolloutGroup(
        group_id=wire.group_id or f"sha256:{_content_hash(wire)}",
        environment=wire.environment or environment,
        rollouts=rollouts,
        advantages=None if wire.advantages is None else tuple(tuple(row) for row in wire.advantages),
        metadata=metadata,
    )


def to_scored_data(group: RolloutGroup) -> dict[str, Any]:
    """The group as Atropos' API hands it out: every field present, null when unset. [G] advantages become rows."""
    overrides: list[dict[str, Any]] = [{"temperature": rollout.temperature} for rollout in group.rollouts]
    for entry, rollout in zip(overrides, group.rollouts, strict=True):
        if rollout.zero_advantage:
            entry["set_advantage_to_zero"] = True
    return dict.fromkeys(ScoredData.model_fields) | {
        "tokens": [list(rollout.tokens) for rollout in group.rollouts],
        "masks": [
            [token if sampled else GIVEN for token, sampled in zip(rollout.tokens, rollout.mask, strict=True)]
            for rollout in group.rollouts
        ],
        "scores": [rollout.reward for rollout in group.rollouts],
        "inference_logprobs": [
            [
                value if sampled else MISSING_LOGPROB
                for value, sampled in zip(rollout.logprobs, rollout.mask, strict=True)
            ]
            for rollout in group.rollouts
        ],
        "advantages": _advantage_rows(group),
        "messages": group.metadata.get("messages"),
        "generation_params": group.metadata.get("generation_params"),
        "overrides": overrides,
        "env_id": group.metadata.get("env_id"),
        "group_id": group.group_id,
        "environment": group.environment,
        "policy_versions": [list(rollout.policy_versions) for rollout in group.rollouts],
    }


def _versions(wire: ScoredData, number: int, mask: list[int], policy_version: int) -> tuple[int, ...]:
    """As sent; else `policy_version` where a token was sampled, and unknown (-1) where it was given."""
    if wire.policy_versions:
        return tuple(wire.policy_versions[number])
    return tuple(policy_version if sampled else -1 for sampled in mask)


def _rollout(
    wire: ScoredData, number: int, override: Mapping[str, Any], policy_version: int, temperature: float
) -> Rollout:
    assert wire.inference_logprobs is not None  # _require_rows
    tokens, labels = wire.tokens[number], wire.masks[number]
    mask = [0 if label == GIVEN else 1 for label in labels]
    values = wire.inference_logprobs[number]
    if tokens == _DUMMY_TOKENS and all(value == _DUMMY_LOGPROB for value in values):
        raise RolloutRejectedError(
            f"sequence {number} is atroposlib's placeholder (tokens 0 to 127): the environment must use"
            " server_type vllm, which returns real token ids and log-probabilities"
        )
    for position, (token, label, value) in enumerate(zip(tokens, labels, values, strict=True)):
        if label not in (GIVEN, token):
            raise RolloutRejectedError(
                f"sequence {number}: masks[{position}] is {label}, neither -100 (given) nor the token's id {token}"
            )
        if label != GIVEN and value > LOGPROB_TOLERANCE:
            raise RolloutRejectedError(
                f"sequence {number}: sampled token {position} has no log-probability (inference_logprobs is {value:g})"
            )
    return Rollout(
        tokens=tuple(tokens),
        mask=tuple(mask),
        logprobs=tuple(value if sampled else 0.0 for value, sampled in zip(values, mask, strict=True)),
        policy_versions=_versions(wire, number, mask, policy_version),
        temperature=_temperature(wire, override, temperature),
        scores={"reward": wire.scores[number]},
        zero_advantage=bool(override.get("set_advantage_to_zero")),
    )


def _temperature(wire: ScoredData, override: Mapping[str, Any], default: float) -> float:
    for source in (override, wire.generation_params or {}, wire.group_overrides or {}):
        value = source.get("temperature")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise RolloutRejectedError(f"temperature {value!r} is not a number")
        return float(value) if value > 0 else 1.0
    return default


def _refuse_what_is_not_supported(wire: ScoredData) -> None:
    if wire.images is not None:
        raise RolloutRejectedError("the group carries images; the policy reads text only")
    for where in (*(entry or {} for entry in wire.overrides or []), wire.group_overrides or {}):
        if where.get("sft"):
            raise RolloutRejectedError(
                "the group asks for supervised training (sft), which this trainer does not mix in"
            )
    if wire.inference_logprobs is None:
        raise RolloutRejectedError(
            "no inference_logprobs: the environment must collect through atroposlib's ManagedServer"
            " (server_type vllm), or return them itself"
        )


def _require_rows(wire: ScoredData, size: int) -> None:
    """Every field has G entries, and each row of a [G][T] field the length of its tokens."""
    for name in ("masks", "scores", "inference_logprobs", "advantages", "policy_versions"):
        rows = getattr(wire, name)
        if rows is None:
            continue
        if len(rows) != size:
            raise RolloutRejectedError(f"{len(rows)} {name} for {size} sequences")
        if name == "scores":
            continue
        for number, (row, tokens) in enumerate(zip(rows, wire.tokens, strict=True)):
            if len(row) != len(tokens):
                raise RolloutRejectedError(f"sequence {number}: {len(row)} {name} for {len(tokens)} tokens")
    if len(wire.overrides or []) > size:
        raise RolloutRejectedError(f"{len(wire.overrides or [])} overrides for {size} sequences")


def _first_faults(error: ValidationError) -> str:
    faults = [f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors(include_url=False)[:3]]
    return "not a scored group: " + "; ".join(faults)


def _content_hash(wire: ScoredData) -> str:
    digest = hashlib.sha256(repr((wire.env_id, wire.scores)).encode())
    for tokens, masks, values in zip(wire.tokens, wire.masks, wire.inference_logprobs or [], strict=True):
        digest.update(array("d", values).tobytes())
        digest.update(repr((tokens, masks)).encode())
    return digest.hexdigest()[:32]


def _advantage_rows(group: RolloutGroup) -> list[list[float]] | None:
    if group.advantages is None:
        return None
    rows: list[list[float]] = []
    for entry, rollout in zip(group.advantages, group.rollouts, strict=True):
        rows.append(list(entry) if isinstance(entry, tuple) else [cast(float, entry)] * len(rollout.tokens))
    return rows
