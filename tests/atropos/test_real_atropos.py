"""atroposlib 0.4.0 itself against the daemon: its run-api, environments derived from its BaseEnv,
its ManagedServer.

Skipped where build/atropos is missing (scripts/setup_atropos makes it): continuous integration has
no time for a minute of installation and the minutes that a real environment takes; it runs the same
protocol against the fakes instead.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.rollout_store.store import RolloutStore
from tests.atropos.atropos_processes import (
    EXAMPLES,
    ROOT,
    Environment,
    RunApi,
    needs_atropos,
)
from tests.integration.processes import Daemon, free_port, metrics, wait_for_step
from tests.integration.speaking_model import save_speaker

LETTERS = EXAMPLES / "letters.toml"
OWN = ROOT / "build" / "atropos" / "environments"
TREE = ROOT / "tests" / "atropos" / "atropos_tree"
TINY = str(ROOT / "mlx_parallm" / "models" / "tiny")
# in a line that the environment prints for each group that the queue has taken
RECEIVED = '"received"'


def train(tmp_path: Path, api_url: str, *settings: str) -> Daemon:
    """The daemon with the example's configuration; the run's directory is tmp_path/run."""
    port = free_port()
    place = [
        f"server.port={port}",
        f"rl_training.checkpoint_dir={tmp_path}",
        "rl_training.run_name=run",
    ]
    chosen = [*place, f"rl_training.atropos.api_url={api_url}", *settings]
    flags = [part for setting in chosen for part in ("--set", setting)]
    return Daemon("mlx_parallm_train", "--config", str(LETTERS), *flags, port=port)


def test_the_examples_configuration_is_valid() -> None:
    assert load_config(LETTERS).rl_training.atropos.rollout_batch_size % 8 == 0


@needs_atropos
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("queue", ["run-api", "embedded"])
def test_the_tiny_model_learns_from_a_real_environment(queue: str, tmp_path: Path) -> None:
    with RunApi() as api, train(tmp_path, api.url if queue == "run-api" else "embedded") as daemon:
        url = api.url if queue == "run-api" else f"{daemon.url}/atropos"
        with Environment(EXAMPLES / "environment.py", url, daemon.url) as environment:
            wait_for_step(daemon, tmp_path / "run", 55, timeout=500)
            # it logs what its workers raise, and continues
            assert "Error in" not in environment.output
            assert "error: " not in environment.output
            assert daemon.wait() == 0, daemon.output
    rewards = [line["reward_mean"] for line in metrics(tmp_path / "run")]
    assert fmean(rewards[:5]) <= 0.40, rewards
    assert fmean(rewards[-10:]) >= 0.75, rewards
    store = RolloutStore(tmp_path / "run" / "rollouts.sqlite")
    assert store.counts().rejected == 0


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[RunApi, Daemon, Environment]]:
    """A run that continues until it is killed, in its third step."""
    with (
        RunApi() as api,
        train(tmp_path, api.url, "rl_training.total_steps=10000") as daemon,
        Environment(EXAMPLES / "environment.py", api.url, daemon.url) as environment,
    ):
        wait_for_step(daemon, tmp_path / "run", 3)
        yield api, daemon, environment


def restart_run_api(api: RunApi, environment: Environment) -> None:
    api.kill()
    api.start()


def restart_environment(api: RunApi, environment: Environment) -> None:
    environment.kill()


def restart_both(api: RunApi, environment: Environment) -> None:
    api.kill()
    environment.kill()
    api.start()


@needs_atropos
@pytest.mark.slow
@pytest.mark.parametrize("restart", [restart_run_api, restart_environment, restart_both])
def test_training_goes_on_after_a_restart(
    restart: Callable[[RunApi, Environment], None],
    training: tuple[RunApi, Daemon, Environment],
    tmp_path: Path,
) -> None:
    api, daemon, environment = training
    began = len(environment.runs)
    restart(api, environment)
    deadline = time.monotonic() + 60
    # the supervisor starts it again: at once, or when it has given up
    while len(environment.runs) == began:
        assert time.monotonic() < deadline, environment.output[-4000:]
        time.sleep(0.02)
    first = environment.wait_for(RECEIVED, since=environment.runs[began - 1].lines[-1][0])
    step = len(metrics(tmp_path / "run"))
    wait_for_step(daemon, tmp_path / "run", step + 2, timeout=first + 15 - time.monotonic())
    print(
        f"{restart.__name__}: two more steps"
        f" {time.monotonic() - first:.1f} s after the first new group"
    )


TEXT_FLAGS = ("--openai.server_type", "openai")


@needs_atropos
@pytest.mark.slow
def test_groups_without_log_probabilities_are_refused_with_the_reason(tmp_path: Path) -> None:
    with (
        train(tmp_path, "embedded") as daemon,
        Environment(
            TREE / "text_environment.py",
            f"{daemon.url}/atropos",
            daemon.url,
            *TEXT_FLAGS,
            path=EXAMPLES,
        ) as environment,
    ):
        environment.wait_for("Client error: 422")
    store = RolloutStore(tmp_path / "run" / "rollouts.sqlite")
    counts = store.counts()
    assert (counts.waiting, counts.taken) == (0, 0)
    assert {reject.reason.partition(":")[0] for reject in store.rejects()} == {
        "no inference_logprobs"
    }


@needs_atropos
@pytest.mark.slow
def test_groups_without_log_probabilities_train_where_that_is_asked_for(tmp_path: Path) -> None:
    small = [
        "rl_training.total_steps=3",
        "rl_training.batch_size=16",
        "rl_training.atropos.rollout_batch_size=16",
    ]
    with (
        RunApi() as api,
        train(
            tmp_path, api.url, *small, "rl_training.atropos.missing_logprobs=recompute"
        ) as daemon,
        Environment(TREE / "text_environment.py", api.url, daemon.url, *TEXT_FLAGS, path=EXAMPLES),
    ):
        wait_for_step(daemon, tmp_path / "run", 3)
        assert daemon.wait() == 0, daemon.output
    for line in metrics(tmp_path / "run"):
        assert line["groups_without_logprobs"] == line["groups"]
        # one update, taken from the step's own weights
        assert line["ratio_mean"] == pytest.approx(1.0, abs=0.02)
    assert RolloutStore(tmp_path / "run" / "rollouts.sqlite").counts().rejected == 0


GSM8K_FLAGS = (
    "--openai.api_key",
    "dummy",
    "--openai.tokenizer_name",
    TINY,
    "--env.tokenizer_name",
    TINY,
)


def train_with_gsm8k(tmp_path: Path, path: Path, *settings: str, cwd: Path | None = None) -> None:
    """Two steps as the specification starts them: --openai.base_url, --openai.api_key, and the
    model's tokenizer."""
    small = [
        "rl_training.total_steps=2",
        "rl_training.batch_size=16",
        "rl_training.atropos.rollout_batch_size=16",
    ]
    with (
        RunApi() as api,
        train(tmp_path, api.url, *small, *settings) as daemon,
        Environment(
            EXAMPLES / "gsm8k.py", api.url, daemon.url, *GSM8K_FLAGS, path=path, cwd=cwd
        ) as environment,
    ):
        wait_for_step(daemon, tmp_path / "run", 2)
        assert daemon.wait() == 0, daemon.output
        assert environment.times(RECEIVED)
    lines = metrics(tmp_path / "run")
    # scores are -1 and 1, and no group is all of one
    assert all(-1 < line["reward_mean"] < 1 for line in lines)


