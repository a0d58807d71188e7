"""/v1/completions with the real `openai` client against a real engine on the shipped model."""

import pytest
from openai import BadRequestError, NotFoundError

from tests.server.serving import flat

MODEL = "default"
PROMPT = "<|im_start|>user\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n"


# many distinct tokens
VARIED = {"temperature": 4.0, "seed": 11, "max_tokens": 60, "ignore_eos": True}


def create(client, prompt=PROMPT, **fields):
    extra = {key: fields.pop(key) for key in list(fields) if key in EXTRA}
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **fields)


EXTRA = {
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
    "top_k",
}


def test_every_form_of_prompt_gives_the_same_answer(client, tiny_tokenizer):
    ids = tiny_tokenizer.encode(PROMPT)
    alone = create(client, temperature=0).choices[0].text
    assert create(client, ids, temperature=0).choices[0].text == alone
    other = create(client, "abc", temperature=0, max_tokens=8).choices[0].text
    for prompts in ([PROMPT, "abc"], [ids, tiny_tokenizer.encode("abc")]):
        answer = create(client, prompts, temperature=0)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].text == alone and answer.choices[1].text.startswith(other)
        assert answer.usage.prompt_tokens == len(ids) + len(tiny_tokenizer.encode("abc"))


def test_choices_are_prompt_major_and_a_prompt_counts_once(client):
    answer = create(client, [PROMPT, "abc"], n=3, max_tokens=4, ignore_eos=True, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text.startswith("abc") for choice in answer.choices] == [False] * 3 + [True] * 3
    assert answer.usage.completion_tokens == 24
    assert (
        answer.usage.prompt_tokens
        == create(client, [PROMPT, "abc"], max_tokens=1).usage.prompt_tokens
    )


def test_the_default_length_is_16_tokens(client):
    assert create(client, ignore_eos=True).usage.completion_tokens == 16


@pytest.mark.parametrize("stream_options", [None, {"include_usage": True}])
def test_a_stream_adds_up_to_the_whole_answer(client, stream_options):
    fields = {
        "n": 2,
        "seed": 3,
        "max_tokens": 12,
        "logprobs": 2,
        "return_token_ids": True,
        "echo": False,
    }
    whole = create(client, [PROMPT, "abc"], **fields)
    options = {"stream_options": stream_options} if stream_options else {}
    chunks = list(create(client, [PROMPT, "abc"], stream=True, **options, **fields))
    if stream_options:
        last = chunks.pop()
        assert last.choices == [] and last.usage.completion_tokens == whole.usage.completion_tokens
        assert last.usage.prompt_tokens == whole.usage.prompt_tokens
        assert all(chunk.usage is None for chunk in chunks)
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text
        assert flat(part.token_ids for part in mine) == choice.token_ids
        assert mine[0].prompt_token_ids == choice.prompt_token_ids
        for key in ("tokens", "text_offset"):
            assert flat(getattr(part.logprobs, key) for part in mine) == getattr(
                choice.logprobs, key
            )
        # The two prompts may meet in another batch than before, and float32 sums are then rounded
        # otherwise.
        for key in ("token_logprobs", "top_logprobs"):
            streamed, told = (
                flat(getattr(part.logprobs, key) for part in mine),
                getattr(choice.logprobs, key),
            )
            assert len(streamed) == len(told)
            assert all(
                one == pytest.approx(other, abs=1e-4)
                for one, other in zip(streamed, told, strict=True)
            )
        assert [part.finish_reason for part in mine][-1] == choice.finish_reason
        assert mine[-1].weight_versions == choice.weight_versions
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_streamed_echo_starts_with_the_prompt(client):
    chunks = list(create(client, "abc", echo=True, stream=True, temperature=0, max_tokens=4))
    whole = create(client, "abc", echo=True, temperature=0, max_tokens=4)
    assert chunks[0].choices[0].text.startswith("abc")
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_a_seed_repeats_and_another_differs(client):
    fields = VARIED | {"return_token_ids": True}
    ids = [
        create(client, "a", **fields | {"seed": seed}).choices[0].token_ids for seed in (1, 1, 2)
    ]
    assert ids[0] == ids[1] != ids[2] and len(set(ids[0])) >= 20


