"""The Atropos queue for somebody else's trainer: it registers, and /batch hands out whole groups, oldest first.

`mlx_parallm_serve --atropos-queue DIR` makes a `HandOutQueue` over the `RolloutStore` in DIR: atroposlib's `run-api`,
but what it accepted, whom it registered and what it handed out is on the disk. Any group is taken that some trainer
could use; it is handed out as it came. A batch is marked before it is sent: whoever gets no answer has lost it, as
with `run-api`, and none is ever sent twice. Where answers differ otherwise is docs/atropos_queue.md.
"""

import threading
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import ValidationError

from mlx_parallm.config.training import RolloutsConfig
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.integrations.atropos.queue import AtroposQueue, AtroposSettings, require_finite
from mlx_parallm.integrations.atropos.wire import GIVEN, AtroposData, first_faults
from mlx_parallm.rollout_store.disk import GB
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Rollout, RolloutGroup

logger = get_logger("atropos")

_NOTE = "atropos_hand_out"
_SENT = "scored_data"  # in a group's metadata: the JSON that came
_STARVED_UP_TO = 8  # batches: environments whose groups do not add up are asked for more no longer
_ROWS = ("masks", "scores", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")
_NOBODY = AtroposSettings()
_FOR_EVER = 2**62  # steps: no checkpoint of ours brings back what was handed out


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What the trainer has told and done. `step` counts batches from its starting step; None: none ever registered."""

    registered: bool = False
    started: bool = False  # it has asked for a batch; until then environments wait
    step: int | None = None
    settings: AtroposSettings = _NOBODY


class HandOutQueue(AtroposQueue):
    """Thread-safe. Raises ConfigError: the store holds a training run's groups."""

    def __init__(self, store: RolloutStore, kept: RolloutsConfig) -> None:
        noted = store.recall(_NOTE)
        if noted is None and store.counts().waiting + store.counts().taken > 0:
            raise ConfigError(f"{store.path} belongs to a training run: give the queue a directory of its own")
        state = TrainerState() if noted is None else _state(noted)
        super().__init__(store, state.settings, current_step=lambda: self._state.step or 0, policy_version=lambda: 0)
        self._kept = kept
        self._handing_out = threading.Lock()
        self._stuck = False  # at the last call of /batch a batch and more waited, and none could be made of it
        self._save_state(state)

    @property
    def started(self) -> bool:
        return self._state.started

    def register_trainer(self, settings: AtroposSettings, starting_step: int) -> str | None:
        """The first registration counts; another one, after a reset. Groups too large for a batch are dropped."""
        with self._handing_out:
            if not self._state.registered:
                sizes = self.store.waiting_sizes()
                if too_large := [name for name, _, size in sizes if 0 < settings.batch_size < size]:
                    reason = f"more sequences than a batch has ({settings.batch_size})"
                    self.store.drop(too_large, starting_step, reason)
                self._save_state(TrainerState(registered=True, step=starting_step, settings=settings))
        return None

    def batch(self) -> dict[str, Any]:
        """Whole groups that make `batch_size` sequences, marked as handed out; null when none can be made."""
        with self._handing_out:
            state = self._state
            if not state.registered:
                message = "Trainer not registered. Call /register first."
                return {"status": "error", "message": message, "batch": []}
            waiting = self.store.waiting_sizes()
            chosen = self._chosen(waiting)
            self._note_stuck(waiting, not chosen)
            if not state.started or chosen:
                state = replace(state, started=True, step=(state.step or 0) + bool(chosen))
                self._save_state(state)  # first: a step without a batch loses nothing
            if not chosen:
                return {"batch": None}
            self._prune()
            groups = self.store.groups(chosen)
            self.store.take(chosen, state.step or 0)  # nothing that can fail comes after it
            return {"batch": [group.metadata[_SENT] for group in groups]}

    def status(self) -> dict[str, int]:
        if self._state.step is None:  # as atroposlib before anybody registered
            return {"current_step": 0, "queue_size": 0}
        return super().status()

    def reset(self) -> int:
        """Forgets the trainer and the environments, and drops what waits."""
        with self._handing_out:
            dropped = super().reset()
            if dropped or self._state.step is not None:
                longest = self.settings.max_token_length
                self._save_state(TrainerState(step=0, settings=AtroposSettings(max_token_length=longest)))
                self._stuck = False
                with self._lock:
                    self._environments, self._last_seen, self._sent = [], {}, {}
                    self._save()
        return dropped

    def _group(self, data: Mapping[str, Any], environment: str) -> RolloutGroup:
        try:
            sent = AtroposData.model_validate(data)
        except ValidationError as error:
            raise RolloutRejectedError(first_faults(error)) from error
        fields = sent.model_dump()
        require_finite(fields)
        _require_shape(fields)
        logprobs: Sequence[Sequence[float] | None] = sent.inference_logprobs or [None] * len(sent.tokens)
        return RolloutGroup(
            group_id=uuid.uuid4().hex,
            environment=environment,
            rollouts=tuple(
                Rollout(
                    tokens=tuple(tokens),
                    mask=tuple(int(label != GIVEN) for label in labels),
                    logprobs=None if row is None else tuple(row),
                    policy_versions=(-1,) * len(tokens),
                    temperature=1.0,
                    scores={"reward": score},
                )
                for tokens, labels, row, score in zip(sent.tokens, sent.masks, logprobs, sent.scores, strict=True)
            ),
            metadata={_SENT: fields},
        )

    def _chosen(self, waiting: Sequence[tuple[str, str, int]]) -> list[str]:
        """Ids of a batch: first what the environments' minimums ask for, then the oldest."""
        first: set[int] = set()
        for environment, (wanted, _) in self.minimums().items():
            own = [number for number, (_, name, _) in enumerate(waiting) if name == environment]
            if not own:
                return []
            for number in own:
                if wanted > 0:
                    first.add(number)
                    wanted -= waiting[number][2]
        order = sorted(range(len(waiting)), key=lambda number: (number not in first, number))
        found = oldest_that_sum_to([waiting[number][2] for number in order], self.settings.batch_size)
        return [waiting[order[position]][0] for position in found]

    def _prune(self) -> None:
        """As [rollouts] says; a batch counts as a step."""
        steps = self._kept.keep
        always = -1 if steps == "all" else self.current_step - steps
        self.store.prune(_FOR_EVER, always_up_to_step=always, max_bytes=round(self._kept.max_gb * GB), seconds=0.2)

    def _note_stuck(self, waiting: Sequence[tuple[str, str, int]], nothing: bool) -> None:
        sizes = [size for _, _, size in waiting]
        stuck = nothing and sum(sizes) >= self.settings.batch_size
        if stuck and not self._stuck:
            listed = ", ".join(map(str, sorted(set(sizes))))
            logger.warning(
                "a batch and more waits, but whole groups do not make one",
                waiting=sum(sizes),
                batch_size=self.settings.batch_size,
                group_sizes=listed,
            )
        self._stuck = stuck

    def _starved(self) -> bool:
        if not self._stuck:
            return False
        return self.store.waiting_sequences() < _STARVED_UP_TO * self.settings.batch_size

    def _save_state(self, state: TrainerState) -> None:
        self.store.remember(_NOTE, asdict(state))
        self._state, self.settings = state, state.settings


def oldest_that_sum_to(sizes: Sequence[int], total: int) -> list[int]:
    """Positions, rising, of sizes that sum to `total`: the first position of all that can be, then the next, …

    Empty when there are none. Sizes are at least 1.
    """
    if not 0 < total <= sum(sizes):  # a trainer may ask for 10**12: what follows is `total` bits a group
        return []
    sums = [1]  # bit n of the last one but k: the last k sizes can sum to n
    for size in reversed(sizes):
        sums.append((sums[-1] | sums[-1] << size) & ((2 << total) - 1))
    sums.pop()
    chosen: list[int] = []
    missing = total
    for position, size in enumerate(sizes):
        after = sums.pop()
        if size <= missing and after >> (missing - size) & 1:
            chosen.append(position)
            missing -= size
    return chosen if missing == 0 else []


def _require_shape(fields: Mapping[str, Any]) -> None:
    """Rows for each sequence, a value for each token, ids that fit 64 bits; an absent field is null or []."""
    tokens = fields["tokens"]
    if not tokens:
        raise RolloutRejectedError("the group has no sequences")
    for name in _ROWS:
        rows = fields[name]
        if not rows and name not in ("masks", "scores"):
            continue
        if len(rows) != len(tokens):
            raise RolloutRejectedError(f"{len(rows)} {name} for {len(tokens)} sequences")
        for number, (row, ids) in enumerate(zip(rows, tokens, strict=True)):
            if name != "scores" and len(row) != len(ids):
                raise RolloutRejectedError(f"sequence {number}: {len(row)} {name} for {len(ids)} tokens")


def _state(noted: Mapping[str, Any]) -> TrainerState:
    settings = AtroposSettings(**{**noted["settings"], "other_group_sizes": ()})
    return TrainerState(**{**noted, "settings": settings})
