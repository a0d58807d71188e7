"""Defaults that follow from the machine, and their place below the configuration."""

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_parallm.config.load import hardware_defaults, load_config
from mlx_parallm.engine.starting import engine_options
from mlx_parallm.system.hardware import (
    GIB,
    Hardware,
    bound_buffer_cache,
    detect,
    empty_buffer_cache,
    lack_of_room,
    memory_present,
    mlx_device,
    usable_cores,
    wire_memory,
)


def machine(backend: str = "cpu", memory: int = 64) -> Hardware:
    return Hardware(backend, "x86_64", 2, memory * GIB, memory * GIB)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("backend", "memory", "expected"),
    [
        ("cpu", 64, {}),
        ("cuda", 64, {"server.prefill_chunk": 2048}),
        # Metal's watchdog kills work that takes seconds (ml-explore/mlx#3267).
        (
            "metal",
            64,
            {
                "server.prefill_chunk": 2048,
                "rl_training.max_eval_ms": 250,
                "server.max_prefill_ms": 250,
            },
        ),
        *(
            ("cpu", gib, {"rl_training.token_budget": tokens})
            for gib, tokens in ((0, 1024), (2, 2048), (7, 7168))
        ),
    ],
)
def test_defaults_follow_from_the_machine(
    backend: str, memory: int, expected: dict[str, int]
) -> None:
    assert hardware_defaults(machine(backend, memory)) == expected


@pytest.mark.parametrize(
    ("backend", "memory", "billions", "tokens"),
    [
        ("metal", 24, 14, 2304),
        ("cuda", 96, 14, None),
        ("metal", 24, 0.6, None),
        ("cpu", 24, 14, None),
    ],
)
def test_a_large_model_has_smaller_micro_batches_where_memory_is_short(
    backend: str, memory: int, billions: float, tokens: int | None
) -> None:
    """14 B in 4 bits: 17.0 GiB at 2048 tokens, 21.5 at 4096 (docs/first_model.md)."""
    found = hardware_defaults(machine(backend, memory), billions)
    assert found.get("rl_training.token_budget") == tokens


def test_hardware_defaults_lie_below_file_and_command_line(tmp_path: Path) -> None:
    found = hardware_defaults(machine("cuda", memory=2))
    assert load_config(None, [], found).server.prefill_chunk == 2048
    (tmp_path / "x.toml").write_text("[server]\nprefill_chunk = 64\n")
    config = load_config(tmp_path / "x.toml", ["rl_training.token_budget=99"], found)
    assert (config.server.prefill_chunk, config.rl_training.token_budget) == (64, 99)


@pytest.mark.parametrize("given", [[], ["server.kv_cache_bytes=8", "server.prefix_cache_bytes=9"]])
def test_in_deterministic_mode_nothing_depends_on_free_memory_or_earlier_answers(
    given: list[str],
) -> None:
    loaded = SimpleNamespace(max_model_len=64, vocab_size=300, config={})
    found = []
    for mode in ([], ["rl_training.deterministic=true", "rl_training.max_staleness=0"]):
        config = load_config(None, [*given, *mode])
        deterministic = config.rl_training.deterministic
        options = engine_options(config.server, loaded, deterministic=deterministic)  # type: ignore[arg-type]
        found.append((options.kv_cache_bytes, options.prefix_cache_bytes))
    if given:
        assert found == [(8, 9)] * 2
    else:
        assert (
            found[0][0] > 0 and found[0][1] == memory_present()[1] // 20 and found[1] == (None, 0)
        )


@pytest.mark.parametrize(
    "model_gib, advice",
    [(86, ""), (88, "sudo sysctl iogpu.wired_limit_mb=100125"), (120, "quantized")],
)
def test_metal_keeps_the_model_in_memory(
    model_gib: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MLX answers on a Mac of 128 GiB, of which Metal keeps 96: 0.9 of them are 86.4."""
    mx = pytest.importorskip("mlx.core")
    wired: list[int] = []
    sizes = {"max_recommended_working_set_size": 96 * GIB, "memory_size": 128 * GIB}
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", dict)  # of the CPU, which a Mac's program may choose
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert wire_memory(model_gib * GIB, 1.0) is None and wired == []
    monkeypatch.setattr(mx, "device_info", lambda: sizes)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    found = wire_memory(model_gib * GIB) or ""
    assert advice in found and bool(advice) == bool(found) and wired == [], "off by default"
    assert [wire_memory(model_gib * GIB, way) or "" for way in (0.5, "weights")] == [found, found]
    assert wired == [48 * GIB, min(model_gib, 96) * GIB]


def test_a_lower_bound_of_the_buffer_cache_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's own on a CPU is 32 MiB; on a GPU it is what the GPU has."""
    mx = pytest.importorskip("mlx.core")
    limits = [32 << 20]

    def set_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    monkeypatch.setattr(mx, "set_cache_limit", set_limit)
    eighth = memory_present()[1] // 8
    assert bound_buffer_cache(0.125) == 32 << 20 and limits[-1] == 32 << 20
    limits[:] = [96 * GIB]
    assert bound_buffer_cache(0.125, processes=2) == eighth // 2 == limits[-1]


def test_the_buffer_cache_is_emptied_after_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    mx = pytest.importorskip("mlx.core")
    calls: list[str] = []
    monkeypatch.setattr(mx, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(mx, "clear_cache", lambda: calls.append("clear"))
    empty_buffer_cache()
    assert calls == ["synchronize", "clear"]


def test_this_machine() -> None:
    hardware = detect()
    assert hardware.cores == usable_cores() >= 1
    assert 0 < hardware.available_bytes <= hardware.memory_bytes
    assert mlx_device().startswith("gpu (" if hardware.backend != "cpu" else "cpu (")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "no more memory or threads (MemoryError)"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("[malloc] Unable to allocate 10 bytes."), "Unable to allocate 10"),
        (ImportError("libx.so: failed to map segment from shared object"), "failed to map"),
        (RuntimeError("another fault"), None),
        (OSError(errno.ENOENT, "No such file"), None),
    ],
)
def test_a_lack_of_memory_or_threads_is_one_line(error: Exception, line: str | None) -> None:
    found = lack_of_room(error)
    assert found is None if line is None else found is not None and line in found
    try:
        try:
            raise error
        except Exception as cause:
            raise RuntimeError("a task failed") from cause
    except RuntimeError as outer:
        assert (lack_of_room(outer) is None) == (line is None)
