"""log.py: what is written, where, and with which fields."""

import json
import logging
import sys

import pytest
import structlog

from mlx_parallm.system.log import configure_logging, get_logger


def test_json_lines_carry_the_bound_fields(capsys):
    configure_logging(json=True, level="debug")
    with structlog.contextvars.bound_contextvars(request_id="r1"):
        get_logger("server").debug("request", status=200)
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["level"], line["part"]) == ("request", "debug", "server")
    assert (line["request_id"], line["status"]) == ("r1", 200)


def test_events_below_the_level_are_dropped_and_stdout_stays_clean(capsys):
    configure_logging(level="warning")
    get_logger("x").info("quiet")
    get_logger("x").warning("loud")
    captured = capsys.readouterr()
    assert "quiet" not in captured.err and "loud" in captured.err and captured.out == ""


def test_libraries_speak_from_warning_on_in_the_same_form(capsys):
    configure_logging(json=True, level="info")
    logging.getLogger("some.library").info("started")
    logging.getLogger("some.library").warning("odd %s", "thing")
    # Only ours: libraries of earlier tests may have something to say when they are collected.
    events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert "odd thing" in events
    assert "started" not in events


def test_a_traceback_shows_no_local_variables(capsys):
    configure_logging(level="info")
    secret = "s3cret"
    try:
        raise ValueError(len(secret))
    except ValueError:
        get_logger("x").exception("failed")
    written = capsys.readouterr().err
    assert (
        "ValueError: 6" in written
        and "Traceback" in written
        and "s3cret" not in written.replace('"s3cret"', "")
    )


@pytest.mark.parametrize("on_a_terminal", [False, True])
def test_no_value_hands_a_control_character_to_the_terminal(capsys, monkeypatch, on_a_terminal):
    """A group's id without white space was printed as it came."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: on_a_terminal)
    configure_logging(level="info")
    hostile = "\x1b]0;pwned\x07\x9b2J"
    get_logger("x").info(
        f"got {hostile}\nforged line", group=hostile, several=[hostile], spaced=f"a {hostile}"
    )
    logging.getLogger("some.library").warning("odd %s", hostile)
    try:
        raise ValueError(hostile)
    except ValueError:
        get_logger("x").exception("failed")
    written = capsys.readouterr().err
    assert written.count(r"\x1b]0;pwned\x07\x9b2J") == 6
    assert "\x1b]" not in written and "\x07" not in written and "\x9b" not in written
    assert "\nforged" not in written
    assert ("\x1b[" in written) is on_a_terminal, "its own colours"
