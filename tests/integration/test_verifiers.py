"""verifiers 0.4 itself against the daemon: its environments, played by its own client, with the
example's adapter.

Skipped where build/verifiers is missing (scripts/setup_verifiers makes it): continuous integration
has no time for the minutes of installation; it checks /inference/v1/generate by the rules of that
client (tests/server/test_inference.py).
"""

import os
import subprocess
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.rollout_store.store import RolloutStore
from tests.integration.http_environment import needs_atropos
from tests.integration.processes import Daemon, metrics, train_example
from tests.signals_reset import default_signals

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "verifiers"
LETTERS = EXAMPLE / "letters.toml"
VENV = ROOT / "build" / "verifiers"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
GIVEN = -100
needs_verifiers = pytest.mark.skipif(
    not (VENV / ".ready").exists(),
    reason="build/verifiers is missing: scripts/setup_verifiers makes it",
)


def adapter(daemon: Daemon, *flags: str) -> subprocess.Popen[str]:
    """examples/verifiers/train.py against the daemon."""
    return subprocess.Popen(
        [str(VENV / "bin" / "python"), str(EXAMPLE / "train.py"), "--url", daemon.url, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | OFFLINE,
        preexec_fn=default_signals,
    )


def scores(daemon: Daemon, tokens: list[int]) -> list[float]:
    """The server's own log-probability of each token but the first."""
    body = {"prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
    [choice] = (
        httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60)
        .raise_for_status()
        .json()["choices"]
    )
    entries = choice["prompt_logprobs"]
    return [
        entry[str(token)]["logprob"] for token, entry in zip(tokens[1:], entries[1:], strict=True)
    ]


@needs_verifiers
def test_a_finite_taskset_is_gone_through_again_and_an_empty_one_is_told() -> None:
    code = (
        "import itertools, train; print(list(itertools.islice(train.rounds([1, 2]), 5)))\n"
        "try: next(train.rounds([]))\nexcept train.Failed as error: print(error)"
    )
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", code],
        cwd=EXAMPLE,
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["[1, 2, 1, 2, 1]", "the taskset has no tasks"], done.stderr


def test_the_examples_configuration_is_valid() -> None:
    assert load_config(EXAMPLE / "letters.toml").rl_training.atropos.rollout_batch_size % 8 == 0


@needs_atropos
@needs_verifiers
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["one turn", "several turns over a tool"])
def test_its_own_client_brings_exactly_what_was_sampled(kind: str, tmp_path: Path) -> None:
    tools = ["--tools"] if kind != "one turn" else []
    with train_example(LETTERS, tmp_path) as daemon:
        daemon.wait_until_ready()
        play = adapter(daemon, "--groups", "1", *tools)
        output, _ = play.communicate(timeout=200)
        assert play.returncode == 0, output
        group: dict[str, Any] = httpx.get(f"{daemon.url}/atropos/latest_example").json()
        assert len(group["tokens"]) == 8
        compared = 0
        for tokens, labels, logprobs in zip(
            group["tokens"], group["masks"], group["inference_logprobs"], strict=True
        ):
            for label, logprob, score in zip(
                labels[1:], logprobs[1:], scores(daemon, tokens), strict=True
            ):
                if label != GIVEN:
                    assert abs(logprob - score) < 1e-4
                    compared += 1
            spans = [sampled for sampled, _ in groupby(label != GIVEN for label in labels)]
            given = httpx.post(
                f"{daemon.url}/detokenize",
                json={
                    "tokens": [t for t, label in zip(tokens, labels, strict=True) if label == GIVEN]
                },
            ).json()["prompt"]
            assert spans.count(True) == (3 if tools else 1)
            assert given.count("Reverse: ") == (3 if tools else 1)  # what the tool says is given
        assert compared >= 20


@needs_atropos
@needs_verifiers
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tiny_model_learns_from_two_of_them_at_once(tmp_path: Path) -> None:
    with train_example(LETTERS, tmp_path, **{"rl_training.total_steps": 30}) as daemon:
        daemon.wait_until_ready()
        players = [
            adapter(daemon, "--in-flight", "4"),
            adapter(daemon, "--in-flight", "2", "--tools"),
        ]
        try:
            assert daemon.wait(timeout=800) == 0, daemon.output
        finally:
            for player in players:
                player.kill()
                player.communicate()
    lines = metrics(tmp_path / "run")
    by_environment = [line["reward_by_environment"] for line in lines]
    rewards = [means["letters_0"] for means in by_environment if "letters_0" in means]
    assert fmean(rewards[-8:]) >= fmean(rewards[:8]) + 0.15, rewards
    assert any("letters_tools_0" in means for means in by_environment)
    assert max(line["staleness"] for line in lines) <= 4
    store = RolloutStore(tmp_path / "run" / "rollouts.sqlite")
    assert store.counts().rejected == 0
