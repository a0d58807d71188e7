"""docs/environments.md: every line of its table is an entry, and every kind has one."""

import re

import tomli

from mlx_parallm.config.environment import EnvironmentConfig
from mlx_parallm.environments.registry import ENVIRONMENTS
from tests.source_trees import ROOT


def test_every_kind_has_a_line_that_is_an_entry():
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    lines = re.findall(r"\| `(kind = [^`]+)` \|$", page, re.MULTILINE)
    entries = [EnvironmentConfig(**tomli.loads(f"entry = {{ {line} }}")["entry"]) for line in lines]
    kinds = {entry.kind for entry in entries}  # rows of several forms are of one kind
    assert sorted(kinds) == sorted([*ENVIRONMENTS, "python:my.py:MyEnvironment"])
