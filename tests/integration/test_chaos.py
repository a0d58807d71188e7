"""Good requests among all that can go wrong; a whole server. The long form is
tests/soak/chaos.py."""

import pytest

from tests.soak.chaos import CONTEXT, HANGUPS, WRONG, run_chaos
from tests.soak.fuzz_openapi import tiny_server

pytestmark = pytest.mark.slow


def test_good_requests_are_answered_right_and_nothing_is_left() -> None:
    with tiny_server(f"server.max_model_len={CONTEXT}", "server.request_timeout_s=0") as serving:
        report = run_chaos(serving, 240)
        stats = serving.client.stats()
    assert report.faults == []
    assert report.requests["good"] == 60 and set(report.requests) <= {"good", *WRONG, *HANGUPS}
    assert stats.requests_aborted > 10 and stats.requests_failed == 0
