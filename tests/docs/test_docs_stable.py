"""docs/stability.md promises routes and metrics that are there. (Its signatures are a block that
runs, its table of commands is in tests/test_documented.py.)"""

import re

import mlx_parallm
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.run_files.metrics import KEYS
from mlx_parallm.server.app import create_app
from mlx_parallm.server.context import ServerDeps, ServerState
from tests.docs.docs_blocks import ROOT, blocks

PAGE = ROOT / "docs" / "stability.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_version_is_this_one() -> None:
    assert f"The version is {mlx_parallm.__version__} " in TEXT


def test_promised_routes_are_there() -> None:
    """The Atropos routes: tests/atropos/test_routes.py."""
    app = create_app(ServerDeps(ServerState(), ServerConfig()))
    routes = {
        (method.upper(), path)
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    promised = {
        entry
        for entry in re.findall(r"`(GET|POST) (/[\w/-]+)`", TEXT)
        if "/atropos/" not in entry[1]
    }
    assert len(promised) >= 10
    assert promised <= routes


def test_promised_metrics_are_there() -> None:
    [block] = [block for block in blocks(PAGE) if block.language == "text"]
    assert set(block.text.split()) <= set(KEYS)
