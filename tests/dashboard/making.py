"""Run directories for the dashboard's tests, written by the parts that write real ones; and
servers of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from mlx_parallm.rl_training.rollout_buffer import NO_VARIANCE
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile, complete
from mlx_parallm.runs.dashboard.command import make_app
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.types import RolloutGroup
from tests.answered import answered

HOSTILE = (
    "<img src=x onerror=\"document.title='pwned'\"></script><script>document.title='pwned'</script>"
    "\x07\x00\u202egnp.exe"
)
SECRET = "sk-abcdefghijklmnop1234"


answer = partial(answered, slope=-1 / 8)


def metrics_line(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step,
        "reward_mean": step / 100,
        "reward_std": 0.25,
        "groups": 2,
        "sequences": 4,
        "kl": 0.01 * step,
    }
    return complete(values | {"reward_by_environment": {"sums": step / 50}} | changes)


def evaluated(step: int, *rewards: float, text: str) -> dict[str, Any]:
    """A line of evaluations.jsonl: problems p0, p1, …; the answer to the first one was kept."""
    problems = [
        {"key": f"p{n}", "greedy": reward, "sampled": []} for n, reward in enumerate(rewards)
    ]
    example = {
        "key": "p0",
        "prompt": "1+1",
        "expected": "2",
        "text": text,
        "reward": rewards[0],
        "error": None,
    }
    part = {"numbers": {"accuracy": 0.5}, "problems": problems, "examples": [example]}
    return {
        "step": step,
        "version": step,
        "seconds": 1.0,
        "score": 0.5,
        "environments": {"sums": part},
    }


def make_run(
    path: Path, *, steps: int = 3, name: str = "my-run", learning_rate: float = 1e-3
) -> Path:
    """Step n took group `sums-n` (rewards 1 and 0) and dropped `words-n` (0 and 0); `tools-9`
    waits."""
    run = path / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(
        '[model]\nbase_path = "builtin:tiny"\n[rl_training]\ntotal_steps = 9\nlearning_rate ='
        f" {learning_rate}\n"
    )
    store, file = RolloutStore(run / "rollouts.sqlite"), MetricsFile(run / METRICS_FILE)
    for step in range(1, steps + 1):
        right, wrong = (
            answer(f"Sum: {step}+2", str(step + 2), reward=1.0),
            answer(f"Sum: {step}+2", HOSTILE, extra={"parsed": HOSTILE, "odd": [step]}),
        )
        store.add(
            RolloutGroup(f"sums-{step}", "sums", (right, wrong), metadata={"answer": "3"}),
            source="here",
        )
        same = tuple(answer("Spell", f"abc {SECRET}", version=step) for _ in range(2))
        store.add(RolloutGroup(f"words-{step}", "words", same), source="here")
        store.take([f"sums-{step}"], step)
        store.drop([f"words-{step}"], step, NO_VARIANCE)
        file.append(metrics_line(step))
    for step in (0, steps):
        MetricsFile(run / "evaluations.jsonl").append(
            evaluated(step, 0.0, 1.0, text=f"It is {step}. {HOSTILE}")
        )
    spans = (
        {"name": "rl.train", "step": step, "begin": 9.0 + step, "end": 9.5 + step}
        for step in range(1, steps + 1)
    )
    (run / "spans.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    tools = answer(
        "What time?", '<tool_call>{"name": "clock"}</tool_call>', "noon", "12", reward=0.5
    )
    store.add(
        RolloutGroup("tools-9", "tools", (tools, answer("What time?", "late"))), source="here"
    )
    store.close()
    return run


def make_clients_run(path: Path, name: str) -> Path:
    """As one that a client trains over HTTP: one step, neither groups nor rewards."""
    run = path / name
    run.mkdir(parents=True)
    (run / "config.toml").write_text(
        '[model]\nbase_path = "builtin:tiny"\n[tinker]\nenabled = true\n'
    )
    line = {"step": 1, "judged_by": "loss", "groups": 0, "sequences": 4, "loss": -0.25}
    MetricsFile(run / METRICS_FILE).append(complete(line | {"tokens": 80}))
    return run


@contextmanager
def served(paths: Sequence[Path]) -> Iterator[str]:
    """The address of `mlx_parallm_dashboard` over these runs."""
    listener = bind_socket("127.0.0.1", 0)
    thread = ServerThread(make_app(list(paths)), listener, 256)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.start()
    try:
        yield url
    finally:
        thread.stop(0.5)
