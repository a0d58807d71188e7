"""Tokens a second through the real HTTP server against its peers: the table of
docs/benchmarks/serving.md.

A random 29 M parameter Qwen3 is written in Hugging Face layout and served by this package and by
`mlx_lm.server` (its newest release, `setup_peers`; peers.py) with the same BLAS; `ceiling.py` is
mlx-lm's forward without any server. The sender (load.py) is its own process and sends all
servers the same bodies. In every round each contender of a case runs once, one after the other, so
that a busy neighbour hits all; the ratio of a round is within the round. Round 0 warms up and is
not counted.

    scripts/bench/setup_peers && .venv/bin/python -m scripts.bench.serving          # every case, about 10 minutes
    .venv/bin/python -m scripts.bench.serving --case ceiling --case "32 clients"    # cases whose name contains one
"""

import argparse
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from scripts.bench import peers
from scripts.bench.ceiling import ceiling_rate  # the fast BLAS comes before MLX
from scripts.bench.load import Report, send
from scripts.bench.models import save_bench_model

# isort: split
import mlx.core as mx

from mlx_parallm.config.load import parse_config
from mlx_parallm.daemon import Serving
from mlx_parallm.deploy.export.gguf_file import write_model
from mlx_parallm.deploy.export.model import ModelSource, open_model
from mlx_parallm.deploy.export.vocabulary import read_vocabulary
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import LoadedModel, load_model
from mlx_parallm.models.lora import linear_layers, linear_shape
from mlx_parallm.system.log import configure_logging
from mlx_parallm.weights import SharedWeights

OUTPUT = 64
RANK = 8
ADAPTERS = tuple(f"adapter-{i}" for i in range(8))
Contender = Callable[["Case"], Report]


