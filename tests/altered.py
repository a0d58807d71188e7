"""What a test may alter: a module of the standard library as one module of the package knows it.

`monkeypatch.setattr(files, "os", Altered(os, fsync=fail))`: the process's own `os` stays, which
other threads go on using. What is the whole process's after all is put back: `unaltered_process`.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import structlog


class Altered(SimpleNamespace):
    def __init__(self, module: ModuleType, **contents: object) -> None:
        super().__init__(**contents)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@contextmanager
def unaltered_process() -> Iterator[None]:
    """The environment, sys.path, the working directory and the logs are afterwards what they
    were."""
    environment, path, directory = dict(os.environ), list(sys.path), Path.cwd()
    root, logs = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    for name in {*environment, *os.environ} - {"PYTEST_CURRENT_TEST"}:
        if name not in environment:
            del os.environ[name]
        elif os.environ.get(name) != environment[name]:
            os.environ[name] = environment[name]
    sys.path[:] = path
    os.chdir(directory)
    root.handlers = handlers
    root.setLevel(level)
    structlog.configure(**logs)
