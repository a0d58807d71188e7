"""`mlx_parallm export` on the shipped model with an adapter: what is written is what is served
here, or nothing is."""

import json
import math
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlx_parallm import cli
from mlx_parallm.deploy.export import gguf_file, llama_server
from mlx_parallm.deploy.export.pipeline import lm_studio_directory
from mlx_parallm.deploy.export.quantization import without_own_type
from mlx_parallm.deploy.export.reference import divergence, mean_divergence
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.gguf import architectures
from mlx_parallm.models.lora import adapter_layers, inject_lora, save_adapter
from tests.export.llama import needs_llama, report
from tests.export.test_ollama import fake_ollama
from tests.runs.commands import call
from tests.tiny_models import TINY_ASSETS, lora_config

BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a small adapter that changes answers, as training leaves it."""
    run = tmp_path_factory.mktemp("checkpoints") / "first"
    final = run / "step_000001"
    final.mkdir(parents=True)
    model, _ = load_model(TINY_ASSETS)
    mx.random.seed(1)
    inject_lora(model, lora_config(rank=4, alpha=8))
    layers = {
        name: LoraPair(pair.a, mx.random.normal(pair.b.shape) * 0.02, pair.scale)
        for name, pair in adapter_layers(model).items()
    }
    save_adapter(final, layers, num_layers=3, base="builtin:tiny")
    (final / "trainer_state.json").write_text("{}")
    (run / "latest").symlink_to(final.name)
    (run / "final").symlink_to(final.name)
    (run / "config.toml").write_text('[model]\nbase_path = "builtin:tiny"\n')
    return run


KEY = "tokenizer.chat_template"
OTHER = "nats a token from this model"


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    return call(cli.export, *arguments)


@needs_llama
@pytest.mark.parametrize("kind", [pytest.param("f32", marks=pytest.mark.slow), "q8_0"])
def test_a_run_becomes_a_file_that_llama_cpp_answers_with_as_here(
    tmp_path: Path, run_directory: Path, kind: str
) -> None:
    result = export(run_directory, "--type", kind, "--to", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert f"first-{kind}.gguf" in result.stdout
    assert "200 of 200 equal" in result.stdout
    found = report(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "Modelfile",
        "export.json",
        f"first-{kind}.gguf",
    ]
    checked = found["verification"]
    assert checked["passed"] and checked["texts"] == [200, 200] and checked["chats"] == [5, 5]
    equal, places = checked["choices"]
    assert places >= 16 and equal >= {"f32": places, "q8_0": 0.9 * places}[kind]
    assert checked["remainder"] <= {"f32": 1e-4, "q8_0": checked["allowed"] / 2}[kind], (
        "the bound is not close"
    )
    assert (checked["rounding"] > 0) == (kind == "q8_0")
    assert (found["adapted_layers"], found["stops"]) == (21, ["<|im_end|>", "<|endoftext|>"])
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert modelfile.startswith(f"FROM ./first-{kind}.gguf\nTEMPLATE ")
    assert (
        'PARAMETER stop "<|im_end|>"\nPARAMETER stop "<|endoftext|>"\nPARAMETER temperature 1\n'
        in modelfile
    )


@needs_llama
@pytest.mark.slow
def test_an_adapter_alone_is_verified_beside_its_base(tmp_path: Path, run_directory: Path) -> None:
    result = export(run_directory, "--type", "f32", "--adapter-only", "--to", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "export.json",
        "first-lora.gguf",
    ]
    checked = report(tmp_path / "out")["verification"]
    assert checked["passed"] and checked["remainder"] <= 1e-4


def without_template(path: Path) -> None:
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))


@needs_llama
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("pre", "texts have other token ids"),
        pytest.param(
            "no pre", "texts have other token ids", marks=[pytest.mark.slow, pytest.mark.long]
        ),
        pytest.param(
            "template",
            "the chat template makes another prompt",
            marks=[pytest.mark.slow, pytest.mark.long],
        ),
        pytest.param("rope base", OTHER, marks=pytest.mark.slow),
        pytest.param("rope base q4_k_m", OTHER, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("rope order q8_0", OTHER, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("rope order q2_k", OTHER, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("one tensor q8_0", OTHER, marks=[pytest.mark.slow, pytest.mark.long]),
        pytest.param("one tensor q4_k_m", OTHER, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_a_file_that_is_not_as_here_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, reason: str
) -> None:
    arguments: list[Any] = ["--type", fault.rpartition(" ")[2] if "_" in fault else "f32"]
    if fault == "pre":
        arguments += ["--pre", "qwen2"]
    elif fault == "no pre":
        monkeypatch.setattr("gguf.GGUFWriter.add_tokenizer_pre", lambda self, name: None)
    elif fault == "template":
        other = "{{ messages[0].content }}"
        monkeypatch.setattr(
            "gguf.GGUFWriter.add_chat_template", lambda self, text: self.add_string(KEY, other)
        )
    elif "rope order" in fault:
        monkeypatch.setattr(architectures, "ARCHITECTURES", with_other_order())
    elif "one tensor" in fault:
        monkeypatch.setattr(gguf_file, "encode", with_one_tensor_reversed(gguf_file.encode))
    else:
        write_metadata = architectures.write_metadata

        def other_base(writer: Any, arguments: Any) -> None:
            arguments.rope_theta = 100.0
            write_metadata(writer, arguments)

        monkeypatch.setattr(architectures, "write_metadata", other_base)
    result = export("--base-model", "builtin:tiny", "--to", tmp_path / "out", *arguments)
    assert result.returncode == 2
    assert reason in result.stderr.splitlines()[-1], result.stderr
    assert "it was not kept" in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def with_other_order() -> dict[str, architectures.GGUFArchitecture]:
    """Heads with their rows in llama.cpp's order where they should be in mlx-lm's, or the other
    way round."""
    return {
        name: replace(each, permuted=not each.permuted)
        for name, each in architectures.ARCHITECTURES.items()
    }


def with_one_tensor_reversed(encode: Any) -> Any:
    """The values of one layer with the rows of its matrix in another order."""

    def encoded(pieces: Any, kind: Any, shape: Any, name: str) -> Any:
        whole = np.concatenate(list(pieces))
        turned = whole[::-1] if name == "model.layers.1.self_attn.v_proj.weight" else whole
        return encode([turned], kind, shape, name)

    return encoded


@needs_llama
@pytest.mark.slow
def test_a_type_that_no_tensor_has_is_told(tmp_path: Path) -> None:
    """Rows of 128 are not multiple of 256: a q2_k of the tiny model holds none, and was verified
    as one."""
    result = export("--base-model", "builtin:tiny", "--type", "q2_k", "--to", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "no tensor of this file is Q2_K" in result.stdout and "Q4_0" in result.stdout


def test_which_files_lack_their_own_type() -> None:
    assert without_own_type("q8_0", {"F32": 1, "Q8_0": 2}) is None
    assert without_own_type("q4_k_m", {"F32": 1, "Q4_K": 2, "Q6_K": 1}) is None
    assert "Q5_K" in str(without_own_type("q5_k_s", {"F32": 13, "Q5_1": 22}))
    assert "(13 F32, 22 F16)" in str(without_own_type("q6_k", {"F32": 13, "F16": 22}))


def test_divergences_of_hand_made_distributions() -> None:
    ours = np.log(np.array([0.5, 0.25, 0.25]))
    assert divergence(ours, dict(enumerate(ours.tolist()))) == 0.0
    assert divergence(ours, {0: math.log(0.25)}) == pytest.approx(0.1438, abs=1e-4)
    assert divergence(ours, {0: math.log(0.5)}) == 0.0, "what is not listed counts as one token"
    assert mean_divergence([ours[None]], [np.log(np.array([[0.25, 0.5, 0.25]]))]) == pytest.approx(
        0.25 * math.log(2)
    )


def test_what_can_be_refused_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_directory: Path
) -> None:
    (tmp_path / "there").mkdir()
    bare = Path(shutil.copytree(TINY_ASSETS, tmp_path / "bare"))
    without_template(bare)
    tiny = ["--base-model", "builtin:tiny"]
    cases = [
        ([*tiny, "--type", "q9"], "--type q9: expected one of f32, f16"),
        ([*tiny, "--to", tmp_path / "there"], "exists already: choose another --to"),
        ([*tiny, "--to", "ollama:"], "such as ollama:my-model"),
        ([*tiny, "--to", "a", "--to", "b"], "at most one directory"),
        ([*tiny, "--to", "lmstudio:me"], "expected lmstudio:PUBLISHER/MODEL"),
        ([run_directory, "--to", "ollama:m", "--adapter-only"], "Ollama takes no adapter"),
        ([*tiny, "--to", tmp_path / "x", "--adapter-only"], "--adapter-only needs an adapter"),
        (
            ["--base-model", bare, "--to", tmp_path / "x"],
            "has no chat template: llama.cpp would take another model's",
        ),
        ([tmp_path / "there"], "is not a run directory"),
        ([*tiny, "--name", "a/b"], "it becomes a file's name, without /"),
        (
            [*tiny, "--to", "ollama:m", "--ollama-url", "http://127.0.0.1:9"],
            "is `ollama serve` running",
        ),
        ([*tiny, "--verify", "http://127.0.0.1:9"], "http://127.0.0.1:9/tokenize does not answer"),
        ([*tiny, "--verify", "never"], "'never' is not a URL"),
    ]
    for arguments, reason in cases:
        result = export(*arguments)
        assert result.returncode == 2, arguments
        assert reason in result.stderr.splitlines()[-1], result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare", "there"]
    monkeypatch.setattr("mlx_parallm.deploy.export.quantization._quantize_chunk", lambda: None)
    result = export(*tiny, "--type", "q4_k_m")
    assert "llama-quantize MODEL-bf16.gguf MODEL-q4_k_m.gguf Q4_K_M" in result.stderr


def test_without_llama_cpp_it_says_that_nothing_was_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_server, "available", lambda: False)
    bare = Path(shutil.copytree(TINY_ASSETS, tmp_path / "bare"))
    without_template(bare)
    result = export(
        "--base-model", bare, "--chat-template", "none", "--type", "f16", "--to", tmp_path / "out"
    )
    assert result.returncode == 0, result.stderr
    assert "not verified: no llama.cpp here: `pip install xllamacpp`" in result.stdout
    assert report(tmp_path / "out")["verification"]["passed"] is False
    assert "TEMPLATE" not in (tmp_path / "out" / "Modelfile").read_text()


@needs_llama
@pytest.mark.slow
def test_a_server_that_runs_is_compared_and_nothing_is_written(
    tmp_path: Path, run_directory: Path
) -> None:
    assert (
        export(
            run_directory, "--type", "f16", "--verify", "off", "--to", tmp_path / "out"
        ).returncode
        == 0
    )
    with llama_server.running(tmp_path / "out" / "first-f16.gguf") as server:
        same = export(run_directory, "--type", "f16", "--verify", f"{server.url}/v1")
    assert same.returncode == 0 and "200 of 200 equal" in same.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ollama_gets_the_model_with_its_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_directory: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with fake_ollama() as (url, state):
        options = ["--verify", "off", "--ollama-url", url]
        result = export(run_directory, "--to", "ollama:first", *options)
        assert result.returncode == 0, result.stderr
        assert "ollama run first" in result.stdout
        assert list(tmp_path.iterdir()) == []
        [created] = state.created
        assert created["parameters"]["stop"] == ["<|im_end|>", "<|endoftext|>"]
        assert created["template"].startswith("{{- range .Messages }}")
        assert list(created["files"]) == ["first-q8_0.gguf"]

        state.refuse = "no space left on device"
        result = export(run_directory, "--to", "ollama:second", "--to", tmp_path / "kept", *options)
        assert result.returncode == 2
        assert (
            f"no space left on device. The file is in {tmp_path / 'kept'}"
            in result.stderr.splitlines()[-1]
        )
        assert (tmp_path / "kept" / "first-q8_0.gguf").is_file()


def test_lm_studio_looks_two_directories_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_directory: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert export(run_directory, "--to", "lmstudio", "--verify", "off").returncode == 0
    models = tmp_path / ".lmstudio" / "models"
    assert (models / "mlx-parallm" / "first" / "first-q8_0.gguf").is_file()
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'elsewhere'}\n")
    assert lm_studio_directory("me/m") == tmp_path / "elsewhere" / "models" / "me" / "m"


@pytest.mark.slow
@pytest.mark.long
def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    result = subprocess.run(
        [
            BIN / "mlx_parallm_export",
            "--base-model",
            "builtin:tiny",
            "--verify",
            "off",
            "--to",
            tmp_path / "out",
        ],
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    assert "cannot be written" in result.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_killed_export_leaves_no_file_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    """It is killed while the file is half written: its last tensors wait for a pipe that nobody
    feeds."""
    out, program = tmp_path / "out", tmp_path / "stopped.py"
    program.write_text(
        "import sys, time\n"
        "import mlx_parallm\n"
        "from mlx_parallm import cli\n"
        "from mlx_parallm.deploy.export import model\n"
        "rows = model.SourceTensor.rows\n"
        "def stopped(tensor, *changes):\n"
        "    if tensor.name.startswith('model.layers.2'):\n"
        "        print('half', flush=True)\n"
        "        time.sleep(600)\n"
        "    return rows(tensor, *changes)\n"
        "model.SourceTensor.rows = stopped\n"
        f"cli.export(['--base-model', 'builtin:tiny', '--verify', 'off', '--to', {str(out)!r}])\n"
    )
    process = subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    [left] = [path for path in tmp_path.iterdir() if path != program]
    assert left.name == f"out.tmp-{process.pid}", "nothing has the name of a finished export"
    assert export("--base-model", "builtin:tiny", "--verify", "off", "--to", out).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "stopped.py"]
