"""An `AtroposPoller` over a `run-api`, quick to notice, and what a test does to the API
meanwhile."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

import httpx

from mlx_parallm.faces.atropos.api import AtroposClient, TrainerRegistration
from mlx_parallm.faces.atropos.client import AtroposPoller
from mlx_parallm.rollout_store.store import RolloutStore
from tests.atropos.fake_run_api import ENVIRONMENT, RealRunApi, RunApi
from tests.atropos.groups import scored_data
from tests.rollout_store.groups import VOCAB_SIZE

REGISTRATION = TrainerRegistration(
    wandb_group="",
    wandb_project="",
    batch_size=4,
    max_token_len=32,
    checkpoint_dir="checkpoints/run",
    save_checkpoint_interval=50,
    starting_step=7,
    num_steps=1000,
)
FAST = {
    "vocab_size": VOCAB_SIZE,
    "policy_version": lambda: 3,
    "temperature": 1.0,
    "missing_logprobs": "reject",
    "poll_interval_s": 0.01,
    "stalled_after_s": 0.2,
    "status_every_s": 0.05,
}


@contextlib.contextmanager
def polling(url: str, store: RolloutStore, **changes) -> Iterator[AtroposPoller]:
    poller = AtroposPoller(
        AtroposClient(url), store, **{"registration": REGISTRATION, **FAST, **changes}
    )
    poller.start()
    try:
        yield poller
    finally:
        poller.stop()


def groups(count: int, *, size: int = 2, first: int = 0, **changes) -> list[dict]:
    return [
        scored_data(size=size, first_token=10 * (first + number), **changes)
        for number in range(count)
    ]


def register_environment(api: RunApi | RealRunApi, **changes) -> dict:
    return httpx.post(api.url + "/register-env", json=ENVIRONMENT | changes).json()


def register_other_run(api: RunApi | RealRunApi) -> None:
    """Another trainer that has started."""
    httpx.post(
        api.url + "/register", json=asdict(replace(REGISTRATION, batch_size=64))
    ).raise_for_status()
    httpx.get(api.url + "/batch").raise_for_status()


def info(api: RunApi | RealRunApi) -> tuple[int, int]:
    found = httpx.get(api.url + "/info").json()
    return found["batch_size"], found["max_token_len"]


def eventually(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """For states that no event announces: what `health` says, what the fake was asked."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.005)
