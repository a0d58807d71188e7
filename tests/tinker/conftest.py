"""A server with Tinker's API for each file of tests, and the directory of its runs and
checkpoints."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import RunningServer
from tests.tinker.serving import tinker_server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    with tinker_server(root / "runs") as running:
        yield running
