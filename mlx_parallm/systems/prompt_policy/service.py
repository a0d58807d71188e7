"""`PolicyService`: one policy that acts, collects and learns at the same time. `routes.py` puts
HTTP in front of it.

    acting thread     its own copy of the networks; a choice never waits for an update
    learning thread   `PPOTrainer`: updates, checkpoints; then the acting copy gets the new weights
    store's thread    experiences on the disk before they are acknowledged

`checkpoint_dir` holds `latest`, `update_N`, checkpoints that clients name, and
`experiences.sqlite`. A checkpoint knows the last experience it has learned from. So after a kill -9
the policy continues from `latest` with the experiences that came after it: none is lost, and none is
learned from twice.
"""

import asyncio
import contextlib
import fcntl
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_parallm.errors import CheckpointError, RefusedError, RequestError
from mlx_parallm.models.threads import MLXThread
from mlx_parallm.system.files import TEMPORARY, remove_leftovers
from mlx_parallm.system.log import get_logger
from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig
from mlx_parallm.systems.prompt_policy.experience import Choice, Experience, History
from mlx_parallm.systems.prompt_policy.mutation_ppo import STATE_FILE, ActorCritic, PPOTrainer
from mlx_parallm.systems.prompt_policy.store import Decision, ExperienceStore

log = get_logger("prompt policy")

LATEST, DATABASE, LOCK = "latest", "experiences.sqlite", "lock"
MOST_CHECKPOINTS = 1000
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


