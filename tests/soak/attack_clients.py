"""Attacks by clients of Tinker's API and the prompt policy, by pages of other ports, by files,
by an upstream."""

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import zstandard

from tests.soak.attack_sandbox import FINE, TRAIN, ended, training
from tests.soak.attack_server import JSON, costly, together
from tests.soak.attack_target import MB, PORT, SERVE, Server, Target, Watch, attack

API = "/api/v1"
TINKER = (*SERVE, "--tinker")
CHUNK: dict[str, Any] = {"type": "encoded_text", "tokens": [1, 40, 41]}
MOST_HELD_MB = 1000
SILENT_S = 5.0  # that /health may be silent, on a machine that does other things too


def session_of(server: Server) -> str:
    return str(server.post(f"{API}/create_session", {"tags": []}).json()["session_id"])


def sampler_of(server: Server, session: str) -> str:
    name = httpx.get(f"{server.url}{API}/get_server_capabilities").json()["supported_models"][0][
        "model_name"
    ]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": name}
    return str(server.post(f"{API}/create_sampling_session", body).json()["sampling_session_id"])


@attack("Tinker: 16 MB of wrong items in each list of a body", got_through=True)
def wrong_items(target: Target) -> str:
    items = b",".join([b'"a"'] * (4 * MB))
    bodies = {
        "asample": b'{"sampling_session_id":"s","prompt":{"chunks":[{"tokens":[%s]}]}}' % items,
        "create_session": b'{"tags":[%s]}' % items.replace(b'"a"', b"1"),
        "retrieve_futures": b'{"target":{"sampling_session_id":"s"},"retrieved_request_ids":[%s]}'
        % items.replace(b'"a"', b"1"),
        "asample ": b'{"prompt":{"chunks":[]},"sampling_params":{"stop":[%s]}}'
        % b",".join([b"{}"] * 900_000),
        "asample  ": b'{"prompt":{"chunks":[%s]}}' % b",".join([b"{}"] * 900_000),
        "save_weights": b'{"model_id":"m","user_metadata":{"a":[%s]}}' % items,
    }
    with target.own_server("wrong_items", command=TINKER) as server:
        return "; ".join(
            costly(server, f"{API}/{path.strip()}", body, 400, 404) for path, body in bodies.items()
        )


@attack("Tinker: 15 million empty datums, plain and packed", got_through=True)
def empty_datums(target: Target) -> str:
    plain, seen = b"\x1a\x00" * 15_000_000, []
    packed = zstandard.compress(b"\x1a\x00" * 120_000_000)
    with target.own_server("empty_datums", command=TINKER) as server:
        for body, headers in ((plain, {}), (packed, {"Content-Encoding": "zstd"})):
            with Watch(server) as watch:
                answer = server.post(f"{API}/forward_backward", content=body, headers=headers)
            assert (
                answer.status_code == 400
                and watch.silence_s < SILENT_S
                and watch.grown_mb < MOST_HELD_MB
            ), str(watch)
            seen.append(f"{len(body)} bytes: 400, {watch}")
    return "; ".join(seen)


@attack("Tinker: 30 MB of metadata, and 3,000 sessions", got_through=True)
def piled_sessions(target: Target) -> str:
    large = b'{"user_metadata":{"a":"%s"}}' % (b"x" * (30 * MB))
    with target.own_server("sessions", command=TINKER) as server:
        with Watch(server) as watch, httpx.Client(base_url=server.url, timeout=60) as http:
            refused = server.post(f"{API}/create_session", content=large, headers=JSON).status_code
            body = {"user_metadata": {"a": "x" * 60_000}}
            codes = [http.post(f"{API}/create_session", json=body).status_code for _ in range(3000)]
        seen = str(watch)
    assert refused == 400 and codes[-1] == 429 and watch.grown_mb < MOST_HELD_MB, (
        f"{refused}, {codes[-1]}, {seen}"
    )
    return f"400; {codes.count(200)} sessions, then 429; {seen}"


@attack(
    "1024 samples × 400 tokens × 1024 alternatives, and ten requests of the most", got_through=True
)
def alternatives(target: Target) -> str:
    many = {
        "num_samples": 1024,
        "topk_sample_logprobs": 1024,
        "sampling_params": {"max_tokens": 400},
    }
    with target.own_server("alternatives", command=TINKER) as server:
        with Watch(server) as watch:
            sampler = sampler_of(server, session_of(server))
            base = {"sampling_session_id": sampler, "prompt": {"chunks": [CHUNK]}}
            statuses = [server.post(f"{API}/asample", base | many).status_code]
            most = {
                "num_samples": 256,
                "topk_sample_logprobs": 20,
                "sampling_params": {"max_tokens": 400},
            }
            statuses += [server.post(f"{API}/asample", base | most).status_code for _ in range(10)]
            chat = {
                "model": "default",
                "messages": [{"role": "user", "content": "a"}],
                "n": 1024,
                "max_tokens": 400,
            }
            statuses.append(
                server.post(
                    "/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 20}
                ).status_code
            )
            assert server.answers(), "/health does not answer"
        seen = str(watch)
    assert statuses[0] == statuses[-1] == 400 and 429 in statuses, str(statuses)
    assert watch.grown_mb < 2500 and watch.silence_s < 2 * SILENT_S, seen
    return f"{statuses}, {seen}"


