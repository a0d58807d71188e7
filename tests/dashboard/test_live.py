"""The page of a real training run, with an API key: the last step, every group, a killed and
resumed process."""

import json
import math
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_parallm.rollout_store.store import RolloutStore
from tests.dashboard.conftest import Opened, faults_of_access
from tests.integration.processes import (
    Daemon,
    free_port,
    metrics,
    train,
    wait_for_step,
    write_config,
)

pytestmark = pytest.mark.slow
KEY = "sk-of-a-live-dashboard"


def test_a_live_run_with_a_key(tmp_path: Path, opened: Opened) -> None:
    config, run = write_config(tmp_path, steps=400), tmp_path / "checkpoints" / "run"
    key_file = tmp_path / "key"
    key_file.write_text(KEY)
    named = ("--set", f'server.api_key_file="{key_file}"', "--set", "logging.sample_every=1")
    with train(config, *named) as daemon:
        page = opened.page(f"{daemon.wait_until_ready().url}/dashboard#key={KEY}")
        wait_for_step(daemon, run, 3)
        page.wait_for_selector(".chart canvas")
        assert page.locator(".badge").inner_text() == "running" and "key" not in page.url
        opened.page(f"{daemon.url}/dashboard").wait_for_selector("input[type=password]")
        ask = httpx.Client(
            base_url=f"{daemon.url}/dashboard/api",
            headers={"Authorization": f"Bearer {KEY}"},
            timeout=60,
        )
        assert ask.get("/runs").json()["runs"][0]["live"] is True
        assert groups_of(ask) >= known_groups(run), "every group of the store is reached"
        check_tokens(ask)
        order = {"action": "change", "settings": {"learning_rate": 1e-3, "temperature": 0.7}}
        assert (
            httpx.post(f"{daemon.url}/dashboard/api/control", json=order, timeout=60).status_code
            == 401
        )
        foreign = ask.post("/control", json=order, headers={"Origin": "https://example.org"})
        assert (
            foreign.status_code == 403
            and ask.get("/control").json()["settings"]["learning_rate"] == 2e-3
        )
        changed = ask.post("/control", json=order, headers={"Origin": daemon.url})
        assert changed.json()["result"] == {
            "learning_rate": [2e-3, 1e-3],
            "temperature": [1.0, 0.7],
        }
        assert (
            ask.post("/control", json={"action": "change", "settings": {"seed": 1}}).status_code
            == 400
        )
        daemon.send(signal.SIGKILL)
        page.wait_for_selector(".lost:has-text('Not reachable')")
        assert daemon.wait() == -signal.SIGKILL
        assert KEY not in daemon.output and f"{daemon.url}/dashboard" in daemon.output
    with train(config, *named, "--resume", str(run)) as daemon:
        daemon.wait_until_ready()
        page.wait_for_selector(".lost", state="detached", timeout=30_000)
        wait_for_step(daemon, run, last_step(run) + 2)
        daemon.send(signal.SIGTERM)
        assert daemon.wait() == 0
    lines = metrics(run)
    (at,) = [line["step"] for line in lines if line.get("changed") == order["settings"]]
    assert lines[0]["learning_rate"] == 2e-3 and {line["learning_rate"] for line in lines[at:]} == {
        1e-3
    }
    with closing(RolloutStore(run / "rollouts.sqlite")) as store:
        groups = store.groups(store.taken_by(lines[-1]["step"]))
        newest = [rollout.temperature for group in groups for rollout in group.rollouts]
    assert set(newest) == {0.7}, (
        "a resume from the file that the run began with keeps what was changed"
    )
    page.locator(".chart button").first.click()
    steps = page.locator(".chart").first.locator("tbody td:first-child").all_inner_texts()
    assert steps and len(steps) == len(set(steps)), "no step twice"
    assert KEY not in (run / "run.log").read_text()
    assert not [url for url in opened.requests if KEY in url]
    problems = [problem for problem in opened.problems if "Failed to load resource" not in problem]
    assert problems == [], "but for the lost server and the missing key"


def check_tokens(ask: httpx.Client) -> None:
    """The trainer's log-probabilities are the sampler's: these steps are one update with the
    weights that sampled."""
    checked = 0
    for group in ask.get(
        "/groups", params={"first_step": 1, "last_step": 2, "state": "taken"}
    ).json()["groups"]:
        for answer in group["answers"]:
            found = ask.get(
                "/tokens", params={"id": group["group_id"], "number": answer["number"]}
            ).json()
            if "trainer_logprobs" not in found["values"]:
                continue  # samples keep three groups of a step at most
            columns = (
                found["values"][name]
                for name in ("logprobs", "trainer_logprobs", "ratio", "entropies")
            )
            for own, sampler, trainer, ratio, entropy in zip(found["mask"], *columns, strict=True):
                if own:
                    assert abs(trainer - sampler) < 1e-4
                    assert ratio == pytest.approx(math.exp(trainer - sampler), rel=1e-6)
                    assert entropy >= 0
                    checked += 1
    assert checked >= 20


def last_step(run: Path) -> int:
    return int(metrics(run)[-1]["step"])


def known_groups(run: Path) -> set[str]:
    with sqlite3.connect(f"file:{run / 'rollouts.sqlite'}?mode=ro", uri=True) as store:
        return {
            group_id
            for (group_id,) in store.execute(
                "SELECT group_id FROM groups WHERE bytes IS NOT NULL AND step <= 3"
            )
        }


