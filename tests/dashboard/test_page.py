"""The page in a real browser over real servers: curves, groups, tokens, keys, hostile text, lost
servers, many tabs."""

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.config.load import load_config
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.runs.dashboard import run_view
from mlx_parallm.runs.dashboard.command import make_app
from mlx_parallm.runs.dashboard.routes import added_router, dashboard
from mlx_parallm.runs.dashboard.run_view import RunView
from mlx_parallm.runs.run import Run
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.system.redaction import Redactor
from tests.dashboard.conftest import Opened, faults_of_access
from tests.dashboard.making import make_clients_run, make_run, metrics_line, served
from tests.server.fake_engine import FakeEngine
from tests.server.serving import running_server

pytestmark = pytest.mark.slow
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> Iterator[str]:
    """The page of a live run (no model behind it: nothing here asks one) with a second one
    beside it: all ten views."""
    run, other = (
        make_run(tmp_path_factory.mktemp("runs"), name=name) for name in ("my-run", "other")
    )
    config = load_config(run / "config.toml")
    commands = RunCommands(run, threading.Event(), config, step=lambda: 3)
    commands.mark("note", "what changed")
    added = added_router(
        [RunView(Run(path), Redactor()) for path in (run, other)], live=True, commands=commands
    )
    with running_server(FakeEngine(), tiny_tokenizer, routers=[added]) as server:
        yield f"{server.url}/dashboard"


VIEWS = {
    "overview": "section[aria-label=marks]",
    "step/1": ".group",
    "group/sums-1": ".answer",
    "tokens/sums-1/1": ".token",
    "search": ".group",
    "heldout": ".answer",
    "timeline": ".lane",
    "compare": ".charts .chart",
    "chat": "textarea",
    "controls": ".order",
}
KEYS = {
    "6": "textarea",
    "4": ".cells",
    "5": ".lane",
    "7": ".order",
    "8": ".charts .chart",
    "3": ".search",
}
"""As the tabs stand, from left to right."""


def steps_of_reward(page: Any) -> list[int]:
    """The steps in the table behind the first chart, oldest first."""
    first = page.locator(".chart").first
    if first.locator("table").count() == 0:
        first.locator("button").first.click()
    first.locator("tbody td").first.wait_for()
    return [
        int(cell)
        for cell in page.locator(".chart").first.locator("tbody td:first-child").all_inner_texts()
    ][::-1]


