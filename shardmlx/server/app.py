"""The ASGI application: OpenAI's API, Anthropic's, the chat page, metrics. No MLX, no MPI."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from shardmlx.errors import UserError
from shardmlx.server.accepted_fields import Json
from shardmlx.server.anthropic_api import MessageReply, counted, read_message
from shardmlx.server.body_reader import BodyReader
from shardmlx.server.chat_request import ApiRequest, ServedModel
from shardmlx.server.guard import PAGE_PARTS, Guard, error_response
from shardmlx.server.metrics import Metrics
from shardmlx.server.openai_errors import ApiError, refused, server_fault
from shardmlx.server.openai_requests import read_chat, read_completion
from shardmlx.server.openai_responses import ChatReply, CompletionReply
from shardmlx.server.replies import Reply
from shardmlx.server.request_queue import RequestQueue
from shardmlx.server.responses_api import ResponseReply, read_response
from shardmlx.server.streaming import AnswerResponse
from shardmlx.server.tokenizing import detokenized, tokenized

_T = TypeVar("_T")
Read = Callable[[bytes, ServedModel], _T]
"""A function that reads the body of a request. Raises ``ApiError``."""

GENERATED: Mapping[str, tuple[Read[ApiRequest], type[Reply]]] = {
    "/v1/chat/completions": (read_chat, ChatReply),
    "/v1/completions": (read_completion, CompletionReply),
    "/v1/responses": (read_response, ResponseReply),
    "/v1/messages": (read_message, MessageReply),
}
"""Paths of all APIs, each with the reader of a request and the form of its reply."""


ANSWERED: Mapping[str, Read[Json]] = {
    "/v1/messages/count_tokens": counted,
    "/tokenize": tokenized,
    "/detokenize": detokenized,
}
"""Paths to which nothing is generated."""


def make_app(
    queue: RequestQueue,
    served: ServedModel,
    *,
    api_key: str | None = None,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    max_body_bytes: int = 4 << 20,
    metrics: Metrics | None = None,
    other_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """Return the application over a queue, with the routes of another API beside it.

    With ``api_key`` all but the page and /health need it. A request's ``Host`` is one of ``hosts``,
    None for any; ``origins`` are other sites whose pages may use the API, "*" for any.
    """
    api = Api(queue, served, BodyReader(max_body_bytes), metrics or Metrics(queue))
    middleware = [Middleware(Guard, api_key=api_key, hosts=hosts)]
    if origins:  # outermost: preflights have no key, and errors are for such pages to read too
        cross_origin = Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
            allow_private_network=True,  # Chrome asks for it before a page may use this machine
        )
        middleware.insert(0, cross_origin)
    errors = (ApiError, UserError, HTTPException, ClientDisconnect, Exception)
    handlers = dict.fromkeys(errors, _answer_error)
    routes = [*api.routes, *other_routes]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


@dataclass
class Api:
    """The endpoints of a server."""

    queue: RequestQueue
    served: ServedModel
    bodies: BodyReader
    metrics: Metrics

    def __post_init__(self) -> None:
        self._page_files = StaticFiles(
            packages=[("shardmlx.common", "page"), ("shardmlx.server", "pages")]
        )
        self._created = int(time.time())
        self._token_text = lru_cache(maxsize=1 << 16)(self.served.encoder.untokenized)

    @property
    def routes(self) -> list[BaseRoute]:
        """The paths that are answered: the page, the APIs, health and metrics."""
        answers: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            **{path: partial(self._generate, *how) for path, how in GENERATED.items()},
            **{path: partial(self._answer, answer) for path, answer in ANSWERED.items()},
        }
        return [
            Route("/", self._page),
            Mount(PAGE_PARTS, self._page_files),
            Route("/health", self._health),
            Route("/metrics", self._exposition),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            *(Route(path, answer, methods=["POST"]) for path, answer in answers.items()),
        ]

    async def _page(self, request: Request) -> Response:
        return await self._page_files.get_response("chat.html", request.scope)

    async def _answer(self, answer: Read[Json], request: Request) -> Response:
        return JSONResponse(await self._read(request, answer))

    async def _read(self, request: Request, read: Read[_T]) -> _T:
        """Return what ``read`` makes of the body, on a thread of its own."""
        return await self.bodies.read(request, lambda body: read(body, self.served))

    async def _generate(
        self, read: Read[ApiRequest], kind: type[Reply], request: Request
    ) -> Response:
        api_request = await self._read(request, read)
        answers = self.queue.submit(api_request.requests)
        reply = kind(api_request, self.served.names.first, self._token_text)
        return AnswerResponse(reply, answers, self.metrics)

    async def _models(self, request: Request) -> Response:
        listed = [self._model(name) for name in self.served.names.listed]
        return JSONResponse({"object": "list", "data": listed})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        names = self.served.names
        names.check(name)
        return JSONResponse(self._model(name if name in names.listed else names.first))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "shardmlx",
            "max_model_len": self.served.most_tokens,
            "adapter": self.served.adapter,
            "tools": self.served.encoder.answer_format.way,
        }

    async def _health(self, request: Request) -> Response:
        if (reason := self.queue.unavailable_reason) is not None:
            status = "waiting" if self.queue.ended is None else "ended"
            return JSONResponse({"status": status, "reason": reason}, 503)
        return JSONResponse({"status": "ok"})

    async def _exposition(self, request: Request) -> Response:
        text = generate_latest(self.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _answer_error(request: Request, error: Exception) -> Response:
    where = f"{request.method} {request.url.path}"
    if isinstance(error, ClientDisconnect):
        return Response()  # nobody reads it
    if isinstance(error, HTTPException):
        said = {
            404: f"there is nothing at {where}: the API is under /v1",
            405: f"{where} is not possible: the method is wrong",
        }
        message = said.get(error.status_code, error.detail)
        error = ApiError(error.status_code, message, headers=error.headers)
    elif isinstance(error, UserError):
        error = refused(str(error))
    elif not isinstance(error, ApiError):
        error = server_fault()
    return error_response(error, request.url.path)