def groups_of(ask: httpx.Client) -> set[str]:
    found, query = set[str](), dict[str, Any](first_step=1, last_step=3, limit=20)
    while True:
        part = ask.get("/groups", params=query).json()
        found |= {group["group_id"] for group in part["groups"]}
        if part["older"] is None:
            return found
        query["older_than"] = part["older"]


def test_the_page_talks_to_the_policy_and_trains_it(tmp_path: Path, opened: Opened) -> None:
    """Nothing else asks or rewards this run: it has stalled until the page sends a group."""
    port, run = free_port(), tmp_path / "run"
    letters = Path(__file__).parents[2] / "examples" / "rewards_by_id" / "letters.toml"
    settings = {
        "server.port": port,
        "rl_training.checkpoint_dir": tmp_path,
        "rl_training.run_name": "run",
        "rl_training.batch_size": 4,
        "rl_training.atropos.rollout_batch_size": 4,
        "rl_training.total_steps": 4,
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with Daemon("mlx_parallm_train", "--config", str(letters), *flags, port=port) as daemon:
        daemon.wait_until_ready()
        page = opened.page(f"{daemon.url}/dashboard#/chat?left=policy@0&temperature=0&answers=2")
        ask_page(page, "Reverse: abcd")
        page.wait_for_selector(".side >> nth=1 >> .answer >> nth=1 >> text=ended by")
        left, right = (
            page.locator(".side").nth(side).locator(".answer .text").first.inner_text()
            for side in (0, 1)
        )
        messages = [{"role": "user", "content": "Reverse: abcd"}]
        for model, shown in (("policy@0", left), ("default", right)):
            body = {
                "model": model,
                "messages": messages,
                "temperature": 0,
                "n": 2,
                "logprobs": True,
            }
            (choice, _) = httpx.post(
                f"{daemon.url}/v1/chat/completions", json=body, timeout=60
            ).json()["choices"]
            assert shown == "".join(token["token"] for token in choice["logprobs"]["content"])
            assert choice["message"]["content"] and choice["message"]["content"] in shown
        assert faults_of_access(page) == []
        page.goto(f"{daemon.url}/dashboard#/chat?left=default&right=default&answers=2")
        page.click("text=New conversation")
        ask_page(page, "Reverse: wxyz")
        for number, mark in enumerate(("right", "wrong", "right", "wrong")):
            page.locator(".answer").nth(number).locator(f"button:text-is('{mark}')").click()
        page.click("button:text-is('Send rewards')")
        page.click("[role=status] a")
        page.wait_for_selector(".answer .reward >> nth=3")
        assert sorted(page.locator(".answer .reward").all_inner_texts()) == ["0", "0", "1", "1"]
        page.wait_for_selector(".count:text-matches('^1 ')")
        assert [line["reward_mean"] for line in metrics(run)] == [0.5]
        check_controls(page, daemon)
        page.click("nav >> text=Controls")
        page.click("button:text-is('Stop')")
        page.click("text=Yes, stop")
        assert daemon.wait() == 0
    state = json.loads((run / "step_000001" / "trainer_state.json").read_text())
    assert state["changes"] == [{"step": 1, "settings": {"learning_rate": [2e-3, 1e-3]}}]
    assert "the first step" in (run / "run.log").read_text()
    opened.problems[:] = [
        problem for problem in opened.problems if "Failed to load resource" not in problem
    ]
    assert opened.problems == []


def check_controls(page: Any, daemon: Daemon) -> None:
    """One step is finished, and no other one begins."""
    page.click("nav >> text=Controls")
    page.fill("input[aria-label=note]", "<b>the first step</b>")
    command(page, "Note it", "Yes, write", "on the charts")
    command(page, "Pause", "Yes, pause", "Done")
    assert httpx.get(f"{daemon.url}/is_paused").json() == {"is_paused": True}
    command(page, "Resume", "Yes, resume", "Done")
    command(page, "Checkpoint now", "Yes, save", "Saved: step_000001")
    page.fill("input[aria-label='version or checkpoint']", "step_000001")
    command(page, "Roll back", "Yes, roll back", "they are version 2 now")
    page.fill("input[name=learning_rate]", "0.001")
    command(page, "Change", "Yes, change", "saved in a checkpoint")
    assert faults_of_access(page) == []
    page.keyboard.press("1")
    page.wait_for_selector("section[aria-label=marks] >> text=learning_rate 0.002 → 0.001")
    shown = page.locator("section[aria-label=marks] tbody td:last-child").all_inner_texts()[::-1]
    assert shown == [
        "<b>the first step</b>",
        "paused",
        "resumed",
        "checkpoint step_000001",
        "rolled back to step_000001",
        "learning_rate 0.002 → 0.001",
    ]
    assert "the first step" in page.locator(".chart .at").first.inner_text(), (
        "the mark is on the charts"
    )


def command(page: Any, name: str, yes: str, outcome: str) -> None:
    page.click(f"button:text-is('{name}')")
    page.click(f"button:text-is('{yes}')")
    page.wait_for_selector(f"[role=status]:has-text('{outcome}')")


def ask_page(page: Any, prompt: str) -> None:
    page.fill("textarea[name=prompt]", prompt)
    page.press("textarea[name=prompt]", "Enter")
