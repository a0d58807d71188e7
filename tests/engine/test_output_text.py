"""Stop strings, held back text and incremental decoding; alone, then through the engine."""

import random

import pytest

from mlx_parallm.engine.output_text import OutputText
from tests.engine.helpers import (
    EOS,
    ByteTokenizer,
    collect,
    collect_deltas,
    qwen3_model,
    request,
    run,
    serve,
)


def text_of(*stop: str, include_stop: bool = False, eager: bool = True) -> OutputText:
    return OutputText(ByteTokenizer().detokenizer, stop, include_stop=include_stop, eager=eager)


def feed(text: OutputText, data: bytes) -> tuple[list[str], str | None]:
    """What `take` shows after each byte, and the stop string that ended it."""
    shown = []
    for byte in data:
        matched = text.add(byte)
        shown.append(text.take())
        if matched is not None:
            return shown, matched
    return shown, None


def test_text_that_may_begin_a_stop_string_is_held_back():
    shown, matched = feed(text_of("END"), b"aENbEND!")
    assert shown == ["a", "", "", "ENb", "", "", ""]
    assert matched == "END"


def test_a_stop_string_across_tokens_of_several_characters():
    text = text_of("6><2")
    assert text.add(256) is None
    assert text.take() == "<25"
    assert text.add(257) == "6><2"
    assert (text.take(), text.finish()) == ("", "<25")


def test_a_stop_string_inside_one_token():
    text = text_of("25")
    assert text.add(256) == "25"
    assert text.finish() == "<"


def test_unchecked_tokens_do_not_stop_and_are_not_matched_later():
    text = text_of("ab")
    for byte in b"ab":
        assert text.add(byte, check_stop=False) is None
    assert text.add(ord("c")) is None
    assert text.add(ord("a")) is None
    assert text.add(ord("b")) == "ab"


@pytest.mark.parametrize("seed", range(40))
def test_stop_strings_are_found_and_held_back_as_by_looking_everywhere(seed: int) -> None:
    """The twin looks for each string in the whole text, and holds back the longest end that
    could begin one."""
    draw = random.Random(seed)
    stop = tuple({"".join(draw.choices("ab", k=draw.randint(1, 5))) for _ in range(4)})
    text, shown, so_far = text_of(*stop), "", ""
    for character in draw.choices("aabc", k=60):
        so_far += character
        matched = text.add(ord(character))
        shown += text.take()
        found = sorted(
            (so_far.find(each), place, each) for place, each in enumerate(stop) if each in so_far
        )
        if found:
            assert matched == found[0][2] and shown == so_far[: found[0][0]]
            return
        held = max(
            (n for each in stop for n in range(len(each)) if so_far.endswith(each[:n])), default=0
        )
        assert matched is None and shown == so_far[: len(so_far) - held]


def force(*tokens: int) -> dict[int, float]:
    """Biases under which greedy sampling with a frequency penalty of 2 takes the tokens in turn."""
    return {token: 1000.0 - place for place, token in enumerate(tokens)}


@pytest.mark.parametrize("include", [False, True])
def test_engine_stop_string_across_token_borders(include):
    served = serve(qwen3_model())
    params = {
        "temperature": 0.0,
        "logit_bias": force(*b"abc"),
        "frequency_penalty": 2.0,
        "max_tokens": 50,
    }
    requests = [
        request("plain", [1, 2], **params | {"max_tokens": 6}),
        request(
            "stop", [1, 2], stop=("zz", "cb", "ca"), include_stop_str_in_output=include, **params
        ),
    ]
    outputs = run(served.engine, requests)
    plain, stopped = outputs["plain"].completions[0], outputs["stop"].completions[0]
    assert plain.finish_reason == "length"
    at = next(i for i in range(50) if bytes(stopped.token_ids[i : i + 2]) in (b"cb", b"ca"))
    assert len(stopped.token_ids) == at + 2, "the ids that completed the stop string are kept"
    match = bytes(stopped.token_ids[at:]).decode()
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", match)
    assert stopped.text == bytes(stopped.token_ids[: at + 2 * include]).decode()
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_engine_stop_token_ids():
    served = serve(qwen3_model())
    params = {"logit_bias": {66: 1000.0}, "stop_token_ids": (66, 67), "max_tokens": 9}
    hidden = run(served.engine, [request("r", [1], **params)])["r"].completions[0]
    assert (hidden.token_ids, hidden.text, hidden.finish_reason, hidden.stop_reason) == (
        (66,),
        "",
        "stop",
        66,
    )
    shown = run(served.engine, [request("s", [1], include_stop_str_in_output=True, **params)])[
        "s"
    ].completions[0]
    assert shown.text == "B"


