"""No test sees which ran before it."""

import logging
import os
import sys
from pathlib import Path

import pytest
import structlog

from mlx_parallm.system.log import configure_logging
from tests.altered import unaltered_process


def state() -> tuple[object, ...]:
    root = logging.getLogger()
    logs = structlog.get_config()["processors"], root.handlers, root.level
    return dict(os.environ), list(sys.path), Path.cwd(), logs


def test_what_a_test_sets_for_the_process_is_gone_after_it(tmp_path: Path) -> None:
    before = state()
    with unaltered_process():
        os.environ["OF_A_TEST"] = "1"
        os.environ["PATH"] += ":/elsewhere"
        del os.environ["XDG_CACHE_HOME"]
        sys.path.insert(0, str(tmp_path))
        os.chdir(tmp_path)
        configure_logging(level="debug", json=True)
        assert all(old != new for old, new in zip(before, state(), strict=True))
    assert state() == before


def test_every_test_has_it(request: pytest.FixtureRequest) -> None:
    assert "own_process" in request.fixturenames
