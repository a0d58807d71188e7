"""Structured output in the engine: a random model, whose free output is garbage, under every
kind of grammar."""

import json
import re
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from mlx_parallm.engine.grammar import KEPT_GRAMMARS, Grammars, allowed_tokens
from mlx_parallm.errors import RequestError
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Completion, Structure
from tests.engine.helpers import Served, full_logits, qwen3_model, request, run, serve

PADDED = 350  # wider than the tokenizer's 320: the logits of many checkpoints are
REGEX = r"[A-Z]{2}-[0-9]{3}(\.[a-z]{1,8})?"
CHOICES = ["yes", "no", "not yet", 'say "no"', "back\\slash", "zwei\nZeilen", "ünïcode 😀"]
PROMPT = [70, 71, 72, 80]


class Line(BaseModel):
    model_config = ConfigDict(extra="forbid")
    product: Literal["bolt", "nut", "gear \u2699"]
    count: int = Field(ge=1, le=500)
    weight: float = Field(ge=0, le=1)
    labels: list[Literal["a", "b"]] = Field(max_length=3)


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: str = Field(pattern="^[A-Z]{2}-[0-9]{3}$")
    lines: list[Line] = Field(min_length=1, max_length=2)
    paid: bool
    note: str | None = Field(max_length=6)


SCHEMA = Structure("json_schema", json.dumps(Order.model_json_schema()))
LARK = Structure("grammar", 'start: expr\nexpr: "x" | "(" expr "+" expr ")"')


def regex(source: str) -> Structure:
    return Structure("regex", source)


def choice(*texts: str) -> Structure:
    return Structure("choice", json.dumps(texts))


def holds(structure: Structure, text: str) -> bool:
    match structure.kind:
        case "json_schema":
            return bool(Order.model_validate_json(text, strict=False))
        case "regex":
            return re.fullmatch(structure.source, text) is not None
        case "choice":
            return text in json.loads(structure.source)
        case "grammar":
            return eval(text.replace("+", ","), {"x": 1}) is not None


@pytest.fixture(scope="module")
def served(tiny_tokenizer: Tokenizer) -> Served:
    model = qwen3_model(vocab_size=PADDED)
    # no step may run ahead
    return serve(model, tokenizer=tiny_tokenizer, vocab_size=PADDED, async_scheduling=True)


def sample(
    served: Served, structure: Structure, n: int, name: str = "r", **params: Any
) -> tuple[Completion, ...]:
    params = {"max_tokens": 600, "seed": 7, "n": n} | params
    return run(served.engine, [request(name, PROMPT, structure=structure, **params)])[
        name
    ].completions


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure",
    [SCHEMA, regex(REGEX), choice(*CHOICES), LARK],
    ids=["schema", "regex", "choice", "grammar"],
)
def test_forty_samples_all_match(served: Served, structure: Structure) -> None:
    completions = sample(served, structure, 40)
    assert all(holds(structure, c.text) for c in completions if c.finish_reason == "stop")
    # a garbage model may not find an end in 600
    assert sum(c.finish_reason == "stop" for c in completions) >= 36
    assert {c.finish_reason for c in completions} <= {"stop", "length"}
    assert len({c.text for c in completions}) >= (
        5 if structure.kind in ("choice", "grammar") else 20
    )
    assert all(token < 320 for c in completions for token in c.token_ids)
    # on one line
    assert not any("\n" in c.text or "  " in c.text for c in completions if structure is SCHEMA)


def test_greedy_answers_match_too(served: Served) -> None:
    [completion] = sample(served, regex(REGEX), 1, temperature=0)
    assert holds(regex(REGEX), completion.text) and completion.finish_reason == "stop"
    free = run(served.engine, [request("free", PROMPT, max_tokens=20, temperature=0)])[
        "free"
    ].completions[0]
    assert not holds(regex(REGEX), free.text)


