"""server.generation_config: the sampling that a model's author recommends, for requests that say
nothing."""

import json
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm import daemon
from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.weights import SharedWeights
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server
from tests.tiny_models import save_checkpoint

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
DEFAULTS |= {"repetition_penalty": 1.1, "max_tokens": 7}
HI = [{"role": "user", "content": "hi"}]


class Recording(FakeEngine):
    """Keeps the parameters of the last request."""

    async def generate_many(self, requests: list[Any]) -> list[Any]:
        self.params = requests[0].params
        return await super().generate_many(requests)


@pytest.fixture(scope="module")
def server(tiny_tokenizer):
    with running_server(Recording(), tiny_tokenizer, sampling_defaults=DEFAULTS) as server:
        yield server


def sampled(server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with server.http() as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    server.engine.answer = answer.json()
    return {name: getattr(server.engine.params, name) for name in DEFAULTS}


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", {"messages": HI}, "max_tokens"),
        ("/v1/chat/completions", {"messages": HI}, "max_completion_tokens"),
        ("/v1/responses", {"input": "hi"}, "max_output_tokens"),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}, "max_tokens"),
        ("/v1/completions", {"prompt": "hi"}, "max_tokens"),
    ],
)
def test_what_a_request_leaves_out_is_the_models(server, path, body, limit) -> None:
    length = {"/v1/messages": 9, "/v1/completions": 16}.get(path, 7)  # those two have their own
    assert sampled(server, path, body) == DEFAULTS | {"max_tokens": length}
    if path == "/v1/responses":
        assert [server.engine.answer[name] for name in ("temperature", "top_p")] == [0.6, 0.9]
    own = {"temperature": 1.0, "top_p": 1.0}
    expected = DEFAULTS | own | {"max_tokens": 5}
    assert sampled(server, path, {**body, **own, limit: 5}) == expected
    nulls = {} if path == "/v1/messages" else {"temperature": None, "top_p": None}
    assert sampled(server, path, {**body, **nulls})["temperature"] == 0.6


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1, 5]}),
        ("/generate", {"prompt": {"prompt_token_ids": [1, 5]}}),
        ("/inference/v1/generate", {"token_ids": [1, 5]}),
    ],
)
def test_routes_of_tokens_stay_neutral(server, path, body) -> None:
    found = sampled(server, path, body)
    assert (found["temperature"], found["top_p"], found["top_k"]) == (1.0, 1.0, 0)


@pytest.mark.parametrize(
    ("chosen", "trains", "applied"),
    [(None, False, True), (None, True, False), ("auto", True, True), ("off", False, False)],
)
def test_a_training_samples_from_its_policy(chosen, trains, applied, tmp_path, monkeypatch) -> None:
    path = save_checkpoint(tmp_path / "model")
    settings = {"temperature": 0.25, "do_sample": False, "eos_token_id": [2]}
    (path / "generation_config.json").write_text(json.dumps(settings))
    options = {"port": 0, "generation_config": chosen}
    serving = Serving(Config.model_validate({"model": {"base_path": str(path)}, "server": options}))
    named: list[str] = []

    def warning(_: str, **fields: str) -> None:
        named.append(fields["keys"])

    monkeypatch.setattr(daemon, "log", SimpleNamespace(info=lambda *_, **__: None, warning=warning))
    with closing(serving):
        serving.listen(run=tmp_path if trains else None)
        loaded = serving.load()
        weights = SharedWeights(loaded.model, keep_versions=1)
        serving.open(loaded, weights, adapters={}, main_adapter=None)
        assert serving.state.parts.sampling_defaults == ({"temperature": 0.25} if applied else {})
    assert named == (["do_sample = False"] if applied else [])
