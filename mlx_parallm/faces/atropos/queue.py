"""The Atropos API's state without HTTP: registered environments, and how their scored groups reach
the store.

`routes.py` turns requests into calls of `AtroposQueue`, which is made over the run's
`RolloutStore`; the trainer of the same process learns from that. docs/environments.md#atropos lists
the differences from atroposlib's server, all on purpose.

`queue_size` tells an environment when to pause: waiting groups of all sources, counted in *its own*
group size, because it stops generating when `queue_size * group_size >= max_batches_offpolicy *
batch_size`.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from mlx_parallm.errors import RefusedError, RolloutRejectedError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.faces.atropos.wire import ATROPOS_FIELDS, SHOWN, from_scored_data
from mlx_parallm.rollout_store.checks import MissingLogprobs, check_group
from mlx_parallm.rollout_store.companions import with_fitting_experts
from mlx_parallm.rollout_store.store import RolloutStore, WaitingSource
from mlx_parallm.types import RolloutGroup

SOURCE = "atropos"
SILENT_AFTER_S = 60.0  # environments ask for their status ten times a second
STALLED_AFTER_S = 600.0  # without a group although environments are there
RECENT = 20  # submissions that `health` judges by
MIN_ENV_WEIGHT = 0.01  # atroposlib's floor, so that no environment is starved
MOST_ENVIRONMENTS = 1000  # registrations in one run; each of them writes the whole list
LARGEST_NUMBER = 2**31 - 1
_NOTE = "atropos_environments"
_LOOSE = ("messages", "generation_params", "overrides", "group_overrides", *SHOWN)
_ENV_ID = TypeAdapter(NonNegativeInt | None)


@dataclass(frozen=True, slots=True)
class AtroposSettings:
    """Hold what environments ask for, and the bounds of their groups. `batch_size`
    counts sequences."""

    batch_size: int
    max_token_length: int
    vocab_size: int
    checkpoint_dir: str
    checkpoint_interval: int
    total_steps: int
    wandb_group: str | None
    wandb_project: str | None
    temperature: float  # for groups that do not name theirs
    missing_logprobs: MissingLogprobs
    # group sizes of the other sources of the same batches; more may be added
    other_group_sizes: Sequence[int] = ()
    # (layers, experts a token, experts) that the trainer repeats; None: it repeats none
    experts: Callable[[], tuple[int, int, int] | None] = lambda: None
    image_reader: ImageReader | None = None  # None: the policy reads texts alone


@dataclass(frozen=True, slots=True)
class EnvironmentEntry:
    """One registered environment. `name` is the desired name and a number, as in atroposlib."""

    env_id: int
    desired_name: str
    name: str
    max_token_length: int
    weight: float
    group_size: int
    connected: bool = True
    min_batch_allocation: float | None = None  # part of each batch, 0 to 1


class AtroposQueue:
    """Thread-safe. `current_step` and `policy_version` are called at each request; they must not
    block."""

    def __init__(
        self,
        store: RolloutStore,
        settings: AtroposSettings,
        *,
        current_step: Callable[[], int],
        policy_version: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.settings = settings
        self._current_step = current_step
        self._policy_version = policy_version
        self._clock = clock
        self._lock = threading.Lock()
        self._environments = [
            _bounded(EnvironmentEntry(**entry)) for entry in store.recall(_NOTE) or []
        ]
        self._last_seen: dict[int, float] = {}  # no entry: not seen since this process started
        self.begin_waiting()
        self._recent: deque[str | None] = deque(maxlen=RECENT)  # None = accepted, else why not
        self._sent: dict[str, float] = {}  # environment's name → when its last group came
        self._latest: Mapping[str, Any] | None = None
        self.on_registration: list[Callable[[EnvironmentEntry], None]] = []
        self.on_group: list[Callable[[str, RolloutGroup], None]] = []
        """Called with a registered environment's name and a group of it that is new and on the
        disk."""

    def begin_waiting(self) -> None:
        """Count the time without groups from now on. While the model loads no environment can
        send one."""
        self._last_group = self._last_reward = self._clock()

    @property
    def current_step(self) -> int:
        return self._current_step()

    def environments(self) -> tuple[EnvironmentEntry, ...]:
        """Return every environment that ever registered with this run, absent ones too."""
        with self._lock:
            return tuple(self._environments)

    def register_environment(
        self,
        desired_name: str,
        *,
        max_token_length: int,
        weight: float,
        group_size: int,
        min_batch_allocation: float | None = None,
    ) -> EnvironmentEntry:
        """Give an environment its id and name.

        An environment that comes back (same desired name, its earlier registration disconnected or
        silent) gets its old id and name, and so finds the checkpoints that it saved under that
        name.

        Raises RefusedError: MOST_ENVIRONMENTS are registered.
        """
        with self._lock:
            namesakes = [
                entry for entry in self._environments if entry.desired_name == desired_name
            ]
            former = next((entry for entry in namesakes if not self._is_present(entry)), None)
            if former is None and len(self._environments) >= MOST_ENVIRONMENTS:
                message = (
                    f"{MOST_ENVIRONMENTS} environments have registered with"
                    " this run: use a former one's name"
                )
                raise RefusedError(message, 422, "desired_name")
            env_id = former.env_id if former else len(self._environments)
            name = former.name if former else f"{desired_name}_{len(namesakes)}"
            entry = EnvironmentEntry(
                env_id,
                desired_name,
                name,
                max_token_length,
                weight,
                group_size,
                min_batch_allocation=min_batch_allocation,
            )
            self._environments[env_id : env_id + 1] = [entry]
            self._last_seen[env_id] = self._clock()
            self._save()
        for call in self.on_registration:
            call(entry)
        return entry

    def disconnect_environment(self, env_id: int) -> bool:
        """False when no environment has that id."""
        with self._lock:
            if not 0 <= env_id < len(self._environments):
                return False
            self._environments[env_id] = replace(self._environments[env_id], connected=False)
            self._save()
            return True

    def status(self) -> dict[str, int]:
        """`queue_size` counts waiting groups of all sources."""
        return {"current_step": self._current_step(), "queue_size": self.store.counts().waiting}

    def environment_status(self, env_id: int) -> dict[str, int | float] | None:
        """Return the load by which an environment throttles itself, as in atroposlib; None for
        an unknown id."""
        waiting = self.store.waiting_by_source()
        with self._lock:
            if not 0 <= env_id < len(self._environments):
                return None
            entry = self._environments[env_id]
            self._last_seen[env_id] = self._clock()
            weight = self._weight(entry)
            present = [other for other in self._environments if self._is_present(other)]
        shares = {_source(other.env_id): other.min_batch_allocation or 0.0 for other in present}
        waiting_here = waiting.pop(_source(env_id), WaitingSource(0, 0, 0))
        largest = max([1, waiting_here.largest, *(source.largest for source in waiting.values())])
        group_size = max(entry.group_size, waiting_here.largest) or 1
        sequences = waiting_here.sequences
        # in packs of the largest group, beyond each one's minimum
        for name, source in waiting.items():
            packed = -(-source.sequences // largest) * largest if largest > 1 else 0
            sequences += max(0, packed - int(self.settings.batch_size * shares.get(name, 0.0)))
        if self.store.waiting_sequences() >= self.settings.batch_size and self.store.starved():
            sequences = 0  # full queues would wait for each other
        return {
            "current_step": self.status()["current_step"],
            "queue_size": sequences // group_size,
            "unallocated_fraction": 1.0 - min(sum(shares.values()), 1.0),
            "self_queue_size": waiting_here.sequences // group_size,
            "max_group_size": largest,
            "env_weight": weight,
        }

    def minimums(self) -> dict[str, tuple[int, int]]:
        """Return environment's name → (its least sequences of each batch, in whole groups; its
        group size).

        These are the environments with a `min_batch_allocation` that are present and have sent a
        group within
        SILENT_AFTER_S: one that delivers nothing must not hold batches up.
        """
        now, minimums = self._clock(), {}
        with self._lock:
            for entry in self._environments:
                wanted = int(self.settings.batch_size * (entry.min_batch_allocation or 0.0))
                sent = self._sent.get(entry.name)
                if (
                    wanted > 0
                    and self._is_present(entry)
                    and sent is not None
                    and now - sent <= SILENT_AFTER_S
                ):
                    size = max(entry.group_size, 1)
                    minimums[entry.name] = (-(-wanted // size) * size, size)
        return minimums

    def submit(self, data: Any) -> bool:
        """Store one scored group from the wire; on the disk when this returns. False: it was sent
        before.

        Raises RolloutRejectedError: it cannot be trained on, and is in quarantine with the reason.
        StoreError: it cannot be stored now; the sender should try again.
        """
        env_id = _env_id(data)
        entry, source = self.sender(env_id), _source(env_id)
        environment = entry.name if entry else "external"
        try:
            if not isinstance(data, Mapping):
                raise RolloutRejectedError(
                    f"a scored group is a JSON object, not {type(data).__name__}"
                )
            _require_finite({key: data.get(key) for key in _LOOSE})
            version = self._policy_version()
            group = from_scored_data(
                data,
                policy_version=version,
                environment=environment,
                temperature=self.settings.temperature,
                reader=self.settings.image_reader,
            )
            group = with_fitting_experts(group, self.settings.experts())
            check_group(
                group,
                vocab_size=self.settings.vocab_size,
                max_token_length=self.settings.max_token_length,
                missing_logprobs=self.settings.missing_logprobs,
                newest_version=version,
            )
            if len(group.rollouts) > self.settings.batch_size:
                raise RolloutRejectedError(
                    f"{len(group.rollouts)} sequences in one group, but a batch has"
                    f" {self.settings.batch_size}"
                    " (rollout_batch_size) and groups are never split"
                )
            added = self.store.add(group, source=source)
        except RolloutRejectedError as error:
            self.store.reject(data, source=source, reason=str(error))
            self._note_submission(str(error), environment, None)
            raise
        self._note_submission(None, environment, data)
        for call in self.on_group if added and entry else ():
            call(environment, group)
        return added

    def quarantine(self, reason: str) -> None:
        """Count a group whose body was not JSON, or too large to be read."""
        self.store.reject(None, source=SOURCE, reason=reason)
        self._note_submission(reason, "external", None)

    def latest_example(self) -> dict[str, Any] | None:
        """Return the last group accepted since this process started, as it was sent."""
        return (
            None
            if self._latest is None
            else {name: self._latest.get(name) for name in ATROPOS_FIELDS}
        )

    def reset(self) -> int:
        """Drop the waiting groups of environments and record why; registrations stay. Returns
        how many groups."""
        return self.store.drop_waiting(
            SOURCE, self._current_step(), "dropped by /atropos/reset_data"
        )

    def note_reward(self) -> None:
        """Note a group from /v1/rewards: rollouts are made even if no environment has
        registered here."""
        with self._lock:
            self._last_reward = self._clock()

    def health(self) -> str | None:
        """Describe a fault of the environments over HTTP, or return None."""
        now = self._clock()
        with self._lock:
            seen = [
                (entry, self._last_seen.get(entry.env_id))
                for entry in self._environments
                if entry.connected
            ]
            reasons = [reason for reason in self._recent if reason is not None]
            recent = len(self._recent)
            quiet_s, unrewarded_s = now - self._last_group, now - self._last_reward
        for entry, last in seen:
            if last is not None and now - last > SILENT_AFTER_S:
                return (
                    f"environment {entry.name} has not called for"
                    f" {now - last:.0f} s: is it still running?"
                )
        present = [entry for entry, last in seen if last is not None]
        if reasons and 2 * len(reasons) >= recent:
            return (
                f"{len(reasons)} of the last {recent} groups from"
                f" environments were rejected: {reasons[-1]}"
            )
        if fault := self._unreachable_batch(present):
            return fault
        nobody_s = min(quiet_s, unrewarded_s)
        if not present and not self.settings.other_group_sizes and nobody_s > SILENT_AFTER_S:
            return (
                "no environment has registered at /atropos and nothing came to /v1/rewards for"
                f" {nobody_s:.0f} s:"
                " nothing makes rollouts"
            )
        if present and quiet_s > STALLED_AFTER_S:
            return (
                f"{len(present)} environments are registered, but none has sent a group for"
                f" {quiet_s:.0f} s"
            )
        return None

    def _unreachable_batch(self, present: list[EnvironmentEntry]) -> str | None:
        """Check that some mix of group sizes adds up to the batch size: batches are whole
        groups."""
        sizes = {entry.group_size for entry in present} | set(self.settings.other_group_sizes)
        total = self.settings.batch_size
        reachable = {0}
        for amount in range(1, total + 1):
            if any(amount - size in reachable for size in sizes):
                reachable.add(amount)
        if not present or total in reachable:
            return None
        listed = ", ".join(map(str, sorted(sizes)))
        return (
            f"no mix of groups of {listed} sequences makes a batch of {total} (rollout_batch_size)"
        )

    def sender(self, env_id: int | None) -> EnvironmentEntry | None:
        """Return an environment that calls now; None: there is none of that id."""
        with self._lock:
            if env_id is None or env_id >= len(self._environments):
                return None
            self._last_seen[env_id] = self._clock()
            return self._environments[env_id]

    def _note_submission(
        self, reason: str | None, environment: str, accepted: Mapping[str, Any] | None
    ) -> None:
        with self._lock:
            self._recent.append(reason)
            if accepted is not None:
                self._latest = accepted
                self._last_group = self._sent[environment] = self._clock()

    def _weight(self, entry: EnvironmentEntry) -> float:
        """atroposlib's share of an environment: context length x weight, over the environments
        that are present."""
        total = sum(
            other.max_token_length * max(0.0, other.weight)
            for other in self._environments
            if self._is_present(other)
        )
        return (
            max(MIN_ENV_WEIGHT, entry.max_token_length * entry.weight / total)
            if total
            else MIN_ENV_WEIGHT
        )

    def _is_present(self, entry: EnvironmentEntry) -> bool:
        last = self._last_seen.get(entry.env_id)
        return entry.connected and last is not None and self._clock() - last <= SILENT_AFTER_S

    def _save(self) -> None:
        self.store.remember(_NOTE, [asdict(entry) for entry in self._environments])


def _require_finite(fields: Mapping[str, Any]) -> None:
    """Raises RolloutRejectedError: a field holds NaN or an infinity (JSON has neither), or is
    nested too deep."""
    for name, value in fields.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise RolloutRejectedError(f"{name} holds NaN or an infinity") from None
        except RecursionError:
            raise RolloutRejectedError(f"{name} is nested too deep") from None


def _bounded(entry: EnvironmentEntry) -> EnvironmentEntry:
    """The entry; one whose numbers an older version accepted, and that would end the training,
    counts as gone."""
    allocation = 0.0 if entry.min_batch_allocation is None else entry.min_batch_allocation
    numbers = (entry.weight, entry.max_token_length, entry.group_size)
    if 0 <= allocation <= 1 and all(0 <= number <= LARGEST_NUMBER for number in numbers):
        return entry
    return replace(
        entry,
        weight=0.0,
        max_token_length=1,
        group_size=1,
        connected=False,
        min_batch_allocation=None,
    )


def _source(env_id: int | None) -> str:
    return SOURCE if env_id is None else f"{SOURCE}:{env_id}"


def _env_id(data: Any) -> int | None:
    """Return the environment's id; None: missing, or it is not a valid one."""
    try:
        return _ENV_ID.validate_python(data.get("env_id") if isinstance(data, Mapping) else None)
    except ValidationError:
        return None
