"""A real llama.cpp in its own process, and its HTTP API.

`xllamacpp` holds llama.cpp's server as a library; a `llama-server` on the PATH is the same program.
A wrong file may abort either, so it runs in a child (llama_child.py).
"""

import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx

from mlx_parallm.errors import EndpointError, ModelError
from mlx_parallm.system.foreign_http import Bounds, json_of, sync_client

CONTEXT = 2048  # tokens; longer texts are not sent
START_S = 600.0  # for a large file on a slow disk
ANSWER_S = 600.0
PAUSE_S = 0.05
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Step:
    """The most probable next token, and log-softmax(logits) of the first ones: id →
    log-probability. A token that is half a character has none."""

    token: int
    logprobs: Mapping[int, float]


class LlamaServer:
    """The API of llama-server at a URL. Its methods raise EndpointError."""

    def __init__(self, url: str, description: str = "") -> None:
        self._description = description
        if not url.startswith(("http://", "https://")):
            raise EndpointError(f"{url!r} is not a URL: expected e.g. http://127.0.0.1:8080")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = sync_client(base_url=self.url, timeout=ANSWER_S)

    def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text, as for a request: with what the tokenizer puts around it if
        `special`."""
        reply = self._post(
            "/tokenize", {"content": text, "add_special": special, "parse_special": True}
        )
        return [int(token) for token in reply["tokens"]]

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that its chat template makes of messages."""
        return str(self._post("/apply-template", {"messages": list(messages)})["prompt"])

    def next_token(self, prompt: Sequence[int], top: int) -> Step:
        """Return what follows token ids: the most probable token, with `top` log-probabilities."""
        reply = self._post(
            "/completion",
            {
                "prompt": list(prompt),
                "n_predict": 1,
                "n_probs": top,
                "return_tokens": True,
                "temperature": 0.0,
                "top_k": 1,
                "cache_prompt": True,
            },
        )
        first = next(iter(reply.get("completion_probabilities", ())), None)
        logprobs = (
            {each["id"]: float(each["logprob"]) for each in first["top_logprobs"]} if first else {}
        )
        return Step(int(reply["tokens"][0]), logprobs)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the most probable tokens one after another: `count`, or fewer if the answer
        ends."""
        options = {
            "n_predict": count,
            "return_tokens": True,
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": True,
        }
        return [
            int(token)
            for token in self._post("/completion", {"prompt": list(prompt), **options})["tokens"]
        ]

    def description(self) -> str:
        """Return which llama.cpp this is, as it says itself."""
        return (
            self._description
            or f"llama.cpp {self._request('GET', '/props', None).get('build_info', '')}".strip()
        )

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, json=body)
            value = json_of(reply)
        except httpx.HTTPError as error:
            raise EndpointError(
                f"{self.url}{path} does not answer: {error or type(error).__name__}"
            ) from error
        except ValueError as error:
            raise EndpointError(
                f"{self.url}{path} answers {reply.status_code}, which"
                " is not JSON: is it llama-server?"
            ) from error
        if reply.status_code != 200 or not isinstance(value, dict):
            answer_error = value.get("error") if isinstance(value, dict) else value
            message = (
                answer_error.get("message", answer_error)
                if isinstance(answer_error, dict)
                else answer_error
            )
            raise EndpointError(
                f"{self.url}{path} answers {reply.status_code}: {message}", status=reply.status_code
            )
        return value


def available() -> bool:
    """Whether a llama.cpp can be started here."""
    return (
        importlib.util.find_spec("xllamacpp") is not None
        or shutil.which("llama-server") is not None
    )


@contextmanager
def running(file: Path, adapter: Path | None = None, *, threads: int = 0) -> Iterator[LlamaServer]:
    """Serve a file, with an adapter of llama.cpp's `--lora`, keys and values in float32.

    Args:
        threads: 0: as many as llama.cpp chooses. They wait for each other by turning in a loop, so
            more than the idle cores are slow.

    Raises ModelError: llama.cpp refuses the file; the message has its own words.
    """
    with tempfile.TemporaryDirectory() as directory, Path(directory, "log").open("w+b") as log:
        port_file = Path(directory, "url")
        process = subprocess.Popen(
            _command(file, adapter, port_file, threads),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
        )
        try:
            server = LlamaServer(
                _wait_for(process, port_file, file, Path(directory, "log")), _package()
            )
            yield server
            server.close()
        finally:
            process.kill()
            process.wait()


def _package() -> str:
    """Name and version of the package that holds llama.cpp; "" for a program."""
    try:
        return f"llama.cpp (xllamacpp {version('xllamacpp')})"
    except PackageNotFoundError:
        return ""


def _command(file: Path, adapter: Path | None, port_file: Path, threads: int) -> list[str]:
    if importlib.util.find_spec("xllamacpp") is not None:
        child = Path(__file__).with_name("llama_child.py")
        command = [
            sys.executable,
            str(child),
            str(file),
            str(port_file),
            str(CONTEXT),
            HOST,
            str(threads),
        ]
        return [*command, *([str(adapter)] if adapter else [])]
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    port_file.write_text(f"http://{HOST}:{port}")
    command = [
        "llama-server",
        "-m",
        str(file),
        "--host",
        HOST,
        "--port",
        str(port),
        "-c",
        str(CONTEXT),
        "-np",
        "1",
    ]
    command += [
        "-ctk",
        "f32",
        "-ctv",
        "f32",
        "-fa",
        "off",
        "--jinja",
        "-ngl",
        "0",
        "--no-kv-offload",
        "--no-op-offload",
    ]
    command += ["--threads", str(threads)] if threads else []
    return [*command, *(["--lora", str(adapter)] if adapter else [])]


def _wait_for(process: subprocess.Popen[bytes], port_file: Path, file: Path, log: Path) -> str:
    """Return the URL once the server is ready."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ModelError(
                f"llama.cpp does not load {file.name}: {_reason(log.read_text(errors='replace'))}"
            )
        url = port_file.read_text() if port_file.is_file() else ""
        if url.endswith("\n") or (url and _healthy(url)):
            return url.strip()
        time.sleep(PAUSE_S)  # another program: it does not signal when it is ready
    raise ModelError(f"llama.cpp has not loaded {file.name} in {START_S:g} seconds")


def _healthy(url: str) -> bool:
    try:
        with sync_client(Bounds(seconds=1.0), timeout=1.0) as client:
            return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    wrong = [line for line in lines if "error" in line.lower() and "exiting" not in line.lower()]
    return (wrong or lines or ["no reason is known"])[0][-300:]
