"""The user's own code: found, checked before anything is built from it, and its faults told in
one line."""

import asyncio
import importlib
from pathlib import Path

import pytest

from mlx_parallm import primitives
from mlx_parallm.config.load import load_config
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import ConfigError, ParallmError
from mlx_parallm.execution import user_code as user_code_module
from mlx_parallm.execution.user_code import (
    REMOVED,
    absolute,
    is_async,
    load,
    load_function_of,
    name_of,
    on_own_thread,
    user_code,
)


def write(directory: Path, text: str, name: str = "mine.py") -> Path:
    file = directory / name
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        ("", "python:{}", "does not have the form"),
        ("", "mine.py:f", "does not have the form"),
        ("", "python:no/such.py:f", "there is no file no/such.py"),
        ("", "python:no.such.module:f", "No module named 'no'"),
        (
            "def correct(): ...\ndef other(): ...",
            "python:{}:corect",
            "no 'corect' in .*did you mean 'correct'",
        ),
        ("def short(): ...", "python:{}:nope", r"no 'nope' in [^;]*mine\.py$"),
        ("f = 3", "python:{}:f", "is int 3, not a function"),
        ("class f: ...", "python:{}:f", "is a class, not a function"),
        ("x = 1\ndef f(:\n", "python:{}:f", r"mine\.py, line 2: SyntaxError: "),
        (
            "import os\nimport nowhere_to_be_found",
            "python:{}:f",
            r"mine\.py, line 2: ModuleNotFoundError: No module",
        ),
        (
            "def g():\n    return 1 / 0\n\ng()",
            "python:{}:f",
            r"mine\.py, line 2: ZeroDivisionError: division by zero",
        ),
        ("import sys\nsys.exit('no')", "python:{}:f", r"mine\.py, line 2: SystemExit: no"),
        ("def f(): ...", "python:{}:f", r"takes \(\), but it is called with \(rewards\)"),
        ("def f(a, b): ...", "python:{}:f", r"takes \(a, b\), but it is called with \(rewards\)"),
        ("async def f(rewards): ...", "python:{}:f", "is async; it has to be a plain function"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(
    tmp_path: Path, text: str, reference: str, message: str
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"(?s)^the.key: .*{message}") as caught:
        load_function_of(("rewards",), reference.format(file), "the.key")
    assert "\n" not in str(caught.value)


def test_a_file_is_run_once_and_finds_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "VALUE = 41", "neighbour_of_mine.py")
    file = write(
        tmp_path,
        "import neighbour_of_mine\nstate = [neighbour_of_mine.VALUE]\ndef f(): return state",
    )
    load(f"python:{file}:f", "k")().append(1)
    assert load(f"python:{file}:state", "k") == [41, 1]


def test_a_file_that_failed_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path, "1 / 0")
    with pytest.raises(ConfigError):
        load(f"python:{file}:f", "k")
    write(tmp_path, "def f(): return 'better'")
    assert load(f"python:{file}:f", "k")() == "better"


def test_a_module_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package_of_rewards").mkdir()
    write(tmp_path / "my_package_of_rewards", "def f(): return 5", "scoring.py")
    monkeypatch.chdir(tmp_path)
    assert load("python:my_package_of_rewards.scoring:f", "k")() == 5


def test_names_and_kinds_of_callables() -> None:
    class Judge:
        async def __call__(self) -> None: ...

    async def later() -> None: ...

    assert (name_of(Judge()), name_of(later)) == ("Judge", "later")
    assert is_async(Judge())
    assert is_async(later)
    assert not is_async(len)


def test_a_fault_names_the_line_of_the_users_file(tmp_path: Path) -> None:
    file = write(tmp_path, "import json\n\ndef f():\n    return json.loads('[')\n")
    function = load(f"python:{file}:f", "k")
    with (
        pytest.raises(ConfigError, match=r"mine\.py.*JSONDecodeError"),
        user_code("f"),
    ):
        function()
    with pytest.raises(ParallmError, match=r"^our own$"), user_code("f"):
        raise ParallmError("our own")


@pytest.mark.parametrize(
    ("text", "line", "instead"),
    [
        (
            "from mlx_parallm.environments.base import Environment, Task",
            1,
            "write a BaseEnvironment instead",
        ),
        (
            "from mlx_parallm.environments.base import (\n    SingleTurn,\n)",
            1,
            "leave it out: an EnvironmentSource plays one turn",
        ),
        (
            "import mlx_parallm.environments.base as base\n\nclass Mine(base.Environment): ...",
            3,
            "write a BaseEnvironment instead",
        ),
        ("from rl_primitives.environment import State", 1, "from mlx_parallm.primitives instead"),
        ("from mlx_parallm.types import Rolout", 1, "docs/stability.md lists"),
    ],
)
def test_a_name_that_is_gone_is_told_with_what_to_write(
    text: str, line: int, instead: str, tmp_path: Path
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"mine\.py, line {line}: .*: .*{instead}") as error:
        load(f"python:{file}:Mine", "environments: kind")
    assert "\n" not in str(error.value)


