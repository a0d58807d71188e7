"""Refuses requests that cannot be run, before they reach the engine thread (and there again). No
MLX."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_parallm.engine.companions.request_images import check_images
from mlx_parallm.errors import ContextLengthError, RequestError
from mlx_parallm.types import Request, SamplingParams

REQUEST_CHECKS = (check_images,)
"""Checks of what companions carry: (request, the engine's placeholder)."""
MAX_CHOICES = 1024
MAX_ALTERNATIVES = 1024
# numbers beside the sampled tokens' own of one request: rows × tokens × alternatives
MOST_ALTERNATIVES = 1 << 21
LIKELY_LENGTH = 1 << 16  # tokens of a completion without max_tokens, for that product
MAX_STOPS, LONGEST_STOP = 64, 256  # each row looks for each of them at each token


@dataclass(frozen=True)
class RequestLimits:
    max_model_len: int
    vocab_size: int
    # positions whose keys and values memory holds; None = unbounded
    max_kv_tokens: int | None = None
    # for a request that names none; None = all the room there is
    default_max_tokens: int | None = None
    # memory of a position of a prompt that is computed, over that of a row's position
    prompt_cost: float = 1.0
    # of the engine's `PlaceholderReader`
    placeholder: int | None = None
    ends_thinking: bool = False  # the end of reasoning has a marker

    def room(self, prompt: int) -> int:
        """Return the longest completion of a prompt of that many tokens. While a prompt is
        computed its keys and values exist twice: in the prefill's cache, and in the row that
        they move to."""
        room = self.max_model_len - prompt
        if self.max_kv_tokens is None:
            return room
        return min(room, self.max_kv_tokens - prompt - math.ceil(self.prompt_cost * prompt) + 1)

    def default_length(self, prompt: int) -> int:
        room = self.room(prompt)
        return room if self.default_max_tokens is None else min(room, self.default_max_tokens)


def check_request(request: Request, limits: RequestLimits) -> None:
    """Raises RequestError naming the parameter, or ContextLengthError."""
    params = request.params
    _check_tokens(request.prompt_token_ids, limits)
    _check_length(len(request.prompt_token_ids), params.max_tokens, limits)
    for check in REQUEST_CHECKS:
        check(request, limits.placeholder)
    _check_sampling(params)
    budget = params.thinking_token_budget
    _require(budget is None or budget >= -1, "thinking_token_budget", "must be at least -1 (none)")
    _require(
        limits.ends_thinking or not params.has_thinking_budget,
        "thinking_token_budget",
        "this model's reasoning has no markers, so none can be forced",
    )
    check_alternatives([request], limits.max_model_len)
    _check_stops(params, limits)
    ends = params.structure is None or not params.ignore_eos
    _require(
        ends, "ignore_eos", "excludes structured output, whose grammar says where the text ends"
    )
    if bias := params.logit_bias:
        in_vocabulary = min(bias) >= 0 and max(bias) < limits.vocab_size
        _require(
            in_vocabulary, "logit_bias", f"expected token ids from 0 to {limits.vocab_size - 1}"
        )
        _require(all(map(math.isfinite, bias.values())), "logit_bias", "values must be finite")
    if ids := params.allowed_token_ids:
        in_vocabulary = min(ids) >= 0 and max(ids) < limits.vocab_size
        _require(
            in_vocabulary,
            "allowed_token_ids",
            f"expected token ids from 0 to {limits.vocab_size - 1}",
        )
    _require(len(params.bad_words) <= MAX_STOPS, "bad_words", f"at most {MAX_STOPS} words")
    fits = all(len(word.strip()) > 0 and len(word) <= LONGEST_STOP for word in params.bad_words)
    _require(fits, "bad_words", f"a word has 1 to {LONGEST_STOP} characters")


def alternatives(request: Request, max_model_len: int) -> int:
    """How many log-probabilities of other tokens the answer may hold: each is an object of 100
    bytes."""
    params, prompt = request.params, len(request.prompt_token_ids)
    length = params.max_tokens
    if length is None:
        length = min(max(max_model_len - prompt, 0), LIKELY_LENGTH)
    return params.n * length * (params.logprobs or 0) + prompt * (params.prompt_logprobs or 0)


def check_alternatives(requests: Sequence[Request], max_model_len: int) -> int:
    """Count those of requests that are one to their client. Raises RequestError: more than
    MOST_ALTERNATIVES."""
    count = sum(alternatives(request, max_model_len) for request in requests)
    if count > MOST_ALTERNATIVES:
        raise RequestError(
            "logprobs: completions × their tokens × alternatives, and tokens of the prompt ×"
            f" alternatives, are {count} numbers in one answer, and at most {MOST_ALTERNATIVES} are"
            " given: ask for fewer alternatives, completions or max_tokens",
            param="logprobs",
        )
    return count


def _check_tokens(tokens: Sequence[int], limits: RequestLimits) -> None:
    """Raises RequestError: no tokens, or an id outside the vocabulary; ContextLengthError: too
    many."""
    _require(len(tokens) > 0, "prompt", "the prompt is empty")
    if len(tokens) > limits.max_model_len:
        raise ContextLengthError(len(tokens), limits.max_model_len)
    if min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        raise RequestError(
            f"the prompt has token ids outside of 0..{limits.vocab_size - 1}", param="prompt"
        )


def _check_length(prompt: int, max_tokens: int | None, limits: RequestLimits) -> None:
    if max_tokens is None and prompt >= limits.max_model_len:
        raise ContextLengthError(prompt, limits.max_model_len)
    _require(max_tokens is None or max_tokens >= 0, "max_tokens", "must be at least 0")
    if max_tokens is not None and prompt + max_tokens > limits.max_model_len:
        raise ContextLengthError(prompt, limits.max_model_len, max_tokens)
    # it is only computed: no row will hold it
    if max_tokens == 0 and limits.max_kv_tokens is not None:
        most = int(limits.max_kv_tokens / limits.prompt_cost)
        message = (
            f"memory (server.kv_cache_bytes) has room to compute {most}"
            f" tokens, and this prompt has {prompt}"
        )
        _require(prompt <= most, "prompt", message)
        return
    room = limits.room(prompt)
    if room < (1 if max_tokens is None else max_tokens):
        raise RequestError(
            "max_tokens: memory (server.kv_cache_bytes) holds keys and values of"
            f" {limits.max_kv_tokens} tokens: with"
            f" this prompt of {prompt} tokens there is room for at most {max(room, 0)} more",
            param="max_tokens",
        )


def _check_sampling(params: SamplingParams) -> None:
    for name, number in {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
    }.items():
        _require(math.isfinite(number), name, "must be finite")
    # Beyond these logits / temperature leaves float32; the distribution is one-hot, or flat, long
    # before.
    within = params.temperature == 0 or 1e-5 <= params.temperature <= 1e30
    _require(within, "temperature", "must be 0, or in [1e-5, 1e30]")
    _require(0 < params.top_p <= 1, "top_p", "must be in (0, 1]")
    _require(params.top_k >= -1, "top_k", "must be at least -1 (-1 and 0 switch it off)")
    _require(0 <= params.min_p <= 1, "min_p", "must be in [0, 1]")
    _require(-2 <= params.presence_penalty <= 2, "presence_penalty", "must be in [-2, 2]")
    _require(-2 <= params.frequency_penalty <= 2, "frequency_penalty", "must be in [-2, 2]")
    # Beyond these a logit times the penalty leaves float32, and 0 times infinity is not a number.
    _require(
        1e-30 <= params.repetition_penalty <= 1e30,
        "repetition_penalty",
        "must be in [1e-30, 1e30]",
    )
    _require(1 <= params.n <= MAX_CHOICES, "n", f"must be in 1..{MAX_CHOICES}")
    for name, value in {
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }.items():
        _require(
            value is None or 0 <= value <= MAX_ALTERNATIVES,
            name,
            f"must be in 0..{MAX_ALTERNATIVES}",
        )


def _check_stops(params: SamplingParams, limits: RequestLimits) -> None:
    _require(all(params.stop), "stop", "a stop string is empty")
    _require(len(params.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} stop strings")
    longest = max(map(len, params.stop), default=0)
    _require(
        longest <= LONGEST_STOP, "stop", f"a stop string has at most {LONGEST_STOP} characters"
    )
    for token in params.stop_token_ids:
        _require(
            0 <= token < limits.vocab_size,
            "stop_token_ids",
            f"token id {token} is not in the vocabulary",
        )
    _require(params.min_tokens >= 0, "min_tokens", "must be at least 0")
    if params.max_tokens is not None:
        _require(params.min_tokens <= params.max_tokens, "min_tokens", "must not exceed max_tokens")


def _require(condition: bool, param: str, message: str) -> None:
    if not condition:
        raise RequestError(f"{param}: {message}", param=param)
