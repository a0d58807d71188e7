"""`mlx_parallm_dashboard RUN_DIR…`: the page for runs on the disk, in its own server on
this machine only."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_parallm.config.arguments import Arguments, RunDirectory, place
from mlx_parallm.errors import ConfigError

if TYPE_CHECKING:
    from fastapi import FastAPI

HOST, PORT = "127.0.0.1", 8010
MOST_RUNS = 26
DRAIN_S = 1.0


class Dashboard(Arguments):
    """`mlx_parallm dashboard`: runs on the disk in a browser."""

    runs: list[RunDirectory] = place()
    """checkpoints/<run>; several: compare them"""
    port: int = PORT
    """0 takes a free one"""

    def run(self) -> int:
        from mlx_parallm.server.thread import serve_until_signal

        app: FastAPI | None = None

        def make() -> "FastAPI":
            nonlocal app
            app = make_app(self.runs)
            return app

        def draining() -> None:  # streams of events end by themselves
            assert app is not None, "it was made before it is served"
            app.state.context.deps.state.drain(0.0)

        serve_until_signal(make, HOST, self.port, _announce, drain_s=DRAIN_S, draining=draining)
        return 0


def _announce(url: str) -> None:
    sys.stdout.write(f"{url}/dashboard\n")
    sys.stdout.flush()


def make_app(paths: list[Path]) -> "FastAPI":
    """Return the page's routes alone, without a model. Raises ConfigError: no run directory, one
    that is named twice, too many."""
    from fastapi import FastAPI
    from starlette.responses import RedirectResponse

    from mlx_parallm.config.server import ServerConfig
    from mlx_parallm.runs.dashboard.routes import PAGE, added_router
    from mlx_parallm.runs.dashboard.run_view import RunView
    from mlx_parallm.runs.run import open_run
    from mlx_parallm.server.auth import AuthMiddleware, PublicPaths
    from mlx_parallm.server.context import ServerContext, ServerDeps, ServerState
    from mlx_parallm.server.errors import install_error_handlers
    from mlx_parallm.system.redaction import Redactor, environment_secrets

    if len(paths) > MOST_RUNS:
        raise ConfigError(f"{len(paths)} runs: at most {MOST_RUNS} at once")
    runs = [open_run(path) for path in paths]
    for number, run in enumerate(runs):
        if any(earlier.path == run.path for earlier in runs[:number]):
            raise ConfigError(f"{run.path} is named twice")
    redactor = Redactor(environment_secrets())
    added = added_router([RunView(run, redactor) for run in runs], live=False)
    app = FastAPI(title="mlx_parallm dashboard", openapi_url=None)
    app.state.context = ServerContext(ServerDeps(ServerState(), ServerConfig()))
    app.include_router(added.router)
    app.add_api_route("/", lambda: RedirectResponse(PAGE), response_class=RedirectResponse)
    install_error_handlers(app)
    app.add_middleware(
        AuthMiddleware, api_key=None, origins=(), basic_prefixes=(), public=PublicPaths()
    )
    return app
