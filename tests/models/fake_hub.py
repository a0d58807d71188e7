"""A server that speaks the hub's endpoints for one repository, with the headers that
huggingface.co sends."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REPOSITORY = "acme/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(frozen=True)
class Refusal:
    """An answer that is not 200; `code` and `message` go into X-Error-Code and X-Error-Message."""

    status: int
    code: str = ""
    message: str = ""


@dataclass
class FakeHub:
    """What the server answers, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=dict)
    # of files that are listed larger than they are
    sizes: dict[str, int] = field(default_factory=dict)
    info: Refusal | None = None
    content: Refusal | None = None
    asked: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def fetched(self) -> set[str]:
        """Files whose content was sent."""
        return {
            line.rpartition("/")[2]
            for line in self.asked
            if line.startswith("GET") and "/resolve/" in line
        }


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        api = f"/api/models/{REPOSITORY}"
        if not path.startswith((api, f"/{REPOSITORY}/")):
            self._refuse(Refusal(404, "RepoNotFound", "Repository not found"))
        elif path.startswith(api) and self.hub.info:
            self._refuse(self.hub.info)
        elif "/revision/" in path and not path.endswith(("/main", COMMIT)):
            self._refuse(
                Refusal(404, "RevisionNotFound", f"Invalid rev id: {path.rpartition('/')[2]}")
            )
        elif path.startswith(f"{api}/tree/"):
            self._send(json.dumps([self._entry(name) for name in self.hub.files]).encode())
        elif path.startswith(api):
            siblings = [{"rfilename": name, "size": self._size(name)} for name in self.hub.files]
            self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": siblings}).encode())
        elif self.hub.content:
            self._refuse(self.hub.content)
        elif (name := path.rpartition("/")[2]) in self.hub.files:
            self._send(
                self.hub.files[name], {"ETag": f'"{abs(hash(name)):040x}"', "X-Repo-Commit": COMMIT}
            )
        else:
            self._refuse(Refusal(404, "EntryNotFound", "Entry not found"))

    def _entry(self, name: str) -> dict[str, object]:
        return {
            "type": "file",
            "path": name,
            "size": self._size(name),
            "oid": f"{abs(hash(name)):040x}",
        }

    def _size(self, name: str) -> int:
        return self.hub.sizes.get(name, len(self.hub.files[name]))

    def _refuse(self, refusal: Refusal) -> None:
        headers = {"X-Error-Code": refusal.code, "X-Error-Message": refusal.message}
        self._send(b"", {key: value for key, value in headers.items() if value}, refusal.status)

    def _send(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
