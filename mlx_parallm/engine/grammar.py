"""Structured output: a text that matches a JSON schema, a regular expression, a list of choices or a grammar. No MLX.

    Structure (types.py) → `Grammars.prepare` (off the event loop, before the request enters the queue)
                         → `Grammars.matcher` → one `Matcher` a choice → `allowed_tokens` → sampler.py

The grammar library is llguidance (MIT): one wheel of 3 MB for macOS arm64, Linux x86-64 and aarch64 and every Python,
no dependencies, masks computed in Rust in microseconds, and bounds on the work of hostile grammars. xgrammar would
bring torch along; outlines-core compiles an automaton per schema (no recursion, slow for large vocabularies).

The end token is allowed exactly where the grammar accepts, so a choice that ends with it is complete. A text that the
model never closes ends with finish_reason "length". JSON is written on one line, an optional space after "," and ":":
where any whitespace is allowed, small models fill their answer with it.
"""

import asyncio
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from mlx_parallm.errors import RequestError
from mlx_parallm.types import Structure

if TYPE_CHECKING:
    from mlx_parallm.models.tokenizer import Tokenizer

# Bounds on the cost of a hostile grammar. The library's time grows with the square of a regular expression's length:
# 2 s for the worst one of 16 Ki characters. It compiles by recursion, and the end of the stack is the end of the
# process: a chain of 5,000 references needs 40 MB. A mask that takes longer than `SLOW_MASK_S` ends its request.
MAX_CHARACTERS = {"json_schema": 64 << 10, "choice": 64 << 10, "regex": 16 << 10, "grammar": 16 << 10}
MAX_STRING = 16 << 10  # within a schema: its patterns are regular expressions
COMPILER_STACK = 256 << 20  # address space; only what is used is memory
SLOW_MASK_S = 0.1
KEPT_GRAMMARS = 64
_LIMITS = LLParserLimits(
    max_items_in_row=1000,  # 250 optional properties of one object; a step then takes 10 ms at worst
    step_max_items=10_000,
    max_lexer_states=20_000,  # 40 MB a matcher
    verbose_errors=False,  # else the message has the whole grammar
)
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Matcher:
    """The state of one choice's text in its grammar. Engine thread only.

    Args:
        state: a copy of its own of the compiled grammar.
        min_tokens: so many tokens come before an end, unless the grammar leaves nothing but the end.
        ends: token ids that end the choice.
    """

    __slots__ = ("_going_on", "_min_tokens", "_slow", "_state", "_taken")

    def __init__(self, state: LLMatcher, min_tokens: int, ends: Iterable[int]) -> None:
        self._state = state
        self._min_tokens = min_tokens
        self._taken = 0
        self._slow = False
        self._going_on: np.ndarray | None = None
        if min_tokens:
            going_on = np.ones(8 * len(state.compute_bitmask()), bool)
            going_on[list(ends)] = False
            self._going_on = np.packbits(going_on, bitorder="little")

    def advance(self, token: int) -> str | None:
        """Takes the sampled token. Returns an error where the grammar has become too complex."""
        self._taken += 1
        if self._state.consume_token(token) and not self._slow:
            return None
        reason = "it takes too long" if self._slow else _plain(self._state.get_error())
        return f"the grammar cannot be followed any further: {reason}"

    def allowed(self) -> np.ndarray:
        """Bits of the tokens that may come next, the lowest first: [V/8, rounded up to 4] uint8."""
        started = time.thread_time()
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        self._slow = time.thread_time() - started > SLOW_MASK_S
        if self._going_on is None or self._taken >= self._min_tokens:
            return bits
        longer = bits & self._going_on
        return longer if longer.any() else bits


def allowed_tokens(matchers: Sequence[Matcher], vocab_size: int) -> np.ndarray:
    """[m, vocab_size] bool: the tokens that each matcher lets come next. Ids beyond the tokenizer's are False."""
    bits = np.stack([matcher.allowed() for matcher in matchers])
    return np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(bool)