def test_stop_strings_end_before_or_after_themselves(client):
    fields = VARIED
    text = create(client, "a", **fields).choices[0].text
    stop = text[20:24]
    cut = text.index(stop)
    stopped = create(client, "a", stop=["never\x00", stop], **fields).choices[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (text[:cut], "stop", stop)
    kept = create(client, "a", stop=stop, include_stop_str_in_output=True, **fields).choices[0]
    assert kept.text == text[: cut + len(stop)]


def test_stop_token_ids_end_the_answer_and_are_kept_in_the_ids(client):
    fields = VARIED | {"return_token_ids": True}
    ids = create(client, "a", **fields).choices[0].token_ids
    stop = ids[10]
    stopped = create(client, "a", stop_token_ids=[stop], **fields).choices[0]
    assert stopped.token_ids == ids[: ids.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_logprobs_are_parallel_lists_that_place_each_token(client, tiny_tokenizer):
    choice = create(
        client, max_tokens=8, temperature=0, logprobs=3, ignore_eos=True, return_token_ids=True
    ).choices[0]
    lists = choice.logprobs
    assert (
        len(lists.tokens)
        == len(lists.token_logprobs)
        == len(lists.top_logprobs)
        == len(lists.text_offset)
        == 8
    )
    for token, logprob, top in zip(
        lists.tokens, lists.token_logprobs, lists.top_logprobs, strict=True
    ):
        assert logprob <= 0 and top[token] == logprob == max(top.values()) and len(top) == 3
    # A special token does not show in the text, so it takes no place there.
    named = zip(lists.tokens, choice.token_ids, strict=True)
    shown = ["" if token_id in tiny_tokenizer.special_ids else token for token, token_id in named]
    assert lists.text_offset == [len("".join(shown[:end])) for end in range(8)]
    assert "".join(shown) == choice.text
    named = create(
        client,
        max_tokens=8,
        temperature=0,
        logprobs=1,
        ignore_eos=True,
        return_tokens_as_token_ids=True,
    ).choices[0]
    assert named.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]
    assert list(named.logprobs.top_logprobs[0]) == named.logprobs.tokens[:1]


def test_scoring_a_text_gives_what_sampling_it_gave(client):
    sampled = create(client, max_tokens=12, seed=5, logprobs=0, return_token_ids=True).choices[0]
    ids = sampled.prompt_token_ids + sampled.token_ids
    scored = create(client, ids, max_tokens=0, echo=True, logprobs=2)
    lists = scored.choices[0].logprobs
    assert lists.token_logprobs[0] is None and lists.top_logprobs[0] is None
    assert len(lists.tokens) == len(ids) and scored.usage.completion_tokens == 0
    assert lists.token_logprobs[len(sampled.prompt_token_ids) :] == pytest.approx(
        sampled.logprobs.token_logprobs, abs=1e-4
    )
    assert scored.choices[0].text.startswith(PROMPT) and len(lists.top_logprobs[1]) in (2, 3)


def test_echo_with_logprobs_covers_prompt_and_answer(client):
    whole = create(
        client, "abc", echo=True, logprobs=0, max_tokens=5, temperature=0, return_token_ids=True
    )
    choice = whole.choices[0]
    assert len(choice.logprobs.tokens) == len(choice.prompt_token_ids) + len(choice.token_ids)
    assert choice.text.startswith("abc")
    assert (
        choice.logprobs.token_logprobs[0] is None and None not in choice.logprobs.token_logprobs[1:]
    )


def test_prompt_logprobs_name_each_token_with_its_rank(client):
    choice = create(client, "abcd", max_tokens=1, prompt_logprobs=2, return_token_ids=True).choices[
        0
    ]
    assert choice.prompt_logprobs[0] is None
    for token_id, entry in zip(
        choice.prompt_token_ids[1:], choice.prompt_logprobs[1:], strict=True
    ):
        assert str(token_id) in entry and {1, 2} <= {shown["rank"] for shown in entry.values()}


def test_token_ids_go_round_without_retokenising(client, server):
    first = create(
        client, "ab", max_tokens=6, seed=1, ignore_eos=True, return_token_ids=True
    ).choices[0]
    again = create(
        client, first.prompt_token_ids + first.token_ids, max_tokens=1, return_token_ids=True
    ).choices[0]
    assert again.prompt_token_ids == first.prompt_token_ids + first.token_ids
    with server.http() as http:
        assert http.post("/detokenize", json={"tokens": first.prompt_token_ids}).json() == {
            "prompt": "ab"
        }


def test_filters_send_the_renormalised_logprobs_too(client):
    choice = create(client, max_tokens=4, top_k=1, logprobs=0, ignore_eos=True).choices[0]
    assert choice.processed_logprobs == pytest.approx([0.0] * 4, abs=1e-5)
    assert min(choice.logprobs.token_logprobs) < -1e-4


def test_the_policy_version_is_in_every_answer(client, server):
    version = server.engine.stats().policy_version
    answer = create(client, max_tokens=3, ignore_eos=True)
    assert answer.policy_version == version
    assert answer.choices[0].weight_versions == [{"version": version, "start": 0, "end": 3}]
    last = list(create(client, max_tokens=3, ignore_eos=True, stream=True))[-1]
    assert last.policy_version == version and last.choices[0].weight_versions == [
        {"version": version, "start": 0, "end": 3}
    ]


REFUSED = {
    "unknown": ({"temprature": 1}, "temprature"),
    "temperature": ({"temperature": -1}, "temperature"),
    "top_p": ({"top_p": 0}, "top_p"),
    "n": ({"n": 0}, "n"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
    "empty stop": ({"stop": ["a", ""]}, "stop"),
    "empty prompt": ({"prompt": []}, "prompt"),
    "empty text": ({"prompt": ""}, "prompt"),
    "prompt of objects": ({"prompt": {"a": 1}}, "prompt"),
    "token out of range": ({"prompt": [1_000_000]}, "prompt"),
    "negative token": ({"prompt": [-1]}, "prompt"),
    "bias of no token": ({"logit_bias": {"1000000": 1}}, "logit_bias"),
    "zero max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "stream_options alone": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "unknown stream option": (
        {"stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
    ),
    "min over max": ({"min_tokens": 9, "max_tokens": 4}, "min_tokens"),
}


@pytest.mark.parametrize("fields, param", REFUSED.values(), ids=REFUSED.keys())
def test_a_request_that_cannot_be_honoured_is_a_400_naming_the_field(server, fields, param):
    with server.http() as http:
        answer = http.post("/v1/completions", json={"prompt": "a"} | fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (
            400,
            param,
            "invalid_request_error",
        )
        assert param.split(".")[0] in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_over_the_context_is_a_400_that_says_so(client, server, stream):
    longest = server.engine.max_model_len
    with pytest.raises(BadRequestError, match="maximum context length") as caught:
        create(client, [5] * longest, max_tokens=1, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError, match="maximum context length"):
        create(client, [5] * 10, max_tokens=longest, stream=stream)


def test_an_unknown_model_is_a_404_with_the_list(client):
    with pytest.raises(NotFoundError, match=r"Served models: .*tiny") as caught:
        client.completions.create(model="gpt-4", prompt="a")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_a_publish_in_the_middle_of_a_stream_shows_in_its_spans(client, tiny_engine):
    chunks = create(client, "a", stream=True, max_tokens=200, ignore_eos=True)
    first = next(chunks)
    old, new = tiny_engine.weights.version, tiny_engine.weights.publish_parameters({}).version
    last = [first, *chunks][-1]
    before, after = last.choices[0].weight_versions
    assert (before["version"], after["version"], last.policy_version) == (old, new, new)
    assert before["start"] == 0 and before["end"] == after["start"] and after["end"] == 200
    assert client.models.list().data[0].policy_version == new
