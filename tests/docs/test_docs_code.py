"""Every code block of README.md and docs/**/*.md works: run where it can be, else checked as far as
it can be.

Each test's name says which: `docs/serving.md:12-bash-run`, `…-checked`, `…-text`. The blocks of a
page, up to a comment `<!-- session: NAME -->`, are one session: they run in their order, in one
temporary directory, with files saved by earlier ones and with their own server. What is
changed before they run: ports 8000 and 8765, hub ids of models (the tiny model takes their place),
the number and size of training steps (`docs_commands.py`). `docs_blocks.py` finds and looks at
them.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.environments.episode_tools import open_tools
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import is_reference, load
from tests.docs import docs_commands
from tests.docs.docs_blocks import (
    COMMANDS,
    ROOT,
    SCRIPTS,
    Block,
    blocks,
    flag_problems,
    flags_of,
    pages,
    problems,
)
from tests.integration.processes import free_port
from tests.signals_reset import default_signals

ALL = [block for page in pages() for block in blocks(page)]
LONG_SESSIONS = {
    *("evaluation", "first_model", "library", "loading", "parameters", "trl", "your_environment")
}
"""Several trainings each, of what tests/integration, tests/library, tests/trl and
tests/environments train as well."""
BLOCK_SECONDS = 120
PAGES_AT_ONCE = 2
MODEL_ID = re.compile(
    r"\b(?:Qwen|mlx-community|NousResearch|meta-llama|mistralai|unsloth)/[\w.-]+"
    r"|\bbuild/smollm2/\w+"
)
RUN_DIRECTORY = re.compile(r"checkpoints/(?:<[\w-]+>|\w+-YYYY\w+-\w+)")


Place = tuple[Path, str]
"""A page, and one of its sessions."""


class Page:
    """One session of a page: its blocks, a directory, a port, and the result of each block."""

    def __init__(self, blocks: list[Block], directory: Path, shims: Path) -> None:
        self.blocks = blocks
        self.directory = directory
        (directory / "examples").symlink_to(ROOT / "examples")  # a reader is in a clone
        self.port = free_port()
        self._groups: list[int] = []
        self.results: dict[int, Future[str | None]] = {
            block.line: Future() for block in self.blocks
        }
        paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
        self._environment = os.environ | {
            "PATH": os.pathsep.join([str(shims), *paths]),
            "DOCS_PATH": os.pathsep.join(paths),
            "DOCS_BIN": paths[0],
            "DOCS_PORT": str(self.port),
        }
        self._environment.pop("MLX_PARALLM_API_KEY", None)

    def run(self, last: int) -> None:
        """Runs the page up to the block of that line; each block's result is what went wrong, or
        None."""
        try:
            for block in (block for block in self.blocks if block.line <= last):
                if block.saved_as:
                    self._save(block)
                self.results[block.line].set_result(self._run(block) if block.is_run else None)
        finally:
            docs_commands.stop_server(self.directory)
            for group in self._groups:  # what blocks have left in the background
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)

    def parse_toml_to(self, wanted: Block) -> Config:
        """The configuration in a block, with the hooks that it names found in the files of the
        blocks before it.

        Raises ConfigError.
        """
        for block in self.blocks:
            if block.saved_as:
                self._save(block)
            if block is wanted:
                break
            if block.saved_as and block.language == "python" and "open(" in block.text:
                assert not self._run(block)  # it writes the rows
        file = self.directory / (wanted.saved_as or f"block_{wanted.line}.toml")
        file.write_text(self._here(wanted.text))
        config = load_config(file)
        environments = [e for e in config.environments if not (e.data or "").startswith("hf:")]
        tools = open_tools(config.tools)
        build_sources(environments, seed=0, tools=tools)
        if tools is not None:
            tools.client.close()
        for reference in (config.rl_training.advantage, config.rl_training.loss):
            if reference is not None and is_reference(reference):
                load(reference, "rl_training")
        return config

    def _save(self, block: Block) -> None:
        assert block.saved_as is not None
        file = self.directory / block.saved_as
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._here(block.text), encoding="utf-8")

    def _here(self, text: str) -> str:
        """The block as it is run on this machine."""
        text = re.sub(r"\b(8000|8765)\b", str(self.port), MODEL_ID.sub("builtin:tiny", text))
        text = re.sub(r"^(\.|source) \S*bin/activate$", "true", text, flags=re.MULTILINE)
        text = re.sub(r"(?<![\w/])\.venv/bin/(?=\w)", "", text)
        runs = sorted(
            (self.directory / "checkpoints").glob("*/config.toml"),
            key=lambda file: file.stat().st_mtime,
        )
        return RUN_DIRECTORY.sub(f"checkpoints/{runs[-1].parent.name}", text) if runs else text

    def _run(self, block: Block) -> str | None:
        text = self._here(block.text)
        if block.language == "python":
            file = self.directory / (block.saved_as or f"block_{block.line}.py")
            file.write_text(text, encoding="utf-8")
            # Code that talks to a server finds one, as a reader of the page has one.
            script = (
                f"curl http://127.0.0.1:{self.port}/health >/dev/null\n"
                if str(self.port) in text
                else ""
            )
            text = script + f"exec python {file.name}\n"
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.directory,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=(output := (self.directory / f"output_{block.line}").open("w+")),
            stderr=subprocess.STDOUT,
            preexec_fn=default_signals,
            start_new_session=True,
        )
        self._groups.append(process.pid)
        with output:
            try:
                code = process.wait(BLOCK_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return f"{block}: not done after {BLOCK_SECONDS} s"
            output.seek(0)
            return f"{block}: exit code {code}\n{text}\n{output.read()[-4000:]}" if code else None


Session = tuple[Page, "Future[None]"]


@pytest.fixture(scope="module")
def shims(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that comes first on the PATH."""
    directory = tmp_path_factory.mktemp("shims")
    for name in docs_commands.NAMES:
        script = f'#!/bin/sh\nexec "{sys.executable}" "{docs_commands.__file__}" {name} "$@"\n'
        (directory / name).write_text(script)
        (directory / name).chmod(0o755)
    return directory


