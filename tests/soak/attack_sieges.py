"""Every kind of attack while the process has to answer: a siege continues, a small chat is asked again
and again, then SIGTERM comes in the middle of it. attack.py runs them; `--seed` changes the blows.

A siege is a list of blows (what one client does once) that clients strike side by side, each once
at least, in an order of chance. It is held when each chat is answered within `ANSWERS_S`, memory grows by less than its bound, nothing is a 500,
no traceback is in the log, and the process ends within `ENDS_S` with exit code 0. On a machine that
does other things too, the seconds count by its load.
"""

import contextlib
import gzip
import io
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import zstandard
from PIL import Image

from tests.soak import hostile_images
from tests.soak.attack_target import MB, PORT, SERVE, Server, Target, Watch, attack
from tests.soak.hostile_http import ANSWERS, hostile_server
from tests.soak.training_daemon import sampled_groups

ANSWERS_S, ENDS_S = 10.0, 10.0
LASTS_S, LASTS_AT_MOST_S = 5.0, 60.0
MOST_GROWN_MB, CLIENTS = 1200, 4
JSON = {"Content-Type": "application/json"}
SMALL = {"messages": [{"role": "user", "content": "Sum: 1+"}], "max_tokens": 4, "model": "default"}
Blow = Callable[[Server, random.Random], int | None]
SEED = int(os.environ.get("MLX_PARALLM_ATTACK_SEED", "0"))