class PolicyService:
    """Any thread. Methods that return a Future are done when what they promise is on the disk.

    Args:
        mutations: their names, in the order of the actions.

    Raises CheckpointError, StoreError: `checkpoint_dir` cannot be used, or is another policy's.
    """

    def __init__(self, config: PromptPolicyConfig, mutations: tuple[str, ...]) -> None:
        self.config, self.mutations = config, mutations
        self.directory = config.checkpoint_dir.expanduser()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._claim = (self.directory / LOCK).open("w")
        except OSError as error:
            raise CheckpointError(
                f"{self.directory} cannot be used: {error.strerror or error}"
            ) from error
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._claim.close()
            raise CheckpointError(
                f"{self.directory} is in use by another prompt policy: set another"
                " prompt_policy.checkpoint_dir"
            ) from error
        remove_leftovers(self.directory)
        self._lock = threading.Lock()  # guards the buffer
        self._buffer: list[Experience] = []
        self._update_waits = False
        self._acting, self._learning = (
            MLXThread("prompt-policy-acts"),
            MLXThread("prompt-policy-learns"),
        )
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._claim.close)
            on_error.callback(self._acting.close)
            on_error.callback(self._learning.close)
            self._store = ExperienceStore(
                self.directory / DATABASE,
                config.ppo.input_dim,
                len(mutations),
                open_decisions=config.open_decisions,
                added=self._added,
            )
            on_error.callback(self._store.close)
            self._networks = self._acting.submit(lambda: ActorCritic(config.ppo)).result()
            self._trainer = self._learning.submit(self._begin).result()
            on_error.pop_all()
        for experience in self._store.unused():
            if experience.sequence > self._trainer.trained_through:
                self._added(experience)
        # a restart does not draw the same again
        self._sampling = np.random.default_rng(
            [config.ppo.seed, 1, self._trainer.summary().experiences]
        )

    @property
    def buffer_size(self) -> int:
        """Experiences that wait for the next update."""
        with self._lock:
            return len(self._buffer)

    def history(self) -> History:
        return self._trainer.summary()

    def uncertainty(self, state: np.ndarray) -> float:
        """Return how little is known about an embedding [input_dim], 1 = nothing, towards 0 with
        experiences."""
        return self._trainer.uncertainty(state)

    def choose(
        self, state: np.ndarray, allowed: np.ndarray | None = None, *, deterministic: bool = False
    ) -> "Future[Choice]":
        """Choose a mutation for an embedding [input_dim]: the likeliest one, or one drawn from
        the distribution."""

        def act() -> Choice:
            rows = None if allowed is None else mx.array(allowed)[None]
            x = mx.array(state)[None]
            log_probs = self._networks.policy(x, rows)[0]
            numbers, probabilities = np.array(log_probs), np.array(mx.exp(log_probs))
            value = float(np.array(self._networks.value(x))[0])
            if deterministic:
                action = int(numbers.argmax())
            else:
                exact = probabilities.astype(np.float64)
                action = int(self._sampling.choice(len(exact), p=exact / exact.sum()))
            return Choice(
                action,
                float(numbers[action]),
                value,
                probabilities,
                self._trainer.uncertainty(state),
            )

        return self._acting.submit(act)

    def add(self, experience: Experience) -> "Future[Experience]":
        """Keep an experience for the next update."""
        return self._store.add(experience)

    def open(self, decision: Decision) -> "Future[None]":
        """Keep a mutation until its reward comes."""
        return self._store.add_decision(decision)

    def reward(
        self,
        decision_id: str,
        reward: float,
        episode_id: str | None = None,
        next_state: np.ndarray | None = None,
    ) -> "Future[Experience]":
        """Reward an open mutation. `next_state`: embedding [input_dim] of the prompt after it;
        None = the episode has ended. The Future raises RefusedError (404): unknown
        id."""
        return self._store.reward(decision_id, reward, episode_id, next_state)

    def update(self) -> "Future[dict[str, float] | None]":
        """Learn from what has come since the last update; None: fewer than `min_buffer_size`
        experiences."""
        return self._learning.submit(self._update)

    def save(self, name: str | None) -> "Future[str]":
        """Write a checkpoint; return its name. Raises RequestError: not a name, or the name of
        something else; the Future: RefusedError (503)."""
        directory = self._checkpoint(name or LATEST)

        def write() -> str:
            self._write(directory)
            return directory.name

        if directory.is_symlink() or (
            directory.exists() and not (directory / STATE_FILE).is_file()
        ):
            raise RequestError(
                (
                    f"{directory} is there, and is not a checkpoint of a"
                    " prompt policy: choose another name"
                ),
                param="path",
            )
        if (
            not directory.exists()
            and len(list(self.directory.glob(f"*/{STATE_FILE}"))) >= MOST_CHECKPOINTS
        ):
            raise RequestError(
                (
                    f"{self.directory} holds {MOST_CHECKPOINTS} checkpoints: delete some, or take"
                    " a name that is there"
                ),
                param="path",
            )
        return self._learning.submit(write)

    def load(self, name: str) -> "Future[None]":
        """Act and learn from a checkpoint on. Raises RequestError: not a name; the Future:
        RefusedError (404: there is none; 409: it does not fit). Experiences that wait stay."""
        directory = self._checkpoint(name)

        def read() -> None:
            if not directory.is_dir():
                kept = sorted(path.name for path in self.directory.iterdir() if path.is_dir())
                raise RefusedError(
                    f"File not found: no checkpoint {name!r}; there are: {', '.join(kept)}",
                    404,
                    "path",
                )
            try:
                self._trainer.load(directory)
            except CheckpointError as error:
                raise RefusedError(str(error), 409, "path") from error
            self._publish()
            if directory.name != LATEST:  # a restart continues from here
                self._write(self.directory / LATEST)

        return self._learning.submit(read)

    def close(self) -> None:
        """Write what waits and a last checkpoint, and end the threads. Raises CheckpointError."""
        self._store.close()
        try:
            self._learning.submit(lambda: self._trainer.save(self.directory / LATEST)).result()
        finally:
            self._learning.close()
            self._acting.close()
            self._claim.close()

    def _begin(self) -> PPOTrainer:
        trainer = PPOTrainer(self.config.ppo, self._store.id)
        if (self.directory / LATEST).is_dir():
            trainer.load(self.directory / LATEST)
        self._publish(trainer)
        return trainer

    def _publish(self, trainer: PPOTrainer | None = None) -> None:
        """Give the acting networks the weights; arrays are never changed in place, so they are
        shared."""
        weights = (trainer or self._trainer).networks.parameters()
        mx.eval(weights)
        self._acting.submit(lambda: self._networks.update(weights)).result()

    def _added(self, experience: Experience) -> None:
        self._trainer.observe(experience)
        with self._lock:
            self._buffer.append(experience)
            full = len(self._buffer) >= self.config.ppo.buffer_size and not self._update_waits
            self._update_waits |= full
        if full:
            self._learning.submit(self._update).add_done_callback(_report)

    def _update(self) -> dict[str, float] | None:
        with self._lock:
            taken, self._update_waits = list(self._buffer), False
        if len(taken) < self.config.ppo.min_buffer_size:
            return None
        metrics = self._trainer.update(taken)
        with self._lock:
            del self._buffer[: len(taken)]
        self._publish()
        updates = self._trainer.history.updates
        self._write(self.directory / LATEST)
        self._store.consumed(self._trainer.trained_through)
        if updates % self.config.ppo.checkpoint_interval == 0:
            self._write(self.directory / f"update_{updates:06d}")
        log.info(
            "update",
            number=updates,
            experiences=len(taken),
            **{k: round(v, 5) for k, v in metrics.items()},
        )
        return metrics | {"update_count": updates, "experiences": len(taken)}

    def _write(self, directory: Path) -> None:
        """Save to a directory. Raises RefusedError (503): the disk is full, or not writable."""
        try:
            self._trainer.save(directory)
        except CheckpointError as error:
            raise RefusedError(str(error), 503) from error

    def _checkpoint(self, name: str) -> Path:
        """Return the directory of a checkpoint. Raises RequestError: the name could leave
        `checkpoint_dir`."""
        plain = name.casefold()  # some file systems do not tell "Lock" from "lock"
        if (
            not NAME.fullmatch(name)
            or plain.startswith(DATABASE)
            or plain == LOCK
            or TEMPORARY in plain
        ):
            raise RequestError(
                f"'path' is the name of a checkpoint in {self.directory}: up to 100 letters,"
                f" digits, '_', '-' and '.', not {name!r}",
                param="path",
            )
        return self.directory / name


def _report(outcome: "Future[Any]") -> None:
    if error := outcome.exception():
        log.error("the update failed", error=str(error))


def allowed_actions(
    mutations: tuple[str, ...],
    names: Mapping[str, Any] | list[str] | None,
    *,
    param: str = "allowed",
) -> np.ndarray | None:
    """Return [actions] bool for names of mutations; None = all. Raises RequestError: no such
    mutation, or none."""
    if names is None:
        return None
    if unknown := sorted(set(names) - set(mutations)):
        raise RequestError(
            f"there is no mutation {unknown[0]!r}; there are {', '.join(mutations)}", param=param
        )
    if not names:
        raise RequestError(
            "'allowed' is empty: name at least one mutation, or leave it out", param="allowed"
        )
    return np.array([name in names for name in mutations])


async def done(outcome: "Future[Any]") -> Any:
    """Wait for a Future of a thread in an asyncio loop. A client that hangs up does not cancel
    the thread's work."""
    return await asyncio.shield(asyncio.wrap_future(outcome))
