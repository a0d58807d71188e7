"""60 planted secrets of 15 kinds: none in any output, placeholders stable, JSON valid; ordinary
code stays as it is."""

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.systems.traces.privacy import TraceRedactor, leftovers, redact_trace, secret_finder
from mlx_parallm.systems.traces.reading import write_traces
from mlx_parallm.systems.traces.trace import Trace, new_trace, parse_trace
from tests.traces.messages import assistant, user

LETTERS = string.ascii_letters + string.digits


def planted() -> dict[str, list[str]]:
    """Four of each kind, made as the services make them."""
    source = random.Random(7)

    def text(length: int, letters: str = LETTERS) -> str:
        return "".join(source.choices(letters, k=length))

    def jwt() -> str:
        return f"eyJ{text(20)}.eyJ{text(40)}.{text(43)}"

    def pem() -> str:
        lines = "\n".join(text(64, LETTERS + "+/") for _ in range(3))
        return f"-----BEGIN RSA PRIVATE KEY-----\n{lines}\n-----END RSA PRIVATE KEY-----"

    upper = string.ascii_uppercase + string.digits
    makers: dict[str, Any] = {
        "aws": lambda: "AKIA" + text(16, upper),
        "aws_secret": lambda: "q9" + text(38, LETTERS + "+/"),
        "github": lambda: source.choice(["ghp_", "gho_", "ghs_"]) + text(36),
        "gitlab": lambda: "glpat-" + text(20),
        "slack": lambda: f"xoxb-{text(11, string.digits)}-{text(24)}",
        "google": lambda: "AIza" + text(35),
        "stripe": lambda: "sk_live_" + text(24),
        "jwt": jwt,
        "private_key": pem,
        "npm": lambda: "npm_" + text(36),
        "huggingface": lambda: "hf_" + text(34),
        "openai": lambda: "sk-proj-" + "4" + text(40),
        "bearer": lambda: "7" + text(31),
        "url_password": lambda: "5" + text(19),
        "user": lambda: (
            source.choice(["mwagner", "jdoe42", "liu-wei", "anna_k"])
            + text(2, string.ascii_lowercase)
        ),
    }
    assert len(makers) == 15
    return {kind: [make() for _ in range(4)] for kind, make in makers.items()}


def around(kind: str, secret: str) -> str:
    """How such a secret stands in what an agent reads."""
    places = {
        "aws_secret": f"aws_secret_access_key = {secret}",
        "bearer": f"curl -H 'Authorization: Bearer {secret}' https://example.org",
        "url_password": f"git clone https://ci:{secret}@example.org/repo.git",
        "user": f"FileNotFoundError: /home/{secret}/project/main.py",
    }
    return places.get(kind, f"The value is {secret} and stays so")


def trace_with(secrets: dict[str, list[str]]) -> Trace:
    """Each secret stands in a message, in a call's arguments (an object and JSON text) or in a
    result, and again."""
    messages: list[dict[str, Any]] = []
    for kind, values in secrets.items():
        in_text, in_arguments, in_result, in_raw = values
        arguments = {
            "command": around(kind, in_arguments),
            "deep": [{"x": around(kind, in_arguments)}],
            "n": 3,
        }
        raw = json.dumps({"note": around(kind, in_raw)}, separators=(",", ":"))
        calls = [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "run", "arguments": json.dumps(arguments)},
            },
            {"id": "2", "type": "function", "function": {"name": "run", "arguments": raw}},
        ]
        messages += [
            user(f"{around(kind, in_text)}\nagain: {around(kind, in_text)}"),
            assistant("", reasoning_content=around(kind, in_text), tool_calls=calls),
            {
                "role": "tool",
                "tool_call_id": "1",
                "content": json.dumps({"out": around(kind, in_result)}),
            },
            {"role": "tool", "tool_call_id": "2", "content": f"ran: {around(kind, in_raw)}"},
        ]
    return new_trace(messages, session_id="planted", source="test")