@pytest.mark.slow
def test_a_batch_of_different_grammars_and_none_is_each_alone(served: Served) -> None:
    structures = [
        SCHEMA,
        None,
        regex(REGEX),
        choice(*CHOICES),
        None,
        LARK,
        regex("[ab]{30,40}"),
        None,
    ]
    requests = [
        request(
            f"r{i}",
            [*PROMPT, i],
            structure=structure,
            max_tokens=120,
            seed=i,
            temperature=0.7 if i % 2 else 1.0,
        )
        for i, structure in enumerate(structures)
    ]
    together = run(served.engine, requests)
    alone = {item.request_id: run(served.engine, [item])[item.request_id] for item in requests}
    for name, output in together.items():
        assert output.completions[0].token_ids == alone[name].completions[0].token_ids, name
    assert (
        len({token for output in together.values() for token in output.completions[0].token_ids})
        >= 20
    )
    for item in requests:
        completion = together[item.request_id].completions[0]
        if item.params.structure is not None and completion.finish_reason == "stop":
            assert holds(item.params.structure, completion.text)


def test_the_end_comes_exactly_where_the_grammar_accepts(
    served: Served, tiny_tokenizer: Tokenizer
) -> None:
    grammars = Grammars(tiny_tokenizer, PADDED)
    matcher = grammars.matcher(regex("ab?"), 0, tiny_tokenizer.eos_token_ids)
    a, b = tiny_tokenizer.encode("a")[0], tiny_tokenizer.encode("b")[0]
    ends = set(tiny_tokenizer.eos_token_ids)

    def allowed() -> set[int]:
        return set(np.flatnonzero(allowed_tokens([matcher], PADDED)[0]).tolist())

    assert allowed() == {a}
    assert matcher.advance(a) is None and allowed() == {b} | ends
    assert matcher.advance(b) is None and allowed() == ends
    assert matcher.advance(min(ends)) is None


def test_the_masks_are_those_of_a_naive_twin(tiny_tokenizer: Tokenizer) -> None:
    """A token may come next when what was said and the token begin one of the choices, or end
    one."""
    choices = [text.encode() for text in CHOICES]
    tokens = {
        t: tiny_tokenizer.token_bytes(t) for t in range(320) if t not in tiny_tokenizer.special_ids
    }
    grammars, generator = Grammars(tiny_tokenizer, PADDED), np.random.default_rng(0)
    for _ in range(20):
        matcher, said = grammars.matcher(choice(*CHOICES), 0, ()), b""
        while True:
            expected = {
                t for t, text in tokens.items() if any(c.startswith(said + text) for c in choices)
            }
            expected |= set(tiny_tokenizer.eos_token_ids) if said in choices else set()
            allowed = np.flatnonzero(allowed_tokens([matcher], PADDED)[0]).tolist()
            assert set(allowed) == expected, said
            token = int(generator.choice(allowed))
            if token in tiny_tokenizer.eos_token_ids:
                break
            assert matcher.advance(token) is None
            said += tokens[token]


def test_processed_logprobs_are_those_under_the_mask(
    served: Served, tiny_tokenizer: Tokenizer
) -> None:
    structure = regex(REGEX)
    [completion] = sample(served, structure, 1, temperature=0.8)
    tokens = [*PROMPT, *completion.token_ids]
    logits = full_logits(served.plain, tokens)[len(PROMPT) - 1 : -1] / 0.8
    matcher = Grammars(tiny_tokenizer, PADDED).matcher(structure, 0, ())
    assert completion.processed_logprobs is not None
    for t, token in enumerate(completion.token_ids):
        allowed = mx.array(allowed_tokens([matcher], PADDED)[0])
        plain = (logits[t, token] - mx.logsumexp(logits[t])).item()
        masked = (logits[t, token] - mx.logsumexp(mx.where(allowed, logits[t], -mx.inf))).item()
        assert completion.logprobs[t] == pytest.approx(plain, abs=1e-3)
        assert completion.processed_logprobs[t] == pytest.approx(masked, abs=1e-3)
        assert completion.forced is not None
        possible = set(np.flatnonzero(np.array(allowed)).tolist())
        no_choice = len(possible) == 1 or possible <= tiny_tokenizer.eos_token_ids
        assert completion.forced[t] == no_choice
        assert matcher.advance(token) is None


