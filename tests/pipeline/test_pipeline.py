"""The whole way on the shipped model: one command, killed in the training, finished by the same
command."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlx_parallm.cli.table import main
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.checkpoint_files import directory_of
from mlx_parallm.system import packages
from mlx_parallm.systems.pipeline import (
    CPU_ONLY,
    LearnedReward,
    TrainingPipeline,
    detect_hardware,
    requirements,
)
from mlx_parallm.systems.pipeline.options import PipelineOptions, check_options
from mlx_parallm.systems.pipeline.pipeline import REPORT_FILE, RESULTS_FILE
from mlx_parallm.systems.pipeline.references import AGREEMENT
from mlx_parallm.systems.pipeline.stages import Stages
from mlx_parallm.systems.pipeline.work import STATE_FILE, StageFailedError, WorkDirectory
from mlx_parallm.systems.traces.reading import read_traces, write_lines
from mlx_parallm.systems.traces.trace import Trace, new_trace
from tests.altered import Altered
from tests.export.llama import needs_llama
from tests.export.test_ollama import fake_ollama

SCORE = """
def correct(prompts, completions, **columns):
    wanted = [prompt[-1]["content"].removeprefix("Reverse: ")[::-1] for prompt in prompts]
    return [float(answer[0]["content"] == right) for answer, right in zip(completions, wanted)]
