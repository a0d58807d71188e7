"""`mlx_parallm_serve --tinker` as a process: killed between forward_backward and optim_step,
started again."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.integration.processes import Daemon, free_port
from tests.tinker.serving import API, WireClient, request_of

pytestmark = pytest.mark.slow
DATUM = {"tokens": [1, 40, 41], "target_tokens": [40, 41, 2], "weights": [0.0, 1.0, 1.0]}


def serve(directory: Path) -> Daemon:
    port, where = free_port(), f'tinker.directory="{directory}"'
    arguments = ("--model-path", "builtin:tiny", "--port", str(port), "--tinker", "--set", where)
    return Daemon("mlx_parallm_serve", *arguments, port=port)


def test_a_killed_server_keeps_checkpoints_and_says_what_is_lost(tmp_path: Path) -> None:
    def loss(client: WireClient, model: str, seq_id: int) -> float:
        promise = client.send(model, seq_id, [DATUM], "cross_entropy", forward_only=True)
        return float(client.output(promise).metrics["loss:sum"])

    with serve(tmp_path) as daemon:
        daemon.wait_until_ready()
        with httpx.Client(base_url=f"http://127.0.0.1:{daemon.port}", timeout=60) as http:
            client = WireClient(http)
            model = client.create_model()
            client.output(client.send(model, 1, [DATUM], "cross_entropy"))
            client.result(client.optim_step(model, 2, learning_rate=1e-2))
            state = client.result(
                client.post("save_weights", model_id=model, seq_id=3, path="here")
            )["path"]
            saved = loss(client, model, 4)
            pending = client.send(model, 5, [DATUM], "cross_entropy")
            client.output(pending)
            daemon.send(signal.SIGKILL)
            daemon.wait()
    with serve(tmp_path) as daemon:
        daemon.wait_until_ready()
        with httpx.Client(base_url=f"http://127.0.0.1:{daemon.port}", timeout=60) as http:
            client = WireClient(http)
            client.post("retrieve_future", status=410, request_id=pending["request_id"])
            lost = client.post("optim_step", status=404, model_id=model, seq_id=6, adam_params={})
            assert "create_training_client_from_state" in lost["error"]["message"]
            sent = request_of([DATUM], "cross_entropy", model_id=model, seq_id=6)
            assert http.post(f"{API}/forward_backward", content=sent).status_code == 404
            body = {
                "session_id": client.session,
                "model_seq_id": 0,
                "path": state,
                "optimizer": True,
            }
            again = client.result(client.post("load_weights", **body))
            assert loss(client, again["model_id"], 1) == saved
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0
