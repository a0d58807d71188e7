"""The OpenAPI documents that clients/typescript is typed from: the training daemon's and the prompt
policy's.

    .venv/bin/python -m scripts.generate_openapi      # then: npm run generate, in clients/typescript

Only the routes that it calls. Chat, Responses, Messages and the like are left out: the packages
`openai` and `@anthropic-ai/sdk` have their types.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from mlx_parallm.config.load import load_config
from mlx_parallm.config.server import ServerConfig
from mlx_parallm.runs.dashboard.routes import dashboard
from mlx_parallm.server.app import create_app
from mlx_parallm.server.context import ServerDeps, ServerState
from mlx_parallm.system.redaction import Redactor
from mlx_parallm.systems.prompt_policy.app import PromptPolicyServer
from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig
from mlx_parallm.systems.traces.recorder import SessionRecorder
from mlx_parallm.systems.traces.routes import session_router

DIRECTORY = Path(__file__).resolve().parents[1] / "clients" / "typescript" / "openapi"
SERVER_PATHS = (
    *("/health", "/v1/models", "/version", "/server_info", "/weight_info"),
    *("/v1/rewards", "/sessions/{name}/feedback", "/v1/training/rollback"),
    *("/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache"),
    *(
        f"/dashboard/api/{name}"
        for name in ("runs", "metrics", "health", "evaluations", "events", "control")
    ),
    *(f"/dashboard/api/{name}" for name in ("groups", "group", "tokens")),
)
POLICY_PATHS = (
    *(
        "/health",
        "/stats",
        "/select_action",
        "/get_distribution",
        "/store_experience",
        "/update",
        "/save",
        "/load",
    ),
    *("/mutate", "/feedback", "/embed", "/rollout"),
)


def server_document() -> dict[str, Any]:
    """Return the document of `mlx_parallm train` with `traces.directory`, with SERVER_PATHS
    only."""
    with tempfile.TemporaryDirectory() as directory:
        recorder = SessionRecorder(Path(directory), Redactor())
        routers = [session_router(recorder), dashboard(Path(directory), Redactor())]
        return only(
            create_app(ServerDeps(ServerState(), ServerConfig()), routers).openapi(), SERVER_PATHS
        )


def policy_document() -> dict[str, Any]:
    """Return the document of `mlx_parallm prompt-policy --server`, with POLICY_PATHS only."""
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            "server.port=0",
            f'prompt_policy.checkpoint_dir="{directory}"',
            "prompt_policy.ppo.hidden_dim=2",
        ]
        config = load_config(None, settings)
        server = PromptPolicyServer(
            config.section(PromptPolicyConfig), config.server, config.resolve_api_key()
        )
        server.start()
        try:
            return only(server.app.openapi(), POLICY_PATHS)
        finally:
            server.close()


def only(document: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """Return the document with these paths and the schemas that they need. Errors are left out,
    as they all are of the schema `Error`, and so are titles and the version, which a release
    changes without changing a type."""
    kept = {
        path: {method: _kept(operation) for method, operation in document["paths"][path].items()}
        for path in paths
    }
    schemas = document["components"]["schemas"]
    needed, text = {"Error": schemas["Error"]}, json.dumps(kept)
    while missing := [
        name for name in schemas if name not in needed and f'"#/components/schemas/{name}"' in text
    ]:
        needed |= {name: schemas[name] for name in missing}
        text = json.dumps([schemas[name] for name in missing])
    made = {
        "openapi": document["openapi"],
        "info": {"title": document["info"]["title"], "version": "generated"},
    }
    return _without_titles(
        made | {"paths": kept, "components": {"schemas": dict(sorted(needed.items()))}}
    )


def _kept(operation: dict[str, Any]) -> dict[str, Any]:
    errors = [
        status
        for status, answer in operation["responses"].items()
        if "/Error" in json.dumps(answer)
    ]
    return operation | {
        "responses": {
            key: value for key, value in operation["responses"].items() if key not in errors
        }
    }


def _without_titles(value: Any) -> Any:
    """A schema's title is its name in other words."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_titles(item)
        for key, item in value.items()
        if key != "title" or not isinstance(item, str) or "version" in value
    }


DOCUMENTS = {"server.json": server_document, "prompt_policy.json": policy_document}


def text_of(name: str) -> str:
    return json.dumps(DOCUMENTS[name](), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name in DOCUMENTS:
        (DIRECTORY / name).write_text(text_of(name), encoding="utf-8")
