"""A conversation as the tokens that really went through the engine: what was sampled is never tokenised again."""

from collections.abc import Sequence

from mlx_parallm.types import ChatTokenizer, Completion, Rollout

UNKNOWN_VERSION = -1


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
        """The sequence so far, without scores."""
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
    before: str,
    said: str,
    after: str,
    *,
    last_token: int,
    stop: str | int | None = None,
) -> list[int] | None:
    """Token ids that follow a sampled turn: its closing marks, what the environment says, the next turn's opening.

    None where the next prompt is no longer the last one and its answer: a template that rewrites what came before, as
    Qwen3's does with earlier thinking, or another text altogether. Then the next turn is not asked for after the tokens
    that were sampled. White space around `said` may differ.

    Args:
        before: the prompt that was answered, as text; `said` is the answer.
        after: the next prompt, as text.
        last_token: that was sampled; when it is the EOS that a template closes a turn with, it is not given twice.
        stop: what ended the turn; a stop string that `after` goes on with is not given twice either.
    """
    rest = after.removeprefix(before)
    if len(rest) != len(after) - len(before):
        return None
    for shown, spoken in ((rest, said), (rest.lstrip(), said.strip())):
        if shown.startswith(spoken):
            tail, end = shown[len(spoken) :], tokenizer.token_text(last_token)
            if last_token in tokenizer.eos_token_ids:
                tail = tail.removeprefix(end)
            elif isinstance(stop, str) and (end.endswith(stop) or stop.endswith(end)):  # its end is the token's end
                tail = tail.removeprefix(stop)
            return tokenizer.encode(tail, add_special_tokens=False)
    return None
