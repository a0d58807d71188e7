"""One of the in-process environments sleeps for ever: the run goes on without it, and says so."""

from pathlib import Path

import pytest

from tests.integration.processes import metrics, train, write_config

pytestmark = pytest.mark.slow
SLEEPING = Path(__file__).parents[2] / "scripts" / "bench" / "sleeping_environment.py"


@pytest.mark.long
def test_a_run_goes_on_without_an_environment_that_sleeps(tmp_path: Path) -> None:
    config = write_config(tmp_path, steps=3)
    entry = f'[[environments]]\nkind = "python:{SLEEPING}:Sleeping"\nname = "awaits"\ngroup_size = 8\n'
    config.write_text(config.read_text() + entry)
    with train(config) as daemon:
        assert daemon.wait() == 0, daemon.output
    lines = metrics(tmp_path / "checkpoints" / "run")
    assert [line["sequences"] >= 32 for line in lines] == [True] * 3
    assert {name for line in lines for name in line["environments"]} == {"reverse", "sort"}
    assert "environment awaits delivers nothing: awaits-5-" in daemon.output
