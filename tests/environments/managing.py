"""What tests of the RolloutManager share."""

import threading
from functools import partial

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.registry import build_sources
from tests import waiting

WAIT_S = 60.0


class Inbox:
    """The sink of a test: keeps groups and failures, and lets the test wait for a number of
    them."""

    def __init__(self):
        self.groups, self.failures = [], []
        self.changed = threading.Condition()

    def sink(self, group):
        with self.changed:
            self.groups.append(group)
            self.changed.notify_all()

    def failed(self, group, reason):
        with self.changed:
            self.failures.append((group.group_id, reason))
            self.changed.notify_all()

    def wait(self, groups=0, failures=0):
        with self.changed:
            enough = lambda: len(self.groups) >= groups and len(self.failures) >= failures  # noqa: E731
            assert self.changed.wait_for(enough, WAIT_S), (len(self.groups), self.failures)
        return self.groups

    @property
    def ids(self):
        return [group.group_id for group in self.groups]


def two_tasks(**weights):
    entries = [
        EnvironmentConfig(kind="tasks", name=name, weight=weight, group_size=2)
        for name, weight in weights.items()
    ]
    return build_sources(entries, seed=0)


until = partial(waiting.until, seconds=WAIT_S)