def test_curves_follow_the_run_and_a_lost_server_is_said(tmp_path: Path, opened: Opened) -> None:
    run = make_run(tmp_path)
    listener = bind_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = ServerThread(make_app([run]), listener, 256)
    server.start()
    page = opened.page(f"http://127.0.0.1:{port}/dashboard")
    page.wait_for_selector(".chart canvas")
    page.wait_for_selector("h1:text-is('my-run')")
    page.wait_for_selector(".badge:text-is('stopped')")
    assert steps_of_reward(page) == [1, 2, 3]
    seconds = []
    for step in range(4, 9):
        written = time.monotonic()
        MetricsFile(run / METRICS_FILE).append(metrics_line(step))
        page.wait_for_selector(f".count:text-matches('^{step} ')")
        seconds.append(time.monotonic() - written)
    assert statistics.median(seconds) < 2.0, "one may come while other processes have the machine"
    page.locator(".chart .plot").first.focus()
    for key in ("Home", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.wait_for_selector("[data-group='sums-2']")
    page.go_back()
    page.locator(".chart .u-over").first.click(position={"x": 2, "y": 40})
    page.wait_for_selector("[data-group='sums-1']")
    groups = [entry.get_attribute("data-group") for entry in page.locator(".group").all()]
    assert sorted(groups) == ["sums-1", "words-1"]
    page.go_back()
    assert opened.problems == []
    server.stop(0.1)
    page.wait_for_selector(".lost")
    assert "Not reachable since" in page.locator(".lost").inner_text()
    MetricsFile(run / METRICS_FILE).append(metrics_line(9, rolled_back_to="version 2"))
    server = ServerThread(make_app([run]), bind_socket("127.0.0.1", port), 256)
    server.start()
    try:
        page.wait_for_selector(".lost", state="detached")
        page.wait_for_selector(".count:text-matches('^9 ')")
        assert steps_of_reward(page) == [1, 2, 3, 4, 5, 6, 7, 8, 9], "each step once"
    finally:
        server.stop(0.1)


def test_what_waits_is_shown_below_the_newest_step_alone(url: str, opened: Opened) -> None:
    """Not below a step before it, and not before its groups: what one is about to click does not
    move."""
    context, held, answered = opened.context(), list[Any](), list[str]()
    context.on("response", lambda response: answered.append(response.url))

    def hold(route: Any) -> None:
        held.append(route)

    def until_in(addresses: list[str], text: str) -> None:
        while not [address for address in addresses if text in address]:
            page.wait_for_timeout(20)

    context.route("**/metrics?**", hold)
    page = opened.page(f"{url}#/step/1", context)
    page.wait_for_selector("[data-group='sums-1']")
    until_in(opened.requests, "/metrics?")
    held.pop().continue_()
    page.wait_for_selector(".steps:has-text('of 3')")
    assert not [address for address in opened.requests if "state=waiting" in address]
    context.unroute("**/metrics?**")
    context.route("**/groups?**first_step=3**", hold)
    page = opened.page(f"{url}#/step/3", context)
    until_in(opened.requests, "first_step=3")
    until_in(answered, "state=waiting")
    assert page.locator(".group").count() == 0
    for route in held:
        route.continue_()
    page.wait_for_selector("section[aria-label=waiting] [data-group='tools-9']")
    assert page.locator(".group").first.get_attribute("data-group") != "tools-9"


def test_hostile_text_is_text(url: str, open_page: Open) -> None:
    page = open_page(f"{url}#/step/1?kind=mixed")
    page.click(".group")
    page.wait_for_selector(".answer")
    shown = page.locator(".answer").nth(1).inner_text()
    assert '<img src=x onerror="document.title=' in shown and "</script><script>" in shown
    assert "␇␀⟨U+202E⟩gnp.exe" in shown, "control characters and a change of direction are visible"
    assert page.locator("main img, main script").count() == 0 and "pwned" not in page.title()
    page.locator(".answer").nth(1).locator("summary", has_text="parsed, odd").click()
    assert page.locator(".answer details pre").last.inner_text() == "odd: [1]"
    page.goto(f"{url}#/search?text=%3Cimg")
    page.wait_for_selector("mark")
    assert page.locator("mark").first.inner_text() == "<img"
    assert "pwned" not in page.title()


READ_TOKENS = """async (places) => {
  const shown = [];
  for (const place of places) {
    document.querySelector(`.token[data-i="${place}"]`).dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    shown.push(document.querySelector("[data-value=logprobs]").innerText);
  }
  return shown;
}"""


def test_tokens_show_the_numbers_of_the_store(url: str, open_page: Open) -> None:
    page = open_page(f"{url}#/tokens/sums-2/1")
    page.wait_for_selector(".token")
    stored = page.evaluate(
        "fetch('/dashboard/api/tokens?id=sums-2&number=1').then((answer) => answer.json())"
    )
    sampled = [place for place, own in enumerate(stored["mask"]) if own]
    assert len(sampled) > 20 and page.locator(".token").count() == len(stored["ids"])
    assert page.locator(".token.masked").count() == len(stored["ids"]) - len(sampled)
    shown = page.evaluate(READ_TOKENS, [*sampled[:20], 0])
    assert shown.pop() == "–" and [float(value) for value in shown] == [
        -place / 8 for place in sampled[:20]
    ]
    page.locator(f".token[data-i='{sampled[0]}']").focus()
    page.keyboard.press("ArrowRight")
    assert float(page.locator("[data-value=logprobs]").inner_text()) == pytest.approx(
        -sampled[1] / 8
    )
    assert "s8" in (page.locator(".token").last.get_attribute("class") or ""), (
        "an unlikely token has the full colour"
    )


def test_every_view_by_keyboard(url: str, open_page: Open) -> None:
    page = open_page(url)
    page.wait_for_selector(".count:text-matches('^3 ')")
    page.keyboard.press("2")
    page.wait_for_selector("[data-group='sums-3']")
    page.keyboard.press("[")
    page.wait_for_selector("[data-group='sums-2']")
    page.keyboard.press("i")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.className") == "answer"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".token")
    page.keyboard.press("?")
    page.wait_for_selector(".help")
    page.keyboard.press("Escape")
    for key, wanted in KEYS.items():
        page.keyboard.press(key)
        page.wait_for_selector(wanted)
        assert page.evaluate("document.activeElement.tagName") != "TEXTAREA", (
            "the next key is not text"
        )
    page.keyboard.press("5")
    page.locator(".lanes").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".lanes p:has-text('step')")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-group='sums-1']")
    page.keyboard.press("/")
    page.wait_for_selector("#search-text:focus")
    page.keyboard.type("spell")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-group='sums-1']", state="detached")
    assert page.url.endswith("#/search?text=spell"), "a search can be sent to somebody"
    assert page.locator(".group").count() == 3


