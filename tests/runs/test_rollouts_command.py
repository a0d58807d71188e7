"""mlx_parallm_rollouts on databases that a store wrote, an older run's among them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm import cli
from mlx_parallm.rollout_store.checks import OTHER_MODEL
from mlx_parallm.rollout_store.store import RolloutStore
from tests.rollout_store.groups import make_group, make_rollout

TWO_STEPS = Path(__file__).parents[1] / "data" / "two_steps"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "my-run"
    store = RolloutStore(run / "rollouts.sqlite")
    for name, version in (("sums-0", 0), ("sums-1", 2), ("sums-2", 2), ("sums-3", 5)):
        store.add(
            make_group(
                name, rollouts=(make_rollout(version=version), make_rollout(0.0, version=version))
            ),
            source="environments",
        )
    store.add(make_group("far", size=3, environment="gsm8k_0"), source="atropos:0")
    store.add(make_group("foreign", environment="gsm8k_0"), source="atropos:0")
    store.drop(["foreign"], 2, OTHER_MODEL)
    store.take(["sums-0", "sums-1"], 1)
    store.drop(["sums-2"], 1, "too old")
    store.prune(1, always_up_to_step=0, max_bytes=1)
    store.take(["sums-3"], 2)
    store.reject({"scores": [float("nan")]}, source="atropos:0", reason="the reward is nan")
    store.reject({"scores": []}, source="atropos:0", reason="the group has no rollouts")
    store.close()
    return run


def rollouts(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert cli.rollouts([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_counts_by_state_environment_and_version(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(rollouts(capsys, run, "--counts", "--json"))
    assert found["groups"] == {
        "waiting": 1,
        "taken": 3,
        "dropped": 1,
        "quarantined": 1,
        "rejected": 2,
    }
    [far, sums] = found["environments"]
    names = ("environment", "source", "waiting", "quarantined", "sequences")
    assert [far[name] for name in names] == ["gsm8k_0", "atropos:0", 1, 1, 5]
    assert [sums[name] for name in ("taken", "dropped", "sequences", "pruned")] == [3, 1, 8, 3]
    versions = [
        tuple(entry[name] for name in ("version", "waiting", "taken", "dropped"))
        for entry in found["versions"]
    ]
    assert versions == [(0, 1, 1, 0), (2, 0, 1, 1), (5, 0, 1, 0)]
    assert found["dropped"] == {"too old": 1, OTHER_MODEL: 1}
    assert {entry["reason"] for entry in found["rejected"]} == {
        "the reward is nan",
        "the group has no rollouts",
    }
    text = rollouts(capsys, run, "--counts")
    assert text.startswith(
        "my-run: groups: 1 waiting, 3 taken, 1 dropped, 1 quarantined, 2 rejected"
    )
    assert "sequences  pruned  last received" in text
    for words in ("gsm8k_0", "too old", "atropos:0: the reward is nan", "policy version"):
        assert words in text


def test_one_group_and_one_rollout(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(rollouts(capsys, run, "--show", "sums-3", "--json"))
    assert (found["state"], found["step"], found["last_version"]) == ("taken", 2, 5)
    [first, second] = found["rollouts"]
    assert (first["reward"], first["parts"]) == (1.0, {})
    expected = make_rollout(version=5)
    [segment] = first["segments"]
    for name in ("tokens", "mask", "logprobs", "policy_versions"):
        assert segment[name] == list(getattr(expected, name))
    assert segment["text"] is None, "no config.toml says whose tokens these are"
    text = rollouts(capsys, run, "--show", "sums-3#1")
    assert "sums-3: used by step 2" in text
    assert "#1  reward 0" in text and "#0" not in text
    assert f"{expected.logprobs[-1]:.4f}" in text
    assert second["number"] == 1


def test_a_pruned_group_still_says_what_became_of_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert json.loads(rollouts(capsys, run, "--show", "sums-2", "--json"))["rollouts"] is None
    text = rollouts(capsys, run, "--show", "sums-2")
    assert "sums-2: dropped by step 1: too old" in text and "the tokens were pruned" in text


def test_texts_by_the_tokenizer_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(TWO_STEPS, run, symlinks=True)
    entries = json.loads(rollouts(capsys, run / "step_000002", "--counts", "--json"))["versions"]
    assert [entry["version"] for entry in entries] == [0]
    found = json.loads(rollouts(capsys, run, "--show", "sum-0-1#1", "--json"))
    [segment] = found["rollouts"][0]["segments"]
    assert segment["text"].startswith("<|im_start|>")
    assert "".join(segment["token_texts"]) == segment["text"]
    assert "<|im_end|>" in rollouts(capsys, run, "--show", "sum-0-1#1")


def test_the_quarantine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest, older = map(json.loads, rollouts(capsys, run, "--rejects", "--json").splitlines())
    assert newest["reason"] == "the group has no rollouts"
    assert older["payload"] == {"scores": ["nan"]}
    assert "the reward is nan" in rollouts(capsys, run, "--rejects")


def test_it_reads_while_the_run_writes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RolloutStore(run / "rollouts.sqlite")
    store.add(make_group("new"), source="environments")
    assert json.loads(rollouts(capsys, run, "--counts", "--json"))["groups"]["waiting"] == 2
    store.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["{tmp}"],
            (
                "is not a run directory (no metrics.jsonl, rollouts.sqlite or"
                " config.toml); runs in it: my-run"
            ),
        ),
        (["{tmp}/nothing"], "nothing is not a run directory"),
        (["{run}", "--show", "ghost"], "no group 'ghost'"),
        (["{run}", "--show", "sums-"], "several groups begin with 'sums-': sums-0, sums-1"),
        (["{run}", "--show", "sums-3#2"], "group sums-3 has rollouts 0 to 1, no 2"),
    ],
)
def test_what_is_not_there_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert cli.rollouts([text.format(tmp=run.parent, run=run) for text in arguments]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_a_damaged_database_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rollouts.sqlite").write_bytes(b"no database" * 500)
    assert cli.rollouts([str(tmp_path)]) == 2
    assert "not a database" in capsys.readouterr().err
