"""One `Run` feeds explain, compare and the dashboard, and they agree about it."""

from pathlib import Path

from mlx_parallm.runs.compare import compared
from mlx_parallm.runs.dashboard.run_view import RunView
from mlx_parallm.runs.explain import explain
from mlx_parallm.runs.run import open_run
from mlx_parallm.system.redaction import Redactor
from tests.dashboard.making import make_run


def test_explain_compare_and_the_dashboard_show_the_same_run(tmp_path: Path) -> None:
    directory = make_run(tmp_path, steps=3)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # the step that is being written
    run = open_run(directory)
    explanation, view = explain(run), RunView(run, Redactor())
    (compared_run,) = compared([run])
    summary = view.summary()

    assert explanation.run == compared_run.name == summary["name"] == "my-run"
    assert explanation.steps == len(compared_run.lines) == summary["steps"] == 3
    assert explanation.total_steps == summary["total_steps"] == 9
    assert compared_run.settings is not None
    assert compared_run.settings["rl_training.total_steps"] == 9
    rewards = [value for _, value in compared_run.values("reward_mean")]
    assert list(explanation.rewards) == rewards
    assert view.metrics(["reward_mean"], "", 100)["columns"]["reward_mean"] == rewards
    assert view.health()["findings"] == [found.to_json() for found in explanation.findings]
    assert [line["step"] for line in compared_run.evaluations] == [0, 3]
    assert [line["step"] for line in view.evaluations.all()] == [0, 3]
