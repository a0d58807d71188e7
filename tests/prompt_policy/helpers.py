"""A small policy and its service in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.systems.prompt_policy.app import PromptPolicyServer
from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig
from mlx_parallm.systems.prompt_policy.experience import Experience

SIZE = 16
SMALL = (
    f"prompt_policy.ppo.input_dim={SIZE}",
    "prompt_policy.ppo.hidden_dim=8",
    "prompt_policy.ppo.min_buffer_size=8",
)


def small_config(directory: Path, *overrides: str) -> Config:
    paths = [f'prompt_policy.checkpoint_dir="{directory}"', "server.port=0"]
    return load_config(None, [*paths, *SMALL, *overrides])


def small_server(directory: Path, *overrides: str) -> PromptPolicyServer:
    config = small_config(directory, *overrides)
    section, key = config.section(PromptPolicyConfig), config.resolve_api_key()
    return PromptPolicyServer(section, config.server, key)


@contextmanager
def serving(directory: Path, *overrides: str) -> Iterator[httpx.Client]:
    """A client of a real server, which ends in order."""
    server = small_server(directory, *overrides)
    server.start()
    try:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            yield client
    finally:
        server.close()


def vector(seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(SIZE).astype(np.float32)
    unit: np.ndarray = numbers / np.linalg.norm(numbers)
    return unit


def experience(seed: int = 0, **changes: Any) -> Experience:
    values = {"action": 0, "reward": 0.5, "done": True, "log_prob": -1.609438, "value": 0.0}
    return Experience(
        **{"state": vector(seed), "next_state": vector(seed + 1), **values, **changes}
    )


def experience_body(seed: int = 0, **changes: Any) -> dict[str, Any]:
    body = {
        "state": vector(seed).tolist(),
        "action": 0,
        "reward": 0.5,
        "next_state": vector(seed + 1).tolist(),
    }
    return body | {"done": True, "log_prob": -1.6, "value": 0.0} | changes