"""
STAGES = [
    "traces",
    "label",
    "dataset",
    "dry_run",
    "baseline",
    "train",
    "evaluate",
    "export",
    "deploy",
]


def write_traces_of_words(path: Path, count: int = 120) -> None:
    """A right and a wrong answer to each of `count` words."""
    source = random.Random(0)
    traces: list[Trace] = []
    for number in range(count):
        word = "".join(source.choices("abcdefghijklm", k=4))
        for name, answer in (("right", word[::-1]), ("wrong", word)):
            messages = [
                {"role": "user", "content": f"Reverse: {word}"},
                {"role": "assistant", "content": answer},
            ]
            traces.append(new_trace(messages, session_id=f"{number}-{name}", source="test"))
    write_lines(traces, path)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "score.py").write_text(SCORE)
    write_traces_of_words(tmp_path / "traces.jsonl")
    return tmp_path


def command(*more: str) -> list[str]:
    flags = [
        "--traces",
        "traces.jsonl",
        "--base-model",
        "builtin:tiny",
        "--method",
        "sft",
        "--reward",
    ]
    flags += [
        "score.py:correct",
        "--work",
        "work",
        "--test-fraction",
        "0.2",
        "--epochs",
        "2",
        "--type",
        "q8_0",
    ]
    return [
        "pipeline",
        *flags,
        "--deploy",
        "out",
        "--set",
        "rl_training.checkpoint_interval=1",
        *more,
    ]


@needs_llama
@pytest.mark.slow
@pytest.mark.long
def test_one_command_from_traces_to_a_file_that_llama_cpp_answers_better_with(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [sys.executable, "-m", "mlx_parallm", *command()]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    run = place / "work" / "train" / "run"
    # a checkpoint that a resume can begin with
    while not any(run.glob("step_*/trainer_state.json")):
        assert process.poll() is None
        time.sleep(0.02)
    state = json.loads((place / "work" / STATE_FILE).read_text())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert list(state["done"]) == STAGES[:5] and psutil.pid_exists(state["child"]["pid"])

    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unchanged, skipped") == 5
    assert "resum" in (place / "work" / "train" / "log.txt").read_text()
    results = json.loads((place / "work" / RESULTS_FILE).read_text())
    assert results["success"] and list(results["seconds"]) == STAGES
    for found in (results["evaluation"], results["exported"]):
        assert found["after"] > found["before"] + 0.1, found
    assert results["exported"]["verification"]["faults"] == []
    assert {file.name for file in (place / "out").iterdir()} == {
        "model-q8_0.gguf",
        "Modelfile",
        "export.json",
    }
    page = (place / "work" / REPORT_FILE).read_text()
    assert (
        "<polyline" in page
        and "http" not in page.replace("https://", "http://").split("<details>")[0]
    )

    assert main(command()) == 0
    assert capsys.readouterr().out.count("unchanged, skipped") == len(STAGES)
    with fake_ollama() as (url, ollama):
        assert main(command("--deploy", "ollama:words", "--ollama-url", url)) == 0
    said = capsys.readouterr().out
    assert said.count("unchanged, skipped") == len(STAGES) - 1 and "ollama run words" in said
    [made], [content] = ollama.created, ollama.blobs.values()
    assert made["model"] == "words" and content == (place / "out" / "model-q8_0.gguf").read_bytes()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--traces", "nothing"], "nothing does not exist"),
        (["--deploy", "ollama:"], "expected ollama:NAME or a directory"),
        (["--deploy", "score.py"], "is not an exported model"),
        (["--deploy", "other"], "holds another model, agent-q8_0.gguf"),
        (["--base-model", "broken"], "is not a file of weights"),
        (["--name", "a/b"], "without /"),
        (["--name", ".."], "without /"),
        (["--work", "."], "one lies in the other"),
        (["--epochs", "0"], "at least 1"),
        (["--reward", "score.py:missing"], "missing"),
        (["--test-fraction", "0"], "none of 120 prompts is held out"),
        (["--method", "grpo", "--set", "rl_training.algorithm=x"], "rl_training.algorithm"),
    ],
)
def test_what_cannot_work_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], more: list[str], reason: str
) -> None:
    (place / "other").mkdir()
    (place / "other" / "export.json").write_text(json.dumps({"file": "agent-q8_0.gguf"}))
    (place / "broken").mkdir()
    (place / "broken" / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"[]")
    assert main(command("--hardware", "CPU_ONLY", *more)) == 2
    assert reason in capsys.readouterr().err
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (
            ["--deploy", "ollama:words", "--ollama-url", "http://127.0.0.1:9"],
            "Ollama has to run before the training",
        ),
        (["--deploy", "ollama:words", "--ollama-url", "127.0.0.1:9"], "is not a URL"),
        (["--deploy", "ollama:my words"], "a name of Ollama's is letters"),
        (["--deploy", "score.py/out"], "score.py is a file"),
        (["--work", "score.py/work"], "score.py is a file"),
        (["--type", "q9_9"], "expected one of f32"),
        (
            ["--base-model", "untemplated"],
            "could not be exported: the tokenizer has no chat template",
        ),
        (["--base-model", "unknown"], "could not be exported"),
        (["--set", 'logging.trackers=["trackio"]'], "trackio"),
        (["no package"], r"needs the package gguf"),
        (["no disk"], "the disk of"),
    ],
)
def test_what_a_later_stage_needs_is_missed_before_the_first(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    reason: str,
) -> None:
    """Of deploying, exporting, training, and of all: no stage has begun, and nothing was
    trained."""
    installed, missing = packages.is_installed, "gguf" if more == ["no package"] else "trackio"
    monkeypatch.setattr(
        packages, "is_installed", lambda module: module != missing and installed(module)
    )
    if more == ["no disk"]:
        full = Altered(shutil, disk_usage=lambda _: SimpleNamespace(free=1000))
        monkeypatch.setattr(requirements, "shutil", full)
    if "--base-model" in more:
        shutil.copytree(directory_of("builtin:tiny"), place / more[-1])
        for file in (place / more[-1]).glob("*template*"):
            file.unlink()
        for name, key in (
            ("config.json", "model_type"),
            ("tokenizer_config.json", "chat_template"),
        ):
            document = json.loads((place / more[-1] / name).read_text())
            if key == "chat_template":
                document.pop(key, None)
            elif more[-1] == "unknown":
                document[key] = "mamba"
            (place / more[-1] / name).write_text(json.dumps(document))
    assert main(command("--hardware", "CPU_ONLY", *(more if more[0].startswith("--") else []))) == 2
    said = capsys.readouterr()
    assert reason in said.err and len(said.err.strip().splitlines()) == 1
    assert said.out == "" and not (place / "work" / "traces").exists()


def test_a_model_that_comes_with_the_dry_run_is_checked_after_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the hub is not here at the start; it is before anything long begins."""
    options = check_options(PipelineOptions((place / "traces.jsonl",), "builtin:tiny", type="q9_9"))
    with closing(WorkDirectory(place / "work")) as work:
        stages = Stages(options, detect_hardware(CPU_ONLY), work)
        with monkeypatch.context() as away:
            away.setattr(
                "mlx_parallm.systems.pipeline.requirements.directory_of", lambda name: None
            )
            stages.check_requirements()
        monkeypatch.setattr(stages, "_training_command", lambda directory: ["train"])
        monkeypatch.setattr(work, "command", lambda *arguments: None)
        with pytest.raises(ConfigError, match=r"--type.*q9_9"):
            stages._watch = lambda: None
            stages._dry_run(place)