def test_every_view_fits_each_screen_and_is_accessible_in_light_and_dark(
    url: str, open_page: Open
) -> None:
    page = open_page(url, color_scheme="light")
    for place, wanted in VIEWS.items():
        page.goto(f"{url}#/{place}")
        for width, height in ((3840, 2160), (1280, 800), (390, 844)):
            page.set_viewport_size({"width": width, "height": height})
            page.wait_for_selector(wanted)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (place, width)
            assert page.evaluate(OVERLAPS) == [], (place, width)
        page.emulate_media(color_scheme="light")
        assert faults_of_access(page) == []
        page.emulate_media(color_scheme="dark")
        page.wait_for_selector("[data-theme=dark]")
        assert faults_of_access(page, "color-contrast") == [], "only the colours are others"
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_selector(f"[data-theme={theme}]")
        read = "(name) => getComputedStyle(document.documentElement).getPropertyValue(name)"
        dim, panel = (page.evaluate(read, name) for name in ("--dim", "--panel"))
        assert contrast(dim, panel) >= 4.5, "the text of the axes"


# Pairs of texts or controls that lie over each other by more than 3 pixels, each cut to what its
# scrolling boxes show.
OVERLAPS = """() => {
  const shown = (element, { left, top, right, bottom }) => {
    const part = { element, left, top, right, bottom };
    for (let box = element.parentElement; box; box = box.parentElement) {
      if (getComputedStyle(box).overflow === "visible") continue;
      const own = box.getBoundingClientRect();
      for (const side of ["left", "top"]) part[side] = Math.max(part[side], own[side]);
      for (const side of ["right", "bottom"]) part[side] = Math.min(part[side], own[side]);
    }
    return part;
  };
  const controls = "input, select, button, textarea, svg, .plot";
  const unseen = ".token, .detail, .u-wrap, option, datalist, details:not([open]) > :not(summary)";
  const words = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  const parts = [...document.querySelectorAll("header *, main *")]
    .filter((element) => !element.closest(unseen) && (element.matches(controls) || words(element)))
    .flatMap((element) => [...element.getClientRects()].map((rect) => shown(element, rect)))
    .filter(({ left, top, right, bottom }) => right - left > 3 && bottom - top > 3);
  const over = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 3
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3
    && !a.element.contains(b.element) && !b.element.contains(a.element);
  const text = ({ element }) => element.outerHTML.slice(0, 90);
  return parts.flatMap((a, place) => parts.slice(place + 1).filter((b) => over(a, b)).map((b) => [text(a), text(b)]));
}"""


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two #rrggbb, by WCAG 2's formula: black on white is 21."""

    def luminance(colour: str) -> float:
        parts = (int(colour.strip()[place : place + 2], 16) / 255 for place in (1, 3, 5))
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.long
def test_eight_tabs_that_are_seen_share_one_stream(tmp_path: Path, opened: Opened) -> None:
    """Eight pages with charts in one browser: each asks and is answered, all follow the run,
    hidden ones rest."""
    run, ask = (
        make_run(tmp_path),
        "async () => { const began = performance.now(); await fetch('/dashboard/api/runs');",
    )
    ask += " return performance.now() - began }"
    with served([run]) as address:
        context = opened.context()
        pages = [
            opened.page(f"{address}/dashboard", context, wait_until="commit") for _ in range(8)
        ]
        for page in pages:
            page.wait_for_selector(".chart canvas")
        assert max(page.evaluate(ask) for page in pages) < 1000
        # as over plain HTTP to another machine, where a browser has no locks
        plain = opened.context()
        plain.add_init_script("Object.defineProperty(navigator, 'locks', { value: undefined })")
        polling = opened.page(f"{address}/dashboard", plain)
        streams = [url for url in opened.requests if url.endswith("/events")]
        assert len(streams) == 1, "one tab listens for all"
        before = len(opened.requests)
        MetricsFile(run / METRICS_FILE).append(metrics_line(4))
        for page in [*pages, polling]:
            page.wait_for_selector(".count:text-matches('^4 ')")
        asked = [url for url in opened.requests[before:] if "/metrics?" in url]
        assert len(asked) < 1 + 8, (
            "one that polls, and of those that share a stream one for those that hear it in time"
        )
        # drawn later than the first
        pages[7].wait_for_selector(".chart >> nth=1 >> .plot[aria-label$='at step 4.']")
        pages[0].close()  # who held the stream: another one continues
        hide = "Object.defineProperty(document, 'hidden', { value: true }); "
        hide += "document.dispatchEvent(new Event('visibilitychange'))"
        for page in pages[1:7]:  # what a browser does with a tab in the background
            page.evaluate(hide)
        while len([url for url in opened.requests if url.endswith("/events")]) < 2:
            pages[7].wait_for_timeout(50)
        MetricsFile(run / METRICS_FILE).append(metrics_line(5))
        pages[7].wait_for_selector(".count:text-matches('^5 ')")
        assert [page.locator(".count").inner_text()[0] for page in pages[1:7]] == ["4"] * 6
    assert opened.problems == []


