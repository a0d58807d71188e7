"""GGUFExporter: a run that trained all weights; the hosting profile; destinations that take no
adapter."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gguf import GGUFReader

from mlx_parallm.deploy.export.hosting import fitting_type, hosting_profile
from mlx_parallm.deploy.export.model import ModelSource, source_of_run
from mlx_parallm.deploy.export.pipeline import ExportPipeline, GGUFExporter, destination_of
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.hardware import GIB, Hardware
from tests.tiny_models import TINY_ASSETS


def tensors(file: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in GGUFReader(file).tensors}


def test_a_run_that_trained_all_weights_is_exported_as_it_is(tmp_path: Path) -> None:
    run = tmp_path / "whole"
    step = run / "step_000001"
    step.mkdir(parents=True)
    for file in Path(TINY_ASSETS).iterdir():
        if file.is_file():
            shutil.copy(file, step / file.name)
    (step / "trainer_state.json").write_text("{}")
    (run / "final").symlink_to(step.name)
    (run / "config.toml").write_text(
        '[model]\nbase_path = "builtin:tiny"\n[rl_training.lora]\nenabled = false\n'
    )
    made = tensors(GGUFExporter(str(run), tmp_path, name="whole").convert("F16", check="off"))
    base = tensors(GGUFExporter("builtin:tiny", tmp_path, name="base").convert("F16", check="off"))
    assert made.keys() == base.keys() and len(made) > 20
    assert all(np.array_equal(made[name], base[name]) for name in made)
    assert (tmp_path / "whole-f16-gguf" / "whole-f16.gguf").is_file()
    assert destination_of([], source_of_run(run), "q8_0").directory == run / "whole-q8_0-gguf", (
        "not where one stands"
    )
    assert destination_of([], ModelSource("builtin:tiny", None, "m"), "f16").directory == Path(
        "m-f16-gguf"
    )


@pytest.mark.parametrize(("target", "who"), [("lmstudio", "LM Studio"), ("ollama:x", "Ollama")])
def test_an_adapter_alone_goes_into_no_program_that_loads_whole_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, who: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    place = destination_of([target], ModelSource("builtin:tiny", None, "m"), "lora")
    with pytest.raises(ConfigError, match=f"{who}.*leave --adapter-only out"):
        ExportPipeline(
            ModelSource("builtin:tiny", None, "m"), "f32", place, adapter_only=True
        ).run()


SHAPE = SimpleNamespace(
    head_dim=128,
    num_hidden_layers=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    hidden_size=4096,
)


def test_the_hosting_profile_fits_keys_and_values_into_what_the_file_leaves() -> None:
    cpu = Hardware("cpu", "x", 16, 16 * GIB, 16 * GIB)
    # a token takes 2 · 32 · 8 · 128 · 2 = 131,072 bytes; 0.8 · 16 - 8 = 4.8 GiB hold 39,321: 4
    # requests of 9 · 1024
    profile = hosting_profile(cpu, 8 * GIB, SHAPE, memory=16 * GIB)
    assert (profile.num_parallel, profile.num_ctx, profile.num_thread, profile.num_gpu) == (
        4,
        9 * 1024,
        14,
        0,
    )
    assert profile.to_env()["OLLAMA_NUM_PARALLEL"] == "4" and profile.note == ""
    two = hosting_profile(
        Hardware("cpu", "x", 2, 16 * GIB, 16 * GIB), 8 * GIB, SHAPE, memory=16 * GIB
    )
    assert (two.num_parallel, two.num_thread, two.num_ctx) == (1, 2, 32768)
    gpu = hosting_profile(
        Hardware("cuda", "x", 4, 16 * GIB, 16 * GIB), 8 * GIB, SHAPE, memory=24 * GIB
    )
    assert gpu.num_gpu == 999 and gpu.flash_attention and "-ngl 999" in gpu.llama_server("f")
    large = hosting_profile(cpu, 14 * GIB, SHAPE, memory=16 * GIB)
    assert (large.num_parallel, large.num_ctx) == (1, 2048) and "does not fit" in large.note


def test_the_finest_type_that_fits() -> None:
    assert fitting_type(7 * 10**9, 16 * GIB) == "q8_0"  # 6.9 of 12.8 GiB
    assert fitting_type(14 * 10**9, 16 * GIB) == "q6_k"  # 10.8; q8_0 takes 13.9
    assert fitting_type(70 * 10**9, 16 * GIB) is None
