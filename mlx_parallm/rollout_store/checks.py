"""Check a group before it may be trained on. Every source uses these checks; the first fault is the
reason.

The reasons are sentences: they are kept beside the group, sent in the HTTP 422 and shown in the
health line. Whether its log-probabilities fit this model is asked later:
`rl_training/group_fit.py`, from the rollout buffer.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Literal

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.companions import COMPANIONS
from mlx_parallm.types import LOGPROB_TOLERANCE, MAX_REWARD, Rollout, RolloutGroup

GREEDY = "greedy"
"""Key of a group's metadata: it was sampled at temperature 0, and its zeros are not
placeholders."""
LEAST_LOGPROB = -1e9  # far below what logits / temperature in float32 gives

TOO_LARGE = f"a score, an advantage or a log-probability is out of range (scores: ±{MAX_REWARD:g})"
"""Why a group that an older version accepted is dropped."""

OTHER_MODEL = "other tokenizer or model: its log-probabilities are far from this model's"
"""Why a group that was accepted is put into quarantine later (`rl_training/group_fit.py`)."""

MissingLogprobs = Literal["reject", "recompute"]


def check_group(
    group: RolloutGroup,
    *,
    vocab_size: int,
    max_token_length: int,
    missing_logprobs: MissingLogprobs = "reject",
    newest_version: int | None = None,
) -> None:
    """Raises RolloutRejectedError with the first fault, in words; returns when the group can be
    trained on.

    `vocab_size` is the number of ids of the model's embedding, `max_token_length` the longest whole
    sequence; `missing_logprobs` says whether rollouts without any log-probabilities can be trained
    on; `newest_version` is the policy's that is served: what claims a later one, of groups from
    outside, would never count as stale.
    """
    if not group.group_id:
        raise RolloutRejectedError("the group has no id")
    for name in (group.group_id, group.environment):
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise RolloutRejectedError(
                f"the name {name!r} holds half a character (a lone surrogate)"
            )
    if not group.rollouts:
        raise RolloutRejectedError("the group has no rollouts")
    unscored = any(rollout.logprobs is None for rollout in group.rollouts)
    if missing_logprobs == "reject" and unscored and not group.metadata.get(GREEDY):
        raise RolloutRejectedError(
            "no inference_logprobs, or zeros alone: the environment must collect through"
            " atroposlib's ManagedServer (server_type vllm) or return them itself;"
            ' rl_training.atropos.missing_logprobs = "recompute" trains without them'
        )
    for number, rollout in enumerate(group.rollouts):
        try:
            for segment in rollout.segments:
                _check_lengths(segment, max_token_length)
                _check_tokens(segment, vocab_size)
                _check_logprobs(segment)
            _check_scores(rollout)
            _check_turns(rollout)
        except RolloutRejectedError as error:
            raise RolloutRejectedError(f"rollout {number}: {error}") from None
    newest = max(group.sampled_versions, default=0)
    if newest_version is not None and newest > newest_version:
        raise RolloutRejectedError(
            f"policy version {newest} has not been served yet: the newest is {newest_version}"
        )
    _check_advantages(group)
    _check_carried(group, vocab_size)


def is_too_large(group: RolloutGroup) -> bool:
    """Whether numbers of a stored group would overflow: it was accepted before there was a
    bound."""
    try:
        for rollout in group.rollouts:
            _check_scores(rollout)
            for segment in rollout.segments:
                _check_logprobs(segment)
        _check_advantages(group)
    except RolloutRejectedError:
        return True
    return False


def _check_carried(group: RolloutGroup, vocab_size: int) -> None:
    for companion in COMPANIONS:
        companion.check_group(group, vocab_size)


def _check_lengths(rollout: Rollout, max_token_length: int) -> None:
    length = len(rollout.tokens)
    columns: dict[str, Sequence[float]] = {
        "mask values": rollout.mask,
        "policy versions": rollout.policy_versions,
    }
    if rollout.logprobs is not None:
        columns["logprobs"] = rollout.logprobs
    if rollout.processed_logprobs is not None:
        columns["processed logprobs"] = rollout.processed_logprobs
    if rollout.forced is not None:
        columns["forced tokens"] = rollout.forced
    for name, column in columns.items():
        if len(column) != length:
            raise RolloutRejectedError(f"{len(column)} {name} for {length} tokens")
    for companion in COMPANIONS:
        companion.check(rollout)
    if length > max_token_length:
        raise RolloutRejectedError(
            f"{length} tokens are more than max_token_length = {max_token_length}"
        )


def _check_tokens(rollout: Rollout, vocab_size: int) -> None:
    for position, token in enumerate(rollout.tokens):
        if not 0 <= token < vocab_size:
            raise RolloutRejectedError(
                f"token {position} has id {token}, outside the vocabulary of {vocab_size}"
            )
    if set(rollout.mask) - {0, 1}:
        raise RolloutRejectedError("the mask holds values other than 0 and 1")
    if set(rollout.forced or ()) - {0, 1}:
        raise RolloutRejectedError("the forced tokens hold values other than 0 and 1")
    if 1 not in rollout.mask:
        raise RolloutRejectedError(
            "no token was sampled by the policy: there is nothing to train on"
        )
    if rollout.mask[0] == 1:
        raise RolloutRejectedError(
            "token 0 counts as sampled, but nothing precedes it: its prompt is missing"
        )
    oldest = min(
        version
        for version, sampled in zip(rollout.policy_versions, rollout.mask, strict=True)
        if sampled
    )
    if oldest < 0:
        raise RolloutRejectedError(f"policy version {oldest} of a sampled token is negative")


def _check_logprobs(rollout: Rollout) -> None:
    for position, (value, sampled) in enumerate(
        zip(rollout.logprobs or (), rollout.mask, strict=False)
    ):
        if not isfinite(value) or value < LEAST_LOGPROB:
            raise RolloutRejectedError(f"the logprob of token {position} is {value}")
        if sampled and value > LOGPROB_TOLERANCE:
            raise RolloutRejectedError(
                f"the logprob of token {position} is {value:.4g}, more than 0"
            )
    if rollout.processed_logprobs is not None and not all(
        map(isfinite, rollout.processed_logprobs)
    ):
        raise RolloutRejectedError("a processed logprob is not finite")
    if not isfinite(rollout.temperature) or rollout.temperature < 0:
        raise RolloutRejectedError(f"temperature {rollout.temperature} is not a number >= 0")


def _check_scores(rollout: Rollout) -> None:
    if "reward" not in rollout.scores:
        raise RolloutRejectedError(f"no score named 'reward' among {sorted(rollout.scores)}")
    for name, score in rollout.scores.items():
        if not abs(score) <= MAX_REWARD:
            raise RolloutRejectedError(
                f"the score {name!r} is {score:g}, not a number of at most ±{MAX_REWARD:g}"
            )
    for number, reward in enumerate(rollout.turn_rewards):
        if not abs(reward) <= MAX_REWARD:
            raise RolloutRejectedError(
                f"the reward of turn {number} is {reward:g}, not a number of at most"
                f" ±{MAX_REWARD:g}"
            )


def _check_turns(rollout: Rollout) -> None:
    for segment in rollout.segments:
        sampled = sum(segment.mask)
        if segment.turn_lengths and (
            sum(segment.turn_lengths) != sampled or min(segment.turn_lengths) < 0
        ):
            raise RolloutRejectedError(
                f"turns of {list(segment.turn_lengths)} tokens for {sampled} sampled tokens"
            )
    turns = sum(len(segment.turns) for segment in rollout.segments)
    if rollout.turn_rewards and len(rollout.turn_rewards) != turns:
        raise RolloutRejectedError(f"{len(rollout.turn_rewards)} turn_rewards for {turns} turns")


def _check_advantages(group: RolloutGroup) -> None:
    if group.advantages is None:
        return
    if len(group.advantages) != len(group.rollouts):
        raise RolloutRejectedError(
            f"{len(group.advantages)} advantages for {len(group.rollouts)} rollouts"
        )
    for number, (entry, rollout) in enumerate(zip(group.advantages, group.rollouts, strict=True)):
        row = entry if isinstance(entry, tuple) else (entry,)
        if isinstance(entry, tuple) and len(entry) != len(rollout.tokens):
            raise RolloutRejectedError(
                f"rollout {number}: {len(entry)} advantages for {len(rollout.tokens)} tokens"
            )
        if not all(abs(value) <= MAX_REWARD for value in row):
            raise RolloutRejectedError(
                f"rollout {number}: an advantage is not a number of at most ±{MAX_REWARD:g}"
            )
