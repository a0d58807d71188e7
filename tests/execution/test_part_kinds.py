"""A kind of message part beside text is a line of KINDS: a made-up one is read from every face, and
refused by name where a model does not read it."""

from typing import Any

import pytest

from mlx_parallm.environments.episode_state import shown_text
from mlx_parallm.environments.row_forms import known_row
from mlx_parallm.errors import ConfigError, RequestError
from mlx_parallm.execution.chat_messages import read_messages
from mlx_parallm.execution.parts import kinds
from mlx_parallm.execution.parts.kind import PartKind
from mlx_parallm.execution.prompt_images import without_sources
from mlx_parallm.faces.trl.dataset_argument import DataRows
from mlx_parallm.faces.trl.rollouts import check_rows
from mlx_parallm.rl_training.data.leftovers import Leftovers
from mlx_parallm.server.messages.body import CountTokensBody
from mlx_parallm.server.responses.items import chat_messages

URL = "data:audio/wav;base64,AA"
OPENAI = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
BLOCK = {"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": "AA"}}
HEARD = {"type": "text", "text": "Heard: "}


def _source(part: Any, where: str) -> Any:
    held = part.get("input_audio") or part.get("audio")
    if not held:
        raise RequestError(f"{where}: a sound needs one of input_audio, audio")
    return held


SOUND = PartKind(
    "audio",
    "sounds",
    types=("input_audio", "audio"),
    fields=("input_audio", "audio"),
    source=_source,
    columns=("clips",),
    calls=("sound_generation_call",),
)


@pytest.fixture(autouse=True)
def sounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, SOUND))


def _user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def _of_openai(shown: kinds.Shown) -> Any:
    return read_messages([_user(HEARD, OPENAI)], shown=shown)[0]["content"]


def _of_responses(shown: kinds.Shown) -> Any:
    items = [{"type": "message", **_user({**HEARD, "type": "input_text"}, OPENAI)}]
    return chat_messages(items, shown=shown)[0]["content"]


def _of_messages(shown: kinds.Shown) -> Any:
    body = CountTokensBody.model_validate({"messages": [_user(HEARD, BLOCK)]})
    return body.to_chat(shown=shown).template_messages(shown=shown)[0]["content"]


@pytest.mark.parametrize("read", [_of_openai, _of_responses, _of_messages])
def test_it_is_read_where_the_model_reads_it_and_refused_elsewhere(read: Any) -> None:
    text, sound = read(["image", "audio"])
    assert text == HEARD and sound["type"] == "audio"
    assert sound.get("input_audio") == OPENAI["input_audio"] or sound["audio"] == URL
    assert without_sources([_user(text, sound)]) == [_user(HEARD, {"type": "audio"})]
    for shown in (["image"], []):
        with pytest.raises(RequestError, match="audio"):
            read(shown)


def test_rows_and_texts_for_people_have_it() -> None:
    valued = {"messages": [_user({"type": "audio", "value": URL}, {"type": "text", "value": "?"})]}
    row, _ = known_row(valued, "row 1")
    assert row["messages"][0]["content"][0] == {"type": "audio", "audio": URL}
    asked = {"responses_create_params": {"input": [_user(HEARD, OPENAI)]}}
    prompt = known_row(asked, "row 1")[0]["prompt"]
    assert shown_text(prompt[0]["content"]) == "Heard: ⟦audio⟧"
    assert kinds.unread_in(prompt, ["image"]) == "sounds" and not kinds.unread_in(prompt, ["audio"])
    asked = {"responses_create_params": {"input": [_user(HEARD, {"type": "input_audio"})]}}
    with pytest.raises(ConfigError, match="needs one of input_audio"):
        known_row(asked, "row 1")
    assert kinds.made_by("sound_generation_call", "AA") == [{"type": "audio", "audio": "AA"}]
    with pytest.raises(ConfigError, match="takes no sounds"):
        check_rows(DataRows(({"prompt": "a", "clips": ["AA"]},), False), "rows")
    leftovers = Leftovers("rows.jsonl")
    leftovers.count({"prompt": prompt, "clips": []}, ("prompt",), None, "sft", chat=True)
    assert not leftovers._fields and not leftovers._columns
