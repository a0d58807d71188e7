"""RolloutBuffer: waiting groups of the store → the TrainBatch of a step. No MLX.

    request(step)    allows the in-process source to start the groups that the step lacks
                     (none, when groups come by HTTP)
    collect(step)    takes whole groups until `rollout_batch_size` sequences are together; None =
                     not yet

On the way it drops, in the store and with the reason, groups that are too old, groups from outside
whose log-probabilities are another model's (`group_fit.py`), groups that an older version stored
with numbers that overflow, and groups whose rewards are all equal. In their place it asks for
others (`dynamic_sampling`): as many as should fill the step at the share of useful groups that it
has seen in it, at most as many as came so far, and never more than `max_oversampling` allows. Where
the bound ends it, the step trains on what there is and says why. What it takes is marked
`taken(step)`; a checkpoint older than that brings it back.

Order: "fifo" oldest first · "uniform" at random by (seed, step) · "priority" largest mean
|advantage| first. In deterministic mode it waits until everything asked for has arrived, and goes
by the groups' own index.

An environment over HTTP may register with a minimum share of the batch: places are kept for it
while it delivers. If it stops delivering, or if its groups cannot be trained on (`max_empty_rounds`
of them), others take the places in that step, and the health line says so: a minimum never keeps a
step from its batch for good.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mlx_parallm.config.training import LearningSection
from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.advantages import (
    PLAIN,
    Estimator,
    Shaping,
    by_segment,
    over_batch,
    pair_advantages,
    token_advantages,
)
from mlx_parallm.rl_training.monitor.evidence import Arrivals
from mlx_parallm.rl_training.monitor.health import find_waiting
from mlx_parallm.rl_training.step.batch import StatisticsCollector, TrainBatch, TrainSequence
from mlx_parallm.rollout_store.checks import OTHER_MODEL, TOO_LARGE, is_too_large
from mlx_parallm.run_files.versions import VersionSteps
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Rollout, RolloutGroup

if TYPE_CHECKING:  # `explain` reads this file without MLX
    from mlx_parallm.rl_training.step.companion import StepCompanion

log = get_logger("train")

UNTRAINABLE = "refill after refill brought no group of it that can be trained on"
NO_VARIANCE = (
    "no variance: all rewards of the group are equal, or none of its answers is trained on"
)
NO_PAIR = (
    "no pair: the rewards of the group are equal, or fewer than two of its answers are one sequence"
    " each that may be trained on"
)
NO_LABEL = "no label: the rewards of the group are 0, or none of its answers is trained on"
TOO_OLD = "too old: sampled more than max_staleness steps ago"

Advantages = tuple[tuple[float, ...], ...]
Chosen = tuple[RolloutGroup, Advantages | None, int]
"""A group of the batch, its advantages (None: all its rewards are equal), and its age in steps."""


class GroupStore(Protocol):
    """The part of `rollout_store.store.RolloutStore` that the buffer uses."""

    def waiting(self, limit: int | None = None, *, exclude: set[str]) -> list[RolloutGroup]: ...

    def groups(self, group_ids: Sequence[str]) -> list[RolloutGroup]: ...

    def known_ids(self) -> set[str]: ...

    def waiting_ids(self) -> set[str]: ...

    def take(self, group_ids: Sequence[str], step: int) -> None: ...

    def drop(self, group_ids: Sequence[str], step: int, reason: str) -> None: ...

    def wait_for_groups(self, timeout_s: float, *, at_least: int = 1) -> bool: ...


@dataclass(frozen=True, slots=True)
class Minimum:
    """Hold the least part of a batch of one environment over HTTP."""

    sequences: int  # sequences of whole groups
    group_size: int


class RolloutBuffer:
    """One thread's. `collect` of a step is called until it gives a batch, then for the next step.

    Args:
        estimate: rewards of a group → advantages, or None without variance.
        group_sizes: of the in-process environments, one entry each; empty = groups come by HTTP
            only.
        request_groups: allows the in-process source n more groups; each brings exactly one.
        minimums: of the environments that deliver now, by name.
        is_mismatched: whether the log-probabilities of a group from outside are of another model;
            called before the group enters a batch.
        shaping: changes of rewards and rollouts before the advantages.
        pairs: the sequences of a batch are the best and the worst answer of each group.
        singles: each sequence learns from the sign of its own reward.
        companions: the trainer's. A group that one of them teaches is kept if its rewards are
            equal, unless none of its answers is trained on.

    Raises ConfigError: no mix of these group sizes makes `batch_size` sequences.
    """

    def __init__(
        self,
        store: GroupStore,
        versions: VersionSteps,
        estimate: Estimator,
        training: LearningSection,
        *,
        group_sizes: Sequence[int] = (),
        request_groups: Callable[[int], None] | None = None,
        minimums: Callable[[], Mapping[str, Minimum]] = dict,
        is_mismatched: Callable[[RolloutGroup], bool] | None = None,
        shaping: Shaping = PLAIN,
        pairs: bool = False,
        singles: bool = False,
        companions: Mapping[str, "StepCompanion"] = MappingProxyType({}),
    ) -> None:
        self._target = training.atropos.rollout_batch_size
        if group_sizes and not fillable_up_to(self._target, set(group_sizes))[-1]:
            sizes = ", ".join(map(str, sorted(set(group_sizes))))
            raise ConfigError(
                f"rl_training.atropos.rollout_batch_size = {self._target} cannot be made of whole"
                f" groups: the environments' group sizes are {sizes}"
            )
        self._store, self._versions, self._estimate = store, versions, estimate
        self._nominal_sizes = set(group_sizes)
        self._mean_size = sum(group_sizes) / len(group_sizes) if group_sizes else 1.0
        self._request_groups, self._read_minimums = request_groups, minimums
        self._minimums: Mapping[str, Minimum] = {}
        self._sampling, self._max_staleness = training.buffer_sampling, training.max_staleness
        self._max_empty_rounds = training.max_empty_rounds
        self._deterministic, self._seed = training.deterministic, training.seed
        self._dynamic = training.dynamic_sampling
        self._max_oversampling = training.max_oversampling or math.inf
        self._is_mismatched, self._shaping = is_mismatched, shaping
        self._pairs = pairs
        self._nothing = NO_PAIR if pairs else NO_LABEL if singles else NO_VARIANCE
        self._companions = companions
        # waiting in the store, read already; in the store's order
        self._held: dict[str, RolloutGroup] = {}
        # advantages of held groups, which each new arrival looks at again
        self._computed: dict[str, Advantages | None] = {}
        self._outstanding = 0  # in-process groups asked for and not seen yet
        # What a former process left is not an answer to our requests, and perhaps of weights that
        # were lost with it.
        self._restored = frozenset(store.known_ids())
        self._step = 0  # the step that is being collected
        self._begin()
        self._poll()

    def _begin(self) -> None:
        self._chosen: list[Chosen] = []
        self._taken = Counter[str]()  # sequences of the chosen groups, by environment
        self._dropped = 0  # sequences of in-process groups without variance
        self._statistics = StatisticsCollector(self._shaping.turn_gamma is not None)
        self._empty_rounds = 0
        self._lifted: list[str] = []  # environments whose minimum this step does without

    # ------------------------------------------------------------------ demand

    def request(self, step: int, last: int | None = None) -> None:
        """Asks for what `step` (to step `last`) lacks, beyond what waits (and is not too old for
        `step`) and the requests so far."""
        self._poll()
        waiting = sum(
            len(g.rollouts)
            for g in self._held.values()
            if self._age(g, step) <= self._max_staleness
        )
        wanted = self._target * ((last or step) - step + 1)
        self._ask(math.ceil((wanted - waiting) / self._mean_size - self._outstanding))

    def _ask(self, groups: int) -> None:
        if self._request_groups is not None and groups > 0:
            self._outstanding += groups
            self._request_groups(groups)

    def health(self) -> str | None:
        """Say why the step has no batch yet; None when nothing is wrong. From any thread."""
        usable, statistics = len(self._chosen) + len(self._held), self._statistics
        # where groups can be requested, others take their places
        alike = statistics.alike if self._request_groups is None else 0
        arrivals = Arrivals(
            self._step,
            usable=usable,
            stale=statistics.stale,
            mismatched=statistics.mismatched,
            alike=alike,
            why_alike=statistics.lost_in_words() if alike else "",
        )
        diagnoses = find_waiting(arrivals)
        if not diagnoses and self._lifted:
            return (
                f"step {self._step} is made without the minimum share of"
                f" {', '.join(self._lifted)}: {UNTRAINABLE}"
            )
        return str(diagnoses[0]) if diagnoses else None

    # ------------------------------------------------------------------ the batch

    def collect(self, step: int, *, timeout_s: float) -> TrainBatch | None:
        """The batch of `step`, or None after `timeout_s` (or a wake-up of the store) without enough
        groups.

        Rounds of groups that cannot be trained on end with a smaller batch, perhaps an empty one,
        that says so.
        """
        self._step = step
        self._poll()
        batch = self._try(step)
        if batch is None:
            self._store.wait_for_groups(timeout_s, at_least=len(self._held) + len(self._chosen) + 1)
            self._poll()
            batch = self._try(step)
        return batch

    def _try(self, step: int) -> TrainBatch | None:
        self._choose(step)
        missing = self._target - sum(len(group.rollouts) for group, _, _ in self._chosen)
        gave_up = self._give_up(missing) if missing else ""
        return self._finish(step, gave_up) if gave_up or not missing else None

    def _give_up(self, missing: int) -> str:
        """Request missing groups once all requested ones have come. Returns the reason after
        too many rounds."""
        reserved = self._reserved(missing)
        no_mix = f"no mix of the waiting groups' sizes fills the last {missing} places"
        without_place = self._without_place(missing)
        # what can be requested may fill them, while there is room to read it
        may_come = self._request_groups is not None and self._room_to_read() > 0
        if self._chosen and not (reserved or may_come) and without_place >= 2 * self._target:
            return no_mix
        if reserved and self._empty_rounds >= self._max_empty_rounds:
            self._lifted, self._empty_rounds = [*self._lifted, *reserved], 0
            log.warning(
                "a minimum share is not kept",
                step=self._step,
                environments=list(reserved),
                reason=UNTRAINABLE,
            )
            return ""
        wanted = missing - sum(reserved.values())  # groups over HTTP cannot be requested
        bound = (
            f"max_oversampling = {self._max_oversampling:g} ends the step {missing} sequences short"
        )
        if self._request_groups is not None and wanted and self._left(missing) <= 0:
            return f"{bound}: {self._statistics.lost_in_words()}"
        if self._outstanding > 0 or self._request_groups is None:
            return ""
        if self._empty_rounds >= self._max_empty_rounds:
            rounds = (
                f"{self._empty_rounds} refills in a row brought no group with different rewards"
            )
            if without_place and not self._dropped:
                return no_mix
            return f"{rounds}: {self._statistics.lost_in_words()}"
        if wanted and not (groups := self._refill(wanted, missing)):
            return f"{bound}: {self._statistics.lost_in_words()}"
        if wanted:
            self._empty_rounds += 1
            self._ask(groups)
        return ""

    def _refill(self, wanted: int, missing: int) -> int:
        """How many groups should fill `wanted` of the `missing` places, at the rate of this step;
        0: the bound is near.

        A refill brings at most as many as came before it, for a rate of a few groups says little.
        Worked: 16 groups wanted, 4 of the first 16 useful: 12 / ¼ = 48, so 16 more; 8 of those 32
        useful: 8 / ¼ = 32 more.
        """
        useful = self._target - missing + self._waiting_sequences()
        sampled = useful + self._dropped
        most = max(wanted, sampled)
        sequences = min(most, wanted * sampled / useful) if useful else most
        return int(
            min(
                math.ceil(sequences / self._mean_size),
                max(self._left(missing), 0.0) / self._mean_size,
            )
        )

    def _left(self, missing: int) -> float:
        """Return how many more sequences may be sampled for the step; `missing` of its places are
        open."""
        return self._max_oversampling * self._target - (self._target - missing) - self._dropped

    def _reserved(self, room: int) -> dict[str, int]:
        """Sequences among the last `room` that are kept for environments below their minimum:
        whole groups of each."""
        reserved: dict[str, int] = {}
        for name, minimum in self._minimums.items():
            lacking = min(minimum.sequences - self._taken[name], room - sum(reserved.values()))
            if lacking >= minimum.group_size and name not in self._lifted:
                reserved[name] = lacking // minimum.group_size * minimum.group_size
        return reserved

    def _has_place(self, group: RolloutGroup, room: int, fillable: Sequence[bool]) -> bool:
        """Whether the rest can be filled when `group` takes its part of `room`, the places of
        others left to them."""
        kept = sum(
            lacking for name, lacking in self._reserved(room).items() if name != group.environment
        )
        rest = room - len(group.rollouts) - kept
        return rest >= 0 and fillable[rest]

    def _without_place(self, missing: int) -> int:
        """Sequences of the waiting groups that could be trained on, and do not fit."""
        bound = self._left(missing) <= 0
        return sum(
            len(group.rollouts)
            for group in self._held.values()
            if not (bound and group.index is not None)
            and (not self._dynamic or self._advantages(group) or self._is_taught(group))
        )

    def _room_to_read(self) -> int:
        """Return how many more groups are held at once."""
        return 4 * self._target - len(self._held) - len(self._chosen)

    def _waiting_sequences(self) -> int:
        return sum(len(group.rollouts) for group in self._held.values())

    def choose_again(self) -> None:
        """Put the groups that were chosen for the step, which has not begun, back among the held
        ones; called after a rollback."""
        self._held = {entry[0].group_id: entry[0] for entry in self._chosen} | self._held
        self._chosen, self._taken = [], Counter()

    def _poll(self) -> None:
        """Read new groups of the store; forget those that were dropped elsewhere
        (/atropos/reset_data)."""
        waiting = self._store.waiting_ids()
        self._held = {
            group_id: group for group_id, group in self._held.items() if group_id in waiting
        }
        self._computed = {
            group_id: values
            for group_id, values in self._computed.items()
            if group_id in self._held
        }
        self._chosen = [entry for entry in self._chosen if entry[0].group_id in waiting]
        self._taken = Counter()
        for group, _, _ in self._chosen:
            self._taken[group.environment] += len(group.rollouts)
        taken = {*self._held, *(group.group_id for group, _, _ in self._chosen)}
        too_large: list[str] = []
        for group in self._store.waiting(max(self._room_to_read(), 1), exclude=taken):
            self._held[group.group_id] = group
            if (
                group.index is not None
                and self._outstanding > 0
                and group.group_id not in self._restored
            ):
                self._outstanding -= 1
            if group.group_id in self._restored and is_too_large(group):
                too_large.append(group.group_id)
        self._discard(too_large, self._step, TOO_LARGE)

    def _choose(self, step: int) -> None:
        if self._deterministic and self._outstanding > 0:
            return
        self._minimums = self._read_minimums()
        room = self._target - sum(len(group.rollouts) for group, _, _ in self._chosen)
        fillable = fillable_up_to(
            self._target,
            self._nominal_sizes | {len(group.rollouts) for group in self._held.values()},
        )
        stale: list[str] = []
        constant: list[str] = []
        trainable: list[Chosen] = []
        sequences = 0  # sequences of the trainable groups
        for group in self._ordered():
            if room == 0 and self._sampling == "fifo":
                break
            if group.index is not None and self._left(max(0, room - sequences)) <= 0:
                continue  # it waits for the next step
            age = self._age(group, step)
            if age > self._max_staleness:
                stale.append(group.group_id)
                self._statistics.add_stale(group)
            elif (
                (advantages := self._advantages(group)) is None
                and self._dynamic
                and not self._is_taught(group)
            ):
                constant.append(group.group_id)
                self._statistics.add_without_variance(group)
                self._dropped += len(group.rollouts) if group.index is not None else 0
            elif self._sampling != "fifo":
                trainable.append((group, advantages, age))
                sequences += len(group.rollouts)
            elif self._has_place(group, room, fillable) and not self._drop_of_another_model(
                group, step
            ):
                self._take(group, advantages, age)
                room -= len(group.rollouts)
        self._discard(stale, step, TOO_OLD)
        self._discard(constant, step, self._nothing)
        if sequences and sequences >= room:  # else it waits until there is enough to choose from
            self._choose_among(trainable, room, fillable, step)

    def _advantages(self, group: RolloutGroup) -> Advantages | None:
        if group.group_id not in self._computed:
            advantages = pair_advantages if self._pairs else token_advantages
            self._computed[group.group_id] = advantages(group, self._estimate, self._shaping)
        return self._computed[group.group_id]

    def _is_taught(self, group: RolloutGroup) -> bool:
        if all(map(self._shaping.leaves_out, group.rollouts)):
            return False
        return any(companion.teaches(group) for companion in self._companions.values())

    def _dataset_completion(self, group: RolloutGroup) -> Rollout | None:
        answers = (each.dataset_completion(group) for each in self._companions.values())
        return next((answer for answer in answers if answer is not None), None)

    def _choose_among(
        self, trainable: list[Chosen], room: int, fillable: Sequence[bool], step: int
    ) -> None:
        """Chooses by another order than that of arrival."""
        if self._sampling == "uniform":
            order = np.random.default_rng([self._seed & 0xFFFFFFFF, step]).permutation(
                len(trainable)
            )
            trainable = [trainable[i] for i in order]
        else:
            trainable = sorted(trainable, key=lambda entry: -_weight(entry[1]))
        for group, advantages, age in trainable:
            if (
                room
                and self._has_place(group, room, fillable)
                and not self._drop_of_another_model(group, step)
            ):
                self._take(group, advantages, age)
                room -= len(group.rollouts)

    def _drop_of_another_model(self, group: RolloutGroup, step: int) -> bool:
        """True: the group came from outside and its log-probabilities are another model's
        (group_fit.py)."""
        mismatched = (
            self._is_mismatched is not None and group.index is None and self._is_mismatched(group)
        )
        if mismatched:
            self._statistics.add_mismatched()
            self._discard([group.group_id], step, OTHER_MODEL)
        return mismatched

    def _ordered(self) -> list[RolloutGroup]:
        groups = list(self._held.values())
        if self._deterministic:
            groups.sort(key=lambda group: math.inf if group.index is None else group.index)
        return groups

    def _take(self, group: RolloutGroup, advantages: Advantages | None, age: int) -> None:
        del self._held[group.group_id]
        self._chosen.append((group, advantages, age))
        self._taken[group.environment] += len(group.rollouts)
        self._empty_rounds = 0

    def _discard(self, group_ids: list[str], step: int, reason: str) -> None:
        if group_ids:
            self._store.drop(group_ids, step, reason)
        for group_id in group_ids:
            # no refill can be asked for
            self._empty_rounds += self._held.pop(group_id).environment in self._minimums

    def _age(self, group: RolloutGroup, step: int) -> int:
        return self._versions.staleness(group.sampled_versions, step)

    def _finish(self, step: int, gave_up: str = "") -> TrainBatch:
        self._store.take([group.group_id for group, _, _ in self._chosen], step)
        for group, advantages, age in self._chosen:
            self._statistics.add_trained(group, age, varied=advantages is not None)
        batch = TrainBatch(
            step=step,
            groups=tuple(group for group, _, _ in self._chosen),
            sequences=self._sequences(
                [(group, advantages) for group, advantages, _ in self._chosen], step
            ),
            statistics=self._statistics.result(),
            gave_up=gave_up,
        )
        self._begin()
        return batch

    def resume(self, step: int, group_ids: Sequence[str]) -> TrainBatch:
        """The batch of a step that was interrupted. Its statistics are in the checkpoint. Raises
        StoreError."""
        groups = self._store.groups(group_ids)
        chosen = [(group, self._advantages(group)) for group in groups]
        self._store.take(list(group_ids), step)
        for group_id in group_ids:
            self._held.pop(group_id, None)
        return TrainBatch(
            step, tuple(groups), self._sequences(chosen, step), StatisticsCollector().result()
        )

    def _sequences(
        self, chosen: list[tuple[RolloutGroup, Advantages | None]], step: int
    ) -> tuple[TrainSequence, ...]:
        sequences = []
        groups = [group for group, _ in chosen]
        of_batch = over_batch(groups, [each for _, each in chosen], self._shaping)
        for group, advantages in zip(groups, of_batch, strict=True):
            if (answer := self._dataset_completion(group)) is not None:
                none = (0.0,) * len(answer.tokens)
                sequences.append(TrainSequence(answer, none, fresh=False, from_dataset=True))
                continue
            may_be_fresh = group.group_id not in self._restored or self._deterministic
            if self._pairs:
                sequences += [
                    TrainSequence(rollout, row, may_be_fresh and self._is_fresh(rollout, step))
                    for rollout, row in _pair(group, advantages)
                ]
                continue
            for rollout, row in zip(group.rollouts, advantages or _zeros(group), strict=True):
                left_out = self._shaping.leaves_out(rollout)
                parts = zip(rollout.segments, by_segment(row, rollout), strict=True)
                for segment, values in parts:
                    fresh = may_be_fresh and self._is_fresh(segment, step)
                    trained = (
                        replace(segment, mask=(0,) * len(segment.mask)) if left_out else segment
                    )
                    sequences.append(TrainSequence(trained, values, fresh))
        return tuple(sequences)

    def _is_fresh(self, rollout: Rollout, step: int) -> bool:
        """Whether the newest version sampled all of a sequence: keys and values that older
        weights left in the cache change every later log-probability."""
        versions = set(rollout.policy_versions)  # a few, of thousands of tokens
        steps_known = all(v >= 0 and self._versions.steps(v) == step - 1 for v in versions)
        return steps_known and rollout.logprobs is not None


def _pair(
    group: RolloutGroup, advantages: Advantages | None
) -> list[tuple[Rollout, tuple[float, ...]]]:
    """The best and the worst answer with their advantages; none if there is no pair."""
    rows = list(zip(group.rollouts, advantages or (), strict=bool(advantages)))
    return sorted((row for row in rows if row[1][0]), key=lambda row: -row[1][0])


def fillable_up_to(total: int, sizes: set[int]) -> list[bool]:
    """Return for each number from 0 to `total` whether it is a sum of these sizes, each used any
    number of times."""
    sums = [True] + [False] * total
    for value in range(1, total + 1):
        sums[value] = any(size <= value and sums[value - size] for size in sizes)
    return sums


def _weight(advantages: Advantages | None) -> float:
    values = [abs(value) for row in advantages or () for value in row]
    return sum(values) / max(len(values), 1)


def _zeros(group: RolloutGroup) -> Advantages:
    return tuple((0.0,) * len(rollout.tokens) for rollout in group.rollouts)