@pytest.fixture(scope="module")
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, shims: Path
) -> Iterator[dict[Place, Session]]:
    """All sessions with a block that was selected, two at a time, the longest
    first."""
    chosen = [
        item
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_block_runs"
    ]
    last: Counter[Place] = Counter()
    for block in (
        item.callspec.params["block"] for item in chosen if isinstance(item, pytest.Function)
    ):
        last[place_of(block)] = max(last[place_of(block)], block.line)
    pages_ = {place: Page(of(place), tmp_path_factory.mktemp(place[1]), shims) for place in last}
    sessions: dict[Place, Session] = {}
    with ThreadPoolExecutor(PAGES_AT_ONCE) as pool:
        for place in sorted(last, key=lambda place: -sum(block.is_run for block in of(place))):
            sessions[place] = pages_[place], pool.submit(pages_[place].run, last[place])
        yield sessions


def place_of(block: Block) -> Place:
    return block.page, block.session


def of(place: Place) -> list[Block]:
    return [block for block in ALL if place_of(block) == place]


def _runnable(block: Block) -> Any:
    return pytest.param(block, marks=pytest.mark.long) if block.session in LONG_SESSIONS else block


@pytest.mark.parametrize("block", ALL, ids=str)
def test_block_is_well_formed(block: Block) -> None:
    assert not list(problems(block))


@pytest.mark.parametrize("block", [block for block in ALL if block.language == "toml"], ids=str)
def test_toml_is_a_configuration(block: Block, tmp_path: Path, shims: Path) -> None:
    Page(of(place_of(block)), tmp_path, shims).parse_toml_to(block)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", [_runnable(block) for block in ALL if block.is_run], ids=str)
def test_block_runs(block: Block, running: dict[Place, Session]) -> None:
    page, session = running[place_of(block)]
    wait([page.results[block.line], session], return_when=FIRST_COMPLETED)
    if not page.results[block.line].done():
        session.result()  # raises what ended the session before this block
    fault = page.results[block.line].result()
    assert fault is None, fault


CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
KEY = re.compile(r"(?:server|model|rl_training|logging)(?:\.[a-z_]+)+")


