"""The nouns that travel between the parts. Frozen, no MLX, plain Python values only.

`Task → Episode → Request → Sequence → Completion → Trajectory (Rollout) → RolloutGroup →
TrainBatch`

A `Trajectory` is one scored episode: its `Rollout` holds the tokens, masks, log-probabilities,
policy versions and scores, the rest is what people and rewards read. Both have an exact JSON form
(`to_json`, `from_json`).

Log-probabilities: `logprobs` in these types are float32 log-softmax(logits / temperature) of the
sampled token *before* top_k, top_p, min_p, penalties, bias and grammar (temperature 0 counts as 1).
If any of those was active, `processed_logprobs` holds the log-probability under the distribution
that was really sampled from.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from itertools import groupby
from math import isnan
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

if TYPE_CHECKING:
    import numpy as np

BETWEEN = "⟦{}⟧"
"""Around what an environment answered between two turns, where people read both."""

EQUAL_TOLERANCE = 1e-6
MAX_REWARD = 1e9
"""The largest size of a reward, a score or an advantage. Beyond it means, squares and float32
lose their digits or overflow; every way in refuses it."""

NARROW_IDS = 256
"""Up to so many experts an id takes one byte."""
WIDEST_ID = (1 << 15) - 1
"""The highest id of an expert: a trainer counts them in 16 bits, and -1 means none."""

LOGPROB_TOLERANCE = 1e-3  # float32 log-softmax may come out a hair above 0

UNSCORED = "unscored"
"""A score of this name marks a trajectory that nothing could score. It gets no advantage and
counts in no number of its group; its "reward" is a placeholder that nobody reads."""


def are_equal(rewards: Sequence[float]) -> bool:
    """Whether rewards (at least one) differ by no more than a millionth of the largest (of 1, if it
    is smaller): that is rounding, which dividing by its own size would make an advantage."""
    largest = max(1.0, *(abs(reward) for reward in rewards))
    return max(rewards) - min(rewards) <= EQUAL_TOLERANCE * largest


def has_score(reward: float | None) -> TypeGuard[float]:
    """Whether a reward is a number. None and NaN stand for an answer that nothing scored."""
    return reward is not None and not isnan(reward)


FinishReason = Literal["stop", "length", "abort", "error"]
Pooling = Literal["mean", "last"]


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure that a generated text must match, before it is compiled (engine/grammar.py)."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "answer"]
    # a JSON schema; a regular expression; a JSON list of texts; a Lark or GBNF grammar; Lark over
    # `parts`
    source: str
    param: str = field(default="structure", compare=False)  # where it came from, for error texts
    strict: bool = False  # a schema whose objects are closed, whatever server.open_objects says
    parts: tuple["Structure", ...] = ()  # kind "answer": the grammars of @part_0, @part_1, …


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of one request, with vLLM's names and meanings. Neutral defaults:
    the model's own distribution."""

    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    max_tokens: int | None = None  # None = server.default_max_tokens, or up to the model's context
    min_tokens: int = 0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    # markers of reasoning that the text may begin with, in which stop strings do not count where
    # the text shows them; the first is "" if the prompt has opened it
    reasoning: tuple[str, str] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    # False: the text shows special tokens (never the EOS or stop token that ends it)
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    # only these are drawn, the EOS included only if it is one; () = all
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()  # texts whose last token is not drawn behind the others
    # top-k alternatives wanted per sampled token (0 = the sampled one only)
    logprobs: int | None = None
    # top-k alternatives wanted per prompt token (0 = the given one only)
    prompt_logprobs: int | None = None
    structure: Structure | None = None  # what the text must match
    pooling: Pooling | None = None  # the prompt's hidden states are wanted, pooled so
    # longest reasoning, in tokens between its markers; None or -1 = any length
    thinking_token_budget: int | None = None

    @property
    def filters(self) -> bool:
        """True when the least likely tokens are left out."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def has_thinking_budget(self) -> bool:
        return self.thinking_token_budget is not None and self.thinking_token_budget >= 0

    @property
    def is_constrained(self) -> bool:
        """True when a grammar, a list or a budget says which tokens may come next."""
        return (
            bool(self.allowed_token_ids) or self.structure is not None or self.has_thinking_budget
        )

    @property
    def reshapes_distribution(self) -> bool:
        """True when sampling is not from plain softmax(logits / temperature)."""
        return (
            self.filters
            or self.min_tokens > 0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias)
            or bool(self.bad_words)
            or self.is_constrained
        )


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, as the model's tower reads it."""

    digest: str  # SHA-256 of what its features are computed from, in hexadecimal digits
    text: str  # the text that stands for the image in a prompt
    tokens: int  # image tokens in `text`: one for each of its features
    # frames, rows and columns of its tokens, if its model gives them their own positions
    grid: tuple[int, int, int] | None = None
    # numpy's, by name: what the tower reads
    arrays: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Request:
    """One generation request: `params.n` completions of one prompt under one adapter."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str | None = None  # None = the untouched base; otherwise a name in the adapter table
    stream: bool = False  # False: deltas are not emitted, only the final output
    cache_salt: str | None = None  # prefixes are shared among requests of the same salt only
    priority: int = 0  # lower goes first
    opens_text: bool = False  # the completion begins its own text, as a chat's answer does
    images: tuple[PromptImage, ...] = ()  # in the order of their tokens in the prompt

    def samples_from(self, adapter: str | None) -> bool:
        """Return whether its tokens are drawn from this adapter (None: the base) as it is served:
        a policy is trained on no others."""
        return self.adapter == adapter


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The part of one choice of a streamed request since its last delta: one or more tokens, or
    only a finish."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None
    policy_versions: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None  # as Completion's
    processed_logprobs: tuple[float, ...] | None = None  # as Completion's
    forced: tuple[int, ...] | None = None  # as Completion's
    routed_experts: "RoutedExperts | None" = None  # as Completion's, of these tokens
    prompt_experts: "tuple[PromptExperts, ...]" = ()  # as Completion's, in each choice's first
    cached_tokens: int = 0  # in choice 0's first: tokens of the prompt that the prefix cache held
    rejected_tokens: int = 0  # in choice 0's first, as RequestOutput's


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The experts to which a mixture of experts sent each sampled token (vLLM's
    `routed_experts`): those of the forward that predicted it.

    `ids`: [tokens, layers, each], row after row, little-endian; one byte an id where `wide` is
    False, else two. A layer counts if it has experts.
    """

    layers: int
    each: int  # experts a token, in a layer
    ids: bytes
    wide: bool = False

    def __post_init__(self) -> None:
        if self.token_bytes <= 0 or len(self.ids) % self.token_bytes:
            raise ValueError(
                f"{len(self.ids)} bytes are not whole tokens: {self.layers} layers of"
                f" {self.each} experts, {1 + self.wide} bytes an id"
            )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.layers * self.each * (1 + self.wide)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids) // self.token_bytes

    def array(self) -> "np.ndarray":
        """Return the ids as an array [tokens, layers, each], uint8 or uint16."""
        import numpy as np

        kind = np.dtype("<u2" if self.wide else "u1")
        return np.frombuffer(self.ids, kind).reshape(-1, self.layers, self.each)

    @classmethod
    def of(cls, ids: "np.ndarray") -> "RoutedExperts":
        """Hold ids [tokens, layers, each], whole numbers from 0 on, in one byte each if they
        fit. Raises ValueError: they do not."""
        wide = bool(ids.size and ids.max() >= NARROW_IDS)
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or (ids.size and ids.min() < 0):
            raise ValueError("ids of experts are [tokens, layers, each], whole numbers from 0 on")
        if wide and ids.max() > WIDEST_ID:
            raise ValueError(f"expert {ids.max()} is above {WIDEST_ID}")
        _, layers, each = ids.shape
        return cls(layers, each, ids.astype("<u2" if wide else "u1").tobytes(), wide)

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal one."""
        ids = base64.b64encode(self.ids).decode()
        return {"layers": self.layers, "each": self.each, "ids": ids, "wide": self.wide}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RoutedExperts":
        """Read what `to_json` wrote. Raises ValueError: a key is unknown or missing, the ids are no
        base64 or no whole number of tokens."""
        values = _checked_keys(cls, data)
        return cls(**values | {"ids": base64.b64decode(values["ids"], validate=True)})


@dataclass(frozen=True, slots=True)
class PromptExperts:
    """The experts of neighbouring tokens whose forward predicted no sampled token: of a prompt, or
    of what is between two turns. `start`: the first one's place in the sequence."""

    start: int
    experts: RoutedExperts

    @property
    def stop(self) -> int:
        """Return the place behind the last one."""
        return self.start + len(self.experts)

    def behind(self, start: int) -> "PromptExperts | None":
        """Return the part from the place `start` on."""
        if start <= self.start:
            return self
        if start >= self.stop:
            return None
        whole = self.experts
        ids = whole.ids[(start - self.start) * whole.token_bytes :]
        return PromptExperts(start, RoutedExperts(whole.layers, whole.each, ids, whole.wide))

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal one."""
        return {"start": self.start, "experts": self.experts.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "PromptExperts":
        """Read what `to_json` wrote. Raises ValueError, as `RoutedExperts.from_json`."""
        values = _checked_keys(cls, data)
        return cls(values["start"], RoutedExperts.from_json(values["experts"]))


def joined_experts(
    parts: Sequence["RoutedExperts | None"],
) -> "RoutedExperts | None":
    """Return the experts of several stretches of sampled tokens, end to end. None: one of them has
    recorded none, or was recorded for another shape."""
    first = parts[0] if parts else None
    if first is None:
        return None
    shape = (first.layers, first.each, first.wide)
    alike = [part for part in parts if part and (part.layers, part.each, part.wide) == shape]
    if len(alike) < len(parts):
        return None
    return RoutedExperts(first.layers, first.each, b"".join(p.ids for p in alike), first.wide)


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished choice. `token_ids` includes the sampled EOS or stop token; `text` does not
    show it."""

    index: int
    text: str
    token_ids: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T]
    # [T], only when the request reshaped the distribution
    processed_logprobs: tuple[float, ...] | None
    top_logprobs: tuple[tuple[TopLogprob, ...], ...] | None  # [T][k]
    policy_versions: tuple[int, ...]  # [T]
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or token id that ended it; None for EOS
    error: str | None = None
    error_code: str | None = None  # OpenAI's, of an error that the request itself causes
    prompt_version: int = -1  # policy version under which the prompt was read; -1 = unknown
    routed_experts: RoutedExperts | None = None  # experts of T tokens, if the engine records them
    # experts of the prompt's tokens before its last one, if recorded
    prompt_experts: tuple[PromptExperts, ...] = ()
    cached_tokens: int = 0  # tokens of the prompt that the prefix cache held
    # [T], where a grammar or `allowed_token_ids` was on: 1 where it left no choice: this one
    # token, or the end
    forced: tuple[int, ...] | None = None

    def delta(self, *, rejected_tokens: int = 0) -> CompletionDelta:
        """Return the whole choice as one delta. `rejected_tokens`: see `RequestOutput`."""
        return CompletionDelta(
            index=self.index,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            policy_versions=self.policy_versions,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            error_code=self.error_code,
            processed_logprobs=self.processed_logprobs,
            forced=self.forced,
            routed_experts=self.routed_experts,
            prompt_experts=self.prompt_experts,
            cached_tokens=0 if self.index else self.cached_tokens,
            rejected_tokens=0 if self.index else rejected_tokens,
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scores of the prompt: entry 0 is None (nothing precedes it)."""

    logprobs: tuple[float | None, ...]  # [P]
    top_logprobs: tuple[tuple[TopLogprob, ...] | None, ...]  # [P][k]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]  # in index order, n of them
    prompt_logprobs: PromptLogprobs | None = None
    # [D] float32, the pooled hidden states of the prompt
    embedding: tuple[float, ...] | None = None
    rejected_tokens: int = 0  # tokens of choices that broke their schema and were sampled again


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Tokens [start, end) of a completion were sampled under policy `version` (vLLM's
    `weight_versions`)."""

    version: int
    start: int
    end: int


def weight_spans(policy_versions: tuple[int, ...]) -> tuple[WeightSpan, ...]:
    """Run-length encodes the per-token versions of a completion."""
    spans: list[WeightSpan] = []
    for position, version in enumerate(policy_versions):
        if spans and spans[-1].version == version:
            spans[-1] = WeightSpan(version, spans[-1].start, position + 1)
        else:
            spans.append(WeightSpan(version, position, position + 1))
    return tuple(spans)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of /v1/models. `parent` is the base's id for an adapter, None for the base."""

    id: str
    adapter: str | None
    root: str
    parent: str | None
    policy_version: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine thread's counters; taking one never touches MLX."""

    alive: bool
    ready: bool
    steps: int
    last_step_time: float  # time.monotonic() of the last step or idle turn
    running: int
    waiting: int
    prompt_tokens: int  # tokens of all prompts admitted, one count per choice's request
    prefill_tokens: int  # prompt tokens really computed; n choices of one prompt count once
    generation_tokens: int
    requests_finished: int
    requests_failed: int
    requests_aborted: int
    policy_version: int
    error: str | None = None
    prefix_cache_query_tokens: int = 0  # tokens of the prompts looked up in the prefix cache …
    prefix_cache_hit_tokens: int = 0  # … and how many of them it held
    prefix_disk_hit_tokens: int = 0  # tokens of prompts that were read from disk …
    prefix_disk_seconds_saved: float = 0.0  # … and what computing them would have taken longer
    prefix_disk_used_bytes: int = 0  # of the files
    prefix_disk_corrupt_files: int = 0  # that were damaged, and are removed
    prefix_disk_stuck_files: int = 0  # that could not be removed when they were to be
    prefix_disk_refused_files: int = 0  # that the disk did not take
    prefix_disk_dropped_bytes: int = 0  # that were not kept: too many waited to be written
    prefix_disk_failed_reads: int = 0  # that gave nothing: no answer in time, or no permission
    draft_tokens: int = 0  # guessed by prompt lookup …
    accepted_draft_tokens: int = 0  # … and how many of them were sampled
    kv_tokens: int = 0  # positions of the running sequences, shared ones counted in each
    kv_bytes: int = 0  # memory of their keys and values
    kv_bytes_shared: int = 0  # bytes saved by sharing prompts
    kv_layout: str = ""  # "tokens", "rectangle" or "rows" (engine/cache/batch.py)
    # seconds of all steps, by part (live_requests.STEP_PARTS)
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    holders: tuple[str, ...] = ()  # who has paused admission


@dataclass(frozen=True, slots=True)
class Rollout:
    """One scored sequence: its tokens, which of them the policy sampled, and how likely it found
    them.

    `policy_versions[t]` is the version that sampled the token; where mask is 0, the one that read
    it (-1 unknown).

    All lists have the length T of the whole sequence. `mask[t]` is 1 where the policy sampled the
    token (EOS included). `logprobs[t]` is the behaviour policy's (see the module docstring), 0.0
    where mask is 0; None: the sender had none, and the trainer's own at the time of the step stand
    in for all of them.

    An episode is one sequence, unless its chat template rewrote what came before a turn (Qwen3
    leaves out earlier thinking). Then each stretch that was really sampled as one sequence is a
    segment: the last one is this rollout, which has the scores of the episode, those before it are
    `earlier`.

    A turn is one sampled answer; a round of tool calls is a turn too. `turn_rewards` has the reward
    of each turn of the episode, through all its segments; empty: nobody scored single turns. They
    are a part of the episode's reward; the rest of it belongs to the last turn.
    """

    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    policy_versions: tuple[int, ...]
    temperature: float
    scores: Mapping[str, float]  # named parts; "reward" is the number that is trained on
    stop_reason: str | None = None  # "stop", "length", …
    processed_logprobs: tuple[float, ...] | None = None
    # [T], 1 where a grammar left no choice: sampled, but nothing to learn; None: no grammar was on
    forced: tuple[int, ...] | None = None
    error: str | None = None
    # learn nothing from this one (the environment's word); its score counts in the group
    zero_advantage: bool = False
    # segments, oldest first; no scores and no `earlier` of their own
    earlier: tuple["Rollout", ...] = ()
    # experts of the tokens that the policy sampled, in their order; None: not recorded
    routed_experts: RoutedExperts | None = None
    # experts of the other tokens, as far as recorded; by place, none twice
    prompt_experts: tuple[PromptExperts, ...] = ()
    # for the whole episode, oldest turn first; segments in `earlier` have none of their own
    turn_rewards: tuple[float, ...] = ()
    # sampled tokens of each turn of this sequence; empty: each run of sampled tokens is a turn
    turn_lengths: tuple[int, ...] = ()
    # names of the stored images whose tokens are in this sequence, in order
    images: tuple[str, ...] = ()
    # columns that rewards report for this episode, JSON values; nothing learns from them
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal rollout; no float is rounded."""
        return {
            "tokens": list(self.tokens),
            "mask": list(self.mask),
            "logprobs": None if self.logprobs is None else list(self.logprobs),
            "policy_versions": list(self.policy_versions),
            "temperature": self.temperature,
            "scores": dict(self.scores),
            "stop_reason": self.stop_reason,
            "processed_logprobs": None
            if self.processed_logprobs is None
            else list(self.processed_logprobs),
            "forced": None if self.forced is None else list(self.forced),
            "error": self.error,
            "zero_advantage": self.zero_advantage,
            "earlier": [segment.to_json() for segment in self.earlier],
            "routed_experts": None
            if self.routed_experts is None
            else self.routed_experts.to_json(),
            "prompt_experts": [part.to_json() for part in self.prompt_experts],
            "turn_rewards": list(self.turn_rewards),
            "turn_lengths": list(self.turn_lengths),
            "images": list(self.images),
            "extra": dict(self.extra),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Rollout":
        """Read what `to_json` wrote. Raises ValueError: a key is unknown or missing."""
        values = {
            key: tuple(value) if isinstance(value, list) else value for key, value in data.items()
        }
        values["earlier"] = tuple(cls.from_json(segment) for segment in data.get("earlier", ()))
        if experts := data.get("routed_experts"):
            values["routed_experts"] = RoutedExperts.from_json(experts)
        parts = data.get("prompt_experts", ())
        values["prompt_experts"] = tuple(map(PromptExperts.from_json, parts))
        return cls(**_checked_keys(cls, values))

    @property
    def reward(self) -> float:
        return self.scores["reward"]

    @property
    def is_scored(self) -> bool:
        """Whether `reward` is a score: nothing marks it `UNSCORED`, and it is a number."""
        return UNSCORED not in self.scores and has_score(self.reward)

    @property
    def segments(self) -> tuple["Rollout", ...]:
        """All sequences of the episode, oldest first; this one is the last."""
        return (*self.earlier, self)

    @property
    def turns(self) -> tuple[int, ...]:
        """The number of sampled tokens of each turn of this sequence."""
        return self.turn_lengths or sampled_runs(self.mask)

    @property
    def trained_mask(self) -> tuple[int, ...]:
        """The mask [T] of the tokens to learn from: sampled, and not forced by a grammar."""
        if self.forced is None:
            return self.mask
        return tuple(
            int(sampled and not forced)
            for sampled, forced in zip(self.mask, self.forced, strict=True)
        )

    @property
    def sampled_tokens(self) -> int:
        """The number of sampled tokens of the whole episode."""
        return sum(sum(segment.mask) for segment in self.segments)


def sampled_runs(mask: Sequence[int]) -> tuple[int, ...]:
    """Return the length of each run of sampled tokens: [0, 1, 1, 0, 1] → (2, 1)."""
    return tuple(sum(1 for _ in run) for sampled, run in groupby(mask) if sampled)


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of an episode, as text."""

    prompt: str  # what the policy was asked: text, or the rendered conversation
    response: str  # its answer, without the EOS or stop string that ended it


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished episode as a reward sees it, and as `RolloutManager.collect_rollouts` returns
    it."""

    text: str  # the policy's last answer, without the EOS or stop string that ended it
    # tokens, mask, log-probabilities, stop reason; its scores are empty until it is scored
    rollout: Rollout
    prompt: str = ""  # text of the opening
    history: tuple[Turn, ...] = ()  # every turn, the last one included
    step_count: int = 1
    # the environment's: tool_calls, budget, spent, …
    metadata: Mapping[str, Any] = field(default_factory=dict)
    group_id: str = ""  # the same for all trajectories of one prompt
    # truncated, and by the limit of the whole sequence (max_token_length)
    out_of_room: bool = False
    # the last prompt's and the last answer; empty for a prompt of text
    messages: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal trajectory, where `metadata` and
        `messages` hold nothing but what JSON has; no float is rounded."""
        return {
            "text": self.text,
            "rollout": self.rollout.to_json(),
            "prompt": self.prompt,
            "history": [
                {"prompt": turn.prompt, "response": turn.response} for turn in self.history
            ],
            "step_count": self.step_count,
            "metadata": dict(self.metadata),
            "group_id": self.group_id,
            "out_of_room": self.out_of_room,
            "messages": [dict(message) for message in self.messages],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Trajectory":
        """Read what `to_json` wrote. Raises ValueError: a key is unknown or missing."""
        values = _checked_keys(cls, data)
        history = tuple(Turn(**_checked_keys(Turn, turn)) for turn in data.get("history", ()))
        messages = tuple(data.get("messages", ()))
        return cls(
            **values
            | {
                "rollout": Rollout.from_json(data["rollout"]),
                "history": history,
                "messages": messages,
            }
        )

    @property
    def response(self) -> str:
        return self.text

    @property
    def tool_calls(self) -> tuple[Mapping[str, Any], ...]:
        """The calls that the environment recorded in `metadata`."""
        return tuple(self.metadata.get("tool_calls", ()))

    @property
    def conversation(self) -> str:
        """Every answer, and in ⟦ ⟧ what the policy was asked between two of them. For people."""
        later = "".join(
            f"\n{BETWEEN.format(turn.prompt)}\n{turn.response}" for turn in self.history[1:]
        )
        return (self.history[0].response if self.history else self.text) + later

    @property
    def truncated(self) -> bool:
        """Ended by a limit (of tokens or of steps), not by the environment or the policy."""
        return self.rollout.stop_reason == "length"

    @property
    def error(self) -> str | None:
        """The reason why the episode failed; None: it did not."""
        return self.rollout.error


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """G rollouts of one task. `advantages`: [G] or [G][T] when the environment brings its own,
    else None."""

    group_id: str
    environment: str
    rollouts: tuple[Rollout, ...]
    advantages: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None
    index: int | None = None  # position in the in-process source's fixed order (deterministic mode)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scored(self) -> tuple[Rollout, ...]:
        """The rollouts that have a score. All numbers of the group are theirs."""
        return tuple(rollout for rollout in self.rollouts if rollout.is_scored)

    @property
    def sampled_versions(self) -> tuple[int, ...]:
        """Policy versions of every sampled token of the group."""
        return tuple(
            version
            for rollout in self.rollouts
            for segment in rollout.segments
            for version, sampled in zip(segment.policy_versions, segment.mask, strict=True)
            if sampled
        )


class PolicyClient(Protocol):
    """The part of `engine.client.EngineClient` that environments use. Cancelling a call aborts
    its requests in the engine."""

    @property
    def max_model_len(self) -> int: ...

    async def generate(self, request: Request) -> RequestOutput: ...

    async def generate_many(self, requests: Sequence[Request]) -> list[RequestOutput]: ...


class ChatTokenizer(Protocol):
    """The part of `models.tokenizer.Tokenizer` that environments, rewards and data readers use,
    without its imports."""

    eos_token_ids: frozenset[int]
    eos_token_id: int | None  # the tokenizer's own
    special_ids: frozenset[int]
    longest_token: int  # in characters, or bytes shown as such
    # (start, end) of a call in the model's own format; None: it has none
    tool_markers: tuple[str, str] | None
    parse_tool_call: Callable[[str, Any], Any] | None
    think_markers: tuple[str, str] | None  # (start, end) of reasoning; None: it has none
    image_reader: Any  # of stored ones; None: messages hold texts alone

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def template_takes_tools(self) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_after(self, prompt: str, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def opens_text(self, prompt_ids: Sequence[int]) -> bool: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]: ...

    def images_of(self, messages: str | Sequence[Mapping[str, Any]]) -> tuple[PromptImage, ...]: ...

    def render_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        teach_tools: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str: ...

    def token_text(self, token_id: int) -> str: ...


def _checked_keys(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments. Raises ValueError: a key that the class lacks, or one missing
    that it needs."""
    fields_by_name = {entry.name: entry for entry in fields(cls)}
    unknown = set(data) - set(fields_by_name)
    needed = {
        name
        for name, entry in fields_by_name.items()
        if entry.default is MISSING and entry.default_factory is MISSING
    }
    if unknown or needed - set(data):
        raise ValueError(
            f"{cls.__name__}: unknown keys {sorted(unknown)}, missing keys"
            f" {sorted(needed - set(data))}"
        )
    return dict(data)
