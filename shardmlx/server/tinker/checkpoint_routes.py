"""The endpoints of training runs and their saved states. No MLX, no MPI."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from tinker import types

from shardmlx.api.requests import DeleteState, SavedState
from shardmlx.errors import UserError
from shardmlx.server.guard import FILES
from shardmlx.server.openai_errors import ApiError, refused, shown
from shardmlx.server.tinker.checkpoints import checkpoint_of, runs_of, state_of, training_run
from shardmlx.server.tinker.desk import Desk, json_response

LIFE_OF_URL = timedelta(hours=1)

NOT_DONE: Mapping[str, tuple[str, str]] = {
    "training_runs/{run}/checkpoints/{checkpoint:path}/publish": (
        "nothing is published",
        "copy the state's directory, or download an adapter",
    ),
    "training_runs/{run}/checkpoints/{checkpoint:path}/ttl": (
        "saved states have no time to live",
        "delete what you need no more",
    ),
    "sessions/{name}/project": ("there are no projects", "leave it out"),
    "sessions/{name}/trace_export": ("traces are not kept", "see the server's log"),
    "sessions/search": ("sessions are not searched", "list them with list_sessions"),
    "copy_weights": ("there are no projects to copy weights to", "load the state where it is"),
    "create_custom_loss": ("losses are not uploaded", "the SDK computes them on the client"),
    "audit": ("there is no audit log", "give serve --access-log for a line of each request"),
    "billing/{rest:path}": ("nothing is billed", "leave it out"),
    "auth/{rest:path}": ("there are no accounts", "give the key of serve --api-key"),
}
"""Paths that Tinker has and this server has not, and the words of the refusal."""


class WeightsInfoRequest(BaseModel):
    """The SDK sends it without a message of its own."""

    tinker_path: str


@dataclass(frozen=True)
class FileAccess:
    """A right to fetch the files of a state without the key, as signed URLs have it."""

    state: str
    ends: datetime


class CheckpointRoutes:
    """The endpoints of what is saved."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._rights: dict[str, FileAccess] = {}

    @property
    def routes(self) -> list[BaseRoute]:
        """The paths that are answered."""
        checkpoint = "training_runs/{run}/checkpoints/{checkpoint:path}"
        answers: list[tuple[str, str, Callable[[HttpRequest], Awaitable[Response]]]] = [
            ("GET", f"{checkpoint}/external_weights_urls", self._urls),
            ("DELETE", checkpoint, self._delete),
            ("GET", "training_runs/{run}/checkpoints", self._of_run),
            ("GET", "training_runs/{run}", self._run),
            ("GET", "training_runs", self._runs),
            ("GET", "checkpoints", self._all),
            ("POST", "weights_info", self._info),
        ]
        methods = ["GET", "POST", "PUT", "DELETE"]
        return [
            *(Route(f"/api/v1/{path}", self._refuse, methods=methods) for path in NOT_DONE),
            *(Route(f"/api/v1/{path}", answer, methods=[how]) for how, path, answer in answers),
            Route(FILES + "{right}/{file:path}", self._file),
        ]

    async def _refuse(self, request: HttpRequest) -> Response:
        pattern = request.scope["route"].path.removeprefix("/api/v1/")
        what, remedy = NOT_DONE[pattern]
        raise refused(f"{what} here: {remedy}")

    async def _states(self) -> Sequence[SavedState]:
        return await asyncio.to_thread(self._desk.service.states)

    async def _state(self, name: str) -> SavedState:
        try:
            return await self._desk.saved(name)
        except UserError as error:
            raise ApiError(404, str(error)) from None

    async def _of_run(self, request: HttpRequest) -> Response:
        run = request.path_params["run"]
        runs = runs_of(await self._states())
        if run not in runs and run not in self._desk.registry.models:
            raise ApiError(404, f"there is no training run {shown(run)}")
        found = _checkpoints(runs.get(run, []))
        return json_response(types.CheckpointsListResponse(checkpoints=found))

    async def _all(self, request: HttpRequest) -> Response:
        newest_first = _checkpoints(await self._states())[::-1]
        page, cursor = _page(request, newest_first, 100)
        return json_response(types.CheckpointsListResponse(checkpoints=page, cursor=cursor))

    async def _runs(self, request: HttpRequest) -> Response:
        known = await self._known_runs()
        latest_first = sorted(known.values(), key=lambda each: each.last_request_time, reverse=True)
        page, cursor = _page(request, latest_first, 20)
        return json_response(types.TrainingRunsResponse(training_runs=page, cursor=cursor))

    async def _run(self, request: HttpRequest) -> Response:
        run = request.path_params["run"]
        known = await self._known_runs()
        if run not in known:
            raise ApiError(404, f"there is no training run {shown(run)}")
        return json_response(known[run])

    async def _known_runs(self) -> dict[str, types.TrainingRun]:
        """Return all runs that train now, or have saved states."""
        saved = runs_of(await self._states())
        found = {}
        for run, states in saved.items():
            of_run: Any = states[-1].note.get("run") or {}
            found[run] = training_run(
                run,
                states,
                base_model=of_run.get("base_model") or self._desk.names.first,
                rank=states[-1].lora.rank,
                last_request=None,
                user_metadata=of_run.get("user_metadata"),
            )
        for model in self._desk.registry.models.values():
            found[model.name] = training_run(
                model.name,
                saved.get(model.name, []),
                base_model=model.base_model,
                rank=model.lora.rank,
                last_request=model.last_request,
                user_metadata=model.user_metadata,
            )
        return found

    async def _info(self, request: HttpRequest) -> Response:
        asked, _ = await self._desk.read(request, WeightsInfoRequest)
        try:
            saved = await self._state(state_of(asked.tinker_path))
        except UserError as error:
            raise refused(str(error)) from None
        of_run: Any = saved.note.get("run") or {}
        return json_response(
            types.WeightsInfoResponse(
                base_model=of_run.get("base_model") or self._desk.names.first,
                is_lora=True,
                lora_rank=saved.lora.rank,
                train_unembed=saved.lora.unembed,
                train_mlp=saved.lora.mlp,
                train_attn=saved.lora.attention,
            )
        )

    async def _delete(self, request: HttpRequest) -> Response:
        saved = await self._state(_asked_state(request))
        await self._desk.submit(DeleteState(saved.state))
        return Response(status_code=204)

    # Files.

    async def _urls(self, request: HttpRequest) -> Response:
        saved = await self._state(_asked_state(request))
        files = await asyncio.to_thread(self._files, saved.state)
        now = datetime.now(UTC)
        self._rights = {name: each for name, each in self._rights.items() if each.ends > now}
        right = secrets.token_urlsafe(24)
        access = FileAccess(saved.state, now + LIFE_OF_URL)
        self._rights[right] = access
        root = f"{str(request.base_url).rstrip('/')}{FILES}{right}/"
        urls = {name: root + quote(name) for name in files}
        return json_response(types.ExternalWeightsUrlsResponse(urls=urls, expires=access.ends))

    async def _file(self, request: HttpRequest) -> Response:
        access = self._rights.get(request.path_params["right"])
        if access is None or access.ends < datetime.now(UTC):
            raise ApiError(404, "this URL was never given, or has expired: ask for new ones")
        files = await asyncio.to_thread(self._files, access.state)
        name = request.path_params["file"]
        if name not in files:
            raise ApiError(404, f"the adapter has no file {shown(name)}")
        return Response(files[name], media_type="application/octet-stream")

    def _files(self, state: str) -> dict[str, bytes]:
        """Return the files of a state's adapter, as mlx_lm and PEFT load it."""
        files = {}
        with tarfile.open(fileobj=io.BytesIO(self._desk.service.export(state))) as archive:
            for member in archive.getmembers():
                taken = archive.extractfile(member) if member.isfile() else None
                if taken is not None:
                    files[member.name] = taken.read()
        return files


def _asked_state(request: HttpRequest) -> str:
    return f"{request.path_params['run']}/{request.path_params['checkpoint']}"


def _checkpoints(states: Sequence[SavedState]) -> list[types.Checkpoint]:
    return [each for each in map(checkpoint_of, states) if each is not None]


def _page(request: HttpRequest, items: list[Any], usual: int) -> tuple[list[Any], types.Cursor]:
    """Return the items of the page that a request asks for, and where it stands."""
    try:
        limit = int(request.query_params.get("limit", usual))
        offset = int(request.query_params.get("offset", 0))
    except ValueError:
        raise refused("limit and offset are whole numbers") from None
    if limit < 1 or offset < 0:
        raise refused("limit is 1 or more, offset 0 or more")
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(items))
    return items[offset : offset + limit], cursor
