"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest

from tests.engine.helpers import short_segments


@pytest.fixture
def small() -> Iterator[None]:
    with short_segments():
        yield
