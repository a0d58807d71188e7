"""One generation in flight. Mutable, owned by the engine thread, plain Python: no tensors, no
parallel lists elsewhere.

`types.Request` → n × `Sequence` → `Scheduler` gives it a row of the KV cache → `ModelRunner`
samples its tokens → `apply_stop_rules` ends it (stop strings: output_text.py)
→ `Completion`.
"""

from collections.abc import Hashable, Set
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from mlx_parallm.engine.companions.companion import Carried, SequenceRecord
from mlx_parallm.engine.companions.recorded import Piece, RecordedPrompt, pieces_between
from mlx_parallm.engine.grammar import TokenMatcher
from mlx_parallm.engine.logit_edits import LogitEdits
from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.types import (
    Completion,
    FinishReason,
    SamplingParams,
    TopLogprob,
)

if TYPE_CHECKING:
    from mlx_parallm.engine.cache.prefix import PrefixChunk
    from mlx_parallm.models.adapters.adapter import AdapterSlot

_MASK64 = (1 << 64) - 1


class Status(Enum):
    WAITING = auto()  # in the queue
    PREFILLING = auto()  # the prompt is being computed; a row is reserved
    RUNNING = auto()  # has a row and decodes
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request.

    `row` is its place in the KV cache, -1 while it has none. `cached` counts the tokens whose keys
    and values lie in that row: prompt + output without the newest token, which the next decode step
    feeds.
    """

    request_id: str
    index: int
    prompt: tuple[int, ...]  # negative: `PlaceholderReader.carry`
    params: SamplingParams
    # None = the base; kept to the end, also when it is unloaded meanwhile
    adapter: "AdapterSlot | None"
    max_tokens: int
    random_stream: int  # 64 bits; token t of this choice is drawn with f(random_stream, t)
    stop_ids: frozenset[int]  # EOS (unless ignored) and the request's stop ids
    text: OutputText
    # penalties, bias, forbidden ends; None = the logits stay as they are
    edits: LogitEdits | None = None
    matcher: TokenMatcher | None = None  # which tokens may come next
    status: Status = Status.WAITING
    row: int = -1
    cached: int = 0
    priority: int = 0  # lower goes first
    rank: int = 0  # place in the queue
    cache_salt: str | None = None
    carried: Carried | None = None  # beside the prompt's tokens
    chunks: tuple["PrefixChunk", ...] = ()  # segments that its row reads and others may read too
    # weights and salt under which the prompt's keys and values began to be computed
    prefix_key: Hashable = None
    prompt_version: int = -1  # policy version at that time
    cached_prompt_tokens: int = 0  # tokens of the prompt found in the prefix cache
    is_new: bool = False  # has its row since the last step
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    processed_logprobs: list[float] | None = None
    forced: list[int] | None = None  # 1 if the matcher left no choice
    top_logprobs: list[tuple[TopLogprob, ...]] | None = None
    versions: list[int] = field(default_factory=list)
    records: tuple[SequenceRecord, ...] = ()  # of its sampled tokens
    recorded_prompt: RecordedPrompt | None = None  # if its prompt's are recorded too
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_code: str | None = None
    emitted: int = 0  # tokens that a stream has been sent

    def outside_spans(self, place: int) -> int:
        """Return the first place from this one on at which a forward may end."""
        return place if self.carried is None else self.carried.outside(place)

    @property
    def pinned_version(self) -> int | None:
        """The policy version that the request names by number; None = the newest."""
        return (
            self.adapter.weights.version
            if self.adapter is not None and self.adapter.pinned
            else None
        )

    @property
    def next_token(self) -> int:
        """The token that the next decode step feeds."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def awaits_token(self) -> bool:
        """Whether the step after one that is not read yet needs its token: for penalties, a mask,
        or the end."""
        return (
            self.edits is not None
            or len(self.tokens) + 1 >= self.max_tokens
            or (self.matcher is not None and self.matcher.binds(ahead=1))
        )

    @property
    def finished(self) -> bool:
        return self.status is Status.FINISHED

    @property
    def feeds_prefix_cache(self) -> bool:
        """False when its row is doubtful (a failed one may hold NaN), or the request is a
        measurement."""
        return self.error is None and self.params.prompt_logprobs is None

    def advance_matcher(self, token: int) -> None:
        """Take a sampled token in its grammar, and note whether it was the only one; end if the
        grammar leads nowhere."""
        assert self.matcher is not None and self.forced is not None
        self.forced.append(int(self.matcher.forces))
        if broken := self.matcher.advance(token):
            self.finish("error", error=broken, code=self.matcher.error_code)

    def finish(
        self,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        *,
        error: str | None = None,
        code: str | None = None,
    ) -> None:
        """End it. `code`: OpenAI's, of an error that the request itself causes."""
        self.status = Status.FINISHED
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.error, self.error_code = error, code

    def apply_stop_rules(self, eos: Set[int]) -> None:
        """Feed the newest token to the text, and end it when it stops (stop tokens, stop strings),
        or has no room for more."""
        params, token = self.params, self.tokens[-1]
        if token in self.stop_ids:
            is_eos = token in eos
            if params.include_stop_str_in_output and not is_eos:
                self.text.add(token, check_stop=False)
            self.finish("stop", None if is_eos and token not in params.stop_token_ids else token)
            return
        matched = self.text.add(token, check_stop=len(self.tokens) > params.min_tokens)
        if matched is not None:
            self.finish("stop", matched)
        elif len(self.tokens) >= self.max_tokens:
            self.finish("length")

    def completion(self) -> Completion:
        """The finished choice; ends the text."""
        assert self.finish_reason is not None
        completion = Completion(
            index=self.index,
            text=self.text.finish(),
            token_ids=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            processed_logprobs=None
            if self.processed_logprobs is None
            else tuple(self.processed_logprobs),
            forced=None if self.forced is None else tuple(self.forced),
            top_logprobs=None if self.top_logprobs is None else tuple(self.top_logprobs),
            policy_versions=tuple(self.versions),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            error_code=self.error_code,
            prompt_version=self.prompt_version
            if self.pinned_version is None
            else self.pinned_version,
            cached_tokens=self.cached_prompt_tokens,
        )
        return replace(completion, **self.recorded_since(0)) if self.records else completion

    def add_record(self, columns: SequenceOf[bytes]) -> None:
        """Note what was recorded of the newest token."""
        for record, column in zip(self.records, columns, strict=True):
            record.data += column

    def recorded_since(self, start: int) -> dict[str, Any]:
        """Return what its records say of the sampled tokens from `start` on."""
        fields: dict[str, Any] = {}
        prompt = None if start else self.recorded_prompt  # goes with the first token
        for column, record in enumerate(self.records):
            parts: SequenceOf[tuple[int, bytes]] = ()
            if prompt is not None and record.has_prompt:
                parts = prompt.joined(column, record.token_bytes)
            fields |= record.fields(start, parts)
        return fields

    def recorded_between(self, start: int, stop: int) -> tuple[Piece, ...]:
        """Return what is recorded of these positions of prompt and output; (): its prompt is
        not."""
        if self.recorded_prompt is None:
            return ()
        first = len(self.prompt) - 1  # its forward predicted the first sampled token
        columns = [bytes(record.data) for record in self.records]
        sampled = Piece(first, first, first + len(self.tokens), columns)
        return pieces_between([*self.recorded_prompt.pieces, sampled], start, stop)


def random_stream(seed: int, index: int) -> int:
    """The 64-bit random stream of choice `index` of a request with this seed: two rounds of
    splitmix64."""
    return splitmix64((splitmix64(seed & _MASK64) + index) & _MASK64)


def splitmix64(x: int) -> int:
    """Steele, Lea and Flood 2014 (Fast splittable pseudorandom number generators): a bijection
    of 64 bits."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)
