"""Follows the chats of people who agreed: each answer as the engine sampled it, and what a request
says about earlier ones. No MLX.

Both are on the disk before the client sees the end of the answer.
"""

import asyncio
from collections.abc import Callable, Sequence

from mlx_parallm.errors import StoreError
from mlx_parallm.rollout_store.companions import unkept_of
from mlx_parallm.rollout_store.completions import Choice, rollout_of
from mlx_parallm.rollout_store.payload import encode_group
from mlx_parallm.server.protocol.openai import ChatBody
from mlx_parallm.systems.feedback.consent import Consent
from mlx_parallm.systems.feedback.follow_ups import ConversationReader, FollowUpReading
from mlx_parallm.systems.feedback.store import NOBODY_JUDGES, FeedbackStore, NewAnswer
from mlx_parallm.systems.traces.received_answers import ObservedCall
from mlx_parallm.systems.traces.session import ABORTED
from mlx_parallm.types import Request, Rollout, RolloutGroup

ENVIRONMENT = "feedback"
NOT_THE_POLICY = "another model than the policy answered"
SECRET = "a secret or name was replaced in the chat: its tokens would show it"
BROKEN_OFF = "the answer was broken off before its end, or nothing was sampled"
UNKEPT = "the chat has {}"
TOKENS = "the prompt came as tokens, in which no secrets are looked for"
CONTINUED = "the answer continues with a message of the client's"


def answer_id(response_id: str, choice: int) -> str:
    """Return the id under which a choice is known: the completion's for the first one."""
    return response_id if choice == 0 else f"{response_id}#{choice}"


class ChatObserver(ObservedCall):
    """Follows one answer.

    Args:
        is_policy: whether a request is answered by the policy that is being trained.
        heard: called when something was written that a worker has to look at.
        lost: called when nothing could be written. The person gets the answer all the same.
            Both are called on the thread that writes.
    """

    def __init__(
        self,
        store: FeedbackStore,
        reader: ConversationReader,
        consent: Consent,
        *,
        is_policy: Callable[[Request], bool],
        heard: Callable[[], None],
        lost: Callable[[StoreError], None],
    ) -> None:
        super().__init__()
        self._store, self._reader, self._consent = store, reader, consent
        self._is_policy, self._heard, self._lost = is_policy, heard, lost
        self._began = self._continues = self._as_tokens = False
        self._rollouts: dict[int, Rollout | str] = {}

    def begun(self, body: ChatBody) -> None:
        super().begun(body)
        # fields that a template may show beside the messages
        self.call.tools = [*body.callable_tools, *(body.chat_template_kwargs or {}).values()]
        self._as_tokens = bool(body.prompt_tokens)
        self._began, self._continues = True, body.continues_final_message

    def sampled(self, requests: Sequence[Request], choices: Sequence[Sequence[Choice]]) -> None:
        [request], [all_parts] = requests, choices
        for parts in all_parts:
            index = parts[0].index
            if not self._is_policy(request):
                self._rollouts[index] = NOT_THE_POLICY
            elif unkept := unkept_of(request):
                self._rollouts[index] = UNKEPT.format(unkept)
            else:
                self._rollouts[index] = rollout_of(request, parts)

    async def ended(self) -> None:
        if not self._began:
            return
        if self.call.status == ABORTED:  # what the request said about earlier answers is kept
            self.call.choices.clear()
        # the disk may be slow: no other request waits for it
        await asyncio.to_thread(self._write)

    def _write(self) -> None:
        """Record, and tell of it: nobody waits for this thread when the request's task is
        cancelled, as at the end of the process, when the store may be closed already."""
        try:
            says = self._record()
        except StoreError as error:
            self._lost(error)
            return
        if says:
            self._heard()

    def _record(self) -> bool:
        """Read the request and write all that it says; return whether it says something about
        earlier answers."""
        reading = self._reader.read(self._consent.user, self.call.messages, self.call.tools)
        answers = [self._answer(reading, index) for index in sorted(self.call.choices)]
        self._store.record(answers, reading.signals)
        for _ in range(reading.unjudged):
            self._store.count("signal", "message", NOBODY_JUDGES)
        return bool(reading.signals)

    def _answer(self, reading: FollowUpReading, index: int) -> NewAnswer:
        identity = answer_id(str(self.call.response_id), index)
        choice = self.call.choices[index]
        after, words, had_secret = self._reader.after(reading, choice.message)
        rollout = self._rollouts.get(index, BROKEN_OFF)
        reason: str | None = None
        if isinstance(rollout, str):
            reason = rollout
        elif reading.redacted or had_secret:
            reason = SECRET
        elif self._as_tokens:
            reason = TOKENS
        elif self._continues:
            reason = CONTINUED
        elif rollout.stop_reason not in ("stop", "length") or 1 not in rollout.mask:
            reason = BROKEN_OFF
        payload = None
        if reason is None and isinstance(rollout, Rollout):
            payload = encode_group(
                RolloutGroup(f"{ENVIRONMENT}-{identity}", ENVIRONMENT, (rollout,))
            )
        return NewAnswer(
            identity,
            self._consent.user,
            self._consent.task,
            reading.key,
            after,
            reading.question,
            words,
            payload,
            reason,
        )
