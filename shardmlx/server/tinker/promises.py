"""Futures of requests: the SDK asks for their results, and repeats what it lost. No MLX, no MPI."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tinker.types import RequestErrorCategory

from shardmlx.api.requests import LoopEnded
from shardmlx.errors import UserError, one_line
from shardmlx.server.tinker.answers import Answer, failure

SECONDS_KEPT = 120.0
"""Seconds for which a result is kept after it was fetched, for a client that lost it."""


@dataclass(eq=False)
class Promise:
    """The future of a request: its id, by which a client asks, and the ``digest`` of its body, by
    which a repeated one is known. ``answer`` is None until it ends."""

    request_id: str
    session: str
    digest: bytes
    nbytes: int = 0
    """Bytes that its request holds until it ends."""
    answer: Answer | None = None
    is_fetched: bool = False
    is_sample: bool = False
    """True if its work changes nothing, so that a client may ask for it again."""
    is_given_up: bool = False
    """True if its work was ended since its client is silent: it has no answer then."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Promises:
    """The futures of all requests. Everything is called on the event loop's thread."""

    def __init__(self) -> None:
        self._all: dict[str, Promise] = {}
        self._fetched: deque[tuple[float, str]] = deque()

    def get(self, request_id: str) -> Promise | None:
        """Return the future with this id, if it is known still."""
        return self._all.get(request_id)

    def count(self, session: str) -> int:
        """Return the number of a session's futures whose results nobody has fetched."""
        return sum(each.session == session and not each.is_fetched for each in self._all.values())

    @property
    def held_bytes(self) -> int:
        """The bytes that all requests under way hold."""
        return sum(each.nbytes for each in self._all.values() if each.answer is None)

    def begin(
        self,
        promise: Promise,
        work: Awaitable[Any],
        write: Callable[[Any], Answer],
        on_end: Callable[[Promise], None] = lambda promise: None,
    ) -> Promise:
        """Keep a future that ends with what ``write``, on a thread of its own, makes of the result
        of ``work``; ``on_end`` is called then."""
        self._forget_fetched()
        self._all[promise.request_id] = promise
        promise.task = asyncio.ensure_future(self._carry(promise, work, write, on_end))
        return promise

    def fail(self, promise: Promise, error: Exception) -> Promise:
        """Keep a future that has failed at once: a ``UserError`` by its client's fault."""
        self._forget_fetched()
        self._all[promise.request_id] = promise
        is_users = isinstance(error, UserError)
        category = RequestErrorCategory.User if is_users else RequestErrorCategory.Server
        self._end(promise, failure(one_line(error), category))
        return promise

    def mark_fetched(self, promise: Promise) -> None:
        """Note that a client has the answer; it is forgotten a while later."""
        if not promise.is_fetched:
            promise.is_fetched = True
            self._fetched.append((time.monotonic(), promise.request_id))

    def forget(self, request_id: str) -> None:
        """Forget a future whose answer a client has."""
        promise = self._all.get(request_id)
        if promise is not None and promise.answer is not None:
            del self._all[request_id]

    def cancel(self, request_id: str) -> None:
        """Give up the work of a future; it fails, unless it has ended."""
        promise = self._all.get(request_id)
        if promise is not None and promise.task is not None:
            promise.task.cancel()

    def expire(self, session: str) -> None:
        """Forget all futures of a session that is over, and give up their work."""
        for promise in [each for each in self._all.values() if each.session == session]:
            self.cancel(promise.request_id)
            del self._all[promise.request_id]

    def give_up_samples(self, session: str) -> int:
        """End the samples of a silent client, and forget them; return their number. The SDK repeats
        a request whose future is gone, if its client is heard again."""
        found = [
            each
            for each in self._all.values()
            if each.session == session and each.is_sample and each.answer is None
        ]
        for promise in found:
            promise.is_given_up = True
            self.cancel(promise.request_id)
            del self._all[promise.request_id]
        return len(found)

    def _forget_fetched(self) -> None:
        while self._fetched and self._fetched[0][0] < time.monotonic() - SECONDS_KEPT:
            self._all.pop(self._fetched.popleft()[1], None)

    async def _carry(
        self,
        promise: Promise,
        work: Awaitable[Any],
        write: Callable[[Any], Answer],
        on_end: Callable[[Promise], None],
    ) -> None:
        answer: Answer | None
        try:
            result = await work
            answer = await asyncio.to_thread(write, result)
        except UserError as error:
            answer = failure(str(error), RequestErrorCategory.User)
        except asyncio.CancelledError:
            answer = None
            if not promise.is_given_up:
                answer = failure("the client cancelled it", RequestErrorCategory.User)
        except LoopEnded as error:
            said = f"{one_line(error)}: go on from the last saved state"
            answer = failure(said, RequestErrorCategory.Server)
        except Exception as error:
            traceback.print_exc()
            answer = failure(one_line(error), RequestErrorCategory.Server)
        self._end(promise, answer)
        on_end(promise)

    def _end(self, promise: Promise, answer: Answer | None) -> None:
        promise.answer = answer
        promise.ended.set()