@needs_atropos
@pytest.mark.slow
def test_a_gsm8k_environment_trains_through_the_wrapper(tmp_path: Path) -> None:
    train_with_gsm8k(tmp_path, TREE)


@pytest.mark.skipif(
    not (OWN / "gsm8k_server.py").exists(),
    reason="`scripts/setup_atropos environments` fetches it",
)
@pytest.mark.slow
def test_atropos_own_gsm8k_server_trains_through_the_wrapper(tmp_path: Path) -> None:
    """Their file as it is. Stand-ins: the data set (a directory that `load_dataset("gsm8k",
    "main")` takes) and a model that draws its answer, because it drops answers of less than ten
    tokens and wants \\boxed{}."""
    data = tmp_path / "gsm8k"
    data.mkdir()
    (data / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n---\n"
    )
    rows = [
        {"question": f"{a} + {b}?", "answer": f"<<{a}+{b}={a + b}>>\n#### {a + b}"}
        for a, b in ((1, 2), (1, 4))
    ]
    for split in ("train", "test"):
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_speaker(tmp_path / "speaker", load_tokenizer(Path(TINY), ModelConfig()))
    settings = [f"model.base_path={model}", "rl_training.atropos.max_token_length=2048"]
    train_with_gsm8k(tmp_path, OWN, *settings, cwd=tmp_path)
