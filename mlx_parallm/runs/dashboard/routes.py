"""The routes below /dashboard, in the daemon and in its own server (command.py). The page's
own files (static/) are public and hold no data; all data needs the server's key. A leaf: `RunView`
reads the data, from the disk alone.

    /dashboard, /dashboard/static/…   the page
    /dashboard/api/events             one stream for each tab: which data has changed; the page then
                                      asks for it
    /dashboard/api/…                  that data, bounded, with cursors

Handlers are plain functions: they read files, and Starlette runs them in its worker threads.
"""

import asyncio
import mimetypes
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from mlx_parallm.errors import RefusedError
from mlx_parallm.rl_training.commands import RunCommands
from mlx_parallm.runs.dashboard.controls import control_router
from mlx_parallm.runs.dashboard.response_shapes import (
    Changes,
    EvaluationList,
    Groups,
    MetricsAnswer,
    RunHealth,
    Runs,
    ShownGroup,
    Tokens,
)
from mlx_parallm.runs.dashboard.run_view import (
    MOST_ANSWERS,
    MOST_TIMELINE_STEPS,
    RunView,
    Search,
    differing_settings,
)
from mlx_parallm.runs.run import Run
from mlx_parallm.server.app import AddedRouter
from mlx_parallm.server.context import Context
from mlx_parallm.server.sse import EVENT_STREAM, EventStream
from mlx_parallm.system.redaction import Redactor

PAGE, STATIC, API = "/dashboard", "/dashboard/static/", "/dashboard/api"
LOOK_S = 0.4
"""Between two looks at the files' times."""
PACE_S = 1.5
"""Between two events of a run that changes all the time: each is a drawing of the page. A step
is on it within 2 s."""
BEAT_S = 8.0
"""An event is sent that often though nothing has changed: the page tells a quiet run from a lost
connection."""
MOST_POINTS = 2000
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none';"
    " base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

RunId = Annotated[int, Query(ge=0, description="its id in the list of runs")]
Views = Callable[[], Mapping[int, RunView]]
"""The runs by their ids, in the order of the list."""


def dashboard(
    runs: Path | Callable[[], Sequence[Path]],
    redactor: Redactor,
    commands: RunCommands | None = None,
) -> AddedRouter:
    """Return the routes for the run that this process trains, or for runs that come and go: a
    `daemon.Page`."""
    if isinstance(runs, Path):
        return added_router([RunView(Run(runs), redactor)], live=True, commands=commands)
    return _added(_ComingRuns(runs, redactor), live=False, commands=None, directory=Path())


def added_router(
    views: Sequence[RunView], *, live: bool, commands: RunCommands | None = None
) -> AddedRouter:
    """Return the routes of these runs. `live`: the first of them is trained by this process, and
    takes `commands`."""
    by_id = dict(enumerate(views))
    return _added(lambda: by_id, live=live, commands=commands, directory=views[0].path)


class _ComingRuns:
    """A run keeps its id while it is in the list."""

    def __init__(self, runs: Callable[[], Sequence[Path]], redactor: Redactor) -> None:
        self._runs, self._redactor = runs, redactor
        self._lock, self._numbers = Lock(), count()
        self._shown: dict[Path, tuple[int, RunView]] = {}

    def __call__(self) -> Mapping[int, RunView]:
        with self._lock:
            runs = self._runs()
            for run in reversed(runs):
                if run not in self._shown:
                    self._shown[run] = next(self._numbers), RunView(Run(run), self._redactor)
            self._shown = {run: self._shown[run] for run in runs}
            return dict(self._shown.values())


def _added(
    views: Views, *, live: bool, commands: RunCommands | None, directory: Path
) -> AddedRouter:
    router = APIRouter(tags=["dashboard"], default_response_class=JSONResponse)
    _page_routes(router, views)
    _run_routes(router, views, live=live)
    _rollout_routes(router, views)
    router.include_router(control_router(commands, directory))
    return AddedRouter(router, public=(PAGE, STATIC), page=PAGE)


