"""Text streamed = text not streamed: any tokens (half characters too), any stop strings, any cut
of the stream."""

import json
from functools import cache
from itertools import pairwise

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.server.sse import DONE, event

PIECES = [
    "a",
    "b",
    "ab",
    "é",
    "€",
    "🙂",
    "\n\n",
    "data: ",
    "END",
    " ",
    "\\",
    '"',
    "\u2028",
    "<|x|>",
]


@st.composite
def texts_with_stops(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    """A text of awkward pieces, and stop strings most of which occur in it, across whatever
    borders there are."""
    text = "".join(draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=25)))
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text) - 1))
        stops.append(text[start : start + draw(st.integers(1, 6))])
    stops += draw(st.lists(st.sampled_from(PIECES), max_size=1))
    return text, tuple(stops)


def generated(tokenizer, tokens, stops, include, cuts, eager=True):
    """(pieces that were shown at the cuts, whole text, stop string, tokens used) as the engine
    goes about it."""
    text = OutputText(tokenizer.detokenizer, stops, include_stop=include, eager=eager)
    shown, matched, used = [], None, 0
    for position, token in enumerate(tokens):
        matched = text.add(token)
        used += 1
        if position in cuts:
            shown.append(text.take())
        if matched is not None:
            break
    whole = text.finish()
    return [*shown, text.take()], whole, matched, used


def naive(tokenizer, tokens, stops, include):
    """The definition: token by token the text so far, until a stop string is in it; then all
    before its first place."""
    for used in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:used])
        complete = text.rstrip("\ufffd")  # half a character is none yet
        found = [(complete.find(stop), stop) for stop in stops if stop in complete]
        if found:
            at, stop = min(found, key=lambda match: (match[0], stops.index(match[1])))
            return complete[: at + len(stop) * include], stop, used
    return tokenizer.decode(tokens), None, len(tokens)


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(texts_with_stops(), st.booleans(), st.sets(st.integers(0, 60)), st.integers(1, 4))
def test_streamed_is_what_is_not_streamed(tiny_tokenizer, text_and_stops, include, cuts, size):
    text, stops = text_and_stops
    data = text.encode()
    # Pieces of a few bytes each become tokens of their own: characters are cut wherever it hurts.
    tokens = [
        token
        for start in range(0, len(data), size)
        for token in _tokens_of(tiny_tokenizer, data[start:][:size])
    ]
    shown, whole, matched, used = generated(tiny_tokenizer, tokens, stops, include, cuts)
    assert "".join(shown) == whole
    assert (whole, matched, used) == naive(tiny_tokenizer, tokens, stops, include)
    all_at_once = generated(tiny_tokenizer, tokens, stops, include, set(), eager=False)
    assert all_at_once[1:] == (whole, matched, used)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_token_ids_stream_to_the_text_of_all_of_them(tiny_tokenizer, data):
    """Invalid UTF-8, special tokens, whatever a model may sample."""
    tokens = data.draw(st.lists(st.integers(0, tiny_tokenizer.vocab_size - 1), max_size=40))
    cuts = data.draw(st.sets(st.integers(0, 40)))
    shown, whole, _, _ = generated(tiny_tokenizer, tokens, (), False, cuts)
    assert "".join(shown) == whole == tiny_tokenizer.decode(tokens)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.text(max_size=12), min_size=1, max_size=8),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_events_survive_the_wire_whatever_their_text_and_wherever_it_is_cut(texts, cuts):
    """No text may look like the end of an event; a client that reads any pieces of the bytes
    gets every text back."""
    valid = [text for text in texts if _is_unicode(text)]
    wire = b"".join(event({"text": text}) for text in valid) + DONE
    edges = [0, *sorted(min(cut, len(wire)) for cut in cuts), len(wire)]
    buffer, received = b"", []
    for start, stop in pairwise(edges):
        buffer += wire[start:stop]
        *events, buffer = buffer.split(b"\n\n")
        received += [line.removeprefix(b"data: ") for line in events]
    assert buffer == b"" and received.pop() == b"[DONE]"
    assert [json.loads(line)["text"] for line in received] == valid


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _tokens_of(tokenizer, data: bytes) -> list[int]:
    """The single-byte tokens of these bytes."""
    return [_byte_tokens(tokenizer)[byte] for byte in data]


@cache
def _byte_tokens(tokenizer) -> dict[int, int]:
    ordinary = [
        token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids
    ]
    return {raw[0]: token for token in ordinary if len(raw := tokenizer.token_bytes(token)) == 1}
