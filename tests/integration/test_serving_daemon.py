"""mlx_parallm_serve as a whole: names, adapters, and ending in order, again and again."""

import concurrent.futures
import copy
import signal
from pathlib import Path

import mlx.core as mx
import openai
import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.loading import load_model
from mlx_parallm.models.lora import adapter_layers, inject_lora, save_adapter
from tests.integration.processes import Daemon, free_port
from tests.tiny_models import lora_config

pytestmark = pytest.mark.slow
# those above and every training daemon of these tests, which has the same threads, must end with 0
# as well
STARTS = 2


def serve(*arguments: str) -> Daemon:
    port = free_port()
    return Daemon(
        "mlx_parallm_serve",
        "--model-path",
        "builtin:tiny",
        "--port",
        str(port),
        *arguments,
        port=port,
    )


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes every answer."""
    directory = tmp_path_factory.mktemp("adapters") / "loud"
    directory.mkdir()
    tree = copy.deepcopy(load_model(ModelConfig()).model)
    mx.random.seed(0)
    inject_lora(tree, lora_config(4, 8))
    layers = adapter_layers(tree)
    changed = {
        path: LoraPair(p.a, mx.random.normal(p.b.shape), p.scale) for path, p in layers.items()
    }
    save_adapter(directory, changed, num_layers=len(tree.layers))
    return directory


def answer(client: openai.OpenAI, model: str) -> str | None:
    messages = [{"role": "user", "content": "Sort: dcba"}]
    reply = client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=8
    )
    return reply.choices[0].message.content


def test_base_and_adapters_by_name(adapter: Path) -> None:
    with serve("--lora-path", f"a={adapter}", f"b={adapter / 'adapters.safetensors'}") as daemon:
        client = daemon.wait_until_ready().client()
        models = {model.id: model.model_extra or {} for model in client.models.list()}
        assert set(models) == {"builtin:tiny", "a", "b"}
        assert models["a"]["parent"] == "builtin:tiny"
        base = answer(client, "builtin:tiny")
        assert base == answer(client, "tiny") == answer(client, "default")
        assert answer(client, "a") == answer(client, "b") != base
        with pytest.raises(openai.NotFoundError, match="builtin:tiny, a, b"):
            answer(client, "c")
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0


def test_an_unnamed_adapter_is_the_served_model_and_the_base_stays_reachable(adapter: Path) -> None:
    with serve("--lora-path", str(adapter)) as daemon:
        client = daemon.wait_until_ready().client()
        assert (
            answer(client, "default")
            == answer(client, "loud")
            != answer(client, "builtin:tiny:base")
        )
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora-path", "/nowhere"], "no adapter at /nowhere"),
        pytest.param(
            ["--lora-path", "default={adapter}"],
            "cannot be named 'default'",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--lora-path", "{adapter}", "loud={adapter}"],
            "two adapters are named 'loud'",
            marks=pytest.mark.long,
        ),
        (["--host", "0.0.0.0"], "API key"),
        (["--set", "server.prot=1"], "server.port"),
        pytest.param(["--model-path", "/nowhere"], "/nowhere", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    adapter: Path, arguments: list[str], message: str
) -> None:
    with serve(*[argument.format(adapter=adapter) for argument in arguments]) as daemon:
        assert daemon.wait(timeout=60) == 2
    errors = [line for line in daemon.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in daemon.output


@pytest.mark.timeout(600)
def test_starts_and_stops_all_exit_zero() -> None:
    """MLX with MKL aborts at exit when a thread leaves its streams behind (10 of 16 runs without
    our clean-up)."""

    def once(_: int) -> int:
        with serve() as daemon:
            client = daemon.wait_until_ready().client()
            answer(client, "default")
            daemon.send(signal.SIGTERM)
            return daemon.wait()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(once, range(STARTS))) == [0] * STARTS
