import pytest
from structlog.testing import capture_logs

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.system.log import configure_logging
from tests.environments.managing import Inbox


@pytest.fixture(scope="session")
def tokenizer(tiny_tokenizer):
    return tiny_tokenizer


@pytest.fixture
def warned():
    """The warnings of the test."""
    configure_logging(level="warning")
    with capture_logs() as logs:
        yield logs


@pytest.fixture
def managed(tokenizer):
    """Makes managers with a sink that are stopped at the end of the test."""
    managers = []

    def make(
        client,
        *,
        inbox=None,
        sources=None,
        start=True,
        seed=0,
        num_parallel=64,
        longest=256,
        **options,
    ):
        inbox = inbox or Inbox()
        entries = [EnvironmentConfig(kind="tasks", name="sum", group_size=4)]
        manager = RolloutManager(
            sources or build_sources(entries, seed=0),
            RolloutConfig(seed=seed, num_parallel=num_parallel, max_token_length=longest),
            client=client,
            tokenizer=tokenizer,
            on_failure=inbox.failed,
            **{"sink": inbox.sink, **options},
        )
        managers.append(manager)
        if start:
            manager.start()
        return manager, inbox

    yield make
    for manager in managers:
        manager.stop()
