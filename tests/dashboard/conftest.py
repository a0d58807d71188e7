"""One Chromium for the tests of a file. They are skipped, with the reason, where there is none."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
HOW = "scripts/setup_browser gets it"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser. While it is open an event loop counts as running in this thread: it must not
    outlive its file's tests, or `asyncio.run` fails in those of the next."""
    playwright = pytest.importorskip("playwright.sync_api", reason=f"no playwright: {HOW}")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no chromium: {HOW}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


def faults_of_access(page: Any, *rules: str) -> list[str]:
    """Serious faults that axe-core finds in the page as it is: who cannot see colours, or uses a
    screen reader.
    `rules`: only these."""
    axe = pytest.importorskip(
        "axe_playwright_python", reason="no axe-core: pip install axe-playwright-python"
    )
    if page.evaluate("!window.axe"):
        page.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text())
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    found = page.evaluate("(options) => axe.run(document, options)", options)["violations"]
    return [
        f"{page.url}: {fault['id']}: {fault['nodes'][0]['html'][:200]}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]


class Opened:
    """Pages of one test. `requests`: every address that was asked for; `problems`: errors of the
    console."""

    def __init__(self, browser: Any) -> None:
        self._browser, self._contexts = browser, list[Any]()
        self.requests: list[str] = []
        self.problems: list[str] = []

    def context(self, **options: Any) -> Any:
        self._contexts.append(self._browser.new_context(**options))
        self._contexts[-1].set_default_timeout(15_000)
        return self._contexts[-1]

    def page(
        self, url: str, context: Any = None, *, wait_until: str = "load", **options: Any
    ) -> Any:
        page = (context or self.context(**options)).new_page()
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: self.problems.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda message: message.type == "error" and self.problems.append(message.text),
        )
        page.goto(url, wait_until=wait_until)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Opened]:
    pages = Opened(chromium)
    yield pages
    pages.close()


@pytest.fixture
def open_page(opened: Opened) -> Iterator[Callable[..., Any]]:
    """Opens a page; at the end no error was on its console, and nothing but its own server was
    asked."""
    yield opened.page
    assert opened.problems == []
    assert len({url.partition("//")[2].partition("/")[0] for url in opened.requests}) <= 1
