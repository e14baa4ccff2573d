"""The endpoints of Tinker's API. No MLX, no MPI."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from shardmlx.api.requests import Service
from shardmlx.common.reporter import Reporter
from shardmlx.server.body_reader import BodyReader
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError, shown
from shardmlx.server.tinker.checkpoint_routes import CheckpointRoutes
from shardmlx.server.tinker.desk import Desk
from shardmlx.server.tinker.sampling_routes import SamplingRoutes
from shardmlx.server.tinker.session_routes import SessionRoutes
from shardmlx.server.tinker.sessions import SECONDS_OF_SILENCE, Registry
from shardmlx.server.tinker.training_routes import TrainingRoutes


def tinker_routes(
    service: Service,
    names: ModelNames,
    *,
    most_tokens: int,
    max_body_bytes: int,
    reporter: Reporter,
    tokenizer: str | None = None,
    earlier_end: str = "",
    seconds_of_silence: float = SECONDS_OF_SILENCE,
) -> list[BaseRoute]:
    """Return the routes of Tinker's API over a ``service`` for the model of these names.

    A prompt and its answer have ``most_tokens`` together at most, a body ``max_body_bytes``, packed
    or not. ``tokenizer`` is where clients find it; None for the model's name. ``earlier_end`` tells
    how the start before this one ended, of which clients may ask still. The session of a
    client ends after ``seconds_of_silence``.
    """
    desk = Desk(
        service,
        names,
        most_tokens,
        BodyReader(max_body_bytes),
        reporter,
        tokenizer,
        Registry(earlier_end, seconds_of_silence),
    )
    return [
        *SessionRoutes(desk).routes,
        *TrainingRoutes(desk).routes,
        *SamplingRoutes(desk).routes,
        *CheckpointRoutes(desk).routes,
        Route("/api/{path:path}", _unknown, methods=["GET", "POST", "PUT", "DELETE"]),
    ]


async def _unknown(request: HttpRequest) -> Response:
    where = f"{request.method} {request.url.path}"
    raise ApiError(404, f"Tinker's API has nothing at {shown(where)[1:-1]} here")
