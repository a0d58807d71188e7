"""Recorded sessions as a source of rollouts: an agent's run that got a score is trained on, with
others of its prompt.

    POST /sessions/NAME/feedback {"score": …} → the session's rollout → waits for its group →
    RolloutStore

Sessions whose first prompts have equal tokens are a group, or those that name the same `group`.
Rollouts that wait for their group are in memory: a restart forgets them (their labels are on the
disk). A group in the store is durable.
"""

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mlx_parallm.errors import ConfigError, RolloutRejectedError, TraceError
from mlx_parallm.rl_training.sources import POLICY, RolloutSource, SourceContext
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.server.context import ServerDeps
from mlx_parallm.systems.traces.config import TracesConfig
from mlx_parallm.systems.traces.privacy import secret_finder
from mlx_parallm.systems.traces.recorder import SessionRecorder
from mlx_parallm.systems.traces.routes import session_router
from mlx_parallm.systems.traces.schema import Json, Label
from mlx_parallm.systems.traces.session import Session
from mlx_parallm.types import Request, Rollout, RolloutGroup

MOST_WAITING = 10_000  # groups that are not full
ENVIRONMENT = "sessions"


def recorder_of(config: TracesConfig, secrets: Iterable[str | None] = ()) -> SessionRecorder | None:
    """The recorder of `[traces]`; None where it records nothing. Raises StoreError: the
    directory cannot be made."""
    if config.directory is None:
        return None
    finder = secret_finder(secrets, personal=config.redact_personal) if config.redact else None
    return SessionRecorder(config.directory, finder)


def session_routes(config: TracesConfig, deps: ServerDeps) -> AddedRouter | None:
    """Return the recorder's routes, for a server that trains nothing; None: nothing is recorded."""
    recorder = recorder_of(config, [deps.api_key])
    return session_router(recorder) if recorder is not None else None


def session_rewards(context: SourceContext) -> "SessionRewards | None":
    """Return the source; None: nothing is recorded. Raises ConfigError: groups of this size
    never fill a batch."""
    config = context.config
    section, batch = config.section(TracesConfig), config.rl_training.atropos.rollout_batch_size
    recorder = recorder_of(section, [config.resolve_api_key()])
    if recorder is None:
        return None
    size = section.group_size
    if size > batch or (batch % size and not context.environments):
        raise ConfigError(
            f"traces.group_size = {size}: groups of sessions never add up to"
            f" rl_training.atropos.rollout_batch_size = {batch}; choose a divisor of it"
        )
    return SessionRewards(context, recorder)


class SessionRewards(RolloutSource):
    """Sessions that were recorded by this run and scored. `router` takes the calls and the
    scores."""

    name = ENVIRONMENT

    def __init__(self, context: SourceContext, recorder: SessionRecorder) -> None:
        self._context, self._recorder = context, recorder
        self._group_size = context.config.section(TracesConfig).group_size
        # key → session, answer → rollout
        self._waiting: dict[str, dict[tuple[str, str | None], Rollout]] = {}
        self._queued: set[tuple[str, str | None]] = set()
        adapter = POLICY if context.config.rl_training.lora.enabled else None

        def is_policy(request: Request) -> bool:
            return request.samples_from(adapter)

        self.router = session_router(recorder, is_policy=is_policy, trained=self._take)

    async def _take(self, session: str, label: Label, group: str | None) -> Json:
        """Make a rollout of a scored session and put it to its group. Server's thread only."""
        place = (session, label.response_id)
        if place in self._queued:
            reason = "an earlier score of this session is in a group already"
            return {"state": "trained", "reason": reason}

        def read(recorded: Session) -> tuple[Rollout, list[int]]:
            answer = label.response_id
            last = recorded.by_response(answer) if answer is not None else None
            return recorded.rollout(last), recorded.opening

        try:
            rollout, opening = self._recorder.read(session, read)
        except TraceError as error:
            return {"state": "refused", "reason": str(error)}
        assert label.value is not None
        key = group if group is not None else hashlib.sha256(str(opening).encode()).hexdigest()
        waiting = self._waiting.setdefault(key, {})
        waiting[place] = replace(rollout, scores={"reward": label.value})
        if len(waiting) < self._group_size:
            if len(self._waiting) > MOST_WAITING:
                del self._waiting[next(iter(self._waiting))]
            return {"state": "waiting", "sessions": len(waiting), "group_size": self._group_size}
        del self._waiting[key]
        return await asyncio.to_thread(self._store, waiting)

    def _store(self, waiting: dict[tuple[str, str | None], Rollout]) -> Json:
        names: list[Any] = [
            session if answer is None else f"{session}/{answer}" for session, answer in waiting
        ]
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
        group = RolloutGroup(
            f"{ENVIRONMENT}-{digest}",
            ENVIRONMENT,
            tuple(waiting.values()),
            metadata={"sessions": names},
        )
        context = self._context
        try:
            longest = context.config.rl_training.atropos.max_token_length
            check_group(group, vocab_size=context.vocab_size, max_token_length=longest)
        except RolloutRejectedError as error:
            context.store.reject(group, source=self.name, reason=str(error))
            return {"state": "refused", "reason": str(error)}
        context.store.add_all([group], source=self.name)
        self._queued.update(waiting)
        for listener in context.on_reward:
            listener()
        return {"state": "queued", "group": group.group_id, "sessions": names}
