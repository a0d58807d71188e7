"""A clock that a test moves.

It stands in for the module `time` as one module of the package knows it
(`monkeypatch.setattr(heartbeat, "time", clock)`). The process's own clock stays: the loops of all
servers wait by it, and one that once saw a later time waits until then.
"""


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    monotonic = time = __call__
