"""An HTTP server that answers from a script, for the clients of other people's servers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Reply = tuple[int, dict[str, str], Any]


class Received(NamedTuple):
    path: str
    key: str | None  # Authorization
    body: Any


@contextmanager
def scripted_http(
    answer: Callable[[str, Any], Reply | None],
) -> Iterator[tuple[str, list[Received]]]:
    """Yields the URL and what was received. A reply is status, headers and JSON (or text as it
    is); None hangs up."""
    received: list[Received] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits 40 ms for the client

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            lines = self.headers.get("Content-Type") == "application/x-ndjson"
            value = body.decode() if lines else json.loads(body) if body else None
            received.append(Received(self.path, self.headers.get("Authorization"), value))
            reply = answer(*received[-1][::2])
            if reply is None:
                self.close_connection = True
                return
            status, headers, answered = reply
            content = (answered if isinstance(answered, str) else json.dumps(answered)).encode()
            self.send_response(status)
            for name, text in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            with suppress(OSError):  # the client has gone
                self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", received
    finally:
        server.shutdown()
        server.server_close()