def _inline(page: Path) -> list[str]:
    text = re.sub(
        r"^( *)(`{3,}).*?^\1\2`*$",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.MULTILINE | re.DOTALL,
    )
    return CODE.findall(text)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_names_in_the_text_exist(page: Path) -> None:
    """Commands with flags, and configuration keys, that a sentence names in `code`."""
    wrong = []
    for code in _inline(page):
        words = code.replace("\\|", "|").replace("…", "").split()
        if command := re.match(r"mlx_parallm (\w[\w-]*)|(mlx_parallm_\w+)(?: |$)", code):
            name = command[1] or SCRIPTS.get(command[2], command[2])
            known = flags_of(name) if name in COMMANDS else set()
            flags = {flag for word in words[1:] for flag in re.findall(r"^\[?(--[a-z-]+)", word)}
            wrong += [code] if flags - known or name not in COMMANDS else []
        elif KEY.fullmatch(code.partition("=")[0].strip()) and not code.endswith(
            (".py", ".safetensors")
        ):
            wrong += [] if _is_key(code.partition("=")[0].strip()) else [code]
    assert not wrong


def _is_key(dotted: str) -> bool:
    section: object = Config
    for part in dotted.split("."):
        fields = getattr(section, "model_fields", {})
        if part not in fields:
            return False
        section = fields[part].annotation
    return True


BROKEN = {
    "an unclosed quote": "```bash\necho 'a\n```",
    "a flag that is not there": "```bash\nmlx_parallm_serve --model-path M --no-such-flag\n```",
    "a target that is not there": "```sh\nmake no-such-target\n```",
    "an extra that is not there": '```bash\npip install "mlx-parallm[no-such-extra]"\n```',
    "no Python": "```python\nreturn = 1\n```",
    "no language": "```\nls\n```",
    "an unknown language": "```cobol\n```",
    "a unit with a wrong flag": "```ini\n[Service]\nExecStart=/x/mlx_parallm_train"
    " --confg a.toml\n```",
    "a unit that starts nothing of ours": "```ini\n[Service]\nExecStart=/bin/true\n```",
    "a job without a label": "```xml\n<plist><dict><key>a</key><string>b</string></dict></plist>\n```",
    "a service with a wrong command": "```yaml\nservices: {a: {image: x, command:"
    " mlx_parallm_serve --nope}}\n```",
    "no JSON": "```json\n{a: 1}\n```",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_block_is_found(text: str) -> None:
    [block] = blocks(ROOT / "docs" / "broken.md", text)
    assert list(problems(block))


def test_a_right_command_is_not_called_wrong() -> None:
    assert not list(flag_problems("serve", ["--model-path", "M", "--lora-path", "a=x", "b=y"]))
    assert list(flag_problems("serves", []))


def test_blocks_are_found_and_named() -> None:
    text = "* item\n\n  ```python\n  # score.py\n  def f():\n      pass\n  ```\n\n"
    text += "````text\n```bash\n````\n<!-- session: y -->\n```jsonl a.jsonl\n{}\n```\n"
    first, second, third = blocks(ROOT / "docs" / "x.md", text)
    assert (first.line, first.saved_as, first.text) == (
        3,
        "score.py",
        "# score.py\ndef f():\n    pass\n",
    )
    assert (second.text, second.is_run) == ("```bash\n", False)
    assert third.saved_as == "a.jsonl"
    assert (second.session, third.session) == ("x", "y")


@pytest.mark.parametrize("text", ["false | true", "exit 3"])
def test_a_failing_block_fails(text: str, tmp_path: Path, shims: Path) -> None:
    page = Page([Block(ROOT / "docs" / "failing.md", 1, ("bash",), text + "\n")], tmp_path, shims)
    page.run(1)
    assert "exit code" in str(page.results[1].result())


def test_a_configuration_with_a_missing_hook_fails(tmp_path: Path, shims: Path) -> None:
    block = Block(
        ROOT / "docs" / "hook.md",
        1,
        ("toml",),
        '[rl_training]\nadvantage = "python:nowhere.py:f"\n',
    )
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        Page([block], tmp_path, shims).parse_toml_to(block)
