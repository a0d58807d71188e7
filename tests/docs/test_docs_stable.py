"""docs/stability.md promises names that are there: flags, routes, metrics. (Its signatures are a block that runs.)"""

import re

import mlx_parallm
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.rl_training.metrics import KEYS
from mlx_parallm.server.app import create_app
from mlx_parallm.server.context import ServerDeps, ServerState
from tests.docs.docs_blocks import COMMANDS, ROOT, blocks, flags_of

PAGE = ROOT / "docs" / "stability.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_version_is_this_one() -> None:
    assert f"The version is {mlx_parallm.__version__} " in TEXT


def test_every_flag_of_every_command_is_promised() -> None:
    rows = re.findall(r"^\| `mlx_parallm (\w+)` \| (?:`(\w+)`)? ?\| (.*)\|$", TEXT, re.MULTILINE)
    assert {(name, script or None) for name, script, _ in rows} == {(c.name, c.script) for c in COMMANDS.values()}
    promised = {name: flags for name, _, flags in rows}
    short = {"merge": {"--output"}}  # of --output-path
    for command, flags in promised.items():
        said = set(re.findall(r"--[\w-]+", flags))
        assert said == flags_of(command) - {"--help", "--version"} - short.get(command, set()), command


def test_promised_routes_are_there() -> None:
    """The Atropos routes: tests/integrations/atropos/test_routes.py."""
    app = create_app(ServerDeps(ServerState(), ServerConfig()))
    routes = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    promised = {entry for entry in re.findall(r"`(GET|POST) (/[\w/-]+)`", TEXT) if "/atropos/" not in entry[1]}
    assert len(promised) >= 10
    assert promised <= routes


def test_promised_metrics_are_there() -> None:
    [block] = [block for block in blocks(PAGE) if block.language == "text"]
    assert set(block.text.split()) <= set(KEYS)
