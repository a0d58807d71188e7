"""Adapters that come and go under load: threads, open files and memory of the process stay flat.

    .venv/bin/python -m tests.soak.adapter_loads                  # 2,000 loads, 2,000 publishes,
    .venv/bin/python -m tests.soak.adapter_loads --loads 100 …    # 200 Tinker samplers

Two parts, with chats under the adapters all the while:

    loads      a server process with Tinker's API: clients load, replace and unload adapters over
               HTTP, four at a time; then a training saves samplers, and each samples
    publishes  a server in this process: versions of the policy, and reads of policy@V from disk

Each is measured after a tenth of its work and at its end. Prints a table; exit code 1 when threads
move by more than 2, open files by more than 4, memory by more than 60 MB, or an answer is an error.
"""

import argparse
import itertools
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

import mlx_parallm  # the fast BLAS comes before MLX
from mlx_parallm.config.load import load_config
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.daemon import Serving
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import adapter_layers, inject_lora, load_adapter, save_adapter
from mlx_parallm.models.threads import mlx_thread
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights
from tests.soak.attack_target import MB, SERVE, Server

assert mlx_parallm.__version__

MOST_THREADS, MOST_FILES, MOST_MB = 2, 4, 60
ADAPTERS, NAMES, CLIENTS, CHATS = 8, 24, 4, 2
API = "/api/v1"


@dataclass
class Measured:
    """What a process holds, at some moments of its work."""

    name: str
    process: psutil.Process
    settled: Callable[[], object] = lambda: None  # before it is measured
    moments: list[tuple[str, int, int, int]] = field(default_factory=list)

    def note(self, moment: str) -> None:
        self.settled()
        held = self.process.memory_info().rss // MB
        line = (moment, self.process.num_threads(), self.process.num_fds(), held)
        self.moments.append(line)
        print(f"| {self.name} | {' | '.join(map(str, line))} |", flush=True)

    @property
    def grown(self) -> bool:
        """Whether something moved from the second moment to the last by more than it may."""
        first, last = self.moments[0][1:], self.moments[-1][1:]
        moved = [after - before for before, after in zip(first, last, strict=True)]
        bounds = (MOST_THREADS, MOST_FILES)
        flat = all(abs(by) <= most for by, most in zip(moved, bounds, strict=False))
        return not flat or moved[2] > MOST_MB


