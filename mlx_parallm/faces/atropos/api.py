"""The HTTP side of an external Atropos API, and the words for why it makes no batch.
`atropos_client` polls with it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from mlx_parallm.system.foreign_http import Bounds, async_client, json_of

REQUEST_TIMEOUT_S = 120.0  # a 52 MB batch takes the server 12 s, and it blocks meanwhile
BOUNDS = Bounds(body=256 << 20, seconds=REQUEST_TIMEOUT_S)
UNSET = -1  # the batch size of an API without a registered trainer


@dataclass(frozen=True, slots=True)
class TrainerRegistration:
    """The body of POST /register; every field is required there. `batch_size` counts sequences."""

    wandb_group: str
    wandb_project: str
    batch_size: int
    max_token_len: int
    checkpoint_dir: str
    save_checkpoint_interval: int
    starting_step: int  # 0, or the step that a resumed run continues from
    num_steps: int  # absolute, also after a resume


@dataclass(frozen=True, slots=True)
class BatchReply:
    """One answer of /batch. `groups` is None if the API answered null; `registered` False:
    register first."""

    groups: list[dict[str, Any]] | None
    registered: bool = True


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    """The answer of /status-env about one environment, and about the queue as a whole."""

    own_groups: int  # queued groups of its own size
    # sequences of the largest group queued, from any environment; 1 when the queue is empty
    largest_group: int
    unallocated: float  # share of a batch that the environments' `min_batch_allocation` leaves


class AtroposClient:
    """One Atropos API.

    Every method raises httpx.HTTPError (unreachable, bad status) or ValueError (not its JSON: a
    whole sentence).
    """

    def __init__(self, api_url: str) -> None:
        self.url = api_url.rstrip("/")
        # identity: on a loopback connection gzip makes a large batch three times slower
        self._http = async_client(
            BOUNDS, timeout=REQUEST_TIMEOUT_S, headers={"Accept-Encoding": "identity"}
        )

    async def register(self, registration: TrainerRegistration) -> int:
        """Return the uuid, a 128-bit integer that no later call wants."""
        return int(
            (await self._json("POST", "/register", "uuid", json=asdict(registration)))["uuid"]
        )

    async def info(self) -> tuple[int, int]:
        """Return the (batch_size, max_token_len) that environments get; batch_size is UNSET when no
        trainer is registered."""
        info = await self._json("GET", "/info", "batch_size", "max_token_len")
        return int(info["batch_size"]), int(info["max_token_len"])

    async def queue_size(self) -> int:
        """Return how many groups wait; 0 also when no trainer is registered."""
        return int((await self._json("GET", "/status", "queue_size"))["queue_size"])

    async def environments(self) -> list[EnvironmentReport]:
        """One report for each that ever registered; none when all have disconnected (the API
        fails then)."""
        reports: list[EnvironmentReport] = []
        while (
            reply := await self._send("GET", "/status-env", json={"env_id": len(reports)})
        ).is_success:
            status = self._object(
                "/status-env",
                reply,
                ("self_queue_size", "max_group_size", "unallocated_fraction"),
            )
            reports.append(
                EnvironmentReport(
                    own_groups=int(status["self_queue_size"]),
                    largest_group=int(status["max_group_size"]),
                    unallocated=float(status["unallocated_fraction"]),
                )
            )
        return reports

    async def reset(self) -> None:
        """Throw away the queue, the environments and the registration."""
        (await self._send("GET", "/reset_data")).raise_for_status()

    async def batch(self) -> BatchReply:
        """Take the next batch: it is handed out once."""
        reply = await self._json("GET", "/batch", "batch")
        if reply.get("status") == "error":
            return BatchReply(None, registered=False)
        return BatchReply(reply["batch"] or None)

    async def close(self) -> None:
        await self._http.aclose()

    async def _json(self, method: str, path: str, *keys: str, **options: Any) -> dict[str, Any]:
        reply = await self._send(method, path, **options)
        reply.raise_for_status()
        return self._object(path, reply, keys)

    def _object(self, path: str, reply: httpx.Response, keys: Sequence[str]) -> dict[str, Any]:
        try:
            value = json_of(reply, BOUNDS)
        except ValueError as error:
            value = f"{reply.content[:80].decode(errors='replace')} ({error})"
        if not isinstance(value, dict) or not value.keys() >= set(keys):
            raise ValueError(
                f"{self.url}{path} answered {str(value)[:160]!r}: is this an Atropos API?"
            )
        return value

    async def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            reply: httpx.Response = await self._http.request(method, self.url + path, **options)
            return reply
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
            # a kept-alive connection that the server closed after its last error
            reply = await self._http.request(method, self.url + path, **options)
            return reply


def why_no_batch(
    url: str,
    batch_size: int,
    groups: int,
    environments: Sequence[EnvironmentReport],
    seconds: float,
) -> str:
    """Return a sentence that says why /batch stays null although `groups` have waited, unchanged,
    for `seconds`.

    The API packs groups of one size into runs as long as the largest group and makes a batch of
    runs that add up to exactly `batch_size` sequences. A group that never fits waits forever,
    and then the environments wait too: they stop when the queue holds `max_batches_offpolicy`
    batches.
    """
    if not groups and not environments:
        return (
            f"no environment has registered at {url} for {seconds:.0f} s: start one with"
            f" --env.rollout_server_url {url}"
        )
    if not groups:
        return (
            f"{len(environments)} environments are registered at {url}, but nothing has been queued"
            f" for {seconds:.0f} s: do they get answers, and have their groups"
            " the size that they registered?"
        )
    largest = max((report.largest_group for report in environments), default=0)
    waiting = (
        f"the Atropos API at {url} makes no batch of {batch_size} sequences from the {groups}"
        " groups queued there"
    )
    if largest > batch_size:
        return (
            f"{waiting}: one has {largest}, and blocks the rest until run-api is restarted"
            " (lower group_size or raise rollout_batch_size)"
        )
    if largest and batch_size % largest:
        return (
            f"{waiting}: the largest has {largest}, which does not divide"
            f" {batch_size} (change group_size)"
        )
    reserved = 1.0 - environments[0].unallocated if environments else 0.0
    absent = [number for number, report in enumerate(environments) if not report.own_groups]
    if reserved > 0 and absent:
        return (
            f"{waiting}: {reserved:.0%} of it is reserved (min_batch_allocation), and"
            f" environment {absent[0]} has sent nothing"
        )
    if largest and groups * largest < batch_size:
        return (
            f"{waiting}: they are too few, and none has come for {seconds:.0f} s: the environments"
            " wait or hang (do they get answers?)"
        )
    return (
        f"{waiting}: group sizes must divide the batch size and each other; environments wait"
        " meanwhile, for the queue looks full"
    )