def test_engine_streams_add_up_to_the_output():
    served = serve(qwen3_model())
    params = {"seed": 3, "max_tokens": 40, "stop": ("\x00\x00",), "n": 3, "logprobs": 2}
    whole = run(served.engine, [request("w", [1, 2, 3], **params)])["w"]
    served.engine.add(request("s", [1, 2, 3], stream=True, **params))
    deltas = collect_deltas(served.engine)["s"]
    for completion in whole.completions:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in mine) == completion.text
        assert sum((delta.token_ids for delta in mine), ()) == completion.token_ids
        assert sum((delta.logprobs for delta in mine), ()) == pytest.approx(
            completion.logprobs, abs=1e-5
        )
        assert sum(len(delta.top_logprobs) for delta in mine) == len(completion.token_ids)
        assert sum((delta.policy_versions for delta in mine), ()) == completion.policy_versions
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [
            completion.finish_reason
        ]
        assert len(mine) == len(completion.token_ids), (
            "one delta a token, the last one with the finish"
        )


def test_engine_abort_ends_a_stream_with_its_held_back_text():
    served = serve(qwen3_model())
    params = {
        "temperature": 0.0,
        "logit_bias": {97: 1000.0},
        "max_tokens": 50,
        "stop": ("aaaaaaaa",),
    }
    served.engine.add(request("s", [1], stream=True, **params))
    for _ in range(3):
        served.engine.step()
    served.engine.abort("s")
    deltas = [event.delta for event in served.engine.take_events()[:1]]
    assert (deltas[0].text, deltas[0].finish_reason) == ("aaa", "abort")


class FailingTokenizer(ByteTokenizer):
    """Its decoder fails on the token 200."""

    def token_bytes(self, token: int) -> bytes:
        if token == 200:
            raise OverflowError("token 200")
        return super().token_bytes(token)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_decoder_fails_its_request_only(stream):
    served = serve(qwen3_model(), tokenizer=FailingTokenizer())
    served.engine.add(request("bad", [1], logit_bias={200: 1000.0}, max_tokens=5, stream=stream))
    served.engine.add(request("good", [1], logit_bias={97: 1000.0}, max_tokens=5))
    outputs = collect(served.engine)
    bad, good = outputs["bad"].completions[0], outputs["good"].completions[0]
    assert bad.finish_reason == "error" and "token 200" in bad.error
    assert (good.finish_reason, good.text) == ("length", "aaaaa")
    assert (served.engine.counters.requests_failed, served.engine.counters.requests_finished) == (
        1,
        1,
    )
    assert EOS not in good.token_ids


def test_engine_stop_strings_wait_for_min_tokens():
    served = serve(qwen3_model())
    params = {
        "temperature": 0.0,
        "logit_bias": {97: 1000.0},
        "max_tokens": 20,
        "stop": ("aa",),
        "min_tokens": 5,
    }
    completion = run(served.engine, [request("r", [1], **params)])["r"].completions[0]
    assert len(completion.token_ids) == 6, "the first token after the minimum completes a match"
    assert completion.stop_reason == "aa"


def test_a_stop_string_counts_behind_the_reasoning():
    """Opened by the prompt, or by the text; a text without reasoning is checked from its start."""
    cases = [
        (("", "</r>"), b"Q: x</r>a Q: b", "Q: x</r>a "),
        (("<r>", "</r>"), b" <r>Q: x</r>a Q: b", " <r>Q: x</r>a "),
        (("<r>", "</r>"), b"<Q: x</r>a Q: b", "<"),
        (("<r>", "</r>"), b"Q: x", ""),
        (("", "</r>"), b"Q: xQ:</r>: b", "Q: xQ:</r>: b"),
    ]
    for eager in (True, False):
        for reasoning, data, expected in cases:
            text = OutputText(
                ByteTokenizer().detokenizer,
                ("Q:",),
                include_stop=False,
                eager=eager,
                reasoning=reasoning,
            )
            shown, matched = feed(text, data)
            assert text.finish() == expected == "".join(shown) + text.take(), data
            assert matched == (None if expected == data.decode() else "Q:")
