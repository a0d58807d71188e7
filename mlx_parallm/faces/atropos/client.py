"""Groups from an external Atropos API (`api_url = "http://…"`): register, poll /batch, check,
store.

`AtroposPoller` runs in a thread with its own loop; the trainer makes it over the run's
`RolloutStore`, starts it before the first step and shows `health()`. `api.py` is the HTTP side,
`wire.py` has the wire conventions.

Faults of atroposlib 0.4.0's server for a trainer, and our answer to each (measured):
* environments wait until the first GET /batch: the poller asks once right after registering, room
  or not;
* /batch hands a batch out once: no poll while the store already holds a batch, the client's timeout
  is 120 s, and when the disk is full the batch in hand is tried again until it is kept;
* it forms all batches at once, hands them out newest first, and counts them as steps: the trainer
  counts its own;
* null for minutes is normal; a constant queue with null is not (group sizes that never add up):
  `health` says why;
* a NaN in a group makes /batch fail, and the batch is gone: counted, and asked again;
* after an unhandled error it answers 500 and closes the socket: a transport error is tried again on
  a new one;
* an error comes as 200 with `"batch": []`, and after a restart no trainer is registered: register
  again, also while the store is full and /batch is not asked, because environments wait for it;
* a second /register is ignored, and one after stray data is too ("poisoned"): /info tells. A reset
  throws queued groups away and ends running environments, so it is done only if nothing can be
  lost.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from mlx_parallm.errors import ConfigError, RolloutRejectedError, StoreError
from mlx_parallm.execution.prompt_images import ImageReader
from mlx_parallm.faces.atropos.api import (
    UNSET,
    AtroposClient,
    BatchReply,
    TrainerRegistration,
    why_no_batch,
)
from mlx_parallm.faces.atropos.wire import from_scored_data
from mlx_parallm.rollout_store.checks import MissingLogprobs, check_group
from mlx_parallm.rollout_store.companions import with_fitting_experts
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread

STALLED_AFTER_S = 60.0
STATUS_EVERY_S = 10.0  # how often the API is looked at while /batch is null or not asked
# an API that comes back has its trainer, and so its environments, within this
MAX_RETRY_PAUSE_S = 5.0
RESET_ATTEMPTS = 3

T = TypeVar("T")
logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _ApiQueue:
    """The last answer of /status: `size` groups wait, a number that has not changed since
    `since`. `polled_at`: when the API was called (monotonic)."""

    size: int
    since: float
    polled_at: float


class AtroposPoller:
    """Fetches batches into the store in its own thread. `start`, `health`, `stop`."""

    def __init__(
        self,
        client: AtroposClient,
        store: RolloutStore,
        registration: TrainerRegistration,
        *,
        vocab_size: int,
        policy_version: Callable[[], int],
        temperature: float,
        missing_logprobs: MissingLogprobs,
        poll_interval_s: float,
        image_reader: ImageReader | None = None,
        stalled_after_s: float = STALLED_AFTER_S,
        status_every_s: float = STATUS_EVERY_S,
        experts: Callable[[], tuple[int, int, int] | None] = lambda: None,
    ) -> None:
        self._client = client
        self._store = store
        self._registration = registration
        self._vocab_size = vocab_size
        self._experts = experts  # see `AtroposSettings.experts`
        self._policy_version = policy_version
        self._temperature = temperature
        self._missing_logprobs = missing_logprobs
        self._poll_interval_s = poll_interval_s
        self._image_reader = image_reader
        self._stalled_after_s = stalled_after_s
        self._status_every_s = status_every_s
        self._loop = LoopThread("atropos-poller")
        self._polling: Future[None] | None = None  # from `start` on
        self._registered = threading.Event()  # set once for good, by success or by `_fatal`
        self._fatal: ConfigError | None = None
        self._problem: str | None = None
        self._stall: str | None = None
        self._queue: _ApiQueue | None = None  # while there is room and /batch is null
        self._asked = 0.0  # when the API last told whether this run is registered (monotonic)
        self._was_away = False  # it may have been restarted, and be another run's now
        self._stop = asyncio.Event()
        self.groups_received = 0
        self.groups_rejected = 0
        self.batches_lost = 0  # by the API

    @property
    def source(self) -> str:
        """The name of this source in the store."""
        return f"atropos:{self._client.url}"

    def start(self) -> None:
        """Start the thread, which registers and polls. An API that is not up yet is waited for."""
        self._polling = self._loop.submit(self._work())
        self._polling.add_done_callback(_log_failure)

    def wait_until_registered(self, timeout_s: float) -> bool:
        """Blocks; False when the time is up. Raises ConfigError: the API is registered for
        another run."""
        done = self._registered.wait(timeout_s)
        if self._fatal is not None:
            raise self._fatal
        return done

    def check(self) -> None:
        """Raises ConfigError when polling has ended for good, and says why."""
        if self._fatal is not None:
            raise self._fatal
        if self._has_died:
            raise ConfigError(
                f"the thread that polls {self._client.url} has died; its error is in the log"
            )

    def stop(self, *, grace_s: float = 2.0) -> None:
        """End and join the thread. A request in flight gets `grace_s`: its batch would not be
        handed out again."""
        if self._polling is not None and not self._stopping:
            self._loop.run(self._request_stop())
            wait([self._polling], grace_s)
            self._loop.stop(self._client.close)

    def health(self) -> str | None:
        """Return the problem in words, or None."""
        if self._fatal is not None:
            return str(self._fatal)
        if self._has_died:
            return f"the thread that polls {self._client.url} has died; its error is in the log"
        return self._problem or self._stall

    async def _request_stop(self) -> None:
        self._stop.set()

    async def _work(self) -> None:
        try:
            await self._persistently(self._register)
            self._registered.set()
            must_ask = True  # the first /batch starts the environments
            while not self._stopping:
                if must_ask or self._has_room():
                    must_ask = False
                    if await self._persistently(self._fetch):
                        continue
                else:
                    self._queue = self._stall = None
                    must_ask = bool(await self._persistently(self._was_forgotten))
                    if must_ask:
                        continue
                await self._pause(self._poll_interval_s)
        except ConfigError as error:
            self._fatal = error
            logger.error("atropos_registration_failed", error=str(error))
        finally:
            self._registered.set()

    async def _persistently(self, action: Callable[[], Awaitable[T]]) -> T | None:
        """Run `action` until the API answers it; `health` gives the reason meanwhile."""
        pause = min(self._poll_interval_s, MAX_RETRY_PAUSE_S)
        while not self._stopping:
            try:
                result = await action()
            except ConfigError as error:
                if not self._registered.is_set():
                    raise
                # another run took a restarted API: it may give it back
                self._set_problem(str(error))
            except httpx.HTTPError as error:
                self._was_away |= isinstance(error, httpx.TransportError)
                self._set_problem(
                    f"the Atropos API at {self._client.url} does not answer: {error or repr(error)}"
                )
            except ValueError as error:
                self._set_problem(str(error))
            else:
                self._set_problem(None)
                return result
            await self._pause(pause)
            pause = min(2 * pause, MAX_RETRY_PAUSE_S)
        return None

    async def _register(self) -> None:
        """Registers, and checks that the API took the registration.

        Raises ConfigError when another run's registration is in force, ValueError when data keeps
        coming first.
        """
        wanted = (self._registration.batch_size, self._registration.max_token_len)
        for _ in range(RESET_ATTEMPTS):
            await self._client.register(self._registration)
            in_force = await self._client.info()
            if in_force == wanted:
                logger.info(
                    "atropos_registered",
                    url=self._client.url,
                    starting_step=self._registration.starting_step,
                )
                return
            # data came before any trainer: nothing of it can ever be fetched
            poisoned = in_force[0] == UNSET
            if not poisoned and (
                await self._client.queue_size() or await self._client.environments()
            ):
                raise ConfigError(
                    f"rl_training.atropos.api_url: {self._client.url} serves another run"
                    f" (batch_size {in_force[0]}, max_token_len {in_force[1]}; this run wants"
                    f" {wanted[0]} and {wanted[1]}). Set rollout_batch_size"
                    f" and max_token_length to its values, or stop its environments, call"
                    f" {self._client.url}/reset_data and start again"
                )
            await self._client.reset()
        raise ValueError(
            f"the Atropos API at {self._client.url} ignores this run's registration, because"
            " groups from an earlier"
            " run keep coming in before it: restart their environments"
        )

    async def _fetch(self) -> bool:
        """One /batch; True when it brought groups."""
        if self._was_away:
            await self._register()  # nothing happens if the registration still holds
            self._was_away = False
        try:
            reply = await self._client.batch()
        except httpx.HTTPStatusError as error:
            if (await self._client.info())[0] != UNSET:
                self.batches_lost += 1
                raise ValueError(
                    f"the Atropos API at {self._client.url} answered {error.response.status_code}"
                    " to /batch and lost"
                    f" the batch, the {self.batches_lost}. so far: an environment sends NaN or"
                    " infinite numbers"
                ) from error
            # /reset_data was called: 500 until someone registers
            reply = BatchReply(None, registered=False)
        if not reply.registered:
            logger.warning("atropos_registering_again", url=self._client.url)
            await self._register()
            reply = await self._client.batch()  # environments wait for this one
        self._asked = time.monotonic()
        if reply.groups is None:
            await self._watch_queue()
            return False
        self._queue = self._stall = None
        for data in reply.groups:
            await self._keep(data)
        return True

    async def _was_forgotten(self) -> bool:
        """Whether the API has lost the registration (it was restarted). Asked now and then."""
        if time.monotonic() - self._asked < self._status_every_s:
            return False
        forgotten = (await self._client.info())[0] == UNSET
        self._asked = time.monotonic()
        return forgotten or self._was_away

    async def _keep(self, data: dict[str, Any]) -> None:
        """Put a group into the store or into quarantine. Waits while the disk is full: the API
        forgot the group."""
        while True:
            try:
                self._store_group(data)
            except StoreError as error:
                self._set_problem(str(error))
                if self._stopping:
                    logger.error("atropos_group_lost", error=str(error))
                    return
                await self._pause(self._poll_interval_s)
            else:
                self._set_problem(None)
                return

    def _store_group(self, data: dict[str, Any]) -> None:
        env_id = data.get("env_id") if isinstance(data, dict) else None
        try:
            group = from_scored_data(
                data,
                policy_version=self._policy_version(),
                environment="external" if env_id is None else f"env_{env_id}",
                temperature=self._temperature,
                reader=self._image_reader,
            )
            group = with_fitting_experts(group, self._experts())
            check_group(
                group,
                vocab_size=self._vocab_size,
                max_token_length=self._registration.max_token_len,
                missing_logprobs=self._missing_logprobs,
                newest_version=self._policy_version(),
            )
            self._store.add(group, source=self.source)
        except RolloutRejectedError as error:
            self._store.reject(data, source=self.source, reason=str(error))
            self.groups_rejected += 1
            logger.warning("atropos_group_rejected", reason=str(error))
        else:
            self.groups_received += 1

    async def _watch_queue(self) -> None:
        """While /batch is null: looks how many groups wait at the API, and since when, and finds
        the reason."""
        now = time.monotonic()
        queue = self._queue = self._queue or _ApiQueue(size=0, since=now, polled_at=now)
        if now - queue.polled_at < self._status_every_s:
            return
        size = await self._client.queue_size()
        # it grows: environments are slow, not stuck
        since = queue.since if size == queue.size else now
        self._queue = _ApiQueue(size, since, now)
        self._stall = None
        if now - since >= self._stalled_after_s:
            environments = await self._client.environments()
            self._stall = why_no_batch(
                self._client.url, self._registration.batch_size, size, environments, now - since
            )

    def _has_room(self) -> bool:
        """False while a batch waits in the store: groups that stay at the API tell environments to
        slow down.

        True all the same while the trainer waits: the sizes of the groups in the store do not add
        up to its batch.
        """
        return (
            self._store.waiting_sequences() < self._registration.batch_size or self._store.starved()
        )

    @property
    def _has_died(self) -> bool:
        return self._polling is not None and self._polling.done() and not self._stopping

    @property
    def _stopping(self) -> bool:
        return self._stop.is_set()

    def _set_problem(self, problem: str | None) -> None:
        if problem is not None and problem != self._problem:
            logger.warning("atropos_problem", problem=problem)
        self._problem = problem

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)


def _log_failure(polling: "Future[None]") -> None:
    if not polling.cancelled() and (error := polling.exception()) is not None:
        logger.error("atropos_poller_failed", exc_info=error)
