import pytest
from managing import Inbox

from mlx_parallm.config import EnvironmentConfig
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.environments.rollouts import RolloutManager


@pytest.fixture(scope="session")
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


@pytest.fixture
def managed(tokenizer):
    """Makes managers that are stopped at the end of the test."""
    managers = []

    def make(client, *, inbox=None, sources=None, start=True, **options):
        inbox = inbox or Inbox()
        entries = [EnvironmentConfig(kind="tasks", name="sum", group_size=4)]
        options = {"seed": 0, "temperature": 1.0, "max_token_length": 256, "sink": inbox.sink, **options}
        manager = RolloutManager(
            client, sources or build_sources(entries, seed=0), tokenizer, on_failure=inbox.failed, **options
        )
        managers.append(manager)
        if start:
            manager.start()
        return manager, inbox

    yield make
    for manager in managers:
        manager.stop()
