"""A conversation as the tokens that really went through the engine: what was sampled is never tokenised again."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.environments.base import ChatTokenizer
from mlx_parallm.errors import RequestError
from mlx_parallm.types import Completion, Rollout

UNKNOWN_VERSION = -1
STAND_IN = "STAND-IN-FOR-THE-ANSWER"


class Transcript:
    """Grows span by span: given tokens (mask 0) and sampled ones (mask 1, with log-probability and policy version)."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self.give(prompt_ids)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    @property
    def last_token(self) -> int:
        return self._tokens[-1]

    def give(self, token_ids: Sequence[int]) -> None:
        """Tokens that the policy did not choose: prompt, template, an environment's answer."""
        self._tokens += token_ids
        self._mask += [0] * len(token_ids)
        self._logprobs += [0.0] * len(token_ids)
        self._versions += [UNKNOWN_VERSION] * len(token_ids)

    def sample(self, completion: Completion) -> None:
        """What the policy chose, EOS included; says under which version the tokens given before it were read."""
        for position in range(len(self._tokens) - 1, -1, -1):
            if self._mask[position]:
                break
            self._versions[position] = completion.prompt_version
        self._tokens += completion.token_ids
        self._mask += [1] * len(completion.token_ids)
        self._logprobs += completion.logprobs
        self._versions += completion.policy_versions

    def rollout(self, *, temperature: float, stop_reason: str | None, error: str | None = None) -> Rollout:
        """The episode so far, without scores."""
        return Rollout(
            tokens=tuple(self._tokens),
            mask=tuple(self._mask),
            logprobs=tuple(self._logprobs),
            policy_versions=tuple(self._versions),
            temperature=temperature,
            scores={},
            stop_reason=stop_reason,
            error=error,
        )


def continuation(
    tokenizer: ChatTokenizer,
    conversation: Sequence[Mapping[str, str]],
    answer_to_it: Sequence[Mapping[str, str]],
    *,
    last_token: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids that follow a sampled turn: its closing marks, the environment's messages, the next turn's opening.

    The template is rendered with a stand-in for the sampled turn and everything up to the stand-in is cut off, so the
    sampled tokens stay as they are whatever a template does to earlier turns. `conversation` ends before that turn.

    Raises RequestError: a template that refuses the messages or leaves the turn out.
    """
    turns = [*conversation, {"role": "assistant", "content": STAND_IN}, *answer_to_it]
    text = tokenizer.render_chat_text(turns, add_generation_prompt=True, template_kwargs=template_kwargs)
    _, found, tail = text.rpartition(STAND_IN)
    if not found:
        raise RequestError("the chat template leaves out earlier assistant turns: no token-exact episode of many turns")
    if last_token in tokenizer.eos_token_ids:
        tail = tail.removeprefix(tokenizer.token_text(last_token))
    return tokenizer.encode(tail, add_special_tokens=False)
