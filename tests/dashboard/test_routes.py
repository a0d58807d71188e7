"""The dashboard's routes: who may read what, the page's own files, the stream, the vendored
files."""

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from mlx_parallm import cli
from mlx_parallm.config.load import parse_config
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.run_files.metrics import METRICS_FILE, MetricsFile
from mlx_parallm.runs.dashboard import routes
from mlx_parallm.system.redaction import Redactor
from tests.dashboard.making import make_clients_run, make_run, metrics_line, served
from tests.server.fake_engine import FakeEngine
from tests.server.serving import RunningServer, running_server

KEY = "sk-of-the-dashboard"
STATIC = Path(routes.__file__).parent / "static"
DATA = (
    "runs",
    "compare",
    "metrics",
    "health",
    "evaluations",
    "events",
    "groups",
    "group?id=sums-1",
    "tokens?id=sums-1&number=0",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def server(run: Path, tiny_tokenizer: Any) -> Iterator[RunningServer]:
    added = routes.dashboard(run, Redactor([KEY]))
    with running_server(FakeEngine(), tiny_tokenizer, routers=[added], api_key=KEY) as running:
        yield running


def test_the_page_needs_no_key_and_all_data_does(server: RunningServer) -> None:
    with server.http() as http:
        for path in (
            "/dashboard",
            "/dashboard/static/app.js",
            "/dashboard/static/vendor/preact.mjs",
        ):
            answer = http.get(path)
            assert (
                answer.status_code == 200
                and "default-src 'self'" in answer.headers["Content-Security-Policy"]
            )
            assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert [http.get(f"/dashboard/api/{name}").status_code for name in DATA] == [401] * len(
            DATA
        )
        assert http.get("/dashboard/static/../api/runs").status_code == 401
        assert http.get("/dashboard/static/%2e%2e/routes.py").status_code == 404
        assert http.post("/dashboard").status_code == 401, "only reading is public"
        assert http.post("/dashboard/api/control", json={"action": "stop"}).status_code == 401
    with server.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
        for name in DATA:
            if name != "events":
                assert http.get(f"/dashboard/api/{name}").status_code == 200, name
        (shown,) = http.get("/dashboard/api/runs").json()["runs"]
        assert (shown["name"], shown["live"], shown["steps"], shown["total_steps"]) == (
            "my-run",
            True,
            3,
            9,
        )
        assert http.get("/dashboard/api/runs?run=7").status_code == 200
        for answer in (
            http.get("/dashboard/api/control"),
            http.post("/dashboard/api/control", json={"action": "stop"}),
        ):
            assert (
                answer.status_code == 409 and "does not train" in answer.json()["error"]["message"]
            )
        wrong = {
            "metrics?run=7": 404,
            "groups?regex=(": 400,
            "groups?order=up": 400,
            "group?id=nobody": 400,
        }
        for name, status in wrong.items():
            answer = http.get(f"/dashboard/api/{name}")
            assert answer.status_code == status and answer.json()["error"]["message"], name
        documented = http.get("/openapi.json").json()["paths"]
        assert {f"/dashboard/api/{name.partition('?')[0]}" for name in DATA} <= set(documented)


def test_the_answers_have_the_shapes_that_the_document_declares(server: RunningServer) -> None:
    with server.http(headers={"Authorization": f"Bearer {KEY}"}) as http:
        document = http.get("/openapi.json").json()
        for name in (
            "health",
            "v1/models",
            "server_info",
            *(f"dashboard/api/{name}" for name in DATA),
        ):
            path = f"/{name.partition('?')[0]}"
            answer = http.get(
                f"/{name}", params={"once": True} if name.endswith("events") else None
            )
            declared = document["paths"][path]["get"]["responses"][str(answer.status_code)][
                "content"
            ]
            schema = declared["application/json"]["schema"] | {"components": document["components"]}
            jsonschema.validate(answer.json(), schema)


def test_the_page_opens_while_the_model_loads(run: Path, tiny_tokenizer: Any) -> None:
    added = routes.dashboard(run, Redactor())
    with (
        running_server(FakeEngine(), tiny_tokenizer, loaded=False, routers=[added]) as server,
        server.http() as http,
    ):
        assert http.get("/dashboard").status_code == 200
        assert http.get("/dashboard/api/runs").status_code == 503
        foreign = {"Origin": "https://example.org"}
        assert http.get("/dashboard", headers=foreign).status_code == 403, (
            "without a key only this machine's pages"
        )


def test_runs_that_clients_train_come_and_go(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """The newest is the first; each keeps its id. They are judged by their loss, and have no
    groups."""
    runs = [make_clients_run(tmp_path, "first")]
    added = routes.dashboard(lambda: list(runs), Redactor())
    with (
        running_server(FakeEngine(), tiny_tokenizer, routers=[added]) as server,
        server.http() as http,
    ):

        def get(name: str, **query: Any) -> Any:
            return http.get(f"/dashboard/api/{name}", params=query).json()

        def listed(name: str = "runs", **query: Any) -> list[int]:
            return [run["id"] for run in get(name, **query)["runs"]]

        assert listed() == [0]
        runs[:0] = [make_clients_run(tmp_path, "second"), make_clients_run(tmp_path, "third")]
        assert listed() == listed("events", once=True) == [2, 1, 0]
        runs.remove(tmp_path / "first")
        assert (
            sorted(listed()) == [1, 2] and "no run 0" in get("metrics", run=0)["error"]["message"]
        )
        (shown, _) = get("runs")["runs"]
        assert (shown["total_steps"], shown["algorithm"], shown["live"]) == (None, "tinker", False)
        assert (shown["judged_by"], shown["name"]) == ("loss", "second")
        assert "neither groups nor rewards" in get("groups", run=1)["error"]["message"]
        assert get("health", run=1)["notes"] == []
        assert get("metrics", run=1)["columns"]["headline"] == [-0.25]
        runs.clear()
        assert listed() == [] and get("compare")["settings"] == {}


def test_the_stream_says_what_changed_and_ends_with_the_server(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=1)
    with served([run]) as url, httpx.Client(base_url=url, timeout=20) as http:
        with http.stream("GET", "/dashboard/api/events") as stream:
            events = (
                json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")
            )
            (first,) = next(events)["runs"]
            MetricsFile(run / METRICS_FILE).append(metrics_line(2))
            (second,) = next(events)["runs"]
        assert (
            first["metrics"] != second["metrics"] and first["evaluations"] == second["evaluations"]
        )
        assert first["state"] == "stopped"


def test_vendored_files_are_what_they_say() -> None:
    listed = json.loads((STATIC / "vendor" / "VENDORED.json").read_text())
    for entry in listed:
        content = (STATIC / "vendor" / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], entry["file"]
        assert (
            (STATIC / "vendor" / f"LICENSE.{entry['package']}").is_file()
            and entry["version"]
            and entry["licence"]
        )
    code = {
        file.name: file.stat().st_size
        for file in (STATIC / "vendor").iterdir()
        if file.suffix in (".mjs", ".js", ".css")
    }
    assert set(code) == {entry["file"] for entry in listed}
    assert sum(code.values()) <= 90_000
    assert sum(file.stat().st_size for file in STATIC.rglob("*") if file.is_file()) <= 250_000
    ours = "".join(file.read_text() for file in STATIC.glob("*.*"))
    assert (
        "innerHTML" not in ours
        and "http://" not in ours.replace("http://www.w3.org/2000/svg", "")
        and "https://" not in ours
    )


def test_the_command_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dashboard([str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    run = make_run(tmp_path, steps=0)
    assert cli.dashboard([str(run), str(run)]) == 2
    assert "is named twice" in capsys.readouterr().err


def test_the_bare_address_leads_to_the_page(tmp_path: Path) -> None:
    with (
        served([make_run(tmp_path, steps=1)]) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        answer = http.get("/")
    assert answer.status_code == 307 and answer.headers["location"] == "/dashboard"


def test_settings_that_differ(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path, steps=1, name="a"),
        make_run(tmp_path, steps=1, name="b", learning_rate=5e-4),
    ]
    with served(runs) as url, httpx.Client(base_url=url, timeout=20) as http:
        found = http.get("/dashboard/api/compare").json()
    assert found == {
        "settings": {"rl_training.learning_rate": ["0.001", "0.0005"]},
        "faults": ["", ""],
    }


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, steps=2, name=name) for name in ("a", "b")]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (runs[1] / name).write_text('rubbish\n{"step": 2}\n')
    with served(runs) as url, httpx.Client(base_url=url, timeout=20) as http:
        shown = http.get("/dashboard/api/runs").json()["runs"]
        assert [(each["name"], each["steps"]) for each in shown] == [("a", 2), ("b", 0)]
        assert http.get("/dashboard/api/compare").json()["faults"] == ["", ""]
        assert http.get("/dashboard/api/metrics?run=0").json()["steps"] == [1, 2]
        damaged = http.get("/dashboard/api/metrics?run=1")
        assert damaged.status_code == 500 and "not JSON" in damaged.json()["error"]["message"]


def test_where_nothing_is_trained_there_is_nothing_to_control(tmp_path: Path) -> None:
    """`mlx_parallm dashboard` said that its model is still loading."""
    with (
        served([make_run(tmp_path, steps=1)]) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        for answer in (
            http.get("/dashboard/api/control"),
            http.post("/dashboard/api/control", json={"action": "stop"}),
        ):
            assert answer.status_code == 409
            assert "does not train the run" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({"action": "change", "settings": {"learning_rate": True}}, "settings.learning_rate"),
        ({"action": "change", "settings": {"learning_rate": "1e-3"}}, "settings.learning_rate"),
        ({"action": "change", "settings": {}}, "settings"),
        ({"action": "change"}, "settings"),
        ({"action": "checkpoint", "settings": {"learning_rate": 1e-3}}, "settings"),
        ({"action": "change", "settings": {"learning_rate": 1e-3}, "text": "why"}, "text"),
        ({"action": "note", "text": "  "}, "text"),
    ],
)
def test_an_order_that_says_something_else_is_refused(
    order: dict[str, Any], param: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    """A learning rate of true became 1.0; settings beside another action were passed over."""
    commands = RunCommands(
        tmp_path, threading.Event(), parse_config({"rl_training": {}}), step=lambda: 3
    )
    added = routes.dashboard(tmp_path, Redactor([]), commands)
    with (
        running_server(FakeEngine(), tiny_tokenizer, routers=[added]) as server,
        server.http() as http,
    ):
        answer = http.post("/dashboard/api/control", json=order)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert not (tmp_path / "marks.jsonl").exists()