def test_without_llama_cpp_it_says_so_at_the_start(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.deploy.export.llama_server.available", lambda: False)
    options = check_options(
        PipelineOptions((place / "traces.jsonl",), "builtin:tiny", type="f16", rewards=("r",))
    )
    with closing(WorkDirectory(place / "work")) as work:
        [line] = Stages(options, detect_hardware(CPU_ONLY), work).check_requirements()
    assert line.startswith(
        "no llama.cpp here: the exported file will not be verified, and not asked the held-out"
    )


def test_a_reward_of_labels_needs_scikit_learn_from_the_start(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.system.packages.is_installed", lambda name: name != "sklearn")
    options = check_options(
        PipelineOptions((place / "traces.jsonl",), "builtin:tiny", type="f16", method="grpo")
    )
    with (
        closing(WorkDirectory(place / "work")) as work,
        pytest.raises(ConfigError, match=r"scikit-learn: .*\[traces\]"),
    ):
        Stages(options, detect_hardware(CPU_ONLY), work).check_requirements()


def test_a_stage_that_fails_stands_in_the_results_and_the_report(place: Path) -> None:
    messages = [{"role": "user", "content": "Reverse: ab"}, {"role": "assistant", "content": "ba"}]
    collected = place / "rl_traces"
    collected.mkdir()
    write_lines([new_trace(messages, session_id="1", source="test")], collected / "traces.jsonl")
    pipeline = TrainingPipeline(
        "isaa", "builtin:tiny", "sft", traces=[collected / "traces.jsonl"], profile=CPU_ONLY
    )
    with pytest.raises(StageFailedError, match="held out"):
        pipeline.run_full_pipeline(say=lambda line: None)
    assert pipeline.work == place / "rl_training" / "isaa"
    results = json.loads((pipeline.work / RESULTS_FILE).read_text())
    assert results["success"] is False and "held out" in results["error"]
    assert "held out" in (pipeline.work / REPORT_FILE).read_text()


def test_without_a_reward_function_grpo_learns_one_from_the_labels(place: Path) -> None:
    found = list(read_traces(place / "traces.jsonl"))
    for trace in found:
        trace.note(rewards={"reward": {"score": float(trace.id.endswith("right")), "weight": 1.0}})
    write_lines(found, place / "traces.jsonl")
    options = check_options(
        PipelineOptions((place / "traces.jsonl",), "builtin:tiny", test_fraction=0.2)
    )
    with closing(WorkDirectory(place / "work")) as work:
        stages = Stages(options, detect_hardware(CPU_ONLY), work)
        for stage in stages.all()[:3]:
            work.carry_out(stage)
        config = stages._config_of(stages._settings())
    [environment] = config.environments
    learned = LearnedReward.load(environment.reward_options["learned"]["path"])
    assert environment.rewards == ("builtin:learned", AGREEMENT)
    assert environment.reward_weights == (1.0, 2.0)
    problems = (work.directory("dataset") / "problems" / "test.jsonl").read_text().splitlines()
    for row in map(json.loads, problems):
        assert row["references"] == [row["prompt"][0]["content"].removeprefix("Reverse: ")[::-1]]
    good = (work.directory("dataset") / "rows" / "good.jsonl").read_text().splitlines()
    assert len(good) == learned.positive
    assert learned.positive == learned.negative < 120  # none of the prompts that are held out
    assert environment.group_size * 16 == config.rl_training.atropos.rollout_batch_size


@pytest.mark.parametrize(
    ("right", "wrong", "weights"),
    [(20, 80, (4.0, 1.0)), (60, 20, (1.0, 3.0)), (50, 50, (1.0, 1.0))],
)
def test_both_labels_of_kto_count_alike(
    place: Path, right: int, wrong: int, weights: tuple[float, float]
) -> None:
    found = []
    for number in range(right + wrong):
        messages = [
            {"role": "user", "content": f"Q{number}"},
            {"role": "assistant", "content": f"A{number}"},
        ]
        found.append(new_trace(messages, session_id=f"{number}", source="test"))
        found[-1].note(rewards={"reward": {"score": float(number < right), "weight": 1.0}})
    write_lines(found, place / "traces.jsonl")
    setting = f"model.chat_template={'x' * 300!r}"  # longer than a file's name may be
    options = PipelineOptions((place / "traces.jsonl",), "builtin:tiny", "kto", settings=(setting,))
    options = check_options(options)
    with closing(WorkDirectory(place / "work")) as work:
        stages = Stages(options, detect_hardware(CPU_ONLY), work)
        for stage in stages.all()[:3]:
            work.carry_out(stage)
        assert stages._about_training()
        preference = stages._config_of(stages._settings()).rl_training.preference
        rows = (work.directory("dataset") / "rows" / "train.jsonl").read_text().splitlines()
    good = sum(json.loads(row)["label"] for row in rows)
    bad = len(rows) - good
    assert preference.desirable_weight * good == pytest.approx(preference.undesirable_weight * bad)
    assert (preference.desirable_weight, preference.undesirable_weight) == pytest.approx(
        weights, rel=0.3
    )
    assert min(preference.desirable_weight, preference.undesirable_weight) == 1.0
