"""kill -9 under a steady flow of groups: none lost, none trained twice. Long form:
tests/soak/kill_rollouts.py."""

from pathlib import Path

import pytest

from tests.soak.kill_rollouts import run_kills


@pytest.mark.slow
def test_every_received_group_is_trained_once_or_accounted_for(tmp_path: Path) -> None:
    kills, sent, audit = run_kills(tmp_path, 1, seed=3)
    assert len(kills) == 1 and any(kill.received for kill in kills)
    assert audit.faults == []
    assert len(sent.received) == sum(audit.states.values()) >= 8 and not sent.refused
    assert audit.states["taken"]
