"""The hub, spoken to over HTTP: what is fetched, what is refused before it is, and each failure
in words."""

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.models import hub as hub_module
from mlx_parallm.models.hub import download
from mlx_parallm.models.loading import check_model, load_model
from tests.altered import Altered
from tests.models.fake_hub import REPOSITORY, FakeHub, Refusal, fake_hub
from tests.tiny_models import QWEN3, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = save_checkpoint(tmp_path_factory.mktemp("hub") / "m")
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture
def hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: dict[str, bytes]
) -> Iterator[FakeHub]:
    with fake_hub() as server:
        server.files = dict(checkpoint)
        constants = huggingface_hub.constants
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            server.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def refusal(revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(ModelConfig(base_path=REPOSITORY, revision=revision))
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_model_is_downloaded_and_found_again_without_the_hub(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["README.md"] = b"not for us"
    of_tokenizers = {"spiece.model", "tokenizer.model.v3", "source.spm", "chat_template.json"}
    hub.files |= dict.fromkeys(of_tokenizers, b"{}")
    check_model(ModelConfig(base_path=REPOSITORY), train=True)
    assert hub.fetched == {"config.json"}
    loaded = load_model(ModelConfig(base_path=REPOSITORY))
    assert loaded.vocab_size == QWEN3["vocab_size"]
    assert "model.safetensors" in hub.fetched
    assert "README.md" not in hub.fetched and of_tokenizers <= hub.fetched
    hub.info = hub.content = Refusal(503)
    check_model(ModelConfig(base_path=REPOSITORY), train=True)
    assert load_model(ModelConfig(base_path=REPOSITORY)).path == loaded.path


def test_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.content = Refusal(401, "GatedRepo", "Access to model acme/model is restricted.")
    text = refusal()
    assert "is gated: no token is set" in text
    assert f"{hub.url}/acme/model" in text
    assert "`hf auth login`" in text
    monkeypatch.setenv("HF_TOKEN", "hf_known")
    hub.content = Refusal(403, "GatedRepo", "Access to model acme/model is restricted.")
    assert "is gated: your token is known to the hub but has no access" in refusal()


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (
            Refusal(401, "", "Invalid credentials in Authorization header"),
            "refuses your token .* `hf auth login`",
        ),
        (
            Refusal(403, "", "Forbidden"),
            "your token may not read 'acme/model': give it read access",
        ),
        (
            Refusal(401, "", "Invalid username or password."),
            "no model 'acme/model' on the hub: check the name",
        ),
        (
            Refusal(404, "RepoNotFound", "Repository not found"),
            "no model 'acme/model' on the hub: check the name",
        ),
    ],
)
def test_what_the_hub_refuses(hub: FakeHub, info: Refusal, text: str) -> None:
    hub.info = info
    with pytest.raises(ModelError, match=text):
        download(REPOSITORY, None)
    refusal()


def test_an_unknown_revision(hub: FakeHub) -> None:
    assert "has no revision 'v9' (model.revision): branches and tags are at" in refusal("v9")


def test_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.info = Refusal(429)
    text = refusal()
    assert "is not in the local cache and" in text
    assert "`hf download acme/model --local-dir DIR`" in text
    # nobody listens there
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached: go online once" in refusal()


def test_a_cache_with_a_part_of_the_model_is_said_to_be_one(hub: FakeHub) -> None:
    check_model(ModelConfig(base_path=REPOSITORY), train=False)  # config.json only
    hub.info = Refusal(503)
    assert "`hf download" in refusal()


def test_too_little_disk_is_said_before_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.sizes["model.safetensors"] = 9_000_000_000
    usage = namedtuple("usage", "total used free")
    disk = usage(10**10, 9 * 10**9, 10**9)
    monkeypatch.setattr(hub_module, "shutil", Altered(shutil, disk_usage=lambda _: disk))
    text = refusal()
    assert "needs 9.0 GB more in" in text
    assert "where 1.0 GB are free" in text
    assert "`hf cache rm`" in text
    assert not hub.fetched


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["model-Q4_K_M.gguf", "README.md"], "holds GGUF, llama.cpp's format"),
        (["config.json", "pytorch_model.bin"], r"has PyTorch weights only .*save_pretrained"),
    ],
)
def test_other_formats_are_refused_before_the_download(
    hub: FakeHub, names: list[str], text: str
) -> None:
    hub.files = dict.fromkeys(names, b"{}")
    with pytest.raises(ModelError, match=text):
        download(REPOSITORY, None)
    assert not hub.fetched


def test_what_config_json_shows_is_refused_before_the_weights(hub: FakeHub) -> None:
    model = ModelConfig(base_path=REPOSITORY)
    for change, kind, text in [
        ({"model_type": "perceptron"}, ModelError, "model_type 'perceptron' is unknown to mlx-lm"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            ModelError,
            "GPTQ to 4 bits",
        ),
        (
            {"quantization": {"bits": 4, "group_size": 64}},
            ConfigError,
            r"already quantised \(4 bits, groups of 64\)",
        ),
    ]:
        shutil.rmtree(huggingface_hub.constants.HF_HUB_CACHE, ignore_errors=True)
        hub.files["config.json"] = json.dumps(QWEN3 | change).encode()
        with pytest.raises(kind, match=text):
            check_model(model, train=True, quantize=True)
    assert hub.fetched == {"config.json"}


@pytest.mark.slow
def test_the_command_says_it_in_one_line(hub: FakeHub, tmp_path: Path) -> None:
    hub.content = Refusal(403, "GatedRepo", "Access to model acme/model is restricted.")
    program = "import sys; from mlx_parallm.cli import train; sys.exit(train(sys.argv[1:]))"
    arguments = [
        "--config",
        "quickstart",
        "--set",
        f"model.base_path={REPOSITORY}",
        "--set",
        "server.port=0",
    ]
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "MKL_NUM_THREADS": "1",
            "PATH": "/usr/bin",
        },
        check=False,
    )
    lines = [line for line in result.stderr.splitlines() if "gated" in line]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1
    assert "Traceback" not in result.stderr
    assert list(tmp_path.glob("checkpoints/*")) == []
