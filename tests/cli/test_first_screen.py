"""A start that cannot work, as a new user sees it: one line that says what is wrong and where, exit
code 2, no traceback."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

OWN = """
from mlx_parallm.primitives import BaseEnvironment, State

class Good(BaseEnvironment):
    def reset(self, index=0):
        return State(prompt="Sort: ba", metadata={"answer": "ab"})

class NoReset(BaseEnvironment):
    pass

class ResetText(Good):
    def reset(self, index=0):
        return "hello"

class NoEnvironment:
    pass

def score(prompts, completions, **columns):
    return [1.0] * len(completions)
"""
CONFIG = """
[model]
base_path = "builtin:tiny"
[server]
port = {port}
[rl_training]
total_steps = 1
checkpoint_dir = "checkpoints-{name}"
[[environments]]
kind = "python:own.py:{kind}"
rewards = ["{reward}"]
group_size = 4
"""
ROWS = {
    "wrong": '{"question": "a", "solution": "b"}',
    "half": '{"prompt": "a", "chosen": "b"}',
    "text": "not json",
    "good": "\n".join(f'{{"prompt": "Sort: b{n}", "answer": "{n}b"}}' for n in range(9)),
}
DATA = "train --model builtin:tiny --data"
CASES = {
    # arguments, or an environment and a reward of a configuration; what the line has
    "import fails": (("broken.py:Any", ""), ["broken.py, line 1", "No module named 'notthere'"]),
    "no such class": (("own.py:God", ""), ["there is no 'God' in", "did you mean 'Good'"]),
    "no environment": (("own.py:NoEnvironment", ""), ["is a subclass neither of"]),
    "no reset": (("own.py:NoReset", ""), ["NoReset does not define reset()"]),
    # it loads the model, which a process does once
    "reset returns a text": (("own.py:ResetText", ""), ["returned 'hello', not a State"]),
    "no such reward": (("own.py:Good", "python:own.py:scor"), ["did you mean 'score'"]),
    "a reward without its prefix": (f"{DATA} good.jsonl --reward answer_match", ["'builtin:'"]),
    "wrong columns": (f"{DATA} wrong.jsonl --reward python:own.py:score", ["only question, sol"]),
    "half a pair": (
        f"{DATA} half.jsonl --algorithm dpo",
        ["half.jsonl:1", "'rejected' is missing"],
    ),
    "no JSON": (f"{DATA} text.jsonl --algorithm sft", ["text.jsonl:1", "not JSON"]),
    "no file": (f"{DATA} gone.jsonl --algorithm sft", ["there is no file gone.jsonl"]),
    "no model": (
        "train --model ./gone --data good.jsonl --reward python:own.py:score",
        ["no model at './gone'"],
    ),
    "port in use": ("serve --model-path builtin:tiny --port {port}", ["already in use", "port"]),
    "port in use, recorder": (
        "traces record --upstream http://127.0.0.1:9/v1 --dir r --port {port}",
        ["already in use", "with --port"],
    ),
    "port in use, mcp": ("mcp --directory m --http {port}", ["already in use", "with --http"]),
    "port in use, train": (("own.py:Good", "python:own.py:score"), ["already in use"]),
    "too little memory": (
        f"{DATA} good.jsonl --algorithm sft --set rl_training.token_budget=9000000000000"
        " --set data.max_length=9000000000",
        ["memory", "it fits with"],
    ),
}
PROGRAM = """
import json, os, sys, tempfile
from mlx_parallm import cli
for arguments in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        log.seek(0)
        print("RESULT", json.dumps([code, log.read().decode()]), flush=True)
"""


@pytest.mark.slow
def test_a_start_that_cannot_work_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("import notthere\n")
    for name, text in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(text)
    commands = []
    with socket.create_server(("127.0.0.1", 0)) as busy:
        taken = busy.getsockname()[1]
        for number, (name, (start, _)) in enumerate(CASES.items()):
            if isinstance(start, str):
                commands.append(start.format(port=taken).split())
                continue
            kind, reward = start
            port = taken if name.startswith("port") else 0
            text = CONFIG.replace("own.py:{kind}", kind).format(
                name=number, port=port, kind="", reward=reward or "python:own.py:score"
            )
            (tmp_path / f"{number}.toml").write_text(text)
            commands.append(["train", "--config", f"{number}.toml"])
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, json.dumps(commands)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line[:6] == "RESULT"]
    assert len(results) == len(CASES), done.stderr[-2000:] + done.stdout[-2000:]
    wrong = {
        name: (code, text)
        for (name, (_, words)), (code, text) in zip(CASES.items(), results, strict=True)
        if code != 2
        or "Traceback" in text
        or text.count("error: ") != 1
        or not all(word in text.splitlines()[-1] for word in words)
    }
    assert wrong == {}