def test_what_a_hint_calls_gone_is_gone() -> None:
    for name in REMOVED:
        module, _, attribute = name.rpartition(".")
        assert not hasattr(importlib.import_module(module), attribute) if module else True
    for name in ("BaseEnvironment", "State"):
        assert name in primitives.__all__


def test_relative_files_lie_beside_the_configuration_or_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, here = tmp_path / "beside", tmp_path / "here"
    beside.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    for directory, name in ((beside, "a.py"), (here, "a.py"), (here, "rows.jsonl"), (here, "b.py")):
        write(directory, "", name)
    config = write(
        beside,
        '[rl_training]\nadvantage = "python:a.py:f"\nloss ='
        ' "python:my.module:g"\n[[environments]]\nkind = "dataset"\n'
        'data = "rows.jsonl"\nheldout_data = "missing.jsonl"\nrewards = ["python:b.py:r"]\n',
        "run.toml",
    )
    found = load_config(config)
    [entry] = found.environments
    assert found.rl_training.advantage == f"python:{beside / 'a.py'}:f"
    assert found.rl_training.loss == "python:my.module:g"
    assert (entry.data, entry.heldout_data) == (str(here / "rows.jsonl"), "missing.jsonl")
    assert entry.rewards == (f"python:{here / 'b.py'}:r",)
    assert absolute("~/nowhere.py", [here]) == "~/nowhere.py"


OWN_CLASS = """
from mlx_parallm.environments.base import EnvironmentSource, Task
from mlx_parallm.rewards.base import exact_match

class Good(EnvironmentSource):
    def task(self, index, split="train"):
        question = f"{self.config.options['word']} {index}"
        return Task(question, self.open_with(({"role": "user", "content": question},)), exact_match("x"))

class NoTask(EnvironmentSource): ...
class NoSplit(EnvironmentSource):
    def task(self, index): ...
class Later(EnvironmentSource):
    async def task(self, index, split): ...
class NoSeed(Good):
    def __init__(self, config): ...
class Fails(Good):
    def __init__(self, config, *, seed, name=None):
        raise OSError("no disk")
class Other: ...
class Several(Good):
    def environment(self, task): ...
"""


def own(tmp_path: Path, name: str):
    kind = f"python:{write(tmp_path, OWN_CLASS, 'env.py')}:{name}"
    file = write(
        tmp_path, f'[[environments]]\nkind = "{kind}"\noptions = {{ word = "Say" }}\n', "run.toml"
    )
    return build_sources(load_config(file).environments, seed=0)


def test_an_environment_of_ones_own(tmp_path: Path) -> None:
    [source] = own(tmp_path, "Good")
    assert source.name == "Good"
    assert source.task(3).messages[0]["content"] == "Say 3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoTask", r"does not define task\(index, split\)"),
        ("NoSplit", r"\.task takes \(self, index\), but it is called with \(self, index, split\)"),
        ("Later", "task is async"),
        ("NoSeed", r"takes \(config\), but it is called with \(config, seed=…, name=…\)"),
        ("Fails", r"env\.py, line 19: OSError: no disk"),
        (
            "Several",
            "Several: Several.environment is never called: an EnvironmentSource plays one turn;"
            " for several write a BaseEnvironment",
        ),
        ("Other", "is a subclass neither of mlx_parallm.environments.state.BaseEnvironment nor of"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        own(tmp_path, name)


def test_a_directory_named_like_the_package_is_the_users() -> None:
    directory = Path(f"{user_code_module.PACKAGE.rstrip('/')}_rewards")
    assert user_code_module._is_theirs(str(directory / "score.py"))
    assert not user_code_module._is_theirs(user_code_module.__file__)


def test_an_object_of_this_process_is_shown_by_its_name() -> None:
    """TRL's eval_dataset was called python:this_process:eval_dataset in messages."""
    assert (
        user_code_module.shown(user_code_module.reference_to([], "eval_dataset")) == "eval_dataset"
    )
    for reference in ("python:rows.py:rows", "rows.jsonl"):
        assert user_code_module.shown(reference) == reference


@pytest.mark.parametrize("raised", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
async def test_what_is_no_exception_is_the_error_of_its_call(raised: type[BaseException]) -> None:
    """Whoever waited for the call waited for ever."""

    def judge() -> float:
        raise raised

    async with asyncio.timeout(20):
        with pytest.raises(ParallmError, match=rf"my judge: .*{raised.__name__}"):
            await on_own_thread(judge, "my judge")
