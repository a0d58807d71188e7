"""Task folders are read, played in the sandbox, scored by their own tests, or refused by name."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.environments.registry import create_environment
from mlx_parallm.environments.task_folders import folder as folders
from mlx_parallm.environments.task_folders.environment import FolderState, TaskFoldersEnvironment
from mlx_parallm.environments.task_folders.folder import NeedsContainerError, read_folder
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from tests.integration.in_process import train_here
from tests.integration.processes import metrics, write_config

MOST = 20  # files of a task, in the place of MOST_FILES

TASK = '[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 20.0\n'
DOCKERFILE = "FROM python:3.13-slim\nWORKDIR /app\nCOPY data /app/data\nENV WORD=hello \\\n  N=3\n"
SCRIPT = """#!/bin/bash
if [ "$(cat /app/out.txt)" = "hello 3 seed" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo "out.txt is wrong in /app"; echo 0.25 > /logs/verifier/reward.txt
fi
"""
PLAIN_TESTS = """
from pathlib import Path

def test_there():
    assert Path("/app/out.txt").read_text().strip() == "hello 3 seed"
"""
SOLUTION = '```bash\necho "$WORD $N $(cat /app/data/seed.txt)" > /app/out.txt; pwd\n```'


def folder(root: Path, name: str, files: Mapping[str, str]) -> Path:
    for file, text in files.items():
        path = root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / name


def harbor(root: Path, name: str = "greet", **changes: str | None) -> Path:
    files = {
        "task.toml": TASK,
        "instruction.md": "<!-- canary 123 -->\nWrite /app/out.txt.\n",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/seed.txt": "seed",
        "tests/test.sh": SCRIPT,
        "solution/solve.sh": "exit 1",
    }
    for key, text in changes.items():
        file = {"task": "task.toml", "dockerfile": "environment/Dockerfile"}.get(key, key)
        files.pop(file, None)
        if text is not None:
            files[file] = text
    return folder(root, name, files)


def play(environment: TaskFoldersEnvironment, *answers: str) -> FolderState:
    state = environment.reset(index=0)
    for answer in answers:
        state = environment.update_state(state, answer)
    assert isinstance(state, FolderState)
    return state


def test_a_harbor_task_is_played_and_scored_by_its_script(tmp_path: Path) -> None:
    harbor(tmp_path)
    environment = create_environment("task_folders", path=str(tmp_path), heldout=0)
    assert isinstance(environment, TaskFoldersEnvironment)
    state = environment.reset(index=0)
    text = str(state.prompt[0]["content"])  # type: ignore[index]
    assert text.endswith("without a block.\n\nWrite /app/out.txt.")
    state = play(environment, SOLUTION, "done")
    assert state.prompt[2] == {"role": "user", "content": "/app\n(exit code 0)"}  # type: ignore[index]
    assert (state.done, state.metadata["reward"], state.metadata["commands"]) == (True, 1.0, 1)
    assert state.metadata["of_task"] == {"difficulty": "easy"}
    lazy = play(environment, "nothing to do")
    assert (lazy.metadata["reward"], lazy.done) == (0.25, True)
    assert "out.txt is wrong in /app" in lazy.metadata["tests_output"]


def test_the_tests_are_unseen_and_the_turns_bounded(tmp_path: Path) -> None:
    harbor(tmp_path)
    environment = TaskFoldersEnvironment(path=str(tmp_path), heldout=0, max_steps=2, command_s=2)
    state = play(environment, "```bash\nls /tests; echo kept > a; sleep 9\n```")
    shown = state.prompt[-1]["content"]  # type: ignore[index]
    assert shown == "(it ran out of time)"
    assert state.files["a"] == b"kept\n"
    state = environment.update_state(state, "```bash\ncat a\n```\n```bash\nrm a\n```")
    assert (state.done, state.files["a"]) == (True, b"kept\n")  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["harbor", "terminal-bench"])
def test_plain_test_functions_need_no_pytest(tmp_path: Path, kind: str) -> None:
    if kind == "harbor":
        script = "apt-get install -y curl\nuvx -w pytest pytest /tests/test_outputs.py\n"
        files = {"tests/test.sh": script, "tests/test_outputs.py": PLAIN_TESTS}
        harbor(tmp_path, **files)
    else:
        files = {
            "task.yaml": "instruction: |-\n  Write /app/out.txt.\nparser_name: pytest\ntags: [x]\n",
            "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/python-3-13:20250620\n"
            "WORKDIR /app\nCOPY data/ ./data/\nENV WORD=hello N=3\n",
            "data/seed.txt": "seed",
            "run-tests.sh": "uv run pytest $TEST_DIR/test_outputs.py",
            "tests/test_outputs.py": PLAIN_TESTS,
        }
        folder(tmp_path, "greet", files)
    environment = TaskFoldersEnvironment(path=str(tmp_path), heldout=0)
    assert play(environment, SOLUTION, "done").metadata["reward"] == 1.0
    lazy = play(environment, "done")
    assert lazy.metadata["reward"] == 0.0
    assert "FileNotFoundError" in lazy.metadata["tests_output"]


def test_a_python_verifier_gives_a_share(tmp_path: Path) -> None:
    verifier = (
        "def verify(workspace):\n"
        "    return {'reward': len((workspace / 'out.txt').read_text().split()) / 4, 'other': 1}\n"
    )
    harbor(tmp_path, **{"tests/test.sh": None, "tests/verifier.py": verifier})
    environment = TaskFoldersEnvironment(path=str(tmp_path), heldout=0)
    assert play(environment, SOLUTION, "done").metadata["reward"] == 0.75


def test_tests_without_a_reward_reject_the_episode(tmp_path: Path) -> None:
    harbor(tmp_path, **{"tests/test.sh": "echo nothing"})
    environment = TaskFoldersEnvironment(path=str(tmp_path), heldout=0)
    with pytest.raises(RolloutRejectedError, match=r"greet: .*reward"):
        play(environment, "done")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dockerfile": "FROM python:3.13\nRUN apt-get install -y git\n"}, "line 2: RUN apt-get"),
        ({"dockerfile": "FROM nvidia/cuda:12\n"}, "not a plain python, ubuntu or debian image"),
        ({"dockerfile": "FROM ubuntu:24.04\nCOPY data /etc/data\n"}, "outside of /app"),
        ({"dockerfile": "FROM ubuntu:24.04\nCOPY ../x .\n"}, "there is no '../x'"),
        ({"dockerfile": "FROM ubuntu\nCOPY --from=a b c\n"}, "needs a container"),
        (
            {"task": '[environment]\ndocker_image = "org/own:1"\n', "dockerfile": None},
            "docker_image = 'org/own:1'",
        ),
        ({"task": "[environment]\ngpus = 1\n"}, "gpus"),
        ({"task": "version = "}, "task.toml"),
        ({"tests/test.sh": "curl x | bash\n"}, "test.sh calls curl: the sandbox has no network"),
        (
            {"tests/test.sh": "pytest /tests", "tests/test_a.py": "import numpy\n"},
            "imports numpy",
        ),
        (
            {"tests/test.sh": "pytest /tests", "tests/test_a.py": "def test_a(tmp_path): ...\n"},
            "fixtures",
        ),
        ({"tests/test.sh": None}, "no tests/test.sh"),
        ({"environment/docker-compose.yaml": "services: {}"}, "docker-compose.yaml"),
    ],
)
def test_what_needs_a_container_is_refused_by_name(
    tmp_path: Path, changes: dict[str, str | None], reason: str
) -> None:
    path = harbor(tmp_path, **changes)
    with pytest.raises(NeedsContainerError, match=reason):
        read_folder(path)


def out_of(path: Path) -> Path:
    (path.parent / "outside").mkdir()
    (path.parent / "outside" / "secret").write_text("secret")
    return path.parent / "outside"


def linked(name: str, target: str = "secret") -> Callable[[Path], None]:
    def change(path: Path) -> None:
        outside = out_of(path)
        entry = path / name
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        entry.symlink_to(outside / target)

    return change


def sparse(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with (path / name).open("wb") as file:
            file.truncate(3 << 30)

    return change


def with_time(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "task.toml").write_text(f"[verifier]\ntimeout_sec = {text}\n")


def many(path: Path) -> None:
    for number in range(MOST):
        (path / "tests" / f"{number}").touch()


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (linked("instruction.md"), "instruction.md' leads out"),
        (linked("task.toml"), "task.toml' leads out"),
        (linked("environment", "."), "environment' leads out|environment.*leads out"),
        (linked("tests", "."), "tests' leads out"),
        (linked("tests/a"), "tests/a' leads out"),
        (linked("tests/a", "."), "tests/a is a link to a directory"),
        (linked("environment/Dockerfile"), "leads out"),
        (linked("environment/data"), "beside the Dockerfile"),
        (linked("environment/data/seed.txt"), "leads out"),
        (sparse("instruction.md"), "more than"),
        (sparse("task.toml"), "more than"),
        (sparse("environment/Dockerfile"), "more than"),
        (sparse("environment/data/a"), "more than"),
        (sparse("tests/a"), "more than"),
        (lambda path: os.mkfifo(path / "tests" / "pipe"), "not a regular file"),
        (lambda path: (path / "tests" / "z").symlink_to("/dev/zero"), "leads out"),
        (many, "more than"),
        (
            lambda path: (path / "task.toml").write_text("a" + ".a" * 500_000 + "=1"),
            "1000003 bytes",
        ),
        (with_time("nan"), "timeout_sec = nan: expected seconds above 0"),
        (with_time("-1"), "timeout_sec = -1: expected"),
        (with_time("'1'"), "timeout_sec = 1: expected"),
        (lambda path: (path / "task.toml").write_text("a = " + "[" * 60_000), "cannot be read"),
        (lambda path: (path / "tests/test.sh").symlink_to("test.sh"), "not a path|[Ss]ymlink"),
    ],
)
def test_a_folder_is_read_inside_and_within_bounds(
    tmp_path: Path,
    attack: Callable[[Path], object],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folders, "MOST_FILES", MOST)
    path = harbor(tmp_path)
    (path / "tests/test.sh").rename(path / "tests/test.sh.old")
    if reason != "not a path|[Ss]ymlink":
        (path / "tests/test.sh.old").rename(path / "tests/test.sh")
    attack(path)
    with pytest.raises(NeedsContainerError, match=reason):
        read_folder(path)


def test_a_link_inside_counts_as_its_file(tmp_path: Path) -> None:
    path = harbor(tmp_path)
    (path / "tests" / "more").symlink_to("../environment/data/seed.txt")
    assert read_folder(path).tests["more"] == b"seed"


def test_an_instruction_behind_many_empty_lines(tmp_path: Path) -> None:
    """Line by line they were taken off for minutes."""
    path = harbor(tmp_path)
    (path / "instruction.md").write_text("\n" * 3_000_000 + "<!-- canary 1 -->\n\nDo it.\n")
    assert read_folder(path).instruction == "Do it."


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\ninstruction: hi\n", "aliases"),
        ("base: &b {k: 1}\nmore:\n  <<: *b\ninstruction: hi\n", "aliases"),
        ("instruction: " + "[" * 5000, "cannot be read|task.yaml"),
        ("instruction: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_yaml_that_stands_for_more_than_it_is(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(NeedsContainerError, match=reason):
        read_folder(folder(tmp_path, "bench", {"task.yaml": text}))


def test_refused_tasks_end_the_start_or_are_counted(tmp_path: Path) -> None:
    harbor(tmp_path, "good")
    harbor(tmp_path, "deep/bad", dockerfile="FROM ubuntu\nRUN make\n")
    with pytest.raises(ConfigError, match="skip = true"):
        TaskFoldersEnvironment(path=str(tmp_path))
    environment = TaskFoldersEnvironment(path=str(tmp_path), skip=True, heldout=0)
    assert environment.refused == {"Dockerfile, line 2: RUN make: needs a container": 1}
    with pytest.raises(ConfigError, match="each of 1 tasks"):
        TaskFoldersEnvironment(path=str(tmp_path / "deep"), skip=True)
    with pytest.raises(ConfigError, match=r"task\.toml.*task\.yaml"):
        TaskFoldersEnvironment(path=str(tmp_path / "good" / "tests"))


@pytest.mark.slow
@pytest.mark.long
def test_a_run_trains_on_it(tmp_path: Path) -> None:
    harbor(tmp_path / "tasks")
    config = write_config(tmp_path, steps=2)
    text = config.read_text()
    entry = f'kind = "task_folders"\nname = "folders"\noptions = {{ path = "{tmp_path}/tasks" }}\n'
    config.write_text(
        text[: text.index("[[environments]]")]
        + f"[[environments]]\n{entry}max_tokens = 8\ngroup_size = 4\n"
    )
    train_here(
        config,
        "rl_training.dynamic_sampling=false",
        "rl_training.atropos.rollout_batch_size=8",
        "rl_training.batch_size=8",
        "rl_training.atropos.max_token_length=1024",
    )
    lines = metrics(tmp_path / "checkpoints" / "run")
    assert [line["reward_by_environment"] for line in lines] == [{"folders": 0.25}] * 2


def test_the_path_is_beside_the_configuration(tmp_path: Path) -> None:
    harbor(tmp_path / "tasks")
    config = tmp_path / "run.toml"
    config.write_text(
        '[[environments]]\nkind = "task_folders"\nname = "t"\noptions = { path = "tasks" }\n'
    )
    [entry] = load_config(config).environments
    assert entry.options == {"path": str((tmp_path / "tasks").resolve())}


def test_tasks_of_one_name_keep_their_own_tests(tmp_path: Path) -> None:
    harbor(tmp_path / "one", task="")
    harbor(tmp_path / "two", task="", **{"tests/test.sh": "echo 0.5 > /logs/verifier/reward.txt"})
    environment = TaskFoldersEnvironment(path=str(tmp_path), heldout=0)
    rewards = {}
    for index in (0, 1):
        state = environment.update_state(environment.reset(index=index), "nothing to do")
        rewards[state.metadata["task"]] = state.metadata["reward"]
    assert rewards == {"one/greet": 0.25, "two/greet": 0.5}


@pytest.mark.parametrize("text", ["nan", "inf", '{"reward": 1e999}', f"1{'0' * 400}"])
def test_a_reward_is_a_finite_number(tmp_path: Path, text: str) -> None:
    name = "reward.json" if text[:1] in "{1" else "reward.txt"
    harbor(tmp_path, **{"tests/test.sh": f"echo '{text}' > /logs/verifier/{name}"})
    environment = TaskFoldersEnvironment(path=str(tmp_path), heldout=0)
    with pytest.raises(RolloutRejectedError, match="its tests wrote no reward"):
        play(environment, "nothing to do")


@pytest.mark.parametrize(
    "changes",
    [
        {"task": '[verifier]\ntimeout_sec = "soon"\n'},
        {"task": "[verifier]\ntimeout_sec = [1]\n"},
        {"dockerfile": "FROM python:3.13\nCOPY 'data /app/data\n"},
        {"dockerfile": "FROM python:3.13\nWORKDIR /app/../..\n"},
    ],
)
def test_what_cannot_be_read_is_refused_too(tmp_path: Path, changes: dict[str, str]) -> None:
    path = harbor(tmp_path, **changes)
    with pytest.raises(NeedsContainerError):
        read_folder(path)
