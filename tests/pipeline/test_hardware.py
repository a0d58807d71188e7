"""Hardware profiles: the specification's numbers, and their reasons."""

from pathlib import Path

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.systems import pipeline
from mlx_parallm.systems.pipeline import hardware
from mlx_parallm.systems.pipeline.hardware import (
    BILLION,
    HardwareConfig,
    detect_hardware,
    parameters_of,
)


def test_the_ryzen_preset_is_the_specifications() -> None:
    config = pipeline.get_ryzen_optimized_config()
    assert (config.cpu_cores, config.cpu_threads, config.ram_gb, config.has_avx2) == (
        16,
        32,
        40.0,
        True,
    )
    assert (config.recommended_batch_size, config.lora_r, config.lora_alpha) == (2, 16, 32)
    assert (config.num_generations, config.use_bf16, config.quantization) == (6, True, "q8_0")
    assert detect_hardware(pipeline.RYZEN_OPTIMIZED) == config
    assert config.to_lora_config()["r"] == 16
    assert config.to_training_args()["gradient_accumulation_steps"] == 4
    assert config.to_grpo_config()["num_generations"] == 6


@pytest.mark.parametrize(
    ("backend", "gigabytes", "wanted"),
    [
        ("cpu", 64.0, (4, 3, 16, 8, "q8_0")),
        ("cpu", 63.0, (2, 1.5, 16, 6, "q8_0")),
        ("cpu", 16.0, (1, 0.5, 8, 4, "q6_k")),
        ("cpu", 8.0, (1, 0.5, 4, 2, "q4_k_m")),
        ("metal", 24.0, (8, 7, 32, 8, "q6_k")),
        ("cuda", 16.0, (4, 3, 16, 8, "q6_k")),
        ("cuda", 7.0, (1, 0.5, 8, 4, "q3_k_m")),
    ],
)
def test_memory_decides(backend: str, gigabytes: float, wanted: tuple[float | str, ...]) -> None:
    config = machine(backend, gigabytes)
    chosen = (
        config.recommended_batch_size,
        config.recommended_billions,
        config.lora_r,
        config.num_generations,
    )
    assert (*chosen, config.quantization) == wanted
    assert "GiB" in config.why["rank"]


def machine(backend: str, gigabytes: float) -> HardwareConfig:
    return hardware._fitting(
        cpu_name="x",
        cpu_cores=4,
        cpu_threads=8,
        ram_gb=gigabytes,
        has_avx2=True,
        has_avx512=False,
        backend=backend,
        memory_gb=gigabytes,
        profile="AUTO_DETECT",
    )


def test_a_small_model_takes_the_top_tier_and_a_large_one_a_base_in_4_bits() -> None:
    small = machine("cpu", 8.0).for_model(BILLION // 100)
    assert (small.lora_r, small.num_generations, small.quantize_base) == (16, 8, False)
    assert "0.01 billion parameters are few" in small.why["rank"]
    large = machine("cpu", 8.0).for_model(3 * BILLION)  # 5.6 GiB of 8; 8.5 bits: 3.0 GiB of 6.4
    assert (large.lora_r, large.quantize_base, large.quantization) == (4, True, "q8_0")
    # 6.1 GiB of 6.4; q8_0 takes 7.9
    assert machine("cpu", 8.0).for_model(8 * BILLION).quantization == "q6_k"
    keys = large.settings(1024)
    assert keys["rl_training.lora.rank"] == 4 and keys["rl_training.token_budget"] == 1024
    assert any("4 bits" in line and "more than half" in line for line in large.summary())
    assert machine("cpu", 8.0).for_model(None) == machine("cpu", 8.0)


def test_this_machine_and_what_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    config = detect_hardware(pipeline.CPU_ONLY)
    assert config.backend == "cpu" and config.memory_gb == config.ram_gb and config.cpu_threads >= 1
    monkeypatch.setattr(hardware, "detect", lambda: hardware_of("cpu"))
    with pytest.raises(ConfigError, match="CPU"):
        detect_hardware(pipeline.GPU_ENABLED)
    with pytest.raises(ConfigError, match="no hardware profile 'TPU'"):
        detect_hardware("TPU")  # type: ignore[arg-type]


def hardware_of(backend: str) -> object:
    from mlx_parallm.system.hardware import Hardware

    return Hardware(backend, "x", 2, 2**33, 2**32)  # type: ignore[arg-type]


def test_the_size_of_a_model_is_counted_or_read_from_its_name(tmp_path: Path) -> None:
    counted = parameters_of("builtin:tiny")
    assert counted is not None and 10**5 < counted < 10**7
    assert parameters_of("Qwen/Qwen2.5-1.5B-Instruct") == 15 * BILLION // 10
    assert parameters_of("someone/model") is None
    assert parameters_of(str(tmp_path)) is None
