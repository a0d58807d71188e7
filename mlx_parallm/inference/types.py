"""Arguments and results of `InferenceModule` and its two backends. No MLX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypedDict, TypeGuard, overload

import numpy as np

from mlx_parallm.errors import RequestError
from mlx_parallm.execution.tool_calls import ParsedCalls
from mlx_parallm.rollout_store.companions import answer_metadata
from mlx_parallm.types import Completion

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages | Sequence[int]
"""Text, which the model continues as it is; messages, for its chat template; or token ids."""

Response = str | Sequence[int]

MAX_NEW_TOKENS = 256


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` beside max_new_tokens. A missing one, or None, means the value in
    brackets."""

    temperature: float | None  # [1.0]; 0 = greedy
    top_p: float | None  # [1.0]
    top_k: int | None  # [-1 = off]
    do_sample: bool  # [True]; False = greedy, whatever the temperature
    num_return_sequences: int | None  # [1]; answers to each prompt, side by side in the result
    stop: str | Sequence[str] | None  # [()]; the text ends before them
    thinking_token_budget: int | None  # [any]; longest reasoning, in tokens: then its end is forced
    seed: int | None  # [random]; prompt number i > 0 derives its own from it and i
    return_logprobs: bool
    return_logits: bool


_NAMES = {"max_new_tokens": "max_tokens", "num_return_sequences": "n"}
_SAMPLING = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "num_return_sequences",
    "stop",
    "thinking_token_budget",
    "seed",
)


def explicit_params(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set, by SamplingParams' names. Raises TypeError: there is no
    such option; RequestError: a boolean where a number is wanted."""
    if unknown := sorted(
        options.keys() - GenerateOptions.__annotations__.keys() - {"max_new_tokens"}
    ):
        raise TypeError(f"generate() got an unexpected keyword argument {unknown[0]!r}")
    params = {
        _NAMES.get(key, key): options[key] for key in _SAMPLING if options.get(key) is not None
    }
    if switches := [key for key in _SAMPLING if isinstance(options.get(key), bool)]:
        reason = f"{switches[0]}: a number is wanted, not True or False"
        raise RequestError(reason, param=switches[0])
    if "stop" in params:
        params["stop"] = (
            (params["stop"],) if isinstance(params["stop"], str) else tuple(params["stop"])
        )
    if options.get("do_sample") is False:
        params["temperature"] = 0.0
    return params


@dataclass(frozen=True, slots=True)
class Generation:
    """One answer of a backend to one prompt; None = the endpoint does not return it."""

    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[float, ...] | None
    finish_reason: str
    policy_versions: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] | None = None
    cached: bool = False
    recorded: Mapping[str, Any] = field(default_factory=dict)  # by companions, as a list's entry

    @classmethod
    def of(
        cls, completion: Completion, prompt_token_ids: tuple[int, ...] | None = None
    ) -> "Generation":
        return cls(
            completion.text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
            completion.policy_versions,
            prompt_token_ids,
            recorded=answer_metadata(completion),
        )


@dataclass(frozen=True, slots=True)
class CalledAnswer:
    """One answer of a model that has tools. `text`: an endpoint takes the calls out of it."""

    text: str
    calls: ParsedCalls
    finish_reason: str
    token_ids: tuple[int, ...] | None = None

    @property
    def words(self) -> str:
        """The text without the calls."""
        text, end = "", 0
        for call in sorted((*self.calls, *self.calls.malformed), key=lambda call: call.start_pos):
            text += self.text[end : max(end, call.start_pos)]
            end = max(end, call.end_pos)
        return (text + self.text[end:]).strip()


@dataclass(frozen=True, eq=False)
class GenerationResult(Sequence[str]):
    """The answers; as a sequence, their texts. Generation j to prompt i is number i ·
    num_return_sequences + j.

    token_ids: the sampled ones, EOS included; None: the endpoint does not return them.
    logprobs: with return_logprobs, for each answer [T] float32: log-softmax(logits / temperature)
    of its tokens before
        top_k and top_p (temperature 0 counts as 1).
    logits: with return_logits, for each answer [T, vocabulary] float32, from a second forward pass.
    metadata: lists with an entry for each answer: "finish_reasons" ("stop", "length"),
    "policy_versions" (one for each
        token), "prompt_token_ids" (or None), "cached" (answered from the greedy cache); of a
        mixture of experts those of each token ([T, layers, k], or None).
    """

    texts: list[str]
    token_ids: list[tuple[int, ...]] | None = None
    logprobs: list[np.ndarray] | None = None
    logits: list[np.ndarray] | None = None
    metadata: dict[str, list[Any]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, answers: Sequence[Generation], *, logprobs: bool, logits: list[np.ndarray] | None
    ) -> "GenerationResult":
        ids = [answer.token_ids for answer in answers if answer.token_ids is not None]
        metadata: dict[str, list[Any]] = {
            "finish_reasons": [answer.finish_reason for answer in answers],
            "policy_versions": [answer.policy_versions for answer in answers],
            "prompt_token_ids": [answer.prompt_token_ids for answer in answers],
            "cached": [answer.cached for answer in answers],
        }
        for name in dict.fromkeys(chain(*(answer.recorded for answer in answers))):
            metadata[name] = [answer.recorded.get(name) for answer in answers]
        return cls(
            [answer.text for answer in answers],
            ids if len(ids) == len(answers) else None,
            [np.array(answer.logprobs, np.float32) for answer in answers] if logprobs else None,
            logits,
            metadata,
        )

    def __len__(self) -> int:
        return len(self.texts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self.texts[index]


def is_messages(prompt: Prompt) -> TypeGuard[Messages]:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def as_prompts(prompts: Any) -> list[Prompt]:
    """Return one prompt, or several, as a list. Raises RequestError: an entry that is not a
    prompt."""
    entries = [prompts] if _is_prompt(prompts) or isinstance(prompts, Mapping) else list(prompts)
    for number, prompt in enumerate(entries):
        if not _is_prompt(prompt):
            raise RequestError(
                (
                    f"prompt number {number} is {prompt!r:.80}: expected a text, a list of"
                    " messages or a list of token ids"
                ),
                param="prompt",
            )
    return entries


def as_responses(responses: Any, count: int) -> list[Response]:
    """Return texts or token ids, one for each of `count` prompts; a GenerationResult means its
    token ids. Raises RequestError: there are more or fewer."""
    if isinstance(responses, GenerationResult):
        responses = responses.texts if responses.token_ids is None else responses.token_ids
    entries = [responses] if _is_prompt(responses) else list(responses)
    if len(entries) != count:
        raise RequestError(
            f"{len(entries)} responses to {count} prompts: each response needs its prompt",
            param="response",
        )
    return entries


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return isinstance(value, str)
    return len(value) > 0 and any(
        all(isinstance(part, kind) for part in value) for kind in (Mapping, int)
    )