def bound(seconds: float) -> float:
    """Seconds of a machine that does nothing else → of this one now."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@dataclass
class Seen:
    """What a siege showed."""

    statuses: Counter[int]
    slowest_s: float = 0.0
    blows: int = 0
    chats: int = 0
    grown_mb: int = 0
    ended_s: float = 0.0

    def __str__(self) -> str:
        codes = ", ".join(f"{code}: {n}" for code, n in sorted(self.statuses.items()))
        return (
            f"{self.blows} blows, {self.chats} chats, slowest {self.slowest_s:.1f} s, +{self.grown_mb} MB,"
            f" ended after {self.ended_s:.1f} s ({codes})"
        )


def besiege(server: Server, blows: list[Blow], lasts_s: float = LASTS_S) -> Seen:
    """Strike for so long, and end the server in the middle of it. Raises AssertionError."""
    seen, stop, lock = Seen(Counter()), threading.Event(), threading.Lock()
    deck = random.Random(SEED).sample(blows, len(blows))
    struck = 0

    def strike(seed: int) -> None:
        nonlocal struck
        chance = random.Random(SEED * 1000 + seed)
        while not stop.is_set():
            with lock:
                blow, struck = deck[struck % len(deck)], struck + 1
            with contextlib.suppress(httpx.HTTPError, OSError):
                code = blow(server, chance)
                if code is not None:
                    with lock:
                        seen.statuses[code] += 1

    chat(server)  # the first one makes what is made once
    clients = [threading.Thread(target=strike, args=(n,), daemon=True) for n in range(CLIENTS)]
    try:
        with Watch(server) as watch:
            for client in clients:
                client.start()
            began = time.monotonic()
            while (lasted := time.monotonic() - began) < lasts_s or (
                struck < len(deck) + CLIENTS and lasted < bound(LASTS_AT_MOST_S)
            ):
                seen.slowest_s = max(seen.slowest_s, chat(server))
                seen.chats += 1
            seen.blows = struck
            began = time.monotonic()
            server.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(bound(3 * ENDS_S))
            seen.ended_s = time.monotonic() - began
        seen.grown_mb = watch.grown_mb
    finally:
        stop.set()
    output = server.output.read_text(errors="replace")
    assert server.process.returncode == 0, f"exit code {server.process.returncode}: {seen}"
    assert seen.ended_s <= bound(ENDS_S) and seen.slowest_s <= bound(ANSWERS_S), str(seen)
    assert seen.grown_mb <= MOST_GROWN_MB and not seen.statuses[500], str(seen)
    assert "Traceback" not in output, f"{seen}; in the log: {output[-600:]}"
    return seen


def chat(server: Server) -> float:
    """Ask once; return the seconds. Raises AssertionError: no answer."""
    began = time.monotonic()
    answer = server.post("/v1/chat/completions", SMALL, timeout_s=bound(3 * ANSWERS_S))
    assert answer.status_code == httpx.codes.OK, f"a chat got {answer.status_code}: {answer.text}"
    return time.monotonic() - began


def siege(
    name: str, *settings: str, command: tuple[str, ...] = SERVE, got_through: bool = False
) -> Callable[[Callable[[Target], Iterator[list[Blow]]]], None]:
    """Enter a siege into the table: a generator that yields its blows once, and cleans up."""

    def enter(make: Callable[[Target], Iterator[list[Blow]]]) -> None:
        @attack(f"siege: {name}", got_through=got_through)
        def run(target: Target) -> str:
            with contextlib.contextmanager(make)(target) as blows:
                words = tuple(w.replace("DIR", str(target.directory)) for w in command)
                places = [s.replace("DIR", str(target.directory)) for s in settings]
                folder = f"siege_{make.__name__}"
                with target.own_server(folder, *places, command=words) as server:
                    return str(besiege(server, blows))

    return enter


def sends(path: str, content: bytes, **headers: str) -> Blow:
    def blow(server: Server, chance: random.Random) -> int:
        return server.post(path, content=content, headers=JSON | headers).status_code

    return blow


# ---------------------------------------------------------------------- bodies


@cache
def _zeros(size: int) -> bytes:
    return b'{"prompt":"%s"}' % (b" " * size)


@siege("packed bodies")
def packed(_: Target) -> Iterator[list[Blow]]:
    plain, lists = _zeros(900 * MB), b'{"prompt":[%s[]]}' % (b"[]," * (20 * MB))
    raw = zlib.compressobj(1, wbits=-15)
    deflated = raw.compress(plain) + raw.flush()
    bodies = {
        "gzip": [
            gzip.compress(plain, 1),
            gzip.compress(lists, 1),
            gzip.compress(gzip.compress(plain, 1), 1),
            gzip.compress(b" ", 1) * 100_000,
            gzip.compress(plain, 1)[:-20],
            b"\x1f\x8b" + b"\x00" * 1000,
        ],
        "deflate": [deflated, zlib.compress(plain, 1), b"\x78\x9c" + b"\xff" * 100],
        "zstd": [zstandard.compress(plain)],
        "br": [b"\x1b" * 1000],
        "gzip, gzip": [gzip.compress(gzip.compress(plain, 1), 1)],
        "x-gzip": [gzip.compress(plain, 1)],
        "identity": [b"{}"],
        "\x00": [b"{}"],
        "gzip" * 5000: [b"{}"],
    }
    del plain, lists, raw
    yield [
        sends("/v1/completions", body, **{"Content-Encoding": encoding})
        for encoding, each in bodies.items()
        for body in each
    ]


@siege("JSON of every odd form")
def odd_json(_: Target) -> Iterator[list[Blow]]:
    bodies = [
        b"[" * 3_000_000,
        b'{"a":' * 500_000,
        b'{"messages":%s"x"%s}' % (b"[" * 250, b"]" * 250),
        b'{"prompt":"a","max_tokens":1%s}' % (b"0" * 4000),
        b'{"prompt":"a","max_tokens":1%s}' % (b"0" * 1_000_000),
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"a","temperature":-0.0,"seed":1e400}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a",%s"max_tokens":1}' % (b'"max_tokens":2,' * 200_000),
        b'{"%s":1}' % (b"k" * (20 * MB)),
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"%s"}' % (b"\\u0000" * 200_000),
        "{}".encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b'{"prompt":"a"}' * 1000,
        b"null",
        b"1" * 5_000_000,
        b'"' + b"\\" * 5_000_001,
        b'{"prompt":"a","user":{"a":%s1%s}}' % (b'{"b":' * 200, b"}" * 200),
        b'{"model":"%s","prompt":"a"}' % (b"m" * 3_000_000),
    ]
    routes = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
    more = ("/tokenize", "/v1/rewards", "/v1/load_lora_adapter", "/v1/embeddings", "/v1/score")
    yield [sends(path, body) for body in bodies for path in (*routes, *more)]


# ---------------------------------------------------------------------- grammars

REGEXES = (
    *("^(a?){5000}a{5000}$", "(a?){300}a{300}", "(x+x+)+y", "(a|b)*a(a|b){18}c", "a{100000}"),
    *("a{1000000000}", "(((a{1000}){1000}){1000})", "a?" * 8000, "(.*a){40}", "[^a]{0,65535}b"),
    *("(" * 240 + "a" + "?)" * 240, "|".join(f"ab{n}c" for n in range(1500)), "(?i)[a-z]{2000}k"),
    "".join(chr(0x4E00 + n) + "?" for n in range(8000)),
)
GRAMMARS = (
    *('start: s\ns: s s | "a" | "a" s | s "a" | ', "start: /(x+x+)+/\n%ignore /(y+y+)+/"),
    *('start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"?', 'start: a*\na: b*\nb: a* | "x"'),
    *("start: A\nA: " + " & ".join(f"/.{{0,{n}}}x/" for n in range(300)), "start: <[*]>{1000000}"),
    "start: A\nA: ~/(a|b)*a(a|b){18}/",
    "start: " + "(" * 6000 + '"a"' + ")" * 6000,
    'root ::= "a"{1000000}',
)


def _chain(kind: str) -> dict[str, Any]:
    """Each definition refers to the next one twice."""
    twice = {
        "anyOf": lambda ref: {"anyOf": [ref, ref]},
        "allOf": lambda ref: {"allOf": [ref, ref]},
        "properties": lambda ref: {
            "type": "object",
            "properties": {"a": ref, "b": ref},
            "required": ["a", "b"],
        },
    }[kind]
    defs = {f"d{n}": twice({"$ref": f"#/$defs/d{n + 1}"}) for n in range(40)}
    return {"$defs": {**defs, "d40": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _schemas() -> list[Any]:
    choices = [[{"properties": {f"a{n}": {"const": j}}} for j in range(6)] for n in range(10)]
    return [
        *map(_chain, ("anyOf", "allOf", "properties")),
        {"allOf": [{"anyOf": each} for each in choices]},
        {"allOf": [{"oneOf": each} for each in choices]},
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1500)}},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        {"type": "string", "minLength": 2**62},
        {"type": "string", "pattern": "^(a?){5000}a{5000}$"},
        {"type": "object", "patternProperties": {f"^(a?){{{n}}}b$": {} for n in range(200, 230)}},
        {"type": "integer", "minimum": -(10**300), "maximum": 10**300},
        {"enum": [f"v{n}" for n in range(5000)]},
        {"$dynamicRef": "#x", "$dynamicAnchor": "x"},
        {"$ref": "http://169.254.169.254/latest"},
        {"$ref": "file:///etc/passwd"},
        {"type": "array", "uniqueItems": True, "prefixItems": [{"const": n} for n in range(2000)]},
    ]


@siege("grammars", got_through=True)
def grammars(_: Target) -> Iterator[list[Blow]]:
    def asks(**structure: Any) -> Blow:
        def blow(server: Server, chance: random.Random) -> int:
            body = {
                "prompt": "a",
                "max_tokens": 40,
                "seed": chance.randrange(9),
                "model": "default",
            }
            body |= {"stream": chance.random() < 0.3}
            return server.post("/v1/completions", body | structure).status_code

        return blow

    def form(schema: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}

    def calls(schema: Any) -> Blow:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        fields = {"tools": [tool], "tool_choice": "required"}

        def blow(server: Server, chance: random.Random) -> int:
            return server.post("/v1/chat/completions", SMALL | fields).status_code

        return blow

    yield [
        *(asks(guided_regex=each) for each in REGEXES),
        *(asks(guided_grammar=each) for each in GRAMMARS),
        *(asks(response_format=form(each)) for each in _schemas()),
        *(calls(each) for each in _schemas()),
        asks(guided_choice=["x" * 60_000]),
        asks(guided_choice=[f"c{n}" for n in range(5000)]),
    ]


@siege("bounds of sampling")
def sampling(_: Target) -> Iterator[list[Blow]]:
    fields: list[dict[str, Any]] = [
        {"max_tokens": 2**63, "n": 1},
        {"max_tokens": 10**40},
        {"n": 10**6},
        {"n": 1024, "max_tokens": 30, "ignore_eos": True},
        {"logprobs": 10**9},
        {"logit_bias": {str(n): 100.0 for n in range(200_000)}},
        {"logit_bias": {"-1": 1, "99999999": 1}},
        {"logit_bias": {"5": 1e308}},
        {"stop": ["a" * 100_000]},
        {"stop": [f"s{n}" for n in range(5000)]},
        {"stop_token_ids": [2**63]},
        {"stop_token_ids": list(range(500_000))},
        {"bad_words": ["a" * 50] * 10_000},
        {"allowed_token_ids": list(range(1_000_000))},
        {"allowed_token_ids": [0], "bad_words": ["!"], "temperature": 0},
        {"allowed_token_ids": [-5]},
        {"temperature": 1e-30, "top_p": 1e-30},
        {"temperature": 1e30},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e300},
        {"seed": -(2**70)},
        {"min_tokens": 2**40},
        {"top_k": 2**40, "min_p": 1.0},
        {"priority": -(2**80)},
        {"cache_salt": "x" * 1_000_000},
        {"truncate_prompt_tokens": 2**40},
        {"prompt": [2**40]},
        {"prompt": [[1] * 300] * 300},
        {"prompt": "a" * 5_000_000},
        {"prompt_logprobs": 2**40},
        {"return_token_ids": True, "stream": True, "n": 64, "max_tokens": 20},
    ]
    yield [
        sends("/v1/completions", json.dumps({"prompt": "a", "model": "default"} | each).encode())
        for each in fields
    ]


# ---------------------------------------------------------------------- pictures


def _many_scans(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * 3000 + data[-2:]


def _pictures() -> list[bytes]:
    good = hostile_images.picture_file("JPEG")
    many = hostile_images.chunk(b"abCd", b"") * 200_000
    tags = b"".join(n.to_bytes(2, "little") + b"\x02\0\x60\xea\0\0\x08\0\0\0" for n in range(5000))
    exif = b"Exif\0\0II*\0\x08\0\0\0" + (5000).to_bytes(2, "little") + tags
    return [
        _many_scans(3000),
        good[:2] + b"\xff\xfe\0\x02" * 500_000 + good[2:],
        good[:2] + b"\xff" * 2_000_000 + good[2:],
        hostile_images.picture_file("JPEG", exif=exif),
        hostile_images.png(8, 8, zlib.compress(bytes(72)), many),
        hostile_images.large(6000),
        hostile_images.large(10_000),
        hostile_images.png(2**31 - 1, 2**31 - 1, zlib.compress(bytes(MB))),
        hostile_images.png(1, 200_000, zlib.compress(bytes(400_000))),
    ]


@siege(
    "pictures",
    "vision.enabled=true",
    command=("mlx_parallm_serve", "--model-path", "builtin:tiny-vision", "--port", PORT),
    got_through=True,
)
def pictures(_: Target) -> Iterator[list[Blow]]:
    urls = [hostile_images.data_url(data) for data in _pictures()]
    urls += [each.url for each in hostile_images.hostile_images(60, SEED)]
    urls += ["file:///etc/passwd", "http://169.254.169.254/a.png", "data:;base64," + "A" * MB]

    def blow(server: Server, chance: random.Random) -> int:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            url = chance.choice(urls)
            return hostile_images.ask(http, chance.randrange(3), url).status_code

    yield [blow]


HOSTS = ('vision.hosts=["127.0.0.1"]', "vision.timeout_s=2", "vision.enabled=true")


@siege(
    "pictures from hosts that answer as none should",
    *HOSTS,
    command=("mlx_parallm_serve", "--model-path", "builtin:tiny-vision", "--port", PORT),
)
def fetched_pictures(_: Target) -> Iterator[list[Blow]]:
    with hostile_server() as host:

        def blow(server: Server, chance: random.Random) -> int:
            with httpx.Client(base_url=server.url, timeout=120) as http:
                url = f"{host.url}/{chance.choice([*ANSWERS])}/a.png"
                return hostile_images.ask(http, chance.randrange(3), url).status_code

        yield [blow]


# ---------------------------------------------------------------------- connections


@siege("slow, half and silent clients", "server.request_timeout_s=60")
def connections(_: Target) -> Iterator[list[Blow]]:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    long = {"model": "default", "prompt": "a", "max_tokens": 400, "n": 8, "stream": True}
    body = json.dumps(long | {"ignore_eos": True, "logprobs": 5}).encode()
    held: list[socket.socket] = []

    def opens(sent: bytes, count: int = 20) -> Blow:
        def blow(server: Server, chance: random.Random) -> None:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    held.append(server.connect(sent))
            while len(held) > 1500:
                held.pop(chance.randrange(len(held))).close()

        return blow

    def trickles(server: Server, chance: random.Random) -> None:
        with server.connect() as client:
            for byte in (head + b"Content-Length: 100\r\n\r\n{")[:40]:
                client.sendall(bytes([byte]))
                time.sleep(0.05)

    yield [
        opens(b""),
        opens(b"POST /v1/comp"),
        opens(head),
        opens(head + b"Content-Length: 33000000\r\n\r\n" + b" " * 10_000),
        opens(head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\n"),
        opens(head + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 3),
        opens(head + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n{}", 3),
        opens(b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n", 3),
        opens(b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 50_000, 3),
        opens(head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body), 2),  # nobody reads it
        opens(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500, 2),  # pipelined
        trickles,
    ]
    for client in held:
        client.close()


# ---------------------------------------------------------------------- files


def _header(length: int, content: bytes) -> bytes:
    return length.to_bytes(8, "little") + content


SAFETENSORS = {
    "huge header": _header(2**63, b"{}"),
    "long header": _header(100 << 20, b"{" + b" " * 1000),
    "deep header": _header(400_000, b"[" * 400_000),
    "negative offsets": _header(
        64, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}'.ljust(64)
    ),
    "overlap": _header(
        128,
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],'
        b'"data_offsets":[0,4]}}'.ljust(128),
    )
    + bytes(4),
    "huge shape": _header(
        96, b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}'.ljust(96)
    )
    + bytes(4),
    "unknown type": _header(64, b'{"a":{"dtype":"X9","shape":[1],"data_offsets":[0,1]}}'.ljust(64)),
    "empty": b"",
}


def write_adapters(roots: Path) -> list[Path]:
    """Directories that are not adapters, each in its way."""
    made = []
    for name, data in SAFETENSORS.items():
        folder = roots / name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(data)
        (folder / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
        made.append(folder)
    configs = {
        "deep": "[" * 100_000,
        "rank": '{"r": 1e300, "lora_alpha": 1}',
        "pattern": json.dumps({"r": 2, "lora_alpha": 1, "alpha_pattern": {"(a+)+$": 1}}),
        "ranks": json.dumps({"r": 2, "lora_alpha": 1, "rank_pattern": {"((a*)*)*!": 10**9}}),
        "modules": json.dumps({"r": 2, "lora_alpha": 1, "target_modules": "((.*)*)*!"}),
    }
    for name, text in configs.items():
        folder = roots / f"config_{name}"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(SAFETENSORS["overlap"])
        (folder / "adapter_config.json").write_text(text)
        made.append(folder)
    pickled = roots / "pickled"
    pickled.mkdir(exist_ok=True)
    (pickled / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    (pickled / "adapter_config.json").write_text("{}")
    sparse = roots / "sparse"
    sparse.mkdir(exist_ok=True)
    with (sparse / "adapter_model.safetensors").open("wb") as file:
        file.truncate(40 << 30)
    (sparse / "adapter_config.json").write_text("{}")
    for name, leads in {"out": "/etc", "loop": "loop", "zero": "/dev/zero"}.items():
        folder = roots / f"link_{name}"
        folder.mkdir(exist_ok=True)
        for file in ("adapter_model.safetensors", "adapter_config.json"):
            (folder / file).unlink(missing_ok=True)
            (folder / file).symlink_to(leads)
        made.append(folder)
    queue = roots / "queue"
    queue.mkdir(exist_ok=True)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        if not (queue / file).exists():
            os.mkfifo(queue / file)
    return [*made, pickled, sparse, queue]


@siege("adapters of every broken form")
def adapters(_: Target) -> Iterator[list[Blow]]:
    def blow(server: Server, chance: random.Random) -> int:
        if not made:
            made.extend(map(str, write_adapters(server.roots)))
        path = chance.choice([*made, "/etc", "../..", "\x00", "a" * 100_000, "~root", "//x"])
        body = {"lora_name": f"a{chance.randrange(5)}", "lora_path": path, "load_inplace": True}
        return server.post("/v1/load_lora_adapter", body).status_code

    made: list[str] = []
    yield [blow]


# ---------------------------------------------------------------------- other commands


@siege(
    "Tinker's bodies",
    "tinker.directory='DIR/tinker'",
    command=(*SERVE, "--tinker"),
)
def tinker(_: Target) -> Iterator[list[Blow]]:
    api = "/api/v1"
    odd: list[Any] = [None, [], {}, "x" * 100_000, -1, 2**70, [[]] * 1000, {"a": {"b": []}}]
    names = ("create_session", "create_model", "asample", "retrieve_future", "save_weights")
    names += ("optim_step", "forward", "create_sampling_session", "load_weights", "weights_info")
    fields = ("session_id", "model_id", "prompt", "path", "seq_id", "base_model", "lora_config")

    def blow(server: Server, chance: random.Random) -> int:
        body = {name: chance.choice(odd) for name in chance.sample(fields, 3)}
        return server.post(f"{api}/{chance.choice(names)}", body).status_code

    packed_bomb = zstandard.compress(bytes(900 * MB))
    binary = {"Content-Type": "application/x-protobuf", "Content-Encoding": "zstd"}
    yield [
        blow,
        sends(f"{api}/forward_backward", packed_bomb, **binary),
        sends(f"{api}/forward_backward", b"\x1a\x00" * 2_000_000, **{"Content-Type": "x"}),
        sends(f"{api}/forward_backward", os.urandom(100_000), **binary),
    ]


LETTERS = Path(__file__).parents[2] / "examples" / "verifiers" / "letters.toml"


@siege(
    "what a program of verifiers sends",
    "rl_training.atropos.api_url='embedded'",
    "rl_training.checkpoint_dir='DIR/verifiers'",
    "rl_training.total_steps=100000",
    command=("mlx_parallm", "train", "--config", str(LETTERS), "--set", f"server.port={PORT}"),
)
def verifiers(_: Target) -> Iterator[list[Blow]]:
    """Its calls for token ids and its scored groups, beside a training that learns from good ones."""
    generate, queue = "/inference/v1/generate", "/atropos/scored_data"
    odd: list[Any] = [None, [], {}, -1, 2**70, 1e308, "x" * 100_000, [[]] * 1000, True, [2**40]]
    sampling = {"max_tokens": 8, "logprobs": 1, "temperature": 1.0}
    good_call = {"model": "default", "token_ids": [5, 6, 7], "sampling_params": sampling}

    def calls(server: Server, chance: random.Random) -> int:
        body = json.loads(json.dumps(good_call))
        place = chance.choice([body, body["sampling_params"]])
        place[chance.choice([*place, "features", "seed", "n", "stop_token_ids"])] = chance.choice(
            odd
        )
        return server.post(generate, body).status_code

    def groups(server: Server, chance: random.Random) -> int:
        [group] = sampled_groups(server.url, 1, chance)
        group["scores"] = [chance.random() for _ in group["tokens"]]
        for name in chance.sample([*group], chance.randrange(3)):
            group[name] = chance.choice(odd)
        return server.post(queue, group).status_code

    def hangs_up(server: Server, chance: random.Random) -> None:
        body = json.dumps(good_call | {"stream": chance.random() < 0.5}).encode()
        head = f"POST {generate} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with server.connect(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body):
            pass

    yield [
        calls,
        groups,
        hangs_up,
        sends(generate, b'{"token_ids":[%s5]}' % (b"5," * 2_000_000)),
        sends(generate, gzip.compress(_zeros(900 * MB), 1), **{"Content-Encoding": "gzip"}),
        sends(queue, b'{"tokens":%s%s}' % (b"[" * 100_000, b"]" * 100_000)),
        sends(queue, gzip.compress(_zeros(900 * MB), 1), **{"Content-Encoding": "gzip"}),
    ]


QUICK = {
    "model.base_path": "builtin:tiny",
    "server.port": PORT,
    "rl_training.run_name": "run",
    "rl_training.checkpoint_dir": "DIR/runs",
    "rl_training.total_steps": "100000",
    "rl_training.batch_size": "16",
    "rl_training.atropos.rollout_batch_size": "16",
    "rl_training.atropos.max_token_length": "64",
}


def training(directory: Path, name: str, text: str) -> tuple[str, ...]:
    """The command of a training with this configuration beside the usual one."""
    file = directory / f"{name}.toml"
    file.write_text(text)
    fixed = {key: value.replace("DIR", str(directory / name)) for key, value in QUICK.items()}
    sets = [word for key, value in fixed.items() for word in ("--set", f"{key}={value}")]
    return ("mlx_parallm", "train", "--config", str(file), *sets)


FOREIGN: Mapping[str, str] = {
    "MCP": """
