"""thinking_token_budget: reasoning never gets longer, its end is forced token by token, and nothing
else of an answer changes."""

import random
from types import SimpleNamespace

import pytest

from mlx_parallm.engine.grammar import bits_of
from mlx_parallm.engine.thinking_budget import ThinkingBudget
from mlx_parallm.errors import RequestError
from mlx_parallm.types import Completion
from tests.engine.helpers import ByteTokenizer, qwen3_model, request, run, serve

START, END = 260, 261
LONG_END = tuple(b"[/t]")


class Thinker(ByteTokenizer):
    """Reasoning is marked by one token on each side."""

    special_ids = frozenset({START, END})
    think_markers = (f"<{START}>", f"<{END}>")
    answer_opening = ""

    def decode(self, ids, *, skip_special_tokens=False):
        return super().decode(list(ids))

    def encode_within(self, text):
        for token in (START, END):
            text = text.replace(f"<{token}>", chr(token))
        return [ord(character) for character in text]

    def hides(self, marker):
        return False

    def to_json(self):
        return None


class LongMarkers(Thinker):
    """Reasoning is marked by several tokens on each side, which may be drawn as any others."""

    special_ids = frozenset()
    think_markers = ("[t]", "[/t]")


def answers(requests, tokenizer, **options) -> dict[str, Completion]:
    served = serve(qwen3_model(), tokenizer=tokenizer, max_rows=16, **options)
    return {name: output.completions[0] for name, output in run(served.engine, requests).items()}


def thoughts(completion: Completion, opened: bool, end: tuple[int, ...]) -> int | None:
    """How many tokens stand between the markers; None: nothing was thought."""
    ids = list(completion.token_ids)
    if not opened:
        if ids[:1] != [START]:
            return None
        ids = ids[1:]
    for place in range(len(ids)):
        if tuple(ids[place : place + len(end)]) == end:
            return place
    return len(ids)


@pytest.mark.parametrize("ahead", [False, True])
def test_no_thought_is_longer_than_the_budget_and_nothing_else_changes(ahead):
    """Prompts that open the reasoning, have begun it, have ended it, or leave it to the answer; the
    same answers without a budget up to the place where an end is forced."""
    draw = random.Random(1)
    plain, bounded = [], []
    for number in range(40):
        words = [draw.randrange(97, 123) for _ in range(draw.randint(1, 12))]
        opening = draw.choice([[START], [START, 10], [START, 10, END], []])
        sampling = {"seed": number, "max_tokens": 30, "ignore_eos": True, "temperature": 2.0}
        if not opening:
            sampling["logit_bias"] = {START: 9.0}  # a model that thinks
        bounded.append(
            request(
                f"{number}",
                words + opening,
                **sampling,
                thinking_token_budget=draw.choice([0, 1, 2, 7, 29, 30, 100, -1]),
            )
        )
        plain.append(request(f"{number}", words + opening, **sampling))
    free = answers(plain, Thinker(), async_scheduling=ahead)
    found = answers(bounded, Thinker(), async_scheduling=ahead)
    forced_ends = 0
    for item in bounded:
        completion, budget = found[item.request_id], item.params.thinking_token_budget
        before, prompt = free[item.request_id], item.prompt_token_ids
        opened = START in prompt
        thought = None if END in prompt else thoughts(completion, opened, (END,))
        used = len(prompt) - prompt.index(START) - 1 if opened else 0
        places = [place for place, forced in enumerate(completion.forced or ()) if forced]
        if budget < 0 or thought is None:
            assert completion.token_ids == before.token_ids and not places
            continue
        assert thought <= max(budget - used, 0)
        assert [completion.token_ids[place] for place in places] == [END] * len(places)
        first = places[0] if places else len(completion.token_ids)
        assert completion.token_ids[:first] == before.token_ids[:first]
        assert all(completion.processed_logprobs[place] == 0.0 for place in places)
        assert all(completion.logprobs[place] < 0.0 for place in places), "the model's own"
        if places:
            assert first == thought + (not opened) and thought == max(budget - used, 0)
        forced_ends += len(places)
    assert forced_ends >= 10


