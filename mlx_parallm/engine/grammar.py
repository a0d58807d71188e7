"""Structured output: a text that matches a JSON schema, a regular expression, a list of choices or
a grammar. No MLX.

    Structure (types.py) → `Grammars.prepare` (off the event loop, before the request enters the
    queue)
                         → `Grammars.matcher` → one `Matcher` a choice → `allowed_tokens` →
                         decoding/sampler.py

The grammar library is llguidance (MIT): one wheel of 3 MB for macOS arm64, Linux x86-64 and aarch64
and every Python, no dependencies, masks computed in Rust in microseconds, and bounds on the work of
hostile grammars. xgrammar would bring torch along; outlines-core compiles an automaton per schema
(no recursion, slow for large vocabularies).

The end token is allowed if the grammar accepts, so a choice that ends with it is complete. A
grammar may also lead into a place where nothing can follow; the library then leaves the end, and
the choice ends with the error `DEAD_END`. A text that the model never closes ends with
finish_reason "length". JSON is written on one line, an optional space after "," and ":": if any
whitespace is allowed, small models fill their answer with it.
"""

import asyncio
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from mlx_parallm.engine.json_schema import NO_TEXT, for_grammar
from mlx_parallm.errors import RequestError
from mlx_parallm.system.foreign_json import validator
from mlx_parallm.types import Structure

if TYPE_CHECKING:
    from mlx_parallm.models.tokenizer import Tokenizer

# Bounds on the cost of a hostile grammar. The library's time grows with the square of a regular
# expression's length: 2 s for the worst one of 16 Ki characters. It compiles by recursion, and the
# end of the stack is the end of the process: a chain of 5,000 references needs 40 MB. A mask that
# takes longer than `SLOW_MASK_S` ends its request.
MAX_CHARACTERS = {
    "json_schema": 64 << 10,
    "choice": 64 << 10,
    "regex": 16 << 10,
    "grammar": 16 << 10,
}
MAX_ANSWER = 128 << 10  # an "answer" and all its parts together
MAX_STRING = 16 << 10  # within a schema: its patterns are regular expressions
COMPILER_STACK = 256 << 20  # address space; only used pages take memory
SLOW_MASK_S = 0.1
GRAMMAR_CODE, NO_TOKEN_CODE = "invalid_grammar", "no_token_allowed"
TRIED_TOKENS = 4  # tokens of a walk through a new grammar: some grow too complex at the first one
DEAD_END = "the grammar lets nothing follow, and the answer is not complete"
KEPT_GRAMMARS = 64
_LIMITS = LLParserLimits(
    # 250 optional properties of one object; a step then takes 10 ms at worst
    max_items_in_row=1000,
    step_max_items=10_000,
    max_lexer_states=20_000,  # 40 MB a matcher
    verbose_errors=False,  # else the message has the whole grammar
)
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
# Options to relax, in this order, if a schema has keywords that the library cannot
# enforce.
_CONCESSIONS: tuple[dict[str, Any], ...] = ({}, {"coerce_one_of": True}, {"lenient": True})
_UNKNOWN_KEYS, _UNKNOWN_FORMAT, _COUNTS = (
    re.compile(r"Unimplemented keys: (\[.*\])"),
    "Unknown format: ",
    "maxProperties",
)


class TokenMatcher(Protocol):
    """A source of the tokens that may come next in a choice."""

    @property
    def forces(self) -> bool: ...

    @property
    def ends_thinking(self) -> bool: ...

    @property
    def error_code(self) -> str: ...

    def binds(self, ahead: int = 0) -> bool: ...

    def allowed(self) -> np.ndarray: ...

    def advance(self, token: int) -> str | None: ...


