"""The weights that samples are drawn with: named ones at /v1 after a restart, which stay in
memory, and who may ask."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.engine.served_models import AdapterUses
from mlx_parallm.errors import AdapterError, ModelNotFoundError, RefusedError
from mlx_parallm.faces.tinker.checkpoints import (
    SAMPLER,
    TRAINING,
    Checkpoints,
    TinkerPath,
    TinkerRun,
)
from mlx_parallm.faces.tinker.samplers import SamplerShelf, SamplerWeights
from tests.server.serving import RunningServer
from tests.tinker.serving import API, DATUM, TOKENS, WireClient, tinker_server

KEY = "tml-of-this-server"


@pytest.fixture(scope="module")
def restarted(root: Path) -> Iterator[RunningServer]:
    """Another server with the same checkpoints, and with a key."""
    with tinker_server(root / "runs", api_key=KEY) as running:
        yield running


def test_named_weights_are_read_from_disk_when_v1_asks_for_them(
    server: RunningServer, restarted: RunningServer, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a server that was started after they were saved; more of them than are kept at once."""
    client = WireClient(server.http())
    model, names = client.create_model(), list[str]()
    for number in range(4):
        client.output(client.send(model, 0, [DATUM] * 4, "cross_entropy"))
        client.result(client.optim_step(model, 0, learning_rate=3e-2))
        save = {"model_id": model, "path": f"at@{number}", "seq_id": 0}
        names.append(client.result(client.post("save_weights_for_sampler", **save))["path"])

    def text(on: RunningServer, name: str, status: int = 200) -> Any:
        body = {
            "model": name,
            "prompt": TOKENS,
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        with on.http(headers={"X-API-Key": KEY}) as http:
            answer = http.post("/v1/completions", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()["choices"][0]["token_ids"] if status == 200 else answer.json()["error"]

    with restarted.http(headers={"X-API-Key": KEY}) as http:
        listed = [entry["id"] for entry in http.get("/v1/models").json()["data"]]
        assert set(names) <= set(listed) and len(listed) == len(set(listed))
        assert http.get(f"/v1/models/{names[0]}").json()["parent"] is not None
    known = [text(server, name) for name in names]
    assert [text(restarted, name) for name in [*names, names[0]]] == [*known, known[0]]
    loaded = [each.id for each in restarted.engine.models() if each.id.startswith("tinker://")]
    assert loaded == [names[0], names[2], names[3]], "three sets are kept, the least used one went"
    for missing in (
        f"{names[0]}-not",
        f"tinker://{model}/weights/at@0",
        "tinker://a/b",
        "tinker://../sampler_weights/x",
    ):
        assert text(restarted, missing, 404)["code"] == "model_not_found"
    with monkeypatch.context() as patched:  # taken away between the reading and the engine's look
        patched.setattr(SamplerShelf, "load", lambda shelf, name: None)
        assert text(restarted, names[1], 404)["code"] == "model_not_found"
    directory = root / "runs" / model.replace(":", "_") / "sampler_weights"
    (directory / "at@1" / "adapters.safetensors").write_bytes(b"damaged")
    assert text(restarted, names[1], 404)["code"] == "model_not_found"
    for number in (1, 3):  # one that is not in memory, and one that is
        file = directory / f"at@{number}" / "checkpoint.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"expires": 1.0}))
        assert "its time is over" in text(restarted, names[number], 404)["message"]


def test_the_key_comes_as_the_sdk_sends_it(restarted: RunningServer) -> None:
    """Without it nothing is answered: not a promise, not a run, not a sample."""
    routes = [
        ("POST", "client/config", {}),
        ("POST", "create_session", {"tags": []}),
        ("POST", "retrieve_future", {"request_id": "a-1"}),
        ("POST", "asample", {}),
        ("GET", "training_runs", None),
        ("DELETE", "training_runs/x/checkpoints/weights/a", None),
    ]
    for headers in ({}, {"X-API-Key": "tml-another"}, {"X-API-Key": ""}):
        with restarted.http(headers=headers) as http:
            for method, path, body in routes:
                refused = http.request(method, f"{API}/{path}", json=body)
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    401,
                    "invalid_api_key",
                ), path
            assert http.get(f"{API}/downloads/x/y").status_code == 404, "a link is its own key"
    with restarted.http(headers={"X-API-Key": KEY}) as http:
        assert WireClient(http).session
        assert http.get(f"{API}/training_runs").status_code == 200
        assert http.post(f"{API}/retrieve_future", json={"request_id": "a-1"}).status_code == 410


def test_weights_that_change_do_not_hold_up_samples() -> None:
    begun, go = threading.Event(), threading.Event()
    weights = BlockedWeights(begun, go)
    samplers = SamplerWeights(cast(Any, weights), {}, AdapterUses(), kept=2, total=2)
    go.set()
    samplers.put("a", "run", {})
    go.clear()
    begun.clear()
    changing = threading.Thread(target=samplers.put, args=("b", "run", {}))
    changing.start()
    assert begun.wait(10)
    done = threading.Event()

    def use() -> None:
        samplers.check("a")
        done.set()

    threading.Thread(target=use, daemon=True).start()
    assert done.wait(10)
    go.set()
    changing.join()


def test_what_a_request_uses_is_kept_and_the_least_used_goes() -> None:
    """A request of /v1 counts as a use; weights of one that runs stay, though more are kept
    then."""
    free = threading.Event()
    free.set()
    weights, uses = BlockedWeights(threading.Event(), free), AdapterUses()
    samplers = SamplerWeights(cast(Any, weights), {}, uses, kept=2, total=9)
    with uses.holding(["a"]):
        for name in ("a", "b", "c"):
            samplers.put(name, "run", {})
        assert weights.removed == ["b"]
        with uses.holding(["c"]):
            samplers.put("d", "run", {})
        assert weights.removed == ["b"], (
            "both are in use, and the one that was just put is not taken away"
        )
    uses.note("c")
    samplers.put("e", "run", {})
    assert weights.removed == ["b", "d", "a"]


def free_weights() -> "BlockedWeights":
    go = threading.Event()
    go.set()
    return BlockedWeights(threading.Event(), go)


def test_what_goes_is_gone_for_who_asks_meanwhile() -> None:
    """A request that comes between the choice and the removal is not told that its weights are
    there."""
    uses, answers = AdapterUses(), list[str]()
    samplers = SamplerWeights(cast(Any, free_weights()), {}, uses, kept=1, total=9)
    asked, choose = threading.Event(), uses.least_recent

    def ask() -> None:
        with uses.holding(["a"]):
            try:
                samplers.check("a")
                answers.append("there")
            except RefusedError:
                answers.append("gone")
        asked.set()

    def chosen(names: Iterable[str]) -> str | None:
        name = choose(names)
        threading.Thread(target=ask).start()
        asked.wait(0.05)
        return name

    samplers.put("a", "run", {})
    uses.least_recent = chosen  # type: ignore[method-assign]
    samplers.put("b", "run", {})
    assert asked.wait(10) and answers == ["gone"]


def test_an_adapter_that_is_gone_already_fails_nobody() -> None:
    weights = free_weights()
    samplers = SamplerWeights(cast(Any, weights), {}, AdapterUses(), kept=1, total=9)
    samplers.put("a", "run", {})
    weights.absent = "a"
    samplers.put("b", "run", {})
    samplers.put("c", "run", {})
    assert weights.removed == ["b"]


def test_a_checkpoint_is_read_once_however_many_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, all_ask = free_weights(), threading.Barrier(4)
    samplers = SamplerWeights(cast(Any, weights), {}, AdapterUses(), kept=3, total=9)
    monkeypatch.setattr(
        "mlx_parallm.faces.tinker.samplers.load_adapter",
        lambda directory: SimpleNamespace(layers={}),
    )
    monkeypatch.setattr(
        "mlx_parallm.faces.tinker.samplers.fit_adapter",
        lambda *args: {"waited": threading.Event().wait(0.02)},
    )

    def ask() -> None:
        all_ask.wait(10)
        samplers.load("a", "run", tmp_path)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weights.added == 1


def test_weights_in_memory_go_with_their_checkpoint(tmp_path: Path) -> None:
    """One that is deleted, overwritten, or whose time is over is not drawn with any more."""
    now, weights = [100.0], free_weights()
    checkpoints = Checkpoints(tmp_path, lambda: now[0])
    samplers = SamplerWeights(cast(Any, weights), {}, AdapterUses(), kept=9, total=9)
    checkpoints.removed = samplers.drop
    checkpoints.begin(TinkerRun("r:train:0", "base", {}, 1.0))
    paths = [TinkerPath("r:train:0", kind, kind) for kind in (TRAINING, SAMPLER)]
    late = TinkerPath("r:train:0", SAMPLER, "late")
    for path in (*paths, late):
        checkpoints.save(path, lambda directory: None, ttl_seconds=10 if path is late else None)
        samplers.put(str(path), "r:train:0", {})
    assert weights.removed == []
    checkpoints.save(paths[0], lambda directory: None, overwrite=True)
    checkpoints.delete(paths[1])
    now[0] = 111.0
    with pytest.raises(ModelNotFoundError, match="its time is over"):
        SamplerShelf(checkpoints, samplers, ("base",)).load(str(late))
    assert weights.removed == [*map(str, paths), str(late)]


def test_what_a_sample_is_drawn_with_is_held_before_it_is_looked_for(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, held = WireClient(server.http()), list[bool]()
    sampler = client.live_sampler(client.create_model(), 1, 0)

    def check(samplers: SamplerWeights, name: str) -> None:
        held.append(samplers._uses.least_recent([name]) is None)

    monkeypatch.setattr(SamplerWeights, "check", check)
    client.samples(client.sample(sampler, 0, TOKENS, params={"max_tokens": 1}))
    assert held == [True]


class BlockedWeights:
    """Changes its weights once it may."""

    def __init__(self, begun: threading.Event, go: threading.Event) -> None:
        self._begun, self._go = begun, go
        self.removed: list[str] = []
        self.added = 0
        self.absent = ""

    def in_loader(self, function: Callable[[], None]) -> None:
        function()

    def add_adapter(self, name: str, layers: object) -> None:
        self.added += 1
        self._begun.set()
        self._go.wait(10)

    def remove_adapter(self, name: str) -> None:
        if name == self.absent:
            raise AdapterError(f"no adapter {name!r}")
        self.removed.append(name)


def test_one_bad_checkpoint_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged, expired, or deleted by another thread in between; and who looks deletes nothing."""
    now = [100.0]
    checkpoints = Checkpoints(tmp_path, lambda: now[0])
    checkpoints.begin(TinkerRun("r:train:0", "base", {}, 1.0))
    paths = {
        name: TinkerPath("r:train:0", SAMPLER, name)
        for name in ("good", "empty", "list", "old", "bare")
    }
    for name, path in paths.items():
        checkpoints.save(path, lambda directory: None, ttl_seconds=10 if name == "old" else None)
    directories = {name: tmp_path / "r_train_0" / SAMPLER / name for name in paths}
    (directories["empty"] / "checkpoint.json").write_text("")
    (directories["list"] / "checkpoint.json").write_text("[]")
    (directories["bare"] / "checkpoint.json").write_text("{}")
    now[0] = 111.0
    samplers = SamplerWeights(cast(Any, free_weights()), {}, AdapterUses(), kept=1, total=9)
    shelf = SamplerShelf(checkpoints, samplers, ("base",))
    assert shelf.names() == [str(paths["good"])]
    for name in ("empty", "list", "bare", "old"):
        with pytest.raises(ModelNotFoundError):
            shelf.load(str(paths[name]))
    assert directories["old"].is_dir()
    checkpoints.save(TinkerPath("r:train:0", SAMPLER, "next"), lambda directory: None)
    assert not directories["old"].exists() and directories["good"].exists()
    [good] = checkpoints.list("r:train:0")[1:]
    assert good.size_bytes > 0
    rename = Path.rename

    def second(path: Path, target: Path) -> Path:
        if path == directories["good"]:
            rename(path, target)  # another thread's
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", second)
    assert checkpoints.delete(paths["good"]) is False and good.size_bytes == 0
    (tmp_path / "r_train_0" / "run.json").write_text("")
    assert checkpoints.run("r:train:0") is None and checkpoints.runs() == []
