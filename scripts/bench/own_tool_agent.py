"""An own agent with tools, as a user has one: a loop of the OpenAI client over HTTP.

It minds a house: of a question it calls the tool that knows (`door`, `lamp`, `mail`), and
says what that returned. `record` runs it on yesterday's model, an endpoint that looks in half of its
runs and guesses in the others, behind `mlx_parallm traces record`; each run gets its user's score.
`judged` runs the same loop on a served policy, and asks what no trace has.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from openai import APIStatusError, OpenAI

from scripts.server_process import command, server_process

Json = dict[str, Any]
HOUSE = {"door": "shut", "lamp": "on", "mail": "two letters"}
"""What each tool returns. An answer is right when the agent has called the tool and says this."""
GUESSES = ("open", "off", "none", "yes", "no")
PHRASES = {
    "door": ("is the door open?", "did you lock up?", "front door?", "can people walk in?"),
    "lamp": ("is the lamp lit?", "does it burn?", "lamp?", "light on or off?"),
    "mail": ("any mail?", "what came by post?", "letters for me?", "is the box empty?"),
}
NAMES = (
    "Ann",
    "Bob",
    "Cid",
    "Dora",
    "Eve",
    "Finn",
    "Gus",
    "Hal",
    "Ivy",
    "Jo",
    "Kim",
    "Lou",
    "Max",
    "Ned",
    "Oda",
    "Pia",
    "Rex",
    "Sue",
    "Tom",
)
MOST_TURNS = 4


def questions() -> list[str]:
    """Each name with each phrase, in a random order that is always the same."""
    found = [f"{who}: {text}" for who in NAMES for texts in PHRASES.values() for text in texts]
    random.Random(1).shuffle(found)
    return found


def tool_for(question: str) -> str:
    phrase = question.partition(": ")[2]
    return next(name for name, texts in PHRASES.items() if phrase in texts)


def definitions() -> list[Json]:
    empty = {"type": "object", "properties": {}}
    return [
        {"type": "function", "function": {"name": name, "description": "", "parameters": empty}}
        for name in HOUSE
    ]


def run_agent(client: OpenAI, question: str) -> tuple[str, list[str]]:
    """The agent: it asks the model, makes the calls, and continues until an answer without one.

    Returns the answer, and the names of the tools that it called.
    """
    messages: list[Any] = [{"role": "user", "content": question}]
    called: list[str] = []
    for _ in range(MOST_TURNS):
        answer = client.chat.completions.create(
            model="default",
            messages=messages,
            tools=definitions(),  # type: ignore[arg-type]
            temperature=0,
            max_tokens=96,
        )
        message = answer.choices[0].message
        if not message.tool_calls:
            return (message.content or "").strip(), called
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            name = call.function.name  # type: ignore[union-attr]
            called.append(name)
            result = HOUSE.get(name, f"there is no tool {name}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "", called


def is_right(question: str, answer: str, called: Sequence[str]) -> bool:
    """The agent's own rule: it has looked, and says what it saw."""
    wanted = tool_for(question)
    return wanted in called and answer == HOUSE[wanted]


def record(asked: Sequence[str], directory: Path) -> int:
    """Run the agent twice on each question, recorded by a proxy; return how often it was right."""
    right = 0

    def words(port: int) -> list[str | Path]:
        proxy = [command("mlx_parallm"), "traces", "record", "--upstream", upstream]
        return [*proxy, "--dir", directory, "--port", str(port)]

    with yesterdays_model() as upstream, server_process(words) as (url, _):
        for number, question in enumerate(asked):
            for run in "ab":
                session = f"{url}/sessions/{number}-{run}"
                client = OpenAI(base_url=f"{session}/v1", api_key="none")
                fine = is_right(question, *run_agent(client, question))
                right += fine
                client.post(f"{session}/feedback", body={"score": int(fine)}, cast_to=object)
    return right


def judged(asked: Sequence[str], model: str, adapter: Path | None, log: Path) -> list[bool]:
    """Serve a policy, run the agent on it, and return by its own rule what was right."""

    def words(port: int) -> list[str | Path]:
        serve = [command("mlx_parallm"), "serve", "--model-path", model, "--port", str(port)]
        return serve if adapter is None else [*serve, "--lora-path", adapter]

    right = []
    with server_process(words, log) as (url, _):
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        for question in asked:
            try:
                right.append(is_right(question, *run_agent(client, question)))
            except APIStatusError:  # such as a conversation that has no more room
                right.append(False)
    return right


@contextlib.contextmanager
def yesterdays_model() -> Iterator[str]:
    """Yield the URL of an endpoint that makes the right call in the first run of a question, and
    guesses in the second."""
    guess, seen = random.Random(2), set[str]()

    def reply(messages: Sequence[Json]) -> Json:
        if messages[-1]["role"] == "tool":
            return {"role": "assistant", "content": messages[-1]["content"]}
        question = messages[0]["content"]
        if question in seen:
            return {"role": "assistant", "content": guess.choice(GUESSES)}
        seen.add(question)
        call = {"name": tool_for(question), "arguments": "{}"}
        calls = [{"id": f"call_{len(seen)}", "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = reply(body["messages"])
            reason = "tool_calls" if message.get("tool_calls") else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            head = {"id": "chatcmpl-0", "object": "chat.completion", "created": int(time.time())}
            answer = json.dumps({**head, "model": "yesterday", "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
