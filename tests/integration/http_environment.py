"""An environment in a thread of the test, over HTTP, as one that is derived from atroposlib's
BaseEnv speaks."""

import gzip
import json
import random
import threading
from importlib.util import find_spec
from typing import Any, ClassVar

import httpx
import pytest

from mlx_parallm.environments.kinds.tasks import make_problem, score

GROUP_SIZE = 8
ROWS = [str(number) for number in range(400)]
HAS_ATROPOS = find_spec("mlx_parallm.faces.atropos") is not None
needs_atropos = pytest.mark.skipif(
    not HAS_ATROPOS, reason="groups come to /atropos, and that leaf is not here"
)


class HttpEnvironment(threading.Thread):
    """What an environment derived from atroposlib's BaseEnv does on the wire, with server_type
    vllm."""

    extra: ClassVar[dict[str, Any]] = {}
    """Further fields of its requests to /generate."""

    def __init__(self, url: str, *, key: str | None = None, least: float | None = None) -> None:
        """`least`: the part of every batch that it wants."""
        super().__init__(daemon=True)
        self._least = least
        self._generate = httpx.Client(
            base_url=url, timeout=60, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        queue = url.replace("http://", f"http://env:{key}@") if key else url
        self._queue = httpx.Client(base_url=queue + "/atropos/", timeout=60)
        self.ended = threading.Event()
        self.replies: list[str] = []
        self.failure: str | None = None

    def run(self) -> None:
        try:
            self._register()
            while not self.ended.is_set():
                self._post_group()
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if not self.ended.is_set():
                self.failure = repr(error)

    def _register(self) -> None:
        body = {
            "max_token_length": 256,
            "desired_name": "sorting",
            "weight": 1.0,
            "group_size": GROUP_SIZE,
        }
        body |= {"min_batch_allocation": self._least}
        registered = self._queue.post("register-env", json=body).raise_for_status().json()
        assert registered["status"] == "success", registered
        self.env_id: int = registered["env_id"]

    def leave(self) -> None:
        """Ends after the group at hand, and says so to the queue."""
        self.ended.set()
        self.join()
        self._queue.post("disconnect-env", json={"env_id": self.env_id}).raise_for_status()

    def _post_group(self) -> None:
        asked = {"env_id": self.env_id, "rows": ROWS}
        [row] = self._queue.post("next-rows", json=asked).raise_for_status().json()["rows"]
        problem = make_problem("sort", int(row), seed=1, split="train")
        prompt = self._generate.post(
            "/tokenize", json={"messages": list(problem.messages)}
        ).raise_for_status()
        ids = prompt.json()["tokens"]
        body = {
            "prompt": {"prompt_token_ids": ids},
            "n": GROUP_SIZE,
            "max_tokens": 12,
            "temperature": 1.0,
            "logprobs": 0,
            **self.extra,
        }
        answer = self._generate.post("/generate", json=body).raise_for_status().json()
        data = self._scored(problem, ids, answer) | {"row": row}
        content = gzip.compress(json.dumps(data).encode())
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        reply = self._queue.post("scored_data", content=content, headers=headers).raise_for_status()
        self.replies.append(reply.json()["status"])

    def _scored(self, problem: Any, ids: list[int], answer: dict[str, Any]) -> dict[str, Any]:
        data: dict[str, Any] = {
            "tokens": [],
            "masks": [],
            "scores": [],
            "inference_logprobs": [],
            "env_id": self.env_id,
        }
        for text, positions in zip(answer["text"], answer["logprobs"], strict=True):
            pairs = [next(iter(position[0].items())) for position in positions]
            output = [int(token) for token, _ in pairs]
            data["tokens"].append(ids + output)
            data["masks"].append([-100] * len(ids) + output)
            data["inference_logprobs"].append([1.0] * len(ids) + [logprob for _, logprob in pairs])
            data["scores"].append(score(problem, text) + 0.01 * random.random())
        return data
