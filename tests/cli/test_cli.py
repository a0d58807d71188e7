"""The commands: quick help without MLX, errors of one line, and what reaches the daemon."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import mlx_parallm
from mlx_parallm import cli
from mlx_parallm.cli.table import COMMANDS, TASKS, Command

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]

# Runs a command with a daemon that prints what it was given.
RECORDER = """
import json, os, signal, sys, types
import mlx_parallm
from mlx_parallm import cli

def record(config, adapters=None, *, resume=None):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    print(json.dumps({
        "config": config.model_dump(mode="json"), "adapters": adapters, "resume": resume,
        "blocked": sorted(s.name for s in blocked), "mlx": "mlx.core" in sys.modules,
        "cbwr": os.environ.get("MKL_CBWR"), "path": os.environ["PATH"],
    }))
    return 7

sys.modules["mlx_parallm.daemon"] = daemon = types.ModuleType("mlx_parallm.daemon")
daemon.run_training = daemon.run_server = record
sys.exit(sum(getattr(cli, sys.argv[1])(arguments) for arguments in json.loads(sys.argv[2])))
"""


def call(
    command: str, *arguments: str, cwd: Path, env: dict[str, str] | None = None
) -> dict[str, Any]:
    [given] = calls(command, arguments, cwd=cwd, env=env)
    return given


def calls(
    command: str, *arguments: Sequence[str], cwd: Path, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run the command once with each of these arguments, one after the other in one process."""
    program = [sys.executable, "-c", RECORDER, command, json.dumps(arguments)]
    if env is None:
        # of a test before
        env = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    result = subprocess.run(program, capture_output=True, text=True, cwd=cwd, env=env, check=False)
    assert result.returncode == 7 * len(arguments), result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def config_file(tmp_path: Path, text: str = "") -> str:
    (tmp_path / "mine.toml").write_text(text)
    return str(tmp_path / "mine.toml")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_is_quick_and_loads_no_mlx(command: Command) -> None:
    program = (
        f"import sys\nfrom mlx_parallm.cli import main\ntry:\n    main([{command.name!r},"
        " '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\nloaded = {'mlx',"
        " 'mlx_lm', 'transformers', 'pydantic', 'rich'} &"
        " set(sys.modules)\nassert not loaded, loaded"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith(f"usage: mlx_parallm {command.name}")


@pytest.mark.slow
def test_every_script_is_a_command_of_the_table() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"mlx_parallm"} | {
        command.script for command in COMMANDS if command.script
    }
    for name in set(scripts) - {"mlx_parallm"}:
        result = subprocess.run([BIN / name, "--help"], capture_output=True, text=True, check=True)
        assert result.stdout.startswith(f"usage: {name} ")
        assert getattr(cli, scripts[name].partition(":")[2])


