"""The parts of a prompt policy, put together: for its own service (`PromptPolicyServer`),
and for a daemon."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mlx_parallm.config.server import ServerConfig
from mlx_parallm.engine.served_models import DEFAULT
from mlx_parallm.errors import ConfigError, RefusedError
from mlx_parallm.execution.openai_client import OpenAIEndpoint
from mlx_parallm.server.api import status
from mlx_parallm.server.app import AddedRouter, create_app
from mlx_parallm.server.auth import check_bind, check_origins
from mlx_parallm.server.connection_limits import connection_limit
from mlx_parallm.server.context import ServerDeps, ServerState
from mlx_parallm.server.errors import ERROR_CONTENT, HEALTH
from mlx_parallm.server.generation import UNNAMED, new_id
from mlx_parallm.server.thread import ServerThread, bind_socket
from mlx_parallm.system.files import raise_file_limit
from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig
from mlx_parallm.systems.prompt_policy.embeddings import (
    Embedder,
    EndpointEmbedder,
    HashedEmbedder,
    checked,
)
from mlx_parallm.systems.prompt_policy.mutations import CHAT_REWRITE, RULES, ChatMutation
from mlx_parallm.systems.prompt_policy.protocol import HealthAnswer
from mlx_parallm.systems.prompt_policy.rewriting import PolicyDeps
from mlx_parallm.systems.prompt_policy.routes import policy_router
from mlx_parallm.systems.prompt_policy.service import PolicyService
from mlx_parallm.systems.prompt_policy.task_reward import EndpointAnswers, ServedAnswers, TaskReward
from mlx_parallm.types import Pooling, Request, SamplingParams

LOOPBACK_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
"""Web pages of this machine may use the service: without a key they are let in anyway."""
LAST_WORDS_S = 0.1
MOUNT = "/prompt_policy"


class ServedEmbedder:
    """Hidden states of the model that this server serves, as /v1/embeddings gives them."""

    def __init__(self, state: ServerState, pooling: Pooling, dimensions: int) -> None:
        self.dimensions, self._state, self._pooling = dimensions, state, pooling

    async def __call__(self, texts: Sequence[str]) -> np.ndarray:
        parts, params = self._state.parts, SamplingParams(max_tokens=0, pooling=self._pooling)
        adapter = parts.engine.resolve_model(DEFAULT).adapter
        requests = [
            Request(new_id(UNNAMED), tuple(parts.tokenizer.encode(text)), params, adapter)
            for text in texts
        ]
        outputs = await parts.engine.generate_many(requests)
        rows = np.array([output.embedding or () for output in outputs], np.float32)
        return checked(rows, len(texts), self.dimensions, "the served model")


def make_deps(config: PromptPolicyConfig, served: ServedEmbedder | None = None) -> PolicyDeps:
    """Start the policy and its helpers. `served`: if this server serves a model.

    Raises ConfigError, CheckpointError, StoreError, EndpointError.
    """
    key = _key(config.api_key_file)

    def endpoint(url: str) -> OpenAIEndpoint:
        return OpenAIEndpoint(url, key, timeout_s=config.timeout_s)

    embedder: Embedder = HashedEmbedder(config.ppo.input_dim)
    if config.embedding_model is not None:
        embedder = EndpointEmbedder(
            endpoint(config.embedding), config.embedding_model, config.ppo.input_dim
        )
    elif config.embedding == "served" and served is not None:
        embedder = served
    chat = task = None
    if config.rewards and config.task_url is not None:
        task = TaskReward(EndpointAnswers(endpoint(config.task_url), config), config.rewards)
    elif config.rewards and served is not None:
        task = TaskReward(ServedAnswers(config), config.rewards)
    if config.chat_url is not None and config.chat_model is not None:
        chat = ChatMutation(endpoint(config.chat_url), config.chat_model)
    mutations = (*RULES, CHAT_REWRITE) if chat is not None else tuple(RULES)
    return PolicyDeps(config, PolicyService(config, mutations), embedder, chat, task)


def mounted(config: PromptPolicyConfig, deps: ServerDeps) -> AddedRouter | None:
    """The routes below /prompt_policy of a server that serves a model; None: not wanted. Raises
    as `make_deps`."""
    if not config.mount:
        return None
    served = ServedEmbedder(deps.state, deps.config.embedding_pooling, config.ppo.input_dim)
    policy = make_deps(config, served)
    watch(deps.state.metrics.registry, policy.service)
    return AddedRouter(policy_router(policy, MOUNT), close=policy.service.close)


class PromptPolicyServer:
    """A separate service, in two threads of this process, from `start` to `close`.

    Raises ConfigError: the port, the key, the origins; CheckpointError, StoreError: the checkpoint
    directory.
    """

    def __init__(self, config: PromptPolicyConfig, server: ServerConfig, key: str | None) -> None:
        if config.embedding == "served":
            raise ConfigError(
                'prompt_policy.embedding = "served" needs a served model: take it within'
                " `mlx_parallm serve`, or set"
                " the URL of a server"
            )
        check_bind(server.host, key)
        check_origins(server.cors_origins, key)
        self._drain_s = server.drain_timeout_s
        self._listener = bind_socket(server.host, server.port)
        host = f"[{server.host}]" if ":" in server.host else server.host
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._state = ServerState(needs_model=False)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._listener.close)
            self.deps = make_deps(config)
            on_error.pop_all()
        watch(self._state.metrics.registry, self.deps.service)
        self.app = create_app(
            ServerDeps(self._state, server, api_key=key),
            [AddedRouter(policy_router(self.deps))],
            base=(_own_routes(self._state),),
            title="mlx_parallm prompt policy",
            origin_regex=LOOPBACK_PAGES,
        )
        connections = connection_limit(server.max_concurrent_requests, raise_file_limit())
        self._http = ServerThread(self.app, self._listener, connections)

    def start(self) -> None:
        """Answer requests from now on."""
        self._http.start()

    def close(self) -> None:
        """Let running requests end, then write a checkpoint. Raises CheckpointError."""
        deadline = time.monotonic() + self._drain_s
        self._state.drain(self._drain_s)
        try:
            self._http.stop(max(deadline - time.monotonic(), LAST_WORDS_S))
        finally:
            self.deps.service.close()


def _own_routes(state: ServerState) -> APIRouter:
    router = APIRouter(tags=["status"])

    @router.get(
        HEALTH,
        responses={503: {"description": "The service is shutting down", "content": ERROR_CONTENT}},
    )
    async def policy_health() -> HealthAnswer:
        """Whether the service answers."""
        if state.unavailable is not None:
            raise RefusedError(state.unavailable[1], 503)
        return HealthAnswer()

    router.get("/metrics", response_class=Response)(status.metrics)
    return router


def watch(registry: CollectorRegistry, service: PolicyService) -> None:
    """Show the policy in /metrics."""
    registry.register(_PolicyCollector(service))


class _PolicyCollector(Collector):
    def __init__(self, service: PolicyService) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> list[Metric]:
        history, prefix = self._service.history(), "mlx_parallm_prompt_policy"
        mutations = CounterMetricFamily(
            f"{prefix}_experiences", "Experiences, by mutation", labels=["mutation"]
        )
        for number, name in enumerate(self._service.mutations):
            mutations.add_metric([name], sum(history.actions[number : number + 1]))
        mean = sum(history.rewards) / len(history.rewards) if history.rewards else 0.0
        return [
            mutations,
            CounterMetricFamily(
                f"{prefix}_updates", "Updates of the policy", value=history.updates
            ),
            CounterMetricFamily(
                f"{prefix}_episodes", "Episodes that ended", value=history.episodes
            ),
            GaugeMetricFamily(
                f"{prefix}_buffer",
                "Experiences that wait for an update",
                value=self._service.buffer_size,
            ),
            GaugeMetricFamily(
                f"{prefix}_reward", "Mean reward of the last 100 experiences", value=mean
            ),
        ]


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.expanduser().read_text().strip() or None
    except OSError as error:
        raise ConfigError(f"prompt_policy.api_key_file: {error}") from error