def test_an_end_of_several_tokens_is_forced_whole_and_one_that_is_drawn_counts():
    prompt = [*b"why?", *b"[t]"]
    bias = {"logit_bias": {LONG_END[0]: 60.0}, "temperature": 1.0, "max_tokens": 12}
    requests = [
        request("cut", prompt, seed=1, thinking_token_budget=3, max_tokens=9, ignore_eos=True),
        request("half drawn", prompt, seed=1, thinking_token_budget=2, ignore_eos=True, **bias),
        request("in two", prompt, n=1, seed=2, thinking_token_budget=0, max_tokens=2),
    ]
    found = answers(requests, LongMarkers())
    assert found["cut"].token_ids[3:7] == LONG_END
    assert found["cut"].forced == (0, 0, 0, 1, 1, 1, 1, 0, 0)
    assert found["half drawn"].token_ids[:6] == (LONG_END[0], LONG_END[0], *LONG_END)
    assert found["in two"].token_ids == LONG_END[:2], "max_tokens has the last word"


def test_the_choices_of_a_group_and_penalties_have_it_too():
    item = request(
        "group",
        [*b"a", START],
        n=3,
        seed=5,
        max_tokens=8,
        ignore_eos=True,
        thinking_token_budget=2,
        logit_bias={END: -100.0},
        frequency_penalty=0.5,
        temperature=2.0,
    )
    served = serve(qwen3_model(), tokenizer=Thinker())
    choices = run(served.engine, [item])["group"].completions
    assert [choice.token_ids[2] for choice in choices] == [END] * 3
    assert len({choice.token_ids for choice in choices}) == 3


def test_a_list_of_allowed_tokens_holds_for_everything_but_the_end():
    letters = tuple(range(97, 103))
    item = request(
        "list",
        [*b"a", START],
        seed=5,
        max_tokens=9,
        thinking_token_budget=4,
        allowed_token_ids=letters,
        temperature=2.0,
    )
    ids = answers([item], Thinker())["list"].token_ids
    assert ids[4] == END and {*ids[:4], *ids[5:]} <= {*letters}


@pytest.mark.parametrize(
    "forbidding",
    [
        {"bad_words": (f"<{END}>",)},
        {"min_tokens": 6, "stop_token_ids": (END,)},
        {"logit_bias": {END: -1e9}},
    ],
    ids=lambda each: next(iter(each)),
)
def test_what_forbids_the_end_does_not_hold_where_it_is_forced(forbidding):
    item = request(
        "a", [*b"a", START], seed=3, max_tokens=8, thinking_token_budget=2, top_k=2, **forbidding
    )
    found = answers([item], Thinker())["a"]
    assert found.token_ids[2] == END and found.forced[:3] == (0, 0, 1)
    assert found.processed_logprobs[2] == 0.0 and found.error is None


def test_a_model_without_markers_and_odd_numbers_are_refused_by_name():
    served = serve(qwen3_model())
    with pytest.raises(RequestError, match="thinking_token_budget: this model's reasoning has no"):
        served.engine.add(request("r", [1, 2], thinking_token_budget=5))
    with pytest.raises(RequestError, match="thinking_token_budget: must be at least -1"):
        served.engine.add(request("r", [1, 2], thinking_token_budget=-2))
    served.engine.add(request("r", [1, 2], thinking_token_budget=-1, max_tokens=1))


def test_an_end_that_a_grammar_has_cut_is_forced_from_its_beginning() -> None:
    other = ord("a")
    grammar = SimpleNamespace(allows=[*LONG_END], forces=False, error_code="")
    grammar.allowed = lambda: bits_of(grammar.allows, 300)
    grammar.advance = lambda token: None
    budget = ThinkingBudget(0, ("", "[/t]"), LONG_END, SimpleNamespace(add=chr), 300, grammar)
    taken = []
    for allows in ([*LONG_END], [*LONG_END], [other], *[[*LONG_END]] * len(LONG_END)):
        grammar.allows = allows
        bits = budget.allowed()
        [token] = [each for each in [*LONG_END, other] if (bits & bits_of([each], 300)).any()]
        taken.append(token)
        assert budget.advance(token) is None
    assert bytes(taken) == b"[/a[/t]"
