"""The client against a server that behaves as Ollama's documented HTTP API; Modelfile and Go
template."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.deploy.export.ollama import OllamaDeployer, go_template, modelfile
from mlx_parallm.errors import EndpointError
from mlx_parallm.models.loading import load_tokenizer
from tests.tiny_models import TINY_ASSETS

FILE = b"GGUF" + bytes(range(256)) * 9000  # more than one piece of an upload


class FakeOllama:
    """https://docs.ollama.com/api: version, blobs, create, tags, delete."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.uploads = 0
        self.cut = 0  # uploads that are cut after their first bytes
        self.refuse: str | None = None
        self.refuse_late: str | None = None


class OllamaHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeOllama

    def answer(self, status: int, value: Any = None) -> None:
        content = b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.path == "/api/version":
            return self.answer(200, {"version": "0.35.0"})
        return self.answer(
            200, {"models": [{"name": body["model"]} for body in self.state.created]}
        )

    def do_HEAD(self) -> None:
        self.answer(200 if self.path.removeprefix("/api/blobs/") in self.state.blobs else 404)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        if not self.path.startswith("/api/blobs/"):
            return self.create(json.loads(self.rfile.read(length)))
        self.state.uploads += 1
        if self.state.cut:
            self.state.cut -= 1
            self.rfile.read(1000)
            self.close_connection = True
            return self.connection.close()
        digest, content = self.path.removeprefix("/api/blobs/"), self.rfile.read(length)
        if digest != f"sha256:{hashlib.sha256(content).hexdigest()}":
            return self.answer(400, {"error": "digest does not match file content"})
        self.state.blobs[digest] = content
        return self.answer(201)

    def do_DELETE(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kept = [each for each in self.state.created if each["model"] != body["model"]]
        found, self.state.created = len(kept) < len(self.state.created), kept
        self.answer(200) if found else self.answer(
            404, {"error": f"model '{body['model']}' not found"}
        )

    def create(self, body: dict[str, Any]) -> None:
        if self.state.refuse:
            return self.answer(400, {"error": self.state.refuse})
        missing = [digest for digest in body["files"].values() if digest not in self.state.blobs]
        statuses: list[dict[str, str]] = [
            {"status": "parsing GGUF"},
            {"status": "writing manifest"},
        ]
        if missing or self.state.refuse_late:
            statuses.append({"error": self.state.refuse_late or f"blob {missing[0]} not found"})
        else:
            self.state.created.append(body)
            statuses.append({"status": "success"})
        content = "".join(f"{json.dumps(status)}\n" for status in statuses).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def fake_ollama() -> Iterator[tuple[str, FakeOllama]]:
    state = FakeOllama()
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), type("Handler", (OllamaHandler,), {"state": state})
    )
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a connection that is cut here
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", state
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def ollama() -> Iterator[tuple[OllamaDeployer, FakeOllama]]:
    with fake_ollama() as (url, state):
        deployer = OllamaDeployer(url, pause_s=0.0)
        yield deployer, state
        deployer.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m-q8_0.gguf"
    path.write_bytes(FILE)
    return path


Ollama = tuple[OllamaDeployer, FakeOllama]


def test_the_file_is_uploaded_under_its_digest_and_created(ollama: Ollama, file: Path) -> None:
    deployer, state = ollama
    said: list[str] = []
    deployer.create(
        "me/m",
        file,
        stops=["<|im_end|>", '"'],
        template="T",
        parameters={"temperature": 0.5},
        progress=said.append,
    )
    digest = f"sha256:{hashlib.sha256(FILE).hexdigest()}"
    assert state.blobs == {digest: FILE}
    assert state.created == [
        {
            "model": "me/m",
            "files": {"m-q8_0.gguf": digest},
            "stream": True,
            "parameters": {"stop": ["<|im_end|>", '"'], "temperature": 0.5},
            "template": "T",
        }
    ]
    assert said[-2:] == ["writing manifest", "success"]
    assert deployer.models() == ["me/m"]
    deployer.delete("me/m")
    assert deployer.models() == []


def test_what_the_server_has_is_not_uploaded_again(ollama: Ollama, file: Path) -> None:
    deployer, state = ollama
    for _ in range(2):
        deployer.create("m", file, stops=[])
    assert state.uploads == 1


def test_a_cut_upload_is_repeated(ollama: Ollama, file: Path) -> None:
    deployer, state = ollama
    state.cut = 2
    said: list[str] = []
    deployer.create("m", file, stops=[], progress=said.append)
    assert state.uploads == 3
    assert list(state.blobs.values()) == [FILE]
    assert sum("was cut" in line for line in said) == 2


@pytest.mark.parametrize("where", ["refuse", "refuse_late"])
def test_a_refusal_is_one_line(ollama: Ollama, file: Path, where: str) -> None:
    deployer, state = ollama
    setattr(state, where, "unsupported\n architecture 'x'")
    with pytest.raises(EndpointError, match="'x'") as raised:
        deployer.create("m", file, stops=[])
    assert "\n" not in str(raised.value)
    assert state.created == []


def test_no_server_is_one_line(ollama: Ollama, file: Path) -> None:
    deployer, state = ollama
    state.cut = 99
    with pytest.raises(EndpointError, match="`ollama serve`"):
        deployer.create("m", file, stops=[])
    assert state.uploads == 4
    with pytest.raises(EndpointError, match="is not a URL"):
        OllamaDeployer("localhost:11434")
    nobody = OllamaDeployer("http://127.0.0.1:9")
    with pytest.raises(EndpointError, match="is `ollama serve` running"):
        nobody.version()


def test_the_modelfile_names_every_stop() -> None:
    assert modelfile(
        "m.gguf", ["<|im_end|>", 'a"b'], "{{ .Prompt }}", {"num_ctx": 4096, "temperature": 0.7}
    ) == (
        'FROM ./m.gguf\nTEMPLATE """{{ .Prompt }}"""\nPARAMETER stop'
        ' "<|im_end|>"\nPARAMETER stop "a\\"b"\nPARAMETER num_ctx'
        " 4096\nPARAMETER temperature 0.7\n"
    )
    assert "TEMPLATE" not in modelfile("m.gguf", [], None, {})


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            CHATML + ANSWER,
            '{{- range .Messages }}{{ if eq .Role "system" }}{{ "<|im_start|>system\\n" }}{{'
            ' .Content }}{{ "<|im_end|>\\n" }}{{ else if eq .Role "user" }}{{'
            ' "<|im_start|>user\\n" }}{{ .Content }}{{ "<|im_end|>\\n" }}{{ else if eq .Role'
            ' "assistant" }}{{ "<|im_start|>assistant\\n" }}{{ .Content }}{{ "<|im_end|>\\n"'
            ' }}{{ end }}{{ end }}{{ "<|im_start|>assistant\\n" }}',
        ),
        (CHATML + "{% if tools %}{{ tools }}{% endif %}" + ANSWER, None),
        (CHATML.replace("m.content", "m.content | trim") + ANSWER, None),
        (
            "{% if messages[0].role != 'system' %}<|im_start|>system\nHi<|im_end|>\n{% endif %}"
            + CHATML
            + ANSWER,
            None,
        ),
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            + CHATML
            + ANSWER,
            None,
        ),
    ],
    ids=["chatml", "tools", "trimmed", "default system", "refuses system"],
)
def test_a_template_that_only_puts_text_around_messages_is_written_in_go(
    template: str, expected: str | None
) -> None:
    tokenizer = load_tokenizer(TINY_ASSETS, ModelConfig(chat_template=template))
    assert go_template(tokenizer) == expected
