"""An episode's tokens as they went through the engine: sampled text is never tokenised again."""

from collections.abc import Sequence
from typing import Any

from mlx_parallm.rollout_store.companions import COMPANIONS
from mlx_parallm.types import (
    ChatTokenizer,
    Completion,
    Rollout,
    sampled_runs,
)

UNKNOWN_VERSION = -1


class SequenceRecorder:
    """Records one sequence span by span: prompt tokens (mask 0) and sampled ones (mask 1, with
    log-probability and policy version)."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._processed: list[float] = []
        self._reshaped = False  # some turn was sampled from a reshaped distribution
        self._forced: list[int] = []
        self._constrained = False  # a grammar was on in some turn
        self._scored = True  # every sampled token has a log-probability
        self._versions: list[int] = []
        self._turns: list[int] = []  # sampled tokens of each
        self._companions = [companion.recorder() for companion in COMPANIONS]
        self.add_prompt(prompt_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def last_token(self) -> int:
        return self._tokens[-1]

    def add_prompt(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample: prompt, template, an environment's
        answer."""
        self._tokens += token_ids
        self._mask += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._processed += [0.0] * len(token_ids)
        self._forced += [0] * len(token_ids)
        self._versions += [UNKNOWN_VERSION] * len(token_ids)

    def add_sampled(self, completion: Completion) -> None:
        """Append the policy's sampled tokens, EOS included, and note the version that read the
        prompt tokens before it. One without log-probabilities leaves the trainer to score the
        sequence."""
        for position in range(len(self._tokens) - 1, -1, -1):
            if self._mask[position]:
                break
            self._versions[position] = completion.prompt_version
        self._tokens += completion.token_ids
        self._mask += [1] * len(completion.token_ids)
        self._scored &= bool(completion.logprobs)
        self._logprobs += completion.logprobs
        self._reshaped |= completion.processed_logprobs is not None
        self._processed += completion.processed_logprobs or completion.logprobs
        self._constrained |= completion.forced is not None
        self._forced += completion.forced or (0,) * len(completion.token_ids)
        self._versions += completion.policy_versions
        self._turns.append(len(completion.token_ids))
        for companion in self._companions:
            companion.add_sampled(completion, len(self._tokens))

    def show(self, prompt: Any) -> None:
        """Note the prompt of the next turn, a text or messages, for what travels with its
        tokens."""
        for companion in self._companions:
            companion.show(prompt)

    def rollout(
        self, *, temperature: float, stop_reason: str | None, error: str | None = None
    ) -> Rollout:
        """Return the sequence so far, without scores."""
        turns = tuple(self._turns)
        return Rollout(
            tokens=tuple(self._tokens),
            mask=tuple(self._mask),
            logprobs=tuple(self._logprobs) if self._scored else None,
            policy_versions=tuple(self._versions),
            temperature=temperature,
            scores={},
            processed_logprobs=tuple(self._processed) if self._reshaped and self._scored else None,
            forced=tuple(self._forced) if self._constrained else None,
            stop_reason=stop_reason,
            error=error,
            # nothing was asked between two turns: the mask does not tell them apart
            turn_lengths=() if turns == sampled_runs(self._mask) else turns,
            **{k: v for each in self._companions for k, v in each.fields().items()},
        )


def continuation(
    tokenizer: ChatTokenizer,
    before: str,
    answer: str,
    after: str,
    *,
    last_token: int,
    stop: str | int | None = None,
) -> list[int] | None:
    """Return the token ids that follow a sampled turn: its closing marks, the environment's answer,
    the next opening.

    None if the next prompt does not begin with the last one and its answer, because it is
    another text or because the template rewrites earlier turns (Qwen3's removes earlier thinking).
    Then the next turn starts a new sequence. White space around `answer` may differ.

    Args:
        before: text of the prompt that was answered.
        answer: text of the answer.
        after: text of the next prompt.
        last_token: the last sampled token; if it is the EOS with which the template closes a
            turn, the closing mark is not repeated.
        stop: what ended the turn; a stop string with which `after` continues is not repeated
        either.
    """
    rest = after.removeprefix(before)
    if len(rest) != len(after) - len(before):
        return None
    for text, sampled in ((rest, answer), (rest.lstrip(), answer.strip())):
        if text.startswith(sampled):
            tail, end = text[len(sampled) :], tokenizer.token_text(last_token)
            if last_token in tokenizer.eos_token_ids:
                tail = tail.removeprefix(end)
            # the stop was sampled whole
            elif isinstance(stop, str) and (end.endswith(stop) or stop.endswith(end)):
                tail = tail.removeprefix(stop)
            return tokenizer.encode_after(after.removesuffix(tail), tail)
    return None