@attack("a page of another port: POST /pause without a body", got_through=True)
def other_page(target: Target) -> str:
    server = target.server()
    page = {
        "Origin": "http://127.0.0.1:18812",
        "Sec-Fetch-Site": "same-site",
        "Sec-Fetch-Mode": "no-cors",
    }
    document = httpx.get(f"{server.url}/openapi.json").json()
    changing = [
        (method, path)
        for path, each in document["paths"].items()
        for method in each
        if method != "get"
    ]
    let_in = []
    for method, path in changing:
        for headers in (page, page | {"Content-Type": "text/plain"}, {**page, "Origin": "null"}):
            if (
                httpx.request(
                    method, f"{server.url}{path}", headers=headers, timeout=10
                ).status_code
                != 403
            ):
                let_in.append(f"{method} {path}")
    assert not let_in, str(let_in)
    return f"{len(changing)} routes refuse it"


@attack("readers that take nothing of a long answer", got_through=False)
def slow_readers(target: Target) -> str:
    server = target.server()
    body = {
        "model": "default",
        "prompt": "a",
        "max_tokens": 800,
        "n": 8,
        "logprobs": 20,
        "ignore_eos": True,
    }
    sent = json.dumps(body | {"stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with Watch(server) as watch:
        held = [
            server.connect(head + b"Content-Length: %d\r\n\r\n%s" % (len(sent), sent))
            for _ in range(20)
        ]
        time.sleep(20)
        status = server.post(
            "/v1/completions", {"model": "default", "prompt": "a", "max_tokens": 1}
        ).status_code
        for connection in held:
            connection.close()
    assert status == 200 and watch.silence_s < SILENT_S and watch.grown_mb < 1500, (
        f"{status}, {watch}"
    )
    return f"{status}, {watch}"


@attack(
    "the prompt policy: 8 MB of wrong items, 64 clients, a page of another port", got_through=False
)
def prompt_policy(target: Target) -> str:
    directory = target.directory / "policy_checkpoints"
    command = ("mlx_parallm", "prompt-policy", "--server", PORT)
    with target.own_server(
        "policy", f"prompt_policy.checkpoint_dir='{directory}'", command=command
    ) as server:
        seen = [
            costly(server, "/select_action", b'{"embedding":[%s1]}' % (b'"a",' * (2 * MB)), 400)
        ]
        seen.append(costly(server, "/embed", b'{"input":[%s1]}' % (b"1," * (4 * MB)), 400))
        seen.append(
            costly(
                server,
                "/rollout",
                b'{"prompt":"a","columns":{"a":[%s1]}}' % (b"1," * (4 * MB)),
                400,
                404,
                409,
                422,
            )
        )
        page = {"Origin": "http://127.0.0.1:18812", "Sec-Fetch-Site": "same-site"}
        for path in ("/update", "/save", "/load", "/mutate", "/feedback"):
            assert server.post(path, headers=page).status_code == 403, path
        for path in ("/etc/passwd", "../x", "a/../../x", "\x00", "a" * 200, "latest/../../.."):
            assert server.post("/load", {"path": path}).status_code in (400, 404, 409), path
        failed: list[int] = []

        def client() -> None:
            for _ in range(20):
                code = server.post("/mutate", {"prompt": "Say it. " * 100}).status_code
                if code not in (200, 429, 503):
                    failed.append(code)

        together([client] * 64)
        assert not failed and server.answers(), str(failed)
    return "; ".join(seen)


@attack("two resumes of one run at once", got_through=False)
def two_resumes(target: Target) -> str:
    directory = target.directory / "twice"
    code, text = ended(training(directory, FINE, steps=2))
    assert code == 0, text[-500:]
    resume = [TRAIN, "--resume", str(directory / "run"), "--set", "rl_training.total_steps=6"]
    ends: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda: ends.append(ended(resume))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(code for code, _ in ends)
    steps = [
        json.loads(line)["step"]
        for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert codes == [0, 2] and steps == [1, 2, 3, 4, 5, 6], f"exit codes {codes}, steps {steps}"
    assert not any("Traceback" in text for _, text in ends)
    return f"exit codes {codes}, steps {steps}"


@attack("the run directory is removed while it trains", got_through=True)
def removed_run(target: Target) -> str:
    directory = target.directory / "removed"
    with (target.directory / "removed.txt").open("w") as output:
        process = subprocess.Popen(
            training(directory, FINE, steps=400), stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + 120
        while not list(directory.glob("run/step_*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        shutil.rmtree(directory, ignore_errors=True)
        code = process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()
    text = (target.directory / "removed.txt").read_text()
    assert code in (1, 2) and "Traceback" not in text, f"exit code {code}: {text[-600:]}"
    return f"exit code {code}: {text.strip().splitlines()[-1][-160:]}"


HOSTILE_ROWS: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b"\xff\xfe\x00\x01",
    "a list": b"[1]\n",
    "deep": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}\n",
    "half a character": b'{"prompt": "\\ud800", "completion": "\\udfff"}\n',
    "numbers": b'{"prompt": 1, "completion": 2}\n',
    "NaN": b'{"prompt": "a", "completion": NaN}\n',
    "a long line": b'{"prompt": "' + b"a" * (20 * MB) + b'", "completion": "b"}\n',
    "a null byte": b'{"prompt": "\\u0000", "completion": "b"}\n\x00\n',
    "a large number": b'{"prompt": "a", "completion": "b", "n": ' + b"9" * 5000 + b"}\n",
}


@attack("--data of every wrong form", got_through=False)
def hostile_data(target: Target) -> str:
    directory, bad = target.directory / "data", []
    directory.mkdir()
    for name, content in HOSTILE_ROWS.items():
        file = directory / f"{name.replace(' ', '_')}.jsonl"
        file.write_bytes(content)
        command = [TRAIN, "--model", "builtin:tiny", "--algorithm", "sft", "--data", str(file)]
        sets = [
            f"rl_training.checkpoint_dir={directory}/{file.stem}",
            "rl_training.total_steps=1",
            "server.port=0",
        ]
        code, text = ended([*command, *(part for each in sets for part in ("--set", each))], 120)
        if code not in (0, 2) or "Traceback" in text:
            bad.append(f"{name}: exit code {code}: {text[-200:]}")
    assert not bad, "; ".join(bad)
    return f"{len(HOSTILE_ROWS)} files: exit code 2 in words, or trained"


@attack("damaged adapters and models for export, merge and serve", got_through=False)
def damaged_models(target: Target) -> str:
    directory = target.directory / "exported"
    code, text = ended(training(directory, FINE, steps=1))
    assert code == 0, text[-500:]
    final, seen, program = directory / "run" / "final", [], str(Path(TRAIN).parent / "mlx_parallm")
    for name, content in {
        "adapters.safetensors": b"x" * 100,
        "adapter_config.json": b"[",
        "none": None,
    }.items():
        copy = directory / name.replace(".", "_")
        shutil.copytree(final, copy, symlinks=False)
        if content is None:
            shutil.rmtree(copy)
        else:
            (copy / name).write_bytes(content)
        both = ["--base-model", "builtin:tiny", "--lora-path", str(copy)]
        for command in (
            ["merge", *both, "--output-path", f"{copy}_m"],
            ["export", *both, "--to", f"{copy}_e"],
        ):
            code, text = ended([program, *command], 120)
            assert code == 2 and "Traceback" not in text, (
                f"{command[0]} {name}: exit code {code}: {text[-300:]}"
            )
            seen.append(code)
    return f"exit codes {seen}"


@attack("a recorder before an upstream that sends what no chat is", got_through=True)
def hostile_upstream(target: Target) -> str:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    streams = [
        b'data: {"choices":[{"index":"a","delta":[]}]}\n\n',
        b"data: " + b"x" * (9 * MB),
        b"\xff" * 1000,
    ]
    streams += [b'data: {"choices":[%s]}\n\n' % b",".join(b'{"index":%d}' % n for n in range(5000))]

    class Upstream(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(streams[int(self.headers["X-Stream"])])

        def log_message(self, *arguments: Any) -> None:
            return

    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    directory = target.directory / "recorded"
    url = f"http://127.0.0.1:{upstream.server_address[1]}/v1"
    command = [
        str(Path(TRAIN).parent / "mlx_parallm"),
        "traces",
        "record",
        "--upstream",
        url,
        "--dir",
        str(directory),
    ]
    output = target.directory / "recorder.txt"
    with output.open("w") as file:
        process = subprocess.Popen([*command, "--port", "0"], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while "http://127.0.0.1:" not in output.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        proxy = (
            "http://127.0.0.1:"
            + output.read_text().split("http://127.0.0.1:")[1].split("/")[0].split()[0]
        )
        for number, content in enumerate(streams):
            for changed in ({}, {"temperature": "hot"}, {"tools": 5}):
                body = {"messages": [{"role": "user", "content": "a"}], "stream": True} | changed
                answer = httpx.post(
                    f"{proxy}/sessions/s/v1/chat/completions",
                    json=body,
                    headers={"X-Stream": str(number)},
                    timeout=60,
                )
                assert (answer.status_code, answer.content) == (200, content), (
                    f"stream {number}: {answer.status_code}"
                )
    finally:
        process.terminate()
        process.wait(30)
        upstream.shutdown()
    return f"{3 * len(streams)} answers passed on byte for byte"
