import pytest

from tests.engine.cache.stored_prefixes import OPEN


@pytest.fixture(autouse=True)
def closed():
    yield
    while OPEN:
        OPEN.pop().close()
