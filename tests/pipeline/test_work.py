"""The work directory: unchanged stages are skipped, others are not, and a kill leaves nothing
running."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from mlx_parallm.errors import CheckpointError
from mlx_parallm.systems.pipeline.work import (
    Json,
    PipelineStage,
    StageFailedError,
    WorkDirectory,
    digest_of,
)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[WorkDirectory]:
    with closing(WorkDirectory(tmp_path / "work")) as directory:
        yield directory


def stage(
    source: Path, calls: list[str], *, resumes: bool = False, fails: bool = False
) -> PipelineStage:
    def run(directory: Path) -> Json:
        calls.append("again" if (directory / "half").exists() else "anew")
        (directory / "half").write_text("x")
        if fails:
            raise StageFailedError("copy: no")
        (directory / "copy").write_bytes(source.read_bytes())
        return {"bytes": source.stat().st_size}

    return PipelineStage("copy", "copy a file", lambda: ["option", source], run, ("copy",), resumes)


def test_an_unchanged_stage_is_skipped_also_by_the_next_process(tmp_path: Path) -> None:
    source, calls = tmp_path / "source", list[str]()
    source.write_text("one")
    for _ in range(2):
        with closing(WorkDirectory(tmp_path / "work")) as work:
            outcome = work.carry_out(stage(source, calls))
    assert calls == ["anew"] and outcome.skipped and outcome.result == {"bytes": 3}
    with closing(WorkDirectory(tmp_path / "work")) as work:
        source.write_text("two")  # of the same length: the content counts
        assert not work.carry_out(stage(source, calls)).skipped
        work.directory("copy").joinpath("copy").write_text("edited")
        assert not work.carry_out(stage(source, calls)).skipped
    assert (tmp_path / "work" / "copy" / "copy").read_text() == "two"


def test_a_file_that_cannot_be_read_or_written_is_an_error_of_its_stage(
    work: WorkDirectory,
) -> None:
    def full(directory: Path) -> Json:
        raise OSError(28, "No space left on device")

    with pytest.raises(StageFailedError, match=r"copy: .*No space left"):
        work.carry_out(PipelineStage("copy", "copy a file", lambda: None, full))


@pytest.mark.parametrize("resumes", [False, True])
def test_a_stage_that_failed_begins_anew_or_goes_on(
    tmp_path: Path, work: WorkDirectory, resumes: bool
) -> None:
    source, calls = tmp_path / "source", list[str]()
    source.write_text("one")
    with pytest.raises(StageFailedError):
        work.carry_out(stage(source, calls, resumes=resumes, fails=True))
    work.carry_out(stage(source, calls, resumes=resumes))
    assert calls == ["anew", "again" if resumes else "anew"]
    source.write_text("two")  # other inputs: what it has begun is worth nothing
    work.carry_out(stage(source, calls, resumes=resumes))
    assert calls[-1] == "anew"


def test_a_command_that_fails_is_one_line(work: WorkDirectory) -> None:
    work.directory("x").mkdir()
    work.command("x", ["--version"])
    with pytest.raises(StageFailedError, match=r"'nothing'.*log\.txt"):
        work.command("x", ["nothing"])
    assert "mlx_parallm" in (work.directory("x") / "log.txt").read_text()


def test_two_pipelines_do_not_share_a_directory(work: WorkDirectory) -> None:
    with pytest.raises(CheckpointError, match="in use"):
        WorkDirectory(work.path)


PROGRAM = """
import sys
from pathlib import Path
from mlx_parallm.systems.pipeline.work import WorkDirectory
work = WorkDirectory(Path(sys.argv[1]))
work.directory("x").mkdir()
work.command("x", ["serve", "--model-path", "builtin:tiny", "--port", "0"], lambda: print("watch", flush=True))
"""


@pytest.mark.slow
def test_what_a_killed_pipeline_left_running_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "work")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "watch\n"
        [child] = psutil.Process(process.pid).children()
        os.kill(process.pid, signal.SIGKILL)
    assert child.is_running()
    WorkDirectory(tmp_path / "work").close()
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_directorys_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    first = digest_of(tmp_path)
    (tmp_path / "a").rename(tmp_path / "b")
    assert digest_of(tmp_path) != first
    (tmp_path / "b").rename(tmp_path / "a")
    assert digest_of(tmp_path) == first
    assert digest_of(tmp_path / "nothing") == "missing"


def test_a_directory_with_files_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="holds other files"):
        WorkDirectory(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"train"} and (
        tmp_path / "train" / "mine.txt"
    ).exists()
    for _ in range(2):  # an empty one, and its own before any stage
        WorkDirectory(tmp_path / "new").close()
