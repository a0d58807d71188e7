"""The Atropos wire format → `RolloutGroup`. Only this folder knows its conventions.

On the wire `masks` are labels: -100 if a token was given, the token's own id if the policy
sampled it; and `inference_logprobs` hold 1.0 if there is none. Here `mask` is 0 or 1; a group
without `inference_logprobs` (server_type openai) has rollouts with `logprobs` None, and a sampled
token without one among others refuses the group. Zeros for all sampled tokens of a group, as
environments write that have none, are not log-probabilities either.

atroposlib's ManagedServer makes sequences of several turns: several sampled spans; after a turn its
EOS twice, the second one given; earlier turns given again (-100 and 1.0) when a plain completion
was extended. Only the label counts: a token is trained on if its label says so and nowhere else.
A template that rewrites history makes one sequence a turn there; only the environment knows whether
those belong together, and `episodes` says so.

Eight optional fields are ours: `group_id`, `environment`, `policy_versions` [G][T], `row`, the
sender's name of what the group was asked, `turn_rewards` [G][turns of the sequence], a part of the
score (`Rollout.turn_rewards`), each sequence's experts (`SentExperts`), and `episodes` [G]:
sequences with the same number are the segments of one episode, oldest first, with that episode's
score, which then counts once in the group (`Rollout.earlier`). Fields that would
change the training and have no counterpart here are refused (`sft`, messages with sound or video).
Fields without which the group keeps its meaning are listed in `metadata["ignored_fields"]`
(ref_logprobs: the trainer computes its own reference). `distill_token_ids` and
`distill_logprobs` are in `metadata["distill"]` (docs/distillation.md). `checks.check_group` checks
the ranges.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, ValidationError, field_validator

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.faces.atropos.companion import GIVEN, Integers, Optional, SentSequences
from mlx_parallm.faces.atropos.routing import SentExperts
from mlx_parallm.faces.atropos.sent_images import SentImages, refuse_other_media, without_pictures
from mlx_parallm.rollout_store.checks import GREEDY
from mlx_parallm.rollout_store.distillation import KEY, best_tokens
from mlx_parallm.server.protocol.fields import ListOf
from mlx_parallm.system.pydantic_faults import faults
from mlx_parallm.types import (
    LOGPROB_TOLERANCE,
    UNSCORED,
    Rollout,
    RolloutGroup,
    has_score,
    sampled_runs,
)

# placeholder of atroposlib's DummyManagedServer for servers without token ids
_DUMMY_TOKENS = list(range(128))
_DUMMY_LOGPROB = -0.5
FEWEST_CERTAIN = 8  # sampled tokens of a group: fewer may all be certain
MAX_TEMPERATURE = 1e6  # also against integers that no float holds
_KEPT_AS_METADATA = ("generation_params", "env_id", "row")
_IGNORED = ("ref_logprobs",)


Numbers = ListOf[ListOf[float]]
LONGEST_NAME = 256


def whole(name: str) -> str:
    # half a character (a lone surrogate) is a ValueError, so a 422; it can be neither kept nor
    # answered
    name.encode()
    return name


RowName = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME), AfterValidator(whole)]


class ScoredData(SentImages, SentExperts):
    """One scored group as environments send it: atroposlib 0.4.0's ScoredData, and eight optional
    fields of ours."""

    scores: ListOf[float | None]
    advantages: Optional[ListOf[float]] = None
    ref_logprobs: Optional[ListOf[float]] = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: Optional[ListOf[float]] = None
    overrides: Optional[dict[str, Any]] = None
    group_overrides: dict[str, Any] | None = None
    env_id: NonNegativeInt | None = None
    distill_token_ids: Optional[Integers] = None
    distill_logprobs: Optional[Numbers] = None
    group_id: str | None = None
    environment: str | None = None
    row: RowName | None = None
    policy_versions: Optional[ListOf[int]] = None
    episodes: Optional[int] = None
    turn_rewards: Optional[ListOf[float]] = None

    @field_validator("messages", mode="before")
    @classmethod
    def _have_role_and_content(cls, value: Any) -> Any:
        try:
            complete = all(
                "role" in message and "content" in message for row in value or [] for message in row
            )
        except TypeError:  # no lists of objects: the type's own message says so
            return value
        if not complete:
            raise ValueError("Message must have 'role' and 'content' fields")
        return value


OUR_FIELDS = (
    "group_id",
    "environment",
    "row",
    "policy_versions",
    "episodes",
    "turn_rewards",
    *ScoredData.ours,
)
SHOWN = tuple(SentImages.model_fields.keys() - SentSequences.model_fields.keys())
"""Fields of companions that show more of a prompt than its tokens."""
ATROPOS_FIELDS = tuple(name for name in ScoredData.model_fields if name not in OUR_FIELDS)


def from_scored_data(
    data: Mapping[str, Any],
    *,
    policy_version: int,
    environment: str,
    temperature: float = 1.0,
    reader: ImageReader | None = None,
) -> RolloutGroup:
    """A group from the wire. `tokens`, `masks`, `inference_logprobs` are [G][T]; `scores` [G].

    `policy_version` is given to every sampled token of a group without `policy_versions`
    (environments send none): callers pass the version served when the group arrives, the newest
    that can have sampled it. `temperature` is used if the group names none; precedence
    overrides[i] > generation_params > group_overrides > `temperature`, and a value <= 0 counts as 1
    (both as in Atropos' own trainer). A group without `group_id` gets one from its content, so that
    a group that is sent twice is known the second time. A score of null or NaN is none: that
    sequence counts nowhere. `reader` stores what the group shows; None: the
    policy reads texts alone.

    Raises RolloutRejectedError with the reason in words.
    """
    try:
        wire = ScoredData.model_validate(data)
    except ValidationError as error:
        raise RolloutRejectedError(f"not a scored group: {faults(error, 3)}") from error
    _refuse_what_is_not_supported(wire)
    size = len(wire.tokens)
    _require_rows(wire, size)
    ignored = [key for key, value in wire if key in _IGNORED and value is not None]
    if _are_placeholders(wire):
        wire.inference_logprobs = None
        ignored.append("inference_logprobs")
    overrides = wire.overrides or []
    if not any(map(has_score, wire.scores)):
        raise RolloutRejectedError("no sequence of the group has a score")
    rollouts = tuple(
        _rollout(
            wire,
            number,
            overrides[number] if number < len(overrides) else {},
            policy_version,
            temperature,
            reader,
        )
        for number in range(size)
    )
    metadata: dict[str, Any] = {
        key: value for key, value in wire if key in _KEPT_AS_METADATA and value is not None
    }
    if wire.messages is not None:
        metadata["messages"] = [
            [{**message, "content": without_pictures(message["content"])} for message in row]
            for row in wire.messages
        ]
    if ignored:
        metadata["ignored_fields"] = ignored
    if "inference_logprobs" in ignored and _is_greedy(wire):
        metadata[GREEDY] = True
    if wire.distill_token_ids is not None or wire.distill_logprobs is not None:
        metadata[KEY] = best_tokens(
            wire.distill_token_ids, wire.distill_logprobs, wire.tokens, wire.episodes
        )
    return RolloutGroup(
        group_id=wire.group_id or f"sha256:{_content_hash(wire)}",
        environment=wire.environment or environment,
        rollouts=rollouts if wire.episodes is None else _joined(rollouts, wire.episodes),
        advantages=None
        if wire.advantages is None
        else tuple(tuple(row) for row in wire.advantages),
        metadata=metadata,
    )


def _are_placeholders(wire: ScoredData) -> bool:
    """Whether zeros stand for the log-probabilities of all sampled tokens of the group."""
    rows = zip(wire.masks, wire.inference_logprobs or (), strict=False)
    values = [
        value
        for labels, row in rows
        for label, value in zip(labels, row, strict=True)
        if label != GIVEN
    ]
    return len(values) >= FEWEST_CERTAIN and not any(values)


def _is_greedy(wire: ScoredData) -> bool:
    """Whether the group says of each sequence that it was sampled at temperature 0: then zeros are
    what its sampler computed."""
    overrides = [*(wire.overrides or []), *({} for _ in wire.tokens)][: len(wire.tokens)]
    common = wire.generation_params or {}, wire.group_overrides or {}
    temperatures = [
        next((v for s in (each, *common) if (v := s.get("temperature")) is not None), None)
        for each in overrides
    ]
    return all(isinstance(value, int | float) and value <= 0 for value in temperatures)


def _joined(sequences: tuple[Rollout, ...], episodes: list[int]) -> tuple[Rollout, ...]:
    """One rollout an episode, in the order in which they begin."""
    segments: dict[int, list[Rollout]] = {}
    for sequence, episode in zip(sequences, episodes, strict=True):
        segments.setdefault(episode, []).append(sequence)
    for episode, parts in segments.items():
        if len({(part.is_scored, part.reward) for part in parts}) > 1:
            raise RolloutRejectedError(
                f"the sequences of episode {episode} have different scores; an episode has one"
            )
    return tuple(
        replace(
            parts[-1],
            earlier=tuple(replace(part, scores={}, turn_rewards=()) for part in parts[:-1]),
            turn_rewards=tuple(reward for part in parts for reward in part.turn_rewards),
        )
        for parts in segments.values()
    )


def _versions(
    wire: ScoredData, number: int, mask: list[int], policy_version: int
) -> tuple[int, ...]:
    """Return the versions as sent; else `policy_version` if a token was sampled, and -1
    (unknown) elsewhere."""
    if wire.policy_versions:
        return tuple(wire.policy_versions[number])
    return tuple(policy_version if sampled else -1 for sampled in mask)


def _rollout(
    wire: ScoredData,
    number: int,
    override: Mapping[str, Any],
    policy_version: int,
    temperature: float,
    reader: ImageReader | None,
) -> Rollout:
    tokens, labels = wire.tokens[number], wire.masks[number]
    mask = [0 if label == GIVEN else 1 for label in labels]
    values = None if wire.inference_logprobs is None else wire.inference_logprobs[number]
    if tokens == _DUMMY_TOKENS and all(value == _DUMMY_LOGPROB for value in values or ()):
        raise RolloutRejectedError(
            f"sequence {number} is atroposlib's placeholder (tokens 0 to 127): the environment must"
            " use server_type vllm, which returns real token ids and log-probabilities"
        )
    for position, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if label not in (GIVEN, token):
            raise RolloutRejectedError(
                f"sequence {number}: masks[{position}] is {label}, neither -100 (given) nor"
                f" the token's id {token}"
            )
    turn_rewards = () if wire.turn_rewards is None else tuple(wire.turn_rewards[number])
    if wire.turn_rewards is not None and len(turn_rewards) != (turns := len(sampled_runs(mask))):
        raise RolloutRejectedError(
            f"sequence {number}: {len(turn_rewards)} turn_rewards for {turns} turns"
        )
    score = wire.scores[number]
    return Rollout(
        tokens=tuple(tokens),
        mask=tuple(mask),
        logprobs=None if values is None else _sampled_logprobs(number, values, mask),
        policy_versions=_versions(wire, number, mask, policy_version),
        temperature=_temperature(wire, override, temperature),
        scores={"reward": score} if has_score(score) else {"reward": 0.0, UNSCORED: 1.0},
        zero_advantage=bool(override.get("set_advantage_to_zero")) or not has_score(score),
        turn_rewards=turn_rewards,
        **wire.carried(number, mask, reader),
    )


def _sampled_logprobs(number: int, values: list[float], mask: list[int]) -> tuple[float, ...]:
    for position, (value, sampled) in enumerate(zip(values, mask, strict=True)):
        if sampled and value > LOGPROB_TOLERANCE:
            raise RolloutRejectedError(
                f"sequence {number}: sampled token {position} has no log-probability"
                f" (inference_logprobs is {value:g})"
            )
    return tuple(value if sampled else 0.0 for value, sampled in zip(values, mask, strict=True))


def _temperature(wire: ScoredData, override: Mapping[str, Any], default: float) -> float:
    for source in (override, wire.generation_params or {}, wire.group_overrides or {}):
        value = source.get("temperature")
        if value is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= MAX_TEMPERATURE
        ):
            raise RolloutRejectedError(
                f"temperature {repr(value)[:80]} is not a number up to {MAX_TEMPERATURE:g}"
            )
        return float(value) if value > 0 else 1.0
    return default


def _refuse_what_is_not_supported(wire: ScoredData) -> None:
    for where in (*(wire.overrides or []), wire.group_overrides or {}):
        if where.get("sft"):
            raise RolloutRejectedError(
                "the group asks for supervised training (sft), which this trainer does not mix in"
            )
    refuse_other_media(wire.messages or ())


def _require_rows(wire: ScoredData, size: int) -> None:
    """Check that every field has G entries, and that each row of a [G][T] field is as long as
    its tokens."""
    by_token: dict[str, Sequence[Sequence[Any]] | None] = {
        "masks": wire.masks,
        "inference_logprobs": wire.inference_logprobs,
        "advantages": wire.advantages,
        "policy_versions": wire.policy_versions,
    }
    columns: dict[str, Sequence[Any] | None] = {
        **by_token,
        "scores": wire.scores,
        "episodes": wire.episodes,
        "turn_rewards": wire.turn_rewards,
        **wire.columns(),
    }
    for name, rows in columns.items():
        if rows is not None and len(rows) != size:
            raise RolloutRejectedError(f"{len(rows)} {name} for {size} sequences")
    for name, table in by_token.items():
        for number, row in enumerate(table or ()):
            if len(row) != (length := len(wire.tokens[number])):
                raise RolloutRejectedError(
                    f"sequence {number}: {len(row)} {name} for {length} tokens"
                )
    if wire.advantages is not None and wire.episodes is not None:
        raise RolloutRejectedError(
            "advantages and episodes: advantages of each token belong to whole episodes only"
        )
    if len(wire.overrides or []) > size:
        raise RolloutRejectedError(f"{len(wire.overrides or [])} overrides for {size} sequences")


def _content_hash(wire: ScoredData) -> str:
    digest = hashlib.sha256(
        repr((wire.env_id, wire.scores, [len(row) for row in wire.tokens])).encode()
    )
    digest.update(wire.content())
    logprobs = wire.inference_logprobs or [[]] * len(wire.tokens)
    try:
        for tokens, masks, values in zip(wire.tokens, wire.masks, logprobs, strict=True):
            for column in (array("d", values), array("q", tokens), array("q", masks)):
                digest.update(column)
    except OverflowError:
        raise RolloutRejectedError("a token id does not fit 64 bits") from None
    return digest.hexdigest()[:32]