def _answer(model: type) -> dict[int | str, dict[str, Any]]:
    """Declare a route's answer. `model`: one of response_shapes.py."""
    return {200: {"model": model}}


def _page_routes(router: APIRouter, views: Views) -> None:
    def read_ahead() -> None:
        for view in (shown := list(views().values())):
            view.read()
        for view in shown[:1]:
            view.read_newest_group()

    @router.get("/dashboard", include_in_schema=False)
    def page() -> Response:
        """The page, and then the numbers that it will ask for, while the browser loads its
        files."""
        answer = _file("index.html")
        answer.background = BackgroundTask(read_ahead)
        return answer

    @router.get("/dashboard/static/{name:path}", include_in_schema=False)
    async def static(name: str) -> Response:  # in memory: no thread for it
        return _file(name)


def _run_routes(router: APIRouter, views: Views, *, live: bool) -> None:
    @router.get("/dashboard/api/runs", responses=_answer(Runs))
    def runs(context: Context) -> Response:
        """The runs that this page shows. `live`: this process trains it, and can be talked to;
        `rewards`: its answers may be rewarded; `feedback`: it learns from chats."""
        kept = context.deps.completions
        here = {"live": live, "rewards": live and kept is not None and kept.enabled}
        elsewhere = {"live": False, "rewards": False}
        shown = [
            view.summary()
            | {"id": number, "feedback": live and number == 0 and view.learns_from_chats}
            | (here if number == 0 else elsewhere)
            for number, view in views().items()
        ]
        return JSONResponse({"runs": shown})

    @router.get("/dashboard/api/metrics", responses=_answer(MetricsAnswer))
    def metrics(
        run: RunId = 0,
        keys: str = "headline",
        after: Annotated[str, Query(max_length=100)] = "",
        max_points: Annotated[int, Query(ge=1, le=MOST_POINTS)] = MOST_POINTS,
    ) -> Response:
        """Columns of metrics.jsonl behind a cursor. Many steps become `max_points` means."""
        wanted = [key for key in keys.split(",") if key][:100]
        return JSONResponse(_view(views, run).metrics(wanted, after, max_points))

    @router.get("/dashboard/api/health", responses=_answer(RunHealth))
    def health(run: RunId = 0) -> Response:
        """The findings of `mlx_parallm explain`."""
        return JSONResponse(_view(views, run).health())

    @router.get("/dashboard/api/evaluations", responses=_answer(EvaluationList))
    def evaluations(run: RunId = 0) -> Response:
        """The numbers of each evaluation on held-out problems, with the ends of their intervals."""
        return JSONResponse({"evaluations": _view(views, run).evaluations.all()})

    @router.get("/dashboard/api/heldout")
    def heldout(run: RunId = 0, before: int = 0, after: int = -1) -> Response:
        """Two evaluations, problem by problem, with a word diff of the answers that were kept."""
        return JSONResponse(_view(views, run).evaluations.heldout(before, after))

    @router.get("/dashboard/api/timeline")
    def timeline(
        steps: Annotated[int, Query(ge=1, le=MOST_TIMELINE_STEPS)],
        last: int | None = None,
        run: RunId = 0,
    ) -> Response:
        """The spans of the run's work, in the newest steps or those up to `last`."""
        return JSONResponse(_view(views, run).timeline(steps, last))

    @router.get("/dashboard/api/compare")
    def compare() -> Response:
        """The settings that differ between the runs, and why a run's are not known."""
        return JSONResponse(differing_settings(list(views().values())))

    look = _Look(views)

    @router.get(
        "/dashboard/api/events", responses={200: {"model": Changes, "content": {EVENT_STREAM: {}}}}
    )
    async def events(request: Request, context: Context, once: bool = False) -> Response:
        """A stream of server-sent events: a word for each kind of data of each run, again
        whenever one changes. With `once`, one such object as JSON."""
        if once:
            return JSONResponse({"runs": await look.now()})
        return await EventStream(_changes(context, look)).prefetch(request.receive)