class Matcher:
    """The state of one choice's text in its grammar. Engine thread only.

    Args:
        state: its own copy of the compiled grammar.
        width: how many tokens a mask speaks of; the library's may be longer.
        min_tokens: so many tokens come before an end, unless the grammar leaves nothing but the
            end.
        ends: token ids that end the choice; `eos`: those of them that end the grammar's text.
    """

    __slots__ = (
        "_bytes",
        "_eos",
        "_going_on",
        "_min_tokens",
        "_slow",
        "_state",
        "_taken",
        "forces",
    )
    error_code = GRAMMAR_CODE
    ends_thinking = False

    def __init__(
        self,
        state: LLMatcher,
        width: int,
        min_tokens: int,
        ends: Iterable[int],
        eos: Set[int] = frozenset(),
    ) -> None:
        self._state, self._eos = state, eos
        self._bytes = mask_bytes(width)
        self._min_tokens = min_tokens
        self._taken = 0
        self._slow = False
        self.forces = False  # the last `allowed` left no choice
        self._going_on: np.ndarray | None = None
        if min_tokens:
            self._going_on = ~bits_of(ends, width)

    def binds(self, ahead: int = 0) -> bool:
        """Return whether a mask may be needed once `ahead` further tokens are known."""
        return True

    def advance(self, token: int) -> str | None:
        """Takes the sampled token. Returns an error if the grammar has become too complex, or
        leads nowhere."""
        self._taken += 1
        if token in self._eos and not self._state.is_accepting():
            return DEAD_END
        if self._state.consume_token(token) and not self._slow:
            return None
        reason = "it takes too long" if self._slow else _plain(self._state.get_error())
        return f"the grammar cannot be followed any further: {reason}"

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next, the lowest first: [mask_bytes(width)] uint8."""
        started = time.thread_time()
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)[: self._bytes]
        self._slow = time.thread_time() - started > SLOW_MASK_S
        if self._going_on is not None and self._taken < self._min_tokens:
            longer = bits & self._going_on
            bits = longer if longer.any() else bits
        self.forces = _no_choice(bits, self._eos)
        return bits


class OnlyTokens:
    """A matcher of a text made of some tokens, which may be in a grammar too. If the grammar
    allows none of them it is the grammar that counts.

    Args:
        ids: the tokens; `width`: how many tokens a mask speaks of.
    """

    __slots__ = ("_bits", "_matcher", "_now", "forces")

    def __init__(self, ids: Iterable[int], width: int, matcher: "TokenMatcher | None") -> None:
        self._bits = self._now = bits_of(ids, width)
        self._matcher = matcher
        self.forces = _no_choice(self._bits, frozenset())  # same meaning as `Matcher.forces`

    @property
    def error_code(self) -> str:
        return NO_TOKEN_CODE if self._matcher is None else self._matcher.error_code

    @property
    def ends_thinking(self) -> bool:
        """Whether the last `allowed` forces the end of reasoning, which nothing forbids then."""
        return self._matcher is not None and self._matcher.ends_thinking

    def advance(self, token: int) -> str | None:
        """Describe the fault of a drawn token; "" unless no token may come
        next."""
        if self._matcher is not None and (broken := self._matcher.advance(token)):
            return broken
        allowed = self._now[token // 8] >> (token % 8) & 1
        return None if allowed else f"no token may come next: {token} is none of allowed_token_ids"

    def binds(self, ahead: int = 0) -> bool:
        """Return whether a mask may be needed (`Matcher.binds`)."""
        return True

    def allowed(self) -> np.ndarray:
        if self._matcher is None:
            return self._bits
        grammar = self._matcher.allowed()
        both = grammar & self._bits
        self._now = both if both.any() else grammar
        self.forces = self._matcher.forces or _no_choice(self._now, frozenset())
        return self._now


def mask_bytes(width: int) -> int:
    """Return the length of a mask of `width` tokens."""
    return -(-width // 32) * 4


def bits_of(ids: Iterable[int], width: int) -> np.ndarray:
    """Return a mask of these tokens, as `Matcher.allowed` does."""
    allowed = np.zeros(8 * mask_bytes(width), bool)
    allowed[list(ids)] = True
    return np.packbits(allowed, bitorder="little")


def _no_choice(bits: np.ndarray, ends: Set[int]) -> bool:
    """Whether one bit of [n] uint8 is set, or none but those of `ends`, which all mean the end."""
    [places] = bits.nonzero()
    if len(places) > max(len(ends), 1):
        return False
    tokens = [8 * int(p) + i for p in places for i in range(8) if bits[p] >> i & 1]
    return len(tokens) == 1 or (bool(tokens) and ends >= set(tokens))


def allowed_tokens(matchers: Sequence[TokenMatcher], vocab_size: int) -> np.ndarray:
    """[m, vocab_size] bool: the tokens that each matcher lets come next. Ids beyond the
    tokenizer's are False."""
    bits = np.stack([matcher.allowed() for matcher in matchers])
    return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(bool)


@dataclass(frozen=True, slots=True)
class Compiled:
    """`unenforced`: keywords of its schemas that the grammar does not enforce, sorted; an answer
    may break them."""

    start: LLMatcher
    unenforced: tuple[str, ...] = ()


