"""Prints what atroposlib's own ManagedServer makes of several turns: the contents of
tests/data/managed_server.json.

    mlx_parallm_serve --model-path builtin:tiny --port 8000
    build/atropos/bin/python tests/atropos/record_managed_server.py http://127.0.0.1:8000/v1

Needs `scripts/setup_atropos`. Again when the tiny model's weights change: the log-probabilities are
of this model.
"""

import asyncio
import json
import sys
from pathlib import Path

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.vllm_server import VLLMServer

TINY = str(Path(__file__).parents[2] / "mlx_parallm" / "models" / "tiny")
SAMPLING = {"max_tokens": 12, "temperature": 1.0, "seed": 3}


async def chat(server: VLLMServer) -> dict[str, object]:
    """Two turns, in a conversation that continues."""
    managed = ManagedServer(server)
    messages = [{"role": "user", "content": "Sort: cab"}]
    answer = await managed.chat_completion(messages=messages, **SAMPLING)
    messages += [{"role": "assistant", "content": answer.choices[0].message.content}]
    messages += [{"role": "user", "content": "Sort: dbe"}]
    await managed.chat_completion(messages=messages, **SAMPLING)
    return only_node(managed)


async def completion(server: VLLMServer) -> dict[str, object]:
    """A text that is continued, and its continuation."""
    managed = ManagedServer(server)
    first = await managed.completion(prompt="Sort: cab\n", **SAMPLING)
    await managed.completion(prompt=f"Sort: cab\n{first.choices[0].text}\nSort: dbe\n", **SAMPLING)
    return only_node(managed)


def only_node(managed: ManagedServer) -> dict[str, object]:
    [node] = managed.get_state()["nodes"]
    return {"tokens": node.tokens, "masks": node.masked_tokens, "inference_logprobs": node.logprobs}


async def main() -> None:
    config = APIServerConfig(
        base_url=sys.argv[1],
        api_key="unused",
        model_name="default",
        server_type="vllm",
        tokenizer_name=TINY,
    )
    server = VLLMServer(config)
    print(json.dumps({"chat": await chat(server), "completion": await completion(server)}))


asyncio.run(main())
