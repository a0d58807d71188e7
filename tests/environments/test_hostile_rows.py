"""Rows of every wrong form: one line that names the file and the row, never a traceback of the
tokenizer or of json."""

from pathlib import Path

import pytest

from mlx_parallm.environments.dataset_rows import json_lines
from mlx_parallm.errors import ConfigError

ROWS = {
    "no JSON": (b"{", "not JSON"),
    "no UTF-8": (b"\xff\xfe", "cannot be read"),
    "a list": (b"[1]", "expected one JSON object"),
    "half a character": (b'{"prompt": "\\ud800"}', "surrogate"),
    "half a character as a name": (b'{"\\uDFFF": 1}', "surrogate"),
    "half a character far inside": (
        b'{"messages": [{"content": [{"text": "\\udbff"}]}]}',
        "surrogate",
    ),
    "lists within lists": (
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        "no JSON that can be read",
    ),
    "a number of 5,000 digits": (b'{"n": ' + b"9" * 5000 + b"}", "no JSON that can be read"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_a_wrong_form_is_named(tmp_path: Path, name: str) -> None:
    content, words = ROWS[name]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n' + content + b"\n")
    with pytest.raises(ConfigError, match=words) as error:
        list(json_lines(file, "data.path"))
    assert str(file) in str(error.value) and len(str(error.value)) < 500


def test_whole_pairs_are_characters(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "\\ud83d\\ude00"}\n')
    assert [row for _, row in json_lines(file, "data.path")] == [{"prompt": "\U0001f600"}]
