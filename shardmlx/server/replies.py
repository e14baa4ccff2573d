"""The reply to a request of any API, made from its answers while they come. No MLX, no MPI."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import ClassVar

from shardmlx.server.accepted_fields import Json
from shardmlx.server.answer_parts import AnswerPart
from shardmlx.server.chat_request import ApiRequest
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.request_queue import Delta

TokenText = Callable[[int], str]


class Reply(ABC):
    """The reply to one request of an API, whole or as events of a stream, which ``done`` ends. The
    ``blocks`` of each answer are what it thinks, says or calls without a break; its ``last`` delta
    has its numbers of tokens."""

    done: ClassVar[bytes] = b""

    def __init__(self, request: ApiRequest, model: str, token_text: TokenText) -> None:
        self.request = request
        self.model = model
        self.token_text = token_text
        self.id = uuid.uuid4().hex
        self.created = int(time.time())
        self.last = [Delta((), (), 0) for _ in request.requests]
        self.blocks: list[list[AnswerPart]] = [[] for _ in request.requests]

    def add(self, index: int, delta: Delta) -> Iterator[Json]:
        """Take in a delta of answer ``index``, and yield the events to send of it."""
        self.last[index] = delta
        yield from self._add(index, delta)

    def _begins(self, index: int, part: AnswerPart) -> bool:
        blocks = self.blocks[index]
        return bool(part.id) or not blocks or blocks[-1].kind != part.kind

    def _take(self, index: int, part: AnswerPart) -> None:
        """Take a part into the blocks of answer ``index``."""
        if self._begins(index, part):
            self.blocks[index].append(replace(part))
        else:
            self.blocks[index][-1].text += part.text

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompts. A prompt counts once, however many answers it has."""
        return sum(len(each.tokens) for each in self.request.requests[:: self.request.n])

    @property
    @abstractmethod
    def sign_of_life(self) -> bytes:
        """The bytes that a stream sends in silence, which clients of the API count as life."""

    def opening(self) -> Iterator[Json]:
        """Yield the events that come before all others."""
        yield from ()

    @abstractmethod
    def _add(self, index: int, delta: Delta) -> Iterator[Json]:
        """Yield the events to send of a delta."""

    @abstractmethod
    def closing(self) -> Iterator[Json]:
        """Yield the events that come after all answers."""

    @property
    @abstractmethod
    def whole(self) -> Json:
        """The whole reply, as far as it has come."""

    @abstractmethod
    def event(self, body: Json) -> bytes:
        """Return an event of the stream as it is sent."""

    def failure(self, error: ApiError) -> Json:
        """Return an error in OpenAI's form: the body, or the event that ends a stream."""
        return error.body


class BlockReply(Reply):
    """A reply that has one answer, and tells of each of its blocks."""

    def _add(self, index: int, delta: Delta) -> Iterator[Json]:
        for part in delta.parts:
            begins = self._begins(index, part)
            if begins:
                yield from self._last_ended(is_cut=False)
            self._take(index, part)
            if begins:
                yield from self._begun(part)
            yield from self._more(part)
        if delta.finish_reason is not None:
            yield from self._last_ended(is_cut=delta.finish_reason == "length")
            yield from self._end(delta)

    def event(self, body: Json) -> bytes:
        """Return an event with its type as its name."""
        return f"event: {body['type']}\ndata: {json.dumps(body)}\n\n".encode()

    def _last_ended(self, *, is_cut: bool) -> Iterator[Json]:
        for block in self.blocks[0][-1:]:
            # A call that is cut off becomes text.
            yield from self._ended(block, is_cut=is_cut and block.kind != "call")

    @abstractmethod
    def _begun(self, block: AnswerPart) -> Iterator[Json]: ...

    @abstractmethod
    def _more(self, part: AnswerPart) -> Iterator[Json]: ...

    @abstractmethod
    def _ended(self, block: AnswerPart, *, is_cut: bool) -> Iterator[Json]: ...

    @abstractmethod
    def _end(self, delta: Delta) -> Iterator[Json]: ...
