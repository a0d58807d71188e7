"""Two companions that record travel side by side: each has a column of its own in answers, whole
and streamed, of sampled tokens and of prompts, also of a prompt that the prefix cache holds."""

from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.engine.companions.companion import (
    EngineCompanions,
    PlaceholderReader,
    SequenceRecord,
    TokenRecorder,
)
from mlx_parallm.engine.live_requests import Finished, StreamDelta
from tests.engine.helpers import qwen3_model, request, run, serve

PROMPT = [5, 9, 2, 7, 8, 1, 1, 3, 3, 6, 2, 4] * 3


class Noting(nn.Module):
    """The norm before the head, which notes the hidden states of each forward."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self._hidden = norm, []

    def __call__(self, hidden: mx.array) -> mx.array:
        self._hidden[:] = [hidden.reshape(-1, hidden.shape[-1])]
        return self.norm(hidden)


class Place(SequenceRecord):
    """The place of a number of each token's hidden state."""

    token_bytes = 1

    def __init__(self, field: str) -> None:
        super().__init__()
        self._field = field

    def fields(self, since, prompt):
        return {self._field: (bytes(self.data[since:]).hex(), [(at, p.hex()) for at, p in prompt])}


class Places(TokenRecorder):
    def __init__(self, noting: Noting, field: str, place, *, prompts: bool = True) -> None:
        self._noting, self._field, self._place = noting, field, place
        self.records_prompts = prompts

    def record(self) -> Place:
        return Place(self._field)

    @contextmanager
    def recording(self):
        yield lambda: self._place(self._noting._hidden[0], axis=-1).astype(mx.uint8)


def engine_of(only: str = "", prompts: tuple[str, ...] = ("stop_reason", "error_code")):
    model = qwen3_model()
    model.model.norm = noting = Noting(model.model.norm)
    places = {"stop_reason": mx.argmax, "error_code": mx.argmin}
    made = [
        Places(noting, field, place, prompts=field in prompts)
        for field, place in places.items()
        if only in (field, "")
    ]
    return serve(model, companions=made, prefill_chunk=16).engine


def test_columns_of_two_companions_do_not_mix() -> None:
    params = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    asked = [request(str(n), PROMPT[n:], **params) for n in range(3)]
    both = run(engine := engine_of(), asked)
    for field in ("stop_reason", "error_code"):
        alone = run(engine_of(field), asked)
        for name, output in both.items():
            [completion] = output.completions
            sampled, prompt = getattr(completion, field)
            assert len(sampled) == 2 * 5
            assert [(at, len(part) // 2) for at, part in prompt] == [
                (0, len(PROMPT) - int(name) - 1)
            ]
            assert (sampled, prompt) == getattr(alone[name].completions[0], field)
    again = run(engine, [request("again", PROMPT, **params)])["again"].completions[0]
    assert again.cached_tokens > 0
    assert again.error_code == both["0"].completions[0].error_code, "from the prefix cache"
    engine.add(request("streamed", PROMPT, stream=True, **params))
    events = []
    while engine.has_work:
        events += engine.step()
    parts = [event.delta.error_code for event in events if isinstance(event, StreamDelta)]
    [end] = [event for event in events if isinstance(event, Finished)]
    whole = end.output.completions[0].error_code
    assert ("".join(part[0] for part in parts), parts[0][1]) == whole == again.error_code
    assert not any(part[1] for part in parts[1:]), "the prompt's goes with the first token"


def test_a_companion_without_prompts_gets_none_beside_one_that_has_them() -> None:
    params = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
    engine = engine_of(prompts=("error_code",))
    [completion] = run(engine, [request("0", PROMPT, **params)])["0"].completions
    assert len(completion.error_code[1]) == 1 and not completion.stop_reason[1]
    assert len(completion.stop_reason[0]) == 2 * 5


def test_one_companion_alone_may_have_placeholders() -> None:
    """The second one's would be read as words."""

    class Shown(PlaceholderReader):
        placeholder = 3

        def carry(self, request):
            return None

        def read(self, *pieces):
            raise AssertionError("nothing is read")

    with pytest.raises(AssertionError, match="two companions"):
        EngineCompanions([Shown(), Shown()])


@pytest.mark.parametrize("kind", [PlaceholderReader, TokenRecorder])
def test_a_companion_that_lacks_a_method_is_not_made(kind: type) -> None:
    wanted = kind.__abstractmethods__
    for left_out in sorted(wanted):
        named = dict.fromkeys(wanted - {left_out}, lambda self, *given: None)
        with pytest.raises(TypeError, match=left_out):
            type("Third", (kind,), named)()
