"""Sequences of calls to an Atropos API, made up from a seed: a trainer and environments that do everything they can."""

import gzip
import json
import random
from typing import Any

from tests.integration.atropos_comparison import DRAIN, Call

JSON = {"Content-Type": "application/json"}
GZIP = JSON | {"Content-Encoding": "gzip"}
TRAINER = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 5,
    "starting_step": 0,
    "num_steps": 100,
}
NAN, INFINITY = float("nan"), float("inf")


class Calls:
    """Call after call into `made`. A sequence is mostly good manners, with at most a few surprises."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made: list[Call] = []
        self._environments = 0
        self._sizes: list[int] = []
        self._count = 0

    def get(self, path: str, body: Any = None) -> None:
        self.made.append(Call("GET", path, body, JSON if body is not None else {}))

    def post(self, path: str, body: Any, headers: dict[str, str] = JSON) -> None:
        if headers is GZIP and not isinstance(body, bytes):
            body = gzip.compress(json.dumps(body).encode(), mtime=0)
        self.made.append(Call("POST", path, body, headers))

    def drain(self) -> None:
        self.made.append(Call(DRAIN, "/batch"))

    def group(self, size: int, env_id: Any = None, **changes: Any) -> dict[str, Any]:
        """As BaseEnv sends it; now and then with one of the fields that few environments fill."""
        self._count += 1
        lengths = [self.random.randint(3, 5) for _ in range(size)]
        tokens = [[self._count % 50, *(self.random.randint(0, 500) for _ in range(length - 1))] for length in lengths]
        group: dict[str, Any] = {
            "tokens": tokens,
            "masks": [[-100, -100, *row[2:]] for row in tokens],
            "scores": [self.random.choice([0, 1, 0.5, -1.25]) for _ in lengths],
            "advantages": None,
            "ref_logprobs": None,
            "messages": None,
            "generation_params": None,
            "inference_logprobs": [[1.0, 1.0] + [-self.random.randrange(400) / 100 for _ in row[2:]] for row in tokens],
            "overrides": None,
            "group_overrides": None,
            "images": None,
        }
        if env_id is not None:
            group["env_id"] = env_id
        rare = {
            "messages": [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": None}]] * size,
            "ref_logprobs": [[-0.5] * length for length in lengths],
            "advantages": [[0.25] * length for length in lengths],
            "generation_params": {"temperature": 0.7, "stop": ["\n"]},
            "overrides": [{"temperature": 0.5}] * size,
            "group_overrides": {"group_size": size},
            "distill_logprobs": [[[-0.5, -1.5]] * length for length in lengths],
            "inference_logprobs": None,
            "images": {"any": ["thing"]},
            "something": "unknown",
        }
        if self.random.random() < 0.3:
            name = self.random.choice(list(rare))
            group[name] = rare[name]
        return group | changes

    def register_environment(self, **changes: Any) -> None:
        size = changes.get("group_size", self.random.choice([2, 2, 4]))
        body = {
            "max_token_length": self.random.choice([32, 64]),
            "desired_name": self.random.choice(["sums", "words", "songs"]),
            "weight": self.random.choice([1.0, 1.0, 0.25, 3]),
            "group_size": size,
            "min_batch_allocation": None,
        }
        self.post("/register-env", body | changes)
        self._environments += 1
        self._sizes.append(size)

    def sender(self) -> tuple[Any, int]:
        if not self._environments or self.random.random() < 0.1:
            return None, 2
        env_id = self.random.randrange(self._environments)
        return env_id, self._sizes[env_id]

    def send(self) -> None:
        env_id, size = self.sender()
        if self.random.random() < 0.2:
            self.post("/scored_data_list", [self.group(size, env_id) for _ in range(self.random.randint(0, 3))])
        else:
            self.post("/scored_data", self.group(size, env_id), self.random.choice([JSON, GZIP]))

    def look(self) -> None:
        kind = self.random.randrange(6)
        if kind < 3 and self._environments:
            self.get("/status-env", {"env_id": self.random.randrange(self._environments)})
        else:
            self.get(("/status", "/info", "/wandb_info", "/latest_example", "/status", "/")[kind])


def bad_body(calls: Calls) -> None:
    """What both must refuse alike, or run-api fails at."""
    good = calls.group(2)
    group = calls.random.choice(
        [
            {key: value for key, value in good.items() if key != "tokens"},
            {},
            good | {"scores": None},
            good | {"scores": ["high", 1.0]},
            good | {"masks": [1, 2]},
            good | {"tokens": "text"},
            good | {"tokens": [[1.5], [2]]},
            good | {"ref_logprobs": [1]},
            good | {"advantages": [1]},
            good | {"overrides": [None, {}]},
            good | {"messages": [[{"role": "user"}], []]},
            good | {"messages": "text"},
            good | {"messages": 5},
            good | {"messages": [[1]]},
            good | {"env_id": "first"},
            good | {"group_overrides": []},
            good | {"scores": NAN},
            "text",
            7,
            [],
            None,
        ]
    )
    path = calls.random.choice(["/scored_data", "/scored_data", "/scored_data_list"])
    calls.post(path, json.dumps(group).encode())


def bad_bytes(calls: Calls) -> None:
    whole = gzip.compress(json.dumps(calls.group(2)).encode(), mtime=0)
    body, headers = calls.random.choice(
        [
            (b"{", JSON),
            (b"", JSON),
            (b"\xff{}", JSON),
            (b"{}", {}),
            (b"{}", {"Content-Type": "text/plain"}),
            (b"not gzip", GZIP),
            (whole[:-12], GZIP),
            (whole[:30] + b"\0" * 8 + whole[38:], GZIP),
            (whole + b"garbage", GZIP),
            (gzip.compress(b"not JSON", mtime=0), GZIP),
        ]
    )
    calls.post(calls.random.choice(["/scored_data", "/register-env", "/register", "/disconnect-env"]), body, headers)


def bad_registration(calls: Calls) -> None:
    path, body = calls.random.choice(
        [
            ("/register", TRAINER | {"wandb_group": None}),
            ("/register", {"batch_size": 8}),
            ("/register", TRAINER | {"batch_size": "many"}),
            ("/register-env", {"desired_name": None, "max_token_length": 1, "weight": 1, "group_size": 1}),
            ("/register-env", {"desired_name": "a"}),
            ("/disconnect-env", {}),
            ("/disconnect-env", {"env_id": "0"}),
            ("/disconnect-env", {"env_id": 99}),
        ]
    )
    calls.post(path, body)
    if body == {"env_id": "0"}:
        calls.get("/status-env", {"env_id": "0"})


def surprise(calls: Calls) -> None:
    """What ours answers differently, and on purpose."""
    env_id, size = calls.sender()
    good = calls.group(size, env_id)
    kind = calls.random.randrange(12)
    if kind < 5:
        changes = (
            {"masks": good["masks"][:-1]},
            {"scores": [NAN] * size},
            {"inference_logprobs": [row[:-1] for row in good["tokens"]]},
            {"scores": [INFINITY] * size},
            {"generation_params": {"temperature": NAN}},
        )[kind]
        calls.post("/scored_data", json.dumps(good | changes).encode())
    elif kind == 5:
        calls.post("/scored_data", calls.group(9))
    elif kind == 6:
        calls.post("/scored_data", calls.group(size + 1, env_id))
    elif kind == 7:
        calls.post("/scored_data_list", [good, good | {"tokens": None}, good])
    elif kind == 8:
        path = calls.random.choice(["/disconnect-env", "/scored_data"])
        calls.post(path, {"env_id": -1} if path == "/disconnect-env" else good | {"env_id": -1})
    elif kind == 9:
        calls.get("/status-env", {"env_id": calls.random.choice([-1, 50])})
    elif kind == 10 and env_id is not None:
        calls.post("/disconnect-env", {"env_id": env_id})
        calls.get("/status-env", {"env_id": env_id})
        for name in ("sums", "words", "songs"):
            calls.register_environment(desired_name=name)
    else:
        calls.post("/scored_data", calls.group(1, tokens=[], masks=[], scores=[], inference_logprobs=[]))


def generated(seed: int) -> list[Call]:
    """A run of up to fifty calls: a start of some kind, a middle of everything, and a batch at the end."""
    calls = Calls(seed)
    draw = calls.random.random
    for _ in range(calls.random.randrange(3)):
        calls.random.choice([calls.look, calls.register_environment, calls.drain, lambda: calls.get("/reset_data")])()
    calls._environments, calls._sizes = 0, []  # who asks before the trainer is there is told to wait
    if draw() < 0.05:
        calls.send()
    calls.post("/register", TRAINER | {"batch_size": calls.random.choice([4, 8, 8, 16]), "starting_step": seed % 3})
    if draw() < 0.2:
        calls.register_environment()
        calls._environments, calls._sizes = 0, []
    calls.get("/batch")
    mixed = draw() < 0.2
    size = calls.random.choice([2, 2, 4, 4, 3])
    for _ in range(calls.random.randint(1, 3)):
        options = {} if mixed else {"group_size": size}
        if draw() < 0.05:
            options["min_batch_allocation"] = calls.random.choice([0.25, 0.5])
        calls.register_environment(**options)
    ways = [calls.send] * 10 + [calls.look] * 8 + [calls.drain] * 2
    ways += [lambda: bad_body(calls), lambda: bad_bytes(calls), lambda: bad_registration(calls)]
    ways += [lambda: calls.get("/batch"), lambda: calls.post("/register", TRAINER | {"batch_size": 32})]
    for _ in range(calls.random.randint(15, 40)):
        calls.random.choice(ways)()
        if draw() < 0.02:
            surprise(calls)
    if draw() < 0.2:
        calls.get("/reset_data")
        calls.look()
        calls.post("/register", TRAINER)
        calls.get("/info")
        calls.get("/batch")
    elif draw() < 0.2:
        surprise(calls)
    calls.drain()
    calls.get("/status")
    return calls.made
