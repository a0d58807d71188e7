"""Hostile clients of Tinker's API: what they send is bounded, and so is what they can pile up."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mlx_parallm.errors import RequestError
from mlx_parallm.faces.tinker import service, sessions, wire
from mlx_parallm.faces.tinker.bodies import CreateSessionBody
from mlx_parallm.faces.tinker.checkpoints import Checkpoints, TinkerPath
from mlx_parallm.faces.tinker.config import TinkerConfig
from mlx_parallm.faces.tinker.service import TinkerService
from mlx_parallm.faces.tinker.sessions import Sampler
from mlx_parallm.server.errors import ServerBusyError
from tests.server.serving import RunningServer
from tests.tinker.serving import API, JSON_BODY, TOKENS, WireClient


@pytest.fixture
def client(server: RunningServer) -> Iterator[WireClient]:
    with server.http(headers={"X-API-Key": "tml-local"}) as http:
        made = WireClient(http)
        yield made
        made.post(f"sessions/{made.session}/finish", reason={"type": "success"})


HOSTILE: dict[str, dict[str, Any]] = {
    "asample": {
        "sampling_session_id": "s",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": ["a"]}]},
    },
    "asample of chunks": {"sampling_session_id": "s", "prompt": {"chunks": [{}]}},
    "asample with stops": {"prompt": {"chunks": []}, "sampling_params": {"stop": [[]]}},
    "create_session": {"tags": [1]},
    "create_session with metadata": {"user_metadata": {"a": ["b"]}},
    "retrieve_futures": {"target": {"sampling_session_id": "s"}, "retrieved_request_ids": [1]},
    "save_weights_external": {"model_id": "m", "age_encryption_recipients": [1]},
    "create_session with an unknown field": {"more": [1]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_of_wrong_items_is_given_up_at_the_first(client: WireClient, name: str) -> None:
    """Of each list that a body holds, with 30,000 items: a fault of each of them would take
    fifty megabytes. Beside the reported ones: chunks, metadata, unknown fields, recipients of an
    encryption."""

    def long(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: long(item) for key, item in value.items()}
        return (
            [long(item) for item in value] * 30_000
            if isinstance(value, list) and value != [[]]
            else value
        )

    body = HOSTILE[name]
    grown = {key: long(value) for key, value in body.items()}
    if name == "asample":  # one list of one chunk, whose tokens are many
        grown = {
            **body,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": ["a"] * 30_000}]},
        }
    if name == "asample with stops":
        grown = {**body, "sampling_params": {"stop": [[]] * 30_000}}
    answer = client.http.post(
        f"{API}/{name.split()[0]}", content=json.dumps(grown), headers=JSON_BODY
    )
    assert answer.status_code == 400 and len(answer.text) < 3000, answer.text[:300]


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"\x1a\x00" * 20_000, "16384 entries of 'data'"),  # empty datums
        # chunks of one datum, within its limit: no datum is whole
        (b"\x1a\xc0\x3e" + b"\x0a\x00" * 4000, "data"),
        (b"\x1a\xd0\xf8\x01" + b"\x0a\x00" * 15_912, "4096 entries of 'model_input'"),
        (b"\x2a\x00" * 100, "64 entries of 'loss_fn_config'"),
        (b"\x1a\x2c\x12\x2a\x12\x28\x22\x26" + b"\x01" * 38, "32 bytes of 'shape'"),
        (b"\x48\x01" * ((1 << 20) + 1), "protobuf fields"),  # a field that nobody knows
        (b"\x1b\x1c" * 10, "not a protobuf"),  # groups
        (b"\x1a\xff", "not a protobuf"),
    ],
    ids=["datums", "cut", "chunks", "config", "shape", "fields", "groups", "short"],
)
def test_messages_are_counted_before_they_are_made(body: bytes, named: str) -> None:
    with pytest.raises(RequestError) as error:
        request = wire.read_forward_backward(body)
        for number, datum in enumerate(request.data):
            wire.read_datum(datum, f"data {number}")
    assert named in str(error.value)


def test_a_small_body_that_unpacks_to_millions_of_datums_is_refused_by_their_number(
    client: WireClient,
) -> None:
    packed = zstandard.compress(b"\x1a\x00" * 15_000_000)
    answer = client.http.post(
        f"{API}/forward_backward", content=packed, headers={"Content-Encoding": "zstd"}
    )
    assert answer.status_code == 400 and "16384 entries of 'data'" in answer.text


async def test_what_clients_pile_up_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions, sampling sessions, requests for models, copies of a client, events that nobody
    reads."""
    absent: Any = None
    made = TinkerService(
        TinkerConfig(), absent, absent, absent, absent, absent, names=("m",), tokenizer_id="m"
    )
    for name, most in {"MOST_SESSIONS": 3}.items():
        monkeypatch.setattr(service, name, most)
    for name, most in {"MOST_SAMPLERS": 3, "MOST_LINES": 2, "KEPT_EVENTS": 4}.items():
        monkeypatch.setattr(sessions, name, most)
    kept = [made.create_session(CreateSessionBody()) for _ in range(3)]
    with pytest.raises(ServerBusyError, match="3 sessions"):
        made.create_session(CreateSessionBody())
    kept[0].last_seen -= service.GONE_AFTER_S + 1
    made.create_session(CreateSessionBody())
    assert len(made.sessions) == 3 and kept[0].session_id not in made.sessions
    samplers = [Sampler(f"{kept[1].session_id}:sample:{number}", "m") for number in range(5)]
    for number, sampler in enumerate(samplers):
        made.add_sampler(kept[1], sampler)
        if number == 1:
            samplers[0].line(0).running = 1  # its samples continue
    assert [made.sampling.get(each.sampler_id) is not None for each in samplers] == [
        True,
        False,
        False,
        True,
        True,
    ]
    assert len(kept[1].samplers) == 3
    samplers[0].line(1)
    with pytest.raises(ServerBusyError, match="copies"):
        samplers[0].line(2)
    line = samplers[0].line(0)
    for number in range(6):
        line.add({"n": number})
    assert [event["n"] for event in line.events] == [2, 3, 4, 5] and line.first == 2


