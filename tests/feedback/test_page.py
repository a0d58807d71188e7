"""The review on the dashboard, in a real browser over a real server."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.rl_training.sources import SourceContext
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.runs.dashboard.routes import added_router
from mlx_parallm.runs.dashboard.run_view import RunView
from mlx_parallm.runs.run import Run
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.systems.feedback.source import feedback_source
from tests.conftest import TinyEngine
from tests.dashboard.conftest import chromium, faults_of_access, open_page, opened
from tests.dashboard.making import make_run
from tests.feedback.test_source import Chat, configuration, user
from tests.rollout_store.groups import VOCAB_SIZE
from tests.server.serving import running_server

__all__ = ["chromium", "open_page", "opened"]
pytestmark = pytest.mark.slow


def test_a_person_approves_and_rejects(
    tmp_path: Path,
    store: RolloutStore,
    tiny_engine: TinyEngine,
    tiny_tokenizer: Any,
    open_page: Callable[..., Any],
) -> None:
    run = make_run(tmp_path, name="my-run")
    config = configuration(tmp_path, **{"feedback.review": True})
    source = feedback_source(
        SourceContext(config, run, store, VOCAB_SIZE, [], lambda: 0, lambda: 0)
    )
    assert source is not None
    commands = RunCommands(run, threading.Event(), load_config(run / "config.toml"), step=lambda: 3)
    page_router = added_router([RunView(Run(run), Redactor())], live=True, commands=commands)
    with running_server(
        tiny_engine.client, tiny_tokenizer, routers=[source.router, page_router]
    ) as server:
        chat = Chat(server, source, store)
        for digit in (1, 2):
            chat.give(chat.ask([user(f"Sum: 2+{digit}")]), rating="down", comment="<b>not so</b>")
        chat.turn()
        page = open_page(f"{server.url}/dashboard")
        page.get_by_role("link", name="Feedback").click()
        first = page.locator(".answer").first
        first.get_by_text("Sum: 2+1").wait_for()
        assert "<b>not so</b>" in first.inner_text()
        assert faults_of_access(page) == []
        first.get_by_role("button", name="Learn it").click()
        page.get_by_text("1 wait for you").wait_for()
        page.locator(".answer").first.get_by_role("button", name="Reject").click()
        page.get_by_text("0 wait for you").wait_for()
        chat.turn()
        page.get_by_role("row", name=re.compile("^released")).first.wait_for()
    source.stop()
    [group] = store.waiting()
    assert group.environment == "feedback"
