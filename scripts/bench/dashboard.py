"""Measure what the dashboard costs, and how soon it draws. Needs Chromium (scripts/setup_browser)
and an idle machine.

    python scripts/bench/dashboard.py            # all
    python scripts/bench/dashboard.py first      # a run of 10,000 steps: seconds to the first chart, the largest answer
    python scripts/bench/dashboard.py cost       # the quickstart with three tabs open and with none, in turns
    python scripts/bench/dashboard.py processor  # processor-seconds that three tabs cost a minute (Linux)

`cost` is one run: pages are opened and closed in turns of 20 steps, and the same process is
compared with itself. `processor` adds a line to metrics.jsonl every 0.6 s, as the quickstart does,
and has no model.
"""

import argparse
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile, complete
from mlx_parallm.server.thread import bind_socket

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
STEPS, TABS, TURN, TURNS = 10_000, 3, 20, 10
OPENING = 2  # steps of a turn that are not counted: they began before its tabs were open
STEP_S, SETTLE_STEPS, MEASURED_STEPS = 0.6, 10, 50
FIRST_S, LARGEST_BYTES, COST = 1.5, 300_000, 0.98


def make_run(path: Path, steps: int) -> Path:
    """A run directory of so many steps."""
    run = path / f"of-{steps}"
    run.mkdir()
    (run / "config.toml").write_text(
        f'[model]\nbase_path = "builtin:tiny"\n[rl_training]\ntotal_steps = {STEPS}\n'
    )
    with (run / METRICS_FILE).open("w") as file:
        file.writelines(metrics_line(step) for step in range(1, steps + 1))
    return run


def metrics_line(step: int) -> str:
    """With the numbers of a real line: 100 keys."""
    numbers = {f"rewards/part{n}/mean": step / (n + STEPS) for n in range(20)}
    line = dict.fromkeys(complete({}), 0.123456789012) | numbers
    line |= {
        "step": step,
        "reward_mean": step / STEPS,
        "groups": 8,
        "gave_up": None,
        "rolled_back_to": None,
    }
    return json.dumps(line | {"reward_by_environment": {"sums": 0.5}, "environments": {}}) + "\n"


def first(browser: Any, scratch: Path) -> bool:
    """Print seconds from opening a freshly started server's page to its first chart, and the
    largest answer."""
    run, seconds, sizes = make_run(scratch, STEPS), [], list[int]()
    for _ in range(3):
        port = free_port()
        with subprocess.Popen(
            command("dashboard", str(run), "--port", str(port)), stdout=subprocess.PIPE
        ) as server:
            assert server.stdout is not None
            url = server.stdout.readline().decode().strip()
            page = browser.new_page()
            page.on(
                "response",
                lambda answer: sizes.append(int(answer.headers.get("content-length", 0))),
            )
            began = time.perf_counter()
            page.goto(url)
            page.wait_for_selector(".chart canvas", timeout=60_000)
            seconds.append(time.perf_counter() - began)
            page.wait_for_selector(".health .verdict", timeout=60_000)
            page.close()
            server.terminate()
    print(
        f"{STEPS} steps, {(run / METRICS_FILE).stat().st_size / 1e6:.0f} MB: first chart after"
        f" {min(seconds):.2f} s"
    )
    each = ", ".join(f"{one:.2f}" for one in seconds)
    print(
        f"  (three times: {each}; wanted < {FIRST_S}); largest answer {max(sizes)} bytes (<="
        f" {LARGEST_BYTES})"
    )
    return min(seconds) < FIRST_S and max(sizes) <= LARGEST_BYTES