def test_metadata_and_names_have_a_size(client: WireClient) -> None:
    client.post("create_session", status=400, tags=[], user_metadata={"a": "x" * 100_000})
    client.post("create_session", status=400, tags=[], user_metadata={"a": [{}] * 70_000})
    client.post("create_session", status=400, tags=["x"] * 100)
    client.post("create_session", tags=[], user_metadata={"a": "x" * 60_000})


def test_the_alternatives_of_a_sample_are_bounded(client: WireClient) -> None:
    """Each factor is small, the product is not; and what runs counts too."""
    base = client.post("get_info", model_id=client.create_model())["model_name"]
    body = {"session_id": client.session, "sampling_session_seq_id": 7, "base_model": base}
    sampler = client.post("create_sampling_session", **body)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": TOKENS}]}
    many = {
        "num_samples": 1024,
        "topk_sample_logprobs": 1024,
        "sampling_params": {"max_tokens": 100},
    }
    refused = client.post("asample", status=400, sampling_session_id=sampler, prompt=prompt, **many)
    assert "104857600 numbers in one answer" in str(refused)
    client.post(
        "asample",
        status=400,
        sampling_session_id=sampler,
        prompt=prompt,
        **many | {"sampling_params": {}},
    )


def test_a_promise_cannot_be_guessed(client: WireClient) -> None:
    ids = [
        client.create_model(number) and client.optim_step(client.create_model(number), 1)
        for number in range(2)
    ]
    first, second = (each["request_id"] for each in ids)
    assert (
        first.partition("-")[0] == second.partition("-")[0] and len(first.partition("-")[2]) == 32
    )
    assert first != second


def test_a_full_disk_refuses_a_checkpoint_in_words(tmp_path: Path) -> None:
    """Too little free space; and a directory that cannot be written, as a removed run directory
    behind a file."""
    made = Checkpoints(tmp_path / "a", min_free_gb=1e9)
    path = TinkerPath("m:train:0", "weights", "a")
    with pytest.raises(RequestError, match="free some space"):
        made.save(path, lambda directory: None)
    (tmp_path / "b").write_text("")
    with pytest.raises(RequestError, match="cannot be written"):
        Checkpoints(tmp_path / "b", min_free_gb=0).save(path, lambda directory: None)
