"""The reply to a request of any API, made from its answers while they come. No MLX, no MPI."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from shardmlx.server.answer_parser import AnswerParser
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import ApiRequest
from shardmlx.server.request_queue import Piece

Body = dict[str, Any]
"""A JSON object."""

TokenText = Callable[[int], str]


class Reply(ABC):
    """The reply to one request of an API, whole or as events of a stream.

    ``generated`` and ``cached`` count the tokens of each answer, ``done`` ends a stream.
    """

    done: ClassVar[bytes] = b""

    def __init__(self, request: ApiRequest, model: str, token_text: TokenText) -> None:
        self.request = request
        self.model = model
        self.token_text = token_text
        self.generated = [0 for _ in request.requests]
        self.cached = [0 for _ in request.requests]
        self._parsers = list(map(AnswerParser.of, request.requests))

    def add(self, index: int, piece: Piece) -> Iterator[Body]:
        """Take in a piece of answer ``index``, and yield the events to send of it."""
        self.generated[index], self.cached[index] = piece.generated, piece.cached
        yield from self._add(index, piece, self._parsers[index])

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. A prompt counts once, however many answers it has."""
        return sum(len(each.tokens) for each in self.request.requests[:: self.request.n])

    @property
    @abstractmethod
    def sign_of_life(self) -> bytes:
        """The bytes that a stream sends in silence, which clients of the API count as life."""

    @abstractmethod
    def opening(self) -> Iterator[Body]:
        """Yield the events that come before all others."""

    @abstractmethod
    def _add(self, index: int, piece: Piece, parser: AnswerParser) -> Iterator[Body]:
        """Yield the events to send of a piece."""

    @abstractmethod
    def closing(self) -> Iterator[Body]:
        """Yield the events that come after all answers."""

    @property
    @abstractmethod
    def whole(self) -> Body:
        """The whole reply, as far as it has come."""

    @abstractmethod
    def event(self, body: Body) -> bytes:
        """Return an event as it is sent."""

    @abstractmethod
    def failure(self, error: ApiError) -> Body:
        """Return the body of an error."""
