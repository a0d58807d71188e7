"""[[tools.mcp]] in a run's TOML: a dataset environment and a reward call a real MCP server;
counts in metrics."""

import json
import sys
import threading
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from mlx_parallm.config.load import load_config
from mlx_parallm.daemon import training_run
from mlx_parallm.models.threads import in_mlx_thread
from tests.integration.processes import metrics

pytest.importorskip("mcp")
PROGRAM = Path(__file__).parents[1] / "execution" / "mcp_server.py"

RUN = f"""
[model]
base_path = "builtin:tiny"

[server]
port = 0

[rl_training]
total_steps = 2
run_name = "run"
batch_size = 8

[rl_training.atropos]
rollout_batch_size = 8

[[environments]]
kind = "dataset"
data = "rows.jsonl"
group_size = 4
max_tokens = 4
tools = ["add", "pid"]
rewards = ["builtin:tool", "builtin:length"]
reward_options.tool = {{ name = "add", arguments = {{ a = "{{a}}", b = 1 }} }}
reward_options.length = {{ target = 3 }}

[tools]
formats = ["json"]

[[tools.mcp]]
command = [{json.dumps(sys.executable)}, {json.dumps(str(PROGRAM))}]
env = {{ TOKEN = "$TOOLS_TEST_TOKEN" }}
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_server_in_a_runs_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLS_TEST_TOKEN", "hush-hush-hush")
    rows = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1), "a": n} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(RUN)
    text = ""

    def run() -> None:
        nonlocal text
        config = load_config(tmp_path / "run.toml", [f"rl_training.checkpoint_dir={tmp_path}"])
        console = Console(file=StringIO())
        training = training_run(config, resume=None, stop=threading.Event(), console=console)
        try:
            training.execute()
            text = training.prepared.serving.state.metrics.exposition().decode()  # type: ignore[attr-defined]
        finally:
            training.close()

    in_mlx_thread(run)
    first, second = metrics(tmp_path / "run")
    assert first["rewards/tool/mean"] >= 1, "the tool's number is the score"
    assert first["tools/calls"] + second["tools/calls"] >= 16
    assert first["tools/errors"] == second["tools/restarts"] == 0
    assert first["tools/cache_hits"] + second["tools/cache_hits"] >= 8, (
        "add is read-only: a group asks it once"
    )
    assert (
        "mlx_parallm_tool_calls_total" in text
        and 'mlx_parallm_tool_errors_total{kind="timeout"} 0.0' in text
    )
    saved = (tmp_path / "run/config.toml").read_text()
    assert '"$TOOLS_TEST_TOKEN"' in saved and "hush" not in saved
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if str(PROGRAM) in " ".join(child.cmdline())
    ]
    assert left == []