class Load:
    """Clients in threads of this script, and what they were answered."""

    def __init__(self, url: str) -> None:
        self.url, self.answers = url, Counter[str]()
        self._stop = threading.Event()

    def ask(self, model: str) -> None:
        """Let this thread ask once."""
        body = {"prompt": "Sum: 1+", "max_tokens": 2, "model": model}
        code = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120).status_code
        self.answers["read" if code == httpx.codes.OK else f"read {code}"] += 1

    @contextmanager
    def chats(self, names: Callable[[random.Random], str]) -> Iterator[None]:
        """Chat under random names all the while. An adapter may be gone: 404."""

        def chat(seed: int) -> None:
            chance = random.Random(seed)
            with httpx.Client(base_url=self.url, timeout=120) as http:
                while not self._stop.is_set():
                    body = {"prompt": "Sum: 1+", "max_tokens": 8, "model": names(chance)}
                    code = http.post("/v1/completions", json=body).status_code
                    self.answers["chat" if code in (200, 404) else f"chat {code}"] += 1

        threads = [threading.Thread(target=chat, args=(seed,)) for seed in range(CHATS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def share(self, work: Sequence[int], do: Callable[[httpx.Client, int], str]) -> None:
        """Let the clients do a piece of work each, at the same time."""
        numbers, lock = iter(work), threading.Lock()

        def client() -> None:
            with httpx.Client(base_url=self.url, timeout=120) as http:
                while True:
                    with lock:
                        number = next(numbers, None)
                    if number is None:
                        return
                    self.answers[do(http, number)] += 1

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    @property
    def faults(self) -> dict[str, int]:
        return {name: n for name, n in self.answers.items() if name.rpartition(" ")[2].isdigit()}


def tenths(total: int) -> Iterator[tuple[str, range]]:
    """The first tenth of a work, and the rest in three parts."""
    ends = [0, total // 10, total * 4 // 10, total * 7 // 10, total]
    for begin, end in itertools.pairwise(ends):
        yield f"{end}", range(begin, end)


def new_layers(loaded: Any) -> Mapping[str, LoraPair]:
    inject_lora(loaded, LoraConfig(rank=4, alpha=8.0))
    return adapter_layers(loaded)


def varied(layers: Mapping[str, LoraPair]) -> dict[str, LoraPair]:
    import mlx.core as mx

    changed = {
        path: LoraPair(pair.a, mx.random.normal(pair.b.shape) * 0.02, pair.scale)
        for path, pair in layers.items()
    }
    mx.eval([pair.b for pair in changed.values()])
    return changed


def write_adapters(roots: Path, layers: Mapping[str, LoraPair], count: int) -> list[Path]:
    paths = []
    for number in range(count):
        path = roots / str(number)
        path.mkdir(parents=True)
        save_adapter(path, varied(layers), num_layers=99)
        paths.append(path)
    return paths


def load_adapters(args: argparse.Namespace, directory: Path, layers: Mapping[str, Any]) -> bool:
    settings = ("server.max_loaded_adapters=16", f"tinker.directory='{directory / 'tinker'}'")
    server = Server(directory, *settings, command=(*SERVE, "--tinker"))
    paths = write_adapters(server.roots, layers, ADAPTERS)
    load = Load(server.url)

    def change(http: httpx.Client, number: int) -> str:
        name = f"a{number % NAMES}"
        if number % 11 == 0:
            code = http.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code
            return "unload" if code in (200, 404) else f"unload {code}"
        body = {
            "lora_name": name,
            "lora_path": str(paths[number % ADAPTERS]),
            "load_inplace": True,
        }
        code = http.post("/v1/load_lora_adapter", json=body).status_code
        return "load" if code == httpx.codes.OK else f"load {code}"

    measured = Measured("loads", psutil.Process(server.process.pid))
    try:
        with load.chats(lambda chance: f"a{chance.randrange(NAMES)}"):
            for moment, part in tenths(args.loads):
                load.share(part, change)
                measured.note(moment)
            samplers = Measured("samplers", measured.process)
            save_samplers(server, args.samplers, load, samplers)
    finally:
        server.end()
    print(dict(load.answers))
    return measured.grown or samplers.grown or bool(load.faults)


def save_samplers(server: Server, count: int, load: Load, measured: Measured) -> None:
    """A training's weights of the moment, saved and sampled from, `count` times."""

    def done(promise: Any) -> Any:
        return server.post(f"{API}/retrieve_future", {"request_id": promise["request_id"]})

    base = httpx.get(f"{server.url}{API}/get_server_capabilities").json()["supported_models"][0]
    session = server.post(f"{API}/create_session", {"tags": []}).json()["session_id"]
    made = {"session_id": session, "model_seq_id": 0, "base_model": base["model_name"]}
    model = done(server.post(f"{API}/create_model", made | {"lora_config": {"rank": 4}}).json())
    saved = {"model_id": model.json()["model_id"], "kind": "snapshot"}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 40, 41]}]}
    for moment, part in tenths(count):
        for number in part:
            body = saved | {"seq_id": number + 1, "sampling_session_seq_id": number}
            if number % 2:  # by a name: it lies on disk, and is read when somebody asks for it
                body = {"model_id": saved["model_id"], "seq_id": number + 1, "path": f"s{number}"}
            answer = done(server.post(f"{API}/save_weights_for_sampler", body).json()).json()
            asked = {"seq_id": number, "prompt": prompt, "sampling_params": {"max_tokens": 4}}
            if "sampling_session_id" not in answer:
                named = {"session_id": session, "sampling_session_seq_id": number}
                named |= {"model_path": answer["path"]}
                answer = server.post(f"{API}/create_sampling_session", named).json()
            asked["sampling_session_id"] = answer["sampling_session_id"]
            code = done(server.post(f"{API}/asample", asked).json()).status_code
            load.answers["sample" if code == httpx.codes.OK else f"sample {code}"] += 1
        measured.note(moment)


class Archive:
    """Old versions of the policy: the same few files under many numbers."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths, self.newest = paths, 0

    def versions(self) -> Sequence[int]:
        return range(self.newest)

    def load(self, version: int) -> Mapping[str, LoraPair]:
        return load_adapter(self.paths[version % len(self.paths)]).layers


def publish_versions(args: argparse.Namespace, directory: Path, layers: Mapping[str, Any]) -> bool:
    import mlx.core as mx

    archive = Archive(write_adapters(directory, layers, ADAPTERS))
    serving = Serving(load_config(None, ["model.base_path=builtin:tiny", "server.port=0"]))
    try:
        serving.listen()
        loaded = serving.load()
        weights = SharedWeights(loaded.model, policy="policy", keep_versions=2, archive=archive)
        adapters = {"policy": dict(layers)}
        serving.open(loaded, weights, adapters=adapters, main_adapter="policy")
        load = Load(serving.url)
        measured = Measured("publishes", psutil.Process(), mx.clear_cache)
        with load.chats(lambda chance: f"policy@{chance.randrange(archive.newest + 1)}"):
            for moment, part in tenths(args.publishes):
                for number in part:
                    weights.publish_adapter(varied(layers))
                    archive.newest = weights.version
                    if number % 4 == 0:
                        load.ask(f"policy@{number * 7 % (archive.newest + 1)}")
                measured.note(moment)
    finally:
        serving.close()
    print(dict(load.answers))
    return measured.grown or bool(load.faults)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", type=int, default=2000)
    parser.add_argument("--publishes", type=int, default=2000)
    parser.add_argument("--samplers", type=int, default=200)
    args = parser.parse_args()
    configure_logging(level="warning")
    print("| | done | threads | open files | MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="adapters_") as name, mlx_thread():
        directory = Path(name)
        serving = Serving(load_config(None, ["model.base_path=builtin:tiny", "server.port=0"]))
        layers = new_layers(serving.load().model)
        serving.close()
        grown = bool(args.loads) and load_adapters(args, directory / "loads", layers)
        grown |= publish_versions(args, directory / "publishes", layers)
    print("GROWN" if grown else "flat")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
