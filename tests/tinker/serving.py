"""A real server with Tinker's routes over the tiny model, and a client that speaks the wire
format without the SDK."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from mlx_parallm.config.load import load_config
from mlx_parallm.engine.starting import start_engine
from mlx_parallm.faces.tinker import wire, wire_pb2
from mlx_parallm.faces.tinker.leaf import tinker_part
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.system.serve_priority import Turns
from mlx_parallm.weights import SharedWeights
from tests.server.serving import RunningServer, running_server

API = "/api/v1"
TOKENS = [1, 40, 41, 42, 43, 44]
DATUM = {"tokens": TOKENS, "target_tokens": [40, 41, 42, 43, 44, 2], "weights": [0, 0, 1, 1, 1, 1]}
JSON_BODY = {"Content-Type": "application/json"}
CONFIG = """
[tinker]
enabled = true
directory = "{directory}"
max_models = 4
kept_samplers = 3
max_samples = 64
[server]
max_model_len = 256
"""


@contextmanager
def tinker_server(directory: Path, **deps: Any) -> Iterator[RunningServer]:
    """`deps`: fields of ServerDeps."""
    config = load_config(None, text=CONFIG.format(directory=directory))
    part = tinker_part(config)
    assert part is not None
    loaded = load_model(config.model)
    weights = SharedWeights(loaded.model, keep_versions=1)
    part.loaded(loaded, Turns())
    engine = start_engine(
        config.server,
        loaded,
        weights,
        lambda: load_tokenizer(loaded.path, config.model),
        base=config.model.base_path,
        deterministic=False,
        chats_first=False,
        adapters={},
        main_adapter=None,
    )
    part.opened(weights, engine.thread.client)
    try:
        with running_server(
            engine.thread.client,
            load_tokenizer(loaded.path, config.model),
            routers=[part.router],
            **deps,
        ) as server:
            yield server
    finally:
        part.close()
        engine.thread.stop()


def tensor(target: Any, values: Any, dtype: int) -> None:
    array = np.asarray(values, "<f4" if dtype == wire.FLOAT32 else "<i8")
    target.dtype, target.dense = dtype, array.tobytes()
    target.shape.extend(array.shape)


def request_of(
    data: Sequence[Mapping[str, Any]],
    loss: str,
    *,
    model_id: str = "",
    seq_id: int = 0,
    **fields: Any,
) -> bytes:
    """A ForwardBackwardRequest; a datum is {"tokens", "target_tokens", other inputs}."""
    request = wire_pb2.ForwardBackwardRequest()
    request.model_id, request.seq_id, request.loss_fn = model_id, seq_id, loss
    request.forward_only = fields.pop("forward_only", False)
    for key, value in fields.pop("config", {}).items():
        request.loss_fn_config_v2[key].number = value
    for entry in data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(entry["tokens"], "<i4").tobytes()
        for name, values in entry.items():
            if name == "spans":
                for sequence_id, offset, length in values:
                    span = datum.loss_fn_input_spans.add()
                    place = span.sampled_tokens if sequence_id else span.prompt_tokens
                    place.sequence_id, place.offset, place.length = sequence_id, offset, length
            elif name != "tokens":
                kind = wire.INT64 if name == "target_tokens" else wire.FLOAT32
                tensor(datum.loss_fn_inputs[name], values, kind)
    body: bytes = request.SerializeToString()
    return body


class WireClient:
    """Knows a session and a model; raises for a status that is not expected."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http
        self.session = self.post("create_session", tags=[], sdk_version="0", type="create_session")[
            "session_id"
        ]
        self.seq = 0

    def post(self, path: str, /, *, status: int = 200, **body: Any) -> Any:
        answer = self.http.post(f"{API}/{path}", content=json.dumps(body), headers=JSON_BODY)
        assert answer.status_code == status, (path, answer.status_code, answer.text)
        return answer.json()

    def result(self, promise: Mapping[str, Any]) -> Any:
        """The result of a promise: JSON, or a message by the promise's media type."""
        answer = self.http.post(
            f"{API}/retrieve_future", json={"request_id": promise["request_id"]}
        )
        assert answer.status_code == 200, answer.text
        return answer.content if answer.headers["content-type"] == wire.PROTOBUF else answer.json()

    def create_model(self, number: int = 0, **lora: Any) -> str:
        base = self.http.get(f"{API}/get_server_capabilities").json()["supported_models"][0][
            "model_name"
        ]
        body = {"session_id": self.session, "model_seq_id": number, "base_model": base}
        made = self.result(
            self.post("create_model", **body, lora_config={"rank": 4, "seed": 1} | lora)
        )
        assert "error" not in made, made
        return str(made["model_id"])

    def send(
        self, model: str, seq_id: int, data: Sequence[Mapping[str, Any]], loss: str, **fields: Any
    ) -> Any:
        """The promise of a forward_backward."""
        body = request_of(data, loss, model_id=model, seq_id=seq_id, **fields)
        answer = self.http.post(
            f"{API}/forward_backward", content=body, headers={"Content-Type": wire.PROTOBUF}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def output(self, promise: Mapping[str, Any]) -> Any:
        """A ForwardBackwardOutput."""
        message = wire_pb2.ForwardBackwardOutput()
        body = self.result(promise)
        assert isinstance(body, bytes), body
        message.ParseFromString(body)
        return message

    def optim_step(self, model: str, seq_id: int, **adam: Any) -> Any:
        return self.post("optim_step", model_id=model, seq_id=seq_id, adam_params=adam)

    def live_sampler(self, model: str, seq_id: int, number: int, **fields: Any) -> str:
        body = {
            "model_id": model,
            "seq_id": seq_id,
            "sampling_session_seq_id": number,
            "kind": "snapshot",
        } | fields
        return str(
            self.result(self.post("save_weights_for_sampler", **body))["sampling_session_id"]
        )

    def sample(
        self, sampler: str, seq_id: int, tokens: Sequence[int], *, status: int = 200, **fields: Any
    ) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
        params = fields.pop("params", {})
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "prompt": prompt,
            "sampling_params": params,
        }
        return self.post("asample", status=status, **body, **fields)

    def samples(self, promise: Mapping[str, Any]) -> Any:
        """A SampleResponse."""
        message = wire_pb2.SampleResponse()
        body = self.result(promise)
        assert isinstance(body, bytes), body
        message.ParseFromString(body)
        return message


def logprobs_of(output: Any) -> np.ndarray:
    """Of all datums, one after the other."""
    return np.concatenate(
        [np.frombuffer(r.fields["logprobs"].data, "<f4") for r in output.loss_fn_outputs]
    )
