"""The Atropos APIs that tests of the poller talk to."""

from collections.abc import Iterator

import pytest

from scripts.server_process import free_port
from tests.atropos.fake_run_api import REAL, RealRunApi, RunApi, serving


@pytest.fixture
def api() -> RunApi:
    return RunApi()


@pytest.fixture
def url(api: RunApi) -> Iterator[str]:
    with serving(api.app(), free_port()) as url:
        api.url = url
        yield url


@pytest.fixture(scope="module")
def real_api() -> Iterator[RealRunApi]:
    api = RealRunApi(free_port())
    yield api
    api.kill()


REAL_ONE = pytest.param(
    "real",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(not REAL.exists(), reason="run scripts/setup_atropos first"),
    ],
)


@pytest.fixture(params=["stand-in", REAL_ONE])
def either(request: pytest.FixtureRequest) -> RunApi | RealRunApi:
    """The stand-in, and the real one, just started. Both are talked to by HTTP alone."""
    if request.param == "real":
        real: RealRunApi = request.getfixturevalue("real_api")
        real.restart()
        return real
    request.getfixturevalue("url")
    return request.getfixturevalue("api")
