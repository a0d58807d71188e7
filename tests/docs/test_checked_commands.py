"""The shell blocks that a page's own test only looks at (`check`), run all the same.

    scripts/test -m long tests/docs/test_checked_commands.py

Sessions as in `test_docs_code.py`, in a clone's place: an empty directory with links to
what a clone has, and with what the pages take for granted, a run that has ended and configurations
of their names. What needs a download, another program or hours is named in NOT_HERE, with the
reason; of the programs under scripts/bench only the flags are looked at, in every run of the tests.
"""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.docs import docs_commands
from tests.docs.docs_blocks import ROOT, SHELLS, Block
from tests.docs.test_docs_code import ALL, Page, Place, of, place_of, shims  # noqa: F401  a fixture
from tests.integration.processes import BIN

CHECKED = [block for block in ALL if block.language in SHELLS and not block.is_run]
NOT_HERE = {
    "atropos": "installs another program",
    "clients": "asks for Claude Code",
    "first_model": "a download",
    "hybrid": "minutes; tests/orchestrator has shorter ones",
    "pipeline": "needs traces of an agent; tests/pipeline makes them",
    "prompt_policy": "two servers",
    "real_model": "a download; `make real-model`",
    "rewards_by_id": "an id that the reader has",
    "tiny_model": "half an hour",
    "tiny_vision_model": "half an hour",
    "tools": "installs another program",
    "traces": "logs of the reader's own, and a server that nothing ends",
    "typescript": "npm; scripts/test_typescript",
    "verifiers": "installs another program",
}
# lines of other blocks that need an address, another program or a file that the reader has
NOT_THESE = re.compile(
    r"ollama:|192\.168|llama-server|mlx\.launch|--url |results/gguf|wandb|SmolLM2|smollm2|mistralai"
    r"|/rollback|lora_adapter|--restarts|chatcmpl-|--show |^jq "
)
CONFIGURATIONS = ("my.toml", "train.toml", "test.toml")
RUNS = ("my-run", "first", "second", "third", "three")
COMMAND = re.compile(r"scripts[./]bench|mlx_parallm |scripts/clients|make \w")
BENCH = re.compile(r"-m scripts\.bench\.([\w.]+)|scripts/bench/(\w+)\.py")


def here(block: Block) -> Block:
    """The block without the lines that cannot be run on this machine, to be run."""
    joined = block.text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if not NOT_THESE.search(line)]
    text = "\n".join(lines).replace("step_000100", "step_000001") + "\n"
    text = text.replace("--first-hour", "--first-hour --minutes 0.1")
    return replace(block, text=text, info=tuple(word for word in block.info if word != "check"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in a clone's place."""
    place = tmp_path_factory.mktemp("clone")
    settings = {
        **docs_commands.SMALL,
        "evaluation.problems": 8,
        "server.port": 0,
        "rl_training.total_steps": 2,
        "rl_training.checkpoint_interval": 1,
        "rl_training.run_name": RUNS[0],
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [BIN / "mlx_parallm", "train", "--config", "quickstart", *words]
    subprocess.run(command, cwd=place, check=True, capture_output=True)
    (place / "checkpoints" / RUNS[0] / "best").symlink_to("step_000002")  # two steps have none
    for name in RUNS[1:]:
        shutil.copytree(
            place / "checkpoints" / RUNS[0], place / "checkpoints" / name, symlinks=True
        )
    for name in CONFIGURATIONS:
        shutil.copy(ROOT / "train_configs" / "quickstart.toml", place / name)
    return place


SESSIONS = sorted(
    {
        place_of(block)
        for block in CHECKED
        if block.session not in NOT_HERE and "bench" not in str(block)
    }
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("session", SESSIONS, ids=lambda place: place[1])
def test_checked_blocks_run(session: Place, clone: Path, tmp_path: Path, shims: Path) -> None:  # noqa: F811
    place = tmp_path / "clone"
    shutil.copytree(clone, place, symlinks=True)
    if session[1] == "operations":  # which starts this run itself
        shutil.rmtree(place / "checkpoints" / RUNS[0])
    for name in ("scripts", "train_configs"):
        (place / name).symlink_to(ROOT / name)
    blocks = [here(block) if block in CHECKED else block for block in of(session)]
    page = Page(blocks, place, shims)
    page.run(blocks[-1].line)
    faults = [page.results[block.line].result() for block in blocks if block.is_run]
    assert not [fault for fault in faults if fault]


def _program(module: str) -> Path:
    place = ROOT / "scripts" / "bench" / module.rstrip(".").replace(".", "/")
    return place / "__main__.py" if place.is_dir() else place.with_suffix(".py")


def test_flags_of_the_benchmarks_exist() -> None:
    """They run for minutes to hours: their flags are looked for in their text."""
    wrong = []
    for block in CHECKED:
        for line in block.text.replace("\\\n", " ").splitlines():
            if (found := BENCH.search(line)) is None:
                continue
            text = _program(found[1] or found[2]).read_text(encoding="utf-8")
            flags = re.findall(r"(?<=\s)--[a-z-]+", line[found.end() :])
            wrong += [f"{block}: {flag}" for flag in flags if f'"{flag}"' not in text]
    assert not wrong


def test_every_subject_of_the_benchmarks_names_its_command() -> None:
    """A program that is gone is named with the commit that has it."""
    wrong = []
    for page in sorted((ROOT / "docs" / "benchmarks").glob("*.md")):
        for subject in re.split(r"^(?=## )", page.read_text(encoding="utf-8"), flags=re.M)[1:]:
            heading = f"{page.name}: {subject.partition(chr(10))[0]}"
            lines = [line for line in subject.splitlines() if re.search(COMMAND, line)]
            generated = "written by" in page.read_text(encoding="utf-8").lower()
            wrong += [] if lines or generated else [f"{heading}: no command"]
            wrong += [
                f"{heading}: {line}"
                for line in lines
                if "commit" not in line and "git checkout" not in line
                for module in BENCH.findall(line)
                if not _program("".join(module)).exists()
            ]
    assert not wrong


def test_what_is_not_run_is_there() -> None:
    assert set(NOT_HERE) <= {block.session for block in CHECKED}
