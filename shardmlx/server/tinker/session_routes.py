"""The endpoints of sessions, their settings and the results of futures. No MLX, no MPI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from tinker import types
from tinker.types.client_config_request import ClientConfigRequest
from tinker.types.client_config_response import ClientConfigResponse
from tinker.types.client_dynamic_config_response import ClientDynamicConfigResponse
from tinker.types.create_session_request import CreateSessionRequest
from tinker.types.create_session_response import CreateSessionResponse
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.health_response import HealthResponse
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest
from tinker.types.session_heartbeat_response import SessionHeartbeatResponse
from tinker.types.telemetry_response import TelemetryResponse
from tinker.types.try_again_response import TryAgainResponse

from shardmlx.server.body_reader import read_body
from shardmlx.server.openai_errors import ApiError, shown
from shardmlx.server.tinker.answers import failure
from shardmlx.server.tinker.desk import Desk, json_response
from shardmlx.server.tinker.reading import MOST_ROWS
from shardmlx.server.tinker.sampling_routes import SECONDS_OF_POLL


class CancelFutureRequest(FutureRetrieveRequest):
    """The SDK cancels a future without a message of its own."""


class SessionRoutes:
    """The endpoints that every client needs first."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @property
    def routes(self) -> list[BaseRoute]:
        """The paths that are answered."""
        posts: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create,
            "session_heartbeat": self._heartbeat,
            "sessions/{name}/finish": self._finish,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "telemetry": self._telemetry,
        }
        gets: dict[str, Callable[[HttpRequest], Awaitable[Response]]] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "sessions": self._sessions,
            "sessions/{name}": self._session,
        }
        return [
            *(Route(f"/api/v1/{path}", answer, methods=["POST"]) for path, answer in posts.items()),
            *(Route(f"/api/v1/{path}", answer) for path, answer in gets.items()),
        ]

    # Settings.

    async def _config(self, request: HttpRequest) -> Response:
        """Answer how the SDK shall talk: requests of a model one after the other, packed by zstd,
        and one question for the ends of all samples."""
        await self._desk.read(request, ClientConfigRequest)
        return json_response(
            ClientConfigResponse(
                parallel_fwdbwd_chunks=False,
                proto_compress_fwdbwd=True,
                fwdbwd_max_chunk_len=MOST_ROWS,
                # The SDK counts arrays alone: names and lengths come on top.
                fwdbwd_max_chunk_bytes_count=self._desk.bodies.most_bytes // 2,
                sample_use_retrieve_futures=True,
                sample_join_sampling_session=True,
            )
        )

    async def _dynamic_config(self, request: HttpRequest) -> Response:
        await self._desk.read(request, ClientConfigRequest)
        return json_response(ClientDynamicConfigResponse(sample_cancel_enabled=True))

    async def _capabilities(self, request: HttpRequest) -> Response:
        models = [
            types.SupportedModel(
                model_name=name,
                max_context_length=self._desk.most_tokens,
                trainable=True,
                sampleable=True,
            )
            for name in self._desk.names.listed
        ]
        return json_response(types.GetServerCapabilitiesResponse(supported_models=models))

    async def _health(self, request: HttpRequest) -> Response:
        return json_response(HealthResponse(status="ok"))

    async def _telemetry(self, request: HttpRequest) -> Response:
        await read_body(request, self._desk.bodies.most_bytes)
        self._desk.say_once("Telemetry of Tinker's SDK is accepted, and thrown away")
        return json_response(TelemetryResponse(status="accepted"))

    # Sessions.

    async def _create(self, request: HttpRequest) -> Response:
        asked, _ = await self._desk.read(request, CreateSessionRequest)
        session = self._desk.begin_session(asked.user_metadata, asked.display_name)
        return json_response(CreateSessionResponse(session_id=session.name))

    async def _heartbeat(self, request: HttpRequest) -> Response:
        asked, _ = await self._desk.read(request, SessionHeartbeatRequest)
        self._desk.registry.session(asked.session_id)
        return json_response(SessionHeartbeatResponse())

    async def _finish(self, request: HttpRequest) -> Response:
        await read_body(request, self._desk.bodies.most_bytes)
        self._desk.end_session(self._desk.registry.session(request.path_params["name"]))
        return Response(status_code=204)

    async def _sessions(self, request: HttpRequest) -> Response:
        return json_response(
            types.ListSessionsResponse(sessions=list(self._desk.registry.sessions))
        )

    async def _session(self, request: HttpRequest) -> Response:
        registry = self._desk.registry
        session = registry.session(request.path_params["name"])
        models = [each.name for each in registry.models.values() if each.session == session.name]
        samplers = [
            each.name for each in registry.samplers.values() if each.session == session.name
        ]
        return json_response(
            types.GetSessionResponse(
                training_run_ids=models,
                sampler_ids=samplers,
                user_metadata={name: str(value) for name, value in session.user_metadata.items()},
                display_name=session.display_name,
            )
        )

    # Results.

    async def _retrieve(self, request: HttpRequest) -> Response:
        """Answer with a future's result once it has ended; after a while, to ask again."""
        asked, _ = await self._desk.read(request, FutureRetrieveRequest)
        promise = self._desk.promises.get(asked.request_id)
        if promise is None:
            return self._unknown(asked.request_id)
        self._desk.registry.hear(promise.session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SECONDS_OF_POLL):
                await promise.ended.wait()
        if promise.is_given_up:
            return self._unknown(asked.request_id)
        if promise.answer is None:
            again = TryAgainResponse(request_id=promise.request_id, queue_state="active")
            return JSONResponse(again.model_dump(), 408)  # which the SDK tells nobody
        self._desk.promises.mark_fetched(promise)
        return Response(promise.answer.content, media_type=promise.answer.media_type)

    def _unknown(self, request_id: str) -> Response:
        if not self._desk.registry.is_earlier(request_id):
            # The SDK repeats a request whose future is gone.
            raise ApiError(410, f"the future {shown(request_id)} has expired, or never was")
        answer = failure(
            f"{self._desk.registry.started_anew}, and this request ended with the earlier start: "
            "go on from the last saved state",
            types.RequestErrorCategory.Server,
        )
        return Response(answer.content, media_type=answer.media_type)

    async def _cancel(self, request: HttpRequest) -> Response:
        asked, _ = await self._desk.read(request, CancelFutureRequest)
        self._desk.promises.cancel(asked.request_id)
        return Response(status_code=204)
