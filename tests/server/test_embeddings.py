"""/v1/embeddings with the real client: the numbers of an independent forward, both encodings,
every kind of input."""

import base64
from typing import Any

import mlx.core as mx
import numpy as np
import openai
import pytest
from openai import OpenAI

from mlx_parallm.models.loading import load_model
from mlx_parallm.models.tokenizer import Tokenizer
from tests.conftest import TINY, TINY_CONTEXT
from tests.server.serving import RunningServer

TEXTS = ["Sort: hgfa", "a", "Sort: zyxw " * 12]  # one token; more than a chunk


@pytest.fixture(scope="module")
def hidden(tiny_tokenizer: Tokenizer) -> list[np.ndarray]:
    """[T, D] of each text: the blocks and the final norm of a plain mlx-lm tree, all at once."""
    model: Any = load_model(TINY).model
    return [
        np.array(model.model(mx.array([tiny_tokenizer.encode(text)]))[0].astype(mx.float32))
        for text in TEXTS
    ]


def embed(client: OpenAI, texts: Any = TEXTS, **fields: Any) -> np.ndarray:
    extra = {
        key: fields.pop(key)
        for key in ("pooling", "normalize", "truncate_prompt_tokens")
        if key in fields
    }
    answer = client.embeddings.create(model="default", input=texts, extra_body=extra, **fields)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data])


def test_the_vectors_are_the_pooled_hidden_states(client: OpenAI, hidden: list[np.ndarray]) -> None:
    mean, last = np.array([h.mean(axis=0) for h in hidden]), np.array([h[-1] for h in hidden])
    assert np.abs(mean - last)[0].max() > 0.1, "or the test could not tell them apart"
    np.testing.assert_allclose(embed(client, normalize=False), mean, atol=2e-4)
    np.testing.assert_allclose(embed(client, normalize=False, pooling="last"), last, atol=2e-4)
    unit = mean / np.linalg.norm(mean, axis=1, keepdims=True)
    np.testing.assert_allclose(embed(client), unit, atol=1e-4)
    short = mean[:, :16] / np.linalg.norm(mean[:, :16], axis=1, keepdims=True)
    np.testing.assert_allclose(embed(client, dimensions=16), short, atol=1e-4)


def test_both_encodings_ids_and_usage(
    client: OpenAI, server: RunningServer, tiny_tokenizer: Tokenizer
) -> None:
    """The client asks for base64 by itself, and decodes it."""
    floats = embed(client, encoding_format="float")
    np.testing.assert_array_equal(floats.astype(np.float32), embed(client).astype(np.float32))
    ids = [tiny_tokenizer.encode(text) for text in TEXTS]
    np.testing.assert_array_equal(embed(client, ids, encoding_format="float"), floats)
    np.testing.assert_array_equal(embed(client, ids[0], encoding_format="float"), floats[:1])
    np.testing.assert_array_equal(embed(client, TEXTS[0], encoding_format="float"), floats[:1])
    cut = embed(client, ids[0], encoding_format="float", truncate_prompt_tokens=1)
    np.testing.assert_array_equal(cut, embed(client, ids[0][-1:], encoding_format="float"))
    with server.http() as http:
        answer = http.post(
            "/v1/embeddings", json={"input": TEXTS[1], "encoding_format": "base64", "user": "me"}
        ).json()
    raw = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    np.testing.assert_array_equal(raw, floats[1].astype(np.float32))
    assert answer["object"] == "list" and answer["usage"] == {
        "prompt_tokens": len(ids[1]),
        "total_tokens": len(ids[1]),
    }


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [5] * (TINY_CONTEXT + 1)}, None),
        ({"input": "a", "dimensions": 4096}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": ["a"] * 1025}, "input"),
    ],
)
def test_what_cannot_be_embedded_is_a_400(
    server: RunningServer, fields: dict[str, Any], param: str | None
) -> None:
    with server.http() as http:
        answer = http.post("/v1/embeddings", json=fields)
    assert answer.status_code == 400 and (
        param is None or answer.json()["error"]["param"] == param
    ), answer.text


def test_an_unknown_model_is_a_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nope", input="a")
