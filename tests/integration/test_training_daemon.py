"""The training daemon as a whole: it serves while it learns, stops in order, and comes back
where it was."""

import json
import shutil
import signal
import threading
from pathlib import Path

import openai
import pytest

from mlx_parallm.models.loading import read_config, resolve_model_path
from mlx_parallm.models.lora import adapter_layers, inject_lora, save_adapter
from mlx_parallm.rollout_store.store import RolloutStore
from tests.integration.processes import metrics, train, wait_for_step, write_config
from tests.tiny_models import lora_config, make_model

pytestmark = pytest.mark.slow


def test_answers_all_through_a_run_under_rising_versions(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=20)
    versions: list[int] = []
    failures: list[str] = []
    with train(config) as daemon:
        client = daemon.wait_until_ready().client()
        done = threading.Event()

        def ask() -> None:
            while not done.is_set():
                try:
                    answer = client.chat.completions.create(
                        model="default",
                        messages=[{"role": "user", "content": "Reverse: abc"}],
                        max_tokens=8,
                    )
                    versions.append(answer.model_extra["policy_version"])
                    pinned = client.completions.create(
                        model=f"policy@{versions[-1]}", prompt="abc", max_tokens=2
                    )
                    assert pinned.model_extra["policy_version"] == versions[-1]
                except openai.OpenAIError as error:
                    if daemon.process.poll() is None and not done.is_set():
                        failures.append(repr(error))

        asking = threading.Thread(target=ask)
        asking.start()
        with train(config, "--set", "rl_training.run_name=other") as second:  # on the same port
            assert second.wait(timeout=60) == 2
        wait_for_step(daemon, tmp_path / "checkpoints" / "run", 7)
        done.set()
        asking.join()
        assert daemon.wait() == 0, daemon.output
    assert str(daemon.port) in second.output and "Traceback" not in second.output
    assert not (tmp_path / "checkpoints" / "other").exists()
    assert not failures
    assert len(versions) >= 5
    assert versions == sorted(versions)
    assert versions[-1] > versions[0]
    run = tmp_path / "checkpoints" / "run"
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["policy_version"] == 20
    assert max(line["logprob_diff_max"] for line in lines) < 1e-4
    assert (
        json.loads((run / "final" / "adapter_config.json").read_text())["model"] == "builtin:tiny"
    )
    for name in (
        "config.toml",
        "rollouts.sqlite",
        "latest",
        "final/adapters.safetensors",
        "reward.png",
    ):
        assert (run / name).exists(), name


def test_a_signal_saves_and_exits_zero_and_a_resume_goes_on(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, steps=500, interval=400)
    run = tmp_path / "checkpoints" / "run"
    with train(config) as daemon:
        wait_for_step(daemon, run, 1)
        daemon.send(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 0, daemon.output
    stopped_at = metrics(run)[-1]["step"]
    assert (run / "latest").resolve().name == f"step_{stopped_at:06d}"
    with train(
        config, "--resume", str(run), "--set", f"rl_training.total_steps={stopped_at + 1}"
    ) as daemon:
        assert daemon.wait() == 0, daemon.output
    assert [line["step"] for line in metrics(run)] == list(range(1, stopped_at + 2))


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_starts_over_with_its_groups(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, steps=500, interval=400)
    run, copied = tmp_path / "checkpoints" / "run", tmp_path / "copy" / "run"
    with train(config) as daemon:
        wait_for_step(daemon, run, 2)
        daemon.process.kill()
        daemon.wait()
    accepted = len(RolloutStore(run / "rollouts.sqlite").known_ids())
    assert accepted > 0
    shutil.copytree(run, copied, symlinks=True)
    place = ["--set", f"rl_training.checkpoint_dir={copied.parent}"]
    for directory, resume in (
        (run, ["--resume", "auto"]),
        (copied, ["--resume", str(copied), *place]),
    ):
        with train(config, *resume, "--set", "rl_training.total_steps=1") as daemon:
            assert daemon.wait() == 0, daemon.output
        assert [line["step"] for line in metrics(directory)] == [1]
        assert len(RolloutStore(directory / "rollouts.sqlite").known_ids()) >= accepted


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param("model.base_path=/nowhere", "/nowhere", marks=pytest.mark.long),
        ('rl_training.lora.target_modules=["qproj"]', "matches no linear layer"),
        ("model.lora_path={tmp}/adapter", "the adapter has A"),
        pytest.param(
            "rl_training.atropos.rollout_batch_size=36", "group sizes are 8", marks=pytest.mark.long
        ),
        ("rl_training.atropos.api_url=localhost:8001", "begins with http://"),
    ],
)
def test_a_start_that_fails_is_one_line_and_leaves_nothing(
    tmp_path: Path, setting: str, message: str
) -> None:
    tree = make_model({"model_type": "qwen3"} | read_config(resolve_model_path("builtin:tiny")))
    inject_lora(tree, lora_config(2, 4))
    (tmp_path / "adapter").mkdir()
    # rank 2, the run's is 4
    save_adapter(tmp_path / "adapter", adapter_layers(tree), num_layers=len(tree.layers))
    config = write_config(tmp_path, steps=1)
    with train(config, "--set", setting.format(tmp=tmp_path)) as daemon:
        assert daemon.wait() == 2, daemon.output
    errors = [line for line in daemon.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in daemon.output
    assert not (tmp_path / "checkpoints" / "run").exists()
