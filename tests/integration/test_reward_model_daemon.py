"""A reward model as a user meets it: trained by the daemon, killed, resumed, served, a reward."""

import json
import random
import signal
from pathlib import Path

import httpx
import pytest

from mlx_parallm.models.scoring.reward_model import TrainedRewardModel
from tests.integration.processes import Daemon, free_port, metrics, train, wait_for_step

pytestmark = pytest.mark.slow
CONFIG = """
[server]
port = {port}

[rl_training]
algorithm = "reward_model"
total_steps = {steps}
checkpoint_interval = 2
learning_rate = 4e-3
batch_size = 16
checkpoint_dir = "{directory}"
run_name = "judge"

[rl_training.lora]
rank = 4
alpha = 8.0

[data]
path = "{rows}"
eval_fraction = 0.1
"""


def write_run(directory: Path, *, steps: int) -> Path:
    rng = random.Random(0)
    rows = []
    for _ in range(200):
        first, second = ("".join(rng.sample(half, 2)) for half in ("abcdef", "uvwxyz"))
        question = f"Which is first: {first} or {second}?"
        rows.append({"prompt": question, "chosen": first, "rejected": second})
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {"directory": directory / "runs", "rows": directory / "rows.jsonl"}
    file = directory / "run.toml"
    file.write_text(CONFIG.format(port=free_port(), steps=steps, **values))
    return file


def chat(answer: str) -> list[dict[str, str]]:
    question = {"role": "user", "content": "Which is first: ab or yz?"}
    return [question, {"role": "assistant", "content": answer}]


def test_trained_killed_resumed_and_served(tmp_path: Path) -> None:
    config, run = write_run(tmp_path, steps=24), tmp_path / "runs" / "judge"
    with train(config) as daemon:
        wait_for_step(daemon, run, 9)
        daemon.process.kill()
        daemon.wait()
    assert not (run / "final").exists()
    with train(config, "--resume", "auto") as daemon:
        assert daemon.wait() == 0, daemon.output
    assert f"--reward-model {run}" in daemon.output.replace("\n", "")
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert lines[0]["eval_before/rewards/accuracies"] == 0.5
    assert lines[-1]["heldout_score"] > 0.9

    port = free_port()
    words = ("--model-path", "builtin:tiny", "--reward-model", str(run), "--port", str(port))
    with Daemon("mlx_parallm_serve", *words, port=port) as server:
        server.wait_until_ready()
        body = {"messages": [chat("ab"), chat("yz")]}
        reply = httpx.post(f"{server.url}/v1/score", json=body, timeout=60).json()
        answered = server.client().chat.completions.create(
            model="default", messages=[{"role": "user", "content": "Sum: 1+2"}], max_tokens=4
        )
        assert answered.choices[0].message.content
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.output
    scores = [entry["score"] for entry in reply["data"]]
    model = TrainedRewardModel.load(run)
    expected = model.score([model.tokens(chat(answer)) for answer in ("ab", "yz")])
    assert scores == pytest.approx(expected, abs=2e-6)
    assert scores[0] > scores[1]
    assert reply["model"] == "judge"


@pytest.mark.parametrize("made", [False, True])
def test_a_path_without_a_reward_model_is_one_line(made: bool, tmp_path: Path) -> None:
    if made:
        (tmp_path / "nothing").mkdir()
    words = ("--model-path", "builtin:tiny", "--reward-model", str(tmp_path / "nothing"))
    with Daemon("mlx_parallm_serve", *words, "--port", "0", port=0) as server:
        assert server.wait() == 2
    errors = [line for line in server.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "is not a reward model" in errors[0]