def test_none_of_sixty_secrets_is_in_any_output(tmp_path: Path) -> None:
    secrets = planted()
    trace, hits = redact_trace(trace_with(secrets), secret_finder())
    review = write_traces([trace], tmp_path / "traces.jsonl", hits)
    assert review is not None
    written = (tmp_path / "traces.jsonl").read_text() + review.read_text()
    flat = written.replace("\\n", "\n")
    left = [
        secret
        for values in secrets.values()
        for secret in values
        if secret in written or secret in flat
    ]
    assert left == []
    assert sum(trace.get("redacted").values()) == len(hits) >= 60
    for message in trace.messages:
        for call in message.get("tool_calls", ()):
            json.loads(call["function"]["arguments"])
        if message["role"] == "tool" and message["tool_call_id"] == "1":
            json.loads(message["content"])
    assert list(leftovers([tmp_path / "traces.jsonl", review])) == []


def test_placeholders_are_stable_and_different() -> None:
    one, other = planted()["github"][:2]
    redactor = TraceRedactor("t", secret_finder())
    assert redactor.text(f"{one} {other} {one}") == "<GITHUB_1> <GITHUB_2> <GITHUB_1>"
    assert redactor.value({"password": "hunter22", "note": "a password"}) == {
        "password": "<SECRET_1>",
        "note": "a password",
    }
    assert redactor.value('{"api_key": "abc123"}') == '{"api_key": "<SECRET_2>"}'


def test_a_trace_with_hits_keeps_no_tokens() -> None:
    """The tokens of a secret are the secret."""
    metrics = {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3],
        "logprobs": [-0.5],
        "prompt_tokens": 2,
    }
    messages = [user(planted()["aws"][0]), assistant("ok", step={"metrics": metrics})]
    trace, _ = redact_trace(new_trace(messages, session_id="s", source="test"), secret_finder())
    assert trace.to_json()["steps"][1]["metrics"] == {"prompt_tokens": 2}
    clean = new_trace([user("hi"), messages[1]], session_id="s", source="test")
    assert redact_trace(clean, secret_finder()) == (clean, [])


def test_at_most_three_false_hits_in_ten_thousand_words_of_code() -> None:
    """Each 10,000 words of code of other projects, as they are installed here."""
    folder = Path(json.__file__).parent
    files = sorted(folder.parent.glob("*.py")) + sorted(folder.parent.glob("asyncio/*.py"))
    finder, words, hits = secret_finder(), 0, 0
    for file in files[:60]:
        text = file.read_text(encoding="utf-8", errors="replace")
        words += len(text.split())
        hits += len(finder.find(text))
    assert words > 50_000
    assert hits <= 3 * words / 10_000, hits


@pytest.mark.parametrize(
    "text",
    [
        "sk-folding-cube-wrapper and class sk-learn",
        "token = tokenizer.convert_ids_to_tokens(ids)",
        'api_key=os.environ["OPENAI_API_KEY"]',
        "Bearer tokens are sent with each request",
        "sha256:9f86d081884c7d659a2feaa0c55ad015",
        "https://example.org/user@host",
        "/home/user/project and /Users/Shared/x",
        'quote mkdir "/Users/name/My Documents" and /home/your-name/x',
        "secret_key_base = Rails.application.credentials",
    ],
)
def test_what_is_no_secret(text: str) -> None:
    assert secret_finder().find(text) == []


def test_a_planted_leftover_is_found(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    secret = planted()["stripe"][0]
    file.write_text(
        '{"a": "fine"}\n' + json.dumps({"messages": [{"content": f"key {secret}"}]}) + "\n"
    )
    assert list(leftovers([file])) == [f"{file}:2: stripe"]


def test_a_redacted_trace_is_a_trace() -> None:
    trace, _ = redact_trace(trace_with(planted()), secret_finder())
    assert parse_trace(trace.to_json()).to_json() == trace.to_json()
