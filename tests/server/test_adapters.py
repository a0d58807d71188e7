"""Adapters over HTTP: loaded, replaced and unloaded while others stream; which paths and names;
versions by number."""

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import mlx.nn as nn
import openai
import pytest

from mlx_parallm.engine.adapter_loader import AdapterLoader
from mlx_parallm.engine.engine import Engine
from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.engine.thread import EngineThread
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import load_model, load_tokenizer
from mlx_parallm.models.lora import linear_layers, linear_shapes, prepare_for_serving, save_adapter
from mlx_parallm.weights import SharedWeights
from tests.conftest import TINY, TINY_CONTEXT
from tests.engine.helpers import engine_options, naive_greedy
from tests.server.serving import RunningServer, running_server

PROMPT = [1, 40, 41, 42, 43]


@dataclass
class Served:
    server: RunningServer
    weights: SharedWeights
    plain: nn.Module
    root: Path

    def layers(self, seed: int, rank: int = 4) -> dict[str, LoraPair]:
        made = {}
        for i, (path, (inputs, outputs)) in enumerate(linear_shapes(self.plain).items()):
            keys = mx.random.split(mx.random.key(1000 * seed + i))
            a = mx.random.normal((inputs, rank), key=keys[0]) / inputs**0.5
            made[path] = LoraPair(
                a, mx.random.normal((rank, outputs), key=keys[1]) / rank**0.5, 2.0
            )
        mx.eval([(pair.a, pair.b) for pair in made.values()])
        return made

    def save(self, name: str, seed: int, rank: int = 4) -> str:
        directory = self.root / name
        directory.mkdir(exist_ok=True)
        save_adapter(directory, self.layers(seed, rank), num_layers=len(self.plain.layers))
        return str(directory)

    def twin(self, seed: int, tokens: int, rank: int = 4) -> list[int]:
        """What a plain tree with this adapter alone says."""
        model, layers = copy.deepcopy(self.plain), self.layers(seed, rank)
        for path, layer in linear_layers(model).items():
            layer.weight = layer.weight + 2.0 * (layers[path].a @ layers[path].b).T
        return naive_greedy(model, PROMPT, tokens, eos=None)

    def post(self, path: str, **body: Any) -> httpx.Response:
        with self.server.http() as http:
            return http.post(path, json=body)

    def load(self, name: str, path: str, **body: Any) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **body)

    def ask(self, client: openai.OpenAI, model: str, tokens: int = 24) -> Any:
        extra = {"return_token_ids": True, "ignore_eos": True}
        return client.completions.create(
            model=model, prompt=PROMPT, max_tokens=tokens, temperature=0, extra_body=extra
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("adapters")
    loaded = load_model(TINY)
    plain, shapes = copy.deepcopy(loaded.model), linear_shapes(loaded.model)
    weights = SharedWeights(loaded.model, policy="policy", keep_versions=3)
    names = ServedModels(
        "builtin:tiny",
        adapter_versions=lambda: {
            name: adapter.version for name, adapter in weights.adapters().items()
        },
        version=lambda: weights.version,
        policy_adapter="policy",
        policy_versions=weights.history.versions,
        loader=weights.loader,
    )
    lora = prepare_for_serving(loaded.model)
    options = engine_options(
        max_model_len=TINY_CONTEXT, vocab_size=loaded.vocab_size, max_rows=16, prefill_chunk=64
    )
    tokenizer = load_tokenizer(loaded.path, TINY)
    thread = EngineThread(lambda: Engine(loaded.model, tokenizer, weights, lora, options), names)
    thread.start()
    loader = AdapterLoader(weights, shapes, names, [root], 256)
    with running_server(
        thread.client, load_tokenizer(loaded.path, TINY), adapters=loader
    ) as server:
        made = Served(server, weights, plain, root)
        for version in range(1, 5):
            weights.publish_adapter(made.layers(100 + version))
        yield made
    thread.stop()


@pytest.mark.long
@pytest.mark.slow
def test_changes_while_eight_streams_run(served: Served) -> None:
    """Two of the streams are under an adapter that is unloaded, and another given its name,
    before they have ended."""
    seeds = {"s0": 1, "s1": 2, "s2": 3, "s3": 4}
    paths = {name: served.save(name, seed, rank=2 + seed) for name, seed in seeds.items()}
    for name, path in paths.items():
        assert served.load(name, path).text == f"Success: LoRA adapter '{name}' added successfully."
    twins = {name: served.twin(seed, 240, rank=2 + seed) for name, seed in seeds.items()}
    started, swapped, done = threading.Barrier(9), threading.Event(), threading.Event()
    extra = {"return_token_ids": True, "ignore_eos": True}

    def stream(client: openai.OpenAI, name: str, first: bool) -> list[int]:
        ids: list[int] = []
        for chunk in client.completions.create(
            model=name, prompt=PROMPT, max_tokens=240, temperature=0, stream=True, extra_body=extra
        ):
            ids += chunk.choices[0].token_ids
            if first and len(ids) == 1:
                started.wait(30)
        return ids

    def streams(name: str) -> int:
        """One stream after another until the changes are done; s3, which is swapped, once."""
        with served.server.openai() as client:
            assert stream(client, name, True) == twins[name], name
            assert name != "s3" or swapped.is_set(), "the stream ended before the swap"
            count = 1
            while name != "s3" and not done.is_set():
                assert stream(client, name, False) == twins[name], name
                count += 1
        return count

    with ThreadPoolExecutor(8) as pool, served.server.openai() as client:
        running = [pool.submit(streams, name) for name in [*seeds, *seeds]]
        started.wait(30)
        assert served.post("/v1/unload_lora_adapter", lora_name="s3").status_code == 200
        assert served.load("s3", paths["s2"]).status_code == 200
        swapped.set()
        for turn in range(6):
            assert served.load("x", served.save("x", 10 + turn)).status_code == 200
            assert served.ask(client, "x").choices[0].token_ids == served.twin(10 + turn, 24)
            path = served.save("y", 20 + turn)
            assert served.load("x", path).status_code == 400, (
                "the name is taken, and this is another path"
            )
            assert served.load("x", path, load_inplace=True).status_code == 200
            assert served.ask(client, "x").choices[0].token_ids == served.twin(20 + turn, 24)
            assert served.post("/v1/unload_lora_adapter", lora_name="x").status_code == 200
            with pytest.raises(openai.NotFoundError, match="'x' does not exist"):
                served.ask(client, "x")
        done.set()
        assert sum(future.result(60) for future in running) >= 8
        assert served.ask(client, "s3", 100).choices[0].token_ids == twins["s2"][:100]
    assert len({token for ids in twins.values() for token in ids}) >= 20


def test_the_root_route_replaces_as_prime_rl_expects_and_the_same_path_does_everywhere(
    served: Served,
) -> None:
    first, second = served.save("step_1", 31), served.save("step_2", 32)
    with served.server.openai() as client:
        for seed, path in ((31, first), (32, second)):
            answer = served.post(
                "/load_lora_adapter", lora_name="r8-1e-4", lora_path=path, unknown_field=1
            )
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(
                "text/plain"
            )
            assert served.ask(client, "r8-1e-4").choices[0].token_ids == served.twin(seed, 24)
        served.save("step_2", 33)
        assert served.load("r8-1e-4", second).status_code == 200
        assert served.ask(client, "r8-1e-4").choices[0].token_ids == served.twin(33, 24)
        assert "r8-1e-4" in [model.id for model in client.models.list()]
    assert served.post("/unload_lora_adapter", lora_name="r8-1e-4").status_code == 200
    assert served.post("/unload_lora_adapter", lora_name="r8-1e-4").status_code == 404


def test_paths_stay_inside_of_the_roots(served: Served, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    save_adapter(outside, served.layers(1), num_layers=2)
    (served.root / "link").symlink_to(outside)
    half = served.root / "half"
    half.mkdir()
    (half / "adapters.safetensors").symlink_to(outside / "adapters.safetensors")
    (half / "adapter_config.json").write_text("{}")
    for path in (
        outside,
        served.root / "link",
        half,
        f"{served.root}/../{served.root.name}_x",
        "/etc/passwd",
        "",
        "~",
    ):
        answer = served.load("p", str(path))
        error = answer.json()["error"]
        assert (
            answer.status_code == 403
            and error["param"] == "lora_path"
            and "server.adapter_roots" in error["message"]
        )
    for path in (served.root / "nothing", served.root / ("x" * 300)):
        assert served.load("p", str(path)).status_code == 404
    assert served.load("p", "a\0b").status_code == 400
    assert "p" not in served.weights.adapters()


def test_what_does_not_fit_names_the_layer_and_leaves_the_old_one(served: Served) -> None:
    path = served.save("fit", 41)
    assert served.load("fit", path).status_code == 200
    held = served.weights.adapters()["fit"]
    wrong = served.root / "wrong"
    wrong.mkdir()
    layers = {"model.layers.0.self_attn.q_proj": LoraPair(mx.zeros((3, 2)), mx.zeros((2, 5)), 1.0)}
    save_adapter(wrong, layers, num_layers=1)
    answer = served.load("fit", str(wrong), load_inplace=True)
    assert (
        answer.status_code == 400
        and "model.layers.0.self_attn.q_proj is [" in answer.json()["error"]["message"]
    )
    (wrong / "adapters.safetensors").write_bytes(b"no safetensors")
    assert served.load("fit", str(wrong), load_inplace=True).status_code == 400
    assert served.weights.adapters()["fit"] is held


@pytest.mark.parametrize(
    "name",
    [
        "",
        "policy",
        "default",
        "tiny",
        "builtin:tiny",
        "builtin:tiny:base",
        "a@3",
        "tinker://a/live/1",
    ],
)
def test_names_of_the_server_are_not_given_away(served: Served, name: str) -> None:
    path = served.save("named", 51)
    for answer in (served.load(name, path), served.post("/v1/unload_lora_adapter", lora_name=name)):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_name"


@pytest.mark.parametrize("name", ["\\ud800", "x" * 257, "\\u001b[2J"])
def test_a_name_can_be_shown(served: Served, name: str) -> None:
    """Half a character in a name was a 500 of /v1/models for everybody."""
    body = f'{{"lora_name": "{name}", "lora_path": "{served.save("named", 51)}"}}'
    with served.server.http() as http:
        answer = http.post(
            "/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400 and "printable" in answer.json()["error"]["message"]
        assert http.get("/v1/models").status_code == 200


def test_the_number_of_adapters_is_bounded_and_none_in_use_goes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one goes that was not asked for the longest."""
    path = served.save("counted", 52)
    loader = served.server.state.parts.adapters
    assert loader is not None
    monkeypatch.setattr(loader, "_most", len(loader._paths) + 3)
    before = set(loader._paths)
    for name in ("old", "used", "young"):
        assert served.load(name, path).status_code == 200
    with served.server.openai() as client:
        for name in (*before, "old", "used", "young", "old"):
            served.ask(client, name, tokens=1)
        if before:  # of other tests: they are the oldest
            monkeypatch.setattr(loader, "_most", 3)
        assert served.load("fourth", path).status_code == 200
        assert {model.id for model in client.models.list()} >= {"old", "young", "fourth"}
        with pytest.raises(openai.NotFoundError):
            served.ask(client, "used", tokens=1)
        monkeypatch.setattr(loader, "_most", 1)
        stream = client.completions.create(
            model="old", prompt=PROMPT, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert served.load("fifth", path).status_code == 400, "one is in use"
        assert {model.id for model in client.models.list()} >= {
            "old"
        } and "fourth" not in loader._paths
        stream.close()
    assert served.load("old", path, load_inplace=True).status_code == 200, (
        "one that is there can be replaced"
    )
    for name in list(loader._paths):
        assert served.post("/v1/unload_lora_adapter", lora_name=name).status_code == 200


def test_without_roots_the_routes_say_what_to_set(served: Served, server: RunningServer) -> None:
    loader = AdapterLoader(
        served.weights, {}, ServedModels("m", adapter_versions=dict, version=lambda: 0), [], 1
    )
    with (
        running_server(served.server.engine, None, adapters=loader) as closed,
        closed.http() as http,
    ):
        for body in ({"lora_name": "a", "lora_path": "/"}, {"lora_name": "a"}):
            route = "/v1/load_lora_adapter" if "lora_path" in body else "/v1/unload_lora_adapter"
            answer = http.post(route, json=body)
            assert (
                answer.status_code == 403
                and "server.adapter_roots" in answer.json()["error"]["message"]
            )
    with server.http() as http:
        assert (
            http.post(
                "/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/"}
            ).status_code
            == 403
        )
        assert http.post("/v1/load_lora_adapter", json={"lora_name": "a"}).status_code == 400


def test_versions_of_the_policy_by_number(served: Served) -> None:
    with served.server.openai() as client:
        for name in ("policy@2", "builtin:tiny@2", "default@2"):
            answer = served.ask(client, name)
            assert answer.model == name and answer.policy_version == 2
            assert answer.choices[0].token_ids == served.twin(102, 24)
            assert answer.choices[0].weight_versions == [{"version": 2, "start": 0, "end": 24}]
        assert served.ask(client, "policy").choices[0].token_ids == served.twin(104, 24)
        with pytest.raises(openai.NotFoundError, match="versions: 2, 3, 4"):
            served.ask(client, "policy@1")
        assert not [model.id for model in client.models.list() if "@" in model.id]
        assert client.models.retrieve("policy@3").policy_version == 3