def test_a_token_is_forced_where_no_other_may_come(served: Served) -> None:
    """Under a grammar, a list of tokens, both, and neither; bits are counted, not the model's
    chances."""
    [completion] = sample(served, choice("abc", "abd"), 1)
    assert completion.forced is not None and len(completion.forced) == len(completion.token_ids)
    assert completion.forced[-1] == 1  # the end
    assert 0 in completion.forced  # c or d
    a, eos = completion.token_ids[0], completion.token_ids[-1]
    [only] = run(served.engine, [request("one", PROMPT, allowed_token_ids=(a,), max_tokens=3)])[
        "one"
    ].completions
    assert only.forced == (1, 1, 1)
    [two] = run(served.engine, [request("two", PROMPT, allowed_token_ids=(a, eos), max_tokens=3)])[
        "two"
    ].completions
    assert two.forced == (0,) * len(two.token_ids)
    [free] = run(served.engine, [request("free", PROMPT, top_k=1, max_tokens=3)])[
        "free"
    ].completions
    assert free.forced is None  # chosen: the model's likeliest


@pytest.mark.parametrize("name", ["a b", "A<B,(C|null)>", 'a"b', "é", "50%", "a%b", "a#b", "p/q~r"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_reference_may_have_any_character(
    name: str, merged: bool, tiny_tokenizer: Tokenizer
) -> None:
    """Beside `properties` its target is a part of an object, which stays open."""
    reference = {"$ref": "#/definitions/" + name.replace("~", "~0").replace("/", "~1")}
    part = {"type": "object", "properties": {"k": {"const": "v"}}, "required": ["k"]}
    schema: dict[str, Any] = {"definitions": {name: part}}
    schema |= (
        {"properties": {"x": {"const": 1}}, "required": ["x"], **reference}
        if merged
        else {"type": "object", "properties": {"x": reference}, "required": ["x"]}
    )
    structure = Structure("json_schema", json.dumps(schema))
    answers = {True: '{"x": 1, "k": "v"}', False: '{"x": {"k": "v"}}'}

    def follows(text: str) -> bool:
        matcher = Grammars(tiny_tokenizer, PADDED).matcher(structure, 0, ())
        for token in tiny_tokenizer.encode(text, add_special_tokens=False):
            if not allowed_tokens([matcher], PADDED)[0][token]:
                return False
            assert matcher.advance(token) is None
        return True

    assert follows(answers[merged])
    assert not follows(answers[not merged])


def test_min_tokens_waits_unless_only_the_end_is_left(served: Served) -> None:
    for completion in sample(served, regex("[ab]*"), 8, min_tokens=15, max_tokens=60):
        assert len(completion.token_ids) > 15 and re.fullmatch("[ab]*", completion.text)
    for completion in sample(served, choice("abc"), 4, min_tokens=15, max_tokens=60):
        assert (completion.text, completion.finish_reason) == ("abc", "stop")


def test_stop_strings_filters_bias_and_max_tokens_go_on_working(
    served: Served, tiny_tokenizer: Tokenizer
) -> None:
    [stopped] = sample(served, regex("[ab]{5}cc[ab]{5}"), 1, stop=("cc",))
    assert re.fullmatch("[ab]{5}", stopped.text) and stopped.stop_reason == "cc"
    a = tiny_tokenizer.encode("a")[0]
    filters = {
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "logit_bias": {a: -5.0},
    }
    for completion in sample(served, regex(REGEX), 10, **filters):
        assert holds(regex(REGEX), completion.text)
    [cut] = sample(served, regex("[ab]{50}"), 1, max_tokens=10)
    assert cut.finish_reason == "length" and re.fullmatch("[ab]{2,}", cut.text)


@pytest.mark.slow
def test_a_grammar_that_grows_too_complex_ends_its_own_request_only(served: Served) -> None:
    """Every split of the text is its own parse: the work grows with the square of the
    length."""
    hostile = Structure("grammar", 'start: s\ns: s s | "a" | "a" s | s "a"')
    requests = [
        request("bad", PROMPT, structure=hostile, max_tokens=1500, min_tokens=1500, seed=1),
        request("good", PROMPT, structure=regex("[ab]{60}"), max_tokens=100, seed=1),
        request("free", PROMPT, max_tokens=100, seed=1, ignore_eos=True),
    ]
    outputs = run(served.engine, requests)
    bad = outputs["bad"].completions[0]
    assert bad.finish_reason == "error" and "cannot be followed any further" in (bad.error or "")
    assert bad.error_code == "invalid_grammar"
    assert re.fullmatch("[ab]{60}", outputs["good"].completions[0].text)
    assert outputs["free"].completions[0].finish_reason == "length"


BAD: dict[str, tuple[Structure, str]] = {
    "no type": (Structure("json_schema", '{"type": "nope"}'), "nope"),
    "not JSON": (Structure("json_schema", "{"), "property name"),
    "never": (Structure("json_schema", '{"not": {}}'), "no text"),
    "unsatisfiable": (
        Structure("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'),
        "nsatisfiable",
    ),
    "reference to itself": (
        Structure("json_schema", '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}'),
        "no text",
    ),
    "deep": (Structure("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000), "recursion"),
    "unclosed": (regex("(a"), "unclosed"),
    "lookahead": (regex("a(?=b)"), "look"),
    "deep regex": (regex("(" * 5000 + "a" + ")" * 5000), "nest"),
    "no start": (Structure("grammar", "a: a"), "Expected"),
    "unknown rule": (Structure("grammar", "start: nowhere"), "nowhere"),
    "deep grammar": (Structure("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    "too complex at its first token": (regex("^(a?){5000}a{5000}$"), "too many expressions"),
    "too long": (regex("a" * 20_000), "characters"),
    "long pattern": (
        Structure("json_schema", json.dumps({"type": "string", "pattern": "a?" * 9000})),
        "characters",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_is_refused_with_the_reason(served: Served, name: str) -> None:
    structure, reason = BAD[name]
    with pytest.raises(RequestError, match=reason) as caught:
        served.engine.add(request(name, PROMPT, structure=structure))
    assert caught.value.param == "structure" and len(str(caught.value)) < 400
    assert not served.engine.has_work


def test_long_chains_of_references_do_not_end_the_process(tiny_tokenizer: Tokenizer) -> None:
    """The library compiles by recursion: this one does not fit into a thread's usual 8 MB."""
    definitions = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1800)} | {
        "d1800": {"const": "x"}
    }
    schema = Structure("json_schema", json.dumps({"$ref": "#/$defs/d0", "$defs": definitions}))
    nested = '{"$ref":"#/$defs/%d"}'
    for _ in range(110):
        nested = '{"items":' + nested + "}"
    deep = ",".join(f'"{i}":' + nested % (i + 1) for i in range(45))
    text = '{"$ref":"#/$defs/0","$defs":{' + deep + ',"45":{"type":"null"}}}'
    grammars = Grammars(tiny_tokenizer, PADDED)
    for structure in (schema, Structure("json_schema", text)):
        assert allowed_tokens([grammars.matcher(structure, 0, ())], PADDED).any()


def test_a_list_of_thousands_of_choices(served: Served) -> None:
    texts = [f"entry-{i:05d}" for i in range(3000)]
    [completion] = sample(served, choice(*texts), 1)
    assert completion.text in texts and completion.finish_reason == "stop"


def test_a_grammar_that_takes_too_long_ends_its_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.engine.grammar.SLOW_MASK_S", -1.0)
    [completion] = sample(served, regex("[ab]{9}"), 1)
    assert completion.finish_reason == "error" and "takes too long" in (completion.error or "")


def test_compiled_grammars_are_kept_and_bounded(tiny_tokenizer: Tokenizer) -> None:
    grammars = Grammars(tiny_tokenizer, PADDED)
    for i in range(KEPT_GRAMMARS + 10):
        grammars.matcher(regex(f"a{{{i + 1}}}"), 0, ())
    assert len(grammars._kept) == KEPT_GRAMMARS
    # the field's name is not part of the key
    first = grammars._find(Structure("regex", "a{20}", "guided_regex"))
    assert first is not None and grammars._find(regex("a{20}")) is first


def test_added_tokens_in_a_forced_text(tiny_tokenizer: Tokenizer) -> None:
    """Qwen's <think> and <tool_call> are not special; the library forced such tokens and then
    refused them."""
    source = json.loads(tiny_tokenizer.to_json() or "")
    think = {"id": tiny_tokenizer.vocab_size, "content": "<think>"}
    off = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    source["added_tokens"].append(think | off)

    class Thinking:
        eos_token_ids, vocab_size = tiny_tokenizer.eos_token_ids, PADDED
        word_of = staticmethod(tiny_tokenizer.word_of)

        def to_json(self) -> str:
            return json.dumps(source)

    matcher = Grammars(Thinking(), PADDED).matcher(regex("<think>[ab]{2}"), 0, ())  # type: ignore[arg-type]
    for token in tiny_tokenizer.encode("<think>ab"):
        assert allowed_tokens([matcher], PADDED)[0, token]
        assert matcher.advance(token) is None
    source["added_tokens"].append(off | {"id": think["id"] + 1, "content": " é"})
    free = Grammars(Thinking(), PADDED).matcher(regex("(<think>|x)y"), 0, ())  # type: ignore[arg-type]
    assert allowed_tokens([free], PADDED)[0, think["id"]] and free.advance(think["id"]) is None, (
        "it counts as its text"
    )
    bytes_of = Grammars(Thinking(), PADDED).matcher(regex("( é|x)y"), 0, ())  # type: ignore[arg-type]
    assert allowed_tokens([bytes_of], PADDED)[0, think["id"] + 1], "in the alphabet of bytes"

    Thinking.eos_token_ids = frozenset({think["id"]})  # an end token that is not marked as special
    text = Grammars(Thinking(), PADDED).matcher(regex("[a-z<>]{7}y"), 0, ())  # type: ignore[arg-type]
    assert not allowed_tokens([text], PADDED)[0, think["id"]], "it ends the answer, and is not text"


def greedy_twin(served: Served, prompt: list[int], count: int, forbidden: Any) -> list[int]:
    """Greedy decoding where `forbidden(output, logits)` changes the logits of each step."""
    output: list[int] = []
    for _ in range(count):
        logits = np.array(full_logits(served.plain, [*prompt, *output])[-1].astype(mx.float32))
        output.append(int(np.argmax(forbidden(output, logits))))
    return output


def test_bad_words_and_allowed_tokens_are_vllms(served: Served, tiny_tokenizer: Tokenizer) -> None:
    """A word's last token is not drawn where the others have just been drawn; alone and behind a
    space."""
    free = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    said = run(served.engine, [request("free", PROMPT, **free)])["free"].completions[0].token_ids
    pair = next(
        tiny_tokenizer.decode(said[i : i + 2])
        for i in range(24)
        if all(3 <= t < 288 for t in said[i : i + 2])
    )
    words = [tiny_tokenizer.decode([max(said[4:], key=lambda t: 3 <= t < 288)]), pair]
    ids = [
        tuple(tiny_tokenizer.encode(space + w.lstrip(), add_special_tokens=False))
        for w in words
        for space in ("", " ")
    ]

    def without(output: list[int], logits: np.ndarray) -> np.ndarray:
        for word in ids:
            if word[:-1] == tuple(output[len(output) - len(word) + 1 :]) or len(word) == 1:
                logits[word[-1]] = -np.inf
        return logits

    [bad] = run(served.engine, [request("bad", PROMPT, bad_words=tuple(words), **free)])[
        "bad"
    ].completions
    assert list(bad.token_ids) == greedy_twin(served, PROMPT, 24, without) != list(said)
    assert bad.processed_logprobs is not None
    few = (40, 41, 42, 50, 60)

    def only(output: list[int], logits: np.ndarray) -> np.ndarray:
        return np.where(np.isin(np.arange(len(logits)), few), logits, -np.inf)

    outputs = run(
        served.engine,
        [request("few", PROMPT, allowed_token_ids=few, **free), request("all", PROMPT, **free)],
    )
    assert list(outputs["few"].completions[0].token_ids) == greedy_twin(served, PROMPT, 24, only)
    assert outputs["all"].completions[0].token_ids == said, "the other row is as it was"
    a, b = (tiny_tokenizer.encode(letter)[0] for letter in "ab")
    [both] = sample(served, regex("[abc]{20}"), 1, allowed_token_ids=(a, b))
    assert set(both.text) == {"a", "b"} and both.finish_reason == "stop", (
        "the end is what the grammar leaves"
    )
    for name, params in {
        "allowed_token_ids": {"allowed_token_ids": (PADDED,)},
        "bad_words": {"bad_words": (" ",)},
    }.items():
        with pytest.raises(RequestError, match=name):
            served.engine.add(request("x", PROMPT, **params))


@pytest.mark.parametrize("width", [320, 350, 352])
def test_a_grammar_and_a_list_of_tokens_meet_in_a_batch_at_any_width(width, tiny_tokenizer):
    """The library's masks are longer than the vocabulary where that is a multiple of 32."""
    served = serve(qwen3_model(vocab_size=width), tokenizer=tiny_tokenizer, vocab_size=width)
    a, b = (tiny_tokenizer.encode(letter)[0] for letter in "ab")
    kinds = {
        "grammar": {"structure": regex("[ab]{3}")},
        "list": {"allowed_token_ids": (a, b), "ignore_eos": True},
        "both": {"structure": regex("[abc]{3}"), "allowed_token_ids": (a, b), "min_tokens": 2},
        "free": {"ignore_eos": True},
    }
    requests = [request(name, PROMPT, max_tokens=5, seed=1, **kind) for name, kind in kinds.items()]
    outputs = run(served.engine, requests)
    texts = {name: output.completions[0].text for name, output in outputs.items()}
    assert len(outputs["free"].completions[0].token_ids) == 5
    assert all(set(texts[name]) <= {"a", "b"} and texts[name] for name in kinds if name != "free")


def test_where_no_token_may_come_next_the_text_ends_with_an_error(
    served: Served, tiny_tokenizer: Tokenizer
) -> None:
    """All logits are -inf then, and the token that argmax names is none that the client asked
    for."""
    end = min(tiny_tokenizer.eos_token_ids)
    letter = tiny_tokenizer.encode("a")[0]
    word = tiny_tokenizer.decode([letter])
    nothing: dict[str, dict[str, Any]] = {
        "the end alone, and not yet": {"allowed_token_ids": (end,), "min_tokens": 3},
        "one token, a bad word": {"allowed_token_ids": (letter,), "bad_words": (word,)},
    }
    for name, params in nothing.items():
        [done] = run(served.engine, [request(name, PROMPT, max_tokens=8, **params)])[
            name
        ].completions
        assert done.finish_reason == "error" and "no token may come next" in (done.error or ""), (
            name
        )


def test_logits_start_alone_only_where_a_grammar_binds(monkeypatch):
    """A step without one hands all of its operations to the device at once."""
    served = serve(qwen3_model(), async_scheduling=False)
    started, start = [], mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: started.append(arrays) or start(*arrays))
    free = [request(name, PROMPT, max_tokens=3, ignore_eos=True) for name in "ab"]
    run(served.engine, free)
    assert not started
    bound = request("c", PROMPT, max_tokens=3, ignore_eos=True, allowed_token_ids=(65, 66))
    run(served.engine, [*free, bound])
    assert len(started) == 3
