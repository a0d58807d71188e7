"""Records what a real BaseEnv and a real trainer ask of a real run-api, into tests/data/atropos_calls.jsonl.

`python -m tests.integration.record_atropos`, once scripts/setup_atropos has made build/atropos. The environment is
examples/atropos/environment.py against `mlx_parallm_serve`; the trainer's calls are made by atroposlib's own example
trainer (its HTTP half: it learns nothing). Afterwards test_atropos_differential writes the answers.
"""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from tests.integration.atropos_comparison import Call
from tests.integration.atropos_processes import EXAMPLES, PROGRAMS, RunApi, Watched
from tests.integration.processes import Daemon, free_port
from tests.integration.test_atropos_differential import RECORDED, write_recording

BATCHES = 3
TRAINER = """
import importlib.util, sys, time, types
place = list(importlib.util.find_spec("example_trainer").submodule_search_locations)
package, config = types.ModuleType("example_trainer"), types.ModuleType("example_trainer.config")
package.__path__, config.TrainingConfig = place, types.SimpleNamespace  # the real ones need torch
sys.modules |= {"example_trainer": package, "example_trainer.config": config}
from example_trainer.api import check_atropos_api, get_batch, register_trainer
url, batches = sys.argv[1], int(sys.argv[2])
config = types.SimpleNamespace(atropos_url=url, batch_size=2, gradient_accumulation_steps=2, seq_len=64, save_path="c",
                               training_steps=batches, checkpoint_interval=3, wandb_group=None, wandb_project=None)
assert check_atropos_api(url)
register_trainer(config)
while batches:
    batches -= get_batch(url)["batch"] is not None
    time.sleep(0.2)
"""
KEPT_HEADERS = ("Content-Type", "Content-Encoding")


class Proxy(ThreadingHTTPServer):
    """Passes one request after the other on to `target` and keeps it, but for repetitions that nothing came of."""

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = httpx.Client(base_url=target, timeout=60)
        self.one_at_a_time = threading.Lock()
        self.calls: list[Call] = []
        self.last: tuple[Call, bytes] | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def pass_on(self, call: Call) -> httpx.Response:
        with self.one_at_a_time:
            reply = self.target.request(call.method, call.path, content=call.content, headers=call.headers)
            if (call, reply.content) != self.last:
                self.calls.append(call)
            self.last = (call, reply.content)
        return reply


class Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
        packed = "Content-Encoding" in headers
        content = body if packed or not body else json.loads(body)
        reply = self.server.pass_on(Call(self.command, self.path, content or None, headers))
        self.send_response(reply.status_code)
        self.send_header("Content-Type", reply.headers["content-type"])
        self.send_header("Content-Length", str(len(reply.content)))
        self.end_headers()
        self.wfile.write(reply.content)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def record() -> list[Call]:
    port = free_port()
    serve = Daemon("mlx_parallm_serve", "--model-path", "builtin:tiny", "--port", str(port), port=port)
    python = str(PROGRAMS / "python")
    with RunApi() as api, serve:
        serve.wait_until_ready()
        proxy = Proxy(api.url)
        with Watched(python, "-c", TRAINER, proxy.url, str(BATCHES)) as trainer:
            environment = (python, str(EXAMPLES / "environment.py"), "serve")
            flags = ("--env.rollout_server_url", proxy.url, "--env.group_size", "2", "--env.max_num_workers", "2")
            with Watched(*environment, *flags, "--openai.base_url", f"{serve.url}/v1") as playing:
                trainer.process.wait(120)
                assert trainer.process.returncode == 0, trainer.output
                playing.process.wait(60)
        proxy.shutdown()
    return proxy.calls


if __name__ == "__main__":
    socket.setdefaulttimeout(60)
    calls = [call.to_json() for call in record()]
    RECORDED.write_text(json.dumps({"name": "base_env", "calls": calls}) + "\n")
    write_recording()
