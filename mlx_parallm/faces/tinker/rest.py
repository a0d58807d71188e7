"""Runs and checkpoints over REST, as the SDK's RestClient and the `tinker` command ask for them."""

import asyncio
import io
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response, StreamingResponse

from mlx_parallm.errors import RefusedError
from mlx_parallm.faces.tinker import bodies
from mlx_parallm.faces.tinker.checkpoints import (
    CHECKPOINT_FILE,
    SAMPLER,
    TRAINING,
    Checkpoint,
    TinkerPath,
    TinkerRun,
    iso,
    read_path,
    shown_metadata,
)
from mlx_parallm.faces.tinker.service import TinkerService

MOST_LINKS = 4096  # the oldest makes room
LINKS_LIVE_S = 3600.0
DOWNLOADS = "/api/v1/downloads/"
ARCHIVE = "archive.tar"
OWNER = "local"
Service = Callable[[], TinkerService]


def add_rest_routes(router: APIRouter, service: Service) -> None:
    _run_routes(router, service)
    _checkpoint_routes(router, service)
    _download_routes(router, service)


def _run_routes(router: APIRouter, service: Service) -> None:
    @router.get("/training_runs")
    async def runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            all_runs = service().checkpoints.runs()
            shown = [_run_json(service(), run) for run in all_runs[offset : offset + limit]]
            return {"training_runs": shown, "cursor": _cursor(offset, limit, len(all_runs))}

        return await asyncio.to_thread(read)

    @router.get("/training_runs/{run_id}")
    async def run(run_id: str) -> dict[str, Any]:
        return await asyncio.to_thread(lambda: _run_json(service(), _run(service(), run_id)))

    @router.post("/weights_info")
    async def weights_info(body: bodies.PathBody) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            checkpoint = _checkpoint(service(), read_path(body.tinker_path))
            trained_run = _run(service(), checkpoint.path.run)
            lora = dict(trained_run.lora)
            trained = {key: lora[key] for key in ("train_mlp", "train_attn")}
            unembed = lora["train_unembed"] and service().learner.trains_head
            answer = {
                "base_model": trained_run.base_model,
                "is_lora": True,
                "lora_rank": lora["rank"],
            }
            return (
                answer | trained | {"train_unembed": unembed, "optimizer_config": {"type": "adamw"}}
            )

        return await asyncio.to_thread(read)


def _checkpoint_routes(router: APIRouter, service: Service) -> None:
    @router.get("/checkpoints")
    async def checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            runs = service().checkpoints.runs()
            listed = [each for run in runs for each in service().checkpoints.list(run.run_id)]
            listed.sort(key=lambda checkpoint: -checkpoint.created)
            shown = [checkpoint.to_json() for checkpoint in listed[offset : offset + limit]]
            return {"checkpoints": shown, "cursor": _cursor(offset, limit, len(listed))}

        return await asyncio.to_thread(read)

    @router.get("/training_runs/{run_id}/checkpoints")
    async def of_run(run_id: str) -> dict[str, Any]:
        def read() -> dict[str, Any]:
            _run(service(), run_id)
            return {
                "checkpoints": [
                    checkpoint.to_json() for checkpoint in service().checkpoints.list(run_id)
                ]
            }

        return await asyncio.to_thread(read)

    @router.delete("/training_runs/{run_id}/checkpoints/{kind}/{name}", status_code=204)
    async def delete(run_id: str, kind: str, name: str) -> Response:
        def remove() -> None:
            path = read_path(str(TinkerPath(run_id, kind, name)))
            if not service().checkpoints.delete(path):
                raise _missing(path)

        await asyncio.to_thread(remove)
        return Response(status_code=204)

    @router.put("/training_runs/{run_id}/checkpoints/{kind}/{name}/ttl", status_code=204)
    async def ttl(run_id: str, kind: str, name: str, body: bodies.TtlBody) -> Response:
        path = read_path(str(TinkerPath(run_id, kind, name)))
        if not await asyncio.to_thread(service().checkpoints.set_ttl, path, body.ttl_seconds):
            raise _missing(path)
        return Response(status_code=204)