@dataclass(frozen=True)
class Case:
    """`ours` is divided by `against`; `ours` names the models that the clients take in turn."""

    name: str
    against: str
    clients: int
    target: float
    prompt: int = 64
    group: int = 1
    requests: int = 2
    models: tuple[str, ...] = ("default",)

    def prompts(self, turn: int) -> list[str]:
        """One a client; letters, because a letter is one token. The same for every contender of
        a round."""
        letters = random.Random(f"{self.name} {turn}")
        distinct = [
            "".join(letters.choices(string.ascii_letters, k=self.prompt))
            for _ in range(self.clients)
        ]
        return [distinct[client // self.group] for client in range(self.clients)]


CASES = (
    *(Case(f"{clients} clients", "ceiling", clients, 0.88) for clients in (8, 32, 64)),
    Case("1 client", "mlx_lm.server", 1, 1.0, requests=4),
    Case("8 clients", "mlx_lm.server", 8, 1.2),
    Case("32 clients", "mlx_lm.server", 32, 1.35),
    Case("64 clients", "mlx_lm.server", 64, 1.35, requests=1),
    Case("groups of 16, 400-token prompt", "mlx_lm.server", 16, 1.4, prompt=400, group=16),
    Case("8 clients", "mlx_lm.server, reference BLAS", 8, 8.0, requests=1),
    *(
        Case(f"{clients} client{'s'[: clients - 1]}", "llama.cpp", clients, 1.0)
        for clients in (1, 8, 32)
    ),
    Case("1 adapter, 32 clients", "no adapter", 32, 0.93, models=ADAPTERS[:1]),
    Case("8 adapters, 32 clients", "no adapter", 32, 0.83, models=ADAPTERS),
)


class Bench:
    """Knows how each contender runs a case. Servers are started when a case first asks for them."""

    def __init__(self, directory: Path, stack: ExitStack, peer_flags: list[str]) -> None:
        self._directory = directory
        self._peer_flags = peer_flags
        self._stack = stack
        self._urls: dict[str, str] = {}
        self._plain: LoadedModel | None = None

    def run(self, contender: str, case: Case, turn: int) -> Report:
        if contender == "ceiling":
            return self._ceiling(case, turn)
        models = case.models if contender == "ours" else ("default",)
        if contender.startswith("mlx_lm.server"):
            models = (str(self._directory),)
        common: dict[str, Any] = {"max_tokens": OUTPUT, "temperature": 1.0}
        if contender == "llama.cpp":  # by default it draws from 40 tokens at most
            common |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
        bodies = [
            [common | {"model": models[client % len(models)], "prompt": prompt} for prompt in texts]
            for client, texts in enumerate(zip(*self._turns(case, turn), strict=True))
        ]
        return send(self.url(contender), bodies)

    def url(self, contender: str) -> str:
        if contender not in self._urls:
            if contender.startswith("mlx_lm.server"):
                blas = "reference" if contender.endswith("reference BLAS") else "mkl"
                server = peers.mlx_lm_server(self._directory, blas, self._peer_flags)
            elif contender == "llama.cpp":
                server = peers.llama_server(self._gguf(), parallel=32, context=256)
            else:
                server = our_server(self._directory)
            url = self._stack.enter_context(server)
            self._urls[contender] = url
            if contender in ("ours", "no adapter"):
                self._urls |= {"ours": url, "no adapter": url}
        return self._urls[contender]

    def _gguf(self) -> Path:
        """The same weights as float32. Its end of text is a token of the model, as the file must
        have one."""
        directory = save_bench_model(self._directory / "gguf")
        opened = open_model(ModelSource(str(directory)))
        vocabulary = read_vocabulary(opened.tokenizer, opened.config, opened.path)
        write_model(directory / "model.gguf", opened, vocabulary, "f32")
        return directory / "model.gguf"

    def _turns(self, case: Case, turn: int) -> list[list[str]]:
        return [case.prompts(turn * case.requests + request) for request in range(case.requests)]

    def _ceiling(self, case: Case, turn: int) -> Report:
        if self._plain is None:
            self._plain = load_model(
                parse_config({"model": {"base_path": str(self._directory)}}).model
            )
        report = Report()
        for texts in self._turns(case, turn):
            # Which ids the prompts have makes no difference to the loop.
            prompts = [[ord(letter) for letter in text] for text in texts]
            report.seconds += (
                case.clients * OUTPUT / ceiling_rate(self._plain.model, prompts, OUTPUT)
            )
            report.tokens += case.clients * OUTPUT
        return report


@contextmanager
def our_server(directory: Path) -> Iterator[str]:
    """This package's server in this process, with all adapters of the cases."""
    tree = {"server": {"port": 0, "batch_size": 64}, "model": {"base_path": str(directory)}}
    serving = Serving(parse_config(tree))
    try:
        serving.listen()
        loaded = serving.load()
        adapters = {name: _random_adapter(loaded, seed) for seed, name in enumerate(ADAPTERS)}
        serving.open(
            loaded,
            SharedWeights(loaded.model, keep_versions=1),
            adapters=adapters,
            main_adapter=None,
        )
        yield serving.url
    finally:
        serving.close()


def _random_adapter(loaded: LoadedModel, seed: int) -> dict[str, LoraPair]:
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    layers = {
        path: LoraPair(
            mx.random.normal((inputs, RANK), key=next(keys)) * inputs**-0.5,
            mx.random.normal((RANK, outputs), key=next(keys)) * 0.01,
            2.0,
        )
        for path, layer in linear_layers(loaded.model).items()
        for inputs, outputs in [linear_shape(layer)]
    }
    mx.eval([array for pair in layers.values() for array in (pair.a, pair.b)])
    return layers


def measure(bench: Bench, case: Case, rounds: int) -> str:
    """A line of the table."""
    rates: dict[str, list[float]] = {"ours": [], case.against: []}
    failed = dict.fromkeys(rates, 0)
    for turn in range(rounds + 1):
        for contender, measured in rates.items():
            report = bench.run(contender, case if turn else replace(case, requests=1), turn)
            if turn:
                measured.append(report.rate)
                failed[contender] += len(report.failures)
            if report.failures:
                print(
                    (
                        f"  {contender}: {len(report.failures)} failed of {report.sent},"
                        f" {report.failures[0]}"
                    ),
                    flush=True,
                )
    ours, theirs = rates.values()
    ratios = [
        mine / other if other else float("inf") for mine, other in zip(ours, theirs, strict=True)
    ]
    ratio = statistics.median(ratios)
    cells = [
        case.name,
        case.against,
        f"{statistics.median(ours):.0f}",
        f"{statistics.median(theirs):.0f}",
        f"**{ratio:.2f}**",
        ", ".join(f"{value:.2f}" for value in ratios),
        f"≥ {case.target:g} {'yes' if ratio >= case.target else 'NO'}",
        " / ".join(str(count) for count in failed.values()),
    ]
    return "| " + " | ".join(cells) + " |"


def compare_greedy(bench: Bench, directory: Path, prompts: int = 32) -> str:
    """Greedy answers of both servers, tokens and log-probabilities, up to the first difference
    of each answer."""
    common: dict[str, Any] = {"max_tokens": OUTPUT, "temperature": 0.0}
    ties, different, worst, agreed = 0, 0, 0.0, list[int]()
    for text in Case("greedy", "mlx_lm.server", prompts, 1.0).prompts(0):
        ours_body = common | {
            "model": "default",
            "prompt": text,
            "logprobs": 2,
            "return_token_ids": True,
        }
        theirs_body = common | {"model": str(directory), "prompt": text, "logprobs": True}
        ours, theirs = (
            _choice(bench.url("ours"), ours_body),
            _choice(bench.url("mlx_lm.server"), theirs_body),
        )
        entries = theirs["logprobs"]["content"]
        own_logprobs = ours["logprobs"]["token_logprobs"]
        for place, (token, logprob, entry) in enumerate(
            zip(ours["token_ids"], own_logprobs, entries, strict=True)
        ):
            if token != entry["id"]:  # from here on these are two texts
                best, second = sorted(
                    ours["logprobs"]["top_logprobs"][place].values(), reverse=True
                )[:2]
                ties += best - second <= 1e-4
                different += best - second > 1e-4
                break
            agreed.append(token)
            worst = max(worst, abs(logprob - entry["logprob"]))
    return (
        f"greedy answers, {prompts} of {OUTPUT} tokens: {len(agreed)} tokens equal,"
        f" {len(set(agreed))} distinct,"
        f" log-probabilities within {worst:.1e}; answers that parted at a near tie: {ties},"
        f" otherwise: {different}"
    )


def _choice(url: str, body: dict[str, Any]) -> dict[str, Any]:
    response = httpx.post(url + "/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    return dict(response.json()["choices"][0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case",
        action="append",
        help="only cases whose name or peer contains this; may be repeated",
    )
    parser.add_argument("--rounds", type=int, default=3, help="counted ones")
    parser.add_argument("--peer-flags", default=" ".join(peers.FLAGS), help="of mlx_lm.server")
    arguments = parser.parse_args()
    configure_logging(level="warning")
    wanted = [
        c for c in CASES if any(part in f"{c.name}, {c.against}" for part in arguments.case or [""])
    ]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = save_bench_model(Path(name), endless=True)
        bench = Bench(directory, stack, arguments.peer_flags.split())
        lines = []
        for case in wanted:
            lines.append(measure(bench, case, arguments.rounds))
            print(f"[{time.perf_counter() - started:4.0f} s] {lines[-1]}", flush=True)
        if any("mlx_lm" in case.against for case in wanted):
            print(f"peer: {peers.version()}; flags {arguments.peer_flags}")
            print(compare_greedy(bench, directory))
    print(
        "\n| case | against | ours tok/s | theirs | ratio, median | rounds |"
        " target | failed ours / theirs |"
    )
    print("|---|---|---|---|---|---|---|---|", *lines, sep="\n")


if __name__ == "__main__":
    main()