def test_runs_over_each_other_and_seeds_as_one(tmp_path: Path, open_page: Open) -> None:
    """a-1 and a-2 differ in their seed; b has half the learning rate."""
    runs = [
        make_run(tmp_path, name="a-1"),
        make_run(tmp_path, name="a-2"),
        make_run(tmp_path, steps=5, name="b", learning_rate=5e-4),
    ]
    with (runs[1] / "config.toml").open("a") as file:
        file.write("seed = 7\n")
    lines = [
        line | {"reward_mean": line["reward_mean"] + 0.5}
        for line in MetricsFile(runs[1] / METRICS_FILE).read()
    ]
    (runs[1] / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(runs) as address:
        page = open_page(f"{address}/dashboard")
        page.wait_for_selector("select[aria-label=run]")
        page.keyboard.press("6")  # the sixth tab: nothing is trained here
        page.wait_for_selector(".settings td:has-text('0.0005')")
        page.wait_for_selector(".chart:has-text('a (2 seeds)')")
        assert table_of(page, "Reward")[-1] == ["1", "0.260", "0.010"], (
            "the median of 0.01 and 0.51"
        )
        assert table_of(page, "Held-out problems") == [
            ["5", "–", "0.500"],
            ["3", "0.500", "–"],
            ["0", "0.500", "0.500"],
        ]
        page.click("button:text-is('each run')")
        page.wait_for_selector(".chart:has-text('a-1')")
        rows = table_of(page, "Reward")
        assert [row[0] for row in rows] == ["5", "4", "3", "2", "1"], "the steps of all"
        assert rows[0][1:3] == ["–", "–"] and rows[-1] == ["1", "0.010", "0.510", "0.010"]
        assert page.locator("nav a:text-is('Controls'), nav a:text-is('Chat')").count() == 0, (
            "nothing is trained here"
        )
        page.select_option("select[aria-label=run]", "2")
        page.wait_for_selector(".count:text-matches('^5 ')")


def test_runs_that_are_judged_by_different_numbers_have_axes_of_their_own(
    tmp_path: Path, open_page: Open
) -> None:
    runs = [
        make_run(tmp_path, name="rewarded"),
        make_run(tmp_path, name="lost", learning_rate=5e-4),
    ]
    lines = [{"step": step, "loss": 9.0 - step, "groups": 0, "sequences": 4} for step in (1, 2)]
    (runs[1] / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with served(runs) as address:
        page = open_page(f"{address}/")  # the page, also without its path
        page.wait_for_selector("select[aria-label=run]")
        page.keyboard.press("6")
        page.wait_for_selector(".chart:has-text('lost')")
        assert [len(row) for row in (table_of(page, "Reward")[-1], table_of(page, "Loss")[-1])] == [
            2,
            2,
        ]
        assert (
            table_of(page, "Reward")[-1] == ["1", "0.010"] and table_of(page, "Loss")[-1][0] == "1"
        )
        assert float(table_of(page, "Loss")[-1][1]) == 8


def test_no_card_is_stretched_by_the_one_beside_it(tmp_path: Path, open_page: Open) -> None:
    """The answers of this run are all cut off, which is a finding of several lines."""
    run = make_run(tmp_path, steps=0)
    for step in range(1, 13):
        cut = {"truncated_fraction": 1.0, "eos_fraction": 0.0, "completion_tokens_mean": 8.0}
        MetricsFile(run / METRICS_FILE).append(metrics_line(step, **cut))
    with served([run]) as address:
        page = open_page(f"{address}/dashboard", viewport={"width": 1300, "height": 900})
        page.wait_for_selector(".finding")
        heights = page.evaluate(
            "[...document.querySelectorAll('.health, .figures > div')].map((card) =>"
            " card.offsetHeight)"
        )
        assert max(heights[1:]) < heights[0], (
            "the figures keep their height beside a long health card"
        )


def test_a_search_goes_on_until_something_fits(
    tmp_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_view, "SEARCH_S", 0.0)  # one group an answer of the server
    run = make_run(tmp_path, steps=6)
    with served([run]) as address:
        page = open_page(f"{address}/dashboard#/search?text=Sum%3A%201%2B2")
        page.wait_for_selector("[role=status]:has-text('0 answers')")
        page.click("button:text-is('search further back')")
        page.wait_for_selector("[data-group='sums-1']")


def test_one_chooses_among_the_runs_of_a_servers_clients(
    tmp_path: Path, open_page: Open, tiny_tokenizer: Any
) -> None:
    runs = list[Path]()
    added = dashboard(lambda: list(runs), Redactor())
    with running_server(FakeEngine(), tiny_tokenizer, routers=[added]) as server:
        page = open_page(f"{server.url}/dashboard")
        page.wait_for_selector(".empty:has-text('as soon as a client creates one')")
        runs.append(make_clients_run(tmp_path, "a"))
        page.wait_for_selector("h1:text-is('a')")
        page.wait_for_selector(".chart:has(h3:text-is('Loss'))")
        page.wait_for_selector(".chart:has(h3:text-is('Tokens of a step'))")
        runs.insert(0, make_clients_run(tmp_path, "b"))
        page.wait_for_selector("select[aria-label=run]")
        assert page.locator("select[aria-label=run] option:checked").inner_text() == "a", (
            "it stays where one looks"
        )
        page.select_option("select[aria-label=run]", label="b")
        page.wait_for_selector("option:checked:text-is('b')", state="attached")
        page.wait_for_selector(".count:text-matches('^1')")
        assert page.locator("nav a:text-is('Chat')").count() == 0
        page.close()  # its stream would hold up the server's end


def table_of(page: Any, title: str) -> list[list[str]]:
    """The rows of the table behind a chart, newest first."""
    chart = page.locator(f".chart:has(h3:text-is('{title}'))")
    if chart.locator("table").count() == 0:
        chart.locator("button").click()
    chart.locator("tbody td").first.wait_for()
    return [row.split("\t") for row in chart.locator("tbody tr").all_inner_texts()]


def test_the_pages_functions(url: str, open_page: Open) -> None:
    page = open_page(f"{url}#/search")
    call = "async ([name, values]) => (await import('/dashboard/static/lib.js'))[name](...values)"

    def lib(name: str, *values: Any) -> Any:
        return page.evaluate(call, [name, values])

    # (0.5·0.5 + 0.5·0) / (1 - 0.5²)
    assert lib("smoothed", [1, None, 0], 0.5) == [1, None, pytest.approx(1 / 3)]
    before = {"cursor": "f-1", "steps": [1], "columns": {"a": [5]}}
    more = {"cursor": "f-3", "reset": False, "steps": [2, 3], "columns": {"b": [7, 8]}}
    joined = lib("merged", before, more)
    assert (
        joined["columns"] == {"a": [5, None, None], "b": [None, 7, 8]} and joined["cursor"] == "f-3"
    )
    assert lib("merged", before, more | {"reset": True})["steps"] == [2, 3], (
        "what was there is gone"
    )
    assert lib("running", [[1, 2], [0.5, None]]) == [1.5, 3.5]
    both = lib("overlaid", [{"x": [1, 3], "values": [5, 6]}, {"x": [2, 3], "values": [7, 8]}])
    assert both == {"x": [1, 2, 3], "columns": [[5, None, 6], [None, 7, 8]]}
    assert lib("beganAndNow", [0, 1, 2, 3]) == [0.5, 2.5, 2]  # means of 2 steps each
    assert lib("filled", [1, 2, 4, 5], [None, 3, None, 6]) == [None, 3, 5, 6]
    # sorted: 0 1 2 4, and 1 5 9
    joined = lib("together", [1, 2], [[0, 1], [1, None], [4, 5], [2, 9]])
    assert joined == {"values": [1.5, 5], "low": [0.75, 3], "high": [2.5, 7]}
    settings = {"rl_training.seed": ["1", "2", "3"], "rl_training.kl_beta": ["0", "0", "0.1"]}
    assert lib("seeds", 3, settings) == [[0, 1], [2]] and lib(
        "seeds", 3, settings, [False, True, False]
    )[1] == [1]
    assert lib("readPlace", lib("writePlace", "group", ["a/b#c"], {"x": "1&2", "y": ""})) == {
        "view": "group",
        "rest": ["a/b#c"],
        "query": {"x": "1&2"},
    }