[[environments]]
kind = "tasks"
name = "reverse"
group_size = 8
max_tokens = 8
[[tools.mcp]]
url = "URL/mcp"
start_timeout_s = 5
timeout_s = 2
""",
    "OpenEnv": """
[[environments]]
kind = "openenv"
group_size = 8
max_tokens = 8
timeout_s = 5
options = { url = "URL" }
""",
    "Atropos": """
[rl_training.atropos]
api_url = "URL"
""",
}


def _enter_foreign(kind: str, way: str) -> None:
    @attack(f"a training whose {kind} server answers /{way}", got_through=way == "bomb")
    def foreign(target: Target) -> str:
        """It says what is wrong and ends, or continues and ends by SIGTERM."""
        with hostile_server() as host:
            name = f"{kind}_{way}"
            text = FOREIGN[kind].replace("URL", f"{host.url}/{way}")
            command = [*training(target.directory, name, text)]
            command[0] = str(Path(sys.executable).parent / command[0])
            words = [word.replace(f"={PORT}", "=0") for word in command]
            output = target.directory / f"{name}.txt"
            with output.open("wb") as file:
                process = subprocess.Popen(words, stdout=file, stderr=file)
            try:
                most = watched(process, host.asked.is_set, LASTS_AT_MOST_S)
                most = max(most, watched(process, lambda: False, LASTS_S))
                code = process.poll()
                seconds = 0.0
                if code is None:
                    began = time.monotonic()
                    process.terminate()
                    code = process.wait(bound(6 * ENDS_S))
                    seconds = time.monotonic() - began
            finally:
                process.kill()
                process.wait()
        text = output.read_text(errors="replace")
        assert code in (0, 2) and "Traceback" not in text, f"exit code {code}: {text[-600:]}"
        assert seconds <= bound(ENDS_S), f"ended {seconds:.1f} s after SIGTERM"
        assert most < MOST_GROWN_MB, f"{most} MB"
        ended = f"ended {seconds:.1f} s after SIGTERM" if seconds else "ended by itself"
        return f"exit code {code}, {ended}, {most} MB: {text.strip().splitlines()[-1][-140:]}"


def watched(process: "subprocess.Popen[bytes]", enough: Callable[[], bool], seconds: float) -> int:
    """Wait until it is enough, or the process has ended; return the most memory seen, in MB."""
    began, most = time.monotonic(), 0
    while process.poll() is None and not enough() and time.monotonic() - began < bound(seconds):
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            most = max(most, pages * 4096 // MB)
        time.sleep(0.05)
    return most


for _kind in FOREIGN:
    for _way in ("bomb", "endless", "slow", "redirect", "headers", "deep"):
        _enter_foreign(_kind, _way)