class Grammars:
    """The compiled grammars of one tokenizer; the last `KEPT_GRAMMARS` are kept. Any thread.

    Args:
        tokenizer: its table of bytes is built at the first use.
        vocab_size: width of the logits; may exceed the tokenizer's.
        close_objects: objects of schemas that are not strict have no properties but those that they
            list.
    """

    def __init__(
        self, tokenizer: "Tokenizer", vocab_size: int, *, close_objects: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._width = vocab_size
        self._close_objects = close_objects
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Structure, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        # one: slow grammars take one core
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def prepare(self, structures: Iterable[Structure | None]) -> None:
        """Compile, in a thread, what is not cached. Raises RequestError: a fault of
        the schema."""
        for structure in structures:
            if structure is not None and self._find(structure) is None:
                await asyncio.wrap_future(self._start_compiling(structure))

    async def unenforced(self, structure: Structure) -> tuple[str, ...]:
        """Returns the schema keywords that the grammar does not enforce. Raises as `prepare`."""
        compiled = self._find(structure)
        if compiled is None:
            compiled = await asyncio.wrap_future(self._start_compiling(structure))
        return compiled.unenforced

    def matcher(self, structure: Structure, min_tokens: int, ends: Iterable[int]) -> Matcher:
        """A matcher at the beginning of its grammar, compiled now if `prepare` did not do so.
        Raises as that."""
        compiled = self._find(structure) or self._start_compiling(structure).result()
        eos = self._tokenizer.eos_token_ids
        return Matcher(compiled.start.deep_copy(), self.width, min_tokens, ends, eos)

    @property
    def width(self) -> int:
        """How many tokens a mask speaks of."""
        return max(self._width, self._tokenizer.vocab_size)

    def _find(self, structure: Structure) -> Compiled | None:
        with self._lock:
            if structure not in self._kept:
                return None
            self._kept.move_to_end(structure)
            return self._kept[structure]

    def _start_compiling(self, structure: Structure) -> "Future[Compiled]":
        with self._lock:
            # for threads started from here on: the first task starts one
            usual = threading.stack_size(COMPILER_STACK)
            try:
                return self._compiler.submit(self._compile, structure)
            finally:
                threading.stack_size(usual)

    def _compile(self, structure: Structure) -> Compiled:
        if (kept := self._find(structure)) is not None:  # while this one waited for its turn
            return kept
        _check_size(structure)
        every = (structure, *structure.parts)
        forms = [self._form(each) for each in every]
        compiled = Compiled(
            self._start(form for form, _ in forms), _names(lost for _, lost in forms)
        )
        if compiled.start.is_error():  # one has keywords that the library cannot enforce
            forms = [
                self._concede(each) if each.kind == "json_schema" else self._form(each)
                for each in every
            ]
            compiled = Compiled(
                self._start(form for form, _ in forms), _names(lost for _, lost in forms)
            )
        if compiled.start.is_error():
            raise _refusal(structure, compiled.start.get_error())
        self._check_schemas(every)
        if (error := _error_at_once(compiled.start, self._tokenizer.eos_token_ids)) is not None:
            raise _refusal(structure, error)
        with self._lock:
            self._kept[structure] = compiled
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return compiled

    def _form(
        self, structure: Structure, **concession: Any
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The library's form of a structure, without its parts, and the keywords that it lacks.
        Raises RequestError."""
        try:
            if structure.kind != "json_schema":
                return _library_form(structure), ()
            schema, lost = for_grammar(
                json.loads(structure.source), close=structure.strict or self._close_objects
            )
            if schema is False:
                raise _refusal(structure, "no text matches it")
            defaults: Any = _ONE_LINE | concession
            return json.loads(
                LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=defaults)
            )["grammars"][0], lost
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
            # A keyword's value may have any type: the schema is a client's JSON.
            raise _refusal(structure, str(error)) from error

    def _start(self, forms: Iterable[dict[str, Any]]) -> LLMatcher:
        named = [
            form | {"name": f"part_{index - 1}" if index else "start"}
            for index, form in enumerate(forms)
        ]
        start = LLMatcher(
            self._read_vocabulary(), json.dumps({"grammars": named}), log_level=0, limits=_LIMITS
        )
        if not start.is_error():
            start.compute_bitmask()  # a grammar that matches no text at all shows here
        return start

    def _concede(self, structure: Structure) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The form of a schema with as few concessions as it takes. Raises RequestError: none
        helps."""
        for concession in _CONCESSIONS:
            form, lost = self._form(structure, **concession)
            start = self._start([form])
            if not start.is_error():
                coerced = ["oneOf"] if concession and '"oneOf"' in structure.source else []
                return form, (*lost, *coerced, *_left_out(start.get_grammar_warnings()))
        raise _refusal(structure, start.get_error())

    def _check_schemas(self, structures: Iterable[Structure]) -> None:
        """Every answer is checked when it is there: the check must be possible."""
        for structure in structures:
            if structure.kind == "json_schema":
                try:
                    validator(structure.source)
                except ValueError as error:
                    raise _refusal(structure, str(error)) from error

    def _read_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            source, ends = self._tokenizer.to_json(), sorted(self._tokenizer.eos_token_ids)
            if source is None or not ends:
                lacking = "a fast tokenizer" if source is None else "an end token"
                raise RequestError(
                    f"structured output needs {lacking}, which this model does not have"
                )
            width = self.width
            source = _with_known_decoder(_as_ordinary_text(source, ends, self._tokenizer.word_of))
            try:
                self._vocabulary = LLTokenizer(source, n_vocab=width, eos_token=ends)
            except ValueError as error:
                raise RequestError(
                    f"structured output cannot read this model's tokenizer: {error}"
                ) from error
        return self._vocabulary


def _error_at_once(start: LLMatcher, ends: Collection[int]) -> str | None:
    """Return the library's error on the first tokens of a text; None: it continues, or ends where
    nothing follows."""
    state = start.deep_copy()
    for _ in range(TRIED_TOKENS):
        bits = np.frombuffer(state.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token = next((int(each) for each in allowed[: len(ends) + 1] if each not in ends), None)
        if token is None:
            break
        if not state.consume_token(token):
            return str(state.get_error())
    return None


def _as_ordinary_text(source: str, ends: Collection[int], word_of: Callable[[str], str]) -> str:
    """A tokenizer.json whose added tokens that are not special ("<think>", "<tool_call>") are words
    of the vocabulary.

    llguidance 1.9 forces such a token if a grammar leaves nothing but its text, and then refuses
    it, because its table has no text for added tokens. As words they have one; a forced text is
    then spelled with smaller tokens. Those in `ends` stay as they are, and so do those of a
    vocabulary that is not a mapping (Unigram's).
    """
    read = json.loads(source)
    vocabulary, added = read["model"].get("vocab"), read.get("added_tokens", [])
    ordinary = [token for token in added if not token["special"] and token["id"] not in ends]
    if not ordinary or not isinstance(vocabulary, dict):
        return source
    read["added_tokens"] = [token for token in added if token not in ordinary]
    vocabulary |= {word_of(token["content"]): token["id"] for token in ordinary}
    return json.dumps(read)


def _with_known_decoder(source: str) -> str:
    """A tokenizer.json whose decoder llguidance 1.9 knows: Metaspace's in the parts that Llama
    2's is made of."""
    read = json.loads(source)
    decoder = read.get("decoder") or {}
    if decoder.get("type") != "Metaspace":
        return source
    space = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    return json.dumps(
        read | {"decoder": {"type": "Sequence", "decoders": [space, {"type": "ByteFallback"}]}}
    )


def _library_form(structure: Structure) -> dict[str, Any]:
    """Raises ValueError: not a grammar."""
    source = structure.source
    match structure.kind:
        case "regex":
            form: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(source))["grammars"][0]
            return form
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(source))
            # one lexeme: any number
            return {"lark_grammar": "start: TEXT\nTEXT: " + " | ".join(texts)}
        case "grammar":
            return {"lark_grammar": grammar_from("grammar", source)}
        case _:
            return {"lark_grammar": source}


def _names(lost: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(sorted({name for names in lost for name in names}))


def _left_out(warnings: Iterable[str]) -> list[str]:
    """The keywords that the library's warnings name."""
    keywords: list[str] = []
    for warning in warnings:
        if (keys := _UNKNOWN_KEYS.search(warning)) is not None:
            keywords += json.loads(keys[1])
        elif warning.startswith(_UNKNOWN_FORMAT):
            keywords.append(f"format:{warning.removeprefix(_UNKNOWN_FORMAT)}")
        elif "oneOf" in warning:
            keywords.append("oneOf")
        elif _COUNTS in warning:
            keywords += ["minProperties", "maxProperties"]
        else:
            keywords.append("other")
    return keywords


def _check_size(structure: Structure) -> None:
    for each in structure.parts or (structure,):
        size, limit = len(each.source), MAX_CHARACTERS[each.kind]
        if size > limit:
            raise _refusal(each, f"{size} characters, and at most {limit} are taken")
        if each.kind == "json_schema" and max(map(len, each.source.split('"'))) > MAX_STRING:
            raise _refusal(each, f"a string in it has more than {MAX_STRING} characters")
    if (
        size := len(structure.source) + sum(len(part.source) for part in structure.parts)
    ) > MAX_ANSWER:
        raise _refusal(structure, f"{size} characters, and at most {MAX_ANSWER} are taken")


def _refusal(structure: Structure, reason: str) -> RequestError:
    return RequestError(
        f"{structure.param}: {_plain(reason)}", param=structure.param, code=GRAMMAR_CODE
    )


def _plain(reason: str) -> str:
    """The library's reason in one line, without its excerpt of the grammar."""
    if reason.startswith(NO_TEXT):
        return "no text matches it"
    sentence = reason.split("\n   1 |")[0].split("<non-verbose/>")[0].rsplit("\nerror: ", 1)[-1]
    return " ".join(sentence.split())[:300]