def test_alone_it_shows_every_command_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert cli.main(["help"]) == 0
    assert capsys.readouterr().out == shown
    titles = [line for line in shown.splitlines() if line in TASKS.values()]
    assert titles == list(TASKS.values())
    assert all(f"\n  {command.name} " in shown and command.summary in shown for command in COMMANDS)


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "did you mean 'train'" in output.err
    assert cli.main(["nonsense"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "code", "shown"),
    [
        ("train", ["--version"], 0, mlx_parallm.__version__),
        ("serve", [], 2, "--model-path is required"),
    ],
)
def test_the_version_and_the_usage_end_the_command(
    command: str, arguments: list[str], code: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        getattr(cli, command)(arguments)
    assert end.value.code == code and shown in "".join(capsys.readouterr())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_their_flags(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_bytes(
        subprocess.run(
            [BIN / "mlx_parallm", "completion", "bash"], capture_output=True, check=True
        ).stdout
    )

    def completions(*words: str) -> set[str]:
        program = (
            f"source {script}; COMP_WORDS=(mlx_parallm {' '.join(map(repr, words))});"
            f" COMP_CWORD={len(words)};"
            ' _shtab_mlx_parallm "" ; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        result = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
        return set(result.stdout.split())

    assert {command.name for command in COMMANDS} <= completions("")
    assert {"--resume", "--restarts"} <= completions("train", "--res")


RECTANGLE_IN_8_BITS = ("--set", "server.kv_bits=8", "--set", "server.kv_layout=rectangle")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("train", [], "--config is required"),
        ("train", ["--resume", "auto"], "--config is required"),
        ("train", ["--config", "nowhere.toml"], "no configuration 'nowhere.toml'"),
        (
            "train",
            ["--config", "mine.toml", "--set", "rl_training.learning_rat=1"],
            "rl_training.learning_rate",
        ),
        ("train", ["--config", "mine.toml", "--set", "nonsense"], "expected section.key=value"),
        ("train", ["--resume", "nowhere"], "--resume nowhere: no such directory"),
        ("train", ["--resume", "."], "no config.toml there"),
        ("serve", ["--model-path", "m", "--lora-path", "a", "b"], "name all but one"),
        ("serve", ["--model-path", "m", "--lora-path", "x=a", "x=b"], "each name once"),
        ("serve", ["--model-path", "m", "--port", "70000"], "server.port"),
        (
            "serve",
            ["--model-path", "m", "--set", "server.kv_bits=3"],
            "server.kv_bits: Input should be 8 or 4",
        ),
        (
            "serve",
            ["--model-path", "m", *RECTANGLE_IN_8_BITS],
            "server: kv_bits needs keys and values by tokens",
        ),
        (
            "merge_lora",
            ["--base-model", "./no", "--lora-path", "a", "--output", "o"],
            "no model at './no'",
        ),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(
    command: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert getattr(cli, command)(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_train_hands_over_the_configuration(tmp_path: Path) -> None:
    file = config_file(tmp_path, "[rl_training]\ntotal_steps = 3\nlearning_rate = 1e-3\n")
    overrides = ("--set", "rl_training.total_steps=9", "--set", "server.port=0")
    given = call("train", "--config", file, *overrides, cwd=tmp_path)
    training = given["config"]["rl_training"]
    assert (
        training["total_steps"],
        training["learning_rate"],
        given["config"]["server"]["port"],
    ) == (9, 1e-3, 0)
    assert training["run_name"].startswith("mine-2")
    assert given["resume"] is None
    assert not given["mlx"], "signals must be blocked before MLX is imported"
    assert given["blocked"] == ["SIGHUP", "SIGINT", "SIGTERM"]
    assert given["cbwr"] is None


def test_resume_auto_a_process_without_a_path_and_deterministic_arithmetic(tmp_path: Path) -> None:
    """A compiler that is found but cannot find its own parts kills MLX's compiled kernels."""
    file = config_file(tmp_path, "[rl_training]\ndeterministic = true\nmax_staleness = 0\n")
    given = call("train", "--config", file, "--resume", "auto", cwd=tmp_path, env={})
    assert (given["resume"], given["config"]["rl_training"]["run_name"]) == ("auto", "mine")
    assert "/usr/bin" in given["path"].split(":")
    assert (given["cbwr"], given["mlx"]) == ("AUTO,STRICT", False), (
        "MKL is asked before MLX is loaded"
    )


def test_train_resume_takes_the_saved_configuration_of_run_and_step(tmp_path: Path) -> None:
    step = tmp_path / "run" / "step_000005"
    step.mkdir(parents=True)
    (tmp_path / "run" / "latest").symlink_to("step_000005")
    (tmp_path / "run" / "config.toml").write_text(
        '[rl_training]\nrun_name = "run"\ntotal_steps = 11\n'
    )
    directories = (tmp_path / "run", step, tmp_path / "run" / "latest")
    each = (
        ["--resume", str(directory), "--set", "rl_training.seed=4"] for directory in directories
    )
    for directory, given in zip(directories, calls("train", *each, cwd=tmp_path), strict=True):
        training = given["config"]["rl_training"]
        assert (training["total_steps"], training["seed"], given["resume"]) == (
            11,
            4,
            str(directory),
        )


@pytest.mark.parametrize("name", ["step_5000", "step_005000/"])
def test_train_resume_of_a_step_without_its_run_says_which_runs_have_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("a/step_005000", "b/step_000001", "c/step_005000"):
        (tmp_path / "checkpoints" / path).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert cli.train(["--resume", f"checkpoints/{name}"]) == 2
    error = capsys.readouterr().err
    assert (
        "no such directory; that step is in checkpoints/a/step_005000, checkpoints/c/step_005000\n"
        in error
    )


def test_serve_hands_over_model_and_adapters(tmp_path: Path) -> None:
    (tmp_path / "odd=name").mkdir()
    adapters = ("--lora-path", "odd=name", "one=a/b", "--lora-path", "two=c=d")
    flags = (
        "--host",
        "::1",
        "--port",
        "0",
        "--api-key-file",
        'k"ey',
        "--set",
        "server.batch_size=3",
    )
    given = call("serve", "--model-path", "builtin:tiny", *adapters, *flags, cwd=tmp_path)
    config = given["config"]
    assert (config["model"]["base_path"], config["model"]["lora_path"]) == (
        "builtin:tiny",
        "odd=name",
    )
    assert given["adapters"] == {"one": "a/b", "two": "c=d"}
    server = config["server"]
    assert (server["host"], server["port"], server["api_key_file"], server["batch_size"]) == (
        "::1",
        0,
        'k"ey',
        3,
    )
    assert given["blocked"] == ["SIGHUP", "SIGINT", "SIGTERM"]


def test_a_reader_that_closes_the_pipe_ends_a_printing_command_in_order() -> None:
    program = (
        "import sys\nfrom argparse import Namespace\nfrom mlx_parallm.cli.command import piped\n"
        "def run(args):\n    for _ in range(10**5):\n        print('a line')\n"
        "sys.exit(piped(run)(Namespace()))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"a line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("eval --config quickstart --poblems 3", "--problems"),
        ("train --model=x --sets a=b", "--set"),
        ("serve --prot=80", "--port"),
        ("traces biuld x", "build"),
    ],
)
def test_a_word_that_argparse_does_not_know_is_answered_by_the_nearest(
    words: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert capsys.readouterr().err.endswith(f"; did you mean {meant!r}?\n")
