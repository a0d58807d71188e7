"""`mlx_parallm_show_checkpoint`: what it says of whole and damaged checkpoints."""

import json
import shutil
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import mlx.core as mx
import pytest

from mlx_parallm import cli
from mlx_parallm.rl_training.checkpoint import Checkpointer
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.runs.show_checkpoint import as_text, describe
from tests.rl_training.making import make_config, make_trainer
from tests.rl_training.test_checkpoint import in_progress, state_at
from tests.runs.commands import call

METRICS = {"step": 12, "reward_mean": 0.25, "loss": -0.5, "kl": None, "grad_norm": 1.5}


def show(*arguments: str) -> CompletedProcess[str]:
    return call(cli.show_checkpoint, *arguments)


def save(run: Path, step: int = 12, state: dict[str, Any] | None = None, **config: Any) -> Path:
    trainer = make_trainer(make_config(**config))
    metrics = MetricsFile(run / "metrics.jsonl")
    run.mkdir(parents=True, exist_ok=True)
    for number in range(3, 13):
        metrics.append(METRICS | {"step": number})
    saver = Checkpointer(run, trainer.policy, trainer.optimizer, keep=3, keep_best=True)
    return saver.save(
        state_at(step, optimizer_updates=24, metrics=METRICS, **(state or {})), final=True
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("checkpoints") / "run"
    save(run, lora={"rank": 4, "alpha": 8, "use_dora": True}, optimizer="muon")
    return run


def test_what_is_in_a_checkpoint(run: Path) -> None:
    found = describe(run)
    assert found["complete"] and found["problems"] == []
    assert (found["path"], found["links"]) == (str(run / "step_000012"), ["latest", "best"])
    assert (found["step"], found["mini_batches"], found["policy_version"]) == (12, 0, 12)
    assert (found["kind"], found["adapter"]) == ("DoRA", {"rank": 4, "scale": 2.0, "layers": 21})
    trainer = make_trainer(make_config(lora={"rank": 4, "use_dora": True}))
    assert found["parameters"] == trainer.policy.parameters
    assert found["optimizer"]["name"] == "muon" and found["optimizer"]["updates"] == 24
    assert found["optimizer"]["bytes"] >= 4 * found["parameters"]
    assert found["score"] == 0.25
    assert found["metrics"] == {"reward_mean": 0.25, "loss": -0.5, "grad_norm": 1.5}
    assert found["bytes"] == sum(file.stat().st_size for file in (run / "step_000012").iterdir())
    text = as_text(found)
    for part in (
        "complete",
        "DoRA",
        "rank 4, scale 2.0, layers 21",
        "muon, 24 updates",
        "(latest, best)",
    ):
        assert part in text
    assert describe(run / "final")["links"] == ["final"]


def test_full_weights_and_a_step_in_progress(tmp_path: Path) -> None:
    state = {"in_progress": in_progress(3), "unpublished": True}
    found = describe(save(tmp_path, 2, state, lora=False))
    assert (found["kind"], found["adapter"], found["mini_batches"]) == ("full weights", None, 3)
    assert (
        found["complete"]
        and "3 mini-batches of the next" in as_text(found)
        and "not served" in as_text(found)
    )


def test_as_a_command(run: Path) -> None:
    result = show(str(run), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == describe(run)
    assert show(str(run / "best")).stdout == as_text(describe(run))
    wrong = show(str(run / "step_000099"))
    assert wrong.returncode == 2
    what = "is neither a checkpoint nor a run directory with one: no such directory"
    assert wrong.stderr == f"error: {run}/step_000099 {what}\n"


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("adapters.safetensors", None, "adapters.safetensors is missing"),
        ("adapters.safetensors", "half", "adapters.safetensors is cut short"),
        ("optimizer.safetensors", "half", "optimizer.safetensors is cut short"),
        ("optimizer.safetensors", None, "optimizer.safetensors is missing"),
        ("trainer_state.json", "half", "trainer_state.json cannot be read"),
        ("trainer_state.json", None, "trainer_state.json cannot be read"),
        ("adapter_config.json", "{}", "adapter_config.json cannot be read"),
    ],
)
def test_damage_is_named(
    run: Path, file: str, content: str | None, problem: str, tmp_path: Path
) -> None:
    copy = tmp_path / "step_000012"
    shutil.copytree(run / "step_000012", copy)
    whole = (copy / file).read_bytes()
    if content is None:
        (copy / file).unlink()
    else:
        (copy / file).write_bytes(
            whole[: len(whole) // 2] if content == "half" else content.encode()
        )
    found = describe(copy)
    assert not found["complete"] and problem in "; ".join(found["problems"])
    assert f"damaged: {found['problems'][0]}" in as_text(found)


def test_a_changed_byte_is_found(run: Path, tmp_path: Path) -> None:
    """Headers were read alone: a checkpoint that a resume refuses was called complete."""
    assert describe(run)["checksums"] == "every file is as it was written"
    copy = tmp_path / "step_000012"
    shutil.copytree(run / "step_000012", copy)
    weights = copy / "adapters.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found = describe(copy)
    assert found["problems"] == ["adapters.safetensors has changed since it was written (SHA-256)"]
    assert not found["complete"] and "checksums     another one: adapters.safetensors\n" in as_text(
        found
    )
    (copy / "SHA256SUMS").unlink()
    found = describe(copy)
    assert found["complete"] and found["checksums"].startswith("missing")


def test_damage_is_an_exit_code(run: Path, tmp_path: Path) -> None:
    (copy := tmp_path / "step_000012").mkdir()
    shutil.copy(run / "step_000012" / "trainer_state.json", copy)
    assert show(str(copy)).returncode == 1


@pytest.mark.parametrize(
    "header",
    [
        [1],
        {"a": 1},
        {"a.lora_a": {"shape": "x", "data_offsets": [0, 0]}},
        {"a": {"shape": [], "data_offsets": []}},
    ],
)
def test_a_header_that_is_json_and_no_safetensors(run: Path, header: Any, tmp_path: Path) -> None:
    copy = tmp_path / "step_000012"
    shutil.copytree(run / "step_000012", copy)
    text = json.dumps(header).encode()
    (copy / "optimizer.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert describe(copy)["problems"] == [
        "optimizer.safetensors is cut short or no safetensors file"
    ]


def test_an_adapter_in_pefts_files_is_described(tmp_path: Path) -> None:
    """It was "no checkpoint and no run directory with one"."""
    a, b = mx.zeros((4, 16)), mx.zeros((32, 4))
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {
        name.format(layer, half): array for layer in (0, 1) for half, array in (("A", a), ("B", b))
    }
    mx.save_safetensors(str(tmp_path / "adapter_model.safetensors"), tensors)
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    config = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": modules,
        "base_model_name_or_path": "some/base",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    shown = show(str(tmp_path))
    assert shown.returncode == 0, shown.stderr
    assert f"PEFT adapter  {tmp_path}\nstate         complete\n" in shown.stdout
    # 2 · (4 · 16 + 32 · 4)
    assert "trained       LoRA in PEFT's format, 384 numbers\n" in shown.stdout
    assert "rank 4, alpha 8, modules q_proj, base some/base, layers 2\n" in shown.stdout
    assert "optimizer" not in shown.stdout
    (tmp_path / "adapter_config.json").write_text("[]")
    assert show(str(tmp_path)).returncode == 1
    assert "adapter_config.json cannot be read" in show(str(tmp_path)).stdout