class Grammars:
    """The compiled grammars of one tokenizer; the last `KEPT_GRAMMARS` are kept. Any thread.

    Args:
        tokenizer: its table of bytes is built at the first use.
        vocab_size: width of the logits; may exceed the tokenizer's.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._width = vocab_size
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[Structure, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")  # one: slow grammars take one core

    async def prepare(self, structures: Iterable[Structure | None]) -> None:
        """Compiles, in a thread, what is not kept yet. Raises RequestError: what is wrong with it."""
        for structure in structures:
            if structure is not None and self._find(structure) is None:
                await asyncio.wrap_future(self._start_compiling(structure))

    def matcher(self, structure: Structure, min_tokens: int, ends: Iterable[int]) -> Matcher:
        """A matcher at the beginning of its grammar, compiled now if `prepare` did not do so. Raises as that."""
        compiled = self._find(structure) or self._start_compiling(structure).result()
        return Matcher(compiled.deep_copy(), min_tokens, ends)

    def _find(self, structure: Structure) -> LLMatcher | None:
        with self._lock:
            if structure not in self._kept:
                return None
            self._kept.move_to_end(structure)
            return self._kept[structure]

    def _start_compiling(self, structure: Structure) -> "Future[LLMatcher]":
        with self._lock:
            usual = threading.stack_size(COMPILER_STACK)  # of threads started from here on: the first task starts one
            try:
                return self._compiler.submit(self._compile, structure)
            finally:
                threading.stack_size(usual)

    def _compile(self, structure: Structure) -> LLMatcher:
        if (kept := self._find(structure)) is not None:  # while this one waited for its turn
            return kept
        _check_size(structure)
        vocabulary = self._read_vocabulary()
        try:
            grammar = _library_form(structure)
        except (ValueError, RecursionError) as error:
            raise _refusal(structure, str(error)) from error
        compiled = LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
        if not compiled.is_error():
            compiled.compute_bitmask()  # a grammar that matches no text at all shows here
        if compiled.is_error():
            raise _refusal(structure, compiled.get_error())
        with self._lock:
            self._kept[structure] = compiled
            while len(self._kept) > KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return compiled

    def _read_vocabulary(self) -> LLTokenizer:
        if self._vocabulary is None:
            source, ends = self._tokenizer.to_json(), sorted(self._tokenizer.eos_token_ids)
            if source is None or not ends:
                lacking = "a fast tokenizer" if source is None else "an end token"
                raise RequestError(f"structured output needs {lacking}, which this model does not have")
            width = max(self._width, self._tokenizer.vocab_size)
            self._vocabulary = LLTokenizer(
                _as_ordinary_text(source, ends, self._tokenizer.word_of), n_vocab=width, eos_token=ends
            )
        return self._vocabulary


def _as_ordinary_text(source: str, ends: Collection[int], word_of: Callable[[str], str]) -> str:
    """A tokenizer.json whose added tokens that are not special ("<think>", "<tool_call>") are words of the vocabulary.

    llguidance 1.9 forces such a token where a grammar leaves nothing but its text, and then refuses it, because its
    table has no text for added tokens. As words they have one; a forced text is then spelled with smaller tokens. Those
    in `ends` stay as they are, and so do those of a vocabulary that is no mapping (Unigram's).
    """
    read = json.loads(source)
    vocabulary, added = read["model"].get("vocab"), read.get("added_tokens", [])
    ordinary = [token for token in added if not token["special"] and token["id"] not in ends]
    if not ordinary or not isinstance(vocabulary, dict):
        return source
    read["added_tokens"] = [token for token in added if token not in ordinary]
    vocabulary |= {word_of(token["content"]): token["id"] for token in ordinary}
    return json.dumps(read)


def _library_form(structure: Structure) -> str:
    """Raises ValueError: not JSON, not a grammar; RecursionError: nested too deeply."""
    source = structure.source
    match structure.kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(source, defaults=_ONE_LINE)  # type: ignore[arg-type]
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(source))
            return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(texts))  # one lexeme: any number
        case "grammar":
            return grammar_from("grammar", source)


def _check_size(structure: Structure) -> None:
    size, limit = len(structure.source), MAX_CHARACTERS[structure.kind]
    if size > limit:
        raise _refusal(structure, f"{size} characters, and at most {limit} are taken")
    if structure.kind == "json_schema" and max(map(len, structure.source.split('"'))) > MAX_STRING:
        raise _refusal(structure, f"a string in it has more than {MAX_STRING} characters")


def _refusal(structure: Structure, reason: str) -> RequestError:
    return RequestError(f"{structure.param}: {_plain(reason)}", param=structure.param, code="invalid_grammar")


def _plain(reason: str) -> str:
    """The library's reason in one line, without its excerpt of the grammar."""
    if reason.startswith("NoExtension"):
        return "no text matches it"
    sentence = reason.split("\n   1 |")[0].split("<non-verbose/>")[0].rsplit("\nerror: ", 1)[-1]
    return " ".join(sentence.split())[:300]
