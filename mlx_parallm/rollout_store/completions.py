"""The server's last answers, kept so that rewards can follow them by id; the way of a rewarded
group into the store.

    server/generation.py → keep → (bounded in bytes and time) → reward, by POST /v1/rewards →
    RolloutStore

Training needs these parts of an answer: prompt ids, sampled ids, log-probabilities and
policy versions of every choice, packed as `payload.py` packs a stored group. It lives in memory: a
restart forgets it. An id that was rewarded is known for longer, because the group in the store
bears it.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from mlx_parallm.errors import RefusedError, RequestError, RolloutRejectedError
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.companions import COMPANIONS, unkept_of
from mlx_parallm.rollout_store.payload import decode_group, encode_group
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import (
    Completion,
    CompletionDelta,
    Request,
    Rollout,
    RolloutGroup,
)

SOURCE = "rewards"  # in the store
GONE_IDS = 20_000  # ids kept with the reason why they cannot be rewarded

Choice = Sequence[Completion | CompletionDelta]  # one whole completion, or its streamed parts


@dataclass(frozen=True, slots=True)
class _KeptAnswer:
    """`payloads`: one packed group without scores for each prompt of the request, in order."""

    kept_at: float
    payloads: tuple[bytes, ...]

    @property
    def size(self) -> int:
        return sum(map(len, self.payloads))


class KeptCompletions:
    """Thread-safe.

    Args:
        policy_adapter: the adapter that is being trained; None = the base is. Answers of others
            cannot be rewarded.
        max_bytes: packed size of all that is kept; 0 = nothing is.
        max_age_s: how long a reward may be in coming.
        batch_size, max_token_length, vocab_size: bounds of a group to be trained on.
        on_reward: called after each accepted reward.
    """

    def __init__(
        self,
        store: RolloutStore,
        *,
        policy_adapter: str | None,
        max_bytes: int,
        max_age_s: float,
        batch_size: int,
        max_token_length: int,
        vocab_size: int,
        on_reward: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._on_reward = on_reward
        self._policy_adapter = policy_adapter
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._batch_size, self._max_token_length, self._vocab_size = (
            batch_size,
            max_token_length,
            vocab_size,
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, _KeptAnswer] = {}  # oldest first
        self._size = 0
        self._gone: dict[str, tuple[int, str]] = {}  # id → HTTP status and reason, oldest first
        self._being_rewarded: set[str] = set()

    @property
    def enabled(self) -> bool:
        return self._max_bytes > 0

    def keep(
        self, response_id: str, requests: Sequence[Request], choices: Sequence[Sequence[Choice]]
    ) -> None:
        """Keeps an answer under the id that its client has seen. `choices`: [prompts][n];
        nothing when it is off."""
        if not self.enabled:
            return
        answer: _KeptAnswer | None = None
        if not all(request.samples_from(self._policy_adapter) for request in requests):
            reason = "was not sampled from the policy that is being trained, but from another model"
            refusal = 409, reason
        elif unkept := next(filter(None, map(unkept_of, requests)), None):
            refusal = 409, f"is an answer to {unkept}, which are not kept for training"
        else:
            groups = (
                _unscored(request, parts) for request, parts in zip(requests, choices, strict=True)
            )
            answer, refusal = (
                _KeptAnswer(self._clock(), tuple(map(encode_group, groups))),
                (410, "is kept no longer"),
            )
        with self._lock:
            self._forget(response_id, refusal)
            if answer is None or answer.size > self._max_bytes:
                return
            del self._gone[response_id]
            self._kept[response_id] = answer
            self._size += answer.size
            self._forget_old()

    def reward(
        self, ids: Sequence[str], rewards: Sequence[float | None], environment: str
    ) -> tuple[RolloutGroup, ...]:
        """Makes a scored group of each distinct prompt of these answers; on the disk when this
        returns.

        `rewards`: one for each choice, in the order of `ids` and then of the choices' indices; None
        leaves it out.

        Raises RequestError: rewards that do not fit the choices; RefusedError: an answer that is
        unknown (404), rewarded already, aborted or not the policy's (409), no longer kept (410),
        not to be trained on (400); StoreError. Whatever is raised, nothing is used up: the same ids
        may be sent again.
        """
        with self._lock:
            answers = [self._find(response_id) for response_id in ids]
            self._being_rewarded.update(ids)
        try:
            unscored = [decode_group(payload) for answer in answers for payload in answer.payloads]
            groups = _scored(unscored, rewards, environment)
            for group in groups:
                self._check(group)
            self._store.add_all(groups, source=SOURCE)
            with self._lock:
                for response_id in ids:
                    self._forget(response_id, (409, "has its rewards already"))
            self._on_reward()
        finally:
            with self._lock:
                self._being_rewarded.difference_update(ids)
        return groups

    def _find(self, response_id: str) -> _KeptAnswer:
        self._forget_old()
        answer = self._kept.get(response_id)
        if response_id in self._being_rewarded:
            raise RefusedError(f"{response_id!r} is being rewarded by another request", 409, "id")
        if answer is not None:
            return answer
        if response_id in self._gone:
            status, reason = self._gone[response_id]
            if status == 410:
                reason += (
                    f" (server.kept_completions_s = {self._max_age_s:g}, _bytes ="
                    f" {self._max_bytes})"
                )
            raise RefusedError(f"{response_id!r} {reason}", status, "id")
        prefix = f"{response_id}-"  # and the prompt's position: the start of an id is not an id
        if any(name.removeprefix(prefix).isdecimal() for name in self._store.known_ids(prefix)):
            raise RefusedError(f"{response_id!r} has its rewards already", 409, "id")
        raise RefusedError(
            f"no completion {response_id!r} was answered since the server started", 404, "id"
        )

    def _check(self, group: RolloutGroup) -> None:
        try:
            check_group(group, vocab_size=self._vocab_size, max_token_length=self._max_token_length)
            if len(group.rollouts) > self._batch_size:
                raise RolloutRejectedError(
                    f"{len(group.rollouts)} choices in one group, but a batch has"
                    f" {self._batch_size}"
                    " (rollout_batch_size) and groups are never split"
                )
        except RolloutRejectedError as error:
            self._store.reject(group, source=SOURCE, reason=str(error))
            raise RefusedError(f"cannot be trained on: {error}", 400, "id") from error

    def _forget(self, response_id: str, refusal: tuple[int, str]) -> None:
        answer = self._kept.pop(response_id, None)
        self._size -= answer.size if answer else 0
        self._gone.pop(response_id, None)
        self._gone[response_id] = refusal
        if len(self._gone) > GONE_IDS:
            del self._gone[next(iter(self._gone))]

    def _forget_old(self) -> None:
        oldest = self._clock() - self._max_age_s
        while self._kept:
            response_id, answer = next(iter(self._kept.items()))
            if self._size <= self._max_bytes and answer.kept_at >= oldest:
                return
            self._forget(response_id, (410, "is kept no longer"))


def _unscored(request: Request, choices: Iterable[Choice]) -> RolloutGroup:
    rollouts = tuple(rollout_of(request, parts) for parts in choices)
    return RolloutGroup(request.request_id, "", rollouts)


def rollout_of(request: Request, parts: Choice) -> Rollout:
    """Return an answer as the engine sampled it: prompt and completion, without scores."""
    prompt = request.prompt_token_ids
    sampled = tuple(chain.from_iterable(part.token_ids for part in parts))
    processed: tuple[float, ...] | None = None
    if request.params.reshapes_distribution:
        processed = tuple(chain.from_iterable(part.processed_logprobs or () for part in parts))
        processed = (0.0,) * len(prompt) + processed
    forced: tuple[int, ...] | None = None
    if request.params.is_constrained:
        forced = tuple(chain.from_iterable(part.forced or () for part in parts))
        forced = (0,) * len(prompt) + forced
    read_under = next((part.prompt_version for part in parts if isinstance(part, Completion)), -1)
    return Rollout(
        tokens=prompt + sampled,
        mask=(0,) * len(prompt) + (1,) * len(sampled),
        logprobs=(0.0,) * len(prompt) + tuple(chain.from_iterable(part.logprobs for part in parts)),
        policy_versions=(read_under,) * len(prompt)
        + tuple(chain.from_iterable(part.policy_versions for part in parts)),
        temperature=request.params.temperature or 1.0,
        scores={},
        stop_reason=parts[-1].finish_reason,
        processed_logprobs=processed,
        forced=forced,
        **{k: v for each in COMPANIONS for k, v in each.of_answer(parts).items()},
    )


def _scored(
    unscored: Sequence[RolloutGroup], rewards: Sequence[float | None], environment: str
) -> tuple[RolloutGroup, ...]:
    """One group a distinct prompt, under the id of its first choice's engine request. Raises
    RequestError."""
    choices = [(group.group_id, rollout) for group in unscored for rollout in group.rollouts]
    if len(rewards) != len(choices):
        raise RequestError(
            f"{len(rewards)} rewards for {len(choices)} choices (null leaves one out)",
            param="rewards",
        )
    by_prompt: dict[tuple[int, ...], list[tuple[str, int, Rollout]]] = {}
    for number, ((group_id, rollout), reward) in enumerate(zip(choices, rewards, strict=True)):
        if reward is None:
            continue
        if rollout.stop_reason == "abort":
            raise RefusedError(
                f"choice {number} was aborted before its end: its reward must be null", 409, "id"
            )
        scored = replace(rollout, scores={"reward": reward})
        prompt = rollout.tokens[: len(rollout.tokens) - sum(rollout.mask)]
        by_prompt.setdefault(prompt, []).append((group_id, number, scored))
    if not by_prompt:
        raise RequestError("all rewards are null: there is nothing to train on", param="rewards")
    for entries in by_prompt.values():
        if len(entries) == 1:
            raise RequestError(
                f"choice {entries[0][1]} is the only one of its prompt with a reward: a group"
                " compares two or more"
                " answers to the same prompt (n > 1, or several ids whose prompts are equal)",
                param="rewards",
            )
    return tuple(
        RolloutGroup(entries[0][0], environment, tuple(rollout for _, _, rollout in entries))
        for entries in by_prompt.values()
    )
