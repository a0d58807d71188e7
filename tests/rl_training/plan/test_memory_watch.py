"""A run that does not fit is refused before it loads anything, with settings that fit; one that
ran is compared."""

import io
import json
import re
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from structlog.testing import capture_logs

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.errors import ConfigError
from mlx_parallm.rl_training.events import RunEvents, StepFinished
from mlx_parallm.rl_training.plan import memory_watch
from mlx_parallm.rl_training.plan.memory_watch import MemoryWatch, measured_bytes, needed_bytes
from mlx_parallm.rl_training.plan.preflight import PlannedRun
from mlx_parallm.rl_training.step.batch import BatchStatistics, TrainBatch, TrainSequence
from mlx_parallm.rl_training.step.collate import padded_length
from mlx_parallm.rl_training.step.memory import Lengths
from mlx_parallm.system.device import traits
from mlx_parallm.system.hardware import GIB
from mlx_parallm.system.log import configure_logging
from mlx_parallm.types import Rollout, RolloutGroup
from tests.integration.processes import train
from tests.rl_training.plan.test_preflight import QWEN3, QWEN3_06B

SETTINGS = ["rl_training.token_budget=8192", "server.prefix_cache_bytes=0"]


def config(*overrides: str) -> Config:
    return load_config(None, [*SETTINGS, *overrides])


def needed(config: Config) -> int:
    return needed_bytes(PlannedRun.of(config, QWEN3_06B).memory)


@pytest.fixture(autouse=True)
def warnings_are_seen() -> None:
    configure_logging(level="warning")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    def holds(whole: float, free: float | None = None) -> None:
        monkeypatch.setattr(
            memory_watch, "memory_present", lambda: (int(free or whole), int(whole))
        )

    return holds


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_what_does_not_fit_is_refused_with_settings_that_do(memory: Any, share: float) -> None:
    asked = config()
    room = share * needed(asked)
    memory(room)
    with pytest.raises(ConfigError, match=r"GiB .*fits with") as caught:
        MemoryWatch.checked(PlannedRun.of(asked, QWEN3_06B))
    message = str(caught.value)
    assert "\n" not in message and f"{needed(asked) / GIB:.2f} GiB" in message
    settings = re.findall(r"([\w.]+) = (\w+)", message)
    assert settings and not any(key in message for key in ("lora", "max_token_length")), (
        "what is learnt stays"
    )
    fitting = config(*(f"{key}={value}" for key, value in settings))
    assert needed(fitting) <= room
    MemoryWatch.checked(PlannedRun.of(fitting, QWEN3_06B))


def test_what_changes_the_learning_is_named_last(memory: Any) -> None:
    asked = config()
    memory(0.15 * needed(asked))
    with pytest.raises(ConfigError) as caught:
        MemoryWatch.checked(PlannedRun.of(asked, QWEN3_06B))
    order = [
        str(caught.value).find(key) for key in ("rl_training.token_budget", "quantize_base = true")
    ]
    assert 0 < order[0] < order[1]
    memory(0.01 * needed(asked))
    with pytest.raises(ConfigError, match="smaller model"):
        MemoryWatch.checked(PlannedRun.of(asked, QWEN3_06B))