def _rollout_routes(router: APIRouter, views: Views) -> None:
    @router.get("/dashboard/api/groups", responses=_answer(Groups))
    def groups(
        run: RunId = 0,
        order: Annotated[str, Query(pattern="^(newest|best|worst)$")] = "newest",
        environment: str = "",
        state: Annotated[str, Query(pattern="^(|waiting|taken|dropped|quarantined)$")] = "",
        first_step: int | None = None,
        last_step: int | None = None,
        lowest: float | None = None,
        highest: float | None = None,
        version: int | None = None,
        reason: str = "",
        text: str = "",
        regex: Annotated[str, Query(max_length=1000)] = "",
        older_than: str = "",
        limit: Annotated[int, Query(ge=1, le=MOST_ANSWERS)] = MOST_ANSWERS,
    ) -> Response:
        """Answers by group, and where to continue."""
        search = Search(
            order=order,
            environment=environment,
            state=state,
            first_step=first_step,
            last_step=last_step,
            lowest=lowest,
            highest=highest,
            version=version,
            reason=reason,
            text=text,
            pattern=regex,
            older_than=older_than,
            limit=limit,
        )
        return JSONResponse(_view(views, run).groups(search))

    @router.get("/dashboard/api/group", responses=_answer(ShownGroup))
    def group(id: Annotated[str, Query(min_length=1)], run: RunId = 0) -> Response:
        """One group: every answer with its conversation."""
        return JSONResponse(_view(views, run).group(id))

    @router.get("/dashboard/api/tokens", responses=_answer(Tokens))
    def tokens(
        id: Annotated[str, Query(min_length=1)],
        number: Annotated[int, Query(ge=0)],
        run: RunId = 0,
        segment: Annotated[int, Query(ge=0)] = 0,
        first: Annotated[int, Query(ge=0)] = 0,
    ) -> Response:
        """The tokens of one answer, with what is known of each."""
        return JSONResponse(_view(views, run).tokens(id, number, segment, first))


def _view(views: Views, run: int) -> RunView:
    by_id = views()
    if run not in by_id:
        raise RefusedError(
            f"there is no run {run}; there are {', '.join(map(str, by_id)) or 'none yet'}", 404
        )
    return by_id[run]


class _Look:
    """Looks at the files at most every LOOK_S, once for all streams. The event loop's thread
    only."""

    def __init__(self, views: Views) -> None:
        self._views, self._due = views, 0.0
        self._task: asyncio.Task[list[dict[str, Any]]] | None = None

    async def now(self) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        if self._task is None or loop.time() >= self._due:
            self._task = asyncio.create_task(asyncio.to_thread(self._look))
            # a stream that sleeps for LOOK_S finds a new one
            self._due = loop.time() + LOOK_S * 0.9
        return await asyncio.shield(self._task)

    def _look(self) -> list[dict[str, Any]]:
        return [view.versions() | {"id": number} for number, view in self._views().items()]


async def _changes(context: Context, look: _Look) -> AsyncGenerator[dict[str, Any], None]:
    """Ends when the server drains: an open page must not hold up its end."""
    before: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    sent, again = -BEAT_S, -BEAT_S
    while not context.deps.state.draining:
        if loop.time() >= again:
            now = await look.now()
            if now != before or loop.time() - sent >= BEAT_S:
                again = loop.time() + (PACE_S if before else 0)
                before, sent = now, loop.time()
                yield {"runs": now}
        await asyncio.sleep(LOOK_S)


@cache
def _static() -> Mapping[str, bytes]:
    """The page's files by name, read once."""

    def below(folder: Traversable, prefix: str) -> dict[str, bytes]:
        content: dict[str, bytes] = {}
        for entry in folder.iterdir():
            name = f"{prefix}{entry.name}"
            content |= below(entry, f"{name}/") if entry.is_dir() else {name: entry.read_bytes()}
        return content

    return below(files("mlx_parallm.runs.dashboard") / "static", "")


def _file(name: str) -> Response:
    content = _static().get(name)
    if content is None:
        raise HTTPException(404)
    kind = "text/javascript" if name.endswith((".js", ".mjs")) else mimetypes.guess_type(name)[0]
    return Response(content, media_type=kind or "text/plain", headers=HEADERS)
