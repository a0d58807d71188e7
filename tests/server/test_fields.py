"""docs/serving.md#every-field-of-a-request tells the truth: each field of the table is sent to a server. And what
single fields do."""

import runpy

import pytest

from mlx_parallm.server.protocol.fields import FIELDS
from tests.docs.docs_blocks import ROOT
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server

DOCS = runpy.run_path(str(ROOT / "scripts" / "generate_field_docs.py"))
MINIMAL = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
ROUTES = pytest.mark.parametrize("route", list(MINIMAL))


@pytest.fixture(scope="module")
def fake(tiny_tokenizer):
    with running_server(FakeEngine(), tiny_tokenizer) as server:
        yield server


def test_the_page_is_current():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert page == DOCS["render"](page), "run .venv/bin/python scripts/generate_field_docs.py"


@ROUTES
def test_every_field_of_the_installed_openai_package_was_decided_on(route):
    """A new release with a new field fails here: put the name into
    server/protocol/fields.toml."""
    assert len(DOCS["OPENAI"][route]) > 15
    decided = {*DOCS["BODIES"][route].model_fields, *FIELDS.harmless, *FIELDS.refused}
    assert DOCS["OPENAI"][route] - decided == set()


@ROUTES
def test_each_field_fares_as_the_table_says(fake, route):
    with fake.http() as http:
        for name in DOCS["names"]():
            body = MINIMAL[route]
            if name in body:
                continue
            assert http.post(route, json=body | {name: None}).status_code == 200, name
            answer = http.post(route, json=body | {name: {"not": "neutral"}})
            if DOCS["fate"](route, name) == DOCS["WITHOUT"]:
                assert answer.status_code == 200, name
            elif DOCS["fate"](route, name) == DOCS["REJECTED"]:
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
                for neutral in FIELDS.refused[name][0] if name in FIELDS.refused else ():
                    assert http.post(route, json=body | {name: neutral}).status_code == 200, name


def test_special_tokens_are_shown_on_demand(client, tiny_tokenizer):
    special = max(tiny_tokenizer.special_ids - tiny_tokenizer.eos_token_ids)
    fields = {"model": "default", "prompt": "a", "max_tokens": 3, "logit_bias": {str(special): 100}}
    assert client.completions.create(**fields).choices[0].text == ""
    for stream in (False, True):
        shown = client.completions.create(
            **fields, stream=stream, extra_body={"skip_special_tokens": False}
        )
        texts = [part.choices[0].text for part in (shown if stream else [shown])]
        assert "".join(texts) == tiny_tokenizer.token_text(special) * 3


def test_a_prompt_is_cut_to_its_last_tokens(client, server):
    ask = {"model": "default", "max_tokens": 4, "temperature": 0}
    extra = {"return_token_ids": True}
    whole = client.completions.create(prompt=[5, 6, 7], **ask, extra_body=extra).choices[0]
    cut = client.completions.create(
        prompt=[[9, 9, 5, 6, 7], [6, 7]], **ask, extra_body=extra | TRUNCATED
    ).choices
    assert cut[0].prompt_token_ids == [5, 6, 7] and cut[0].token_ids == whole.token_ids
    assert cut[1].prompt_token_ids == [6, 7]
    longest = [9] * server.engine.max_model_len
    chat = {
        "model": "default",
        "messages": [{"role": "user", "content": "12 + 7 ="}],
        "max_tokens": 1,
    }
    assert (
        len(client.chat.completions.create(**chat, extra_body=extra | TRUNCATED).prompt_token_ids)
        == 3
    )
    assert (
        client.completions.create(prompt=longest, **ask, extra_body=TRUNCATED).usage.prompt_tokens
        == 3
    )


TRUNCATED = {"truncate_prompt_tokens": 3}