def test_little_to_spare_is_a_warning(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds memory is named: a model that another program keeps may be unloaded."""
    monkeypatch.setattr(memory_watch, "others_holding", lambda: ["ollama 5.0 GiB"])
    size = needed(config())
    for whole, free, warnings in (
        (size / 0.9, None, 1),
        (size / 0.8, None, 0),
        (size / 0.8, size / 2, 1),
    ):
        memory(whole, free)
        with capture_logs() as logs:
            MemoryWatch.checked(PlannedRun.of(config(), QWEN3_06B))
        assert [line["log_level"] for line in logs] == ["warning"] * warnings
        assert all(line["held_by_others"] == "ollama 5.0 GiB" for line in logs)


def test_nothing_is_loaded_or_written_before_the_refusal(
    memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory(2**20)
    overrides = [f"rl_training.checkpoint_dir={tmp_path}/runs", "server.port=0"]
    run = training_run(
        load_config(None, overrides),
        resume=None,
        stop=threading.Event(),
        console=Console(quiet=True),
    )
    monkeypatch.setattr(run.prepared.serving, "load", lambda **_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"are there"):
        run.execute()
    run.close()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_command_ends_with_one_line_and_code_2(tmp_path: Path) -> None:
    """A model of a few hundred GB, of which only the configuration is there, and an empty file
    of weights."""
    shape = {
        "hidden_size": 16384,
        "num_hidden_layers": 126,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
    }
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps(QWEN3 | shape))
    (tmp_path / "large" / "model.safetensors").touch()
    (tmp_path / "large.toml").write_text(
        f'[model]\nbase_path = "{tmp_path}/large"\n[server]\nport = 0\n'
    )
    with train(tmp_path / "large.toml") as daemon:
        assert daemon.wait() == 2
    [error] = [line for line in daemon.output.splitlines() if line.startswith("error: ")]
    assert re.search(r"needs \d{3,}\.\d\d GiB .*quantize_base = true.* take a smaller model", error)


# ---------------------------------------------------------------------- predicted and measured


def batch(prompt: int, completion: int, *, rows: bool = False) -> TrainBatch:
    tokens, mask = (1,) * (prompt + completion), (0,) * prompt + (1,) * completion
    rollout = Rollout(tokens, mask, (0.0,) * len(tokens), (0,) * len(tokens), 1.0, {"reward": 1.0})
    sequence = TrainSequence(rollout, (0.0,) * len(tokens), fresh=False)
    groups = () if rows else (RolloutGroup("g", "e", (rollout,)),)
    return TrainBatch(1, groups, (sequence,), BatchStatistics())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There MLX's arrays count, which a test can make up, and not the process."""
    monkeypatch.setattr(traits, "on_cpu", lambda: False)


def watched(*peaks: float, prompt: int = 64, completion: int = 128) -> MemoryWatch:
    """A watch after steps with these shares of what is predicted for their lengths as peaks."""
    asked, events = config(), RunEvents()
    shape = PlannedRun.of(asked, QWEN3_06B).shape
    watch = MemoryWatch(PlannedRun(asked, shape))
    predicted = PlannedRun(
        asked, shape, Lengths(0, 0).with_batch(batch(prompt, completion))
    ).memory.of_mlx
    watch.subscribe(events)
    for peak in peaks:
        events.emit(StepFinished({"memory_gb": peak * predicted / 1e9}, batch(prompt, completion)))
    return watch


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("peaks", "ill"), [((0.9, 1.1), 0), ((1.0, 1.2, 0.9), 1), ((0.5, 0.8), 0)])
def test_the_peak_is_compared_with_what_was_predicted_for_the_lengths_seen(
    peaks: tuple[float, ...], ill: int
) -> None:
    """There is no warning of a prediction that was too high."""
    watch = watched(*peaks)
    out = io.StringIO()
    with capture_logs() as logs:
        watch.tell(Console(file=out, width=60))
    [line] = out.getvalue().splitlines()
    assert re.fullmatch(r"memory: .* GiB at the peak \(.* GiB predicted\)", line)
    assert [line["event"] for line in logs] == ["the preflight predicted too little"] * ill
    assert bool(watch.health()) == bool(ill)
    if ill:
        assert re.fullmatch(
            r"memory: .* GiB at the peak, .* GiB predicted; .*token_budget.*",
            watch.health() or "",
        )


def test_a_run_without_a_step_has_nothing_to_tell() -> None:
    watch = watched()
    out = io.StringIO()
    watch.tell(Console(file=out))
    assert out.getvalue() == "" and watch.health() is None


@pytest.mark.skipif(not traits.on_cpu(), reason="on a GPU its own memory counts")
def test_on_a_cpu_the_whole_process_counts() -> None:
    resident = psutil.Process().memory_info().rss
    assert 0.9 * resident <= measured_bytes([]) <= psutil.virtual_memory().total


def test_what_a_program_held_before_the_run_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch, or the model of a notebook's earlier cell: "the preflight predicted too little"."""
    before = memory_watch.PROCESS_BYTES + 20 * GIB
    sizes = iter([before, before + 2**20])
    monkeypatch.setattr(traits, "on_cpu", lambda: True)
    monkeypatch.setattr(memory_watch, "measured_bytes", lambda lines: next(sizes))
    out, watch = io.StringIO(), watched(1.0)
    assert watch.health() is None
    watch.tell(Console(file=out))
    assert out.getvalue().startswith("memory: 241.0 MiB at the peak")  # PROCESS_BYTES, and 1 MiB


def test_the_longest_lengths_are_kept() -> None:
    seen = (
        Lengths(0, 0)
        .with_batch(batch(5, 9))
        .with_batch(batch(7, 3, rows=True))
        .with_batch(batch(2, 4))
    )
    assert seen == Lengths(7, 9, padded_length(13))


def test_a_batch_of_few_tokens_needs_less_than_one_of_the_longest_rows() -> None:
    """DPO's rows differ in length: 1.3 to 1.44 times what was needed was predicted, all rows as
    long as the longest."""
    asked = config("rl_training.batch_size=32")
    shape = PlannedRun.of(asked, QWEN3_06B).shape
    parts = [
        PlannedRun(asked, shape, Lengths(100, 100, tokens)).memory.parts
        for tokens in (None, 10**9, 3200)
    ]
    activations = [each["training: activations"] + each["training: logits"] for each in parts]
    assert activations[0] == activations[1] > 1.5 * activations[2]


@pytest.mark.usefixtures("gpu")
def test_what_is_sampled_and_not_trained_on_counts() -> None:
    """Only a publish empties the prefix cache: steps without one add up, and no batch is there to
    see lengths of."""
    shape = PlannedRun.of(config(), QWEN3_06B).shape
    watch = MemoryWatch(PlannedRun(config(), shape))
    line = {"sequences": 128, "optimizer_updates": 0, "memory_gb": 0.0}
    predicted = []
    for step in (line, line, line | {"optimizer_updates": 4}, line):
        watch.add(StepFinished(step, TrainBatch(1, (), (), BatchStatistics())))
        predicted.append(watch.predicted)
    whole = PlannedRun(config(), shape).memory.of_mlx
    assert whole <= predicted[0] <= predicted[1] <= predicted[2] == predicted[3]
    watch.add(StepFinished(line | {"memory_gb": 1000.0}, TrainBatch(1, (), (), BatchStatistics())))
    assert "server.prefix_cache_bytes lowers it" in (watch.health() or "")