class Links:
    """Addresses of a checkpoint's files for clients that send no key: anyone who has one may read,
    for an hour."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[float, Checkpoint]] = {}

    def new(self, checkpoint: Checkpoint, request: Request) -> str:
        now = time.time()
        self._open = {token: entry for token, entry in self._open.items() if entry[0] > now}
        while len(self._open) >= MOST_LINKS:
            del self._open[next(iter(self._open))]
        token = secrets.token_urlsafe(24)
        self._open[token] = now + LINKS_LIVE_S, checkpoint
        return f"{str(request.base_url).rstrip('/')}{DOWNLOADS}{token}"

    def find(self, token: str) -> Checkpoint:
        """Raises RefusedError, 404."""
        expires, checkpoint = self._open.get(token, (0.0, None))
        if checkpoint is None or expires < time.time():
            raise RefusedError("this link is unknown or older than an hour: ask for a new one", 404)
        return checkpoint


def _download_routes(router: APIRouter, service: Service) -> None:
    links = Links()

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/external_weights_urls")
    async def urls(run_id: str, kind: str, name: str, request: Request) -> dict[str, Any]:
        path = read_path(str(TinkerPath(run_id, kind, name)))
        checkpoint = await asyncio.to_thread(_checkpoint, service(), path)
        link = links.new(checkpoint, request)
        files = {file.name: f"{link}/{file.name}" for file in _files(checkpoint)}
        return {"urls": files, "expires": iso(time.time() + LINKS_LIVE_S)}

    @router.get("/training_runs/{run_id}/checkpoints/{kind}/{name}/archive")
    async def archive(run_id: str, kind: str, name: str, request: Request) -> Response:
        path = read_path(str(TinkerPath(run_id, kind, name)))
        checkpoint = await asyncio.to_thread(_checkpoint, service(), path)
        location = f"{links.new(checkpoint, request)}/{ARCHIVE}"
        return Response(
            status_code=302,
            headers={
                "Location": location,
                "Expires": formatdate(time.time() + LINKS_LIVE_S, usegmt=True),
            },
        )

    @router.get("/downloads/{token}/{file}")
    async def download(token: str, file: str) -> Response:
        files = _files(links.find(token))
        if file == ARCHIVE:
            return StreamingResponse(_tar(files), media_type="application/x-tar")
        requested = next((each for each in files if each.name == file), None)
        if requested is None:
            raise RefusedError(f"the checkpoint has no file {file!r}", 404)
        return FileResponse(requested)


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _run_json(service: TinkerService, run: TinkerRun) -> dict[str, Any]:
    checkpoints = service.checkpoints.list(run.run_id)
    model = service.models.get(run.run_id)

    def newest(kind: str) -> dict[str, Any] | None:
        return next((each.to_json() for each in checkpoints if each.path.kind == kind), None)

    last = max((each.created for each in checkpoints), default=run.created)
    return {
        "training_run_id": run.run_id,
        "base_model": run.base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": run.lora["rank"],
        "last_request_time": iso(last if model is None else max(last, model.last_request)),
        "last_checkpoint": newest(TRAINING),
        "last_sampler_checkpoint": newest(SAMPLER),
        "user_metadata": shown_metadata(run.user_metadata),
    }


def _run(service: TinkerService, run_id: str) -> TinkerRun:
    run = service.checkpoints.run(run_id)
    if run is None:
        raise RefusedError(f"there is no training run {run_id!r}", 404)
    return run


def _checkpoint(service: TinkerService, path: TinkerPath) -> Checkpoint:
    checkpoint = service.checkpoints.find(path)
    if checkpoint is None:
        raise _missing(path)
    return checkpoint


def _missing(path: TinkerPath) -> RefusedError:
    return RefusedError(f"there is no checkpoint {path}", 404)


def _files(checkpoint: Checkpoint) -> list[Path]:
    """Raises RefusedError, 404: it was deleted."""
    try:
        return sorted(
            file for file in checkpoint.directory.iterdir() if file.name != CHECKPOINT_FILE
        )
    except FileNotFoundError as error:
        raise _missing(checkpoint.path) from error


def _tar(files: list[Path]) -> Iterator[bytes]:
    """A tar file of them, a file at a time."""
    for file in files:
        buffer = io.BytesIO()
        # a header is 512 bytes
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
            tar.add(file, arcname=file.name)
        content = buffer.getvalue()
        yield content[: -(-file.stat().st_size // 512) * 512 + 512]
    yield b"\0" * 1024
