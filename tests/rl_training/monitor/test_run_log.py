"""`run.log`: every line of the process, as JSON, bounded, without secrets."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.system.log import KEPT_FILES, RunLog, configure_logging, get_logger
from mlx_parallm.system.redaction import REDACTED, Redactor


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "run.log").read_text().splitlines()]


def test_holds_what_was_said_before_the_directory_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog() as run_log:
        configure_logging(level="info", run_log=run_log)
        get_logger("first").info("early", step=1)
        get_logger("first").debug("below the level")
        run_log.open(tmp_path)
        logging.getLogger("some.library").warning("odd %s", "thing")
    early, late = lines(tmp_path)
    assert (early["event"], early["part"], early["step"], early["level"]) == (
        "early",
        "first",
        1,
        "info",
    )
    assert early["timestamp"].endswith("Z")
    assert (late["event"], late["level"]) == ("odd thing", "warning")
    assert "early" in capsys.readouterr().err, "the terminal has it too"


def test_secrets_reach_neither_file_nor_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(Redactor(["s3cret-value"])) as run_log:
        run_log.open(tmp_path)
        configure_logging(level="info", redactor=run_log.redactor, run_log=run_log)
        log = get_logger("x")
        log.info("asking", url="http://env:KEY99@host", nested={"values": ["s3cret-value"]})
        try:
            raise ValueError("no answer from http://env:KEY99@host with s3cret-value")
        except ValueError:
            log.exception("failed")
    written = (tmp_path / "run.log").read_text() + capsys.readouterr().err
    assert "KEY99" not in written and "s3cret-value" not in written
    assert written.count(REDACTED) >= 6
    assert "Traceback" in lines(tmp_path)[1]["exception"]


def test_secrets_that_printing_escapes_or_that_their_names_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = 'it\'s \\ "quoted"'
    with RunLog(Redactor([secret])) as run_log:
        run_log.open(tmp_path)
        for as_json in (False, True):
            configure_logging(
                json=as_json, level="info", redactor=run_log.redactor, run_log=run_log
            )
            get_logger("x").info(
                "a", value=secret, error=ValueError(secret), keys={("a", 1): secret}
            )
            get_logger("x").info("b", judge_api_key="KEY1", nested={"password": "KEY2"})
    written = (tmp_path / "run.log").read_text() + capsys.readouterr().err
    assert "it's" not in written and "quoted" not in written and "KEY" not in written
    assert written.count(REDACTED) == 2 * 2 * 5


def test_says_what_ended_the_process(tmp_path: Path) -> None:
    run_log = RunLog()
    run_log.open(tmp_path)
    with pytest.raises(KeyError), run_log:
        raise KeyError("x")
    assert lines(tmp_path)[-1]["event"] == "ended by KeyError: 'x'"


def test_is_bounded_and_a_resume_goes_on_in_it(tmp_path: Path) -> None:
    for start in (0, 100):
        with RunLog(max_bytes=2000) as run_log:
            run_log.open(tmp_path)
            for number in range(start, start + 100):
                run_log.write("info", "line", number=number)
    files = sorted(tmp_path.iterdir())
    assert len(files) == KEPT_FILES + 1
    assert all(file.stat().st_size <= 2000 for file in files)
    assert lines(tmp_path)[-1]["number"] == 199
