"""`--model FILE.gguf`: converted once into the user's cache, by one of several processes; each
fault is one line."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.cli.dataset_config import find_hidden_size, parameters_of
from mlx_parallm.cli.table import main
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.models.gguf import cache, from_gguf
from mlx_parallm.models.loading import check_model, load_model, resolve_model_path
from mlx_parallm.system import packages
from tests.export.llama import LLAMA, checkpoint, write


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(checkpoint(tmp_path / "model", LLAMA), tmp_path / "m.gguf")
    return tmp_path / "m.gguf"


def folders(file: Path) -> list[str]:
    return sorted(
        path.name for path in (file.parent / "cache/mlx_parallm/gguf").iterdir() if path.is_dir()
    )


def test_a_file_is_a_model(file: Path) -> None:
    """It is checked and loaded as a directory is, converted once, and again in another dtype or
    when it changes."""
    config = ModelConfig(base_path=str(file), dtype="float32")
    assert check_model(config, train=True)["model_type"] == "llama"
    (first,) = folders(file)
    assert first.startswith("m-float32-")
    weights = file.parent / "cache/mlx_parallm/gguf" / first / "model.safetensors"
    written = weights.stat().st_mtime_ns
    loaded = load_model(config)
    assert loaded.path == weights.parent
    assert weights.stat().st_mtime_ns == written
    expected = mx.load(str(file.parent / "model/model.safetensors"))["model.norm.weight"]
    assert mx.array_equal(loaded.model.model.norm.weight, expected.astype(mx.float32)).item()
    bfloat16 = resolve_model_path(str(file), dtype="bfloat16")
    assert json.loads((bfloat16 / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert len(folders(file)) == 2
    write(checkpoint(file.parent / "other", LLAMA, tied=False), file)
    assert resolve_model_path(str(file), dtype="float32") != loaded.path


def test_a_damaged_copy_is_made_again(file: Path) -> None:
    folder = resolve_model_path(str(file))
    (folder / "tokenizer.json").write_text("")
    assert resolve_model_path(str(file)) == folder
    assert (folder / "tokenizer.json").stat().st_size > 1000


def test_two_processes_at_once_convert_once(file: Path) -> None:
    program = (
        "import sys; from mlx_parallm.models.loading import resolve_model_path; from"
        " mlx_parallm.system.log import"
        " configure_logging; configure_logging(level='info');"
        " print(resolve_model_path(sys.argv[1]))"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], answers
    assert len({out for out, _ in answers}) == 1
    errors = "".join(error for _, error in answers)
    assert errors.count("is converted, once") == 1
    assert errors.count("copy of the GGUF file is kept for the next start") == 1
    assert errors.count("copy of the GGUF file is reused") == 1
    (folder,) = folders(file)
    assert errors.count(folder) >= 2  # both say where


def test_each_fault_is_one_line(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing stays in the cache but the lock."""
    bad = file.with_name("bad.gguf")
    bad.write_bytes(file.read_bytes()[:5000])
    assert (
        main(
            [
                "export",
                "--base-model",
                str(bad),
                "--to",
                str(file.with_name("out")),
                "--verify",
                "off",
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert f"{bad} is damaged or cut short" in error
    assert "Traceback" not in error
    with monkeypatch.context() as patched:
        patched.setattr(from_gguf, "free_bytes", lambda path: 1000)
        with pytest.raises(ModelError, match="XDG_CACHE_HOME"):
            resolve_model_path(str(file))
    with monkeypatch.context() as patched:
        patched.setattr(packages, "is_installed", lambda module: module != "gguf")
        with pytest.raises(ConfigError, match=r"'\.\[export\]'"):
            resolve_model_path(str(file))
    with pytest.raises(ModelError, match="has no converted copy"):
        resolve_model_path(str(file), fetch=False)
    assert folders(file) == []
    assert cache.converted(file, "float32").name == folders(file)[0]


def test_sizes_of_a_run_follow_from_the_file(file: Path) -> None:
    assert find_hidden_size(str(file)) == LLAMA["hidden_size"]
    layers, width = LLAMA["num_hidden_layers"], LLAMA["hidden_size"]
    assert parameters_of(str(file), width) == width * (12.0 * layers * width + LLAMA["vocab_size"])
