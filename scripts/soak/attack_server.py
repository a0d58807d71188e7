"""Attacks on the HTTP server and on the groups that reach a training over it."""

import time

from scripts.soak.attack_target import Target, attack, open_files


@attack("2,300 idle connections", found=True)
def idle_connections(target: Target) -> str:
    server = target.server()
    connections = [server.connect() for _ in range(2300)]
    try:
        started = time.monotonic()
        assert server.answers(), "/health does not answer"
        seconds = time.monotonic() - started
        held = open_files(server.process.pid)
        assert held < 2000, f"the server holds {held} files"
    finally:
        for connection in connections:
            connection.close()
    assert "Traceback" not in server.output.read_text(), "a traceback is in the log"
    return f"/health after {seconds:.2f} s, the server holds {held} files"