def cost(browser: Any, scratch: Path) -> bool:
    """Print tokens per second, served and trained, with TABS visible tabs as a share of those
    with none."""
    port, run = free_port(), scratch / "checkpoints" / "cost"
    settings = {
        "server.port": port,
        "rl_training.checkpoint_dir": run.parent,
        "rl_training.run_name": run.name,
        "rl_training.total_steps": (TURN + OPENING + 1) * TURNS * 2 + 40,
        "evaluation.problems": 0,
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with subprocess.Popen(
        command("train", "--config", "quickstart", *flags), stdout=subprocess.DEVNULL
    ) as process:
        rates = {False: list[tuple[float, float]](), True: list[tuple[float, float]]()}
        wait_for(run, 20, process)
        for turn in range(2 * TURNS):
            # none, some, some, none: what changes while it learns is in both
            tabs = turn % 4 in (1, 2)
            window = browser.new_context()  # tabs of one browser
            for _ in range(TABS if tabs else 0):
                page = window.new_page()
                page.goto(f"http://127.0.0.1:{port}/dashboard")
                page.wait_for_selector(".chart canvas")
            begin = len(list(MetricsFile(run / METRICS_FILE).read())) + OPENING
            wait_for(run, begin + TURN, process)
            lines = list(MetricsFile(run / METRICS_FILE).read())[begin : begin + TURN]
            waited = sum(
                line["time_rollout_s"] + line["time_train_s"] + line["time_publish_s"]
                for line in lines
            )
            served = statistics.median(line["serve_tok_s"] for line in lines)
            rates[tabs].append((served, sum(line["tokens"] for line in lines) / waited))
            window.close()
        process.terminate()
    shares = []
    for name, place in (("served", 0), ("trained", 1)):
        none, some = (
            statistics.median(rate[place] for rate in rates[tabs]) for tabs in (False, True)
        )
        pairs = [b[place] / a[place] for a, b in zip(rates[False], rates[True], strict=True)]
        shares.append(some / none)
        logs = [math.log(pair) for pair in pairs]
        error = statistics.stdev(logs) / math.sqrt(len(logs))
        print(
            f"{name}: {none:.0f} tokens/s with no tab, {some:.0f} with {TABS}: {some / none:.3f}",
            end=" ",
        )
        print(
            f"(mean of {len(pairs)} pairs {math.exp(statistics.mean(logs)):.3f} ± {error:.3f};"
            f" wanted >= {COST})"
        )
    return min(shares) >= COST


def processor(browser: Any, scratch: Path) -> bool:
    """Print the seconds of a processor that each kind of process takes a minute, with no tab and
    with TABS."""
    spent = {tabs: _spent(browser, scratch / str(tabs), tabs) for tabs in (0, TABS)}
    for kind in sorted(spent[TABS]):
        none, some = (spent[tabs].get(kind, 0.0) for tabs in (0, TABS))
        print(f"{kind}: {none:.2f} s a minute with no tab, {some:.2f} with {TABS}")
    none, some = (sum(spent[tabs].values()) for tabs in (0, TABS))
    print(f"all: {some - none:.2f} s a minute more with {TABS} tabs")
    return True


def _spent(browser: Any, scratch: Path, tabs: int) -> Counter[str]:
    scratch.mkdir()
    run, port = make_run(scratch, 80), free_port()
    with subprocess.Popen(
        command("dashboard", str(run), "--port", str(port)), stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        url, window = server.stdout.readline().decode().strip(), browser.new_context()
        for _ in range(tabs):
            page = window.new_page()
            page.goto(url)
            page.wait_for_selector(".chart canvas")
        before, began = Counter[str](), 0.0
        with (run / METRICS_FILE).open("a") as file:
            for number in range(SETTLE_STEPS + MEASURED_STEPS):
                if number == SETTLE_STEPS:
                    before, began = processor_seconds(), time.monotonic()
                file.write(metrics_line(81 + number))
                file.flush()
                time.sleep(STEP_S)  # the pace of the run that it stands in for
        after, minutes = processor_seconds(), (time.monotonic() - began) / 60
        window.close()
        server.terminate()
    return Counter(
        {
            kind: (after[kind] - before[kind]) / minutes
            for kind in after
            if after[kind] > before[kind]
        }
    )


def processor_seconds() -> Counter[str]:
    """Return what the processes below this one have taken so far, by kind: Chromium's,
    playwright's, the server."""
    parents, seconds = dict[int, int](), dict[int, float]()
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        pid = int(place.parent.name)
        parents[pid], seconds[pid] = (
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        )
    kinds, own_pid = Counter[str](), os.getpid()
    for pid, spent in seconds.items():
        above = pid
        while above not in (0, own_pid):
            above = parents.get(above, 0)
        if above == own_pid != pid and (kind := _kind(pid)):
            kinds[kind] += spent
    return kinds


def _kind(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
    if "mlx_parallm" in line:
        return "server"
    if "playwright" in line and "--type=" not in line and "--headless" not in line:
        return "playwright"
    process_type = re.search(r"--utility-sub-type=\w+\.mojom\.(\w+)", line) or re.search(
        r"--type=([\w-]+)", line
    )
    return f"Chromium's {process_type[1] if process_type else 'browser'}"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlx_parallm", *arguments]


def free_port() -> int:
    with bind_socket("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


def wait_for(run: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    file = MetricsFile(run / METRICS_FILE)
    while not (last := file.last(1)) or last[0]["step"] < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended with {process.returncode} before step {step}")
        time.sleep(0.1)


PARTS = {"first": first, "cost": cost, "processor": processor}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    wanted = parser.parse_args().parts or list(PARTS)
    if CHROMIUM is None:
        raise SystemExit("no Chromium: scripts/setup_browser gets it")
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        held = [PARTS[part](browser, Path(scratch)) for part in wanted]
        browser.close()
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
