"""What the page needs of the machine and does to the run: the wheel without any network, a
deterministic run that is watched."""

import json
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import httpx
import pytest

from tests.dashboard.conftest import FLAGS, NAMES, Opened
from tests.dashboard.making import make_run
from tests.integration.test_wheel import venv, wheel
from tests.soak.resume_bits import Run, differences

pytestmark = [pytest.mark.slow, pytest.mark.long]
__all__ = ["venv", "wheel"]  # fixtures

WITHOUT_NETWORK = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
OPEN = """
import json, socket, subprocess, sys
from playwright.sync_api import sync_playwright

chromium, flags, *command = json.loads(sys.argv[1])
try:
    socket.create_connection(("192.0.2.1", 80), 1)
    raise SystemExit("there is a network")
except OSError:
    pass
seen = {"requests": [], "problems": []}
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as driver:
    url = server.stdout.readline().strip()
    page = driver.chromium.launch(executable_path=chromium, args=flags).new_page()
    page.on("request", lambda request: seen["requests"].append(request.url))
    page.on("console", lambda message: message.type == "error" and seen["problems"].append(message.text))
    page.goto(url)
    page.wait_for_selector(".chart canvas")
    page.goto(url + "#/group/sums-1")
    page.wait_for_selector(".answer")
    seen["page"] = url
    page.close()
    server.kill()
print(json.dumps(seen))
"""


def test_the_page_of_the_wheel_without_a_network(venv: Path, tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api")
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    if (
        chromium is None
        or subprocess.run([*WITHOUT_NETWORK, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no chromium, or no user namespaces: the network cannot be taken away")
    serve = [str(venv / "bin" / "mlx_parallm_dashboard"), str(make_run(tmp_path)), "--port", "0"]
    program = [*WITHOUT_NETWORK, sys.executable, "-c", OPEN, json.dumps([chromium, FLAGS, *serve])]
    done = subprocess.run(
        program, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    origin = seen["page"].removesuffix("/dashboard")
    assert len(seen["requests"]) > 15 and all(
        url.startswith(f"{origin}/dashboard") for url in seen["requests"]
    )
    assert seen["problems"] == []


def test_a_deterministic_run_writes_the_same_numbers_when_it_is_watched(
    tmp_path: Path, opened: Opened
) -> None:
    alone, watched = (Run(tmp_path / name, steps=4) for name in ("alone", "watched"))
    alone.finish()
    port = tomllib.loads((tmp_path / "watched" / "run.toml").read_text())["server"]["port"]
    url, answered, over = f"http://127.0.0.1:{port}/dashboard", list[str](), threading.Event()

    def ask() -> None:
        paths = (
            "metrics?keys=*",
            "health",
            "groups",
            "evaluations",
            "timeline?steps=8",
            "runs",
            "events?once=true",
        )
        with httpx.Client(timeout=20) as http:
            while not over.is_set():
                for path in paths:
                    try:
                        answered.extend(
                            [path] if http.get(f"{url}/api/{path}").status_code == 200 else []
                        )
                    except httpx.TransportError:  # not there yet, or ended
                        over.wait(0.05)

    process, threads = watched.start(), [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        while "metrics?keys=*" not in answered:
            assert process.poll() is None, watched.output.read_text()[-2000:]
            over.wait(0.05)
        opened.page(url).wait_for_selector(".bar")
        assert process.wait(timeout=300) == 0, watched.output.read_text()[-2000:]
    finally:
        over.set()
        process.kill()
        for thread in threads:
            thread.join()
    assert len(answered) > 50
    assert differences(watched.lines(), alone.lines()) == []
    assert [line["step"] for line in alone.lines()] == [1, 2, 3, 4]
